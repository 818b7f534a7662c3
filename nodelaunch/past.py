"""Tells an earlier job again, from its log: for a cell whose tab was closed, or a kernel that was started anew."""

from __future__ import annotations

import time

from lab_common.text import clean
from nodelaunch.failure import diagnose
from nodelaunch.node.output import read_lines
from nodelaunch.node.processes import find_jobs
from nodelaunch.result import find_log
from nodelaunch.state import JobState


def last(job_id: str | None = None) -> None:
    """Prints what a job of this machine showed and what came of it; the newest where no id is given.

    Raises:
        LabError: There is none.
    """
    log = find_log(job_id)
    with log.open("rb") as file:
        heard = [line.partition(b": ") for line in read_lines(file)]
    names = list(dict.fromkeys(node.decode(errors="replace") for node, _, _ in heard))
    state = JobState(names, [""] * len(names))
    said = [state.read(node.decode(errors="replace"), rest) for node, _, rest in heard]
    job = log.parent.name
    print(f"job {job}, {time.strftime('%d %B %Y, %H:%M', time.localtime(log.stat().st_mtime))}")
    print(*(clean(line) for line in said if line is not None), sep="\n")
    if find_jobs({"id": job})["jobs"]:
        print(f"It still runs. To end it: python -m nodelaunch stop {job}")
    elif not (state.errors or all(part.ended for part in state.nodes.values())):
        print("It was cut off: its launcher was gone before its end.")
    else:
        print(diagnose(state) or "It ended well.")
    print(f"log: {log}")
