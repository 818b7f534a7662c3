"""Runs notebooks from top to bottom: ``make notebooks`` saves them with their outputs, ``make reference`` does not.

What is saved comes from the drawn data set and from a fresh folder of records, whatever lies in data/ and runs/.
"""

import argparse
import os
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


def run_notebook(source: bytes, folder: Path) -> nbformat.NotebookNode:
    """Runs a notebook in a fresh kernel, in a folder, and returns it with its outputs; an error ends the run.

    Its costs are in its metadata, as ``lab``: memory as ``peak_gib``, the run as ``seconds``, and with reading
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
