"""Spelling, by codespell's list of common slips: the notebooks, the documents, and every comment and docstring."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PACKAGES = ("lab_common", "lab_utils", "nodelaunch", "course", "hosting")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "website", "notebooks/scripts", "data", "docs", "packages")
# To and fro; and a hash that one letter tells from another.
NO_SLIPS = "fro,abd,sme"


def find_slips(*paths: Path) -> list[str]:
    """Runs codespell on files; returns a line for each slip: file, line, slip and the probable intention."""
    command = [sys.executable, "-m", "codespell_lib", f"--ignore-words-list={NO_SLIPS}", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300).stdout.splitlines()


def list_texts() -> list[Path]:
    found = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md")]
    return found + [
        path for path in ROOT.iterdir() if path.suffix in (".py", ".md", ".toml") or path.name == "Makefile"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_slip(path, tmp_path):
    # Not the file itself: among its pictures' letters there are slips by chance.
    text = tmp_path / f"{path.stem}.md"
    text.write_text("\n\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells), encoding="utf-8")
    assert not (slips := find_slips(text)), "\n".join(["", *slips])


def test_no_other_text_has_a_slip():
    texts = list_texts()
    assert {"README.md", "conftest.py", "test_spelling.py", "train_ddp.py"} <= {path.name for path in texts}
    assert not (slips := find_slips(*texts)), "\n".join(["", *slips])


def test_a_slip_is_found(tmp_path):
    path = tmp_path / "text.md"
    path.write_text("a gradient is " + "received".replace("ei", "ie"))
    (slip,) = find_slips(path)
    assert "text.md:1" in slip and "received" in slip
