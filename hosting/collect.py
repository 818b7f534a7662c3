"""Fetches a team's report and work from its container, and trusts nothing that comes from there.

A program of ours, in the container, sends regular files one after the other over a pipe. The team can make it send
anything. So the names, the sizes, the number and the time are checked here, and each file is written new into a folder
that was made for it: nothing that was there before is opened.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from hosting.deployment import Deployment
from hosting.engine import LOG
from hosting.files import HOME, LABS, PYTHON, name_container
from hosting.teams import Team
from lab_common import LabError
from lab_common.files import hold_folder
from lab_common.text import clean_name

REPORT, WORK, LEFT_OUT = "report.html", "work", "left-out.txt"
CHUNK, LONGEST_FRAME = 1 << 20, 1 << 15
MOST_PARTS = 64
# What is named in left-out.txt; more is counted.
MOST_NAMED = 1000
KINDS = {
    "link": "a symbolic link",
    "again": "a second name (hard link) of a file that is there",
    "special": "a pipe, a socket or a device",
    "large": "too large",
    "many": "beyond the number or the size of files that are fetched",
    "unreadable": "cannot be read",
}
# Runs in the team's container. Frames of JSON, one a line; behind those of a file come its bytes.
PACK = """
import json, os, stat, subprocess, sys, tempfile

work, team, (largest, total, most, named, seconds) = *sys.argv[1:3], map(int, sys.argv[3:])
out, seen, left, count, size = sys.stdout.buffer, set(), 0, 0, 0


def tell(*frame):
    out.write(json.dumps(frame).encode() + b"\\n")


def leave(name, kind):
    global left
    left += 1
    if left <= named:
        tell("left", name, kind)


def send(path, *frame):
    # A pipe that has taken the file's place would let an open() wait for ever.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        rest = os.fstat(file.fileno()).st_size
        tell(*frame, rest)
        while rest:
            chunk = file.read(min(rest, 1 << 20)) or bytes(min(rest, 1 << 20))  # it has become shorter
            out.write(chunk)
            rest -= len(chunk)


def visit(path, name):
    global count, size
    found = os.lstat(path)
    if stat.S_ISDIR(found.st_mode):
        return sorted(os.listdir(path), reverse=True)
    if not stat.S_ISREG(found.st_mode):
        leave(name, "link" if stat.S_ISLNK(found.st_mode) else "special")
    elif found.st_nlink > 1 and (found.st_dev, found.st_ino) in seen:
        leave(name, "again")
    elif found.st_size > largest:
        leave(name, "large")
    elif count >= most or size + found.st_size > total:
        leave(name, "many")
    else:
        send(path, "file", name)
        seen.add((found.st_dev, found.st_ino))
        count, size = count + 1, size + found.st_size
    return []


try:
    with tempfile.TemporaryDirectory() as folder:
        report = folder + "/report.html"
        make = [sys.executable, "-I", "-m", "course.report", "--team=" + team, "--output=" + report]
        made = subprocess.run([*make, "--workspace=" + work + "/labs"], capture_output=True, timeout=seconds)
        if made.returncode:
            tell("failed", made.stderr.decode(errors="replace")[-300:])
        else:
            send(report, "report")
except (OSError, subprocess.SubprocessError) as error:
    tell("failed", str(error)[-300:])
# The labs first: what is left of the number and the size of files is for the rest.
names = [name for name in sorted(os.listdir(work), reverse=True) if name != "labs"] + ["labs"]
while names:
    name = names.pop()
    try:
        names += [name + "/" + below for below in visit(work + "/" + name, name)]
    except OSError:
        leave(name, "unreadable")
tell("end", max(0, left - named))
out.flush()
"""


@dataclass(frozen=True)
class Bounds:
    """Limits on what is fetched from one team.

    Attributes:
        files: Most files, and most folders that are made for them.
        largest: Most bytes of one file.
        total: Most bytes of all files.
        seconds: Most seconds for all of it, the report included.
    """

    files: int = 20_000
    largest: int = 1 << 30
    total: int = 4 << 30
    seconds: float = 600.0


@dataclass
class Collected:
    """The files fetched from one team.

    Attributes:
        folder: Their folder.
        files: Number of files fetched.
        report: Whether its report was made.
        left_out: What was left out and why, up to ``MOST_NAMED``.
        more: How many were left out beyond those.
        problem: Why it is incomplete; "" if it is complete.
        folders: Number of folders made for the files.
    """

    folder: Path
    files: int = 0
    report: bool = False
    left_out: list[tuple[str, str]] = field(default_factory=list)
    more: int = 0
    problem: str = ""
    folders: int = 0

    def describe(self) -> str:
        """Returns one line: the folder, and how many files were left out."""
        count = len(self.left_out) + self.more
        return f"{self.folder}" + (f" ({count} left out: {self.folder / LEFT_OUT})" if count else "")

    def leave_out(self, name: str, reason: str) -> None:
        """Notes that a file was left out."""
        if len(self.left_out) < MOST_NAMED:
            self.left_out.append((name, reason))
        else:
            self.more += 1


def collect(
    deployment: Deployment, teams: Sequence[Team], target: Path, *, bounds: Bounds | None = None
) -> list[Collected]:
    """Fetches each team's report and work into ``target/<team>``, a new folder; an earlier one is kept beside it.

    Args:
        deployment: Of these teams.
        teams: Whose work.
        target: The folder for all of them.
        bounds: Limits on what is fetched from one team.

    Raises:
        LabError: A team's container does not run, its report cannot be made, or what it sent was cut off; the other
            teams' folders are there, and this team's with the files that arrived.
    """
    whole, failed, target = [], {}, target.resolve()
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what, fix = "What is collected has no place.", "--into with another folder"
        raise LabError(what, where=target, cause=error.strerror or "", fix=fix) from error
    with hold_folder(target, "Another `collect` writes there"):
        for team in teams:
            for left in target.glob(f".{team.name}.????????"):  # a collect that was killed
                shutil.rmtree(left, ignore_errors=True)
            one = _collect_team(deployment, team, target, find_room(target, bounds or Bounds()))
            if one.problem:
                failed[team.name] = one.problem
            else:
                whole.append(one)
    if failed:
        what = f"{len(failed)} of {len(teams)} teams could not be collected whole: {', '.join(failed)}."
        # A hub ends the containers that nobody uses; both variants work on the same volumes.
        fix = f"python3 -m hosting up{' --no-hub' if deployment.settings.hub else ''}, and `collect` again"
        raise LabError(
            what[:120],
            where=target,
            cause=next(iter(failed.values()))[-300:],
            fix=fix,
            log=deployment.engine.folder / LOG,
        )
    return whole


def find_room(target: Path, bounds: Bounds) -> Bounds:
    """Returns the bounds, cut to half of the free bytes here, and of the free inodes if the disk limits those."""
    free = os.statvfs(target)
    files = min(bounds.files, free.f_favail // 4) if free.f_files else bounds.files  # each may need a folder
    return replace(bounds, files=files, total=min(bounds.total, free.f_bavail * free.f_frsize // 2))


def _collect_team(deployment: Deployment, team: Team, target: Path, bounds: Bounds) -> Collected:
    """Fetches one team's work; if nothing arrives, no folder is made."""
    status, said = deployment.ask(team, "true", timeout=20)
    if status:
        problem = clean_name(said[-300:]) or "its container does not run"
        return Collected(target / team.name, problem=problem)
    numbers = (bounds.largest, bounds.total, bounds.files, MOST_NAMED, int(bounds.seconds / 2))
    command = ["exec", "-w", LABS, name_container(deployment.settings, team, 0), *PYTHON, PACK]
    try:
        # Only we can enter it until it has its name.
        fresh = Path(tempfile.mkdtemp(prefix=f".{team.name}.", dir=target))
    except OSError as error:
        return Collected(target / team.name, problem=f"{target}: {error.strerror or error}")
    try:
        one = Collected(fresh)
        with deployment.engine.stream(
            *command, f"{HOME}/{WORK}", team.name, *map(str, numbers), timeout=bounds.seconds
        ) as stream:
            receive(stream, one, bounds)
        if one.files or one.report or one.left_out:
            _write_left_out(one)
            one.folder = _give_name(fresh, target / team.name)
        return one
    except OSError as error:
        return Collected(target / team.name, problem=f"{fresh}: {error.strerror or error}")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def receive(stream: BinaryIO, one: Collected, bounds: Bounds) -> None:
    """Reads what a team's container sends, and writes its files below ``one.folder``.

    A broken rule ends the reading: ``one.problem`` then says so, and the files before it are kept.

    Raises:
        OSError: The files cannot be written here.
    """
    rest = bounds.total
    try:
        # One frame for each file and for each that was left out; then the report's and the last.
        for _ in range(bounds.files + MOST_NAMED + 2):
            kind, *values = _read_frame(stream)
            if kind == "end":
                one.more += _check_size(values[0], 1 << 62)
                break
            if kind == "failed":
                one.problem = clean_name(_check_text(values[0]), 300) or "no report"
            elif kind == "left":
                one.leave_out(_check_text(values[0]), KINDS.get(_check_text(values[1]), "odd"))
            elif kind == "report" and not one.report:
                size = _check_size(values[0], min(rest, bounds.largest))
                _write_new(stream, size, one.folder / REPORT)
                one.report = True
                rest -= size
            elif kind == "file" and one.files < bounds.files:
                size = _check_size(values[1], min(rest, bounds.largest))
                _take_file(stream, _check_text(values[0]), size, one, bounds.files)
                rest -= size
            else:
                raise ValueError("a frame that does not belong there")
        else:
            raise ValueError("more frames than there can be")
        if not one.report:
            one.problem = one.problem or "no report came"
    except (ValueError, IndexError, RecursionError) as error:
        one.problem = f"what its container sent was cut off or cannot be read: {clean_name(error, 200)}"


def _take_file(stream: BinaryIO, name: str, size: int, one: Collected, most: int) -> None:
    parts = name.split("/")
    if len(parts) > MOST_PARTS or any(part in ("", ".", "..") or "\0" in part for part in parts):
        one.leave_out(name, "an unsafe name")
        return _copy(stream, size, None)
    path = one.folder.joinpath(WORK, *map(_make_safe, parts))
    fresh = list(takewhile(lambda folder: not os.path.lexists(folder), path.parents))
    if one.folders + len(fresh) > most:
        one.leave_out(name, KINDS["many"])
        return _copy(stream, size, None)
    try:
        one.folders += len(fresh)
        path.parent.mkdir(parents=True, exist_ok=True)
        return _write_new(stream, size, path, one)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
            raise
        # Nothing of its bytes was read yet: the name was refused.
        reason = "too long a name" if error.errno == errno.ENAMETOOLONG else "another has this name"
        one.leave_out(name, reason)
        return _copy(stream, size, None)


def _write_new(stream: BinaryIO, size: int, path: Path, one: Collected | None = None) -> None:
    """Writes a new file; an incomplete one is removed."""
    with path.open("xb") as file:  # never through anything that is there
        try:
            _copy(stream, size, file)
        except BaseException:
            path.unlink()
            raise
    if one:
        one.files += 1


def _copy(stream: BinaryIO, size: int, file: BinaryIO | None) -> None:
    while size:
        chunk = stream.read(min(size, CHUNK))
        if not chunk:
            raise ValueError("the end came within a file")
        if file:
            file.write(chunk)
        size -= len(chunk)


def _make_safe(part: str) -> str:
    """Returns a part of a path without terminal control characters, and that no command takes for an option."""
    part = clean_name(part)
    return f"_{part}" if part.startswith("-") else part


def _read_frame(stream: BinaryIO) -> list:
    line = stream.readline(LONGEST_FRAME)
    if not line.endswith(b"\n"):
        raise ValueError("the end came too early" if len(line) < LONGEST_FRAME else "too long a frame")
    frame = json.loads(line)
    if not isinstance(frame, list) or not frame:
        raise ValueError("not a frame")
    return frame


def _check_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _check_size(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("not a size, or a larger one than is fetched")
    return value


def _write_left_out(one: Collected) -> None:
    if not one.left_out and not one.more and not one.problem:
        return
    lines = [f"{name!a}: {reason}" for name, reason in one.left_out]
    lines += [f"and {one.more} more"] if one.more else []
    lines += [f"not whole: {one.problem!a}"] if one.problem else []
    with (one.folder / LEFT_OUT).open("x") as file:
        file.write("\n".join(lines) + "\n")


def _give_name(fresh: Path, final: Path) -> Path:
    """Renames a folder to its final name; an older folder of that name gets its collection time as a suffix."""
    if os.path.lexists(final):
        stamp = datetime.fromtimestamp(final.lstat().st_mtime, UTC).strftime("%Y%m%dT%H%M%SZ")
        for number in range(1000):
            kept = final.with_name(f"{final.name}-{stamp}" + (f"-{number + 1}" if number else ""))
            if not os.path.lexists(kept):
                final.rename(kept)
                break
    return fresh.rename(final)
