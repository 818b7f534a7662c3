"""Stands in for programs that a batch script calls, so that it can be tried without Slurm and without training.

:func:`install` writes ``srun``, ``scontrol``, ``hostname`` and ``torchrun`` into a folder that leads in PATH. Each of
them runs this file, which needs the standard library alone. ``srun`` runs its command once for each task, one after
the other, with the variables of Slurm; ``torchrun`` only notes its arguments. A torchrun that is not found by PATH, and
a script that is started without one, import torch: what they find is a small package that notes them, too.
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
SHORT = {"N": "nodes", "n": "ntasks", "w": "nodelist", "c": "cpus-per-task", "l": "label", "K": "kill-on-bad-exit"}
# Options of srun without a value, or with one only after "=".
FLAG_NAMES = """
    label kill-on-bad-exit unbuffered exact overlap exclusive verbose quiet no-kill pty immediate contiguous overcommit
    multi-prog disable-status preserve-env oversubscribe hold help usage version spread-job use-min-nodes
"""
FLAGS = frozenset([*FLAG_NAMES.split(), *"KluvQEksOH"])
MOST_TASKS = 8
NODE = """NodeName={name} Arch=x86_64 CoresPerSocket=1
   CPUAlloc=2 CPUEfctv=2 CPUTot=2 CPULoad=0.10
   AvailableFeatures=(null)
   ActiveFeatures=(null)
   Gres=(null)
   NodeAddr={address} NodeHostName={host} Version=22.05.8
   OS=Linux
   RealMemory=2000 AllocMem=0 FreeMem=1800 Sockets=2 Boards=1
   State=ALLOCATED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
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
    python = folder / "python"
    (python / "torch").mkdir(parents=True)
    (python / "torch" / "__init__.py").write_text(TORCH.format(file=__file__))
    (folder / "nodes.json").write_text(json.dumps(nodes))
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(__file__)} {name} "$@"\n')
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
        return _show(words, nodes)
    if name == "hostname":
        address = any(word.lower() in ("-i", "--ip-address", "--all-ip-addresses") for word in words)
        print(here["address"] if address else here["host"])
    if name in ("torchrun", "python"):
        note = {"program": name, "words": words, "node": here["name"], "step": "SLURM_STEP_ID" in os.environ}
        with (folder / STARTED).open("a") as file:
            file.write(json.dumps(note) + "\n")
    return 0


def _show(words: Sequence[str], nodes: Sequence[dict[str, str]]) -> int:
    """``scontrol show hostnames`` and ``scontrol show node``; other commands do nothing."""
    flags = [word for word in words if word.startswith("-")]
    command = [word for word in words if not word.startswith("-")]
    if len(command) > 1 and command[:1] == ["show"] and "hostnames".startswith(command[1].lower()):
        given = command[2] if len(command) > 2 else os.environ["SLURM_JOB_NODELIST"]
        names = [node["name"] for node in nodes] if given == os.environ["SLURM_JOB_NODELIST"] else given.split(",")
        print(*filter(None, names), sep="\n")
    elif len(command) > 1 and command[:1] == ["show"] and command[1].lower() in ("node", "nodes"):
        wanted = [node for node in nodes if len(command) == 2 or node["name"] in command[2].split(",")]
        if not wanted:
            print(f"Node {command[2]} not found")
            return 1
        for node in wanted:
            text = NODE.format(**node)
            print(" ".join(text.split()) if {"-o", "--oneliner"} & set(flags) else text)
    return 0


def read_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns srun's options by their long names, and what stands behind them: the command."""
    found, rest = {}, list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, equals, value = word[1], word[2:], word[2:]
        if not equals and name not in FLAGS:
            value = rest.pop(0) if rest else ""
        found[SHORT.get(name, name)] = value.removeprefix("=")
    return found, rest


def _run_tasks(words: Sequence[str], nodes: Sequence[dict[str, str]], folder: Path) -> int:
    """``srun``: runs the command once for each task; returns the highest exit code."""
    options, command = read_options(words)
    if names := [name for name in options.get("nodelist", "").split(",") if name]:
        nodes = [node for node in nodes if node["name"] in names]
    try:
        nodes = nodes[: int((options.get("nodes") or str(len(nodes))).split("-")[-1])]
        # As in Slurm 22.05: what the batch script has asked for counts more than srun's own tasks for each node.
        each = int(options.get("ntasks-per-node") or 1)
        tasks = int(options.get("ntasks") or os.environ.get("SLURM_NTASKS") or len(nodes) * each)
    except ValueError as error:
        print(f"srun: error: {error}", file=sys.stderr)
        return 1
    if not nodes or not command or not 1 <= tasks <= MOST_TASKS:
        said = "no command given" if nodes else "the nodes are none of the job's"
        print(f"srun: error: {said if not nodes or not command else f'{tasks} tasks'}", file=sys.stderr)
        return 1
    count, code = min(len(nodes), tasks), 0
    for task in range(tasks):
        place = task * count // tasks
        numbers = {"PROCID": task, "NODEID": place, "LOCALID": task - -(-place * tasks // count), "STEP_ID": 0}
        env = os.environ | {f"SLURM_{name}": str(number) for name, number in numbers.items()}
        env |= {"SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(count), **_find_by(folder)}
        env |= {"SLURMD_NODENAME": nodes[place]["name"], "SLURM_LAUNCH_NODE_IPADDR": nodes[0]["address"]}
        env |= {"HOSTNAME": nodes[place]["host"]}
        try:
            code = max(code, abs(subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=False).returncode))
        except OSError as error:
            print(f"srun: error: execve(): {command[0]}: {error.strerror}", file=sys.stderr)
            return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
