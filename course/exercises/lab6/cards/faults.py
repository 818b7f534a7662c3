"""The faults on the cards: the change that breaks the job, the cause, and how the symptom tells it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PILES = ("stops", "unmatched", "wrong")
# Cards of a later topic are drawn, and numbered, after the others: loading comes only in lab 7.
TOPICS = ("data parallelism", "loading", "model parallelism", "schedulers")
SUFFIXES = {"batch": ".sbatch"}  # of jobs that are not in Python


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        letter: How the lab's list of causes calls it.
        pile: ``"stops"``: a rank's own error ends the job; ``"unmatched"``: ranks whose collectives do not match;
            ``"wrong"``: it runs to its end, and its numbers are wrong.
        job: The job that it is in, ``"ddp"``, ``"dp"``, ``"loader"``, ``"sharded"``, ``"pipeline"``, ``"requeued"``,
            ``"logged"`` or ``"batch"``.
        cause: What is wrong, in a few words.
        sign: What in the symptom points to it; the hint of who named another one.
        mend: What to do about it; the hint of who has named it and not yet mended it.
        edits: Pairs of what stands in the right job and what stands in the broken one.
        layouts: Nodes, and processes per node, on which the mended job is tried, one after the other; the broken one
            runs on the first. At most two processes in all, so that no card takes more memory than another.
        hard: Whether it is drawn after the others of its pile and topic.
        slow: What takes longer when the mended job is tried, where that makes the fault more likely: ``"PREPARE"`` or
            ``"SAVE"``.
        hides: What a mend must not have, a regular expression: with it the job runs, and the fault is still there.
        points: With how many points the mended job is tried, one after the other; the broken one has the first.
        topic: What it is about, one of ``TOPICS``.
        ends: Of a job that is started again and again: after how many epochs each start but the last one ends, when
            the mended job is tried; the broken one is started twice, and first ends as is said first.
    """

    letter: str
    pile: str
    job: str
    cause: str
    sign: str
    mend: str
    edits: tuple[tuple[str, str], ...]
    layouts: tuple[tuple[int, int], ...] = ((2, 1),)
    hard: bool = False
    slow: str = ""
    hides: str = ""
    points: tuple[int, ...] = (257,)
    topic: str = TOPICS[0]
    ends: tuple[int, ...] = ()

    def break_job(self) -> str:
        """Returns the text of the job with this fault in it."""
        text = read_job(self.job)
        for right, wrong in self.edits:
            if right not in text:
                raise AssertionError(f"the job no longer has what fault {self.letter} changes: {right!r}")
            text = text.replace(right, wrong)
        return text


def read_job(job: str) -> str:
    """Returns the text of a job without a fault."""
    return Path(__file__).with_name(f"{job}_job{SUFFIXES.get(job, '.py')}").read_text(encoding="utf-8")


def _sleep_unless(right: str) -> str:
    """Finds a sleep that a mend has added, unless the job has what makes waiting right, a regular expression."""
    return rf"(?s:\A(?!.*(?:{right})).*)\bsleep\((?!float\(os\.environ)"


# A job that no longer divides the batch.
_UNDIVIDED = r"(?s:\A(?!.*\bparallel(?:\.forward)?\().*)F\.cross_entropy\("
# A loop that looks again and again may sleep, and so may whoever waits for the other rank, too.
_WAITS = r"\bwhile |\bbreak\b|\.barrier\(|\.wait\("
_ONE_SAVES = r"\brank\b[^\n]*:\n +"
_SAMPLER = (
    "    sampler = DistributedSampler(dataset, drop_last=True)\n"
    "    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)\n"
)
_SHARD = '    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), reshard_after_forward=True)\n'
_BUILD = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
# A stage that takes over the weights with which it is compared.
_COPIES = r"\.load_state_dict\(|\balone(?:\[\w+\])?\.|(?:\.copy_\(|\.data = ).*\b(?:alone|other|one|two)\b"
FAULTS = (
    Fault(
        "A",
        "wrong",
        "ddp",
        "the sampler is not told the epoch",
        "compare the points that the epochs of one rank begin with",
        "sampler.set_epoch(epoch) at the beginning of each epoch",
        (("        sampler.set_epoch(epoch)\n", ""),),
    ),
    Fault(
        "B",
        "stops",
        "ddp",
        "the ranks are told an interface that the node does not have",
        "the first error names an interface, before any rank has computed anything",
        "name an interface that is there, or none: the launcher has already named the right one",
        (
            (
                "    dist.init_process_group(",
                '    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"\n    dist.init_process_group(',
            ),
        ),
    ),
    Fault(
        "C",
        "stops",
        "ddp",
        "a rank reads what another one is still writing: a barrier is missing",
        "a file is missing on one rank only, and rank 0 is still making it",
        "dist.barrier() after rank 0's preparation, on every rank; a sleep is too short on a slow disk",
        (("        prepare(folder)\n    dist.barrier()\n", "        prepare(folder)\n"),),
        slow="PREPARE",
        hides=_sleep_unless(_WAITS),
    ),
    Fault(
        "D",
        "unmatched",
        "ddp",
        "only rank 0 calls a collective",
        "one rank has printed the epoch, the other was aborted in a line before that: did both ranks call that line?",
        "take the collective out of the `if`: every rank has to call it, and needs the sum",
        (
            (
                "        dist.all_reduce(counts)\n",
                "        if rank == 0:  # rank 0 adds up\n            dist.all_reduce(counts)\n",
            ),
        ),
    ),
    Fault(
        "E",
        "unmatched",
        "ddp",
        "a rank has one batch more than the other, without Join",
        "no rank has printed the epoch: one has finished its batches, and the other still trains",
        "equally many batches for every rank, for any number of points: DistributedSampler(dataset, drop_last=True)",
        (
            (
                _SAMPLER,
                "    mine = Subset(dataset, range(rank, POINTS, world_size))\n"
                "    loader = DataLoader(mine, BATCH_SIZE, shuffle=True)\n",
            ),
            ("        sampler.set_epoch(epoch)\n", ""),
            ("DataLoader, DistributedSampler, TensorDataset", "DataLoader, Subset, TensorDataset"),
        ),
        # With an odd number of points, one fewer is equally many for both ranks.
        hides=r"range\(\w+, (?:POINTS|len\(\w+\)) - 1,|range\(rank \+ 1,",
        points=(257, 319),
    ),
    Fault(
        "F",
        "wrong",
        "ddp",
        "each rank reports the accuracy of its own part as that of all points",
        "compare the ranks: of one model and one set of points they have to report one accuracy",
        "add up the counts over the ranks, dist.all_reduce(counts), before they are divided",
        (("        dist.all_reduce(counts)\n", ""),),
    ),
    Fault(
        "G",
        "stops",
        "ddp",
        "RANK (in the job) is used where LOCAL_RANK (on the node) is meant",
        "only a rank of the second node fails, where it chooses its device",
        "a device belongs to a node: choose it by LOCAL_RANK; RANK modulo a number is right only where the ranks are "
        "numbered node by node",
        (
            ("(gpus or shares)[local_rank]", "(gpus or shares)[rank]"),
            (', int(os.environ["LOCAL_RANK"])', ""),
            ("rank, world_size, local_rank = ", "rank, world_size = "),
        ),
        layouts=((2, 1), (1, 2)),
        # The ranks of the second node would share a device.
        hides=r"\bmin\(rank\b",
    ),
    Fault(
        "H",
        "wrong",
        "dp",
        "the mean of the replicas' mean losses, although their chunks are of unequal size",
        "a batch of 10 over 4 replicas is 3, 3, 3 and 1: how much does that one point count?",
        "one loss over all gathered scores: F.cross_entropy(parallel(inputs), targets)",
        (
            (
                "        loss = F.cross_entropy(parallel(inputs), targets)\n",
                "        chunks = zip(parallel(inputs).chunk(REPLICAS), targets.chunk(REPLICAS), strict=True)\n"
                "        loss = torch.stack([F.cross_entropy(scores, wanted) for scores, wanted in chunks]).mean()\n",
            ),
        ),
        layouts=((1, 1),),
        hides=_UNDIVIDED,
    ),
    Fault(
        "I",
        "wrong",
        "dp",
        "the count is kept in a replica, which lasts one forward pass",
        "what the forward pass counts is 0 afterwards, whatever it has seen",
        "replicas live for one forward pass: count outside of forward, for instance len(inputs) in the loop, and leave "
        "parallel(inputs) as it is",
        (
            (
                "        super().__init__()\n        self.layers = ",
                "        super().__init__()\n        self.seen = 0\n        self.layers = ",
            ),
            (
                "        return self.layers(points)\n",
                "        self.seen += len(points)\n        return self.layers(points)\n",
            ),
            ("    gaps, seen = [], 0\n", "    gaps = []\n"),
            ("        seen += len(inputs)\n", ""),
            ('    print(f"{seen} of', '    seen = parallel.module.seen\n    print(f"{seen} of'),
        ),
        layouts=((1, 1),),
        hides=r"\bseen = (?:POINTS|160|(?:len\()?(?:points|labels))\b|" + _UNDIVIDED,
    ),
    Fault(
        "J",
        "stops",
        "ddp",
        "a layer takes no part in the loss, and DDP waits for its gradients",
        "both ranks stop at the same line, in their second step: what has not finished, and for which parameters?",
        "remove the layer, or let its output take part in the loss; where neither is possible: "
        "DDP(..., find_unused_parameters=True)",
        (
            (
                "torch.nn.Linear(32, 2))\n",
                "torch.nn.Linear(32, 2))\n        self.radius = torch.nn.Linear(2, 1)  # to guess the distance, too\n",
            ),
        ),
    ),
    Fault(
        "K",
        "wrong",
        "ddp",
        "no sampler divides the points: every rank trains on all of them",
        "compare the points of the two ranks in one epoch",
        "DistributedSampler(dataset, drop_last=True), told the epoch: each point on one rank, and on no other",
        (
            (_SAMPLER, "    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True)\n"),
            ("        sampler.set_epoch(epoch)\n", ""),
            ("DataLoader, DistributedSampler, TensorDataset", "DataLoader, TensorDataset"),
        ),
    ),
    Fault(
        "L",
        "wrong",
        "ddp",
        "the forward pass goes around DDP, so that no gradient is averaged",
        "compare the weights of the two ranks after each epoch",
        "train through the wrapper, model(inputs): only its forward pass makes backward() average the gradients",
        (("F.cross_entropy(model(inputs", "F.cross_entropy(model.module(inputs"),),
        # A sum of the gradients that is divided by the number of ranks is right, also one that rank 0 sends to all.
        hides=r"(?s:\A(?!.*(?:AVG|\.div|\.mul|[/*]=|[^/]/ (?:world_size|2\b|dist\.)|\* 0\.5)).*)"
        r"\ball_reduce\([^\n]*\.grad\b"
        r"|(?s:\A(?!.*\breduce\().*)\bbroadcast\([^\n]*\.grad\b",
    ),
    Fault(
        "M",
        "wrong",
        "ddp",
        "one rank has more to compute in each step, and the other waits for it",
        "compare how long each rank took for an epoch, and how much of that time it computed",
        "take the extra work out of the steps: the accuracy is measured after each epoch, by all ranks together",
        (
            (
                "            optimizer.step()\n",
                "            optimizer.step()\n"
                "            if rank == 0:  # how good is it by now?\n"
                "                scores = [model.module(point.to(device)) for point in points]\n"
                "                now = (torch.stack(scores).argmax(1).cpu() == labels).float().mean()\n",
            ),
        ),
    ),
    Fault(
        "N",
        "stops",
        "ddp",
        "every rank saves the checkpoint, all into the same file",
        "the training is over, and a rank does not find its file. Which other process renames a file of this name?",
        "one rank saves: `if rank == 0`. The ranks have the same weights, so one checkpoint is enough",
        (("    if rank == 0:\n        save(model", "    save(model"),),
        slow="SAVE",
        # Without the rename no file is missing; but every rank writes, and who reads then may find half a file.
        hides=r"^\s*if (?!.*\brank\b).*\.(?:exists|is_file)\(\)|"
        + _sleep_unless(rf"{_ONE_SAVES}save\(")
        + rf"|(?s:\A(?!.*{_ONE_SAVES}(?:torch\.)?save\().*)\b(?:torch\.save|copy\w*)\([^\n]*\bmodel\.pt\b",
    ),
    Fault(
        "O",
        "stops",
        "ddp",
        "the job opens a server on a port on which another process already listens",
        "one error names a port, and the other one only a lost connection: who listens on MASTER_PORT?",
        "connect to torchrun's server (is_master=False on every rank), or use dist.barrier() and no server",
        (
            (
                "    if rank == 0:\n        prepare(folder)\n    dist.barrier()\n",
                "    # Rank 0 tells the others when the points are there.\n"
                '    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])\n'
                "    store = dist.TCPStore(address, port, world_size, is_master=rank == 0)\n"
                "    if rank == 0:\n"
                "        prepare(folder)\n"
                '        store.set("prepared", "yes")\n'
                '    store.wait(["prepared"])\n',
            ),
        ),
        slow="PREPARE",
        # A server on a free port that rank 0 tells the others is right.
        hides=r"(?s:\A(?!.*(?:broadcast|getsockname)).*)\bTCPStore\("
        r"(?:.*is_master=(?!False[,)])|(?:[^,\n]+, ){3}(?!\w+=|False[,)]))|" + _sleep_unless(_WAITS),
    ),
    Fault(
        "P",
        "unmatched",
        "ddp",
        "the job calls a collective of its own inside Join, and Join repeats only the model's collectives for a rank "
        "without a batch",
        "the stacks of the ranks name Join: which collectives does it repeat for a rank that has no batch left?",
        "take your all_reduce out of the `with Join` block, or give every rank equally many batches: Join([model]) "
        "repeats only the collectives of this model",
        (
            (
                _SAMPLER,
                "    mine = Subset(dataset, range(rank, POINTS, world_size))\n"
                "    loader = DataLoader(mine, BATCH_SIZE, shuffle=True)\n",
            ),
            ("        sampler.set_epoch(epoch)\n", ""),
            ("DataLoader, DistributedSampler, TensorDataset", "DataLoader, Subset, TensorDataset"),
            ("from torch.nn.parallel", "from torch.distributed.algorithms.join import Join\nfrom torch.nn.parallel"),
            (
                """        for indices, inputs, targets in loader:
            orders[epoch] += indices.tolist()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
""",
                """        with Join([model]):  # a rank with fewer batches takes part in the last steps of the others
            for indices, inputs, targets in loader:
                orders[epoch] += indices.tolist()
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
                loss.backward()
                optimizer.step()
                dist.all_reduce(mean := loss.detach() / world_size)
""",
            ),
        ),
        hard=True,
        points=(257, 319),
    ),
    Fault(
        "Q",
        "wrong",
        "ddp",
        "each rank's sampler has a seed of its own, so that the parts overlap",
        "count the different points that all ranks together had in one epoch",
        "one seed for the samplers of all ranks: each takes its part of the same order",
        (("DistributedSampler(dataset, drop_last=True)", "DistributedSampler(dataset, seed=rank, drop_last=True)"),),
        layouts=((2, 1), (1, 2)),
        hard=True,
    ),
    Fault(
        "R",
        "unmatched",
        "ddp",
        "each rank waits to receive before it sends",
        "both ranks wait in the same line: what has to happen on the other rank before that line can end?",
        "dist.all_reduce(counts); or one rank sends first, and the other one receives first",
        (
            (
                "        dist.all_reduce(counts)\n",
                "        theirs = torch.zeros_like(counts)\n"
                "        dist.recv(theirs, 1 - rank)\n"
                "        dist.send(counts, 1 - rank)\n"
                "        counts += theirs\n",
            ),
        ),
    ),
    Fault(
        "S",
        "stops",
        "ddp",
        "the DataLoader is to shuffle, although a sampler chooses the order already",
        "all ranks stop before any training, where the loader is made: which two of its arguments exclude each other?",
        "leave out shuffle=True: DistributedSampler shuffles, anew in each epoch that it is told of",
        (("BATCH_SIZE, sampler=sampler)", "BATCH_SIZE, shuffle=True, sampler=sampler)"),),
        topic="loading",
    ),
    Fault(
        "T",
        "stops",
        "loader",
        "a worker's batch does not fit into the shared memory, /dev/shm",
        "the error comes out of a worker, and the last line of its traceback is about a file that cannot be resized: "
        "where does a worker put the batches that it sends?",
        "send fewer bytes: keep the pictures uint8 in the worker, and divide in the training loop, or make the "
        "batches smaller; in life also a larger /dev/shm (docker run --shm-size), but not num_workers=0, which the "
        "launcher names: without a worker the training waits for every batch",
        (
            ("        picture = self.transform(pixels)\n", "        picture = self.transform(pixels) / 255\n"),
            ("pictures.flatten(1) / 255", "pictures.flatten(1)"),
        ),
        layouts=((1, 1),),
        topic="loading",
    ),
    Fault(
        "U",
        "stops",
        "loader",
        "a worker keeps all that it has read, until it is killed for lack of memory",
        "the traceback names a signal, Killed. The kernel sends it where memory runs out: what grows in a worker?",
        "keep nothing in the dataset that grows with what was read: each worker has its own copy of it",
        (
            (
                "self.transform, self.file = path, transform, None\n",
                "self.transform, self.file = path, transform, None\n        self.enlarged = {}\n",
            ),
            (
                "        picture = self.transform(pixels)\n",
                "        if index not in self.enlarged:  # for the next epoch\n"
                "            picture = self.transform(pixels).float()\n"
                "            self.enlarged[index] = F.interpolate(picture[None, None], scale_factor=8)\n"
                "        picture = F.avg_pool2d(self.enlarged[index], 8)[0, 0].byte()\n",
            ),
        ),
        layouts=((1, 1),),
        # A dictionary that is emptied, or has a largest size, is right.
        hides=r"(?s:\A(?!.*(?:\.clear\(|\.pop|\bdel |maxlen|len\([\w.]+\) [<>=]"
        r"|self\.(?!file\b)(\w+) = .*self\.\1 = )).*)"
        r"(?:\w+\[index\] = |(?:self\.\w+|[A-Z]\w+)\.(?:setdefault|append)\()"
        r"|^ *@(?:functools\.)?cache\b|\bmaxsize=None",
        topic="loading",
    ),
    Fault(
        "V",
        "stops",
        "loader",
        "the dataset holds a lambda, which cannot be sent to a spawned worker",
        "the error is about pickling, and about a function without a name",
        "a function with a name, at the top level of the file: a spawned worker imports it from there",
        (
            (
                "Pictures(path, to_bytes)",
                "Pictures(path, lambda pixels: torch.tensor(list(pixels), dtype=torch.uint8).view(SIDE, SIDE))",
            ),
            (
                "def to_bytes(pixels: bytes) -> torch.Tensor:\n"
                '    """A picture, uint8 (SIDE, SIDE)."""\n'
                "    return torch.tensor(list(pixels), dtype=torch.uint8).view(SIDE, SIDE)\n\n\n",
                "",
            ),
        ),
        layouts=((1, 1),),
        topic="loading",
    ),
    Fault(
        "W",
        "stops",
        "loader",
        "the dataset holds an open file, which cannot be sent to a spawned worker",
        "the error is about pickling, and names a type of Python's `io`: which attribute of the dataset is one?",
        "open the file in __getitem__, where self.file is None: so the worker opens it, after it has got the dataset",
        (
            ("path, transform, None\n", 'path, transform, path.open("rb")\n'),
            (
                '        if self.file is None:  # the worker opens it\n            self.file = self.path.open("rb")\n',
                "",
            ),
        ),
        layouts=((1, 1),),
        topic="loading",
    ),
    Fault(
        "X",
        "wrong",
        "sharded",
        "rank 0 saves its own shard of each weight as if it were the whole weight",
        "compare how many parameters a rank holds and the checkpoint has, and the accuracy of the checkpoint with that "
        "of the trained model",
        "gather the shards before rank 0 saves them, for instance with tensor.full_tensor(): it is a collective, which "
        "every rank has to call. (Here nothing complained, since this job's empty network takes all shapes that fit "
        "each other: an ordinary load_state_dict() would have said size mismatch)",
        (("tensor.full_tensor()", "tensor.to_local()"),),
        topic="model parallelism",
    ),
    Fault(
        "Y",
        "wrong",
        "sharded",
        "the optimizer is built before the model is sharded, and holds the old parameters",
        "the loss is the same after all epochs, to the last digit: what does optimizer.step() change?",
        "build the optimizer after fully_shard: it replaces the model's parameters by sharded ones",
        ((_SHARD + _BUILD, _BUILD + _SHARD),),
        topic="model parallelism",
    ),
    Fault(
        "Z",
        "wrong",
        "pipeline",
        "a stage receives the activations with their dimensions in another order than that in which they were sent",
        "compare the shape that one rank sent with the shape that the other received: Gloo compares only the "
        "number of bytes",
        "one order of dimensions on both ranks, for the activations and for their gradients: receive what the first "
        "stage sends, (N, CHANNELS, LENGTH)",
        (
            ("torch.empty(len(targets), CHANNELS, LENGTH)", "torch.empty(len(targets), LENGTH, CHANNELS)"),
            ("stage(buffer), targets", "stage(buffer.transpose(1, 2)), targets"),
        ),
        hides=_COPIES,
        topic="model parallelism",
    ),
    Fault(
        "AA",
        "wrong",
        "pipeline",
        "BatchNorm takes its statistics from each micro-batch, and not from the whole batch",
        "with one micro-batch the weights are those of one piece, with more they are not: which layer's output for one "
        "wave depends on the other waves?",
        "a layer that normalises each wave by itself, as GroupNorm or LayerNorm([CHANNELS, LENGTH]); or normalise the "
        "whole batch before it is divided into micro-batches. (SyncBatchNorm joins ranks, and no micro-batches)",
        (("torch.nn.GroupNorm(2, CHANNELS)", "torch.nn.BatchNorm1d(CHANNELS)"),),
        hides=_COPIES,
        topic="model parallelism",
    ),
    Fault(
        "AB",
        "wrong",
        "requeued",
        "a job that is started again looks for its checkpoint under another name",
        "compare the two starts: with which epoch does each begin, and under which name does it save?",
        'one name for all starts of a job, such as f"checkpoint-{job}.pt": a job that is requeued keeps its '
        "SLURM_JOB_ID, while SLURM_RESTART_COUNT counts. Each start goes on with the newest checkpoint",
        (('f"checkpoint-{job}.pt"', 'f"checkpoint-{job}-{start}.pt"'),),
        layouts=((1, 1),),
        topic="schedulers",
        ends=(2, 0, 1),
    ),
    Fault(
        "AC",
        "stops",
        "batch",
        "srun starts two torchruns on the node, and each of them wants to start all ranks",
        "srun puts the number of a task before each line: what did each task start, and did a rank fail?",
        "one task for each node, #SBATCH --ntasks-per-node=1: the task is torchrun, which starts the ranks, "
        "--nproc-per-node=2. (If the batch script asks for more tasks, srun ignores an --ntasks-per-node of its own)",
        (("--ntasks-per-node=1", "--ntasks-per-node=2"), ("--cpus-per-task=2", "--cpus-per-task=1")),
        layouts=((1, 1),),
        # With more nodes, only the first would have a torchrun.
        hides=r"(?s:\A(?!.*\bsrun\b).*)\btorchrun\b",
        topic="schedulers",
    ),
    Fault(
        "AD",
        "wrong",
        "logged",
        "the ranks do not read RANK and WORLD_SIZE, so that each of them trains alone",
        "only rank 0 writes the log: who has written each of its lines?",
        'dist.init_process_group("gloo") without rank and world_size: it reads RANK and WORLD_SIZE, which torchrun '
        "sets. SLURM_PROCID and SLURM_NTASKS are about the tasks of srun, and here a task is a torchrun",
        (
            (
                '    dist.init_process_group("gloo", timeout=timedelta(seconds=60))\n'
                "    rank, world_size = dist.get_rank(), dist.get_world_size()\n",
                '    rank = int(os.environ.get("SLURM_PROCID", 0))\n'
                '    world_size = int(os.environ.get("SLURM_NTASKS", 1))\n'
                "    limit = timedelta(seconds=60)\n"
                '    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=limit)\n',
            ),
        ),
        layouts=((1, 2), (2, 1)),
        # The job may get more ranks.
        hides=r"\bworld_size=2\b|\bworld_size = .*\b2\b",
        topic="schedulers",
    ),
)
