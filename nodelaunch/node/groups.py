"""The process groups that a training script opens: two ranks that form no group of two each train alone."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

from nodelaunch.node.report import Events

# The variables that torchrun sets for a rank, and that a script may overwrite.
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# By framework, the setting that makes it use all ranks.
LIGHTNING = "Trainer(…, devices={devices}, num_nodes={nodes}, strategy='ddp')"
ACCELERATE = "Accelerator(cpu=True), or env={{'ACCELERATE_USE_CPU': 'true'}}, on nodes without GPUs"
FRAMEWORKS = {"lightning": LIGHTNING, "pytorch_lightning": LIGHTNING}
FRAMEWORKS |= {"transformers": "TrainingArguments(use_cpu=True) on nodes without GPUs", "accelerate": ACCELERATE}
# A script that joins its ranks without torch's own function.
JOINS = re.compile(r"ProcessGroup(Gloo|NCCL)\(|init_rpc\(")


class Groups:
    """The groups of one rank, reported to the launcher as they are opened."""

    def __init__(self, events: Events, script: str) -> None:
        self._events, self._sizes = events, set()
        self._told = {name: os.environ.get(name, "") for name in TOLD}
        self._source = Path(script).read_text(errors="replace")

    def watch(self) -> None:
        """Reports each group from now on; without the first report the launcher claims nothing about this rank."""
        from torch.distributed import distributed_c10d

        # Not public, and the one function through which init_process_group, new_group and DeviceMesh go (torch 2.11 to
        # 2.14). Frameworks have imported init_process_group by name; this one they find in its module.
        make_group = getattr(distributed_c10d, "_new_process_group_helper", None)
        if make_group is None:
            return

        @functools.wraps(make_group)
        def make_noted_group(group_size: int, *rest: Any, **more: Any) -> Any:
            made = make_group(group_size, *rest, **more)
            if group_size not in self._sizes:
                self._sizes.add(group_size)
                self._events.write("groups", sizes=sorted(self._sizes))
            return made

        distributed_c10d._new_process_group_helper = make_noted_group
        self._events.write("groups", sizes=[])

    def report_end(self) -> dict:
        """Makes the last reports, once the script has ended; returns why it may have joined no group, and the fix."""
        if JOINS.search(self._source) or "torchft" in sys.modules:
            self._events.write("elsewhere")
        # accelerate on nodes without GPUs opens a group of all ranks, and then trains without it (1.15).
        state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
        if state and state._shared_state.get("num_processes") == 1:
            self._events.write("groups", sizes=[1])
        return {"believed": self.list_beliefs(), "advice": self.advise()}

    def list_beliefs(self) -> list[str]:
        """The beliefs of a script that joined no group of all ranks, in words; the likeliest reason first."""
        words = self.list_changes()
        if slurm := [f"{name}={os.environ[name]}" for name in ("SLURM_PROCID", "SLURM_NTASKS") if name in os.environ]:
            words.append(f"it may believe {', '.join(slurm)}, which were set where the job was started")
        declared, read = r"--local[-_]rank", r"(?<![-\w])local_rank\b"  # an option that nobody reads explains nothing
        if all(re.search(word, self._source) for word in (declared, read)) and "LOCAL_RANK" not in self._source:
            words.append("it waits for --local_rank, which torchrun does not pass (it sets LOCAL_RANK)")
        if self._sizes:
            words.append(f"it opened a group of {max(self._sizes)}")
        elif not words and not self._find_framework():
            words.append("it did not call init_process_group: that may depend on an argument, or on the number of GPUs")
        if "cuda" in self._source and (torch := sys.modules.get("torch")) and not torch.cuda.device_count():
            words.append("it looks for GPUs, and torch sees none here")
        if framework := self._find_framework():
            words.append(f"{framework} goes by its own settings, and took this for a job of one process")
        return words

    def _find_framework(self) -> str:
        return next((name for name in FRAMEWORKS if name in sys.modules), "")

    def advise(self) -> str:
        """The change to a script whose framework joins the ranks; "" if the script has to join them itself."""
        local, size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(self._told["WORLD_SIZE"] or "1")
        return FRAMEWORKS.get(self._find_framework(), "").format(devices=local, nodes=size // local)

    def list_changes(self) -> list[str]:
        """Names what torchrun had told this rank and the script has changed."""
        now = {name: os.environ.get(name, "") for name in TOLD}
        changes = [
            f"{name} to {now[name]} (torchrun: {told})" for name, told in self._told.items() if now[name] != told
        ]
        return [f"it set {', '.join(changes)}"] if changes else []
