"""Exercise 5.2: the two torchrun commands that one would type on two nodes, judged, then run on this machine."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nodelaunch as launch
from course.check.verdicts import NotYetError, expect
from course.exercises.torchrun import parse_torchrun

NODES, SECONDS = 2, 90
EXAMPLE = "torchrun --nnodes=2 --node-rank=0 --master-addr=… --master-port=… scripts/train_ddp.py"
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# With any folder in front, such as ../.venv/bin/torchrun.
PROGRAM = re.compile(r"(\S*/)?(torchrun|python3? (-u )?-m torch\.distributed\.run)")
# By what the two said; the first that fits.
FAILURES = (
    (r"NotImplementedError", "scripts/train_ddp.py still has gaps: first exercise 5.1"),
    (
        r"(?i)address already in use|EADDRINUSE",
        "something has this port, perhaps your own torchrun that still waits for the other: take another port",
    ),
    (r"can't open file|No such file", "the path of the script is as seen from the notebook's folder: scripts/…"),
    (r"(?i)invalid choice|unrecognized arguments", "scripts/train_ddp.py --help lists what the script takes"),
    (
        r"(?i)unable to find address|getaddrinfo|gaierror|name or service not known|EADDRNOTAVAIL|cannot assign",
        "here both nodes are this machine: its address is 127.0.0.1, its interface lo",
    ),
    (
        r"(?i)timed out|(?<!with)timeout|time limit",
        "the first node did not answer at this address in time: one address and port in both, node ranks 0 and 1",
    ),
)
# Options of torchrun, which the script does not know.
TORCHRUN_OPTION = re.compile(r"--(nnodes|node[-_]rank|nproc[-_]per[-_]node|master[-_](addr|port)|rdzv[-_]\w+)(=|$)")
EPOCH = re.compile(r"epoch 1: .*")
# What torch 2.14's Gloo printed at the very end of 2 of 15 such runs, all of whose training was done: likely, a thread
# of it was still there when Python ended. The exit status is an abort's.
ENDING = "terminate called without an active exception"


@dataclass(frozen=True)
class _Command:
    """One command, parsed as by a shell and torchrun."""

    variables: tuple[str, ...]  # what stands before the program, such as GLOO_SOCKET_IFNAME=lo
    given: frozenset[str]  # the names of its options, with "_" for "-"
    options: argparse.Namespace
    argv: tuple[str, ...]  # without the program


def verify_commands(two_commands: Callable) -> str:
    """Parses the two commands, reports their conflicts, and runs them side by side."""
    commands = two_commands()
    expect(
        isinstance(commands, list | tuple) and len(commands) == NODES and all(isinstance(one, str) for one in commands),
        "what the function returns",
        yours=repr(commands)[:60],
        expected="a list of two texts, one command per node",
        hint=f'return ["{EXAMPLE}", "torchrun …"]',
    )
    parsed = [_parse(f"command {number}", command) for number, command in enumerate(commands, start=1)]
    _expect_one_job(parsed)
    print("Both commands run on this machine, on its processor ...", flush=True)
    _run(parsed)
    return "both nodes joined, and only rank 0 printed the result"


def _parse(case: str, command: str) -> _Command:
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        hint = "a quotation mark has no partner"
        raise NotYetError(case, yours=str(error), expected="a line for a shell", hint=hint) from None
    variables = []
    while words and ASSIGNMENT.fullmatch(words[0]):
        variables.append(words.pop(0))
    length = next((length for length in (1, 3, 4) if PROGRAM.fullmatch(" ".join(words[:length]))), 0)
    hint = "the command begins with torchrun, or with NAME=value and then torchrun; no `cd` and no `export`: the cell "
    yours = " ".join(words)[:60] or "nothing"
    expect(length > 0, case, yours=yours, expected=EXAMPLE, hint=hint + "runs it in this folder")
    words, hint = words[length:], "torchrun --help lists its options; each stands before the script"
    options = parse_torchrun(words, case=case, expected=EXAMPLE, hint=hint)
    late = [word for word in options.training_script_args if TORCHRUN_OPTION.match(word)]
    hint = "options of torchrun stand before the script: what stands after it goes to the script"
    expect(not late, f"{case}: options after the script", yours=" ".join(late), expected=EXAMPLE, hint=hint)
    own = words[: len(words) - len(options.training_script_args) - 1]
    given = {word.split("=")[0].lstrip("-").replace("-", "_") for word in own if word.startswith("-")}
    return _Command(tuple(variables), frozenset(given), options, tuple(words))


def _find_meeting(one: _Command) -> str:
    """Returns the nodes' meeting point, with the way to it unless it is torchrun's own; "" if none is named."""
    options, way = one.options, ""
    if options.rdzv_backend != "static" or options.rdzv_id != "none":
        way = f" by {options.rdzv_backend}, id {options.rdzv_id}"
    if options.rdzv_endpoint:
        address, _, port = options.rdzv_endpoint.rpartition(":")
        return f"{address or port}:{port if address else 29400}{way}"  # torchrun's own choice for c10d
    return f"{options.master_addr}:{options.master_port or 29500}{way}" if "master_addr" in one.given else ""


def _expect_one_job(parsed: Sequence[_Command]) -> None:
    """Expects both commands to start one job: of two nodes, which meet, have numbers, and run the same program."""
    for number, one in enumerate(parsed, start=1):
        size = "--standalone" if one.options.standalone else f"--nnodes={one.options.nnodes}"
        expect(
            size.removesuffix(f":{NODES}") == f"--nnodes={NODES}",  # 2:2 is the same: at least and at most two
            f"command {number}: how many nodes the job has",
            yours=size if "nnodes" in one.given or one.options.standalone else "1, as nothing is said",
            expected=f"--nnodes={NODES}",
            hint="without --nnodes=2, and with --standalone, each command is a job of its own, on one node",
        )
    places = [_find_meeting(one) for one in parsed]
    hint = "the address and the port of the first node, in both commands, where all meet; and, with --rdzv-backend and "
    hint += "--rdzv-id, the same way there"
    yours = " and ".join(place or "no address" for place in places)
    expected = "--master-addr=… --master-port=…, the same in both commands"
    expect(places[0] == places[1] != "", "where the nodes meet", yours=yours, expected=expected, hint=hint)
    if parsed[0].options.rdzv_backend == "static":  # any other numbers the nodes by itself
        ranks = [one.options.node_rank for one in parsed]
        hint = "the nodes are numbered from 0: --node-rank=0 on the one whose address you gave, 1 on the other"
        yours = " and ".join(map(str, ranks))
        expect(sorted(ranks) == [0, 1], "the numbers of the nodes", yours=yours, expected="0 and 1", hint=hint)
    programs = [shlex.join([one.options.training_script, *one.options.training_script_args]) for one in parsed]
    expect(
        programs[0] == programs[1] and programs[0].split()[0].endswith("train_ddp.py"),
        "what the nodes run",
        yours=" and ".join(dict.fromkeys(programs))[:160],
        expected="scripts/train_ddp.py with the same arguments on both",
        hint="every rank is the same program: only its number differs. Ranks with other batches or nets do not fit",
    )
    each = [one.options.nproc_per_node for one in parsed]
    hint = "--nproc-per-node is one per device of a node; here each node is half of a machine, and gets one"
    expect(each == ["1", "1"], "the processes on each node", yours=" and ".join(each), expected="1", hint=hint)


def _run(parsed: Sequence[_Command]) -> None:
    """Runs both commands, each as a node of a job, until they end.

    The launcher starts them, so that nothing is left whatever happens: it ends all of their processes. Its agent
    accepts torchrun's own options; plain torchrun would be open to everybody who can reach this machine.
    """
    run = [sys.executable, "-m", "nodelaunch.node.agent"]
    lines = [shlex.join(["env", *one.variables, *run, *one.argv]) for one in parsed]
    with tempfile.TemporaryDirectory(prefix="lab5-") as folder:
        script = Path(folder, "two_commands.sh")
        # What torchrun would take from the launcher's environment is for the launcher's own torchrun. The ranks do not
        # tell the agent that they have started; so it has no other bound than the limit.
        start = f'unset "${{!PET_@}}" MASTER_ADDR MASTER_PORT\nexport LAB_JOIN_TIMEOUT={SECONDS}\n'
        start += f"cd {shlex.quote(str(Path.cwd()))}\n"
        script.write_text(start + f'if [ "$RANK" = 0 ]; then exec {lines[0]}; fi\nexec {lines[1]}\n')
        job = launch.TorchrunJob(
            script,
            nodes=launch.local_nodes(NODES),
            program=["bash"],
            limit=SECONDS,
            # Where the packages are not installed, the learner's shell finds them by PYTHONPATH.
            env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        )
        result = job.run(check=False, show=False, force=True)
    found = [match.group() for line in result.lines if (match := EPOCH.search(line))]
    failure = result.failure
    said = "\n".join([*result.lines, failure.what if failure else ""])
    hint = next((hint for pattern, hint in FAILURES if re.search(pattern, said)), "the log has each node's lines")
    if found and failure and failure.kind == "limit":
        hint = f"both met and train, but not to the end within {SECONDS} s: --images 640, and one epoch"
    yours = (failure.message or failure.what).strip().splitlines()[0][:160] if failure else "an end without a failure"
    where = f"; all of it: {result.log}"
    done = result.ok or bool(found and ENDING in said)
    expect(done, "the two commands", yours=yours + where, expected="two that end well", hint=hint)
    expect(
        len(found) == 1,
        "what rank 0 said after the first epoch",
        yours=f"{len(found)} lines that begin with 'epoch 1'{where}",
        expected="one line",
        hint="give the script at least one epoch, and no --checkpoint of an earlier run; rank 0 alone prints",
    )
