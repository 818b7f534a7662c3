"""Runs a script as torchrun's workers do, with what runs around it, in a fork of ``warm.py``."""

import os

from nodelaunch.node import worker

if "TORCHELASTIC_RUN_ID" not in os.environ:
    # Who starts it has said who this rank is. A second time would be a rank that was started anew.
    worker.Events.introduce = lambda *_, **__: None
worker._die_with_agent = lambda: None  # its parent is no part of the job; it ends with whoever waits for it
worker.main()
