"""Fetches a team's report and work from its container, and trusts nothing that comes from there.

``tar`` in the container sends the files, and the team can make it send anything. So only regular files are taken,
within bounds of size, number and time, and each is written new into a folder that was made for it: nothing that was
there before is opened.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from hosting.compose import HOME
from hosting.deployment import LABS, Deployment
from hosting.teams import Team
from lab_common import LabError
from lab_common.files import hold_folder
from lab_common.text import clean_name

REPORT, WORK, LEFT_OUT = "report.html", "work", "left-out.txt"
# Where the report is made in the container.
PLACE = "/tmp"
# What is named in left-out.txt.
MOST_NAMED = 1000
# Bytes of a path, as Linux has them, and of a file: tarfile looks behind it, however large it says it is.
LONGEST_NAME, LARGEST_FILE = 4096, 1 << 38
# A file that is refused for its name, while the disk is well.
NAME_FAULTS = (errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


@dataclass(frozen=True)
class Bounds:
    """Limits on what is fetched from one team: files and folders, bytes of one file and of all, and seconds."""

    entries: int = 20_000
    largest: int = 1 << 30
    total: int = 4 << 30
    seconds: float = 600.0


class Member(tarfile.TarInfo):
    """One entry of the stream. Refuses what ``tar`` does not send, and what tarfile would read into memory whole."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        names = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        others = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_SPARSE)
        if self.type in others or not 0 <= self.size <= (LONGEST_NAME if self.type in names else LARGEST_FILE):
            raise tarfile.ReadError("an entry that does not belong there")
        return super()._proc_member(archive)


def collect(deployment: Deployment, target: Path, bounds: Bounds | None = None) -> list[str]:
    """Fetches each team's report and work into ``target/<team>``, a new folder; an earlier one is kept beside it.

    Returns:
        A line for each team: its folder, and how many files were left out.

    Raises:
        LabError: A team's container does not run, its report cannot be made, or what it sent was cut off; the other
            teams' folders are there, and this team's with the files that arrived.
    """
    lines, failed, target = [], {}, target.resolve()
    target.mkdir(parents=True, exist_ok=True)
    with hold_folder(target, "Another `collect` writes there"):
        for team in deployment.teams:
            for left in target.glob(f".{team.name}.????????"):  # a collect that was killed
                shutil.rmtree(left, ignore_errors=True)
            left_out: list[str] = []
            try:
                problem = _collect_team(deployment, team, target, bounds or Bounds(), left_out)
            except OSError as error:
                problem = f"{target}: {error.strerror or error}"
            if problem:
                failed[team.name] = problem
            count = f" (left out: {len(left_out)}, see {LEFT_OUT})" if left_out else ""
            lines.append(f"{target / team.name}{count}")
    if failed:
        what = f"{len(failed)} of {len(lines)} teams could not be collected whole: {', '.join(failed)}."
        # A hub ends the containers that nobody uses; both variants work on the same volumes.
        fix = f"python3 -m hosting up{' --no-hub' if deployment.settings.hub else ''}, and `collect` again"
        cause = next(iter(failed.values()))
        raise LabError(what[:120], where=target, cause=cause, fix=fix, log=deployment.engine.log)
    return lines


def _collect_team(deployment: Deployment, team: Team, target: Path, bounds: Bounds, left_out: list[str]) -> str:
    """Fetches one team's work; returns why it is not whole, or "". Fills ``left_out``, also when it raises.

    If nothing arrives, no folder is made.
    """
    container, half = deployment.name_container(team), bounds.seconds / 2
    made = f"--team={team.name} --workspace={HOME}/{WORK}/labs --output={PLACE}/{REPORT}"
    status, said = deployment.run_in(container, "python", "-I", "-m", "course.report", *made.split(), timeout=half)
    report = () if status else ("-C", PLACE, REPORT)
    # The report and the labs first: what is left of the number and the size of files is for the rest, which leaves the
    # labs out. PurePosixPath drops the "./" that tells the two apart.
    tar = ("tar", "-c", "--format=gnu", "--hard-dereference", "--sort=name", "--anchored", f"--exclude=./{WORK}/labs")
    command = ("exec", "-w", LABS, container, *tar, *report, "-C", HOME, f"{WORK}/labs", f"./{WORK}")
    bounds = replace(bounds, total=min(bounds.total, shutil.disk_usage(target).free // 2))
    problem = ""
    with tempfile.TemporaryDirectory(prefix=f".{team.name}.", dir=target) as temporary:
        fresh = Path(temporary) / team.name
        fresh.mkdir(mode=0o700)
        (fresh / WORK).mkdir()
        with deployment.engine.start(*command, timeout=half, stderr=subprocess.DEVNULL) as process:
            try:
                whole = receive(process.stdout, fresh, bounds, left_out)
                # Of tar: 1 if a file changed meanwhile, 2 if one could not be read.
                if whole and (ended := process.wait()) not in (0, 1):
                    problem = "a file could not be read" if ended == 2 else f"tar ended with exit status {ended}"
            except (tarfile.TarError, ValueError, RecursionError) as error:
                problem = f"what its container sent was cut off or cannot be read: {clean_name(error, 200)}"
        if status:
            problem = clean_name(said[-300:]) or "its report could not be made"
        if left_out or problem:
            end = [f"not whole: {problem!a}"] if problem else []
            (fresh / LEFT_OUT).write_text("\n".join([*left_out, *end]) + "\n")
        if left_out or any((fresh / WORK).iterdir()) or (fresh / REPORT).exists():
            _give_name(fresh, target / team.name)
    return problem


def receive(stream: BinaryIO, folder: Path, bounds: Bounds, left_out: list[str]) -> bool:
    """Reads what a team's container sends and writes its files below a folder; adds what it leaves out, and why.

    Returns:
        True if all was read, False if the bounds of number or size were reached.

    Raises:
        TarError, ValueError, RecursionError: The stream cannot be read to its end; the files before are there.
        OSError: The files cannot be written here.
    """
    entries, size = 0, 0
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=Member) as archive:
        while member := archive.next():
            archive.members.clear()  # tarfile would keep every one, however many a team sends
            fault = _find_fault(member, bounds)
            if not fault and (entries >= bounds.entries or size + member.size > bounds.total):
                left_out.append(f"{member.name!a} and what comes behind it: more files or bytes than are fetched")
                return False
            fault = fault or _take(archive, member, folder)
            if not fault:
                entries, size = entries + 1, size + member.size
            elif len(left_out) < MOST_NAMED:
                left_out.append(f"{member.name!a}: {fault}")
    while stream.read(1 << 20):  # tar fills its last block, and ends
        pass
    return True


def _find_fault(member: tarfile.TarInfo, bounds: Bounds) -> str:
    """Returns what is wrong with an entry; "" if nothing is."""
    path = PurePosixPath(member.name)
    if ".." in path.parts or path.parts[:1] not in ((WORK,), (REPORT,)):
        return "an unsafe name"
    if member.issym() or member.islnk():
        return "a link"
    if not member.isreg() and not member.isdir():
        return "a pipe or a device"
    return "too large" if member.size > bounds.largest else ""


def _take(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> str:
    """Writes a file or makes a folder; returns why it was left out, or "". An incomplete file is removed."""
    # A terminal would obey control characters in a name.
    path = folder.joinpath(*map(clean_name, PurePosixPath(member.name).parts))
    try:
        if member.isdir():
            path.mkdir(exist_ok=True)
            return ""
        file = path.open("xb")  # never through anything that is there
    except OSError as error:
        if error.errno not in NAME_FAULTS:
            raise
        return "its name is too long, or another has it"
    with file:
        try:
            shutil.copyfileobj(archive.extractfile(member), file)
        except BaseException:
            path.unlink()
            raise
    return ""


def _give_name(fresh: Path, final: Path) -> None:
    """Renames a folder to its final name; an older folder of that name gets the time of its collection as a suffix."""
    if final.exists():
        stamp = datetime.fromtimestamp(final.stat().st_mtime, UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        final.rename(final.with_name(f"{final.name}-{stamp}"))
    fresh.rename(final)
