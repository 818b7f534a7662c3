"""Checkpoints that survive a crash, a full disk and a power cut, and that cannot run code when they are loaded."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pickle
import re
import shutil
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lab_utils import LabError
from lab_utils.files import sync_folder

# The name carries the first 16 hex digits of the file's SHA-256: no second file that could fail to match it.
PATTERN = re.compile(r"step-(\d{9,})-([0-9a-f]{16})\.pt")
STRAY = re.compile(r"\.step-\d{9,}\.[^/]+\.\d+\.tmp")
# How often a reader lists the folder anew when the writer has meanwhile removed what was listed.
TRIES = 10


class Checkpoints:
    """The last few checkpoints of one run, in a folder of their own.

    A save writes a temporary file, forces it to disk and only then gives it its name, so that at every moment the last
    complete checkpoint can be loaded. One process saves (rank 0); all may load.

    Args:
        folder: The folder; made when the first checkpoint is saved.
        keep: How many to keep.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise LabError("At least one checkpoint must be kept.", where=f"Checkpoints(keep={keep})", fix="keep=2")
        self.folder, self.keep = Path(folder), keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Saves a state and removes all but the last few saved ones.

        Args:
            step: Number of steps taken, from 0.
            state: Tensors, numbers, strings, and dictionaries, lists and tuples of them, such as ``state_dict()``s.

        Returns:
            The file, complete and on disk.

        Raises:
            LabError: The disk is full, the folder cannot be written to, or the state holds something that loading would
                refuse. The checkpoints that were there are as they were.
        """
        temporary = self.folder / f".step-{step:09d}.{socket.gethostname()}.{os.getpid()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_strays()
            with _removed_on_error(temporary), temporary.open("wb") as file:
                # Held until the writer closes the file or dies, however it dies: so the next save can tell a stray one.
                _try_lock(file)
                digest = _write(state, file, folder=self.folder)
                _check_readable(temporary)
                path = self.folder / f"step-{step:09d}-{digest}.pt"
                temporary.replace(path)
            sync_folder(self.folder)
        except OSError as error:
            fix = "choose a folder that you may write to"
            raise LabError("The checkpoint was not saved.", where=self.folder, cause=str(error), fix=fix) from error
        self._prune(path)
        return path

    def load(self, map_location: torch.device | str = "cpu") -> tuple[int, dict[str, Any]] | None:
        """Loads the checkpoint saved last; a damaged one is skipped with a warning that names it.

        Args:
            map_location: Where the tensors go.

        Returns:
            The step and the state, or None where nothing has been saved.

        Raises:
            LabError: All are damaged or vanish, or one holds something other than a state; none of it is run.
        """
        for _ in range(TRIES):
            # A checkpoint that the writer removed after we listed it has a newer one in its place: list again.
            with contextlib.suppress(FileNotFoundError):
                return self._load_last(map_location)
        raise LabError(
            "The checkpoints vanish while they are read.",
            where=self.folder,
            cause="another program removes them, or they are links to files that are gone",
            fix=f"see what is there: ls -l {self.folder}",
        )

    def _load_last(self, map_location: torch.device | str) -> tuple[int, dict[str, Any]] | None:
        skipped = []
        for path in reversed(self._paths()):
            try:
                # Opened once: what was found whole is what is read, whatever becomes of its name.
                with path.open("rb") as file:
                    problem = _find_damage(file, path)
                    if not problem:
                        if skipped:
                            warnings.warn(f"damaged checkpoints were skipped: {', '.join(skipped)}", stacklevel=3)
                        return _parse(path)[0], _read(file, path, map_location)
            except FileNotFoundError:
                raise
            except OSError as error:
                problem = str(error.strerror)
            skipped.append(f"{path.name} ({problem})")
        if skipped:
            raise LabError(
                "No checkpoint can be loaded.",
                where=self.folder,
                cause=f"damaged: {', '.join(skipped)}",
                fix="move the folder away and start the run anew",
            )
        return None

    def _paths(self) -> list[Path]:
        """The checkpoints, oldest first by the time of saving: a run that was started anew counts from 0 again."""
        paths = [path for path in self.folder.glob("step-*.pt") if PATTERN.fullmatch(path.name)]
        return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, _parse(path)[0]))

    def _prune(self, newest: Path) -> None:
        others = [path for path in self._paths() if path != newest]
        same_step = [path for path in others if _parse(path)[0] == _parse(newest)[0]]
        rest = [path for path in others if path not in same_step]
        for path in same_step + rest[: max(0, len(rest) - self.keep + 1)]:
            path.unlink(missing_ok=True)

    def _remove_strays(self) -> None:
        """Removes what killed saves left: files named as we name them that no living process holds."""
        for path in self.folder.glob(".step-*.tmp"):
            if STRAY.fullmatch(path.name):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


class _Digest:
    """Passes what is written on to a file, takes its SHA-256, and remembers an error instead of raising it.

    torch.save does not expect its file to fail half-way, and its total is what a message about a full disk needs.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self.written, self.error = 0, None

    def write(self, data: bytes) -> int:
        size = memoryview(data).nbytes
        self.written += size
        if self.error is None:
            try:
                self._file.write(data)
                self._hash.update(data)
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        pass  # torch.save asks for it; the file is flushed once, by _write, where errors can be told

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:16]


def _write(state: dict[str, Any], file: BinaryIO, *, folder: Path) -> str:
    """Writes a state down to the disk and returns the digest for its name."""
    target = _Digest(file)
    torch.save(state, target)
    try:
        if target.error is not None:
            raise target.error
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        there = os.fstat(file.fileno()).st_size
        free = shutil.disk_usage(folder).free + there
        raise LabError(
            f"The checkpoint needs {target.written:,} bytes, and {free:,} are free.",
            where=folder,
            cause=f"{error.strerror}; the checkpoints saved before are intact",
            fix="free some space, or choose a folder on another disk",
        ) from error
    return target.hexdigest()


def _check_readable(path: Path) -> None:
    """Refuses at once what loading would refuse when it is needed; mapped, so that no tensor is read."""
    try:
        torch.load(path, weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise LabError(
            "The state holds something that a checkpoint may not hold.",
            where="Checkpoints.save",
            cause=_first_line(error),
            fix="save state_dict()s, tensors, numbers and strings only",
        ) from error


def _find_damage(file: BinaryIO, path: Path) -> str:
    """Says what is wrong with a file, or nothing where it is, byte by byte, what was saved."""
    digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return "" if digest == _parse(path)[1] else "torn or altered: its SHA-256 is not the one in its name"


def _read(file: BinaryIO, path: Path, map_location: torch.device | str) -> dict[str, Any]:
    file.seek(0)
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, EOFError) as error:
        raise LabError(
            "The checkpoint holds something other than a state; nothing in it was run.",
            where=path,
            cause=f"the file was not made by these labs: {_first_line(error)}",
            fix="do not load it another way; delete it unless you know who made it",
        ) from error


def _parse(path: Path) -> tuple[int, str]:
    step, digest = PATTERN.fullmatch(path.name).groups()
    return int(step), digest


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _try_lock(file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # some network file systems have no locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
