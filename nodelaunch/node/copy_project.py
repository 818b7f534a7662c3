"""Copies a project into the folder that its jobs run in, over what earlier jobs left there.

``python -m nodelaunch.node.copy_project CODE WORK`` copies ``CODE/project``. Another job of the project may run in
WORK, and nodes may share it, so a file appears whole or not at all, and an equal one is left alone. A file that an
earlier launch copied and that is no longer in the project is removed, unless a job changed it.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

# In the folder that jobs run in: the folder of the code that was copied last.
LAST = ".nodelaunch-last"


def main() -> int:
    """Returns the exit status: 1 if something is in the way."""
    code, work = map(Path, sys.argv[1:])
    remove_old(code, work)
    for path in (code / "project").rglob("*"):
        name = path.relative_to(code / "project")
        try:
            if not path.is_dir():
                copy_file(path, work / name)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            where = shlex.quote(str(error.filename2 or error.filename))
            words = f"{name} of the project cannot be copied, since an earlier job left something in its place"
            print(f"Error: {words}: rm -r -- {where}", file=sys.stderr)
            return 1
    return 0


def remove_old(code: Path, work: Path) -> None:
    """Removes files as the last launch copied them that are no longer in the project: a job could import them."""
    with contextlib.suppress(OSError):  # the first launch, or the last one's code is gone
        last = Path(os.fsdecode((work / LAST).read_bytes())) / "project"
        for name in [path.relative_to(last) for path in last.rglob("*") if path.is_file()]:
            if not (code / "project" / name).exists() and is_equal(last / name, work / name):
                (work / name).unlink()
    (work / LAST).write_bytes(os.fsencode(code))


def is_equal(path: Path, copy: Path) -> bool:
    """True if the copy is a file with the same content."""
    return copy.is_file() and not copy.is_symlink() and filecmp.cmp(path, copy, shallow=False)


def copy_file(path: Path, target: Path) -> None:
    """Copies a file, unless an equal one is there."""
    if is_equal(path, target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not by lab_common.files, which waits for the disk at each file: for thousands, that would take minutes.
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".copying-", delete=False) as file:
        copy = Path(file.name)
    try:
        shutil.copyfile(path, copy)
        copy.chmod(0o700)  # which files of a project are programs makes no difference here
        copy.replace(target)
    finally:
        copy.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
