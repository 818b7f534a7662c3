"""The timer and the records: what they keep, in which order, and what survives."""

import importlib
import json
import math
import os
import subprocess
import sys
import time
import weakref
from dataclasses import FrozenInstanceError

import numpy as np
import psutil
import pytest
import torch
from harness.drawn import assert_explains
from torch import nn

from course import reference
from course.reference import save_reference
from lab_common import LabError
from lab_utils import machine, timing
from lab_utils.timing import Records, Timing
from lab_utils.timing import others as others_module
from lab_utils.timing.others import Usage, find_others

# The package exports a function of the same name as this module, so it is fetched by its path.
measure_module = importlib.import_module("lab_utils.timing.measure")
comparison_module = importlib.import_module("lab_utils.timing.comparison")

# torch is imported once, and the processes that the test is about are forked from there.
FORK = """
import os, sys, time
import torch.distributed as dist
from lab_utils import timing
children = []
for number in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        work(number)
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""

RANKS = """
def work(rank):
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
    step = lambda: time.sleep(0.02 if rank == 1 else 0.001)
    one = timing.measure(step, name="sleep", images=8, repeats=4, warmup=1, device="cpu")
    os.write(1, f"{one.rank} {len(one.seconds)} {one.median > 0.015}\\n".encode())
    dist.barrier()
    dist.destroy_process_group()
"""

APPENDING = """
def work(writer):
    records = timing.Records("lab9", sys.argv[1])
    for number in range(25):
        records.add("parallel", {"text": "x" * 5000}, writer=writer, number=number)
"""


def run_forked(work, argument, processes):
    command = [sys.executable, "-c", work + FORK, str(argument), str(processes)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_timing(name, *seconds, images=0, **more):
    return Timing(name, seconds, seconds, images=images, **more)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_warm_up_is_run_and_dropped():
    calls = []

    def step():
        calls.append(1)
        time.sleep(0.2 if len(calls) <= 2 else 0.001)

    one = timing.measure(step, name="step", images=4, repeats=5, warmup=2, device="cpu")
    assert len(calls) == 7
    assert len(one.seconds) == len(one.cpu_seconds) == 5
    assert one.warmup == 2
    assert max(one.seconds) < 0.19


def test_wall_seconds_count_waiting_and_cpu_seconds_count_work():
    def work():
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass

    waiting, working = timing.interleave(
        {"wait": lambda: time.sleep(0.02), "work": work}, repeats=3, warmup=0, device="cpu", progress=False
    )
    assert waiting.median >= 0.02
    assert max(waiting.cpu_seconds) < 0.01
    assert min(working.cpu_seconds) >= 0.02


SPIN = "import time; end = time.time() + 20\nwhile time.time() < end: pass"


def test_other_programs_are_seen_where_they_take_the_processors():
    def work():
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass

    env = os.environ | {"JPY_SESSION_NAME": "/labs/04_data\x1b_parallel.ipynb"}  # as Jupyter starts a kernel
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN], env=env) for _ in range(os.cpu_count())]
    try:
        (busy,) = timing.interleave({"work": work}, repeats=3, warmup=1, device="cpu", progress=False)
        name = others_module._describe(psutil.Process(spinning[0].pid))
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert 0.3 < busy.others <= 1 and busy.noise == "busy"
    assert name == "the notebook 04_data\ufffd_parallel.ipynb"
    assert busy.busiest in (name, "")  # where this machine had more to do
    assert "this machine was busy, other programs took" in timing.find_noise([busy])
    assert Timing.from_record(json.loads(json.dumps(busy.as_record()))) == busy


@pytest.mark.parametrize(
    ("read", "others"),
    [
        ([(100, 40, 5), (110, 50, 12)], 0.3),  # of 10 seconds all were worked, 7 of them here
        ([(100, 40, 5), (110, 49, 12)], 0.0),  # a tenth was idle
        ([(100, 40, 5), (110, 50, 16)], 0.0),  # the two clocks tick differently
        ([(100, 40, 5), (100.5, 40.5, 5.1)], 0.0),  # too short to know
    ],
)
def test_the_share_of_others_is_what_was_worked_elsewhere(monkeypatch, read, others):
    usages = [Usage(*seconds, {}) for seconds in read]
    monkeypatch.setattr(others_module, "read_usage", lambda: usages[1])
    assert find_others(usages[0]) == (pytest.approx(others), "")


class Program:
    """One that can be seen, as psutil does; of another user, it tells nothing of its settings."""

    def __init__(self, pid, settings=None):
        self.pid, self.settings = pid, settings

    def environ(self):
        if self.settings is None:
            raise psutil.AccessDenied(self.pid)
        return self.settings

    def name(self):
        return "train"


NOTEBOOK = {"JPY_SESSION_NAME": "/labs/01_a.ipynb"}


@pytest.mark.parametrize(
    ("seconds", "busiest"),
    [
        ({Program(7): 3}, "train (process 7)"),
        ({Program(7, NOTEBOOK): 1, Program(8, NOTEBOOK): 1, Program(9): 1}, "the notebook 01_a.ipynb"),
        ({Program(7, {"JPY_SESSION_NAME": "/labs/mine.ipynb"}): 3}, "train (process 7)"),  # what this notebook started
        ({Program(7): 1, Program(8): 1}, ""),  # none took half of it
        ({Program(os.getpid()): 7}, ""),
    ],
)
def test_the_program_that_took_most_is_named(monkeypatch, seconds, busiest):
    monkeypatch.setenv("JPY_SESSION_NAME", "/labs/mine.ipynb")
    monkeypatch.setattr(others_module, "read_usage", lambda: Usage(110, 50, 12, seconds))
    assert find_others(Usage(100, 40, 5, dict.fromkeys(seconds, 0))) == (pytest.approx(0.3), busiest)


@pytest.mark.parametrize(
    ("seconds", "cpu_seconds", "more", "noise"),
    [
        ((1.0, 1.1, 1.2), (1.0, 1.1, 1.2), {}, ""),
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), {"others": 0.2}, "busy"),
        ((1.0, 2.0, 3.0), (1.0, 1.0, 1.0), {}, "busy"),  # the same work, in another time
        ((1.0, 2.0, 3.0), (1.0, 1.0, 1.0), {"rank": 1}, "jumps"),  # or it waited for another rank
        ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0), {}, "jumps"),
        ((0.0, 0.0, 1.0), (), {}, ""),
    ],
)
def test_what_is_called_noise(seconds, cpu_seconds, more, noise):
    one, quiet = Timing("fp32", seconds, cpu_seconds, **more), make_timing("bf16", 1.0, 1.0, 1.0)
    assert one.noise == noise
    words = timing.find_noise([one, quiet])
    assert bool(words) == bool(noise) and words.endswith("measure again" if noise else "")
    assert ("noise" in timing.compare([one, quiet])) == bool(noise)
    if noise:
        assert dict(timing.compare([quiet, one])["noise"]) == {"bf16": "", "fp32": noise}
    if noise == "jumps":
        assert words == "the times of fp32 jump, quartiles 1.7-fold apart: measure again"


def test_interleaving_runs_one_of_each_per_round_and_no_set_up_always_follows_the_same_one():
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in "ABC"}
    timings = timing.interleave(steps, repeats=5, warmup=1, device="cpu", progress=False)
    rounds = ["".join(calls[start : start + 3]) for start in range(0, 18, 3)]
    assert rounds == ["ABC", "CBA", "BCA", "ACB", "CAB", "BAC"]
    assert [one.name for one in timings] == ["A", "B", "C"]
    assert [len(one.seconds) for one in timings] == [5, 5, 5]
    for name in "ABC":
        before = {calls[index - 1] for index in range(1, 18) if calls[index] == name}
        assert before >= set("ABC") - {name}


def test_the_device_is_synchronised_before_the_clock_starts_and_before_it_stops(monkeypatch):
    events = []
    clock = iter(range(1000))
    monkeypatch.setattr(measure_module, "synchronize", lambda device: events.append(("sync", str(device))))
    monkeypatch.setattr(measure_module.time, "perf_counter", lambda: events.append("clock") or next(clock))
    timing.measure(lambda: events.append("step"), repeats=2, warmup=1, device="cpu")
    one = [("sync", "cpu"), "clock", "step", ("sync", "cpu"), "clock"]
    # tqdm reads the clock, too: only what lies between the first and the last synchronisation of a step counts.
    starts = [index for index, event in enumerate(events) if event == "step"]
    assert [events[index - 2 : index + 3] for index in starts] == [one] * 3


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_marks_one_set_up_and_the_others_go_on(error):
    calls, held = [], []

    def fail():
        calls.append("big")
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        raise type(error)(*error.args)  # a new one: the test itself holds the other, and with it its frames

    steps = {"big": fail, "small": lambda: calls.append("small")}
    big, small = timing.interleave(steps, images=8, repeats=3, warmup=1, device="cpu", progress=False)
    assert big.out_of_memory and math.isnan(big.median) and math.isnan(big.images_per_second)
    assert not small.out_of_memory and len(small.seconds) == 3
    assert calls.count("big") == 1 and calls.count("small") == 4
    assert held[0]() is None, "the exception still holds the frames of the step"


def test_real_memory_that_is_not_there_is_told():
    one = timing.measure(lambda: torch.empty(2**50, dtype=torch.uint8), repeats=1, warmup=0, device="cpu")
    assert one.out_of_memory


def test_what_a_step_that_failed_held_is_let_go():
    held = []

    def fail():
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        cycle = [tensor]
        cycle.append(cycle)
        raise torch.OutOfMemoryError("CUDA out of memory")

    timing.measure(fail, device="cpu")
    assert held[0]() is None


def test_an_error_of_the_step_is_the_callers():
    with pytest.raises(RuntimeError, match="shapes"):
        timing.measure(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3), device="cpu")
    with pytest.raises(ZeroDivisionError):
        timing.measure(lambda: 1 / 0, device="cpu")


def test_the_spread_is_the_quartiles():
    one = make_timing("step", 0.1, 0.2, 0.3, 0.4, 10.0, images=6)
    assert (one.low, one.median, one.high) == pytest.approx((0.2, 0.3, 0.4))
    assert one.images_per_second == pytest.approx(20)
    single = make_timing("step", 0.5)
    assert (single.low, single.median, single.high) == (0.5, 0.5, 0.5)
    assert math.isnan(single.images_per_second)
    with pytest.raises(FrozenInstanceError):
        one.name = "other"


def test_the_slowest_rank_is_kept_and_told(tmp_path):
    store = tmp_path / "store"
    assert run_forked(RANKS, store, 2).splitlines() == ["1 4 True"] * 2


def test_compare_sets_speeds_beside_the_baseline():
    seconds = (0.15, 0.2, 0.2, 0.2, 0.2, 0.25)
    timings = [
        make_timing("fp32", *seconds, images=8),
        make_timing("bf16", *(second / 2 for second in seconds), images=8, peak_bytes=2**21),
        Timing("fp16", ()),
    ]
    table = timing.compare(timings)
    assert list(table.columns) == ["ms", "images/s", "speed-up", "low", "high", "n", "peak MiB"]
    assert list(table.index) == ["fp32", "bf16", "fp16"]
    assert list(table.loc["bf16"]) == pytest.approx([100, 80, 2, 2, 2, 6, 2])
    assert table.loc["fp32", "speed-up"] == 1 and math.isnan(table.loc["fp32", "peak MiB"])
    assert table.loc["fp16"].drop("n").isna().all() and table.loc["fp16", "n"] == 0
    with pytest.raises(LabError, match="no timings"):
        timing.compare([])


def test_a_baseline_that_ran_out_of_memory_leaves_the_others_comparable():
    timings = [Timing("fp32", ()), make_timing("fp16", 0.2, 0.2), make_timing("bf16", 0.1, 0.1)]
    table = timing.compare(timings)
    assert list(table["speed-up"])[1:] == pytest.approx([1, 2]) and math.isnan(table.loc["fp32", "speed-up"])
    assert list(table["n"]) == [0, 2, 2] and table["low"].isna().all(), "two rounds are too few"
    assert table.index.name == "set-up (fp32 ran out of memory: speed-up over fp16)"
    assert timing.compare(timings[:1])["speed-up"].isna().all()


# Ratios of six rounds whose pairs of rounds were averaged and sorted by hand.
RATIOS = (1.0, 2.0, 4.0, 8.0, 256.0, 1024.0)


def test_the_speed_up_is_the_middle_of_all_pairs_of_rounds():
    old = make_timing("fp32", *RATIOS)
    new = make_timing("bf16", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    # In powers of 2: the rounds 0 1 2 3 8 10, and the middle of the 21 means 0 .5 1 1 1.5 1.5 2 2 2.5 3 4 4.5 ... 10.
    gain = timing.find_speed_up(old, new)
    assert (gain.value, gain.low, gain.high) == pytest.approx((2**4, 1, 1024)) and gain.rounds == 6
    assert not gain.proven, "the interval of six rounds is all that was seen, and 1 is in it"
    back = timing.find_speed_up(new, old)
    assert (back.value, back.low, back.high) == pytest.approx((2**-4, 1 / 1024, 1))
    # What slows both of a round changes nothing.
    slowed = [make_timing(one.name, *(3.0**n * s for n, s in enumerate(one.seconds))) for one in (old, new)]
    assert str(timing.find_speed_up(*slowed)) == str(gain) == "16.00 (1.00 to 1024.00, n = 6)"


@pytest.mark.parametrize(
    ("rounds", "factor", "words", "proven"),
    [
        (6, 0.5, "2.00 (2.00 to 2.00, n = 6)", True),
        (6, 1.0, "1.00 (1.00 to 1.00, n = 6)", False),
        (5, 0.5, "too few rounds to tell (n = 5)", False),
    ],
)
def test_a_speed_up_is_proven_from_six_rounds_on(rounds, factor, words, proven):
    seconds = [0.1 * 1.1**number for number in range(rounds)]
    old, new = make_timing("fp32", *seconds), make_timing("bf16", *(factor * second for second in seconds))
    gain = timing.find_speed_up(old, new)
    assert (str(gain), gain.proven, gain.rounds) == (words, proven, rounds)
    assert gain.value == pytest.approx(1 / factor), "known, if not proven, in few rounds too"


def test_set_ups_that_were_not_measured_in_turn_are_refused():
    with pytest.raises(LabError, match="have no rounds in common") as caught:
        timing.find_speed_up(make_timing("fp32", 0.1, 0.1, 0.1), make_timing("bf16", 0.1, 0.1))
    assert_explains(caught.value, "fp32: 3 rounds; bf16: 2", "in one timing.interleave")


SPREAD, TIMES = 0.03, 20_000  # standard deviation of a step of 1 s; how often each comparison is simulated


@pytest.mark.parametrize("noise", ["normal", "skewed"])
@pytest.mark.parametrize("rounds", [6, 20])
def test_noise_is_called_a_difference_in_at_most_5_percent_and_differences_are_found(noise, rounds):
    generator, shape = np.random.default_rng(45), (2, TIMES, rounds)
    # Standardised exponentials are skewed: rarely fast, at times very slow.
    drawn = generator.standard_normal(shape) if noise == "normal" else generator.exponential(size=shape) - 1
    old, new = 1 + SPREAD * drawn

    def find_share(seconds):
        _, low, high = comparison_module.find_middle(np.log(old / seconds))
        return np.mean((low > 0) | (high < 0))

    mistaken, found = find_share(new), find_share(new + SPREAD)
    assert 0.02 <= mistaken <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / TIMES)
    assert rounds < 20 or found >= 0.8


# --- records ---------------------------------------------------------------------------------------------------------


def test_once_calls_once_per_settings_machine_and_torch(tmp_path, monkeypatch):
    records, calls = Records("lab9", tmp_path), []

    def function():
        calls.append(1)
        return {"sweep": [make_timing("fp32", 0.1, 0.2)], "call": len(calls)}

    first = records.once("sweep", function, batches=(1, 2), stem="cifar")
    assert records.note.startswith("measured now")
    assert first == {"sweep": [make_timing("fp32", 0.1, 0.2)], "call": 1}
    assert Records("lab9", tmp_path).once("sweep", function, stem="cifar", batches=(1, 2)) == first
    assert records.once("sweep", function, batches=(1, 2), stem="cifar") == first
    assert "not measured again" in records.note and len(calls) == 1

    assert records.once("sweep", function, batches=(1, 2), stem="imagenet")["call"] == 2
    assert records.once("other", function, batches=(1, 2), stem="cifar")["call"] == 3
    assert records.once("sweep", function, again=True, batches=(1, 2), stem="cifar")["call"] == 4
    assert records.once("sweep", function, batches=(1, 2), stem="cifar")["call"] == 4  # the newest, not the first
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert records.once("sweep", function, batches=(1, 2), stem="cifar")["call"] == 5
    monkeypatch.undo()
    text = records.path.read_text().replace(machine.describe().label, "another machine")
    records.path.write_text(text)
    assert records.once("sweep", function, batches=(1, 2), stem="cifar")["call"] == 6


def test_few_rounds_are_allowed_for_tests_and_are_no_finding(monkeypatch):
    monkeypatch.setenv("LAB_ROUNDS", "2")
    steps = []
    one, other = timing.interleave({"a": lambda: steps.append("a"), "b": lambda: steps.append("b")}, device="cpu")
    assert len(one.seconds) == len(other.seconds) == 2
    assert (one.warmup, sorted(steps)) == (1, ["a"] * 3 + ["b"] * 3)
    whole = timing.measure(list, repeats=1, warmup=0, device="cpu")
    monkeypatch.delenv("LAB_ROUNDS")  # what was measured in few rounds stays so, in records too
    one = Timing.from_record(json.loads(json.dumps(one.as_record())))
    assert timing.find_noise([one, other]) == "LAB_ROUNDS allowed only a few rounds: unset it, and measure again"
    assert list(timing.compare([one, other])["noise"]) == ["few", "few"]
    assert len(whole.seconds) == 1 and whole.noise != "few", "no more were asked for"
    monkeypatch.setenv("LAB_ROUNDS", "0")
    with pytest.raises(LabError, match="nothing to measure"):
        timing.measure(list, device="cpu")


def test_a_measurement_that_was_noise_is_measured_again(tmp_path):
    records, busy = Records("lab9", tmp_path), make_timing("fp32", 0.1, others=0.4)
    results = iter([{"a": [busy], "b": 1}, {"a": [make_timing("fp32", 0.1)], "b": 2}])
    for _ in range(3):
        found = records.once("sweep", lambda: next(results))
    assert found["b"] == 2 and "not measured again" in records.note


def test_a_function_among_the_settings_counts_as_changed_when_its_source_is(tmp_path):
    def fast():
        return 1

    def slow():
        return 2

    records = Records("lab9", tmp_path)
    assert records.once("sweep", fast, step=fast) == 1
    assert records.once("sweep", slow, step=fast) == 1
    assert records.once("sweep", slow, step=slow) == 2


def test_records_lie_in_lab_runs_and_are_read_by_kind(tmp_path, monkeypatch):
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "my runs"))
    records = Records("lab9")
    assert records.read() == []
    for number in range(3):
        records.add("even" if number % 2 == 0 else "odd", number)
    assert (tmp_path / "my runs" / "lab9.jsonl").exists()
    assert [record["result"] for record in records.read()] == [0, 1, 2]
    assert [record["result"] for record in records.read("even")] == [0, 2]


def test_a_torn_last_line_is_skipped_and_spoils_nothing_that_follows(tmp_path, recwarn):
    records = Records("lab9", tmp_path)
    for number in range(2):
        records.add("kind", number)
    records.path.write_bytes(records.path.read_bytes()[:-30])
    assert [record["result"] for record in records.read()] == [0]
    assert not [one for one in recwarn if one.category is not ResourceWarning]  # which is of tests before this one
    records.add("kind", 2)
    with pytest.warns(UserWarning, match=r"1 unreadable lines of lab9\.jsonl"):
        assert [record["result"] for record in records.read()] == [0, 2]


def test_four_processes_append_at_once_and_no_line_is_lost(tmp_path):
    run_forked(APPENDING, tmp_path, 4)
    found = [
        (record["settings"]["writer"], record["settings"]["number"]) for record in Records("lab9", tmp_path).read()
    ]
    assert sorted(found) == [(writer, number) for writer in range(4) for number in range(25)]
    assert [number for writer, number in found if writer == 2] == list(range(25))


def test_what_json_cannot_hold_is_refused_and_leaves_no_trace(tmp_path):
    records = Records("lab9", tmp_path)
    with pytest.raises(LabError, match="cannot be stored"):
        records.add("kind", torch.zeros(2))
    assert records.read() == []


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="could not be stored") as caught:
        Records("lab9", tmp_path / "file").add("kind", 1)
    assert "LAB_RUNS" in caught.value.fix


# --- reference runs --------------------------------------------------------------------------------------------------


@pytest.fixture
def in_checkout(tmp_path, monkeypatch):
    """Reference runs go to an empty folder in place of the repository's own."""
    module = importlib.import_module("course.reference")
    monkeypatch.setattr(module, "checkout", lambda: tmp_path)
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is for machines without a GPU")
def test_a_reference_run_needs_a_gpu(in_checkout):
    Records("lab9").add("sweep", 1)
    with pytest.raises(LabError, match="on a GPU, and this machine has none"):
        save_reference("lab9")
    assert reference.read("lab9") is None


def test_the_reference_run_holds_the_newest_record_per_kind_and_settings(in_checkout):
    records = Records("lab9")
    for number, stem in enumerate(["cifar", "imagenet", "cifar"]):
        records.add("sweep", [number, make_timing("fp32", 0.1)], stem=stem)
    records.add("memory", 3, stem="cifar")
    path = save_reference("lab9", allow_cpu=True)
    assert path == in_checkout / "data" / "reference" / "lab9.json"
    assert [file.name for file in path.parent.iterdir()] == ["lab9.json"]
    run = reference.read("lab9")
    found = {(record["kind"], record["settings"]["stem"]): record["result"] for record in run["records"]}
    fp32 = make_timing("fp32", 0.1)
    assert found == {("sweep", "cifar"): [2, fp32], ("sweep", "imagenet"): [1, fp32], ("memory", "cifar"): 3}
    assert run["machine"]["label"] == machine.describe().label
    assert run["machine"]["torch"] == torch.__version__ and run["machine"]["python"]
    assert run["when"] == max(record["when"] for record in run["records"])
    assert str(in_checkout) not in path.read_text()


def test_saved_bytes_are_those_of_the_activations_alone():
    layer, images = nn.Linear(8, 4, bias=False), torch.randn(32, 8)
    assert timing.count_saved_bytes(lambda: layer(images), layer) == 32 * 8 * 4  # the input, and not the weight
    twice = nn.Sequential(layer, nn.ReLU(), nn.ReLU())
    assert timing.count_saved_bytes(lambda: twice(images), twice) == 32 * 8 * 4 + 2 * 32 * 4 * 4  # each output once
