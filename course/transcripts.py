"""What a command prints: run here where its programs are, and else shown as it was recorded, with where and when.

``LAB_RECORD=1`` in the environment, on a machine that has the programs, records what a notebook shows anew in
``data/reference/``.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
from collections import Counter
from pathlib import Path

from lab_common import LabError, checkout
from lab_common.files import read_bounded, write_atomically
from lab_common.text import clean, cut_lines
from lab_utils import machine

KEYS = ("on", "when", "out", "errors")
MOST_CHARACTERS, MOST_COMMANDS, MOST_BYTES = 4000, 80, 2**20


class Transcript:
    """Shows commands and what they print: ``show = Transcript("lab13/slurm", cluster)``, then ``show("squeue")``.

    Args:
        name: Of the record, ``data/reference/NAME.json``.
        here: What runs the commands, such as a cluster, whose ``str`` names its version; None where there is none.
    """

    def __init__(self, name: str, here: object | None) -> None:
        self.here, self._path = here, checkout() / "data" / "reference" / f"{name}.json"
        self._record = here is not None and os.environ.get("LAB_RECORD") == "1"
        self._seen: Counter[str] = Counter()
        self._records = {} if self._record else _read(self._path)

    def __call__(self, *argv: object, cwd: Path | None = None, seconds: float = 120.0) -> str:
        """Prints a command and its output, and returns what it wrote to stdout.

        Args:
            argv: The command's words. Of a path only the name is shown and recorded.
            cwd: The folder to run it in.
            seconds: The most that it may take.

        Raises:
            LabError: It cannot be run, takes longer, or there is too much to record.
        """
        shown = shlex.join(part.name if isinstance(part, Path) else str(part) for part in argv)
        self._seen[shown] += 1
        if self.here is None:
            return self._show(shown)
        out, errors = (_shorten(text, cwd) for text in _run([str(part) for part in argv], cwd, seconds))
        print(f"$ {shown}", *filter(None, (out, errors)), sep="\n")
        if self._record:
            self._keep(shown, {"out": out, "errors": errors})
        return out

    def _show(self, shown: str) -> str:
        records = self._records.get(shown)
        if not records:
            print(f"$ {shown}\n(cannot run here, and was not recorded)")
            return ""
        found = records[min(self._seen[shown], len(records)) - 1]
        print(f"$ {shown}", f"(recorded on {found['on']}, {found['when']})", sep="\n")
        print(*filter(None, (clean(found["out"]), clean(found["errors"]))), sep="\n")
        return found["out"]

    def _keep(self, shown: str, found: dict[str, str]) -> None:
        where = {"on": f"{machine.describe().label}, {self.here}", "when": f"{datetime.date.today()}"}
        self._records[shown] = [*self._records.get(shown, []), where | found]
        if sum(map(len, self._records.values())) > MOST_COMMANDS:
            cause, fix = "one record is for one part of a lab", "show fewer commands, or name another record"
            raise LabError(f"More than {MOST_COMMANDS} commands to record.", where=self._path, cause=cause, fix=fix)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(self._path) as file:
            file.write(json.dumps(self._records, indent=1, ensure_ascii=False).encode() + b"\n")


def _read(path: Path) -> dict[str, list[dict[str, str]]]:
    try:
        records = json.loads(read_bounded(path, MOST_BYTES))
        if not all(isinstance(one[key], str) for many in records.values() for one in many for key in KEYS):
            raise ValueError("it is no record of commands")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        fix = "get this file of the labs anew"
        raise LabError("The recorded commands cannot be read.", where=path, cause=str(error)[:300], fix=fix) from error
    return records


def _run(argv: list[str], cwd: Path | None, seconds: float) -> tuple[str, str]:
    try:
        done = subprocess.run(
            argv, cwd=cwd, timeout=seconds, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        fix = "run the cell again; in a terminal you see what it waits for"
        raise LabError(f"{argv[0]} could not be run.", where=argv[0], cause=str(error)[:300], fix=fix) from error
    return done.stdout, done.stderr


def _shorten(text: str, cwd: Path | None) -> str:
    """Without what only this machine has: paths, and too much of it."""
    for folder in filter(None, (cwd, checkout(), Path.home())):
        text = text.replace(f"{folder}/", "…/").replace(str(folder), "…") if len(str(folder)) > 1 else text
    return cut_lines(clean(text.expandtabs().rstrip()), first=40, last=20, longest=200)[:MOST_CHARACTERS]
