"""Judges what each node reports about itself, and if the nodes agree; sets the verdicts as a table."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lab_common import LabError
from lab_common.text import clean
from nodelaunch.backends.nodes import Node
from nodelaunch.spec import DataFolder

# Per node, the answer of its probe, by the names in nodelaunch.node.probe.examine.
Facts = Mapping[str, Mapping]
MIB = 2**20
DISK_NEEDED, SHARED_NEEDED = 200 * MIB, 64 * MIB  # Docker's 64 MiB of /dev/shm are enough for 32×32 images
CLOCK_ALLOWED = 2.0  # seconds; beyond it, logs and timelines of several nodes side by side mislead
WILL_COPY = "not there yet: will be copied"
ORDER = ("red", "note", "ok")
WIDTH = 118


@dataclass(frozen=True)
class Verdict:
    """One judged fact, with its likely cause and the command or action that fixes it."""

    node: str  # or several
    check: str  # the subject, in a word or two
    state: str  # "ok"; "note": the job runs; "red": the job would fail, hang, or compute something else
    found: str  # further lines are a table
    cause: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Wanted:
    """The needs of a job."""

    nproc_per_node: int = 1
    data: DataFolder | None = None  # that each node needs
    data_hash: str = ""  # of the data that the launcher copies; "" if it has no whole folder or copies none
    torchrun: bool = True  # False if another program runs the script, which may do without torch
    visible: str | None = None  # CUDA_VISIBLE_DEVICES as env= sets it


def judge_error(name: str, error: LabError) -> Verdict:
    """The verdict for a node that could not be asked."""
    where = f" ({error.where})" if error.where not in ("", name) else ""
    return Verdict(name, "node", "red", error.what + where, error.cause, error.fix)


def find_part(found: Mapping, part: str) -> Any:
    """A part of a node's facts; {} if the node could not find it out."""
    own = found.get(part, {})
    return {} if "error" in own else own


def split_facts(facts: Facts, part: str) -> tuple[dict[str, Any], list[Verdict]]:
    """A part of the facts per node, and the notes on the nodes that could not find it out in time."""
    have, gaps = {}, []
    for name, found in facts.items():
        if own := find_part(found, part):
            have[name] = own
        else:
            slow = "it took too long; a hanging disk, driver or name server does that"
            cause, fix = found.get(part, {}).get("error", slow), "look by hand on that node, or go on without"
            gaps.append(Verdict(name, part, "note", "could not be found out", cause, fix))
    return have, gaps


def list_per_node(values: Mapping[str, str]) -> str:
    """Writes a line per node, aligned, below what stands in front of them."""
    width = max(map(len, values), default=0)
    return "".join(f"\n  {name:{width}}  {value}" for name, value in values.items())


def judge_versions(facts: Facts, *, torchrun: bool = True) -> list[Verdict]:
    """Compares Python's minor version, torch, NCCL and CUDA over the nodes; torchrun needs torch."""
    have, verdicts = split_facts(facts, "versions")
    wrong = "it was not installed there, or python= names another environment"
    for name, own in have.items():
        if tuple(map(int, own["python"].split(".")[:2])) < (3, 11):
            what, fix = f"Python {own['python']}: 3.11 or newer is needed", "install one there, or name it: python=…"
            verdicts.append(Verdict(name, "Python", "red", what, wrong, fix))
        if torchrun and not own["torch"]:
            fix = "install torch there, or name the Python that has it: python=…"
            verdicts.append(Verdict(name, "torch", "red", f"{own['program']} has no torch", wrong, fix))
    titles = {"python": "Python", "torch": "torch", "cuda": "CUDA", "nccl": "NCCL"}
    texts = {
        name: ", ".join(f"{title} {own[key]}" if own[key] else f"no {title}" for key, title in titles.items())
        for name, own in have.items()
    }
    table, torches = list_per_node(texts), [own for own in have.values() if own["torch"]]
    with_gpus = any(find_part(found, "gpus").get("gpus") for found in facts.values())
    kinds = {
        "Python": ("red", {own["python"].rpartition(".")[0] for own in have.values()}),
        "torch": ("red", {own["torch"].partition("+")[0] for own in torches}),
        "NCCL": ("red" if with_gpus else "note", {own["nccl"] for own in torches}),
        "CUDA": ("note", {own["cuda"] for own in torches}),
    }
    cause = "the environments were made at different times, or python= names another one on one node"
    fix = "install the same versions on every node, by the same requirements file"
    differing = [
        Verdict(", ".join(have), "versions", state, f"{kind} is not the same on all nodes{table}", cause, fix)
        for kind, (state, values) in kinds.items()
        if len(values) > 1
    ]
    return verdicts + (differing or [Verdict(name, "versions", "ok", text) for name, text in texts.items()])


def judge_disks(facts: Facts) -> list[Verdict]:
    """Judges if each node's folder can be written and has room, and the size of its shared memory."""
    have, verdicts = split_facts(facts, "disk")
    for name, disk in have.items():
        free, folder, shared = disk["free"], disk["folder"], disk["shm"]
        what, cause = f"{free / MIB:,.0f} MiB free at {folder}", f"the disk is full ({DISK_NEEDED // MIB} MiB needed)"
        if not disk["writable"]:
            what, cause = f"{folder} cannot be written", "it is another user's, or the disk is mounted read-only"
        fix = "free some space there, or name a folder of yours on a larger disk: folder=…"
        red = Verdict(name, "disk", "red", what, cause, fix)
        green = Verdict(name, "disk", "ok", f"{free / 2**30:,.1f} GiB free at {folder}")
        verdicts.append(green if disk["writable"] and free >= DISK_NEEDED else red)
        if shared is not None and shared < SHARED_NEEDED:
            what = f"{shared / MIB:,.0f} MiB of shared memory (/dev/shm)"
            cause = "a container's default; DataLoader workers die of it with a bus error"
            fix = "num_workers=0, or start the container with --shm-size=2g"
            verdicts.append(Verdict(name, "memory", "note", what, cause, fix))
    return verdicts


def judge_data(facts: Facts, wanted: Wanted) -> list[Verdict]:
    """Judges if every node has the data that the launcher copies, or those of the first node that has them."""
    have, verdicts = split_facts(facts, "data")
    hashes = {"the launcher": wanted.data_hash} if wanted.data_hash else {}
    hashes |= {name: own["hash"] for name, own in have.items() if own["hash"] and not own["missing"]}
    for name, own in have.items():
        path = own["path"]
        fix = f"copy_data=True, or on that node: {wanted.data.fix or 'copy the folder there by hand'}"
        if own["hash"] and wanted.data_hash:  # existing data are never overwritten
            fix = f"on that node: rm -r -- {shlex.quote(path.rpartition('/')[0])}   (it is copied again)"
        red, green = partial(Verdict, name, "data", "red", fix=fix), partial(Verdict, name, "data", "ok")
        if not own["hash"] and wanted.data.copy_data:
            verdicts.append(green(WILL_COPY))
        elif not own["hash"]:
            cause = "the folder was not made or copied there, or LAB_DATA points elsewhere"
            verdicts.append(red(f"{path} is missing", cause))
        elif own["missing"]:
            verdicts.append(red(f"{path}: {', '.join(own['missing'])} is missing", "a copy was cut short"))
        elif own["hash"] != next(iter(hashes.values())):
            lines = list_per_node({other: digest[:12] for other, digest in hashes.items()})
            what = f"the folder is not that of {'the launcher' if wanted.data_hash else 'the other nodes'}{lines}"
            verdicts.append(red(what, f"it was made from other files, or by another version ({path})"))
        else:
            verdicts.append(green(f"the same on the nodes that have it ({own['hash'][:12]})"))
    return verdicts


def judge_clock(name: str, offset: float) -> Verdict:
    """Judges a node's clock by the seconds that it is off the launcher's, at least."""
    if abs(offset) <= CLOCK_ALLOWED:
        return Verdict(name, "clock", "ok", f"within {CLOCK_ALLOWED:.0f} s of the launcher's")
    what = f"the clock is {abs(offset):,.1f} s {'ahead of' if offset > 0 else 'behind'} the launcher's"
    cause = "nobody sets it; times in logs cannot be compared"
    return Verdict(name, "clock", "note", what, cause, "sudo timedatectl set-ntp true  (there)")


def judge_jobs(nodes: Mapping[str, Node], facts: Facts) -> list[Verdict]:
    """Names the processes of other jobs: red are those that hold the memory of a GPU."""
    verdicts, seen = [], set()
    for name, found in facts.items():
        gpu_users = {int(row[0]) for row in find_part(found, "gpu_users").get("rows", []) if row[0].isdigit()}
        by_job: dict[str, list[Mapping]] = {}
        for process in find_part(found, "jobs").get("jobs", []):
            by_job.setdefault(process["id"], []).append(process)
        for job, own in by_job.items():
            place = found["system"]["machine"], job  # several nodes may be one machine
            if place in seen:
                continue
            seen.add(place)
            pids = ", ".join(str(process["pid"]) for process in own[:8])
            what = f"job {job} still runs here: {len(own)} process{'es' if len(own) > 1 else ''} (pid {pids})"
            state, cause = "note", f"a leftover, or a node that was started by hand: {own[0]['command']}"
            fix = stop_command(job, nodes[name])
            if any(process["supervisor"] for process in own):
                cause = "another notebook or script runs it; the two share the machine"
                fix = "none is needed; to measure without it, wait until it has ended"
            elif gpu_users & {process["pid"] for process in own}:
                state, what = "red", f"{what}, and holds GPU memory"
            verdicts.append(Verdict(name, "jobs", state, what, cause, fix))
    return verdicts


def stop_command(job: str, node: Node) -> str:
    """Returns the command that stops a job on a node."""
    return f"python -m nodelaunch stop {shlex.quote(job)}{'' if node.here else f' {shlex.quote(node.name)}'}"


def write_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns the lines of an aligned table, what is red first, with cause and fix under each that is not green."""
    checks = list(dict.fromkeys(verdict.check for verdict in verdicts))
    by_state = sorted(_join(verdicts), key=lambda verdict: (ORDER.index(verdict.state), checks.index(verdict.check)))
    rows = [((f"[{v.state}]", clean(v.node), clean(v.check)), v) for v in by_state]
    widths = [min(30, max((len(cells[i]) for cells, _ in rows), default=0)) for i in range(3)]
    lines = []
    for cells, verdict in rows:
        start = "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)) + "  "
        lines += _wrap(verdict.found, start, sum(widths) + 6)
        hints = {"likely": verdict.cause, "fix": verdict.fix} if verdict.state != "ok" else {}
        lines += [line for label, text in hints.items() if text for line in _wrap(text, f"{'':8}{label}: ", 13)]
    return lines


def _join(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Makes one of green verdicts that say the same of several nodes."""
    joined: dict[tuple, Verdict] = {}
    for number, verdict in enumerate(verdicts):
        key = (verdict.check, verdict.found) if verdict.state == "ok" else (number,)
        node = f"{joined[key].node}, {verdict.node}" if key in joined else verdict.node
        joined[key] = replace(verdict, node=node)
    return list(joined.values())


def _wrap(text: str, start: str, indent: int) -> list[str]:
    first, *more = clean(text).split("\n")
    # Commands are copied from here: their words stay whole.
    wrapper = textwrap.TextWrapper(WIDTH, start, " " * indent, break_long_words=False, break_on_hyphens=False)
    return (wrapper.wrap(first) or [start.rstrip()]) + [" " * indent + line for line in more]
