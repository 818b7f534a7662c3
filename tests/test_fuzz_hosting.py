"""Damaged answers of teams' containers: what `collect` and `status` make of them."""

from __future__ import annotations

import io
import json
import random

from harness.drawn import list_all
from harness.fuzzing import choose_seeds, mutate_bytes, mutate_json

from hosting.collect import MOST_NAMED, Bounds, Collected, receive
from hosting.status import Standing, parse_facts, show_status
from hosting.teams import Team

SMALL = Bounds(files=20, largest=1000, total=5000, seconds=20.0)
FRAMES = [["report", 2], *(["file", f"a/{number}", 40] for number in range(5)), ["left", "x", "link"], ["end", 0]]
FACTS = {"used": 12_000_000, "free": 9_000_000_000, "labs": [[3, 3], [0, 4], [1, 2]]}


def pack(frames):
    """The frames as a container sends them, with the bytes that should be behind them."""
    sizes = {"report": 2, "file": 40}
    bodies = [
        bytes(range(sizes.get(str(frame[0]), 0))) if isinstance(frame, list) and frame else b"" for frame in frames
    ]
    return b"".join(json.dumps(frame).encode() + b"\n" + body for frame, body in zip(frames, bodies, strict=True))


def test_damaged_streams_stay_within_their_folder(tmp_path):
    """An error in words, or whole files below the folder, and nothing else anywhere."""
    content = pack(FRAMES)
    for seed in choose_seeds(2000, 60):
        dice, folder = random.Random(seed), tmp_path / "in" / str(seed)
        folder.mkdir(parents=True)
        one = Collected(folder)
        frames = mutate_json(FRAMES, dice)
        odd = pack(frames) if seed % 2 and isinstance(frames, list) else mutate_bytes(content, dice)
        receive(io.BytesIO(odd), one, SMALL)
        assert one.problem.isprintable() and len(one.left_out) <= MOST_NAMED, seed
        assert not any(path.is_symlink() for path in folder.rglob("*")), seed
        assert sum(path.is_file() for path in folder.rglob("*")) == one.files + one.report, seed
    assert list_all(tmp_path)[0] == "in" and len(list(tmp_path.iterdir())) == 1


def test_damaged_answers_are_refused_or_shown_on_one_line():
    for seed in choose_seeds(20_000, 300):
        dice = random.Random(seed)
        if seed % 2:
            said = json.dumps(mutate_json(FACTS, dice))
        else:
            said = mutate_bytes(json.dumps(FACTS).encode(), dice).decode(errors="replace")
        try:
            used, free, labs = parse_facts(said)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        shown = show_status([Standing(Team("red"), ("running",), True, (), used, free, labs)]).splitlines()
        assert len(shown) == 2 and all(line.isprintable() and len(line) < 2000 for line in shown), seed
