"""Trains a network in one process: python train_single.py --net tiny --batch-size 64 --epochs 1.

train_ddp.py is this script and the lines, each marked NEW, that several processes need.
"""

import argparse
import hashlib
import time

import torch
import torch.nn.functional as F

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
    return parser.parse_args()


def count(logits, labels):
    """Sums, not means, because sums add up over batches and processes: loss, hits, images."""
    loss = F.cross_entropy(logits.detach(), labels, reduction="sum")
    hits = (logits.argmax(1) == labels).sum()
    # float64 counts exactly up to 2**53, so that one tensor holds all three.
    return torch.stack([loss.double(), hits.double(), torch.ones_like(loss).double() * len(labels)])


def add_up(counts):
    """Adds up what all processes counted; here there is one."""
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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)

    dataset = data.load(args.data)
    # Full batches only (drop_last): the mean over batches is then the mean over images.
    share = {"device": device}
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
    found = checkpoints.load() if checkpoints else None
    if found:
        # The optimizer's momentum belongs to the state as much as the weights: without it the curve has a kink.
        step, state = found
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, position, history = state["epoch"], state["position"], state["history"]
        # Images counted after this checkpoint was saved were lost with it and will come again: none is counted twice.
        seen[: len(state["seen"])] = state["seen"][: args.epochs]

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
            for _ in range(args.accumulate):
                with timeline.phase("data"):
                    images, labels = next(stream)
                with timeline.phase("forward"):
                    logits = model(images.to(dtype))
                    loss = F.cross_entropy(logits, labels)
                with timeline.phase("backward"):
                    # backward() adds to the gradients: divided, they add up to the mean over the passes.
                    (loss / args.accumulate).backward()
                # Nothing is read from a GPU here: a reading would make the program wait for it.
                counts[-1] += count(logits, labels)
                handed_out[epoch] += torch.bincount(batches.chosen, minlength=len(dataset.train))
                position += len(labels)
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
                state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                if args.keep_gradients:
                    state["gradients"] = [parameter.grad for parameter in model.parameters()]
                print(f"step {step}: loss {history[-1, 0] / history[-1, 2]:.4f}", flush=True)
                if checkpoints:
                    checkpoints.save(step, state)
        position = 0

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
            "valid": evaluate(model, valid, dtype) if args.evaluate else {},
        }
    )


if __name__ == "__main__":
    main()
