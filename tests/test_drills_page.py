"""The gate of tests/drills.md: every drill and kind has its rows, and every row names a test that exists."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DRILLS, KINDS = [str(number) for number in range(1, 51)], list("ABCDEFGHIJ")
# Rows of each drill and kind, counted when the page was written; fewer mean that a case was lost.
ROWS = dict.fromkeys(DRILLS, 1) | dict(zip(KINDS, (4, 3, 4, 3, 8, 16, 4, 8, 2, 4), strict=True))
ROWS |= {str(number): 2 for number in (3, 5, 6, 7, 9, 16, 18, 20, 21, 22, 23, 25, 34, 42, 46, 48, 49, 50)}
ROWS |= {str(number): 3 for number in (8, 10, 24, 26, 28, 30, 35, 39, 47)} | {"31": 4, "27": 5}


@functools.cache
def read_tests(path: Path) -> tuple[set[str], list[str]]:
    """The test functions of a file, and its texts, among them the names of cases."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    return names, [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def find_fault(test: str, root: Path = ROOT) -> str:
    """The fault of the last cell of a row; empty if it names one test that exists."""
    found = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)(?:\[(.+)\])?`", test)
    if not found:
        return f"names no test: {test!r}"
    path, name, case = root / found[1], found[2], found[3]
    if not path.is_file():
        return f"there is no {found[1]}"
    names, texts = read_tests(path)
    if name not in names:
        return f"{found[1]} has no {name}"
    return f"{name} has no case {case}" if case and case not in texts else ""


def read_rows(page: str) -> list[list[str]]:
    """The cells of each row of the tables, which begin with a drill's number or a kind's letter."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if not re.fullmatch(r"\s*(drill|kind|-+)\s*", row[0])]


def find_faults(page: str, root: Path = ROOT) -> list[str]:
    """The faults of the page: lost rows, unknown numbers, empty cells, tests that do not exist."""
    rows = read_rows(page)
    firsts = [row[0] for row in rows]
    faults = [f"{first} has lost a row" for first, count in ROWS.items() if firsts.count(first) < count]
    faults += [f"{first} is neither a drill nor a kind" for first in firsts if first not in ROWS]
    for row in rows:
        if len(row) != (3 if row[0] in DRILLS else 4) or not all(row[:-1]):
            faults.append(f"{row[0]}: a cell is missing or empty")
        elif fault := find_fault(row[-1], root):
            faults.append(f"{row[0]}: {fault}")
    return faults


PAGE = (ROOT / "tests" / "drills.md").read_text(encoding="utf-8")


def test_every_drill_and_every_kind_names_a_test_that_exists():
    assert not (faults := find_faults(PAGE)), "\n".join(["", *faults])
