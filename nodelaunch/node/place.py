"""Puts a project's files into the folder that its jobs run in, over what earlier jobs left there.

``python -m nodelaunch.node.place CODE WORK`` copies ``CODE/project``. Another job of the project may run in WORK, and
nodes may share it: so a file appears there whole or not at all, and one that is the same already is left alone. What an
earlier launch copied, and the project no longer has, is removed, unless it was changed here.
"""

from __future__ import annotations

import contextlib
import filecmp
import glob
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

# In the folder of the code: the names of those files of the project that are programs.
PROGRAMS = "programs.json"
# In the folder that jobs run in: the folder of the code that was copied last.
LAST = ".nodelaunch-last"


def main() -> int:
    """Returns the exit status: 1 where something is in the way."""
    code, work = map(Path, sys.argv[1:])
    listed = code / PROGRAMS
    programs = set(json.loads(listed.read_text())) if listed.exists() else set()
    remove_old(code, work)
    for path in sorted((code / "project").rglob("*")):
        if path.is_dir():
            continue
        name = path.relative_to(code / "project")
        try:
            place(path, work / name, 0o700 if name.as_posix() in programs else 0o600)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            where = error.filename2 or error.filename
            words = f"{name} of the project cannot be copied, since an earlier job left something in its place"
            print(f"Error: {words}: rm -r -- {shlex.quote(str(where))}", file=sys.stderr)
            return 1
    return 0


def remove_old(code: Path, work: Path) -> None:
    """Removes what is as the last launch copied it and is no part of the project any more: it would be imported."""
    with contextlib.suppress(OSError):  # there was none, or its code is no longer here
        last = Path(os.fsdecode((work / LAST).read_bytes()))
        for path in last.joinpath("project").rglob("*"):
            name = path.relative_to(last / "project")
            here = work / name
            if path.is_file() and not (code / "project" / name).exists() and not here.is_symlink():
                with contextlib.suppress(OSError):
                    if filecmp.cmp(path, here, shallow=False):
                        here.unlink()
    with contextlib.suppress(OSError):  # something is in its place
        (work / LAST).write_bytes(os.fsencode(code))


def place(path: Path, target: Path, mode: int) -> None:
    """Copies a file, unless the same is there; it then has that mode."""
    if not target.is_symlink() and target.is_file() and filecmp.cmp(path, target, shallow=False):
        if target.stat().st_mode & 0o777 != mode:
            target.chmod(mode)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not by lab_common.files, which waits for the disk at each file: of thousands, that would take minutes.
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".placing-", delete=False) as file:
        copy = Path(file.name)
    try:
        shutil.copyfile(path, copy)
        copy.chmod(mode)
        copy.replace(target)
        # Python takes compiled code for that of the source whose size and whole second of change are the same: those of
        # two launches within a second may be.
        for compiled in target.parent.joinpath("__pycache__").glob(f"{glob.escape(target.stem)}.*.pyc"):
            compiled.unlink(missing_ok=True)
    finally:
        copy.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
