"""Checkpoints that survive a crash, a full disk and a power cut, and that run no code when they are loaded."""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import io
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab_common import LabError, read_folder
from lab_common.files import hold_lock, open_regular, write_atomically
from lab_common.text import clean_name

# The step, and the first 16 hex digits of the file's SHA-256.
PATTERN = re.compile(r"step-[0-9]{9,}-[0-9a-f]{16}\.pt")
PLAIN = (torch.Tensor, torch.nn.Parameter, int, float, str, bool, complex, bytes, type(None))


class Checkpoints:
    """The last few checkpoints of one run, ordered by step and never by time, because clocks are set back.

    Args:
        folder: A folder for this run alone; made when the first checkpoint is saved.
        keep: How many checkpoints to keep, at least 1.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self.folder, self.keep = read_folder(folder), max(keep, 1)
        self._damaged: dict[Path, str] = {}

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Saves a state, and keeps only the last few of the lower steps; higher ones are an earlier run's, and stay.

        It takes as much memory again as the file has bytes.

        Raises:
            LabError: The disk is full, the folder cannot be written to, or the state holds something that would not
                load. The earlier checkpoints are unchanged.
        """
        if not isinstance(step, int | np.integer) or step < 0:
            raise LabError(f"{clean_name(step, 40)} is not a whole number from 0.", where="save", fix="save(0, state)")
        _check_state(state)
        torch.save(state, buffer := io.BytesIO())
        content = buffer.getbuffer()
        path = self.folder / f"step-{step:09d}-{hashlib.sha256(content).hexdigest()[:16]}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_strays()
            others = self._list_files()  # before the rename: what another process saves from now on stays
            with write_atomically(path, prefix=f".step-{step:09d}.") as file:
                hold_lock(file.fileno())
                file.write(content)
        except OSError as error:
            what, fix = "The checkpoint was not saved.", "choose a folder that you may write to"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                free = shutil.disk_usage(self.folder).free
                what = f"The checkpoint needs {len(content):,} bytes, and {free:,} are free."
                fix = "free some space, or choose another disk; the earlier checkpoints are unchanged"
            raise LabError(what, where=self.folder, cause=str(error.strerror), fix=fix) from error
        self._damaged.pop(path, None)
        self._remove_old(others, step)
        if (highest := max(others.values(), default=(0, 0))[0]) > step:
            warnings.warn(f"load() gives step {highest} of an earlier run: use a new folder for each run", stacklevel=2)
        return path

    def load(self, map_location: torch.device | str = "cpu") -> tuple[int, dict[str, Any]] | None:
        """Returns the highest undamaged step and its state, or None if nothing has been saved.

        Raises:
            LabError: All are damaged, or one would run code; none of it is run.
        """
        self._damaged.clear()
        for path, (step, _) in reversed(self._list_files().items()):
            try:
                state = _read_state(path, map_location)
            except OSError as error:
                if not os.path.lexists(path):  # the writer has just removed it, because there is a newer one
                    return self.load(map_location)
                self._damaged[path] = f"{path.name} ({error.strerror})"
                continue
            if self._damaged:
                warnings.warn(f"damaged checkpoints were skipped: {', '.join(self._damaged.values())}", stacklevel=2)
            return step, state
        if self._damaged:
            cause, fix = f"damaged: {', '.join(self._damaged.values())}", "move the folder away and start the run again"
            raise LabError("No checkpoint can be loaded.", where=self.folder, cause=cause, fix=fix)
        return None

    def _list_files(self) -> dict[Path, tuple[int, int]]:
        """Returns the step and the inode of each checkpoint, highest step last."""
        entries = os.scandir(self.folder) if self.folder.exists() else ()
        found = [entry for entry in entries if PATTERN.fullmatch(entry.name)]
        files = {Path(entry.path): (int(entry.name.split("-")[1]), entry.inode()) for entry in found}
        return dict(sorted(files.items(), key=lambda item: item[1]))

    def _remove_old(self, files: dict[Path, tuple[int, int]], step: int) -> None:
        same = [path for path, (other, _) in files.items() if other == step]
        lower = [path for path, (other, _) in reversed(files.items()) if other < step]
        lower.sort(key=lambda path: path in self._damaged)  # a damaged one never takes the place of a good one
        now = self._list_files()
        for path in same + lower[self.keep - 1 :]:
            if now.get(path) == files[path]:  # if the inode differs, another process has saved it again
                with contextlib.suppress(OSError):  # the next save tries again
                    path.unlink()

    def _remove_strays(self) -> None:
        """Removes the temporary files of killed saves: a living one has locked its file."""
        for path in self.folder.glob(".step-[0-9]*.tmp"):
            with contextlib.suppress(OSError), open_regular(path) as file:
                if hold_lock(file.fileno()):
                    path.unlink()


def _read_state(path: Path, map_location: torch.device | str) -> dict[str, Any]:
    """Reads a checkpoint; raises an OSError if it is damaged."""
    with open_regular(path) as file:
        if hashlib.file_digest(file, "sha256").hexdigest()[:16] != path.stem[-16:]:
            raise OSError(errno.EBADMSG, "its SHA-256 is not the one in its name")
        file.seek(0)
        try:
            return torch.load(file, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            # torch's message also says how to load the file anyway; the error's context is the reason alone.
            cause = clean_name(str(error.__context__ or error).split(" was not an allowed")[0], 300)
            what, fix = "The checkpoint is not only data; nothing in it was run.", "delete it, or ask who made it"
            raise LabError(what, where=path, cause=cause, fix=fix) from error


def _check_state(state: object) -> None:
    """Raises a LabError that names the first value that would not load."""
    for place, value in _find_unfit(state, "state"):
        raise LabError(
            f"{place} is of type {type(value).__module__}.{type(value).__qualname__}."[:120],
            cause="only whole tensors, numbers, text, and dictionaries and lists of them load without running code",
            fix=f"save as tensors, numbers or text what {place} holds: float(x), x.tolist(), str(x), vars(x), "
            "x.state_dict(), x.full_tensor() of a DTensor; or leave it out, and build it again after loading",
        )


def _find_unfit(value: object, place: str) -> Iterator[tuple[str, object]]:
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        for key, entry in value.items():
            yield from _find_unfit(key, f"a key of {place}, {key!r:.40},")
            yield from _find_unfit(entry, f'{place}["{key}"]' if isinstance(key, str) else f"{place}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for index, entry in enumerate(value):
            yield from _find_unfit(entry, f"{place}[{index}]")
    elif type(value) not in PLAIN and not _is_loadable(value):
        yield place, value


def _is_loadable(value: object) -> bool:
    try:
        torch.save(value, file := io.BytesIO())
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # whatever its __reduce__ raises
        return False
    return not hasattr(value, "device_mesh")  # this rank holds only a part of a DTensor
