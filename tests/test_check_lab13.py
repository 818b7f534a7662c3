"""Exercises 13.1 and 13.2 refuse typical wrong answers with the hint that fits, and accept right ones."""

import contextlib
import os
import signal
import socket
from functools import partial
from pathlib import Path

import pytest
from harness.answers import write_script

from course import check
from course.check import NotYetError
from course.exercises.lab13 import batch_script, stopping

pytestmark = pytest.mark.usefixtures("runs")


def refuse(number, answer):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert refused.value.yours and refused.value.expected
    return f"{refused.value.what} | {refused.value.hint}"


# 13.2

NAME = "train_preempted.py"
HANDLER = """    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
"""
AGREE = """            stop = torch.tensor(len(told), device=device)
            dist.all_reduce(stop)
"""
SAVE = """                if rank == 0:
                    torch.save(state, args.checkpoint.with_suffix(".new"))
                    args.checkpoint.with_suffix(".new").replace(args.checkpoint)  # a kill leaves the old or the new
"""
LEAVE = """                if stop:
                    dist.destroy_process_group()
                    return
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes the script with some of its text replaced; nothing may be added beside it."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield partial(write_script, folder, NAME)
    assert [path.name for path in folder.iterdir()] == [NAME]


def replace(text, old, new):
    assert old in text
    return text, text.replace(old, new)


def handle(*lines, before="told = []"):
    text = "".join(f"        {line}\n" for line in lines)
    return (
        HANDLER,
        f"    {before}\n\n    def handle(number, frame):\n{text}\n    signal.signal(signal.SIGTERM, handle)\n",
    )


SAVE_HERE = (
    'state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}',
    'torch.save(state, args.checkpoint.with_suffix(".new"))',
    'args.checkpoint.with_suffix(".new").replace(args.checkpoint)',
)
WRONG_STOPS = {
    "no handler": ([(HANDLER, "    told = []\n")], "died of the signal|signal.signal(signal.SIGTERM"),
    "saves in the handler": ([handle("told.append(number)", *SAVE_HERE), (SAVE, "")], "let it only take a note"),
    "the flag stays with its rank": (
        [replace(AGREE, "dist.all_reduce(stop)", "pass")],
        "a rank that was told tells the",
    ),
    "only who was told calls it": (
        [(AGREE, AGREE.replace("dist.all_reduce(stop)", "if told:\n                dist.all_reduce(stop)"))],
        "on every rank, after every step",
    ),
    "rank 0 leaves": ([replace(LEAVE, "if stop:", "if stop and rank == 0:")], "stands in no `if rank"),
    "another exit code": ([replace(LEAVE, "return", "raise SystemExit(1)")], "any other exit code is a crash"),
    "breaks": ([(LEAVE, "                if stop:\n                    break\n")], "break ends one loop of two"),
    "saves nothing": ([(SAVE, "")], "who saves"),
    "saves when it is told, and only then": (
        [replace(SAVE, "if rank == 0:", "if rank == 0 and stop:")],
        "a crash does not tell before",
    ),
    "every rank saves": (
        [replace(SAVE, "if rank == 0:", "if True:")],
        "two processes that write one file|one process saves, if rank == 0",
    ),
    "straight into the file": (
        [(SAVE, "                if rank == 0:\n                    torch.save(state, args.checkpoint)\n")],
        "leaves half a file",
    ),
    "the optimizer is not loaded": ([('        optimizer.load_state_dict(state["optimizer"])\n', "")], "the optimizer"),
    "another order": ([("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch + done)")], "as they were"),
}


@pytest.mark.parametrize(("changes", "hint"), WRONG_STOPS.values(), ids=WRONG_STOPS)
def test_wrong_stops_are_refused(write, changes, hint):
    said = refuse("13.2", write(*changes))
    assert any(one in said for one in hint.split("|")), said


PROVED = (
    "Your script runs in two processes, which are told to stop three times ...\n"
    f"✔ 13.2 Stop when you are told to: {stopping.PROVED}\n"
)
GLOBAL = """    stopping = {"now": False}

    def handle(number, frame):
        stopping["now"] = True

    signal.signal(signal.SIGTERM, handle)
"""
RIGHT_STOPS = {
    "as in the lab": [],
    "a dictionary, the maximum, a barrier": [
        (HANDLER, GLOBAL),
        (AGREE, AGREE.replace("len(told)", 'float(stopping["now"])').replace("(stop)", "(stop, dist.ReduceOp.MAX)")),
        (
            SAVE,
            """                if dist.get_rank() == 0:
                    new = f"{args.checkpoint}.tmp"
                    with open(new, "wb") as file:
                        torch.save(state, file)
                    os.replace(new, args.checkpoint)
                dist.barrier()
""",
        ),
        (LEAVE, "                if stop.item() > 0:\n                    raise SystemExit\n"),
    ],
}


@pytest.fixture
def usual_port():
    """Torch's usual port is taken, as by another learner's check on the machine of a JupyterHub."""
    with contextlib.suppress(OSError), socket.create_server(("", 29500)):
        yield
        return
    yield  # somebody has it


@pytest.mark.usefixtures("usual_port")
@pytest.mark.parametrize("changes", RIGHT_STOPS.values(), ids=RIGHT_STOPS)
def test_right_stops_are_accepted(write, capsys, changes):
    before = signal.getsignal(signal.SIGTERM), Path.cwd(), os.environ.get("RANK"), os.replace
    check.exercise("13.2", write(*changes))
    assert capsys.readouterr().out == PROVED
    assert before == (signal.getsignal(signal.SIGTERM), Path.cwd(), os.environ.get("RANK"), os.replace)


# 13.1

BATCH = r"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=1500M
#SBATCH --time=00:05:00
#SBATCH --output=ddp-%j.out
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head=$(scontrol show node "$head" | grep -oP 'NodeAddr=\K\S+')
srun torchrun --nnodes=2 --nproc-per-node=1 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:29500" \
    scripts/train_ddp.py --data shapes10 --images 640 --epochs 2 --checkpoint ddp.pt
"""
NODES, TASKS, _, MEM, TIME = (f"{line}\n" for line in BATCH.splitlines()[1:6])
RUN = BATCH[BATCH.index("srun") :]
RANK = "--node-rank=$SLURM_NODEID --master-addr=$head --master-port=29500"
ARGUMENTS = "--data shapes10 --images 640 --epochs 2 --checkpoint ddp.pt"
STATIC = f"torchrun --nnodes=2 --nproc-per-node=1 {RANK} scripts/train_ddp.py {ARGUMENTS}"


@pytest.fixture
def as_in_lab(root, monkeypatch):
    """The folder of the notebooks, where nothing may be added; a job of another Slurm around it is not seen."""
    monkeypatch.chdir(root / "notebooks")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "7")
    before = sorted(path.name for path in Path().iterdir())
    yield
    assert sorted(path.name for path in Path().iterdir()) == before


def batch(*changes):
    text = BATCH
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return lambda: text


WRONG_BATCHES = {
    "nothing": ([(BATCH, "")], "what the function returns"),
    "no shell": ([("#!/bin/bash\n", "")], "sbatch refuses a file without it"),
    "a space": ([(NODES, f"# {NODES[1:]}")], "in capitals"),
    "spaces around =": ([(NODES, "#SBATCH --nodes = 2\n")], "sbatch|without a space around ="),
    "no nodes": ([(NODES, "")], "--nodes=2"),
    "a task for each rank": ([(TASKS, "#SBATCH --ntasks-per-node=2\n")], "one torchrun on each node"),
    "no memory": ([(MEM, "")], "one of them"),
    "no time": ([(TIME, "")], "hours:minutes:seconds"),
    "a dash": ([(RUN, RUN.replace("srun ", "srun - "))], "exit code is 2"),
    "no srun": ([(RUN, RUN.removeprefix("srun "))], "on the first node alone"),
    "no torchrun": ([(RUN, "srun python scripts/train_ddp.py\n")], "torchrun starts the ranks"),
    "waits": ([(RUN, f"{RUN}sleep 60\n")], "what it waits for"),
    "an unknown option": ([("--nproc-per-node=1", "--ntasks-per-node=1")], "torchrun --help"),
    "the batch script's node": ([(RUN, f"srun {STATIC}\n")], "replaces $SLURM_NODEID"),
    "each node itself": (
        [(RUN, f"export head\nsrun bash -c '{STATIC}'\n".replace("$head", "$(hostname)"))],
        "one place for both nodes",
    ),
    "an address of today": ([("$head:29500", "10.77.0.11:29500")], "another one in each job"),
}


@pytest.mark.usefixtures("as_in_lab")
@pytest.mark.parametrize(("changes", "hint"), WRONG_BATCHES.values(), ids=WRONG_BATCHES)
def test_wrong_batch_scripts_are_refused(monkeypatch, changes, hint):
    if "waits for" in hint:
        monkeypatch.setattr(batch_script, "SECONDS", 3.0)
    said = refuse("13.1", batch(*changes))
    assert any(one in said for one in hint.split("|")), said


STATIC_BATCH = r"""#!/usr/bin/env bash
# Two nodes, by their numbers.
#SBATCH -J ddp -N 2 -n 2   # two options in one line
#SBATCH --cpus-per-task 2
#SBATCH --mem-per-cpu=750M
#SBATCH -t 10
#SBATCH -o ./ddp-%j.out
#SBATCH --exclusive

set -euo pipefail
module load python
export MASTER=$(scontrol show node "$(scontrol show hostnames | head -n1)" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
export PORT=$((20000 + SLURM_JOB_ID % 10000))
exec srun --label --kill-on-bad-exit=1 bash -c 'exec python -m torch.distributed.run --nnodes=$SLURM_NNODES \
    --nproc_per_node 1 --node_rank=$SLURM_PROCID --master_addr=$MASTER --master_port=$PORT scripts/train_ddp.py \
    --checkpoint=ddp.pt --images=640 --data=shapes10 --epochs=2'
"""
RIGHT_BATCHES = {
    "as in the lab": BATCH,
    "static, in single quotes": STATIC_BATCH,
}


@pytest.mark.usefixtures("as_in_lab")
@pytest.mark.parametrize("text", RIGHT_BATCHES.values(), ids=RIGHT_BATCHES)
def test_right_batch_scripts_are_accepted(capsys, text):
    check.exercise("13.1", lambda: text)
    assert capsys.readouterr().out == f"✔ 13.1 The batch script: {batch_script.PROVED}\n"
