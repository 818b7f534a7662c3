"""Bars of progress show where somebody looks, and leave no line in a log."""

import os
import pty
import subprocess
import sys
import termios

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from course.bars import VIEW

BAR = """
from lab_utils.bars import open_bar
with open_bar(4, "counting", show={show}, mininterval=0) as bar:
    for _ in range(4):
        bar.update()
"""
TRAINS = """
import torch
from lab_utils import training
run = torch.nn.Linear(2, 2)
training.evaluate(run, [(torch.ones(1, 2), torch.zeros(1, dtype=torch.long))] * 3)
"""


@pytest.mark.parametrize("source", [BAR.format(show=True), TRAINS], ids=["bar", "evaluate"])
def test_a_log_holds_no_bar(source):
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("show", [True, False])
def test_a_terminal_shows_a_bar_unless_it_is_told_not_to(show):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with subprocess.Popen([sys.executable, "-c", BAR.format(show=show)], stderr=theirs) as child:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 4096):
                said += piece
        except OSError:  # how Linux says that nobody holds the other end any more
            pass
    os.close(ours)
    assert child.returncode == 0, said
    assert (b"counting: 100%" in said) == show, said
    assert show or not said


def test_a_notebook_forgets_a_bar_that_was_taken_away():
    """Also one that a cell makes by itself, after a lab's imports; one that stays is kept, and so is what was said."""
    bar = "from tqdm.auto import tqdm\nfor _ in tqdm(range(2), leave={}):\n    pass\nprint('done')"
    ours = BAR.format(show=True).replace("show=True", "show=True, leave=False")
    sources = ["from course import check", bar.format(False), ours, bar.format(True)]
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [[output.data for output in cell.outputs if "data" in output] for cell in notebook.cells]
    assert [[bool(data[VIEW]["model_id"]) for data in some] for some in shown] == [[], [False], [False], [True]]
    assert "0/2" in shown[1][0]["text/plain"] and notebook.cells[1].outputs[-1].text == "done\n"
