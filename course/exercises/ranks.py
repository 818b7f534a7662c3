"""Ranks for a check: what an answer does on several ranks, and what went wrong if they do not end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from course.check.verdicts import NotYetError
from course.ranks import Outcome, fork_ranks
from lab_common import LabError
from lab_common.text import clean

# Seconds: the ranks of `run_on_ranks` may take so long, and a collective of theirs waits so long for the other ranks.
LIMIT, COLLECTIVE = 25.0, 5.0
PRINTED = 20  # lines of a rank's own print() that are shown
# With it, macOS lets a fork continue that its Objective-C libraries would end.
FORK_SAFETY = "OBJC_DISABLE_INITIALIZE_FORK_SAFETY"
# Hints for `refusing`: a %%px cell has these names, and a function of the notebook has not.
NAMES = {f"name '{name}' is not defined": f"{name} is dist.get_{name}()" for name in ("rank", "world_size")}
# What Gloo says if the ranks do not do the same.
NETWORK = ("gloo", "Timed out", "Application timeout", "Connection closed", "Connection reset")
SEND_FIRST = (
    "send() returns when the other rank receives. If all send first, none receives: start with irecv, then isend, and "
    "wait for both"
)
UNEQUAL = (
    "look for a collective that only one rank calls, a message that nobody sends, or a tensor that differs in size or "
    "dtype"
)
ENDLESS = "a loop that does not end, a wait for what nobody sends, or tensors that differ in size or dtype"


def run_on_ranks(
    work: Callable[[int], Any], answer: Callable, *, case: str, count: int = 2, limit: float | None = None
) -> list[Any]:
    """Runs a function on ranks that are forked for it, and ends them.

    Args:
        work: Called on each rank with the rank's number; there is a Gloo group of ``count`` ranks. Its return value
            must be picklable.
        answer: The learner's function, which ``work`` calls: if it fails, the error names its line.
        case: The test case, in a few words.
        count: The number of ranks.
        limit: Seconds that the work may take; None for ``LIMIT``.

    Returns:
        The ranks' return values, in order.

    Raises:
        NotYetError: The ranks waited for each other, or sent mismatching data, or did not end.
        LabError: A process group is open in this process, or the ranks did not find each other.
        Exception: An error of the answer, as the first rank reported it.
    """
    # The first optimizer, or DDP, imports hundreds of modules: once here, and not in each rank of each check.
    import torch._dynamo  # noqa: F401

    outcomes = fork_ranks(work, answer, count, limit=limit or LIMIT, timeout=COLLECTIVE)
    show_printed(dict(enumerate(outcomes)))
    _raise_failure(outcomes, case)
    return [outcome.value for outcome in outcomes]


def show_printed(outcomes: Mapping[int, Outcome]) -> None:
    """Prints the first lines of each rank's own output."""
    for rank, outcome in outcomes.items():
        for line in outcome.printed.splitlines()[:PRINTED]:
            print(f"[rank {rank}] {clean(line, 200)}")


def _raise_failure(outcomes: list[Outcome], case: str) -> None:
    """Raises the failure: first an error of the answer itself, then one between the ranks."""
    failed = [(rank, one) for rank, one in enumerate(outcomes) if one.error]
    for _, one in failed:
        if "autograd's threading" in str(one.error):  # torch: no fork after a backward, where there is a GPU
            raise LabError(
                "This check cannot make its ranks in this kernel.",
                where="torch's backward, in a process that was forked",
                cause="there is a GPU, and a backward pass ran in this kernel before: torch cannot be forked after it",
                fix="start JupyterLab with CUDA_VISIBLE_DEVICES= (nothing behind it), and run the lab on the CPU",
            )
        if not any(word in str(one.error) for word in NETWORK):
            one.error.line_of_answer = one.line
            raise one.error
    _blame_macos(outcomes)
    silent = [(rank, one) for rank, one in enumerate(outcomes) if one.stuck or one.number]
    expected = "every rank calls the same collectives in the same order, on tensors of equal size"
    blocked = any("send(" in one.line and "isend" not in one.line for _, one in failed + silent)
    if failed and not any(one.number for _, one in silent):
        rank, one = failed[0]
        calls = ", ".join(f"rank {place} called {other.calls}" for place, other in enumerate(outcomes))
        raise NotYetError(
            f"{case}: the ranks do not fit together",
            yours=f"{calls} collectives; rank {rank} stopped at {one.line or 'a collective'}",
            expected=expected,
            hint=SEND_FIRST if blocked else UNEQUAL,
        )
    if silent:
        where = next((f"; rank {rank} stands in {one.line}" for rank, one in silent if one.line), "")
        raise NotYetError(
            f"{case}: did not end",
            yours=f"rank {', '.join(str(rank) for rank, _ in silent)} gave no result{where}",
            expected=expected,
            hint=SEND_FIRST if blocked else ENDLESS,
        )


def _blame_macos(outcomes: list[Outcome]) -> None:
    """Raises LabError if macOS may have ended a rank because it was forked beside threads: not the answer's fault."""
    if sys.platform == "darwin" and FORK_SAFETY not in os.environ and any(one.number for one in outcomes):
        raise LabError(
            "A rank of this check was killed.",
            where="this kernel",
            cause="macOS ends forked processes that call its own libraries",
            fix=f"export {FORK_SAFETY}=YES, then start JupyterLab again from that terminal",
        )
