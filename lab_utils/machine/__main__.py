"""``python -m lab_utils.machine``: says whether everything that the labs need is here; status 1 where it is not."""

from __future__ import annotations

import sys

from lab_utils.machine import check_environment


def main() -> int:
    """Prints one line per check, with the fix under each that failed, and returns the exit status."""
    verdicts = check_environment()
    for verdict in verdicts:
        print(f"[ok]   {verdict.what}" if verdict.ok else f"[fail] {verdict.what}\n       fix: {verdict.fix}")
    return 0 if all(verdict.ok for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
