"""The figures: labelled axes, and what is drawn where."""

import math

import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from lab_utils import plots
from lab_utils.timing import Timing


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


def draw_all_axes():
    """Every drawing function that has labelled axes, once on its own figure and once on Axes that are given."""
    drawings = [
        lambda **more: plots.step_times([make_timing("fp32", 0.1), make_timing("bf16", 0.05)], **more),
        lambda **more: plots.throughput(make_sweep(), **more),
        lambda **more: plots.speed_up({"one": make_sweep()}, baseline="fp32", candidate="bf16", **more),
        lambda **more: plots.curves({"fp32": [[1, 2]]}, [0, 1], xlabel="images seen", ylabel="loss", **more),
    ]
    return [(draw(), draw) for draw in drawings]


def test_every_figure_is_returned_with_its_axes_labelled_and_drawn_where_asked():
    for ax, draw in draw_all_axes():
        assert isinstance(ax, Axes)
        assert ax.get_xlabel()
        assert ax.get_ylabel() or [tick.get_text() for tick in ax.get_yticklabels()] == ["fp32", "bf16"]
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
