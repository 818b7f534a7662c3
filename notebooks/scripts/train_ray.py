"""Trains a network in workers that Ray starts: python train_ray.py --workers 2 --epochs 3 --checkpoint run.pt."""

import argparse
import os
import secrets
import shutil
import tempfile
from pathlib import Path

# Ray reads these when it is imported. No usage statistics; who connects to its processes has to know a token; and one
# process less, which would watch for nodes that a cloud takes back.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_AUTH_MODE": "token"}

import ray
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, Subset
from train_ddp import count

from lab_utils import data, models


def train(config):
    """Trains, from the last checkpoint if there is one. Each worker calls it; Ray has made their process group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset = data.load(config["data"])
    train, valid = (Subset(split, range(len(split))[: config["images"]]) for split in (dataset.train, dataset.valid))
    # NEW: Ray gives the loader a DistributedSampler, wraps the network in DDP, and moves both to the device.
    loader = DataLoader(train, config["batch_size"], shuffle=True, drop_last=True)
    loader = prepare_data_loader(loader)
    valid = Subset(valid, range(rank, len(valid), world_size))

    torch.manual_seed(0)
    model = prepare_model(models.build(config["net"], num_classes=len(dataset.class_names)))
    optimizer = torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9)

    # NEW: after a failure Ray starts all workers again, and hands each the last checkpoint that was reported.
    first, device = 0, next(model.parameters()).device
    if found := ray.train.get_checkpoint():
        with found.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]

    for epoch in range(first, config["epochs"]):
        loader.sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        counts = count(model.module, DataLoader(valid, config["batch_size"]), device)
        dist.all_reduce(counts)
        loss, hits, images = counts.tolist()
        metrics = {"epoch": epoch + 1, "loss": loss / images, "accuracy": hits / images}
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        # NEW: all workers report, and one of them hands over a folder, which Ray copies to its storage.
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                torch.save(state, Path(folder, "state.pt"))
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def fit(train, config, storage):
    """Calls ``train`` in each of the workers, and returns its last report."""
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=config["workers"]),  # on any nodes that have a CPU for each
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            storage_path=storage,  # for checkpoints; all nodes have to see it
            failure_config=FailureConfig(max_failures=config["max_failures"]),
        ),
    )
    return trainer.fit()


def main(train=train):
    """Starts Ray here, or joins the nodes of --address, trains, and saves the last checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="shapes10, cinic10, ...; if not given, what is there")
    parser.add_argument("--images", type=int, help="only so many of each split")
    parser.add_argument("--net", default="tiny", choices=models.NAMES)
    parser.add_argument("--batch-size", type=int, default=64, help="images per process")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--checkpoint", type=Path, help="the file to save to")
    # NEW: Ray starts the processes, so the script says how many, and how often they may be started again.
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-failures", type=int, default=0)
    parser.add_argument("--address", help="of a Ray that runs already; if not given, one of its own")
    parser.add_argument("--storage", help="a folder that all nodes see; if not given, one in /tmp")
    config = vars(parser.parse_args())
    if config["workers"] < 2:
        parser.error("--workers: at least 2, since for one alone Ray makes neither a sampler nor DDP")

    # The paths of Ray's sockets have room for some 100 letters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        if config["address"]:
            ray.init(config["address"])  # with the token of that Ray: in RAY_AUTH_TOKEN, or in ~/.ray/auth_token
        else:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            # The least object store that Ray allows is 80 MB: nothing large goes through it here.
            own = {"num_cpus": config["workers"], "object_store_memory": 100_000_000, "_temp_dir": folder}
            ray.init(include_dashboard=False, **own)
        try:
            result = fit(train, config, config["storage"] or folder)
            print("epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}".format(**result.metrics))
            if config["checkpoint"]:
                shutil.copy(Path(result.checkpoint.path, "state.pt"), config["checkpoint"])
        finally:
            ray.shutdown()  # ends all processes of a Ray of our own


if __name__ == "__main__":
    main()
