"""The exercises of lab 10: bytes of states and of activations, a step of ZeRO-1, an MLP by tensor parallelism."""

from __future__ import annotations

from course.check.verdicts import Exercise
from course.exercises.lab10.formulas import verify_activation_bytes, verify_state_bytes
from course.exercises.lab10.split_mlp import verify_split_mlp
from course.exercises.lab10.zero import verify_zero_step

EXERCISES = {
    "10.1": Exercise("Bytes of the states", verify_state_bytes),
    "10.2": Exercise("Bytes of the activations", verify_activation_bytes),
    "10.3": Exercise("A step of ZeRO-1", verify_zero_step),
    "10.4": Exercise("An MLP on two ranks", verify_split_mlp),
}
