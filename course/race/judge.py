"""Runs one lap: starts the script, takes the time, evaluates what it saved, and writes the record.

Nothing that the script says counts. The judge's clock runs in the judge's process; it ends a lap when it sees the last
saved weights. Only afterwards it draws or opens the images on which it evaluates them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from course.race import images, records, saved, sealed
from course.race.evaluate import evaluate
from course.race.leagues import find_threshold
from lab_common import LabError
from lab_common.files import read_bounded
from lab_common.text import clean
from lab_utils import data
from lab_utils.data.pack import MANIFEST
from nodelaunch import DataFolder, JobError, TorchrunJob, Usage, Watch, local_nodes, watch
from nodelaunch.backends.nodes import Node
from nodelaunch.running import RunningJob

RUN = "run"  # below a lap's folder: all that the script may read beside its code
SAVED = "saved/weights.pt"  # below that, on the node of rank 0
LIMIT = 3600.0  # seconds of a lap in any case
MOST_VERSIONS = 40  # that are kept for the curve
CURVE = 200  # samples of the devices that a record keeps, of each node
PATIENCE = 20.0  # seconds for a program on a node that is asked to end or to answer


@dataclass
class _Follower:
    """Collects the versions of the saved weights, each with the seconds at which it was seen."""

    folder: Path
    begin: float = 0.0
    versions: list[tuple[float, Path]] = field(default_factory=list)
    count: int = 0

    def follow(self, process: subprocess.Popen) -> None:
        """Reads until the program on the node ends."""
        with contextlib.suppress(ValueError, OSError):  # the pipe was closed under us
            while line := process.stdout.readline():
                seconds, size = time.monotonic() - self.begin, int(line)
                path = self.folder / f"{self.count:06d}.pt"
                path.write_bytes(process.stdout.read(size))
                self.versions.append((seconds, path))
                self.count += 1
                if len(self.versions) > MOST_VERSIONS:  # every second one goes; the newest stays
                    for _, old in self.versions[-2::-2]:
                        old.unlink()
                    self.versions = self.versions[::-2][::-1]


@dataclass(frozen=True)
class _Drive:
    """What one run of the script left behind.

    Attributes:
        versions: Of the weights: seconds since the launch, and the file.
        usage: Seconds since the launch, number of the node, busy share of its devices.
        span: Seconds since the launch at which all ranks had started, and at which the last weights were seen.
    """

    versions: list[tuple[float, Path]]
    usage: list[tuple[float, int, float]]
    span: tuple[float, float]


def run_lap(
    script: str | Path,
    args: Sequence[object] = (),
    *,
    nodes: Sequence[Node] = (),
    nproc_per_node: int = 1,
    league: str = "sprint",
    within: float | None = None,
    name: str = "",
    files: Sequence[str | Path] = (),
    compare: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Runs a script as one lap of the race, and keeps its record.

    Args:
        script: It gets ``--checkpoint FILE`` beside ``args``, and saves there a ``state_dict`` of a network of
            ``lab_utils.models``, or a dictionary that has one under ``model``.
        args: Its own arguments.
        nodes: As of ``TorchrunJob``, on this machine or reached by SSH; this machine as one node where none is given.
        nproc_per_node: Processes on each node.
        league: ``sprint`` or ``distance``: reach its top-1 in the least time. Ignored with ``within``.
        within: Reach the most top-1 in so many seconds; the judge ends the job then.
        name: Who races.
        files: What the script imports or reads beside itself, text; with it at most 64 KiB.
        compare: Whether to run the script on the first node alone before, for speed-up and efficiency.
        show: Whether to print what the ranks print.

    Returns:
        The record, as it is kept; its keys are told in the guide of the race.

    Raises:
        JobError: The script failed.
        LabError: It saved no weights, or what it saved cannot be evaluated, or another lap runs.
    """
    nodes, home = list(nodes or local_nodes(1)), records.find_home()
    if any(node.backend != "nodelaunch.backends.direct" for node in nodes):
        fix = "race on this machine, or on hosts: LAB_NODES=hostA,hostB"
        raise LabError("The race cannot follow the saved weights on Slurm.", where="run_lap(nodes=…)", fix=fix)
    if compare and len(nodes) < 2:
        raise LabError("One node cannot be compared with itself.", where="run_lap(compare=True)", fix="name two nodes")
    dataset = data.load()
    threshold = None if within else find_threshold(dataset, league)
    with records.hold_race(home):
        lap = f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        folder = home / lap
        folder.mkdir()
        try:
            code = _copy_code([Path(script), *map(Path, files)], folder / records.CODE)
            mapping, counts = images.draw_lap(dataset, folder / RUN / "data")
            placed = [_place(node, lap, folder) for node in nodes]
            facts = [_ask(node) for node in nodes]
            job = {"script": Path(script).name, "args": [str(one) for one in args], "pack": dataset.name}
            drives = [
                _drive(folder, job, part, nproc_per_node=nproc_per_node, within=within, show=show, facts=facts)
                for part in ([placed[:1], placed] if compare else [placed])
            ]
            record = {
                "format": records.FORMAT,
                "lap": lap,
                "name": str(name)[:60],
                "began": began,
                "script": job["script"],
                "args": job["args"],
                "league": "" if within else league,
                "threshold": threshold,
                "within": within,
                "code": code,
                **_judge(folder, drives, dataset, mapping, counts, threshold=threshold, nodes=len(nodes)),
                **_describe(nodes, facts, nproc_per_node, drives[-1]),
                "previous": records.find_newest(home),
            }
            record["device_seconds"] = record["seconds"] * record["devices"]
            return records.write_record(folder, record)
        except JobError as error:
            raise _explain(error) from error
        finally:
            # Of a lap without a record nothing stays; of one that has it, neither its data nor the versions.
            whole = (folder / records.RECORD).exists()
            for path in [folder / RUN, folder / "versions"] if whole else [folder]:
                shutil.rmtree(path, ignore_errors=True)
            for node in nodes:
                _clean(node, lap)


def _explain(error: JobError) -> LabError:
    """Says what it means that a script was refused a file; any other error stays what it is."""
    failure = error.result.failure
    if "PermissionError" not in failure.message:
        return error
    return LabError(
        f"The lap was stopped: {clean(failure.message, 300)}.",
        where=failure.location,
        cause="a lap reads the images that the judge gave it, its own code, and what is installed; nothing else",
        fix="train with data.load() alone, and bring files of code by files=",
        log=error.result.log,
    )


def _copy_code(paths: Sequence[Path], folder: Path) -> dict[str, str]:
    """Copies the script and its files beside each other, so that what is kept is what runs; returns their hashes."""
    folder.mkdir()
    hashes, left = {}, records.CODE_BYTES
    for path in paths:
        try:
            content = read_bounded(path, left)
            content.decode()
        except (OSError, ValueError) as error:
            cause = f"the code of a lap is text, {records.CODE_BYTES // 1024} KiB in all"
            where, fix = clean(path, 300), "leave weights and other data out of it"
            raise LabError(f"{clean(path.name, 60)} cannot race.", where=where, cause=cause, fix=fix) from error
        left -= len(content)
        (folder / path.name).write_bytes(content)
        hashes[path.name] = records.hash_file(folder / path.name, records.CODE_BYTES)
    return hashes


def _place(node: Node, lap: str, folder: Path) -> Node:
    """The node with the lap's data as its LAB_DATA."""
    return replace(node, data=f"{folder / RUN if node.here else _find_folder(node, lap)}/data")


def _find_folder(node: Node, lap: str) -> str:
    """The lap's folder on a node that is another machine."""
    return f"{node.folder}/race/{lap}"


def _start(node: Node, module: Any, *arguments: str) -> subprocess.Popen:
    """Starts the program of a module that needs the standard library alone."""
    return node.popen([node.python, "-c", Path(module.__file__).read_text(), *arguments])


def _ask(node: Node) -> dict[str, Any]:
    """What a node is: the answer of ``sealed.describe`` there."""
    process = _start(node, sealed, "--describe")
    try:
        out, _ = process.communicate(timeout=PATIENCE)
        return json.loads(out.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        process.kill()
        process.wait()
        raise LabError(f"{node.name} did not describe itself.", where=node.name, fix="job.preflight()") from error


def _clean(node: Node, lap: str) -> None:
    """Takes away what a lap left on another machine."""
    if not node.here:
        with contextlib.suppress(OSError, LabError, subprocess.SubprocessError):
            node.popen(["rm", "-rf", "--", _find_folder(node, lap)]).communicate(timeout=PATIENCE)


def _drive(
    folder: Path,
    job: dict[str, Any],
    nodes: list[Node],
    *,
    nproc_per_node: int,
    within: float | None,
    show: bool,
    facts: list[dict[str, Any]],
) -> _Drive:
    """Runs the script on nodes that have the lap's data, and follows what it saves."""
    head, versions = nodes[0], folder / "versions" / str(len(nodes))
    versions.mkdir(parents=True)
    pack = f"packed/{job['pack']}"
    where = DataFolder(folder / RUN / "data" / pack, pack, MANIFEST, copy_data=True)
    # Beside the data, which is the only place that the script may read; a new one for each run.
    target = f"{Path(head.data).parent}/{len(nodes)}/{SAVED}"
    script = Path(sealed.__file__)
    files = sorted((folder / records.CODE).iterdir())
    options = {"nodes": nodes, "nproc_per_node": nproc_per_node, "data": where, "limit": LIMIT, "rank_order": "nodes"}
    if not all(node.here for node in nodes):
        # What is copied once is not copied again: the lap's time has no copying in it.
        TorchrunJob(script, ["--describe"], **{**options, "nproc_per_node": 1}, program=["python"]).run(show=False)
    train = TorchrunJob(script, [job["script"], *job["args"], "--checkpoint", target], **options, files=files)
    train.preflight()
    follower, process = _Follower(versions), _start(head, saved, target)
    try:
        if process.stdout.readline() != b"ready\n":
            raise LabError("The saved weights cannot be followed.", where=f"{head.name}: {target}")
        with watch(nodes) as seen:
            watched = time.monotonic()
            follower.begin = time.monotonic()
            thread = threading.Thread(target=follower.follow, args=(process,), daemon=True)
            thread.start()
            running = train.start(show=show)
            joined = _wait(running, None if within is None else follower.begin + within)
            process.stdin.close()
            thread.join(PATIENCE)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    kept = [one for one in follower.versions if within is None or one[0] <= within]
    if not kept:
        fix = "save the weights to the file that --checkpoint names, with torch.save(…)"
        raise LabError("The script saved no weights.", where=job["script"], cause="a lap ends with them", fix=fix)
    for node, fact in zip(nodes, facts, strict=False):  # a container's share counts, where there is one
        fact["cores"] = min([fact["cores"], *(one.cores for one in seen.samples if one.node == node.name)])
    span = joined, kept[-1][0]
    return _Drive(kept, _list_usage(seen, nodes, facts, watched - follower.begin, nproc_per_node), span)


def _wait(running: RunningJob, end: float | None) -> float:
    """Waits for the end of a job, or ends it in time; returns when all ranks had started, in seconds."""
    try:
        result = running.wait(None if end is None else max(0.0, end - time.monotonic()))
    except TimeoutError:
        running.stop()
        result = running.wait(check=False)
    return result.seconds["joined"] or 0.0


def _list_usage(
    seen: Watch, nodes: list[Node], facts: list[dict[str, Any]], offset: float, processes: int
) -> list[tuple[float, int, float]]:
    """Samples as (seconds since the launch, number of the node, busy share of the devices that the node's job has)."""
    found = []
    for number, (node, fact) in enumerate(zip(nodes, facts, strict=False)):
        samples = [one for one in seen.samples if one.node == node.name]
        # By the node's own clock, which may be wrong: only differences count.
        first = samples[0].time if samples else 0.0
        shares = [(one.time - first + offset, number, _measure(one, node, fact, processes)) for one in samples]
        step = max(1, len(shares) // CURVE)
        found += [share for share in shares[::step] if share[2] is not None]
    return sorted(found)


def _measure(sample: Usage, node: Node, fact: dict[str, Any], processes: int) -> float | None:
    if fact["gpus"]:
        busy = sorted((gpu.busy for gpu in sample.gpus), reverse=True)[:processes]
        return statistics.mean(busy) if busy else None
    if sample.job_busy is None:
        return None
    # Nodes of one machine have a share of its cores each.
    return min(1.0, sample.job_busy * sample.cores / _count_cores(node, sample.cores))


def _count_cores(node: Node, cores: float) -> float:
    return max(1, int(cores) // node.together) if node.here else cores


def _judge(
    folder: Path,
    drives: list[_Drive],
    dataset: data.Dataset,
    mapping: list[int],
    counts: dict[str, int],
    *,
    threshold: float | None,
    nodes: int,
) -> dict[str, Any]:
    """Evaluates what was saved, and keeps the last weights."""
    seed = images.choose_seed(dataset)
    on = images.find_images(dataset, mapping, seed)
    found = [evaluate([path for _, path in drive.versions], on) for drive in drives]
    ends = [answers[-1] for answers in found]
    for end in ends:
        if isinstance(end, str):
            fix = "torch.save(model.state_dict(), …), of a network of lab_utils.models"
            raise LabError("The last saved weights cannot be evaluated.", where=records.WEIGHTS, cause=end, fix=fix)
    seconds, last = drives[-1].versions[-1]
    last.replace(folder / records.WEIGHTS)
    net, top1 = ends[-1]
    curve = [(when, answer[1]) for (when, _), answer in zip(drives[-1].versions, found[-1], strict=True) if answer[1:]]
    alone = {"seconds": drives[0].versions[-1][0], "top1": ends[0][1]} if len(drives) > 1 else None
    speed_up = alone["seconds"] / seconds if alone else None
    return {
        "data": {
            "name": dataset.name,
            "source": dataset.source,
            "train": counts["train"],
            "valid": len(on.labels),
            "classes": on.classes,
            "sha256": images.hash_images(on),
            "seed": seed,
            "mapping": mapping,
        },
        "weights": records.hash_file(folder / records.WEIGHTS, records.WEIGHTS_BYTES),
        "net": net,
        "seconds": seconds,
        "top1": top1,
        "reached": threshold is None or top1 >= threshold,
        "curve": [one for one in curve if not isinstance(one[1], str)],
        "one_node": alone,
        "speed_up": speed_up,
        "efficiency": speed_up and speed_up / nodes,
    }


def _describe(nodes: list[Node], facts: list[dict[str, Any]], processes: int, drive: _Drive) -> dict[str, Any]:
    """Hardware, its class, and how busy it was while the script trained."""
    count, first = len(nodes), facts[0]
    cores = [_count_cores(node, fact["cores"]) for node, fact in zip(nodes, facts, strict=True)]
    used = [gpu for fact in facts for gpu in fact["gpus"][:processes]]
    many = f"{count} nodes{' on one machine' if all(node.here for node in nodes) else ''}, " if count > 1 else ""
    if used:
        what = f"{many}{len(used)} GPU{'s' if len(used) > 1 else ''}: {', '.join(sorted(set(used)))}"
    else:
        each = " each" if count > 1 else ""
        what = f"{many}{min(cores)} CPU core{'s' if min(cores) > 1 else ''}{each}"
    begin, end = drive.span
    busy = [share for when, _, share in drive.usage if begin <= when <= end]
    return {
        "nodes": count,
        "processes": count * processes,
        "device": "cuda" if used else "cpu",
        "hardware": ", ".join(used) if used else f"{sum(cores)} cores of {first['cpu']}",
        "class": what,
        "devices": len(used) or sum(cores),
        "busy": statistics.mean(busy) if busy else None,
        "usage": [(round(when, 2), node, round(share, 3)) for when, node, share in drive.usage if when <= end],
        "versions": first["versions"],
        "sealed": all(fact["landlock"] for fact in facts),
    }


def tell(record: dict[str, Any]) -> str:
    """A lap in two lines."""
    goal = (
        f"within {record['within']:g} s" if record["within"] else f"{record['league']}, {record['threshold']:.0%} top-1"
    )
    end = "" if record["within"] else (", reached" if record["reached"] else ", NOT reached")
    busy = "" if record["busy"] is None else f", {record['busy']:.0%} busy"
    lines = [
        f"{goal}{end}: {record['top1']:.1%} on {record['data']['valid']:,} images after {record['seconds']:.1f} s",
        f"{record['class']}, {record['device_seconds']:.0f} device-seconds{busy}; lap {record['lap']}",
    ]
    if record["speed_up"]:
        part = record["speed_up"] / record["nodes"]
        lines.append(f"{record['speed_up']:.2f} times as fast as one node, efficiency {part:.0%}")
    return "\n".join(lines)
