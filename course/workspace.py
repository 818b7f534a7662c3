"""Makes the learner's copy of the labs: solutions replaced by stubs, and a file that the learner changed never touched.

``python -m course.workspace`` does it. The notebooks hold the solutions between nbgrader's markers, so that there is
one source and a graded course can use nbgrader as it is. They also hold an example of each guess, for the readers of
the web site; in the learner's copy ``None`` takes its place.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course.notebooks import BEGIN, END, NOTEBOOK_BYTES, read_notebook
from lab_common import LabError, checkout, read_path
from lab_common.commandline import run_command
from lab_common.files import hold_folder, read_bounded, write_atomically

STUB = ("# YOUR CODE HERE", 'raise NotImplementedError("Replace this line with your code, then run the cell again.")')
SCRIPT_STUB = ("# YOUR CODE HERE", 'raise NotImplementedError("Replace this line with your code, then run it again.")')
# A guess, such as `    "DDP": 0.8,  # example guess: time on one device ÷ time with DDP`.
GUESS_MARK = "# example guess"
GUESS = re.compile(rf"^(.*[=:] )(-?\d+(?:\.\d+)?)(,?)  {GUESS_MARK}: (.+)$", re.MULTILINE)
GUESS_STUB = "# YOUR GUESS HERE: type a number in place of None, then run the cell."
# What lies beside the notebooks and is copied with them.
FOLDERS = ("figures", "scripts")
MANIFEST = ".generated.json"
TEMPORARY = ".writing-"


@dataclass(frozen=True)
class Report:
    """The result of ``update``, as file names relative to the workspace.

    Attributes:
        written: New, or deleted by the learner and written again.
        refreshed: Not changed by the learner, and replaced by a new version.
        current: Not changed by the learner, and up to date.
        kept: Changed by the learner, and made from the present version.
        outdated: Changed by the learner and kept, while there is a new version.
    """

    written: tuple[str, ...] = ()
    refreshed: tuple[str, ...] = ()
    current: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    outdated: tuple[str, ...] = ()


def make_stub(notebook: NotebookNode, *, name: str = "the notebook") -> NotebookNode:
    """Returns a copy of a notebook with stubs for solutions and guesses, and without outputs; ids and metadata stay.

    Raises:
        LabError: A solution's marker has no partner; names the notebook and the cell.
    """
    stub = copy.deepcopy(notebook)
    code = [cell for cell in stub.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, start=1):
        cell.source = replace_guesses(_replace_solutions(cell.source, f"{name}, code cell [{number}]"))
        cell.outputs, cell.execution_count = [], None
    return stub


def make_script_stub(source: str, *, name: str = "the script") -> str:
    """Returns the text of a Python script with stubs for solutions; without markers it stays as it is.

    Raises:
        LabError: A solution's marker has no partner; names the script.
    """
    return _replace_solutions(source, name, SCRIPT_STUB) + "\n" if BEGIN in source or END in source else source


def replace_guesses(source: str) -> str:
    """Returns a cell's source with ``None`` for each example guess, and above them a line that says what to type."""
    asked, guesses = GUESS.subn(r"\1None\3  # \4, for example \2", source)
    return f"{GUESS_STUB}\n{asked}" if guesses else source


def _replace_solutions(source: str, where: str, stub: tuple[str, ...] = STUB) -> str:
    lines, inside = [], False
    for line in source.splitlines():
        marker = line.strip()
        if marker in (BEGIN, END) and inside != (marker == END):
            raise LabError(
                f"{marker!r} has no partner.",
                where=where,
                cause="a marker was deleted or doubled while the lab was edited",
                fix=f"put the solution between one line {BEGIN!r} and one line {END!r}",
            )
        if marker == BEGIN:
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent + text for text in stub]
            inside = True
        elif marker == END:
            inside = False
        elif not inside:
            lines.append(line)
    if inside:
        return _replace_solutions(f"{source}\n{BEGIN}", where)  # raises: the open marker meets another
    return "\n".join(lines)


def update(notebooks: Path, workspace: Path, *, kernel: str = "") -> Report:
    """Makes or updates the learner's copy of every lab, and of the figures and scripts beside them.

    A file that is not what was once generated is the learner's, and is never overwritten; outputs of a notebook do not
    count, since a run is no edit. A run that is
    cut off at any point leaves whole files only, and the next run goes on from there.

    Args:
        notebooks: The labs with their solutions, or a release's without them.
        workspace: The learner's copy; it is made if it is not there.
        kernel: The Jupyter kernel that new copies of the notebooks ask for; "" keeps theirs.

    Raises:
        LabError: There are no labs in ``notebooks``, or one of them cannot be read or has unbalanced markers; or the
            copy cannot be written, or another process is writing it.
    """
    generated = _generate(notebooks, kernel)
    try:
        workspace.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        cause, fix = error.strerror or "", "rename what is there, then run: make workspace"
        raise LabError("The folder for your copy cannot be made.", where=workspace, cause=cause, fix=fix) from error
    # One process at a time: another would take this one's half-written files for leftovers.
    with hold_folder(workspace, "Your copy of the labs is being written by another command"):
        return _bring_up_to_date(notebooks, workspace, generated)


def _bring_up_to_date(notebooks: Path, workspace: Path, generated: dict[str, bytes]) -> Report:
    known = _read_manifest(workspace / MANIFEST)
    # First what may be written, so that a run that is cut off does not take its own files for the learner's.
    fresh = {name: [_digest(text)] for name, text in generated.items()}
    _write_manifest(workspace, {**known, **{name: known.get(name, []) + fresh[name] for name in fresh}})
    for leftover in {left for name in generated for left in (workspace / name).parent.glob(f"{TEMPORARY}*.tmp")}:
        with contextlib.suppress(OSError):  # a folder of that name is none of ours
            leftover.unlink()
    state = {}
    for name, text in generated.items():
        # As late as can be: many files take a disk its time, and JupyterLab saves by itself.
        state[name] = _classify(workspace / name, known.get(name, []), *fresh[name])
        if state[name] in ("written", "refreshed"):
            _write(workspace / name, text, notebooks / name)
    outdated = [name for name, verdict in state.items() if verdict == "outdated"]
    _write_manifest(workspace, {**known, **{name: fresh[name] for name in fresh if name not in outdated}})
    kinds = ("written", "refreshed", "current", "kept", "outdated")
    return Report(**{kind: tuple(sorted(name for name, found in state.items() if found == kind)) for kind in kinds})


def _classify(path: Path, known: list[str], wanted: str) -> str:
    """Decides about one file, from the digests of what was generated before and of what is wanted now."""
    try:
        found = _digest(read_bounded(path, NOTEBOOK_BYTES))
    except OSError as error:  # a folder, say, or larger than anything of ours: not ours to replace
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            return "written"
        found = None
    if found == wanted:
        return "current"
    if found in known:
        return "refreshed"
    # Without a manifest nobody knows which version the learner started from; the next new one will be announced.
    return "outdated" if known and wanted not in known else "kept"


def _generate(notebooks: Path, kernel: str) -> dict[str, bytes]:
    generated = {}
    for path in sorted(notebooks.glob("*.ipynb")):
        stub = make_stub(read_notebook(path), name=path.name)
        if kernel:
            stub.metadata["kernelspec"] = {"name": kernel, "display_name": kernel, "language": "python"}
        generated[path.name] = (nbformat.writes(stub) + "\n").encode()
    if not generated:
        raise LabError(
            "There are no labs here.", where=notebooks, cause="another folder was meant", fix="make workspace"
        )
    beside = (path for folder in FOLDERS for path in (notebooks / folder).rglob("*"))
    hidden = ("__pycache__", ".ipynb_checkpoints")
    files = [path for path in beside if path.is_file() and path.parent.name not in hidden]
    return generated | {name: _copy(path, name) for path in files if (name := path.relative_to(notebooks).as_posix())}


def _copy(path: Path, name: str) -> bytes:
    # Bytes where nothing is to be replaced: a figure, or a file that is not text at all.
    try:
        text = path.read_bytes()
        script = name.startswith("scripts/") and path.suffix == ".py"
        return make_script_stub(text.decode(), name=name).encode() if script else text
    except (OSError, ValueError) as error:
        fix = f"git checkout -- {shlex.quote(str(path))}"
        raise LabError(f"{name} cannot be read.", where=path, cause=str(error)[:200], fix=fix) from error


def _digest(text: bytes) -> str:
    """The SHA-256 of a file's bytes, or of what a notebook's cells say, without their outputs and counts."""
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        cells = json.loads(text)["cells"]
        text = json.dumps([_list_content(cell) for cell in cells]).encode()
    return hashlib.sha256(text).hexdigest()


def _list_content(cell: dict) -> list:
    """Lists what a learner writes in a cell; a picture that was pasted into one is an attachment."""
    content = [cell["cell_type"], cell.get("id"), "".join(cell["source"])]
    return [*content, cell["attachments"]] if cell.get("attachments") else content


def _read_manifest(path: Path) -> dict[str, list[str]]:
    """Reads, per file, the digests of what was generated; {} where there is none: then all files are the learner's."""
    try:
        files = json.loads(read_bounded(path, NOTEBOOK_BYTES))["files"]
        return {str(name): [str(digest) for digest in digests] for name, digests in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def _write_manifest(workspace: Path, files: dict[str, list[str]]) -> None:
    about = "SHA-256 of the files as they were generated; a file that differs is yours and is never overwritten."
    _write(
        workspace / MANIFEST, (json.dumps({"about": about, "files": files}, indent=1, sort_keys=True) + "\n").encode()
    )


def _write(path: Path, text: bytes, model: Path | None = None) -> None:
    """Writes a file in one step, with the permissions of ``model``: there is the old one or the new one, no half.

    Raises:
        LabError: It cannot be written.
    """
    mode = model.stat().st_mode & 0o777 if model else 0o644
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path, prefix=TEMPORARY, mode=mode) as file:
            file.write(text)
    except OSError as error:
        fix = "free some space, or see who owns the folder, then run: make workspace"
        raise LabError(f"{path.name} cannot be written.", where=path, cause=error.strerror or "", fix=fix) from error


def describe(report: Report) -> list[str]:
    """Puts a report into a few lines for the learner."""
    words = {
        "written": "written",
        "refreshed": "brought up to date",
        "current": "up to date",
        "kept": "changed by you and kept",
        "outdated": "changed by you and kept, while there is a new version",
    }
    counts = [f"{len(getattr(report, kind))} {text}" for kind, text in words.items() if getattr(report, kind)]
    lines = [f"Your copy of the labs: {'; '.join(counts)}."]
    for name in report.outdated:
        lines.append(f"{name} changed upstream. Yours is edited and was kept.")
        lines.append(f"  For the new one: rename yours (for example to my_{Path(name).name}), then run: make workspace")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m course.workspace", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--notebooks", type=read_path, default=checkout() / "notebooks", help="the labs with their solutions"
    )
    parser.add_argument("--workspace", type=read_path, default=checkout() / "workspace", help="the learner's copy")
    parser.add_argument("--kernel", default="", help="the Jupyter kernel of new copies (setup_anywhere.py makes one)")
    chosen = parser.parse_args(arguments)
    from course.start import write_start  # what it imports takes longer than all else here

    def run() -> None:
        print("\n".join(describe(update(chosen.notebooks, chosen.workspace, kernel=chosen.kernel))))
        write_start(chosen.notebooks, chosen.workspace)

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
