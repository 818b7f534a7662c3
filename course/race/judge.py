"""Runs one lap: starts the script, takes the time, evaluates the saved weights, and writes the record.

Nothing that the script reports counts. The clock runs in the judge's process, which ends a lap when it sees the last
saved weights. Only then does the judge draw or choose the images for their evaluation. The record is written before the
launch, as of an unfinished lap: a lap counts even if somebody ends it, or kills the judge.
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
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from course.race import images, records, sealed
from course.race.board_record import check_numbers, read_record
from course.race.drive import HIDDEN, LIMIT, PATIENCE, RUN, VERSIONS, Drive, Lap, drive, share_cores
from course.race.evaluate import evaluate
from course.race.leagues import find_threshold
from lab_common import LabError, read_path
from lab_common.files import read_bounded
from lab_common.text import clean
from lab_utils import data, timing
from nodelaunch import JobError, local_nodes
from nodelaunch.backends.nodes import Node
from nodelaunch.program import make_command

ARGUMENTS = 2000  # characters of all of them


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
        The stored record; ``board_record.PROPERTIES`` has its keys.

    Raises:
        JobError: The script failed. Its record says so under ``failed``.
        LabError: Likewise: it saved no weights, or its weights cannot be evaluated. Or nothing was launched: another
            lap runs, or the nodes are not ready.
    """
    nodes = list(nodes or local_nodes(1))
    _check(nodes, args, within=within, compare=compare)
    texts, whole = _read_code(script, files), data.load(dataset)
    threshold = None if within else find_threshold(whole, league)
    rules = {"league": "" if within else league, "threshold": threshold, "within": within}
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    with records.hold_race(records.find_home()) as home, _open_folder(home, nodes) as folder:
        code = _copy_code(texts, folder / records.CODE)
        mapping, counts = images.draw_lap(whole, folder / RUN / "data")
        placed, facts = [_place(node, folder) for node in nodes], [_ask(node) for node in nodes]
        given = [str(one) for one in args]
        lap = Lap(folder, Path(script).name, given, whole.name, facts, nproc_per_node, within, show)
        record = {
            "format": records.FORMAT,
            "lap": folder.name,
            "name": str(name)[:60],
            "began": began,
            "script": lap.script,
            "args": lap.args,
            **rules,
            "code": code,
            "failed": "the judge was ended before the lap",
            **records.NOTHING,
            "data": _describe_data(whole, mapping, counts),
            **_describe(nodes, facts, nproc_per_node),
            "previous": records.find_newest(home),
        }
        parts = [placed[:1], placed] if compare else [placed]
        with _count_failure(folder, record):
            drives = [drive(lap, part, partial(_keep, folder, record)) for part in parts]
            return _keep(folder, record | _judge(record, folder, drives, whole) | {"failed": ""})


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
            print(f"lap {folder.name} did not end; it counts")
        if isinstance(error, JobError):
            _explain(error)
        raise


def _keep(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Writes the record and reads it as the board will: a refused record would invalidate all later laps."""
    before = (folder / records.RECORD).exists()
    whole = records.write_record(folder, record)
    try:
        check_numbers(read_record(folder))
    except (OSError, ValueError) as error:
        if not before:
            (folder / records.RECORD).unlink()
        what, fix = "This lap has no place on a board.", "look at the arguments and at the names of files"
        raise LabError(what, where=record["script"], cause=str(error), fix=fix) from error
    return whole


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
    wanted = {
        "name": str(options.get("name", ""))[:60],
        "args": [str(one) for one in args],
        "league": "" if options.get("within") else options.get("league", "sprint"),
        "within": options.get("within"),
        "nodes": (nodes := len(options.get("nodes") or [None])),
        "processes": nodes * options.get("nproc_per_node", 1),
        "code": {
            path.name: hashlib.sha256(text).hexdigest() for path, text in _read_code(script, options.get("files"))
        },
    }
    whole, compare = data.load(options.get("dataset")), bool(options.get("compare"))
    wanted["threshold"] = find_threshold(whole, wanted["league"]) if wanted["league"] else None

    def suits(lap: dict[str, Any]) -> bool:
        same = all(lap.get(key) == value for key, value in wanted.items()) and bool(lap["one_node"]) == compare
        same = same and not lap["failed"]
        return same and (lap["data"]["name"], lap["data"]["valid"]) == (whole.name, len(whole.valid))

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


@contextlib.contextmanager
def _open_folder(home: Path, nodes: list[Node]) -> Iterator[Path]:
    """Makes a lap's folder; removes it if there is no record, and always the images and the versions."""
    for lap in home.iterdir():
        if re.fullmatch(r"\d{4}-\d{6}-[0-9a-f]{6}", lap.name):
            _open(lap)
            # No other lap runs: a folder of a lap with images was left by a judge who was killed.
            if (lap / RUN).exists():
                _sweep(lap)
    folder = home / f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        _sweep(folder)
        for node in nodes:
            _clean(node, folder.name)


def _open(lap: Path) -> None:
    """Makes a lap's folder readable again: Landlock does not stop a script from changing its mode."""
    with contextlib.suppress(OSError):
        lap.chmod(0o755)
        (lap / records.RECORD).chmod(0o644)


def _sweep(folder: Path) -> None:
    _open(folder)
    whole = (folder / records.RECORD).exists()
    for path in [folder / part for part in (RUN, VERSIONS, HIDDEN)] if whole else [folder]:
        shutil.rmtree(path, ignore_errors=True)


def _explain(error: JobError) -> None:
    """Raises an explanation if a script was refused a file or a connection; ignores any other error."""
    failure = error.result.failure
    if "PermissionError" in failure.message:
        raise LabError(
            f"The lap was stopped: {clean(failure.message, 300)}.",
            where=failure.location,
            cause="a lap reads its images, its code, and files of the system and Python; it reaches no other machine",
            fix="train with data.load() alone, and bring files of code by files=",
            log=error.result.log,
        ) from error


def _read_code(script: str | Path, files: Sequence[str | Path] | None) -> list[tuple[Path, bytes]]:
    """Reads the script and its files.

    Raises:
        LabError: One is missing, is not text, or has a name that no record can hold; or they are too large in total.
    """
    found, left = [], records.CODE_BYTES
    for path in map(read_path, (script, *(files or ()))):
        cause, fix = f"the code of a lap is text, {records.CODE_BYTES // 1024} KiB in all", "leave other data out of it"
        try:
            if not re.fullmatch(r"[\w.-]{1,60}", path.name, re.ASCII):
                cause, fix = "its name has other characters than letters, digits and _.-", "rename it"
                raise ValueError(cause)
            content = read_bounded(path, left)
            content.decode()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno != errno.EFBIG:
                cause = error.strerror
            what, where = f"{clean(path.name, 60)} cannot race.", clean(path, 300)
            raise LabError(what, where=where, cause=cause, fix=fix) from error
        left -= len(content)
        found.append((path, content))
    return found


def _copy_code(code: list[tuple[Path, bytes]], folder: Path) -> dict[str, str]:
    """Copies the script and its files into one folder, so that the stored code is what runs; returns their hashes."""
    folder.mkdir()
    for path, content in code:
        (folder / path.name).write_bytes(content)
    return {path.name: hashlib.sha256(content).hexdigest() for path, content in code}


def _place(node: Node, folder: Path) -> Node:
    """Returns the node with the lap's data as its LAB_DATA."""
    return replace(node, data=f"{folder / RUN if node.here else _find_folder(node, folder.name)}/data")


def _find_folder(node: Node, lap: str) -> str:
    """Returns the lap's folder on a node that is another machine."""
    return f"{node.folder}/race/{lap}"


def _ask(node: Node) -> dict[str, Any]:
    """Describes a node: the result of ``sealed.describe`` there."""
    process = node.popen(make_command(node.python, sealed, "--describe"))
    try:
        out, _ = process.communicate(timeout=PATIENCE)
        return json.loads(out.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        process.kill()
        process.wait()
        raise LabError(f"{node.name} did not describe itself.", where=node.name, fix="job.preflight()") from error


def _clean(node: Node, lap: str) -> None:
    """Removes a lap's files from a node: the ranks' scratch folders, and on another machine the lap's folder."""
    mine = [] if node.here else [_find_folder(node, lap)]
    remove = "import glob, shutil, sys, tempfile\n"
    remove += "for path in [*glob.glob(f'{tempfile.gettempdir()}/lap-{sys.argv[1]}-*'), *sys.argv[2:]]:\n"
    remove += "    shutil.rmtree(path, ignore_errors=True)"
    with contextlib.suppress(OSError, LabError, subprocess.SubprocessError):
        node.popen([node.python, "-c", remove, lap, *mine]).communicate(timeout=PATIENCE)


def _describe_data(dataset: data.Dataset, mapping: list[int], counts: dict[str, int]) -> dict[str, Any]:
    """Describes the images of a lap, before the judge has chosen its own."""
    return {
        "name": dataset.name,
        "source": dataset.source,
        "train": counts["train"],
        "valid": len(dataset.valid),
        "classes": len(dataset.class_names),
        "sha256": None,
        "seed": None,
        "mapping": mapping,
    }


def _judge(record: dict[str, Any], folder: Path, drives: list[Drive], dataset: data.Dataset) -> dict[str, Any]:
    """Evaluates the saved weights, keeps the last ones, and returns their part of the lap's record."""
    seed = images.choose_seed(dataset)
    on = images.find_images(dataset, record["data"]["mapping"], seed)
    for _, path, digest in (version for one in drives for version in one.versions):
        if records.hash_file(path) != digest:
            fix = "run the lap again"
            raise LabError("Saved weights were changed after the judge saw them.", where=path, fix=fix)
    found = [evaluate([path for _, path, _ in drive.versions], on) for drive in drives]
    ends = [answers[-1] for answers in found]
    for end in ends:
        if isinstance(end, str):
            fix = "torch.save(model.state_dict(), …), of a network of lab_utils.models"
            raise LabError("The last saved weights cannot be evaluated.", where=records.WEIGHTS, cause=end, fix=fix)
    seconds, last, digest = drives[-1].versions[-1]
    last.replace(folder / records.WEIGHTS)
    net, top1 = ends[-1]
    curve = [(when, answer[1]) for (when, *_), answer in zip(drives[-1].versions, found[-1], strict=True) if answer[1:]]
    alone = {"seconds": drives[0].versions[-1][0], "top1": ends[0][1]} if len(drives) > 1 else None
    speed_up = alone["seconds"] / seconds if alone else None
    return {
        "data": record["data"] | {"sha256": images.hash_images(on), "seed": seed},
        "weights": digest,
        "net": net,
        "seconds": seconds,
        "device_seconds": seconds * record["devices"],
        "top1": top1,
        "reached": record["threshold"] is None or top1 >= record["threshold"],
        "curve": [one for one in curve if not isinstance(one[1], str)],
        "one_node": alone,
        "speed_up": speed_up,
        "efficiency": speed_up and speed_up / record["nodes"],
        **_measure_busy(drives[-1]),
    }


def _measure_busy(drive: Drive) -> dict[str, Any]:
    """Returns how busy the devices were, on average while the script trained and over time."""
    begin, end = drive.span
    busy = [share for when, _, share in drive.usage if begin <= when <= end]
    return {
        "busy": statistics.mean(busy) if busy else None,
        "usage": [(round(when, 2), node, round(share, 3)) for when, node, share in drive.usage if when <= end],
    }


def _describe(nodes: list[Node], facts: list[dict[str, Any]], processes: int) -> dict[str, Any]:
    """Describes hardware and its class, versions, and the seal."""
    count, first = len(nodes), facts[0]
    shares = [share_cores(node, fact["cores"]) for node, fact in zip(nodes, facts, strict=True)]
    used = [gpu for fact in facts for gpu in fact["gpus"][:processes]]
    many = f"{count} nodes{' on one machine' if all(node.here for node in nodes) else ''}, " if count > 1 else ""
    if used:
        what = f"{many}{len(used)} GPU{'s' if len(used) > 1 else ''}: {', '.join(sorted(set(used)))}"
    else:
        each = " each" if count > 1 else ""
        what = f"{many}{min(shares)} CPU core{'s' if min(shares) > 1 else ''}{each}, {first['cpu']}"
    return {
        "nodes": count,
        "processes": count * processes,
        "device": "cuda" if used else "cpu",
        "hardware": ", ".join(used) if used else f"{sum(shares)} cores of {first['cpu']}",
        "class": what,
        "devices": len(used) or sum(shares),
        "versions": first["versions"],
        "sealed": all(fact["landlock"] for fact in facts),
    }


def tell(record: dict[str, Any]) -> str:
    """Describes a lap in two lines."""
    goal = (
        f"within {record['within']:g} s" if record["within"] else f"{record['league']}, {record['threshold']:.0%} top-1"
    )
    end = "" if record["within"] else (", reached" if record["reached"] else ", NOT reached")
    busy = "" if record["busy"] is None else f", {record['busy']:.0%} busy"
    seal = "sealed" if record["sealed"] else "NOT sealed: there is no Landlock here"
    lines = [
        f"{goal}{end}: {record['top1']:.1%} on {record['data']['valid']:,} images after {record['seconds']:.1f} s",
        f"{record['class']}, {record['device_seconds']:.0f} device-seconds{busy}, {seal}; lap {record['lap']}",
    ]
    if record["speed_up"]:
        part = record["speed_up"] / record["nodes"]
        lines.append(f"{record['speed_up']:.2f} times as fast as one node, efficiency {part:.0%}")
    return "\n".join(lines)
