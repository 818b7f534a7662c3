"""``python -m course.prepare``: all that comes before JupyterLab opens: the checks, the data set, the learner's copy.

The checks run beside the first import of torch, which takes seconds. The options are those of
``python -m course.workspace``.
"""

import subprocess
import sys

from lab_common.commandline import run_command


def main() -> int:
    """Prints the checks, prepares the data and writes the learner's copy; returns the exit status of the last two."""
    checks = subprocess.Popen([sys.executable, "-m", "course.environment"], stdout=subprocess.PIPE, text=True)
    try:
        from course import workspace
        from lab_utils.data import __main__ as data
    finally:  # an import that fails is what the checks explain
        print(checks.communicate()[0], end="", flush=True)
        if checks.returncode:
            print("The labs may not work properly until this is fixed. Continuing anyway.")
    return data.main(["prepare"]) or workspace.main()


if __name__ == "__main__":
    sys.exit(run_command(main))
