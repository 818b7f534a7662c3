"""Exercise 13.1: a batch script for Slurm; its requests are read, and it runs with programs that stand in for Slurm's.

Nothing is submitted, and nothing is trained: the check finds out what each node would have started. The script runs
twice, as two jobs on different nodes, which reveals hard-coded values.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from course.check.judge import AnyOf, judge
from course.check.verdicts import expect
from course.exercises.lab13 import slurm_stand_in
from course.exercises.torchrun import parse_torchrun

NODES, SCRIPT, SECONDS = 2, "train_ddp.py", 15.0
# What the lab compares needs these.
ARGUMENTS = {"--data": "shapes10", "--images": "640", "--epochs": "2", "--checkpoint": "ddp.pt"}
MEMORY, MINUTES = (500, 2000), (1, 60)  # megabytes of a node of the lab's own Slurm; the time limit
# The job's number, and its nodes: a name in Slurm need not be one of the network.
JOBS = (("4711", (1, 2)), ("4712", (5, 6)))
SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time", "o": "output", "J": "job-name"}
FLAGS = frozenset({"exclusive", "requeue", "no-requeue"})
# Of sbatch 22.05: those that a job of this kind may have.
OTHERS = """
    ntasks-per-node mem mem-per-cpu error partition account qos nodelist exclude constraint chdir signal open-mode
    mail-type mail-user comment export gres gpus gpus-per-node reservation nice begin
"""
KNOWN = FLAGS | {*SHORT.values()} | {*OTHERS.split()}
REQUEST = "a request is #SBATCH --name=value, in capitals, without a space around =, and with a name that sbatch knows"
PROVED = (
    "one torchrun on each of two nodes, which meet at the first one's address under one id, with one rank each; run "
    "twice, as two jobs on different nodes"
)


def verify_batch_script(write_batch: Callable) -> str:
    """Reads the requests, runs the script with stand-ins, and compares what each node would have started."""
    text = write_batch()
    expect(
        isinstance(text, str) and bool(text.strip()),
        "what the function returns",
        yours=repr(text)[:60],
        expected="the text of a batch script",
        hint='return r"""#!/bin/bash …""": three quotation marks hold several lines',
    )
    first = text.splitlines()[0]
    right = bool(re.match(r"#!\s*(\S*/)?(env\s+)?(\S*/)?(bash|sh)\b", first))
    hint = "#!/bin/bash stands right behind the quotation marks: sbatch refuses a file without it"
    expect(right, "the first line", yours=repr(first)[:60], expected="#!/bin/bash", hint=hint)
    requests = _read_requests(text)
    _judge_requests(requests)
    for job, places in JOBS:
        nodes = [{"name": f"c{one}", "address": f"10.77.0.{10 + one}", "host": f"host{one}"} for one in places]
        _judge_started(_run(text, requests, job, nodes), job, nodes)
    return PROVED


# What it asks for


def _read_requests(text: str) -> dict[str, str]:
    """Returns the options that sbatch reads, before the first command, by their long names."""
    requests, over = {}, False
    for number, line in enumerate(text.splitlines(), start=1):
        case = f"line {number}"
        if line.startswith("#SBATCH"):
            hint = "sbatch reads no request behind the first command: all of them stand above it"
            expect(not over, case, yours=line[:60], expected="no #SBATCH here", hint=hint)
            requests |= _read_line(line, case)
        else:
            alike = re.match(r"\s*#\s*sbatch\s*-", line, re.I)
            expect(not alike, case, yours=line[:60], expected="#SBATCH …", hint=f"a comment to sbatch: {REQUEST}")
            over = over or bool(line.strip() and not line.startswith("#"))
    return requests


def _read_line(line: str, case: str) -> dict[str, str]:
    """Returns the options in one line of #SBATCH."""
    words, found = line.removeprefix("#SBATCH").partition(" #")[0].split(), {}
    while words:
        word = words.pop(0)
        long, short = re.fullmatch(r"--([a-z-]+)(=(.*))?", word), re.fullmatch(r"-([A-Za-z])=?(.*)", word)
        name = long[1] if long else SHORT.get(short[1], "") if short else ""
        expect(name in KNOWN, case, yours=word[:60], expected="an option of sbatch", hint=REQUEST)
        value = (long[3] if long else short[2]) or ""
        if not value and name not in FLAGS:
            value = words.pop(0) if words else ""
            hint = f"give it a value: --{name}=…"
            expect(bool(value), case, yours=word[:60], expected=f"--{name}=…", hint=hint)
        found[name] = value.strip("\"'")
    return found


def _judge_requests(requests: Mapping[str, str]) -> None:
    hint = "--nodes=2: the number of machines. (-n is the number of tasks)"
    judge(requests.get("nodes"), right=AnyOf(("2", "2-2")), case="--nodes", hint=hint)
    judge(
        {name: requests[name] for name in ("ntasks-per-node", "ntasks") if name in requests},
        right=AnyOf(({"ntasks-per-node": "1"}, {"ntasks": "2"}, {"ntasks-per-node": "1", "ntasks": "2"})),
        case="tasks",
        wrong={"say it: --ntasks-per-node=1": {}},
        hint="a task is what srun starts: one torchrun on each node, which then starts the ranks (--nproc-per-node)",
    )
    hint = "--cpus-per-task=1: without it a task gets one processor, however many ranks it starts; here a node has 2"
    judge(requests.get("cpus-per-task"), right=AnyOf(("1", "2")), case="--cpus-per-task", hint=hint)
    low, high = MEMORY
    memory = {name: requests[name] for name in ("mem", "mem-per-cpu") if name in requests}
    sizes = [_read_megabytes(size, int(requests["cpus-per-task"])) for size in memory.values()]
    hint = f"--mem=1500M for each node, or --mem-per-cpu for each processor, one of them; a node here has {high}M"
    right = len(sizes) == 1 and low <= sizes[0] <= high
    expect(right, "memory", yours=memory or "not said", expected=f"{low}M to {high}M for each node", hint=hint)
    given, hint = requests.get("time", ""), "hours:minutes:seconds, such as --time=00:05:00. (Two are minutes:seconds)"
    right = MINUTES[0] <= _read_minutes(given) <= MINUTES[1]
    expected = f"{MINUTES[0]} to {MINUTES[1]} minutes"
    expect(right, "the time limit", yours=given or "not said", expected=expected, hint=hint)
    output = re.sub(r"%\d*[jA]", "%j", requests.get("output", "none")).removeprefix("./")
    hint = "%j is the job's number, which no variable is here: without it the next job writes over this one's output"
    judge(output, right="ddp-%j.out", case="--output", hint=hint)


def _read_megabytes(size: str, cpus: int) -> float:
    """The megabytes of a size such as 1500M or 1G, of as many processors; 0 if it is invalid."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", size, re.I)
    return int(found[1]) * {"K": 1 / 1024, "G": 1024, "T": 1024**2}.get(found[2].upper(), 1) * cpus if found else 0


def _read_minutes(given: str) -> float:
    """The minutes of a time limit, in any of sbatch's forms; 0 if it is invalid."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", given)
    if not found:
        return 0
    days, *rest = (int(part or 0) for part in found.groups())
    if found[1] or found[4]:  # hours come first
        return days * 1440 + rest[0] * 60 + rest[1] + rest[2] / 60
    return rest[0] + rest[1] / 60


# What it starts


def _run(text: str, requests: Mapping[str, str], job: str, nodes: Sequence[Mapping[str, str]]) -> list[dict]:
    """Runs the script as the first node of a job would; returns what it started by srun.

    Raises:
        NotYetError: It does not end well, or starts something other than torchrun, or starts it without srun.
    """
    with tempfile.TemporaryDirectory(prefix="lab13-", ignore_cleanup_errors=True) as folder:
        programs = Path(folder, "programs")
        env = _make_environment(requests, job, nodes) | slurm_stand_in.install(programs, nodes)
        script, said = Path(folder, "slurm_script"), Path(folder, "output")
        script.write_text(text)
        with said.open("wb") as output:
            process = subprocess.Popen(
                [shutil.which("bash") or "/bin/bash", script], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=env, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                code = f"none: it still runs after {SECONDS:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = slurm_stand_in.read_started(programs)
        lines = said.read_text(errors="replace").replace(f"{folder}/", "").strip().splitlines()
    last = lines[-1][:160] if lines else "nothing"
    alone = [one for one in found if not one["step"]]
    yours, hint = f"{len(alone)} of {len(found)} without srun", "a batch script runs on the first node alone: srun …"
    expect(not alone, "what it starts", yours=yours, expected="all by srun", hint=hint)
    other = " ".join(next((one["words"] for one in found if one["program"] != "torchrun"), []))[:120]
    hint = "torchrun starts the ranks: the line that starts them begins with `srun torchrun`"
    right, yours = bool(found) and not other, other or f"nothing; the last line: {last}"
    if code == 0 or found:
        expect(right, "what it starts", yours=yours, expected="srun torchrun …", hint=hint)
    hint = "mend what its last line says, or what it waits for: is a quotation mark or a bracket without its partner?"
    expect(code == 0, f"the script's exit code is {code}", yours=f"its last line: {last}", expected=0, hint=hint)
    return found


def _make_environment(requests: Mapping[str, str], job: str, nodes: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns the variables that Slurm sets for a batch script, without those of an outer job or torchrun."""
    kept = {name: one for name, one in os.environ.items() if not name.startswith(("SLURM", "PET_", "MASTER_"))}
    first, last = (re.sub(r"\D", "", node["name"]) for node in nodes)
    facts = {"JOB_ID": job, "JOBID": job, "NNODES": NODES, "JOB_NUM_NODES": NODES, "NODEID": 0, "PROCID": 0}
    facts |= {"LOCALID": 0, "SUBMIT_DIR": Path.cwd(), "NTASKS": NODES, "CPUS_PER_TASK": requests["cpus-per-task"]}
    facts |= {name: f"c[{first}-{last}]" for name in ("JOB_NODELIST", "NODELIST")}
    env = {f"SLURM_{name}": str(fact) for name, fact in facts.items()}
    return kept | env | {"SLURMD_NODENAME": nodes[0]["name"], "HOSTNAME": nodes[0]["host"]}


def _judge_started(found: Sequence[dict], job: str, nodes: Sequence[Mapping[str, str]]) -> None:
    """Judges the torchruns of a job, which ran on these nodes."""
    names = [node["name"] for node in nodes]
    hint = "srun takes the number of tasks from #SBATCH: leave -n, -N and -w away from the line of torchrun"
    judge([one["node"] for one in found], right=names, case="the nodes that start a torchrun", hint=hint)
    hint = "torchrun --help lists its options; each stands before the script. Is a variable empty, or misspelt?"
    expected = "options, then the script"
    options = [
        parse_torchrun(one["words"], case=f"torchrun on node {one['node']}", expected=expected, hint=hint)
        for one in found
    ]
    for one in options:
        size = "--standalone" if one.standalone else f"--nnodes={one.nnodes}"
        hint = "without --nnodes=2 each torchrun is a job of its own. Slurm has the number in $SLURM_NNODES"
        judge(size, right=AnyOf(("--nnodes=2", "--nnodes=2:2")), case="the nodes of a torchrun", hint=hint)
        hint = "one rank on each node: --nproc-per-node=1. (With GPUs: one for each)"
        judge(one.nproc_per_node, right="1", case="the ranks of a torchrun", hint=hint)
    _judge_meeting(options, job, nodes)
    script, words = options[0].training_script, [[one.training_script, *one.training_script_args] for one in options]
    arguments = [part for word in words[0][1:] for part in word.split("=", 1)]
    hint = f"both run {SCRIPT} with the arguments that are given, all behind torchrun's options"
    expect(
        words[0] == words[1]
        and Path(script).name == SCRIPT
        and dict(zip(arguments[::2], arguments[1::2], strict=False)) == ARGUMENTS,
        "what the ranks run",
        yours=" and ".join(dict.fromkeys(map(shlex.join, words)))[:160],
        expected=f"scripts/{SCRIPT} {' '.join(map(' '.join, ARGUMENTS.items()))}",
        hint=hint,
    )
    hint = "sbatch starts the script in the folder where it is called: the path is as seen from the notebook's folder"
    expect(Path(script).is_file(), "the script's path", yours=script, expected=f"scripts/{SCRIPT}", hint=hint)


def _judge_meeting(options: Sequence[argparse.Namespace], job: str, nodes: Sequence[Mapping[str, str]]) -> None:
    """Judges whether both meet at the first node, at an address that any machine can resolve, under one id."""
    backends = [one.rdzv_backend for one in options]
    right = AnyOf((["c10d"] * NODES, ["static"] * NODES))
    judge(backends, right=right, case="how the nodes meet", hint="--rdzv-backend=c10d, on both nodes")
    if backends[0] == "static":
        judge(
            [int(one.node_rank) for one in options],
            right=[0, 1],
            case="--node-rank on node 0 and on node 1",
            wrong={
                "the batch script replaces $SLURM_NODEID before srun, on node 0, where it is 0: with "
                "--rdzv-backend=c10d no node needs a number": [0, 0]
            },
            hint="--node-rank=$SLURM_NODEID has to be read on each node: srun bash -c '… $SLURM_NODEID …'",
        )
    places = [_find_meeting(one) for one in options]
    hint = "one place for both nodes: what the shell of each node asks for differs. Ask in the batch script, above srun"
    judge(places[1], right=places[0], case="where node 1 meets the others, beside node 0", hint=hint)
    host, port = places[0]
    judge(
        host or "none",
        right=AnyOf((nodes[0]["address"], nodes[0]["host"])),
        case="where they meet",
        wrong={
            "to each node this is itself: give the address of the first node": AnyOf(("127.0.0.1", "localhost")),
            "this is the name in Slurm, which need not be one of the network: ask for its NodeAddr": nodes[0]["name"],
        },
        hint="the address of the first node, which is another one in each job: $head, as it is given",
    )
    right = port.isdecimal() and 1024 <= int(port) <= 65535
    hint = "a port from 1024 to 65535, the same on both: $port, as it is given"
    expect(right, "the port", yours=port or "none", expected="such as 29500", hint=hint)
    ids = [one.rdzv_id for one in options]
    right = ids[0] == ids[1] and (backends[0] == "static" or job in ids[0])
    hint = "--rdzv-id=$SLURM_JOB_ID: two jobs that share a node must not meet"
    expect(right, "--rdzv-id", yours=" and ".join(dict.fromkeys(ids)), expected="one id, of this job", hint=hint)


def _find_meeting(options: argparse.Namespace) -> tuple[str, str]:
    """Returns the address and port at which a node meets the others."""
    if options.rdzv_endpoint:
        host, colon, port = options.rdzv_endpoint.rpartition(":")
        return (host, port) if colon else (port, "29400")  # torchrun's own choice for c10d
    if options.rdzv_backend == "c10d":
        return "", ""
    return options.master_addr, str(options.master_port or 29500)
