"""The process that serves TensorBoard: on 127.0.0.1 only, and no longer than the process that started it.

``python server.py LOGDIR PORT PARENT`` prints one line of JSON, {"port": ...}, as soon as it answers. It is started by
its path, so that it needs nothing of this package.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

# TensorBoard's own default of 1,000 would thin out a long curve; pictures and histograms are large, so few are kept.
SAMPLES = "scalars=10000,images=20,histograms=50"


def drop_replaced_runs() -> None:
    """Makes TensorBoard reread a run whose file was deleted, as when its cell is run again.

    Its own reader goes on looking for the deleted file, as long as the folder is there, and shows the old curve.
    """
    from tensorboard.backend.event_processing import directory_watcher

    load = directory_watcher.DirectoryWatcher.Load

    def load_or_drop(watcher: directory_watcher.DirectoryWatcher) -> Iterator:
        if watcher._path and not Path(watcher._path).exists():
            raise directory_watcher.DirectoryDeletedError(watcher._path)
        yield from load(watcher)

    directory_watcher.DirectoryWatcher.Load = load_or_drop


def main(arguments: list[str]) -> int:
    """Serves until the parent is gone; a port that is taken, or not ours to take, is replaced by a free one."""
    logdir, wanted, parent = arguments[0], int(arguments[1]), int(arguments[2])
    from tensorboard import program

    drop_replaced_runs()

    def launch(port: int) -> str:
        board = program.TensorBoard()
        # No --bind_all, ever: TensorBoard asks nobody for a password. load_fast would start one more process.
        options = [f"--logdir={logdir}", "--host=127.0.0.1", f"--port={port}", "--load_fast=false"]
        board.configure(argv=["tensorboard", *options, "--reload_interval=2", f"--samples_per_plugin={SAMPLES}"])
        return board.launch()

    try:
        url = launch(wanted)
    except program.TensorBoardServerException:
        url = launch(0)  # the system chooses, so that nobody can come between choosing and taking
    print(json.dumps({"port": urlsplit(url).port}), flush=True)
    # A kernel that is killed says goodbye to nobody, but its children get another parent.
    while os.getppid() == parent:
        time.sleep(0.25)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
