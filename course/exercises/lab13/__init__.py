"""The exercises of lab 13: ask for nodes and give them back; files for a cluster and a cloud; what a run costs."""

from __future__ import annotations

from course.check.verdicts import Exercise
from course.exercises.lab13.batch_script import verify_batch_script
from course.exercises.lab13.cloud_files import verify_cloud_files
from course.exercises.lab13.costs import verify_plan_run
from course.exercises.lab13.stopping import verify_stopping

EXERCISES = {
    "13.1": Exercise("The batch script", verify_batch_script),
    "13.2": Exercise("Stop when you are told to", verify_stopping),
    "13.3": Exercise("Files for a cluster and a cloud", verify_cloud_files),
    "13.4": Exercise("What a run costs", verify_plan_run),
}
