"""Which failure a job is said to have, from recorded events alone; and how a notebook shows it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from harness.jobs import hear
from IPython.core.formatters import DisplayFormatter

from lab_common import LabError
from nodelaunch import Failure, JobError, JobResult, local_nodes
from nodelaunch.failure import diagnose
from nodelaunch.node.errors import StopReason
from nodelaunch.spec import JobSpec
from nodelaunch.state import JobState

LOST = "RuntimeError: [/x/gloo/pair.cc:1] Connection closed by peer [10.0.0.1]:1"
NCCL = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited"
WAITED = "RuntimeError: Timed out waiting 60000ms for recv operation to complete"

# The events of a job of two nodes, a and b, with one rank each (0 and 1). Each is called with the job's state.


def event(rank, name, **facts):
    return lambda state: hear(state, "ab"[rank], name, rank=rank, **facts)


def error(rank, message, **facts):
    return event(rank, "error", **{"kind": "exception", "message": message, "traceback": "", "location": "", **facts})


def line(rank, text):
    return lambda state: state.read("ab"[rank], f"{text}\n".encode())


def leave(rank, code, pid=None, before=""):
    """torchrun's word on the end of a worker."""
    return line(
        rank, f"{before}E1121 failed (exitcode: {code}) local_rank: 0 (pid: {pid or 57 + rank}) of binary: python"
    )


def done(rank, **facts):
    return event(rank, "done", **facts)


def stand(rank, inside, where="", **facts):
    return event(rank, "still", seconds=61.0, timeout=1800.0, inside=inside, where=where, **facts)


def end(rank, returncode, reason=None, why=""):
    return event(rank, "ended", returncode=returncode, reason=reason, why=why, killed=0, memory={})


def lose(rank):
    return lambda state: setattr(state.nodes["ab"[rank]], "gone", True)


def start(rank, attempt):
    """A rank starts in an attempt; its pid ends in the rank."""
    who = {"pid": 10 * attempt + rank, "host": "ab"[rank], "local_rank": 0, "node": rank}
    return event(rank, "worker", **who, processes=1, port=str(attempt))


STACK = f'Current thread 0x08 (most recent call first):\n  File "/n/code/{"0" * 64}/script/train.py", line 23 in f\n'
SILENT = "no heartbeat of the launcher for 6 s"
# By name: the events; the kind, the rank and the node of the failure; words of it, "-" before words that it lacks.
STORIES = {
    # Who failed first.
    "the exit of a rank does not hide its message": (
        [leave(0, 1), error(0, LOST), leave(1, -9)], "signal", 1, "b", ["rank 0 failed as a consequence"]),
    "a rank that is aborted while it waits is not the first": (
        [leave(0, -6), leave(1, -9)], "signal", 1, "b", ["was killed by signal 9"]),
    "a rank that torchrun ends is a consequence": (
        [leave(1, 3), leave(0, -15)], "exit", 1, "b", ["rank 0 failed as a consequence", "-too"]),
    # Ranks that lost or missed another one.
    "a rank whose peer is gone": ([error(0, NCCL)], "lost", 1, "b", ["Rank 0 on a lost its peers"]),
    "a node that is gone comes before the rank that misses it": (
        [error(0, NCCL), lose(1)], "lost", None, "b", ["The connection to b was lost.", "rank 0 failed as a conseq"]),
    "a rank that waited in vain": (
        [error(0, WAITED)], "hang", 1, "b", ["Rank 1 on b was silent while rank 0 on a waited for it.", WAITED]),
    "a crash after the script has ended": (
        [done(1), leave(1, -6), error(0, LOST)], "exit", 1, "b", ["Rank 1 had ended its work while rank 0 still"]),
    "the one of two that stands outside of torch": (
        [stand(0, False, "place 0"), event(0, "stack", text=STACK),
         error(1, WAITED, traceback='  File "x.py", line 5, in g\n')],
        "hang", 0, "a",
        ["was in place 0 while rank", "rank 0 stood at: train.py, line 23, in f", "rank 1 stood at: x.py, line 5, in"]),
    # Errors of the script itself are no lost peers, and the other way round.
    **{f"own: {message[:30]}": ([error(0, message, **more), error(1, "ValueError: later")], "exception", 0, "a", [])
       for message, more in [
           ("torch.distributed.DistNetworkError: The server socket has failed to listen. EADDRINUSE", {}),
           ("RuntimeError: the teacher's server: Connection refused", {"file": "/n/train.py"}),
       ]},
    **{f"echo: {message[:30]}": ([error(0, message, **more), error(1, "ValueError: later")], "exception", 1, "b", [])
       for message, more in [
           (LOST, {}),
           ("RuntimeError: Timed out waiting 20000ms for recv operation to complete", {"file": "/n/train.py"}),
       ]},
    # Full disks, by the message about them.
    **{f"disk: {path}": ([error(1, text)], "exception", 1, "b", [f"likely: the disk is full at {path}\n", "df -h"])
       for text, path in [
           ("OSError: [Errno 28] No space left on device: '/a b/c'", "/a b/c"),
           ("cp: error writing '/a/x': No space left on device", "/a/x"),
       ]},
    # Nodes.
    "a launcher that slept": (
        [line(0, "SignalException: Process 9 got signal: 15"), end(0, 1, "silence", SILENT), lose(0),
         end(1, 1, "silence", SILENT), lose(1)], "lost", None, "a", ["no heartbeat", "slept"]),
    "a supervisor that is told to end": (
        [error(0, LOST), end(1, 1, "signal", "signal 15")], "lost", None, "b", ["b ended the job: signal 15", "Slurm"]),
    "a torchrun that is killed": (
        [end(0, 0), end(1, -9)], "torchrun", None, "b", ["torchrun ended on b: exit status -9", "dmesg"]),
}  # fmt: skip


def assert_words(failure, words):
    for word in words:
        assert (word.lstrip("-") in str(failure)) is not word.startswith("-"), str(failure)


@pytest.mark.parametrize(("events", "kind", "rank", "node", "words"), STORIES.values(), ids=STORIES)
def test_what_failed_first(state, events, kind, rank, node, words):
    for happen in events:
        happen(state)
    failure = diagnose(state)
    assert (failure.kind, failure.rank, failure.node) == (kind, rank, node), failure
    assert_words(failure, words)


def test_a_stop_hides_no_failure_before_it_and_causes_none(state):
    state.reason, state.asked = StopReason.STOPPED, 0.0
    error(1, LOST)(state)
    leave(0, -15)(state)
    assert (diagnose(state).kind, diagnose(state).what) == ("stopped", "The job was stopped.")
    state.asked = 1e12
    error(1, "ValueError: bad luck")(state)
    assert diagnose(state).what == "Rank 1 on b failed first: ValueError: bad luck"


# Ranks that stand: by name, the events, True if no rank can move any more, and words of the failure.

STANDS = {
    "nothing was heard of rank 0: it works": ([stand(1, True)], False, []),
    "rank 0 waits for a program": ([stand(1, True), stand(0, False, "subprocess.run (train.py, line 4)")], False, []),
    "one handles an error": (
        [stand(0, True, "dist.all_reduce(t) (a, line 1)"),
         stand(1, True, "dist.barrier() (a, line 2)", raised="ValueError: bad")], True,
        ["Rank 1 waits in dist.barrier() (a, line 2) while it handles an error.", "ValueError: bad",
         "in a finally: or except:"]),
    "one calls the model alone": (
        [stand(0, True, "model(images) (train.py, line 17)", forward=True),
         stand(1, True, "dist.barrier() (train.py, line 20)", forward=False)], True,
        ["rank 0 in model(images) (train.py, line 17)", "model.module(…)"]),
    "a thread of rank 0 works": (
        [done(0), done(1), event(0, "lingers"), stand(0, False, thread="Thread-1 (upload)", idle=False)], False, []),
}  # fmt: skip


@pytest.mark.parametrize(("events", "still", "words"), STANDS.values(), ids=STANDS)
def test_ranks_that_stand_end_the_job_only_if_none_can_move(state, events, still, words):
    for happen in events:
        happen(state)
    assert state.stands_still() is still
    if still:
        state.reason, state.asked = StopReason.STANDSTILL, 1e12
        assert_words(diagnose(state), words)


def test_ranks_that_all_stand_elsewhere_are_named_at_the_limit(state):
    for rank in (0, 1):
        stand(rank, False, f"lock.acquire() (train.py, line {5 + rank})")(state)
    assert not state.stands_still(), "each may be about to go on"
    state.spec, state.reason = JobSpec("train.py", nodes=local_nodes(2), limit=90), StopReason.LIMIT
    failure = diagnose(state)
    assert failure.kind == "limit" and failure.fix.startswith("look at what each rank waits for there")
    assert "rank 0 in lock.acquire() (train.py, line 5); rank 1 in lock.acquire() (train.py, line 6)" in failure.cause


# Restarts.


def test_a_failure_belongs_to_its_attempt():
    """A rank fails again before another is heard to start."""
    state = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"])
    again = [error(1, "OSError: once"), start(0, 2), error(0, "OSError: twice"), start(1, 2)]
    for happen in (start(0, 1), start(1, 1), *again):
        happen(state)
    assert diagnose(state).what == "Rank 0 on a failed first: OSError: twice"
    assert [[one["rank"] for one in errors] for errors in state.restarts] == [[1]]


# How a notebook shows a failure.

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: bad luck'
FAILURE = Failure(
    kind="exception",
    what="Rank 1 on b failed first: ValueError: bad luck",
    rank=1,
    node="b",
    message="ValueError: bad luck",
    traceback=TRACEBACK,
    cause="the batch is empty",
    fix="num_workers=0, or a smaller batch",
    consequences={0: "RuntimeError: Connection closed by peer"},
)


def make_result(failure):
    return JobResult(not failure, (), (), failure, (), {}, {}, Path("/runs/jobs/train-1"), ("[rank 0] hello",))


def show(thing):
    """A displayed thing as a notebook keeps it, by type."""
    return DisplayFormatter().format(thing)[0]


def read_text(page):
    """The lines of a page that are visible without unfolding."""
    visible = re.sub(r"<details>.*</details>", "", page, flags=re.DOTALL)
    return [line for line in re.sub(r"<[^>]*>", "", visible.replace("</div>", "\n")).split("\n") if line]


def test_a_failed_job_is_a_card_with_a_folded_traceback_and_print_shows_the_same():
    failed = make_result(FAILURE)
    page = show(failed)["text/html"]
    assert read_text(page) == [
        "exception&nbsp; rank 1 on b",
        FAILURE.what,
        "rank 0 failed as a consequence: RuntimeError: Connection closed by peer",
        "likely: the batch is empty",
        "fix: num_workers=0, or a smaller batch",
        "log: /runs/jobs/train-1/output.log",
    ]
    assert re.search(
        r"<details><summary>traceback of rank 1</summary><pre [^>]*>Traceback \(most .*bad luck</pre>", page, re.S
    )
    assert show(failed)["text/plain"] == show(JobError(failed))["text/plain"] == str(JobError(failed))
    assert show(JobError(failed))["text/html"] == page
    good = make_result(None)
    assert show(good) == {"text/plain": repr(good)}


HOSTILE = "</pre></details><script>alert('1')</script>&\x1b[31m\x1b]0;title\x07"


def test_what_a_job_wrote_is_only_text_on_its_card():
    names = ("kind", "what", "node", "message", "traceback", "cause", "fix")
    texts = {name: f"{HOSTILE}\n\tnum_workers='{HOSTILE}'" for name in names}
    hostile = Failure(**texts, rank=1, consequences={0: HOSTILE}, stacks={0: HOSTILE})
    error = LabError(HOSTILE, where=HOSTILE, cause=HOSTILE, fix=HOSTILE, log=HOSTILE)
    for thing in (hostile, replace(hostile, kind="hang"), replace(make_result(hostile), folder=Path(HOSTILE)), error):
        page = show(thing)["text/html"]
        assert "<script" not in page and "&lt;script&gt;alert(&#x27;1&#x27;)" in page
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", page)
        assert page.count("<details>") == page.count("</details>") <= 1
