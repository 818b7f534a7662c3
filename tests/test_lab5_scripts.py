"""The scripts of lab 5: plain, equal on two processes and on one, resumed after a crash, watched from outside."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from harness.drawn import make_folder
from harness.jobs import hear_listeners
from torch.nn import functional as F
from torch.utils.data import DataLoader

import nodelaunch as launch
from lab_utils import data, models, timing
from nodelaunch.node.probe import find_free_port

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
        port = find_free_port()
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
    """Returns the values printed after each epoch: its number, loss, accuracy and images."""
    return re.findall(r"epoch (\d+): loss (\S+), accuracy (\S+) on (\d+) images", report["printed"])


@pytest.mark.system
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


TIMED = ("alone", "compute", "apart", "ddp")


def make_step(*buckets, backward, busy, **seconds):
    rows = [{"bytes": 4, "ready": ready, "send": send} for ready, send in buckets]
    timings = {what: timing.Timing(what, (one,)).as_record() for what, one in seconds.items()}
    return {"stem": "cifar", "batch": 8, "buckets": rows, "backward": backward, "busy": busy, **timings}


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("buckets", "busy", "added"),
    [
        ([(0.1, 0.2), (0.5, 0.3)], 0.0, 0.0),  # all has gone when backward ends, after 1 s
        ([(0.1, 0.2), (0.9, 0.3)], 0.0, 0.2),
        ([(0.1, 0.7), (0.5, 0.5)], 0.0, 0.3),  # the second bucket waits for the first
        ([(0.1, 0.2), (0.5, 0.3)], 1.0, 0.5),  # the cores are taken all the time
        ([(0.1, 0.2), (0.9, 0.3)], 0.2, 0.2),
    ],
)
def test_the_prediction_of_a_step_bucket_by_bucket(run_cells_of, capsys, buckets, busy, added):
    step = make_step(*buckets, backward=1.0, busy=busy, alone=1.0, compute=2.0, apart=4.0, ddp=2.0)
    timings = {("cifar", 8, what): timing.Timing.from_record(step[what]) for what in TIMED}
    names = {"TIMED": TIMED, "measured": {"steps": [step]}, "timings": timings}
    found = run_cells_of("05_ddp_two_nodes", "scaling-table", **names)
    sends = sum(send for _, send in buckets)
    assert found["predict_step"](step) == pytest.approx(2 + added)
    assert found["predict_step"](step, overlap=False) == pytest.approx(2 + sends)
    off = [100 * (2 + added) / 2 - 100, 100 * (2 + sends) / 4 - 100]
    assert list(found["table"]["off by (%)"]) == pytest.approx(off, abs=0.06)


@pytest.mark.usefixtures("runs", "warm_torchrun")
def test_a_step_is_measured_bucket_by_bucket(scripts):
    arguments = ["--stems", "imagenet", "--batch-sizes", 2, "--repeats", 2]
    job = launch.TorchrunJob(scripts / "measure_step.py", arguments, nodes=launch.local_nodes(2))
    (step,) = job.run(show=False, force=True).results[0]["steps"]
    buckets, net = step["buckets"], models.build("resnet18", num_classes=10)
    assert len(buckets) > 1
    assert sum(bucket["bytes"] for bucket in buckets) == 4 * sum(one.numel() for one in net.parameters())
    ready = [bucket["ready"] for bucket in buckets]
    assert ready[0] > 0 and ready == sorted(ready) and ready[-1] < step["backward"]
    assert all(bucket["send"] > 0 for bucket in buckets) and 0 <= step["busy"] <= 1
    stored = timing.Records("lab5").add("step", step)["result"]
    for what in TIMED:
        found = stored[what]  # a Timing, which is measured again where it is noise
        assert len(found.seconds) == 2 and found.median > 0
    overlapping, apart = step["timelines"].values()
    names = ["backward", *(f"bucket {number + 1}" for number in range(len(buckets)))]
    assert [name for name, *_ in overlapping] == [name for name, *_ in apart] == names
    (_, began, ended), first, *_ = overlapping
    assert began == 0 and 0 < first[1] < ended, "the first bucket is sent while backward runs"
    moments = [moment for _, *pair in apart for moment in pair]
    assert moments == sorted(moments), "one after the other, and all after backward"


LOST = """
import os, signal
import torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "0":
    for process in (os.getppid(), os.getpid()):
        os.kill(process, signal.SIGKILL)
dist.barrier()
"""


@pytest.mark.drill
@pytest.mark.usefixtures("runs")
def test_a_job_ends_when_the_node_is_lost_where_they_meet(scripts, write, survivors):
    """That a job goes on without any other node, lab 5 itself shows, and is compared."""
    first = write("lost.py", LOST)
    how = {"program": ["python"], "files": [first], "limit": 100, "nodes": launch.local_nodes(2)}
    job = launch.TorchrunJob(scripts / "elastic_node.py", [first.name], **how)
    job_id = job.id
    with hear_listeners(f"LAB_JOB_ID={job_id}") as heard:
        result = job.run(show=False, force=True, check=False)
    assert not result.ok and "node0" in result.failure.what and survivors(job_id) == []
    assert heard and all(address.startswith("127.") for address, _ in heard), heard


@pytest.fixture(scope="module")
def killed(run, tmp_path_factory):
    """The files of a run of two processes, killed in step 9; the first epoch, of 5 steps, is saved."""
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
