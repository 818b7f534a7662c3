"""Explains a failed job: from its ``JobState`` to one ``Failure`` with its cause and a fix."""

from __future__ import annotations

import re
import signal
import textwrap

from lab_common.text import clean, clean_message
from nodelaunch.messages import look_up
from nodelaunch.node.errors import FULL, StopReason, failed_as_consequence, name_full_disk, shorten_gloo
from nodelaunch.result import Failure
from nodelaunch.state import JobState, NodeState

# Where on a node the script lies, or its project; libraries, too, may be in a folder called work.
OWN = r"[^\"]*/(?:code/[0-9a-f]{64}/script|work/[\w.-]+-[0-9a-f]{6})/"
# The last traceback in a rank's output, and the line with the error.
PRINTED = re.compile(r"[\s\S]*(Traceback \(most recent call last\):\n(?: .*\n)+(\S.*)[\s\S]*)")
WAITED = re.compile(r"Timed out waiting|Application timeout|wait timeout|Watchdog caught collective|Connect timeout")
# Lines by which a program says why it aborts; everything else that it printed may have nothing to do with its end.
ABORTS = re.compile(r"terminate called|what\(\):|^(ERROR|FATAL|Fatal)\b|bad_alloc|gloo|[Bb]us error")

AGAIN = "run the job again; a checkpoint lets the job go on where it was"
SENT = "a kill, a batch system (Slurm's --signal or time limit), or the system sent it (`man 7 signal` says what for)"
# The likely cause of a signal that ended a program, and what to do. All others somebody sent.
SIGNALS = {
    signal.SIGKILL: (
        "often Linux's out-of-memory killer (`sudo dmesg | tail` then says so); else a `kill -9`, or the scheduler",
        "a smaller batch, fewer processes on the node, or a node with more memory"),
    signal.SIGABRT: ("C++ code gave up (an assertion or an exception that nobody caught)", "read its last lines"),
    signal.SIGBUS: ("it read memory whose file is gone or too short: a full /dev/shm, or a mapped file that was cut",
                    "num_workers=0, or more shared memory (--shm-size=2g); leave files alone that a job has mapped"),
    signal.SIGSEGV: ("C code touched memory that is not its own: often a package built for another torch",
                     "import the packages one by one to find it; install those with C++ parts again for this torch"),
}  # fmt: skip


def diagnose(state: JobState) -> Failure | None:
    """Returns what failed first, or None if nothing did."""
    errors = sorted((_add_traceback(state, error) for error in state.errors), key=lambda error: error["at"])
    # What the ranks say about their end comes of it; what was heard before does not.
    before = [error for error in errors if state.asked is not None and error["at"] <= state.asked]
    if state.reason == StopReason.STOPPED:
        if not before:
            return _fail("stopped", "The job was stopped.", "job.stop() was called", AGAIN, stacks=state.stacks)
        errors = before
    if state.reason == StopReason.STANDSTILL and not any(_is_own(error) for error in before):
        return _explain_hang(state, before)
    if any(_is_own(error) for error in errors):
        return _explain_rank(state, errors)
    ended = [part for part in state.nodes.values() if part.ended]
    limits = [part.ended["why"] for part in ended if part.ended["reason"] == StopReason.LIMIT]
    if limits or state.reason == StopReason.LIMIT:
        return _explain_limit(state, limits)
    left = [part for part in ended if part.ended["reason"] in (StopReason.SILENCE, StopReason.SIGNAL)]
    # A scheduler tells all nodes to end when a rank of one has given up waiting.
    if left and not state.reason and not any(WAITED.search(error["message"]) for error in errors):
        slept = "the computer of the launcher slept, or the network to the node was cut"
        cause = slept if left[0].ended["reason"] == StopReason.SILENCE else SENT
        return _fail("lost", f"{left[0].name} ended the job: {left[0].ended['why']}.", cause, AGAIN, node=left[0].name)
    if errors:
        return _explain_waiting(state, errors)
    if state.reason:
        return _explain_join(state)
    if lost := _find_lost(state):
        return _explain_lost(lost)
    bad = [part for part in state.nodes.values() if not part.by_hand and (not part.ended or part.ended["returncode"])]
    if bad:
        # A node that was told to end (srun tells all when one has failed) is not the one that failed.
        return _explain_torchrun(state, min(bad, key=lambda part: bool(part.ended and part.ended["reason"])))
    return _explain_alone(state) if trained_alone(state) else None


def describe_restart(errors: list[dict]) -> str:
    """One line about the first of the errors after which torchrun restarted the workers."""
    error = _find_first(errors)
    return f"rank {error['rank']} on {error['node']}: {_shorten_message(error)}"


def _fail(kind: str, what: str, cause: str, fix: str, **more: object) -> Failure:
    return Failure(kind, textwrap.shorten(what, 120, placeholder="…"), cause=cause, fix=fix, **more)


def _find_first(errors: list[dict]) -> dict:
    """A rank's own failures come before those that another rank caused, and then the earlier ones."""
    # SIGABRT and SIGTERM are between the two: NCCL's watchdog aborts a rank that waits, and torchrun ends one.
    return min(errors, key=lambda error: (not _is_own(error), error.get("code") in (-6, -15), error["at"]))


def _is_own(error: dict) -> bool:
    return not failed_as_consequence(error["message"], error.get("file", "/torch/"))


def _add_traceback(state: JobState, error: dict) -> dict:
    """An exit with the traceback that the rank printed last, if only its exit status was heard of."""
    found = PRINTED.match("\n".join(state.rank_states[error["rank"]].tail))
    # With another status it did not end by an exception: it caught that, and printed it.
    if not found or error["kind"] != "exit" or error.get("code") != 1:
        return error
    place, traceback = _find_stand(found[1]).partition(", in ")[0], re.sub(rf'(File "){OWN}', r"\1", found[1])
    return {**error, "kind": "exception", "message": found[2], "traceback": traceback, "location": place}


def _explain_rank(state: JobState, errors: list[dict]) -> Failure:
    error = _find_first(errors)
    rank, kind = error["rank"], error["kind"]
    # Its last lines that say why it ended, if it ended without an exception.
    words = [line for line in state.rank_states[rank].tail if "Warning" not in line]
    if kind == "signal":
        words = [line for line in words if ABORTS.search(line)] or [line for line in words if line[:1] != " "][-1:]
    else:
        words = words[-1:] if kind == "exit" else []
    said = (error["message"].strip().splitlines() or [kind])[0]
    if kind == "exit" and words and words[-1] not in said:
        said += f": {words[-1]}"
    later = [other for other in errors if other["rank"] != rank]
    # torchrun ends the other ranks of its node by SIGTERM.
    own = [other for other in later if _is_own(other) and other.get("code") != -signal.SIGTERM]
    return _fail(
        kind,
        f"Rank {rank} on {error['node']} {'was ' if kind == 'signal' else 'failed first: '}{said}",
        *_explain_error(state, error, words, errors),
        **{name: error[name] for name in ("rank", "node", "message", "location", "traceback")},
        consequences=_list_messages([other for other in later if other not in own]),
        others=_list_messages(own),
        stacks=state.stacks,
    )


def _explain_error(state: JobState, error: dict, words: list[str], errors: list[dict]) -> tuple[str, str]:
    """The cause and the fix, as far as they are known: from the rank's message, its last words, or how it ended."""
    kind = error["kind"]
    if kind == "signal" and error["code"] == -signal.SIGKILL:
        (cause, fix), peak = SIGNALS[signal.SIGKILL], state.memory.get(error["rank"])
        return (f"{cause}; its memory had reached {peak / 2**20:,.0f} MiB" if peak else cause), fix
    trace = re.sub(r"^ {4}.*\n?", "", error["traceback"], flags=re.MULTILINE)  # lines of source may talk of anything
    cause, fix = look_up("\n".join([trace, error["message"], *words]))
    if not cause:
        cause, fix = _explain_full_disk(state, error)
    cause, fix = error.get("cause") or cause, error.get("fix") or fix
    if kind == "signal" and not cause:
        return _explain_signal(-error["code"], words[-1][:200] if words else "")
    if "different collectives" in cause:
        places = {rank: _find_stand(text) for rank, text in state.stacks.items()}
        places |= {other["rank"]: other["location"] for other in errors if other["location"]}
        cause += f": {'; '.join(f'rank {rank} at {place}' for rank, place in sorted(places.items()) if place)}"
    unknown = "the launcher does not know this message; it is the script's, or of a package that it uses"
    place = error["location"] or _find_stand(state.rank_states[error["rank"]].stack)
    begin = f"begin at {place}, the script's own line" if place else "begin at the last lines of the traceback"
    if kind == "exit":
        unknown = "the script ended itself with this status; that is the last line that it printed"
        begin = "look at the last lines of this rank"
    return cause or unknown, fix or begin


def _explain_signal(number: int, last: str = "") -> tuple[str, str]:
    """The likely cause of a signal that ended a program, and what to do; ``last`` is the last line that it printed."""
    cause, fix = SIGNALS.get(number, (SENT, AGAIN))
    return f"{cause}; the last that it printed: {last}" if last else cause, fix


def _explain_waiting(state: JobState, errors: list[dict]) -> Failure:
    """All that was heard is that ranks waited for others: one ended early, hangs, or cannot be reached."""
    first, waiting, texts = errors[0], {error["rank"] for error in errors}, _list_messages(errors)
    if lost := _find_lost(state):
        return _explain_lost(lost, texts)
    if early := [rank for rank in state.find_ranks(lambda one: one.done) if rank not in waiting]:
        return _explain_early(state, early[0], first, texts)
    text = "\n".join(error["message"] for error in errors)
    if WAITED.search(text):
        return _explain_hang(state, errors)
    cause, fix = look_up(text)
    cause = cause or "another rank died without a word, or the network between the nodes was cut"
    fix = fix or "job.preflight() looks at the network both ways; the log has what torchrun said"
    what = f"Rank {first['rank']} on {first['node']} lost its peers: {_shorten_message(first)}"
    rank = min(set(state.ranks) - waiting, default=first["rank"])
    who = {"rank": rank, "node": state.ranks[rank].node if rank in state.ranks else first["node"]}
    others = {"consequences": texts, "stacks": _list_stands(state, errors)}
    return _fail("lost", what, cause, fix, **who, message=first["message"], **others)


def _explain_early(state: JobState, rank: int, waiter: dict, consequences: dict[int, str]) -> Failure:
    """A rank had ended its script in order while another still waited for it."""
    cause = "it left earlier (return, sys.exit), or the ranks have different numbers of batches"
    cause += _quote_last(state, rank)
    fix = "for batches: drop_last=True, or torch.distributed.algorithms.join.Join around the loop"
    what = f"Rank {rank} had ended its work while rank {waiter['rank']} still waited for it."
    facts = {"rank": rank, "node": state.ranks[rank].node, "message": waiter.get("message", "")}
    return _fail("exit", what, cause, fix, **facts, consequences=consequences, stacks=_list_stands(state, [waiter]))


def _explain_hang(state: JobState, errors: list[dict]) -> Failure:
    """The ranks stand still, or their group's timeout came: the answer depends on where each of them stood."""
    facts = {error["rank"]: error for error in errors} | state.still
    waiting = sorted({*state.waiting, *(error["rank"] for error in errors)})
    halted, done = state.find_ranks(lambda one: one.halted), state.find_ranks(lambda one: one.done)
    awaited = [*halted, *(rank for rank in state.busy if rank not in waiting)]
    if waiting and done and not awaited:
        return _explain_early(state, done[0], {"rank": waiting[0], **facts.get(waiting[0], {})}, {})
    rank = next(iter([*awaited, *state.find_ranks(lambda one: one.lingers), *waiting]), 0)
    node, fact = state.ranks[rank].node if rank in state.ranks else "", facts.get(rank, {})
    if awaited:
        whom = next((f"rank {one} on {state.ranks[one].node}" for one in waiting if one != rank), "another rank")
        stood = _find_stand(state.rank_states[rank].stack)
        where = f"in {fact['where']}" if fact.get("where") else f"at {stood}" if stood else "silent"
        where = "stopped (SIGSTOP)" if rank in halted else where
        what = f"Rank {rank} on {node} was {where} while {whom} waited for it."
        # Where only the stack of its end is known, that does not tell if it waited, too.
        cause = "it did something else for longer than the group's own timeout, or waited in another collective"
        cause += _quote_last(state, rank)
        fix = "every rank has to come to the same collectives; for work that takes long: init_process_group(timeout=…)"
    elif not waiting:
        what = f"The script has ended on every rank, but thread {fact['thread']!r} of rank {rank} still runs."
        cause = "Python waits at its end for every thread that is not a daemon; this one waits for something itself"
        fix = "stop the thread and join() it at the script's end, or make it with daemon=True"
    else:
        what, cause, fix = _explain_standstill({one: facts.get(one, {}) for one in waiting})
    message = next((error["message"] for error in errors), "")
    others = {"consequences": _list_messages(errors), "stacks": _list_stands(state, errors)}
    return _fail("hang", what, cause, fix, rank=rank, node=node, message=message, **others)


def _explain_standstill(facts: dict[int, dict]) -> tuple[str, str, str]:
    """The headline, the cause and the fix if every rank waits for another one."""
    what = "The ranks wait for each other."
    cause = "a collective (all_reduce, barrier, backward of DDP) that not every rank calls, or a blocked network"
    fix = "compare where the ranks stood: every rank has to call the same collectives in the same order"
    places = {rank: fact["where"] for rank, fact in facts.items() if fact.get("where")}
    named = "; ".join(f"rank {rank} in {place}" for rank, place in list(places.items())[:4])
    if all(fact.get("meeting") for fact in facts.values()):
        what = f"The ranks did not meet: {len(facts)} of them stand in init_process_group."
        cause = "they look for each other in different places, a rank= or world_size= is wrong, or the network is shut"
        if changes := next((fact["changes"][0] for fact in facts.values() if fact.get("changes")), ""):
            cause = f"the script overrides torchrun: {changes}"
        fix = "remove the lines that set MASTER_ADDR, MASTER_PORT, RANK or WORLD_SIZE, and call "
        fix += "init_process_group('gloo') without init_method=, rank= and world_size=: torchrun has set them all"
    elif raised := [rank for rank, fact in facts.items() if fact.get("raised")]:
        what = f"Rank {raised[0]} waits in {places.get(raised[0], '')} while it handles an error."
        error = clean_message(facts[raised[0]]["raised"])
        cause = f"the error is {error}; its `finally` or `except` waits for other ranks"
        fix = "fix that error; call no collective and no barrier in a finally: or except:"
    elif 0 < sum(bool(fact.get("forward")) for fact in facts.values()) < len(facts):
        cause = f"not every rank is in the forward of a DDP model: {named}"
        fix = "evaluate with model.module(…) on one rank alone, or call the model equally often on every rank"
    elif len(set(places.values())) > 1:
        cause = f"they stand in different collectives, or one of them is an exchange with another rank: {named}"
    return what, cause, fix


def _quote_last(state: JobState, rank: int) -> str:
    tail = state.rank_states[rank].tail
    return f"; the last that it printed: {tail[-1][:160]}" if tail else ""


def _shorten_message(error: dict) -> str:
    # The first line: the last one of torch's long messages is advice.
    lines = error["message"].strip().splitlines() or [error["kind"]]
    return shorten_gloo(lines[0])[:160]


def _list_messages(errors: list[dict]) -> dict[int, str]:
    return {error["rank"]: _shorten_message(error) for error in errors if error["message"]}


def _list_stands(state: JobState, errors: list[dict]) -> dict[int, str]:
    """By rank, where it stood, as a file, a line and a function."""
    # A rank that NCCL's watchdog aborted has printed its stacks; it was in no state to hand them over.
    tails = {error["rank"]: "\n".join(state.rank_states[error["rank"]].tail) for error in errors}
    printed = {error["rank"]: error.get("traceback") or tails[error["rank"]] for error in errors}
    # From the same look as the place in the cause: a rank may move when the others end.
    printed |= {rank: fact["traceback"] for rank, fact in state.still.items() if fact.get("traceback")}
    texts = state.stacks | {rank: text for rank, text in printed.items() if text}
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


def _explain_limit(state: JobState, limits: list[str]) -> Failure:
    cause = "it had more to do, or a rank waited for something that never came"
    silent = [part.name for part in state.nodes.values() if state.reason and not (part.ended or part.by_hand)]
    if silent:
        cause = f"the supervisor on {', '.join(silent)} was stopped (SIGSTOP), or that machine hangs"
    if stands := [f"rank {rank} in {fact['where']}" for rank, fact in state.still.items() if fact["where"]]:
        seconds = min(fact["seconds"] for fact in state.still.values())
        cause += f"; these ranks have not moved for {seconds:.0f} s: {'; '.join(stands[:4])}"
    fix = "look at what each rank waits for there; a larger limit= only if that ends by itself"
    if not state.still.keys() >= state.ranks.keys():  # a rank moved until the end
        fix = "a larger limit=, or less work"
    what = f"The job ran into its {limits[0] if limits else f'time limit of {state.spec.limit:g} s'}."
    return _fail("limit", what, cause, fix)


def trained_alone(state: JobState) -> bool:
    """True if ranks that should have formed one group of all formed none."""
    spec, groups = state.spec, [state.rank_states[rank].groups for rank in state.ranks]
    if not spec or spec.program or not spec.needs_group or spec.world_size == 1:
        return False
    return not any(sizes is None or max(sizes, default=0) >= spec.world_size for sizes in groups)


def _explain_alone(state: JobState) -> Failure:
    """Every rank ended well, and they formed no group of all."""
    ranks = [state.rank_states[rank] for rank in sorted(state.ranks)]
    believed = next((one.believed for one in ranks if one.believed), [])
    cause = "; ".join(believed[:3]) or "the script does not call init_process_group, or only on a condition"
    size = max(max(one.groups, default=1) for one in ranks)
    trained = "alone" if size == 1 else f"in a group of {size}"
    join = "init_process_group('gloo') with no other arguments uses what torchrun has set"
    advice = next((one.advice for one in ranks if one.advice), join)
    fix = f"{advice}; a script that needs no group: TorchrunJob(…, needs_group=False)"
    what = f"The {state.spec.world_size} ranks did not work together: each trained {trained}."
    return _fail("alone", what, cause, fix)


def _explain_join(state: JobState) -> Failure:
    missing = state.list_missing()
    cause = "it was started, and did not reach the meeting point"
    if not state.nodes[missing[0]].started:
        cause = f"{_name_starter(state, 'the')} was not started there"
    fix = "start it (bash node….sh on that node), or let job.preflight() say what is in the way"
    return _fail("join", f"Not all nodes joined in time; missing: {', '.join(missing)}.", cause, fix, node=missing[0])


def _name_starter(state: JobState, article: str) -> str:
    return f"{article} starter of {state.spec.program[0]}" if state.spec and state.spec.program else "torchrun"


def _find_lost(state: JobState) -> NodeState | None:
    return next((part for part in state.nodes.values() if part.gone and part.ended is None), None)


def _explain_lost(part: NodeState, consequences: dict[int, str] | None = None) -> Failure:
    refusal = part.refusal
    if refusal and (not part.started or FULL.search(str(refusal))):
        return _fail("lost", refusal.what, refusal.cause, refusal.fix, node=part.name, message=str(refusal))
    cause = "the node was switched off, the network between you and it was cut, or its supervisor was killed"
    what, fix = f"The connection to {part.name} was lost.", f"see that it answers (ssh), then {AGAIN}"
    return _fail("lost", what, cause, fix, node=part.name, message=f"{refusal or ''}", consequences=consequences or {})


def _explain_torchrun(state: JobState, part: NodeState) -> Failure:
    text, returncode = "\n".join(part.tail), part.ended["returncode"] if part.ended else 1
    # torchrun's own clock was a moment before the launcher's; or a node that expects fewer others ended the meeting.
    if re.search("Rendezvous(Timeout|Closed)Error", text) and not all(one.joined for one in state.nodes.values()):
        return _explain_join(state)
    errors = [line.strip() for line in part.tail if re.search(r"(Error|Exception|error)\b", line)]
    said = errors[-1] if errors else f"exit status {returncode}"
    cause, fix = _explain_disk(part)
    if not cause and re.search(r"Rendezvous\w*Error|DistStoreError|TimeoutError|EADDRINUSE", text):
        cause = "the nodes could not meet at node 0's address and port"
        fix = "job.preflight() says in seconds which way is closed"
    elif not cause:
        cause, fix = _explain_signal(-returncode) if returncode < 0 else look_up(text)
    facts = {"node": part.name, "message": said, "traceback": "\n".join(list(part.tail)[-15:])}
    what = f"{_name_starter(state, 'The')} ended on {part.name}: {said}"
    return _fail("torchrun", what, cause, fix or "read the log", **facts)


def _explain_disk(part: NodeState, path: str = "") -> tuple[str, str]:
    """The cause and the fix if a disk of a node is full, as far as that was said or measured; otherwise "", ""."""
    ended = part.ended or {}
    full = ended.get("room") is not None and ended["room"] < 2**16
    path = path or name_full_disk(part.full) or (ended["folder"] if full else "")
    if path.startswith("/dev/shm/"):
        return look_up(f"No space left on device: '{path}'")
    fix = "free some space there (df -h), or use a folder on a larger disk; then run the job again"
    if path:
        return f"the disk is full at {path}", fix
    return (f"a disk is full: {clean(part.full, 200)}", fix) if part.full else ("", "")


def _explain_full_disk(state: JobState, error: dict) -> tuple[str, str]:
    """The cause and the fix if a rank failed because a disk is full; otherwise "", ""."""
    text, part = f"{error['message']}\n{error['traceback']}", state.nodes[error["node"]]
    if FULL.search(text):
        return _explain_disk(part, error.get("disk") or name_full_disk(text))
    # A rank that says nothing more: its own words, or those of a program that it ran, may have found no room.
    return _explain_disk(part) if error["kind"] == "exit" or "CalledProcessError" in error["message"] else ("", "")
