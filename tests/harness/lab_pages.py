"""Drives JupyterLab in a browser for the tests, and judges what a notebook shows there."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat

from course import workspace
from harness.browser import Page
from harness.notebook_rules import find_exercise_scripts, find_solutions

# What JupyterLab shows in the place of an output that it cannot render.
REFUSALS = ("Error displaying widget", "Loading widget...", "Error rendering", "Javascript Error:")
CELL = 600.0  # seconds without a new line or a new cell: tests run beside other work, too
PROGRESS = "application/vnd.jupyter.widget-view+json"

# What the tests say to JupyterLab's application, which the server's configuration exposes. A click on a menu would race
# the kernel: "Run All Cells" of a session that is not ready yet runs nothing.
HELPERS = """
window.labs = {
  async open(path) {
    await jupyterapp.restored;
    labs.panel = await jupyterapp.commands.execute('docmanager:open', {path, factory: 'Notebook'});
    await labs.panel.context.ready;
    await labs.panel.sessionContext.ready;
    // A bar that ends with its loop is gone from the page afterwards, so it has to be seen while it is there.
    labs.bars = {};
    new MutationObserver(changes => changes.forEach(change => change.addedNodes.forEach(node => {
      const bars = node.querySelectorAll?.('.widget-hprogress .progress-bar').length;
      const cell = bars && labs.cells.findIndex(one => one.node.contains(node));
      if (bars) labs.bars[cell] = (labs.bars[cell] ?? 0) + bars;
    }))).observe(labs.panel.node, {childList: true, subtree: true});
  },
  get kernel() { return labs.panel.sessionContext.session?.kernel?.status; },
  get cells() { return labs.panel.content.widgets; },
  // Another text as soon as another cell runs, or has run, or has printed more.
  get progress() {
    const counts = labs.cells.map(cell => cell.model.executionCount);
    const waiting = labs.cells.filter(cell => cell.model.outputs && cell.model.executionCount === null);
    return `${counts} ${waiting.map(cell => JSON.stringify(cell.model.outputs.toJSON()).length)}`;
  },
  // The cell that stopped "Run All", and the name of its error.
  get stop() {
    const find = cell => (cell.model.outputs?.toJSON() ?? []).find(output => output.output_type === 'error')?.ename;
    const index = labs.cells.findIndex(find);
    return index < 0 ? null : [index, find(labs.cells[index])];
  },
  rewrite(index, source) {
    labs.panel.content.activeCellIndex = index;
    labs.cells[index].model.sharedModel.setSource(source);
  },
  start(command) {
    labs.ended = null;
    jupyterapp.commands.execute(command).then(() => { labs.ended = 'well'; }, error => { labs.ended = String(error); });
  },
  async look(index) {
    const cell = labs.cells[index].node;
    const find = selector => [...cell.querySelectorAll(selector)];
    await labs.panel.content.scrollToItem(index, 'center');
    await Promise.all(find('img').map(image => image.decode().catch(() => null)));
    await new Promise(requestAnimationFrame);
    const all = {opacityProperty: true, visibilityProperty: true, contentVisibilityAuto: true};
    const shows = node => {
      const {width, height} = node.getBoundingClientRect();
      return node.checkVisibility(all) && width > 0 && height > 0 && (node.naturalWidth ?? 1) > 0;
    };
    return {
      text: cell.innerText,
      figures: find('.jp-OutputArea-output :is(img, svg)').map(shows),
      pictures: find('.jp-MarkdownOutput img').map(shows),
      bars: find('.jp-OutputArea-output .widget-hprogress .progress-bar').map(shows),
    };
  },
};
void 0
"""


def open_notebook(page: Page, path: str) -> None:
    """Opens a notebook in a page that has just gone to JupyterLab, and waits until its kernel is ready."""
    page.wait_for("window.jupyterapp !== undefined", timeout=120)
    page.evaluate(HELPERS)
    page.evaluate(f"labs.open({json.dumps(path)})", timeout=120)


def say_in_dialog(page: Page, text: str | None = None) -> None:
    """Waits for a dialog of JupyterLab, fills in its field if there is a text, and confirms."""
    page.wait_for("!!document.querySelector('.jp-Dialog .jp-mod-accept')")
    if text is not None:
        page.evaluate(f"void (document.querySelector('.jp-Dialog input').value = {json.dumps(text)})")
    page.evaluate("void document.querySelector('.jp-Dialog .jp-mod-accept').click()")
    page.wait_for("!document.querySelector('.jp-Dialog')")


def run_all(page: Page, command: str = "notebook:run-all-cells") -> None:
    page.wait_for("labs.kernel === 'idle'")
    page.evaluate(f"labs.start({command!r})")
    seen, end = None, 0.0
    while not page.evaluate("labs.ended && labs.kernel === 'idle'"):
        if (progress := page.evaluate("labs.progress")) != seen:
            seen, end = progress, time.monotonic() + CELL
        assert time.monotonic() < end, f"a cell neither ended nor printed within {CELL:.0f} s"
        time.sleep(0.2)
    page.evaluate("jupyterapp.commands.execute('docmanager:save')")


def go_the_learner_s_way(page: Page, path: Path, folder: Path) -> list[str]:
    """Runs all cells; when a stub stops the run, writes the solution in its place, and continues from there.

    A cell that checks a script whose copy has gaps is a stub, too: the original script replaces the copy.
    Returns the ids of the stub cells.
    """
    cells, met = nbformat.read(path, as_version=4).cells, []
    run_all(page)
    while stop := page.evaluate("labs.stop"):
        cell, error = cells[stop[0]], stop[1]
        # A stub that is not checked in its own cell says the second.
        assert error in ("OpenError", "NotImplementedError") and cell.id not in met, f"{cell.id} says {error}"
        for name in find_exercise_scripts(cell.source):
            shutil.copyfile(path.parent / name, folder / name)
        page.evaluate(f"labs.rewrite({stop[0]}, {json.dumps(cell.source)})")
        met.append(cell.id)
        run_all(page, "notebook:run-all-below")
    return met


def find_stubs(path: Path) -> list[str]:
    """Returns the cells of a lab that are stubs in the learner's copy, or check a script that has gaps there."""
    notebook = nbformat.read(path, as_version=4)
    return [
        cell.id
        for cell in notebook.cells
        if cell.id in find_solutions(notebook)
        or any(workspace.BEGIN in (path.parent / name).read_text() for name in find_exercise_scripts(cell.source))
    ]


def find_faults(page: Page, path: Path) -> list[str]:
    """Describes what is wrong with a notebook that was run and saved: on disk, and in the browser."""
    faults, seen = [], page.evaluate("labs.bars")
    for index, cell in enumerate(nbformat.read(path, as_version=4).cells):
        shown = page.evaluate(f"labs.look({index})")
        judge = judge_code if cell.cell_type == "code" else judge_prose
        words = [f"it shows {word!r}" for word in REFUSALS if word in shown["text"]]
        faults += [f"{cell.id}: {fault}" for fault in [*judge(cell, shown, seen.get(str(index), 0)), *words]]
    return faults


def judge_code(cell: nbformat.NotebookNode, shown: dict, bars: int) -> Iterator[str]:
    """Compares a cell's outputs on disk with the page; ``bars`` are the progress bars seen while it ran."""
    if cell.execution_count is None:
        yield "it was not run"
    data = [output.get("data", {}) for output in cell.outputs]
    figures, widgets = (sum(mime in " ".join(one) for one in data) for mime in ("image/", PROGRESS))
    yield from (f"it raised {output.ename}" for output in cell.outputs if output.output_type == "error")
    if len(shown["figures"]) < figures or not all(shown["figures"]):
        yield f"{figures} figures are stored, visible are {shown['figures']}"
    if bars < widgets or not all(shown["bars"]):
        yield f"{widgets} progress bars are stored, {bars} were seen, visible are {shown['bars']}"


def judge_prose(cell: nbformat.NotebookNode, shown: dict, _: int) -> Iterator[str]:
    """Compares the pictures that a text cell names with those on the page."""
    pictures = len(re.findall(r"!\[|<img ", cell.source))
    if len(shown["pictures"]) < pictures or not all(shown["pictures"]):
        yield f"{pictures} pictures are named, visible are {shown['pictures']}"
