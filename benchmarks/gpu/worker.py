"""The processes of the benchmark: on a GPU one for each arm, which stays while arms take turns.

Settings such as ``cudnn.benchmark`` belong to a process, and so do cuDNN's choices: PyTorch keeps the plan of a
convolution whether it was searched for or taken from heuristics, so that in one process the first arm would choose for
all. An arm that runs out of memory or dies does not affect the others.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu.arms import LR, OURS, REFERENCE, Arm, Batch, Setup, Training, find_blocks
from benchmarks.gpu.peers import PEERS
from lab_utils.timing import synchronize
from lab_utils.timing.measure import is_out_of_memory

ARMS: dict[str, Arm] = {**OURS, **PEERS, "reference": REFERENCE}
POOL = 4  # batches on the device, which steps take in turn
CURVE_LR, CURVE_BATCHES, CURVE_SCALE = 3e-4, 2, 0.1
TOP = 15  # kernels of a profile


def make_pool(batch: int, device: torch.device, *, permuted: bool = False) -> list[Batch]:
    """Returns random uint8 images (batch, 3, 32, 32) and labels, the same in every process.

    Args:
        batch: Images in each.
        device: The device that holds them.
        permuted: True to shuffle each batch's images: the same loss, except for the order of its sums.
    """
    generator = torch.Generator().manual_seed(23)
    pool = []
    for _ in range(POOL):
        images = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (batch,), generator=generator)
        order = torch.randperm(batch, generator=generator)  # drawn in any case, so that the next images are the same
        images, labels = (images[order], labels[order]) if permuted else (images, labels)
        pool.append((images.to(device), labels.to(device)))
    return pool


class Clock:
    """Times the steps from ``lead`` to ``stop``: with CUDA events on a GPU, with the wall clock on a CPU."""

    def __init__(self, device: torch.device, lead: int, stop: int) -> None:
        self.device, self.ends = device, (lead, stop)
        self.marks: list[Any] = []

    def __call__(self, index: int) -> None:
        """Marks the beginning of a step, if it is one of the two."""
        if index not in self.ends:
            return
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> float:
        """Seconds between the two marks; waits for the second."""
        start, stop = self.marks
        if self.device.type != "cuda":
            return stop - start
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


class Worker:
    """Requests that a process answers; each method returns a value that JSON can hold."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.running: dict[str, tuple[Training, list[Batch]]] = {}

    def _set(self, arm: Arm) -> dict[str, object]:
        """Sets PyTorch's global settings for this arm; on a CPU several arms share a process.

        It uses the older names, as timm's script does: they set the newer ones, too, but not the other way round, and
        ``torch.compile`` refuses to run if the two differ.
        """
        torch.backends.cudnn.benchmark = arm.benchmark
        torch.backends.cuda.matmul.allow_tf32 = arm.tf32_matmul
        torch.backends.cudnn.allow_tf32 = arm.tf32_conv
        matmul, conv = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
        return {"cudnn_benchmark": arm.benchmark, "tf32": {"matmul": matmul == "tf32", "conv": conv == "tf32"}}

    def build(self, arm: str, batch: int, permuted: bool = False) -> dict[str, object]:
        """Builds and compiles an arm. Several processes may do so at once: cuDNN measures nothing meanwhile.

        ``deterministic`` is part of the key under which cuDNN keeps its plans. With it set, the compiling steps leave
        no plan that the arm uses later.
        """
        start = time.perf_counter()
        self.drop(arm)
        settings = self._set(ARMS[arm])
        training = ARMS[arm].make(self.setup)
        pool = [(training.prepare(x), y) for x, y in make_pool(batch, self.setup.device, permuted=permuted)]
        self.running[arm] = training, pool
        if ARMS[arm].compiled:
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
            training.run(pool, 2)
            torch.backends.cudnn.deterministic = False
            training.reset()
        synchronize(self.setup.device)
        return {"settings": settings, "build_seconds": time.perf_counter() - start}

    def warm(self, arm: str, steps: int, curve: int = 0) -> dict[str, object]:
        """Captures the graph if the arm has one, records the losses of ``curve`` steps, and warms up.

        The curve starts from weights and a learning rate at which float32 does not depend on the order of its sums;
        the last BatchNorm of each residual block is scaled down for that.
        """
        self._set(ARMS[arm])
        training, pool = self.running[arm]
        if ARMS[arm].graph:
            training.capture(pool[0])
        losses: list[float] = []
        if curve:
            training.reset()
            training.set_lr(CURVE_LR)
            calm(training)
            training.run(pool[:CURVE_BATCHES], curve, losses=losses)
            training.reset()
        training.set_lr(LR)
        training.run(pool, 1)  # algorithms are chosen in it, whose memory is no step's
        cuda = self.setup.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        training.run(pool, steps, losses=(last := []))
        seconds = (time.perf_counter() - start) / steps
        peak = (training.peak or torch.cuda.max_memory_allocated()) if cuda else None
        reserved = torch.cuda.memory_reserved() if cuda else None
        finite = math.isfinite(last[-1])
        return {"losses": losses, "step": seconds, "peak_bytes": peak, "reserved_bytes": reserved, "finite": finite}

    def time(self, arm: str, lead: int, count: int) -> dict[str, object]:
        """Returns seconds per step of ``count`` steps, after ``lead`` that are not timed."""
        self._set(ARMS[arm])
        training, pool = self.running[arm]
        clock = Clock(self.setup.device, lead, lead + count)
        training.run(pool, lead + count, clock)
        return {"seconds": clock.seconds() / count}

    def profile(self, arm: str, steps: int) -> dict[str, object]:
        """Returns the kernels (on a CPU the operators) that take the most time, with their shares, and how many run."""
        self._set(ARMS[arm])
        training, pool = self.running[arm]
        activities = [torch.profiler.ProfilerActivity.CPU]
        cuda = self.setup.device.type == "cuda"
        activities += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
        with torch.profiler.profile(activities=activities) as profiler:
            training.run(pool, steps)
            synchronize(self.setup.device)
        events = profiler.key_averages()
        if cuda:
            events = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        attribute = "self_device_time_total" if cuda else "self_cpu_time_total"
        times = sorted(((getattr(event, attribute), event.count, event.key) for event in events), reverse=True)
        total = sum(one[0] for one in times) or 1.0
        rows = [{"name": key[:120], "calls": count / steps, "share": took / total} for took, count, key in times[:TOP]]
        busy = {"milliseconds": total / 1e3 / steps, "calls": sum(one[1] for one in times) / steps}
        return {"arm": arm, "top": rows, **busy}

    def drop(self, arm: str) -> dict[str, object]:
        """Frees an arm: its memory, and its compiled code."""
        self.running.pop(arm, None)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without CUDA
        return {}


@torch.no_grad()
def calm(training: Training) -> None:
    """Scales the last BatchNorm of each residual block down to ``CURVE_SCALE``, in place."""
    for block in find_blocks(training.model):
        if last := getattr(block, "bn3", None) or getattr(block, "bn2", None):
            last.weight.fill_(CURVE_SCALE)


def serve(connection: Connection, setup: Setup) -> None:
    """Answers requests, each a method's name and arguments, until it receives None or the connection closes."""
    if setup.device.type == "cpu":
        torch.set_num_threads(1)
    worker = Worker(setup)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while (request := connection.recv()) is not None:
            connection.send(answer(worker, *request))


def answer(worker: Worker, name: str, arguments: dict[str, Any]) -> dict[str, object]:
    """Calls one of a worker's methods; an exception becomes an answer, too."""
    try:
        return getattr(worker, name)(**arguments)
    except Exception as error:
        short = isinstance(error, RuntimeError) and is_out_of_memory(error)
        words = "out of memory" if short else f"{type(error).__name__}: {error}".strip()[:600]
    # Only here has the exception let go of the frames that hold the step's tensors.
    with contextlib.suppress(RuntimeError):  # after some errors CUDA can do nothing any more
        worker.drop(arguments["arm"])
    return {"error": words}


class Host:
    """The parent's handle on a worker process."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, setup))
        self.process.start()
        theirs.close()

    def ask(self, name: str, **arguments: object) -> None:
        """Sends a request; answers arrive in the order of the requests."""
        with contextlib.suppress(OSError):  # it has ended: finish tells
            self.connection.send((name, arguments))

    def finish(self, seconds: float) -> dict[str, Any]:
        """Waits for the next answer; ``error`` holds what arrived instead of one, ``late`` means no time was left."""
        try:
            if self.connection.poll(max(0.0, seconds)):
                return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            return {"error": f"its process ended with status {self.process.exitcode}"}
        return {"error": "no time was left", "late": True}


def close_all(hosts: Sequence[Host], seconds: float = 3.0) -> None:
    """Ends processes; those that have not ended within ``seconds`` are killed."""
    end = time.monotonic() + seconds
    for host in hosts:
        with contextlib.suppress(OSError):
            host.connection.send(None)
    for host in hosts:
        host.process.join(max(0.0, end - time.monotonic()))
        if host.process.is_alive():
            host.process.kill()
            host.process.join()
        host.connection.close()
