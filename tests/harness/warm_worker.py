"""Runs a script as torchrun's workers do, with what runs around it, in a fork of ``warm.py``."""

from nodelaunch.node import worker

worker._die_with_agent = lambda: None  # its parent is no part of the job; it ends with whoever waits for it
worker.main()
