"""torchrun on one node of a job, with limits that it does not set: who reaches its stores, and how long it waits.

``python -m nodelaunch.node.agent OPTIONS`` takes the options of ``python -m torch.distributed.run`` and does the same.
A node that is started by hand has no supervisor, so this program ends by itself when the others do not come
(``LAB_JOIN_TIMEOUT``), or when the time of the job is over (``LAB_LIMIT``), both in seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from nodelaunch.node.report import EVENTS, leave
from nodelaunch.node.stores import guard_stores

# The launcher and the supervisor end a job by the same limits, with a better message; they come first.
MARGIN, GRACE = 10.0, 5.0


def main() -> None:
    """Runs torchrun with this process's arguments."""
    keep_bounds()
    guard_stores()
    from torch.distributed.run import main as run_torchrun
    from torch.distributed.run import parse_args

    # The ranks compare it: torchrun uses the number of the node that comes last.
    os.environ["LAB_TOLD_NODES"] = parse_args(sys.argv[1:]).nnodes
    try:
        run_torchrun()
    except Exception:
        sys.excepthook(*sys.exc_info())
        leave(1)
    leave(0)


def keep_bounds() -> None:
    """Starts a thread that ends this process if no worker starts in time, and after the job's limit.

    Call it before a worker can have started.
    """
    join, limit = (float(os.environ[name]) for name in ("LAB_JOIN_TIMEOUT", "LAB_LIMIT"))
    events = Path(os.environ["LAB_JOB_FOLDER"], EVENTS)

    def measure() -> int:
        return events.stat().st_size if events.exists() else 0

    before = measure()  # of an earlier start by hand in the same folder

    def wait() -> None:
        time.sleep(min(join, limit) + MARGIN)
        if measure() == before:
            _end(f"No worker has started within {join:g} s: the other nodes did not come.")
        time.sleep(max(0.0, limit - join))
        _end(f"The job's time limit of {limit:g} s is over.")

    threading.Thread(target=wait, daemon=True, name="bounds").start()


def _end(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)  # torchrun then ends its workers
    time.sleep(GRACE)
    os._exit(1)  # it ignores signals while it waits, in C, for another node; its workers die with it


if __name__ == "__main__":
    main()
