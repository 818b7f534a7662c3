"""The leaderboard of the race: who has which place, what is refused, and a page that survives hostile records."""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from harness.html_reader import read

from course.race import __main__ as command
from course.race.board import read_entries
from course.race.board_page import write_board
from course.race.records import NOTHING, hash_record
from lab_common import LabError
from lab_common.commandline import run_command

BASELINE = "import torch\n\nlr = 0.1\nprint(lr)\n"
SCRIPT = "import torch\n\nlr = 0.2\nprint(lr)\n"
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\u202e\u2066</td></table>&"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_record(lap: str, code: dict[str, str], weights: bytes, **changes) -> dict:
    """A record without hash and predecessor; numbers that follow from others follow the changed ones."""
    record = {
        "format": 2,
        "lap": lap,
        "name": "Team red",
        "began": "2026-11-27 06:44:27 UTC",
        "script": "race.py",
        "args": ["--epochs", "3"],
        "league": "sprint",
        "threshold": 0.6,
        "within": None,
        "data": {
            "name": "shapes10",
            "source": "drawn",
            "train": 10_000,
            "valid": 2000,
            "classes": 3,
            "sha256": digest(b"images"),
            "seed": 7,
            "mapping": [2, 0, 1],
        },
        "code": {name: digest(text.encode()) for name, text in code.items()},
        "failed": "",
        "weights": digest(weights),
        "net": "tiny",
        "seconds": 40.0,
        "top1": 0.81,
        "nodes": 2,
        "processes": 2,
        "device": "cpu",
        "hardware": "2 cores of a test",
        "class": "2 nodes, 1 CPU core each",
        "devices": 2,
        "busy": 0.93,
        "usage": [[second, node, 0.9] for second in range(0, 40, 5) for node in (0, 1)],
        "one_node": None,
        "versions": {"python": "3.12.1", "torch": "2.14.1"},
        "sealed": True,
    } | changes
    seconds, alone, threshold = record["seconds"], record["one_node"], record["threshold"]
    speed_up = alone and alone["seconds"] / seconds
    follows = {
        "reached": threshold is None or record["top1"] >= threshold,
        "curve": [[seconds / 2, record["top1"] / 2], [seconds, record["top1"]]],
        "device_seconds": seconds * record["devices"],
        "speed_up": speed_up,
        "efficiency": speed_up and speed_up / record["nodes"],
    }
    return record | follows | changes


class Race:
    """A race folder that a test fills with laps."""

    def __init__(self, home: Path):
        self.home, self.count, self.newest = home, 0, ""

    def add(self, *, code=None, weights=b"", **changes) -> Path:
        """Writes a valid lap but for the changes, and returns its folder."""
        self.count += 1
        lap = f"1127-0644{self.count:02d}-{self.count:06x}"
        code, weights = code or {"race.py": SCRIPT}, weights or f"{self.home} {self.count}".encode()
        folder = self.home / lap
        (folder / "code").mkdir(parents=True)
        for name, text in code.items():
            (folder / "code" / name).write_text(text)
        (folder / "weights.pt").write_bytes(weights)
        self.newest = write(folder, {"previous": self.newest} | make_record(lap, code, weights, **changes))
        return folder

    def add_failed(self, why: str = "interrupted", **changes) -> Path:
        """Writes a lap that did not end."""
        folder = self.add(**changes)
        (folder / "weights.pt").unlink()
        record = json.loads((folder / "record.json").read_text())
        record |= {**NOTHING, "failed": why, "data": record["data"] | {"sha256": None, "seed": None}}
        self.newest = write(folder, record)
        return folder

    def add_times(self, *seconds: float, **changes) -> list[Path]:
        return [self.add(seconds=one, **changes) for one in seconds]


def write(folder: Path, record: dict) -> str:
    """Writes a record with its hash, and returns this."""
    whole = record | {"sha256": hash_record(record)}
    (folder / "record.json").write_text(json.dumps(whole))
    return whole["sha256"]


def change(folder: Path, **changes) -> None:
    """Rewrites a record with other values and the right hash."""
    write(folder, json.loads((folder / "record.json").read_text()) | changes)


@pytest.fixture
def race(tmp_path) -> Race:
    return Race(tmp_path / "race")


@pytest.fixture
def show(tmp_path):
    """Reads race folders, writes the board, reads the page strictly, and returns it."""

    def run(*folders: Path) -> str:
        write_board(*read_entries(folders), tmp_path / "out" / "board.html", baseline=BASELINE)
        page = (tmp_path / "out" / "board.html").read_text()
        found = read(page)
        assert page.count("<details>") <= page.count("</summary>")
        for tag, attributes in found:
            assert tag not in ("script", "iframe", "object", "link", "base", "form", "img")
            assert not [name for name in attributes if name in ("src", "href") or name.startswith("on")]
        return page

    return run


def find_names(page: str) -> list[str]:
    return re.findall(r'<th scope="row" role="rowheader"><bdi>(.*?)</bdi>', page)


def find_cells(page: str, label: str) -> list[str]:
    return [re.sub("<.*?>", "", cell) for cell in re.findall(rf'data-label="{label}">(.*?)</td>', page)]


# Entries and places


def test_the_median_of_all_laps_is_the_score_and_not_the_fastest(race, show):
    race.add_times(50, 10, 60, name="Lucky")
    race.add_times(45, 44, 43, name="Steady")
    entries, refused = read_entries([race.home])
    assert refused == []
    assert [(entry.record["name"], entry.score) for entry in entries] == [("Steady", 44), ("Lucky", 50)]
    page = show(race.home)
    assert find_names(page) == ["Steady", "Lucky"]
    assert find_cells(page, "place") == ["1", "2"]
    assert find_cells(page, "median seconds") == ["44.0", "50.0"]
    assert find_cells(page, "fastest to slowest") == ["43.0 to 45.0", "10.0 to 60.0"]
    assert find_cells(page, "laps") == ["3", "3"]


def test_a_lap_below_the_threshold_is_infinitely_slow(race, show):
    race.add_times(5, 6, top1=0.3)
    race.add_times(50, 51, 52)
    race.add_times(1, 2, 3, name="Never", top1=0.59999)
    red, never = read_entries([race.home])[0]
    assert red.scores == [50, 51, 52, math.inf, math.inf]
    assert red.score == 52
    assert never.score == math.inf
    page = show(race.home)
    assert find_cells(page, "fastest to slowest")[0] == "50.0 to not reached"
    assert find_cells(page, "median seconds") == ["52.0", "not reached"]
    assert find_cells(page, "place") == ["1", "–"]
    assert find_cells(page, "top-1")[1] == "59.9 %"  # rounded down, else it would look like the threshold


def test_a_lap_that_did_not_end_is_infinitely_slow_and_is_told(race, show):
    race.add_times(30, 31, name="Careless")
    race.add_failed("ZeroDivisionError", name="Careless")
    race.add(seconds=20, name="Choosy")
    for _ in range(2):
        race.add_failed(name="Choosy")
    race.add_failed(EVIL, name="Unfinished", code={"race.py": "1 / 0"})
    entries, refused = read_entries([race.home])
    assert refused == []
    assert [entry.scores for entry in entries] == [[30, 31, math.inf], [20, math.inf, math.inf], [math.inf]]
    assert [entry.shown for entry in entries[:2]] == ["median lap", "worst lap that ended"]
    page = show(race.home)
    assert find_names(page) == ["Careless", "Choosy"] and find_cells(page, "place") == ["1", "–"]
    assert find_cells(page, "median seconds") == ["31.0", "not reached"]
    assert find_cells(page, "laps") == ["3", "3"]
    assert 'points=""' not in page and page.count(">other laps<") == 1
    assert page.count("did not end: interrupted") == 2 and page.count("did not end: ZeroDivisionError") == 1
    told = page.partition("Without a lap that ended")[2]
    assert "<bdi>Unfinished</bdi>, 1 lap; " in told and "alert(1)" in told


def test_within_a_time_a_lap_that_did_not_end_has_no_top1(race, show):
    timed = {"league": "", "threshold": None, "within": 60.0}
    race.add(**timed, top1=0.5)
    race.add_failed(**timed)
    race.add(**timed, top1=0.7)
    page = show(race.home)
    assert find_cells(page, "median top-1") == ["50.0 %"] and find_cells(page, "lowest to highest") == [
        "0.0 % to 70.0 %"
    ]


def test_a_board_of_laps_that_did_not_end_has_no_tables(race, show):
    race.add_failed()
    page = show(race.home)
    assert "<table" not in page and "<h3>" not in page and "no laps yet" not in page


@pytest.mark.parametrize(
    "changes",
    [{key: make_record("", {}, b"")[key]} for key in NOTHING if key not in ("one_node", "speed_up", "efficiency")]
    + [{"failed": 3}, {"failed": "x" * 301}, {"data": make_record("", {}, b"")["data"]}],
    ids=lambda changes: next(iter(changes)) + str(len(str(changes))),
)
def test_a_lap_that_did_not_end_has_no_result(race, changes):
    change(race.add_failed(), **changes)
    assert refuse(race) == [(1, f"'{next(iter(changes))}' in its record is not valid (format 2)")]


@pytest.mark.parametrize("key", ["league", "mapping", "script"])
def test_of_a_lap_that_did_not_end_the_rest_has_to_fit(race, key):
    race.add_failed(**CONTRADICTIONS[key])
    assert refuse(race) == [(1, f"'{key}' in its record contradicts its other values")]


def test_equal_scores_share_a_place(race, show):
    for name in ("a", "b", "c"):
        race.add_times(40, 40, 50 if name == "c" else 40, name=name)
    race.add_times(41, 41, 41, name="d")
    assert find_cells(show(race.home), "place") == ["1", "1", "1", "4"]


def test_an_entry_of_fewer_than_three_laps_is_provisional_and_below(race, show):
    race.add_times(1, 2, name="New")
    race.add_times(70, 71, 72, name="Slow")
    page = show(race.home)
    assert find_names(page) == ["Slow", "New"]
    assert find_cells(page, "laps") == ["3", "provisional, 2 of 3 laps"]
    assert find_cells(page, "place") == ["1", "–"]
    race.add_times(3, name="New")
    assert find_names(show(race.home)) == ["New", "Slow"]


def test_each_class_has_its_own_table_and_places(race, show):
    race.add_times(40, 40, 40, name="cores")
    gpu = {"class": "1 GPU: NVIDIA H100", "device": "cuda", "nodes": 1, "usage": []}
    race.add_times(2, 2, 2, name="gpu", **gpu)
    page = show(race.home)
    assert page.count("<table class=") == 2
    assert find_cells(page, "place") == ["1", "1"]
    assert re.findall("<h3>(.*?)</h3>", page) == [
        "<bdi>1 GPU: NVIDIA H100</bdi>",
        "<bdi>2 nodes, 1 CPU core each</bdi>",
    ]


def test_sections_are_for_data_set_league_threshold_and_time(race, show):
    data = make_record("", {}, b"")["data"]
    race.add(name="red")
    race.add(name="red", threshold=0.1)  # an easier threshold under the same name of a league
    race.add(name="red", league="distance", threshold=0.7)
    race.add(name="red", data=data | {"name": "cinic10"})
    race.add(name="red", data=data | {"train": 500})
    for top1 in (0.5, 0.9, 0.4):
        race.add(name="low", league="", threshold=None, within=60.0, top1=top1)
    for top1 in (0.6, 0.7, 0.1):
        race.add(name="high", league="", threshold=None, within=60.0, top1=top1)
    page = show(race.home)
    titles = [re.sub("<.*?>", "", title) for title in re.findall("<h2>(.*?)</h2>", page)]
    assert titles == [
        "cinic10: sprint",
        "shapes10: sprint",
        "shapes10: sprint",
        "shapes10: sprint",
        "shapes10: distance",
        "shapes10: 60 seconds",
    ]
    assert "Reach 10 % top-1" in page
    assert find_names(page)[-2:] == ["high", "low"]  # most top-1 first
    assert find_cells(page, "median top-1") == ["60.0 %", "50.0 %"]
    assert find_cells(page, "lowest to highest") == ["10.0 % to 70.0 %", "40.0 % to 90.0 %"]


def test_other_code_arguments_processes_or_hardware_are_another_entry(race):
    race.add_times(40, 41, 42)
    race.add(code={"race.py": SCRIPT + "# another\n"})
    race.add(code={"race.py": SCRIPT, "net.py": "depth = 3\n"})
    race.add(args=["--epochs", "4"])
    race.add(processes=4)
    race.add(name="Team blue")
    race.add(**{"class": "8 CPU cores"})
    assert sorted(len(entry.laps) for entry in read_entries([race.home])[0]) == [1, 1, 1, 1, 1, 1, 3]


def test_race_folders_below_a_folder_are_found_once_and_keep_apart(tmp_path):
    """A stranger's bad laps under another's name leave that one's score alone."""
    for team in ("a", "b", "c"):
        Race(tmp_path / "all" / team / "race").add()
    entries, refused = read_entries([tmp_path / "all"])
    assert ([len(entry.laps) for entry in entries], refused) == ([1, 1, 1], [])
    # A folder that is named twice, itself and by its parent, is read once.
    again, refused = read_entries([tmp_path / "all", tmp_path / "all" / "a", tmp_path / "all"])
    assert (len(again), refused) == (3, [])
    for path in (tmp_path / "all").glob("*/race/*/weights.pt"):
        path.write_bytes(b"other")
    _, refused = read_entries([tmp_path / "all"])
    assert [line.split("/1127")[0] for line in refused] == ["all/a/race", "all/b/race", "all/c/race"]


def test_the_bar_of_honour_begins_at_95_per_cent_and_is_told_in_words(race, show):
    race.add_times(40, 40, 40, name="busy", busy=0.95)
    race.add_times(50, 50, 50, name="nearly", busy=0.9499)
    race.add_times(60, 60, 60, name="unknown", busy=None)
    assert find_cells(show(race.home), "busy") == ["★ 95.0 % bar of honour", "94.9 %", "–"]


def test_speed_up_efficiency_and_seal_are_shown(race, show):
    race.add_times(40, 40, 40, one_node={"seconds": 72.0, "top1": 0.8})
    race.add_times(50, 50, name="open", sealed=True)
    race.add_times(50, name="open", sealed=False)
    page = show(race.home)
    assert find_cells(page, "speed-up") == ["1.80", "–"]
    assert find_cells(page, "efficiency") == ["90.0 %", "–"]
    assert find_cells(page, "sealed") == ["sealed", "not sealed"]
    assert find_cells(page, "device-seconds") == ["80", "100"]


# What is refused


def refuse(race: Race) -> list[tuple[str, str]]:
    """The refused laps, by number, and why."""
    _, refused = read_entries([race.home])
    found = [re.fullmatch(r"race/1127-0644(\d\d)-[0-9a-f]{6}: (.*)", line) for line in refused]
    assert None not in found, refused
    return [(int(one[1]), one[2]) for one in found]


def test_changed_files_are_refused_and_the_chain_goes_on(race):
    folders = race.add_times(40, 41, 42, 43, 44, 45)
    (folders[0] / "weights.pt").write_bytes(b"better ones")
    (folders[1] / "code" / "race.py").write_text(SCRIPT + "\n")
    (folders[2] / "weights.pt").unlink()
    (folders[3] / "code" / "race.py").unlink()
    assert refuse(race) == [
        (1, "its weights are not those that the record names"),
        (2, "its race.py is not the code that the record names"),
        (3, "its weights: No such file or directory"),
        (4, "its race.py: No such file or directory"),
    ]
    first, second = read_entries([race.home])[0][0].laps[:2]
    assert [first.record["seconds"], second.record["seconds"]] == [44, 45]


def test_nobody_gets_rid_of_a_bad_lap_by_changing_its_files(race):
    """Whoever could would choose his laps, also among those in the middle of the chain."""
    race.add_times(30, 31, 32)
    bad = race.add_times(90, 91, 92, 93)
    for folder in bad[:2]:
        (folder / "weights.pt").unlink()
    for folder in bad[2:]:
        (folder / "code" / "race.py").write_text("#")
    (entry,), refused = read_entries([race.home])
    assert len(refused) == 4 and entry.scores == [30, 31, 32, *[math.inf] * 4] and entry.score == math.inf
    assert entry.laps[-1].record["failed"].startswith("its ")


def test_nobody_gets_rid_of_bad_laps_by_equal_weights(race):
    race.add_times(30, 31)
    race.add_times(90, 91, 92, weights=b"zeros")
    (entry,), refused = read_entries([race.home])
    assert entry.scores == [30, 31, *[math.inf] * 3] and len(refused) == 3 and "are also those of race/" in refused[0]


def test_nobody_gets_rid_of_a_bad_lap_by_a_copy_in_a_second_folder_of_his_own(tmp_path):
    first, second = Race(tmp_path / "red" / "race"), Race(tmp_path / "red" / "other")
    first.add_times(30, 31)
    first.add(seconds=90, weights=b"bad")
    second.add(seconds=90, weights=b"bad", name="Team gray")
    red, _ = read_entries([tmp_path / "red"])[0]
    assert red.scores == [30, 31, math.inf]
    Race(tmp_path / "blue").add(seconds=1, weights=b"bad", name="Team blue")
    red, _ = read_entries([tmp_path / "red", tmp_path / "blue"])[0]
    assert red.scores == [30, 31, math.inf]
    # Where only a stranger has them, none counts.
    shutil.rmtree(second.home)
    (red,), refused = read_entries([tmp_path / "red", tmp_path / "blue"])
    assert red.scores == [30, 31] and len(refused) == 2


def test_a_folder_that_was_copied_twice_stands_there_twice(race, tmp_path):
    race.add_times(30, 31, 32)
    shutil.copytree(race.home, tmp_path / "older")
    race.add(seconds=33)
    entries, refused = read_entries([race.home, tmp_path / "older"])
    assert [len(entry.laps) for entry in entries] == [3, 4] and refused == []


def test_a_team_s_folders_take_no_other_team_s_share(race, tmp_path, monkeypatch):
    monkeypatch.setattr("course.race.board_laps.MOST_LAPS", 6)
    for number in range(5):
        (flood := tmp_path / "flood" / f"lap{number}").mkdir(parents=True)
        (flood / "record.json").touch()
    race.add_times(30, 31, 32)
    (entry,), refused = read_entries([tmp_path / "flood", race.home])
    assert len(entry.laps) == 3 and "only 3 of its laps are read" in refused[0]


def test_laps_are_shared_among_the_teams_below_a_named_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("course.race.board_laps.MOST_LAPS", 6)
    for name in ("a/one", "a/two", "b/race"):
        Race(tmp_path / "all" / name).add_times(30, 31, 32)
    entries, refused = read_entries([tmp_path / "all"])
    assert {entry.laps[0].label.partition("/1127")[0]: len(entry.laps) for entry in entries} == {
        "all/a/one": 1,
        "all/a/two": 2,
        "all/b/race": 3,
    }
    assert refused == [
        f"all/a/{cut} of its laps are read: 6 is the most in all" for cut in ("one: only 1", "two: only 2")
    ]


def test_a_team_s_empty_folders_hide_no_other_team_and_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr("course.race.board_laps.MOST_FOLDERS", 5)
    for number in range(5):
        (tmp_path / "all" / "a" / str(number)).mkdir(parents=True)
    Race(tmp_path / "all" / "b" / "race").add()
    entries, refused = read_entries([tmp_path / "all"])
    assert len(entries) == 1 and refused == ["all/a: only the first 4 of its folders are looked into"]


def test_a_record_among_the_teams_hides_no_team(tmp_path):
    """Whoever puts one into a team's own folder makes the folder of all teams a race folder."""
    (tmp_path / "all" / "a").mkdir(parents=True)
    (tmp_path / "all" / "a" / "record.json").touch()
    Race(tmp_path / "all" / "b" / "race").add()
    entries, refused = read_entries([tmp_path / "all"])
    assert len(entries) == 1 and refused == ["all/a: its record is no valid JSON"]


def test_of_too_many_folders_the_first_by_name_are_read(race, tmp_path, monkeypatch):
    """The first laps are the oldest ones, so that their chain holds."""
    monkeypatch.setattr("course.race.board_laps.MOST_FOLDERS", 3)
    found, scan = [folder.name for folder in race.add_times(1, 2, 3, 4)], os.scandir

    @contextlib.contextmanager
    def reverse(folder):  # a file system has an order of its own
        with scan(folder) as entries:
            yield iter(sorted(entries, key=lambda one: one.name, reverse=True))

    monkeypatch.setattr(os, "scandir", reverse)
    (entry,), refused = read_entries([race.home])
    assert sorted(lap.folder.name for lap in entry.laps) == found[:3]
    assert refused == ["race: only the first 3 of its folders are looked into"]
    monkeypatch.setattr("course.race.board_laps.MOST_FILES", 3)
    assert read_entries([race.home])[1][1:] == ["race: it holds more than 3 files, and nothing of it is read"]


def test_laps_that_are_shown_alike_are_not_taken_for_each_other(race, monkeypatch):
    long = Race(race.home / ("x" * 60) / "a"), Race(race.home / ("x" * 60) / "b")
    for one in long:
        one.add()
    wrong = long[0].home
    monkeypatch.setattr("course.race.board.evaluate_again", lambda _, path: "wrong" * (wrong in path.parents))
    (entry,), refused = read_entries([race.home], evaluate=True)
    assert entry.laps[0].folder.parent == long[1].home and len(refused) == 1


def test_a_changed_record_is_refused_and_with_it_what_follows(race):
    _, second, _ = race.add_times(40, 41, 42)
    path = second / "record.json"
    path.write_text(path.read_text().replace('"seconds": 41', '"seconds": 11'))
    assert refuse(race) == [
        (2, "its record was changed: the hash is another one"),
        (3, "a lap before it is missing or was changed"),
    ]
    # With a new hash it is a whole record; the next one then names another one.
    change(second, seconds=41.0, device_seconds=82.0, curve=[[41.0, 0.81]], net="resnet18")
    assert refuse(race) == [(3, "a lap before it is missing or was changed")]


def test_a_lap_that_is_missing_refuses_all_after_it(race):
    folders = race.add_times(40, 90, 41, 42)
    shutil.rmtree(folders[1])
    why = "a lap before it is missing or was changed"
    assert refuse(race) == [(3, why), (4, why)]
    shutil.rmtree(folders[0])
    assert refuse(race) == [(3, why), (4, why)]


def test_a_forked_chain_is_refused_from_the_fork_on(race):
    race.add(seconds=40)
    before = race.newest
    race.add_times(41, 42)
    race.newest = before
    race.add(seconds=43)
    why = "two laps name the same lap before them"
    assert refuse(race) == [(2, why), (3, why), (4, why)]
    race.newest = ""
    race.add(seconds=44)  # a second beginning
    assert [number for number, _ in refuse(race)] == [1, 2, 3, 4, 5]


def test_a_copy_of_a_lap_counts_for_nobody(race, tmp_path):
    race.add(seconds=40)
    shutil.copytree(race.home, tmp_path / "copy")
    copy = next((tmp_path / "copy").iterdir())
    change(copy, name="Team blue")  # with a right hash
    entries, refused = read_entries([race.home, tmp_path / "copy"])
    one, other = f"race/{copy.name}", f"copy/{copy.name}"
    assert entries == [] and sorted(refused) == sorted(
        [f"{other}: its weights are also those of {one}", f"{one}: its weights are also those of {other}"]
    )
    shutil.copytree(race.home / copy.name, race.home / "again")
    assert read_entries([race.home])[1] == ["race/again: its record is that of another lap"]


CONTRADICTIONS = {
    "league": {"league": ""},
    "seconds": {"league": "", "threshold": None, "within": 30.0},
    "reached": {"reached": False},
    "device_seconds": {"device_seconds": 79.0},
    "one_node": {"nodes": 1, "usage": [], "one_node": {"seconds": 72.0, "top1": 0.8}},
    "speed_up": {"one_node": {"seconds": 72.0, "top1": 0.8}, "speed_up": 1.9},
    "efficiency": {"one_node": {"seconds": 72.0, "top1": 0.8}, "efficiency": None},
    "curve": {"curve": [[20.0, 0.4], [40.0, 0.82]]},
    "usage": {"usage": [[1.0, 2, 0.5]]},
    "usage ": {"usage": [[1.0, 0, 0.5]] * 201},
    "mapping": {"data": make_record("", {}, b"")["data"] | {"mapping": [0, 1, 1]}},
    "script": {"script": "other.py"},
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_numbers_that_contradict_each_other_are_refused(race, key):
    race.add(**CONTRADICTIONS[key])
    assert refuse(race) == [(1, f"'{key.strip()}' in its record contradicts its other values")]


def test_a_threshold_that_was_reached_unseen_is_refused(race):
    race.add(top1=0.5, reached=True)
    assert refuse(race) == [(1, "'reached' in its record contradicts its other values")]


INVALID = [
    {"seconds": 0},
    {"seconds": -1.0},
    {"seconds": True},
    {"seconds": "40"},
    {"seconds": 10**400, "device_seconds": 80.0, "curve": [[1.0, 1.0]]},
    {"top1": 1.1},
    {"busy": 7},
    {"name": "n" * 61},
    {"name": None},
    {"args": "--epochs"},
    {"args": [3]},
    {"league": "other"},
    {"code": {"../race.py": digest(b"")}},
    {"code": {"..": digest(b"")}},
    {"code": {"a\\b": digest(b"")}},
    {"code": {"race.py": digest(b"") + "\n"}},
    {"code": {}},
    {"script": "code/race.py"},
    {"weights": "short"},
    {"curve": []},
    {"curve": [[1.0, 0.5, 0.5]]},
    {"curve": [[1.0]]},
    {"usage": [[0.0, 0, 0.1]] * 3201},
    {"usage": [[0.0, 0.0, 0.1]]},
    {"nodes": 0},
    {"nodes": 2.0},
    {"devices": True},
    {"versions": {"python": "3", "torch": "2", "more": "1"}},
    *({"data": make_record("", {}, b"")["data"] | one} for one in ({"seed": 5.0}, {"mapping": [2.0, 0.0, 1.0]})),
    {"versions": {"python": "3"}},
    {"previous": None},
    {"one_node": {"seconds": 4.0}},
    {"speed_up": 10**400, "one_node": {"seconds": 72.0, "top1": 0.8}},
    {"data": []},
    {"format": 1},
]


@pytest.mark.parametrize("changes", INVALID, ids=lambda changes: ", ".join(changes) + str(len(str(changes))))
def test_types_ranges_and_lengths_are_checked(race, changes):
    first = next(iter(changes))
    folder = race.add()
    change(folder, **changes)
    assert refuse(race) == [(1, f"'{first}' in its record is not valid (format 2)")]


def test_a_record_without_a_key_is_refused(race):
    folder = race.add()
    record = json.loads((folder / "record.json").read_text())
    del record["net"]
    write(folder, record)
    assert refuse(race) == [(1, "keys are missing in its record (format 2)")]


def test_a_record_with_other_keys_is_refused(race):
    """It would be kept in memory whole, some ten times as large as its file."""
    change(race.add(), extra=[[]] * 1000)
    assert refuse(race) == [(1, "other keys are in its record (format 2)")]


# Hostile files


def link(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def grow(path: Path) -> None:
    os.truncate(path, 2**40)


def fill(content: bytes):
    def run(path: Path) -> None:
        path.write_bytes(content)

    return run


def insert(before: str, after: str):
    def run(path: Path) -> None:
        path.write_text(path.read_text().replace(before, after))

    return run


ODD_FILES = {
    "pipe": (pipe, "its record: it is a pipe and no regular file"),
    "link": (link, "its record: it is a symbolic link and no regular file"),
    "huge": (grow, "its record: it has 1,048,576.0 MB, and 1 is the most"),
    "deep": (fill(b"[" * 200_000), "its record is nested too deeply"),
    "nan": (insert('"seconds": 40.0', '"seconds": NaN'), "its record is no valid JSON"),
    "infinite": (insert('"seconds": 40.0', '"seconds": 1e999'), "'seconds' in its record is not valid (format 2)"),
    "long number": (insert('"seconds": 40.0', f'"seconds": {"9" * 5000}'), "its record is no valid JSON"),
    "no UTF-8": (fill(b'{"lap": "\xff\xfe"}'), "its record is no valid JSON"),
    "list": (fill(b"[]"), "its record is no JSON object"),
    "empty": (fill(b""), "its record is no valid JSON"),
}


@pytest.mark.parametrize("kind", ODD_FILES)
def test_odd_records_are_refused_in_little_time(race, show, kind):
    spoil, why = ODD_FILES[kind]
    spoil(race.add(name="odd", seconds=40.0) / "record.json")
    other = Race(race.home.with_name("other"))
    other.add(name="good")
    begun = time.monotonic()
    page = show(race.home, other.home)
    assert time.monotonic() - begun < 20
    assert refuse(race) == [(1, why)]
    assert find_names(page) == ["good"]
    assert why.replace("'", "&#x27;") in page


@pytest.mark.parametrize(("name", "what"), [("weights.pt", "its weights"), ("code/race.py", "its race.py")])
@pytest.mark.parametrize("spoil", [pipe, link, grow])
def test_odd_files_of_a_lap_are_refused(race, name, what, spoil):
    spoil(race.add() / name)
    [(_, why)] = refuse(race)
    assert why.startswith(what) or (spoil is grow and why == "its code has more than 16 KiB")


def test_code_that_is_large_or_no_text_is_refused(race):
    race.add(code={"race.py": SCRIPT, "more.py": "#" * 2**16})
    folder = race.add()
    (folder / "code" / "race.py").write_bytes(b"\xff")
    change(folder, code={"race.py": digest(b"\xff")})
    assert refuse(race) == [(1, "its code has more than 16 KiB"), (2, "its race.py is no text")]


def test_links_are_not_followed(race, tmp_path):
    folder = race.add()
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "race").symlink_to(race.home)
    assert read_entries([tmp_path / "all"]) == ([], [f"{tmp_path}/all: there are no laps in it"])
    (folder / "code").rename(tmp_path / "code")
    (folder / "code").symlink_to(tmp_path / "code")
    assert refuse(race) == [(1, "its code: the folder is a symbolic link")]
    # The record of another place under a lap's name.
    (race.home / "linked").symlink_to(folder)
    assert len(refuse(race)) == 1


def test_folders_that_are_missing_empty_or_deep_are_named(tmp_path):
    Race(tmp_path / "a" / "b" / "c" / "race").add()  # one level too deep
    for name in ("a", "missing", "loop"):
        if name == "loop":
            (tmp_path / name).symlink_to(name)
        entries, refused = read_entries([tmp_path / name])
        assert entries == []
        assert refused == [f"{tmp_path}/{name}: there are no laps in it"]
    assert len(read_entries([tmp_path / "a" / "b"])[0]) == 1
    assert read_entries([]) == ([], [])


def test_no_more_laps_are_read_than_the_most(race, monkeypatch):
    monkeypatch.setattr("course.race.board_laps.MOST_LAPS", 3)
    race.add_times(1, 2, 3, 4)
    entries, refused = read_entries([race.home])
    assert [len(entry.laps) for entry in entries] == [3]
    assert refused == ["race: only 3 of its laps are read: 3 is the most in all"]


def test_a_lap_that_runs_just_now_is_no_lap_yet(race):
    race.add()
    (race.home / "1127-070000-abcdef" / "code").mkdir(parents=True)
    (race.home / ".lock").write_text("")
    assert refuse(race) == []


@pytest.mark.parametrize("evil", [EVIL, "\ud800\x1b[31m\x00", "a\nb\n" * 9, "</style>-->{star}%s"], ids=range(4))
def test_hostile_text_never_becomes_part_of_the_page(race, show, evil):
    short = evil[:60]
    data = make_record("", {}, b"")["data"] | {"name": short, "source": evil}
    script, file = f"x = 1\n{evil.encode(errors='replace').decode()}\n", '<b onclick="x">.py'
    code = {file: script, "<i>.py": script}
    texts = {"name": short, "class": evil, "hardware": evil, "net": evil, "began": evil[:40], "data": data}
    versions = {"python": evil, "torch": evil}
    race.add_times(*(40, 41, 42), code=code, script=file, args=[evil], versions=versions, **texts)
    name = evil[:20].encode(errors="replace").decode().replace("/", "").replace("\0", "")
    (race.home / name).mkdir()
    (race.home / name / "record.json").write_text("{}")
    entries, refused = read_entries([race.home])
    assert len(entries) == 1
    assert len(refused) == 1
    assert "\n" not in refused[0]
    page = show(race.home)
    for part in ("<script", "<img", "onerror=alert(1)>", "<b onclick", "<i>", "\u202e", "\u2066", "\x1b", "\x00"):
        assert part not in page
    assert page.count("</table>") == page.count("<table")
    assert page.count("<style>") == page.count("</style>")
    assert len(find_names(page)) == 1
    if evil == EVIL:
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in find_names(page)[0]


def test_a_script_of_long_lines_or_many_does_not_swell_the_page(race, show):
    race.add(code={"race.py": "x" * 60_000})
    race.add(code={"race.py": "\n" * 60_000})
    race.add(code={"race.py": "z" * 30_000 + "\n" * 3000 + "end"})
    race.add(code={"race.py": ("y" * 300 + "\n") * 200})
    begun = time.monotonic()
    assert len(show(race.home)) < 2**20
    assert time.monotonic() - begun < 20


def test_what_others_wrote_reaches_any_terminal_as_text(tmp_path, monkeypatch):
    (folder := tmp_path / "all" / "\x1b[2Jné" / "lap").mkdir(parents=True)
    (folder / "record.json").touch()
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["race", "board", str(tmp_path / "all"), "--to", str(tmp_path / "é.html")])
    with pytest.raises(SystemExit):
        run_command(command.main)
    out.flush()
    lines = out.buffer.getvalue().decode().splitlines()
    assert lines[0].endswith("\\xe9.html") and lines[1:] == [
        r"refused: all/\ufffd[2Jn\xe9/lap: its record is no valid JSON"
    ]


# The page


def test_the_page_needs_no_other_file_and_has_its_parts(race, show):
    race.add_times(40, 41, 42, code={"race.py": SCRIPT, "net.py": "depth = 3\n"}, name="changed")
    race.add(code={"race.py": BASELINE}, name="same")
    (race.add(name="gone") / "weights.pt").unlink()
    page = show(race.home)
    assert not re.search(r"https?:|url\(|@import|src=|href=", page)
    assert [tag for tag, _ in read(page) if tag in ("h1", "h2", "h3", "h4")] == [
        "h1",
        "h2",
        "h3",
        *["h4"] * 3,
        "h2",
        "h2",
    ]
    assert 'name="viewport"' in page
    assert "@media (prefers-color-scheme:dark){:root{" in page
    assert "−</span> lr" not in page
    shown = re.findall(r">([+−]) (lr = 0\.\d)", page)
    assert shown == [("−", "lr = 0.1"), ("+", "lr = 0.2")]
    assert "it is the baseline's script" in page
    for colour in ("#D3E8F8", "#FBE3C4"):  # of a diff, which a dark page has darker
        assert f'span[style*="{colour}"]' in page
        assert f'style="display:block;background:{colour}' in page
    assert "depth = 3" in page
    assert "2.14.1" in page
    assert "2 cores of a test" in page
    assert re.search(r"<li><bdi>race/[^<]*: its weights: No such file or directory</bdi></li>", page)


def test_figures_show_curve_threshold_and_utilisation(race, show):
    race.add_times(40, 41, 42)
    page = show(race.home)
    figures = [attributes for tag, attributes in read(page) if tag == "svg" and attributes.get("role") == "img"]
    assert [attributes["aria-label"] for attributes in figures] == [
        "Top-1 over seconds; the median lap ends with 81.0 % after 41.0 seconds. Dashed line: threshold 60 %.",
        "Utilisation over seconds, mean in training 93.0 %. Dashed line: 95 %.",
    ]
    drawn = re.findall('<(?:poly)?line class="(.*?)" ', re.sub('<ul class="legend">.*?</ul>', "", page))
    assert [drawn.count(kind) for kind in ("mark", "line", "other")] == [2, 3, 2]  # one curve, two nodes; two laps
    legends = re.findall('<ul class="legend">(.*?)</ul>', page)
    assert [re.findall("</svg>(.*?)</li>", legend) for legend in legends] == [
        ["median lap", "other laps", "threshold 60 %"],
        ["node 1", "node 2", "bar of honour 95 %"],
    ]
    points = [float(number) for line in re.findall(r'points="(.*?)"', page) for number in re.split("[ ,]", line)]
    assert all(0 <= number <= 360 for number in points)


def test_details_count_all_laps_of_a_name(race, show):
    race.add_times(40, 41)
    race.add_times(50, args=[])
    race.add(name="Team blue")
    assert show(race.home).count("3 laps, 2 entries") == 2


def test_a_full_page_leaves_details_out_and_keeps_the_table(race, show, monkeypatch):
    monkeypatch.setattr("course.race.board_page.PAGE_CHARACTERS", 1)
    race.add(name="a")
    race.add(name="b")
    page = show(race.home)
    assert page.count("<details>") == 1
    assert find_names(page) == ["a", "b"]
    assert "no details, the page is full" in page


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * one for one in colour[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def test_text_has_contrast_on_light_and_dark_pages(race, show):
    page = show(race.home)
    light, dark = (dict(re.findall(r"--([\w-]+):(#\w+)", root)) for root in re.findall(r":root\{(.*?)\}", page))
    assert light.keys() == dark.keys()
    for theme in (light, dark):
        pairs = [(text, back) for text in ("text", "soft", "link", "mark") for back in ("back", "band")]
        for text, back in [*pairs, ("honour", "honour-back")]:
            low, high = sorted((luminance(theme[text]), luminance(theme[back])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, back, theme)


def test_a_page_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="leaderboard cannot be written"):
        write_board([], [], tmp_path / "file" / "board.html", baseline="")
