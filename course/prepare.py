"""``python -m course.prepare``: the data set, then the learner's copy, in one process: importing torch takes seconds.

Its options are those of ``python -m course.workspace``.
"""

import sys

from course import workspace
from lab_common.commandline import run_command
from lab_utils.data import __main__ as data

if __name__ == "__main__":
    sys.exit(run_command(lambda: data.main(["prepare"])) or workspace.main())
