"""The reference loop that the labs measure and change, its accuracy, and checkpoints that survive a crash."""

from lab_utils.training.checkpoints import Checkpoints
from lab_utils.training.loop import Epoch, Step, count_topk, evaluate, plain_step, train_epoch

__all__ = ["Checkpoints", "Epoch", "Step", "count_topk", "evaluate", "plain_step", "train_epoch"]
