"""Your own callback: how long the slowest rank took for a step, as one number for the whole job."""

import time

import lightning as L


class SlowestRank(L.Callback):
    """Logs `slowest`: the seconds of the longest step of an epoch, of all ranks."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        """Lightning calls this before each batch."""
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Lightning calls this after each batch."""
        ### BEGIN SOLUTION
        seconds = time.perf_counter() - self.began
        pl_module.log("slowest", seconds, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        ### END SOLUTION
