"""What all packages of the labs share: one kind of error, whole files, clean text, and where things are.

It imports nothing of ours and little else, so that it also runs on a node that has nothing but Python.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class LabError(Exception):
    """What a learner can cause and mend: what happened, where, the likely cause, one command that fixes it, the log.

    Args:
        what: One sentence, at most 120 characters, that stands on the first line.
        where: The file, cell, host or address concerned.
        cause: The likely cause.
        fix: One command or action that fixes it.
        log: Path of the log with the details.
    """

    def __init__(self, what: str, *, where: object = "", cause: str = "", fix: str = "", log: object = "") -> None:
        self.what, self.where, self.cause, self.fix, self.log = what, str(where), cause, fix, str(log)
        super().__init__("\n".join([what, *(f"  {label}: {text}" for label, text in self.list_hints() if text)]))

    def list_hints(self) -> list[tuple[str, str]]:
        """What stands below the first line: a label and a text each, which may be empty."""
        return [("where", self.where), ("likely", self.cause), ("fix", self.fix), ("log", self.log)]

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: the message alone, which is all that a learner needs."""
        return str(self).splitlines()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook keeps as plain text of an error that is displayed: what print() shows."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """What JupyterLab shows of an error that is displayed."""
        from lab_common.markup import write_card

        return write_card("error", self.what, self.list_hints())


def checkout() -> Path:
    """Returns the repository's root, or the current folder where the package is installed away from it."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").exists() else Path.cwd()


def env_folder(variable: str, default: str) -> Path:
    """Returns the folder that an environment variable names, or ``default``.

    Relative ones count from the repository's root and not from the current folder, so that ``make`` there and a
    notebook in ``workspace/`` mean the same.

    Raises:
        LabError: The variable begins with a user's home that is not known, or leads in a circle.
    """
    try:
        return (checkout() / Path(os.environ.get(variable) or default).expanduser()).resolve()
    except RuntimeError as error:
        what, fix = f"{variable} leads nowhere.", f"export {variable}=/a/folder/of/yours, then start JupyterLab again"
        raise LabError(what, where=os.environ.get(variable, default)[:300], cause=str(error)[:300], fix=fix) from error
