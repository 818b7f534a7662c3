"""The scripts of lab 5: plain, equal on two processes and on one, resumed after a crash, watched from outside."""

import ast
import difflib
import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from harness.drawn import make_folder
from torch.nn import functional as F
from torch.utils.data import DataLoader

from course.workspace import BEGIN, END, make_script_stub
from lab_utils import data, models

# 80 images, 5 steps of 16 an epoch.
PER_CLASS = {"train": 8, "valid": 3, "test": 1}
EPOCHS, STEPS = 3, 15
# SIGKILL, in the middle of a step, to the process that runs the script.
KILLING = """
import os, runpy, signal, sys
import torch
steps, last, plain = 0, int(sys.argv[1]), torch.optim.SGD.step
def step(self, closure=None):
    global steps
    steps += 1
    if steps == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, closure)
torch.optim.SGD.step = step
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def scripts(root):
    return root / "notebooks" / "scripts"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data") / "cinic10", per_class=PER_CLASS)


@pytest.fixture(scope="module")
def run(scripts, images, tmp_path_factory, warm_python):
    killing = tmp_path_factory.mktemp("killing") / "killing.py"
    killing.write_text(KILLING)

    def run(name, *arguments, batch_size, world_size=1, flags=(), kill_at=None, epochs=EPOCHS, disks=None):
        """Runs a script, watched, in as many processes as asked for, each in its own folder.

        Returns what each reported and printed.
        """
        folder = tmp_path_factory.mktemp("job")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            *warm_python,
            *([killing, kill_at, scripts / name] if kill_at else [scripts / "observed.py", *flags]),
        ]
        command += [] if kill_at else [scripts / name]
        command += ["--data", "cinic10", "--batch-size", batch_size, "--epochs", epochs, *arguments]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        shared = {**os.environ, **meeting, "WORLD_SIZE": str(world_size), "LAB_JOB_FOLDER": str(folder)}
        shared |= {"LAB_DATA": str(images.parent), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        processes = []
        for rank in range(world_size):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            disk = (disks or folder) / f"disk{rank}"
            disk.mkdir(exist_ok=True)
            processes.append(subprocess.Popen([*map(str, command)], env=environment, cwd=disk, **pipes))
        printed = [process.communicate(timeout=120)[0] for process in processes]
        if kill_at:
            assert processes[0].returncode == -9, printed
            assert all(process.returncode != 0 for process in processes)  # the others may see the dead one first
            return printed
        assert [process.returncode for process in processes] == [0] * world_size, "\n".join(printed)
        results = [json.loads((folder / "results" / f"rank{rank}.json").read_text()) for rank in range(world_size)]
        return [result | {"printed": text} for result, text in zip(results, printed, strict=True)]

    return run


@pytest.fixture(scope="module")
def alone(run):
    """One process on global batches of 16, in float64."""
    return run("train_ddp.py", flags=["--exact", "--timeline"], batch_size=16)[0]


def flatten(steps):
    return [image for step in steps for image in step]


def assert_same_end(found, expected):
    for key in ("weights", "gradients"):
        assert found[key] == pytest.approx(expected[key], abs=1e-10), key
    assert read_epochs(found) == read_epochs(expected)[-len(read_epochs(found)) :]


def read_epochs(report):
    """What was printed after each epoch: its number, loss, accuracy and images."""
    return re.findall(r"epoch (\d+): loss (\S+), accuracy (\S+) on (\d+) images", report["printed"])


def test_plain_torchrun_runs_the_script_without_anything_of_ours_around_it(scripts, images, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "LAB_DATA": str(images.parent), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for epochs in (1, 2):  # the second time from the checkpoint
        arguments = ["--batch-size", "8", "--epochs", str(epochs), "--checkpoint", "run.pt"]
        done = subprocess.run(
            [*command, str(scripts / "train_ddp.py"), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert [epoch for epoch, *_ in re.findall(r"epoch (\d+): (.*) on 30 images", done.stdout)] == [str(epochs)], (
            done
        )
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_one_process_is_watched_step_by_step(alone):
    assert [len(step) for step in alone["images"]] == [16] * STEPS
    epochs = [flatten(alone["images"][start : start + 5]) for start in range(0, STEPS, 5)]
    assert all(sorted(epoch) == list(range(80)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS, "another order in each epoch"
    phases = [(row["step"], row["phase"]) for row in alone["timeline"]]
    assert phases == [(step, phase) for step in range(STEPS) for phase in ("data", "forward", "backward", "step")]
    for step, seconds in enumerate(alone["seconds"]):
        assert sum(row["end"] - row["start"] for row in alone["timeline"] if row["step"] == step) <= seconds
    assert alone["span"][0] <= alone["timeline"][0]["start"] + 1e-3
    assert alone["span"][1] >= alone["timeline"][-1]["end"] - 1e-3
    assert sum(alone["losses"][-3:]) < sum(alone["losses"][:3])


def test_two_processes_equal_one_on_the_same_global_batches(run, alone):
    ranks = run("train_ddp.py", flags=["--exact"], batch_size=8, world_size=2)
    assert ranks[0]["sha256"] == ranks[1]["sha256"]
    for step, together in enumerate(zip(ranks[0]["images"], ranks[1]["images"], strict=True)):
        assert sorted(flatten(together)) == sorted(alone["images"][step])
    losses = [sum(step) / 2 for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert losses == pytest.approx(alone["losses"], abs=1e-10)
    assert_same_end(ranks[0], alone)
    assert "epoch" not in ranks[1]["printed"]


@pytest.fixture(scope="module")
def killed(run, tmp_path_factory):
    """What a run of two processes left that was killed in step 9; the first epoch, of 5 steps, is saved."""
    disks = tmp_path_factory.mktemp("killed")
    # The killed run is not watched, and computes as usual: it gets the first epoch of one that does not.
    options = ("--checkpoint", "run.pt")
    run("train_ddp.py", *options, flags=["--exact"], batch_size=8, world_size=2, epochs=1, disks=disks)
    saved = (disks / "disk0" / "run.pt").read_bytes()
    run("train_ddp.py", batch_size=8, world_size=2, kill_at=9, disks=disks)
    assert (disks / "disk0" / "run.pt").read_bytes() == saved
    return disks


@pytest.mark.drill
@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 8), (1, 16)])
def test_killed_in_mid_epoch_it_goes_on_at_the_epoch_s_start(run, alone, killed, tmp_path, world_size, batch_size):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    options = {"flags": ["--exact"], "batch_size": batch_size, "world_size": world_size, "disks": tmp_path}
    ranks = run("train_ddp.py", "--checkpoint", "run.pt", **options)
    for epoch in (1, 2):
        steps = slice(5 * (epoch - 1), 5 * epoch)
        assert sorted(flatten(flatten(rank["images"][steps] for rank in ranks))) == list(range(80))
    assert_same_end(ranks[0], alone)
    # Rank 1, which has a disk of its own, neither had a checkpoint nor wrote one.
    assert list((tmp_path / "disk1").iterdir()) == []
    # A run that had come to its end has nothing left to do, and says nothing.
    (again,) = run("train_ddp.py", "--checkpoint", "run.pt", **options | {"batch_size": 16, "world_size": 1})
    assert (again["images"], read_epochs(again)) == ([], [])


@pytest.mark.drill
def test_with_batch_statistics_a_resumed_run_has_the_same_bits_and_rank_0_s_statistics(run, images, tmp_path):
    whole = run("train_ddp.py", batch_size=8, world_size=2)
    run("train_ddp.py", "--checkpoint", tmp_path / "run.pt", batch_size=8, world_size=2, kill_at=7)
    resumed = run("train_ddp.py", "--checkpoint", tmp_path / "run.pt", batch_size=8, world_size=2)
    assert [rank["sha256"] for rank in resumed] == [rank["sha256"] for rank in whole]
    assert read_epochs(resumed[0]) == read_epochs(whole[0])[1:]
    # What all ranks measured together is what one process measures with what was saved.
    state = torch.load(tmp_path / "run.pt")
    model = models.build("tiny")
    model.load_state_dict(state["model"])
    pictures, labels = next(iter(DataLoader(data.load("cinic10", images.parent).valid, 30)))
    with torch.no_grad():
        logits = model.eval()(pictures)
    accuracy = float((logits.argmax(1) == labels).float().mean())
    expected = (float(F.cross_entropy(logits, labels)), accuracy, 30)
    assert [*map(float, read_epochs(resumed[0])[-1][1:])] == pytest.approx(expected, abs=1e-4)
    assert not list(tmp_path.glob("*.new")) and state["epoch"] == EPOCHS


def test_the_single_script_trains_and_goes_on(run, tmp_path):
    options = {"batch_size": 16, "disks": tmp_path}
    first = run("train_single.py", "--checkpoint", "run.pt", epochs=2, **options)[0]
    rest = run("train_single.py", "--checkpoint", "run.pt", **options)[0]
    assert [epoch for epoch, *_ in read_epochs(first) + read_epochs(rest)] == ["1", "2", "3"]
    assert sorted(flatten(rest["images"])) == list(range(80))
    assert run("train_single.py", **options)[0]["sha256"] == run("train_single.py", **options)[0]["sha256"]


def test_only_so_many_images_of_each_split_are_taken(run):
    (report,) = run("train_ddp.py", "--images", 20, batch_size=8, epochs=2)
    assert [len(step) for step in report["images"]] == [8] * 4, "what does not fill a batch is left out"
    assert max(flatten(report["images"])) < 20 and {images for *_, images in read_epochs(report)} == {"20"}


def read(path):
    return path.read_text().splitlines()


def test_the_scripts_are_short_and_their_difference_fits_on_a_screen(scripts):
    single, ddp = read(scripts / "train_single.py"), read(scripts / "train_ddp.py")
    assert len(single) <= 75
    assert len([line for line in ddp if line.strip() not in (BEGIN, END)]) <= 100
    new = [line[2:].strip() for line in difflib.ndiff(single, ddp) if line.startswith("+ ")]
    assert len([line for line in new if line and line[0] != "#"]) <= 40
    for script in ("train_single.py", "train_ddp.py"):
        source = (scripts / script).read_text()
        assert "nodelaunch" not in source and "course" not in source


def test_the_learner_s_copy_has_five_gaps_and_is_still_a_script(scripts):
    source = (scripts / "train_ddp.py").read_text()
    assert source.count(BEGIN) == source.count(END) == 5
    stub = make_script_stub(source)
    ast.parse(stub)
    assert stub.count("raise NotImplementedError") == 5
    for taught in ("init_process_group(", "DDP(model", "all_reduce(", "torch.save(", "DistributedSampler("):
        assert taught in source and taught not in stub, taught
    single = (scripts / "train_single.py").read_text()
    assert make_script_stub(single) == single
