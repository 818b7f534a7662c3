"""A lap of the race is run, timed and evaluated by the judge; what would win without training is refused."""

import json
import math
import sys

import pytest
import torch
from harness.drawn import list_all

from course import race
from course.race import __main__ as command
from course.race import images, records, runner
from course.race.board import read_entries
from lab_common import LabError, checkout
from lab_common.commandline import run_command
from lab_utils import data, models
from nodelaunch import JobError, local_nodes, ssh_nodes

BASELINE = checkout() / "notebooks/scripts/race_baseline.py"
COUNTS = {"train": 300, "valid": 60, "test": 20}
SHORT = ["--epochs", 1, "--batch-size", 90]
# Saves weights that nobody trained: argv[-1] is what --checkpoint names.
UNTRAINED = """
import os, sys, time
from pathlib import Path
import torch
from lab_utils import models
from lab_utils.data import pack_shapes
def save(seed=0):
    torch.manual_seed(seed)
    torch.save(models.build("tiny").state_dict(), sys.argv[-1])
"""


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


@pytest.fixture
def home(runs, tmp_path, monkeypatch):
    """Few images; their data folder."""
    data.pack_shapes(tmp_path / "data/packed/shapes10", COUNTS)
    monkeypatch.setenv("LAB_DATA", str(tmp_path / "data"))
    return records.find_home()


@pytest.fixture
def run(home, warm_ranks, write):
    """Runs a script's text as a lap that reaches its goal in any case."""
    return lambda text: race.run_lap(write("race.py", UNTRAINED + text), threshold=0.0, show=False)


def test_a_lap_is_run_evaluated_and_recorded(home, warm_ranks, monkeypatch):
    monkeypatch.setattr(
        records, "read_thresholds", lambda: [{"data": "shapes10", "train": 300, "league": "sprint", "top1": 0.0}]
    )
    lap = race.run_lap(BASELINE, ["--epochs", 2, "--batch-size", 90], name="me", show=False)
    folder = home / lap["lap"]
    assert json.loads((folder / "record.json").read_text()) == lap
    assert {path.name for path in folder.iterdir()} == {"record.json", "weights.pt", "code"}
    assert (folder / "code/race_baseline.py").read_bytes() == BASELINE.read_bytes()
    assert lap["reached"] and lap["threshold"] == 0.0 and lap["net"] == "tiny" and lap["data"]["train"] == 270
    assert [when for when, _ in lap["curve"]] == sorted(when for when, _ in lap["curve"]) and len(lap["curve"]) == 2
    assert lap["curve"][-1] == [lap["seconds"], lap["top1"]] == json.loads(json.dumps(lap["curve"]))[-1]
    # By hand: the images come from the record's seed, their classes by its mapping.
    net, seen = models.build("tiny"), data.load()
    net.load_state_dict(torch.load(folder / "weights.pt"))
    shown, labels = images.find_images(seen, lap["data"]["mapping"], lap["data"]["seed"])
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (seen.mean, seen.std))
    assert not torch.equal(shown, (seen.valid.images / 255 - mean) / std) and len(labels) == 60
    assert lap["top1"] == pytest.approx((net.eval()(shown).argmax(1) == labels).double().mean().item(), abs=0.02)


def test_each_lap_has_its_own_order_and_numbers_of_classes(home, tmp_path):
    whole = data.load()
    found = []
    for name in "ab":
        mapping, count = images.draw_lap(whole, tmp_path / name)
        lap = data.load(root=tmp_path / name)
        assert count == len(lap.train) == 270 and lap.class_names == tuple(f"class {n}" for n in range(10))
        # All of `train` and nothing else, each with the number that its class has in this lap.
        known = {
            bytes(image): label
            for image, label in zip(whole.train.images.numpy(), whole.train.labels.tolist(), strict=True)
        }
        parts = [
            (bytes(image), label)
            for part in (lap.train, lap.valid)
            for image, label in zip(part.images.numpy(), part.labels.tolist(), strict=True)
        ]
        assert len({image for image, _ in parts}) == 300 and all(
            mapping[known[image]] == label for image, label in parts
        )
        found.append((mapping, lap.train.labels.tolist()))
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]


def test_the_judges_clock_is_the_only_one(run):
    """Clocks that stand still, a saved file of last year, and a search for a seed before "the start" win nothing."""
    lap = run(
        "begin = time.monotonic()\n"
        "time.time = time.monotonic = time.perf_counter = lambda: 0.0\n"
        "for seed in range(3): models.build('tiny'); time.sleep(0.7)\n"
        "save()\n"
        "os.utime(sys.argv[-1], (1, 1))\n"
    )
    assert lap["seconds"] > 2.1


def test_the_last_weights_count_and_not_the_best(run):
    lap = run(
        "save(); time.sleep(0.5); state = torch.load(sys.argv[-1])\n"
        "weight, bias = list(state)[-2:]\n"
        "state[weight] *= 0; state[bias] *= 0; state[bias][3] = 1\n"
        "torch.save({'module._orig_mod.' + key: value for key, value in state.items()}, sys.argv[-1])\n"
    )
    assert len(lap["curve"]) == 2 and lap["top1"] == pytest.approx(0.1, abs=1e-6)


BAD = {
    "nothing saved": ("pass", "saved no weights"),
    "another network": ("torch.save(torch.nn.Linear(2, 2).state_dict(), sys.argv[-1])", "fit no network"),
    "code in it": ("torch.save({'model': Path}, sys.argv[-1])", r"weights_only|Unsupported|WeightsUnpickler"),
    "half a file": ("open(sys.argv[-1], 'wb').write(b'PK' + bytes(100))", "cannot be evaluated"),
}


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD)
def test_a_lap_without_good_weights_did_not_end(text, words, home, run):
    with pytest.raises(LabError, match=words) as caught:
        run(text)
    (lap,) = records.read_laps(home)
    assert lap["failed"] == caught.value.what and list_all(home / lap["lap"]) == ["code", "code/race.py", "record.json"]


def test_a_lap_that_fails_or_is_interrupted_counts_as_endless(home, run, monkeypatch, capsys):
    text = "save(time.time_ns() % 10**6)"
    good = run(text)
    with monkeypatch.context() as patch:
        patch.setattr(images, "find_images", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(text)
    assert "failed, and it counts" in capsys.readouterr().out
    with pytest.raises(JobError, match="ZeroDivisionError"):
        run("1 / 0")
    other = run(text)
    laps = records.read_laps(home)
    assert [lap["failed"] == "" for lap in laps] == [True, False, False, True] and laps[1]["failed"] == "interrupted"
    assert "ZeroDivisionError" in laps[2]["failed"] and laps[2]["top1"] is None
    for lap in laps[1:3]:
        assert lap["class"] == good["class"] and lap["data"]["valid"] == good["data"]["valid"]
    entries, refused = read_entries([home])
    assert refused == [] and [len(entry.laps) for entry in entries] == [3, 1]
    assert entries[0].score == max(good["seconds"], other["seconds"]) and entries[1].score == math.inf


def test_a_judge_who_is_killed_leaves_a_lap_that_counts(home, run, write, monkeypatch):
    """As by `kill -9` on the judge just after the launch: nothing of the judge's own ending runs."""
    with monkeypatch.context() as patch:
        patch.setattr(runner, "watch", interrupt)
        patch.setattr(runner.shutil, "rmtree", lambda *arguments, **options: None)
        patch.setattr(runner, "clean", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run("save()")
    (left,) = home.glob("[0-9]*")
    assert list_all(left) == ["code", "code/race.py", "record.json"] and list(home.glob(".lap-*"))
    run("save()")
    (first,) = (one for one in records.read_laps(home) if one["lap"] == left.name)
    assert first["failed"] == "the judge was stopped before the lap ended"
    assert first["data"]["seed"] is None, "the judge's images are not drawn before the script has ended"
    assert not list(home.glob(".lap-*")) and len(read_entries([home])[0][0].laps) == 2


def test_a_script_is_short(home, write):
    with pytest.raises(LabError, match="16 KiB"):
        race.run_lap(write("race.py", "#" * 20_000), threshold=0.0)
    assert not home.exists()


def test_a_lap_that_could_not_count_is_not_run(home, write):
    with pytest.raises(LabError, match="could not read the record") as caught:
        race.run_laps(write("race.py", UNTRAINED), threshold=52)
    assert caught.value.where == "threshold" and "0.52" in caught.value.fix and records.read_laps(home) == []


def test_laps_that_are_there_are_not_run_again(home, warm_ranks, write, monkeypatch):
    monkeypatch.delenv("LAB_ROUNDS", raising=False)
    script = write("race.py", UNTRAINED + "save()")
    first = race.run_laps(script, count=2, threshold=0.0, show=False)
    assert race.run_laps(script, count=2, threshold=0.0, show=False) == first == records.read_laps(home)
    # With another number of processes it is another lap.
    (other,) = race.run_laps(script, count=1, threshold=0.0, show=False, nproc_per_node=2)
    assert other["processes"] == 2 and other not in first
    script.write_text(UNTRAINED + "save(1)")
    assert len(race.run_laps(script, count=1, threshold=0.0, show=False)) == 1 and len(records.read_laps(home)) == 4


def test_two_nodes_that_are_one_are_refused(monkeypatch):
    monkeypatch.setenv("LAB_NODES", "local:1")
    monkeypatch.setattr(sys, "argv", ["race", "lap", "--nodes", "2", "race.py"])
    with pytest.raises(LabError, match="There is one node only"):
        command.main()


def test_two_nodes_are_compared_with_one(home, warm_ranks):
    lap = race.run_lap(BASELINE, SHORT, nodes=local_nodes(2), threshold=0.0, show=False)
    assert lap["nodes"] == lap["processes"] == 2 and lap["class"].startswith("2 nodes on one machine, ")
    assert lap["speed_up"] == lap["one_node"]["seconds"] / lap["seconds"]
    assert f"efficiency {lap['speed_up'] / 2:.0%}" in race.tell(lap)
    # Zero, where no rank worked between two looks: the lap lasts a second.
    assert lap["busy"] is None or 0 <= lap["busy"] <= 1  # a lap this short may end between two looks


@pytest.mark.system
def test_a_lap_on_two_hosts_copies_its_data_and_leaves_nothing(hosts, home):
    """Torchrun itself, over SSH."""
    nodes = ssh_nodes(["n1", "n2"], config=hosts.ssh_config, python=sys.executable, folder="/node/labs")
    lap = race.run_lap(BASELINE, SHORT, nodes=nodes, threshold=0.0, show=False)
    assert lap["class"].startswith("2 nodes, ") and lap["speed_up"]
    assert 0 < lap["busy"] <= 1
    for node in nodes:
        assert node.popen(["ls", "/node/labs/race"]).communicate()[0] == b""


def test_in_a_terminal_laps_are_run_and_the_leaderboard_is_written(home, warm_ranks, write, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["race", *map(str, arguments)])
        command.main()
        return capsys.readouterr().out

    script = write("race.py", UNTRAINED + "assert sys.argv[1:3] == ['--epochs', '3']\nsave()")
    with pytest.raises(LabError, match="No threshold is set for shapes10 with 300"):
        call("lap", script)
    monkeypatch.setattr(runner, "find_threshold", lambda dataset, league: 0.02)
    assert "sprint, 2% top-1, reached: " in call("lap", "--name", "me", script, "--epochs", 3)
    assert "entries: 1, refused: 0" in call("board", home, "--to", home.parent / "board.html")
    page = (home.parent / "board.html").read_text()
    assert "<td>me</td>" in page and "Changes in" in page
    next(home.glob("*/code/race.py")).unlink()
    with pytest.raises(SystemExit) as ended:
        call("board", home, "--to", home.parent / "board.html")
    assert ended.value.code == 1 and "refused: race/" in capsys.readouterr().out
    monkeypatch.setattr(runner, "run_lap", interrupt)
    monkeypatch.setattr(sys, "argv", ["race", "lap", str(script)])
    assert run_command(command.main) == 130 and "Interrupted." in capsys.readouterr().err


def test_a_team_in_a_container_races_under_its_name(write, monkeypatch):
    laps = []
    monkeypatch.setattr(runner, "run_lap", lambda *arguments, **given: laps.append(given["name"]))
    monkeypatch.setattr(runner, "tell", str)
    monkeypatch.setenv("LAB_TEAM", "red")
    monkeypatch.setattr(sys, "argv", ["race", "lap", str(write("race.py", "pass"))])
    command.main()
    assert laps == ["red"]
