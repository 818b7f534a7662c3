"""Runs one lap: starts the script, takes the time, evaluates the saved weights, and writes the record.

Nothing that the script reports counts. The clock runs in the judge's process: a lap's time ends when the judge sees
the last saved weights. Only then does the judge draw or choose the images for their evaluation. The record is written
before the launch, as of an unfinished lap: a lap counts even if somebody interrupts it, or kills the judge.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from course.race import images, on_node, records
from course.race.records import find_threshold
from lab_common import LabError, read_path
from lab_common.files import hold_folder
from lab_common.text import clean
from lab_utils import data, timing
from lab_utils.data.packing import MANIFEST
from nodelaunch import DataFolder, TorchrunJob, Usage, local_nodes, watch
from nodelaunch.backends.nodes import Node
from nodelaunch.transfer import make_command

LIMIT = 3600.0  # seconds of a lap in any case
PATIENCE = 20.0  # seconds for a program on a node that is asked to answer
EVERY = 0.02  # seconds between two looks at the file of weights
MOST_SAVES = 40  # that are kept for the curve
# The weights that a script saved: seconds since the launch, and a copy of the file.
Saves = list[tuple[float, Path]]
WORK = ".lap-"  # how the folder begins with what a lap needs only while it runs


def run_lap(
    script: str | Path,
    args: Sequence[object] = (),
    *,
    nodes: Sequence[Node] = (),
    nproc_per_node: int = 1,
    league: str = "sprint",
    threshold: float | None = None,
    name: str = "",
    dataset: str | None = None,
    home: Path | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Runs a script as one lap of the race, and keeps its record.

    Args:
        script: A text file of at most 16 KiB. It gets ``--checkpoint FILE`` besides ``args``, and saves there a
            ``state_dict`` of a network of ``lab_utils.models``, or a dictionary that has one under ``model``.
        args: The script's own arguments.
        nodes: As of ``TorchrunJob``; by default this machine as one node. The first saves the weights, and has to be
            this machine. With two, the script runs on the first one alone before, for the speed-up.
        nproc_per_node: Processes on each node.
        league: ``sprint`` or ``distance``: reach its top-1 in the least time.
        threshold: Another top-1 to reach than the league's.
        name: Name of the team.
        dataset: ``shapes10`` or ``cinic10``; None chooses as ``data.load`` does.
        home: The race folder; ``race`` in LAB_RUNS if None.
        show: True to print the ranks' output.

    Returns:
        The stored record: the keys of ``records.PROPERTIES``, which the leaderboard reads, and ``curve``, ``one_node``
        and ``weights``.

    Raises:
        JobError: The script failed. Its record says so under ``failed``.
        LabError: Likewise: it saved no weights, or its weights cannot be evaluated. Or nothing was launched: another
            lap runs, the nodes are not ready, or the leaderboard could not read the lap's record.
    """
    nodes, script, home = list(nodes or local_nodes(1)), read_path(script), home or records.find_home()
    if any(node.backend != "nodelaunch.backends.direct" for node in nodes):
        fix = "race on this machine, or on hosts: LAB_NODES=hostA,hostB"
        raise LabError("The race cannot follow the saved weights on Slurm.", where="run_lap(…)", fix=fix)
    code, whole = _read_script(script), data.load(dataset)
    threshold = find_threshold(whole, league) if threshold is None else threshold
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    lap = f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    home.mkdir(parents=True, exist_ok=True)
    with hold_folder(home, "Another lap is running"), _open_work(home, lap, nodes) as work:
        (work / script.name).write_bytes(code)
        mapping, train = images.draw_lap(whole, work / "data")
        facts = [_ask_node(node, work) for node in nodes]
        if not facts[0]["sees"]:
            fix = "name this machine first: LAB_NODES=thisone,other"
            raise LabError("The first node of a lap has to be this machine.", where=nodes[0].name, fix=fix)
        record = {
            "lap": lap,
            "name": str(name)[:60],
            "began": began,
            "script": script.name,
            "code": hashlib.sha256(code).hexdigest(),
            "args": [str(one) for one in args],
            "league": league,
            "threshold": threshold,
            "failed": "the judge was stopped before the lap ended",
            **records.NO_RESULT,
            "data": {"name": whole.name, "valid": len(whole.valid), "seed": None, "train": train, "mapping": mapping},
            **_describe(nodes, facts, nproc_per_node),
        }
        placed = [replace(node, data=f"{work if node.here else _find_folder(node, lap)}/data") for node in nodes]
        parts = [placed[:1], placed] if len(placed) > 1 else [placed]
        records.check_record(record)
        with _note_failure(record, home / lap):
            runs = [_run_script(part, facts, record, work, home / lap, show=show) for part in parts]
            result = _evaluate(record, home / lap, runs, whole)
        return records.write_record(home / lap, record | result | {"failed": ""})


@contextlib.contextmanager
def _note_failure(record: dict[str, Any], folder: Path) -> Iterator[None]:
    """Notes in the record of a lap that was launched why the block failed."""
    try:
        yield
    except BaseException as error:
        why = getattr(error, "what", "") or ("interrupted" if isinstance(error, KeyboardInterrupt) else repr(error))
        if folder.exists():  # it was launched
            with contextlib.suppress(OSError):  # the disk is full: the record from before the launch stays
                records.write_record(folder, record | {"failed": clean(why, 300)})
            print(f"lap {record['lap']} failed, and it counts")
        raise


def run_laps(
    script: str | Path, args: Sequence[object] = (), *, count: int = 3, **options: Any
) -> list[dict[str, Any]]:
    """Runs a script until this race folder has ``count`` finished laps of it; returns their records, oldest first.

    Those with the same code, arguments, rules, images, nodes and name count. Arguments and errors are those of
    :func:`run_lap`.
    """
    nodes = len(options.get("nodes") or [None])
    whole, league = data.load(options.get("dataset")), options.get("league", "sprint")
    threshold = options.get("threshold")
    wanted = {
        "name": str(options.get("name", ""))[:60],
        "script": Path(script).name,
        "args": [str(one) for one in args],
        "league": league,
        "threshold": find_threshold(whole, league) if threshold is None else threshold,
        "nodes": nodes,
        "processes": nodes * options.get("nproc_per_node", 1),
        "code": hashlib.sha256(_read_script(read_path(script))).hexdigest(),
        "failed": "",
    }
    shown = {"name": whole.name, "valid": len(whole.valid)}
    while True:
        laps = records.read_laps(options.get("home") or records.find_home())
        found = [lap for lap in laps if wanted.items() <= lap.items() and shown.items() <= lap["data"].items()]
        if len(found) >= timing.limit_rounds(count):
            return found
        run_lap(script, args, **options)


def _read_script(path: Path) -> bytes:
    """Reads the script.

    Raises:
        LabError: It is too large.
    """
    content = path.read_bytes()
    if len(content) > records.CODE_BYTES:
        cause, fix = f"the code of a lap has at most {records.CODE_BYTES // 1024} KiB", "leave other data out of it"
        raise LabError(f"{clean(path.name, 60)} cannot race.", where=path, cause=cause, fix=fix)
    return content


@contextlib.contextmanager
def _open_work(home: Path, lap: str, nodes: list[Node]) -> Iterator[Path]:
    """Makes the folder of what a lap needs only while it runs; removes it afterwards, and what is on the nodes."""
    for left in home.glob(f"{WORK}*"):  # no other lap runs: a judge who was killed has left it
        shutil.rmtree(left, ignore_errors=True)
    (work := home / f"{WORK}{lap}").mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        remove = "import shutil, sys\nfor path in sys.argv[1:]: shutil.rmtree(path, ignore_errors=True)"
        for node in nodes:
            paths = [_find_cache(lap), *([] if node.here else [_find_folder(node, lap)])]
            with contextlib.suppress(OSError, LabError, subprocess.SubprocessError):
                node.popen([node.python, "-c", remove, *paths]).communicate(timeout=PATIENCE)


def _find_folder(node: Node, lap: str) -> str:
    """Returns the lap's folder on a node that is reached by SSH."""
    return f"{node.folder}/race/{lap}"


def _find_cache(lap: str) -> str:
    """Returns the folder on a node for compiled kernels: those of an earlier lap would save time."""
    return f"/tmp/lap-{lap}"


def _ask_node(node: Node, work: Path) -> dict[str, Any]:
    """Describes a node: the result of ``on_node.describe`` there."""
    process = node.popen(make_command(node.python, on_node, str(work)))
    try:
        out, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        what, fix = f"{node.name} does not answer.", "python -m nodelaunch preflight says what is wrong with a node"
        raise LabError(what, where=node.name, cause=f"no word within {PATIENCE:g} s", fix=fix) from None
    if process.returncode:
        raise node.explain(process.returncode, errors.decode(errors="replace"))
    return json.loads(out.splitlines()[-1])


def _describe(nodes: list[Node], facts: list[dict[str, Any]], processes: int) -> dict[str, Any]:
    """Describes hardware, its class, and versions."""
    count, cpu = len(nodes), ", ".join(sorted({fact["cpu"] for fact in facts}))
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
        "class": what,
        "devices": len(used) or sum(shares),
        "versions": facts[0]["versions"],
    }


def share_cores(node: Node, cores: float) -> int:
    """Returns the cores of a node's job: nodes on the same machine have a share of it each."""
    # A container may have one and a half; devices are counted whole.
    return max(1, int(cores) // (node.together if node.here else 1))


def _run_script(
    nodes: list[Node], facts: list[dict[str, Any]], record: dict[str, Any], work: Path, folder: Path, *, show: bool
) -> tuple[Saves, float | None]:
    """Runs the script once, and follows the weights that it saves.

    Returns:
        The weights; and the mean busy share of the devices, from when all ranks had started to the last weights.

    Raises:
        JobError: The script failed.
        LabError: It saved no weights.
    """
    processes = record["processes"] // record["nodes"]
    (saved := work / f"saved-{len(nodes)}" / "weights.pt").parent.mkdir()
    (copies := work / f"versions-{len(nodes)}").mkdir()
    pack = f"packed/{record['data']['name']}"
    where = DataFolder(work / "data" / pack, pack, MANIFEST, copy_data=True)
    options = {"nodes": nodes, "data": where, "limit": LIMIT, "rank_order": "nodes"}
    if not all(node.here for node in nodes):  # a lap's time includes no copying
        TorchrunJob(on_node.__file__, [work], **options, program=["python"]).run(show=False)
    cache = _find_cache(record["lap"])
    options["env"] = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    args = [*record["args"], "--checkpoint", saved]
    job = TorchrunJob(work / record["script"], args, **options, nproc_per_node=processes)
    job.preflight().raise_if_red()
    (folder / records.CODE).mkdir(parents=True, exist_ok=True)
    shutil.copy(job.script, folder / records.CODE)
    records.write_record(folder, record)
    over = threading.Event()
    with watch(nodes) as seen, ThreadPoolExecutor(1) as pool:
        following = pool.submit(_copy_saves, saved, copies, over)
        try:
            joined = job.run(show=show).seconds["joined"] or 0.0
        finally:
            over.set()
        versions = following.result()
    if not versions:
        fix = "save the weights to the file that --checkpoint names, with torch.save(…)"
        raise LabError("The script saved no weights.", where=record["script"], cause="a lap ends with them", fix=fix)
    return versions, _measure_busy(seen.samples, nodes, facts, processes, (joined, versions[-1][0]))


def _copy_saves(saved: Path, copies: Path, over: threading.Event) -> Saves:
    """Copies each version of a file as soon as it has stopped changing.

    Of more than ``MOST_SAVES`` every second one goes, and the last one stays.
    """
    begin, copied, seen, last = time.monotonic(), None, None, False
    versions: Saves = []
    while not last:
        last = over.wait(EVERY)
        before, seen = seen, None
        with contextlib.suppress(FileNotFoundError):  # there is none yet, or it was replaced between the calls
            found = saved.stat()
            seen = found.st_ino, found.st_mtime_ns, found.st_size
            # Unchanged since the last look: nobody is writing to it.
            if seen != copied and (seen == before or last):
                copied, seconds = seen, time.monotonic() - begin
                versions.append((seconds, shutil.copyfile(saved, copies / f"{seconds:.6f}.pt")))
        if len(versions) > MOST_SAVES:
            for _, old in versions[-2::-2]:
                old.unlink()
            versions = versions[::-2][::-1]
    return versions


def _measure_busy(
    samples: list[Usage], nodes: list[Node], facts: list[dict[str, Any]], processes: int, span: tuple[float, float]
) -> float | None:
    """Returns how busy the devices of the job were on average between two times since the launch."""
    shares = []
    for node, fact in zip(nodes, facts, strict=False):
        own = [one for one in samples if one.node == node.name]
        for one in own:
            # By the node's own clock, which may be wrong: only differences count. The watch begins at the launch.
            if not span[0] <= one.time - own[0].time <= span[1]:
                continue
            if fact["gpus"]:
                shares += sorted((gpu.busy for gpu in one.gpus), reverse=True)[:processes]
            elif one.job_busy is not None:
                # Nodes of one machine have a share of its cores each.
                shares.append(min(1.0, one.job_busy * one.cores / share_cores(node, one.cores)))
    return statistics.mean(shares) if shares else None


def _evaluate(
    record: dict[str, Any], folder: Path, runs: list[tuple[Saves, float | None]], dataset: data.Dataset
) -> dict[str, Any]:
    """Evaluates the saved weights, keeps the last ones, and returns their part of the lap's record."""
    # A data set that is drawn has new ones for each lap, another one has its ``valid``.
    seed = secrets.randbits(63) if dataset.name == "shapes10" else None
    given = *images.find_images(dataset, record["data"]["mapping"], seed), len(dataset.class_names)
    # Of a drive on one node alone only the last weights count.
    runs = [(versions[-1:], busy) for versions, busy in runs[:-1]] + runs[-1:]
    found = [images.evaluate([path for _, path in versions], *given) for versions, _ in runs]
    for answers in found:
        if isinstance(answers[-1], str):
            what = "The last saved weights cannot be evaluated."
            fix = "torch.save(model.state_dict(), …), of a network of lab_utils.models"
            raise LabError(what, where=records.WEIGHTS, cause=answers[-1], fix=fix)
    versions, busy = runs[-1]
    (seconds, last), (net, top1) = versions[-1], found[-1][-1]
    last.replace(folder / records.WEIGHTS)
    points = zip(versions, found[-1], strict=True)
    one_node = {"seconds": runs[0][0][-1][0], "top1": found[0][-1][1]} if len(runs) > 1 else None
    return {
        "data": record["data"] | {"seed": seed},
        "weights": records.hash_file(folder / records.WEIGHTS),
        "net": net,
        "seconds": seconds,
        "device_seconds": seconds * record["devices"],
        "top1": top1,
        "reached": top1 >= record["threshold"],
        "curve": [(when, answer[1]) for (when, _), answer in points if not isinstance(answer, str)],
        "one_node": one_node,
        "speed_up": one_node and one_node["seconds"] / seconds,
        "busy": busy,
    }


def tell(record: dict[str, Any]) -> str:
    """Describes a lap in two lines, and the speed-up of two nodes in a third."""
    end = "reached" if record["reached"] else "NOT reached"
    busy = "" if record["busy"] is None else f", {record['busy']:.0%} busy"
    lines = [
        f"{record['league']}, {record['threshold']:.0%} top-1, {end}: "
        f"{record['top1']:.1%} on {record['data']['valid']:,} images after {record['seconds']:.1f} s",
        f"{record['class']}, {record['device_seconds']:.0f} device-seconds{busy}; lap {record['lap']}",
    ]
    if record["speed_up"]:
        efficiency = record["speed_up"] / record["nodes"]
        lines.append(f"{record['speed_up']:.2f} times as fast as one node, efficiency {efficiency:.0%}")
    return "\n".join(lines)
