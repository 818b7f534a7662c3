"""Measures training steps of ResNet-152 on 32×32 images against what others type.

``python -m benchmarks.gpu.speed --out FILE.json`` measures group by group, the most valuable first: the arms of a group
get ready one after the other and then take turns, six times. Before that, the losses of 30 steps of each of our arms
have to lie within 2 % of those of IEEE float32 at the same batch size, in each step; an arm that does not is not timed.
FILE.json is written after each turn, and another call with the same machine, versions and code continues with the
missing groups. Exit status: 0 when all is measured, 75 when the time was up before.

Data are random uint8 images on the GPU. The optimizer is SGD with learning rate 0.1, momentum 0.9 and weight decay
1e-4. For the comparison of losses it is ``worker.CURVE_LR``, and the last BatchNorm of each residual block is scaled by
``worker.CURVE_SCALE``. From the usual initial weights no arm could be told from another: two runs in float32 that
differ in nothing but the order of their sums were 8 to 80 % apart within 30 steps, at learning rates from 0.0003 to
0.01 (ResNet-152, batch 64, on a CPU). As it is they were 0.2 % apart and bfloat16 was off by 0.9 %; the middle
BatchNorm of each block frozen was off by 7 %, a learning rate 1.1 times as high by 10 %, no momentum by 290 % (batch
32, on a CPU). FILE.json has the distance of two float32 runs on its machine, ``noise``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims import print_table
from benchmarks.gpu import TIME_IS_UP
from benchmarks.gpu.arms import Setup
from benchmarks.gpu.notebooks import write_json
from benchmarks.gpu.roofline import SHEETS, find_sheet, predict
from benchmarks.gpu.speed_report import ROUNDS, find_best, judge, list_rates
from benchmarks.gpu.worker import ARMS, CURVE_BATCHES, CURVE_LR, CURVE_SCALE, Host, close_all
from lab_common import LabError, checkout
from lab_common.commandline import read_option
from lab_common.files import read_bounded
from lab_common.nvidia import query_smi
from lab_utils import machine

LIMIT = 0.02  # of the losses, in each step
SPARE = 6.0  # seconds at the end, in which processes end and the file is written
GROUPS = {
    "eager": (
        *("graph", "eager", "timm AMP channels_last", "timm AMP", "torchvision AMP fp16"),
        *("examples AMP", "Lightning AMP"),
    ),
    "compiled": (
        *("regional graph", "compiled graph", "compiled", "regional"),
        *("timm compiled channels_last", "timm compiled"),
    ),
    "rest": ("bf16 weights graph", "timm fp32", "torchvision fp32", "examples fp32", "Lightning fp32"),
    "tuned": ("tuned graph",),
}
ORDER = (
    *((1024, "eager"), (128, "eager"), (1024, "compiled"), (128, "compiled"), (1024, "rest"), (128, "rest")),
    *((512, "eager"), (4096, "eager"), (1024, "tuned"), (512, "compiled"), (4096, "compiled")),
)
# Nothing is begun that this many seconds, on an H100, do not suffice for.
LEAST = {"eager": 40.0, "compiled": 60.0, "rest": 40.0, "tuned": 90.0}


@dataclass(frozen=True)
class Scale:
    """Amounts to measure: steps of warm-up and of the curve, untimed steps of a turn, and seconds of a turn."""

    warmup: int = 20
    curve: int = 30
    lead: int = 3
    seconds: float = 0.4
    fewest: int = 5

    def count_steps(self, step: float) -> int:
        """Returns the timed steps of a turn, where one takes ``step`` seconds."""
        return max(self.fewest, min(200, math.ceil(self.seconds / max(step, 1e-6))))


DRY = Scale(warmup=1, curve=2, lead=0, seconds=0.0, fewest=2)


@dataclass(frozen=True)
class Group:
    """Arms that take turns: the network's stem, the batch size, the group's name, and the arms."""

    stem: str
    batch: int
    name: str
    arms: tuple[str, ...]


class TimeIsUpError(Exception):
    """The seconds of this call are over."""


def find_deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative difference of a step's loss; infinite if one is not finite or is missing."""
    pairs = list(zip(losses, expected, strict=False))
    if len(losses) != len(expected) or not all(math.isfinite(one) for pair in pairs for one in pair):
        return math.inf
    return max((abs(one - other) / abs(other) for one, other in pairs), default=math.inf)


class Session:
    """One call of the command: its processes, its time, and the result, which is on the disk after each turn."""

    def __init__(self, out: Path, setup: Setup, scale: Scale, seconds: float, here: dict[str, Any]) -> None:
        self.out, self.setup, self.scale = out, setup, scale
        self.end = time.monotonic() + seconds
        self.hosts: dict[str, Host] = {}
        self.result = load_result(out, make_key(here, setup, scale)) | {"machine": here}
        self.result["when"] = datetime.now(UTC).isoformat(timespec="seconds")

    def left(self) -> float:
        """Seconds that may still be spent on measuring."""
        return self.end - time.monotonic() - SPARE

    def save(self) -> None:
        """Writes the result, after judging its goals again."""
        self.result["goals"] = {stem: [asdict(claim) for claim in judge(self.result, stem)] for stem in SHOWN}
        write_json(self.out, self.result)

    def host(self, arm: str, stem: str) -> Host:
        """Returns the process of an arm; on a CPU all share one."""
        key = f"{stem}/{arm}" if self.setup.device.type == "cuda" else stem
        if key not in self.hosts:
            self.hosts[key] = Host(Setup(self.setup.net, stem, self.setup.device))
        return self.hosts[key]

    def close(self, keep: Iterable[Host] = ()) -> None:
        """Ends all processes but some."""
        going = {key: host for key, host in self.hosts.items() if host not in list(keep)}
        self.hosts = {key: host for key, host in self.hosts.items() if key not in going}
        close_all(list(going.values()))

    def finish(self, arm: str, stem: str) -> dict[str, Any]:
        """Waits for an arm's next answer; a process that has ended is another's the next time."""
        host = self.host(arm, stem)
        reply = host.finish(self.left())
        if reply.get("late"):
            raise TimeIsUpError
        if host.process.exitcode is not None:
            self.close([one for one in self.hosts.values() if one is not host])
        return reply

    def ask(self, arm: str, group: Group, name: str, **arguments: object) -> dict[str, Any]:
        """Asks an arm's process and waits for the answer."""
        self.host(arm, group.stem).ask(name, arm=arm, **arguments)
        return self.finish(arm, group.stem)

    def measure(self, group: Group) -> None:
        """Measures one group, from its processes to its clocks.

        Raises:
            TimeIsUpError: The time was up before; what was timed stays in the result, with fewer rounds.
        """
        same = [one for one in self.result["measurements"] if _place(one) == (group.stem, group.batch, group.name)]
        self.result["measurements"] = [one for one in self.result["measurements"] if one not in same]
        rows = {arm: self._make_row(group, arm) for arm in self._add_anchors(group)}
        self.result["measurements"] += rows.values()
        ready = [arm for arm, row in rows.items() if not row["status"]]
        if ready:
            self.close([self.host(arm, group.stem) for arm in ready])
            if self.setup.device.type != "cuda":
                self._find_curve(group)  # the one process answers in turn
            print(f"{group.stem} stem, batch {group.batch:,}: {', '.join(ready)}", flush=True)
            self._prepare(group, rows, ready)
            ready = [arm for arm in ready if not rows[arm]["status"]]
            self._take_turns(group, rows, ready)
            self._look_at_best(group, rows)
        self.result["groups"].append([group.stem, group.batch, group.name])
        self.save()

    def _make_row(self, group: Group, name: str) -> dict[str, Any]:
        arm, status = ARMS[name], ""
        if (arm.graph or arm.compiled) and self.setup.device.type != "cuda":
            status = "not on a CPU"
        elif arm.package and importlib.util.find_spec(arm.package) is None:
            status = f"{arm.package} is not installed"
        row = {"stem": group.stem, "batch": group.batch, "group": group.name, "arm": name, "ours": arm.ours}
        return row | {"source": arm.source, "status": status, "seconds": [], "fidelity": None, "peak_bytes": None}

    def _add_anchors(self, group: Group) -> list[str]:
        """The group's arms, and two of the eager ones to compare them with in the same turns."""
        rates = list_rates(self.result, group.stem, group.batch, "eager") if group.name != "eager" else {}
        best = [find_best(rates, ours=True), find_best(rates, ours=False, amp=True)]
        return list(dict.fromkeys([*group.arms, *(one[1] for one in best if one)]))

    def _find_curve(self, group: Group) -> None:
        """Takes the losses of IEEE float32, twice, the images of each batch in another order; once for a batch size."""
        key, curves = f"{group.stem}/{group.batch}", []
        if key in self.result["curves"]:
            return
        for permuted in (False, True):
            reply = self.ask("reference", group, "build", batch=group.batch, permuted=permuted)
            if "error" not in reply:
                reply = self.ask("reference", group, "warm", steps=1, curve=self.scale.curve)
            curves.append(reply.get("losses", []))
        self.ask("reference", group, "drop")
        noise = find_deviation(curves[1], curves[0])
        noise = noise if math.isfinite(noise) else None
        self.result["curves"][key] = {"losses": curves[0], "noise": noise, "error": reply.get("error", "")}

    def _prepare(self, group: Group, rows: dict[str, dict[str, Any]], ready: Sequence[str]) -> None:
        """Builds and compiles all arms at once, then warms them up one after the other, as cuDNN measures meanwhile."""
        for arm in ready:
            self.host(arm, group.stem).ask("build", arm=arm, batch=group.batch)
        self._find_curve(group)
        for arm in ready:
            reply = self.finish(arm, group.stem)
            rows[arm].update({key: reply[key] for key in ("settings", "build_seconds") if key in reply})
            rows[arm]["status"] = reply.get("error", "")
        for arm in ready:
            if rows[arm]["status"]:
                continue
            curve = self.scale.curve if ARMS[arm].ours else 0
            reply = self.ask(arm, group, "warm", steps=self.scale.warmup, curve=curve)
            rows[arm].update({key: value for key, value in reply.items() if key != "error"})
            rows[arm]["status"] = reply.get("error", "") or self._check_losses(group, rows[arm])
            if rows[arm]["status"] and "error" not in reply:
                self.ask(arm, group, "drop")
            self.save()

    def _check_losses(self, group: Group, row: dict[str, Any]) -> str:
        """Notes how far the losses of one of ours are off; returns why it is not timed, "" if it may be."""
        if not row["ours"]:
            return ""
        curve = self.result["curves"][f"{group.stem}/{group.batch}"]
        off = find_deviation(row["losses"], curve["losses"])
        row["fidelity"] = off if math.isfinite(off) else None
        if curve["error"]:
            return f"not checked: float32's losses are not known: {curve['error']}"
        return "" if off <= LIMIT else f"refused: its losses are off by {off:.1%}, {LIMIT:.0%} is the most"

    def _take_turns(self, group: Group, rows: dict[str, dict[str, Any]], ready: Sequence[str]) -> None:
        for number in range(ROUNDS):
            for arm in ready[:: -1 if number % 2 else 1]:
                if rows[arm]["status"]:
                    continue
                count = self.scale.count_steps(rows[arm]["step"])
                reply = self.ask(arm, group, "time", lead=self.scale.lead, count=count)
                if "error" in reply:
                    rows[arm]["status"] = reply["error"]
                else:
                    rows[arm]["seconds"].append(reply["seconds"])
                    rows[arm]["steps"] = count
                self.save()

    def _look_at_best(self, group: Group, rows: dict[str, dict[str, Any]]) -> None:
        """Reads the clocks while our fastest arm and the fastest peer run; profiles ours where a goal is missed."""
        rates = list_rates(self.result, group.stem, group.batch, group.name)
        best = [one[1] for one in (find_best(rates, ours=True), find_best(rates, ours=False)) if one]
        for arm in best if self.setup.device.type == "cuda" else ():
            steps = math.ceil(1.0 / statistics.median(rows[arm]["seconds"]))
            self.host(arm, group.stem).ask("time", arm=arm, lead=0, count=steps)
            time.sleep(0.3)
            rows[arm]["clocks"] = read_clocks()
            self.finish(arm, group.stem)
        missed = any(claim.holds is False for claim in judge(self.result, group.stem))
        ours = find_best(rates, ours=True)
        if ours and (missed or self.scale is DRY):
            profile = self.ask(ours[1], group, "profile", steps=3)
            self.result["profiles"].append({"stem": group.stem, "batch": group.batch, "group": group.name} | profile)


SHOWN = ("imagenet", "cifar")


def _place(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["stem"], row["batch"], row["group"]


def read_clocks() -> dict[str, str]:
    """Returns what ``nvidia-smi`` says now of the first GPU: clocks in MHz, power in W, temperature in °C."""
    fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    try:
        return dict(zip(fields, query_smi(f"gpu={','.join(fields)}", seconds=10)[0], strict=False))
    except (OSError, IndexError) as error:
        return {"error": str(error)}


def make_key(here: dict[str, Any], setup: Setup, scale: Scale) -> dict[str, object]:
    """Returns the facts that two calls must share for the later to continue where the earlier stopped."""
    versions = {}
    for package in ("torch", "torchvision", "triton", "timm", "lightning"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    code = hashlib.sha256()
    folder = Path(__file__).parent
    for path in [*sorted(folder.glob("*.py")), checkout() / "lab_utils" / "models.py"]:
        if path.stem in ("arms", "models", "peers", "roofline", "speed", "worker"):
            code.update(path.read_bytes())
    gpu = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if here["gpus"] else None}
    measured = {"net": setup.net, "scale": asdict(scale), "rounds": ROUNDS, "code": code.hexdigest()[:16]}
    return {"machine": here["label"], "python": here["python"], **gpu, "versions": versions} | measured


def load_result(out: Path, key: dict[str, object]) -> dict[str, Any]:
    """Returns an earlier call's result if it has the same key, otherwise an empty one; a different one is kept."""
    curve = {"lr": CURVE_LR, "batches": CURVE_BATCHES, "scale": CURVE_SCALE, "limit": LIMIT}
    fresh = {"key": key, "curve": curve, "curves": {}, "measurements": [], "groups": [], "profiles": []}
    try:
        found = json.loads(read_bounded(out, 16 * 2**20))
        if found.get("key") == json.loads(json.dumps(key)):
            return found
    except FileNotFoundError:
        return fresh
    except (OSError, ValueError, AttributeError):
        pass
    out.replace(out.with_suffix(".old.json"))
    return fresh


def list_plan(stem: str, batches: Sequence[int], arms: Sequence[str], dry: bool) -> list[Group]:
    """Returns the groups in the order of their value; with ``dry`` those of one small batch size."""
    order = [(stem or "imagenet", *one) for one in ([(8, "eager"), (8, "rest")] if dry else ORDER)]
    if not stem and not dry:
        order += [("cifar", 128, "eager"), ("cifar", 128, "compiled")]
    order = [one for one in order if not batches or one[1] in batches]
    groups = [Group(*one, tuple(arm for arm in GROUPS[one[2]] if not arms or arm in arms)) for one in order]
    return [group for group in groups if group.arms]


def describe_here(device: torch.device) -> dict[str, Any]:
    """Returns the machine's facts, its label, and the driver's version."""
    here = machine.describe()
    driver = ""
    if device.type == "cuda":
        try:
            driver = query_smi("gpu=driver_version")[0][0]
        except (OSError, IndexError):
            driver = "not known"
    return asdict(here) | {"label": here.label, "driver": driver}


def add_roofline(result: dict[str, Any], plan: Sequence[Group], gpu: str, dry: bool) -> None:
    """Adds what the data sheet allows, for the batch sizes of the plan; of a GPU without one, nothing.

    The rehearsal computes with an H200's.
    """
    sheet = SHEETS["H200"] if dry else find_sheet(gpu)
    result["sheet"] = sheet and {"flops": sheet[0], "bytes": sheet[1]}
    for group in plan if sheet else ():
        rates = result.setdefault("roofline", {}).setdefault(group.stem, {})
        if str(group.batch) not in rates:
            rates[str(group.batch)] = predict(result["key"]["net"], group.stem, group.batch, sheet)


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.speed", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=read_option, required=True, help="the JSON file to write, and to go on from")
    parser.add_argument("--dry", action="store_true", help="rehearse on a CPU, with a tiny network")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop before so many are over (default: 240)")
    parser.add_argument("--batches", type=int, nargs="+", default=[], metavar="N", help="only these batch sizes")
    parser.add_argument("--arms", nargs="+", default=[], metavar="ARM", choices=sorted(ARMS), help="only these arms")
    parser.add_argument("--stem", choices=SHOWN, help="default: lab 1's first, imagenet; then cifar at batch 128")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing, prints the goals; returns the exit status.

    Raises:
        LabError: There is no GPU, and it is no rehearsal.
    """
    args = read_arguments(arguments)
    started = time.monotonic()
    device = torch.device("cpu") if args.dry else machine.device()
    if device.type != "cuda" and not args.dry:
        raise LabError("There is no GPU to measure.", cause="torch sees none", fix="rehearse on a CPU: --dry")
    # Several processes compile at once.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, machine.describe().cores // 6)))
    scale = DRY if args.dry else Scale()
    setup = Setup("tiny" if args.dry else "resnet152", args.stem or "imagenet", device)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    session = Session(args.out, setup, scale, args.seconds, describe_here(device))
    session.end -= time.monotonic() - started
    plan = list_plan(args.stem, args.batches, args.arms, args.dry)
    done = {tuple(one) for one in session.result["groups"]}
    missing = [group for group in plan if (group.stem, group.batch, group.name) not in done]
    try:
        add_roofline(session.result, plan, session.result["machine"]["label"], args.dry)
        while missing and session.left() >= (0 if args.dry else LEAST[missing[0].name]):
            session.measure(missing[0])
            missing.pop(0)
    except TimeIsUpError:
        pass
    finally:
        session.close()
        session.result["missing"] = [[group.stem, group.batch, group.name] for group in missing]
        session.save()
    print_table(judge(session.result, args.stem or "imagenet"))
    for row in session.result["measurements"]:
        if row["status"]:
            print(f"{row['arm']}, batch {row['batch']:,}: {row['status']}")
    print(f"{len(missing)} of {len(plan)} groups are missing: call again" if missing else "all groups are measured")
    return TIME_IS_UP if missing else 0


if __name__ == "__main__":
    sys.exit(main())
