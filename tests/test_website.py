"""The web site: converted notebooks, the slides; and the whole site in a browser."""

import re
import subprocess
from html import unescape

import nbformat
import pytest
from harness.browser import Browser
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course.parts import PARTS
from course.workspace import make_stub
from website.front import write_front
from website.pages import find_solved, make_page, write_contents, write_sources
from website.slides import read_slide, write_slides

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SOLVED = "def double(x):\n    ### BEGIN SOLUTION\n    return 2 * x\n    ### END SOLUTION"


@pytest.fixture
def notebooks(root):
    return sorted((root / "notebooks").glob("[0-9]*.ipynb"))


def make_lab(**changes):
    """Returns a small notebook with all parts of a lab; ``changes`` replaces the sources of cells by their id."""
    figure = new_output("display_data", {"image/png": PNG, "text/plain": "<Figure>"})
    cells = [
        new_markdown_cell(
            "# Lab 9 · Doubling\n\n**How fast is\nit?**\n\n| | |\n|---|---|\n| **You need** | a CPU |", id="title"
        ),
        new_code_cell(SOLVED, id="solved", outputs=[new_output("stream", text="✔ right")], execution_count=1),
        new_markdown_cell("## Predict\n\nA hint. **Guess: how fast** is `2 * x`? Write it down.", id="predict"),
        new_code_cell("guess = None", id="guess"),
        new_markdown_cell("Was it so?", id="read"),
        new_code_cell(
            "plot()",
            id="plot",
            outputs=[figure],
            execution_count=2,
            metadata={"alt": "Bars, and a <guess>.", "tags": ["slide"]},
        ),
        new_markdown_cell(
            "## What you saw\n\n* One\n  thing: `a < b`.\n* [Two](x.md).\n* Three.\n* Four.\n\n## Further reading",
            id="end",
        ),
    ]
    for cell in cells:
        cell.source = changes.get(cell.id, cell.source)
    return new_notebook(cells=cells)


def test_a_page_has_stubs_and_no_output_of_what_a_solution_printed():
    lab = make_lab()
    page = {cell.id: cell for cell in make_page(lab, "09_doubling.ipynb").cells}
    assert "2 * x" not in page["solved"].source and "YOUR CODE HERE" in page["solved"].source
    assert page["solved"].outputs == [] and page["plot"].outputs == lab.cells[5].outputs
    assert page["plot"].metadata["mystnb"] == {"image": {"alt": "Bars, and a <guess>."}}
    title = page["title"].source
    assert (
        title.startswith("# Lab 9 · Doubling\n\n```{admonition} Run it yourself\n") and "`09_doubling.ipynb`" in title
    )
    assert "stubs" in title and title.endswith("| a CPU |")
    assert lab.cells[5].metadata["alt"] == "Bars, and a <guess>.", "the notebook itself stays as it is"


def test_a_teachers_page_has_the_solutions_and_what_they_printed():
    page = {cell.id: cell for cell in make_page(make_lab(), "09_doubling.ipynb", solutions=True).cells}
    assert "2 * x" in page["solved"].source and page["solved"].outputs[0].text == "✔ right"
    assert "solutions are shown" in page["title"].source


def test_each_lab_has_a_slide(notebooks):
    for path in notebooks:
        slide = read_slide(nbformat.read(path, as_version=4))
        assert len(slide["findings"]) == 3 and slide["ask"] and slide["alt"], path.name
        assert slide["question"].endswith("?") and slide["title"].startswith("Lab "), path.name


def test_a_slide_is_question_figure_three_findings_and_what_to_ask():
    slide = read_slide(make_lab())
    assert slide["question"] == "How fast is it?" and slide["figure"] == PNG
    assert slide["findings"] == ["One thing: `a < b`.", "[Two](x.md).", "Three."]
    assert slide["ask"] == ["How fast is `2 * x`?"], "not the question of the cell after it"
    html = write_slides([make_lab()])
    assert "One thing: <code>a &lt; b</code>." in html and "<li>Two.</li>" in html and "x.md" not in html
    assert 'alt="Bars, and a &lt;guess&gt;."' in html and f"base64,{PNG}" in html
    evil = write_slides([make_lab(end="## What you saw\n\n* <script>alert(1)</script>\n* B.\n* C.")])
    assert "<script" not in evil


def test_the_first_page_has_the_promise_and_a_card_for_each_part(root, notebooks, tmp_path):
    front = write_front(root)
    assert front.split("\n\n")[1] == (root / "README.md").read_text().split("\n\n")[1]
    assert "figures/learner.png" in front
    cards = re.findall(r"<section><h2>([^<]+)</h2><p>[^<]+</p><ul>\n(.*?)</ul></section>", front, re.DOTALL)
    assert [title for title, _ in cards] == [part.title for part in PARTS]
    rows = [row for _, rows in cards for row in re.findall(r'<a href="(.+?)\.html">', rows)]
    assert rows == [f"notebooks/{path.stem}" for path in notebooks]
    assert len(re.findall(r"<small>\d+ minutes, \d\.\d GiB of memory</small>", front)) == len(notebooks)
    contents = write_contents([path.stem for path in notebooks])
    assert ":caption: Tools of the trade" in contents and "notebooks/00_start_here\n" in contents
    assert "api/nodelaunch" in contents and "hosting/README" in contents and "docs/install" in contents
    (tmp_path / "README.md").write_text((root / "README.md").read_text().replace("- [0 · ", "- [Lab 0 · "))
    with pytest.raises(ValueError, match="no line for lab 0"):
        write_front(tmp_path)


@pytest.mark.parametrize("solutions", [False, True])
def test_all_pages_are_written_and_solutions_only_where_they_are_wanted(root, tmp_path, solutions):
    folder = tmp_path / "sources"
    (folder / "notebooks").mkdir(parents=True)
    (folder / "notebooks" / "old.ipynb").touch()
    write_sources(root, folder, solutions=solutions)
    labs, scripts = (sorted((folder / "notebooks").glob(pattern)) for pattern in ("*.ipynb", "scripts/*.py"))
    assert len(labs) >= 15 and len(scripts) > 20
    texts = [path.read_text(encoding="utf-8") for path in (*labs, *scripts)]
    assert any("### BEGIN SOLUTION" in text for text in texts) == solutions
    assert any("# YOUR CODE HERE" in text for text in texts) != solutions
    assert {"index.md", "docs", "slides.md", "conf.py", "SECURITY.md"} <= {path.name for path in folder.iterdir()}
    assert "automodule:: lab_utils.timing" in (folder / "api" / "lab_utils.md").read_text()


# The site as `make site` makes it.


@pytest.fixture(scope="module")
def site(sphinx, root, tmp_path_factory):
    """The folder of the finished pages."""
    into = tmp_path_factory.mktemp("site")
    command = [sphinx, "-m", "website", f"--into={into}"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return into / "html"


CHECK = """axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map(
    one => one.id + ': ' + one.nodes.slice(0, 2).map(node => node.html.slice(0, 200)).join(' ')))"""


def test_the_pages_are_accessible_and_fit_a_phone(site, sphinx, chromium, tmp_path):
    (axe,) = sphinx.parent.parent.glob("lib/python*/site-packages/axe_core_python/axe.min.js")
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    assert len(pages) > 20
    few = ["index.html", "notebooks/05_ddp_two_nodes.html", "api/nodelaunch.html", "slides/labs.html"]
    shown = [(name, 390, "light") for name in pages]
    shown += [(name, width, theme) for name in few for width, theme in ((1400, "light"), (390, "dark"))]
    faults = []
    with Browser(tmp_path / "browser") as browser:
        for name, width, theme in shown:
            page = browser.open((site / name).as_uri())
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            page.call("Emulation.setDeviceMetricsOverride", **size)
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            page.wait_for("document.readyState === 'complete'")
            wide, seen = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            page.evaluate(axe.read_text(encoding="utf-8") + "; 1")
            found = page.evaluate(CHECK, timeout=120) + [f"{wide} pixels wide"] * (wide > seen)
            faults += [f"{name}, {width} wide, {theme}: {fault}" for fault in found]
            page.close()
    assert not faults, "\n".join(["", *faults])


def test_no_page_shows_a_solution(site, root):
    """Neither in a cell nor in the output of a later cell."""
    solved, pages = find_solved(root / "notebooks"), sorted((site / "notebooks").glob("*.html"))
    assert len(solved) > 50 and len(pages) >= 16
    for page in pages:
        path = root / "notebooks" / f"{page.stem}.ipynb"
        stub = make_stub(nbformat.read(path, as_version=4), name=path.name)
        own = "\n".join(cell.source for cell in stub.cells)
        text = unescape(re.sub("<[^>]*>", "", page.read_text(encoding="utf-8")))
        for block in solved:
            assert not all(line in text for line in block) or all(line in own for line in block), (page.name, block)
