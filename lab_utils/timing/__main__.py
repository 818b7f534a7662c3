"""``python -m lab_utils.timing reference lab1``: writes this machine's records of a lab as its reference run."""

from __future__ import annotations

import argparse
import sys

from lab_common import LabError
from lab_utils.timing import save_reference


def main() -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m lab_utils.timing", description=__doc__)
    parser.add_argument("command", choices=["reference"])
    parser.add_argument("lab", help="such as lab1")
    parser.add_argument("--allow-cpu", action="store_true", help="record a machine without a GPU")
    arguments = parser.parse_args()
    try:
        path = save_reference(arguments.lab, allow_cpu=arguments.allow_cpu)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"wrote {path.parent.name}/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
