"""Made-up timings of a busy machine through the sentences and figures of each lab that measures (drill 50)."""

import os

import pytest
import torch
from matplotlib import pyplot as plt

from course.check.guesses import read_guesses
from lab_utils import models
from lab_utils.timing import Records, Timing, find_noise

pytestmark = pytest.mark.usefixtures("runs")
BUSY = "this machine was busy, other programs took 40% of its processors, most of it train (process 7): measure again"
QUIET, NOISY = {}, {"others": 0.4, "busiest": "train (process 7)"}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def texts_of(ax):
    legend = ax.get_legend()
    words = [text.get_text() for text in ax.texts] + [text.get_text() for text in legend.get_texts() if legend]
    return " ".join(words).replace("\n", " ")


def make_timings(name, seconds, images=0, spread=0.01, **more):
    # In each round another one is the slower by chance.
    shifts = (1, -2, 0, 2, -1, 0) if name == "bf16" else (-2, -1, 0, 0, 1, 2)
    return Timing(name, tuple(seconds * (1 + shift * spread) for shift in shifts), images=images, **more)


@pytest.mark.parametrize(
    ("naive", "honest", "words"),
    [
        ((0.0094, 0.0095, 0.0096), (0.0094, 0.0095, 0.0097), "They agree, up to noise"),
        ((0.0093, 0.0094, 0.0095), (0.0149, 0.0151, 0.0153), "this machine was likely busy. Run both again"),
    ],
)
def test_lab_0_does_not_say_that_two_times_agree_which_differ(run_cells_of, capsys, monkeypatch, naive, honest, words):
    clock = iter(moment for number in range(10) for moment in (number, number + honest[number % 3]))
    monkeypatch.setattr("time.perf_counter", clock.__next__)
    names = {"naive": list(naive), "median": lambda _: 1.0, "side": 2, "a": torch.ones(2, 2), "b": torch.ones(2, 2)}
    run_cells_of("00_start_here", "synchronised", **names)
    assert words in capsys.readouterr().out


def make_sweep(gains, spread=0.01, **more):
    sizes = [16 * 2**power for power in range(len(gains))]
    slow = [make_timings("fp32", 1.0, size, spread, **more) for size in sizes]
    return slow + [
        make_timings("bf16", 1 / gain, size, spread, **more) for size, gain in zip(sizes, gains, strict=True)
    ]


@pytest.mark.parametrize(
    ("gains", "proven", "more"),
    [
        ([0.5, 0.9, 2.0], [True] * 3, {}),
        ([7.0, 0.6, 1.2, 1.0], [True, True, True, False], {}),
        ([1.1, 1.1, 1.1], [False] * 3, {"spread": 0.1}),
        ([0.5, 0.9, 2.0], [False] * 3, NOISY),
    ],
)
def test_lab_1_claims_no_speed_up_and_keeps_no_guess_that_noise_can_explain(
    no_reference, run_cells_of, capsys, gains, proven, more
):
    sweep = make_sweep(gains, **more)
    cells = ("speed-up", "throughput-figure", "answers")
    names = run_cells_of("01_mixed_precision", *cells, throughput={"imagenet": sweep}, my_speed_up=2.0)
    out = capsys.readouterr().out
    found = [line.partition("speed-up ")[2] for line in out.splitlines() if line.startswith("imagenet stem")]
    assert ["not proven" not in words for words in found] == proven and "recorded run: none yet" in out
    if not more:
        assert [float(words.split()[0]) for words in found] == pytest.approx(gains, rel=0.02)
    noise = find_noise(sweep)
    assert bool(read_guesses()) != bool(noise)
    assert ("measure again" in texts_of(names["axes"][0][0])) == bool(noise)


@pytest.mark.parametrize("more", [QUIET, NOISY], ids=["quiet", "busy"])
def test_lab_4_says_so_in_its_figure_and_keeps_no_guess(run_cells_of, more):
    runs = {
        kind: [make_timings(name, seconds, 64, **more) for name, seconds in (("1 device", 2.0), ("DP", 3), ("DDP", 2))]
        for kind in ("training", "inference")
    }
    runs["training"].append(make_timings("half the batch", 1.0, 64, **NOISY))  # which is not shown
    names = {"runs": runs, "my_guess": {"DP": 0.7, "DDP": 1.5}, "where": "here"}
    found = run_cells_of("04_data_parallel", "set-ups-figure", **names)
    assert bool(read_guesses()) == (not more)
    assert [BUSY in texts_of(ax) for ax in found["axes"]] == [bool(more)] * 3


def make_measured(seconds, **more):
    """Makes a report of lab 5's script; ``seconds`` by what is timed, the same for all stems and batches."""
    parts = {"buckets": [{"bytes": 40_000_000, "ready": 0.1, "send": 0.2}], "backward": 0.5, "busy": 1.0}
    steps = [
        {"stem": stem, "batch": batch, **parts}
        | {what: make_timings(what, one, batch, rank=0, **more) for what, one in seconds.items()}
        for stem in ("cifar", "imagenet")
        for batch in (8, 4)
    ]
    return {"steps": steps}


@pytest.mark.parametrize("more", [QUIET, NOISY], ids=["quiet", "busy"])
def test_lab_5_says_so_and_no_bar_is_cut_off(run_cells_of, capsys, more, monkeypatch):
    measured = make_measured({"alone": 3.7, "compute": 1.0, "apart": 2.0, "ddp": 2.0}, **more)
    nodes = [type("Node", (), {"name": name}) for name in ("node0", "node1")]
    monkeypatch.setattr("lab_utils.timing.Records.once", lambda *_, **__: measured)
    names = {"my_speed_up": {"cifar": 1.8, "imagenet": 1.5}, "DEVICE": "cpu", "FULL": False}
    monkeypatch.setattr("nodelaunch.choose_nodes", lambda: nodes)
    found = run_cells_of("05_ddp_two_nodes", "measure", "scaling-table", "scaling-figure", **names)
    assert (BUSY in capsys.readouterr().out) == bool(more)
    ax = found["ax"]
    assert (BUSY in texts_of(ax)) == bool(more)
    assert bool(read_guesses()) == (not more)
    top = max(bar.get_height() for bar in ax.patches if hasattr(bar, "get_height"))
    assert top == pytest.approx(3.7) and ax.get_ylim()[1] > 1.04 * top


@pytest.mark.system  # the loops would stand beside other tests' measurements
@pytest.mark.parametrize(
    ("notebook", "cells"),
    [
        ("01_mixed_precision", ["baseline", "amp-step", "setups", "steps", "sweep"]),
        ("04_data_parallel", ["card", "train", "measure"]),
        ("05_ddp_two_nodes", ["measure"]),
    ],
)
def test_labs_that_measure_beside_two_busy_loops_say_so(run_cells_of, root, capsys, monkeypatch, busy, notebook, cells):
    build = models.build
    # As many steps, shorter ones.
    monkeypatch.setattr(models, "build", lambda net, **more: build(net.replace("152", "18"), **more))
    monkeypatch.setattr("lab_utils.machine.has_fast_bf16", lambda _: True)
    once = Records.once
    skipped = {"training": [{}, {}, {}]}  # lab 4's runs, from whose cell only the way to launch is needed
    monkeypatch.setattr(Records, "once", lambda *args, **more: skipped.get(args[1]) or once(*args, **more))
    monkeypatch.syspath_prepend(root / "notebooks")
    monkeypatch.chdir(root / "notebooks")
    images, labels = torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64)
    names = {"images": images, "labels": labels}
    names |= {"DEVICE": "cpu", "FULL": False} if notebook[:2] == "05" else {}  # what the nodes have
    with busy(len(os.sched_getaffinity(0))):
        run_cells_of(notebook, *cells, **names)
    out = capsys.readouterr().out
    assert "this machine was busy, other programs took" in out, out
