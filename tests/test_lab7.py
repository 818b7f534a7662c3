"""Parts of lab 7: its prediction, its figures on made-up numbers, the memory that processes share."""

import math
import os
import time
from functools import partial

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from lab_utils.timing import Timing
from scripts import loading

pytestmark = pytest.mark.usefixtures("runs")


@pytest.fixture
def run_cells(run_cells_of):
    return partial(run_cells_of, "07_data_loading")


@pytest.fixture
def ax():
    with mpl.rc_context({"backend": "agg"}):
        yield plt.figure().add_subplot()
    plt.close("all")


@pytest.mark.parametrize(
    ("device", "cores", "workers", "expected"),
    [
        ("cpu", 2, 0, 8 + 4),  # in turn
        ("cpu", 8, 1, 8),  # one worker is slower than the step
        ("cpu", 8, 2, 4),  # the step is what takes longest
        ("cpu", 2, 4, 11 / 2),  # the cores are used up: 7 and 4 seconds of them
        ("cuda", 1, 4, 7),  # a GPU computes by itself
    ],
)
def test_the_prediction_by_hand(run_cells, device, cores, workers, expected):
    given = {
        "LOAD": {"heavy": Timing("heavy", (8.0,) * 3, (7.0,) * 3)},
        "STEP": Timing("step", (4.0,) * 3, (4.0,) * 3),
        "CORES": cores,
    }
    predict_step = run_cells("guess", **given)["predict_step"]
    predict_step.__globals__["DEVICE"] = torch.device(device)
    assert predict_step("heavy", workers) == pytest.approx(expected)


def test_a_profile_shows_where_a_loop_waits(ax):
    def load(index):
        time.sleep(0.03)
        return index

    took = []  # a sleep on a busy machine lasts longer
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        for _ in DataLoader(range(4), None, collate_fn=load):
            start = time.perf_counter()
            with record_function("train"):
                time.sleep(0.01)
            took.append(1e3 * (time.perf_counter() - start))
    loading.draw_profiles(ax, {"no worker": prof, "the same": prof})
    work, waits = ax.containers[:2]
    assert min(bar.get_x() for bar in work) == 0 and len(work) == 4
    assert sum(took) >= sum(bar.get_width() for bar in work) >= 40
    assert sum(bar.get_width() for bar in waits if bar.get_width() > 20) >= 90, (
        "the first wait is before the first step"
    )


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="Linux alone tells")  # noqa: PTH110
def test_memory_that_processes_share_counts_once():
    kept = np.ones(2**24)  # 128 MiB
    before = loading.sum_pss(["self"])
    batches = iter(DataLoader(range(2), None, num_workers=2, collate_fn=lambda index: kept[index]))
    next(batches)
    together = loading.sum_pss(["self", *(worker.pid for worker in batches._workers)])
    assert together - before < 100 < before
    assert math.isnan(loading.sum_pss(["self", "no such process"]))
