"""What people report (pytorch, Lightning and other projects' issues): each message through the whole diagnosis."""

import functools
import multiprocessing
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.jobs import Heard, hear
from torch.distributed import distributed_c10d, rpc
from torch.utils.data import DataLoader

from lab_common import LabError
from nodelaunch import TorchrunJob, local_nodes
from nodelaunch.diagnosis import diagnose
from nodelaunch.messages import KNOWN, Known
from nodelaunch.node.calls import calls_torch
from nodelaunch.node.errors import failed_as_consequence
from nodelaunch.node.groups import Groups
from nodelaunch.node.reasons import StopReason
from nodelaunch.node.watch import POLL, _count_bytes, is_idle, is_of_script, waits, waits_for_work
from nodelaunch.state import JobState

pytestmark = pytest.mark.usefixtures("runs")


def make_state(**options):
    """Two nodes, a and b, of one rank each, which have started."""
    state = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"], **options)
    for rank, node in enumerate("ab"):
        who = {"rank": rank, "pid": 57 + rank, "host": node, "local_rank": 0, "node": rank}
        hear(state, node, "worker", **who, processes=1)
    return state


def hear_end(state, message, code=0, *, location="train.py, line 9"):
    """Has rank 1 end with a message: by an exception, with an exit status, or by a signal."""
    if not code:
        trace, _, last = message.rpartition("\n") if message.startswith("Traceback") else ("", "", message)
        facts = {"kind": "exception", "message": last, "traceback": trace, "location": location}
        hear(state, "b", "error", rank=1, **facts)
        return
    for line in message.splitlines():
        state.read("b", f"[rank 1] {line}\n".encode())
    if code > 0:
        hear(state, "b", "error", rank=1, kind="exit", message=f"SystemExit: {code}", traceback="", location="")
    state.read("b", f"E1121 failed (exitcode: {code}) local_rank: 0 (pid: 58) of binary: python\n".encode())


def explain(message, code=0):
    state = make_state()
    hear_end(state, message, code)
    return diagnose(state)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: re.sub(r"\W+", "-", known.seen)[:50])
def test_each_known_message_gets_its_own_answer(known: Known):
    failure = explain(known.seen, known.code)
    found = re.search(known.pattern, known.seen, re.MULTILINE)
    assert found.expand(known.cause) in failure.cause, failure
    assert failure.fix == found.expand(known.fix)
    assert not re.search(r"\\g<|\x1b", str(failure))


# Other words for the same: (the message, how the rank ended, a part of the cause, a part of the fix).
OTHERS = [
    # A full /dev/shm, which is no full disk.
    ("RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)", 0,
     "/dev/shm", "num_workers=0"),
    ("RuntimeError: DataLoader worker (pid 1045) is killed by signal: Bus error. It is possible that dataloader's "
     "workers are out of shared memory.", 0, "/dev/shm", "num_workers=0"),
    ("OSError: [Errno 28] No space left on device: '/dev/shm/pym-1-x'", 0, "/dev/shm", "--shm-size"),
    ('Traceback (most recent call last):\n  File "/v/multiprocessing/synchronize.py", line 57, in __init__\n'
     "    sl = self._semlock = _multiprocessing.SemLock(\nOSError: [Errno 28] No space left on device", 0,
     "/dev/shm", "--shm-size"),
    # A full disk, which is none of the others.
    ("OSError: [Errno 28] No space left on device: '/data/out.pt'", 0, "the disk is full at /data/out.pt", "df -h"),
    # What saves or copies an object, and sends it nowhere.
    ('Traceback (most recent call last):\n  File "/v/torch/serialization.py", line 1003, in save\n    _save(\n'
     "AttributeError: Can't pickle local object 'f.<locals>.Head'", 0, "torch.save cannot write", "state_dict()"),
    ('Traceback (most recent call last):\n  File "/usr/lib/python3.11/copy.py", line 161, in deepcopy\n'
     "TypeError: cannot pickle '_io.TextIOWrapper' object", 0, "copy.deepcopy cannot copy", "load_state_dict"),
    # A compiler, a server, an address.
    ("RuntimeError: Error building extension 'x': /c/main.cpp:1:10: fatal error: Python.h: No such file or directory",
     0, "the header Python.h", "python3-dev"),
    ("urllib.error.URLError: <urlopen error [Errno 111] Connection refused>", 0, "nothing listens", "start it"),
    ("OSError: [Errno 99] Cannot assign requested address", 0, "an address that this node does not have", "alone"),
    ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Aborted. ", 0, "crashed in C code (Aborted)",
     "PYTHONFAULTHANDLER"),
    # Open files, threads, memory.
    ("RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)", 0,
     "open files", "ulimit -n"),
    ('Traceback (most recent call last):\n  File "/v/subprocess.py", line 1885, in _execute_child\n'
     "BlockingIOError: [Errno 11] Resource temporarily unavailable", 0, "no more processes", "num_workers"),
    ('Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    pid = os.fork()\n'
     "BlockingIOError: [Errno 11] Resource temporarily unavailable", 0, "no more processes", "num_workers"),
    ('Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    fcntl.lockf(file, flags)\n'
     "BlockingIOError: [Errno 11] Resource temporarily unavailable", 0, "another rank, holds the lock", "LOCK_NB"),
    ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an array with shape (10, 10)", 0,
     "memory is full", "memory"),
    ("torch.AcceleratorError: CUDA error: out of memory", 0, "the GPU's memory", "--batch-size"),
    ("concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while the "
     "future was running or pending.", 0, "was killed: most often by Linux", "more memory"),
    ("subprocess.CalledProcessError: Command '['convert']' died with <Signals.SIGKILL: 9>.", 0, "killed", "memory"),
    # Labels and tokens that the model does not have.
    ("RuntimeError: Class values must be non-negative.", 0, "below 0", "ignore_index="),
    ("IndexError: Target 10 is out of bounds.", 0, "larger than", "num_classes="),
    # Weights of a wrapper, both ways.
    ('RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "fc.weight".\n'
     '\tUnexpected key(s) in state_dict: "_orig_mod.fc.weight".', 0, '"_orig_mod."', "consume_prefix"),
    # GPUs that are not there.
    ("AssertionError: Torch not compiled with CUDA enabled", 0, "torch finds none", "torch.cuda.is_available()"),
    ("RuntimeError: No CUDA GPUs are available", 0, "torch finds none", "nvidia-smi"),
    # The commonest slips of a launch.
    ("train.py: error: unrecognized arguments: --local-rank=0", 2, "--local_rank", "LOCAL_RANK"),
    ("train.py: error: argument --lr: invalid float value: 'fast'", 2, "argument --lr", "args=[…]"),
    ("KeyError: 'SLURM_PROCID'", 0, "SLURM_PROCID", "torchrun sets RANK"),
    ("EOFError: EOF when reading a line", 0, "keyboard", "pdb"),
    # What a node lacks: a library, a program, a repository, the internet, a file.
    ("requests.exceptions.ConnectionError: HTTPSConnectionPool(host='x'): Max retries exceeded with url: /", 0,
     "internet", "beforehand"),
    ("socket.gaierror: [Errno -3] Temporary failure in name resolution", 0, "no address belongs", "/etc/hosts"),
    ('Traceback (most recent call last):\n  File "/v/site-packages/aiohttp/connector.py", line 1, in _create\n'
     "socket.gaierror: [Errno -2] Name or service not known", 0, "internet", "beforehand"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'data/x.npy'", 0, "a path that is not on this node",
     "root='.'"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/scratch/best.pt'", 0,
     "/scratch/best.pt (or its folder) is not on this node, or not there yet", "dist.barrier() after the save"),
    (f"FileNotFoundError: [Errno 2] No such file or directory: '/n/code/{'0' * 64}/script/data/x.npy'", 0,
     "a path that is not on this node", "root='.'"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/n/work/my.project-0a1b2c/data/x.npy'", 0,
     "a path that is not on this node", "root='.'"),
    ("mkdir: cannot create directory 'exp': File exists", 1, "from an earlier run", "exist_ok=True"),
    # What a script printed or wrote that has nothing to do with its end.
    ("UserWarning: GradScaler is enabled, but CUDA is not available. Disabling.\n  super().__init__(\nloss is nan", 3,
     "the script ended itself with this status", "last lines"),
    ("UserWarning: GradScaler is enabled, but CUDA is not available. Disabling.", -11, "C code", ""),
    ("Traceback (most recent call last):\nModuleNotFoundError: No module named 'apex'\nbelow the threshold", 1,
     "the script ended itself with this status", "last lines"),
    ('Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    int("64x")  # out of memory\n'
     "ValueError: invalid literal for int() with base 10: '64x'", 0, "does not know this message", "train.py, line 9"),
    ("ImportError: cannot import name 'Mapping' from 'collections' (/usr/lib/python3.11/collections/__init__.py)", 0,
     "older versions", "newer version"),
    ("ValueError: checkpoint: best.pt: not found", 0, "does not know this message", "train.py"),
    ("Fatal Python error: none_dealloc: deallocating None\n" + "Thread 0x1 (most recent call first):\n" * 20
     + "Extension modules: numpy._core", -6, "none_dealloc", "last lines"),
    # Signals, with the rank's own last words.
    ("", -10, "Slurm's --signal", "signal.SIGUSR1"),
    ("", -4, "this processor lacks", "ordinary build"),
    ("reading shard 7", -11, "the last that it printed: reading shard 7", "one by one"),
    ("", -24, "ulimit -t", "unlimited"),
]  # fmt: skip


# What people report most often. Each has a row in tests/drills.md.
CASES = {
    "bad_alloc": ("terminate called after throwing an instance of 'std::bad_alloc'", -6, "memory is full", "batch"),
    "SIGBUS": ("", -7, "a mapped file that was cut", "--shm-size"),
    "shared memory": ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared "
                      "memory (shm).", -7, "/dev/shm", "--shm-size"),
    "open files": ("RuntimeError: received 0 items of ancdata", 0, "open files", "file_system"),
    "library": ("OSError: libcudart.so.12: cannot open shared object file: No such file or directory", 0,
                "the library libcudart.so.12", "install the package again"),
    "system library": ("ImportError: libGL.so.1: cannot open shared object file: No such file or directory", 0,
                       "libGL.so.1", "install"),
    "program": ("bash: line 1: nvcc: command not found", 127, "there is no nvcc on this node", "whole path"),
    "git": ("git.exc.InvalidGitRepositoryError: /node/work", 0, "without .git", "before the job"),
    "prefix": ("RuntimeError: Error(s) in loading state_dict for Net:\n\tUnexpected key(s) in state_dict: "
               '"module.fc.weight".', 0, 'begin with "module."', "consume_prefix"),
    "weights_only": ("_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you "
                     "have two options\n\tUnsupported global: GLOBAL numpy._core.multiarray.scalar was not an allowed "
                     "global by default.", 0, "holds numpy._core.multiarray.scalar", "weights_only=False"),
    "memory of a tensor": ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
                           "allocate memory: you tried to allocate 4096 bytes. Error code 12", 0,
                           "a tensor of 4096 bytes", "fewer processes"),
    "memory of a fork": ("OSError: [Errno 12] Cannot allocate memory", 0, "memory is full", "fewer num_workers"),
    "local_rank": ("train.py: error: the following arguments are required: --local_rank", 2, "expects --local_rank",
                   "LOCAL_RANK"),
    "ready twice": ("RuntimeError: Expected to mark a variable ready only once. This error is caused by one of", 0,
                    "got its gradient twice", "use_reentrant=False"),
    "killed worker": ("RuntimeError: DataLoader worker (pid 6042) exited unexpectedly with exit code 1.", 0,
                      "ended without a word", "num_workers=0"),
    "ulimit": ("OSError: [Errno 24] Too many open files: 'a.npy'", 0, "`ulimit -n`", "ulimit -n 65536"),
    "internet": ("OSError: We couldn't connect to 'https://huggingface.co' to load the files", 0, "internet",
                 "beforehand"),
    "pdb": ("bdb.BdbQuit", 0, "asks the keyboard", "python -m pdb"),
    "relative import": ("ImportError: attempted relative import beyond top-level package", 0, "part of a package",
                        "module='package.train'"),
    "pickle": ("_pickle.PicklingError: Can't pickle <function <lambda> at 0x7f>: attribute lookup failed", 0,
               "another process", "top of the file"),
    "nccl": ("RuntimeError: Distributed package doesn't have NCCL built in", 0, "nccl", "'gloo'"),
    "wandb": ("wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])", 0,
              "no key", "WANDB_MODE"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "code", "cause", "fix"), [*OTHERS, *CASES.values()], ids=[*(row[0][:45] for row in OTHERS), *CASES]
)
def test_other_words_of_a_kind_get_its_answer(message, code, cause, fix):
    failure = explain(message, code)
    assert cause in failure.cause and fix in failure.fix, failure


def test_a_full_shared_memory_that_no_message_names_is_no_full_disk():
    state = make_state()
    facts = {"kind": "exception", "message": "OSError: [Errno 28] No space left on device", "traceback": ""}
    hear(state, "b", "error", rank=1, **facts, location="train.py, line 9", disk="/dev/shm/cache/part-1")
    assert "shared memory (/dev/shm) is full" in diagnose(state).cause


def test_a_coloured_last_line_is_quoted_without_its_colours():
    failure = explain("\x1b[1;91mValueError: \x1b[0mbad \x1b[32m'shard 7'\x1b[0m", 1)
    assert failure.what.endswith("SystemExit: 1: ValueError: bad 'shard 7'")


def test_a_long_headline_keeps_the_words_of_the_message():
    failure = explain(
        "torch.multiprocessing.spawn.ProcessExitedException: process 123456 terminated with signal SIGKILL"
    )
    assert failure.what.endswith("first: ProcessExitedException: process 123456 terminated with signal SIGKILL")
    failure = explain(f"ValueError: {'seven ' * 30}")
    assert failure.what.endswith("seven…") and len(failure.what) <= 120


def test_an_unknown_message_is_quoted_and_promised_nothing():
    failure = explain("ValueError: bad luck in batch 7")
    assert failure.what == "Rank 1 on b failed first: ValueError: bad luck in batch 7"
    assert (
        "does not know this message" in failure.cause
        and failure.fix == "begin at train.py, line 9, the script's own line"
    )
    failure = explain("loss is too large: 7.1, giving up", 1)
    assert failure.what.endswith("SystemExit: 1: loss is too large: 7.1, giving up")
    assert "the last line that it printed" in failure.cause


def test_an_error_that_a_script_handled_is_not_its_cause():
    trace = (
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'apex'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\nValueError: bad luck"
    )
    failure = explain(trace)
    assert failure.what.endswith("ValueError: bad luck") and "apex" not in failure.cause


def test_a_worker_of_a_data_loader_is_quoted_by_its_own_error():
    message = (
        "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/n/train.py", line 39, in __getitem__\nValueError: bad item'
    )
    state = make_state()
    hear(state, "b", "error", rank=1, kind="exception", message=message, traceback=message, location="train.py, line 3")
    assert diagnose(state).what == "Rank 1 on b failed first: ValueError: bad item (in a DataLoader worker)"


@pytest.mark.parametrize(
    ("message", "file", "own"),
    [
        ("RuntimeError: the teacher's server: Connection refused", "/n/train.py", True),
        ("TimeoutError: Timed out waiting for the lock", "/v/site-packages/filelock/_api.py", True),
        ("RuntimeError: Timed out waiting 20000ms for recv operation to complete", "/n/train.py", False),
        ("RuntimeError: Read error [10.0.0.1]:7: Connection reset by peer", "/n/train.py", False),
        ("RuntimeError: wait timeout", "/v/site-packages/torch/distributed/distributed_c10d.py", False),
    ],
)
def test_an_error_of_the_script_is_not_called_a_lost_peer(message, file, own):
    assert failed_as_consequence(message, file) is not own
    state = make_state()
    facts = {"kind": "exception", "message": message, "traceback": "", "location": "train.py, line 9", "file": file}
    hear(state, "b", "error", rank=1, **facts)
    assert diagnose(state).what.startswith("Rank 1 on b failed first:") is own


def test_a_process_that_the_script_started_is_quoted_by_its_own_error():
    message = (
        "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated with the following error:\n"
        'Traceback (most recent call last):\n  File "/n/train.py", line 5, in work\nValueError: bad shard'
    )
    failure = explain(message)
    assert failure.what == "Rank 1 on b failed first: ValueError: bad shard (in a process that the script started)"


def test_ranks_whose_collectives_differ_are_told_with_the_line_of_each():
    state = make_state()
    words = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
    hear_end(state, f"{words}\n  what():  [enforce fail at /x/gloo/transport/tcp/pair.cc:464] op.preamble.length", -6)
    stack = f'Current thread 0x1 (most recent call first):\n  File "/n/code/{"0" * 64}/script/train.py", line 7 in f\n'
    hear(state, "b", "stack", rank=1, text=f"Fatal Python error: Aborted\n\n{stack}")
    lost = "RuntimeError: Connection closed by peer [10.0.0.2]:1"
    hear(state, "a", "error", rank=0, kind="exception", message=lost, traceback="", location="train.py, line 5")
    failure = diagnose(state)
    assert failure.what == "Rank 1 on b was killed by signal 6 (SIGABRT)"
    assert "rank 0 at train.py, line 5; rank 1 at train.py, line 7" in failure.cause


# Ranks that stand: who waits for whom.


def stand(state, rank, *, inside, where="", **facts):
    hear(state, "ab"[rank], "still", rank=rank, seconds=61.0, timeout=1800.0, inside=inside, where=where, **facts)


def test_a_rank_that_does_something_else_is_no_hang():
    state = make_state()
    stand(state, 1, inside=True, where="torch.distributed.barrier (train.py, line 5)")
    assert not state.stands_still(), "nothing was heard of rank 0: it works"
    stand(state, 0, inside=False, where="subprocess.run (train.py, line 4)")
    assert not state.stands_still() and (state.waiting, state.absent) == ([1], [0])
    hear(state, "a", "moves", rank=0)
    stand(state, 0, inside=True)
    assert state.stands_still()
    hear(state, "b", "moves", rank=1)
    assert not state.stands_still()


def test_a_rank_that_is_stopped_or_has_ended_comes_no_more():
    state = make_state()
    stand(state, 1, inside=True)
    hear(state, "a", "halted", rank=0, halted=True)
    assert state.stands_still()
    state.standstill, state.asked = True, 1e12
    assert diagnose(state).what == "Rank 0 on a is stopped (SIGSTOP) while rank 1 on b waits for it."
    state = make_state()
    stand(state, 1, inside=True)
    hear(state, "a", "done", rank=0)
    assert state.stands_still()
    state.standstill, state.asked = True, 1e12
    assert "Rank 0 had ended its work while rank 1 still waited" in diagnose(state).what


def test_ranks_that_never_met_are_told_what_the_script_changed():
    state = make_state()
    for rank in (0, 1):
        stand(state, rank, inside=True, meeting=True, changes=["it set MASTER_PORT to 29500 (torchrun: 41237)"])
    state.standstill, state.asked = True, 1e12
    failure = diagnose(state)
    assert "did not meet" in failure.what and "MASTER_PORT to 29500" in failure.cause and "init_method=" in failure.fix


@pytest.mark.parametrize(
    ("places", "more", "what", "fix"),
    [
        (["dist.recv(t, 1) (a, line 5)", "dist.recv(t, 0) (a, line 5)"], {}, "The ranks wait", "its peer has sent"),
        (["dist.all_reduce(t) (a, line 1)", "dist.barrier() (a, line 2)"], {"raised": "ValueError: bad"},
         "Rank 1 waits in dist.barrier() (a, line 2) while it handles an error.", "in a finally: or except:"),
    ],
)  # fmt: skip
def test_ranks_that_wait_for_each_other_are_told_why(places, more, what, fix):
    state = make_state()
    stand(state, 0, inside=True, where=places[0])
    stand(state, 1, inside=True, where=places[1], **more)
    state.standstill, state.asked = True, 1e12
    failure = diagnose(state)
    assert failure.what.startswith(what) and fix in failure.fix and more.get("raised", "") in failure.cause


def test_a_ddp_model_that_one_rank_alone_calls_is_named():
    state = make_state()
    stand(state, 0, inside=True, where="model(images) (train.py, line 17)", forward=True)
    stand(state, 1, inside=True, where="dist.barrier() (train.py, line 20)", forward=False)
    state.standstill, state.asked = True, 1e12
    failure = diagnose(state)
    assert "rank 0 in model(images) (train.py, line 17)" in failure.cause and "model.module(…)" in failure.fix


def test_the_places_of_a_rank_come_from_one_look():
    state = make_state()
    trace = '  File "train.py", line {}, in <module>\n    dist.recv(t)\n'
    for rank, node in enumerate("ab"):
        stand(state, rank, inside=True, where=f"dist.recv(t) (train.py, line {rank})", traceback=trace.format(rank))
        hear(
            state, node, "stack", rank=rank, text='Current thread (most recent call first):\n  File "x.py", line 9 in f'
        )
    state.standstill, state.asked = True, 1e12
    assert diagnose(state).stacks == {rank: f"train.py, line {rank}, in <module>" for rank in (0, 1)}


def test_of_threads_that_outlive_the_script_only_an_idle_one_ends_the_job():
    state = make_state()
    for rank, node in enumerate("ab"):
        hear(state, node, "done", rank=rank)
    hear(state, "a", "lingers", rank=0)
    assert not state.stands_still(), "it may be writing a checkpoint"
    stand(state, 0, inside=False, thread="Thread-1 (upload)", idle=False)
    assert not state.stands_still()
    stand(state, 0, inside=False, thread="Thread-1 (wait)", idle=True)
    assert state.stands_still()
    state.standstill, state.asked = True, 1e12
    failure = diagnose(state)
    assert failure.what == "The script has ended on every rank, but thread 'Thread-1 (wait)' of rank 0 still runs."
    hear(state, "a", "left", rank=0)
    assert not state.stands_still()


# Ranks that formed no group.


def test_ranks_that_formed_no_group_trained_alone():
    state = make_state(group=2)
    for rank, node in enumerate("ab"):
        hear(state, node, "groups", rank=rank, sizes=[1])
        hear(state, node, "done", rank=rank, believed=["it set WORLD_SIZE to 1 (torchrun: 2)"])
        hear(state, node, "ended", returncode=0, reason=None, why="", killed=0, memory={})
    failure = diagnose(state)
    assert (failure.kind, failure.what) == ("alone", "The 2 ranks did not work together: each trained alone.")
    assert "WORLD_SIZE to 1" in failure.cause and failure.fix.startswith("init_process_group('gloo')")
    assert "needs_group=False" in failure.fix
    hear(state, "a", "done", rank=0, believed=[], advice="Trainer(…)")
    assert diagnose(state).fix.startswith("Trainer(…); a script that needs no group")
    hear(state, "a", "groups", rank=0, sizes=[1, 2])
    assert diagnose(state) is None


def test_of_ranks_that_did_not_say_what_they_opened_nothing_is_claimed():
    state = make_state(group=2)
    hear(state, "a", "groups", rank=0, sizes=[])
    for node in "ab":
        hear(state, node, "ended", returncode=0, reason=None, why="", killed=0, memory={})
    assert diagnose(state) is None


@pytest.mark.parametrize(
    ("source", "env", "words"),
    [
        ("", {"WORLD_SIZE": "1", "SLURM_NTASKS": "1"}, ["it set WORLD_SIZE to 1 (torchrun: 2)", "SLURM_NTASKS=1"]),
        ("parser.add_argument('--local_rank', default=-1)\nargs.local_rank", {}, ["it waits for --local_rank"]),
        ("parser.add_argument('--local-rank', default=-1)", {}, ["it did not call init_process_group"]),
        (
            "if torch.cuda.device_count() < 2: sys.exit()",
            {},
            ["number of GPUs; it looks for GPUs, and torch sees none"],
        ),
        ("import lightning as L", {}, ["lightning goes by its own settings"]),
    ],
)
def test_what_a_script_believed(source, env, words, write, monkeypatch):
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, text)
    groups = Groups(None, write("train.py", source))
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("lightning", "accelerate", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if "lightning" in source:
        monkeypatch.setitem(sys.modules, "lightning", os)
    said = "; ".join(groups.list_beliefs())
    assert all(word in said for word in words), said
    advice = "Trainer(…, devices=1, num_nodes=2, strategy='ddp')" if "lightning" in source else ""
    assert groups.advise() == advice


def test_a_group_that_accelerate_leaves_alone_is_none(write, monkeypatch):
    """On nodes without GPUs it opens one of all ranks, and then trains in one process (accelerate 1.15)."""
    said = []
    groups = Groups(SimpleNamespace(write=lambda event, **facts: said.append((event, facts))), write("train.py", ""))
    for processes, told in ((2, []), (1, [("groups", {"sizes": [1]})])):
        state = SimpleNamespace(_shared_state={"num_processes": processes})
        monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(PartialState=state))
        groups.close()
        assert said == told


@pytest.mark.parametrize(
    ("act", "claimed"),
    [
        (lambda: subprocess.run(["true"]), True),
        (lambda: subprocess.run([sys.executable, "-c", ""]), False),
        (lambda: os.system("true # python train.py"), False),
        (lambda: multiprocessing.get_context("spawn").Process(target=print).start(), False),
        (lambda: list(DataLoader([1], num_workers=1)), True),
        (lambda: multiprocessing.get_context("fork").Pool(1).terminate(), True),
        (lambda: rpc.init_rpc("x"), False),
    ],
)
def test_of_a_script_whose_own_processes_may_meet_nothing_is_claimed(act, claimed, write, monkeypatch):
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", lambda size: size)
    monkeypatch.setattr(rpc, "init_rpc", lambda name: None)
    monkeypatch.setattr(BaseProcess, "start", BaseProcess.start)
    hooks = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)  # a real one stays in the process for ever
    said = []
    groups = Groups(SimpleNamespace(write=lambda event, **facts: said.append((event, facts))), write("train.py", ""))
    groups.watch()
    real = subprocess.Popen.__init__

    def start(self, args, *rest, **more):
        hooks[0]("subprocess.Popen", (args[0], args, None, None))
        real(self, args, *rest, **more)

    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    monkeypatch.setattr(os, "system", lambda text: hooks[0]("os.system", (text,)))
    act()
    assert said == [("groups", {"sizes": []}), *[("elsewhere", {})] * (not claimed)]
    assert [distributed_c10d._new_process_group_helper(1) for _ in range(2)] == [1, 1]
    assert said[-1] == ("groups", {"sizes": [1]}), "a group of one says that it trained alone"


def test_a_rank_that_may_have_met_the_others_elsewhere_did_not_train_alone():
    state = make_state(group=2)
    for rank, node in enumerate("ab"):
        hear(state, node, "groups", rank=rank, sizes=[])
    assert state.trained_alone
    hear(state, "a", "elsewhere", rank=0)
    assert not state.trained_alone and state.may_have_trained_alone
    hear(state, "a", "groups", rank=0, sizes=[2])
    assert not state.may_have_trained_alone


def watch_of(wait):
    """The frame of a thread that waits."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.2)
    return sys._current_frames()[thread.ident]


def test_only_a_thread_that_waits_without_a_limit_is_idle():
    done = threading.Event()
    assert is_idle(watch_of(done.wait)) and is_idle(watch_of(queue.Queue().get))
    sleep = functools.partial(time.sleep, 60)  # in C, without a frame of its own
    for wait in (lambda: done.wait(60), threading.Timer(60, print).run, lambda: time.sleep(60), sleep):
        assert not is_idle(watch_of(wait))


def test_only_what_is_torchs_is_waited_for():
    """The functions are written in C, as torch's are: Python has no frame of them."""
    work, slow = SimpleNamespace(wait=time.sleep), SimpleNamespace(wait=time.sleep)
    torchs = type("Work", (), {"__module__": "torch._C._distributed_c10d", "wait": time.sleep})()
    handles = [work]
    assert waits_for_work(watch_of(lambda: torchs.wait(60)))
    assert waits_for_work(watch_of(lambda: handles[0].wait(60))), "by its name, if nothing else is known"
    assert not waits_for_work(watch_of(lambda: slow.wait(60)))
    assert not waits_for_work(watch_of(lambda: time.sleep(60)))


def test_an_open_collective_counts_only_where_a_call_may_wait_for_it():
    """Functions in C that sleep stand in for those of torch and of others."""
    known = {"__module__": "torch", "item": time.sleep, "__float__": lambda value: time.sleep(60)}
    loss, other = type("Tensor", (), known)(), SimpleNamespace(item=time.sleep, tolist=time.sleep)
    read, _ = os.pipe()
    rank = SimpleNamespace(losses={"train": loss}, loss=loss, lock=held())
    for wait in (
        lambda: loss.item(60),
        lambda: rank.losses["train"].item(60),
        lambda: rank.loss.item(
            60,
        ),
        lambda: (lambda: rank)().loss.item(60),
    ):
        assert calls_torch(watch_of(wait))
    for wait in (
        lambda: time.sleep(60),
        lambda: time.sleep(60 + 0 * len([loss])),
        lambda: other.item(60),
        lambda: os.read(read, 1),
        rank.lock.acquire,
        lambda: rank.lock.acquire(),
        lambda: queue.SimpleQueue().get(),
    ):
        assert not calls_torch(watch_of(wait))


def held():
    lock = threading.Lock()
    lock.acquire()
    return lock


def test_a_rank_whose_other_thread_works_is_at_work():
    lock, pipe, done = held(), queue.SimpleQueue(), threading.Event()

    def serve(wait):
        wait()  # a line of the script

    for wait, works in (
        (lambda: subprocess.run(["sleep", "3"]), True),
        (lambda: time.sleep(3), True),
        (lambda: done.wait(30), True),
        (lambda: done.wait(0.5) or done.wait(), False),
        (lambda: lock.acquire(), False),
        (lambda: pipe.get(), False),
        (queue.Queue().get, False),
    ):
        thread = threading.Thread(target=serve, args=[wait], daemon=True)
        thread.start()
        time.sleep(0.2)
        frame = sys._current_frames()[thread.ident]
        assert is_of_script(thread, frame) and is_idle(frame, POLL) is not works
    with ThreadPoolExecutor(1) as pool:
        pool.submit(print).result()
        (thread,) = pool._threads
        time.sleep(0.1)
        assert is_idle(sys._current_frames()[thread.ident]), "it waits for something to do"


def test_a_thread_of_a_package_or_of_the_watch_is_not_the_scripts():
    for name, file in (
        ("tqdm._monitor", "/v/site-packages/tqdm/_monitor.py"),
        ("nodelaunch.node.watch", "/n/watch.py"),
    ):
        places = {"__name__": name, "sleep": time.sleep}
        exec(compile("def run():\n    sleep(3)\n", file, "exec"), places)
        thread = threading.Thread(target=places["run"])
        thread.start()
        assert not is_of_script(thread, sys._current_frames()[thread.ident])
    timer = threading.Timer(2, print)
    timer.start()
    time.sleep(0.1)
    assert is_of_script(timer, sys._current_frames()[timer.ident]), "it will start something"


def test_a_rank_that_calls_another_by_rpc_is_not_known_to_wait_in_vain(tmp_path):
    for folder, waiting in (("torch/distributed/rpc", False), ("torch/distributed", True)):
        inner, outer = {}, {"wait": torch.futures.Future().wait}
        exec(compile("def call():\n    wait()\n", f"/v/{folder}/api.py", "exec"), outer, inner)
        outer |= inner
        thread = threading.Thread(target=inner["call"], daemon=True)
        thread.start()
        time.sleep(0.2)
        assert waits(thread.ident) is waiting


def test_ranks_that_all_stand_elsewhere_are_told_at_the_limit():
    state = make_state()
    for rank in (0, 1):
        stand(state, rank, inside=False, where=f"lock.acquire() (train.py, line {5 + rank})")
    assert not state.stands_still(), "each may be about to go on"
    state.limit = 90.0
    failure = diagnose(state, StopReason.LIMIT)
    assert failure.kind == "limit"
    assert "rank 0 in lock.acquire() (train.py, line 5); rank 1 in lock.acquire() (train.py, line 6)" in failure.cause
    assert failure.fix.startswith("look at what each rank waits for there") and "mp.spawn" not in failure.fix
    for rank in (0, 1):
        stand(state, rank, inside=False, where="torch.multiprocessing.spawn.spawn (train.py, line 18)")
    assert "train in it, without mp.spawn" in diagnose(state, StopReason.LIMIT).fix


def test_bytes_on_their_way_are_counted_and_no_file_stays_open():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as link:
        peer = server.accept()[0]
        before, files = _count_bytes(), len(list(Path("/proc/self/fd").iterdir()))
        link.sendall(bytes(100_000))
        peer.recv(100_000, socket.MSG_WAITALL)
        assert _count_bytes() - before >= 200_000, "sent by the one, received by the other"
        assert len(list(Path("/proc/self/fd").iterdir())) == files
        peer.close()


# Whole jobs.

WORLD = """
import os, subprocess, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist

mode = sys.argv[1]
if mode == "alone":
    os.environ["WORLD_SIZE"], os.environ["RANK"] = "1", "0"
if mode == "unknown":
    os.environ["MASTER_ADDR"] = "gpu-node-01.invalid"
if mode == "old":  # as the tutorials of before torchrun have it
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "1"
dist.init_process_group("gloo", timeout=timedelta(seconds=8 if mode == "late" else 60))
if mode in ("busy", "late") and dist.get_rank() == 0:
    subprocess.run(["sleep", "5" if mode == "busy" else "60"])
if mode in ("busy", "late"):
    dist.barrier()
if mode == "open" and dist.get_rank() == 0:  # a collective that it has begun, and then something else
    begun = dist.all_reduce(torch.ones(1), async_op=True)
    time.sleep(8)
    dist.send(torch.ones(4), 1)
if mode == "open" and dist.get_rank():
    dist.recv(torch.zeros(4), 0)
    dist.all_reduce(torch.ones(1))
if mode == "died" and dist.get_rank() == 0:  # the other thread fails, and nothing is sent
    threading.Thread(target=lambda: (time.sleep(4), 1 / 0)).start()
if mode == "died":
    dist.recv(torch.zeros(4), 1 - dist.get_rank())
if mode == "feed" and dist.get_rank() == 0:  # another thread makes what the other rank waits for
    threading.Thread(target=lambda: (subprocess.run(["sleep", "8"]), dist.send(torch.ones(4), 1, tag=1))).start()
    dist.recv(torch.zeros(4), 1, tag=2)
if mode == "feed" and dist.get_rank():
    dist.recv(torch.zeros(4), 0, tag=1)
    dist.send(torch.zeros(4), 0, tag=2)
if mode == "work" and dist.get_rank() == 0:
    time.sleep(1)
    dist.send(torch.ones(1), 1)
if mode == "work":
    work = (dist.irecv(torch.ones(1), 0) if dist.get_rank() else dist.irecv(torch.ones(1), 1))
    work.wait()
    if dist.get_rank():
        dist.irecv(torch.ones(1), 0).wait()
if mode == "fork" and dist.get_rank() == 0 and os.fork() == 0:
    raise ValueError("of the child")
if mode == "fork":
    time.sleep(1)
    dist.barrier()
if mode == "thread":
    threading.Thread(target=threading.Event().wait).start()
if mode == "poll" and dist.get_rank() == 0:  # it prepares something, in many short steps
    for _ in range(20):
        time.sleep(0.25)
    open("ready", "w").close()
if mode == "poll":
    while not os.path.exists("ready"):
        time.sleep(0.1)
    dist.barrier()
if mode == "unused":  # a part of the model that its forward does not use
    parts = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 1), "aux": torch.nn.Linear(2, 1)})
    parts.forward = lambda x: parts["head"](x)
    net = torch.nn.parallel.DistributedDataParallel(parts)
    for _ in range(2):
        net(torch.ones(4, 2)).sum().backward()
print("trained", flush=True)
"""


def start(write, mode, **options):
    heard = Heard()
    script = write("train.py", "print('trained')" if mode == "none" else WORLD)
    job = TorchrunJob(script, [mode], nodes=local_nodes(1), nproc_per_node=2, **options)
    return job.run(show=heard, check=False), "\n".join(heard.lines)


@pytest.mark.usefixtures("warm_torchrun")
@pytest.mark.parametrize(
    ("mode", "options", "what", "cause"),
    [
        ("alone", {}, "The 2 ranks did not work together: each trained alone.", "it set WORLD_SIZE to 1 (torchrun: 2)"),
        ("none", {}, "The 2 ranks did not work together: each trained alone.", "it did not call init_process_group"),
        ("unknown", {}, "the name 'gpu-node-01.invalid' of the meeting point is not known", "and the script set it"),
        (
            "old",
            {"hang_timeout": 1},
            "The ranks did not meet: 2 of them stand in init_process_group.",
            "MASTER_PORT to 1",
        ),
        ("late", {"hang_timeout": 1}, "Rank 0 on node0 was in subprocess.run (train.py, line 16)", "something else"),
        (
            "work",
            {"hang_timeout": 1},
            "The ranks wait for each other.",
            "rank 1 in dist.irecv(torch.ones(1), 0).wait()",
        ),
        ("died", {"hang_timeout": 1}, "The ranks wait for each other.", "every rank waits to receive"),
        ("thread", {"hang_timeout": 1}, "The script has ended on every rank, but thread 'Thread-", "not a daemon"),
        ("unused", {}, "RuntimeError: Expected to have finished reduction", "in the loss: aux.weight, aux.bias"),
    ],
    ids=["alone", "none", "unknown", "old", "late", "work", "died", "thread", "unused"],
)
def test_a_job_that_goes_wrong_is_told_why(write, mode, options, what, cause):
    result, _ = start(write, mode, **options)
    assert what in result.failure.what and cause in result.failure.cause, result.failure


@pytest.mark.usefixtures("warm_torchrun")
def test_a_rank_that_waits_for_a_program_is_named_and_left_alone(write):
    result, said = start(write, "busy", hang_timeout=1)
    assert result.ok and said.count("trained") == 2
    assert re.search(
        r"rank 0 has been in subprocess\.run \(train\.py, line 16\) for \d+ s while 1 rank waits for it", said
    )
    assert "after the group's own timeout of 60 s; hang_timeout= changes" in said and said.count("hang_timeout=") == 1


@pytest.mark.usefixtures("warm_torchrun")
def test_ranks_that_poll_for_a_file_train_to_the_end(write):
    result, said = start(write, "poll", hang_timeout=1)
    assert result.ok and said.count("trained") == 2, result.failure
    assert said.count("hang_timeout=") <= 1, "where they stand is told once"


@pytest.mark.usefixtures("warm_torchrun")
@pytest.mark.parametrize(
    ("mode", "place"),
    [
        ("open", r"time\.sleep\(8\) \(train\.py, line 21\)"),
        ("feed", r"subprocess\.run \(train\.py, line 31\), in its thread 'Thread-\d+ \(<lambda>\)'"),
    ],
)
def test_a_rank_that_begins_or_shares_its_communication_is_left_alone(write, mode, place):
    result, said = start(write, mode, hang_timeout=1)
    assert result.ok and said.count("trained") == 2, result.failure
    assert re.search(f"rank 0 has been in {place} for \\d+ s while 1 rank waits for it", said)


@pytest.mark.usefixtures("warm_torchrun")
def test_what_a_child_of_a_rank_says_is_not_the_ranks(write):
    result, said = start(write, "fork")
    assert result.ok and "ValueError: of the child" in said


@pytest.mark.usefixtures("warm_torchrun")
def test_a_script_that_needs_no_group_says_so(write):
    result, _ = start(write, "none", needs_group=False)
    assert result.ok
    with pytest.raises(LabError, match="needs_group is True or False"):
        TorchrunJob("train.py", nodes=local_nodes(1), needs_group="no")
