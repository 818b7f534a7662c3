"""The labs' own solutions, whole or with a mistake edited in, and what a check compares them with."""

import ast
import contextlib
import linecache
import sys
from pathlib import Path

from course import check
from course.check.judge import Expected
from course.notebooks import read_notebook
from course.workspace import make_script_stub

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def load_answer(number, *edits):
    """Returns what the notebook's cell hands to ``check.exercise(number, …)``, with each ``(old, new)`` replaced once.

    Of the cells before it, only imports, functions, classes and constants are run.
    """
    lab = int(number.partition(".")[0])
    (path,) = NOTEBOOKS.glob(f"{lab:02d}_*.ipynb")
    names = {"__name__": f"answer_{number}"}
    if str(NOTEBOOKS) not in sys.path:
        sys.path.append(str(NOTEBOOKS))  # a notebook imports its scripts
    for position, cell in enumerate(read_notebook(path).cells):
        if cell.cell_type != "code":
            continue
        source = cell.source
        handed = f'check.exercise("{number}", ' in source
        if handed:
            for old, new in edits:
                assert source.count(old) >= 1, f"the solution of {number} has no {old!r}"
                source = source.replace(old, new, 1)
        elif source.startswith("%%"):
            continue
        lines = [line if not line.lstrip().startswith(("%", "!")) else "pass" for line in source.splitlines()]
        _define("\n".join(lines), f"/cells/{number}-{position}.py", names)
        if handed:
            calls = (node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Call))
            (answer,) = (call.args[1] for call in calls if ast.unparse(call.func) == "check.exercise")
            # The path of a script is as seen from the notebook; the script there has its solution.
            return str(NOTEBOOKS / answer.value) if isinstance(answer, ast.Constant) else names[ast.unparse(answer)]
    raise AssertionError(f"no cell hands an answer to {number}")


def _define(source, name, names):
    """Runs the definitions of a cell; its source can be found, as in a kernel."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    for node in ast.parse(source).body:
        if _is_definition(node):
            with contextlib.suppress(NameError, KeyError, AttributeError):  # it uses what only a run has
                exec(compile(ast.Module([node], []), name, "exec"), names)


def _is_definition(node):
    if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
        return True
    return isinstance(node, ast.Assign) and not any(isinstance(part, ast.Call) for part in ast.walk(node))


@contextlib.contextmanager
def recording():
    """Lists the comparisons that a check makes meanwhile."""
    found, original = [], Expected.check

    def note_and_check(self, yours):
        found.append(self)
        original(self, yours)

    Expected.check = note_and_check
    try:
        yield found
    finally:
        Expected.check = original


def write_script(folder, script, *edits, name="", stub=False):
    """Writes a script of the labs into a folder, with each ``(old, new)`` replaced once; returns its name there."""
    source = (NOTEBOOKS / "scripts" / script).read_text()
    source = make_script_stub(source) if stub else source
    for old, new in edits:
        assert source.count(old) >= 1, f"{script} has no {old!r}"
        source = source.replace(old, new, 1)
    (folder / (name or script)).write_text(source)
    return name or script


def refuse(number, answer):
    """Returns the hint of the check that refuses the answer."""
    try:
        check.exercise(number, answer)
    except check.NotYetError as error:
        assert error.yours and error.expected
        return error.hint
    raise AssertionError(f"{number} accepted the answer")


def refuse_edited(number, *edits):
    """Edits the notebook's solution, and returns the hint of the check that refuses it."""
    return refuse(number, load_answer(number, *edits))
