"""Every cell of a notebook may be run twice; and after a restart in the middle, all above and the rest may be run."""

from pathlib import Path

import nbformat
import pytest
from harness.engines import need_engine_of
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

# As long again as the notebooks themselves; the measurements that a lab keeps are read back.
pytestmark = pytest.mark.system
# Two rounds for each measurement. What is kept is called noise then, and each cell would measure it anew.
KEEP = """import os
from lab_utils.timing import records as kept
os.environ["LAB_ROUNDS"] = "2"
kept.find_noise = lambda timings: ''"""
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run_twice_and_again_after_a_restart(path, runs):
    need_engine_of(path)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, new_code_cell(KEEP))
    middle = len(notebook.cells) // 2
    for first, last in ((0, middle), (middle, len(notebook.cells))):  # a kernel for each half
        client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": path.parent}})
        with client.setup_kernel():
            for index, cell in enumerate(notebook.cells[:last]):
                for _ in range(2 if index >= first else 1):
                    client.execute_cell(cell, index)  # raises at an error, with the cell and its traceback
