"""Which failure a job is said to have, from what was heard of it alone; and how a notebook shows it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from harness.jobs import hear
from IPython.core.formatters import DisplayFormatter

from lab_common import LabError, markup
from nodelaunch import Failure, JobError, JobResult
from nodelaunch.diagnosis import diagnose
from nodelaunch.state import JobState

LOST = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited"
WAITED = "RuntimeError: Timed out waiting 60000ms for recv operation to complete"


def hear_error(state, rank, message):
    facts = {"kind": "exception", "message": message, "traceback": "", "location": ""}
    hear(state, "ab"[rank], "error", rank=rank, **facts)


def hear_start(state, rank, attempt, port=""):
    """Has a rank start in an attempt; its pid ends in the rank."""
    who = {"rank": rank, "pid": 10 * attempt + rank, "host": "ab"[rank], "local_rank": 0, "node": rank}
    hear(state, "ab"[rank], "worker", **who, processes=1, port=port or str(attempt))


@pytest.fixture
def restarted():
    """Two nodes whose ranks have started in a job that may start them anew."""
    made = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"])
    for rank in (0, 1):
        hear_start(made, rank, 1)
    return made


def list_restarts(state):
    return [[error["rank"] for error in errors] for errors in state.restarts]


def test_a_rank_that_fails_anew_before_another_is_heard_to_start_is_still_named(restarted):
    hear_error(restarted, 1, "OSError: once")
    hear_start(restarted, 0, 2)
    hear_error(restarted, 0, "OSError: twice")
    hear_start(restarted, 1, 2)  # of another node, whose lines come when they come
    assert diagnose(restarted).what == "Rank 0 on a failed first: OSError: twice"
    assert list_restarts(restarted) == [[1]]


def test_a_node_that_is_heard_a_whole_attempt_late_hides_no_failure():
    late = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"])
    for attempt in (1, 2):
        hear_start(late, 0, attempt)
        hear_error(late, 0, f"OSError: {attempt}")
    for attempt in (1, 2):
        hear_start(late, 1, attempt)
    assert diagnose(late).what == "Rank 0 on a failed first: OSError: 2" and list_restarts(late) == [[0]]


def test_a_rank_that_missed_an_attempt_counts_in_the_next(restarted):
    hear_error(restarted, 1, "OSError: once")
    hear_start(restarted, 0, 2)
    hear_start(restarted, 1, 3)
    hear_error(restarted, 1, "OSError: thrice")
    hear_start(restarted, 0, 3)
    assert diagnose(restarted).what == "Rank 1 on b failed first: OSError: thrice"


def test_what_is_heard_late_of_an_attempt_is_no_failure_of_the_next(restarted):
    """An error, what the rank had printed, and torchrun's word on an exit: lines may wait on their node."""
    hear_start(restarted, 0, 2)
    hear_error(restarted, 1, LOST)
    restarted.read("b", b"[rank 1] Traceback (most recent call last):\n")
    restarted.read("b", b"[rank 1] ValueError: mended\n")
    hear_start(restarted, 1, 2)
    restarted.read("a", b"E1127 failed (exitcode: -9) local_rank: 0 (pid: 10) of binary: python\n")
    assert restarted.errors == [] and list_restarts(restarted) == [[1, 0]]
    restarted.read("b", b"E1127 failed (exitcode: 1) local_rank: 0 (pid: 21) of binary: python\n")
    assert "mended" not in str(diagnose(restarted)) and diagnose(restarted).rank == 1


def test_ranks_that_are_started_anew_without_a_failure_are_no_restart_to_tell(restarted):
    """torchrun does so where another node meets anew."""
    for rank in (1, 0):
        hear_start(restarted, rank, 2)
    assert restarted.restarts == [] and restarted.errors == []


@pytest.mark.parametrize("ports", ["111", "121"])
def test_a_port_that_an_earlier_attempt_had_mixes_none(ports):
    state = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"])
    for attempt, port in enumerate(ports, 1):
        hear_start(state, 0, attempt, port)
        hear_error(state, 0, f"OSError: {attempt}")
        hear_start(state, 1, attempt, port)
    assert diagnose(state).what == "Rank 0 on a failed first: OSError: 3" and list_restarts(state) == [[0], [0]]


def test_without_restarts_a_rank_that_says_twice_who_it_is_hides_no_failure():
    state = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"], restarts=False)
    for rank, attempt in ((0, 1), (1, 1), (1, 2)):
        hear_start(state, rank, attempt)
        if not rank:
            hear_error(state, 0, "OSError: bad")
    assert diagnose(state).what == "Rank 0 on a failed first: OSError: bad" and state.restarts == []


def test_a_node_that_is_gone_is_named_before_the_rank_that_misses_it(state):
    hear_error(state, 0, LOST)
    state.nodes["b"].gone = True
    failure = diagnose(state)
    assert (failure.kind, failure.node, failure.what) == ("lost", "b", "The connection to b was lost.")
    assert set(failure.consequences) == {0}


def test_a_rank_that_waited_in_vain_is_a_hang_and_one_that_lost_its_peer_is_none(state):
    hear_error(state, 0, WAITED)
    failure = diagnose(state)
    assert (failure.kind, failure.rank, failure.node) == ("hang", 1, "b"), "it is the other one that was silent"
    assert failure.what == "Rank 1 on b was silent while rank 0 on a waited for it."
    assert failure.consequences == {0: WAITED}
    lost = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"])
    hear_error(lost, 0, LOST)
    assert diagnose(lost).kind == "lost"


def test_a_node_whose_launcher_was_silent_is_named_also_where_it_is_the_second(state):
    hear(state, "b", "ended", returncode=1, reason="silence", why="no heartbeat for 6 s", killed=0, memory={})
    failure = diagnose(state)
    assert (failure.kind, failure.node) == ("lost", "b")
    assert "no heartbeat" in failure.what


def test_a_rank_with_an_error_of_its_own_is_no_consequence_of_the_first(state):
    advice = "RuntimeError: Expected to have finished reduction\nIn addition, you can set a variable"
    hear_error(state, 0, advice)
    hear_error(state, 1, advice)
    failure = diagnose(state)
    assert (failure.rank, failure.consequences) == (0, {})
    assert "  rank 1 failed, too: RuntimeError: Expected to have finished reduction\n" in str(failure)


@pytest.mark.parametrize(("code", "too"), [(-6, {0}), (-15, set())])
def test_a_rank_that_torchrun_ends_is_a_consequence_and_one_that_aborts_need_not_be(state, code, too):
    state.read("b", b"E1121 failed (exitcode: 3) local_rank: 0 (pid: 58) of binary: python\n")
    state.read("a", f"E1121 failed (exitcode: {code}) local_rank: 0 (pid: 57) of binary: python\n".encode())
    failure = diagnose(state)
    assert (failure.rank, set(failure.others), set(failure.consequences)) == (1, too, {0} - too)


def test_an_exception_that_follows_an_abort_is_named_and_not_called_the_first(state):
    state.read("a", b"E1121 failed (exitcode: -6) local_rank: 0 (pid: 57) of binary: python\n")
    hear_error(state, 1, "TypeError: bad sizes")
    assert diagnose(state).what == "Rank 1 on b failed: TypeError: bad sizes"


@pytest.mark.parametrize("code", [-6, -15])
def test_a_rank_that_was_aborted_or_told_to_end_is_behind_one_that_ended_by_itself(state, code):
    state.read("a", f"E1121 failed (exitcode: {code}) local_rank: 0 (pid: 57) of binary: python\n".encode())
    state.read("b", b"E1121 failed (exitcode: -11) local_rank: 0 (pid: 58) of binary: python\n")
    assert (diagnose(state).rank, diagnose(state).kind) == (1, "signal")


def test_a_rank_that_is_blamed_by_another_is_named_with_its_own_node(state):
    hear(state, "b", "done", rank=1)
    hear_error(state, 0, WAITED)
    ended = diagnose(state)
    assert (ended.kind, ended.rank, ended.node) == ("exit", 1, "b")


def test_a_rank_whose_peer_is_gone_is_named_with_the_peers_node(state):
    hear_error(state, 0, LOST)
    lost = diagnose(state)
    assert (lost.kind, lost.rank, lost.node) == ("lost", 1, "b")


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
    """What a notebook keeps of a thing that is displayed, by type."""
    return DisplayFormatter().format(thing)[0]


def read_text(page):
    """What a reader of a page sees, without the folded part, in lines."""
    visible = re.sub(r"<details>.*</details>", "", page, flags=re.DOTALL)
    return [line for line in re.sub(r"<[^>]*>", "", visible.replace("</div>", "\n")).split("\n") if line]


def test_a_failed_job_is_a_card_with_a_folded_traceback():
    page = show(make_result(FAILURE))["text/html"]
    assert page.startswith(f'<div style="border-left:5px solid {markup.COLOURS["red"]};')
    assert read_text(page) == [
        "exception&nbsp; rank 1 on b",
        FAILURE.what,
        "rank 0 failed as a consequence: RuntimeError: Connection closed by peer",
        "likely: the batch is empty",
        "fix: num_workers=0, or a smaller batch",
        "log: /runs/jobs/train-1/output.log",
    ]
    assert re.search(r"<code [^>]*>num_workers=0</code>, or", page), "what can be typed is code"
    assert re.search(
        r"<details><summary>traceback of rank 1</summary><pre [^>]*>Traceback \(most .*bad luck</pre>", page, re.S
    )
    assert page.count("<div") == page.count("</div>")


def test_the_plain_text_of_a_card_is_what_print_shows():
    assert show(FAILURE)["text/plain"] == str(FAILURE)
    assert "log:" not in show(FAILURE)["text/html"]
    failed = make_result(FAILURE)
    assert show(failed)["text/plain"] == show(JobError(failed))["text/plain"] == str(JobError(failed))
    assert show(JobError(failed))["text/html"] == show(failed)["text/html"]
    good = make_result(None)
    assert show(good) == {"text/plain": repr(good)}
    error = LabError("No node.", where="LAB_NODES", cause="a typo", fix="export LAB_NODES=local:2, then make lab")
    assert show(error)["text/plain"] == str(error)
    page = show(error)["text/html"]
    assert read_text(page) == ["error&nbsp; ", *(line.strip() for line in str(error).split("\n"))]
    assert re.findall(r"<code [^>]*>(.*?)</code>", page) == ["export LAB_NODES=local:2", "make lab"]


def test_each_rank_of_a_hang_is_on_the_card_and_of_many_the_first():
    places = {rank: f"train.py, line {rank}, in <module>" for rank in range(10)}
    hang = Failure("hang", "The ranks wait for each other.", 0, "a", stacks=places)
    lines = read_text(show(hang)["text/html"])
    assert lines[2:] == [
        *(f"rank {rank} stood at: train.py, line {rank}, in &lt;module&gt;" for rank in range(8)),
        "more ranks: 2 are not shown here",
    ]
    assert "<details" not in show(hang)["text/html"], "there is no traceback to fold"
    assert "rank 9 stood at" in show(hang)["text/plain"]


def test_a_job_that_was_stopped_has_another_colour():
    stopped = Failure("stopped", "The job was stopped.", traceback="last words")
    page = show(stopped)["text/html"]
    assert markup.COLOURS["note"] in page and markup.COLOURS["red"] not in page
    assert "<summary>the last lines before the end</summary>" in page


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


def test_the_colours_of_a_terminal_and_tabs_leave_no_signs_on_a_card():
    coloured = replace(FAILURE, traceback="\x1b[1;31mError\x1b[0m\tin C", cause="\x1b[32mgreen\x1b[0m")
    page = show(coloured)["text/html"]
    assert ">Error   in C</pre>" in page and "likely: green" in read_text(page)


def test_a_notebook_keeps_the_ends_of_a_traceback_of_100_000_lines():
    lines = [f"line {number}" for number in range(100_000)]
    long = replace(FAILURE, traceback="\n".join([*lines, "x" * 10**6]), cause="c" * 10**6, fix="f=" * 10**6)
    for shown in (show(long), show(make_result(long)), show(JobError(make_result(long)))):
        assert {kind: len(text) < 10_000 for kind, text in shown.items()} == {"text/plain": True, "text/html": True}
        for text in shown.values():
            assert "line 19\n(99,901 lines are left out here)\nline 99921\n" in text and "xxx…" in text
    assert len(JobError(make_result(long))._render_traceback_()) < 120
    assert str(long).count("\n") > 100_000, "print() shows all of it"
    many = {rank: "lost" for rank in range(1000)}
    assert len(show(replace(FAILURE, consequences=many))["text/html"]) < 10_000


@pytest.mark.parametrize(
    ("fix", "typed"),
    [
        ("a larger limit=, or less work", ["limit="]),
        ("job.preflight() says in seconds which way is closed", ["job.preflight()"]),
        ("a smaller --batch-size", ["--batch-size"]),
        ("yours: files=, with env={'PYTHONPATH': '.'} to look in it", ["files=", "env={'PYTHONPATH': '.'}"]),
        ("drop_last=True, or torch.utils.data.Subset around it", ["drop_last=True", "torch.utils.data.Subset"]),
        ("on that node: rm -r -- '/a b'   (it is copied again)", ["rm -r -- '/a b'"]),
        ("on node0: df -h; free some space", ["df -h"]),
        ("TorchrunJob('train.py', nodes=local_nodes(2))", ["TorchrunJob('train.py', nodes=local_nodes(2))"]),
        ("ssh-keygen -t ed25519, then ssh-copy-id n1", ["ssh-keygen -t ed25519", "ssh-copy-id n1"]),
        ("read the log: the last lines before the crash", []),
        ("see that it answers (ssh), then run the job again", []),
    ],
)  # fmt: skip
def test_what_can_be_typed_in_a_fix_is_code(fix, typed):
    page = markup.mark_code(fix).replace("&#x27;", "'")
    assert re.findall(r"<code [^>]*>(.*?)</code>", page) == typed
    assert re.sub(r"<[^>]*>|&nbsp;", lambda found: " " * (found[0] == "&nbsp;"), page) == fix


def compare(one, other):
    """The contrast of two colours as WCAG 2 defines it, from 1 to 21."""
    lights = []
    for colour in (one, other):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
    return max(lights) / min(lights)


@pytest.mark.parametrize("colour", markup.COLOURS.values())
def test_the_colours_can_be_seen_in_both_themes(colour):
    assert compare(colour, "#ffffff") > 4.5, "text of the colour on white, and white text on the colour"
    assert compare(colour, "#111111") > 3, "an edge and bold words on the dark theme"
    assert compare("#ffffff", "#000000") == pytest.approx(21)


def test_torchrun_that_gave_up_before_the_launcher_is_a_node_that_did_not_join():
    state = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"])
    state.nodes["a"].started = True
    state.read("a", b"torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n")
    hear(state, "a", "ended", returncode=1, reason="", why="", killed=0, memory={})
    state.nodes["a"].gone = True
    failure = diagnose(state)
    assert (failure.kind, failure.node) == ("join", "b")
    assert failure.what == "Not all nodes joined in time; missing: b."
