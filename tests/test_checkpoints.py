"""Checkpoints: drills 21 to 23. A save that is killed, a full disk, a torn file and a hostile one."""

import argparse
import collections
import datetime
import hashlib
import io
import os
import pickle
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.canary import limit_seconds

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
    strays = [name for name in os.listdir(sys.argv[1]) if name.endswith(".tmp")]
    middle += bool(strays)
    for name in strays:  # one that is still empty would be left alone for a minute
        os.utime(os.path.join(sys.argv[1], name), (0, 0))
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

# A reader beside a writer that removes each checkpoint as soon as there is the next.
READING = """
import os, signal, sys, time, warnings
import torch
from lab_utils.training import Checkpoints

warnings.simplefilter("error")  # what the writer removed is not damaged
checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(0, {"step": 0})
child = os.fork()
if child == 0:
    step = 0
    while True:
        step += 1
        checkpoints.save(step, {"step": step})
try:
    start, last, loads = time.monotonic(), 0, 0
    # Two seconds; more where the disk is so busy that little came in them.
    while (spent := time.monotonic() - start) < 2 or (min(last, loads) < 20 and spent < 100):
        step, state = checkpoints.load()
        assert step == state["step"] >= last, (step, state, last)
        last, loads = step, loads + 1
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print(last, loads)
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
    path = Checkpoints(tmp_path / "new" / "run").save(7, state)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.name == f"step-000000007-{digest[:16]}.pt"
    step, loaded = Checkpoints(tmp_path / "new" / "run").load()
    assert step == 7
    assert all(torch.equal(loaded["model"][name], value) for name, value in model.state_dict().items())
    assert torch.equal(loaded["rng"], state["rng"])
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    other.load_state_dict(loaded["optimizer"])
    assert other.param_groups[0]["lr"] == 0.1


def test_nothing_saved_is_nothing_loaded(tmp_path):
    assert Checkpoints(tmp_path / "never").load() is None


def test_the_last_few_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(5):
        checkpoints.save(step, make_state(step))
        assert steps(tmp_path) == [number for number in (step - 1, step) if number >= 0]
    assert checkpoints.load()[0] == 4
    Checkpoints(tmp_path, keep=1).save(5, make_state(5))
    assert steps(tmp_path) == [5]
    with pytest.raises(LabError, match="At least one"):
        Checkpoints(tmp_path, keep=0)


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
    monkeypatch.setattr("lab_utils.training.checkpoints.sync_folder", lambda folder: save_theirs())

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


def test_a_run_started_anew_in_the_same_folder_loses_nothing_and_is_told(tmp_path):
    old = Checkpoints(tmp_path)
    for step in (900, 1000):
        old.save(step, make_state(step))
    anew = Checkpoints(tmp_path)
    with pytest.warns(UserWarning, match="step 1000 .* load\\(\\) gives the highest step"):
        assert anew.save(1, make_state(1)).exists()
    for step in (2, 3):
        assert anew.save(step, make_state(step)).exists()  # told once
    assert steps(tmp_path) == [2, 3, 900, 1000]
    assert anew.load()[0] == 1000
    with pytest.warns(UserWarning, match="step 1000"):
        Checkpoints(tmp_path).save(950, make_state(950))
    assert steps(tmp_path) == [900, 950, 1000]
    anew.save(1001, make_state(1001))
    assert steps(tmp_path) == [1000, 1001]


@pytest.mark.drill
def test_a_damaged_highest_step_costs_none_of_the_good_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    paths = [checkpoints.save(step, make_state(step)) for step in (100, 300)]
    paths[1].write_bytes(b"torn")
    with pytest.warns(UserWarning, match="damaged checkpoints were skipped"):
        assert checkpoints.load()[0] == 100
    for step in (110, 120, 130):
        checkpoints.save(step, make_state(step))  # no second warning: load() has told of the damaged one
    assert steps(tmp_path) == [120, 130, 300]
    with pytest.warns(UserWarning, match="damaged checkpoints were skipped"):
        assert checkpoints.load()[0] == 130


@pytest.mark.drill
@pytest.mark.parametrize("damage", ["torn", "a link", "a folder"])
def test_what_cannot_be_loaded_pushes_out_no_good_one(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1))
    path = checkpoints.save(2, make_state(2))
    if damage == "torn":
        path.write_bytes(b"torn")
    else:
        path.unlink()
        path.symlink_to("gone") if damage == "a link" else path.mkdir()
    with pytest.warns(UserWarning, match="damaged checkpoints were skipped"):
        assert checkpoints.load()[0] == 1
    newest = checkpoints.save(3, make_state(3))
    assert {1, 3} <= set(steps(tmp_path))
    newest.write_bytes(b"torn, too")
    with pytest.warns(UserWarning, match="damaged checkpoints were skipped"):
        assert checkpoints.load()[0] == 1


def test_a_damaged_checkpoint_that_is_saved_again_counts(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1))
    checkpoints.save(2, make_state(2)).write_bytes(b"torn")
    with pytest.warns(UserWarning, match="damaged checkpoints were skipped"):
        checkpoints.load()
    for step in (2, 3):
        checkpoints.save(step, make_state(step))
    assert steps(tmp_path) == [2, 3]


HUGE = [pytest.param(10**5000, id="too long to print"), pytest.param(-(10**5000), id="too far below"), 10**18]


@pytest.mark.parametrize("step", [-1, 1.5, "7", None, *HUGE])
def test_a_step_is_a_number_from_0(tmp_path, step):
    with pytest.raises(LabError, match="step"):
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


@pytest.mark.drill
def test_a_reader_beside_the_writer_never_sees_a_file_vanish(tmp_path):
    command = [sys.executable, "-c", READING, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    saves, loads = map(int, done.stdout.split())
    assert saves >= 20 and loads >= 20, "too few of either: the drill drills nothing"


@pytest.mark.drill
def test_a_checkpoint_that_is_never_there_ends_with_a_message(tmp_path):
    (tmp_path / f"step-000000001-{'0' * 16}.pt").symlink_to(tmp_path / "gone")
    with pytest.raises(LabError, match="vanish while they are read"):
        Checkpoints(tmp_path).load()


def make_pipe(path):
    os.mkfifo(path)


def make_endless(path):
    path.symlink_to("/dev/zero")


def make_unending(path):
    """A regular file of 0 bytes, by what it says, that takes hours to read, as /proc/kmsg never ends."""
    path.symlink_to("/proc/self/pagemap")


def make_dangling(path):
    path.symlink_to(path.with_name("gone"))


def make_circle(path):
    path.symlink_to(path)


@pytest.mark.drill
@pytest.mark.parametrize("digest", ["0" * 16, hashlib.sha256().hexdigest()[:16]])
@pytest.mark.parametrize("make", [make_pipe, make_endless, make_unending, make_dangling, make_circle, Path.mkdir])
def test_what_is_no_file_does_not_hide_the_good_ones(tmp_path, make, digest):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1))
    strange = tmp_path / f"step-000000002-{digest}.pt"
    make(strange)
    with limit_seconds(20):
        with pytest.warns(UserWarning, match=f"skipped: {strange.name}"):
            assert checkpoints.load()[0] == 1
        assert Checkpoints(tmp_path).save(3, make_state(3)).exists()
        assert checkpoints.load()[0] == 3
        make(tmp_path / ".step-000000004.host.123.tmp")  # nor does it keep the next save waiting
        assert Checkpoints(tmp_path).save(4, make_state(4)).exists()


@pytest.mark.drill
def test_a_planted_link_is_not_written_through(tmp_path, monkeypatch):
    """Whoever may write into the folder could guess the temporary file's name, but not all of it."""
    (tmp_path / "theirs").write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    link = folder / f".step-000000001.{socket.gethostname()}.{os.getpid()}.tmp"
    link.symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(Checkpoints, "_remove_strays", lambda self: None)
    Checkpoints(folder).save(1, make_state(1))
    assert (tmp_path / "theirs").read_text() == "precious"


def give_name(content, folder, step=2):
    """Stores any bytes as a checkpoint whose name has the right digest."""
    path = folder / f"step-{step:09d}-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    path.write_bytes(content)
    return path


def rezip(path, change):
    """The content of a checkpoint with some of its records changed, and compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = change(info.filename, old.read(info))
            new.writestr(info.filename, content, zipfile.ZIP_DEFLATED if len(content) > 10**6 else zipfile.ZIP_STORED)
    return out.getvalue()


def save_bytes(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def add_second_directory(path):
    """A bomb with two lists of its records: torch's reader finds the true one, and zipfile one of a harmless copy."""
    bomb = WRONG["a bomb"](path)
    *numbers, size, start, _ = struct.unpack("<4s4H2IH", bomb[-22:])
    listed = bytearray(bomb[start : start + size])
    at = 0
    while at < size:
        lengths = struct.unpack_from("<3H", listed, at + 28)
        struct.pack_into("<H", listed, at + 10, zipfile.ZIP_STORED)
        struct.pack_into("<2I", listed, at + 20, 1, 1)
        at += 46 + sum(lengths)
    return bomb[:-22] + listed + struct.pack("<4s4H2IH", *numbers, size, start, 0)


def point_aside(path):
    """A bomb whose end in torch's form points at its list, where zipfile takes what stands before the pointer."""
    whole = path.read_bytes()
    end = whole[-98:]
    bomb = WRONG["a bomb"](path)
    *_, size, start, _ = struct.unpack("<4s4H2IH", bomb[-22:])
    true = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 7, 7, size, start)
    body = bomb + true
    # What zipfile takes is a copy of the harmless list, at the end of the file.
    *_, size, start = struct.unpack("<4sQ2H2I4Q", end[:56])
    body += whole[start : start + size]
    harmless = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 7, 7, size, len(body) - size)
    pointer = struct.pack("<4sIQI", b"PK\6\7", 0, len(bomb), 1)
    return body + harmless + pointer + end[-22:]


def add_old_form(path):
    """A pickle of the form before torch 1.6, of which torch reads the beginning, with a whole checkpoint after it."""
    return b"cbuiltins\nbytearray\n\x8a\x05" + struct.pack("<Q", 3 * 10**8)[:5] + b"\x85R." + path.read_bytes()


class Large:
    def __reduce__(self):
        return bytearray, (3 * 10**8,)


WRONG = {
    "a bomb": lambda path: rezip(path, lambda name, old: bytes(3 * 10**8) if name.endswith("/data/0") else old),
    "a bomb with two directories": add_second_directory,
    "a bomb with a pointer aside": point_aside,
    "a bytearray": lambda path: save_bytes({"a": Large()}),
    "an old form before the archive": add_old_form,
    "a comment after the archive": lambda path: path.read_bytes()[:-2] + b"\1\0 ",
    "no zip": lambda path: b"PK\x03\x04" + bytes(1000),
    "no pickle": lambda path: rezip(path, lambda name, old: b"\xff\xfe" if name.endswith(".pkl") else old),
    "no text": lambda path: rezip(path, lambda name, old: old.replace(b"weight", b"w\xff\xfeght")),
    "a tensor larger than its bytes": lambda path: rezip(
        path, lambda name, old: old.replace(b"M\xe8\x03", b"M\xff\xff")
    ),
    "a list": lambda path: save_bytes([1, 2]),
    "text": lambda path: save_bytes("text"),
    "nothing": lambda path: b"",
}


@pytest.mark.drill
@pytest.mark.parametrize("kind", WRONG)
def test_what_holds_no_state_is_skipped_and_the_one_before_is_loaded(tmp_path, kind):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, make_state(1))
    wrong = give_name(WRONG[kind](path), tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.warns(UserWarning, match=f"skipped: {wrong.name}"):
        assert checkpoints.load()[0] == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    path.unlink()
    with pytest.raises(LabError, match="No checkpoint can be loaded") as caught:
        checkpoints.load()
    assert wrong.name in caught.value.cause


def test_a_device_that_is_not_there_is_not_called_damage(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1))
    with pytest.raises(LabError, match="cannot be put on") as caught:
        checkpoints.load(map_location="cuda:77")
    assert caught.value.fix


def test_a_folder_that_is_none_is_not_called_empty(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="cannot be listed"):
        Checkpoints(tmp_path / "file").load()


@pytest.mark.drill
@pytest.mark.parametrize("damage", ["cut to half", "emptied", "one bit flipped", "middle zeroed"])
def test_a_damaged_file_is_named_and_the_one_before_is_loaded(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1))
    path = checkpoints.save(2, make_state(2))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if damage == "cut to half":
        content = content[:middle]
    elif damage == "emptied":
        content = b""
    elif damage == "one bit flipped":
        content[middle] ^= 1
    else:
        content[middle : middle + 512] = bytes(512)
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
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    file.rename(folder / f"step-000000002-{digest}.pt")
    with pytest.raises(LabError, match="nothing in it was run"):
        Checkpoints(folder).load()
    assert not marker.exists()


class Odd:
    def __getstate__(self):
        raise RuntimeError("odd")


@pytest.mark.parametrize("more", [Path("x"), lambda: 1, threading.Lock(), bytearray(1), Odd(), "no dictionary"])
def test_what_loading_would_refuse_is_refused_when_it_is_saved(tmp_path, more):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1))
    with pytest.raises(LabError, match="may not hold"):
        checkpoints.save(2, make_state(2) | {"more": more} if more != "no dictionary" else [1])
    assert len(names(tmp_path)) == 1 and checkpoints.load()[0] == 1


UNFIT = {
    'state["best"] is a numpy.float64': (np.float64(1), 'save float(state["best"])'),
    'state["best"] is a numpy.ndarray': (np.zeros(2), 'save torch.from_numpy(state["best"])'),
    'state["best"] is an argparse.Namespace': (argparse.Namespace(lr=1), 'save vars(state["best"])'),
    'state["best"] is a datetime.date': (datetime.date(2026, 1, 1), 'save state["best"].isoformat()'),
    'state["best"] is a pathlib.PosixPath': (Path("x"), 'save str(state["best"])'),
    'state["best"] is a collections.defaultdict': (collections.defaultdict(int), 'save dict(state["best"])'),
    'state["best"] is a torch.nn': (torch.nn.Linear(1, 1), 'save state["best"].state_dict()'),
    'state["best"] is a function': (lambda: 0, 'leave state["best"] out'),
    "Odd, which": (Odd(), 'save vars(state["best"])'),
    'state["best"] is a type': (Odd, 'save state["best"].__name__'),
    'state["best"] is a bytearray': (bytearray(1), 'save bytes(state["best"])'),
    'state["best"]["a"][1]["b"] is a numpy.int64': ({"a": [1, {"b": np.int64(2)}]}, '["a"][1]["b"])'),
    'a key of state["best"], np.int64(3), is a numpy.int64': ({np.int64(3): 1}, "save int(key)"),
    'state["best"][0] is a numpy.float64': ([np.float64(n) for n in range(6)], "float"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_cannot_be_saved_is_named_with_what_to_save_instead(tmp_path, what):
    value, fix = UNFIT[what]
    with pytest.raises(LabError) as caught:
        Checkpoints(tmp_path).save(1, make_state(1) | {"best": value})
    error = caught.value
    assert what in error.what and "may not hold" in error.what and fix in error.fix, str(error)
    assert len(error.what) <= 120 and not re.search("weights_only|two options|\\x1b|allowlist", str(error))
    assert ("so are" in error.cause and "and 2 more" in error.cause) == what.startswith('state["best"][0]')
    assert names(tmp_path) == []


@pytest.mark.parametrize("value", [np.float64(1), argparse.Namespace(), {1: np.zeros(3)}])
def test_a_file_that_torch_refuses_is_told_without_its_advice(tmp_path, value):
    file = tmp_path / "other.pt"
    torch.save({"x": value}, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    file.rename(tmp_path / f"step-000000002-{digest}.pt")
    with pytest.raises(LabError, match=r"it refers to the code of (numpy|argparse)") as caught:
        Checkpoints(tmp_path).load()
    assert not re.search("weights_only|two options|\\x1b|allowlist|safe_globals", str(caught.value))


def test_a_typed_folder_has_its_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Checkpoints("~/run").save(1, make_state(1))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_a_compiled_module_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(LabError, match="may not hold"):
        Checkpoints(tmp_path).save(1, {"module": torch.jit.script(torch.nn.Linear(2, 2))})
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_what_says_nothing_of_the_state_is_not_blamed_on_it(tmp_path, monkeypatch, error):
    def run_out(*args, **others):
        raise error("no memory")

    monkeypatch.setattr(torch, "save", run_out)
    with pytest.raises(error):
        Checkpoints(tmp_path).save(1, make_state(1))


def check_full_disk(folder, state):
    checkpoints = Checkpoints(folder)
    before = {path: path.read_bytes() for path in folder.glob("step-*")}
    with pytest.raises(LabError, match="The checkpoint needs") as caught:
        checkpoints.save(3, state)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    needed = int(caught.value.what.split()[3].replace(",", ""))
    assert needed > state["weight"].nbytes
    assert checkpoints.load()[0] == 2
    return caught.value


@pytest.mark.drill
def test_a_file_that_may_not_grow_leaves_the_earlier_ones_intact(tmp_path):
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, make_state(step))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        error = check_full_disk(tmp_path, make_state(3, size=1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in error.cause
    assert Checkpoints(tmp_path).save(3, make_state(3)).exists()


@pytest.mark.drill
def test_a_full_disk_is_told_in_bytes_and_leaves_the_earlier_ones_intact(small_disk):
    for step in (1, 2):
        Checkpoints(small_disk).save(step, make_state(step))
    error = check_full_disk(small_disk, make_state(3, size=1_000_000))
    free = int(error.what.split()[6].replace(",", ""))
    assert 1_900_000 < free < 2 * 2**20
    assert "No space left" in error.cause
    assert Checkpoints(small_disk).save(3, make_state(3)).exists()


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


def test_a_part_of_a_sharded_tensor_is_refused(tmp_path, monkeypatch):
    """torch.save takes it, and the parts of the other ranks would be lost without a word."""
    from torch.distributed import tensor

    class Part:
        device_mesh = SimpleNamespace(size=lambda: 2)

    monkeypatch.setattr(tensor, "DTensor", Part)
    with pytest.raises(LabError, match=r"state\['model'\]\[0\] is a DTensor") as caught:
        Checkpoints(tmp_path).save(1, {"model": [Part()]})
    assert "full_state_dict=True" in caught.value.fix and not list(tmp_path.glob("*.pt"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="was not saved") as caught:
        Checkpoints(tmp_path / "file").save(1, make_state())
    assert str(tmp_path / "file") in caught.value.where


def test_only_strays_of_ours_that_nobody_writes_are_removed(tmp_path):
    import fcntl

    stray, held = tmp_path / ".step-000000001.host.123.tmp", tmp_path / ".step-000000002.host.124.tmp"
    foreign = [tmp_path / name for name in ("notes.tmp", ".step-one.tmp", "step-000000009.pt", "model.pt")]
    for path in (stray, held, *foreign):
        path.write_bytes(b"something")
    with held.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        saved = Checkpoints(tmp_path).save(3, make_state(3))
        assert set(tmp_path.iterdir()) == {held, saved, *foreign}
    saved = Checkpoints(tmp_path).save(4, make_state(4))
    assert held not in set(tmp_path.iterdir())


def test_a_stray_that_somebody_may_be_about_to_lock_has_a_minute(tmp_path):
    """Between another's open and its lock its file is empty, and the lock free."""
    stray = tmp_path / ".step-000000001.host.123.tmp"
    stray.touch()
    Checkpoints(tmp_path).save(3, make_state(3))
    assert stray.exists()
    os.utime(stray, (time.time() - 61,) * 2)
    Checkpoints(tmp_path).save(4, make_state(4))
    assert not stray.exists()


@pytest.mark.parametrize(("number", "size"), [(0, 0), (1, 5_000_000), (300, 10)])
def test_what_is_saved_passes_every_check_of_loading(tmp_path, number, size):
    state = {"bytes": b"\0\xff", "text": "builtins\nbytearray\n", "weights": [torch.ones(size) for _ in range(number)]}
    Checkpoints(tmp_path).save(1, state)
    loaded = Checkpoints(tmp_path).load()[1]
    assert all(map(torch.equal, loaded.pop("weights"), state.pop("weights"))) and loaded == state
