"""The labs as a learner has them: JupyterLab as `make lab` starts it, in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
from harness.browser import Page
from harness.engines import need_engine_of
from harness.hosts import find_missing
from harness.jobs import wait_for
from harness.lab_pages import (
    REFUSALS,
    find_faults,
    find_stubs,
    go_the_learner_s_way,
    run_all,
    say_in_dialog,
)
from harness.lab_server import BRIEF, WANDB_KEY, Lab, start_lab

from course import workspace
from course.pocket_slurm import find_missing_packages
from course.report.__main__ import main as report

ROOT = Path(__file__).resolve().parents[1]
# Where hosts can be made, test_lab5.py takes lab 5 this way on two of them.
NOTEBOOKS = [path for path in sorted((ROOT / "notebooks").glob("*.ipynb")) if path.stem[:2] != "05" or find_missing()]
# The one that is run again also where LAB_BRIEF=1: it finds a server, jobs' folders and records of the evening before.
AGAIN = "02_tensorboard"
# With LAB_BRIEF=1, one lab of each part but the race. nbval runs them all.
IN_BRIEF = (AGAIN, "06_fault_cards", "08_collectives", "10_sharding", "12_lightning")
assert {path.stem for path in NOTEBOOKS}.issuperset(IN_BRIEF), "a lab has another name now"

# What a cell's output shows.
TEXT = "labs.cells[{}].outputArea.node.innerText"
LAST_FIGURE = "[...labs.panel.node.querySelectorAll('.jp-RenderedImage img')].at(-1)"


@pytest.fixture(scope="module")
def lab(
    cinic_folder: Path, chromium: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Lab]:
    """`make lab` and a browser for the whole file; lab 13 finds a Slurm if this machine can run one."""
    if not os.geteuid() and not find_missing_packages():
        request.getfixturevalue("slurm")
    with start_lab(tmp_path_factory.mktemp("lab"), cinic_folder) as started:
        yield started


@pytest.fixture
def pages(lab: Lab) -> Iterator[list[Page]]:
    """A list for the tabs of a test; afterwards they are closed and all kernels are ended."""
    opened: list[Page] = []
    yield opened
    for page in opened:
        page.close()
    lab.end_kernels()


@pytest.fixture
def open_notebook(lab: Lab, pages: list[Page]) -> Callable[[str], Page]:
    """Opens notebooks by name."""

    def run(name: str) -> Page:
        pages.append(lab.open(name))
        return pages[-1]

    return run


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_learner_meets_each_stub_solves_it_sees_all_and_runs_it_again(lab, open_notebook, keep, path):
    need_engine_of(path)
    if BRIEF and path.stem not in IN_BRIEF:
        pytest.skip("NOT TESTED HERE: LAB_BRIEF=1 takes one lab of each part through the browser; nbval runs them all")
    page = open_notebook(path.name)
    assert go_the_learner_s_way(page, path, lab.folder) == find_stubs(path)
    faults = find_faults(page, lab.folder / path.name)
    page.evaluate(f"{LAST_FIGURE}?.scrollIntoView({{block: 'center'}})")
    keep(page, path.stem)
    assert not faults, "\n".join(["", *faults])
    if path.stem == "03_wandb":
        expect_key_kept_secret(lab, path)
    page.close()
    lab.end_kernels()
    if not BRIEF or path.stem == AGAIN:
        lab.run_again(path.name)


def expect_key_kept_secret(lab: Lab, path: Path) -> None:
    """Asserts that lab 3 went online with the key that it found, and that no notebook, log or home folder has it."""
    cells = {cell.id: cell for cell in nbformat.read(lab.folder / path.name, as_version=4).cells}
    (said,) = [output.text for output in cells["connect"].outputs]
    assert said.startswith("online: ") and said.count("\n") == 1
    # First run, the step back, the training, three of the sweep, and three of two ranks; the killed ones stay offline.
    assert len(lab.tracker.rows) == 9 and lab.tracker.keys == {WANDB_KEY}
    files = [file for file in lab.runs.parent.rglob("*") if file.is_file()]
    assert len(files) > 100
    assert [file for file in files if "PLANTED" in file.name or b"PLANTED" in file.read_bytes()] == []
    written = [file for file in (lab.runs.parent / "user").rglob("*") if re.search(r"wandb|\.netrc", file.name)]
    assert written == []


def test_tensorboard_answers_inside_the_notebook_through_jupyterlab_s_own_port(lab, open_notebook, keep):
    """Runs only up to the training: a later cell of the lab ends the server, and a loaded frame would stay."""
    path = Path(shutil.copy(ROOT / "notebooks" / "02_tensorboard.ipynb", lab.folder / "inline.ipynb"))
    ids = [cell.id for cell in nbformat.read(path, as_version=4).cells]
    page = open_notebook(path.name)
    page.evaluate(f"labs.panel.content.activeCellIndex = {ids.index('run') + 1}")
    run_all(page, "notebook:run-all-above")
    page.evaluate(f"labs.look({ids.index('start-server')})")
    frame = f"labs.cells[{ids.index('start-server')}].node.querySelector('object')"
    page.wait_for(f"{frame}?.contentDocument?.title === 'TensorBoard'")
    assert page.evaluate(f"new URL({frame}.data).origin") == lab.url
    assert page.evaluate(f"fetch({frame}.data).then(answer => answer.status)") == 200

    def shows_the_run() -> bool:
        """Returns True if the page, reloaded through the proxy as by a learner, names the run."""
        page.evaluate(f"void ({frame}.contentWindow.stale = true, {frame}.contentWindow.location.reload())")
        with suppress(TimeoutError):
            text = f"{frame}.contentDocument.body?.innerText"
            return page.wait_for(f"!{frame}.contentWindow.stale && {text}?.includes('baseline')", timeout=10)

    wait_for(shows_the_run, 60.0)
    keep(page, "tensorboard_inline")


def run_cell(page: Page, index: int) -> str:
    """Runs one cell in an idle kernel, to its end, and returns its output."""
    page.evaluate(f"labs.panel.content.activeCellIndex = {index}; labs.start('notebook:run-cell')")
    page.wait_for("labs.ended && labs.kernel === 'idle'")
    return page.evaluate(TEXT.format(index)).strip()


def test_the_first_start_shows_the_page_of_all_labs_and_its_link_opens_one(lab, pages, keep):
    page = lab.start()
    pages.append(page)
    page.wait_for("document.querySelector('.jp-RenderedMarkdown h1')?.innerText === 'Distributed Training Labs'")
    shown = "[...document.querySelectorAll('{}')].map(node => node.innerText)"
    assert page.evaluate(shown.format("#jp-main-dock-panel .lm-TabBar-tab")) == ["START.md"]
    names = "[...document.querySelectorAll('.jp-DirListing-itemText')]"
    assert {path.name for path in NOTEBOOKS} <= set(page.evaluate(f"{names}.map(node => node.innerText)"))
    cut = page.evaluate(f"{names}.filter(node => node.scrollWidth > node.clientWidth).map(node => node.innerText)")
    assert cut == [], "the file browser is too narrow"
    keep(page, "first_start")
    page.evaluate("void [...document.querySelectorAll('.jp-RenderedMarkdown p a')][0].click()")
    page.wait_for("jupyterapp.shell.currentWidget?.context?.path === '00_start_here.ipynb'")
    page.wait_for("jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'")
    # What would ask for news has asked by now.
    assert page.evaluate(shown.format(".Toastify__toast, .jp-Dialog")) == []


def cut_lab_0(lab: Lab, name: str, ids: Sequence[str]) -> dict[str, int]:
    """Puts a learner's copy of some cells of lab 0 into the workspace; returns their places."""
    book = workspace.make_stub(nbformat.read(ROOT / "notebooks" / "00_start_here.ipynb", as_version=4))
    book.cells = [cell for cell in book.cells if cell.id in ids]
    nbformat.write(book, lab.folder / name)
    return {cell.id: place for place, cell in enumerate(book.cells)}


def answer_topk(page: Page, place: int, *lines: str) -> str:
    """Writes an answer to exercise 0.1 into its cell, runs that, and returns its output."""
    body = "\n".join(f"    {line}" for line in lines)
    source = f"def count_topk(logits, labels, k):\n{body}\n\n\ncheck.exercise('0.1', count_topk)"
    page.evaluate(f"labs.rewrite({place}, {json.dumps(source)})")
    return run_cell(page, place)


RIGHT_TOPK = ("best = logits.topk(k, dim=1).indices", "return (best == labels.unsqueeze(1)).sum()")


def find_pictures(path: Path) -> dict[str, list[str]]:
    """Returns the figures that are stored in a notebook, by the id of their cell."""
    outputs = {cell.id: cell.get("outputs", []) for cell in nbformat.read(path, as_version=4).cells}
    data = {name: [output.get("data", {}).get("image/png") for output in some] for name, some in outputs.items()}
    return {name: [one.strip() for one in some if one] for name, some in data.items() if any(some)}


def test_a_lab_bears_a_restart_in_the_middle_a_second_evening_and_a_new_name(
    lab, open_notebook, keep, tmp_path, monkeypatch
):
    ids = ["title", "imports", "load", "batches", "exercise-topk", "recipe-code", "loop", "predict", "epoch"]
    cells = cut_lab_0(lab, "evening.ipynb", [*ids, "plot-read", "first-plot"])
    page = open_notebook("evening.ipynb")
    page.evaluate(f"labs.panel.content.activeCellIndex = {cells['exercise-topk']}")
    run_all(page, "notebook:run-all-above")
    answer_topk(page, cells["exercise-topk"], *RIGHT_TOPK)
    page.evaluate("void jupyterapp.commands.execute('kernelmenu:restart')")
    say_in_dialog(page)
    page.wait_for("labs.panel.sessionContext.kernelDisplayStatus === 'idle'")
    assert "NameError" in run_cell(page, cells["recipe-code"]), "the kernel is a new one"
    page.evaluate(f"labs.panel.content.activeCellIndex = {cells['plot-read']}")
    run_all(page, "notebook:run-all-above")
    assert page.evaluate("labs.stop") is None
    assert page.evaluate(TEXT.format(cells["exercise-topk"])).startswith("✔ 0.1")
    shown = [page.evaluate(TEXT.format(place)) for name, place in cells.items() if name in ids[1:]]
    page.close()
    lab.end_kernels()

    page = open_notebook("evening.ipynb")  # as on the next evening
    page.wait_for("!labs.panel.node.innerText.includes('Loading widget...')")
    assert [page.evaluate(TEXT.format(place)) for name, place in cells.items() if name in ids[1:]] == shown
    looks = {name: page.evaluate(f"labs.look({place})") for name, place in cells.items()}
    page.evaluate(f"labs.look({cells['epoch']})")
    keep(page, "second_evening")
    assert [(name, word) for name, look in looks.items() for word in REFUSALS if word in look["text"]] == []
    pictures = find_pictures(lab.folder / "evening.ipynb")
    assert {name: look["figures"] for name, look in looks.items() if look["figures"]} == {
        name: [True] * len(some) for name, some in pictures.items()
    }
    assert pictures.keys() == {"load", "first-plot"}

    page.evaluate("void jupyterapp.commands.execute('docmanager:rename')")
    say_in_dialog(page, "my own evening.ipynb")
    page.wait_for("labs.panel.context.path === 'my own evening.ipynb'")
    monkeypatch.setenv("LAB_RUNS", str(lab.runs))
    team = tmp_path / "team"
    team.mkdir()
    shutil.copy(lab.folder / "my own evening.ipynb", team)
    assert report(["--workspace", str(team), "--output", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    of_lab = text.partition('id="lab0"')[2].partition('id="lab1"')[0]
    assert all("".join(picture.split()) in of_lab for some in pictures.values() for picture in some)
