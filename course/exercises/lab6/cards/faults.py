"""The faults on the cards: the change that breaks the job, the cause, and how the symptom tells it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PILES = ("stops", "unmatched", "wrong")
# Cards of a later topic are drawn, and numbered, after the others: loading comes only in lab 7.
TOPICS = ("data parallelism", "loading", "model parallelism", "schedulers")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        letter: How the lab's list of causes calls it.
        pile: ``"stops"``: a rank's own error ends the job; ``"unmatched"``: ranks whose collectives do not match;
            ``"wrong"``: it runs to its end, and its numbers are wrong.
        job: The job that it is in, ``"ddp"``, ``"dp"``, ``"loader"``, ``"sharded"`` or ``"logged"``.
        cause: What is wrong, in a few words.
        sign: What in the symptom points to it; the hint of who named another one.
        mend: What to do about it; the hint of who has named it and not yet mended it.
        edits: Pairs of what stands in the right job and what stands in the broken one.
        layouts: Nodes, and processes per node, on which the mended job is tried, one after the other; the broken one
            runs on the first. At most two processes in all, so that no card takes more memory than another.
        points: With how many points the mended job is tried, one after the other; the broken one has the first.
        topic: What it is about, one of ``TOPICS``.
    """

    letter: str
    pile: str
    job: str
    cause: str
    sign: str
    mend: str
    edits: tuple[tuple[str, str], ...]
    layouts: tuple[tuple[int, int], ...] = ((2, 1),)
    points: tuple[int, ...] = (257,)
    topic: str = TOPICS[0]

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
    return Path(__file__).with_name(f"{job}_job.py").read_text(encoding="utf-8")


_SAMPLER = (
    "    sampler = DistributedSampler(dataset, drop_last=True)\n"
    "    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)\n"
)
_SHARD = '    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), reshard_after_forward=True)\n'
_BUILD = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
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
        "a rank reads what another one is still writing: a barrier is missing",
        "a file is missing on one rank only, and rank 0 is still making it",
        "dist.barrier() after rank 0's preparation, on every rank; a sleep is too short on a slow disk",
        (("        prepare(folder)\n    dist.barrier()\n", "        prepare(folder)\n"),),
    ),
    Fault(
        "C",
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
        "D",
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
        points=(257, 319, 290),
    ),
    Fault(
        "E",
        "wrong",
        "ddp",
        "each rank reports the accuracy of its own part as that of all points",
        "compare the ranks: of one model and one set of points they have to report one accuracy",
        "add up the counts over the ranks, dist.all_reduce(counts), before they are divided",
        (("        dist.all_reduce(counts)\n", ""),),
    ),
    Fault(
        "F",
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
    ),
    Fault(
        "G",
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
    ),
    Fault(
        "H",
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
        "I",
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
        "J",
        "wrong",
        "ddp",
        "the forward pass goes around DDP, so that no gradient is averaged",
        "compare the weights of the two ranks after each epoch",
        "train through the wrapper, model(inputs): only its forward pass makes backward() average the gradients",
        (("F.cross_entropy(model(inputs", "F.cross_entropy(model.module(inputs"),),
    ),
    Fault(
        "K",
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
        "L",
        "stops",
        "ddp",
        "every rank saves the checkpoint, all into the same file",
        "the training is over, and a rank does not find its file: which ranks have saved, and into which file?",
        "one rank saves: `if rank == 0`. The ranks have the same weights, so one checkpoint is enough",
        (("    if rank == 0:\n        save(model", "    save(model"),),
    ),
    Fault(
        "M",
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
        "N",
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
        "O",
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
        "P",
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
        "Q",
        "wrong",
        "sharded",
        "the optimizer is built before the model is sharded, and holds the old parameters",
        "the loss is the same after all epochs, to the last digit: what does optimizer.step() change?",
        "build the optimizer after fully_shard: it replaces the model's parameters by sharded ones",
        ((_SHARD + _BUILD, _BUILD + _SHARD),),
        topic="model parallelism",
    ),
    Fault(
        "R",
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
        layouts=((1, 2), (2, 1), (1, 1)),
        topic="schedulers",
    ),
)
