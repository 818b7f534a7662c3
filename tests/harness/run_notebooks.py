"""Runs notebooks from top to bottom: ``make notebooks`` saves them with their outputs, ``make reference`` does not.

What is saved comes from the drawn data set and from a fresh folder of records, whatever lies in data/ and runs/.
"""

import argparse
import base64
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from memory import MemoryWatch  # beside this file, which is run as a script
from nbclient import NotebookClient
from notebook_rules import count_minutes

from lab_common import LabError
from lab_common.files import write_atomically
from lab_utils import data

PICTURE = ("01_mixed_precision", "throughput-figure")  # the notebook and the cell of the README's figure


def run_notebook(source: bytes, folder: Path) -> nbformat.NotebookNode:
    """Runs a notebook in a fresh kernel, in a folder, and returns it with its outputs; an error ends the run.

    What it took stands in its metadata, as ``lab``: memory as ``peak_gib``, the run as ``seconds``, and with reading
    and exercises as ``minutes``.
    """
    notebook = nbformat.reads(source.decode(), as_version=4)
    client = NotebookClient(
        notebook,
        timeout=3600,
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": folder}},
    )
    with MemoryWatch() as watch:
        # While the kernel is there: a short notebook may begin and end between two looks.
        client.on_cell_executed = lambda **_: watch.sample()
        start = time.monotonic()
        client.execute()
        seconds = round(time.monotonic() - start)
    notebook.metadata["lab"] = {"peak_gib": watch.peak_gib, "seconds": seconds}
    notebook.metadata["lab"]["minutes"] = count_minutes(notebook, folder)
    hide_places(notebook)
    bar = "application/vnd.jupyter.widget-view+json"
    for cell in notebook.cells:
        # A progress bar that is over is no output, and its widget is gone; where outputs are compared it has to stay.
        if "nbval-ignore-output" in cell.metadata.get("tags", []):
            cell.outputs = [output for output in cell.outputs if bar not in output.get("data", {})]
    return notebook


def hide_places(notebook: nbformat.NotebookNode) -> None:
    """Replaces, in what the cells printed, the folders of this machine by an ellipsis."""
    places = [os.environ.get("LAB_RUNS"), os.environ.get("LAB_DATA"), str(Path(__file__).resolve().parents[2])]
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts = output if "text" in output else output.get("data", {})
            for key in [key for key in texts if key.startswith("text")]:
                for place in filter(None, places):
                    texts[key] = texts[key].replace(place, "…")


def save_notebook(notebook: nbformat.NotebookNode, path: Path, source: bytes) -> None:
    """Writes a notebook in place of the source that it was run from.

    Raises:
        LabError: The file is no longer that source; it is left as it is.
    """
    if path.read_bytes() != source:
        raise LabError(
            f"{path.name} was changed while it ran, and was not saved.",
            where=path,
            cause="it was edited meanwhile; the edits are as they were, the outputs of this run are gone",
            fix="save your edits, then run: make notebooks",
        )
    with write_atomically(path, mode=path.stat().st_mode & 0o777) as file:
        file.write((nbformat.writes(notebook) + "\n").encode())


def save_picture(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Saves the first figure of the README's cell."""
    cells = {cell.id: cell for cell in notebook.cells}
    figure = next(output.data["image/png"] for output in cells[PICTURE[1]].outputs if "data" in output)
    (folder / "lab1_throughput.png").write_bytes(base64.b64decode(figure))


def save_needs(notebook: nbformat.NotebookNode, readme: Path, name: str) -> None:
    """Writes the minutes and the memory that a lab takes into its row of the README's table, its next to last cells."""
    row = rf"^(\| \[[^|]+\]\(notebooks/{re.escape(name)}\) (?:\|[^|]+){{2}})\|[^|]+\|[^|]+\|"
    text, lab = readme.read_text(encoding="utf-8"), notebook.metadata["lab"]
    changed = re.sub(row, rf"\1| {lab['minutes']} | {lab['peak_gib']:.1f} GiB |", text, flags=re.MULTILINE)
    if changed != text:
        with write_atomically(readme, mode=readme.stat().st_mode & 0o777) as file:
            file.write(changed.encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--save", action="store_true", help="saves the outputs, of shapes10 and the small scale")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="labs-") as scratch:
        if arguments.save:
            os.environ |= {"LAB_DATA": f"{scratch}/data", "LAB_RUNS": f"{scratch}/runs", "LAB_SCALE": "small"}
            Path(scratch, "data").mkdir()  # or each lab would say that it is not there
            data.load()  # drawn before: a slow machine would show its bar of progress in the outputs
        for path in arguments.notebooks:
            print(path, "...", flush=True)
            source = path.read_bytes()
            notebook = run_notebook(source, path.parent)
            lab = notebook.metadata["lab"]
            print(f"  {lab['peak_gib']:.1f} GiB of memory at most, {lab['seconds']} s", flush=True)
            if arguments.save:
                try:
                    save_notebook(notebook, path, source)
                except LabError as error:
                    print(error, file=sys.stderr)
                    return 1
                if (readme := path.parents[1] / "README.md").exists():
                    save_needs(notebook, readme, path.name)
                if path.stem == PICTURE[0]:
                    save_picture(notebook, path.parent / "figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
