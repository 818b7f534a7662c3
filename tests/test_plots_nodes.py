"""The figures of nodes and ranks: lanes, lines and bars, and that they say what they show."""

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

from lab_utils import plots
from lab_utils.plots.nodes import PHASES
from nodelaunch import GpuUsage, Usage

GIB = 2**30


@pytest.fixture(autouse=True)
def no_screen():
    with mpl.rc_context():
        plt.switch_backend("agg")
        plots.use_style()
        yield
        plt.close("all")


def make_rows(start):
    lengths = {"data": 0.01, "forward": 0.02, "backward": 0.04, "step": 0.005}
    rows, moment = [], start
    for step in range(2):
        for phase, seconds in lengths.items():
            rows.append({"phase": phase, "step": step, "start": moment, "end": moment + seconds})
            moment += seconds
    return rows


def make_usage(node, moment, **facts):
    usual = {"cores": 2, "busy": 0.9, "job_busy": 0.4, "memory_bytes": 3 * GIB, "memory_total": 8 * GIB, "gpus": ()}
    return Usage(**{"node": node, "time": 1000.0 + moment, **usual, **facts})


def labels_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def drawings():
    return [
        lambda **more: plots.timeline({0: make_rows(5.0), 1: make_rows(5.001)}, **more),
        lambda **more: plots.utilisation([make_usage("node0", 0), make_usage("node0", 1)], **more),
        lambda **more: plots.scaling({"CIFAR stem": [100, 190]}, **more),
    ]


def test_every_figure_is_returned_and_drawn_where_asked():
    for draw in drawings():
        ax = draw()
        assert isinstance(ax, Axes) and (ax.get_xlabel() or ax.get_ylabel())
        given = plt.figure().subplots()
        figures = plt.get_fignums()
        assert draw(ax=given) is given
        assert plt.get_fignums() == figures
        ax.figure.canvas.draw()


def test_figures_of_nothing_are_empty_and_no_error():
    for ax in (plots.timeline({}), plots.timeline({0: []}), plots.utilisation([]), plots.scaling({})):
        ax.figure.canvas.draw()
        assert not any([*ax.lines, *ax.collections, *ax.patches, *ax.texts]), "nothing was measured"


def test_the_timeline_has_a_lane_per_rank_in_milliseconds_since_the_first_start():
    ax = plots.timeline({1: make_rows(7.001), 0: make_rows(7.0)})
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["rank 0", "rank 1"]
    assert ax.get_xlabel() == "time in ms since the first phase began"
    spans = {}
    for collection in ax.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            spans.setdefault((to_hex(collection.get_facecolor()[0]).upper(), round(box.y0 + 0.35)), []).append(box)
    assert len(spans) == 8  # four phases in two lanes
    for phase, before in (("data", 0), ("forward", 10), ("backward", 30), ("step", 70)):
        for rank in (0, 1):
            starts = sorted(box.x0 for box in spans[PHASES[phase], rank])
            assert starts == pytest.approx([before + rank, before + rank + 75])
    assert labels_of(ax) == ["data", "forward", "backward, with communication", "step"]


def test_utilisation_tells_two_nodes_on_one_machine_apart_by_the_job_s_share():
    samples = [make_usage(f"node{n}", t + 0.1 * n, job_busy=0.5 - 0.1 * n) for t in range(3) for n in (1, 0)]
    ax = plots.utilisation(samples)
    lines = {line.get_label().split(":")[0]: line for line in ax.lines}
    assert list(lines["node0"].get_ydata()) == pytest.approx([50] * 3)
    assert list(lines["node1"].get_ydata()) == pytest.approx([40] * 3)
    assert list(lines["node1"].get_xdata()) == pytest.approx([0.1, 1.1, 2.1])
    assert labels_of(ax)[0] == "node0: 2 cores, the job's share; the machine's memory up to 3.0 of 8 GiB"
    assert ax.get_ylabel() == "busy in %"


def test_utilisation_shades_the_training_and_says_its_mean():
    samples = [make_usage("node0", t, job_busy=busy) for t, busy in enumerate([0.1, 0.5, 0.7, 0.2])]
    ax = plots.utilisation(samples, span=[1001.0, 1002.5])
    assert labels_of(ax)[0].endswith("; 60 % in training")
    (shade,) = ax.patches
    assert (shade.get_x(), shade.get_width()) == pytest.approx((1.0, 1.5))
    assert labels_of(ax)[1] == "training"
    outside = plots.utilisation(samples, span=[2000.0, 2001.0])
    assert "in training" not in labels_of(outside)[0]


def test_utilisation_takes_the_gpus_where_there_are_some_and_else_says_what_it_took():
    gpus = (GpuUsage(0, 1.0, 10 * GIB, 80 * GIB), GpuUsage(1, 0.5, 20 * GIB, 80 * GIB))
    ax = plots.utilisation([make_usage("a", 0, gpus=gpus), make_usage("a", 1, gpus=gpus)])
    assert list(ax.lines[0].get_ydata()) == pytest.approx([75, 75])
    assert labels_of(ax) == ["a: 2 GPUs, memory up to 30.0 of 160 GiB"]
    rough = {"job_busy": None, "memory_bytes": None, "memory_total": None}
    ax = plots.utilisation([make_usage("mac", 0, **rough), make_usage("mac", 1, **rough)])
    assert list(ax.lines[0].get_ydata()) == pytest.approx([90, 90])
    assert labels_of(ax) == ["mac: 2 cores, all programs (load average)"]


def test_scaling_draws_bars_ratios_and_dashed_predictions():
    speeds = {"ImageNet stem": [5000, 4000], "CIFAR stem": [900, 1700]}
    ax = plots.scaling(speeds, predicted={"CIFAR stem": [None, 1750], "ImageNet stem": [None, 3600]})
    assert sorted(bar.get_height() for bar in ax.patches) == [900, 1700, 4000, 5000]
    assert sorted(text.get_text() for text in ax.texts) == ["0.80×", "1.89×"]
    marks = [collection for collection in ax.collections if isinstance(collection, LineCollection)]
    assert sorted(mark.get_segments()[0][0][1] for mark in marks) == [1750, 3600]
    assert labels_of(ax).count("predicted") == 1
    assert {"1 node", "2 nodes"} <= set(labels_of(ax))
    assert "predicted" not in labels_of(plots.scaling(speeds))
