"""Writes what Sphinx reads: the README's parts, the guides, each lab with its stored outputs, and stubs for the API."""

from __future__ import annotations

import copy
import html
import importlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course.notebooks import BEGIN, END
from course.parts import PARTS
from course.workspace import FOLDERS, make_script_stub, make_stub
from website.front import write_front

# Pages that are files of the repository as they are; their links to one another hold in the copy.
GUIDES = ("README.md", "docs/where-to-run.md", "docs/start_anywhere.ipynb", "docs/install.md", "docs/settings.md")
GUIDES += (
    "docs/two-nodes.md",
    "docs/race.md",
    "docs/from-your-slides.md",
    "data/README.md",
    "packages/nodelaunch/README.md",
)
FOR_TEACHERS = ("hosting/README.md", "hosting/ISOLATION.md", "hosting/RACE.md", "hosting/hub/README.md")
FOR_TEACHERS += ("hosting/kubernetes/README.md",)
FOR_MAINTAINERS = ("CONTRIBUTING.md", "SECURITY.md", "docs/performance.md", "data/reference/README.md")
PAGES = GUIDES + FOR_TEACHERS + FOR_MAINTAINERS
# What they link to besides.
FILES = ("hosting/kubernetes/values.yaml",)
MODULES = {
    "lab_utils": (
        "data",
        "models",
        "training",
        "timing",
        "plots",
        "machine",
        "parallel",
        "board",
        "wandb_runs",
    ),
    "nodelaunch": (),
    "lab_common": (),
}
RUN = """```{{admonition}} Run it yourself
Get the course's folder (by `git clone` and its address, or from your teacher), type `make lab` in it, and open
`{name}`. The lab's own figures are from one machine; yours will show other times. What others published is marked.
{solutions}
```
"""

# What an output shows of a server that ran beside the lab, such as TensorBoard.
LIVE = re.compile(r"https?://(127\.0\.0\.1|localhost)\b")
# Characters of a solution's line, and of all of them, that give it away: "return total" may stand anywhere.
SHORTEST, TELLING = 12, 30
SLIDES = """# Slides

For teachers: one page a lab, with its question, a figure, what it finds, and what to ask the class. The pages are made
from the notebooks, and print in landscape.

<p><a href="slides/labs.html">Open the slides</a></p>
"""


def write_sources(root: Path, folder: Path, *, solutions: bool = False) -> None:
    """Writes all pages of the site as Sphinx reads them.

    Args:
        root: The checkout.
        folder: The target; its old content is removed first.
        solutions: Shows the exercises' solutions in place of stubs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name in PAGES + FILES:
        _write(folder / name, (root / name).read_text(encoding="utf-8"))
    notebooks = sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    solved = [] if solutions else find_solved(root / "notebooks")
    for path in notebooks:
        page = make_page(nbformat.read(path, as_version=4), path.name, solutions=solutions, solved=solved)
        _write(folder / "notebooks" / path.name, nbformat.writes(page))
    for name in FOLDERS:
        shutil.copytree(
            root / "notebooks" / name, folder / "notebooks" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    if not solutions:
        for script in (folder / "notebooks" / "scripts").glob("*.py"):
            _write(script, make_script_stub(script.read_text(encoding="utf-8"), name=script.name))
    here = Path(__file__).parent
    shutil.copy(here / "conf.py", folder)
    shutil.copytree(here / "static", folder / "static")
    for package, modules in MODULES.items():
        _write(folder / "api" / f"{package}.md", write_api(package, modules))
    _write(folder / "slides.md", SLIDES)
    _write(folder / "index.md", write_front(root) + write_contents([path.stem for path in notebooks]))


def find_solved(folder: Path) -> list[tuple[str, ...]]:
    """Returns the lines of each solution in the notebooks and scripts of a folder, without those that are too short."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("scripts/*.py")]
    for path in folder.glob("[0-9]*.ipynb"):
        texts += [cell.source for cell in nbformat.read(path, as_version=4).cells]
    found = [
        text.strip().splitlines() for text in texts for text in re.findall(f"{BEGIN}\n(.*?){END}", text, re.DOTALL)
    ]
    blocks = (tuple(line.strip() for line in lines if len(line.strip()) >= SHORTEST) for lines in found)
    return [block for block in blocks if len("".join(block)) >= TELLING]


def make_page(
    notebook: NotebookNode, name: str, *, solutions: bool = False, solved: Sequence[tuple[str, ...]] = ()
) -> NotebookNode:
    """Returns a notebook as a page: without solutions, the outputs of their cells, and outputs that show a solution.

    A figure's text for who cannot see it, ``alt`` in its cell's metadata, goes to where myst-nb looks for it.

    Args:
        notebook: With its stored outputs.
        name: Its file's.
        solutions: Shows all.
        solved: Solutions of all labs, as :func:`find_solved` returns them.
    """
    page = copy.deepcopy(notebook) if solutions else make_stub(notebook, name=name)
    # What the learner has in this lab anyway, such as lab 3, which says what lab 2 asks for, gives nothing away.
    own = "\n".join(cell.source for cell in page.cells)
    solved = [block for block in solved if not _shows(own, block)]
    for cell, before in zip(page.cells, notebook.cells, strict=True):
        if cell.cell_type == "code" and cell.source == before.source:
            cell.outputs = [_freeze(output, solved) for output in before.outputs]
            cell.execution_count = before.execution_count
        if alt := cell.metadata.pop("alt", None):
            cell.metadata["mystnb"] = {"image": {"alt": alt}}
    title = page.cells[0]
    head, _, rest = title.source.partition("\n")
    words = "The solutions are shown." if solutions else "The exercises have stubs here, as in your copy."
    title.source = f"{head}\n\n{RUN.format(name=name, solutions=words)}\n{rest.lstrip()}"
    return page


def _freeze(output: NotebookNode, solved: Sequence[tuple[str, ...]]) -> NotebookNode:
    """Returns an output as it is, or words in the place of a live page or of somebody's answer."""
    data = output.get("data", {})
    page = data.get("text/html", "")
    if LIVE.search(page):
        return _say("(Here the lab shows a live page.)")
    text = "\n".join([output.get("text", ""), data.get("text/plain", ""), html.unescape(re.sub("<[^>]*>", "", page))])
    if any(_shows(text, block) for block in solved):
        return _say("(Here the lab shows lines of your own answer.)")
    return output


def _shows(text: str, solution: Sequence[str]) -> bool:
    return all(line in text for line in solution)


def _say(words: str) -> NotebookNode:
    return nbformat.v4.new_output("display_data", {"text/plain": words})


def write_contents(labs: list[str]) -> str:
    """Returns the start page's table of contents, which makes the menu beside each page."""
    parts = {part.title: [f"notebooks/{labs[lab]}" for lab in part.labs if lab < len(labs)] for part in PARTS}
    parts |= {
        "Guides": ["The README <README>", *(name.rpartition(".")[0] for name in GUIDES[1:])],
        "For teachers": ["slides", *(name.rpartition(".")[0] for name in FOR_TEACHERS)],
        "For maintainers": [name.rpartition(".")[0] for name in FOR_MAINTAINERS],
        "Reference": [f"api/{package}" for package in MODULES],
    }
    blocks = [
        "\n".join(("```{toctree}", f":caption: {part}", ":hidden:", *pages, "```")) for part, pages in parts.items()
    ]
    return "\n\n" + "\n\n".join(blocks) + "\n"


def write_api(package: str, modules: tuple[str, ...]) -> str:
    """Returns the page of a package: its public names with their docstrings, module by module."""
    lines = [f"# {package}", ""]
    for module in (".".join((package, name)) for name in modules) if modules else (package,):
        # One that is divided into files says which names of theirs are public.
        divided = hasattr(importlib.import_module(module), "__all__")
        lines += [f"## {module}", ""] if modules else []
        lines += ["```{eval-rst}", f".. automodule:: {module}", "   :members:"]
        lines += ["   :imported-members:"] * divided + ["```", ""]
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
