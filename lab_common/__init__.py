"""Shared by all packages of the labs: one kind of error, whole files, clean text, and where things are.

It imports nothing of ours and little else, so that it also runs on a node that has nothing but Python.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any


class LabError(Exception):
    """An error that a learner can cause and fix: what happened, where, the likely cause, one fix, the log's path.

    ``what`` is one sentence of at most 120 characters, for the first line; ``fix`` is one command or action.
    """

    def __init__(self, what: str, *, where: object = "", cause: str = "", fix: str = "", log: object = "") -> None:
        from lab_common.text import clean_message

        # Here for all: a hint may quote a file's name, or a library's message that is coloured for a terminal.
        texts = map(clean_message, (what, where, cause, fix, log))
        self.what, self.where, self.cause, self.fix, self.log = texts
        super().__init__("\n".join([self.what, *(f"  {label}: {text}" for label, text in self.list_hints() if text)]))

    def list_hints(self) -> list[tuple[str, str]]:
        """The lines below the first one as pairs of a label and a text, which may be empty."""
        return [("where", self.where), ("likely", self.cause), ("fix", self.fix), ("log", self.log)]

    def _render_traceback_(self) -> list[str]:
        """Gives IPython the message alone in place of a traceback: it is all that a learner needs."""
        return str(self).splitlines()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Gives a notebook the plain text of a displayed error, as print() shows it."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Returns the HTML that JupyterLab shows for a displayed error."""
        from lab_common.markup import write_card

        return write_card("error", self.what, self.list_hints())


def checkout() -> Path:
    """Returns the labs' folder: the one with this package, or one around the current folder, or that folder."""
    root = Path(__file__).resolve().parents[1]
    if (root / "pyproject.toml").exists():
        return root
    # Installed beside somebody else's Python, as on a JupyterHub; the learner's copy is inside the labs' folder.
    here = Path.cwd()
    around = (one for one in (here, *here.parents) if (one / "pyproject.toml").exists())
    return next((one for one in around if (one / "lab_common").is_dir()), here)


def read_path(text: str | os.PathLike[str]) -> Path:
    """Returns a path that a person typed, with a user's home in place of ``~`` and ``~user``.

    Options need it, too: a shell leaves ``--into=~/x`` as it stands.
    """
    return Path(text).expanduser()


def read_folder(text: str | os.PathLike[str]) -> Path:
    """Returns a folder's path that a person typed, as :func:`read_path`; the folder may still have to be made.

    Raises:
        LabError: Something on the path is not a folder.
    """
    folder = read_path(text)
    with contextlib.suppress(OSError):  # what cannot be asked is told where the folder is used
        place = next(place for place in (folder, *folder.parents) if place.exists() or place.is_symlink())
        if not place.is_dir():
            kind = "link" if place.is_symlink() else "file"
            cause = (
                f"it leads to {place.readlink()}" if kind == "link" else "a path leads to a file, or goes on below it"
            )
            fix = f"name a folder: a new one, or {place.parent}"
            raise LabError(f"A {kind} lies where a folder is meant.", where=place, cause=cause, fix=fix)
    return folder


def env_folder(variable: str, default: str) -> Path:
    """Returns the folder that an environment variable names, or ``default``.

    Relative paths start at the labs' folder, so that ``make`` there and a notebook in ``workspace/`` mean the same.
    """
    return (checkout() / read_path(os.environ.get(variable) or default)).resolve()
