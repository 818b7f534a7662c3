"""The exercises of lab 11: a step of GPipe, the order of 1F1B, where to cut a network, what each way sends."""

from __future__ import annotations

from course.check.verdicts import Exercise
from course.exercises.lab11.gpipe import verify_gpipe_step
from course.exercises.lab11.plans import verify_bytes_sent, verify_cut, verify_one_f_one_b

EXERCISES = {
    "11.1": Exercise("A step of GPipe", verify_gpipe_step),
    "11.2": Exercise("The order of 1F1B", verify_one_f_one_b),
    "11.3": Exercise("Where to cut", verify_cut),
    "11.4": Exercise("Bytes that a rank sends", verify_bytes_sent),
}
