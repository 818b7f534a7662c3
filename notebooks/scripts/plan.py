"""Predicts step time, efficiency and cost of data-parallel training on many nodes: ``python scripts/plan.py``.

All-reduce of S bytes over n nodes of g devices (N = n·g); latencies a inside a node and A between, bandwidths b and B:

* ring: 2(N - n)·a + 2(n - 1)·A + 2(N - 1)/N · S/B (on one node, b). Patarasuk and Yuan, "Bandwidth optimal all-reduce
  algorithms" (2009); latencies as NCCL adds them up: github.com/NVIDIA/nccl, src/graph/tuning.cc.
* tree: 2(g - 1)·a + 2·⌈log2 n⌉·A + 2·S/B. NCCL's double binary tree, with a chain inside the node (tuning.cc).
* hierarchical: 2(g - 1)·a + 2(g - 1)/g · S/b + 2(n - 1)·A + 2(n - 1)/n · S/B. A reduce-scatter inside, g rings that
  share the node's link, an all-gather inside; for these parts see Thakur, Rabenseifner and Gropp, "Optimization of
  Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from lab_common import LabError, checkout
from lab_common.commandline import run_command

ALGORITHMS, NODES = ("ring", "tree", "hierarchical"), (*(2**power for power in range(14)), 10_000)
ASSUMPTIONS = """Assumed: no stragglers, no wait for data, no congestion, equal nodes: so the efficiency is an upper
bound. Backward fills k equal buckets at equal intervals. They are sent one after the other while it runs, and sending
takes nothing from computing. The step then waits max(send - backward·(1 - 1/k), send/k); k = 1 is no overlap. Computing
takes time in proportion to the batch. Weak scaling keeps the batch per device; strong scaling divides that of one node,
down to one image per device. Efficiency: images/s over those of as many devices that work alone."""


def _ask(words: str, default: float | None = None, low: float = 1e-300, high: float = 1e300) -> float:
    return field(default=default, metadata={"words": words, "range": (low, high)})


@dataclass(frozen=True)
class Setup:
    """One device's step, the gradients and the links; ``python scripts/plan.py --help`` has the units.

    Raises:
        LabError: A value is missing or out of range.
    """

    compute: float = _ask("seconds of a step on one device")
    batch: float = _ask("images per device and step", low=1)
    size: float = _ask("bytes of gradients", low=1)
    latency: float = _ask("seconds that a message between two nodes takes besides its bytes", low=0)
    bandwidth: float = _ask("bytes/s of a node's link to the others, each way")
    devices: int = _ask("devices per node", 1, low=1)
    inner_latency: float = _ask("as --latency, inside a node", 0.0, low=0)
    inner_bandwidth: float = _ask("bytes/s of a device's link in its node, or no limit", math.inf, high=math.inf)
    backward: float = _ask("backward's share of the step", 2 / 3, low=0, high=1)
    buckets: int = _ask("messages that the gradients are sent in; 0: one per 25 MiB, as in DDP", 0, low=0)
    images: float = _ask("images in the whole training; by default 90 epochs of ImageNet-1k", 90 * 1_281_167)
    price: float = _ask("price of a device per hour", 0.0, low=0)

    def __post_init__(self) -> None:
        if missing := [f"--{one.name}" for one in fields(self) if getattr(self, one.name) is None]:
            cause = "lab 5 has measured nothing on this machine"
            raise LabError(f"The planner needs {', '.join(missing)}.", cause=cause, fix="give them, or run lab 5")
        for one in fields(self):
            value, (low, high) = getattr(self, one.name), one.metadata["range"]
            whole, least = " whole" * (one.type == "int"), "above 0" if 0 < low < 1 else f"from {low:g}"
            if not low <= value <= high or (whole and value % 1):
                fix = f"give {one.metadata['words']}: a{whole} number {least}{' to 1' * (high == 1)}"
                raise LabError(f"--{one.name.replace('_', '-')} is {value:g}.", fix=fix)


def all_reduce(setup: Setup, nodes: int, algorithm: str, size: float) -> float:
    """Seconds of one all-reduce of ``size`` bytes over all devices of ``nodes`` nodes, by the formulas above."""
    if algorithm not in ALGORITHMS or nodes < 1 or nodes % 1:
        fix = f"take one of {ALGORITHMS}, and a whole number of nodes from 1"
        raise LabError(f"There is no all-reduce {algorithm!r} over {nodes} nodes.", fix=fix)
    devices, link = nodes * setup.devices, setup.bandwidth if nodes > 1 else setup.inner_bandwidth
    inside, between = 2 * (setup.devices - 1) * setup.inner_latency, 2 * (nodes - 1) * setup.latency
    if algorithm == "ring":
        return nodes * inside + between + 2 * (1 - 1 / devices) * size / link
    if algorithm == "tree":
        return inside + 2 * math.ceil(math.log2(nodes)) * setup.latency + (devices > 1) * 2 * size / link
    inside += 2 * (1 - 1 / setup.devices) * size / setup.inner_bandwidth
    return inside + between + 2 * (1 - 1 / nodes) * size / setup.bandwidth


def predict(setup: Setup, nodes: int, algorithm: str, scaling: str = "weak") -> dict[str, float | str]:
    """One row for a DataFrame: step in s, efficiency in %, images/s, and days and cost of the whole training."""
    devices, share = nodes * setup.devices, 1 / nodes if scaling == "strong" else 1
    k = setup.buckets or math.ceil(setup.size / (25 * 2**20))
    compute = share * setup.compute
    send = k * all_reduce(setup, nodes, algorithm, setup.size / k)
    step = compute + max(send - setup.backward * compute * (1 - 1 / k), send / k)
    speed, hours = devices * share * setup.batch / step, setup.images * step / (devices * share * setup.batch) / 3600
    row = {"scaling": scaling, "nodes": nodes, "devices": devices, "algorithm": algorithm, "step (s)": step}
    row |= {"efficiency (%)": 100 * compute / step, "images/s": speed, "days": hours / 24}
    return row | {"cost": hours * devices * setup.price}


def tabulate(setup: Setup, nodes: Iterable[int] = NODES) -> list[dict[str, float | str]]:
    """The rows of ``predict`` for all algorithms, in weak and in strong scaling."""
    cases = [(scaling, n) for scaling in ("weak", "strong") for n in nodes if scaling == "weak" or n <= setup.batch]
    return [predict(setup, n, algorithm, scaling) for scaling, n in cases for algorithm in ALGORITHMS]


def check_published() -> list[dict[str, float | str]]:
    """The planner's error, in points of efficiency, for each result in ``data/reference/published_scaling.json``."""
    rows = []
    for one in json.loads((checkout() / "data" / "reference" / "published_scaling.json").read_bytes())["results"]:
        found = predict(Setup(**one["setup"]), one["nodes"], one["algorithm"])["efficiency (%)"]
        rows.append({"result": one["name"], "reported (%)": one["reported"], "predicted (%)": found})
        rows[-1]["error (points)"] = found - one["reported"]
    return rows


def read_records() -> dict[str, float]:
    """The values of a Setup by the last measurement of lab 5 on this machine; {} if there is none."""
    import numpy as np

    from lab_utils import machine, timing

    here = [one for one in timing.Records("lab5").read("buckets") if one["machine"] == machine.describe().label]
    try:
        (step, *others), ranks = here[-1]["result"]["steps"], here[-1]["result"]["world_size"]
        sent = np.array([(one["bytes"], one["send"]) for case in (step, *others) for one in case["buckets"]], float)
        slope, start = np.polyfit(*sent.T, 1, w=1 / sent[:, 1])
        found = {"compute": step["alone"].median, "batch": step["batch"], "buckets": len(step["buckets"])}
        found |= {"size": sum(one["bytes"] for one in step["buckets"]), "latency": max(0, start) / (2 * ranks - 2)}
        found |= {"backward": min(1, step["backward"] / step["compute"].median)}
        return found | {"bandwidth": 2 * (1 - 1 / ranks) / slope}
    except (LookupError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        return {}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and what it assumes; returns 1 after an error, whose message goes to stderr."""
    import pandas as pd

    parser = argparse.ArgumentParser(prog="python scripts/plan.py", description=__doc__.splitlines()[0])
    for one in fields(Setup):
        option, kind = f"--{one.name.replace('_', '-')}", {"int": int, "float": float}[one.type]
        parser.add_argument(option, type=kind, help=one.metadata["words"])
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="how many, one number after the other")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    nodes = given.pop("nodes")

    def run() -> None:
        measured = read_records()
        values = {name: one for name, one in measured.items() if name != "buckets" or "size" not in given} | given
        frame = pd.DataFrame(tabulate(Setup(**values), dict.fromkeys(nodes)))
        notes = [f"{name}: {one:.6g}{', by lab 5' * (one is measured.get(name))}" for name, one in values.items()]
        print(ASSUMPTIONS, "; ".join(notes), frame.round(4).to_string(index=False), sep="\n\n")

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
