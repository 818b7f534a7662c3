"""Interrupts at random moments of a job: the prompt is back at once, nothing is left, and the last checkpoint loads."""

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from harness.jobs import assert_gone, assert_port_free, find_port

from lab_utils.training import Checkpoints

# Of jobs with torchrun, and of jobs of plain Pythons, which start in a tenth of the time. `make drills` asks for more.
MANY = int(os.environ.get("LAB_INTERRUPTS", "8"))
COUNTS = {"torchrun": max(4, MANY // 6), "python": MANY}
STEPS = 24  # in each job
TRAIN = f"""
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import nodelaunch as launch
from lab_utils.training import Checkpoints

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, checkpoints = dist.get_rank(), Checkpoints(sys.argv[1])
box = [checkpoints.load() if rank == 0 else None]
dist.broadcast_object_list(box)
step, weights = (box[0][0], box[0][1]["weights"]) if box[0] else (0, torch.zeros(100_000))
print("connected", flush=True)
for _ in range({STEPS}):
    gradients = torch.ones_like(weights)
    dist.all_reduce(gradients)
    weights += gradients / 2
    step += 1
    if step % 3 == 0:
        if rank == 0:
            print("saving", flush=True)
            checkpoints.save(step, {{"weights": weights}})
        dist.barrier()
    time.sleep(0.02)
print("ending", flush=True)
launch.report(step)
dist.destroy_process_group()
"""
# The same without torch, and with two ranks that know nothing of each other: rank 0 alone reads and writes.
PLAIN = f"""
import json, os, sys, time
from pathlib import Path
import nodelaunch as launch
from lab_common.files import write_atomically

rank, path = int(os.environ["RANK"]), Path(sys.argv[1])
step = json.loads(path.read_text())[0] if rank == 0 and path.exists() else 0
print("connected", flush=True)
for _ in range({STEPS}):
    step += 1
    if step % 3 == 0 and rank == 0:
        print("saving", flush=True)
        with write_atomically(path) as file:
            file.write(json.dumps([step] * 100_000).encode())
    time.sleep(0.02)
print("ending", flush=True)
launch.report(step)
"""
# As a notebook's kernel: it stays, and an interrupt ends the cell.
KERNEL = """
import sys, traceback
import nodelaunch as launch

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # print() can be interrupted before the end of its line
    sys.stdout.flush()

while True:
    try:
        if not sys.stdin.readline():
            break
        program = [] if sys.argv[3] == "torchrun" else [sys.argv[3]]
        job = launch.TorchrunJob(sys.argv[1], [sys.argv[2]], nodes=launch.local_nodes(2), program=program)
        say("id", job.id)
        result = job.run(show=say)
        say("reported", *result.results)
    except KeyboardInterrupt:
        say("interrupted")
    except BaseException as error:
        say("failed", repr(error), *traceback.format_exc().splitlines())
"""
# When: after which line, and how many seconds after it at most. The first is the preflight, the copies and the meeting.
MOMENTS = {
    "torchrun": (("id ", 3.5), ("connected", 0.8), ("saving", 0.1), ("ending", 1.2)),
    "python": (("id ", 0.9), ("connected", 0.5), ("saving", 0.05), ("ending", 0.2)),
}


class Kernel:
    """The process that runs the jobs, and its lines as they come."""

    def __init__(self, *arguments):
        # In a session of its own, as a kernel: the interrupt goes to its whole process group.
        self.process = subprocess.Popen(
            [sys.executable, "-c", KERNEL, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.lines, self.heard = queue.SimpleQueue(), []
        threading.Thread(target=lambda: [self.lines.put(line.rstrip("\n")) for line in self.process.stdout]).start()

    def run_cell(self):
        self.heard.clear()
        self.process.stdin.write("\n")
        return self.wait_for("id ")[3:]

    def wait_for(self, *parts, seconds=60.0):
        """The next line with one of these in it."""
        end = time.monotonic() + seconds
        while True:
            try:
                self.heard.append(self.lines.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"none of {parts} within {seconds} s: {self.heard}") from None
            if any(part in self.heard[-1] for part in parts):
                return self.heard[-1]

    def interrupt(self):
        os.killpg(self.process.pid, signal.SIGINT)

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()


@pytest.fixture
def kernel(tmp_path, monkeypatch, program):
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    (tmp_path / "train.py").write_text(TRAIN if program == "torchrun" else PLAIN)
    made = Kernel(tmp_path / "train.py", tmp_path / "checkpoints", program)
    yield made
    made.close()


def draw_moments(program):
    """Equally many of each kind, at random times, in random order."""
    draw, kinds = random.Random(16), MOMENTS[program]
    moments = [(part, draw.uniform(0, most)) for part, most in (kinds[k % 4] for k in range(COUNTS[program]))]
    draw.shuffle(moments)
    return moments


def check_checkpoint(folder):
    """The last checkpoint is whole: every weight is the number of its step."""
    if folder.is_file():
        step, *others = json.loads(folder.read_text())
        assert others == [step] * 99_999
        return step
    found = Checkpoints(folder).load() if folder.exists() else None
    if found is None:
        return 0
    step, state = found
    assert torch.equal(state["weights"], torch.full((100_000,), float(step)))
    return step


@pytest.mark.drill
@pytest.mark.parametrize("program", COUNTS)
def test_interrupts_at_random_moments(kernel, tmp_path, program):
    checkpoints, last, slowest, longest, ended = tmp_path / "checkpoints", 0, 0.0, 0.0, 0
    for part, delay in draw_moments(program):
        job_id = kernel.run_cell()
        if part != "id ":
            kernel.wait_for(part)
        time.sleep(delay)
        start = time.monotonic()
        kernel.interrupt()
        said = kernel.wait_for("interrupted", "failed", seconds=15)
        took = time.monotonic() - start
        where = f"{delay:.2f} s after {part!r}: {kernel.heard[-12:]}"
        assert said == "interrupted", where
        assert took < 5, f"{took:.1f} s, {where}"
        slowest, ended = max(slowest, took), ended + any("reported" in line for line in kernel.heard)
        longest = max(longest, assert_gone(job_id, 10))
        step = check_checkpoint(checkpoints)
        assert step >= last, where
        last = step
    print(f"slowest prompt {slowest:.1f} s, slowest end {longest:.1f} s later; {last} steps")
    print(f"{ended} of {COUNTS[program]} jobs had ended before the interrupt")
    assert ended <= COUNTS[program] / 3, "most interrupts have to hit a running job"
    assert last > 0

    # The same kernel runs a job to its end, from the last checkpoint.
    job_id = kernel.run_cell()
    said = kernel.wait_for("reported", "failed", "interrupted")
    assert said == f"reported {last + STEPS} {last + STEPS if program == 'torchrun' else STEPS}", kernel.heard
    assert_gone(job_id, 1)
    folder = tmp_path / "runs" / "jobs" / job_id
    assert_port_free("127.0.0.1", find_port(folder / "node0.sh"))
