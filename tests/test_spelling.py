"""Spelling, by codespell's list of common slips: the notebooks, the documents, and every comment and docstring."""

import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PACKAGES = ("lab_common", "lab_utils", "nodelaunch", "course", "hosting")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "website", "notebooks/scripts", "data", "docs", "packages")
# To and fro; and a hash that one letter tells from another.
NO_SLIPS = "fro,abd,sme"


def list_texts() -> list[Path]:
    found = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md")]
    return found + [
        path for path in ROOT.iterdir() if path.suffix in (".py", ".md", ".toml") or path.name == "Makefile"
    ]


def test_no_text_has_a_slip(tmp_path):
    texts = list_texts()
    assert {"README.md", "conftest.py", "test_spelling.py", "train_ddp.py"} <= {path.name for path in texts}
    for path in NOTEBOOKS:
        # Not the file itself: among its pictures' letters there are slips by chance.
        text = "\n\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        (tmp_path / f"{path.stem}.md").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "codespell_lib", f"--ignore-words-list={NO_SLIPS}", *texts, tmp_path]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stdout) == (0, ""), found.stdout + found.stderr
