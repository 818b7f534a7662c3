"""Puts a project's files into the folder that its jobs run in, over what earlier jobs left there.

``python -m nodelaunch.node.place CODE WORK`` copies ``CODE/project``. Another job of the project may run in WORK, and
nodes may share it: so a file appears there whole or not at all, and one that is the same already is left alone.
"""

from __future__ import annotations

import filecmp
import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

# In the folder of the code: the names of those files of the project that are programs.
PROGRAMS = "programs.json"


def main() -> int:
    """Returns the exit status: 1 where something is in the way."""
    code, work = map(Path, sys.argv[1:])
    listed = code / PROGRAMS
    programs = set(json.loads(listed.read_text())) if listed.exists() else set()
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
    finally:
        copy.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
