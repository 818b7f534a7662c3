"""Measures training steps of ResNet-152 on 32×32 images, ours against those of others, each against its own kind.

``python -m benchmarks.gpu.speed --out FILE.json`` measures group by group, the most valuable first: the arms of a group
get ready one after the other and then take turns. Before that, the losses of 30 steps of each of our arms have to lie
within 2 % of those of IEEE float32 at the same batch size, in each step; an arm that does not is not timed. FILE.json
is written after each group, and another call with the same machine, versions and code goes on with the missing groups.
Exit status: 0 when all is measured, 75 when the time was up before.

An arm has a process of its own, since PyTorch keeps the plan of a convolution whether it was searched for or taken from
heuristics: in one process the first arm would choose for all. Data are random uint8 images on the GPU.

For the comparison of losses the learning rate is ``CURVE_LR``, and the last BatchNorm of each residual block is scaled
by ``CURVE_SCALE``. From the usual initial weights no arm could be told from another: two runs in float32 that differ in
nothing but the order of their sums were 8 to 80 % apart within 30 steps, at learning rates from 0.0003 to 0.01
(ResNet-152, batch 64, on a CPU). As it is they were 0.2 % apart and bfloat16 was off by 0.9 %; a learning rate 1.1
times as high was off by 10 %, no momentum by 290 % (batch 32, on a CPU).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import TIME_IS_UP, write_json
from benchmarks.gpu.arms import ARMS, KINDS, LR, REFERENCE, Arm, Batch, Setup, Training, make_reference
from benchmarks.gpu.roofline import SHEETS, find_sheet, predict
from course.reference import describe_machine
from lab_common import LabError
from lab_common.commandline import read_option
from lab_utils import machine
from lab_utils.timing import synchronize

ROUNDS = 6  # as few as a comparison needs
POOL = 4  # batches on the device, which steps take in turn
LIMIT = 0.02  # of the losses, in each step
CURVE_LR, CURVE_BATCHES, CURVE_SCALE = 3e-4, 2, 0.1
TOP = 15  # kernels of a profile
ORDER = [("imagenet", batch, kind) for batch in (1024, 128) for kind in KINDS]
ORDER += [("cifar", 128, kind) for kind in KINDS]
# Seconds that have to be left for a group.
LEAST = {"eager": 40.0, "graph": 40.0, "compiled": 90.0, "compiled graph": 90.0}
FULL, DRY = (
    {"warmup": 20, "curve": 30, "seconds": 0.4, "fewest": 5},
    {"warmup": 1, "curve": 2, "seconds": 0, "fewest": 2},
)


def make_pool(batch: int, device: torch.device) -> list[Batch]:
    """Returns random uint8 images (batch, 3, 32, 32) and labels on the device, the same in every process."""
    generator = torch.Generator().manual_seed(23)
    return [
        (
            torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8, generator=generator).to(device),
            torch.randint(0, 10, (batch,), generator=generator).to(device),
        )
        for _ in range(POOL)
    ]


def run_steps(training: Training, pool: Sequence[Batch], count: int) -> list[torch.Tensor]:
    """Trains on the batches in turn; returns the losses, on the device."""
    return [training.step(*pool[index % len(pool)]).clone() for index in range(count)]


def time_steps(training: Training, pool: Sequence[Batch], count: int) -> float:
    """Returns the seconds of a step, of ``count`` steps after three, by CUDA's events on a GPU."""
    device = pool[0][0].device
    run_steps(training, pool, 3)
    if device.type != "cuda":
        start = time.perf_counter()
        run_steps(training, pool, count)
        return (time.perf_counter() - start) / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run_steps(training, pool, count)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def find_curve(training: Training, pool: Sequence[Batch], count: int) -> list[float]:
    """Returns the losses of some steps from weights at which float32 does not depend on the order of its sums."""
    first = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    calm = {name: tensor.clone() for name, tensor in first.items()}
    # A Bottleneck's last BatchNorm is bn3, a BasicBlock's bn2.
    ends = ("bn3.weight",) if any(name.endswith("bn3.weight") for name in calm) else ("bn2.weight",)
    for name, tensor in calm.items():
        if name.endswith(ends):
            tensor.fill_(CURVE_SCALE)
    training.load(calm)
    training.set_lr(CURVE_LR)
    losses = [float(loss) for loss in run_steps(training, pool[:CURVE_BATCHES], count)]
    training.load(first)
    training.set_lr(LR)
    return losses


def prepare(
    arm: Arm, setup: Setup, batch: int, scale: dict[str, float]
) -> tuple[Training, list[Batch], dict[str, Any]]:
    """Builds an arm, captures its graph, takes its curve and warms up; returns it with its batches and its facts."""
    arm.set_globals()
    began = time.perf_counter()
    training = arm.make(setup)
    pool = [(training.prepare(images), labels) for images, labels in make_pool(batch, setup.device)]
    first = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    if arm.make is make_reference:
        return training, pool, {"losses": find_curve(training, pool, int(scale["curve"]))}
    if arm.kind.endswith("graph"):
        training.capture(pool[0])
        training.load(first)
    losses = find_curve(training, pool, int(scale["curve"])) if arm.ours else []
    run_steps(training, pool, 1)  # algorithms are chosen in it, whose memory is no step's
    synchronize(setup.device)
    cuda = setup.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    last = run_steps(training, pool, int(scale["warmup"]))[-1]
    finite = math.isfinite(float(last))
    step = (time.perf_counter() - start) / scale["warmup"]
    peak = (training.peak or torch.cuda.max_memory_allocated()) if cuda else None
    facts = {"losses": losses, "step": step, "peak_bytes": peak, "finite": finite}
    return training, pool, facts | {"build_seconds": start - began}


def profile(training: Training, pool: Sequence[Batch], steps: int = 3) -> dict[str, Any]:
    """Returns the kernels (on a CPU the operators) that take the most time, with their shares, and how many run."""
    cuda = pool[0][0].is_cuda
    activities = [torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        run_steps(training, pool, steps)
        synchronize(pool[0][0].device)
    attribute = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [one for one in profiler.key_averages() if getattr(one, attribute)]
    total = sum(getattr(one, attribute) for one in events) or 1.0
    events.sort(key=lambda one: getattr(one, attribute), reverse=True)
    top = [
        {"name": one.key[:120], "calls": one.count / steps, "share": getattr(one, attribute) / total}
        for one in events[:TOP]
    ]
    return {"top": top, "milliseconds": total / 1e3 / steps, "calls": sum(one.count for one in events) / steps}


def serve(connection: Connection, arm: Arm, setup: Setup, batch: int, scale: dict[str, float]) -> None:
    """A process of one arm: sends its facts, then answers each number of steps with the seconds of one."""
    if setup.device.type == "cpu":
        torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        try:
            training, pool, facts = prepare(arm, setup, batch, scale)
            connection.send(facts)
            while True:
                asked = connection.recv()
                connection.send(profile(training, pool) if asked == "profile" else time_steps(training, pool, asked))
        except (RuntimeError, ValueError, ImportError) as error:
            connection.send({"error": f"{type(error).__name__}: {error}".strip()[:600]})


class Host:
    """An arm in a process of its own."""

    def __init__(self, arm: Arm, setup: Setup, batch: int, scale: dict[str, float]) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, arm, setup, batch, scale), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, end: float) -> Any:
        """Waits for an answer; one with ``error`` where the process ended.

        Raises:
            TimeoutError: The time was up before.
        """
        try:
            if self.connection.poll(max(0.0, end - time.monotonic())):
                return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            return {"error": f"its process ended with status {self.process.exitcode}"}
        raise TimeoutError

    def ask(self, what: int | str, end: float) -> Any:
        """Sends a request and waits for the answer."""
        with contextlib.suppress(OSError):
            self.connection.send(what)
        return self.receive(end)

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def find_deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative difference of a step's loss; infinite if one is not finite or is missing."""
    pairs = list(zip(losses, expected, strict=False))
    if len(losses) != len(expected) or not all(math.isfinite(one) for pair in pairs for one in pair):
        return math.inf
    return max((abs(one - other) / abs(other) for one, other in pairs), default=math.inf)


def find_obstacle(arm: Arm, device: torch.device) -> str:
    """Explains why an arm cannot run here; "" if it can."""
    if arm.kind != "eager" and device.type != "cuda":
        return "not on a CPU"
    return f"{arm.package} is not installed" if arm.package and not importlib.util.find_spec(arm.package) else ""


def measure_group(result: dict, setup: Setup, batch: int, kind: str, scale: dict[str, float], end: float) -> None:
    """Measures the arms of a kind in turn and adds their rows, and the profile of our fastest, to the result.

    Raises:
        TimeoutError: The time was up before; of the group only the losses of float32 are kept.
    """
    place = {"stem": setup.stem, "batch": batch, "group": kind}
    rows, hosts = [], {}
    try:
        if (known := f"{setup.stem}/{batch}") not in result["curves"]:
            reference = hosts["reference"] = Host(REFERENCE, setup, batch, scale)
            result["curves"][known] = reference.receive(end)
            reference.close()
        curve = result["curves"][known]
        for name, arm in ((name, arm) for name, arm in ARMS.items() if arm.kind == kind):
            row = place | {"arm": name, "ours": arm.ours, "source": arm.source, "seconds": [], "fidelity": None}
            rows.append(row | {"status": find_obstacle(arm, setup.device)})
            if rows[-1]["status"]:
                continue
            hosts[name] = Host(arm, setup, batch, scale)
            facts = hosts[name].receive(end)
            rows[-1].update({"status": facts.pop("error", "")} | facts)
            if arm.ours and not rows[-1]["status"]:
                off = find_deviation(facts["losses"], curve.get("losses", []))
                rows[-1]["fidelity"] = off if math.isfinite(off) else None
                refused = f"refused: its losses are off by {off:.1%}, {LIMIT:.0%} is the most"
                rows[-1]["status"] = "" if off <= LIMIT else curve.get("error", refused)
        for number in range(ROUNDS):
            for row in [one for one in rows if not one["status"]][:: -1 if number % 2 else 1]:
                count = max(scale["fewest"], min(200, math.ceil(scale["seconds"] / max(row["step"], 1e-6))))
                answer = hosts[row["arm"]].ask(int(count), end)
                if isinstance(answer, dict):
                    row["status"] = answer["error"]
                else:
                    row["seconds"].append(answer)
        result["measurements"] += rows
        result["groups"].append(list(place.values()))
        ours = [one["arm"] for one in rows if one["ours"] and not one["status"]]
        with contextlib.suppress(TimeoutError):  # what was measured stays
            result["profiles"] += [place | {"arm": arm} | hosts[arm].ask("profile", end) for arm in ours]
    finally:
        for host in hosts.values():
            host.close()


def make_key(label: str, net: str, scale: dict[str, float]) -> dict[str, object]:
    """Returns the facts that two calls must share for the later to go on where the earlier stopped."""
    versions = {}
    for package in ("torch", "torchvision", "triton", "timm"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    code = hashlib.sha256(b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("arms", "speed")))
    key = {"machine": label, "versions": versions, "net": net, "scale": scale}
    return key | {"rounds": ROUNDS, "code": code.hexdigest()[:16]}


def load_result(out: Path, key: dict[str, object]) -> dict[str, Any]:
    """Returns an earlier call's result if it has the same key, otherwise an empty one; another is kept beside it."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(out.read_bytes())
        if found.get("key") == json.loads(json.dumps(key)):
            return found
        out.replace(out.with_suffix(".old.json"))
    return {"key": key, "curves": {}, "measurements": [], "groups": [], "profiles": []}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing; returns the exit status.

    Raises:
        LabError: There is no GPU, and it is no rehearsal.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.speed", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=read_option, required=True, help="the JSON file to write, and to go on from")
    parser.add_argument("--dry", action="store_true", help="rehearse on a CPU, with a tiny network")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop before so many are over (default: 240)")
    args = parser.parse_args(arguments)
    end = time.monotonic() + args.seconds - 6  # in which processes end and the file is written
    device = torch.device("cpu") if args.dry else machine.device()
    if device.type != "cuda" and not args.dry:
        raise LabError("There is no GPU to measure.", cause="torch sees none", fix="rehearse on a CPU: --dry")
    scale, net = (DRY, "tiny") if args.dry else (FULL, "resnet152")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    here = describe_machine()
    result = load_result(args.out, make_key(here["label"], net, scale)) | {"machine": here}
    result["when"] = datetime.now(UTC).isoformat(timespec="seconds")
    sheet = SHEETS["H200"] if args.dry else find_sheet(here["label"])
    plan = [("imagenet", 8, "eager")] if args.dry else ORDER
    for stem, batch, kind in plan:
        if list((stem, batch, kind)) in result["groups"] or end - time.monotonic() < (0 if args.dry else LEAST[kind]):
            continue
        print(f"{stem} stem, batch {batch:,}, {kind}", flush=True)
        try:
            measure_group(result, Setup(net, stem, device), batch, kind, scale, end)
        except TimeoutError:
            break
        if sheet:
            roofline = result.setdefault("roofline", {}).setdefault(stem, {})
            roofline[str(batch)] = predict(net, stem, batch, sheet)
        write_json(args.out, result)
    for row in result["measurements"]:
        rates = [row["batch"] / seconds for seconds in row["seconds"]]
        found = row["status"] or f"{min(rates):,.0f} to {max(rates):,.0f} images/s"
        print(f"{row['arm']}, batch {row['batch']:,}: {found}")
    missing = sum(list(one) not in result["groups"] for one in plan)
    print(f"{missing} of {len(plan)} groups are missing: call again" if missing else "all groups are measured")
    return TIME_IS_UP if missing else 0


if __name__ == "__main__":
    sys.exit(main())
