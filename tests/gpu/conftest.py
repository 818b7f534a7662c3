"""Shared fixtures of the GPU tests. Self-contained: on a GPU machine the files above it are not loaded."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import runpy
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Before torch: as in all other tests, one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch import distributed
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NO_GPU = "NOT TESTED HERE: needs a GPU"
SECONDS = 100  # for one test, where pytest-timeout is installed
TOLD = ("synchronize", "empty_cache")


def pytest_addoption(parser):
    """Adds the option of ``make gpu``."""
    parser.addoption("--record", action="store_true", help="writes what passed into data/reference/gpu_tests.json")


def pytest_terminal_summary(terminalreporter, config):
    """Records which tests passed, on which machine and when; on a machine without a GPU there is nothing to record."""
    if not (config.getoption("--record") and torch.cuda.is_available()):
        return
    from course.reference import describe_machine

    tests = {}
    for outcome in ("passed", "skipped", "failed", "error"):
        tests |= {report.nodeid: outcome for report in terminalreporter.getreports(outcome)}
    when = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"machine": describe_machine(), "torch": torch.__version__, "when": when, "tests": tests}
    path = ROOT / "data" / "reference" / "gpu_tests.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def pytest_collection_modifyitems(config, items):
    """Limits each test's time, so that one that hangs on a GPU fails alone."""
    if config.pluginmanager.has_plugin("timeout"):
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.timeout(SECONDS))


class RealGpu:
    """The first GPU; notes each call that a test asks about, and carries it out."""

    device = CUDA
    rate = 0.0  # cycles of torch.cuda._sleep in a second

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        if not RealGpu.rate:
            RealGpu.rate = self._measure_rate()

    @staticmethod
    def _measure_rate() -> float:
        """Measures at the clock rate of a busy GPU; an idle one is slower at first."""
        torch.cuda._sleep(200_000_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        end.synchronize()
        return 1e8 / (start.elapsed_time(end) / 1e3)

    @contextlib.contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[RealGpu]:
        """Replaces each function that a test asks about by one that takes notes."""
        torch.cuda.empty_cache()  # what tests before left there would change the sizes of blocks
        for name in TOLD:
            patch.setattr(torch.cuda, name, self._tell(name, getattr(torch.cuda, name)))
        begin, graph, replay = torch.autocast.__init__, torch.cuda.graph, torch.cuda.CUDAGraph.replay

        def note_autocast(one, device_type, dtype=None, enabled=True, cache_enabled=None):
            self.note("autocast", device_type, dtype, enabled)
            begin(one, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

        @contextlib.contextmanager
        def note_graph(*args, **options):
            with graph(*args, **options):
                self.note("graph begins")
                yield
                self.note("graph ends")

        def note_replay(one):
            self.note("replay")
            replay(one)

        patch.setattr(torch.autocast, "__init__", note_autocast)
        patch.setattr(torch.cuda, "graph", note_graph)
        patch.setattr(torch.cuda.CUDAGraph, "replay", note_replay)
        with _Copies(self):
            yield self

    def _tell(self, name: str, function: Callable) -> Callable:
        def run(*args: Any, **options: Any) -> Any:
            self.note(name)
            return function(*args, **options)

        return run

    def note(self, name: str, *details: object) -> None:
        """Notes a call."""
        self.calls.append((name, *details))

    def launch(self, seconds: float) -> None:
        """Queues work of about this length."""
        torch.cuda._sleep(int(seconds * self.rate))

    def least(self, seconds: float) -> float:
        """Returns the least time for work of this length at the current clock rates."""
        return 0.7 * seconds

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """Makes operations that wait for the device raise in this block."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class _Copies(TorchFunctionMode):
    """Notes copies between the devices: target, whether from page-locked memory, and whether non-blocking."""

    def __init__(self, gpu: RealGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        if func not in (torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.cpu, torch.Tensor.cuda):
            return func(*args, **options)
        source = args[1] if func is torch.Tensor.copy_ else args[0]
        result = func(*args, **options)
        if result.device.type != source.device.type:
            self._gpu.note("copy", result.device.type, source.is_pinned(), bool(options.get("non_blocking")))
        return result


@pytest.fixture
def gpu(real_gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealGpu]:
    """The first GPU, which notes what is called."""
    with RealGpu().installed(monkeypatch) as device:
        yield device


@pytest.fixture
def real_gpu() -> Iterator[torch.device]:
    """The first GPU as a device of torch's."""
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    yield CUDA
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Gives the test its own records and jobs; restores torch's global settings afterwards."""
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    for name in ("LAB_SCALE", "LAB_ROUNDS"):
        monkeypatch.delenv(name, raising=False)
    conv, product = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = conv.fp32_precision, product.fp32_precision
    yield
    conv.fp32_precision, product.fp32_precision = before


@pytest.fixture
def smi() -> None:
    """The machine's ``nvidia-smi``."""
    if not shutil.which("nvidia-smi"):
        pytest.skip("NOT TESTED HERE: needs nvidia-smi")


@pytest.fixture
def group(gpu: RealGpu) -> Iterator[None]:
    """A process group of this process alone, as in the scripts that measure."""
    store = distributed.HashStore()
    distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=gpu.device)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def define(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Defines the functions and classes of a notebook's cells, or runs the cells; returns all names."""

    def run(notebook: str, *cells: str, whole: bool = False, **names: object) -> dict[str, Any]:
        content = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text(encoding="utf-8"))
        sources = {cell["id"]: "".join(cell["source"]) for cell in content["cells"]}
        tree = ast.parse("\n\n".join(sources[cell] for cell in cells))
        if not whole:
            tree.body = [one for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)]
        path = tmp_path / "cells.py"
        path.write_text(ast.unparse(tree), encoding="utf-8")
        return runpy.run_path(str(path), init_globals=names)

    return run
