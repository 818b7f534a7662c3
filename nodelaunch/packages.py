"""Finds your own packages that a script imports, and the module that a job runs in place of a script.

Your own are those that no installer has put on the nodes.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path

from lab_common import LabError
from lab_common.text import clean
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
    found: dict[str, Path] = {}
    todo = [name for source in sources for name in list_imports(source)]
    while todo:
        name = todo.pop()
        if name not in found and (path := _find_own(name)):
            found[name] = path
            todo += [other for file in list_modules(path) for other in list_imports(file.read_bytes())]
    return found


def list_imports(source: bytes) -> set[str]:
    """The packages, by their first name, that a Python file imports."""
    names = set()
    for match in IMPORTED.finditer(source):
        parts = [match["package"]] if match["package"] else match["names"].split(b",")
        names |= {part.split(b".")[0].split()[0].decode() for part in parts if part.strip() and part.isascii()}
    return names


def list_modules(path: Path) -> list[Path]:
    """The Python files of a package, without those of tools and an editor's lock; a module is one file."""
    if path.is_file():
        return [path]
    files = [file for file in sorted(path.rglob("*.py")) if not file.name.startswith(".")]
    return [file for file in files if not {*SKIPPED} & {*file.relative_to(path).parts}]


def find_module(module: str, root: Path | None = None) -> Path | None:
    """Returns the file that ``python -m`` runs for a module of a project; None if it is installed on the nodes.

    Args:
        module: Its name, with dots.
        root: The project, if there is one.

    Raises:
        LabError: The project has no such module, or the module is your own and there is no project.
    """
    top, path = module.partition(".")[0], module.replace(".", "/")
    folder, shown = root or Path.cwd(), clean(module, 50)
    files = [folder / f"{path}.py", folder / path / "__main__.py"]
    found, own = next((file for file in files if file.is_file()), None), _find_own(top)
    if root and not found and (own or _find_spec(top) is None):
        where, cause = clean(root, 300), f"it has neither {path}.py nor {path}/__main__.py"
        fix = f"root= is the folder that contains {top}; leave root= out for a module that the nodes have installed"
        raise LabError(f"The project has no module {shown}.", where=where, cause=cause, fix=fix)
    if not root and (found or own):
        here = folder if found else own.parent
        fix = f"TorchrunJob(module={module!r}, root={'.' if here == Path.cwd() else str(here)!r}, …)"
        cause = "a node has only what is installed there and what the job copies"
        what = f"The module {shown} is not installed, and without root= it is not copied."
        raise LabError(what, where=clean(found or own, 300), cause=cause, fix=fix)
    return found


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a module that was made at run time has none
        return None


def _find_own(name: str) -> Path | None:
    spec = None if name in sys.stdlib_module_names or not name.isidentifier() else _find_spec(name)
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        return None
    origin = Path(spec.origin).resolve()
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    if installed & {*origin.parents} or {"site-packages", "dist-packages"} & {*origin.parts}:
        return None
    return origin.parent if spec.submodule_search_locations else origin
