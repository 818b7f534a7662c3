"""Reports from the field (issues of pytorch, Lightning and others): each message goes through the whole diagnosis."""

import json
import os
import re
import select
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from harness.forked import fork
from harness.jobs import Heard, hear

from nodelaunch import TorchrunJob, local_nodes
from nodelaunch.failure import KNOWN, diagnose, trained_alone
from nodelaunch.node import watch as node_watch
from nodelaunch.node.groups import Groups
from nodelaunch.node.watch import HangWatch
from nodelaunch.spec import JobSpec
from nodelaunch.state import JobState

pytestmark = pytest.mark.usefixtures("runs")


def make_state():
    """Two nodes, a and b, with one rank each, which have started."""
    state = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"], JobSpec("train.py", nodes=local_nodes(2)))
    for rank, node in enumerate("ab"):
        who = {"rank": rank, "pid": 57 + rank, "host": node, "local_rank": 0, "node": rank}
        hear(state, node, "worker", **who, processes=1)
    return state


def hear_end(state, message, code=0, *, location="train.py, line 9"):
    """Ends rank 1 with a message: by an exception, with an exit status, or by a signal."""
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


# Real messages of each rule: the text, how the rank ended (0 by an exception, above 0 with this status, below 0 by a
# signal), a part of the cause and a part of the fix.
MESSAGES = [
    # A full /dev/shm, which is no full disk.
    ("RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)", 0,
     "/dev/shm", "num_workers=0"),
    ('Traceback (most recent call last):\n  File "/v/multiprocessing/synchronize.py", line 57, in __init__\n'
     "    sl = self._semlock = _multiprocessing.SemLock(\nOSError: [Errno 28] No space left on device", 0,
     "/dev/shm", "--shm-size"),
    # Memory of a GPU.
    ("torch.AcceleratorError: CUDA error: out of memory", 0, "the GPU's memory", "--batch-size"),
    # DistributedDataParallel, weights, labels.
    ("RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.", 0,
     "took no part in the loss", "find_unused_parameters"),
    ("RuntimeError: DDP expects same model across all ranks, but Rank 1 has 3 params", 0, "different models", "same"),
    ("AttributeError: 'DistributedDataParallel' object has no attribute 'fc'", 0, "wraps the model", "model.module.fc"),
    ("IndexError: Target 10 is out of bounds.", 0, "larger than", "num_classes="),
    # Devices.
    ("torch.AcceleratorError: CUDA error: invalid device ordinal", 0, "fewer GPUs than processes", "LOCAL_RANK"),
    ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.5\n"
     "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
     "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 6000", 0, "the same GPU", "nproc_per_node="),
    ("AssertionError: Torch not compiled with CUDA enabled", 0, "torch finds none", "torch.cuda.is_available()"),
    # The group.
    ("RuntimeError: Detected mismatch between collectives on ranks.", 0, "different collectives", "same collective"),
    ("KeyError: 'SLURM_PROCID'", 0, "asks for SLURM_PROCID", "torchrun sets RANK"),
    ("RuntimeError: the name 'gpu-node-01' of the meeting point is not known on this node, and the script set it", 0,
     "no address belongs to the name gpu-node-01 here, and the script set it", "leave MASTER_ADDR"),
    ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: "
     "29500, useIpv6: false, code: -98, name: EADDRINUSE", 0, "has this port", "another port"),
    ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL", 0, "gave up", "NCCL_DEBUG"),
    # What a node lacks: a server, a program, a package, a file.
    ("socket.gaierror: [Errno -3] Temporary failure in name resolution", 0, "by a name", "/etc/hosts"),
    ("ImportError: /a/fused.so: undefined symbol: _ZN3c105Error", 0, "another version of torch", "in pairs"),
    ("ModuleNotFoundError: No module named 'apex'", 0, "does not have: apex", "pip install"),
    ("ImportError: cannot import name 'build' from partially initialized module 'model'", 0,
     "does not know this message", "train.py"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'data/x.npy'", 0, "a path that is not on this node",
     "root='.'"),
    # What a script printed or wrote that has nothing to do with its end.
    ("Traceback (most recent call last):\nModuleNotFoundError: No module named 'apex'\nbelow the threshold", 1,
     "ended itself with this status", "last lines"),
    ('Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    int("64x")  # out of memory\n'
     "ValueError: invalid literal for int() with base 10: '64x'", 0, "does not know this message", "train.py, line 9"),
    # Signals, with the rank's own last words.
    ("Fatal Python error: none_dealloc: deallocating None\n" + "Thread 0x1 (most recent call first):\n" * 20
     + "Extension modules: numpy._core", -6, "none_dealloc", "last lines"),
    ("reading shard 7", -11, "the last that it printed: reading shard 7", "one by one"),
    ("", -10, "Slurm's --signal", "checkpoint"),
]  # fmt: skip


# The most frequent ones. Each has a row in tests/drills.md.
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
                        "root='.' and env={'PYTHONPATH': '.'}"),
    "pickle": ("_pickle.PicklingError: Can't pickle <function <lambda> at 0x7f>: attribute lookup failed", 0,
               "another process", "top of the file"),
    "nccl": ("RuntimeError: Distributed package doesn't have NCCL built in", 0, "nccl", "'gloo'"),
    "wandb": ("wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])", 0,
              "no key", "WANDB_MODE"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "code", "cause", "fix"),
    [*MESSAGES, *CASES.values()],
    ids=[*(re.sub(r"\W+", "-", row[0])[:45] for row in MESSAGES), *CASES],
)
def test_other_words_of_a_kind_get_its_answer(message, code, cause, fix):
    failure = explain(message, code)
    assert cause in failure.cause and fix in failure.fix, failure
    assert not re.search(r"\\g<|\x1b", str(failure))


def test_each_known_message_gets_its_own_answer():
    given = [explain(message, code) for message, code, *_ in [*MESSAGES, *CASES.values()]]
    for _, cause, fix in KNOWN:
        words = [".*".join(map(re.escape, re.split(r"\\g<\w+>", text))) for text in (cause, fix)]
        assert any(re.match(words[0], one.cause) and re.fullmatch(words[1], one.fix) for one in given), cause


@pytest.mark.parametrize(
    ("message", "code", "headline"),
    [
        ("\x1b[1;91mValueError: \x1b[0mbad \x1b[32m'shard 7'\x1b[0m", 1, "SystemExit: 1: ValueError: bad 'shard 7'"),
        (f"ValueError: {'seven ' * 30}", 0, "seven…"),
        ("Traceback (most recent call last):\nModuleNotFoundError: No module named 'apex'\n\n"
         "During handling of the above exception, another exception occurred:\n\n"
         "Traceback (most recent call last):\nValueError: bad luck", 0,
         "ValueError: bad luck"),
    ],
)  # fmt: skip
def test_a_headline_quotes_the_error_itself(message, code, headline):
    failure = explain(message, code)
    assert failure.what.endswith(headline) and len(failure.what) <= 120 and "apex" not in failure.cause


def test_an_unknown_message_is_quoted_and_promised_nothing():
    failure = explain("ValueError: bad luck in batch 7")
    assert failure.what == "Rank 1 on b failed first: ValueError: bad luck in batch 7"
    assert "does not know this message" in failure.cause
    assert failure.fix == "begin at train.py, line 9, the script's own line"
    failure = explain("loss is too large: 7.1, giving up", 1)
    assert failure.what.endswith("SystemExit: 1: loss is too large: 7.1, giving up")
    assert "the last line that it printed" in failure.cause


def test_a_full_shared_memory_that_no_message_names_is_no_full_disk():
    state = make_state()
    facts = {"kind": "exception", "message": "OSError: [Errno 28] No space left on device", "traceback": ""}
    hear(state, "b", "error", rank=1, **facts, location="train.py, line 9", disk="/dev/shm/cache/part-1")
    assert "shared memory (/dev/shm) is full" in diagnose(state).cause


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


# Ranks that formed no group.


def test_ranks_that_formed_no_group_trained_alone():
    state = make_state()
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


@pytest.mark.parametrize(
    ("source", "env", "words"),
    [
        ("", {"WORLD_SIZE": "1", "SLURM_NTASKS": "1"}, ["it set WORLD_SIZE to 1 (torchrun: 2)", "SLURM_NTASKS=1"]),
        ("parser.add_argument('--local_rank', default=-1)\nargs.local_rank", {}, ["it waits for --local_rank"]),
        ("if torch.cuda.device_count() < 2: sys.exit()", {}, ["of GPUs; it looks for GPUs, and torch sees none"]),
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


def test_a_rank_that_may_have_met_the_others_elsewhere_did_not_train_alone():
    state = make_state()
    for rank, node in enumerate("ab"):
        hear(state, node, "groups", rank=rank, sizes=[])
    assert trained_alone(state)
    hear(state, "a", "elsewhere", rank=0)
    assert not trained_alone(state)


# The watch over a rank: when it reports that the main thread stands, and whether that thread waits for other ranks.


def watch(write, source, *, seconds=30.0):
    """The first event of the watch over a process in which ``source`` runs as the training script, and when it came."""
    script, (read, end) = str(write("train.py", source)), os.pipe()

    def work():
        def tell(event, **facts):
            os.write(end, json.dumps({"event": event, **facts}).encode())

        made = HangWatch(SimpleNamespace(write=tell), script, 0.3, SimpleNamespace(list_changes=list))
        made.start()
        exec(compile(source, script, "exec"), {"__name__": "__main__"})
        time.sleep(60)

    process, begun = fork(work), time.monotonic()
    try:
        assert select.select([read], [], [], seconds)[0], "nothing was told"
        return json.loads(os.read(read, 2**16)), time.monotonic() - begun
    finally:
        process.kill()
        process.join()
        os.close(read)
        os.close(end)


TOOLS = """
import threading, time, torch
from types import SimpleNamespace
lock = threading.Lock()
lock.acquire()
# Functions in C, as torch's are: Python has no frame of them.
Work = type("Work", (), {"__module__": "torch._C._distributed_c10d", "wait": time.sleep})
Tensor = type("Tensor", (), {"__module__": "torch", "item": time.sleep, "__gt__": time.sleep})
work, loss = Work(), Tensor()
dist, rank = SimpleNamespace(irecv=lambda *rest: work), SimpleNamespace(loss=loss, lock=lock)
def beside(wait):
    threading.Thread(target=wait, daemon=True).start()
def run_in(name, file, wait):
    places = {"__name__": name, "wait": wait}
    exec(compile("def run():\\n    wait()\\n", file, "exec"), places)
    return places["run"]
collective = torch.futures.Future().wait
"""


@pytest.mark.parametrize(
    ("source", "inside"),
    [
        # A collective is waited for; work of the script's own is not.
        ("dist.irecv(torch.ones(1), 0).wait(60)", True),
        ("time.sleep(60)", False),
        ("run_in('torch.distributed', '/v/torch/distributed/api.py', collective)()", True),
        ("beside(lambda: time.sleep(3))\ncollective()", True),
    ],
)
def test_a_rank_waits_for_others_only_in_torch(source, inside, write):
    event, _ = watch(write, f"{TOOLS}{source}")
    assert (event["event"], event["inside"]) == ("still", inside), event


@pytest.mark.parametrize(
    ("source", "inside"),
    [
        ("loss.item(60)", True),
        ("time.sleep(60)", False),
        ("rank.lock.acquire()", False),
    ],
)
def test_an_open_collective_counts_only_where_a_call_may_wait_for_it(source, inside, write, monkeypatch):
    monkeypatch.setattr(node_watch, "has_open_work", lambda: True)
    assert watch(write, f"{TOOLS}{source}")[0]["inside"] is inside


@pytest.mark.parametrize(
    "source",
    [
        "sum(range(3 * 10**8))",  # one long call at one place
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "def send():\n"
        "    link = socket.create_connection(server.getsockname())\n"
        "    for _ in range(20):\n"
        "        link.sendall(bytes(100_000)), time.sleep(0.1)\n"
        "beside(send)\n"
        "server.accept()[0].recv(10**8, socket.MSG_WAITALL)",
    ],
    ids=["computes", "bytes"],
)
def test_a_rank_that_computes_or_exchanges_data_moves(source, write):
    _, took = watch(write, f"{TOOLS}{source}\ntime.sleep(60)")
    assert took > 1.5


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
if mode == "work" and dist.get_rank() == 0:
    time.sleep(1)
    dist.send(torch.ones(1), 1)
if mode == "work":
    work = (dist.irecv(torch.ones(1), 0) if dist.get_rank() else dist.irecv(torch.ones(1), 1))
    work.wait()
    if dist.get_rank():
        dist.irecv(torch.ones(1), 0).wait()
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


# By mode: what the error says, and its cause.
WRONG = {
    "alone": ("The 2 ranks did not work together: each trained alone.", "it set WORLD_SIZE to 1 (torchrun: 2)"),
    "none": ("The 2 ranks did not work together: each trained alone.", "it did not call init_process_group"),
    "unknown": ("the name 'gpu-node-01.invalid' of the meeting point is not known", "and the script set it"),
    "old": ("The ranks did not meet: 2 of them stand in init_process_group.", "MASTER_PORT to 1"),
    "late": ("Rank 0 on node0 was in subprocess.run (train.py, line 16)", "something else"),
    "work": ("The ranks wait for each other.", "rank 1 in dist.irecv(torch.ones(1), 0).wait()"),
    "thread": ("The script has ended on every rank, but thread 'Thread-", "not a daemon"),
    "unused": ("RuntimeError: Expected to have finished reduction", "in the loss: aux.weight, aux.bias"),
}


@pytest.mark.usefixtures("warm_torchrun")
@pytest.mark.parametrize("mode", WRONG)
def test_a_job_that_goes_wrong_is_told_why(write, mode):
    what, cause = WRONG[mode]
    result, _ = start(write, mode, **({"hang_timeout": 1} if mode in ("old", "late", "work", "thread") else {}))
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
def test_a_script_that_needs_no_group_says_so(write):
    assert start(write, "none", needs_group=False)[0].ok
