"""Stands in for programs that a batch script calls, so that it can be tried without Slurm.

:func:`install` writes ``srun``, ``scontrol``, ``hostname`` and ``torchrun`` into a folder that leads in PATH. They run
this file, which needs the standard library alone, so that it starts quickly. ``srun`` runs its command once for each
task, one after the other, with the variables of Slurm. Nothing is trained: ``torchrun`` only notes its arguments. A
torchrun that is not found by PATH, and a script that is started without one, import torch: what they find is a small
package that notes them, too.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = "LAB_STAND_INS"  # the variable with the folder of the programs
STARTED = "started.jsonl"
PROGRAMS = ("srun", "scontrol", "hostname", "torchrun", "module")
SHORT = {"N": "nodes", "n": "ntasks", "w": "nodelist"}
# Options of srun without a value, or with one only after "=".
FLAG_NAMES = "label kill-on-bad-exit unbuffered exact overlap exclusive verbose quiet"
FLAGS = frozenset([*FLAG_NAMES.split(), *"lKuvQs"])
MOST_TASKS = 4
# The lines of `scontrol show node` that a script may look for.
NODE = """NodeName={name} Arch=x86_64 CoresPerSocket=1
   CPUAlloc=2 CPUEfctv=2 CPUTot=2 CPULoad=0.10
   NodeAddr={address} NodeHostName={host} Version=22.05.8
   RealMemory=2000 AllocMem=0 FreeMem=1800 Sockets=2 Boards=1
   Partitions=lab
"""
# In place of torch: notes who imports it, and ends it.
TORCH = """import os, sys
given = sys.orig_argv
launched = given[given.index("-m") + 1] == "torch.distributed.run" if "-m" in given else False
launched = launched or os.path.basename(sys.argv[0]) == "torchrun"
words = sys.argv[1:] if launched else sys.argv
os.execv(sys.executable, [sys.executable, "-IS", {file!r}, "torchrun" if launched else "python", *words])
"""


def install(folder: Path, nodes: Sequence[dict[str, str]]) -> dict[str, str]:
    """Writes the programs into a new folder.

    Args:
        folder: Where to.
        nodes: The nodes of the job: ``name`` in Slurm, ``address``, and ``host``, the name that it has itself.

    Returns:
        The variables with which the programs are found.
    """
    folder.mkdir()
    (folder / "nodes.json").write_text(json.dumps(nodes))
    (folder / "python" / "torch").mkdir(parents=True)
    (folder / "python" / "torch" / "__init__.py").write_text(TORCH.format(file=__file__))
    this = f"{shlex.quote(sys.executable)} -IS {shlex.quote(__file__)}"
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {this} {name} "$@"\n')
        program.chmod(0o755)
    return {FOLDER: str(folder), **_find_by(folder)}


def _find_by(folder: Path) -> dict[str, str]:
    first = {"PATH": str(folder), "PYTHONPATH": str(folder / "python")}
    return {name: os.pathsep.join(filter(None, (path, os.environ.get(name)))) for name, path in first.items()}


def read_started(folder: Path) -> list[dict]:
    """Returns what was started: the program, its words, on which node, and whether by srun."""
    file = folder / STARTED
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> int:
    """Does what the program of this name would; returns the exit code."""
    name, words, folder = sys.argv[1], sys.argv[2:], Path(os.environ[FOLDER])
    nodes = json.loads((folder / "nodes.json").read_text())
    here = next((node for node in nodes if node["name"] == os.environ.get("SLURMD_NODENAME")), nodes[0])
    if name == "srun":
        return _run_tasks(words, nodes, folder)
    if name == "scontrol":
        return _show([word for word in words if not word.startswith("-")], nodes)
    if name == "hostname":
        address = any(word.lower() in ("-i", "--ip-address", "--all-ip-addresses") for word in words)
        print(here["address"] if address else here["host"])
    if name in ("torchrun", "python"):
        note = {"program": name, "words": words, "node": here["name"], "step": "SLURM_STEP_ID" in os.environ}
        with (folder / STARTED).open("a") as file:
            file.write(json.dumps(note) + "\n")
    return 0


def _show(command: Sequence[str], nodes: Sequence[dict[str, str]]) -> int:
    """``scontrol show hostnames`` and ``scontrol show node NAME``; other commands do nothing."""
    if command[:2] == ["show", "hostnames"]:
        print(*(node["name"] for node in nodes), sep="\n")
    elif command[:2] in (["show", "node"], ["show", "nodes"]):
        wanted = [node for node in nodes if len(command) == 2 or node["name"] in command[2].split(",")]
        for node in wanted:
            print(NODE.format(**node))
        return int(not wanted)
    return 0


def _run_tasks(words: Sequence[str], nodes: Sequence[dict[str, str]], folder: Path) -> int:
    """``srun``: runs the command once for each task; returns the highest exit code."""
    options, command = _read_options(words)
    if names := options.get("nodelist"):
        nodes = [node for node in nodes if node["name"] in names.split(",")]
    nodes = nodes[: int((options.get("nodes") or str(len(nodes))).split("-")[-1])]
    each = int(options.get("ntasks-per-node") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
    tasks = int(options.get("ntasks") or os.environ.get("SLURM_NTASKS") or len(nodes) * each)
    if not nodes or not command or not 1 <= tasks <= MOST_TASKS:
        print(f"srun: error: {len(nodes)} nodes, {tasks} tasks, command: {command}", file=sys.stderr)
        return 1
    nodes, codes = nodes[:tasks], []
    for task in range(tasks):
        place = task * len(nodes) // tasks
        numbers = {"PROCID": task, "NODEID": place, "LOCALID": task - -(-place * tasks // len(nodes)), "STEP_ID": 0}
        env = os.environ | {f"SLURM_{name}": str(number) for name, number in numbers.items()}
        env |= {"SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(len(nodes)), **_find_by(folder)}
        env |= {"SLURMD_NODENAME": nodes[place]["name"], "HOSTNAME": nodes[place]["host"]}
        try:
            codes.append(subprocess.run(command, env=env, stdin=subprocess.DEVNULL).returncode)
        except OSError as error:
            print(f"srun: error: execve(): {command[0]}: {error.strerror}", file=sys.stderr)
            return 2
    return max(map(abs, codes))


def _read_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns srun's options by their long names, and the command after them."""
    found, rest = {}, list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        name, equals, value = word[2:].partition("=") if word.startswith("--") else (word[1], word[2:], word[2:])
        if not equals and name not in FLAGS:
            value = rest.pop(0) if rest else ""
        found[SHORT.get(name, name)] = value.removeprefix("=")
    return found, rest


if __name__ == "__main__":
    sys.exit(main())
