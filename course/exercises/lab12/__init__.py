"""The exercises of lab 12: a script with Lightning, what it logs, a callback, and how many steps it takes."""

from __future__ import annotations

from course.check.verdicts import Exercise
from course.exercises.lab12.callback import verify_callback
from course.exercises.lab12.counts import verify_count_steps, verify_read_logs
from course.exercises.lab12.lightning_script import verify_lightning_script

EXERCISES = {
    "12.1": Exercise("The LightningModule", verify_lightning_script),
    "12.2": Exercise("What is logged", verify_read_logs),
    "12.3": Exercise("A callback", verify_callback),
    "12.4": Exercise("Steps", verify_count_steps),
}
