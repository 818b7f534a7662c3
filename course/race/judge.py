"""Runs one lap: starts the script, takes the time, evaluates the saved weights, and writes the record.

Nothing that the script reports counts. The clock runs in the judge's process: a lap's time ends when the judge sees
the last saved weights. Only then does the judge draw or choose the images for their evaluation. The record is written
before the launch, as of an unfinished lap: a lap counts even if somebody interrupts it, or kills the judge.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import secrets
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from course.race import images, on_node, records
from course.race.evaluate import evaluate
from course.race.leagues import find_threshold
from lab_common import LabError, read_path
from lab_common.files import read_bounded
from lab_common.text import clean
from lab_utils import data, timing
from lab_utils.data.packing import MANIFEST
from nodelaunch import DataFolder, TorchrunJob, Usage, Watch, local_nodes, watch
from nodelaunch.backends.nodes import Node
from nodelaunch.program import make_command
from nodelaunch.running import RunningJob

LIMIT = 3600.0  # seconds of a lap in any case
PATIENCE = 20.0  # seconds for a program on a node that is asked to end or to answer
ARGUMENTS = 2000  # characters of all arguments together
# Subfolders of a lap's folder: the lap's images and what the script saves there; what the judge has received.
RUN, VERSIONS = "run", "versions"
MOST_VERSIONS = 40  # that are kept for the curve


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
    dataset: str | None = None,
    compare: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Runs a script as one lap of the race, and keeps its record.

    Args:
        script: It gets ``--checkpoint FILE`` besides ``args``, and saves there a ``state_dict`` of a network of
            ``lab_utils.models``, or a dictionary that has one under ``model``.
        args: The script's own arguments.
        nodes: As of ``TorchrunJob``, on this machine or reached by SSH; by default this machine as one node.
        nproc_per_node: Processes on each node.
        league: ``sprint`` or ``distance``: reach its top-1 in the least time. Ignored with ``within``.
        within: Reach the highest top-1 in that many seconds; then the judge ends the job.
        name: Name of the team.
        files: Text files that the script imports or reads; with the script at most 16 KiB.
        dataset: ``shapes10`` or ``cinic10``; None chooses as ``data.load`` does.
        compare: True to run the script on the first node alone first, for speed-up and efficiency.
        show: True to print the ranks' output.

    Returns:
        The stored record; ``records.PROPERTIES`` has its keys.

    Raises:
        JobError: The script failed. Its record says so under ``failed``.
        LabError: Likewise: it saved no weights, or its weights cannot be evaluated. Or nothing was launched: another
            lap runs, or the nodes are not ready.
    """
    nodes = list(nodes or local_nodes(1))
    _check(nodes, args, within=within, compare=compare)
    code, whole = _read_code(script, files), data.load(dataset)
    threshold = None if within else find_threshold(whole, league)
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    with records.hold_race(records.find_home()) as home, _open_folder(home, nodes) as folder:
        mapping, counts = images.draw_lap(whole, folder / RUN / "data")
        (folder / records.CODE).mkdir()
        for file, content in code.items():
            (folder / records.CODE / file).write_bytes(content)
        placed, facts = [_place(node, folder) for node in nodes], [_ask(node) for node in nodes]
        record = {
            "format": records.FORMAT,
            "lap": folder.name,
            "name": str(name)[:60],
            "began": began,
            "script": Path(script).name,
            "args": [str(one) for one in args],
            "league": "" if within else league,
            "threshold": threshold,
            "within": within,
            "code": _hash_code(code),
            "failed": "the judge was stopped before the lap ended",
            **records.NOTHING,
            "data": {
                "name": whole.name,
                "source": whole.source,
                "train": counts["train"],
                "valid": len(whole.valid),
                "classes": len(whole.class_names),
                "seed": None,
                "mapping": mapping,
            },
            **_describe(nodes, facts, nproc_per_node),
        }
        lap = Lap(folder, record, facts, whole.name, nproc_per_node, show)
        with _count_failure(folder, record):
            drives = [lap.drive(part) for part in ([placed[:1], placed] if compare else [placed])]
            return records.write_record(folder, record | _judge(record, folder, drives, whole) | {"failed": ""})


@contextlib.contextmanager
def _count_failure(folder: Path, record: dict[str, Any]) -> Iterator[None]:
    """Records why a launched lap did not end."""
    try:
        yield
    except BaseException as error:
        why = getattr(error, "what", "") or ("interrupted" if isinstance(error, KeyboardInterrupt) else repr(error))
        if (folder / records.RECORD).exists():
            with contextlib.suppress(OSError):  # the disk is full: the record from before the launch stays
                records.write_record(folder, record | {"failed": clean(why, 300)})
            print(f"lap {folder.name} failed, and it counts")
        raise


def run_laps(
    script: str | Path, args: Sequence[object] = (), *, count: int = 3, **options: Any
) -> list[dict[str, Any]]:
    """Runs a script until this race folder has ``count`` finished laps of it; returns their records, oldest first.

    Args:
        script: As for :func:`run_lap`.
        args: As for :func:`run_lap`.
        count: Number of finished laps to reach; those with the same code, arguments, rules, images, nodes and name
            count.
        options: As for :func:`run_lap`.

    Raises:
        LabError: As for :func:`run_lap`.
    """
    nodes = len(options.get("nodes") or [None])
    whole, within = data.load(options.get("dataset")), options.get("within")
    league = "" if within else options.get("league", "sprint")
    wanted = {
        "name": str(options.get("name", ""))[:60],
        "script": Path(script).name,
        "args": [str(one) for one in args],
        "league": league,
        "within": within,
        "threshold": find_threshold(whole, league) if league else None,
        "nodes": nodes,
        "processes": nodes * options.get("nproc_per_node", 1),
        "code": _hash_code(_read_code(script, options.get("files"))),
        "failed": "",
    }

    def suits(lap: dict[str, Any]) -> bool:
        same = all(lap[key] == value for key, value in wanted.items())
        same = same and (lap["data"]["name"], lap["data"]["valid"]) == (whole.name, len(whole.valid))
        return same and bool(lap["one_node"]) == bool(options.get("compare"))

    count = timing.limit_rounds(count)
    while True:
        found = [lap for lap in records.read_laps(records.find_home()) if suits(lap)]
        if len(found) >= count:
            return found
        run_lap(script, args, **options)


def _check(nodes: list[Node], args: Sequence[object], *, within: float | None, compare: bool) -> None:
    """Refuses nodes that cannot race, and values that no record can hold."""
    where = "run_lap(…)"
    if any(node.backend != "nodelaunch.backends.direct" for node in nodes):
        fix = "race on this machine, or on hosts: LAB_NODES=hostA,hostB"
        raise LabError("The race cannot follow the saved weights on Slurm.", where=where, fix=fix)
    if compare and len(nodes) < 2:
        raise LabError("One node cannot be compared with itself.", where=where, fix="name two nodes")
    if within is not None and not 0 < within <= LIMIT:
        fix = "within=60 is one minute"
        raise LabError(f"within= must be above 0 and at most {LIMIT:.0f} s, not {within:g}.", where=where, fix=fix)
    if isinstance(args, str) or sum(len(str(one)) for one in args) > ARGUMENTS or len(args) > 200:
        cause = f"a record holds a list of up to 200 arguments, of {ARGUMENTS} characters in all"
        raise LabError("These arguments cannot race.", where=where, cause=cause, fix='["--epochs", 4]')


def _read_code(script: str | Path, files: Sequence[str | Path] | None) -> dict[str, bytes]:
    """Reads the script and its files; returns their contents by name.

    Raises:
        LabError: One is missing or is not text, or they are too large in total.
    """
    found, left = {}, records.CODE_BYTES
    for path in map(read_path, (script, *(files or ()))):
        cause, fix = f"the code of a lap is text, {records.CODE_BYTES // 1024} KiB in all", "leave other data out of it"
        try:
            content = read_bounded(path, left)
            content.decode()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno != errno.EFBIG:
                cause, fix = error.strerror, "check the path"
            what, where = f"{clean(path.name, 60)} cannot race.", clean(path, 300)
            raise LabError(what, where=where, cause=cause, fix=fix) from error
        left -= len(content)
        found[path.name] = content
    return found


def _hash_code(code: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in code.items()}


@contextlib.contextmanager
def _open_folder(home: Path, nodes: list[Node]) -> Iterator[Path]:
    """Makes a lap's folder; afterwards removes its images, and the folder if no record was written."""
    for lap in home.iterdir():
        # No other lap runs: a folder of a lap with images was left by a judge who was killed.
        if re.fullmatch(r"\d{4}-\d{6}-[0-9a-f]{6}", lap.name) and (lap / RUN).exists():
            _sweep(lap)
    folder = home / f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        _sweep(folder)
        for node in nodes:
            _clean(node, folder.name)


def _sweep(folder: Path) -> None:
    whole = (folder / records.RECORD).exists()
    for path in [folder / RUN, folder / VERSIONS] if whole else [folder]:
        shutil.rmtree(path, ignore_errors=True)


def _place(node: Node, folder: Path) -> Node:
    """Returns the node with the lap's data as its LAB_DATA."""
    return replace(node, data=f"{folder / RUN if node.here else _find_folder(node, folder.name)}/data")


def _find_folder(node: Node, lap: str) -> str:
    """Returns the lap's folder on a node that is another machine."""
    return f"{node.folder}/race/{lap}"


def _find_cache(lap: str) -> str:
    """Returns the folder on a node for compiled kernels: those of an earlier lap would save time."""
    return f"/tmp/lap-{lap}"


def _clean(node: Node, lap: str) -> None:
    """Removes a lap's files from a node: compiled kernels, and on another machine the lap's folder."""
    paths = [_find_cache(lap), *([] if node.here else [_find_folder(node, lap)])]
    remove = "import shutil, sys\nfor path in sys.argv[1:]: shutil.rmtree(path, ignore_errors=True)"
    with contextlib.suppress(OSError, LabError, subprocess.SubprocessError):
        node.popen([node.python, "-c", remove, *paths]).communicate(timeout=PATIENCE)


def _ask(node: Node) -> dict[str, Any]:
    """Describes a node: the result of ``on_node.describe`` there."""
    process = node.popen(make_command(node.python, on_node, "describe"))
    try:
        out, _ = process.communicate(timeout=PATIENCE)
        return json.loads(out.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        process.kill()
        process.wait()
        raise LabError(f"{node.name} did not describe itself.", where=node.name, fix="job.preflight()") from error


def _describe(nodes: list[Node], facts: list[dict[str, Any]], processes: int) -> dict[str, Any]:
    """Describes hardware, its class, and versions."""
    count, first, cpu = len(nodes), facts[0], ", ".join(sorted({fact["cpu"] for fact in facts}))
    shares = [share_cores(node, fact["cores"]) for node, fact in zip(nodes, facts, strict=True)]
    used = [gpu for fact in facts for gpu in fact["gpus"][:processes]]
    many = f"{count} nodes{' on one machine' if all(node.here for node in nodes) else ''}, " if count > 1 else ""
    if used:
        what = f"{many}{len(used)} GPU{'s' if len(used) > 1 else ''}: {', '.join(sorted(set(used)))}"
    else:
        each = " each" if count > 1 else ""
        what = f"{many}{min(shares)} CPU core{'s' if min(shares) > 1 else ''}{each}, {cpu}"
    return {
        "nodes": count,
        "processes": count * processes,
        "hardware": ", ".join(used) if used else f"{sum(shares)} cores of {cpu}",
        "class": what,
        "devices": len(used) or sum(shares),
        "versions": first["versions"],
    }


def share_cores(node: Node, cores: float) -> int:
    """Returns the cores of a node's job: nodes on the same machine have a share of it each."""
    # A container may have one and a half; devices are counted whole.
    return max(1, int(cores) // (node.together if node.here else 1))


@dataclass
class _Follower:
    """Collects the versions of the saved weights: the seconds at which each was seen, and its file."""

    folder: Path
    begin: float = 0.0
    versions: list[tuple[float, Path]] = field(default_factory=list)
    count: int = 0
    error: Exception | None = None

    def follow(self, process: subprocess.Popen) -> None:
        """Reads until the program on the node ends."""
        try:
            while line := process.stdout.readline():
                seconds, path = time.monotonic() - self.begin, self.folder / f"{self.count:06d}.pt"
                path.write_bytes(process.stdout.read(int(line)))
                self.versions.append((seconds, path))
                self.count += 1
                if len(self.versions) > MOST_VERSIONS:  # every second one goes; the newest stays
                    for _, old in self.versions[-2::-2]:
                        old.unlink()
                    self.versions = self.versions[::-2][::-1]
        except (OSError, ValueError) as error:  # the disk is full, or the connection broke
            self.error = error


@dataclass(frozen=True)
class Drive:
    """The result of one run of the script.

    Attributes:
        versions: Versions of the weights: seconds since the launch, and the file.
        busy: Mean busy share of the devices, from when all ranks had started to the last weights.
    """

    versions: list[tuple[float, Path]]
    busy: float | None


@dataclass(frozen=True)
class Lap:
    """A lap to run.

    Attributes:
        folder: The lap's folder on this machine: it has ``code``, and ``run/data`` with the images.
        record: The record as of an unfinished lap.
        facts: The result of ``on_node.describe`` on each node.
        pack: The name of the pack with the images.
        nproc_per_node: Processes on each node.
        show: True to print the ranks' output.
    """

    folder: Path
    record: dict[str, Any]
    facts: list[dict[str, Any]]
    pack: str
    nproc_per_node: int
    show: bool

    def drive(self, nodes: list[Node]) -> Drive:
        """Runs the script once, on nodes that have the lap's images, and follows the weights that it saves.

        Raises:
            JobError: The script failed.
            LabError: It saved no weights.
        """
        head, versions, within = nodes[0], self.folder / VERSIONS / str(len(nodes)), self.record["within"]
        target = f"{Path(head.data).parent}/{len(nodes)}/saved/weights.pt"
        versions.mkdir(parents=True)
        job = self._prepare(nodes, target)
        follower, process = _Follower(versions), head.popen(make_command(head.python, on_node, "follow", target))
        try:
            if process.stdout.readline() != b"ready\n":
                fix = "see that the disk has room there, then run the lap again"
                raise LabError("The saved weights cannot be followed.", where=f"{head.name}: {target}", fix=fix)
            records.write_record(self.folder, self.record)
            with watch(nodes) as seen:
                follower.begin = time.monotonic()
                thread = threading.Thread(target=follower.follow, args=(process,), daemon=True)
                thread.start()
                joined = _wait(job.start(show=self.show), within and follower.begin + within)
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
        kept = [one for one in follower.versions if within is None or one[0] <= within]
        if not kept:
            fix = "save the weights to the file that --checkpoint names, with torch.save(…)"
            when = "" if within is None else f" within {within:g} s"
            where, cause = self.record["script"], "a lap ends with them"
            raise LabError(f"The script saved no weights{when}.", where=where, cause=cause, fix=fix)
        return Drive(kept, self._measure_busy(seen, nodes, joined, kept[-1][0]))

    def _prepare(self, nodes: list[Node], target: str) -> TorchrunJob:
        """Makes the job, whose nodes have its data already: a lap's time includes no copying."""
        pack = f"packed/{self.pack}"
        where = DataFolder(self.folder / RUN / "data" / pack, pack, MANIFEST, copy_data=True)
        options = {"nodes": nodes, "data": where, "limit": LIMIT, "rank_order": "nodes"}
        script = self.folder / records.CODE / self.record["script"]
        if not all(node.here for node in nodes):
            TorchrunJob(on_node.__file__, ["describe"], **options, program=["python"]).run(show=False)
        files = [path for path in script.parent.iterdir() if path != script]
        cache = _find_cache(self.folder.name)
        options |= {"env": {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}, "files": files}
        args = [*self.record["args"], "--checkpoint", target]
        job = TorchrunJob(script, args, **options, nproc_per_node=self.nproc_per_node)
        job.preflight().raise_if_red()
        return job

    def _measure_busy(self, seen: Watch, nodes: list[Node], begin: float, end: float) -> float | None:
        """Returns how busy the devices of the job were on average between two times since the launch."""
        shares = []
        for node, fact in zip(nodes, self.facts, strict=False):
            samples = [one for one in seen.samples if one.node == node.name]
            # By the node's own clock, which may be wrong: only differences count. The watch begins at the launch.
            inside = [one for one in samples if begin <= one.time - samples[0].time <= end]
            shares += [_measure(one, node, fact, self.nproc_per_node) for one in inside]
        known = [share for share in shares if share is not None]
        return statistics.mean(known) if known else None


def _measure(sample: Usage, node: Node, fact: dict[str, Any], processes: int) -> float | None:
    if fact["gpus"]:
        busy = sorted((gpu.busy for gpu in sample.gpus), reverse=True)[:processes]
        return statistics.mean(busy) if busy else None
    if sample.job_busy is None:
        return None
    # Nodes of one machine have a share of its cores each.
    return min(1.0, sample.job_busy * sample.cores / share_cores(node, sample.cores))


def _wait(running: RunningJob, end: float | None) -> float:
    """Waits for the end of a job, or ends it in time; returns the seconds until all ranks had started."""
    try:
        result = running.wait(None if end is None else max(0.0, end - time.monotonic()))
    except TimeoutError:
        running.stop()
        result = running.wait(check=False)
    return result.seconds["joined"] or 0.0


def _judge(record: dict[str, Any], folder: Path, drives: list[Drive], dataset: data.Dataset) -> dict[str, Any]:
    """Evaluates the saved weights, keeps the last ones, and returns their part of the lap's record."""
    seed = images.choose_seed(dataset)
    on = images.find_images(dataset, record["data"]["mapping"], seed)
    found = [evaluate([path for _, path in drive.versions], on) for drive in drives]
    ends = [answers[-1] for answers in found]
    for end in ends:
        if isinstance(end, str):
            fix = "torch.save(model.state_dict(), …), of a network of lab_utils.models"
            raise LabError("The last saved weights cannot be evaluated.", where=records.WEIGHTS, cause=end, fix=fix)
    (seconds, last), (net, top1) = drives[-1].versions[-1], ends[-1]
    last.replace(folder / records.WEIGHTS)
    points = zip(drives[-1].versions, found[-1], strict=True)
    alone = {"seconds": drives[0].versions[-1][0], "top1": ends[0][1]} if len(drives) > 1 else None
    speed_up = alone["seconds"] / seconds if alone else None
    return {
        "data": record["data"] | {"seed": seed},
        "weights": records.hash_file(folder / records.WEIGHTS),
        "net": net,
        "seconds": seconds,
        "device_seconds": seconds * record["devices"],
        "top1": top1,
        "reached": record["threshold"] is None or top1 >= record["threshold"],
        "curve": [(when, answer[1]) for (when, _), answer in points if not isinstance(answer, str)],
        "one_node": alone,
        "speed_up": speed_up,
        "efficiency": speed_up and speed_up / record["nodes"],
        "busy": drives[-1].busy,
    }


def tell(record: dict[str, Any]) -> str:
    """Describes a lap in two lines."""
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
