"""Checks who imports whom: ``python -m tests.harness.arrows`` prints the layers of our packages and their lengths.

Imports only ever point down. Within a layer a module may import another of its own package, but never in a circle.
"""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# From the bottom up. Those of one line do not import each other; `nodelaunch.node` is what runs on a node.
LAYERS = (("lab_common",), ("lab_utils", "nodelaunch.node"), ("nodelaunch",), ("course",), ("hosting",))
# What a layer may not import although it lies below.
APART = {("nodelaunch", "lab_utils")}


def list_modules() -> dict[str, Path]:
    """Returns the files of our packages by module name; a package is its ``__init__``."""
    roots = sorted({layer.split(".")[0] for row in LAYERS for layer in row})
    paths = [path for root in roots for path in sorted((ROOT / root).rglob("*.py"))]
    names = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def find_layer(module: str) -> str:
    """Returns a module's layer: the longest name that it begins with.

    Raises:
        ValueError: It is in no layer.
    """
    layers = [layer for row in LAYERS for layer in row if f"{module}.".startswith(f"{layer}.")]
    return max(layers, key=len)


def find_level(module: str) -> int:
    """Returns the height of that layer, from 0."""
    layer = find_layer(module)
    return next(level for level, row in enumerate(LAYERS) if layer in row)


def find_imports(source: str, module: str, known: dict[str, Path]) -> set[str]:
    """Returns which of our modules a module imports, also inside a function or only for a type checker.

    Args:
        source: Its source.
        module: Its name; with ``.__init__`` for a package.
        known: All modules, by name.
    """
    base, found = module.split("."), set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = base[: len(base) - node.level] if node.level else []
            package = ".".join([*package, *([node.module] if node.module else [])])
            names = [f"{package}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            found |= {name} - {""}
    return found


def find_faults() -> list[str]:
    """Describes each import that points up, connects two separate layers, or closes a circle."""
    known, faults, graph = list_modules(), [], {}
    for module, path in known.items():
        own = f"{module}.__init__" if path.name == "__init__.py" else module
        imports = find_imports(path.read_text(encoding="utf-8"), own, known) - {module}
        layer, level = find_layer(module), find_level(module)
        for name in sorted(imports):
            other = find_layer(name)
            if other != layer and (find_level(name) >= level or (layer, other) in APART):
                faults.append(f"{module} imports {name}, which it may not")
        graph[module] = imports
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        faults.append(f"in a circle: {' → '.join(error.args[1])}")
    return faults


def main() -> int:
    """Prints the layers, from the top down; returns 1 if an import is wrong."""
    lines: dict[str, list[int]] = {}
    for module, path in list_modules().items():
        lines.setdefault(find_layer(module), []).append(len(path.read_text(encoding="utf-8").splitlines()))
    for row in reversed(LAYERS):
        print("   ".join(f"{layer}: {len(lines[layer])} files, {sum(lines[layer]):,} lines" for layer in row))
    faults = find_faults()
    print(*faults or ["All arrows point down, and none leads round in a circle."], sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
