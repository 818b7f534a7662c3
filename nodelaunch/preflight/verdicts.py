"""Judges what each node says about itself, and whether the nodes agree: no question to the network."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lab_common import LabError
from nodelaunch.spec import DataFolder

# Per node, what its probe found, by the names in nodelaunch.node.facts.find_facts.
Facts = Mapping[str, Mapping]
MIB = 2**20
DISK_NEEDED = 200 * MIB
# A DataLoader worker hands its batches over in shared memory; Docker's 64 MiB are enough for 32×32 images.
SHARED_NEEDED = 64 * MIB
WILL_COPY = "not there yet: will be copied"


@dataclass(frozen=True)
class Verdict:
    """One judged fact.

    Attributes:
        node: The node's name, or several.
        check: What was looked at, in a word or two.
        state: "ok"; "note": worth knowing, the job runs; "red": the job would fail, hang, or compute something else.
        found: What was found; further lines are a table.
        cause: The likely cause.
        fix: The command or action that mends it.
        lacking: Whether it is what the launcher will copy there.
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
    """What the job needs of its nodes.

    Attributes:
        processes: Per node.
        bundle: Hash of the code, "" where none is asked for.
        data: What data each node needs, None where none are.
        data_hash: Of what the launcher copies, "" where it has no whole folder or copies none.
        job_id: The job that asks; its own processes are none of an earlier job.
        machine: Where the launcher runs, as :func:`nodelaunch.node.facts.find_system` names it.
        pid: The launcher's process.
        torchrun: Whether torchrun runs the script; without torch on a node it cannot, and another program may.
        visible: CUDA_VISIBLE_DEVICES as env= sets it; None where it does not.
    """

    processes: int = 1
    bundle: str = ""
    data: DataFolder | None = None
    data_hash: str = ""
    job_id: str = ""
    machine: str = ""
    pid: int = 0
    torchrun: bool = True
    visible: str | None = None


def judge_error(name: str, error: LabError) -> Verdict:
    """Turns the error of a node that could not be asked into its verdict."""
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
    """Says whether a node found a part out."""
    return part in found and not (isinstance(found[part], Mapping) and "error" in found[part])


def judge_gap(name: str, found: Mapping, part: str) -> Verdict:
    """The verdict for what a node could not find out, or not in time."""
    cause = found.get(part, {}).get("error", "it took too long; a hanging disk, driver or name server does that")
    return Verdict(name, part, "note", "could not be found out", cause, "look by hand on that node, or go on without")


def list_per_node(values: Mapping[str, str]) -> str:
    """One line per node, aligned."""
    width = max(map(len, values))
    return "".join(f"\n  {name:{width}}  {value}" for name, value in values.items())


def judge_versions(facts: Facts, *, torchrun: bool = True) -> list[Verdict]:
    """Compares Python's minor version, torch, NCCL and CUDA over the nodes, and that torch is there for torchrun."""
    verdicts = [judge_gap(name, found, "versions") for name, found in facts.items() if not is_there(found, "versions")]
    have = {name: found["versions"] for name, found in facts.items() if is_there(found, "versions")}
    if not have:
        return verdicts
    for name, own in have.items():
        if tuple(map(int, own["python"].split(".")[:2])) < (3, 11):
            fix = "install a newer Python there, or name the one that is there: python=…"
            cause = "what the launcher runs on nodes is written for Python 3.11"
            verdicts.append(
                Verdict(name, "Python", "red", f"Python {own['python']}: 3.11 or newer is needed", cause, fix)
            )
        if torchrun and not own["torch"]:
            cause = "torch was not installed there, or python= names another environment"
            fix = f"install torch there, or name the Python that has it: python=…; now: {own['program']}"
            verdicts.append(Verdict(name, "torch", "red", f"{own['program']} has no torch", cause, fix))
    texts = {name: _describe_versions(own) for name, own in have.items()}
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
    if not differing:
        verdicts += [Verdict(name, "versions", "ok", text) for name, text in texts.items()]
    return verdicts


def _describe_versions(own: Mapping) -> str:
    names = {"python": "Python", "torch": "torch", "cuda": "CUDA", "nccl": "NCCL"}
    return ", ".join(f"{title} {own[key]}" if own[key] else f"no {title}" for key, title in names.items())


def judge_disk(name: str, found: Mapping, wanted: Wanted) -> list[Verdict]:
    """Judges that the node's folder can be written and has room, and the size of its shared memory."""
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
    """Judges that code which was copied before is still what its name, a hash, says."""
    folder, digest = found["code"]["folder"], found["code"]["hash"]
    if digest is None:
        return [Verdict(name, "code", "ok", WILL_COPY, lacking=True)]
    if digest.startswith(wanted.bundle):
        return [Verdict(name, "code", "ok", f"the launcher's script and package ({wanted.bundle[:12]})")]
    cause = "a file was changed there by hand; the launcher's copy is the one to change"
    fix = f"on that node: rm -r -- {shlex.quote(folder)}   (it is copied again)"
    return [Verdict(name, "code", "red", f"{folder} is not what its name says", cause, fix)]


def judge_data(facts: Facts, wanted: Wanted) -> list[Verdict]:
    """Judges that every node has the data that the launcher copies, or those of the first node that has them."""
    verdicts = [judge_gap(name, found, "data") for name, found in facts.items() if not is_there(found, "data")]
    have = {name: found["data"] for name, found in facts.items() if is_there(found, "data")}
    hashes = {"the launcher": wanted.data_hash} if wanted.data_hash else {}
    hashes |= {name: own["hash"] for name, own in have.items() if own["hash"] and not own["missing"]}
    first = next(iter(hashes.values()), None)
    for name, own in have.items():
        place = own.get("path") or f"{own['folder']}/{wanted.data.identity_path}"
        fix = f"copy_data=True, or on that node: {wanted.data.fix or 'copy the folder there by hand'}"
        if own["hash"] and wanted.data_hash:  # what is there is never written over
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
