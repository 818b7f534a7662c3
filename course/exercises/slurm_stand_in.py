"""Stands in for programs that a batch script calls, so that it can be tried without Slurm.

:func:`install` writes ``srun``, ``scontrol``, ``hostname`` and ``torchrun`` into a folder that leads in PATH. They run
this file, which needs the standard library alone, so that it starts quickly. ``srun`` runs its command once for each
task, with the variables of Slurm.

If nothing is to be trained, as in lab 13, ``torchrun`` only notes its arguments, and the tasks run one after the
other. A torchrun that is not found by PATH, and a script that is started without one, import torch: what they find is a
small package that notes them, too. In lab 6 torchrun is the real one, and the tasks run side by side, on this machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

FOLDER = "LAB_STAND_INS"  # the variable with the folder of the programs
REPORTS = "LAB_CARD_REPORTS"  # the variable with the folder for what the ranks of a real torchrun report
STARTED = "started.jsonl"
PROGRAMS = ("srun", "scontrol", "hostname", "torchrun", "module")
SHORT = {"N": "nodes", "n": "ntasks", "w": "nodelist", "c": "cpus-per-task", "l": "label", "K": "kill-on-bad-exit"}
# Options of srun and sbatch without a value, or with one only after "=".
FLAG_NAMES = """
    label kill-on-bad-exit unbuffered exact overlap exclusive verbose quiet no-kill pty immediate contiguous overcommit
    multi-prog disable-status preserve-env oversubscribe hold help usage version spread-job use-min-nodes
    requeue no-requeue wait
"""
FLAGS = frozenset([*FLAG_NAMES.split(), *"KluvQEksOH"])
MOST_TASKS = 4
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


def read_request(text: str) -> dict[str, str]:
    """Returns the variables that sbatch sets, from the ``#SBATCH`` lines of a batch script.

    Raises:
        ValueError: A number is invalid, or a quotation mark is missing.
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


def install(folder: Path, nodes: Sequence[dict[str, str]], python: str = "") -> dict[str, str]:
    """Writes the programs into a new folder.

    Args:
        folder: Where to.
        nodes: The nodes of the job: ``name`` in Slurm, ``address``, and ``host``, the name that it has itself.
        python: What runs torchrun and the training script; where it is "", they are only noted.

    Returns:
        The variables with which the programs are found.
    """
    this = f"{shlex.quote(sys.executable)} -IS {shlex.quote(__file__)}"
    texts = {name: f'exec {this} {name} "$@"' for name in PROGRAMS}
    folder.mkdir()
    (folder / "nodes.json").write_text(json.dumps(nodes))
    if python:
        run = f"exec {shlex.quote(python)}"
        texts["torchrun"] = f'{this} torchrun "$@"\n{run} -m torch.distributed.run "$@"'
        texts["python"] = f'{run} "$@"'
    else:
        (folder / "python" / "torch").mkdir(parents=True)
        (folder / "python" / "torch" / "__init__.py").write_text(TORCH.format(file=__file__))
    for name, text in texts.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return {FOLDER: str(folder), **_find_by(folder)}


def _find_by(folder: Path) -> dict[str, str]:
    first = {"PATH": str(folder), "PYTHONPATH": str(folder / "python") if (folder / "python").is_dir() else None}
    return {name: os.pathsep.join(filter(None, (path, os.environ.get(name)))) for name, path in first.items() if path}


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
    """Returns srun's options by their long names, and the command after them."""
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
    try:
        nodes, tasks = _count_tasks(options, nodes)
    except ValueError as error:
        print(f"srun: error: {error}", file=sys.stderr)
        return 1
    if not command:
        print("srun: error: no command given", file=sys.stderr)
        return 1
    reports, count, processes, readers = os.environ.get(REPORTS), len(nodes), [], []
    for task in range(tasks):
        place = task * count // tasks
        numbers = {"PROCID": task, "NODEID": place, "LOCALID": task - -(-place * tasks // count), "STEP_ID": 0}
        env = os.environ | {f"SLURM_{name}": str(number) for name, number in numbers.items()}
        env |= {"SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(count), **_find_by(folder)}
        env |= {"SLURMD_NODENAME": nodes[place]["name"], "SLURM_LAUNCH_NODE_IPADDR": nodes[0]["address"]}
        env |= {"HOSTNAME": nodes[place]["host"]}
        pipes = {}
        if reports:
            # The ranks of each task report into a folder of their own. What this machine is called may not resolve.
            env |= {"LAB_JOB_FOLDER": f"{reports}/task{task}", "PET_LOCAL_ADDR": "127.0.0.1"}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            processes.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, **pipes))
        except OSError as error:
            print(f"srun: error: execve(): {command[0]}: {error.strerror}", file=sys.stderr)
            return 2
        if reports:
            label = f"{task}: " if "label" in options else ""
            readers.append(threading.Thread(target=_pass_on, args=(processes[-1].stdout, label)))
            readers[-1].start()
        else:
            processes[-1].wait()
    for reader in readers:
        reader.join()
    codes = [process.wait() for process in processes]
    for task, code in enumerate(codes):
        if code:
            host = nodes[task * count // tasks]["host"]
            print(f"srun: error: {host}: task {task}: Exited with exit code {code}", file=sys.stderr)
    return max(code if code >= 0 else 128 - code for code in codes)


def _count_tasks(options: dict[str, str], nodes: Sequence[dict[str, str]]) -> tuple[Sequence[dict[str, str]], int]:
    """The nodes that take part and the number of tasks, by srun's options and what the batch script has asked for."""
    if names := [name for name in options.get("nodelist", "").split(",") if name]:
        nodes = [node for node in nodes if node["name"] in names]
    if not nodes:
        raise ValueError("the nodes are none of the job's")
    nodes = nodes[: int((options.get("nodes") or str(len(nodes))).split("-")[-1])]
    each = int(options.get("ntasks-per-node") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
    tasks = int(options.get("ntasks") or os.environ.get("SLURM_NTASKS") or len(nodes) * each)
    if not 1 <= tasks <= MOST_TASKS:
        raise ValueError(f"{tasks} tasks; the stand-in for srun starts 1 to {MOST_TASKS}")
    if "ntasks-per-node" in options and tasks > len(nodes) * each:
        # As srun of Slurm 22.05 does: the number of tasks that the batch script has asked for counts.
        why = f"doesn't match the requested tasks {tasks} with the number of requested nodes {len(nodes)}"
        said = f"srun: Warning: can't honor --ntasks-per-node set to {each} which {why}. Ignoring it."
        print(said, file=sys.stderr, flush=True)
    return nodes[:tasks], tasks


def _pass_on(lines: IO[bytes], label: str) -> None:
    for line in lines:
        os.write(1, label.encode() + line)


if __name__ == "__main__":
    sys.exit(main())
