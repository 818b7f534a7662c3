"""Tells the rank that failed first from the ranks that failed because of it, and says what it means."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import replace

from lab_common.text import clean_message
from nodelaunch.disks import explain_disk, explain_full_disk
from nodelaunch.ends import EndError, explain_signal, find_signalled, name_signal
from nodelaunch.messages import look_up
from nodelaunch.node.errors import failed_as_consequence, shorten_gloo
from nodelaunch.node.reasons import StopReason
from nodelaunch.result import Failure
from nodelaunch.state import JobState

HEADING = "Traceback (most recent call last):"
JOIN = "init_process_group('gloo') with no other arguments uses what torchrun has set"
# Where on a node the script lies, or its project; libraries, too, may be in a folder called work.
OWN = r"[^\"]*/(?:code/[0-9a-f]{64}/script|work/[\w.-]+-[0-9a-f]{6})/"
OWN_FRAME = re.compile(rf'\s*File "{OWN}([^"]*)", line (\d+)')
OWN_FOLDER = re.compile(rf'(File "){OWN}')
WAITED = re.compile(r"Timed out waiting|Application timeout|wait timeout|Watchdog caught collective|Connect timeout")
DEAD_MEMORY = (
    "often Linux's out-of-memory killer (`sudo dmesg | tail` then says so); else a `kill -9`, or the scheduler"
)
MORE_MEMORY = "a smaller batch, fewer processes on the node, or a node with more memory"
INNER = (
    (r"[\w.]+: Caught \w+ in DataLoader worker", "in a DataLoader worker"),
    (r"torch\.multiprocessing\.spawn\.ProcessRaisedException", "in a process that the script started"),
)
# Lines by which a program says why it aborts; all else that it printed may have nothing to do with its end.
ABORTS = re.compile(r"terminate called|what\(\):|^(ERROR|FATAL|Fatal|OMP: Error)\b|bad_alloc|gloo|[Bb]us error")


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
    if state.standstill and not any(_is_own(error) and error["at"] <= state.asked for error in errors):
        return _describe_hang(state, [error for error in errors if error["at"] <= state.asked])
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
        stood = sorted((rank, place) for rank, text in state.stacks.items() if (place := _find_stand(text)))
        at_end = "; ".join(f"rank {rank} stood at {place}" for rank, place in stood[:4])
        if stands := state.name_stands() or at_end:
            cause += f"; {stands}"
        what = _shorten(f"The job ran into its {limits[0] if limits else f'time limit of {state.limit:g} s'}.")
        return Failure("limit", what, cause=cause, fix=_advise_limit(state, stands))
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
    if bad:
        return _describe_torchrun(state, bad[0].name)
    return _describe_alone(state) if state.trained_alone else None


def _advise_limit(state: JobState, stands: str) -> str:
    """What to do about a job that ran into its time limit; ``stands`` are the places of its ranks, as far as known."""
    if not state.still.keys() >= state.ranks.keys():  # a rank moved until the end
        return "a larger limit=, or less work"
    fix = "look at what each rank waits for there; a larger limit= only if that ends by itself"
    spawns = "multiprocessing.spawn" in stands
    return f"{fix}; torchrun has started one process per rank: train in it, without mp.spawn" if spawns else fix


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
    own = [place.groups() for line in lines if (place := OWN_FRAME.match(line))]
    location = "{}, line {}".format(*own[-1]) if own else ""
    return {
        **error,
        "kind": "exception",
        "message": message,
        "traceback": OWN_FOLDER.sub(r"\1", "\n".join(lines)),
        "location": location,
    }


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
    return error["kind"] != "hang" and not failed_as_consequence(error["message"], error.get("file", "/torch/"))


def _describe_rank(state: JobState, error: dict, errors: list[dict]) -> Failure:
    """A rank that failed by itself: by an exception, an exit or a signal."""
    rank, kind, message = error["rank"], error["kind"], error["message"]
    words = _choose_words(state, error)
    cause, fix = _explain_rank(state, error, words, errors)
    lines = message.strip().splitlines() or [kind]
    # Of a process that the script or its DataLoader started: the message holds its traceback, and ends with the error.
    inner = next((where for pattern, where in INNER if re.match(pattern, lines[0])), "")
    said = f"{lines[-1]} ({inner})" if inner else lines[0]
    if kind == "exit" and words and words[-1] not in said:
        said += f": {words[-1]}"
    place = error["location"] or _find_stand(state.stacks.get(rank, ""))
    later = [other for other in errors if other["rank"] != rank]
    # torchrun ends the other ranks of its node by SIGTERM.
    own = [other for other in later if _is_own(other) and other.get("code") != -signal.SIGTERM]
    # An exception says more than an abort, and is named before one that was heard of earlier.
    first = error["at"] <= min((other["at"] for other in own), default=math.inf)
    verb = "was " if kind == "signal" else "failed first: " if first else "failed: "
    begin = f"begin at {place}, the script's own line" if place else "begin at the last lines of the traceback"
    return Failure(
        kind=kind,
        what=_shorten(f"Rank {rank} on {error['node']} {verb}{said}"),
        rank=rank,
        node=error["node"],
        message=message,
        location=error["location"],
        traceback=error["traceback"],
        cause=cause or "the launcher does not know this message; it is the script's, or of a package that it uses",
        fix=fix or begin,
        consequences={other["rank"]: _shorten_message(other) for other in later if other not in own},
        others={other["rank"]: _shorten_message(other) for other in own},
        stacks=state.stacks,
    )


def _choose_words(state: JobState, error: dict) -> list[str]:
    """The last lines of a rank that say why it ended, if it ended without an exception."""
    lines = [line for line in state.tails.get(error["rank"], ()) if "Warning" not in line]
    if error["kind"] == "signal":
        return [line for line in lines if ABORTS.search(line)] or [line for line in lines if line[:1] != " "][-1:]
    return lines[-1:] if error["kind"] == "exit" else []


def _explain_rank(state: JobState, error: dict, words: list[str], errors: list[dict]) -> tuple[str, str]:
    """The cause and the fix, as far as they are known: by the rank's message, its last words, or how it ended."""
    kind, last = error["kind"], words[-1][:200] if words else ""
    # Without the lines of source, which may talk of anything; but os.fork() has no frame of its own.
    trace = re.sub(r"^ {4}(?!.*\bfork(pty)?\().*\n?", "", error["traceback"], flags=re.MULTILINE)
    cause, fix = look_up("\n".join([trace, error["message"], *words]))
    if not cause and (full := explain_full_disk(state, error)):
        cause, fix = full
    cause, fix = error.get("cause") or cause, error.get("fix") or fix
    if kind == "signal" and error["code"] == -signal.SIGKILL:
        peak = state.memory.get(error["rank"])
        return DEAD_MEMORY + (f"; its memory had reached {peak / 2**20:,.0f} MiB" if peak else ""), MORE_MEMORY
    if kind == "signal" and not cause:
        return explain_signal(-error["code"], last)
    if "different collectives" in cause:
        places = {rank: _find_stand(text) for rank, text in state.stacks.items()}
        places |= {other["rank"]: other["location"] for other in errors if other["location"]}
        cause += f": {'; '.join(f'rank {rank} at {place}' for rank, place in sorted(places.items()) if place)}"
    if kind == "mismatch":
        cause = cause or "a script was changed or started by hand with other arguments"
        return cause, fix or "start all nodes with job.run()"
    if kind == "exit" and error.get("silent"):
        return f"it ended before the script began: {last or 'it said nothing'}", fix or "look at the log"
    if kind == "exit":
        cause = cause or "the script ended itself with this status; that is the last line that it printed"
        return cause, fix or "look at the last lines of this rank"
    return cause, fix


def _describe_waiting(state: JobState, errors: list[dict]) -> Failure:
    """All that was heard is that ranks waited for others: one ended early, hangs, or cannot be reached."""
    heard = errors[0]
    waiting = {error["rank"] for error in errors}
    text = "\n".join(error["message"] for error in errors)
    consequences = {error["rank"]: _shorten_message(error) for error in errors if error["message"]}
    for part in state.nodes.values():
        if part.gone and part.ended is None:
            return _describe_lost(state, part.name, consequences=consequences)
    if early := sorted(set(state.done) - waiting):
        return _describe_early(state, early[0], heard, consequences)
    if heard["kind"] == "hang" or WAITED.search(text):
        return _describe_hang(state, errors)
    cause, fix = look_up(text)
    missing = sorted(set(state.ranks) - waiting)
    return Failure(
        "lost",
        _shorten(f"Rank {heard['rank']} on {heard['node']} lost its peers: {_shorten_message(heard)}"),
        rank=missing[0] if missing else heard["rank"],
        node=state.ranks[missing[0]].node if missing else heard["node"],
        message=heard["message"],
        cause=cause or "another rank died without a word, or the network between the nodes was cut",
        fix=fix or "job.preflight() looks at the network both ways; the log has what torchrun said",
        consequences=consequences,
        stacks=_list_stands(state, errors),
    )


def _describe_early(state: JobState, rank: int, heard: dict, consequences: dict[int, str]) -> Failure:
    """A rank had ended its script in order, and another still waited for it."""
    last = f"; the last that it printed: {state.tails[rank][-1][:160]}" if state.tails.get(rank) else ""
    cause = f"it left earlier (return, sys.exit), or the ranks have different numbers of batches{last}"
    fix = "for batches: drop_last=True, or torch.distributed.algorithms.join.Join around the loop"
    if "connectFullMesh" in heard["message"]:
        # Torch's own race: init_process_group returns on one rank when its side of a connection is there.
        cause = "it ended without a word to the others, which were still on their way to it"
        fix = "a dist.barrier() before the script's end"
    return Failure(
        "exit",
        _shorten(f"Rank {rank} had ended its work while rank {heard['rank']} still waited for it."),
        rank=rank,
        node=state.ranks[rank].node,
        message=heard["message"],
        cause=cause,
        fix=fix,
        consequences=consequences,
        stacks=_list_stands(state, [heard]),
    )


def _describe_hang(state: JobState, errors: list[dict]) -> Failure:
    """The ranks stand still, or their group's timeout came: by where each of them stood."""
    facts = {error["rank"]: error for error in errors} | state.still
    waiting = sorted({*state.waiting, *(error["rank"] for error in errors)})
    absent = [rank for rank in state.absent if rank not in waiting and not _waits(state, rank)]
    if waiting and state.done and not (state.halted or absent):
        heard = {"rank": waiting[0], "message": ""} | facts.get(waiting[0], {})
        return _describe_early(state, min(state.done), heard, {})
    rank = next(iter([*sorted(state.halted), *absent, *sorted(state.lingering), *waiting]), 0)
    node = state.ranks[rank].node if rank in state.ranks else ""
    other = next((one for one in waiting if one != rank), None)
    whom = "another rank" if other is None else f"rank {other} on {state.ranks[other].node}"
    fact = facts.get(rank, {})
    if rank in state.halted:
        what = f"Rank {rank} on {node} is stopped (SIGSTOP) while {whom} waits for it."
        cause, fix = "somebody stopped the process: a debugger, Ctrl-Z, or kill -STOP", "let it go on: kill -CONT"
    elif rank in absent:
        where = f"in {fact['where']}" if fact.get("where") else "silent"
        what = f"Rank {rank} on {node} was {where} while {whom} waited for it."
        cause = "it did something else for longer than the group's own timeout, or hung outside of a collective"
        cause += f"; the last that it printed: {state.tails[rank][-1][:160]}" if rank in state.tails else ""
        fix = "every rank has to come to the same collectives; for work that takes long: init_process_group(timeout=…)"
    elif not waiting:
        what = f"The script has ended on every rank, but thread {fact['thread']!r} of rank {rank} still runs."
        cause = "Python waits at its end for every thread that is not a daemon; this one waits for something itself"
        fix = "stop the thread and join() it at the script's end, or make it with daemon=True"
    else:
        what, cause, fix = _explain_standstill({one: facts.get(one, {}) for one in waiting})
    return Failure(
        "hang",
        _shorten(what),
        rank=rank,
        node=node,
        message=next((error["message"] for error in errors), ""),
        cause=cause,
        fix=fix,
        consequences={error["rank"]: _shorten_message(error) for error in errors if error["message"]},
        stacks=_list_stands(state, errors),
    )


def _explain_standstill(facts: dict[int, dict]) -> tuple[str, str, str]:
    """The failure in words, its cause and the fix if every rank waits for another one."""
    if all(fact.get("meeting") for fact in facts.values()):
        changes = next((fact["changes"][0] for fact in facts.values() if fact.get("changes")), "")
        cause = "they look for each other in different places, a rank= or world_size= is wrong, or the network is shut"
        return (
            f"The ranks did not meet: {len(facts)} of them stand in init_process_group.",
            f"the script overrides torchrun: {changes}" if changes else cause,
            "remove the lines that set MASTER_ADDR, MASTER_PORT, RANK or WORLD_SIZE, and call "
            "init_process_group('gloo') without init_method=, rank= and world_size=: torchrun has set them all",
        )
    places = {rank: fact["where"] for rank, fact in facts.items() if fact.get("where")}
    failed = next((rank for rank, fact in facts.items() if fact.get("raised")), None)
    if failed is not None:
        where, raised = facts[failed].get("where", ""), clean_message(facts[failed]["raised"])
        return (
            f"Rank {failed} waits in {where} while it handles an error.",
            f"the error is {raised}; its `finally` or `except` waits for ranks that are elsewhere",
            "mend that error; call no collective and no barrier in a finally: or except:",
        )
    cause = "a collective (all_reduce, barrier, backward of DDP) that not every rank calls, or a blocked network"
    named = "; ".join(f"rank {rank} in {place}" for rank, place in list(places.items())[:4])
    if places and all(re.search(r"\bi?recv\(", place) for place in places.values()):
        fix = "look at what each rank does before that line: a recv ends when its peer has sent"
        return "The ranks wait for each other.", f"every rank waits to receive: {named}", fix
    if (forward := {rank for rank, fact in facts.items() if fact.get("forward")}) and len(forward) < len(facts):
        fix = "evaluate with model.module(…) on one rank alone, or call the model equally often on every rank"
        return "The ranks wait for each other.", f"not every rank is in the forward of a DDP model: {named}", fix
    if len(set(places.values())) > 1:
        cause = f"they stand in different collectives, or one of them is an exchange with another rank: {named}"
    fix = "compare where the ranks stood: every rank has to call the same collectives in the same order"
    return "The ranks wait for each other.", cause, fix


def _list_stands(state: JobState, errors: list[dict]) -> dict[int, str]:
    """By rank, where it stood, as a file, a line and a function."""
    stands = {rank: _find_stand(text) or "(not known)" for rank, text in state.stacks.items()}
    # A rank that NCCL's watchdog aborted has printed its stacks; it was in no state to hand them over.
    told = {error["rank"]: error.get("traceback") or "\n".join(state.tails.get(error["rank"], ())) for error in errors}
    # From the same look as the place in the cause: a rank may move when the others end.
    told |= {rank: fact["traceback"] for rank, fact in state.still.items() if fact.get("traceback")}
    return stands | {rank: _find_stand(text) or "(not known)" for rank, text in told.items() if text}


def _waits(state: JobState, rank: int) -> bool:
    """Whether a rank of which no error was heard stood in a collective when it was told to end."""
    # faulthandler writes all threads, and the one that was interrupted last: the main thread, which runs the script.
    stack = state.stacks.get(rank, "").rpartition("Current thread")[2]
    places = re.findall(r'File "([^"]+)", line', stack)
    return bool(places) and "/torch/distributed/" in places[0 if "most recent call first" in stack else -1]


def _describe_alone(state: JobState) -> Failure:
    """Every rank ended well, and they formed no group of all."""
    believed = next((words for _, words in sorted(state.believed.items()) if words), [])
    cause = "; ".join(believed[:3]) or "the script does not call init_process_group, or only on a condition"
    size = max((size for sizes in state.groups.values() for size in sizes), default=1)
    trained = "alone" if size == 1 else f"in a group of {size}"
    last = next((lines[-1][:160] for _, lines in sorted(state.tails.items()) if lines), "")
    return Failure(
        "alone",
        f"The {state.group} ranks did not work together: each trained {trained}.",
        cause=f"{cause}; the last that a rank printed: {last}" if last else cause,
        fix=next(iter(state.advice.values()), JOIN)
        + "; a script that needs no group: TorchrunJob(…, needs_group=False)",
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
    """The line of the training script in a stack of faulthandler (innermost first) or of traceback (last), or ""."""
    found = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', stack)
    # In traceback's own form the script has no folder, or only those of its package, see nodelaunch.node.target.
    own = [place for place in found if re.match(OWN, place[0]) or not re.match("[/<]", place[0])]
    if not own:
        return ""
    path, line, name = own[0] if "most recent call first" in stack else own[-1]
    return f"{re.sub(OWN, '', path)}, line {line}, in {name}"


def _capitalise(text: str) -> str:
    """A sentence with a capital; torchrun keeps its own letters."""
    return text if text.startswith("torchrun") else text[0].upper() + text[1:]


def _shorten(text: str) -> str:
    if len(text) > 120:  # the module of an error's class says least
        text = re.sub(r"(?<=: )(\w+\.)+(?=\w+: )", "", text)
    if len(text) <= 120:
        return text
    words = text[:117].rpartition(" ")[0]
    return (words if len(words) > 90 else text[:117]) + "…"
