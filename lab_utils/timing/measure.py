"""Measures steps: one at a time, or several in turn so that a busy moment of the machine affects all alike."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace

import torch
from torch import distributed

from lab_common import LabError
from lab_utils import machine
from lab_utils.bars import open_bar
from lab_utils.timing.memory import return_memory
from lab_utils.timing.others import find_others, read_usage

Step = Callable[[], object]

# Beyond these a timing is noise: the share of the processors' time that other programs may take where none is idle, and
# how many times the first quartile the third may be.
MOST_OTHERS, MOST_SPREAD = 0.1, 1.5
# How many rounds a measurement may have at most, for tests of what surrounds it: their timings are called noise.
ROUNDS = "LAB_ROUNDS"


@dataclass(frozen=True)
class Timing:
    """The seconds that one set-up took, step by step.

    Args:
        name: The set-up.
        seconds: Wall-clock seconds of each kept step; empty if the set-up ran out of memory.
        cpu_seconds: Seconds of CPU time, over all threads of this process, of the same steps.
        images: Images that one step handles, over all ranks together; 0 if the step handles none.
        warmup: Number of steps that were run before and dropped.
        device: The device, such as ``cuda:0``.
        peak_bytes: Most bytes that tensors held on the CUDA device during a kept step, including those allocated
            before the step; None on a CPU.
        rank: The slowest rank, whose seconds these are; None if ``torch.distributed`` is not in use.
        others: The share of the processors' time, 0 to 1, that other programs took meanwhile; 0 if some was idle, as
            then they hardly disturb.
        busiest: The program that took at least half of that: a notebook's name, or a process; "" if none is known.
        few: True if ``LAB_ROUNDS`` allowed fewer rounds than were asked for.
    """

    name: str
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...] = ()
    images: int = 0
    warmup: int = 0
    device: str = "cpu"
    peak_bytes: int | None = None
    rank: int | None = None
    others: float = 0.0
    busiest: str = ""
    few: bool = False

    @property
    def out_of_memory(self) -> bool:
        """True if the set-up ran out of device memory, so that nothing but its name is known."""
        return not self.seconds

    @property
    def median(self) -> float:
        """The median in seconds per step; NaN if the set-up ran out of memory."""
        return self._quartiles()[1]

    @property
    def low(self) -> float:
        """The first quartile in seconds per step: a quarter of the steps were faster."""
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        """The third quartile in seconds per step: a quarter of the steps were slower."""
        return self._quartiles()[2]

    @property
    def images_per_second(self) -> float:
        """Images per second at the median step, over all ranks; NaN if the step handles no images."""
        return self.images / self.median if self.images and self.median else math.nan

    @property
    def noise(self) -> str:
        """Reason to distrust this: "few" rounds, "busy" processors, "jumps" between quartiles; "" if there is none."""
        if self.few:
            return "few"
        jumps = self.high > MOST_SPREAD * self.low > 0
        # Where a process that waits for no other did the same work in another time, something else had the processor.
        work = Timing(self.name, self.cpu_seconds if self.rank is None and self.device == "cpu" else ())
        if self.others > MOST_OTHERS or (jumps and work.high < 1.1 * work.low):
            return "busy"
        return "jumps" if jumps else ""

    def _quartiles(self) -> tuple[float, float, float]:
        import statistics  # not above: with the fractions that it brings it would take milliseconds of every rank

        if len(self.seconds) < 2:  # statistics.quantiles wants two points before Python 3.13
            return (*self.seconds, math.nan)[:1] * 3
        return tuple(statistics.quantiles(self.seconds, n=4, method="inclusive"))

    def as_record(self) -> dict[str, object]:
        """Returns the fields as a dictionary that JSON can hold."""
        return asdict(self) | {"seconds": list(self.seconds), "cpu_seconds": list(self.cpu_seconds)}

    @classmethod
    def from_record(cls, record: object) -> Timing:
        """Returns the Timing that ``as_record`` was called on.

        Raises:
            ValueError: It is no such record.
        """
        if not isinstance(record, Mapping) or record.keys() != {field.name for field in fields(cls)}:
            raise ValueError("a Timing with other fields than as_record writes")
        lists = {name: tuple(record[name]) for name in ("seconds", "cpu_seconds")}
        return cls(**{**record, **lists})


def find_noise(timings: Iterable[Timing]) -> str:
    """Explains why these timings are too noisy to trust; "" if nothing is wrong.

    Other programs took more than a tenth of the processors' time while none of it was idle; or the third quartile of a
    set-up is more than 1.5 times its first one; or ``LAB_ROUNDS`` allowed only a few rounds.
    """
    known = [timing for timing in timings if timing.noise]
    if any(timing.noise == "few" for timing in known):
        return f"{ROUNDS} allowed only a few rounds: unset it, and measure again"
    others, busiest = max(((timing.others, timing.busiest) for timing in known), default=(0, ""))
    if any(timing.noise == "busy" for timing in known):
        share = f", other programs took {others:.0%} of its processors" if others else ""
        share += f", most of it {busiest}" if others and busiest else ""
        return f"this machine was busy{share}: measure again"
    if known:
        widest = max(known, key=lambda one: one.high / one.low)
        return f"the times of {widest.name} jump, quartiles {widest.high / widest.low:.1f}-fold apart: measure again"
    return ""


def limit_rounds(wanted: int) -> int:
    """Returns how often to repeat what is only measured: as wanted, or less where ``LAB_ROUNDS`` says so."""
    most = os.environ.get(ROUNDS, "")
    return min(wanted, int(most)) if most.isdecimal() else wanted


def synchronize(device: torch.device | str) -> None:
    """Waits until the device has finished its work: CUDA runs asynchronously, a CPU does not."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def measure(step: Step, *, name: str = "step", **settings: object) -> Timing:
    """Measures ``repeats`` calls of a step, after ``warmup`` calls that are dropped.

    The first steps of a run are not like the rest: memory is allocated, algorithms are chosen, code is loaded. The
    device is synchronised before the clock starts and before it stops.

    Args:
        step: The step to measure; called without arguments.
        name: The set-up's name in tables and figures.
        settings: ``images``, ``repeats``, ``warmup`` and ``device``, as for ``interleave``.

    Returns:
        The Timing; under ``torch.distributed`` the slowest rank's, on every rank.
    """
    return interleave({name: step}, progress=False, **settings)[0]


def interleave(
    steps: Mapping[str, Step],
    *,
    images: int = 0,
    repeats: int = 10,
    warmup: int = 3,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> list[Timing]:
    """Measures several set-ups in turn, one step of each per round, so that drift and neighbours affect all alike.

    Every second round runs backwards and the start rotates, so that no set-up always follows the same one. A set-up
    that runs out of device memory gets a Timing without seconds and the others continue, except under
    ``torch.distributed``, where the other ranks would wait for it forever.

    Args:
        steps: The set-ups by name.
        images: Images that one step handles, over all ranks together.
        repeats: Number of kept rounds.
        warmup: Number of dropped rounds.
        device: The device to synchronise; ``machine.device()`` if None.
        progress: True to show a bar; if None, rank 0 shows one.

    Returns:
        One Timing per set-up, in the order of ``steps``; under ``torch.distributed`` the slowest rank's, on every rank.
    """
    asked, repeats = repeats, limit_rounds(repeats)
    warmup = limit_rounds(warmup + 1) - 1
    if repeats < 1 or warmup < 0 or not steps:
        raise LabError(
            "There is nothing to measure.",
            cause=f"{len(steps)} steps, repeats={repeats}, warmup={warmup}",
            fix="give at least one step, repeats=1 or more, warmup=0 or more",
        )
    device = torch.device(device or machine.device())
    alone = not (distributed.is_available() and distributed.is_initialized())
    show = (alone or distributed.get_rank() == 0) if progress is None else progress
    samples: dict[str, list[tuple[float, float, int]]] = {name: [] for name in steps}
    before = read_usage()
    with open_bar((warmup + repeats) * len(steps), "measuring", show=show, leave=False) as bar:
        for round_number in range(warmup + repeats):
            for name in _order(list(steps), round_number):
                if name in samples:
                    sample = _sample(steps[name], device, survive=alone)
                    if sample is None:
                        del samples[name]
                    elif round_number >= warmup:
                        samples[name].append(sample)
                bar.update()
    others, busiest = find_others(before)
    more = {"others": others, "busiest": busiest, "few": repeats < asked}
    return_memory()
    timings = []
    for name in steps:
        seconds, cpu_seconds, peaks = zip(*samples[name], strict=True) if name in samples else ((), (), ())
        peak = max(peaks, default=None) if device.type == "cuda" else None
        timing = Timing(name, seconds, cpu_seconds, images, warmup, str(device), peak, **more)
        timings.append(timing if alone else _keep_slowest(timing))
    return timings


def _order(names: list[str], round_number: int) -> list[str]:
    start = round_number // 2 % len(names)
    order = names[start:] + names[:start]
    return order[::-1] if round_number % 2 else order


def _sample(step: Step, device: torch.device, *, survive: bool) -> tuple[float, float, int] | None:
    """Runs one step and returns wall seconds, CPU seconds and peak bytes; None if device memory ran out."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.init()  # before it, the device has no counters, and resetting them raises
        torch.cuda.reset_peak_memory_stats(device)
    try:
        synchronize(device)
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        synchronize(device)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    except RuntimeError as error:
        if not (survive and is_out_of_memory(error)):
            raise
    else:
        return seconds, cpu_seconds, torch.cuda.max_memory_allocated(device) if cuda else 0
    # Only here, after the except block, has the exception let go of the frames that hold the step's tensors.
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA
    return None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Returns True if memory ran out; for cuDNN, cuBLAS and the CPU only the message tells, not the type.

    cuDNN's engines are the algorithms of a convolution. If there is no memory for any engine's workspace, torch says
    only that no engine was found: https://github.com/pytorch/pytorch/issues/108645. A cuDNN that does not support the
    GPU causes the same message, at every batch size.
    """
    words = ("out of memory", "_STATUS_ALLOC_FAILED", "can't allocate memory", "unable to find an engine")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _keep_slowest(timing: Timing) -> Timing:
    """Gathers the Timing of every rank and returns the slowest, with the largest peak of all ranks."""
    timings: list[Timing] = [timing] * distributed.get_world_size()
    distributed.all_gather_object(timings, timing)
    rank = max(range(len(timings)), key=lambda index: timings[index].median)
    peak = max((one.peak_bytes for one in timings if one.peak_bytes is not None), default=None)
    others, busiest = max((one.others, one.busiest) for one in timings)
    return replace(timings[rank], rank=rank, peak_bytes=peak, others=others, busiest=busiest)
