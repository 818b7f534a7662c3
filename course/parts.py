"""The parts of the course, which the learner's first page and the web site show: labs that belong together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of the course.

    Attributes:
        title: Its name.
        labs: The numbers of its labs.
        promise: What a learner can do afterwards, in a sentence.
    """

    title: str
    labs: range
    promise: str


PARTS = (
    Part("One device", range(0, 4), "Measure honestly, compute faster, and keep a record of every run."),
    Part("Several devices", range(4, 7), "Train on two GPUs and on two nodes, and repair what goes wrong there."),
    Part("Under the hood", range(7, 10), "Keep the device fed, know what a byte costs, and send fewer of them."),
    Part("Models that do not fit", range(10, 12), "Share the memory between the ranks, or cut the model into stages."),
    Part("Tools of the trade", range(12, 15), "Use frameworks and schedulers, and know what they do for you."),
    Part("The race", range(15, 16), "Put it all together, against the clock."),
)
