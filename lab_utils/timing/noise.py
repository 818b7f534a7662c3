"""Recognises measurements too noisy to trust: the machine was busy, the times jump, or the rounds were few."""

from __future__ import annotations

from collections.abc import Iterable

from lab_utils.timing.measure import ROUNDS, Timing


def find_noise(timings: Iterable[Timing]) -> str:
    """Explains why these timings are too noisy to trust; "" if nothing is wrong.

    Other programs took more than a tenth of the processors' time while none of it was idle; or the third quartile of a
    set-up is more than 1.5 times its first one; or ``LAB_ROUNDS`` allowed only a few rounds.
    """
    known = [timing for timing in timings if timing.noise]
    if any(timing.noise == "few" for timing in known):
        return f"{ROUNDS} allowed only a few rounds: unset it, and measure again"
    others, busiest = max(((timing.others, timing.busiest) for timing in known), default=(0, ""))
    if any(timing.noise == "busy" for timing in known):
        share = f", other programs took {others:.0%} of its processors" if others else ""
        share += f", most of it {busiest}" if others and busiest else ""
        return f"this machine was busy{share}: measure again"
    if known:
        widest = max(known, key=lambda one: one.high / one.low)
        return f"the times of {widest.name} jump, quartiles {widest.high / widest.low:.1f}-fold apart: measure again"
    return ""
