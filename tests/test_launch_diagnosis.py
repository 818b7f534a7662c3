"""Which failure a job is said to have, from what was heard of it alone."""

import json

import pytest

from nodelaunch.diagnosis import diagnose
from nodelaunch.state import JobState

LOST = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited"
WAITED = "RuntimeError: Timed out waiting 60000ms for recv operation to complete"


@pytest.fixture
def state():
    """Two nodes, a and b, of one rank each, which have started."""
    made = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"])
    for rank, node in enumerate("ab"):
        hear(made, node, "worker", rank=rank, pid=57 + rank, host=node, local_rank=0, node=rank, processes=1)
    return made


def hear(state, node, event, /, **facts):
    state.read(node, f"\x1e{json.dumps({'event': event, **facts})}\n".encode())


def hear_error(state, rank, message):
    facts = {"kind": "exception", "message": message, "traceback": "", "location": ""}
    hear(state, "ab"[rank], "error", rank=rank, **facts)


def test_a_node_that_is_gone_is_named_before_the_rank_that_misses_it(state):
    hear_error(state, 0, LOST)
    state.nodes["b"].gone = True
    failure = diagnose(state)
    assert (failure.kind, failure.node, failure.what) == ("lost", "b", "The connection to b was lost.")
    assert set(failure.consequences) == {0}


def test_a_rank_that_waited_in_vain_is_a_hang_and_one_that_lost_its_peer_is_none(state):
    hear_error(state, 0, WAITED)
    assert (diagnose(state).kind, diagnose(state).rank) == ("hang", 0)
    lost = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"])
    hear_error(lost, 0, LOST)
    assert diagnose(lost).kind == "lost"


def test_a_node_whose_launcher_was_silent_is_named_also_where_it_is_the_second(state):
    hear(state, "b", "ended", returncode=1, reason="silence", why="no heartbeat for 6 s", killed=0, memory={})
    failure = diagnose(state)
    assert (failure.kind, failure.node) == ("lost", "b")
    assert "no heartbeat" in failure.what


@pytest.mark.parametrize("code", [-6, -15])
def test_a_rank_that_was_aborted_or_told_to_end_is_behind_one_that_ended_by_itself(state, code):
    state.read("a", f"E1121 failed (exitcode: {code}) local_rank: 0 (pid: 57) of binary: python\n".encode())
    state.read("b", b"E1121 failed (exitcode: -11) local_rank: 0 (pid: 58) of binary: python\n")
    assert (diagnose(state).rank, diagnose(state).kind) == (1, "signal")
