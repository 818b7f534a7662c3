"""Runs train_ddp.py or train_ray.py, and kills rank 1 once: kill_worker.py AT_STEP NOTES train_ray.py --epochs 2.

The file NOTES then has a line for each step of rank 1, and one for its end, each with its time.
"""

import argparse
import os
import runpy
import signal
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


def watch(at_step, notes):
    """In each worker: notes rank 1's steps, and kills it once at ``at_step``. torchrun and Ray both set RANK."""
    if os.environ["RANK"] != "1":
        return
    notes, steps = Path(notes), []

    def note(what):
        with notes.open("a") as file:
            file.write(f"{what} {time.time()}\n")

    def after_step(optimizer, arguments, options):
        steps.append(1)
        note("step")
        if len(steps) == at_step and "killed" not in notes.read_text():
            time.sleep(3)  # Ray asks its workers every two seconds what they have reported, such as a checkpoint
            note("killed")
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(after_step)


def main():
    """Runs the script, whose workers are this process under torchrun, and other processes under Ray."""
    parser = argparse.ArgumentParser()
    parser.add_argument("at_step", type=int)
    parser.add_argument("notes")
    parser.add_argument("script", choices=["train_ddp.py", "train_ray.py"])
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    path = Path(__file__).with_name(args.script)
    sys.argv = [str(path), *args.arguments]
    if args.script == "train_ddp.py":
        watch(args.at_step, args.notes)
        runpy.run_path(str(path), run_name="__main__")
    else:
        import train_ray

        def train(config):
            watch(args.at_step, args.notes)
            train_ray.train(config)

        train_ray.main(train)


if __name__ == "__main__":
    main()
