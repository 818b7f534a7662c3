"""Damaged answers of teams' containers: what `collect` and `status` make of them."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tarfile

from harness.drawn import list_all
from harness.fuzzing import choose_seeds, mutate_bytes, mutate_json

from hosting.collect import MOST_NAMED, Bounds, receive
from hosting.status import TeamStatus, parse_facts, show_status
from hosting.teams import Team

SMALL = Bounds(entries=20, largest=1000, total=5000, seconds=20.0)
FACTS = {"used": 12_000_000, "free": 9_000_000_000, "labs": [[3, 3], [0, 4], [1, 2]]}
NAMES = {
    "report.html": tarfile.REGTYPE,
    "work/labs": tarfile.DIRTYPE,
    "work/labs/a": tarfile.REGTYPE,
    f"./work/{'x' * 200}": tarfile.REGTYPE,
    "./work/link": tarfile.SYMTYPE,
    "./work/twice": tarfile.LNKTYPE,
}


def make_stream() -> bytes:
    """A tar of files, folders and links, one of them with a long name."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind in NAMES.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "../../x"
            member.size = 40 if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(bytes(40)))
    return file.getvalue()


def test_damaged_streams_stay_within_their_folder(tmp_path):
    """Whole files below the folder, and nothing else anywhere; an error is one of those that `collect` names."""
    content = make_stream()
    for seed in choose_seeds(2000, 60):
        folder, left_out = tmp_path / "in" / str(seed), []
        (folder / "work").mkdir(parents=True)
        with contextlib.suppress(tarfile.TarError, ValueError, RecursionError):
            receive(io.BytesIO(mutate_bytes(content, random.Random(seed))), folder, SMALL, left_out)
        assert len(left_out) <= MOST_NAMED and all(line.isprintable() for line in left_out), seed
        assert not any(path.is_symlink() for path in folder.rglob("*")), seed
        assert sum(path.is_file() for path in folder.rglob("*")) <= SMALL.entries, seed
    assert list_all(tmp_path)[0] == "in" and len(list(tmp_path.iterdir())) == 1


def test_damaged_answers_are_refused_or_shown_on_one_line():
    for seed in choose_seeds(20_000, 300):
        dice = random.Random(seed)
        if seed % 2:
            said = json.dumps(mutate_json(FACTS, dice))
        else:
            said = mutate_bytes(json.dumps(FACTS).encode(), dice).decode(errors="replace")
        try:
            work, labs = parse_facts(said)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        shown = show_status([TeamStatus(Team("red"), ("running",), True, work, labs)]).splitlines()
        assert len(shown) == 2 and all(line.isprintable() and len(line) < 2000 for line in shown), seed
