"""The exercises of lab 14: Horovod, TensorFlow's TF_CONFIG, and a parameter server in two ways."""

from __future__ import annotations

from course.check.verdicts import Exercise
from course.exercises.lab14.horovod_script import verify_horovod_script
from course.exercises.lab14.parameter_server import verify_serve_at_once, verify_serve_in_turn
from course.exercises.lab14.tf_config import verify_write_tf_config

EXERCISES = {
    "14.1": Exercise("The Horovod script", verify_horovod_script),
    "14.2": Exercise("TF_CONFIG", verify_write_tf_config),
    "14.3": Exercise("A synchronous parameter server", verify_serve_in_turn),
    "14.4": Exercise("An asynchronous parameter server", verify_serve_at_once),
}
