"""Runs a notebook by nbclient and prints what its cells printed; a script, for another Python and another user.

It imports nothing of the labs. ``run_elsewhere.py NOTEBOOK [--kernel NAME] [--source PATH] [--cells ID ...]``: the
kernel (the notebook's own if not named), what stands in place of the labs' address, and the cells that are run.
"""

import argparse
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

parser = argparse.ArgumentParser()
parser.add_argument("notebook", type=Path)
parser.add_argument("--kernel", default="")
parser.add_argument("--source", default="")
parser.add_argument("--cells", nargs="*")
chosen = parser.parse_args()

notebook = nbformat.read(chosen.notebook, as_version=4)
notebook.cells = [cell for cell in notebook.cells if chosen.cells is None or cell.id in chosen.cells]
for cell in notebook.cells:
    if cell.id == "source":
        cell.source = f"SOURCE = {chosen.source!r}"
folder = {"metadata": {"path": str(chosen.notebook.parent)}}
kernel = chosen.kernel or notebook.metadata["kernelspec"]["name"]
start = time.monotonic()
NotebookClient(notebook, timeout=900, kernel_name=kernel, resources=folder).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text") or output.get("data", {}).get("text/plain", ""))
print(f"{chosen.notebook.name} took {time.monotonic() - start:.0f} s")
