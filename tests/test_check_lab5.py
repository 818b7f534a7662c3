"""Each check of lab 5 refuses typical wrong answers with the hint that fits, accepts right ones, and leaves nothing."""

import ast
import copy
import re
import secrets
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness.jobs import hear_listeners
from torch.nn import functional as F

from course import check
from course.check import NotYetError, OpenError
from course.exercises import precautions
from course.exercises.lab5 import commands, ddp_script
from course.workspace import make_script_stub
from lab_common import LabError
from nodelaunch.node.probe import find_free_port
from nodelaunch.result import Failure, JobResult

pytestmark = pytest.mark.usefixtures("runs")


def refuse(number, answer):
    with pytest.raises(NotYetError) as refused:
        check.exercise(number, answer)
    assert refused.value.yours and refused.value.expected
    return refused.value.hint


# 5.1, with real processes


@pytest.fixture
def write(root, tmp_path, monkeypatch):
    """A function that writes the lab's script with some of its text replaced, beside the one that watches it."""
    scripts = root / "notebooks" / "scripts"
    shutil.copy(scripts / "observed.py", tmp_path)
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
def right(root, tmp_path_factory, warm_up):
    """The result of the lab's own script."""
    with pytest.MonkeyPatch.context() as patch:
        warm_up(patch)
        return ddp_script._run(root / "notebooks" / "scripts" / "train_ddp.py", tmp_path_factory.mktemp("right"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x = 1\0", b"#" * 10_000_000, b"(" * 100_000], ids=range(4))
def test_a_script_that_cannot_be_read_is_named(write, tmp_path, count_runs, content):
    path = tmp_path / write()
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
    filled = "dist.all_reduce(counts)\n"
    stub = "raise NotImplementedError("
    with pytest.raises(LabError, match="has 1 place left"):
        check.exercise("5.1", write((filled, stub + ")\n")))
    with pytest.raises(LabError, match=r"no script 'nowhere\.py'"):
        check.exercise("5.1", "nowhere.py")
    with pytest.raises(LabError, match=r"where: train_ddp\.py, line \d+: dist\.all_reduce"):
        check.exercise("5.1", write((filled, "dist.all_reduce(counts\n")))
    (tmp_path / "observed.py").unlink()
    with pytest.raises(LabError, match=r"no script 'observed\.py'"):
        check.exercise("5.1", write())
    assert not count_runs


LOCAL_RANK = 'local_rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()'
DEVICE = 'torch.device("cuda", local_rank) if cuda else torch.device("cpu")'
BY_LOCAL_RANK = "    if cuda:\n        torch.cuda.set_device(local_rank)\n"
TAKE = "def take(index):\n    torch.cuda.set_device(index)"
FIND = 'def find():\n    return int(os.environ["LOCAL_RANK"])'
OPTIONS = "dist.init_process_group(timeout=timedelta(minutes=2), **options)"
INIT = "dist.init_process_group(backend, timeout=timedelta(minutes=2), device_id=device_id)"
SET_DEVICE = "    if cuda:\n        torch.cuda.set_device(device)\n"
SAMPLER = "sampler = DistributedSampler(train, drop_last=True)"
LOADER = "loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)"
LOADER_OF_BATCHES = "loader = DataLoader(train, batch_sampler=batches, num_workers=1)"
WRAP = "model = DDP(model, device_ids=[local_rank] if cuda else None)"
SAVE = """        if args.checkpoint and rank == 0:
            torch.save(state, args.checkpoint.with_suffix(".new"))
            args.checkpoint.with_suffix(".new").replace(args.checkpoint)  # a crash leaves the old one or the new
"""
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
        ((INIT, INIT.replace("minutes=2", "hours=2")), "two minutes are enough"),
        ((SET_DEVICE, ""), "current one, GPU 0"),
        ((SAVE, "        pass\n"), "rank == 0: torch.save"),
        ((INIT, INIT.replace("minutes=2", "60 * 2")), "the first number of timedelta counts days"),
        ((INIT, INIT.replace("minutes=2", "seconds=2")), "only starts slowly would be given up"),
        (('("nccl", device) if cuda else ("gloo", None)', '"gloo", None'), "nccl is made for GPUs"),
        ((DEVICE, 'torch.device("cuda" if cuda else "cpu")'), '"cuda" alone has no number'),
        ((DEVICE, 'torch.device("cuda:0" if cuda else "cpu")'), '"cuda:0" is the same GPU'),
        ((DEVICE, 'torch.device("cuda" if torch.cuda.device_count() > local_rank else "cpu")'), '"cuda" alone'),
    ],
)
def test_missing_precautions_are_seen_without_a_run(write, count_runs, change, hint):
    assert hint in refuse("5.1", write(change))
    assert not count_runs


def test_a_model_that_never_reaches_a_gpu_is_seen_without_a_run(write, count_runs):
    hint = refuse("5.1", write((DEVICE, 'torch.device("cpu")'), (SET_DEVICE, BY_LOCAL_RANK)))
    assert 'torch.device("cuda", local_rank) if cuda' in hint
    assert not count_runs


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [(DEVICE, 'torch.device(f"cuda:{local_rank}" if cuda else "cpu")')],
        [(DEVICE, '"cuda:" + os.environ["LOCAL_RANK"] if cuda else "cpu"')],
        [(DEVICE, 'local_rank if cuda else "cpu"'), (WRAP, "model = DDP(model)")],
        [(SET_DEVICE, ""), (DEVICE, f'torch.device("cuda" if cuda else "cpu")\n{BY_LOCAL_RANK}')],
        [
            (SET_DEVICE, BY_LOCAL_RANK),
            (DEVICE, 'torch.device("cuda" if cuda else "cpu")'),
            ("[local_rank]", "[device]"),
        ],
        [('int(os.environ["LOCAL_RANK"])', "dist.get_node_local_rank()")],
        [
            (
                LOCAL_RANK,
                'rank, local_rank = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK"))\n    cuda = False',
            )
        ],
        [(SET_DEVICE, "    args.device = device\n    torch.cuda.set_device(args.device)\n")],
        [(SET_DEVICE, "    take(index=local_rank)\n"), ("def main", f"{TAKE}\n\n\ndef main")],
        [(SET_DEVICE, "    take(local_rank)\n"), ("def main", f"{TAKE}\n\n\ndef main")],
        [(SET_DEVICE, "    torch.cuda.set_device(find())\n"), ("def main", f"{FIND}\n\n\ndef main")],
        [(DEVICE, 'torch.device("cuda:0")\n    os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)')],
        [("    backend, device_id =", "    options = {}\n    options['backend'], device_id ="), (INIT, OPTIONS)],
    ],
)
def test_a_device_by_local_rank_is_accepted_however_it_is_written(write, tmp_path, changes):
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


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ((WRAP, "pass"), "model = DDP(model), under the same name"),
        ((WRAP, "bare, model = model, DDP(model)"), ""),
        ((SAVE, SAVE.replace("rank == 0", "local_rank == 0")), "every process saved"),
        (("sampler.set_epoch(epoch)  #", "pass  #"), "set_epoch(epoch) before each epoch"),
        ((SAMPLER, SAMPLER.replace("sampler", "samples", 1)), "assign it in the gap"),
        (
            ("        dist.all_reduce(counts)", "        counts = dist.all_reduce(counts)"),
            "returns None: assign nothing",
        ),
        (("minutes=2", "minutes=None"), "mend what this line says"),
        ((LOADER, "loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)"), "sampler=sampler"),
        ((SAVE, SAVE + "    " + BARRIER), "none of them may stand in `if rank == 0`"),
    ],
)
def test_wrong_scripts_get_their_hint(write, count_runs, survivors, monkeypatch, request, change, hint):
    if "`if rank == 0`" not in hint:  # where the ranks hang, what is left of them is looked for
        request.getfixturevalue("warm_ranks")
    monkeypatch.setattr(ddp_script, "HANG_SECONDS", 6)
    changes = [change]
    if not hint:  # wrapped, and then trained past the wrapper
        changes.append(("loss = F.cross_entropy(model(images", "loss = F.cross_entropy(bare(images"))
        hint = "the forward pass has to run through DDP(model)"
    found = refuse("5.1", write(*changes))
    assert hint in found
    assert len(count_runs) == 1
    assert survivors(count_runs[0]) == []


# 5.1, with what a right run gave, altered


@pytest.fixture
def alter(right, write, monkeypatch):
    """A function that replaces the check's own runs by altered ones, and returns the script's name."""

    def alter(*, ranks=(0, 1), images=None, kept=None, lines=None, results=None, saved=None):
        results = copy.deepcopy(right.job.results) if results is None else results
        states = copy.deepcopy(right.kept)
        for rank in ranks:
            if images:
                results[rank]["images"] = images(rank, results[rank]["images"])
            if kept:
                kept(states[rank])
        job = replace(right.job, results=results, lines=tuple(lines(right.job.lines)) if lines else right.job.lines)
        runs = replace(right, job=job, kept=states, saved=saved or right.saved)
        monkeypatch.setattr(ddp_script, "_run", lambda *_: runs)
        return write()

    return alter


def test_what_a_right_run_gave_is_accepted_again(alter, capsys):
    check.exercise("5.1", alter())
    assert "\n✔ 5.1" in capsys.readouterr().out


def test_a_checkpoint_after_the_last_epoch_alone_is_refused(alter, right):
    first, *others = copy.deepcopy(right.job.results)
    assert first["saves"][0] == ddp_script.STEPS
    found = refuse("5.1", alter(results=[first | {"saves": first["saves"][1:]}, *others]))
    assert "save in each epoch" in found


def test_wrong_shares_get_their_hint(alter, right):
    halves = [rank["images"] for rank in right.job.results]
    batches = [[*range(start, start + 16)] for start in range(0, 112, 16)]
    short = [*range(112, 127)]
    for images, hint in [
        (lambda rank, own: batches + batches, "both ranks went through all images"),
        (lambda rank, own: halves[0], "both ranks got the same share"),
        (lambda rank, own: [[] for _ in own], "the batches come from `train`"),
        (lambda rank, own: [*own[:-1], own[-1][1:]], "args.batch_size is the number"),
        (lambda rank, own: [*own[:3], short, *own[3:], short], "drop_last=True for the DataLoader"),
        (lambda rank, own: [*own[:3], own[0], *own[3:], own[1]], "drop_last=True for the DistributedSampler"),
        (lambda rank, own: [*own[:-1], halves[0][3]], "divides the images"),
        (lambda rank, own: own[:3] * 2, "set_epoch(epoch) before each epoch"),
        (lambda rank, own: [step[half::2] for step in own for half in (0, 1)], "args.batch_size is the number"),
        (lambda rank, own: batches[rank:6:2] * 2, "shuffle=False"),
    ]:
        assert hint in refuse("5.1", alter(images=images)), hint


@pytest.mark.usefixtures("warm_ranks")
def test_the_rank_s_own_line_and_the_case_without_a_checkpoint(alter, write, tmp_path, monkeypatch):
    """A script that names no condition is run once more, with no checkpoint given."""
    always = "        if rank == 0:\n            torch.save(state, args.checkpoint)\n"
    alter()
    ddp_script._draw_images(tmp_path / "data" / "packed" / "shapes10")
    monkeypatch.setattr(ddp_script.tempfile, "TemporaryDirectory", lambda **_: nullcontext(tmp_path))
    with pytest.raises(NotYetError) as refused:
        check.exercise("5.1", write((SAVE, always)))
    assert "only then is there a name" in refused.value.hint
    assert re.match(r"train_ddp.py, line \d+: AttributeError: expected 'f'", refused.value.yours)
    with pytest.raises(NotYetError) as refused:
        check.exercise("5.1", write((SAVE, always.replace("args.checkpoint", 'args.checkpoint or "run.pt"'))))
    assert refused.value.yours == "it saves run.pt"


def test_wrong_gradients_and_weights_get_their_hint(alter):
    def change(what, by, step=1):
        def change(states):
            for name, tensor in states[step][what].items():
                states[step][what][name] = by(tensor)

        return change

    assert "a model of its own" in refuse("5.1", alter(ranks=[1], kept=change("weights", lambda one: one + 1e-12)))
    assert "a model of its own" in refuse("5.1", alter(ranks=[1], kept=change("weights", lambda one: one * 2, -1)))
    for factor, hint in [(2, "this is the sum"), (0.5, "has divided by the ranks already"), (1.1, "leave it to DDP")]:
        assert hint in refuse("5.1", alter(kept=change("gradients", lambda one, by=factor: one * by))), factor
    assert "leave it to DDP" in refuse("5.1", alter(kept=lambda states: states[2]["gradients"].popitem()))


def test_wrong_counts_get_their_hint(alter, right):
    results = (right.job.results[0], None)
    assert "come to its end on every rank" in refuse("5.1", alter(ranks=(), results=results))
    printed = [line for line in right.job.lines if "] epoch " in line]
    assert len(printed) == 2
    for lines, hint in [
        (
            lambda lines: [line.replace("on 21 images", "on 11 images") for line in lines],
            "dist.all_reduce(counts), once",
        ),
        (lambda lines: [re.sub(r"loss \S+,", "loss 2.0000,", line) for line in lines], "dist.all_reduce(counts), once"),
        (lambda lines: [re.sub(r"y \S+ on", "y 0.5000 on", line) for line in lines], "dist.all_reduce(counts), once"),
        (lambda lines: [line for line in lines if line != printed[1]], "dist.all_reduce(counts), once"),
        (lambda lines: [*lines, printed[0].replace("[rank 0]", "[rank 1]")], "leave `if rank == 0:`"),
    ]:
        assert hint in refuse("5.1", alter(lines=lines)), hint


def test_wrong_checkpoints_get_their_hint(alter, right, tmp_path):
    first, second = right.saved.values()
    state = torch.load(first)
    weights = state["model"]
    for number, (changed, hint) in enumerate(
        [
            ({"epoch": 1}, "the last one too"),
            ({"model": {f"module.{name}": value for name, value in weights.items()}}, "names have no 'module.'"),
            ({"model": {name: value + 1 for name, value in weights.items()}}, "the last one too"),
            ({"model": {}}, "as it was put together"),
            ({"optimizer": {}}, "the optimizer's momentum"),
        ]
    ):
        path = tmp_path / f"{number}.pt"
        torch.save(state | changed, path)
        assert hint in refuse("5.1", alter(saved={"node0": path, "node1": second})), hint
    (tmp_path / "broken.pt").write_bytes(b"no checkpoint")
    assert "torch.save(state" in refuse("5.1", alter(saved={"node0": tmp_path / "broken.pt", "node1": second}))
    assert "exactly one process saves" in refuse("5.1", alter(saved={"node0": second, "node1": first}))
    assert "exactly one process saves" in refuse("5.1", alter(saved={"node0": second, "node1": second}))
    (tmp_path / "renamed").mkdir()
    torch.save(state, tmp_path / "renamed" / "run.pt")
    saved = {"node0": tmp_path / "renamed" / first.name, "node1": second}
    assert "save to args.checkpoint" in refuse("5.1", alter(saved=saved))
    # The other rank's under another name: the renaming alone is rank 0's.
    (tmp_path / "other").mkdir()
    torch.save(state, tmp_path / "other" / "run.new")
    (tmp_path / "other" / "notes.txt").write_text("rank 1 was here")
    saved = {"node0": first, "node1": tmp_path / "other" / "run.pt"}
    assert "every process saved" in refuse("5.1", alter(saved=saved))
    (tmp_path / "other" / "run.new").unlink()
    check.exercise("5.1", alter(saved=saved))


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
        ([type_static(0, nodes="--standalone"), type_static(1)], "it looks for no other"),
        ([type_static(0, meet=""), type_static(1)], "no other way to find it"),
        ([type_static(0), type_static(1, meet=MEET.replace("55", "56"))], "address and port are the first node's"),
        ([type_static(0), type_static(1, meet="--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29555")], "name one job"),
        ([type_static(0), type_static(1, script="scripts/train_single.py")], "every rank is the same program"),
        ([type_static(0, each="--nproc-per-node=2"), type_static(1)], "one per device"),
        (["python scripts/train_ddp.py", type_static(1)], "torchrun starts the ranks"),
        ([type_static(0), f"torchrun --nnodes=2 {MEET} {SCRIPT} --node-rank 1"], "stand before the script"),
        (["cd notebooks && " + type_static(0), type_static(1)], "without `cd` and `export`"),
        ([type_static(0, nodes="--nodes=2"), type_static(1)], "torchrun --help"),
        ([type_static(0) + " '", type_static(1)], "no partner"),
    ],
)
def test_wrong_commands_get_their_hint_without_a_run(typed, hint, count_runs):
    assert hint in refuse("5.2", lambda: typed)
    assert not count_runs


@pytest.fixture
def said(monkeypatch, root):
    """A function that sets the output of the two commands, without running them; returns the lines for bash."""
    monkeypatch.chdir(root / "notebooks")

    def said(*lines, ok=False, kind="exit", message="ChildFailedError"):
        started = []

        def run(job, **options):
            started.extend(job.spec.script.read_text().splitlines())
            failure = None if ok else Failure(kind, "Rank 0 ended with exit status 1", message=message)
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
        ("The server socket has failed: EADDRINUSE", "take another port"),
        ("python: can't open file '/x/train_ddp.py'", "as seen from the notebook's folder"),
        ("train_ddp.py: error: unrecognized arguments: --imgs 3", "--help lists what the script takes"),
        ("RuntimeError: [...] Unable to find address for: eth9", "its interface lo"),
        ("TimeoutError: timed out after 60 s", "did not answer at this address in time"),
        ("TimeoutError: timed out\nThe server cannot listen: EADDRNOTAVAIL", "both nodes are this machine"),
        ("[W1124 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed", "the log has each node's lines"),
    ],
)
def test_commands_that_fail_get_their_hint(said, line, hint):
    said(line)
    assert hint in refuse("5.2", lambda: RIGHT_COMMANDS)


def test_an_error_in_the_script_itself_is_the_one_that_is_named(said):
    """Neither torchrun's own error, nor the other rank's complaint about the connection."""
    frame = 'File "/home/me/scripts/train_ddp.py", line 98, in main'
    own = "AttributeError: expected 'f' to be string, path, or a file-like object with a 'write' attribute"
    followed = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:24921"
    lines = [
        "[rank 1] [W1124 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=4)",
        f"[rank 1] [rank1]:   {frame}",
        f"[rank 1] [rank1]: {followed}",
        f"[rank 0] [rank0]:   {frame}",
        f"[rank 0] [rank0]: {own}",
        "[rank 0] torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    ]
    said(*lines)
    with pytest.raises(NotYetError) as refused:
        check.exercise("5.2", lambda: RIGHT_COMMANDS)
    assert refused.value.yours.startswith(own) and "the script itself fails" in refused.value.hint
    said(*lines[:3], lines[-1])
    assert "the log has each node's lines" in refuse("5.2", lambda: RIGHT_COMMANDS)
    said(f"[rank 0]   {frame}", "[rank 0] torch.distributed.DistStoreError: Timed out after 121 seconds waiting")
    assert "did not answer at this address in time" in refuse("5.2", lambda: RIGHT_COMMANDS)
    said(EPOCH, kind="limit", message="The job ran into its time limit of 90 s.")
    assert "both met and train, but not to the end" in refuse("5.2", lambda: RIGHT_COMMANDS)


def test_an_abort_after_the_training_is_no_slip_of_the_learner_s(said, capsys):
    said(EPOCH, f"[rank 1] {commands.ENDING}", ok=False)
    check.exercise("5.2", lambda: RIGHT_COMMANDS)
    assert "✔ 5.2" in capsys.readouterr().out
    said(f"[rank 1] {commands.ENDING}", ok=False)
    assert "the log has" in refuse("5.2", lambda: RIGHT_COMMANDS)
    said(ok=True)
    assert "at least one epoch" in refuse("5.2", lambda: RIGHT_COMMANDS)


def test_commands_run_as_they_were_typed(said, root):
    started = said(EPOCH, ok=True)
    own = "CUDA_VISIBLE_DEVICES= GLOO_SOCKET_IFNAME=lo python -m torch.distributed.run --nnodes 2"
    meet = "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29555"
    check.exercise("5.2", lambda: [f"{run} {meet} \\\n {SCRIPT}" for run in (own, own.replace("-m", "-u -m"))])
    assert started[0] == 'unset "${!PET_@}" MASTER_ADDR MASTER_PORT' and started[2] == f"cd {root}/notebooks"
    for line in started[3:]:
        # The agent is torchrun, with stores that listen at the address that is given only.
        before = "env CUDA_VISIBLE_DEVICES= GLOO_SOCKET_IFNAME=lo"
        assert f"{before} {sys.executable} -m nodelaunch.node.agent --nnodes 2" in line
        assert SCRIPT in line


def test_commands_find_the_packages_where_the_shell_does(said, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/where/the/packages/are")
    said(EPOCH, ok=True)
    found, run = [], commands.launch.TorchrunJob.run
    monkeypatch.setattr(
        commands.launch.TorchrunJob, "run", lambda job, **more: (found.append(job.spec.env), run(job, **more))[1]
    )
    check.exercise("5.2", lambda: RIGHT_COMMANDS)
    assert found[0]["PYTHONPATH"] == "/where/the/packages/are" and found[0]["CUDA_VISIBLE_DEVICES"] == ""


def test_at_least_two_nodes_and_at_most_two_are_two(said):
    said(EPOCH, ok=True)
    check.exercise("5.2", lambda: [type_static(node, nodes="--nnodes=2:2") for node in (0, 1)])


@pytest.mark.parametrize(
    ("before", "after"),
    [("env A= ", ""), ("../.venv/bin/", ""), ("A=1 /x/bin/", ""), ("", " &"), ("", "&\n"), ("", ";"), ("", "  # node")],
)
def test_commands_as_a_shell_takes_them_are_accepted(said, before, after):
    started = said(EPOCH, ok=True)
    check.exercise("5.2", lambda: [type_static(node, before=before) + after for node in (0, 1)])
    assert all(line.rstrip("; fi").endswith("--images 64") for line in started[3:])


def test_two_commands_meet_and_train(root, monkeypatch, capsys, survivors, count_runs):
    """Runs them for real, closed to other machines. Nothing is left, even if one waits for the other in vain."""
    monkeypatch.chdir(root / "notebooks")
    mark = f"LAB_TEST={secrets.token_hex(8)}"
    monkeypatch.setenv(*mark.split("="))
    meet = f"--master-addr=127.0.0.1 --master-port={find_free_port()}"
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
        assert "both nodes are this machine" in refuse("5.2", lambda: elsewhere)
    assert [survivors(job) for job in count_runs] == [[], []]
    assert len(heard) >= 3, heard  # the store, and Gloo on both ranks
    assert all(address.startswith("127.") for address, _ in heard), heard


# 5.3


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda orders: False, "every epoch has the same order"),
        (lambda orders: True, "the orders differ"),
        (lambda orders: sorted(orders[0]) == sorted(orders[-1]), "compare the lists themselves"),
        (lambda orders: len(orders) > 1 and len({order[0] for order in orders}) == 1, "compare whole orders"),
        (lambda orders: len(orders) > 1 and len({tuple(order[:3]) for order in orders}) == 1, "a part may agree"),
        (lambda orders: len(orders) > 1 and len({(order[0], order[-1]) for order in orders}) == 1, "both ends"),
        (lambda orders: len(orders) > 1 and orders[0] == orders[1] == orders[-1], "however many there are"),
        (lambda orders: len(orders) > 1 and orders[0] == orders[1], "compare all epochs with the first"),
        (lambda orders: len(orders) > 1 and orders[-2] == orders[-1], "not only neighbours"),
        (lambda orders: len(orders) > 1 and orders[0] == orders[-1], "not only the first and the last"),
        (lambda orders: orders[0] == orders[1] == orders[-1], "one epoch is not enough to decide"),
        (lambda orders: len(orders) == 3 and orders[0] == orders[1] == orders[2], "any length"),
        (lambda orders: "yes" if orders[0] == orders[1] else "", "return True or False"),
        (lambda orders: (torch.tensor(orders) == torch.tensor(orders[0])).all(), "bool(...)"),
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
    expected = "✔ 5.3 A forgotten set_epoch: 13 runs of torch's DistributedSampler, with and without set_epoch\n"
    assert capsys.readouterr().out == expected


# 5.4


def accumulation(plan):
    """Makes a step from the named parts; those in brackets are repeated for every micro-batch."""
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
                        called = model.module if "bare" in part and not last else model  # DDP has no part in it
                        loss = F.cross_entropy(called(images), labels)
                        total = total + loss / len(micro_batches)
                elif part.startswith("backward"):
                    with silence(model, part, number == 0, last):
                        share = {"undivided": 1, "by_ranks": len(micro_batches) * dist.get_world_size()}
                        (loss / share.get(part.partition("=")[2], len(micro_batches))).backward()
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
    elif part.startswith("reduce"):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size() if "mean" in part else 1
    elif part == "broken":
        raise ZeroDivisionError


RIGHT = "zero [forward_but_last backward] step"


@pytest.mark.parametrize(
    ("plan", "hint"),
    [
        (RIGHT.replace("backward", "backward=undivided"), "divide each loss"),
        (RIGHT.replace("_but_last", ""), "all micro-batches but the last"),
        (RIGHT.replace("_but_last", "_always"), "through model, outside"),
        (RIGHT.replace("_but_last", "_but_first"), "send in the last pass"),
        (RIGHT.replace("forward_but_last backward", "forward backward_but_last"), "DDP decides in the forward pass"),
        (RIGHT.replace("zero [", "["), "gradients of the step before"),
        (RIGHT.replace("zero [", "[zero "), "only the last micro-batch counts"),
        (RIGHT.replace("] step", "] zero step"), "did not move"),
        (RIGHT.replace("] step", " step]"), "once, after the last micro-batch"),
        (RIGHT.replace(" backward] step", "] total step"), "frees that pass's activations"),
        (RIGHT.replace("backward", "backward=by_ranks"), "divided by the number of ranks already"),
        (RIGHT.replace("] step", "] reduce step"), "all-reduce nothing yourself"),
        (RIGHT.replace("] step", "] reduce_mean step"), "no collective of your own"),
        ("zero step [ ]", "each followed by its backward()"),
    ],
)
def test_wrong_accumulation_gets_its_hint(plan, hint):
    assert hint in refuse("5.4", accumulation(plan))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "plan",
    [
        RIGHT,
        "[forward_but_last backward_but_last] step zero",
        "zero [forward_but_last backward] step zero",
        "zero [forward_bare backward] step",
    ],
)
def test_right_accumulation_is_accepted(plan, capsys):
    check.exercise("5.4", accumulation(plan))
    expected = "✔ 5.4 Accumulation: each of two steps equals a step on its global batch, and sent the gradients once\n"
    assert capsys.readouterr().out == expected
    assert not dist.is_initialized()


def test_no_group_is_left_behind_by_an_error():
    with pytest.raises(OpenError, match="ZeroDivisionError"):
        check.exercise("5.4", accumulation("broken []"))
    assert not dist.is_initialized()


def test_a_group_that_is_there_is_named(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(LabError, match="destroy_process_group"):
        check.exercise("5.4", accumulation(RIGHT))
