"""Tells the rank that failed first from the ranks that failed because of it, and says what it means."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import replace
from pathlib import Path

from nodelaunch.causes import look_up
from nodelaunch.disks import explain_disk, explain_full_disk
from nodelaunch.ends import EndError, explain_signal, find_signalled, name_signal
from nodelaunch.node.errors import failed_as_consequence, shorten_gloo
from nodelaunch.node.reasons import StopReason
from nodelaunch.result import Failure
from nodelaunch.state import JobState

HEADING = "Traceback (most recent call last):"
# Where on a node the script lies, or its project; libraries, too, may be in a folder called work.
OWN = r"[^\"]*/(?:code/[0-9a-f]{64}/script|work/[\w.-]+-[0-9a-f]{6})/"
OWN_FRAME = re.compile(rf'\s*File "({OWN}[^"]*)", line (\d+)')
OWN_FOLDER = re.compile(rf'(File "){OWN}')
WAITED = re.compile(r"Timed out waiting|Application timeout|wait timeout|Watchdog caught collective|Connect timeout")
DEAD_MEMORY = (
    "often Linux's out-of-memory killer (`sudo dmesg | tail` then says so); else a `kill -9`, or the scheduler"
)


def diagnose(state: JobState, reason: StopReason | None = None) -> Failure | None:
    """Returns what failed first, or None where nothing did.

    Args:
        state: What was heard of the job.
        reason: Why the launcher ended the job, where it did.
    """
    errors = sorted((_add_traceback(state, error) for error in state.errors), key=lambda error: error["at"])
    if reason in (StopReason.STOPPED, StopReason.INTERRUPTED):
        # What the ranks say about their end comes of that; what was heard before does not.
        errors = [error for error in errors if state.asked is not None and error["at"] <= state.asked]
        if not errors:
            return _describe_end(state, reason)
    first = _sort_first(errors)[:1]
    if first and _is_own(first[0]):
        return _describe_rank(state, first[0], errors)
    ended = [part.ended for part in state.nodes.values() if part.ended]
    limits = [end["why"] for end in ended if end["reason"] == StopReason.LIMIT]
    if limits or reason == StopReason.LIMIT:
        # One node ends a moment before the other, whose ranks then miss the first one's.
        silent = [part.name for part in state.nodes.values() if reason and not (part.ended or part.by_hand)]
        cause = "it had more to do, or a rank waited for something that never came"
        if silent:
            cause = f"the supervisor on {', '.join(silent)} was stopped (SIGSTOP), or that machine hangs"
        what = _shorten(f"The job ran into its {limits[0] if limits else f'time limit of {state.limit:g} s'}.")
        return Failure("limit", what, cause=cause, fix="a larger limit=, or less work")
    for part in state.nodes.values():
        if part.ended and part.ended["reason"] == StopReason.SILENCE and not reason:
            cause = "the computer of the launcher slept, or the network to the node was cut"
            fix = "run the job again; a checkpoint lets the job go on where it was"
            what = _shorten(f"{part.name} ended the job: {part.ended['why']}.")
            return Failure("lost", what, node=part.name, cause=cause, fix=fix)
    gave_up = min((error["at"] for error in errors if WAITED.search(error["message"])), default=math.inf)
    if not reason and (signalled := find_signalled(state, before=gave_up)):
        return _describe_signal(state, *signalled, errors)
    if errors:
        return _describe_waiting(state, errors)
    if reason:
        return _describe_end(state, reason)
    for part in state.nodes.values():
        if part.gone and part.ended is None:
            return _describe_lost(state, part.name)
    followed = [part for part in state.nodes.values() if not part.by_hand]
    bad = [part for part in followed if part.ended is None or part.ended["returncode"]]
    # One that was told to end (srun tells all when one has failed) is not the one that failed.
    bad.sort(key=lambda part: bool(part.ended and part.ended["reason"]))
    return _describe_torchrun(state, bad[0].name) if bad else None


def _add_traceback(state: JobState, error: dict) -> dict:
    """An exit with the traceback that the rank printed last, where only its exit status was heard of."""
    lines = list(state.tails.get(error["rank"], ()))
    # With another status it did not end by an exception: it caught that, and printed it.
    if error["kind"] != "exit" or error.get("code") != 1 or HEADING not in lines:
        return error
    lines = lines[len(lines) - 1 - lines[::-1].index(HEADING) :]
    message = next((line for line in lines[1:] if not line.startswith(" ")), "")
    if not message:
        return error
    own = [(Path(place[1]).name, place[2]) for line in lines if (place := OWN_FRAME.match(line))]
    location = "{}, line {}".format(*own[-1]) if own else ""
    return {
        **error,
        "kind": "exception",
        "message": message,
        "traceback": OWN_FOLDER.sub(r"\1", "\n".join(lines)),
        "location": location,
    }


def _find_last_line(state: JobState, rank: int) -> str:
    return state.tails[rank][-1] if rank in state.tails else "it said nothing"


def find_first(errors: list[dict]) -> str:
    """Names, in one line, the first of the failures after which the workers were started anew."""
    error = _sort_first(errors)[0]
    return _shorten(f"rank {error['rank']} on {error['node']}: {_shorten_message(error)}")


def _sort_first(errors: list[dict]) -> list[dict]:
    """By what a rank did itself before what another did to it, and then by time.

    SIGABRT and SIGTERM are between the two: NCCL's watchdog aborts a rank that waits, and torchrun ends one.
    """
    return sorted(errors, key=lambda error: (not _is_own(error), error.get("code") in (-6, -15), error["at"]))


def _is_own(error: dict) -> bool:
    return error["kind"] != "hang" and not failed_as_consequence(error["message"])


def _describe_rank(state: JobState, error: dict, errors: list[dict]) -> Failure:
    rank, kind, message = error["rank"], error["kind"], error["message"]
    cause, fix = look_up(f"{message}\n{error['traceback']}")
    cause, fix = error.get("cause") or cause, error.get("fix") or fix
    if full := explain_full_disk(state, error):
        cause, fix = full
    elif kind == "signal" and error["code"] == -9:
        peak = state.memory.get(rank)
        size = f"; its memory had reached {peak / 2**20:,.0f} MiB" if peak else ""
        cause, fix = DEAD_MEMORY + size, "a smaller batch, fewer processes on the node, or a node with more memory"
    elif kind == "signal":
        cause, fix = explain_signal(-error["code"])
    elif kind == "mismatch":
        cause = error.get("cause") or "a script was changed or started by hand with other arguments"
        fix = error.get("fix") or "start all nodes with job.run()"
    elif kind == "exit":
        cause, fix = cause or "the script ended itself with this status", fix or "look at the last lines of this rank"
        if error.get("silent"):
            cause = f"it ended before the script began: {_find_last_line(state, rank)[:200]}"
    said = message.strip().splitlines()[0] if message.strip() else kind
    later = [other for other in errors if other["rank"] != rank]
    # torchrun ends the other ranks of its node by SIGTERM.
    own = [other for other in later if _is_own(other) and other.get("code") != -signal.SIGTERM]
    # An exception says more than an abort, and is named before one that was heard of earlier.
    first = error["at"] <= min((other["at"] for other in own), default=math.inf)
    verb = "was " if kind == "signal" else "failed first: " if first else "failed: "
    return Failure(
        kind=kind,
        what=_shorten(f"Rank {rank} on {error['node']} {verb}{said}"),
        rank=rank,
        node=error["node"],
        message=message,
        location=error["location"],
        traceback=error["traceback"],
        cause=cause,
        fix=fix or "mend the script at the line that the traceback names, then run the job again",
        consequences={other["rank"]: _shorten_message(other) for other in later if other not in own},
        others={other["rank"]: _shorten_message(other) for other in own},
        stacks=state.stacks,
    )


def _describe_waiting(state: JobState, errors: list[dict]) -> Failure:
    """All that was heard is that ranks waited for others: one ended early, hangs, or cannot be reached."""
    heard = errors[0]
    waiting = {error["rank"] for error in errors}
    text = "\n".join(error["message"] for error in errors)
    early = sorted(set(state.done) - waiting)
    stacks = {rank: _find_stand(text) for rank, text in state.stacks.items()}
    # A rank that NCCL's watchdog aborted has printed its stacks; it was in no state to hand them over.
    told = {error["rank"]: error.get("traceback") or "\n".join(state.tails.get(error["rank"], ())) for error in errors}
    stacks |= {rank: _find_stand(text) for rank, text in told.items()}
    common = {"message": heard["message"], "traceback": "", "stacks": stacks}
    for part in state.nodes.values():
        if part.gone and part.ended is None:
            return _describe_lost(
                state, part.name, consequences={error["rank"]: _shorten_message(error) for error in errors}
            )
    if early:
        cause = "the ranks have different numbers of batches, so that one takes a step more than the other"
        fix = "drop_last=True, or torch.distributed.algorithms.join.Join around the loop"
        if "connectFullMesh" in heard["message"]:
            # Torch's own race: init_process_group returns on one rank when its side of a connection is there.
            cause = "it ended without a word to the others, which were still on their way to it"
            fix = "a dist.barrier() before the script's end"
        return Failure(
            "exit",
            _shorten(f"Rank {early[0]} had ended its work while rank {heard['rank']} still waited for it."),
            rank=early[0],
            node=state.ranks[early[0]].node,
            cause=cause,
            fix=fix,
            consequences={error["rank"]: _shorten_message(error) for error in errors},
            **common,
        )
    if heard["kind"] == "hang" or WAITED.search(text):
        if silent := [rank for rank in sorted(set(state.ranks) - waiting) if not _waits(state, rank)]:
            return _describe_silent(state, silent[0], errors, common)
        return _describe_hang(state, errors, common)
    cause, fix = look_up(text)
    missing = sorted(set(state.ranks) - waiting)
    return Failure(
        "lost",
        _shorten(f"Rank {heard['rank']} on {heard['node']} lost its peers: {_shorten_message(heard)}"),
        rank=missing[0] if missing else heard["rank"],
        node=state.ranks[missing[0]].node if missing else heard["node"],
        cause=cause or "another rank died without a word, or the network between the nodes was cut",
        fix=fix or "job.preflight() looks at the network both ways; the log has what torchrun said",
        consequences={error["rank"]: _shorten_message(error) for error in errors},
        **common,
    )


def _describe_hang(state: JobState, errors: list[dict], common: dict) -> Failure:
    """Every rank was heard to wait, or stood still: where each one stood says whether one is outside a collective."""
    heard = errors[0]
    what, rank = "The ranks wait for each other.", heard["rank"]
    stacks = common["stacks"]
    inside, outside = ([one for one in stacks if _stands_outside(state, one) is there] for there in (False, True))
    if inside and outside:
        rank = outside[0]
        what = f"Rank {rank} on {state.ranks[rank].node} stood in the script itself, while rank {inside[0]}"
        what += " waits in a collective."
    return Failure(
        "hang",
        _shorten(what),
        rank=rank,
        node=state.ranks[rank].node if rank in state.ranks else heard["node"],
        cause="a collective (all_reduce, barrier, backward of DDP) that not every rank calls, or a blocked network",
        fix="compare where the ranks stood: every rank has to call the same collectives in the same order",
        **common,
    )


def _waits(state: JobState, rank: int) -> bool:
    """Whether a rank of which no error was heard stood in a collective when it was told to end."""
    return "/torch/distributed/" in state.stacks.get(rank, "")


def _stands_outside(state: JobState, rank: int) -> bool | None:
    """Whether a rank stood in a line of the script itself, and not in torch; None where that is not known."""
    # faulthandler writes all threads, and the one that was interrupted last: the main thread, which runs the script.
    stack = state.stacks.get(rank, "").rpartition("Current thread")[2]
    places = re.findall(r'File "([^"]+)", line', stack)
    if not places:
        return None
    return re.match(OWN, places[0 if "most recent call first" in stack else -1]) is not None


def _describe_silent(state: JobState, rank: int, errors: list[dict], common: dict) -> Failure:
    """A rank that reported no collective and no error, while others waited for it."""
    node, heard = state.ranks[rank].node, errors[0]
    said = f"; the last that it printed: {state.tails[rank][-1][:160]}" if rank in state.tails else ""
    return Failure(
        "hang",
        _shorten(f"Rank {rank} on {node} was silent while rank {heard['rank']} on {heard['node']} waited for it."),
        rank=rank,
        node=node,
        cause=f"it was busy with something else, hung outside of a collective, or its machine stood still{said}",
        fix="look at where it stood: every rank has to call the same collectives in the same order",
        consequences={error["rank"]: _shorten_message(error) for error in errors if error["message"]},
        **common,
    )


def _describe_signal(state: JobState, node: str, program: str, number: int, errors: list[dict]) -> Failure:
    cause, fix = explain_signal(number)
    what = f"{program} on {node} was ended by signal {number} ({name_signal(number)})."
    return Failure(
        "lost" if program == "the supervisor" else "torchrun",
        _shorten(_capitalise(what)),
        node=node,
        cause=cause,
        fix=fix,
        consequences={error["rank"]: _shorten_message(error) for error in errors},
    )


def _describe_end(state: JobState, reason: StopReason) -> Failure:
    if reason == StopReason.JOIN:
        absent = [part.name for part in state.nodes.values() if not part.joined]
        silent = [part.name for part in state.nodes.values() if not part.started]
        cause = (
            f"{state.starter} was not started there"
            if silent
            else "it was started, and did not reach the meeting point"
        )
        return Failure(
            "join",
            _shorten(f"Not all nodes joined in time; missing: {', '.join(silent or absent)}."),
            node=(silent or absent)[0],
            cause=cause,
            fix="start it (bash node….sh on that node), or let job.preflight() say what is in the way",
        )
    cause = "the launcher was interrupted" if reason == StopReason.INTERRUPTED else "job.stop() was called"
    fix = "run the job again; a checkpoint lets it go on where it was"
    return Failure("stopped", f"The job was {reason.value}.", cause=cause, fix=fix, stacks=state.stacks)


def _describe_lost(state: JobState, node: str, consequences: dict[int, str] | None = None) -> Failure:
    refusal = state.nodes[node].refusal
    if refusal and (isinstance(refusal, EndError) or not state.nodes[node].started):
        return Failure("lost", refusal.what, node=node, message=str(refusal), cause=refusal.cause, fix=refusal.fix)
    return Failure(
        "lost",
        _shorten(f"The connection to {node} was lost."),
        node=node,
        message=f"{refusal or ''}",
        cause="the node was switched off, the network between you and it was cut, or its supervisor was killed",
        fix="see that it answers (ssh), then run the job again; a checkpoint lets the job go on where it was",
        consequences=consequences or {},
    )


def _describe_torchrun(state: JobState, node: str) -> Failure:
    part = state.nodes[node]
    text = "\n".join(part.tail)
    if "RendezvousTimeoutError" in text and not all(one.joined for one in state.nodes.values()):
        # torchrun's own clock was a moment before the launcher's.
        return _describe_end(state, StopReason.JOIN)
    if "RendezvousClosedError" in text and not all(one.joined for one in state.nodes.values()):
        cause = "a node that came first ended the meeting: with another number of nodes it meets alone, and ends"
        fix = "start each node by its node….sh of this job"
        return replace(_describe_end(state, StopReason.JOIN), cause=cause, fix=fix)
    errors = [line for line in part.tail if re.search(r"(Error|Exception|error)\b.*", line)]
    said = errors[-1].strip() if errors else f"exit status {part.ended['returncode'] if part.ended else 'unknown'}"
    cause, fix = look_up(text)
    if re.search(r"Rendezvous\w*Error|DistStoreError|TimeoutError|EADDRINUSE", text):
        cause = "the nodes could not meet at node 0's address and port"
        fix = "job.preflight() says in seconds which way is closed"
    cause, fix = explain_disk(part) or (cause, fix)
    return Failure(
        "torchrun",
        _shorten(_capitalise(f"{state.starter} ended on {node}: {said}")),
        node=node,
        message=said,
        traceback="\n".join(list(part.tail)[-15:]),
        cause=cause,
        fix=fix or "read the log",
    )


def _shorten_message(error: dict) -> str:
    # The first line: the last one of torch's long messages is advice.
    lines = error["message"].strip().splitlines() or [error["kind"]]
    return shorten_gloo(lines[0])[:160]


def _find_stand(stack: str) -> str:
    """The line of the training script in a stack of faulthandler (innermost first) or of traceback (last)."""
    found = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', stack)
    # In traceback's own form the script has no folder, see nodelaunch.node.worker.
    own = [place for place in found if re.match(OWN, place[0]) or not re.search("[/<]", place[0])]
    if not own:
        return "(not known)"
    path, line, name = own[0] if "most recent call first" in stack else own[-1]
    return f"{path.rpartition('/')[2]}, line {line}, in {name}"


def _capitalise(text: str) -> str:
    """A sentence with a capital; torchrun keeps its own letters."""
    return text if text.startswith("torchrun") else text[0].upper() + text[1:]


def _shorten(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "…"
