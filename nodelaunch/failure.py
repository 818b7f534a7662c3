"""Explains a failed job: from all that was heard of it (``JobState``) to one ``Failure`` with its cause and a fix."""

from __future__ import annotations

import errno
import math
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

from lab_common import LabError
from lab_common.text import clean, clean_message
from nodelaunch.messages import look_up
from nodelaunch.node.errors import FULL, StopReason, failed_as_consequence, name_full_disk, shorten_gloo
from nodelaunch.result import Failure
from nodelaunch.state import JobState, NodeState, name_signal

HEADING = "Traceback (most recent call last):"
# Where on a node the script lies, or its project; libraries, too, may be in a folder called work.
OWN = r"[^\"]*/(?:code/[0-9a-f]{64}/script|work/[\w.-]+-[0-9a-f]{6})/"
OWN_FRAME = re.compile(rf'\s*File "{OWN}([^"]*)", line (\d+)')
OWN_FOLDER = re.compile(rf'(File "){OWN}')
WAITED = re.compile(r"Timed out waiting|Application timeout|wait timeout|Watchdog caught collective|Connect timeout")
# The message of a process that the script or its DataLoader started holds its traceback, and ends with the error.
INNER = (
    (r"[\w.]+: Caught \w+ in DataLoader worker", "in a DataLoader worker"),
    (r"torch\.multiprocessing\.spawn\.ProcessRaisedException", "in a process that the script started"),
)
# Lines by which a program says why it aborts; everything else that it printed may have nothing to do with its end.
ABORTS = re.compile(r"terminate called|what\(\):|^(ERROR|FATAL|Fatal|OMP: Error)\b|bad_alloc|gloo|[Bb]us error")
TOOL = re.compile(r"(subprocess\.)?CalledProcessError")  # gives the status with which a program ended, not the reason
ROOM = 64 * 2**10  # bytes; a disk with less is full

AGAIN = "run the job again; a checkpoint lets the job go on where it was"
KILLED = "often Linux's out-of-memory killer (`sudo dmesg | tail` then says so); else a `kill -9`, or the scheduler"
SENT = "somebody sent it: a kill, a batch system, or a machine that shuts down"
TIMER = "somebody sent it (Slurm's --signal before the time limit, a timer), and the script has no handler for it"
# The likely cause of a signal that ended a program, and what to do.
SIGNALS = {
    **dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT), (SENT, AGAIN)),
    **{one: (TIMER, f"signal.signal(signal.{one.name}, …) in the script, before the training")
       for one in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)},
    signal.SIGKILL: ("somebody sent it, or Linux did because memory was full (sudo dmesg | tail says so)", AGAIN),
    signal.SIGABRT: ("C++ code gave up (an assertion or an exception that nobody caught)", "read its last lines"),
    signal.SIGBUS: ("it read memory whose file is gone or too short: a full /dev/shm, or a mapped file that was cut",
                    "num_workers=0, or more shared memory (--shm-size=2g); leave files alone that a job has mapped"),
    signal.SIGSEGV: ("C code touched memory that is not its own: often a package built for another torch",
                     "import the packages one by one to find it; install those with C++ parts again for this torch"),
    signal.SIGILL: ("the program has instructions that this processor lacks: it was built for a newer one",
                    "install the ordinary build of the package that the traceback names"),
    signal.SIGFPE: ("C code divided a whole number by zero", "look for a size of 0 at the line where it stood"),
    signal.SIGPIPE: ("it wrote to a program that had ended (`| head`)", "write to a file, or leave the pipe out"),
    signal.SIGXCPU: ("it used up the CPU seconds that `ulimit -t` allows", "ulimit -t unlimited, or a batch system"),
    signal.SIGXFSZ: ("it wrote a file larger than `ulimit -f` allows", "ulimit -f unlimited, or smaller files"),
}  # fmt: skip


def diagnose(state: JobState, reason: StopReason | None = None) -> Failure | None:
    """Returns what failed first, or None if nothing did.

    Args:
        state: What was heard of the job.
        reason: Why the launcher ended the job, if it did.
    """
    errors = sorted((_add_traceback(state, error) for error in state.errors), key=lambda error: error["at"])
    if reason in (StopReason.STOPPED, StopReason.INTERRUPTED):
        # What the ranks say about their end comes of the stop; what was heard before does not.
        errors = [error for error in errors if state.asked is not None and error["at"] <= state.asked]
        if not errors:
            cause = "the launcher was interrupted" if reason == StopReason.INTERRUPTED else "job.stop() was called"
            return _fail("stopped", f"The job was {reason.value}.", cause, AGAIN, stacks=state.stacks)
    if state.standstill:
        before = [error for error in errors if error["at"] <= state.asked]
        if not any(_is_own(error) for error in before):
            return _explain_hang(state, before)
    first = _sort_first(errors)[:1]
    if first and _is_own(first[0]):
        return _explain_rank(state, first[0], errors)
    ended = [part for part in state.nodes.values() if part.ended]
    limits = [part.ended["why"] for part in ended if part.ended["reason"] == StopReason.LIMIT]
    if limits or reason == StopReason.LIMIT:
        return _explain_limit(state, limits, reason)
    if not reason:
        if silent := next((part for part in ended if part.ended["reason"] == StopReason.SILENCE), None):
            cause = "the computer of the launcher slept, or the network to the node was cut"
            what = f"{silent.name} ended the job: {silent.ended['why']}."
            return _fail("lost", what, cause, AGAIN, node=silent.name)
        gave_up = min((error["at"] for error in errors if WAITED.search(error["message"])), default=math.inf)
        if signalled := _find_signalled(state, before=gave_up):
            return _explain_signalled(*signalled, errors)
    if errors:
        return _explain_waiting(state, errors)
    if reason:
        return _explain_join(state)
    if lost := _find_lost(state):
        return _explain_lost(lost)
    bad = [part for part in state.nodes.values() if not part.by_hand and (not part.ended or part.ended["returncode"])]
    if bad:
        # A node that was told to end (srun tells all when one has failed) is not the one that failed.
        return _explain_torchrun(state, min(bad, key=lambda part: bool(part.ended and part.ended["reason"])))
    return _explain_alone(state) if state.trained_alone else None


def describe_restart(errors: list[dict]) -> str:
    """One line about the first of the errors after which torchrun restarted the workers."""
    error = _sort_first(errors)[0]
    return _shorten(f"rank {error['rank']} on {error['node']}: {_shorten_message(error)}")


def _fail(kind: str, what: str, cause: str, fix: str, **more: object) -> Failure:
    return Failure(kind, _shorten(what), cause=cause, fix=fix, **more)


def _sort_first(errors: list[dict]) -> list[dict]:
    """A rank's own failures come before those that another rank caused, and then the earlier ones."""
    # SIGABRT and SIGTERM are between the two: NCCL's watchdog aborts a rank that waits, and torchrun ends one.
    return sorted(errors, key=lambda error: (not _is_own(error), error.get("code") in (-6, -15), error["at"]))


def _is_own(error: dict) -> bool:
    return error["kind"] != "hang" and not failed_as_consequence(error["message"], error.get("file", "/torch/"))


# A rank that failed by itself: by an exception, an exit or a signal.


def _add_traceback(state: JobState, error: dict) -> dict:
    """An exit with the traceback that the rank printed last, if only its exit status was heard of."""
    lines = list(state.tails.get(error["rank"], ()))
    # With another status it did not end by an exception: it caught that, and printed it.
    if error["kind"] != "exit" or error.get("code") != 1 or HEADING not in lines:
        return error
    lines = lines[len(lines) - 1 - lines[::-1].index(HEADING) :]
    message = next((line for line in lines[1:] if not line.startswith(" ")), "")
    if not message:
        return error
    own = [place.groups() for line in lines if (place := OWN_FRAME.match(line))]
    location, traceback = "{}, line {}".format(*own[-1]) if own else "", OWN_FOLDER.sub(r"\1", "\n".join(lines))
    return {**error, "kind": "exception", "message": message, "traceback": traceback, "location": location}


def _explain_rank(state: JobState, error: dict, errors: list[dict]) -> Failure:
    rank, kind, message = error["rank"], error["kind"], error["message"]
    words = _choose_words(state, error)
    lines = message.strip().splitlines() or [kind]
    inner = next((where for pattern, where in INNER if re.match(pattern, lines[0])), "")
    said = f"{lines[-1]} ({inner})" if inner else lines[0]
    if kind == "exit" and words and words[-1] not in said:
        said += f": {words[-1]}"
    later = [other for other in errors if other["rank"] != rank]
    # torchrun ends the other ranks of its node by SIGTERM.
    own = [other for other in later if _is_own(other) and other.get("code") != -signal.SIGTERM]
    # An exception says more than an abort, and is named before one that was heard of earlier.
    first = error["at"] <= min((other["at"] for other in own), default=math.inf)
    verb = "was " if kind == "signal" else "failed first: " if first else "failed: "
    facts = {name: error[name] for name in ("rank", "node", "message", "location", "traceback")}
    return _fail(
        kind,
        f"Rank {rank} on {error['node']} {verb}{said}",
        *_explain_error(state, error, words, errors),
        **facts,
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


def _explain_error(state: JobState, error: dict, words: list[str], errors: list[dict]) -> tuple[str, str]:
    """The cause and the fix, as far as they are known: from the rank's message, its last words, or how it ended."""
    kind, last = error["kind"], words[-1][:200] if words else ""
    if kind == "signal" and error["code"] == -signal.SIGKILL:
        peak = state.memory.get(error["rank"])
        cause = f"{KILLED}; its memory had reached {peak / 2**20:,.0f} MiB" if peak else KILLED
        return cause, "a smaller batch, fewer processes on the node, or a node with more memory"
    # Without the lines of source, which may talk of anything; but os.fork() has no frame of its own.
    trace = re.sub(r"^ {4}(?!.*\bfork(pty)?\().*\n?", "", error["traceback"], flags=re.MULTILINE)
    cause, fix = look_up("\n".join([trace, error["message"], *words]))
    if not cause:
        cause, fix = _explain_full_disk(state, error) or ("", "")
    cause, fix = error.get("cause") or cause, error.get("fix") or fix
    if kind == "signal" and not cause:
        return explain_signal(-error["code"], last)
    if "different collectives" in cause:
        places = {rank: _find_stand(text) for rank, text in state.stacks.items()}
        places |= {other["rank"]: other["location"] for other in errors if other["location"]}
        cause += f": {'; '.join(f'rank {rank} at {place}' for rank, place in sorted(places.items()) if place)}"
    if kind == "exit" and error.get("silent"):
        return f"it ended before the script began: {last or 'it said nothing'}", fix or "look at the log"
    place = error["location"] or _find_stand(state.stacks.get(error["rank"], ""))
    begin = f"begin at {place}, the script's own line" if place else "begin at the last lines of the traceback"
    unknown = {
        "mismatch": ("a script was changed or started by hand with other arguments", "start all nodes with job.run()"),
        "exit": ("the script ended itself with this status; that is the last line that it printed",
                 "look at the last lines of this rank"),
    }  # fmt: skip
    known = "the launcher does not know this message; it is the script's, or of a package that it uses"
    other = unknown.get(kind, (known, begin))
    return cause or other[0], fix or other[1]


# Ranks that waited for others.


def _explain_waiting(state: JobState, errors: list[dict]) -> Failure:
    """All that was heard is that ranks waited for others: one ended early, hangs, or cannot be reached."""
    heard = errors[0]
    waiting = {error["rank"] for error in errors}
    text = "\n".join(error["message"] for error in errors)
    if lost := _find_lost(state):
        return _explain_lost(lost, _list_consequences(errors))
    if early := sorted(set(state.done) - waiting):
        return _explain_early(state, early[0], heard, _list_consequences(errors))
    if heard["kind"] == "hang" or WAITED.search(text):
        return _explain_hang(state, errors)
    cause, fix = look_up(text)
    missing = sorted(set(state.ranks) - waiting)
    return _fail(
        "lost",
        f"Rank {heard['rank']} on {heard['node']} lost its peers: {_shorten_message(heard)}",
        cause or "another rank died without a word, or the network between the nodes was cut",
        fix or "job.preflight() looks at the network both ways; the log has what torchrun said",
        rank=missing[0] if missing else heard["rank"],
        node=state.ranks[missing[0]].node if missing else heard["node"],
        message=heard["message"],
        consequences=_list_consequences(errors),
        stacks=_list_stands(state, errors),
    )


def _explain_early(state: JobState, rank: int, heard: dict, consequences: dict[int, str]) -> Failure:
    """A rank had ended its script in order while another still waited for it."""
    cause = "it left earlier (return, sys.exit), or the ranks have different numbers of batches"
    cause += _quote_last(state, rank)
    fix = "for batches: drop_last=True, or torch.distributed.algorithms.join.Join around the loop"
    if "connectFullMesh" in heard["message"]:
        # Torch's own race: init_process_group returns on one rank when its side of a connection is there.
        cause = "it ended without a word to the others, which were still on their way to it"
        fix = "a dist.barrier() before the script's end"
    what = f"Rank {rank} had ended its work while rank {heard['rank']} still waited for it."
    facts = {"rank": rank, "node": state.ranks[rank].node, "message": heard["message"]}
    return _fail("exit", what, cause, fix, **facts, consequences=consequences, stacks=_list_stands(state, [heard]))


def _explain_hang(state: JobState, errors: list[dict]) -> Failure:
    """The ranks stand still, or their group's timeout came: the answer depends on where each of them stood."""
    facts = {error["rank"]: error for error in errors} | state.still
    waiting = sorted({*state.waiting, *(error["rank"] for error in errors)})
    absent = [rank for rank in state.absent if rank not in waiting and not _stood_in_torch(state, rank)]
    if waiting and state.done and not (state.halted or absent):
        heard = {"rank": waiting[0], "message": ""} | facts.get(waiting[0], {})
        return _explain_early(state, min(state.done), heard, {})
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
        cause += _quote_last(state, rank)
        fix = "every rank has to come to the same collectives; for work that takes long: init_process_group(timeout=…)"
    elif not waiting:
        what = f"The script has ended on every rank, but thread {fact['thread']!r} of rank {rank} still runs."
        cause = "Python waits at its end for every thread that is not a daemon; this one waits for something itself"
        fix = "stop the thread and join() it at the script's end, or make it with daemon=True"
    else:
        what, cause, fix = _explain_standstill({one: facts.get(one, {}) for one in waiting})
    message = next((error["message"] for error in errors), "")
    others = {"consequences": _list_consequences(errors), "stacks": _list_stands(state, errors)}
    return _fail("hang", what, cause, fix, rank=rank, node=node, message=message, **others)


def _explain_standstill(facts: dict[int, dict]) -> tuple[str, str, str]:
    """The headline, the cause and the fix if every rank waits for another one."""
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
            "fix that error; call no collective and no barrier in a finally: or except:",
        )
    what = "The ranks wait for each other."
    named = "; ".join(f"rank {rank} in {place}" for rank, place in list(places.items())[:4])
    if places and all(re.search(r"\bi?recv\(", place) for place in places.values()):
        fix = "look at what each rank does before that line: a recv ends when its peer has sent"
        return what, f"every rank waits to receive: {named}", fix
    if 0 < sum(bool(fact.get("forward")) for fact in facts.values()) < len(facts):
        fix = "evaluate with model.module(…) on one rank alone, or call the model equally often on every rank"
        return what, f"not every rank is in the forward of a DDP model: {named}", fix
    cause = "a collective (all_reduce, barrier, backward of DDP) that not every rank calls, or a blocked network"
    if len(set(places.values())) > 1:
        cause = f"they stand in different collectives, or one of them is an exchange with another rank: {named}"
    return what, cause, "compare where the ranks stood: every rank has to call the same collectives in the same order"


def _quote_last(state: JobState, rank: int) -> str:
    return f"; the last that it printed: {state.tails[rank][-1][:160]}" if state.tails.get(rank) else ""


def _list_consequences(errors: list[dict]) -> dict[int, str]:
    return {error["rank"]: _shorten_message(error) for error in errors if error["message"]}


def _list_stands(state: JobState, errors: list[dict]) -> dict[int, str]:
    """By rank, where it stood, as a file, a line and a function."""
    # A rank that NCCL's watchdog aborted has printed its stacks; it was in no state to hand them over.
    told = {error["rank"]: error.get("traceback") or "\n".join(state.tails.get(error["rank"], ())) for error in errors}
    # From the same look as the place in the cause: a rank may move when the others end.
    told |= {rank: fact["traceback"] for rank, fact in state.still.items() if fact.get("traceback")}
    texts = state.stacks | {rank: text for rank, text in told.items() if text}
    return {rank: _find_stand(text) or "(not known)" for rank, text in texts.items()}


def _find_stand(stack: str) -> str:
    """The line of the training script in a stack of faulthandler (innermost first) or of traceback (last), or ""."""
    found = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', stack)
    # In traceback's own form the script has no folder, or only those of its package, see nodelaunch.node.watch.
    own = [place for place in found if re.match(OWN, place[0]) or not re.match("[/<]", place[0])]
    if not own:
        return ""
    path, line, name = own[0] if "most recent call first" in stack else own[-1]
    return f"{re.sub(OWN, '', path)}, line {line}, in {name}"


def _stood_in_torch(state: JobState, rank: int) -> bool:
    """True if a rank without an error stood in a collective when it was told to end."""
    # faulthandler writes all threads, and the one that was interrupted last: the main thread, which runs the script.
    stack = state.stacks.get(rank, "").rpartition("Current thread")[2]
    places = re.findall(r'File "([^"]+)", line', stack)
    return bool(places) and "/torch/distributed/" in places[0 if "most recent call first" in stack else -1]


# A job in which no rank failed.


def _explain_limit(state: JobState, limits: list[str], reason: StopReason | None) -> Failure:
    # One node ends a moment before the other, whose ranks then miss the first one's.
    silent = [part.name for part in state.nodes.values() if reason and not (part.ended or part.by_hand)]
    cause = "it had more to do, or a rank waited for something that never came"
    if silent:
        cause = f"the supervisor on {', '.join(silent)} was stopped (SIGSTOP), or that machine hangs"
    stood = sorted((rank, place) for rank, text in state.stacks.items() if (place := _find_stand(text)))
    stands = state.name_stands()
    if where := stands or "; ".join(f"rank {rank} stood at {place}" for rank, place in stood[:4]):
        cause += f"; {where}"
    fix = "look at what each rank waits for there; a larger limit= only if that ends by itself"
    if not state.still.keys() >= state.ranks.keys():  # a rank moved until the end
        fix = "a larger limit=, or less work"
    elif "multiprocessing.spawn" in stands:
        fix += "; torchrun has started one process per rank: train in it, without mp.spawn"
    what = f"The job ran into its {limits[0] if limits else f'time limit of {state.limit:g} s'}."
    return _fail("limit", what, cause, fix)


def _explain_alone(state: JobState) -> Failure:
    """Every rank ended well, and they formed no group of all."""
    believed = next((words for _, words in sorted(state.believed.items()) if words), [])
    cause = "; ".join(believed[:3]) or "the script does not call init_process_group, or only on a condition"
    size = max((size for sizes in state.groups.values() for size in sizes), default=1)
    trained = "alone" if size == 1 else f"in a group of {size}"
    if last := next((lines[-1][:160] for _, lines in sorted(state.tails.items()) if lines), ""):
        cause += f"; the last that a rank printed: {last}"
    join = "init_process_group('gloo') with no other arguments uses what torchrun has set"
    fix = f"{next(iter(state.advice.values()), join)}; a script that needs no group: TorchrunJob(…, needs_group=False)"
    return _fail("alone", f"The {state.group} ranks did not work together: each trained {trained}.", cause, fix)


def _explain_join(state: JobState) -> Failure:
    silent = [part.name for part in state.nodes.values() if not part.started]
    absent = silent or [part.name for part in state.nodes.values() if not part.joined]
    cause = "it was started, and did not reach the meeting point"
    cause = f"{state.starter} was not started there" if silent else cause
    fix = "start it (bash node….sh on that node), or let job.preflight() say what is in the way"
    return _fail("join", f"Not all nodes joined in time; missing: {', '.join(absent)}.", cause, fix, node=absent[0])


def _find_lost(state: JobState) -> NodeState | None:
    return next((part for part in state.nodes.values() if part.gone and part.ended is None), None)


def _explain_lost(part: NodeState, consequences: dict[int, str] | None = None) -> Failure:
    refusal = part.refusal
    if refusal and (isinstance(refusal, EndError) or not part.started):
        return _fail("lost", refusal.what, refusal.cause, refusal.fix, node=part.name, message=str(refusal))
    cause = "the node was switched off, the network between you and it was cut, or its supervisor was killed"
    fix = f"see that it answers (ssh), then {AGAIN}"
    facts = {"node": part.name, "message": f"{refusal or ''}", "consequences": consequences or {}}
    return _fail("lost", f"The connection to {part.name} was lost.", cause, fix, **facts)


def _explain_torchrun(state: JobState, part: NodeState) -> Failure:
    text, returncode = "\n".join(part.tail), part.ended["returncode"] if part.ended else "unknown"
    if not all(one.joined for one in state.nodes.values()):
        if "RendezvousTimeoutError" in text:  # torchrun's own clock was a moment before the launcher's
            return _explain_join(state)
        if "RendezvousClosedError" in text:
            cause = "a node that came first ended the meeting: with another number of nodes it meets alone, and ends"
            return replace(_explain_join(state), cause=cause, fix="start each node by its node….sh of this job")
    errors = [line for line in part.tail if re.search(r"(Error|Exception|error)\b.*", line)]
    said = errors[-1].strip() if errors else f"exit status {returncode}"
    cause, fix = look_up(text)
    if re.search(r"Rendezvous\w*Error|DistStoreError|TimeoutError|EADDRINUSE", text):
        cause = "the nodes could not meet at node 0's address and port"
        fix = "job.preflight() says in seconds which way is closed"
    cause, fix = _explain_disk(part) or (cause, fix)
    what = _capitalise(f"{state.starter} ended on {part.name}: {said}")
    last = "\n".join(list(part.tail)[-15:])
    return _fail("torchrun", what, cause, fix or "read the log", node=part.name, message=said, traceback=last)


# Programs that were ended by a signal.


class EndError(LabError):
    """A node's program was ended by a signal, or its disk is full: known for certain, though the node said no more.

    Attributes:
        number: The signal; 0 for a full disk.
        at: When this was found out, time.monotonic().
    """

    def __init__(self, what: str, *, number: int = 0, **hints: object) -> None:
        super().__init__(what, **hints)
        self.number, self.at = number, time.monotonic()


def explain_end(name: str, folder: str, returncode: int, stderr: str) -> EndError | None:
    """Explains a program of ours that ended on a node by a signal or for a full disk; None for any other end."""
    if FULL.search(stderr):
        path = name_full_disk(stderr) or folder
        what = clean(f"The disk of {name} is full at {path}", 118) + "."
        return EndError(what, where=path, cause=clean(stderr.strip().splitlines()[-1], 300), fix=_advise_room(path))
    if returncode < 0:
        cause, fix = explain_signal(-returncode)
        what = f"A program on {name[:60]} was ended by signal {-returncode} ({name_signal(-returncode)})."
        return EndError(what, number=-returncode, where=folder, cause=cause, fix=fix)
    return None


def explain_signal(number: int, last: str = "") -> tuple[str, str]:
    """The likely cause of a signal that ended a program, and what to do; ``last`` is the last line that it printed."""
    cause, fix = SIGNALS.get(number, ("it crashed in C code", "read the log: the last lines before the crash"))
    return f"{cause}; the last that it printed: {last}" if last else cause, fix


def _find_signalled(state: JobState, before: float) -> tuple[NodeState, str, int] | None:
    """The node, the program and the signal of the first of our programs that a signal ended."""
    # A program that a signal ends at once says nothing; its end is heard of, and is certain. One that is told to end
    # says so itself, and may have been told because of another: srun tells all when one has failed, or when a rank has
    # given up waiting (at `before`).
    parts = [part for part in state.nodes.values() if not part.by_hand]
    lost = [part for part in parts if part.gone and part.ended is None]
    if certain := [part for part in lost if part.started and getattr(part.refusal, "number", 0)]:
        first = min(certain, key=lambda part: part.refusal.at)
        return first, "the supervisor", first.refusal.number
    if lost:
        return None
    for part in parts:
        if part.ended and part.ended["returncode"] < 0 and not part.ended["reason"]:
            return part, state.starter, -part.ended["returncode"]
    told = [part for part in parts if part.told and part.told[2] < before]
    first = min(told, key=lambda part: part.told[2], default=None)
    return first and (first, *first.told[:2])


def _explain_signalled(part: NodeState, program: str, number: int, errors: list[dict]) -> Failure:
    kind = "lost" if program == "the supervisor" else "torchrun"
    what = _capitalise(f"{program} on {part.name} was ended by signal {number} ({name_signal(number)}).")
    return _fail(kind, what, *explain_signal(number), node=part.name, consequences=_list_consequences(errors))


# Full disks.


def _advise_room(path: str) -> str:
    return f"free some space there (df -h {clean(path, 200)}), or use a folder on a larger disk; then run the job again"


def _explain_disk(part: NodeState, path: str = "") -> tuple[str, str] | None:
    """The cause and the fix if a disk of a node is full, as far as that was said or measured."""
    ended = part.ended or {}
    full = ended.get("room") is not None and ended["room"] < ROOM
    path = path or name_full_disk(part.full) or (ended["folder"] if full else "")
    if path.startswith("/dev/shm/"):
        return look_up(f"No space left on device: '{path}'")
    if path:
        return f"the disk is full at {path}", _advise_room(path)
    if part.full:
        fix = f"on {part.name}: df -h; free some space, or use a folder on a larger disk, then run the job again"
        return f"a disk is full: {clean(part.full, 200)}", fix
    return None


def _explain_full_disk(state: JobState, error: dict) -> tuple[str, str] | None:
    """The cause and the fix if a rank failed because a disk is full."""
    text, part = f"{error['message']}\n{error['traceback']}", state.nodes[error["node"]]
    if FULL.search(text):
        return _explain_disk(part, error.get("disk") or name_full_disk(text))
    # A rank that says nothing more: its own words, or those of a program that it ran, may have found no room.
    return _explain_disk(part) if error["kind"] == "exit" or TOOL.match(error["message"]) else None


def explain_folder(folder: Path, error: OSError) -> LabError:
    """The error for a job's folder, on the launcher's side, that cannot be written."""
    fix = "export LAB_RUNS=/a/folder/of/yours, then start Python (or JupyterLab) again"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = clean(f"The disk is full at {folder}", 110) + "."
        return LabError(what, where=folder, cause=str(error.strerror), fix=f"free some space there, or {fix}")
    cause = f"{error.strerror} ({clean(error.filename or folder, 300)})"
    return LabError("The folder of the job cannot be written.", where=folder, cause=cause, fix=fix)


# Words.


def _shorten_message(error: dict) -> str:
    # The first line: the last one of torch's long messages is advice.
    lines = error["message"].strip().splitlines() or [error["kind"]]
    return shorten_gloo(lines[0])[:160]


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
