"""Runs the notebook of a lab without Jupyter, which a GPU's machine may lack: ``python -m benchmarks.gpu.notebook 0``.

The code cells run one after the other in one namespace, from files in which ``inspect`` finds their source, in a copy
of the notebooks' folder; the committed notebooks are only read. The cells of labs 0, 1, 4 and 5 have no magics.
From IPython they use ``display`` and ``HTML``, which have stand-ins here. Figures go to OUT as PNG files.
"""

from __future__ import annotations

import argparse
import ast
import html
import os
import re
import shutil
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from course.notebooks import load_notebook
from lab_common import checkout
from lab_common.commandline import read_option


class HTML:
    """Stand-in for IPython's HTML, which shows its text without the tags."""

    def __init__(self, data: str) -> None:
        self.data = data

    def __repr__(self) -> str:
        return html.unescape(re.sub(r"<br>|</span>", "\n", re.sub(r"</?(?!br>|/span>)[^>]*>", "", self.data)))


class Printer:
    """Stand-in for the printer that IPython passes to ``_repr_pretty_``."""

    def __init__(self) -> None:
        self.said = ""

    def text(self, text: str) -> None:
        """Adds the next part of the text."""
        self.said += text


def display(*values: object) -> None:
    """Prints what a notebook would keep of a value as plain text."""
    for value in values:
        printer = Printer()
        if hasattr(type(value), "_repr_pretty_"):
            value._repr_pretty_(printer, False)
        print(printer.said or repr(value))


def stand_in_for_ipython() -> None:
    """Replaces ``IPython`` and ``IPython.display`` by modules without a shell, for which matplotlib and tqdm ask."""
    top, below = ModuleType("IPython"), ModuleType("IPython.display")
    top.get_ipython, top.display, top.__path__, top.version_info = (lambda: None), below, [], (0,)
    below.display, below.HTML = display, HTML
    for module in (top, below):
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=module is top)
        sys.modules[module.__name__] = module


def run_cell(source: str, file: Path, names: dict[str, object]) -> None:
    """Writes a cell's source to a file, runs it, and displays the value of an expression at its end."""
    file.write_text(source, encoding="utf-8")
    tree = ast.parse(source, str(file))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(file), "exec"), names)
    if last and (value := eval(compile(ast.Expression(last.value), str(file), "eval"), names)) is not None:
        display(value)


def run_notebook(lab: int, out: Path) -> None:
    """Runs one notebook in this process, which cannot be used for anything else afterwards; an error ends it."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    def keep_figures(*_: object, **__: object) -> None:
        for number in pyplot.get_fignums():
            pyplot.figure(number).savefig(out / f"lab{lab}-{len(list(out.glob('*.png'))):02d}.png", dpi=80)
            pyplot.close(number)

    pyplot.show = keep_figures
    (path,) = (checkout() / "notebooks").glob(f"{lab:02d}_*.ipynb")
    cells = [cell for cell in load_notebook(path)["cells"] if cell["cell_type"] == "code"]
    place = out / f"lab{lab}"
    shutil.rmtree(place, ignore_errors=True)
    (place / "cells").mkdir(parents=True)
    shutil.copytree(path.parent / "scripts", place / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    stand_in_for_ipython()
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update({"display": display, "get_ipython": lambda: None})
    os.chdir(place)
    sys.path.insert(0, "")  # as in a kernel
    for cell in cells:
        start = time.monotonic()
        run_cell("".join(cell["source"]), place / "cells" / f"{cell['id']}.py", main.__dict__)
        keep_figures()
        print(f"--- {cell['id']}: {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.notebook", description=__doc__.splitlines()[0])
    parser.add_argument("lab", type=int, metavar="LAB", help="0, 1, 4 or 5")
    parser.add_argument("--out", type=read_option, default=checkout() / "runs" / "gpu", metavar="FOLDER")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    run_notebook(arguments.lab, arguments.out.resolve())
