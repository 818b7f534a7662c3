"""Runs the notebooks of labs 0, 1, 4 and 5 without Jupyter: ``python -m benchmarks.gpu.notebooks --out FILE 0 1``.

Each notebook gets its own process and runs in a copy of its folder. Its code cells run one after the other in one
namespace, from files, where ``inspect`` and the compiler find their source. What a cell prints and shows, its seconds
and its figures are kept beside FILE, in ``notebooks/``, after each cell; the committed notebooks are only read.

The cells of these labs have no magics: a cell that has one is a syntax error, which the record names. From IPython
they use ``display`` and ``HTML``, which have stand-ins here even if IPython is installed, so that every machine runs
the same code.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import html
import io
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.gpu import TIME_IS_UP, run_capped
from course.notebooks import load_notebook
from lab_common import LabError, checkout
from lab_common.commandline import read_option
from lab_common.files import write_atomically
from lab_common.text import cut_lines

LABS = (0, 1, 4, 5)
FAILED = "failed in cell"


class Shorter(NamedTuple):
    """A replacement of text in a cell, and the factor by which it shortens the work."""

    cell: str
    text: str
    shorter: str
    factor: float


# On a GPU, whose time is counted in minutes. LAB_ROUNDS would shorten too, but calls what it shortens noise.
SHORTER = {
    1: [
        Shorter("setups", '"cifar": (16, 64, 256)}, 20', '"cifar": (16, 64, 256)}, 10', 2),
        Shorter("cards", "(0.8, 1)", "(0.8,)", 2),
    ],
    4: [Shorter("rates", 'SCALE == "small" else 10', 'SCALE == "small" else 2', 5)],
}
# For the rehearsal on a CPU: three batches of 79, and few steps.
REHEARSAL = {
    0: [
        Shorter("loop", 'tqdm(batches, desc="training", leave=False)', "list(batches)[:3]", 26),
        Shorter("evaluate", 'dataset.batches("valid", 500, device=DEVICE)', "list(batches)[:1]", 20),
        Shorter("warmup", "range(7, 16)", "range(7, 9)", 4.5),
        Shorter("spread", "30, 3)", "3, 1)", 8),
        Shorter("profile", "range(5)", "range(1)", 5),
        Shorter("activations", "(8, 16, 32, 64, 128)", "(8, 16)", 10),
    ]
}


def find_notebook(lab: int, folder: Path) -> Path:
    """Returns the notebook of a lab.

    Raises:
        LabError: There is no such notebook.
    """
    found = sorted(folder.glob(f"{lab:02d}_*.ipynb"))
    if not found:
        raise LabError(f"There is no notebook of lab {lab}.", where=folder, fix="run this in the repository's folder")
    return found[0]


def read_cells(path: Path, changes: list[Shorter]) -> dict[str, str]:
    """Returns the source of each code cell by its id, with some texts replaced.

    Raises:
        LabError: The notebook cannot be read, or one of the texts does not occur exactly once in its cell.
    """
    try:
        notebook = load_notebook(path)
        cells = {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path.name} cannot be read.", where=path, cause=str(error), fix="git status") from error
    for change in changes:
        if cells.get(change.cell, "").count(change.text) != 1:
            cause = f"{change.text!r} stands there {cells.get(change.cell, '').count(change.text)} times"
            fix = "write what stands there now into benchmarks/gpu/notebooks.py"
            raise LabError(f"Cell {change.cell!r} cannot be shortened.", where=path.name, cause=cause, fix=fix)
        cells[change.cell] = cells[change.cell].replace(change.text, change.shorter)
    return cells


class Screen(io.TextIOBase):
    """Keeps a cell's output and passes it on to the log."""

    def __init__(self, log: Any) -> None:
        self.log, self.kept = log, io.StringIO()

    def write(self, text: str) -> int:
        """Keeps the text and passes it on."""
        self.log.write(text)
        return self.kept.write(text)

    def flush(self) -> None:
        """Flushes the log."""
        self.log.flush()


class HTML:
    """Stand-in for IPython's HTML, which shows its text without the tags."""

    def __init__(self, data: str) -> None:
        self.data = data

    def __repr__(self) -> str:
        return html.unescape(re.sub(r"<br>|</span>", "\n", re.sub(r"</?(?!br>|/span>)[^>]*>", "", self.data)))


class Printer:
    """Stand-in for the printer that IPython passes to ``_repr_pretty_``, with the methods that we call."""

    def __init__(self) -> None:
        self.said = ""

    def text(self, text: str) -> None:
        """Adds the next part of the text."""
        self.said += text


def display(*values: object) -> None:
    """Prints what a notebook would keep of a value as plain text."""
    for value in values:
        printer = Printer()
        if hasattr(type(value), "_repr_pretty_"):
            value._repr_pretty_(printer, False)
        print(printer.said or repr(value))


def stand_in_for_ipython() -> None:
    """Replaces ``IPython`` and ``IPython.display`` by modules without a shell.

    If matplotlib and tqdm find IPython imported, they ask it for its shell. A notebook shows a table as HTML; in the
    text that is kept here, pandas would leave out columns.
    """
    with contextlib.suppress(ImportError):
        import pandas

        pandas.set_option("display.width", 250, "display.max_columns", None)
    top, below = ModuleType("IPython"), ModuleType("IPython.display")
    top.get_ipython, top.display, top.__path__, top.version_info = (lambda: None), below, [], (0,)
    below.display, below.HTML = display, HTML
    for module in (top, below):
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=module is top)
        sys.modules[module.__name__] = module


class Notebook:
    """The cells of one notebook and the record of their run, which is on the disk after each cell.

    Args:
        cells: Source by id.
        record: Facts that precede the cells.
        path: The record's file; figures go beside it.
        log: Also receives the output.
    """

    def __init__(self, cells: dict[str, str], record: dict[str, Any], path: Path, log: Any) -> None:
        self.cells, self.path, self.log = cells, path, log
        self.record = record | {"outcome": "running", "seconds": 0.0, "cells": {}}
        self.figures: list[str] = []
        self.names = ModuleType("__main__")
        self.names.__dict__.update({"display": display, "get_ipython": lambda: None})

    def run(self, folder: Path) -> bool:
        """Runs the cells until one fails; returns True if none did. The sources go to files in ``folder``."""
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        # An inline figure is shown, and closed, by plt.show(), or at the end of its cell.
        pyplot.show = lambda *_, **__: self.keep_figures()
        sys.modules["__main__"] = self.names
        for name, source in self.cells.items():
            self.log.write(f"--- {name}\n")
            failed = self.run_cell(name, source, folder / f"{name}.py")
            if failed:
                break
        self.record["outcome"] = f"{FAILED} {name}" if failed else "passed"
        self.save()
        return not failed

    def run_cell(self, name: str, source: str, file: Path) -> bool:
        """Runs one cell and keeps its outcome; returns True if it failed."""
        screen, error, start = Screen(self.log), "", time.perf_counter()
        self.figures = []
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
            try:
                execute(source, file, self.names.__dict__)
                self.keep_figures()
            except KeyboardInterrupt:
                error = "interrupted"
            except BaseException as problem:  # a cell may raise SystemExit, too, and Jupyter goes on to live
                error = tell_error(problem)
        seconds = time.perf_counter() - start
        cell = {"text": hide_places(screen.kept.getvalue()), "seconds": round(seconds, 3)}
        cell |= {"figures": self.figures} if self.figures else {}
        cell |= {"error": hide_places(error)} if error else {}
        self.log.write(error and f"{error}\n")
        self.record["cells"][name] = cell
        self.record["seconds"] = round(self.record["seconds"] + seconds, 3)
        self.save()
        return bool(error)

    def keep_figures(self) -> None:
        """Saves the open figures as PNG beside the record and closes them."""
        from matplotlib import pyplot

        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            name = f"{self.path.stem}-{len(self.record['cells']) + 1:02d}-{len(self.figures)}.png"
            figure.savefig(self.path.parent / name, dpi=80)
            self.figures.append(name)
            pyplot.close(figure)

    def save(self) -> None:
        """Writes the record."""
        write_json(self.path, self.record)


def execute(source: str, file: Path, names: dict[str, Any]) -> None:
    """Writes a cell's source to a file, runs it, and displays the value of an expression at its end."""
    file.write_text(source, encoding="utf-8")
    tree = ast.parse(source, str(file))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(file), "exec"), names)
    value = eval(compile(ast.Expression(last.value), str(file), "eval"), names) if last else None
    if value is not None:
        display(value)


def hide_places(text: str) -> str:
    """Replaces this machine's folders, and the middle of a long text, by an ellipsis."""
    places = [os.environ.get("LAB_RUNS"), os.environ.get("LAB_DATA"), str(Path.cwd()), str(checkout()), sys.prefix]
    for place in filter(None, places):
        text = text.replace(place, "…")
    return cut_lines(text, first=60, last=60)


def tell_error(error: BaseException) -> str:
    """Returns a LabError's message, or the traceback starting at the cell."""
    if isinstance(error, LabError):
        return str(error)
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return cut_lines("".join(traceback.format_exception(type(error), error, frames)).strip())


def write_json(path: Path, content: object) -> None:
    """Writes JSON atomically."""
    with write_atomically(path) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")


def run_here(lab: int, folder: Path, changes: list[Shorter]) -> bool:
    """Runs one notebook in this process, which cannot be reused afterwards; returns True if all cells ran.

    Args:
        lab: Its number.
        folder: Receives ``labN.json``, the figures, and the copy in which it runs.
        changes: Texts that shorten it.
    """
    from course.reference import describe_machine

    path = find_notebook(lab, checkout() / "notebooks")
    cells = read_cells(path, changes)
    record = {"lab": f"lab{lab}", "notebook": path.name, "identity": identify(lab, changes)}
    record |= {"machine": describe_machine(), "when": datetime.now(UTC).isoformat(timespec="seconds")}
    record |= {"scale": os.environ.get("LAB_SCALE", "by the device"), "rounds": os.environ.get("LAB_ROUNDS", "all")}
    record["shortened"] = [change._asdict() for change in changes]
    place = folder / f"lab{lab}"
    shutil.rmtree(place, ignore_errors=True)
    for old in folder.glob(f"lab{lab}-*.png"):
        old.unlink()
    shutil.copytree(path.parent / "scripts", place / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    stand_in_for_ipython()
    notebook = Notebook(cells, record, folder / f"lab{lab}.json", sys.stdout)
    os.chdir(place)
    sys.path.insert(0, "")  # as in a kernel
    (place / "cells").mkdir()
    return notebook.run(place / "cells")


def identify(lab: int, changes: list[Shorter]) -> str:
    """Returns a digest of all that determines a record except the machine: sources, changes, settings."""
    root, settings = checkout(), [os.environ.get(name, "") for name in ("LAB_SCALE", "LAB_ROUNDS", "LAB_NODES")]
    digest = hashlib.sha256(repr([changes, settings]).encode())
    folders = [root / name for name in ("lab_common", "lab_utils", "nodelaunch", "course", "notebooks/scripts")]
    files = [find_notebook(lab, root / "notebooks"), *(file for one in folders for file in sorted(one.rglob("*.py")))]
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def read_outcome(lab: int, folder: Path, changes: list[Shorter]) -> str:
    """Returns the outcome of an earlier complete run of the same sources; "" if there was none."""
    record = read_record(folder / f"lab{lab}.json")
    outcome = str(record.get("outcome", ""))
    ended = outcome == "passed" or outcome.startswith(FAILED)
    return outcome if ended and record.get("identity") == identify(lab, changes) else ""


def run_all(labs: list[int], out: Path, seconds: float, choose: Callable[[int], list[Shorter]]) -> int:
    """Runs notebooks, each in its own process, as long as there is time; the outcomes go to ``out``.

    A notebook that ran to its end or to a failed cell, from the same sources, is not run again.

    Returns:
        The exit status: TIME_IS_UP if a notebook was cut off or not started; otherwise 1 if a cell failed, else 0.
    """
    folder, end = out.parent / "notebooks", time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, str] = {}
    for lab in labs:
        left = end - time.monotonic()
        if before := read_outcome(lab, folder, choose(lab)):
            outcomes[f"lab{lab}"] = before
        elif left < 5:
            outcomes[f"lab{lab}"] = "not begun: the time was up"
        else:
            outcomes[f"lab{lab}"] = run_one(lab, folder, left, choose(lab))
        print(f"lab {lab}: {outcomes[f'lab{lab}']}", flush=True)
        write_json(out, outcomes)
    if any(outcome.startswith(("cut off", "not begun")) for outcome in outcomes.values()):
        return TIME_IS_UP
    return 0 if set(outcomes.values()) <= {"passed"} else 1


def run_one(lab: int, folder: Path, seconds: float, changes: list[Shorter]) -> str:
    """Runs one notebook in its own process; returns the outcome in words."""
    log, root = folder / f"lab{lab}.log", checkout()
    log.unlink(missing_ok=True)
    # torchrun starts scripts elsewhere, which import the labs' packages; tqdm's bars would fill the record.
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    more = {"PYTHONPATH": path, "TQDM_DISABLE": "1", "PYTHONUNBUFFERED": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, "-m", "benchmarks.gpu.notebooks", "--here", json.dumps(changes), str(lab)]
    command += ["--out", str(folder / "here.json")]
    status = run_capped(command, seconds=seconds, log=log, env=more, cwd=root)
    if status is not None and status >= 0:
        record = read_record(folder / f"lab{lab}.json")
        if record.get("outcome") in (None, "running"):
            return f"failed before its first cell: {log.read_text(errors='replace').strip()[-300:]}"
        return record["outcome"]
    record = read_record(folder / f"lab{lab}.json")
    done = len(record.get("cells", {}))
    words = "cut off: the time was up" if status is None else f"failed: its process was ended by signal {-status}"
    if record:
        write_json(folder / f"lab{lab}.json", record | {"outcome": f"{words} after {done} cells"})
    return f"{words} after {done} cells"


def read_record(path: Path) -> dict[str, Any]:
    """Returns a record; {} if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    return {}


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("labs", nargs="+", type=int, choices=LABS, metavar="LAB", help="0, 1, 4 or 5")
    parser.add_argument(
        "--out", type=read_option, required=True, metavar="FILE.json", help="what came of each notebook"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all together")
    parser.add_argument("--short", action="store_true", help="shortened, as the record says")
    parser.add_argument("--dry", action="store_true", help="a rehearsal: lab 0 alone, small and in a few steps")
    parser.add_argument("--here", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    out = arguments.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.here is not None:
        changes = [Shorter(*change) for change in json.loads(arguments.here)]
        return 0 if run_here(arguments.labs[0], out.parent, changes) else 1
    os.environ.setdefault("LAB_RUNS", str(out.parent / "runs"))
    chosen = REHEARSAL if arguments.dry else SHORTER if arguments.short else {}
    os.environ |= {"LAB_SCALE": "small", "LAB_ROUNDS": "2"} if arguments.dry else {}
    os.environ.setdefault("LAB_SCALE", "full")
    labs = [0] if arguments.dry else arguments.labs
    try:
        return run_all(labs, out, arguments.seconds, lambda lab: chosen.get(lab, []))
    except LabError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
