"""Checkpoints that survive a crash, a full disk and a power cut, and that cannot run code when they are loaded."""

from __future__ import annotations

import contextlib
import fcntl
import operator
import os
import re
import secrets
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lab_common import LabError, read_path
from lab_common.files import open_regular, sync_folder
from lab_common.text import clean_name
from lab_utils.training.states import UnusableError, check_readable, check_whole, read_state, refuse_state, write_state

# The name carries the first 16 hex digits of the file's SHA-256: no second file that could fail to match it.
PATTERN = re.compile(r"step-([0-9]{9,})-([0-9a-f]{16})\.pt")
STRAY = re.compile(r"\.step-\d{9,}\.[^/]+\.\d+\.tmp")
# How often a reader lists the folder anew when the writer has meanwhile removed what was listed.
TRIES = 10
GONE = "a link to a file that is gone"
# No run takes as many steps, and Python prints no number of more than 4,300 digits.
MOST_STEPS = 10**18


class Checkpoints:
    """The last few checkpoints of one run, in a folder of their own.

    A save writes a temporary file, forces it to disk and only then gives it its name, so that at every moment the last
    complete checkpoint can be loaded. One process saves (rank 0); all may load. Where several save by mistake, one of
    their files stays.

    Checkpoints are ordered by their step, never by the time of their files: clocks are set back. So a folder belongs to
    one run, which goes on from what :meth:`load` gives. A run that is started anew from step 0 wants a folder of its
    own; in the old one it is told so, nothing of the old run is removed before the new one has come as far, and until
    then ``load`` gives the old run's last step.

    Args:
        folder: The folder; made when the first checkpoint is saved.
        keep: How many to keep; links, and what :meth:`load` has found damaged, are removed before those that are good.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise LabError("At least one checkpoint must be kept.", where=f"Checkpoints(keep={keep})", fix="keep=2")
        self.folder, self.keep = read_path(folder), keep
        # What this process has said already: names of damaged files, and those of higher steps than the one it saved.
        self._told: set[str] = set()
        # Names of the files that it could not load, and that are no longer to count.
        self._damaged: set[str] = set()

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Saves a state, and of the lower steps removes all but the last few; higher ones are left alone.

        Args:
            step: Number of steps taken, from 0; at most 18 digits.
            state: Tensors, numbers, strings, and dictionaries, lists and tuples of them, as of ``state_dict()``.

        Returns:
            The file, complete and on disk.

        Raises:
            LabError: The disk is full, the folder cannot be written to, the step is no number from 0, or the state
                holds something that cannot be saved or that loading would refuse, such as a bytearray. The checkpoints
                that were there are as they were.
        """
        step = _check_step(step)
        if not isinstance(state, dict):
            raise refuse_state(f"it is a {type(state).__name__}, not a dictionary")
        # No name that somebody else could guess, and give to a link.
        writer = f"{socket.gethostname()}-{secrets.token_hex(4)}.{os.getpid()}"
        temporary = self.folder / f".step-{step:09d}.{writer}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_strays()
            with _removed_on_error(temporary), temporary.open("xb") as file:
                # Held until the writer closes the file or dies, however it dies: so the next save can tell a stray one.
                _try_lock(file)
                digest = write_state(state, file, folder=self.folder)
                check_readable(temporary, state)
                path = self.folder / f"step-{step:09d}-{digest}.pt"
                # Before the file has its name: whoever names one later has not been seen by us, and keeps it.
                old, higher = self._find_others(path)
                temporary.replace(path)
            sync_folder(self.folder)
        except OSError as error:
            file = isinstance(error, FileExistsError | NotADirectoryError)
            fix = "choose a folder: a file lies there" if file else "choose a folder that you may write to"
            raise LabError("The checkpoint was not saved.", where=self.folder, cause=str(error), fix=fix) from error
        self._damaged.discard(path.name)
        _remove(old)
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
                    check_whole(file, _parse(path)[1])
                    state = read_state(file, path, map_location)
            except FileNotFoundError:
                if not path.is_symlink():
                    raise
                skipped[path.name] = GONE
            except UnusableError as error:
                skipped[path.name] = clean_name(error, 200)
                self._damaged.add(path.name)
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
        return sorted(paths, key=lambda path: (_parse(path)[0], _identify(path)))

    def _find_others(self, newest: Path) -> tuple[dict[Path, tuple[int, int]], list[Path]]:
        """Returns what is not to be kept beside the newest, as it is now, and the checkpoints of higher steps.

        Those are another run's, or damaged: neither may push out what this run has saved, nor this run them.
        """
        step = _parse(newest)[0]
        others = [path for path in self._paths() if path != newest]
        same = [path for path in others if _parse(path)[0] == step]
        # What cannot be loaded goes first, and so pushes out none that can.
        lower = sorted((path for path in others if _parse(path)[0] < step), key=self._is_good)
        old = same + lower[: max(0, len(lower) - self.keep + 1)]
        return {path: _identify(path) for path in old}, [path for path in others if _parse(path)[0] > step]

    def _is_good(self, path: Path) -> bool:
        return path.name not in self._damaged and path.is_file() and not path.is_symlink()

    def _remove_strays(self) -> None:
        """Removes what killed saves left: files named as we name them that no living process holds."""
        for path in self.folder.glob(".step-*.tmp"):
            if STRAY.fullmatch(path.name):
                with contextlib.suppress(OSError), open_regular(path) as file:
                    found = os.fstat(file.fileno())
                    # A minute's grace: between another's open and its lock its file is empty, and the lock free.
                    if found.st_size or time.time() - found.st_mtime >= 60:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink()


def _remove(old: dict[Path, tuple[int, int]]) -> None:
    for path, found in old.items():
        with contextlib.suppress(OSError):  # the new one is safe; the next save tries again
            if _identify(path) == found:  # and not what another process has meanwhile saved under the same name
                path.unlink()


def _check_step(step: int) -> int:
    try:
        if 0 <= (number := operator.index(step)) < MOST_STEPS:
            return number
    except TypeError:
        pass
    try:
        shown = clean_name(repr(step), 40)
    except ValueError:
        shown = "a number too long to print"
    cause = "steps are counted from 0, in whole numbers of at most 18 digits"
    raise LabError(
        "This is no number of steps.", where=f"Checkpoints.save({shown}, ...)", cause=cause, fix="save(0, state)"
    )


def _identify(path: Path) -> tuple[int, int]:
    """Returns a file's time and number: another file of the same name has others."""
    try:
        found = path.lstat()
    except OSError:  # the writer has just removed it
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def _parse(path: Path) -> tuple[int, str]:
    step, digest = PATTERN.fullmatch(path.name).groups()
    return int(step), digest


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
