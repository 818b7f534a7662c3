"""The checks of lab 5 refuse mistakes, accept right answers, and leave nothing (wrong values: test_check_tables.py)."""

import ast
import re
import secrets
import shutil
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness.answers import load_answer, refuse_edited, write_script
from harness.jobs import hear_listeners
from torch.nn import functional as F

from course import check
from course.check import NotYetError, OpenError
from course.exercises import precautions, script_runs
from course.exercises.lab5 import commands, ddp_script
from lab_common import LabError
from nodelaunch.node.probe import find_free_port
from nodelaunch.result import Failure, JobResult

pytestmark = pytest.mark.usefixtures("runs")


def refuse(judging, *arguments):
    with pytest.raises(NotYetError) as refused:
        judging(*arguments)
    assert refused.value.yours and refused.value.expected
    return refused.value.hint


# 5.1


@pytest.fixture
def write(root, tmp_path, monkeypatch):
    """A function that writes the lab's script with some of its text replaced, beside the one that watches it."""
    shutil.copy(root / "notebooks" / "scripts" / "observed.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return partial(write_script, tmp_path, "train_ddp.py")


@pytest.fixture(scope="module")
def right(root, tmp_path_factory, warm_up):
    """The result of the lab's own script."""
    with pytest.MonkeyPatch.context() as patch:
        warm_up(patch)
        return ddp_script._run(root / "notebooks" / "scripts" / "train_ddp.py", tmp_path_factory.mktemp("right"))


def test_a_script_that_cannot_be_read_is_named(write, tmp_path, count_runs):
    path = tmp_path / write()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(LabError, match=r"train_ddp\.py"):
        check.exercise("5.1", str(path))
    assert not count_runs


def test_a_script_with_gaps_is_not_run(write, count_runs, tmp_path):
    with pytest.raises(LabError, match=r"train_ddp.py has 5 places left to fill in") as caught:
        check.exercise("5.1", write(stub=True))
    lines = (tmp_path / "train_ddp.py").read_text().splitlines()
    places = [number for number, line in enumerate(lines, 1) if "YOUR CODE HERE" in line]
    assert caught.value.where == "line " + ", ".join(str(number + 1) for number in places)
    assert sorted(re.findall(r"# Place (\d): ", "\n".join(lines))) == list("12345")
    with pytest.raises(LabError, match=r"no script 'nowhere\.py'"):
        check.exercise("5.1", "nowhere.py")
    with pytest.raises(LabError, match=r"where: train_ddp\.py, line \d+: dist\.all_reduce"):
        check.exercise("5.1", write(("dist.all_reduce(counts)\n", "dist.all_reduce(counts\n")))
    assert not count_runs


DEVICE = 'torch.device("cuda", local_rank) if cuda else torch.device("cpu")'
BY_LOCAL_RANK = "    if cuda:\n        torch.cuda.set_device(local_rank)\n"
FIND = 'def find():\n    return int(os.environ["LOCAL_RANK"])'
INIT = "dist.init_process_group(backend, timeout=timedelta(minutes=2), device_id=device_id)"
SET_DEVICE = "    if cuda:\n        torch.cuda.set_device(device)\n"
SAMPLER = "sampler = DistributedSampler(train, drop_last=True)"
LOADER = "loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)"
WRAP = "model = DDP(model, device_ids=[local_rank] if cuda else None)"
SAVE = """        if args.checkpoint and rank == 0:
            torch.save(state, args.checkpoint.with_suffix(".new"))
            args.checkpoint.with_suffix(".new").replace(args.checkpoint)  # a crash leaves the old one or the new
"""
ALWAYS = "        if rank == 0:\n            torch.save(state, args.checkpoint)\n"
# Not wrong where every rank comes by, and a hang where only one does.
BARRIER = "        dist.barrier()\n"


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ((INIT, "pass"), "init_process_group reads them"),
        ((INIT, "dist.init_process_group(backend)"), "without it the others wait 10 minutes"),
        (('os.environ["LOCAL_RANK"]', "dist.get_rank()"), "RANK counts over all nodes"),
        ((SAMPLER, SAMPLER.replace("train,", "train, 2, rank,")), "leave num_replicas out"),
        ((SAMPLER, SAMPLER.replace("train,", "dataset.train,")), "train, and not dataset.train"),
        ((INIT, INIT.replace("minutes=2", "60 * 2")), "its first number counts days"),
        ((SET_DEVICE, ""), "current one, GPU 0"),
        ((SAVE, "        pass\n"), "rank == 0: torch.save"),
        ((SAVE, ALWAYS), "only then is there a name"),
        (('("nccl", device) if cuda else ("gloo", None)', '"gloo", None'), "nccl is made for GPUs"),
        ((DEVICE, 'torch.device("cuda:0" if cuda else "cpu")'), '"cuda:0" is the same GPU'),
    ],
)
def test_missing_precautions_are_seen_without_a_run(write, count_runs, change, hint):
    assert hint in refuse(check.exercise, "5.1", write(change))
    assert not count_runs


def test_a_model_that_never_reaches_a_gpu_is_seen_without_a_run(write):
    hint = refuse(check.exercise, "5.1", write((DEVICE, 'torch.device("cpu")'), (SET_DEVICE, BY_LOCAL_RANK)))
    assert 'torch.device("cuda", local_rank) if cuda' in hint


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [(DEVICE, '"cuda:" + os.environ["LOCAL_RANK"] if cuda else "cpu"')],
        [(SET_DEVICE, ""), (DEVICE, f'torch.device("cuda" if cuda else "cpu")\n{BY_LOCAL_RANK}')],
        [('int(os.environ["LOCAL_RANK"])', "dist.get_node_local_rank()")],
        [(SET_DEVICE, "    torch.cuda.set_device(find())\n"), ("def main", f"{FIND}\n\n\ndef main")],
        [(DEVICE, 'torch.device("cuda:0")\n    os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)')],
    ],
)
def test_precautions_are_accepted_however_they_are_written(write, tmp_path, changes):
    precautions.expect_precautions(ast.parse((tmp_path / write(*changes)).read_text()))


@pytest.mark.usefixtures("warm_ranks")
def test_another_right_script_with_the_stub_s_comments_is_accepted(write, capsys):
    changes = [
        (INIT, "dist.init_process_group(timeout=timedelta(seconds=99))"),
        (SAMPLER, "sampler = DistributedSampler(train, world_size, rank, drop_last=True, seed=7)"),
        (
            LOADER,
            "loader = DataLoader(train, batch_sampler=BatchSampler(sampler, args.batch_size, True), num_workers=1)",
        ),
        ("Subset\n\n", "BatchSampler, Subset\n\n"),
        (WRAP, WRAP.replace("[local_rank]", "[rank % torch.cuda.device_count()]")),
        ("loss = F.cross_entropy(model(", "loss = torch.nn.CrossEntropyLoss()(model("),
        (
            "        dist.all_reduce(counts)\n",
            "        # YOUR CODE HERE\n        dist.reduce(counts, 0)\n        dist.broadcast(counts, 0)\n",
        ),
        (SAVE, "        first = dist.get_rank() == 0\n" + SAVE.replace("rank == 0", "first") + BARRIER),
        ("torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)", "torch.optim.Adam(model.parameters())"),
    ]
    check.exercise("5.1", write(*changes, name="my script.py"))
    assert "\n✔ 5.1" in capsys.readouterr().out


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ([(WRAP, "pass")], "model = DDP(model), under the same name"),
        (
            [
                (WRAP, "bare, model = model, DDP(model)"),
                ("cross_entropy(model(images.to", "cross_entropy(bare(images.to"),
            ],
            "the forward pass has to run through DDP(model)",
        ),
        ([(SAVE, SAVE.replace("rank == 0", "local_rank == 0"))], "every process saved"),
        ([(SAVE, SAVE + "    " + BARRIER)], "none of them may stand in `if rank == 0`"),
    ],
)
def test_wrong_scripts_get_their_hint(write, count_runs, monkeypatch, changes, hint):
    monkeypatch.setattr(ddp_script, "HANG_SECONDS", 6)
    assert hint in refuse(check.exercise, "5.1", write(*changes))
    assert len(count_runs) == 1


def test_the_lab_s_own_script_is_accepted(write, right, monkeypatch, capsys):
    monkeypatch.setattr(ddp_script, "_run", lambda *_: right)
    check.exercise("5.1", write())
    assert "\n✔ 5.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("RuntimeError: Default process group has not been initialized", "comes first"),
        ("AttributeError: 'NoneType' object has no attribute 'tolist'", "returns None: assign nothing"),
        ("AttributeError: 'Net' object has no attribute 'module'", "model = DDP(model), under the same name"),
        ("RuntimeError: ProcessGroupNCCL is only supported with GPUs", "only if torch.cuda.is_available()"),
        ("NameError: name 'loader' is not defined", "assign it in the gap"),
    ],
)
def test_errors_of_a_script_get_their_hint(right, message, hint):
    failure = Failure("exception", "Rank 0 failed", rank=0, message=message, location="train_ddp.py, line 5")
    assert hint in refuse(ddp_script._expect_end, replace(right.job, failure=failure))


def test_wrong_shares_get_their_hint(right):
    halves = [rank["images"] for rank in right.job.results]
    batches = [[*range(start, start + 16)] for start in range(0, 112, 16)]
    short = [*range(112, 127)]
    for images, hint in [
        (lambda rank, own: batches + batches, "both ranks went through all images"),
        (lambda rank, own: halves[0], "both ranks got the same share"),
        (lambda rank, own: [[] for _ in own], "args.batch_size is of each process"),
        (lambda rank, own: [*own[:3], short, *own[3:], short], "drop_last=True for the DataLoader"),
        (lambda rank, own: [*own[:3], own[0], *own[3:], own[1]], "drop_last=True for the DistributedSampler"),
        (lambda rank, own: [*own[:-1], halves[0][3]], "divides the images"),
        (lambda rank, own: own[:3] * 2, "set_epoch(epoch) before each epoch"),
        (lambda rank, own: batches[rank:6:2] * 2, "shuffle=False"),
    ]:
        taken = [images(rank, own) for rank, own in enumerate(halves)]
        assert hint in refuse(script_runs.expect_images, taken), hint


def test_wrong_gradients_and_weights_get_their_hint():
    weights, alone = {"w": torch.ones(2)}, [{"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([3.0, 5.0])}]
    mean = {"w": torch.tensor([2.0, 4.0])}
    good = {"weights": weights, "gradients": mean}
    script_runs.expect_gradients([good, good], alone, "step 1")
    others = [good, good | {"weights": {"w": torch.ones(2) + 1e-6}}]
    assert "a model of its own" in refuse(script_runs.expect_gradients, others, alone, "step 1")
    for gradients, hint in (
        ({"w": 2 * mean["w"]}, "this is the sum"),
        ({"w": mean["w"] / 2}, "has divided by the ranks already"),
        ({"w": 1.1 * mean["w"]}, "leave it to DDP"),
        ({}, "leave it to DDP"),
    ):
        states = [good | {"gradients": gradients}, good]
        assert hint in refuse(script_runs.expect_gradients, states, alone, "step 1"), hint
    states = [good | {"gradients": own} for own in alone]
    assert "this rank's own images" in refuse(script_runs.expect_gradients, states, alone, "step 1")


def test_wrong_counts_get_their_hint(right):
    silent = replace(right.job, results=(right.job.results[0], None))
    assert "come to its end on every rank" in refuse(ddp_script._expect_end, silent)
    printed = [line for line in right.job.lines if "] epoch " in line]
    assert len(printed) == 2
    for lines, hint in [
        ([line.replace("on 21 images", "on 11 images") for line in printed], "dist.all_reduce(counts), once"),
        ([re.sub(r"loss \S+,", "loss 2.0000,", line) for line in printed], "dist.all_reduce(counts), once"),
        (printed[:1], "dist.all_reduce(counts), once"),
        ([*printed, printed[0].replace("[rank 0]", "[rank 1]")], "leave `if rank == 0:`"),
    ]:
        runs = replace(right, job=replace(right.job, lines=tuple(lines)))
        assert hint in refuse(ddp_script._expect_counts, runs), hint


def test_wrong_checkpoints_get_their_hint(tmp_path):
    weights, path = {"w": torch.ones(2)}, tmp_path / "run.pt"
    state = {"model": weights, "optimizer": {"state": {}}, "epoch": 2}
    torch.save(state, path)
    script_runs.expect_state(path, weights, 2)
    for changed, hint in (
        ({"epoch": 1}, "the last one too"),
        ({"model": {"w": torch.zeros(2)}}, "the last one too"),
        ({"model": {"module.w": weights["w"]}}, "names have no 'module.'"),
        ({"model": {}}, "as it was put together"),
        ({"optimizer": {}}, "the optimizer's momentum"),
    ):
        torch.save(state | changed, path)
        assert hint in refuse(script_runs.expect_state, path, weights, 2), hint
    path.write_bytes(b"no checkpoint")
    assert "torch.save(state" in refuse(script_runs.expect_state, path, weights, 2)


# 5.2

MEET = "--master-addr=127.0.0.1 --master-port=29555"
SCRIPT = "scripts/train_ddp.py --images 64"


def type_static(node, *, meet=MEET, nodes="--nnodes=2", each="--nproc-per-node=1", script=SCRIPT, before=""):
    return f"{before}torchrun {nodes} {each} {meet} --node-rank={node} {script}".replace("  ", " ")


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (None, "return ["),
        ([type_static(0), type_static(0)], "the nodes are numbered from 0"),
        ([type_static(0, nodes=""), type_static(1)], "a job of its own, on one node"),
        ([type_static(0), type_static(1, meet=MEET.replace("55", "56"))], "the address and the port of the first node"),
        ([type_static(0), type_static(1, meet="--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29555")], "the same way"),
        ([type_static(0), type_static(1, script="scripts/train_single.py")], "every rank is the same program"),
        ([type_static(0, each="--nproc-per-node=2"), type_static(1)], "one per device"),
        ([type_static(0), f"torchrun --nnodes=2 {MEET} {SCRIPT} --node-rank 1"], "stand before the script"),
        (["cd notebooks && " + type_static(0), type_static(1)], "no `cd` and no `export`"),
        ([type_static(0, nodes="--nodes=2"), type_static(1)], "torchrun --help"),
        ([type_static(0) + " '", type_static(1)], "no partner"),
    ],
)
def test_wrong_commands_get_their_hint_without_a_run(typed, hint, count_runs):
    assert hint in refuse(check.exercise, "5.2", lambda: typed)
    assert not count_runs


@pytest.fixture
def said(monkeypatch, root):
    """A function that sets the output of the two commands, without running them; returns the jobs and their scripts."""
    monkeypatch.chdir(root / "notebooks")

    def said(*lines, ok=False, kind="exit"):
        started = []

        def run(job, **options):
            started.append((job, job.spec.script.read_text().splitlines()))
            failure = None if ok else Failure(kind, "Rank 0 ended with exit status 1", message="ChildFailedError")
            return JobResult(ok, (), (), failure, (), {}, {}, root, lines)

        monkeypatch.setattr(commands.launch.TorchrunJob, "run", run)
        return started

    return said


EPOCH = "[rank 0] epoch 1: loss 2.3, accuracy 0.1 on 64 images"
RIGHT_COMMANDS = (type_static(0), type_static(1))


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("NotImplementedError: Replace this line", "first exercise 5.1"),
        ("python: can't open file '/labs/train_ddp.py'", "as seen from the notebook's folder"),
        ("train_ddp.py: error: unrecognized arguments: --batch", "lists what the script takes"),
        ("The server socket has failed: EADDRINUSE", "take another port"),
        ("RuntimeError: [...] Unable to find address for: eth9", "its interface lo"),
        ("TimeoutError: timed out after 60 s", "did not answer at this address in time"),
    ],
)
def test_commands_that_fail_get_their_hint(said, line, hint):
    said(line)
    assert hint in refuse(check.exercise, "5.2", lambda: RIGHT_COMMANDS)


def test_an_end_that_is_late_and_an_abort_after_the_training(said, capsys):
    said(EPOCH, kind="limit")
    assert "both met and train, but not to the end" in refuse(check.exercise, "5.2", lambda: RIGHT_COMMANDS)
    said(EPOCH, f"[rank 1] {commands.ENDING}", ok=False)  # no slip of the learner's
    check.exercise("5.2", lambda: RIGHT_COMMANDS)
    assert "✔ 5.2" in capsys.readouterr().out
    said(f"[rank 1] {commands.ENDING}", ok=False)
    assert "the log has" in refuse(check.exercise, "5.2", lambda: RIGHT_COMMANDS)
    said(ok=True)
    assert "at least one epoch" in refuse(check.exercise, "5.2", lambda: RIGHT_COMMANDS)


def test_commands_run_as_they_were_typed(said, root, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/where/the/packages/are")
    started = said(EPOCH, ok=True)
    own = "CUDA_VISIBLE_DEVICES= GLOO_SOCKET_IFNAME=lo python -m torch.distributed.run --nnodes 2"
    meet = "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29555"
    check.exercise("5.2", lambda: [f"{run} {meet} \\\n {SCRIPT}" for run in (own, own.replace("-m", "-u -m"))])
    ((job, lines),) = started
    assert lines[0] == 'unset "${!PET_@}" MASTER_ADDR MASTER_PORT' and lines[2] == f"cd {root}/notebooks"
    for line in lines[3:]:
        # The agent is torchrun, with stores that listen at the address that is given only.
        before = "env CUDA_VISIBLE_DEVICES= GLOO_SOCKET_IFNAME=lo"
        assert f"{before} {sys.executable} -m nodelaunch.node.agent --nnodes 2" in line
        assert SCRIPT in line
    assert job.spec.env["PYTHONPATH"] == "/where/the/packages/are" and job.spec.env["CUDA_VISIBLE_DEVICES"] == ""


def test_commands_of_other_spellings_are_accepted(said):
    started = said(EPOCH, ok=True)
    check.exercise(
        "5.2", lambda: [type_static(n, before="A=1 /x/bin/", nodes="--nnodes=2:2") + "  # n" for n in (0, 1)]
    )
    assert all(line.rstrip("; fi").endswith("--images 64") for line in started[0][1][3:])


def test_two_commands_meet_and_train(root, monkeypatch, capsys, survivors, count_runs):
    """Runs them for real, closed to other machines. Nothing is left, even if one waits for the other in vain."""
    monkeypatch.chdir(root / "notebooks")
    mark = f"LAB_TEST={secrets.token_hex(8)}"
    monkeypatch.setenv(*mark.split("="))
    meet = f"--master-addr=127.0.0.1 --master-port={find_free_port()}"
    monkeypatch.setattr(commands, "SECONDS", 300)  # on a busy machine
    with hear_listeners(mark) as heard:
        check.exercise(
            "5.2", lambda: [type_static(node, meet=meet, script=SCRIPT + " --batch-size 16") for node in (0, 1)]
        )
        assert capsys.readouterr().out == (
            "Both commands run on this machine, on its processor ...\n"
            "✔ 5.2 Two commands: both nodes joined, and only rank 0 printed the result\n"
        )
        monkeypatch.setattr(commands, "SECONDS", 12)
        elsewhere = [type_static(node, meet="--master-addr=203.0.113.7 --master-port=29555") for node in (0, 1)]
        assert "both nodes are this machine" in refuse(check.exercise, "5.2", lambda: elsewhere)
    assert [survivors(job) for job in count_runs] == [[], []]
    assert len(heard) >= 3, heard  # the store, and Gloo on both ranks
    assert all(address.startswith("127.") for address, _ in heard), heard


# 5.3 and 5.4

FORGOTTEN = "len(orders) > 1 and all(order == orders[0] for order in orders[1:])"
SYNC = "model.no_sync() if number < len(micro_batches) else torch.enable_grad()"
BACK = "            (loss / len(micro_batches)).backward()\n    optimizer.step()"
ZERO = "optimizer.zero_grad()"
FORWARD = "loss = torch.nn.functional.cross_entropy(model(images), labels)"
REDUCE = "[torch.distributed.all_reduce(one.grad.div_(2)) for one in model.parameters()]"
TOTAL = "            total = loss / len(micro_batches) + (total if number > 1 else 0)\n    total.backward()"


@pytest.mark.parametrize(
    ("number", "old", "new", "hint"),
    [
        ("5.3", FORGOTTEN, "False", "every epoch has the same order"),
        ("5.3", FORGOTTEN, "True", "the orders differ"),
        ("5.3", FORGOTTEN, "sorted(orders[0]) == sorted(orders[-1])", "compare the lists themselves"),
        ("5.3", FORGOTTEN, "len({order[0] for order in orders}) == 1 < len(orders)", "compare whole orders"),
        ("5.3", FORGOTTEN, "len(orders) > 1 and orders[0] == orders[1]", "compare all epochs with the first"),
        ("5.3", FORGOTTEN, "len(orders) > 1 and orders[0] == orders[-1]", "compare all epochs"),
        ("5.3", "len(orders) > 1 and ", "", "one epoch is not enough to decide"),
        ("5.3", FORGOTTEN, "(torch.tensor(orders) == torch.tensor(orders[0])).all()", "bool(...)"),
        ("5.4", SYNC, "torch.enable_grad()", "all micro-batches but the last"),
        ("5.4", SYNC, "model.no_sync()", "through model, outside"),
        ("5.4", SYNC, SYNC.replace("number < len(micro_batches)", "number > 1"), "send in the last pass"),
        ("5.4", f"    {ZERO}\n", "", "the gradients of this step alone"),
        ("5.4", SYNC + ":", f"{SYNC}:\n            {ZERO}", "only the last micro-batch counts"),
        ("5.4", BACK, BACK.replace("    opt", "        opt"), "once, after the last micro-batch"),
        ("5.4", BACK, f"{TOTAL}\n    optimizer.step()", "frees that pass's activations"),
        ("5.4", "    optimizer.step()", f"    {REDUCE}\n    optimizer.step()", "no collective of your own"),
        ("5.4", f"{FORWARD}\n{BACK}", "pass\n    optimizer.step()", "each followed by its backward()"),
    ],
)
def test_an_edited_solution_is_refused_with_its_hint(number, old, new, hint):
    assert hint in refuse_edited(number, (old, new))
    assert not dist.is_initialized()


def accumulate_and_clear_at_the_end(model, micro_batches, optimizer):
    *silent, (images, labels) = micro_batches
    with model.no_sync():
        for early, truth in silent:
            (F.cross_entropy(model(early), truth) / len(micro_batches)).backward()
    (F.cross_entropy(model(images), labels) / len(micro_batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("5.3", lambda orders: len(orders) > 1 and len({tuple(order) for order in orders}) == 1),
        ("5.3", lambda orders: len(orders) > 1 and bool((torch.tensor(orders) == torch.tensor(orders[0])).all())),
        ("5.4", accumulate_and_clear_at_the_end),
    ],
)
def test_right_answers_get_the_tick(number, answer, capsys):
    check.exercise(number, answer)
    assert capsys.readouterr().out.startswith(f"✔ {number} ")


def test_silent_passes_without_the_wrapper_are_right():
    silent = FORWARD.replace("model(", "(model.module if number < len(micro_batches) else model)(")
    check.exercise("5.4", load_answer("5.4", (FORWARD, silent), (SYNC, "torch.enable_grad()")))


def test_an_error_leaves_no_open_group():
    with pytest.raises(OpenError, match="ZeroDivisionError"):
        check.exercise("5.4", load_answer("5.4", (ZERO, "1 / 0")))
    assert not dist.is_initialized()
