"""Stands in for Slurm, which may not be here: ``srun`` starts the tasks of a batch script on this machine.

With the folder of :func:`install` first in PATH, and the variables of :func:`read_request`, ``bash job.sbatch`` does
what ``sbatch job.sbatch`` does on a cluster, as far as a card needs it. This file is ``srun``: it needs the standard
library alone, so that it starts quickly.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

HOST = "localhost"  # the only node; all tasks run here
SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "l": "label"}
COUNTED = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
STARTED = "torchruns"  # the file with a line for each torchrun
REPORTS = "LAB_CARD_REPORTS"  # the variable with the folder for what the ranks report
MOST_TASKS = 4


def read_request(text: str) -> dict[str, str]:
    """Returns the variables that sbatch sets, from the ``#SBATCH`` lines of a batch script.

    Raises:
        ValueError: A number is none, or a quotation mark is missing.
    """
    head = re.match(r"(?:[ \t]*(?:#.*)?\n)*", text)[0]  # behind the first command, sbatch reads no more of them
    words = [word for line in re.findall(r"^#SBATCH\s+(.*)", head, re.M) for word in shlex.split(line, comments=True)]
    asked, _ = read_options(words)
    nodes, per_node = int(asked.get("nodes", 1)), int(asked.get("ntasks-per-node", 0))
    request = {
        "NNODES": nodes,
        "JOB_NUM_NODES": nodes,
        "NTASKS": int(asked.get("ntasks", 0)) or nodes * per_node,
        "NTASKS_PER_NODE": per_node,
        "CPUS_PER_TASK": int(asked.get("cpus-per-task", 0)),
    }
    return {f"SLURM_{name}": str(number) for name, number in request.items() if number}


def read_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the options that count here, by their long names, and what stands behind all options: the command."""
    found, rest = {}, list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        short = re.fullmatch(r"-([A-Za-z])(.*)", word)
        name, _, value = (short[1], "", short[2]) if short else word[2:].partition("=")
        name = SHORT.get(name, name)
        if name in COUNTED and not value:
            value = rest.pop(0) if rest else ""
        found[name] = value
    return found, rest


def install(folder: Path, python: str) -> None:
    """Writes ``srun``, ``scontrol``, ``torchrun`` and ``python`` into a folder.

    Args:
        folder: A new folder. Each torchrun that is started adds a line to its file ``torchruns``.
        python: What runs torchrun and the training script.
    """
    folder.mkdir()
    run = f"exec {shlex.quote(python)}"
    programs = {
        "srun": f'exec {shlex.quote(sys.executable)} -IS {shlex.quote(__file__)} "$@"',
        # show hostnames: here it is always the one.
        "scontrol": f"echo {HOST}",
        "torchrun": f'echo >> {shlex.quote(str(folder / STARTED))}\n{run} -m torch.distributed.run "$@"',
        "python": f'{run} "$@"',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def main() -> int:
    """``srun``: starts the tasks, shows what they print, and returns the highest of their exit codes."""
    options, command = read_options(sys.argv[1:])
    try:
        nodes, tasks = _count_tasks(options)
    except ValueError as error:
        print(f"srun: error: {error}", flush=True)
        return 1
    label, processes, readers = "label" in options, [], []
    for task in range(tasks):
        node = task * nodes // tasks
        numbers = {"PROCID": task, "NODEID": node, "LOCALID": task - -(-node * tasks // nodes), "NTASKS": tasks}
        env = os.environ | {f"SLURM_{name}": str(number) for name, number in numbers.items()}
        # The ranks of each task report into a folder of their own. What this machine is called may not resolve.
        env |= {"LAB_JOB_FOLDER": f"{os.environ[REPORTS]}/task{task}", "PET_LOCAL_ADDR": "127.0.0.1"}
        try:
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except (OSError, IndexError) as error:
            print(f"srun: error: execve(): {' '.join(command[:1])}: {error}", flush=True)
            return 2
        processes.append(process)
        readers.append(threading.Thread(target=_pass_on, args=(process.stdout, f"{task}: " if label else "")))
        readers[-1].start()
    for reader in readers:
        reader.join()
    codes = [process.wait() for process in processes]
    for task, code in enumerate(codes):
        if code:
            print(f"srun: error: {HOST}: task {task}: Exited with exit code {code}", flush=True)
    return max(code if code >= 0 else 128 - code for code in codes)


def _count_tasks(options: Mapping[str, str]) -> tuple[int, int]:
    """Returns the number of nodes and that of tasks, by the options and by what the batch script has asked for."""
    nodes = int(options.get("nodes") or os.environ.get("SLURM_NNODES") or 1)
    per_node = int(options.get("ntasks-per-node") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
    tasks = int(options.get("ntasks") or os.environ.get("SLURM_NTASKS") or nodes * per_node)
    if not 1 <= nodes <= tasks <= MOST_TASKS:
        raise ValueError(f"{tasks} tasks on {nodes} nodes; the stand-in for srun starts 1 to {MOST_TASKS}")
    if "ntasks-per-node" in options and tasks > nodes * per_node:
        # As srun of Slurm 22.05 does: the number of tasks that the batch script has asked for counts.
        why = f"doesn't match the requested tasks {tasks} with the number of requested nodes {nodes}"
        print(f"srun: Warning: can't honor --ntasks-per-node set to {per_node} which {why}. Ignoring it.", flush=True)
    return nodes, tasks


def _pass_on(lines: IO[bytes], label: str) -> None:
    for line in lines:
        os.write(1, label.encode() + line)


if __name__ == "__main__":
    sys.exit(main())
