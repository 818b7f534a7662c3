"""Runs a script as torchrun's workers do, with what runs around it, in a fork of ``warm.py``."""

from nodelaunch.node import worker

worker.set_process = lambda option, value: None  # its parent is no part of the job; it ends with whoever waits for it
worker.main()
