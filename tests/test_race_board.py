"""The leaderboard of the race: who has which place, what is refused, and a page that survives hostile records."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from harness.html_reader import read

from course.race import __main__ as command
from course.race.board import read_entries, write_board
from course.race.records import NO_RESULT
from lab_common.commandline import run_command

BASELINE = "import torch\n\nlr = 0.1\nprint(lr)\n"
SCRIPT = "import torch\n\nlr = 0.2\nprint(lr)\n"
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\u202e\u2066</td></table>&"
DATA = {"name": "shapes10", "train": 10_000, "valid": 2000, "seed": 7}
RECORD = {
    "name": "Team red",
    "began": "2026-11-27 06:44:27 UTC",
    "script": "race.py",
    "args": ["--epochs", "3"],
    "league": "sprint",
    "threshold": 0.6,
    "data": DATA | {"mapping": [2, 0, 1]},
    "failed": "",
    "weights": "",
    "net": "tiny",
    "seconds": 40.0,
    "top1": 0.81,
    "nodes": 2,
    "processes": 2,
    "class": "2 nodes, 1 CPU core each",
    "devices": 2,
    "busy": 0.93,
    "one_node": None,
    "speed_up": None,
    "versions": {"python": "3.12.1", "torch": "2.14.1"},
}


class Race:
    """A race folder that a test fills with laps."""

    def __init__(self, home: Path):
        self.home, self.count = home, 0

    def add(self, *, code=SCRIPT, **changes) -> Path:
        """Writes a valid lap but for the changes, and returns its folder."""
        self.count += 1
        folder = self.home / f"1127-0644{self.count:02d}-{self.count:06x}"
        (folder / "code").mkdir(parents=True)
        (folder / "code/race.py").write_text(code)
        record = RECORD | {"lap": folder.name, "code": str(hash(code))} | changes
        follows = {"reached": record["top1"] >= record["threshold"], "device_seconds": 2 * record["seconds"]}
        (folder / "record.json").write_text(json.dumps(record | follows | changes))
        return folder

    def add_failed(self, why: str = "interrupted", **changes) -> Path:
        """Writes a lap that did not end."""
        folder = self.add(**changes)
        change(folder, **NO_RESULT, failed=why)
        return folder

    def add_times(self, *seconds: float, **changes) -> list[Path]:
        return [self.add(seconds=one, **changes) for one in seconds]


def change(folder: Path, **changes) -> None:
    """Rewrites a record with other values."""
    path = folder / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def race(tmp_path) -> Race:
    return Race(tmp_path / "race")


@pytest.fixture
def show(tmp_path):
    """Reads race folders, writes the board, reads the page strictly, and returns it."""

    def run(*folders: Path) -> str:
        write_board(*read_entries(folders), tmp_path / "out" / "board.html", baseline=BASELINE)
        page = (tmp_path / "out" / "board.html").read_text()
        for tag, attributes in read(page):
            assert tag not in ("script", "iframe", "object", "link", "base", "form", "img")
            assert not [name for name in attributes if name in ("src", "href") or name.startswith("on")]
        return page

    return run


def find_rows(page: str) -> list[dict[str, str]]:
    """Returns the rows of all rankings."""
    rows = []
    for table in page.split("<table>")[1:]:
        head = re.findall(r'<th scope="col">(.*?)</th>', table)
        for row in table.partition("</table>")[0].split("<tr>")[2:] if "place" in head else ():
            cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


# Entries and places


def test_the_median_of_all_laps_is_the_score_and_not_the_fastest(race, show):
    race.add_times(10, 50, 60, name="lucky")
    race.add_times(40, 41, 42, name="steady")
    rows = find_rows(show(race.home))
    assert [(row["place"], row["name"], row["median seconds"]) for row in rows] == [
        ("1", "steady", "41.0 s"),
        ("2", "lucky", "50.0 s"),
    ]
    assert rows[1]["best to worst"] == "10.0 s to 60.0 s" and rows[1]["laps"] == "3"


def test_a_lap_that_missed_the_threshold_or_did_not_end_is_infinitely_slow(race, show):
    race.add_times(10, 20, name="missed")
    race.add(seconds=5, top1=0.5, name="missed")
    race.add_times(30, name="failed")
    race.add_failed(name="failed")
    race.add_failed("MemoryError", name="failed")
    race.add_failed("ZeroDivisionError", name="never")
    page = show(race.home)
    missed, failed, never = find_rows(page)
    assert missed["median seconds"] == "20.0 s" and missed["best to worst"] == "10.0 s to not reached"
    assert failed["median seconds"] == never["median seconds"] == "not reached" and failed["place"] == "–"
    assert "failed: MemoryError" in page and "failed: ZeroDivisionError" in page


def test_few_laps_are_provisional_and_below(race, show):
    race.add_times(40, 40, 40, name="a")
    race.add_times(50, 50, 50, name="b")
    race.add_times(1, 1, name="quick")
    rows = find_rows(show(race.home))
    assert [(row["place"], row["name"]) for row in rows] == [("1", "a"), ("2", "b"), ("–", "quick")]
    assert rows[-1]["laps"] == "provisional, 2 of 3 laps"


def test_each_data_set_league_threshold_and_class_has_its_own_table(race, show):
    others = [
        {"data": RECORD["data"] | {"name": "cinic10"}},
        {"league": "distance", "threshold": 0.75},
        {"threshold": 0.5},
        {"class": "1 GPU"},
    ]
    for changes in [{}, *others]:
        race.add_times(40, 41, 42, **changes)
    page = show(race.home)
    assert [row["place"] for row in find_rows(page)] == ["1"] * 5 and page.count("<h2>") == 5


def test_other_code_arguments_processes_or_names_are_another_entry(race, tmp_path):
    race.add()
    for changes in ({"code": "x"}, {"args": []}, {"processes": 4}, {"name": "me"}):
        race.add(**changes)
    stranger = Race(tmp_path / "other" / "race")
    stranger.add_failed()  # bad laps under another's name leave that one's score alone
    entries, refused = read_entries([tmp_path])
    assert [len(entry.laps) for entry in entries] == [1] * 6 and refused == []


# What others wrote


BAD_RECORDS = {
    "no JSON": (lambda path: path.write_bytes(b'{"lap": "\xff'), "not valid JSON"),
    "infinite": (lambda path: path.write_text(path.read_text().replace("40.0", "1e999")), "not valid"),
    "huge": (lambda path: os.truncate(path, 2**40), "1 is the most"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "pipe"),
    "a link": (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), "symbolic link"),
    "text for a number": (lambda path: change(path.parent, top1="0.9"), "'top1' in its record"),
    "a path as a name": (lambda path: change(path.parent, script="../x"), "'script' in its record"),
    "code that is large": (lambda path: (path.parent / "code/race.py").write_text("#" * 20_000), "cannot be read"),
}


@pytest.mark.parametrize(("harm", "why"), BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_bad_records_and_files_are_refused_in_little_time(race, show, harm, why):
    folder = race.add()
    race.add()
    harm(folder / "record.json")
    begin = time.monotonic()
    entries, (line,) = read_entries([race.home])
    assert time.monotonic() - begin < 5
    assert why in line and line.startswith(f"race/{folder.name}: ") and [len(entry.laps) for entry in entries] == [1]
    assert "Refused" in show(race.home)


def test_hostile_text_never_becomes_part_of_the_page_or_of_a_terminal(race, show, tmp_path, monkeypatch, capsys):
    hostile = {"name": EVIL, "class": EVIL, "args": [EVIL], "net": EVIL, "began": EVIL}
    hostile["data"] = RECORD["data"] | {"name": EVIL}
    hostile["versions"] = {"python": EVIL, "torch": EVIL}
    race.add(code=EVIL, **hostile)
    race.add_failed(EVIL, **hostile)
    change(race.add(), script="\x1b[2J.py")
    page = show(race.home)
    assert "<script>" not in page and "\u202e" not in page and "\x1b" not in page
    monkeypatch.setattr(sys, "argv", ["race", "board", str(race.home), "--to", str(tmp_path / "b.html")])
    with pytest.raises(SystemExit):
        run_command(command.main)
    assert "\x1b" not in capsys.readouterr().out


def test_the_page_needs_no_other_file_and_shows_each_entry(race, show):
    race.add_times(40, 41, 42)
    page = show(race.home)
    assert "default-src 'none'" in page and "url(" not in page
    assert "+ lr = 0.2" in page and "− lr = 0.1" in page
    race.add(code=BASELINE)
    assert "it is the baseline's script" in show(race.home)
