"""Finds your own packages that a script imports, and the module that a job runs in place of a script.

Your own are those that no installer has put on the nodes.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from nodelaunch.node.facts import SKIPPED

# Not by ast: a script with a syntax error is launched, too, and its rank reports it. Text that only looks like an
# import does no harm.
IMPORTED = re.compile(
    rb"^[ \t]*(?:from[ \t]+(?P<package>\w+)[\w.]*[ \t]+import\b|import[ \t]+(?P<names>[^#;\n]+))", re.MULTILINE
)


def find_packages(sources: Iterable[bytes]) -> dict[str, Path]:
    """Returns your own packages and modules that sources import, directly or through each other.

    Args:
        sources: The contents of Python files.

    Returns:
        By name, the folder of the package or the file of the module: a package beside the notebook, for example, or
        one that was installed as editable.
    """
    found, seen, todo = {}, set(), list(sources)
    while todo:
        for match in IMPORTED.finditer(todo.pop()):
            for part in (match["package"] or match["names"]).decode(errors="replace").split(","):
                name = (part.partition(".")[0].split() or [""])[0]
                if name not in seen and (path := _find_own(name)):
                    found[name] = path
                    todo += [file.read_bytes() for file in list_modules(path)]
                seen.add(name)
    return found


def list_modules(path: Path) -> list[Path]:
    """The Python files of a package, without those of tools and an editor's lock; a module is one file."""
    if path.is_file():
        return [path]
    files = [file for file in sorted(path.rglob("*.py")) if not file.name.startswith(".")]
    return [file for file in files if not {*SKIPPED} & {*file.relative_to(path).parts}]


def find_module(module: str, root: Path | None = None) -> Path | None:
    """Returns the file that ``python -m`` runs for a module of a project; None if the nodes have it installed."""
    path = module.replace(".", "/")
    files = [root / f"{path}.py", root / path / "__main__.py"] if root else []
    return next((file for file in files if file.is_file()), None)


def _find_own(name: str) -> Path | None:
    if name in sys.stdlib_module_names or not name.isidentifier():
        return None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a module that was made at run time has none
        return None
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        return None
    origin = Path(spec.origin).resolve()
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    if installed & {*origin.parents} or {"site-packages", "dist-packages"} & {*origin.parts}:
        return None
    return origin.parent if spec.submodule_search_locations else origin
