"""The claim that a step of DDP can be predicted: ``python -m benchmarks.prediction`` (minutes; ``--small`` is shorter).

First it measures the parts of steps that send nothing, at two batch sizes that no held-out configuration has, and
all-reduces without any step. Then it writes down a prediction for each held-out configuration, with the time. Only then
does it measure those, and it refuses to compare once the file has changed.

The ranks are on two hosts made of namespaces (``tests.harness.hosts``), half of them on each. What each host sends to
the other is shaped by the token bucket of ``tc``, so ranks of one host share a link; what they send to each other is
free. If no hosts can be made, only the loopback of this machine is measured, for which no bound is claimed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.claims import Claim, print_table
from lab_common import LabError, env_folder
from lab_common.commandline import read_option
from lab_common.files import write_atomically
from nodelaunch.node.probe import find_free_port
from tests.harness.hosts import Hosts, find_missing

SCRIPT = Path(__file__).with_name("prediction_ranks.py")
LOOPBACK = "loopback"
# tc's rates, with what its token bucket holds, the bytes of 1 to 3 ms: little beside a step's gradients, and enough
# that few tokens are lost where the kernel wakes up late.
RATES = {"20mbit": "6kb", "100mbit": "16kb", "250mbit": "32kb"}
BOUND = 5.0  # per cent
# Per rank; a line through the calibration's two is what is known of the held-out ones.
CALIBRATION_BATCHES, HELD_OUT_BATCHES = (8, 32), (16, 24)


@dataclass(frozen=True)
class Case:
    """A held-out configuration: network, images per rank, DDP's bucket_cap_mb, ranks, and ``tc``'s rate or LOOPBACK."""

    net: str
    batch: int
    cap: float
    ranks: int
    rate: str


@dataclass(frozen=True)
class Work:
    """Amounts to measure: networks, caps of buckets in MiB, ranks, rates, rounds, bytes of the link's all-reduces."""

    nets: tuple[str, ...] = ("mlp", "cnn", "deep")
    caps: tuple[float, ...] = (0.25, 1.0)
    ranks: tuple[int, ...] = (2, 4)
    rates: tuple[str, ...] = ("100mbit", "250mbit", LOOPBACK)
    rounds: int = 12
    sizes: tuple[int, ...] = (2**14, 2**16, 2**18, 2**20, 2**21)

    def list_cases(self, rate: str, ranks: int) -> list[Case]:
        """The held-out configurations of a rate and a number of ranks."""
        return [Case(*one, ranks, rate) for one in itertools.product(self.nets, HELD_OUT_BATCHES, self.caps)]


SMALL = Work(nets=("cnn",), ranks=(2,), rates=("20mbit",), rounds=3, sizes=(2**14, 2**17, 2**20))


def simulate(ready: Sequence[float], sends: Sequence[float], backward: float) -> float:
    """When the last bucket's mean is there: each is sent when it is full and the link is free, in their order.

    Args:
        ready: When each bucket is full, in seconds since backward began.
        sends: Seconds that each all-reduce takes alone.
        backward: When backward itself ends.
    """
    end = 0.0
    for moment, send in zip(ready, sends, strict=True):
        end = max(end, moment) + send
    return max(end, backward)


def fill_buckets(numbers: Sequence[int], ready: Sequence[float], cap: float) -> list[list[int]]:
    """DDP's buckets from the second step on, by DDP's own function: the indices of the parameters in each.

    Args:
        numbers: Elements of each float32 parameter.
        ready: When its gradient is there; DDP fills buckets in this order.
        cap: bucket_cap_mb.
    """
    order = sorted(range(len(numbers)), key=lambda index: ready[index])
    tensors = [torch.empty(numbers[index]) for index in order]
    limit = int(cap * 2**20)
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [limit, limit], [], order)
    return buckets


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency in s and s/byte of seconds = latency + bytes · slope, by least squares of the relative errors."""
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    return float(start), float(slope)


def interpolate(low: dict, high: dict, batch: int) -> dict:
    """The parts of a step at a batch size, on a straight line through two calibrated ones; seconds."""
    share = (batch - low["batch"]) / (high["batch"] - low["batch"])
    found = {name: low[name] + share * (high[name] - low[name]) for name in ("forward", "backward", "rest")}
    pairs = zip(low["ready"], high["ready"], strict=True)
    return found | {"ready": [one + share * (two - one) for one, two in pairs]}


def predict(case: Case, calibration: dict) -> dict:
    """Seconds of a step of DDP, and DDP's buckets in bytes, by what was calibrated on the same link and ranks."""
    low, high = (one for one in calibration["steps"] if one["net"] == case.net)
    parts, numbers = interpolate(low, high, case.batch), low["numbers"]
    buckets = fill_buckets(numbers, parts["ready"], case.cap)
    sizes = [4 * sum(numbers[index] for index in bucket) for bucket in buckets]
    full = [max(parts["ready"][index] for index in bucket) for bucket in buckets]
    start, slope = fit_line(*zip(*calibration["link"], strict=True))
    end = simulate(full, [max(0.0, start) + slope * size for size in sizes], parts["backward"])
    return asdict(case) | {"seconds": parts["forward"] + end + parts["rest"], "buckets": sizes}


def run_ranks(hosts: Hosts | None, ranks: int, what: str, asked: dict, folder: Path) -> object:
    """Runs the ranks on two hosts, or on this machine where None, and returns rank 0's report.

    Raises:
        RuntimeError: A rank failed.
    """
    question, report = folder / f"{what}-asked.json", folder / f"{what}-report.json"
    question.write_text(json.dumps(asked))
    report.unlink(missing_ok=True)
    where, port = (hosts.address("n1"), 29650) if hosts else ("127.0.0.1", find_free_port())
    common = {"MASTER_ADDR": where, "MASTER_PORT": port, "WORLD_SIZE": ranks, "OMP_NUM_THREADS": 1}
    common["GLOO_SOCKET_IFNAME"] = "eth0" if hosts else "lo"

    def run(rank: int) -> None:
        settings = [f"{name}={value}" for name, value in (common | {"RANK": rank}).items()]
        command = ["env", *settings, sys.executable, str(SCRIPT), what, str(question), str(report)]
        if hosts:
            hosts.run_on("n1" if rank < ranks / 2 else "n2", command, timeout=1200)
        elif (done := subprocess.run(command, capture_output=True, text=True, timeout=1200)).returncode:
            raise RuntimeError(f"rank {rank} ended with {done.returncode}: {done.stderr[-2000:]}")

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks)))
    return json.loads(report.read_text())


@contextlib.contextmanager
def shape(hosts: Hosts, rate: str) -> Iterator[None]:
    """Bounds what each of the hosts sends to the other for a block."""
    bucket = ["tbf", "rate", rate, "burst", RATES[rate], "latency", "400ms"]
    try:
        for node in ("n1", "n2"):
            hosts.run_on(node, ["tc", "qdisc", "replace", "dev", "eth0", "root", *bucket])
        yield
    finally:
        for node in ("n1", "n2"):
            hosts.run_on(node, ["tc", "qdisc", "del", "dev", "eth0", "root"], check=False)


def write_predictions(path: Path, cases: Sequence[dict], calibrations: Sequence[dict]) -> str:
    """Writes the predictions down with the time, and returns the file's SHA-256."""
    when = datetime.now(UTC).isoformat()
    content = json.dumps({"when": when, "cases": cases, "calibrations": calibrations}, indent=1).encode()
    with write_atomically(path) as file:
        file.write(content)
    return hashlib.sha256(content).hexdigest()


def compare(predictions: Path, measured: Path) -> list[dict]:
    """Sets measured steps beside the predictions that they were measured after.

    Returns:
        For each case its settings, ``predicted`` and ``measured`` in s, and ``error`` in %.

    Raises:
        LabError: The predictions are not those that stood there before the measurement, or DDP's buckets are others.
    """
    content, found = predictions.read_bytes(), json.loads(measured.read_text())
    written = json.loads(content)
    if hashlib.sha256(content).hexdigest() != found["predictions"] or written["when"] >= found["when"]:
        cause, fix = "the file was changed or written after the measurement", "python -m benchmarks.prediction"
        raise LabError("These predictions were not made before measuring.", where=predictions, cause=cause, fix=fix)
    rows = []
    for case, one in zip(written["cases"], found["steps"], strict=True):
        if case["buckets"] != one["buckets"]:
            cause = f"predicted: {case['buckets']}, DDP's: {one['buckets']} bytes"
            raise LabError("DDP filled its buckets in another way.", where=case["net"], cause=cause)
        row = {name: case[name] for name in ("net", "batch", "cap", "ranks", "rate")}
        row |= {"predicted": case["seconds"], "measured": one["seconds"]}
        rows.append(row | {"error": 100 * (case["seconds"] / one["seconds"] - 1)})
    return rows


def run_all(folder: Path, work: Work, hosts: Hosts | None) -> list[dict]:
    """Calibrates, writes the predictions down, measures, and compares; the rows of ``compare``."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(rate, ranks) for rate in work.rates if hosts or rate == LOOPBACK for ranks in work.ranks]
    asked = {"nets": work.nets, "batches": CALIBRATION_BATCHES, "sizes": work.sizes, "rounds": work.rounds}

    def run_each(what: str, ask: Callable[[str, int], dict]) -> list:
        reports = []
        for rate, ranks in jobs:
            with contextlib.nullcontext() if rate == LOOPBACK else shape(hosts, rate):
                reports.append(run_ranks(hosts if rate != LOOPBACK else None, ranks, what, ask(rate, ranks), folder))
            print(f"{what}: {ranks} ranks, {rate}", flush=True)
        return reports

    calibrations = run_each("calibrate", lambda rate, ranks: asked)
    pairs = [(case, one) for job, one in zip(jobs, calibrations, strict=True) for case in work.list_cases(*job)]
    cases = [predict(case, one) for case, one in pairs]
    digest = write_predictions(folder / "predictions.json", cases, calibrations)
    print(f"{len(cases)} predictions are written down; SHA-256 {digest}", flush=True)
    whole = {job: [asdict(case) for case in work.list_cases(*job)] for job in jobs}
    reports = run_each("measure", lambda rate, ranks: {"cases": whole[rate, ranks], "rounds": work.rounds})
    steps = [step for report in reports for step in report]
    found = {"predictions": digest, "when": datetime.now(UTC).isoformat(), "steps": steps}
    with write_atomically(folder / "measured.json") as file:
        file.write(json.dumps(found, indent=1).encode())
    return compare(folder / "predictions.json", folder / "measured.json")


def check_all(folder: Path, work: Work | None = None) -> list[Claim]:
    """Predicts steps of DDP and measures them: a claim for shaped links, and one without a bound for the loopback."""
    work, missing = work or Work(), find_missing() or ("" if shutil.which("tc") else "not installed: iproute2")
    with contextlib.nullcontext() if missing else Hosts() as hosts:
        rows = run_all(folder, work, hosts)
    for row in rows:
        print(
            ", ".join(f"{name} {one:.4g}" if isinstance(one, float) else f"{name} {one}" for name, one in row.items())
        )
    claims = []
    for place, bound in (("links shaped by tc", BOUND), (LOOPBACK, None)):
        errors = [abs(row["error"]) for row in rows if (row["rate"] == LOOPBACK) == (bound is None)]
        text = f"prediction of a DDP step, written down before measuring ({len(errors)} configurations, {place})"
        words = f"at most {bound:g} %" if bound else ""
        if errors:
            median = statistics.median(errors)
            measured = f"median error {median:.1f} %, largest {max(errors):.1f} %"
            numbers = {"median error (%)": median, "largest error (%)": max(errors)}
            claims.append(Claim(text, measured, words, bound is None or median <= bound, numbers))
        elif missing and bound:
            claims.append(Claim(text, f"no hosts here: {missing}", words, None))
    return claims


def main() -> int:
    """Runs the claims alone; the exit status is 1 if the bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="one network, two ranks, a very slow link")
    parser.add_argument(
        "--folder", type=read_option, default=env_folder("LAB_RUNS", "runs") / "prediction", help="for the files"
    )
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    claims = check_all(arguments.folder, SMALL if arguments.small else None)
    print_table(claims)
    return 1 if any(claim.holds is False for claim in claims) else 0


if __name__ == "__main__":
    sys.exit(main())
