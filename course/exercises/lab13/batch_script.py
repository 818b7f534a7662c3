"""Exercise 13.1: a batch script for Slurm; its requests are read, and it runs with programs that stand in for Slurm's.

Nothing is submitted, and nothing is trained: the check finds out what each node would have started. The script runs
twice, as two jobs on different nodes, which reveals hard-coded values.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.run import get_args_parser

from course.check.verdicts import NotYetError, expect
from course.exercises import slurm_stand_in

NODES, SCRIPT, SECONDS = 2, "train_ddp.py", 15.0
# What the lab compares needs these.
ARGUMENTS = {"--data": "shapes10", "--images": "640", "--epochs": "2", "--checkpoint": "ddp.pt"}
MOST_CPUS, MEMORY = 2, (500, 2000)  # of a node of the lab's own Slurm; megabytes
MINUTES = (1, 60)
# The job's number, and its nodes: a name in Slurm need not be one of the network.
JOBS = (("4711", (1, 2)), ("4712", (5, 6)))
SHORT = dict(N="nodes", n="ntasks", c="cpus-per-task", t="time", o="output", e="error", J="job-name", p="partition")
SHORT |= dict(A="account", q="qos", w="nodelist", x="exclude", C="constraint", D="chdir", d="dependency", G="gpus")
FLAGS = frozenset({"exclusive", "requeue", "no-requeue", "hold", "overcommit", "oversubscribe", "contiguous", "wait"})
# Of sbatch 22.05: those that a job of this kind may have.
OTHERS = """
    ntasks-per-node mem mem-per-cpu mem-per-gpu signal open-mode mail-type mail-user comment export gres gpus-per-node
    gpus-per-task cpus-per-gpu reservation nice begin array licenses priority hint threads-per-core ntasks-per-core
    ntasks-per-socket sockets-per-node cores-per-socket tmp wckey kill-on-invalid-dep switches distribution input
"""
KNOWN = FLAGS | {*SHORT.values()} | {*OTHERS.split()}
MEMORIES = ("mem", "mem-per-cpu", "mem-per-gpu")
EXAMPLE = "#!/bin/bash, then lines such as #SBATCH --nodes=2, then the commands"
ONE_EACH = "one torchrun on each of the two nodes"
PROVED = (
    "one torchrun on each of two nodes, which meet at the first one's address under one id, with one rank each; run "
    "twice, as two jobs on different nodes"
)
HEAD = "the first name of `scontrol show hostnames`, then its NodeAddr by `scontrol show node`, in the batch script"


@dataclass(frozen=True)
class _Started:
    """A call of torchrun on a node.

    Attributes:
        node: The node's place in the job, from 0.
        options: Its options, as torchrun reads them.
        given: The names of the options that were given, with "_" for "-".
    """

    node: int
    options: argparse.Namespace
    given: frozenset[str]


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
    _expect_script(text)
    requests = _read_requests(text)
    _expect_tasks(requests)
    _expect_memory(requests)
    _expect_time_and_output(requests)
    for number, (job, places) in enumerate(JOBS):
        nodes = [{"name": f"c{one}", "address": f"10.77.0.{10 + one}", "host": f"host{one}"} for one in places]
        started = _run(text, requests, job, nodes)
        _expect_started(started)
        _expect_same_job(started)
        _expect_meeting(started, nodes, number)
        _expect_program(started)
    return PROVED


def _expect_script(text: str) -> None:
    """Expects a text that begins as a script does and that bash can read."""
    first = text.splitlines()[0]
    hint = "#! and the shell are the very first characters; sbatch refuses a file without them"
    if not first.strip():
        hint = 'the first line is empty: put #!/bin/bash right behind the quotation marks, r"""#!/bin/bash'
    right = bool(re.match(r"#!\s*(\S*/)?(env\s+)?(\S*/)?(bash|sh)\b", first))
    expect(right, "the first line", yours=repr(first)[:60], expected="#!/bin/bash", hint=hint)
    done = subprocess.run([_find_bash(), "-n"], input=text.encode(), capture_output=True, timeout=10, check=False)
    said = done.stderr.decode(errors="replace").strip().splitlines()
    hint = "bash cannot read it: look for a quotation mark or a bracket without a partner, or a \\ that ends no line"
    expect(done.returncode == 0, "the script", yours=(said or ["?"])[0][:160], expected="bash reads it", hint=hint)


def _find_bash() -> str:
    return shutil.which("bash") or "/bin/bash"


def _read_requests(text: str) -> dict[str, str]:
    """Returns the options that sbatch reads, before the first command, by their long names."""
    lines, requests, over = text.splitlines(), {}, False
    for number, line in enumerate(lines, start=1):
        where = f"line {number}"
        alike = re.match(r"\s*#\s*sbatch\s*-", line, re.I) and not line.startswith("##")
        if not line.startswith("#SBATCH"):
            hint = "it is a comment to sbatch: a request begins with #SBATCH, in capitals, without any space"
            expect(not alike, where, yours=line[:60], expected="#SBATCH …", hint=hint)
            over = over or bool(line.strip() and not line.startswith("#"))
            continue
        hint = "sbatch reads no request behind the first command: all of them stand above it"
        expect(not over, where, yours=line[:60], expected="no #SBATCH here", hint=hint)
        requests |= _read_line(line, where)
    return requests


def _read_line(line: str, where: str) -> dict[str, str]:
    """Returns the options in one line of #SBATCH."""
    try:
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
    except ValueError as error:
        hint = "a quotation mark has no partner"
        raise NotYetError(where, yours=f"{line[:60]}: {error}", expected="#SBATCH --name=value", hint=hint) from None
    hint = "each request is --name=value"
    expect(bool(words), where, yours=line[:60], expected="#SBATCH --name=value", hint=hint)
    found = {}
    while words:
        word = words.pop(0)
        long = re.fullmatch(r"--([a-z][a-z-]*)(=(.*))?", word)
        short = re.fullmatch(r"-([A-Za-z])=?(.*)", word)
        name = long[1] if long else SHORT.get(short[1], "") if short else ""
        hint = "sbatch does not know it: sbatch --help lists its options, such as --nodes, --time and --output"
        if not (long or short):
            hint = "there is no space around =, and each option has its own --name"
        expect(name in KNOWN, where, yours=word[:60], expected="an option of sbatch", hint=hint)
        value = (long[3] or "") if long else short[2]
        if not value and name not in FLAGS:
            value = words.pop(0) if words else ""
        variable = "$" in value
        hint = "these lines are for sbatch, not for the shell: a variable stays as it is. %j is the job's number"
        expect(not variable, where, yours=word[:60], expected="no variable", hint=hint)
        hint = f"give it a value: --{name}=…"
        expect(bool(value) or name in FLAGS, where, yours=word[:60], expected=f"--{name}=…", hint=hint)
        found[name] = value
    return found


def _expect_tasks(requests: dict[str, str]) -> None:
    """Expects two nodes, one task on each, and a number of processors."""
    nodes, each, tasks = (requests.get(name, "") for name in ("nodes", "ntasks-per-node", "ntasks"))
    yours = f"--nodes={nodes}" if nodes else "not said, so as few as the tasks need"
    hint = "--nodes=2: the number of machines. (-n is the number of tasks)"
    expect(nodes in ("2", "2-2"), "how many nodes", yours=yours, expected="--nodes=2", hint=hint)
    hint = "a task is what srun starts: one torchrun on each node, which then starts the ranks (--nproc-per-node)"
    if not each and not tasks:
        hint = f"say it: --ntasks-per-node=1. {hint}"
    right = each in ("1", "") and tasks in (str(NODES), "") and bool(each or tasks)
    said = ", ".join(f"--{name}={requests[name]}" for name in ("ntasks-per-node", "ntasks") if name in requests)
    expect(right, "tasks on each node", yours=said or "not said", expected="--ntasks-per-node=1", hint=hint)
    cpus = requests.get("cpus-per-task", "")
    yours, hint = f"--cpus-per-task={cpus}", f"a node of the lab's Slurm has {MOST_CPUS} processors"
    if not cpus:
        yours, hint = "not said", "say it: without it a task gets one processor, however many ranks it starts"
    right = cpus.isdecimal() and 1 <= int(cpus) <= MOST_CPUS
    expect(right, "processors", yours=yours, expected=f"--cpus-per-task=1 or {MOST_CPUS}", hint=hint)


def _expect_memory(requests: dict[str, str]) -> None:
    """Expects one of the options for memory, with a suitable size."""
    said = [f"--{name}={requests[name]}" for name in MEMORIES if name in requests]
    case, expected = "memory", "--mem=… or --mem-per-cpu=…, one of them"
    hint = "they exclude each other: --mem is for each node, --mem-per-cpu for each processor"
    if not said:
        hint = "say how much: what a cluster gives else may be very little, or all that a node has"
    expect(len(said) == 1, case, yours=" and ".join(said) or "not said", expected=expected, hint=hint)
    name = next(name for name in MEMORIES if name in requests)
    hint = "there are no GPUs: --mem=1500M is for each node"
    expect(name != "mem-per-gpu", case, yours=said[0], expected=expected, hint=hint)
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", requests[name], re.I)
    hint = "a whole number and a unit: 1500M or 1G"
    expect(bool(found), case, yours=said[0], expected="--mem=1500M", hint=hint)
    factor = {"K": 1 / 1024, "G": 1024, "T": 1024**2}.get(found[2].upper(), 1)
    size = int(found[1]) * factor * (int(requests["cpus-per-task"]) if name == "mem-per-cpu" else 1)
    low, high = MEMORY
    hint = f"a node of the lab's Slurm has {high}M; torchrun and a rank need some hundred"
    if not found[2] and size < low:
        hint = "a number without a unit is in megabytes: 1500M"
    yours, expected = f"{said[0]}, which is {size:.0f}M for each node", f"{low}M to {high}M for each node"
    expect(low <= size <= high, case, yours=yours, expected=expected, hint=hint)


def _expect_time_and_output(requests: dict[str, str]) -> None:
    """Expects a time limit of some minutes, and an output file for each job, in an existing folder."""
    given = requests.get("time", "")
    minutes, expected = _read_minutes(given), f"{MINUTES[0]} to {MINUTES[1]} minutes"
    hint = "hours:minutes:seconds, such as --time=00:05:00. (Two numbers are minutes:seconds, one is minutes)"
    yours = f"--time={given}" + (f", which is {60 * minutes:.0f} seconds" if minutes is not None else "")
    if not given:
        yours, hint = "not said", f"say it: the shorter a job, the sooner Slurm finds a gap for it. {hint}"
    right = minutes is not None and MINUTES[0] <= minutes <= MINUTES[1]
    expect(right, "the time limit", yours=yours, expected=expected, hint=hint)
    output = requests.get("output", "")
    hint = "%j is the job's number: without it the next job writes over this one's output"
    right = bool(re.search(r"%\d*[jA]", output))
    expect(right, "the output's file", yours=output or "not said", expected="--output=ddp-%j.out", hint=hint)
    folder = Path(output).parent
    hint = "Slurm makes no folders: a job whose output cannot be written ends without a word"
    expect(
        "%" not in str(folder) and folder.is_dir(), "the output's folder", yours=str(folder), expected=".", hint=hint
    )
    hint, name = "a later cell looks for it there", re.sub(r"%\d*[jA]", "%j", Path(output).name)
    expect(name == "ddp-%j.out", "the output's file", yours=output, expected="--output=ddp-%j.out", hint=hint)


def _read_minutes(given: str) -> float | None:
    """Returns the minutes of a time limit, in any of sbatch's forms; None if it is invalid."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", given)
    if not found:
        return None
    days, *rest = (int(part or 0) for part in found.groups())
    if found[1] or found[4]:  # hours come first
        return days * 1440 + rest[0] * 60 + rest[1] + rest[2] / 60
    return rest[0] + rest[1] / 60


def _run(text: str, requests: dict[str, str], job: str, nodes: Sequence[dict[str, str]]) -> list[_Started]:
    """Runs the script as the first node of a job would; returns the torchruns that it started.

    Raises:
        NotYetError: It does not end, or starts something other than torchrun, or starts it without srun.
    """
    with tempfile.TemporaryDirectory(prefix="lab13-", ignore_cleanup_errors=True) as folder:
        programs = Path(folder, "programs")
        env = _make_environment(requests, job, nodes) | slurm_stand_in.install(programs, nodes)
        script, said = Path(folder, "slurm_script"), Path(folder, "output")
        script.write_text(text)
        with said.open("wb") as output:
            process = subprocess.Popen(
                [_find_bash(), script], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = slurm_stand_in.read_started(programs)
        lines = said.read_text(errors="replace").replace(f"{folder}/", "").strip().splitlines()
    _expect_by_srun(found, code, lines[-1][:160] if lines else "nothing")
    names = [node["name"] for node in nodes]
    return [_parse(names.index(one["node"]), one["words"]) for one in found]


def _expect_by_srun(found: Sequence[dict], code: int | None, last: str) -> None:
    """Expects the script to succeed and to start torchrun by srun."""
    hint = "here srun and torchrun only take notes: what else does the script wait for?"
    expect(code is not None, "the script", yours=f"runs for more than {SECONDS:g} s", expected="ends", hint=hint)
    bare = [one for one in found if one["program"] != "torchrun"]
    hint = f"torchrun starts the ranks, and tells each who it is: srun torchrun … {SCRIPT}"
    yours = " ".join(["python", *bare[0]["words"]])[:120] if bare else ""
    expect(not bare, "what is started", yours=yours, expected=ONE_EACH, hint=hint)
    yours, hint = f"none; the script's last line of output: {last}", "the line of srun begins with `srun torchrun`"
    expect(bool(found), "what is started", yours=yours, expected=ONE_EACH, hint=hint)
    hint = "the batch script itself runs on the first node alone: srun starts a command on all nodes"
    alone = any(not one["step"] for one in found)
    expect(not alone, "what is started", yours="a torchrun without srun", expected=ONE_EACH, hint=hint)
    hint = "mend what this line says"
    expect(code == 0, f"the script's exit code is {code}", yours=f"its last line: {last}", expected=0, hint=hint)


def _make_environment(requests: dict[str, str], job: str, nodes: Sequence[dict[str, str]]) -> dict[str, str]:
    """Returns the variables that Slurm sets for a batch script, without those of an outer job or torchrun."""
    kept = {name: one for name, one in os.environ.items() if not name.startswith(("SLURM", "PET_", "MASTER_"))}
    names = [node["name"] for node in nodes]
    first, last = (re.sub(r"\D", "", name) for name in (names[0], names[-1]))
    facts = {"JOB_ID": job, "JOBID": job, "NNODES": NODES, "JOB_NUM_NODES": NODES, "NODEID": 0, "PROCID": 0}
    facts |= {"LOCALID": 0, "SUBMIT_DIR": Path.cwd(), "JOB_NAME": requests.get("job-name", "job")}
    facts |= {name: f"c[{first}-{last}]" for name in ("JOB_NODELIST", "NODELIST")}
    facts |= {"NTASKS": NODES, "NPROCS": NODES, "CPUS_PER_TASK": requests["cpus-per-task"], "CPUS_ON_NODE": MOST_CPUS}
    if "ntasks-per-node" in requests:
        facts |= {"NTASKS_PER_NODE": 1}
    env = {f"SLURM_{name}": str(fact) for name, fact in facts.items()}
    return kept | env | {"SLURMD_NODENAME": names[0], "HOSTNAME": nodes[0]["host"]}


def _parse(node: int, words: list[str]) -> _Started:
    """Parses a torchrun's arguments as torchrun does."""
    said, parser, case = io.StringIO(), get_args_parser(), f"torchrun on node {node}"
    parser.prog = "torchrun"  # or it names the program that this process was started as
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            options = parser.parse_args(words)
    except SystemExit:
        last = said.getvalue().strip().splitlines()[-1:] or ["it prints its help"]
        hint = "torchrun --help lists its options; each stands before the script. Is a variable empty, or misspelt?"
        raise NotYetError(case, yours=last[0][:200], expected="options, then the script", hint=hint) from None
    own = words[: len(words) - len(options.training_script_args) - 1]
    given = {word.split("=")[0].lstrip("-").replace("-", "_") for word in own if word.startswith("-")}
    return _Started(node, options, frozenset(given))


def _expect_started(started: Sequence[_Started]) -> None:
    """Expects one torchrun on each node."""
    counts = [sum(one.node == node for one in started) for node in range(NODES)]
    hint = "srun takes the number of tasks from #SBATCH: leave -n, -N and -w away from the line of torchrun"
    yours = ", ".join(f"{count} on node {node}" for node, count in enumerate(counts))
    expect(counts == [1] * NODES, "torchruns", yours=yours, expected="1 on node 0, 1 on node 1", hint=hint)


def _expect_same_job(started: Sequence[_Started]) -> None:
    """Expects each torchrun to know of two nodes with one rank each, and to have its own node rank if it needs one."""
    for one in started:
        size = "--standalone" if one.options.standalone else f"--nnodes={one.options.nnodes}"
        hint = "without --nnodes=2 each torchrun is a job of its own. Slurm has the number in $SLURM_NNODES"
        words = f"torchrun on node {one.node}"
        expect(size in ("--nnodes=2", "--nnodes=2:2"), words, yours=size, expected="--nnodes=2", hint=hint)
        each, hint = one.options.nproc_per_node, "one rank on each node: --nproc-per-node=1. (With GPUs: one for each)"
        expect(each == "1", words, yours=f"--nproc-per-node={each}", expected="--nproc-per-node=1", hint=hint)
    backends = [one.options.rdzv_backend for one in started]
    hint = "--rdzv-backend=c10d, on both nodes"
    right = backends[0] == backends[1] and backends[0] in ("c10d", "static")
    expect(right, "how the nodes meet", yours=" and ".join(backends), expected="c10d on both", hint=hint)
    if backends[0] == "c10d":
        return
    if not any(one.given & {"node_rank", "master_addr"} for one in started):
        yours, expected = "no --rdzv-backend, so static", "--rdzv-backend=c10d"
        hint = "with --rdzv-backend=c10d the nodes find out who is which; else each needs its --node-rank"
        raise NotYetError("how the nodes meet", yours=yours, expected=expected, hint=hint)
    ranks = [int(one.options.node_rank) for one in started]
    hint = "--node-rank=$SLURM_NODEID has to be read on each node: srun bash -c '… $SLURM_NODEID …', in single quotes"
    if ranks == [0, 0]:
        hint = f"the batch script replaced $SLURM_NODEID, before srun, on node 0, where it is 0. {hint}"
    expect(
        ranks == [0, 1],
        "--node-rank on node 0 and on node 1",
        yours=" and ".join(map(str, ranks)),
        expected="0 and 1",
        hint=hint,
    )


def _expect_meeting(started: Sequence[_Started], nodes: Sequence[dict[str, str]], number: int) -> None:
    """Expects both to meet at the first node, at an address that any machine can resolve, under one id."""
    places, c10d = [_find_meeting(one.options) for one in started], started[0].options.rdzv_backend == "c10d"
    option = "--rdzv-endpoint" if c10d else "--master-addr"
    words, yours = f"where they meet, {option}", " and ".join(dict.fromkeys(map(":".join, places)))
    address = nodes[0]["address"]
    hint = "one place for both nodes: what the shell of each node asks for differs. Ask in the batch script, above srun"
    expect(places[0] == places[1], words, yours=yours, expected=f"{address}, on both", hint=hint)
    host, port = places[0]
    hint = f"the address of the first node: {HEAD}"
    if host in ("127.0.0.1", "localhost", "::1"):
        hint = f"to each node this is itself. {hint}"
    elif host in (nodes[0]["name"], *(node["name"] for node in nodes)):
        hint = f"this is the name in Slurm, which need not be one of the network (in the lab it is none). {hint}"
    elif host in (nodes[1]["address"], nodes[1]["host"]):
        hint = f"this is the second node. {hint}"
    elif number:
        hint = f"Slurm chooses other nodes each time. {hint}"
    expect(host in (address, nodes[0]["host"]), words, yours=host or "none", expected=address, hint=hint)
    hint = (
        "a port from 1024 to 65535, such as 29500, or one made from the job's number: $((20000 + SLURM_JOB_ID % 10000))"
    )
    right = port.isdecimal() and 1024 <= int(port) <= 65535
    expect(right, "the port", yours=port or "none", expected="the same on both, such as 29500", hint=hint)
    ids = [one.options.rdzv_id for one in started]
    hint = '--rdzv-id="$SLURM_JOB_ID": two jobs that share a node must not meet'
    right = ids[0] == ids[1] and (not c10d or JOBS[number][0] in ids[0])
    expect(right, "--rdzv-id", yours=" and ".join(dict.fromkeys(ids)), expected="one id, of this job", hint=hint)


def _find_meeting(options: argparse.Namespace) -> tuple[str, str]:
    """Returns the address and port at which a node meets the others."""
    if options.rdzv_endpoint:
        host, colon, port = options.rdzv_endpoint.rpartition(":")
        return (host, port) if colon else (port, "29400")  # torchrun's own choice for c10d
    if options.rdzv_backend == "c10d":
        return "", ""
    return options.master_addr, str(options.master_port or 29500)


def _expect_program(started: Sequence[_Started]) -> None:
    """Expects both to run the same script, which must exist."""
    options = [one.options for one in started]
    programs = [shlex.join([one.training_script, *one.training_script_args]) for one in options]
    script, words = options[0].training_script, json.dumps(programs[0])[:120]
    hint = f"both run {SCRIPT} with the same arguments; they stand behind torchrun's options"
    right = programs[0] == programs[1] and Path(script).name == SCRIPT
    yours = words if programs[0] == programs[1] else " and ".join(programs)[:160]
    expect(right, "what the ranks run", yours=yours, expected=f"scripts/{SCRIPT} …, on both", hint=hint)
    late = [
        word for word in options[0].training_script_args if re.match(r"--(nnodes|nproc|rdzv|node[-_]rank|master)", word)
    ]
    hint = "options of torchrun stand before the script: what stands behind it goes to the script"
    expect(not late, "options behind the script", yours=" ".join(late), expected="none of torchrun's", hint=hint)
    words = [part for word in options[0].training_script_args for part in word.split("=", 1)]
    found, wanted = dict(zip(words[::2], words[1::2], strict=False)), " ".join(map(" ".join, ARGUMENTS.items()))
    hint = "the lab compares what comes of it: give the script these arguments"
    yours = shlex.join(options[0].training_script_args)[:120] or "none"
    expect(found == ARGUMENTS, f"the arguments of {SCRIPT}", yours=yours, expected=wanted, hint=hint)
    hint = "sbatch starts the script in the folder where it is called: the path is as seen from the notebook's folder"
    expect(Path(script).is_file(), "the script's path", yours=script, expected=f"scripts/{SCRIPT}", hint=hint)
