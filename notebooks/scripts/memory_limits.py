"""Measurements of memory for lab 10: a step's curve, the largest model that trains, a save that is killed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lab_utils import LabError
from lab_utils.memory import local
from lab_utils.timing.memory import return_memory

# Seconds that the search for the largest model may take, and its first and last guess of layers.
PATIENCE, FEWEST, MOST = 400.0, 1, 4096
M_MMAP_THRESHOLD = -3  # of <malloc.h>
# A process of its own, which is killed in mid-save.
SAVE = """
import sys, torch
from torch.distributed import checkpoint
state = {f"part {n}": torch.ones(2**22) for n in range(12)}
checkpoint.save(state, checkpoint_id=sys.argv[1], no_dist=True)
"""


def record_step(
    optimizer: torch.optim.Optimizer, held: int, find_loss: Callable[..., torch.Tensor], *arguments: object
) -> dict[str, list[tuple[float, float]]]:
    """Records a training step as :func:`record_curve` does, in the parts forward, backward and step.

    Args:
        optimizer: Steps; its gradients are None.
        held: Bytes that are held before.
        find_loss: Runs forward on the arguments and returns the loss.
        arguments: What ``find_loss`` takes.
    """
    losses: list[torch.Tensor] = []
    parts = {
        "forward": lambda: losses.append(find_loss(*arguments)),
        "backward": lambda: losses.pop().backward(),
        "step": optimizer.step,
    }
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return record_curve(parts, held, lambda: [weight.grad for weight in weights])


def record_curve(
    parts: dict[str, Callable[[], object]], held: int, list_kept: Callable[[], Iterable[torch.Tensor | None]]
) -> dict[str, list[tuple[float, float]]]:
    """Runs the parts of a step under torch's profiler, and reads every allocation that this thread makes on the CPU.

    What is freed has to be allocated inside: the profiler does not know the size of older memory. It does not see what
    another thread frees either, such as the copies that Gloo makes. So an allocation without an end counts only if it
    is kept.

    Args:
        parts: Functions without arguments, in their order, by name.
        held: Bytes that are held before.
        list_kept: Lists, after the last part, the tensors that it leaves.

    Returns:
        For each part the bytes held, as (milliseconds since the first part began, MB) after each allocation.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        for name, run in parts.items():
            with record_function(f"part {name}"):
                run()
    kept = {local(tensor).untyped_storage().data_ptr() for tensor in list_kept() if tensor is not None}
    with tempfile.TemporaryDirectory() as folder:
        prof.export_chrome_trace(str(path := Path(folder, "trace.json")))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = {one["name"][5:]: one for one in events if one["name"].startswith("part ")}
    curve: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
    begin = min(one["ts"] for one in spans.values())
    for change in _list_changes(events, kept):
        held += change["args"]["Bytes"]
        for name, span in spans.items():
            if span["ts"] <= change["ts"] <= span["ts"] + span["dur"]:
                curve[name].append(((change["ts"] - begin) / 1e3, held / 1e6))
    return curve


def _list_changes(events: list[dict], kept: set[int]) -> list[dict]:
    """The allocations that are kept, or have an end, and these ends, in their order."""
    changes = [one for one in events if one["name"] == "[memory]" and one["args"]["Device Type"] == 0]
    # Each at its time; those of one microsecond in the order of the profiler.
    changes.sort(key=lambda one: (one["ts"], one["args"]["Ev Idx"]))
    shown, allocated = set(), {}
    for number, change in enumerate(changes):
        address = change["args"]["Addr"]
        if change["args"]["Bytes"] > 0:
            allocated[address] = number
        elif address in allocated:
            shown |= {allocated.pop(address), number}
    shown |= {number for address, number in allocated.items() if address in kept}
    return [change for number, change in enumerate(changes) if number in shown]


def save_and_kill(folder: Path) -> list[str]:
    """Kills another process while it saves 0.2 GB by ``torch.distributed.checkpoint``; returns the files that it left.

    It is killed as soon as its first file is there. Its files are deleted.

    Args:
        folder: Where it saves; a folder of that name is replaced.

    Raises:
        LabError: It ended by itself.
    """
    shutil.rmtree(folder, ignore_errors=True)
    writer = subprocess.Popen([sys.executable, "-c", SAVE, folder], stderr=subprocess.DEVNULL)
    try:
        while not list(folder.glob("*")) and writer.poll() is None:
            time.sleep(0.001)
    finally:
        writer.kill()
        writer.wait()
    files = [path.name for path in folder.glob("*")]
    shutil.rmtree(folder, ignore_errors=True)
    if writer.returncode != -signal.SIGKILL:
        cause = f"exit status {writer.returncode}; is the disk full?"
        raise LabError("The process that saves ended by itself.", where=str(folder), cause=cause, fix="run it again")
    return files


def find_most_layers(train: Callable[[int], object], card: int) -> int:
    """Finds how many layers a model may have until a training step runs out of memory; none where one is too many.

    On a GPU it is the GPU's own memory. Without one, Linux limits what a fork of this process may allocate: a real
    error of the allocator, at a limit that stands for a card.

    Args:
        train: Builds a model of so many layers and trains a step or two.
        card: Bytes of memory of the card, where there is no GPU.

    Raises:
        LabError: The fork did not end, or failed of something else; or there is neither a GPU nor Linux.
    """
    if torch.cuda.is_available():
        return _search(train)

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        try:
            train(FEWEST)  # one-time memory: kernels, buffers
            with _limit(card):
                theirs.send(_search(train))
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {error}")

    child = context.Process(target=work)
    child.start()
    theirs.close()
    found: int | str = "it took too long, or was killed"
    with contextlib.suppress(EOFError):
        if ours.poll(PATIENCE):
            found = ours.recv()
    child.kill()
    child.join()
    if isinstance(found, str):
        fix = "give a smaller card, or close other programs"
        raise LabError("The search did not end.", where="find_most_layers()", cause=found, fix=fix)
    return found


def _search(train: Callable[[int], object]) -> int:
    """The largest number of layers that trains: doubled until it does not, then halved in between."""
    works, fails = 0, FEWEST
    while fails <= MOST and _fits(train, fails):
        works, fails = fails, 2 * fails
    while fails - works > 1:
        middle = (works + fails) // 2
        works, fails = (middle, fails) if _fits(train, middle) else (works, middle)
    return works


def _fits(train: Callable[[int], object], layers: int) -> bool:
    free()
    try:
        train(layers)
    except (torch.OutOfMemoryError, MemoryError):
        return False
    except RuntimeError as error:
        # What torch's allocator raises on a CPU, and threads that find no memory.
        if "can't allocate memory" not in str(error) and "bad_alloc" not in str(error):
            raise
        return False
    return True


def free() -> None:
    """Collects what Python no longer needs, and gives its memory back to the system."""
    gc.collect()
    return_memory()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def _limit(card: int) -> Iterator[None]:
    """Lets this process allocate ``card`` bytes more than it has now (Linux counts private, writable pages).

    It is a fork: glibc's setting stays.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        # Tensors get pages of their own, which go back at once: in glibc's heap a freed one leaves a gap, which counts.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    free()
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise LabError(
            "Memory cannot be limited here.", where="find_most_layers()", fix="use a Linux machine"
        ) from error
    now = int(text.partition("VmData:")[2].split()[0]) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + card, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
