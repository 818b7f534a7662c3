"""Runs the script once, on nodes that have the lap's images, and follows the weights that it saves."""

from __future__ import annotations

import hashlib
import math
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course.race import records, saved, sealed
from lab_common import LabError
from lab_utils.data.packing import MANIFEST
from nodelaunch import DataFolder, TorchrunJob, Usage, Watch, watch
from nodelaunch.backends.nodes import Node
from nodelaunch.program import make_command
from nodelaunch.running import RunningJob

# Below a lap's folder: all that the script may read beside its code; what the judge has received; the code under names
# that nothing imports.
RUN, VERSIONS, HIDDEN = "run", "versions", "hidden"
LIMIT = 3600.0  # seconds of a lap in any case
MOST_VERSIONS = 40  # that are kept for the curve
PATIENCE = 20.0  # seconds for a program on a node that is asked to end or to answer


@dataclass(frozen=True)
class Lap:
    """A lap to run.

    Attributes:
        folder: The lap's folder on this machine: it has ``code``, and ``run/data`` with the images.
        script: The script's name in ``code``.
        args: The script's own arguments.
        pack: The name of the pack with the images.
        facts: The result of ``sealed.describe`` on each node.
        nproc_per_node: Processes on each node.
        within: Seconds after which the job is ended; None lets it end by itself.
        show: True to print the ranks' output.
    """

    folder: Path
    script: str
    args: list[str]
    pack: str
    facts: list[dict[str, Any]]
    nproc_per_node: int
    within: float | None
    show: bool


@dataclass
class _Follower:
    """Collects the versions of the saved weights: the seconds at which each was seen, its file, and its SHA-256."""

    folder: Path
    begin: float = 0.0
    versions: list[tuple[float, Path, str]] = field(default_factory=list)
    count: int = 0
    error: Exception | None = None

    def follow(self, process: subprocess.Popen) -> None:
        """Reads until the program on the node ends."""
        try:
            while line := process.stdout.readline():
                seconds, size = time.monotonic() - self.begin, int(line)
                path, content = self.folder / f"{self.count:06d}.pt", process.stdout.read(size)
                path.write_bytes(content)
                self.versions.append((seconds, path, hashlib.sha256(content).hexdigest()))
                self.count += 1
                if len(self.versions) > MOST_VERSIONS:  # every second one goes; the newest stays
                    for _, old, _ in self.versions[-2::-2]:
                        old.unlink()
                    self.versions = self.versions[::-2][::-1]
        except (OSError, ValueError) as error:  # the disk is full, or the connection broke
            self.error = error


@dataclass(frozen=True)
class Drive:
    """The result of one run of the script.

    Attributes:
        versions: Versions of the weights: seconds since the launch, the file, its SHA-256 on arrival.
        usage: Seconds since the launch, number of the node, busy share of its devices.
        span: Seconds since the launch at which all ranks had started, and at which the last weights were seen.
    """

    versions: list[tuple[float, Path, str]]
    usage: list[tuple[float, int, float]]
    span: tuple[float, float]


def drive(lap: Lap, nodes: list[Node], begin: Callable[[], None]) -> Drive:
    """Runs the script on nodes whose LAB_DATA is the lap's; calls ``begin`` just before.

    Raises:
        JobError: The script failed.
        LabError: It saved no weights.
    """
    # Beside the data, which is the only place that the script may read; a new one for each run.
    head, versions = nodes[0], lap.folder / VERSIONS / str(len(nodes))
    target = f"{Path(head.data).parent}/{len(nodes)}/saved/weights.pt"
    versions.mkdir(parents=True)
    job = _prepare(lap, nodes, target)
    follower, process = _Follower(versions), head.popen(make_command(head.python, saved, target))
    try:
        if process.stdout.readline() != b"ready\n":
            fix = "see that the disk has room there, then run the lap again"
            raise LabError("The saved weights cannot be followed.", where=f"{head.name}: {target}", fix=fix)
        begin()
        with watch(nodes) as seen:
            follower.begin = time.monotonic()
            thread = threading.Thread(target=follower.follow, args=(process,), daemon=True)
            thread.start()
            joined = _wait(job.start(show=lap.show), None if lap.within is None else follower.begin + lap.within)
            process.stdin.close()
            thread.join(PATIENCE)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    if follower.error or thread.is_alive():
        cause, fix = str(follower.error or "they did not come in time"), "free some space, then run the lap again"
        raise LabError("Saved weights were lost.", where=versions, cause=cause, fix=fix)
    kept = [one for one in follower.versions if lap.within is None or one[0] <= lap.within]
    if not kept:
        fix = "save the weights to the file that --checkpoint names, with torch.save(…)"
        when = "" if lap.within is None else f" within {lap.within:g} s"
        raise LabError(f"The script saved no weights{when}.", where=lap.script, cause="a lap ends with them", fix=fix)
    return Drive(kept, _list_usage(seen, nodes, lap), (joined, kept[-1][0]))


def _prepare(lap: Lap, nodes: list[Node], target: str) -> TorchrunJob:
    """Makes the job, whose nodes have its data already: a lap's time includes no copying."""
    pack = f"packed/{lap.pack}"
    where = DataFolder(lap.folder / RUN / "data" / pack, pack, MANIFEST, copy_data=True)
    script, files = Path(sealed.__file__), []
    hidden = lap.folder / HIDDEN
    hidden.mkdir(exist_ok=True)
    for path in (lap.folder / records.CODE).iterdir():
        files.append(Path(shutil.copy(path, hidden / f"{sealed.HIDDEN}{path.name}")))
    options = {"nodes": nodes, "data": where, "limit": LIMIT, "rank_order": "nodes"}
    if not all(node.here for node in nodes):
        TorchrunJob(script, ["--describe"], **options, program=["python"]).run(show=False)
    options |= {"nproc_per_node": lap.nproc_per_node, "files": files}
    run = f"{lap.folder.name}-{len(nodes)}"  # in the names of the ranks' scratch folders
    job = TorchrunJob(script, [run, lap.script, *lap.args, "--checkpoint", target], **options)
    job.preflight().raise_if_red()
    return job


def _wait(running: RunningJob, end: float | None) -> float:
    """Waits for the end of a job, or ends it in time; returns the seconds until all ranks had started."""
    try:
        result = running.wait(None if end is None else max(0.0, end - time.monotonic()))
    except TimeoutError:
        running.stop()
        result = running.wait(check=False)
    return result.seconds["joined"] or 0.0


def _list_usage(seen: Watch, nodes: list[Node], lap: Lap) -> list[tuple[float, int, float]]:
    """Returns samples: (seconds since the launch, number of the node, busy share of the devices of the node's job)."""
    found, most = [], max(1, min(records.SAMPLES, records.MOST_SAMPLES // len(nodes)))
    for number, (node, fact) in enumerate(zip(nodes, lap.facts, strict=False)):
        samples = [one for one in seen.samples if one.node == node.name]
        # By the node's own clock, which may be wrong: only differences count. The watch begins at the launch.
        first = samples[0].time if samples else 0.0
        shares = [(one.time - first, number, _measure(one, node, fact, lap.nproc_per_node)) for one in samples]
        step = max(1, math.ceil(len(shares) / most))
        found += [share for share in shares[::step] if share[2] is not None]
    return sorted(found)


def _measure(sample: Usage, node: Node, fact: dict[str, Any], processes: int) -> float | None:
    if fact["gpus"]:
        busy = sorted((gpu.busy for gpu in sample.gpus), reverse=True)[:processes]
        return statistics.mean(busy) if busy else None
    if sample.job_busy is None:
        return None
    # Nodes of one machine have a share of its cores each.
    return min(1.0, sample.job_busy * sample.cores / share_cores(node, sample.cores))


def share_cores(node: Node, cores: float) -> int:
    """Returns the cores of a node's job: nodes on the same machine have a share of it each."""
    # A container may have one and a half; devices are counted whole.
    return max(1, int(cores) // (node.together if node.here else 1))
