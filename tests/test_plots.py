"""The figures: labelled axes, and what is drawn where."""

import math

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

from lab_utils import plots
from lab_utils.plots.nodes import PHASES
from lab_utils.timing import Timing
from nodelaunch import GpuUsage, Usage

GIB = 2**30


@pytest.fixture(autouse=True)
def no_screen():
    with mpl.rc_context():
        plt.switch_backend("agg")
        plots.use_style()
        yield
        plt.close("all")


def make_timing(name, seconds, images=0):
    return Timing(name, tuple(seconds * factor for factor in (0.8, 0.9, 0.9, 1.0, 1.2, 1.2, 1.4)), images=images)


def make_sweep(lost=()):
    """Two lines in images per second: fp32 keeps 100, bf16 doubles from 50 at batch 4; ``lost`` ran out of memory."""
    sizes = (4, 8, 16, 32)
    fp32 = [make_timing("fp32", size / 100, size) for size in sizes]
    bf16 = [make_timing("bf16", size / (50 * size / 4), size) for size in sizes]
    return [
        Timing(timing.name, (), images=timing.images) if (timing.name, timing.images) in lost else timing
        for timing in fp32 + bf16
    ]


def labels_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


DRAWINGS = [
    lambda **more: plots.step_times([make_timing("fp32", 0.1), make_timing("bf16", 0.05)], **more),
    lambda **more: plots.throughput(make_sweep(), **more),
    lambda **more: plots.speed_up({"one": make_sweep()}, baseline="fp32", candidate="bf16", **more),
    lambda **more: plots.curves({"fp32": [[1, 2]]}, [0, 1], xlabel="images seen", ylabel="loss", **more),
    lambda **more: plots.timeline({0: make_rows(5.0), 1: make_rows(5.001)}, **more),
    lambda **more: plots.utilisation([make_usage("node0", 0), make_usage("node0", 1)], **more),
    lambda **more: plots.scaling({"CIFAR stem": [100, 190]}, **more),
]


@pytest.mark.parametrize("draw", DRAWINGS)
def test_every_figure_is_returned_with_its_axes_labelled_and_drawn_where_asked(draw):
    ax = draw()
    assert isinstance(ax, Axes) and (ax.get_xlabel() or ax.get_ylabel())
    given = plt.figure().subplots()
    figures = plt.get_fignums()
    assert draw(ax=given) is given
    assert plt.get_fignums() == figures
    ax.figure.canvas.draw()


def test_bars_are_medians_in_milliseconds_and_their_lines_the_quartiles():
    ax = plots.step_times([make_timing("fp32", 0.1), Timing("bf16", ())])
    (bar,) = ax.patches
    assert bar.get_width() == pytest.approx(100)
    (spread,) = [lines for lines in ax.collections if lines.get_segments()]
    assert spread.get_segments()[0][:, 0] == pytest.approx([90, 120])
    assert "out of memory" in [text.get_text().strip() for text in ax.texts]


def test_throughput_marks_where_the_candidate_overtakes_the_baseline():
    ax = plots.throughput(make_sweep(), baseline="fp32", candidate="bf16")
    (mark,) = [line for line in ax.lines if "overtakes" in line.get_label()]
    assert mark.get_xdata()[0] == pytest.approx(8)
    assert "bf16 overtakes fp32\nat about 8 images" in labels_of(ax)
    backwards = plots.throughput(make_sweep(), baseline="bf16", candidate="fp32")
    assert labels_of(backwards) == ["fp32", "bf16"]


def test_throughput_marks_a_batch_that_ran_out_of_memory():
    ax = plots.throughput(make_sweep(lost=[("fp32", 32)]), baseline="fp32", candidate="bf16")
    assert list(ax.lines[0].get_xdata()) == [4, 8, 16]
    (cross,) = [line for line in ax.lines if line.get_label() == "fp32: out of memory"]
    assert list(cross.get_xdata()) == [32]


def find_crossover(baseline, candidate):
    """The crossover of two set-ups whose images per second, by batch size, are the same in each round."""
    return plots.crossover(make_line(baseline), make_line(candidate))


def make_line(speeds):
    return {batch: Timing("", (batch / speed,) * 6, images=batch) for batch, speed in speeds.items()}


def test_the_crossover_is_exact_where_speeds_are_powers_of_the_batch():
    baseline = {batch: 100.0 * batch**0.25 for batch in (1, 4, 64)}
    candidate = {batch: 50.0 * batch**0.75 for batch in (1, 4, 64)}
    assert find_crossover(baseline, candidate) == pytest.approx(4)
    assert find_crossover({4: 100.0, 64: 100.0}, {4: 50.0, 64: 200.0}) == pytest.approx(16)


def test_the_crossover_is_where_the_candidate_stays_ahead():
    baseline = dict.fromkeys((1, 2, 4, 8), 100.0)
    assert find_crossover(baseline, {1: 50.0, 2: 50.0, 4: 200.0, 8: 300.0}) == pytest.approx(2 * math.sqrt(2))
    assert find_crossover(baseline, {1: 700.0, 2: 60.0, 4: 120.0, 8: 101.0}) is None, "ahead, behind, ahead"
    assert find_crossover(baseline, dict.fromkeys((1, 2, 4, 8), 110.0)) is None
    assert find_crossover(baseline, {1: 110.0, 2: 120.0, 4: 130.0, 8: 90.0}) is None
    assert find_crossover(baseline, baseline) is None


def make_sweeps_of(gains, spread=0.01, **more):
    """Timings of fp32 and of bf16, which reaches the gains at batch 4, 8, ..., in rounds that jump by ``spread``."""
    jumps = {"fp32": (-2, -1, 0, 0, 1, 2), "bf16": (1, -2, 0, 2, -1, 0)}
    sizes = [4 * 2**number for number in range(len(gains))]
    seconds = {"fp32": [1.0] * len(gains), "bf16": [1 / gain for gain in gains]}
    return [
        Timing(name, tuple(second * (1 + spread * jump) for jump in jumps[name]), images=size, **more)
        for name, line in seconds.items()
        for size, second in zip(sizes, line, strict=True)
    ]


@pytest.mark.parametrize(
    ("sweep", "claimed"),
    [
        (make_sweeps_of([0.5, 0.5, 2, 2]), True),
        (make_sweeps_of([0.9, 0.9, 1.1, 1.1], spread=0.12), False),  # not proven
        (make_sweeps_of([0.5, 0.5, 2, 1.01], spread=0.05), False),  # at the largest batch nobody is ahead
        (make_sweeps_of([0.5, 0.5, 2, 2], others=0.3), False),
    ],
)
def test_a_crossover_is_claimed_only_where_noise_cannot_be_the_cause(sweep, claimed):
    ax = plots.throughput(sweep, baseline="fp32", candidate="bf16")
    assert any("overtakes" in label for label in labels_of(ax)) == claimed


def test_every_figure_of_times_says_that_the_machine_was_busy():
    words = "this machine was busy,\nother programs took 30% of its processors:\nmeasure again"
    for others, said in ((0.05, []), (0.3, [words])):
        sweep = make_sweeps_of([0.5, 2], others=others)
        for ax in (
            plots.throughput(sweep),
            plots.speed_up({"one": iter(sweep)}, baseline="fp32", candidate="bf16"),
            plots.step_times(sweep[:1] + sweep[2:3]),
        ):
            assert [text.get_text() for text in ax.texts if "busy" in text.get_text()] == said


def test_speed_up_draws_the_ratio_and_the_guess():
    sweeps = {"one": make_sweep(), "two": make_sweep(lost=[("bf16", 4)])}
    ax = plots.speed_up(sweeps, baseline="fp32", candidate="bf16", guess=1.5)
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines["one"].get_ydata()) == pytest.approx([0.5, 1, 2, 4])
    assert list(lines["two"].get_xdata()) == [8, 16, 32]
    assert labels_of(ax) == ["one", "two", "my guess"]
    assert lines["my guess"].get_ydata()[0] == 1.5
    assert "my guess" not in labels_of(plots.speed_up(sweeps, baseline="fp32", candidate="bf16", guess=None))
    lost = {"one": make_sweep(lost=[("fp32", 4), ("fp32", 32)])}
    assert list(plots.speed_up(lost, baseline="fp32", candidate="bf16").lines[0].get_ydata()) == pytest.approx([1, 2])


def test_curves_are_the_mean_and_the_range_over_seeds():
    ax = plots.curves(
        {"fp32": [[1, 2, 3], [3, 2, 7]], "bf16": [[1, 1, 1]]}, [0, 10, 20], xlabel="images", ylabel="loss"
    )
    assert list(ax.lines[0].get_ydata()) == [2, 2, 5]
    band = ax.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band} >= {(0, 1), (0, 3), (20, 3), (20, 7)}
    assert labels_of(ax) == ["fp32 (2 seeds)", "bf16"]


def test_the_grid_shows_every_image_under_its_title():
    images = torch.randint(0, 255, (7, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ax = plots.image_grid(images, [f"class {number}" for number in range(7)], columns=3)
    canvas = torch.as_tensor(ax.images[0].get_array())
    assert [text.get_text() for text in ax.texts] == [f"class {number}" for number in range(7)]
    for text, image in zip(ax.texts, images, strict=True):
        x, y = text.get_position()
        top, left = round(y) + 2, round(x - 4)
        assert torch.equal(canvas[top : top + 8, left : left + 8].permute(2, 0, 1), image)
    assert not plots.image_grid(images).texts
    plots.image_grid(images[:0], []).figure.canvas.draw()  # a network may make no mistakes


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
