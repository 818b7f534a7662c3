"""A lap of the race is run, timed and evaluated by the judge; what would win without training is refused."""

import contextlib
import io
import json
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.drawn import list_all, make_folder

from course import race
from course.exercises.scripts import draw_shapes
from course.race import __main__ as command
from course.race import baseline, evaluate, images, judge, leagues, records
from course.race.board import read_entries
from lab_common import LabError, checkout
from lab_common.commandline import find_user, run_command
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
def save(seed=0):
    torch.manual_seed(seed)
    torch.save(models.build("tiny").state_dict(), sys.argv[-1])
"""


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


@pytest.fixture
def home(runs, tmp_path, monkeypatch):
    """Few images; their data folder."""
    draw_shapes(tmp_path / "data/packed/shapes10", COUNTS)
    monkeypatch.setenv("LAB_DATA", str(tmp_path / "data"))
    return records.find_home()


@pytest.fixture
def run(home, warm_ranks, write):
    """Runs a script's text as a lap of 20 seconds."""
    return lambda text, **more: race.run_lap(write("race.py", UNTRAINED + text), **{"within": 20, **more}, show=False)


def test_a_lap_is_run_evaluated_and_recorded(home, warm_ranks, monkeypatch):
    monkeypatch.setattr(
        leagues, "read_thresholds", lambda: [{"data": "shapes10", "train": 300, "league": "sprint", "top1": 0.0}]
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
    shown = images.find_images(seen, lap["data"]["mapping"], lap["data"]["seed"])
    assert not np.array_equal(shown.images, seen.valid.images.numpy()) and len(shown.labels) == 60
    normal = (torch.tensor(shown.images) / 255 - torch.tensor(seen.mean).view(3, 1, 1)) / torch.tensor(seen.std).view(
        3, 1, 1
    )
    hits = (net.eval()(normal).argmax(1) == torch.tensor(shown.labels)).sum().item()
    assert lap["top1"] == pytest.approx(hits / 60, abs=0.02)


def test_each_lap_has_its_own_order_and_numbers_of_classes(home, tmp_path):
    whole = data.load()
    found = []
    for name in "ab":
        mapping, counts = images.draw_lap(whole, tmp_path / name)
        lap = data.load(root=tmp_path / name)
        assert counts == {"train": 270, "valid": 30, "test": 30} and set(lap.class_names) == {
            f"class {i}" for i in range(10)
        }
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
        assert np.bincount(lap.valid.labels).tolist() == [3] * 10
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


def test_nobody_reports_an_accuracy_of_his_own(run):
    lap = run(
        "import nodelaunch; nodelaunch.report({'top1': 1.0, 'seconds': 0.1}); print('top-1: 1.0')\n"
        "(Path(sys.argv[-1]).parent / 'record.json').write_text('{}')\n"
        "torch.save({'model': models.build('tiny').state_dict(), 'top1': 1.0}, sys.argv[-1])\n"
    )
    assert lap["top1"] < 0.6 and lap["seconds"] > 0.1


def test_the_last_weights_count_and_not_the_best(run):
    lap = run(
        "save(); time.sleep(0.5); state = torch.load(sys.argv[-1])\n"
        "weight, bias = list(state)[-2:]\n"
        "state[weight] *= 0; state[bias] *= 0; state[bias][3] = 1\n"
        "torch.save({'module.' + key: value for key, value in state.items()}, sys.argv[-1])\n"
    )
    assert len(lap["curve"]) == 2 and lap["top1"] == pytest.approx(0.1, abs=1e-6)


def test_what_is_saved_after_the_end_does_not_count(run):
    begin = time.monotonic()
    lap = run("save(); time.sleep(60); save(1)", within=8)
    assert len(lap["curve"]) == 1 and lap["seconds"] < 8 and time.monotonic() - begin < 40


BAD = {
    "nothing saved": ("pass", "saved no weights"),
    "another network": ("torch.save(torch.nn.Linear(2, 2).state_dict(), sys.argv[-1])", "fit no network"),
    "no weights": ("torch.save([1, 2], sys.argv[-1])", "no state_dict"),
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
    entries, refused = read_entries([home], evaluate=True)
    assert refused == [] and [len(entry.laps) for entry in entries] == [3, 1]
    assert entries[0].scores == [*sorted([good["top1"], other["top1"]], reverse=True), 0.0] and not entries[1].ended


def test_a_judge_who_is_killed_leaves_a_lap_that_counts(home, run, write, monkeypatch):
    """As by `kill -9` on the judge just after the launch: nothing of the judge's own ending runs."""
    with monkeypatch.context() as patch:
        patch.setattr(judge, "watch", interrupt)
        for name in ("_count_failure", "_sweep"):
            patch.setattr(judge, name, lambda *arguments: contextlib.nullcontext())
        with pytest.raises(KeyboardInterrupt):
            run("save()")
    (left,) = home.glob("*-*")
    assert {path.name for path in left.iterdir()} == {"record.json", "code", "run", "versions"}
    run("save()")
    (first,) = (one for one in records.read_laps(home) if one["lap"] == left.name)
    assert first["failed"] == "the judge was stopped before the lap ended"
    assert first["data"]["seed"] is None, "the judge's images are not drawn before the script has ended"
    assert list_all(left) == ["code", "code/race.py", "record.json"]
    assert len(read_entries([home])[0][0].laps) == 2


def test_what_is_wrong_before_the_launch_is_no_lap(home, run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(judge.TorchrunJob, "preflight", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run("save()")
    assert list_all(home) == [".lock"]


def test_code_is_text_and_short(home, write):
    for content in (b"\xff\xfe weights", b"#" * 20_000):
        path = write("race.py", "")
        path.write_bytes(content)
        with pytest.raises(LabError, match="16 KiB"):
            race.run_lap(path, within=5)


def test_what_no_record_could_hold_is_refused_before_it_runs(home, write):
    script = write("race.py", "")
    for words, arguments, options in (
        ("These arguments cannot race", ["x" * 3000], {}),
        ("These arguments cannot race", "--epochs", {}),
        ("must be above 0 and at most 3600 s, not 0", [], {"within": 0}),
        ("must be above 0 and at most 3600 s, not nan", [], {"within": float("nan")}),
        ("cannot race.*No such file", [], {"files": [home / "no.py"]}),
        ("cannot race.*directory", [], {"files": [home.parent]}),
    ):
        with pytest.raises(LabError, match=f"(?s){words}"):
            race.run_lap(script, arguments, **{"within": 5, **options})
    assert not home.exists()


def test_weights_that_were_lost_on_the_way_are_no_result(home, run, monkeypatch):
    write = judge.Path.write_bytes

    def fail(path, content):
        if path.name == "000001.pt":
            raise OSError(28, "No space left on device")
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(judge.Path, "write_bytes", fail)
        with pytest.raises(LabError, match=r"(?s)Saved weights were lost.*No space left"):
            run("save(); time.sleep(0.5); save(1)")
    (lap,) = records.read_laps(home)
    assert lap["failed"]


def test_two_laps_at_once_would_slow_each_other(home, run):
    with records.hold_race(home), pytest.raises(LabError, match="Another lap is running"):
        run("save()")


def test_a_league_without_a_threshold_and_one_node_to_compare_are_refused(home):
    with pytest.raises(LabError, match="No threshold is set for shapes10 with 300"):
        race.run_lap(BASELINE)
    with pytest.raises(LabError, match="no league 'marathon'"):
        race.run_lap(BASELINE, league="marathon")
    with pytest.raises(LabError, match="compared with itself"):
        race.run_lap(BASELINE, compare=True)


def test_without_a_threshold_for_its_data_set_lab_15_races_on_shapes10(
    home, warm_ranks, tmp_path, monkeypatch, capsys, run_cells_of
):
    make_folder(tmp_path / "data/cinic-drawn")
    known = [{"data": "shapes10", "train": 300, "league": "sprint", "top1": 0.5}]
    monkeypatch.setattr(leagues, "read_thresholds", lambda: known)
    found = run_cells_of("15_race", "card")
    assert data.load().name == "cinic10" and found["dataset"].name == "shapes10" and found["GOAL"] == 0.5
    assert "This lab races on shapes10." in capsys.readouterr().out
    lap = race.run_lap(BASELINE, SHORT, dataset="shapes10", show=False)
    assert lap["data"]["name"] == "shapes10" and lap["threshold"] == 0.5
    with pytest.raises(LabError, match="No threshold is set for cinic10"):
        race.run_lap(BASELINE, SHORT, show=False)


def test_laps_that_are_there_are_not_run_again(home, warm_ranks, write):
    script = write("race.py", UNTRAINED + "save()")
    first = race.run_laps(script, count=2, within=20, show=False)
    assert race.run_laps(script, count=2, within=20, show=False) == first == records.read_laps(home)
    # With another number of processes it is another lap.
    (other,) = race.run_laps(script, count=1, within=20, show=False, nproc_per_node=2)
    assert other["processes"] == 2 and other not in first
    script.write_text(UNTRAINED + "save(1)")
    assert len(race.run_laps(script, count=1, within=20, show=False)) == 1 and len(records.read_laps(home)) == 4


def sign(home, lap, **changes):
    """Rewrites a record."""
    records.write_record(home / lap["lap"], {**lap, **changes})


def test_the_board_evaluates_again_what_a_record_claims(home, run):
    lap = run("save()")
    assert read_entries([home], evaluate=True)[1] == []
    told = lap["data"]
    forged = {
        "top-1, the record says otherwise": {"top1": 0.9, "curve": [[lap["seconds"], 0.9]]},
        "numbered by the judge": {"data": {**told, "mapping": [0] * 10}},
        "not chosen by the judge": {"data": {**told, "seed": None}},
        "does not use its data set": {"data": {**told, "name": "cifar10"}},
        "differs from the one on this machine": {"data": {**told, "valid": 50}},
        "the record says otherwise": {"net": "resnet18"},
    }
    for words, changes in forged.items():
        sign(home, lap, **changes)
        assert read_entries([home])[1] == []
        entries, (line,) = read_entries([home], evaluate=True)
        assert entries == [] and words in line


NO_IMAGES = evaluate.Images(np.zeros((1, 3, 32, 32), np.uint8), np.zeros(1, np.int64), [0.5] * 3, [0.5] * 3, 10)


def repack(path, **members):
    """Rewrites a file of weights, with other members."""
    with zipfile.ZipFile(path) as file:
        whole = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in whole.items():
            file.writestr(name, members.get(Path(name).stem, content))


def test_of_hostile_weights_one_clean_line_is_told_and_no_code_runs(tmp_path):
    evil, code = (tmp_path / name for name in ("evil.pt", "code.pt"))
    for path in (evil, code):
        torch.save(models.build("tiny").state_dict(), path)
    text = b"\x1b[2J\x1b]0;owned\x07\nentries: 3"
    device = b"\x80\x02ctorch\ndevice\nX" + len(text).to_bytes(4, "little") + text + b"\x85R."
    repack(evil, data=device)
    repack(code, data=b"\x80\x02ccollections\nChainMap\n.")
    found = evaluate.evaluate([evil, code], NO_IMAGES)
    assert all(line.isprintable() and len(line) <= 300 for line in found) and "entries: 3" in found[0]
    assert found[1].endswith("GLOBAL collections.ChainMap was not an allowed global by default.")


def test_a_node_names_its_gpus(tmp_path, monkeypatch):
    (smi := tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho $1 >&2; echo Tensor 3000; echo Tensor 3000\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert judge._ask(local_nodes(1)[0])["gpus"] == []
    monkeypatch.setenv("PATH", str(tmp_path))
    told = judge._ask(local_nodes(1)[0])
    assert told["gpus"] == ["Tensor 3000"] * 2 and told["versions"]["torch"] == metadata.version("torch")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_what_ddp_and_compile_put_before_names_is_taken_away(prefix, tmp_path):
    torch.save({prefix + key: one for key, one in models.build("tiny").state_dict().items()}, tmp_path / "a.pt")
    assert evaluate.read_weights(tmp_path / "a.pt", 10)[0] == "tiny"


def test_two_nodes_are_compared_with_one(home, warm_ranks):
    lap = race.run_lap(BASELINE, SHORT, nodes=local_nodes(2), within=60, compare=True, show=False)
    assert lap["nodes"] == lap["processes"] == 2 and lap["class"].startswith("2 nodes on one machine, ")
    assert lap["speed_up"] == lap["one_node"]["seconds"] / lap["seconds"] and lap["efficiency"] == lap["speed_up"] / 2
    assert 0 < lap["busy"] <= 1


def test_of_many_versions_some_are_kept_and_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "MOST_VERSIONS", 4)
    stream = io.BytesIO(b"".join(b"1\n%d" % number for number in range(10)))
    follower = judge._Follower(tmp_path)
    follower.follow(SimpleNamespace(stdout=stream))
    kept = [path.read_bytes() for _, path in follower.versions]
    assert kept[-1] == b"9" and len(kept) <= 4 and sorted(kept) == kept
    assert sorted(tmp_path.iterdir()) == [path for _, path in follower.versions]


@pytest.mark.parametrize(
    ("name", "stem"), [("tiny", "imagenet"), ("resnet18", "imagenet"), ("resnet18", "cifar"), ("resnet50", "cifar")]
)
def test_the_network_is_told_by_its_weights(name, stem):
    with torch.device("meta"):
        state = models.build(name, num_classes=7, stem=stem).state_dict()
    assert evaluate.find_net(state, 7) == (name, stem)
    with pytest.raises(ValueError, match="fit no network"):
        evaluate.find_net(state, 8)


@pytest.mark.system
def test_a_lap_on_two_hosts_copies_its_data_and_leaves_nothing(hosts, home):
    """Torchrun itself, over SSH."""
    nodes = ssh_nodes(["n1", "n2"], config=hosts.ssh_config, python=sys.executable, folder="/node/labs")
    lap = race.run_lap(BASELINE, SHORT, nodes=nodes, within=300, compare=True, show=False)
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
    assert "within 20 s: " in call("lap", "--within", 20, "--name", "me", script, "--epochs", 3)
    assert "entries: 1, refused: 0" in call("board", home, "--to", home.parent / "board.html", "--evaluate")
    page = (home.parent / "board.html").read_text()
    assert "<bdi>me</bdi>" in page and "Changes in" in page
    next(home.glob("*/code/race.py")).unlink()
    with pytest.raises(SystemExit) as ended:
        call("board", home, "--to", home.parent / "board.html")
    assert ended.value.code == 1 and "refused: race/" in capsys.readouterr().out
    with pytest.raises(LabError, match="No threshold is set"):
        call("lap", script)
    monkeypatch.setattr(judge, "run_lap", interrupt)
    assert run_command(command.main) == 130 and "Interrupted." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("team", "options", "name"), [("red", [], "red"), ("red", ["--name", "me"], "me"), ("", [], find_user())]
)
def test_a_team_in_a_container_races_under_its_name(write, monkeypatch, team, options, name):
    laps = []
    monkeypatch.setattr(judge, "run_lap", lambda *arguments, **given: laps.append(given["name"]))
    monkeypatch.setattr(judge, "tell", str)
    monkeypatch.setenv("LAB_TEAM", team)
    monkeypatch.setattr(sys, "argv", ["race", "lap", *options, str(write("race.py", "pass"))])
    command.main()
    assert laps == [name]


def test_thresholds_are_what_the_worst_of_five_laps_reached():
    found = leagues.read_thresholds()
    kinds = {(one["data"], one["train"], one["league"]) for one in found}
    assert kinds == {
        (*kind, league) for kind in (("shapes10", 10_000), ("cinic10", 1000)) for league in leagues.LEAGUES
    }
    for one in found:
        laps = [lap["top1"] for lap in one["laps"]]
        assert len(laps) == 5 and 0 <= min(laps) - one["top1"] < 0.01 and 1.5 * len(set(laps)) > 5
        assert max(lap["seconds"] for lap in one["laps"]) < 600


def test_a_threshold_is_measured_by_laps_of_the_baseline(home, warm_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(baseline, "THRESHOLDS", tmp_path / "thresholds.json")
    monkeypatch.setattr(baseline, "SEEDS", 2)
    monkeypatch.setitem(baseline.PASSES, "sprint", 500)
    found = baseline.measure_threshold("sprint")
    assert found["epochs"] == 2 and len(found["laps"]) == 2 and found["train"] == 300
    assert found["top1"] <= min(lap["top1"] for lap in found["laps"]) < found["top1"] + 0.01
    kept = json.loads((tmp_path / "thresholds.json").read_text())
    assert kept == [*leagues.read_thresholds(), found]
    assert [lap["args"] for lap in records.read_laps(home)] == [["--epochs", "2", "--seed", str(n)] for n in (0, 1)]
