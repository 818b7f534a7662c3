"""Judges what each node reports about itself, and if the nodes agree; asks the network nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lab_common import LabError
from nodelaunch.spec import DataFolder

# Per node, the answer of its probe, by the names in nodelaunch.node.facts.find_facts.
Facts = Mapping[str, Mapping]
MIB = 2**20
DISK_NEEDED = 200 * MIB
# A DataLoader worker passes its batches through shared memory; Docker's 64 MiB are enough for 32×32 images.
SHARED_NEEDED = 64 * MIB
CLOCK_ALLOWED = 2.0  # seconds; beyond it, logs and timelines of several nodes side by side mislead
WILL_COPY = "not there yet: will be copied"


@dataclass(frozen=True)
class Verdict:
    """One judged fact.

    Attributes:
        node: The node's name, or several.
        check: The subject, in a word or two.
        state: "ok"; "note": worth knowing, the job runs; "red": the job would fail, hang, or compute something else.
        found: The fact; further lines are a table.
        cause: The likely cause.
        fix: The command or action that fixes it.
        lacking: True for what the launcher will copy there.
    """

    node: str
    check: str
    state: str
    found: str
    cause: str = ""
    fix: str = ""
    lacking: bool = False


@dataclass(frozen=True)
class Wanted:
    """The needs of a job.

    Attributes:
        nproc_per_node: Processes on each node.
        bundle: Hash of the code; "" skips the check.
        data: The data that each node needs, if any.
        data_hash: Hash of the data that the launcher copies; "" if it has no whole folder or copies none.
        job_id: The job that asks, whose own processes are not leftovers.
        machine: The launcher's machine, as :func:`nodelaunch.node.facts.find_system` names it.
        pid: The launcher's process.
        torchrun: False if another program runs the script, which may do without torch.
        visible: CUDA_VISIBLE_DEVICES as env= sets it; None if it does not.
    """

    nproc_per_node: int = 1
    bundle: str = ""
    data: DataFolder | None = None
    data_hash: str = ""
    job_id: str = ""
    machine: str = ""
    pid: int = field(default_factory=os.getpid)
    torchrun: bool = True
    visible: str | None = None


def judge_error(name: str, error: LabError) -> Verdict:
    """Returns the verdict for a node that could not be asked."""
    where = f" ({error.where})" if error.where and error.where != name else ""
    return Verdict(name, "node", "red", error.what + where, error.cause, error.fix)


def judge_facts(facts: Facts, wanted: Wanted, gpus: Sequence[Verdict] = ()) -> list[Verdict]:
    """Judges everything but the network, the clocks and other jobs; ``gpus`` are the verdicts on the GPUs."""

    def judge_each(part: str, judge: Callable) -> list[Verdict]:
        each = [
            judge(name, found, wanted) if is_there(found, part) else [judge_gap(name, found, part)]
            for name, found in facts.items()
        ]
        return [verdict for verdicts in each for verdict in verdicts]

    verdicts = [*judge_versions(facts, torchrun=wanted.torchrun), *judge_each("disk", judge_disk), *gpus]
    verdicts += judge_each("code", judge_code) if wanted.bundle else []
    return verdicts + (judge_data(facts, wanted) if wanted.data else [])


def is_there(found: Mapping, part: str) -> bool:
    """True if a node could find out this part."""
    return part in found and not (isinstance(found[part], Mapping) and "error" in found[part])


def judge_gap(name: str, found: Mapping, part: str) -> Verdict:
    """Returns the verdict for a part that a node could not find out in time."""
    cause = found.get(part, {}).get("error", "it took too long; a hanging disk, driver or name server does that")
    return Verdict(name, part, "note", "could not be found out", cause, "look by hand on that node, or go on without")


def list_per_node(values: Mapping[str, str]) -> str:
    """Returns one line per node, aligned."""
    width = max(map(len, values))
    return "".join(f"\n  {name:{width}}  {value}" for name, value in values.items())


def judge_versions(facts: Facts, *, torchrun: bool = True) -> list[Verdict]:
    """Compares Python's minor version, torch, NCCL and CUDA over the nodes; torchrun needs torch."""
    verdicts = [judge_gap(name, found, "versions") for name, found in facts.items() if not is_there(found, "versions")]
    have = {name: found["versions"] for name, found in facts.items() if is_there(found, "versions")}
    if not have:
        return verdicts
    for name, own in have.items():
        if tuple(map(int, own["python"].split(".")[:2])) < (3, 11):
            what = f"Python {own['python']}: 3.11 or newer is needed"
            cause = "what the launcher runs on nodes is written for Python 3.11"
            fix = "install a newer Python there, or name the one that is there: python=…"
            verdicts.append(Verdict(name, "Python", "red", what, cause, fix))
        if torchrun and not own["torch"]:
            cause = "torch was not installed there, or python= names another environment"
            fix = f"install torch there, or name the Python that has it: python=…; now: {own['program']}"
            verdicts.append(Verdict(name, "torch", "red", f"{own['program']} has no torch", cause, fix))
    titles = {"python": "Python", "torch": "torch", "cuda": "CUDA", "nccl": "NCCL"}
    texts = {
        name: ", ".join(f"{title} {own[key]}" if own[key] else f"no {title}" for key, title in titles.items())
        for name, own in have.items()
    }
    with_gpus = any(found.get("gpus", {}).get("gpus") for found in facts.values())
    kinds = {
        "Python": ("red", {own["python"].rpartition(".")[0] for own in have.values()}),
        "torch": ("red", {own["torch"].partition("+")[0] for own in have.values() if own["torch"]}),
        "NCCL": ("red" if with_gpus else "note", {own["nccl"] for own in have.values() if own["torch"]}),
        "CUDA": ("note", {own["cuda"] for own in have.values() if own["torch"]}),
    }
    differing = {kind: state for kind, (state, values) in kinds.items() if len(values) > 1}
    for kind, state in differing.items():
        cause = "the environments were made at different times, or python= names another one on one node"
        fix = "install the same versions on every node, by the same requirements file"
        words = f"{kind} is not the same on all nodes{list_per_node(texts)}"
        verdicts.append(Verdict(", ".join(have), "versions", state, words, cause, fix))
    return verdicts + [Verdict(name, "versions", "ok", text) for name, text in texts.items() if not differing]


def judge_disk(name: str, found: Mapping, wanted: Wanted) -> list[Verdict]:
    """Judges if the node's folder can be written and has room, and the size of its shared memory."""
    disk = found["disk"]
    free, folder = disk["free"], disk["folder"]
    elsewhere = "name a folder of yours on a larger disk: folder=…"
    if not disk["writable"]:
        cause = "the folder is another user's, or the disk is mounted read-only"
        verdicts = [Verdict(name, "disk", "red", f"{folder} cannot be written", cause, elsewhere)]
    elif free < DISK_NEEDED or disk["files"] == 0:
        what = f"{free / MIB:,.0f} MiB free at {folder}" if free < DISK_NEEDED else f"no file can be added at {folder}"
        cause = f"the disk is full (wanted: {DISK_NEEDED / MIB:.0f} MiB)"
        verdicts = [Verdict(name, "disk", "red", what, cause, f"free some space there, or {elsewhere}")]
    else:
        verdicts = [Verdict(name, "disk", "ok", f"{free / 2**30:,.1f} GiB free at {folder}")]
    if disk["shm"] is not None and disk["shm"] < SHARED_NEEDED:
        what = f"{disk['shm'] / MIB:,.0f} MiB of shared memory (/dev/shm)"
        cause = "a container's default; DataLoader workers die of it with a bus error"
        fix = "num_workers=0, or start the container with --shm-size=2g"
        verdicts.append(Verdict(name, "memory", "note", what, cause, fix))
    return verdicts


def judge_code(name: str, found: Mapping, wanted: Wanted) -> list[Verdict]:
    """Judges if code that was copied before still has the hash that is its name."""
    folder, digest = found["code"]["folder"], found["code"]["hash"]
    if digest is None:
        return [Verdict(name, "code", "ok", WILL_COPY, lacking=True)]
    if digest.startswith(wanted.bundle):
        return [Verdict(name, "code", "ok", f"the launcher's script and package ({wanted.bundle[:12]})")]
    cause = "a file was changed there by hand; the launcher's copy is the one to change"
    fix = f"on that node: rm -r -- {shlex.quote(folder)}   (it is copied again)"
    return [Verdict(name, "code", "red", f"{folder} is not what its name says", cause, fix)]


def judge_data(facts: Facts, wanted: Wanted) -> list[Verdict]:
    """Judges if every node has the data that the launcher copies, or those of the first node that has them."""
    verdicts = [judge_gap(name, found, "data") for name, found in facts.items() if not is_there(found, "data")]
    have = {name: found["data"] for name, found in facts.items() if is_there(found, "data")}
    hashes = {"the launcher": wanted.data_hash} if wanted.data_hash else {}
    hashes |= {name: own["hash"] for name, own in have.items() if own["hash"] and not own["missing"]}
    first = next(iter(hashes.values()), None)
    for name, own in have.items():
        place = own.get("path") or f"{own['folder']}/{wanted.data.identity_path}"
        fix = f"copy_data=True, or on that node: {wanted.data.fix or 'copy the folder there by hand'}"
        if own["hash"] and wanted.data_hash:  # existing data are never overwritten
            fix = f"on that node: rm -r -- {shlex.quote(place.rpartition('/')[0])}   (it is copied again)"
        state, what = "red", f"{place} is missing"
        cause = "the folder was not made or copied there, or LAB_DATA points elsewhere"
        if own["missing"]:
            what, cause = f"{place}: {', '.join(own['missing'])} is missing", "a copy was cut short"
        elif own["hash"] and own["hash"] != first:
            lines = list_per_node({other: digest[:12] for other, digest in hashes.items()})
            what = f"the folder is not that of {'the launcher' if wanted.data_hash else 'the other nodes'}{lines}"
            cause = f"it was made from other files, or by another version ({place})"
        elif own["hash"] or wanted.data.copy_data:
            found = f"the same on the nodes that have it ({own['hash'][:12]})" if own["hash"] else WILL_COPY
            state, what, cause, fix = "ok", found, "", ""
        lacking = state == "ok" and not own["hash"]
        verdicts.append(Verdict(name, "data", state, what, cause, fix, lacking))
    return verdicts


def judge_clocks(readings: Mapping[str, tuple[float, float]]) -> list[Verdict]:
    """Judges the nodes' clocks by (offset, round trip) in seconds against the launcher's."""
    verdicts = []
    for name, (offset, delay) in readings.items():
        if abs(offset) - delay / 2 > CLOCK_ALLOWED:
            what = f"the clock is {abs(offset):,.1f} s {'ahead of' if offset > 0 else 'behind'} the launcher's"
            cause, fix = "nobody sets it; times in logs cannot be compared", "sudo timedatectl set-ntp true  (there)"
            verdicts.append(Verdict(name, "clock", "note", what, cause, fix))
    within = f"within {CLOCK_ALLOWED:.0f} s of the launcher's"
    return verdicts or [Verdict(name, "clock", "ok", within) for name in readings]


def judge_jobs(facts: Facts, wanted: Wanted, answers: Mapping[str, Mapping]) -> list[Verdict]:
    """Names the processes of other jobs, each once if several nodes are one machine.

    Red are those that hold the memory of a GPU that this job will use; a held port is judged with the port. A note
    names a job's id that was set by somebody other than the launcher.

    Args:
        facts: Per node, what its probe found.
        wanted: The needs of the job.
        answers: Per node, the answer of :func:`nodelaunch.node.processes.find_jobs`.
    """
    verdicts, seen = [], set()
    for name, answer in answers.items():
        system, gpus = facts.get(name, {}).get("system", {}), facts.get(name, {}).get("gpus", {})
        place = system.get("machine")
        holders = {int(row[0]) for row in gpus.get("apps", []) if row[0].isdigit()}
        by_job: dict[str, list[Mapping]] = {}
        watched = {process["id"] for process in answer["jobs"] if process["supervisor"]}
        for process in answer["jobs"]:
            if process["id"] != wanted.job_id and (place, process["pid"]) not in seen:
                seen.add((place, process["pid"]))
                by_job.setdefault(process["id"], []).append(process)
        for job, own in by_job.items():
            pids = ", ".join(str(process["pid"]) for process in own[:8])
            what = f"job {job} still runs here: {len(own)} process{'es' if len(own) > 1 else ''} (pid {pids})"
            state, cause = "note", f"a leftover, or a node that was started by hand: {own[0]['command']}"
            fix = stop_command(job, name, system, wanted)
            if job in watched:
                cause = "another notebook or script runs it; the two share the machine"
                fix = "none is needed; to measure without it, wait until it has ended"
            elif holders & {process["pid"] for process in own}:
                state, what = "red", f"{what}, and holds GPU memory"
            verdicts.append(Verdict(name, "jobs", state, what, cause, fix))
        for job in answer.get("inherited", ()):
            if (place, job) not in seen:
                seen.add((place, job))
                verdicts.append(judge_inherited(name, job, here=place == wanted.machine))
    return verdicts


def judge_inherited(name: str, job: str, *, here: bool) -> Verdict:
    """Returns the note on a LAB_JOB_ID that was set where the launcher, or the login on a node, was started."""
    where, cause = "in every login there", "a profile exports it, such as ~/.profile or ~/.bashrc"
    fix = "on that node, remove the line that exports LAB_JOB_ID"
    if here:
        where, cause = "in the environment of the launcher", "it was exported in the shell that started Python"
        fix = "unset LAB_JOB_ID in that shell, then start Python (or JupyterLab) from it again"
    what = f"LAB_JOB_ID={job} is set {where}: all that is started from it looks like a part of that job"
    return Verdict(name, "jobs", "note", what, cause, fix)


def stop_command(job: str, name: str, system: Mapping, wanted: Wanted) -> str:
    """Returns the command that stops a job on a node."""
    here = wanted.machine and system.get("machine") == wanted.machine
    return f"python -m nodelaunch stop {shlex.quote(job)}{'' if here else f' {shlex.quote(name)}'}"
