"""Exercises 14.1 and 14.2 refuse typical wrong answers with the hint that fits, and accept right ones."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course import check
from course.check import NotYetError, OpenError
from course.exercises.lab14 import horovod_script, tf_config
from course.exercises.lab14.horovod_stand_in import Horovod
from course.ranks import fork_ranks
from course.workspace import make_script_stub
from lab_common import LabError
from lab_utils import models

pytestmark = pytest.mark.usefixtures("runs")


def refuse(number, answer):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert refused.value.yours and refused.value.expected
    return f"{refused.value.what} | {refused.value.hint}"


# 14.1

NAME = "train_horovod.py"
INIT = "    hvd.init()\n"
DEVICE = 'torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")'
SET_DEVICE = "    if cuda:\n        torch.cuda.set_device(device)\n"
SAMPLER = "DistributedSampler(train, size, rank, drop_last=True)"
LOADER = "loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)"
LR = "args.lr, momentum"
WRAP = "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
LOAD = "    first = 0\n"
FIRST = "    first = hvd.broadcast_object(first, root_rank=0)\n"
PARAMETERS = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
STATE = "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
SUM = "counts = hvd.allreduce(counts, op=hvd.Sum)"
SAVE = "if args.checkpoint and rank == 0:\n            state"
FOUND = "if rank == 0 and args.checkpoint and args.checkpoint.exists()"
STEP = "            optimizer.step()\n"


@pytest.fixture
def write(root, tmp_path, monkeypatch):
    """A function that writes the script with some of its text replaced; nothing may be added beside it."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def write(*changes, stub=False):
        source = (root / "notebooks" / "scripts" / NAME).read_text()
        source = make_script_stub(source) if stub else source
        for old, new in changes:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        (folder / NAME).write_text(source)
        return NAME

    yield write
    assert [path.name for path in folder.iterdir()] == [NAME]


WRONG_SCRIPTS = {
    "no init": ([(INIT, "")], "hvd.init() comes first"),
    "init of torch.distributed": (
        [(INIT, "    import torch.distributed as dist\n    dist.init_process_group('gloo')\n    hvd.init()\n")],
        "without torch.distributed",
    ),
    "the GPU of the rank": ([("hvd.local_rank()", "hvd.rank()")], "RANK counts over all nodes"),
    "the first GPU": ([(DEVICE, 'torch.device("cuda:0" if cuda else "cpu")')], '"cuda:0" is the same GPU'),
    "no current GPU": ([(SET_DEVICE, "")], "take the current one, GPU 0"),
    "no sampler": ([(LOADER, "loader = DataLoader(train, args.batch_size, drop_last=True)")], "sampler=sampler"),
    "size and rank swapped": ([(SAMPLER, SAMPLER.replace("size, rank", "rank, size"))], "how many first, then which"),
    "a sampler without numbers": ([(SAMPLER, SAMPLER.replace("size, rank, ", ""))], "both numbers for the sampler"),
    "the sampler of the local rank": (
        [(SAMPLER, SAMPLER.replace("size, rank", "size, hvd.local_rank()"))],
        "both ranks got the same share",
    ),
    "the sampler of the local size": (
        [(SAMPLER, SAMPLER.replace("size, rank", "hvd.local_size(), hvd.local_rank()"))],
        "both ranks went through all images",
    ),
    "an incomplete batch": ([(LOADER, LOADER.replace(", drop_last=True", ""))], "drop_last=True for the DataLoader"),
    "nothing wrapped": ([(WRAP, "pass")], "DistributedOptimizer(optimizer"),
    "wrapped under another name": ([(WRAP, WRAP.replace("optimizer", "wrapped", 1))], "under the same name"),
    "parameters without names": (
        [(WRAP, WRAP.replace("named_parameters()", "parameters()"))],
        "named_parameters=model.named_parameters()",
    ),
    "the learning rate scaled": ([(LR, LR.replace("lr", "lr * size"))], "Examples of Horovod multiply it"),
    "gradients added": ([(WRAP, WRAP[:-1] + ", op=hvd.Sum)")], "takes the mean of the gradients"),
    "gradients rounded": ([(WRAP, WRAP[:-1] + ", compression=hvd.Compression.fp16)")], "to 16 bits"),
    "wrapped after the checkpoint is loaded": (
        [(WRAP, "pass"), (FIRST, f"    {WRAP}\n{FIRST}")],
        "place 3 stands before optimizer.load_state_dict",
    ),
    "no broadcast of the parameters": ([(PARAMETERS, "pass")], "draws weights of its own"),
    "the model itself is broadcast": ([(PARAMETERS, PARAMETERS.replace(".state_dict()", ""))], "model.state_dict()"),
    "no broadcast of the momentum": ([(STATE, "pass")], "hvd.broadcast_optimizer_state"),
    "root_rank=1": ([(PARAMETERS, PARAMETERS.replace("0", "1"))], "root_rank=0"),
    "root_rank=rank": ([(PARAMETERS, PARAMETERS.replace("0", "rank"))], "the same on all ranks: 0"),
    "broadcast by rank 0 alone": ([(PARAMETERS, f"if rank == 0:\n        {PARAMETERS}")], "in the same order"),
    "broadcast before the checkpoint is loaded": (
        [(PARAMETERS, "pass"), (LOAD, f"    {PARAMETERS}\n{LOAD}")],
        "rank 0 alone loads the checkpoint, and sends it to the others after that",
    ),
    "the first epoch is not broadcast": ([(FIRST, "")], "every rank has to know `first`"),
    "counts averaged": ([(SUM, SUM.replace(", op=hvd.Sum", ""))], "allreduce averages, unless op="),
    "counts not reduced": ([(SUM, "pass")], "the counts of rank 0 alone"),
    "the sum is dropped": ([(SUM, SUM.removeprefix("counts = "))], "in a new tensor"),
    "all ranks save": ([(SAVE, SAVE.replace(" and rank == 0", ""))], "every process saved"),
    "rank 1 saves": ([(SAVE, SAVE.replace("== 0", "== 1"))], "exactly one process saves"),
    "a name that was not given": (
        [
            (FOUND, f"args.checkpoint = args.checkpoint or Path('run.pt')\n    {FOUND}"),
            (SAVE, SAVE.replace("args.checkpoint and ", "")),
        ],
        "only then is there a name to save to",
    ),
    "all ranks print": ([("if rank == 0:\n            print", "if True:\n            print")], "leave `if rank == 0:`"),
    "a step more": ([(STEP, STEP * 2)], "leave the loop as it was"),
    "what the stand-in does not have": ([(INIT, INIT + "    hvd.SyncBatchNorm\n")], "and no more"),
    "a misspelt name": ([("sampler = D", "samples = D")], "assign it in the gap"),
    "an error": ([(INIT, INIT + "    1 / 0\n")], "mend what this line says"),
}


@pytest.mark.parametrize(("changes", "hint"), WRONG_SCRIPTS.values(), ids=WRONG_SCRIPTS)
def test_wrong_scripts_are_refused(write, changes, hint):
    assert hint in refuse("14.1", write(*changes))


PROVED = (
    "Your script runs in two processes, with a stand-in for Horovod ...\n"
    f"✔ 14.1 The Horovod script: {horovod_script.PROVED}\n"
)
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
    ],
    "objects, lists and no names": [
        (INIT, "    assert not hvd.is_initialized()\n    hvd.init()\n    assert hvd.local_size() == 1\n"),
        (WRAP, "optimizer = hvd.DistributedOptimizer(optimizer)"),
        (PARAMETERS, "model.load_state_dict(hvd.broadcast_object(model.state_dict()))"),
        (STATE, "optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), root_rank=0))"),
        (SUM, "counts = sum(hvd.allgather_object(counts))"),
    ],
    "the mean, times the ranks, and gathered by rows": [
        (PARAMETERS, "hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)"),
        (
            SUM,
            "rows = hvd.allgather(counts[None])\n        counts = hvd.allreduce(counts) * size\n"
            "        assert (rows.sum(0) == counts).all()",
        ),
        (STEP, "            optimizer.synchronize()\n            with optimizer.skip_synchronize():\n    " + STEP),
    ],
}


@pytest.mark.parametrize("changes", RIGHT_SCRIPTS.values(), ids=RIGHT_SCRIPTS)
def test_right_scripts_are_accepted(write, capsys, changes):
    settings = ("HOROVOD_RANK", "RANK", "LAB_DATA", "CUDA_VISIBLE_DEVICES")

    def look():
        return Path.cwd(), [os.environ.get(name) for name in settings], models.build, torch.manual_seed, list(sys.argv)

    before = look()
    check.exercise("14.1", write(*changes))
    assert capsys.readouterr().out == PROVED
    assert before == look()
    assert "horovod" not in sys.modules and not dist.is_initialized()


def test_a_script_with_gaps_or_none_is_not_run(write, tmp_path):
    with pytest.raises(OpenError, match=f"{NAME} has 5 places"):
        check.exercise("14.1", write(stub=True))
    with pytest.raises(LabError, match=r"no script 'nowhere\.py'"):
        check.exercise("14.1", "nowhere.py")
    with pytest.raises(LabError, match=r"where: train_horovod\.py, line"):
        check.exercise("14.1", write(("import torch\n", "import import torch\n")))


# The stand-in for Horovod

SAID = """
import sys
import warnings

import horovod.torch as hvd
import torch
from torch import nn


def note(make):
    try:
        found = make()
    except Exception as error:
        found = str(error)[:60]
    said.append(f"{len(said)} {found}")


def train(make, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(6, 3, generator=torch.Generator().manual_seed(hvd.rank()))
    for _ in range(3):
        optimizer.zero_grad()
        for part in images.chunk(options.get("backward_passes_per_step", 1)):
            model(part).pow(2).mean().backward()
        optimizer.step()
    note(lambda: [one.tolist() for one in model.parameters()])
    return model, optimizer, images


def send(optimizer):
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer.state_dict()


warnings.simplefilter("ignore")
said = []
note(hvd.rank)
note(hvd.is_initialized)
hvd.init()
rank = hvd.rank()
note(lambda: (hvd.is_initialized(), hvd.size()))
numbers = torch.tensor([1, -2, 6]) + rank
for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64):
    for op in (None, hvd.Average, hvd.Sum, hvd.Min, hvd.Max):
        note(lambda: hvd.allreduce(numbers.to(dtype), op=op))
note(lambda: hvd.allreduce(numbers, hvd.Sum))
note(lambda: hvd.allreduce(numbers, average=False))
note(lambda: hvd.allreduce(numbers, average=False, op=hvd.Sum))
note(lambda: hvd.allreduce_(numbers, op=hvd.Sum) is numbers)
note(lambda: hvd.grouped_allreduce([numbers, numbers]))
note(lambda: hvd.allgather(torch.full((rank + 1, 2), rank)))
note(lambda: (hvd.broadcast_object({"rank": rank}), hvd.allgather_object(rank)))
note(lambda: hvd.broadcast(torch.tensor(rank), root_rank=1))
model, optimizer, images = train(lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9))
train(lambda weights: torch.optim.Adam(weights, 0.1), op=hvd.Sum)
train(lambda weights: torch.optim.SGD(weights, 0.1), compression=hvd.Compression.fp16)
train(lambda weights: torch.optim.SGD(weights, 0.1), backward_passes_per_step=2)
note(lambda: hvd.broadcast_parameters(model.state_dict(), root_rank=0))
note(lambda: hvd.broadcast_parameters(model, root_rank=0))
for named in (model.parameters(), list(model.named_parameters())[1:], [("", one) for one in model.parameters()]):
    note(lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), named_parameters=named))
model(images).sum().backward()
note(optimizer.zero_grad)
optimizer.step()
plain = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
plain.load_state_dict(optimizer.state_dict())
note(lambda: hvd.DistributedOptimizer(plain).state_dict()["state"])
fresh = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), rank + 0.1, momentum=0.9))
if rank == 0:
    fresh.load_state_dict(optimizer.state_dict())
note(lambda: send(fresh))
note(lambda: hvd.broadcast(torch.ones(1), root_rank=rank))
with open(f"{sys.argv[1]}.{rank}", "w") as file:
    file.write("\\n".join(said))
"""


def test_the_stand_in_does_as_horovod_does(horovod, tmp_path):
    script = tmp_path / "said.py"
    script.write_text(SAID)

    def work(rank):
        group, dist.group.WORLD = dist.group.WORLD, None
        sys.modules.update(Horovod(group, local_rank=rank, local_size=2).make_modules())
        sys.argv = [str(script), str(tmp_path / "stand-in")]
        runpy.run_path(str(script))

    assert [one.error for one in fork_ranks(work, None, 2, limit=60)] == [None, None]
    command = [horovod.with_name("horovodrun"), "--gloo", "-np", "2", horovod, script, tmp_path / "real"]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    for rank in range(2):
        real, stand_in = ((tmp_path / f"{name}.{rank}").read_text().splitlines() for name in ("real", "stand-in"))
        assert stand_in == real


# 14.2


def configure(change=lambda config, addresses, index: config, dump=json.dumps):
    """A function as the exercise asks for, whose configuration is changed before it becomes text."""

    def write_tf_config(addresses, index):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        return dump(change(config, addresses, index))

    return write_tf_config


def put(part, **values):
    """Replaces some of a part, by what a function of the addresses and the index gives."""

    def change(config, addresses, index):
        found = {key: make(addresses, index) for key, make in values.items()}
        return config | {part: {**config[part], **found}}

    return configure(change)


def own_first(addresses, index):
    return [addresses[index], *(one for one in addresses if one != addresses[index])]


WRONG_CONFIGS = {
    "nothing": (configure(dump=lambda config: None), "return the text"),
    "a dictionary": (configure(dump=dict), "json.dumps(...)"),
    "single quotes": (configure(dump=str), "with double quotes"),
    "dumped twice": (configure(dump=lambda config: json.dumps(json.dumps(config))), "json.dumps once"),
    "the parts dumped": (
        configure(dump=lambda config: json.dumps({key: json.dumps(part) for key, part in config.items()})),
        '"cluster" says where all workers are',
    ),
    "no task": (configure(lambda config, *_: {"cluster": config["cluster"]}), "which of the workers this one is"),
    "no cluster": (configure(lambda config, *_: {"task": config["task"]}), "where all workers are"),
    "one string": (put("cluster", worker=lambda addresses, _: ",".join(addresses)), "a list of addresses"),
    "its own address": (put("cluster", worker=lambda addresses, index: [addresses[index]]), "has to know all workers"),
    "the other ones": (put("cluster", worker=lambda a, i: [one for one in a if one != a[i]]), "is in the list, too"),
    "its own first": (put("cluster", worker=own_first), "all workers need it in the same order"),
    "no ports": (put("cluster", worker=lambda a, _: [one.split(":")[0] for one in a]), "the port belongs to"),
    "URLs": (put("cluster", worker=lambda a, _: [f"grpc://{one}" for one in a]), "all addresses, as they are"),
    "a parameter server": (put("cluster", ps=lambda addresses, _: addresses[:1]), "another strategy"),
    "a chief in the cluster": (put("cluster", chief=lambda addresses, _: addresses[:1]), "worker 0 does what a chief"),
    "workers": (
        configure(lambda config, addresses, _: config | {"cluster": {"workers": addresses}}),
        "no 'workers'",
    ),
    "worker 0 is a chief": (put("task", type=lambda _, index: "worker" if index else "chief"), "of worker 0 also"),
    "no type": (configure(lambda config, _, index: config | {"task": {"index": index}}), "the name of the list"),
    "the index as text": (put("task", index=lambda _, index: str(index)), "without quotes"),
    "from 1": (put("task", index=lambda _, index: index + 1), "counts from 0"),
}


@pytest.mark.parametrize(("answer", "hint"), WRONG_CONFIGS.values(), ids=WRONG_CONFIGS)
def test_wrong_configurations_are_refused(answer, hint):
    assert hint in refuse("14.2", answer)


RIGHT_CONFIGS = {
    "as in the lab": configure(),
    "indented, sorted": configure(dump=lambda config: "\n" + json.dumps(config, indent=4, sort_keys=True) + "\n"),
    "put together by hand": lambda addresses, index: (
        '{"task":{"index":' + str(index) + ',"type":"worker"},"cluster":{"worker":["' + '", "'.join(addresses) + '"]}}'
    ),
    "a protocol, too": configure(lambda config, *_: config | {"rpc_layer": "grpc"}),
}


@pytest.mark.parametrize("answer", RIGHT_CONFIGS.values(), ids=RIGHT_CONFIGS)
def test_right_configurations_are_accepted(answer, capsys):
    check.exercise("14.2", answer)
    assert capsys.readouterr().out == f"✔ 14.2 TF_CONFIG: {tf_config.PROVED}\n"


def test_an_error_of_the_answer_s_own_counts_as_no_try():
    with pytest.raises(OpenError, match="ZeroDivisionError"):
        check.exercise("14.2", lambda addresses, index: 1 / 0)
    with pytest.raises(OpenError, match="is not JSON serializable"):
        check.exercise("14.2", configure(lambda config, *_: {**config, "task": {1, 2}}))
