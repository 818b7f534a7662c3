"""The state in a checkpoint's file: written to the disk, and read from a file that anybody may have made."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
import re
import shutil
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lab_common import LabError
from lab_common.text import clean_name
from lab_utils.training.unfit import find_shard, find_unfit

# What torch raises for want of a disk, of memory or of a device: no other state would mend it.
NOT_OF_THE_STATE = (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)


class UnusableError(Exception):
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
        pass  # torch.save asks for it; the file is flushed once, by write_state, where errors can be told

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:16]


def write_state(state: dict[str, Any], file: BinaryIO, *, folder: Path) -> str:
    """Writes a state down to the disk and returns the digest for its name."""
    if place := find_shard(state):
        fix = (
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) on every rank, save on rank 0"
        )
        cause = "a state_dict() after fully_shard or parallelize_module holds parts: the others' would be lost"
        raise LabError(f"{place} is a DTensor, of which this rank holds only its part."[:120], cause=cause, fix=fix)
    target = _Digest(file)
    try:
        torch.save(state, target)
    except NOT_OF_THE_STATE:
        raise
    except Exception as error:  # whatever the __getstate__ and __reduce__ of the objects in it raise
        raise explain_state(state, error) from error
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


def check_readable(path: Path, state: dict[str, Any]) -> None:
    """Refuses at once what loading would refuse when it is needed; mapped, so that no tensor is read."""
    try:
        with path.open("rb") as file:
            _check_pickle(file)
        # On the CPU, where the file is only mapped: tensors of a GPU would be copied back to it.
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, UnusableError) as error:
        raise explain_state(state, error) from error


def explain_state(state: dict[str, Any], error: Exception) -> LabError:
    """Returns the error for a state that cannot be saved or loaded: which entry, its type, and what to save instead."""
    found = find_unfit(state, _is_loadable)
    if not found:
        return refuse_state(_say(error))
    (place, kind, instead), *others = found
    more = f"; so are {', '.join(f'{where} ({what})' for where, what, _ in others[:3])}" if others else ""
    more += f", and {len(others) - 3} more" if len(others) > 3 else ""
    return LabError(
        f"{clean_name(place, 60)} is {clean_name(kind, 32)}, which a checkpoint may not hold.",
        where="Checkpoints.save",
        cause="loading it would run code of its class" + clean_name(more, 500),
        fix=clean_name(f"save {instead}" if instead else f"leave {place} out, and make it anew after loading", 300),
    )


def _is_loadable(content: bytes) -> bool:
    try:
        with io.BytesIO(content) as file:
            _check_pickle(file)
            _load(file, "cpu")
    except Exception:
        return False
    return True


def refuse_state(reason: str) -> LabError:
    """Returns the error for what no checkpoint may hold."""
    return LabError(
        "The state holds something that a checkpoint may not hold.",
        where="Checkpoints.save",
        cause=reason,
        fix="save a dictionary of state_dict()s, tensors, numbers and strings only",
    )


def check_whole(file: BinaryIO, digest: str) -> None:
    """Raises an UnusableError where a file is not, byte by byte, what was saved under this digest."""
    # No more than it says it has: a link may lead to what never ends, such as /proc/kmsg, which says 0.
    left, found = os.fstat(file.fileno()).st_size, hashlib.sha256()
    if not left:
        raise UnusableError("it is empty")
    while block := file.read(min(left, 2**20)):
        found.update(block)
        left -= len(block)
    if found.hexdigest()[:16] != digest:
        raise UnusableError("torn or altered: its SHA-256 is not the one in its name")


def read_state(file: BinaryIO, path: Path, map_location: torch.device | str) -> dict[str, Any]:
    """Reads a state from a file that is what its name says, whoever made it.

    Raises:
        UnusableError: It holds none.
        LabError: It refers to code, or the device is not there.
    """
    file.seek(0)
    if file.read(1) == pickle.PROTO:
        raise _refuse_code(path, "a bare pickle")
    try:
        check_archive(file)
        state = _load(file, map_location)
    except UnusableError:
        raise
    except Exception as error:  # torch raises whatever its unpickler and its readers do, a KeyError as well
        reason = _say(error)
        if "unsupported global" in str(error).lower():
            raise _refuse_code(path, reason) from error
        if str(map_location) != "cpu" and _is_readable(file):
            raise LabError(
                f"The checkpoint cannot be put on {clean_name(map_location, 40)}.",
                where=path,
                cause=clean_name(reason, 300),
                fix="load(map_location='cpu')",
            ) from error
        raise UnusableError(f"it cannot be read: {reason}") from error
    if not isinstance(state, dict):
        raise UnusableError(f"it holds a {type(state).__name__}, not a state")
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


def check_archive(file: BinaryIO) -> None:
    """Raises an UnusableError where a file is none of torch.save, or loading it would take more than it has bytes."""
    _check_ends(file)
    _check_records(file)
    _check_pickle(file)


def _check_ends(file: BinaryIO) -> None:
    """Refuses what may be two archives in one: the one that zipfile finds is checked, and the one torch finds is read.

    A file of torch.save begins with a record, and ends with the list of all, right before what says where the list is.
    """
    file.seek(0)
    begins = file.read(4) == b"PK\3\4"
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 98))
    last = file.read(98).rjust(98, b"\0")
    mark, *_, length, start, comment = struct.unpack("<4s4H2IH", last[76:])
    whole, listed = mark == b"PK\5\6" and comment == 0, size - 22
    if last[56:60] == b"PK\6\7":  # the form for large files, as torch.save writes all: a pointer to what precedes it
        listed = size - 98
        mark, *_, length, start = struct.unpack("<4sQ2H2I4Q", last[:56])
        whole = whole and mark == b"PK\6\6" and struct.unpack("<Q", last[64:72])[0] == listed
    if not (begins and whole and start + length == listed):
        raise UnusableError("no file of torch.save: it is no single archive from its first byte to its last")


def _check_pickle(file: BinaryIO) -> None:
    """Refuses a bytearray: it takes as many bytes as a number says, and torch would let it."""
    file.seek(0)
    content = torch._C.PyTorchFileReader(file).get_record("data.pkl")  # what torch.load reads, whatever zipfile finds
    if b"\nbytearray\n" not in content:  # a text may hold that as well
        return
    try:
        names = [str(name) for code, name, _ in pickletools.genops(content) if code.name == "GLOBAL"]
    except ValueError as error:
        raise UnusableError(f"its pickle cannot be read: {_first_line(error)}") from error
    if any(name.endswith(" bytearray") for name in names):
        raise UnusableError("its pickle makes a bytearray, of any size")


def _check_records(file: BinaryIO) -> None:
    """Refuses a file whose records, once read, take more memory than the file has bytes: torch.save compresses none."""
    try:
        with zipfile.ZipFile(file) as records:
            sizes = [info.file_size for info in records.infolist()]
            stored = all(info.compress_type == zipfile.ZIP_STORED for info in records.infolist())
    except Exception as error:  # zipfile raises struct.error, NotImplementedError and others for what it cannot read
        raise UnusableError(f"no file of torch.save: {_first_line(error)}") from error
    if not stored or sum(sizes) > file.seek(0, os.SEEK_END):
        raise UnusableError("no file of torch.save: its records are compressed")


def _refuse_code(path: Path, reason: str) -> LabError:
    return LabError(
        "The checkpoint holds something other than a state; nothing in it was run.",
        where=path,
        cause=f"the file was not made by these labs: {clean_name(reason, 300)}",
        fix="do not load it another way; delete it unless you know who made it",
    )


def _say(error: Exception) -> str:
    """What was wrong, without the advice of torch to load the file all the same."""
    # It puts that advice before what was wrong, which is the error that it was making its own of.
    text = str(error.__context__ or error)
    if found := re.search(r"(?:GLOBAL|but got) (?:<class ')?([^\s']+)", text):
        return f"it refers to the code of {found[1]}, which is neither a tensor nor a number, text or container"
    if "Weights only load failed" in text:
        return "its pickle is none of a state_dict()"
    return _first_line(error.__context__ or error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
