"""The scripts of lab 5: exact on one process, equal on two, marked line by line, resumed where they were cut off."""

import ast
import difflib
import json
import os
import shutil
import socket
import subprocess

import pytest
from harness.drawn import make_folder

from course.workspace import BEGIN, END, make_script_stub
from lab_utils import data, models
from lab_utils.training import Checkpoints, evaluate

# 80 images, 5 steps of 16 an epoch.
PER_CLASS = {"train": 8, "valid": 3, "test": 1}
EPOCHS, STEPS = 3, 15
# Its own statistics would make BatchNorm depend on how a batch is divided.
EXACT = ("--dtype", "float64", "--frozen-bn")
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

    def run(name, *arguments, batch_size, world_size=1, kill_at=None, epochs=EPOCHS, disks=None):
        """Runs a script in as many processes as asked for, each in its own folder, and returns what each reported."""
        folder = tmp_path_factory.mktemp("job")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [*warm_python, str(killing), str(kill_at)] if kill_at else [*warm_python]
        command += [str(scripts / name), "--data", "cinic10", "--batch-size", str(batch_size)]
        command += ["--epochs", str(epochs), "--evaluate", "--timeline", *map(str, arguments)]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        shared = {**os.environ, **meeting, "WORLD_SIZE": str(world_size), "LAB_JOB_FOLDER": str(folder)}
        shared |= {"LAB_DATA": str(images.parent), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        processes = []
        for rank in range(world_size):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if "ddp" in name else shared
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            disk = (disks or folder) / f"disk{rank}"
            disk.mkdir(exist_ok=True)
            processes.append(subprocess.Popen(command, env=environment, cwd=disk, **pipes))
        printed = [process.communicate(timeout=120)[0] for process in processes]
        if kill_at:
            assert processes[0].returncode == -9, printed
            assert all(process.returncode != 0 for process in processes)  # the others may see the dead one first
            return printed
        assert [process.returncode for process in processes] == [0] * world_size, "\n".join(printed)
        return [json.loads((folder / "results" / f"rank{rank}.json").read_text()) for rank in range(world_size)]

    return run


@pytest.fixture(scope="module")
def exact(run, tmp_path_factory):
    """One process on global batches of 16, in float64."""
    folder = tmp_path_factory.mktemp("single")
    return run("train_single.py", *EXACT, "--checkpoints", folder, "--keep-gradients", batch_size=16)[0], folder


@pytest.fixture(scope="module")
def golden(run):
    """One process as a learner runs it: float32, BatchNorm with each batch's statistics."""
    return run("train_single.py", batch_size=16)[0]


def without_times(report):
    return {key: value for key, value in report.items() if key not in ("seconds", "timeline")}


def assert_same_curve(found, expected, close=1e-10):
    assert len(found["losses"]) == len(expected["losses"])
    assert found["losses"] == pytest.approx(expected["losses"], abs=close)
    for key in ("images", "accuracy", "seen"):
        assert found[key] == expected[key], key
    assert found["valid"] == pytest.approx(expected["valid"], abs=close)


def find_difference(one, other):
    """The largest difference between two checkpoints: weights, momentum and the gradients of the last step."""
    states = [Checkpoints(folder).load() for folder in (one, other)]
    assert states[0][0] == states[1][0]
    lists = []
    for _, state in states:
        momenta = [values["momentum_buffer"] for values in state["optimizer"]["state"].values()]
        lists.append([*state["model"].values(), *momenta, *state["gradients"]])
    return max(float((one - other).abs().max()) for one, other in zip(*lists, strict=True))


def test_one_process_gives_the_same_bits_each_time(run, golden):
    assert len(golden["losses"]) == STEPS
    assert without_times(run("train_single.py", batch_size=16)[0]) == without_times(golden)
    assert golden["seen"] == [[0, 80]] * EPOCHS
    assert golden["images"] == 80 * EPOCHS
    assert golden["valid"]["images"] == 30
    assert sum(golden["losses"][-3:]) < sum(golden["losses"][:3])


def test_each_step_has_its_four_phases_on_the_timeline(golden):
    phases = [(row["step"], row["phase"]) for row in golden["timeline"]]
    assert phases == [(step, phase) for step in range(STEPS) for phase in ("data", "forward", "backward", "step")]
    assert len(golden["seconds"]) == STEPS and min(golden["seconds"]) > 0
    for step, seconds in enumerate(golden["seconds"]):
        assert sum(row["end"] - row["start"] for row in golden["timeline"] if row["step"] == step) <= seconds


def test_ddp_with_one_process_is_the_single_process_script_bit_for_bit(run, golden):
    assert without_times(run("train_ddp.py", batch_size=16)[0]) == without_times(golden)


def test_two_processes_equal_one_on_the_same_global_batches(run, exact, tmp_path):
    alone, folder = exact
    options = (*EXACT, "--checkpoints", tmp_path, "--keep-gradients")
    ranks = run("train_ddp.py", *options, batch_size=8, world_size=2)
    assert without_times(ranks[0]) == without_times(ranks[1])
    assert_same_curve(ranks[0], alone)
    assert find_difference(tmp_path, folder) <= 1e-10


def test_two_processes_that_accumulate_equal_one_that_does_not(run, exact, tmp_path):
    alone, folder = exact
    options = (*EXACT, "--accumulate", 2, "--checkpoints", tmp_path, "--keep-gradients")
    ranks = run("train_ddp.py", *options, batch_size=4, world_size=2)
    assert_same_curve(ranks[0], alone)
    assert find_difference(tmp_path, folder) <= 1e-10


@pytest.fixture(scope="module")
def killed(run, tmp_path_factory):
    """What a run of two processes left that was killed in step 9; step 8 is saved, 48 images into the second epoch."""
    disks = tmp_path_factory.mktemp("killed")
    options = (*EXACT, "--every", 4, "--checkpoints", "saved")
    run("train_ddp.py", *options, batch_size=8, world_size=2, kill_at=9, disks=disks)
    return disks


@pytest.mark.drill
@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 8), (1, 16)])
def test_killed_in_mid_epoch_it_goes_on_at_the_next_image(run, exact, killed, tmp_path, world_size, batch_size):
    alone, _ = exact
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    step, state = Checkpoints(tmp_path / "disk0" / "saved").load()
    assert (step, state["epoch"], state["position"]) == (8, 1, 48)
    assert state["history"][:, 2].sum() == 8 * 16
    options = (*EXACT, "--every", 4, "--checkpoints", "saved")
    ranks = run("train_ddp.py", *options, batch_size=batch_size, world_size=world_size, disks=tmp_path)
    for report in ranks:
        assert len(report["seconds"]) == STEPS - 8
        assert_same_curve(report, alone, close=1e-6)
        assert report["seen"] == [[0, 80]] * EPOCHS
    # Rank 1, which has a disk of its own, neither had a checkpoint nor wrote one.
    assert list((tmp_path / "disk1").iterdir()) == []
    # A run that had come to its end has nothing left to do, and says the same.
    (again,) = run("train_ddp.py", *options, batch_size=16, disks=tmp_path)
    assert (again["losses"], again["seconds"]) == (ranks[0]["losses"], [])


@pytest.mark.drill
def test_with_batch_statistics_a_resumed_run_has_the_same_bits_and_rank_0_s_statistics(run, images, tmp_path):
    whole = run("train_ddp.py", batch_size=8, world_size=2)
    options = ("--every", 4, "--checkpoints", tmp_path)
    run("train_ddp.py", *options, batch_size=8, world_size=2, kill_at=7)
    resumed = run("train_ddp.py", *options, batch_size=8, world_size=2)
    assert [without_times(report) for report in resumed] == [without_times(report) for report in whole]
    # What all ranks measured together is what one process measures with what was saved.
    model = models.build("tiny")
    model.load_state_dict(Checkpoints(tmp_path).load()[1]["model"])
    valid = data.load("cinic10", images.parent).batches("valid", 8)
    assert evaluate(model, valid, progress=False).loss == pytest.approx(resumed[0]["valid"]["loss"], abs=1e-5)


def test_the_single_script_resumes_too_and_stops_where_told(run, golden, tmp_path):
    options = ("--checkpoints", tmp_path)
    first = run("train_single.py", *options, "--max-steps", 7, batch_size=16)[0]
    assert first["losses"] == golden["losses"][:7]
    assert without_times(run("train_single.py", *options, batch_size=16)[0]) == without_times(golden)


def read(path):
    return path.read_text().splitlines()


def is_code(line):
    return bool(line.strip()) and not line.strip().startswith("#")


def test_each_line_of_code_that_ddp_needs_is_marked_and_no_other(scripts):
    single, ddp = read(scripts / "train_single.py"), read(scripts / "train_ddp.py")
    assert not [line for line in single if "# NEW" in line]
    start = next(number for number, line in enumerate(ddp) if line.startswith("import"))
    marked = {number for number, line in enumerate(ddp) if line.endswith("# NEW")}
    changed = set()
    for kind, old, old_end, new, new_end in difflib.SequenceMatcher(None, single, ddp, autojunk=False).get_opcodes():
        if kind == "equal" or new_end <= start:
            continue
        lines = {number for number in range(new, new_end) if is_code(ddp[number])}
        changed |= lines
        # What is gone has something in its place.
        assert len(lines) >= len([line for line in single[old:old_end] if is_code(line)]) or any(
            line.strip() == END for line in ddp[new - 3 : new_end + 3]
        ), single[old:old_end]
    assert changed == marked, [ddp[number] for number in changed ^ marked]
    # Without the marked lines nothing is there that the single script does not have.
    kept = [line for number, line in enumerate(ddp) if is_code(line) and number not in marked and number >= start]
    assert not [line for line in kept if line.strip() not in {other.strip() for other in single}]


def test_the_learner_s_copy_has_five_gaps_and_is_still_a_script(scripts):
    source = (scripts / "train_ddp.py").read_text()
    assert source.count(BEGIN) == source.count(END) == 5
    stub = make_script_stub(source)
    ast.parse(stub)
    assert stub.count("raise NotImplementedError") == 5
    for taught in ("init_process_group(", "DDP(model)", "all_reduce(", "checkpoints.save(", '"world_size": world_size'):
        assert taught in source and taught not in stub, taught
    single = (scripts / "train_single.py").read_text()
    assert make_script_stub(single) == single


@pytest.mark.parametrize("name", ["train_single.py", "train_ddp.py"])
def test_the_scripts_are_short_and_explained(scripts, name):
    lines = [line for line in read(scripts / name) if line.strip()]
    comments = [line for line in lines if "#" in line and line.strip() not in (BEGIN, END)]
    assert len(lines) <= 195
    assert 0.12 <= len(comments) / len(lines) <= 0.4


def test_no_image_is_left_out_but_what_does_not_fill_a_batch(run):
    (report,) = run("train_single.py", batch_size=24, epochs=2)
    assert report["seen"] == [[8, 72]] * 2
    assert report["images"] == 144
