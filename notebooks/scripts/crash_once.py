"""Runs observed.py, and kills rank 1 once, or its node: crash_once.py rank AT_STEP, then what observed.py takes."""

import argparse
import os
import runpy
import signal
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["rank", "node"])
parser.add_argument("at_step", type=int)
parser.add_argument("arguments", nargs=argparse.REMAINDER)
args = parser.parse_args()
steps = []


def crash(optimizer, arguments, options):
    """Counts the steps of this process, and ends it without a word when it is time."""
    steps.append(1)
    if len(steps) == args.at_step:
        if args.what == "node":
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun, which would start the rank anew
        os.kill(os.getpid(), signal.SIGKILL)


# torchrun counts how often it has started this node's processes anew: the second time nothing happens.
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    register_optimizer_step_post_hook(crash)
sys.argv = ["observed.py", *args.arguments]
runpy.run_path(str(Path(__file__).with_name("observed.py")), run_name="__main__")
