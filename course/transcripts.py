"""Output of commands and measurements: live if their programs are here, otherwise as recorded elsewhere.

With ``LAB_RECORD=1`` in the environment, a machine that has the programs records a notebook's output again in
``data/reference/``.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab_common import LabError, checkout
from lab_common.files import write_atomically
from lab_common.text import clean, cut_lines
from lab_utils import machine

MOST_CHARACTERS = 4000


class Transcript:
    """Shows commands and their output: ``show = Transcript("lab13/slurm", cluster)``, then ``show("squeue")``.

    Args:
        name: Name of the record, ``data/reference/NAME.json``.
        here: The system that runs the commands, such as a cluster, whose ``str`` names its version; None if missing.
    """

    def __init__(self, name: str, here: object | None) -> None:
        self.here, self._path = here, checkout() / "data" / "reference" / f"{name}.json"
        self._record = here is not None and os.environ.get("LAB_RECORD") == "1"
        self._seen: Counter[str] = Counter()
        self._records = {} if self._record else _load(self._path)

    def __call__(self, *argv: object, cwd: Path | None = None, seconds: float = 120.0) -> str:
        """Prints a command and its output, and returns what it wrote to stdout.

        Args:
            argv: The command's words. For a path only the name is shown and recorded.
            cwd: The folder to run it in.
            seconds: Time limit.

        Raises:
            LabError: It cannot be run, or takes longer.
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
        _save(self._path, self._records)


def recall(name: str, measure: Callable[[], Any] | None, here: str) -> tuple[Any, str]:
    """Returns a measurement from here or from a record, and a description of which it is.

    Args:
        name: Name of the record, ``data/reference/NAME.json``.
        measure: Returns a value that JSON can hold; None if it cannot be measured here.
        here: Name and version of the measuring program.
    """
    path = checkout() / "data" / "reference" / f"{name}.json"
    if measure is None:
        found = _load(path)
        return found["result"], f"recorded on {found['on']}, {found['when']}"
    found = {"on": f"{machine.describe().label}, {here}", "when": f"{datetime.date.today()}", "result": measure()}
    if os.environ.get("LAB_RECORD") == "1":
        _save(path, found)
    return found["result"], "measured here"


def _load(path: Path) -> dict[str, Any]:
    """Returns the content of a record; {} if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _save(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as file:
        file.write(json.dumps(found, indent=1, ensure_ascii=False).encode() + b"\n")


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
    """Returns the text without this machine's paths, cut to a limit."""
    for folder in filter(None, (cwd, checkout(), Path.home())):
        text = text.replace(f"{folder}/", "…/").replace(str(folder), "…") if len(str(folder)) > 1 else text
    return cut_lines(clean(text.expandtabs().rstrip()), first=40, last=20, longest=200)[:MOST_CHARACTERS]
