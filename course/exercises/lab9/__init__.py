"""The exercises of lab 9: DDP by hand with overlap, a communication hook, SyncBatchNorm on Gloo, local SGD."""

from __future__ import annotations

from course.check.verdicts import Exercise
from course.exercises.lab9.comm_hook import verify_note_and_average
from course.exercises.lab9.local_sgd import verify_local_step
from course.exercises.lab9.overlap import verify_overlap
from course.exercises.lab9.sync_norm import verify_sync_batch_norm

EXERCISES = {
    "9.1": Exercise("Send while backward runs", verify_overlap),
    "9.2": Exercise("A hook that counts", verify_note_and_average),
    "9.3": Exercise("SyncBatchNorm on Gloo", verify_sync_batch_norm),
    "9.4": Exercise("Local SGD", verify_local_step),
}
