"""Runs observed.py, and kills rank 1 once: crash_once.py AT_STEP, then the arguments of observed.py."""

import os
import runpy
import signal
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

at_step, sys.argv = int(sys.argv[1]), ["observed.py", *sys.argv[2:]]
steps = []


def crash(optimizer, args, kwargs):
    """Counts the steps of this process, and ends it without a word when it is time."""
    steps.append(1)
    if len(steps) == at_step:
        os.kill(os.getpid(), signal.SIGKILL)


# torchrun counts how often it has started this node's processes anew: the second time nothing happens.
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    register_optimizer_step_post_hook(crash)
runpy.run_path(str(Path(__file__).with_name("observed.py")), run_name="__main__")
