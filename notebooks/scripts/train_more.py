"""Lightning's extras, a line each: train_more.py --folder runs/lightning, or under torchrun with --devices 2."""

import argparse
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.tuner import Tuner
from slowest_rank import SlowestRank
from torch.utils.data import DataLoader, Subset
from train_lightning import QUIET, Classifier

import nodelaunch as launch
from lab_utils import data


def main():
    """Trains with callbacks, two loggers, bfloat16, accumulation and clipping; reports the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--find-lr", action="store_true", help="try learning rates instead, from small to large")
    args = parser.parse_args()
    dataset = data.load(args.data)
    train, valid = (Subset(split, range(args.images)) for split in (dataset.train, dataset.valid))
    loader, check = DataLoader(train, 32, shuffle=True), DataLoader(valid, 64)
    L.seed_everything(0)
    classifier = Classifier("tiny", len(dataset.class_names), 0.05)
    if args.find_lr:
        # One step with each rate, each larger than the last, until the loss explodes. It changes classifier.lr.
        trainer = L.Trainer(devices=1, max_epochs=5, **QUIET)
        found = Tuner(trainer).lr_find(classifier, loader, num_training=60)
        launch.report({"rates": found.results["lr"], "losses": found.results["loss"], "chosen": classifier.lr})
        return
    loggers = [TensorBoardLogger(args.folder, name="board"), WandbLogger(save_dir=args.folder, offline=True)]
    best = ModelCheckpoint(args.folder, filename="best", monitor="loss")
    trainer = L.Trainer(
        max_epochs=4,
        devices=args.devices,
        precision="bf16-mixed",  # lab 1: autocast around the step
        accumulate_grad_batches=2,  # lab 5: two backwards per step, no_sync for the first
        gradient_clip_val=1.0,
        logger=loggers,  # labs 2 and 3: one run each, of rank 0
        log_every_n_steps=5,
        callbacks=[best, EarlyStopping("loss", patience=1), SlowestRank()],
        profiler="simple",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier, loader, check)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    steps = {"taken": trainer.global_step, "epochs": trainer.current_epoch, "best": float(best.best_model_score)}
    launch.report(steps | {"logged": logged, "kept": best.best_model_path})


if __name__ == "__main__":
    main()
