"""The checks of lab 14 refuse typical wrong answers with the hint that fits, accept right ones, and end all ranks."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness.answers import refuse, refuse_edited, write_script
from torch.distributed import P2POp, batch_isend_irecv

from course import check
from course.exercises.lab14 import horovod_script, parameter_server, tf_config

pytestmark = pytest.mark.usefixtures("runs", "no_fork_is_left")


# 14.1

NAME = "train_horovod.py"
INIT = "    hvd.init()\n"
SAMPLER = "DistributedSampler(train, size, rank, drop_last=True)"
LOADER = "DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)"
WRAP = "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
FIRST = "    first = hvd.broadcast_object(first, root_rank=0)\n"
PARAMETERS = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
STATE = "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
SUM = "counts = hvd.allreduce(counts, op=hvd.Sum)"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes the script with some of its text replaced."""
    monkeypatch.chdir(tmp_path)
    return partial(write_script, tmp_path, NAME)


WRONG_SCRIPTS = [
    (INIT, "", "before hvd.init() nothing else"),
    ("hvd.local_rank()", "hvd.rank()", "RANK counts over all nodes"),
    ("        torch.cuda.set_device(device)\n", "        pass\n", "take the current one, GPU 0"),
    (SAMPLER, SAMPLER.replace("size, rank", "size, hvd.local_rank()"), "both of the whole job"),
    (LOADER, LOADER.replace(", drop_last=True", ""), "the last batch is not a full one"),
    ("args.lr, momentum", "args.lr * size, momentum", "multiply the learning rate by hvd.size()"),
    (WRAP, "pass", "it averages the gradients"),
    (WRAP, WRAP.replace("named_parameters()", "parameters()"), "it averages the gradients"),
    (PARAMETERS, "pass", "all processes need the weights of rank 0"),
    (PARAMETERS, f"if rank == 0:\n        {PARAMETERS}", "in the same order"),
    (STATE, "pass", "the others without"),
    (SUM, SUM.replace(", op=hvd.Sum", ""), "averages unless op="),
    (SUM, SUM.removeprefix("counts = "), "returns a new tensor"),
]


@pytest.mark.parametrize(("old", "new", "hint"), WRONG_SCRIPTS)
def test_wrong_scripts_are_refused(write, old, new, hint):
    assert hint in refuse("14.1", write((old, new)))


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ([(WRAP, "pass"), (FIRST, f"    {WRAP}\n{FIRST}")], "before the checkpoint is loaded"),
        ([(PARAMETERS, "pass"), ("    first = 0\n", f"    {PARAMETERS}\n    first = 0\n")], "the weights of rank 0"),
    ],
)
def test_calls_on_the_wrong_side_of_the_checkpoint_are_refused(write, changes, hint):
    assert hint in refuse("14.1", write(*changes))


RIGHT_SCRIPTS = {
    "as in the lab": [],
    "all arguments by name": [
        (SAMPLER, "DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True, seed=7)"),
        (
            WRAP,
            "optimizer = hvd.DistributedOptimizer(\n        optimizer, model.named_parameters(), op=hvd.Average,\n"
            "        compression=hvd.Compression.none, backward_passes_per_step=1)",
        ),
        (SUM, "hvd.allreduce_(counts, name='counts', op=hvd.Sum)"),
        ("if args.checkpoint and rank == 0:", "if args.checkpoint and hvd.rank() == 0:"),
    ],
}


@pytest.mark.parametrize("changes", RIGHT_SCRIPTS.values(), ids=RIGHT_SCRIPTS)
def test_right_scripts_are_accepted(write, capsys, changes):
    check.exercise("14.1", write(*changes))
    assert capsys.readouterr().out == f"✔ 14.1 The Horovod script: {horovod_script.PROVED}\n"


# 14.2

TASK = '"worker", "index": index'
CLUSTER = '{"worker": list(addresses)}'
TEXT = 'return json.dumps({"cluster": {"worker": list(addresses)}, "task": task})'

WRONG_CONFIGS = [
    (TEXT, 'return {"cluster": {"worker": list(addresses)}, "task": task}', "json.dumps(...)"),
    (TEXT, f"return str({TEXT[18:-1]})", "TensorFlow reads JSON"),
    (TEXT, "pass", "return the text"),
    (', "task": task', "", '"task" says which worker this is'),
    (CLUSTER, '{"worker": ",".join(addresses)}', "all addresses, as they are"),
    (CLUSTER, '{"worker": sorted(addresses)}', "in the order that they have"),
    (CLUSTER, '{"worker": addresses, "ps": addresses[:1]}', '"cluster" holds {"worker": [...]} alone'),
    (TASK, '"worker" if index else "chief", "index": index', "also for worker 0"),
    (TASK, '"worker", "index": index + 1', "the one that the function is given"),
]


@pytest.mark.parametrize(("old", "new", "hint"), WRONG_CONFIGS)
def test_wrong_configurations_are_refused(old, new, hint):
    assert hint in refuse_edited("14.2", (old, new))


@pytest.mark.parametrize(
    "answer",
    [
        lambda addresses, index: (
            '{"task":{"index":'
            + str(index)
            + ',"type":"worker"},"cluster":{"worker":["'
            + '", "'.join(addresses)
            + '"]}}'
        ),
        lambda addresses, index: json.dumps(
            {"cluster": {"worker": addresses}, "task": dict(type="worker", index=index), "rpc_layer": "grpc"}, indent=4
        ),
    ],
)
def test_right_configurations_are_accepted(answer, capsys):
    check.exercise("14.2", answer)
    assert capsys.readouterr().out == f"✔ 14.2 TF_CONFIG: {tf_config.PROVED}\n"


# 14.3 and 14.4: edits of the lab's solutions

START = "    ### BEGIN SOLUTION\n"
SEND = "dist.send(weights, dst=worker)"
RECEIVE = "dist.recv(gradient, src=worker)\n            total += gradient"
TAKE = "for worker in workers:\n            dist.recv"
STEP = "weights -= lr * total / len(workers)"
ROUNDS = "range(rounds)"
FIRST_SEND = f"        {SEND}\n        sent[worker] = 0\n"
ANY = "worker = dist.recv(gradient)\n"
ANSWER = f"        {SEND}\n    return ages"

WRONG_SERVERS = [
    ("14.3", STEP, "weights -= lr * total / 7", "the mean, or here the one gradient"),
    ("14.3", SEND, "dist.send(weights.double(), dst=worker)", "a float32 tensor"),
    ("14.3", RECEIVE, RECEIVE.replace("+=", "="), "one gradient counts for all"),
    ("14.3", RECEIVE, "dist.irecv(torch.empty_like(weights), src=worker)", "wait() for each that you start"),
    ("14.3", ROUNDS, "range(rounds - 1)", "it got none: send to all of `workers` in each round"),
    ("14.3", START, f"    dist.reduce(weights, dst=0)\n{START}", "without a collective"),
    ("14.4", "weights -= lr * gradient", "weights -= 0.4 * lr * gradient", "the one gradient that came last"),
    ("14.4", "weights -= lr * gradient", "weights = weights - lr * gradient", "change it in place"),
    ("14.4", ANSWER, f"        if update < updates - 1:\n    {ANSWER}", "the last one included"),
    ("14.4", START, f"    workers = range(1, dist.get_world_size())\n{START}", "the ranks in `workers`"),
    ("14.4", "return ages", "return sorted(ages)", "return a list in the order of the updates"),
    ("14.4", "sent[worker] = update + 1", "sent[worker] = 0", "how many updates are in them"),
]
STUCK_SERVERS = [
    ("14.3", START, f"    workers = workers[:-1]\n{START}", "has no weights: first send them to all of `workers`"),
    ("14.3", TAKE, TAKE.replace("workers", "workers[1:]"), "one gradient from every worker"),
    ("14.3", "in range(rounds)", "in iter(int, 1)", "the loop does not end"),
    (
        "14.4",
        ANY,
        "worker = dist.recv(gradient, src=workers[update % len(workers)])\n",
        "take whichever gradient comes first",
    ),
    ("14.4", FIRST_SEND, FIRST_SEND.replace("dist.", "worker == workers[0] and dist."), "first send them to all"),
    ("14.4", "in range(updates)", "in iter(int, 1)", "the loop does not end"),
]


@pytest.mark.parametrize(("number", "old", "new", "words"), WRONG_SERVERS)
def test_wrong_servers_are_refused(number, old, new, words):
    assert words in refuse_edited(number, (old, new))


@pytest.mark.parametrize(("number", "old", "new", "words"), STUCK_SERVERS)
def test_servers_that_get_stuck_are_refused(monkeypatch, number, old, new, words):
    monkeypatch.setattr(parameter_server, "LIMIT", 1.5)
    assert words in refuse_edited(number, (old, new))


def wait_for_all(weights, workers, updates, lr):
    """Wrong: at once, but every worker's gradient is waited for before any gets new weights."""
    for worker in workers:
        dist.send(weights, dst=worker)
    for worker in workers:
        dist.recv(torch.empty_like(weights), src=worker)


def test_a_server_that_waits_for_all_is_refused(monkeypatch):
    monkeypatch.setattr(parameter_server, "LIMIT", 1.5)
    assert "before the next recv" in refuse("14.4", wait_for_all)


def in_turn_as_a_batch(weights, workers, rounds, lr):
    """Right: all messages of a round at once; it prints."""
    for _ in range(rounds):
        gradients = [torch.zeros_like(weights) for _ in workers]
        sends = [P2POp(dist.isend, weights, worker) for worker in workers]
        receives = [P2POp(dist.irecv, one, worker) for one, worker in zip(gradients, workers, strict=True)]
        [work.wait() for work in batch_isend_irecv(sends + receives)]
        weights[:] = weights - lr * sum(gradients) / len(gradients)
        print("a step")


def at_once_with_counters(weights, workers, updates, lr):
    """Right: ages to which every update by another worker adds one."""
    older, ages = dict.fromkeys(workers, 0), torch.zeros(updates, dtype=torch.int64)
    for work in [dist.isend(weights, worker) for worker in workers]:
        work.wait()
    for update in range(updates):
        gradient = torch.zeros_like(weights)
        first = dist.recv(gradient)
        ages[update] = older[first]
        weights.add_(gradient, alpha=-lr)
        older = {worker: age + 1 for worker, age in older.items()}
        older[first] = 0
        dist.isend(weights, first).wait()
    return ages


def test_a_right_server_in_turn_is_accepted(capsys):
    check.exercise("14.3", in_turn_as_a_batch)
    *printed, tick = capsys.readouterr().out.splitlines()
    assert tick == (
        "✔ 14.3 A synchronous parameter server: 2 and 3 workers, each with all weights at once, and in every round one "
        "step with their mean"
    )
    assert printed == ["[rank 0] a step"] * 5


def test_a_right_server_at_once_is_accepted(capsys):
    check.exercise("14.4", at_once_with_counters)
    assert capsys.readouterr().out == (
        "✔ 14.4 An asynchronous parameter server: 2 and 3 workers of unequal speed: a step for each gradient as it "
        "came, none waited, and all ages\n"
    )
