"""Each check of lab 5 refuses typical wrong answers with the hint that fits, accepts right ones, and leaves nothing."""

import copy
import math
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from course import check
from course.check import NotYetError, OpenError
from course.exercises.lab5 import ddp_script
from course.workspace import make_script_stub
from lab_common import LabError
from lab_utils.training import Checkpoints

pytestmark = pytest.mark.usefixtures("runs")


def refuse(number, answer):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert refused.value.yours and refused.value.expected
    return refused.value.hint


# 5.1, with real processes


@pytest.fixture
def write(root, tmp_path, monkeypatch):
    """A function that writes the lab's script with some of its text replaced, beside the single-process script."""
    scripts = root / "notebooks" / "scripts"
    shutil.copy(scripts / "train_single.py", tmp_path)
    monkeypatch.chdir(tmp_path)

    def write(*changes, name="train_ddp.py", stub=False):
        source = (scripts / "train_ddp.py").read_text()
        source = make_script_stub(source) if stub else source
        for old, new in changes:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        (tmp_path / name).write_text(source)
        return name

    return write


@pytest.fixture
def count_runs(monkeypatch):
    """The ids of the jobs that a check ran."""
    ids, run = [], ddp_script.launch.TorchrunJob.run

    def note(job, **options):
        try:
            return run(job, **options)
        finally:
            ids.append(job.id)  # the next run has another

    monkeypatch.setattr(ddp_script.launch.TorchrunJob, "run", note)
    return ids


@pytest.fixture(scope="module")
def right(root, tmp_path_factory):
    """What the lab's own scripts give."""
    return ddp_script._run_both(root / "notebooks" / "scripts" / "train_ddp.py", tmp_path_factory.mktemp("right"))


@pytest.fixture
def same_reference(right, monkeypatch):
    """The single-process script gives the same bits each time (test_lab5_scripts.py): here it is not run again."""

    @contextmanager
    def reuse(_script, _arguments, folder, _env):
        shutil.copytree(right.saved_alone, folder / "checkpoints")
        yield lambda: copy.deepcopy(right.alone)

    monkeypatch.setattr(ddp_script, "_run_alone", reuse)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x = 1\0", b"#" * 10_000_000, b"(" * 100_000], ids=range(4))
def test_a_script_that_cannot_be_read_is_named(tmp_path, count_runs, content):
    path = tmp_path / "train_ddp.py"
    path.write_bytes(content)
    with pytest.raises(LabError) as caught:
        check.exercise("5.1", str(path))
    assert "train_ddp.py" in str(caught.value) and not count_runs


def test_a_script_with_gaps_is_not_run(write, count_runs, tmp_path):
    with pytest.raises(LabError, match=r"train_ddp.py has 5 places left to fill in") as caught:
        check.exercise("5.1", write(stub=True))
    lines = (tmp_path / "train_ddp.py").read_text().splitlines()
    places = [number for number, line in enumerate(lines, 1) if "YOUR CODE HERE" in line]
    assert caught.value.where == "line " + ", ".join(str(number + 1) for number in places)
    assert sorted(re.findall(r"# Place (\d): ", "\n".join(lines))) == list("12345")
    filled = "dist.all_reduce(counts)  # NEW\n"
    stub = "raise NotImplementedError("
    with pytest.raises(LabError, match="has 1 place left"):
        check.exercise("5.1", write((filled, stub + ")\n")))
    with pytest.raises(LabError, match=r"no script 'nowhere\.py'"):
        check.exercise("5.1", "nowhere.py")
    with pytest.raises(LabError, match=r"where: train_ddp\.py, line \d+: dist\.all_reduce"):
        check.exercise("5.1", write((filled, "dist.all_reduce(counts\n")))
    assert not count_runs


INIT = "dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=device_id)  # NEW"
SET_DEVICE = "    if cuda:  # NEW\n        torch.cuda.set_device(device)  # NEW\n"
SAVE = "                if checkpoints and rank == 0:  # NEW\n                    checkpoints.save(step, state)\n"
# Not wrong where every rank comes by, and a hang where only one does.
BARRIER = "                dist.barrier()\n"


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ((INIT, "pass"), "init_process_group reads them"),
        ((INIT, 'dist.init_process_group("gloo")'), "without it the others wait 10 minutes"),
        (('os.environ["LOCAL_RANK"]', "dist.get_rank()"), "look for a third GPU"),
        ((SET_DEVICE, ""), "current one, GPU 0"),
        ((SAVE, ""), "if rank == 0: checkpoints.save"),
    ],
)
def test_missing_precautions_are_seen_without_a_run(write, count_runs, change, hint):
    assert hint in refuse("5.1", write(change))
    assert not count_runs


def test_the_lab_s_own_script_gets_the_tick(write, capsys):
    check.exercise("5.1", write())
    assert capsys.readouterr().out == (
        "Your script runs on two local nodes, and train_single.py beside it ...\n"
        "✔ 5.1 The DDP script: two processes with your script: gradients, weights and losses equal one process's "
        "on the union batch; every image once per epoch\n"
    )
    assert not dist.is_initialized()


@pytest.mark.usefixtures("same_reference", "warm_ranks")
def test_another_right_script_with_the_stub_s_comments_is_accepted(write, capsys):
    changes = [
        ("    dist.init_process_group(backend, timeout", "    dist.init_process_group(timeout"),
        (
            "    dist.all_reduce(counts)  # NEW\n",
            "    # YOUR CODE HERE\n    dist.reduce(counts, 0)\n    dist.broadcast(counts, 0)\n",
        ),
        (SAVE, "                first = dist.get_rank() == 0\n" + SAVE.replace("rank == 0", "first") + BARRIER),
    ]
    check.exercise("5.1", write(*changes, name="my script.py"))
    assert "\n✔ 5.1" in capsys.readouterr().out


@pytest.mark.usefixtures("same_reference")
@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (("    model = DDP(model)  # NEW\n", "    pass\n"), "model = DDP(model), under the same name"),
        ((SAVE, SAVE.replace("rank == 0", "local_rank == 0")), "every process saved"),
        (("batches.set_epoch(epoch, start=position)", "pass"), "the first epoch is right, and the next is not"),
        (('    share = {"device"', '    shares = {"device"'), "assign it in the gap"),
        ((SAVE, SAVE + "    " + BARRIER), "none of them may stand in `if rank == 0`"),
    ],
)
def test_wrong_scripts_get_their_hint(write, count_runs, survivors, monkeypatch, request, change, hint):
    if "`if rank == 0`" not in hint:  # where the ranks hang, what is left of them is looked for
        request.getfixturevalue("warm_ranks")
    monkeypatch.setattr(ddp_script, "HANG_SECONDS", 6)
    found = refuse("5.1", write(change))
    assert hint in found
    assert len(count_runs) == 1
    assert survivors(count_runs[0]) == []


# 5.1, with what a right run gave, altered


@pytest.fixture
def alter(right, write, monkeypatch):
    """A function that puts altered runs in the place of the check's own, and returns the script's name."""

    def alter(*, ranks=(0, 1), report=None, **changes):
        results = copy.deepcopy(right.job.results)
        for rank in ranks:
            results[rank].update(report or {})
        runs = replace(right, **({"job": replace(right.job, results=results)} | changes))
        monkeypatch.setattr(ddp_script, "_run_both", lambda *_: runs)
        return write()

    return alter


def test_what_a_right_run_gave_is_accepted_again(alter, capsys):
    check.exercise("5.1", alter())
    assert "\n✔ 5.1" in capsys.readouterr().out


def nudge(values, step, by=1e-8):
    return [value + (by if number == step else 0) for number, value in enumerate(values)]


def test_wrong_reports_get_their_hint(alter, right):
    losses = right.alone["losses"]
    for report, hint in [
        ({"seen": [[0, 0, 96]] * 2, "images": 384}, "both ranks went through all images"),
        # As after dist.all_reduce(counts.clone()), and with "rank": local_rank.
        ({"seen": [[48, 48]] * 2, "images": 96}, "only this rank's half"),
        ({"seen": [[48, 0, 48]] * 2, "images": 192}, "both ranks got the same half"),
        ({"images": 96}, "dist.all_reduce(counts), once"),
        ({"seen": [[0, 96], [0, 0, 96]]}, "dist.all_reduce(counts), once"),
        ({"losses": nudge(losses, 0)}, "the same seed on every rank"),
        ({"losses": nudge(losses, 1)}, "average the gradients"),
        ({"losses": nudge(losses, 3)}, "set_epoch"),
        ({"losses": losses[:-1]}, "set_epoch"),
        ({"losses": nudge(losses, 2, math.nan)}, "average the gradients"),
    ]:
        assert hint in refuse("5.1", alter(report=report)), report
    assert "a model of its own" in refuse("5.1", alter(ranks=[1], report={"sha256": "0" * 64}))
    results = (right.job.results[0], None)
    assert "launch.report" in refuse("5.1", alter(job=replace(right.job, results=results)))


def test_wrong_checkpoints_get_their_hint(alter, right, tmp_path):
    (step, state), (first, second) = Checkpoints(right.saved["node0"]).load(), right.saved.values()
    weights, gradients = state["model"], state["gradients"]
    for number, (step_of_it, changed, hint) in enumerate(
        [
            (step + 1, {}, "at the end of each epoch"),
            (step, {"model": {f"module.{name}": value for name, value in weights.items()}}, "without 'module.'"),
            (step, {"model": {name: value + 1e-9 for name, value in weights.items()}}, "after the step"),
            (step, {"gradients": [gradient * 2 for gradient in gradients]}, "before the next zero_grad"),
            (step, {"gradients": None}, "as it was put together"),
        ]
    ):
        folder = tmp_path / str(number)
        changed = {name: value for name, value in {**state, **changed}.items() if value is not None}
        Checkpoints(folder).save(step_of_it, changed)
        assert hint in refuse("5.1", alter(saved={"node0": folder, "node1": second})), hint
    assert "exactly one process saves" in refuse("5.1", alter(saved={"node0": second, "node1": first}))
    assert "exactly one process saves" in refuse("5.1", alter(saved={"node0": second, "node1": second}))


def test_a_broken_reference_is_not_the_learner_s_fault(write, tmp_path):
    name = write()
    (tmp_path / "train_single.py").write_text("1 / 0")
    with pytest.raises(LabError, match="ZeroDivisionError") as found:
        check.exercise("5.1", name)
    assert not isinstance(found.value, NotYetError)


# 5.2


def accumulation(plan):
    """A step made of the named parts; those between brackets come for every micro-batch."""
    before, _, rest = plan.partition("[")
    inside, _, after = rest.partition("]")

    def accumulate(model, micro_batches, optimizer):
        total = 0
        for part in before.split():
            do(part, model, optimizer)
        for number, (images, labels) in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            for part in inside.split():
                if part.startswith("forward"):
                    with silence(model, part, number == 0, last):
                        loss = F.cross_entropy(model(images), labels)
                        total = total + loss / len(micro_batches)
                elif part.startswith("backward"):
                    with silence(model, part, number == 0, last):
                        (loss if "undivided" in part else loss / len(micro_batches)).backward()
                else:
                    do(part, model, optimizer)
        if "total" in after:
            total.backward()
        for part in after.split():
            do(part, model, optimizer)

    return accumulate


def silence(model, part, first, last):
    silent = {"but_last": not last, "always": True, "but_first": not first}
    chosen = [value for name, value in silent.items() if name in part]
    return model.no_sync() if chosen and chosen[0] else torch.enable_grad()


def do(part, model, optimizer):
    if part == "zero":
        optimizer.zero_grad()
    elif part == "step":
        optimizer.step()
    elif part == "broken":
        raise ZeroDivisionError


RIGHT = "zero [forward_but_last backward] step"


@pytest.mark.parametrize(
    ("plan", "hint"),
    [
        (RIGHT.replace("backward", "backward_undivided"), "divide each loss"),
        (RIGHT.replace("_but_last", ""), "all micro-batches but the last"),
        (RIGHT.replace("_but_last", "_always"), "the last micro-batch runs outside"),
        (RIGHT.replace("_but_last", "_but_first"), "send in the last pass"),
        (RIGHT.replace("forward_but_last backward", "forward backward_but_last"), "DDP decides in the forward pass"),
        (RIGHT.replace("zero [", "["), "gradients of the step before"),
        (RIGHT.replace("zero [", "[zero "), "only the last micro-batch counts"),
        (RIGHT.replace("] step", " step]"), "once, after the last micro-batch"),
        (RIGHT.replace("] step", "]"), "once, after the last micro-batch"),
        (RIGHT.replace(" backward] step", "] total step"), "frees the activations"),
        ("zero step [ ]", "each followed by its backward()"),
    ],
)
def test_wrong_accumulation_gets_its_hint(plan, hint):
    assert hint in refuse("5.2", accumulation(plan))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "plan", [RIGHT, "[forward_but_last backward_but_last] step zero", "zero [forward_but_last backward] step zero"]
)
def test_right_accumulation_is_accepted(plan, capsys):
    check.exercise("5.2", accumulation(plan))
    expected = "✔ 5.2 Accumulation: two steps equal the union batches', and each sent the gradients once\n"
    assert capsys.readouterr().out == expected
    assert not dist.is_initialized()


def test_no_group_is_left_behind_by_an_error():
    with pytest.raises(OpenError, match="ZeroDivisionError"):
        check.exercise("5.2", accumulation("broken []"))
    assert not dist.is_initialized()


def test_a_group_that_is_there_is_used_and_stays():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check.exercise("5.2", accumulation(RIGHT))
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_group_with_others_is_refused_before_anybody_waits(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(LabError, match="destroy_process_group"):
        check.exercise("5.2", accumulation(RIGHT))


# 5.3


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda orders: False, "every epoch has the order of the first"),
        (lambda orders: True, "the orders differ"),
        (lambda orders: sorted(orders[0]) == sorted(orders[-1]), "compare the lists themselves"),
        (lambda orders: len({frozenset(order) for order in orders}) == 1, "compare the lists themselves"),
        (lambda orders: len(orders) > 1 and len({order[0] for order in orders}) == 1, "compare whole orders"),
        (lambda orders: len(orders) > 1 and orders[0] == orders[1], "compare all epochs with the first"),
        (lambda orders: len(orders) > 1 and orders[-2] == orders[-1], "not only neighbours"),
        (lambda orders: orders[0] == orders[1] == orders[-1], "one epoch alone cannot tell"),
        (lambda orders: all(order == orders[0] for order in orders), "one epoch alone cannot tell"),
        (lambda orders: len(orders) == 3 and orders[0] == orders[1] == orders[2], "any length"),
        (lambda orders: "yes" if orders[0] == orders[1] else "", "return it"),
        (lambda orders: None, "return it"),
    ],
)
def test_wrong_answers_about_set_epoch_get_their_hint(answer, hint):
    assert hint in refuse("5.3", answer)


@pytest.mark.parametrize(
    "answer",
    [
        lambda orders: len(orders) > 1 and all(order == orders[0] for order in orders),
        lambda orders: len(orders) > 1 and len({tuple(order) for order in orders}) == 1,
        lambda orders: len(orders) > 1 and (torch.tensor(orders) == torch.tensor(orders[0])).all().numpy()[()],
    ],
)
def test_right_answers_about_set_epoch_are_accepted(answer, capsys):
    check.exercise("5.3", answer)
    expected = "✔ 5.3 A forgotten set_epoch: 8 runs of torch's DistributedSampler, with and without set_epoch\n"
    assert capsys.readouterr().out == expected


# 5.4


def rule(source, low=1, high=65535):
    return {"from": source, "ports": (low, high)}


def per_node(private_ips, *, low=1, high=65535):
    return [rule(f"{address}/32", low, high) for address in private_ips]


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda ips, you: [*per_node(ips, low=29500, high=29500), rule(f"{you}/32", 22, 22)], "only where ranks meet"),
        (lambda ips, you: [*per_node(ips, low=1024), rule(f"{you}/32", 22, 22)], "only where ranks meet"),
        (lambda ips, you: [*per_node(ips, high=65534), rule(f"{you}/32", 22, 22)], "only where ranks meet"),
        (lambda ips, you: [*per_node(ips), rule("0.0.0.0/0", 22, 22)], "tried by guessers"),
        (lambda ips, you: [rule("0.0.0.0/0", 0)], "whoever reaches their ports can run code"),
        (
            lambda ips, you: [*per_node(ips), rule("0.0.0.0/0", 29500, 29500)],
            "whoever reaches their ports can run code",
        ),
        (lambda ips, you: [rule("10.0.0.0/24"), rule("172.31.0.0/16"), rule(f"{you}/32", 22, 22)], "a rule per node"),
        (lambda ips, you: [*per_node(ips), rule(you.rpartition(".")[0] + ".0/24", 22, 22)], "lets your neighbours in"),
        (lambda ips, you: [*per_node(ips), rule(f"{you}/32")], "everything else goes through it"),
        (lambda ips, you: per_node(ips), "a rule for yourself"),
        (lambda ips, you: [*per_node(ips[:1]), rule(f"{you}/32", 22, 22)], "every node has to be let in"),
        (lambda ips, you: [*per_node(ips[1:]), rule(f"{you}/32", 22, 22)], "rank 0's node too"),
        (lambda ips, you: [rule(f"{ips[0]}/24")], "begins where its mask says"),
        (lambda ips, you: [rule("the nodes")], "an address with /32"),
        (lambda ips, you: [{"from": f"{you}/32", "ports": 22}], "ports are two numbers"),
        (lambda ips, you: [{"from": f"{you}/32"}], "ports are two numbers"),
        (lambda ips, you: [rule(f"{you}/32", 0, 65536)], "ports are two numbers"),
        (lambda ips, you: rule(f"{you}/32", 22, 22), "one dictionary per rule"),
        (lambda ips, you: None, "one dictionary per rule"),
    ],
)
def test_wrong_firewalls_get_their_hint(answer, hint):
    assert hint in refuse("5.4", answer)


def test_a_rule_for_the_first_nodes_alone_is_seen_on_the_larger_cluster():
    def answer(ips, you):
        return [*per_node(ips[:2]), rule(f"{you}/32", 22, 22)]

    assert "every node has to be let in" in refuse("5.4", answer)


@pytest.mark.parametrize(
    "answer",
    [
        lambda ips, you: [*per_node(ips), rule(f"{you}/32", 22, 22)],
        lambda ips, you: [rule(you, 22, 22), *({"from": address, "ports": [0, 65535]} for address in ips)],
        lambda ips, you: [*per_node(ips, high=22), *per_node(ips, low=23), rule(f"{you}/32", 22, 22)],
    ],
)
def test_right_firewalls_are_accepted(answer, capsys):
    check.exercise("5.4", answer)
    assert capsys.readouterr().out == (
        "✔ 5.4 Open only what is needed: the nodes reach each other on every port, you reach port 22, "
        "and nobody else reaches anything\n"
    )


# 5.5


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda means, variances: (means.mean(0), variances.mean(0)), "add the variance of the means"),
        (lambda means, variances: (means.mean(0), means.var(0, correction=0)), "add the mean of the variances"),
        (lambda means, variances: (means.mean(0), variances.mean(0) + means.var(0)), "torch.var divides by R - 1"),
        (
            lambda means, variances: (means.mean(0), (variances.mean(0) + means.var(0, correction=0)).sqrt()),
            "standard deviation",
        ),
        (lambda means, variances: (means.mean(0), variances.sum(0) + means.var(0, correction=0)), "average the ranks'"),
        (lambda means, variances: (means.mean(0), variances.amax(0)), "the mean of the variances plus"),
        (lambda means, variances: (means.sum(0), variances.mean(0)), "the mean of the means"),
        (lambda means, variances: (means.mean(1), variances.mean(1)), "dimension 0"),
        (lambda means, variances: (means.mean(), variances.mean()), "dimension 0"),
        (lambda means, variances: means.mean(0), "dimension 0"),
        (lambda means, variances: None, "dimension 0"),
    ],
)
def test_wrong_statistics_get_their_hint(answer, hint):
    assert hint in refuse("5.5", answer)


@pytest.mark.filterwarnings("ignore:var")
def test_variance_of_a_single_rank_is_tried():
    def answer(means, variances):
        ranks = len(means)
        return means.mean(0), variances.mean(0) + means.var(0) * (ranks - 1) / ranks

    assert "one rank" in refuse("5.5", answer)


@pytest.mark.parametrize(
    "answer",
    [
        lambda means, variances: (means.mean(0), variances.mean(0) + means.var(0, correction=0)),
        lambda means, variances: [means.mean(0), (variances + means**2).mean(0) - means.mean(0) ** 2],
        lambda means, variances: (means.mean(0), variances.mean(0) + (means - means.mean(0)).square().mean(0)),
    ],
)
def test_right_statistics_are_accepted(answer, capsys):
    check.exercise("5.5", answer)
    assert capsys.readouterr().out == (
        "✔ 5.5 What SyncBatchNorm computes: 4 groups of ranks, equal to torch's mean and variance of the union batch\n"
    )
