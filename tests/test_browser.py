"""The labs as a learner has them: JupyterLab as `make lab` starts it, in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
from harness.browser import Page
from harness.hosts import find_missing
from harness.jobs import assert_gone, wait_for
from harness.lab_pages import PROGRESS, find_faults, find_stubs, go_the_learner_s_way, run_all
from harness.lab_server import KERNEL, WANDB_KEY, Lab, start_lab
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course import workspace

ROOT = Path(__file__).resolve().parents[1]
# Where hosts can be made, test_lab5.py takes lab 5 this way on two of them.
NOTEBOOKS = [path for path in sorted((ROOT / "notebooks").glob("*.ipynb")) if path.stem[:2] != "05" or find_missing()]

# What a cell's output shows.
TEXT = "labs.cells[{}].outputArea.node.innerText"
LAST_FIGURE = "[...labs.panel.node.querySelectorAll('.jp-RenderedImage img')].at(-1)"
# Two nodes that meet at each step, until a file says that it is enough: no machine is too slow for that.
COUNT = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
step, enough = 0, torch.zeros(1)
while not enough:
    enough[0] = Path(sys.argv[1]).exists()
    dist.all_reduce(enough)
    step += 1
    print("step", step, flush=True)
    time.sleep(0.5)
print("all steps done", flush=True)
dist.destroy_process_group()
"""
TWO_NODES = """
import nodelaunch as launch
launch.TorchrunJob("scripts/count.py", ["{enough}"], nodes=launch.local_nodes(2)).run();
"""
# What a learner asks who wants to know how a job stands: which run here, and what the newest has said.
JOBS = "!python -m nodelaunch jobs"
LOG = """
import nodelaunch as launch
print(*[line for line in launch.find_log().read_text().splitlines() if "step" in line][-4:], sep="\\n")
"""


@pytest.fixture(scope="module")
def lab(cinic_folder: Path, chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """`make lab` and a browser for the whole file."""
    with start_lab(tmp_path_factory.mktemp("lab"), cinic_folder) as started:
        (started.folder / "scripts" / "count.py").write_text(COUNT)
        yield started


@pytest.fixture
def open_notebook(lab: Lab) -> Iterator[Callable[[str], Page]]:
    """Opens notebooks by name; their tabs are closed and their kernels ended after the test."""
    pages = []

    def run(name: str) -> Page:
        pages.append(lab.open(name))
        return pages[-1]

    yield run
    for page in pages:
        page.close()
    lab.end_kernels()


SOLVED = "def f():\n    ### BEGIN SOLUTION\n    return x\n    ### END SOLUTION\nassert f() == 2"
FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
BAR = "import time\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(4), leave={leave}):\n    time.sleep(0.2)"
NO_IMAGE = "from IPython.display import HTML, display\nHTML('<img src=\"none.png\">')"
NO_MODEL = f"display({{{PROGRESS!r}: {{'model_id': 'none'}}}}, raw=True)"


def test_what_a_learner_would_miss_is_found(lab, open_notebook):
    sources = [FIGURE, BAR.format(leave=True), BAR.format(leave=False), NO_IMAGE, NO_MODEL, "1 / 0", "'never run'"]
    path = lab.write("faults.ipynb", *sources)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(new_markdown_cell("![gone](none.png)"))
    nbformat.write(notebook, path)
    figure, _, _, *ids = (cell.id for cell in notebook.cells)
    no_image, no_model, error, unrun, no_picture = ids
    page = open_notebook(path.name)
    run_all(page)
    faults = [
        f"{no_image}: 0 figures are stored, visible are [False]",
        f"{no_model}: 1 progress bars are stored, 0 were seen, visible are []",
        f"{no_model}: it shows 'Loading widget...'",
        f"{error}: it raised ZeroDivisionError",
        f"{unrun}: it was not run",
        f"{no_picture}: 1 pictures are named, visible are [False]",
    ]
    assert find_faults(page, path) == faults
    image = "labs.cells[0].node.querySelector('.jp-RenderedImage img')"
    for harm, visible in (("style.width = 0", "[False]"), ("style.opacity = 0", "[False]"), ("remove()", "[]")):
        page.evaluate(f"void ({image}.{harm})")
        assert find_faults(page, path) == [f"{figure}: 1 figures are stored, visible are {visible}", *faults]
        page.evaluate(f"{image}?.removeAttribute('style')")


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ([SOLVED], None),
        ([SOLVED.replace("assert f() == 2", "")], "meets no stub"),
        (["y\n" + SOLVED], "says NameError"),
        ([SOLVED.replace("f() == 2", "f() == 3")], "says AssertionError"),
        ([SOLVED, "1 / 0"], "says ZeroDivisionError"),
    ],
    ids=["good", "silent stub", "wrong error", "wrong solution", "later error"],
)
def test_the_learner_s_way_is_itself_tested(lab, open_notebook, tmp_path, cells, problem):
    path = tmp_path / "labs" / "way.ipynb"
    path.parent.mkdir()
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in ["x = 2", *cells]], metadata=KERNEL), path)
    stub = workspace.make_stub(nbformat.read(path, as_version=4))
    nbformat.write(stub, lab.folder / path.name)
    page = open_notebook(path.name)
    if problem == "meets no stub":
        assert find_stubs(path) != go_the_learner_s_way(page, path, lab.folder) == []
    elif problem:
        with pytest.raises(AssertionError, match=problem):
            go_the_learner_s_way(page, path, lab.folder)
    else:
        assert find_stubs(path) == go_the_learner_s_way(page, path, lab.folder) == [stub.cells[1].id]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_learner_meets_each_stub_solves_it_and_sees_all_of_the_lab(lab, open_notebook, keep, path):
    page = open_notebook(path.name)
    assert go_the_learner_s_way(page, path, lab.folder) == find_stubs(path)
    faults = find_faults(page, lab.folder / path.name)
    page.evaluate(f"{LAST_FIGURE}?.scrollIntoView({{block: 'center'}})")
    keep(page, path.stem)
    assert not faults, "\n".join(["", *faults])
    if path.stem == "03_wandb":
        expect_key_kept_secret(lab, path)


def expect_key_kept_secret(lab: Lab, path: Path) -> None:
    """Lab 3 went online with the key that it found, and the key is in no file: no notebook, no log, no home folder."""
    cells = {cell.id: cell for cell in nbformat.read(lab.folder / path.name, as_version=4).cells}
    (said,) = [output.text for output in cells["connect"].outputs]
    assert said.startswith("online: ") and said.count("\n") == 1
    # First run, the training, three of the sweep, and three of two ranks; the killed ones stay offline in any case.
    assert len(lab.tracker.rows) == 8 and lab.tracker.keys == {WANDB_KEY}
    files = [file for file in lab.runs.parent.rglob("*") if file.is_file()]
    assert len(files) > 100
    assert [file for file in files if "PLANTED" in file.name or b"PLANTED" in file.read_bytes()] == []
    written = [file for file in (lab.runs.parent / "user").rglob("*") if re.search(r"wandb|\.netrc", file.name)]
    assert written == []


def test_tensorboard_answers_inside_the_notebook_through_jupyterlab_s_own_port(lab, open_notebook, keep):
    """Only up to the training run: a later cell of the lab ends the server, and a frame that has loaded stays."""
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
        """Whether its page names the run, which it fetches through the proxy, after a learner's click on reload."""
        page.evaluate(f"void ({frame}.contentWindow.stale = true, {frame}.contentWindow.location.reload())")
        with suppress(TimeoutError):
            text = f"{frame}.contentDocument.body?.innerText"
            return page.wait_for(f"!{frame}.contentWindow.stale && {text}?.includes('baseline')", timeout=10)

    wait_for(shows_the_run, 60.0)
    keep(page, "tensorboard_inline")


def start_cell(page: Page, index: int) -> None:
    page.evaluate(f"labs.panel.content.activeCellIndex = {index}; labs.start('notebook:run-cell')")


def start_job(page: Page) -> None:
    """Runs the first cell, which starts a job, until both of its nodes are at work."""
    page.wait_for("labs.kernel === 'idle'")
    start_cell(page, 0)
    for rank in (0, 1):
        page.wait_for(f"/rank {rank}.*step 3$/m.test({TEXT.format(0)})", timeout=120)


def run_cell(page: Page, index: int) -> str:
    """Runs one cell of a kernel that is idle, to its end, and returns what it shows."""
    start_cell(page, index)
    page.wait_for("labs.ended && labs.kernel === 'idle'")
    return page.evaluate(TEXT.format(index)).strip()


def find_job(lab: Lab, survivors: Callable[[str], list[int]]) -> str:
    """The id of the one job that runs."""
    (job,) = (folder.name for folder in (lab.runs / "jobs").iterdir() if survivors(folder.name))
    return job


def find_step(log: str) -> int:
    """The last step of which the end of a log tells."""
    return int(re.findall(r"step (\d+)", log)[-1])


@pytest.mark.drill
def test_interrupting_a_two_node_cell_leaves_no_process_and_the_kernel_goes_on(lab, open_notebook, keep, survivors):
    job_cell = TWO_NODES.format(enough=lab.runs / "never")
    page = open_notebook(lab.write("interrupted.ipynb", job_cell, "print(1 + 1)").name)
    start_job(page)
    job = find_job(lab, survivors)
    page.evaluate("jupyterapp.commands.execute('notebook:interrupt-kernel')")
    assert_gone(job, 10.0)
    page.wait_for("labs.ended && labs.kernel === 'idle'", timeout=30)
    keep(page, "interrupted")
    assert "KeyboardInterrupt" in page.evaluate(TEXT.format(0))
    assert run_cell(page, 1) == "2"


@pytest.mark.drill
def test_closing_the_tab_in_mid_run_leaves_the_job_at_work_and_its_state_is_shown(lab, open_notebook, keep, survivors):
    """The reopened notebook shows what was saved. What comes while no tab is open is in the job's log alone."""
    enough = lab.runs / "enough"
    name = lab.write("closed.ipynb", TWO_NODES.format(enough=enough), LOG).name
    page = open_notebook(name)
    start_job(page)
    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    page.close()
    page = open_notebook(name)
    assert "step 3" in page.evaluate(TEXT.format(0))
    job = find_job(lab, survivors)
    keep(page, "reopened")
    beside = open_notebook(lab.write("beside.ipynb", JOBS, LOG).name)
    assert job in run_cell(beside, 0)
    step = find_step(run_cell(beside, 1))
    wait_for(lambda: find_step(run_cell(beside, 1)) > step)
    keep(beside, "beside")
    # The kernel's state is not asked for: a kernel that is asked in mid-cell says "idle" when it has answered.
    enough.touch()
    page.call("Page.bringToFront")
    page.wait_for("labs.kernel === 'idle'")
    assert sorted(run_cell(page, 1).splitlines()[-2:]) == [f"node{n}: [rank {n}] all steps done" for n in (0, 1)]
    assert_gone(job, 10.0)
