"""Writes what Sphinx reads: the README's parts, the guides, each lab with its stored outputs, and stubs for the API."""

from __future__ import annotations

import copy
import importlib
import re
import shutil
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course.workspace import FOLDERS, make_script_stub, make_stub

# Pages that are files of the repository as they are; their links to one another hold in the copy.
GUIDES = ("SECURITY.md", "CONTRIBUTING.md", "data/README.md", "hosting/README.md")
GUIDES += ("hosting/RACE.md", "hosting/hub/README.md", "hosting/kubernetes/README.md", "benchmarks/gpu/PATHS.md")
# What they link to besides.
FILES = ("hosting/kubernetes/values.yaml",)
# The first section of the README that is not on the start page.
REST = "## How a lab works"
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
        "plan",
    ),
    "nodelaunch": (),
}
RUN = """```{{admonition}} Run it yourself
In a clone of the repository type `make lab`, and open `{name}`. What stands here was measured on one machine; yours
will show other figures. {solutions}
```
"""

# What an output shows of a server that ran beside the lab, such as TensorBoard.
LIVE = re.compile(r"https?://(127\.0\.0\.1|localhost)\b")
SLIDES = """# Slides

For teachers: one page a lab, with its question, a figure, what it finds, and what to ask the class. The pages are made
from the notebooks, and print in landscape.

<p><a href="slides/labs.html">Open the slides</a></p>
"""


def write_sources(root: Path, folder: Path, *, solutions: bool = False) -> None:
    """Writes all pages of the site as Sphinx reads them.

    Args:
        root: The checkout.
        folder: Where to; what lies there is removed first.
        solutions: Shows the exercises' solutions in place of stubs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name in GUIDES + FILES:
        _write(folder / name, (root / name).read_text(encoding="utf-8"))
    notebooks = sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    for path in notebooks:
        page = make_page(nbformat.read(path, as_version=4), path.name, solutions=solutions)
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
    start, guide = split_readme((root / "README.md").read_text(encoding="utf-8"))
    _write(folder / "guide.md", guide)
    _write(folder / "slides.md", SLIDES)
    _write(folder / "index.md", start + write_contents([path.stem for path in notebooks]))


def make_page(notebook: NotebookNode, name: str, *, solutions: bool = False) -> NotebookNode:
    """Returns a notebook as a page: without solutions and without the outputs of the cells that had one.

    A figure's text for who cannot see it, ``alt`` in its cell's metadata, goes to where myst-nb looks for it.
    """
    page = copy.deepcopy(notebook) if solutions else make_stub(notebook, name=name)
    for cell, before in zip(page.cells, notebook.cells, strict=True):
        if cell.cell_type == "code" and cell.source == before.source:
            cell.outputs, cell.execution_count = [_freeze(output) for output in before.outputs], before.execution_count
        if alt := cell.metadata.pop("alt", None):
            cell.metadata["mystnb"] = {"image": {"alt": alt}}
    title = page.cells[0]
    head, _, rest = title.source.partition("\n")
    words = "The solutions are shown." if solutions else "The exercises have stubs here, as in your copy."
    title.source = f"{head}\n\n{RUN.format(name=name, solutions=words)}\n{rest.lstrip()}"
    return page


def _freeze(output: NotebookNode) -> NotebookNode:
    """Returns an output as it is, or words in the place of a live page."""
    if LIVE.search(output.get("data", {}).get("text/html", "")):
        return nbformat.v4.new_output("display_data", {"text/plain": "(Here the lab shows a live page.)"})
    return output


def split_readme(text: str) -> tuple[str, str]:
    """Returns the README's start, up to the first section of its guide, and that guide as a page of its own."""
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    start, rest = text.split(REST)
    return start, f"# Working with the labs\n\n{REST}{rest}"


def write_contents(labs: list[str]) -> str:
    """Returns the start page's table of contents, which makes the menu beside each page."""
    parts = {
        "Labs": [f"notebooks/{lab}" for lab in labs],
        "Guides": ["guide", "slides", *(name.removesuffix(".md") for name in GUIDES)],
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
