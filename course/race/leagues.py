"""The leagues: which top-1 has to be reached, on which data set."""

from __future__ import annotations

import json
from pathlib import Path

from lab_common import LabError
from lab_utils import data

LEAGUES = ("sprint", "distance")
THRESHOLDS = Path(__file__).with_name("thresholds.json")


def read_thresholds() -> list[dict]:
    """The thresholds that were set: data set, its number of training images, league, top-1, and from which laps."""
    return json.loads(THRESHOLDS.read_text())


def find_threshold(dataset: data.Dataset, league: str) -> float:
    """The top-1 of a league.

    Raises:
        LabError: There is no such league, or nobody has set it for this data set.
    """
    if league not in LEAGUES:
        raise LabError(f"There is no league {league[:40]!r}.", fix=f"choose one of {', '.join(LEAGUES)}")
    for one in read_thresholds():
        if (one["data"], one["train"], one["league"]) == (dataset.name, len(dataset.train), league):
            return one["top1"]
    raise LabError(
        f"No threshold is set for {dataset.name} with {len(dataset.train):,} training images.",
        where=f"league {league!r}",
        cause="it comes from five laps of the baseline, which nobody has run on this data set",
        fix="run `python -m course.race thresholds sprint`, or race with --within 120",
    )
