"""Checkpoints: drills 21 to 23 and 45. A save that is killed, a full disk, a torn file and a hostile one."""

import hashlib
import os
import pickle
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lab_common import LabError
from lab_utils import models
from lab_utils.training import Checkpoints

# One process imports torch; each save that is to be killed runs in a child forked from it, which costs milliseconds.
KILLING = """
import os, random, signal, sys, time, warnings
import torch
from lab_utils.training import Checkpoints

warnings.simplefilter("error")  # a killed save leaves nothing damaged under a final name, not even what load would skip

def make_state(step):
    return {"model": {f"weight{n}": torch.full((250_000,), float(step + n)) for n in range(4)}, "step": step}

checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(0, make_state(0))
start = time.perf_counter()
checkpoints.save(0, make_state(0))
seconds = time.perf_counter() - start
random.seed(0)
middle = last = 0
for number in range(50):
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"!")
        step = last
        while True:
            step += 1
            checkpoints.save(step, make_state(step))
    os.read(ready, 1)
    time.sleep(random.uniform(0, 2.5 * seconds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready), os.close(tell)
    middle += any(name.endswith(".tmp") for name in os.listdir(sys.argv[1]))
    step, state = checkpoints.load()
    assert step == state["step"] >= last, (step, last)
    for name, weight in state["model"].items():
        assert torch.equal(weight, make_state(step)["model"][name]), name
    # On a busy machine one save says little of the next: wait longer after a kill that came before the first was done.
    seconds *= 1.3 if step == last else 1 / 1.3
    last = step
checkpoints.save(last + 1, make_state(last + 1))
print(middle, last, sorted(os.listdir(sys.argv[1])))
"""


def make_state(step=1, size=1000):
    return {"weight": torch.full((size,), float(step)), "step": step, "note": "as it was"}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def steps(folder):
    return sorted(int(name.split("-")[1]) for name in names(folder))


def test_a_state_comes_back_as_it_was(tmp_path):
    torch.manual_seed(0)
    model = models.build("tiny")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    state["other"] = {"bytes": b"\0\xff", "set": {1}, "type": torch.float16, "lists": [(1, None)]}
    path = Checkpoints(tmp_path / "new" / "run").save(7, state)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.name == f"step-000000007-{digest[:16]}.pt"
    step, loaded = Checkpoints(tmp_path / "new" / "run").load()
    assert step == 7
    assert all(torch.equal(loaded["model"][name], value) for name, value in model.state_dict().items())
    assert torch.equal(loaded["rng"], state["rng"]) and loaded["other"] == state["other"]
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    other.load_state_dict(loaded["optimizer"])
    assert other.param_groups[0]["lr"] == 0.1


def test_the_last_few_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.load() is None
    for step in range(5):
        checkpoints.save(step, make_state(step))
        assert steps(tmp_path) == [number for number in (step - 1, step) if number >= 0]
    assert checkpoints.load()[0] == 4
    Checkpoints(tmp_path, keep=1).save(5, make_state(5))
    assert steps(tmp_path) == [5]


def test_a_step_saved_again_replaces_its_first_state(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1))
    checkpoints.save(2, make_state(2))
    checkpoints.save(2, make_state(3))
    assert steps(tmp_path) == [1, 2]
    assert checkpoints.load()[1]["step"] == 3


@pytest.mark.drill
@pytest.mark.parametrize("before", [False, True])
def test_two_that_save_different_states_of_one_step_leave_one_of_them(tmp_path, monkeypatch, before):
    """By mistake each rank saves, and the second while the first has named its file and not yet removed the old."""
    ours, theirs = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path, keep=1)
    if before:
        theirs.save(1, make_state(2))  # what they save again, under the name that is old to us
    monkeypatch.setattr("lab_common.files.sync_folder", lambda folder: save_theirs())

    def save_theirs():
        monkeypatch.undo()
        theirs.save(1, make_state(2))

    ours.save(1, make_state(1))
    assert ours.load()[1]["step"] == 2


@pytest.mark.drill
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_back_or_forth_changes_nothing(tmp_path, hours):
    """Drill 45: what was saved before the clock was set back by an hour seems to come from the future."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1000, 1100, 1200, 1300):
        path = checkpoints.save(step, make_state(step))
        if step <= 1100:
            os.utime(path, (time.time() + 3600 * hours,) * 2)
        assert checkpoints.load()[0] == step
    assert steps(tmp_path) == [1200, 1300]


def test_a_run_that_starts_again_in_the_same_folder_loses_nothing_and_is_warned(tmp_path):
    old = Checkpoints(tmp_path)
    for step in (900, 1000):
        old.save(step, make_state(step))
    for step in (1, 2, 3):
        with pytest.warns(UserWarning, match="load\\(\\) gives step 1000 of an earlier run"):
            Checkpoints(tmp_path).save(step, make_state(step))
    assert steps(tmp_path) == [2, 3, 900, 1000]
    assert old.load()[0] == 1000
    old.save(1001, make_state(1001))
    assert steps(tmp_path) == [1000, 1001]


@pytest.mark.drill
def test_a_damaged_checkpoint_pushes_out_no_good_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    paths = [checkpoints.save(step, make_state(step)) for step in (1, 2)]
    paths[1].write_bytes(b"torn")
    with pytest.warns(UserWarning, match="damaged checkpoints were skipped"):
        assert checkpoints.load()[0] == 1
    newest = checkpoints.save(3, make_state(3))
    assert steps(tmp_path) == [1, 3]
    newest.write_bytes(b"torn, too")
    with pytest.warns(UserWarning, match="damaged checkpoints were skipped"):
        assert checkpoints.load()[0] == 1


@pytest.mark.parametrize("step", [-1, "7"])
def test_a_step_is_a_number_from_0(tmp_path, step):
    with pytest.raises(LabError, match="not a whole number from 0"):
        Checkpoints(tmp_path).save(step, make_state())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.drill
def test_a_save_killed_at_50_random_points_always_leaves_one_that_loads(tmp_path):
    command = [sys.executable, "-c", KILLING, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    killed_midway, last, left = done.stdout.split(maxsplit=2)
    assert int(killed_midway) >= 5, "too few saves were hit: the drill drills nothing"
    assert int(last) > 0
    assert ".tmp" not in left, "the next save removes what the killed ones left"


def give_name(content, folder, step=2):
    """Stores any bytes as a checkpoint whose name has the right digest."""
    path = folder / f"step-{step:09d}-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    path.write_bytes(content)
    return path


@pytest.mark.drill
@pytest.mark.parametrize("damage", ["cut to half", "emptied", "one bit flipped"])
def test_a_damaged_file_is_named_and_the_one_before_is_loaded(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1))
    path = checkpoints.save(2, make_state(2))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if damage == "one bit flipped":
        content[middle] ^= 1
    else:
        content = content[:middle] if damage == "cut to half" else b""
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=f"damaged checkpoints were skipped: {path.name}"):
        step, state = checkpoints.load()
    assert step == state["step"] == 1


@pytest.mark.drill
def test_only_damaged_files_are_an_error_and_not_a_start_from_nothing(tmp_path):
    path = Checkpoints(tmp_path).save(2, make_state(2))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(LabError, match="No checkpoint can be loaded") as caught:
        Checkpoints(tmp_path).load()
    assert path.name in caught.value.cause and path.exists()


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.drill
@pytest.mark.parametrize("form", ["torch", "bare pickle"])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, form):
    marker, folder = tmp_path / "code was run", tmp_path / "run"
    Checkpoints(folder).save(1, make_state(1))
    file = tmp_path / "hostile"
    if form == "torch":
        torch.save({"weight": Hostile(marker)}, file)
    else:
        file.write_bytes(pickle.dumps({"weight": Hostile(marker)}, protocol=2))
    give_name(file.read_bytes(), folder)
    with pytest.raises(LabError, match="nothing in it was run"):
        Checkpoints(folder).load()
    assert not marker.exists()


UNFIT = {
    'state["best"] is of type numpy.float64': np.float64(1),
    'state["best"] is of type torch.nn': torch.nn.Linear(1, 1),
    'state["best"] is of type builtins.function': lambda: 0,
    'state["best"][1] is of type numpy.float64': [1.0, np.float64(1)],
    'a key of state["best"], np.int64(3), is of type numpy.int64': {np.int64(3): 1},
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_cannot_be_saved_is_named_with_what_to_save_instead(tmp_path, what):
    with pytest.raises(LabError) as caught:
        Checkpoints(tmp_path).save(1, make_state(1) | {"best": UNFIT[what]})
    error = caught.value
    assert what in error.what and len(error.what) <= 120 and "float(x)" in error.fix, str(error)
    assert names(tmp_path) == []


def test_a_file_that_torch_refuses_is_explained_without_its_advice(tmp_path):
    file = tmp_path / "other.pt"
    torch.save({"x": np.float64(1)}, file)
    give_name(file.read_bytes(), tmp_path)
    with pytest.raises(LabError, match=r"Unsupported global: GLOBAL numpy") as caught:
        Checkpoints(tmp_path).load()
    assert not re.search("weights_only|two options|\\x1b|allowlist|safe_globals", str(caught.value))


@pytest.mark.drill
def test_a_full_disk_is_told_in_bytes_and_leaves_the_earlier_ones_intact(small_disk):
    checkpoints, state = Checkpoints(small_disk), make_state(3, size=1_000_000)
    for step in (1, 2):
        checkpoints.save(step, make_state(step))
    before = {path: path.read_bytes() for path in small_disk.glob("step-*")}
    with pytest.raises(LabError, match="The checkpoint needs") as caught:
        checkpoints.save(3, state)
    assert {path: path.read_bytes() for path in small_disk.iterdir()} == before
    needed, free = (int(caught.value.what.split()[word].replace(",", "")) for word in (3, 6))
    assert needed > state["weight"].nbytes and 1_900_000 < free < 2 * 2**20
    assert "No space left" in caught.value.cause and checkpoints.load()[0] == 2
    assert checkpoints.save(3, make_state(3)).exists()


@pytest.mark.drill
def test_a_disk_that_became_read_only_leaves_the_earlier_one_intact(small_disk):
    checkpoints = Checkpoints(small_disk)
    path = checkpoints.save(1, make_state(1))
    before = path.read_bytes()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    try:
        with pytest.raises(LabError, match="was not saved") as caught:
            checkpoints.save(2, make_state(2))
        assert "Read-only file system" in caught.value.cause and caught.value.fix
        assert names(small_disk) == [path.name] and path.read_bytes() == before
        assert checkpoints.load()[0] == 1
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)


def test_a_part_of_a_sharded_tensor_is_refused(tmp_path):
    """torch.save takes it, and the parts of the other ranks would be lost without a word."""
    part = torch.ones(2).as_subclass(type("DTensor", (torch.Tensor,), {}))
    part.device_mesh, part.full_tensor = SimpleNamespace(), None
    with pytest.raises(LabError, match=r'state\["model"\]\[0\] is of type .*DTensor') as caught:
        Checkpoints(tmp_path).save(1, {"model": [part]})
    assert "full_tensor()" in caught.value.fix and names(tmp_path) == []


def test_only_strays_of_ours_that_nobody_writes_are_removed(tmp_path):
    import fcntl

    stray, held = tmp_path / ".step-000000001.abc.tmp", tmp_path / ".step-000000002.def.tmp"
    foreign = [tmp_path / name for name in ("notes.tmp", ".step-one.tmp", "step-000000009.pt", "model.pt")]
    for path in (stray, held, *foreign):
        path.write_bytes(b"something")
    with held.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        saved = Checkpoints(tmp_path).save(3, make_state(3))
        assert set(tmp_path.iterdir()) == {held, saved, *foreign}
    Checkpoints(tmp_path).save(4, make_state(4))
    assert not held.exists()
