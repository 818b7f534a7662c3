"""Trains a network in several processes: torchrun --nproc-per-node=2 train_ddp.py --net tiny --batch-size 32.

This is train_single.py and the lines, each marked NEW, that several processes need.
"""

import argparse
import contextlib  # NEW
import hashlib
import os  # NEW
import time
from datetime import timedelta  # NEW

import torch
import torch.distributed as dist  # NEW
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP  # NEW

import nodelaunch as launch
from lab_utils import data, models
from lab_utils.timing import Timeline, synchronize
from lab_utils.training import Checkpoints


def parse_arguments():
    """Reads the command line, which is the same on every process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="shapes10, cinic10, ...; where not given, what is there")
    parser.add_argument("--net", default="tiny", choices=models.NAMES)
    parser.add_argument("--stem", default="cifar", choices=("cifar", "imagenet"))
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and backward pass")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes per step of the optimizer")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=10**9, help="stop at this step, counted from the first start")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--frozen-bn", action="store_true", help="BatchNorm with stored statistics, not the batch's")
    parser.add_argument("--checkpoints", help="folder to save into, and to resume from")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--keep-gradients", action="store_true", help="keep and report the last gradients, to compare")
    parser.add_argument("--evaluate", action="store_true", help="measure on the valid split at the end")
    parser.add_argument("--timeline", action="store_true", help="record each step's phases; slows a GPU down")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a process waits for another")  # NEW
    return parser.parse_args()


def count(logits, labels):
    """Sums, not means, because sums add up over batches and processes: loss, hits, images."""
    loss = F.cross_entropy(logits.detach(), labels, reduction="sum")
    hits = (logits.argmax(1) == labels).sum()
    # float64 counts exactly up to 2**53, so that one tensor holds all three.
    return torch.stack([loss.double(), hits.double(), torch.ones_like(loss).double() * len(labels)])


def add_up(counts):
    """Adds up what all processes counted."""  # NEW
    # Place 4: A mean of the processes' means would be wrong wherever they have unequal numbers of images.
    ### BEGIN SOLUTION
    dist.all_reduce(counts)  # NEW
    ### END SOLUTION
    return counts.cpu()


def flatten(tensors):
    """All numbers of some tensors, as a list that can be reported."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()


@torch.no_grad()
def evaluate(model, batches, dtype):
    """Mean loss and accuracy over all images of a split."""
    # Stored statistics: the guess for an image must not depend on which others are in its batch.
    model.eval()
    counts = sum(count(model(images.to(dtype)), labels) for images, labels in batches)
    loss, hits, images = add_up(counts).tolist()
    return {"loss": loss / images, "accuracy": hits / images, "images": int(images)}


def main():
    """Trains, from the last checkpoint where there is one, and reports what was measured."""
    args = parse_arguments()
    # Place 1: torchrun tells each process who it is: LOCAL_RANK is its number on this node, and so its GPU; RANK its
    # number in the job. Without a timeout a process waits 10 minutes (nccl) or 30 (gloo) for one that does not answer.
    ### BEGIN SOLUTION
    local_rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()  # NEW
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")  # NEW
    if cuda:  # NEW
        torch.cuda.set_device(device)  # NEW
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)  # NEW
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=device_id)  # NEW
    ### END SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()  # NEW
    dtype = getattr(torch, args.dtype)

    dataset = data.load(args.data)
    # Place 2: Full batches only (drop_last): the mean over batches is then the mean over images.
    # The seed is the same on every rank: one order of all images, of which rank r takes every world_size-th.
    ### BEGIN SOLUTION
    share = {"device": device, "rank": rank, "world_size": world_size}  # NEW
    ### END SOLUTION
    batches = dataset.batches("train", args.batch_size, seed=args.seed, drop_last=True, **share)

    # The same seed gives the same weights at the start.
    torch.manual_seed(args.seed)
    model = models.build(args.net, num_classes=len(dataset.class_names), stem=args.stem).to(device, dtype)
    # A batch's own statistics change when the batch is divided, stored ones do not: only then can runs be equal.
    model.train(not args.frozen_bn)
    # SGD is linear in the gradient, so that equal gradients can be told by equal weights; Adam would hide a factor.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    # `position` counts images of this epoch's order: a resumed run goes on with the next one, whatever its batch size.
    # `history` has a row of counts per step; `seen` says how often each image came in each epoch.
    step = first_epoch = position = 0
    history = torch.zeros(0, 3, dtype=torch.float64)
    seen = torch.zeros(args.epochs, len(dataset.train), dtype=torch.int32)
    checkpoints = Checkpoints(args.checkpoints) if args.checkpoints else None
    # Rank 0 alone has saved, perhaps on a disk that the other node does not have: it tells the others what it found.
    box = [checkpoints.load() if checkpoints and rank == 0 else None]  # NEW
    dist.broadcast_object_list(box, src=0)  # NEW
    found = box[0]  # NEW
    if found:
        # The optimizer's momentum belongs to the state as much as the weights: without it the curve has a kink.
        step, state = found
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, position, history = state["epoch"], state["position"], state["history"]
        # Images counted after this checkpoint was saved were lost with it and will come again: none is counted twice.
        seen[: len(state["seen"])] = state["seen"][: args.epochs]

    # Place 3: From here on DDP averages the gradients over all ranks, bucket by bucket, while backward() still runs. It
    # sends the parameters once, now; they stay equal because every rank makes the same step from the same gradients.
    ### BEGIN SOLUTION
    model = DDP(model)  # NEW
    ### END SOLUTION

    seconds, timeline = [], Timeline(device, enabled=args.timeline)
    counts, handed_out = [], torch.zeros_like(seen)  # since the last checkpoint
    for epoch in range(first_epoch, args.epochs):
        # Another order in every epoch: without this line each epoch would repeat the first one's.
        batches.set_epoch(epoch, start=position)
        stream = iter(batches)
        steps = min(len(batches) // args.accumulate, args.max_steps - step)
        for left in reversed(range(steps)):
            timeline.step, began = step, time.perf_counter()
            optimizer.zero_grad()
            counts.append(0)
            for further in reversed(range(args.accumulate)):  # NEW
                # Only the last pass of a step needs the sum over ranks; DDP decides when it runs forward.
                sync = model.no_sync() if further else contextlib.nullcontext()  # NEW
                with timeline.phase("data"):
                    images, labels = next(stream)
                with timeline.phase("forward"), sync:  # NEW
                    logits = model(images.to(dtype))
                    loss = F.cross_entropy(logits, labels)
                with timeline.phase("backward"):
                    # backward() adds to the gradients: divided, they add up to the mean over the passes.
                    (loss / args.accumulate).backward()
                # Nothing is read from a GPU here: a reading would make the program wait for it.
                counts[-1] += count(logits, labels)
                handed_out[epoch] += torch.bincount(batches.chosen, minlength=len(dataset.train))
                position += len(labels) * world_size  # NEW
            # No communication here: at this point every rank has the same gradients.
            with timeline.phase("step"):
                optimizer.step()
            synchronize(device)  # a GPU runs behind the program: without waiting for it we would time nothing
            seconds.append(time.perf_counter() - began)
            step += 1

            # Seldom, for this is where the program waits for the device and for the disk; and at each epoch's end.
            if step % args.every == 0 or left == 0:
                history = torch.cat([history, add_up(torch.stack(counts))])
                seen += add_up(handed_out.to(device))
                counts, handed_out = [], torch.zeros_like(seen)
                state = {"epoch": epoch, "position": position, "history": history, "seen": seen}
                state |= {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}  # NEW
                if args.keep_gradients:
                    state["gradients"] = [parameter.grad for parameter in model.parameters()]
                if rank == 0:  # NEW
                    print(f"step {step}: loss {history[-1, 0] / history[-1, 2]:.4f}", flush=True)  # NEW
                # Place 5: Where `checkpoints` is not None, one process writes. Nobody reads the file before the next
                # start, so that nobody waits for it.
                ### BEGIN SOLUTION
                if checkpoints and rank == 0:  # NEW
                    checkpoints.save(step, state)
                ### END SOLUTION
        position = 0

    # BatchNorm's statistics are each rank's own; DDP sends rank 0's before every forward, and nobody after the last.
    for buffer in model.buffers():  # NEW
        dist.broadcast(buffer, src=0)  # NEW
    # One number for all weights: two runs are the same, bit by bit, exactly if it is.
    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    valid = dataset.batches("valid", args.batch_size, **share)
    launch.report(
        {
            "losses": (history[:, 0] / history[:, 2]).tolist(),
            "accuracy": float(history[:, 1].sum() / history[:, 2].sum()),
            "images": int(history[:, 2].sum()),
            # Per epoch: how many images came 0 times, once, twice, ...
            "seen": [torch.bincount(times).tolist() for times in seen],
            "device": device.type,
            "seconds": seconds,
            "timeline": timeline.as_rows(),
            # All numbers of a small net, for runs that are to be compared.
            "weights": flatten(model.parameters()) if args.keep_gradients else [],
            "gradients": flatten(p.grad for p in model.parameters()) if args.keep_gradients else [],
            "sha256": hashlib.sha256(weights).hexdigest(),
            # Not the wrapped model: its forward would talk to the other ranks, which may have fewer batches.
            "valid": evaluate(model.module, valid, dtype) if args.evaluate else {},  # NEW
        }
    )
    dist.destroy_process_group()  # NEW


if __name__ == "__main__":
    main()
