"""The plain baseline, and the thresholds that five laps of it set."""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path

from course.race.images import HELD_OUT
from course.race.judge import run_lap
from course.race.records import THRESHOLDS, read_thresholds
from lab_common import checkout
from lab_common.files import write_atomically
from lab_utils import data

SEEDS = 5
# Images that the baseline trains on in each league, all epochs together.
PASSES = {"sprint": 20_000, "distance": 100_000}
SCRIPT = checkout() / "notebooks" / "scripts" / "race_baseline.py"


def count_epochs(league: str, images: int) -> int:
    """The epochs of the baseline on a data set with that many training images in a lap."""
    return max(1, round(PASSES[league] / images))


def measure_threshold(league: str) -> dict:
    """Runs five laps of the baseline and writes the league's top-1 down: what the worst of them reaches, rounded down.

    Returns:
        The threshold, with the top-1 and the seconds of each lap, and the hardware.

    Raises:
        LabError: A lap failed.
    """
    dataset = data.load()
    epochs = count_epochs(league, round((1 - HELD_OUT) * len(dataset.train)))
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        options = {"league": league, "threshold": 0.0, "home": Path(folder), "show": False}
        laps = [run_lap(SCRIPT, ["--epochs", epochs, "--seed", seed], **options) for seed in range(SEEDS)]
    found = {
        "data": dataset.name,
        "train": len(dataset.train),
        "league": league,
        "top1": math.floor(100 * min(lap["top1"] for lap in laps)) / 100,
        "epochs": epochs,
        "laps": [{"top1": lap["top1"], "seconds": round(lap["seconds"], 1)} for lap in laps],
        "hardware": laps[0]["class"],
        "torch": laps[0]["versions"]["torch"],
        "date": time.strftime("%Y-%m-%d"),
    }
    same = ("data", "train", "league")
    others = [one for one in read_thresholds() if [one[key] for key in same] != [found[key] for key in same]]
    with write_atomically(THRESHOLDS) as file:
        file.write((json.dumps([*others, found], indent=1) + "\n").encode())
    return found
