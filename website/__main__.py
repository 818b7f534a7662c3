"""``python -m website``: the course as a web site, out of the README, the committed notebooks and the docstrings.

It needs Sphinx, which ``make site`` installs in ``.engines/sphinx``. No notebook is run. The pages need neither a
server nor a network, and can lie below any path.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import nbformat
from sphinx.cmd.build import main as build

from lab_common import checkout, read_path
from website.pages import write_sources
from website.slides import write_slides

# What the theme leaves open for those who use a screen reader: each part of a page has a name and a rank of its own.
MENDED = {
    '<div id="search-results">': '<h1>Search</h1><div id="search-results">',
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="All pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="This page">',
}


def mend(folder: Path) -> None:
    """Makes each page of a folder accessible where Sphinx and its theme did not."""
    for page in folder.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for old, new in MENDED.items():
            text = text.replace(old, new)
        page.write_text(text, encoding="utf-8")


def main() -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m website", description=__doc__.partition("\n")[0])
    parser.add_argument("--solutions", action="store_true", help="show the exercises' solutions, for teachers")
    where = "default: runs/site, with solutions runs/site-solutions"
    parser.add_argument("--into", type=read_path, metavar="FOLDER", help=where)
    arguments = parser.parse_args()
    usual = Path("runs", "site-solutions" if arguments.solutions else "site")
    start, root, into = time.monotonic(), checkout(), (arguments.into or usual).absolute()
    sources, pages = into / "sources", into / "html"
    write_sources(root, sources, solutions=arguments.solutions)
    shutil.rmtree(pages, ignore_errors=True)
    # A warning is a mistake: a link that leads nowhere, a docstring that is no reStructuredText.
    command = ["-q", "-E", "-W", "--keep-going", "-b", "html", "-d", str(into / "doctrees"), str(sources), str(pages)]
    if status := build(command):
        return status
    mend(pages)
    labs = [nbformat.read(path, as_version=4) for path in sorted((root / "notebooks").glob("[0-9]*.ipynb"))]
    (pages / "slides").mkdir()
    (pages / "slides" / "labs.html").write_text(write_slides(labs), encoding="utf-8")
    size = sum(path.stat().st_size for path in pages.rglob("*") if path.is_file())
    print(f"{pages / 'index.html'}: {size / 1e6:.1f} MB, made in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
