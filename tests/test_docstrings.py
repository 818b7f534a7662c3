"""Docstrings say in their first words what a thing is or does: "True if …", and not "Whether …"."""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_BEGINNINGS = {"Says", "Whether", "Of", "What", "Who", "Where", "Tells"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def find_faults(source: str) -> list[str]:
    """Returns the line and the first line of text of each docstring that begins with one of the words."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    texts = [(node.body[0].lineno, ast.get_docstring(node)) for node in nodes if ast.get_docstring(node)]
    return [f"{line}: {text.splitlines()[0]}" for line, text in texts if text.split()[0].rstrip(",:") in NO_BEGINNINGS]


def test_docstrings_begin_with_what_a_thing_is_or_does():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"conftest.py", "hosting/limits.py", "notebooks/scripts/by_hand.py"} <= set(names)
    there = [name for name in names if (ROOT / name).is_file()]
    faults = [f"{name}:{fault}" for name in there for fault in find_faults((ROOT / name).read_text(encoding="utf-8"))]
    assert not faults, "\n".join(["", *faults])
