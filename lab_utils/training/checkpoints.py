"""Checkpoints that survive a crash, a full disk and a power cut, and that cannot run code when they are loaded."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import operator
import os
import pickle
import re
import secrets
import shutil
import socket
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lab_utils import LabError
from lab_utils.files import open_regular, sync_folder
from lab_utils.text import clean_name

# The name carries the first 16 hex digits of the file's SHA-256: no second file that could fail to match it.
PATTERN = re.compile(r"step-([0-9]{9,})-([0-9a-f]{16})\.pt")
STRAY = re.compile(r"\.step-\d{9,}\.[^/]+\.\d+\.tmp")
# How often a reader lists the folder anew when the writer has meanwhile removed what was listed.
TRIES = 10
GONE = "a link to a file that is gone"


class Checkpoints:
    """The last few checkpoints of one run, in a folder of their own.

    A save writes a temporary file, forces it to disk and only then gives it its name, so that at every moment the last
    complete checkpoint can be loaded. One process saves (rank 0); all may load.

    Checkpoints are ordered by their step, never by the time of their files: clocks are set back. So a folder belongs to
    one run, which goes on from what :meth:`load` gives. A run that is started anew from step 0 wants a folder of its
    own; in the old one it is told so, nothing of the old run is removed before the new one has come as far, and until
    then ``load`` gives the old run's last step.

    Args:
        folder: The folder; made when the first checkpoint is saved.
        keep: How many to keep.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise LabError("At least one checkpoint must be kept.", where=f"Checkpoints(keep={keep})", fix="keep=2")
        self.folder, self.keep = Path(folder), keep
        # What this process has said already: names of damaged files, and those of higher steps than the one it saved.
        self._told: set[str] = set()

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Saves a state, and of the lower steps removes all but the last few; higher ones are left alone.

        Args:
            step: Number of steps taken, from 0.
            state: Tensors, numbers, strings, and dictionaries, lists and tuples of them, such as ``state_dict()``s.

        Returns:
            The file, complete and on disk.

        Raises:
            LabError: The disk is full, the folder cannot be written to, the step is no number from 0, or the state
                holds something that loading would refuse. The checkpoints that were there are as they were.
        """
        step = _check_step(step)
        if not isinstance(state, dict):
            raise _refuse_state(f"it is a {type(state).__name__}, not a dictionary")
        # No name that somebody else could guess, and give to a link.
        writer = f"{socket.gethostname()}-{secrets.token_hex(4)}.{os.getpid()}"
        temporary = self.folder / f".step-{step:09d}.{writer}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_strays()
            with _removed_on_error(temporary), temporary.open("xb") as file:
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
        higher = self._prune(path)
        if new := {name.name for name in higher} - self._told:
            self._told |= new
            warnings.warn(
                f"step {_parse(higher[-1])[0]} of an earlier run is in {self.folder}, and step {step} was saved beside "
                "it: load() gives the highest step; choose a folder of its own for each run",
                stacklevel=2,
            )
        return path

    def load(self, map_location: torch.device | str = "cpu") -> tuple[int, dict[str, Any]] | None:
        """Loads the checkpoint of the highest step; a damaged one is skipped with a warning that names it.

        Args:
            map_location: Where the tensors go.

        Returns:
            The step and the state, or None where nothing has been saved.

        Raises:
            LabError: All are damaged or vanish, one holds something that would run code (none of it is run), or the
                tensors cannot be put on the device.
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
        skipped: dict[str, str] = {}
        for path in reversed(self._paths()):
            try:
                # Opened once: what was found whole is what is read, whatever becomes of its name.
                with open_regular(path) as file:
                    _check_whole(file, path)
                    state = _read(file, path, map_location)
            except FileNotFoundError:
                if not path.is_symlink():
                    raise
                skipped[path.name] = GONE
            except _UnusableError as error:
                skipped[path.name] = clean_name(error, 200)
            except OSError as error:
                skipped[path.name] = str(error.strerror)
            else:
                if skipped:
                    self._told |= set(skipped)
                    names = ", ".join(f"{name} ({problem})" for name, problem in skipped.items())
                    warnings.warn(f"damaged checkpoints were skipped: {names}", stacklevel=3)
                return _parse(path)[0], state
        if set(skipped.values()) == {GONE}:
            raise FileNotFoundError(GONE)
        if skipped:
            raise LabError(
                "No checkpoint can be loaded.",
                where=self.folder,
                cause="damaged: " + ", ".join(f"{name} ({problem})" for name, problem in skipped.items()),
                fix="move the folder away and start the run anew",
            )
        return None

    def _paths(self) -> list[Path]:
        """The checkpoints, the highest step last; times decide only between two of one step (a save was killed)."""
        try:
            paths = [path for path in self.folder.iterdir() if PATTERN.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            cause, fix = str(error.strerror), f"see what is there: ls -ld {self.folder}"
            raise LabError("The checkpoints cannot be listed.", where=self.folder, cause=cause, fix=fix) from error
        return sorted(paths, key=lambda path: (_parse(path)[0], _find_time(path)))

    def _prune(self, newest: Path) -> list[Path]:
        """Removes what is no longer to be kept, and returns the checkpoints of higher steps.

        Those are another run's, or damaged: neither may push out what this run has saved, nor this run them.
        """
        step = _parse(newest)[0]
        others = [path for path in self._paths() if path != newest]
        same = [path for path in others if _parse(path)[0] == step]
        lower = [path for path in others if _parse(path)[0] < step]
        for path in same + lower[: max(0, len(lower) - self.keep + 1)]:
            with contextlib.suppress(OSError):  # the new one is safe; the next save tries again
                path.unlink()
        return [path for path in others if _parse(path)[0] > step]

    def _remove_strays(self) -> None:
        """Removes what killed saves left: files named as we name them that no living process holds."""
        for path in self.folder.glob(".step-*.tmp"):
            if STRAY.fullmatch(path.name):
                with contextlib.suppress(OSError), open_regular(path) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


class _UnusableError(Exception):
    """Why a checkpoint cannot be loaded; the one before it may be."""


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
    try:
        torch.save(state, target)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise _refuse_state(_first_line(error)) from error
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
        raise _refuse_state(_first_line(error)) from error


def _refuse_state(reason: str) -> LabError:
    return LabError(
        "The state holds something that a checkpoint may not hold.",
        where="Checkpoints.save",
        cause=reason,
        fix="save a dictionary of state_dict()s, tensors, numbers and strings only",
    )


def _check_step(step: int) -> int:
    try:
        if (number := operator.index(step)) >= 0:
            return number
    except TypeError:
        pass
    cause = "steps are counted from 0, in whole numbers"
    raise LabError(
        "This is no number of steps.", where=f"Checkpoints.save({step!r}, ...)", cause=cause, fix="save(0, state)"
    )


def _check_whole(file: BinaryIO, path: Path) -> None:
    """Raises where a file is not, byte by byte, what was saved."""
    if hashlib.file_digest(file, "sha256").hexdigest()[:16] != _parse(path)[1]:
        raise _UnusableError("torn or altered: its SHA-256 is not the one in its name")


def _read(file: BinaryIO, path: Path, map_location: torch.device | str) -> dict[str, Any]:
    """Reads a state from a file that is what its name says, whoever made it.

    Raises:
        _UnusableError: It holds none.
        LabError: It refers to code, or the device is not there.
    """
    file.seek(0)
    if file.read(1) == pickle.PROTO:
        raise _refuse_code(path, "a bare pickle")
    _check_records(file)
    try:
        state = _load(file, map_location)
    except Exception as error:  # torch raises whatever its unpickler and its readers do, a KeyError as well
        # torch puts advice to load it unsafely before what was wrong.
        reason = _first_line(error.__context__ or error)
        if "unsupported global" in str(error).lower():
            raise _refuse_code(path, reason) from error
        if str(map_location) != "cpu" and _is_readable(file):
            raise LabError(
                f"The checkpoint cannot be put on {clean_name(map_location, 40)}.",
                where=path,
                cause=clean_name(reason, 300),
                fix="load(map_location='cpu')",
            ) from error
        raise _UnusableError(f"it cannot be read: {reason}") from error
    if not isinstance(state, dict):
        raise _UnusableError(f"it holds a {type(state).__name__}, not a state")
    return state


def _load(file: BinaryIO, map_location: torch.device | str) -> object:
    file.seek(0)
    with warnings.catch_warnings(action="ignore"):  # those of torch, about what is in the file
        return torch.load(file, map_location=map_location, weights_only=True)


def _is_readable(file: BinaryIO) -> bool:
    """Says whether a file can be read on the CPU."""
    try:
        _load(file, "cpu")
    except Exception:
        return False
    return True


def _check_records(file: BinaryIO) -> None:
    """Refuses a file whose records, once read, take more memory than the file has bytes: torch.save compresses none."""
    try:
        with zipfile.ZipFile(file) as records:
            sizes = [info.file_size for info in records.infolist()]
            stored = all(info.compress_type == zipfile.ZIP_STORED for info in records.infolist())
    except Exception as error:  # zipfile raises struct.error, NotImplementedError and others for what it cannot read
        raise _UnusableError(f"no file of torch.save: {_first_line(error)}") from error
    if not stored or sum(sizes) > file.seek(0, os.SEEK_END):
        raise _UnusableError("no file of torch.save: its records are compressed")


def _refuse_code(path: Path, reason: str) -> LabError:
    return LabError(
        "The checkpoint holds something other than a state; nothing in it was run.",
        where=path,
        cause=f"the file was not made by these labs: {clean_name(reason, 300)}",
        fix="do not load it another way; delete it unless you know who made it",
    )


def _find_time(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:  # the writer has just removed it
        return 0


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
