"""Trains two ranks as a notebook would start them: ipython try_strategies.py ddp compute ddp_notebook."""

import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from train_lightning import QUIET, Classifier

torch.set_num_threads(2)
images, labels = torch.randn(64, 3, 32, 32), torch.arange(64) % 10
for strategy in sys.argv[1:]:
    if strategy == "compute":  # with both threads, as an earlier cell may have done
        torch.ones(1000, 1000).exp()
        continue
    try:
        trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, **QUIET)
        trainer.fit(Classifier("tiny", 10, 0.05), DataLoader(TensorDataset(images, labels), 16))
        print(f"{strategy}: trained", flush=True)
    except Exception as error:  # whatever it is, its first sentence is what a learner would read
        print(f"{strategy}: {type(error).__name__}: {str(error).partition('. ')[0]}", flush=True)
