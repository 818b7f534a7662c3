"""Copies a project into the folder that its jobs run in, over what earlier jobs left there.

``python -m nodelaunch.node.place CODE WORK`` copies ``CODE/project``. Another job of the project may run in WORK, and
nodes may share it, so a file appears whole or not at all, and an equal one is left alone. A file that an earlier launch
copied and that is no longer in the project is removed, unless a job changed it.
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

# In the folder of the code: the names of the project's executable files.
PROGRAMS = "programs.json"
# In the folder that jobs run in: the folder of the code that was copied last.
LAST = ".nodelaunch-last"


def main() -> int:
    """Returns the exit status: 1 if something is in the way."""
    code, work = map(Path, sys.argv[1:])
    listed = code / PROGRAMS
    programs = set(json.loads(listed.read_text())) if listed.exists() else set()
    remove_old(code, work)
    for path in sorted((code / "project").rglob("*")):
        name = path.relative_to(code / "project")
        try:
            if not path.is_dir():
                place(path, work / name, 0o700 if name.as_posix() in programs else 0o600)
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
        for path in last.rglob("*"):
            name = path.relative_to(last)
            if path.is_file() and not (code / "project" / name).exists() and not (work / name).is_symlink():
                with contextlib.suppress(OSError):
                    if filecmp.cmp(path, work / name, shallow=False):
                        (work / name).unlink()
    with contextlib.suppress(OSError):  # something else has this name
        (work / LAST).write_bytes(os.fsencode(code))


def place(path: Path, target: Path, mode: int) -> None:
    """Copies a file, unless an equal one is there; sets its mode."""
    if not target.is_symlink() and target.is_file() and filecmp.cmp(path, target, shallow=False):
        if target.stat().st_mode & 0o777 != mode:
            target.chmod(mode)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not by lab_common.files, which waits for the disk at each file: for thousands, that would take minutes.
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".placing-", delete=False) as file:
        copy = Path(file.name)
    try:
        shutil.copyfile(path, copy)
        copy.chmod(mode)
        copy.replace(target)
        # Python compares only the size and the whole second of a source with what it compiled before.
        for compiled in target.parent.joinpath("__pycache__").glob(f"{glob.escape(target.stem)}.*.pyc"):
            compiled.unlink(missing_ok=True)
    finally:
        copy.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
