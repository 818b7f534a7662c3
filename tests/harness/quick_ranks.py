"""Jobs whose ranks are forks of one warm process, without nodelaunch's own processes: for tests of what scripts do.

A job that nodelaunch starts takes seconds of a core before its script begins; the answers to an exercise are many. What
this leaves out, such as torchrun and the search for ranks that hang, the real job has: at least one test runs that.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import warm
from nodelaunch.node.probe import find_free_port
from nodelaunch.result import Failure, JobResult, Rank

SERVE = "import sys\nsys.path.insert(0, sys.argv[2])\nimport {modules}, warm\nwarm.serve(sys.argv[1])"
FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


@contextlib.contextmanager
def keep_warm(python, modules):
    """A command that runs a Python script in a fork of ``python``, which has imported these modules."""
    # Not pytest's own folder: a socket has no room for so long a name.
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        code, where = SERVE.format(modules=", ".join(modules)), str(Path(warm.__file__).parent)
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(
            [python, "-c", code, f"{folder}/s", where], start_new_session=True, env=environment, **pipes
        ) as server:
            assert server.stdout.readline() == b"warm\n"
            yield [sys.executable, "-IS", warm.__file__, f"{folder}/s"]


def run_job(job, command, *, limit=60, agent_store=False):
    """Runs the ranks of a job of local nodes, each in its node's folder; the first that fails ends the others.

    With ``agent_store`` they meet as torchrun's do: in a store that is there already, whatever rank they take.
    """
    with tempfile.TemporaryDirectory(prefix="quick-") as folder, _keep_store(agent_store) as port:
        places = [(node, local) for node in range(len(job.nodes)) for local in range(job.nproc_per_node)]
        ranks = [_start(job, command, rank, *places[rank], len(places), port, folder) for rank in range(len(places))]
        first, codes = _wait(ranks, limit)
        outputs = [Path(folder, f"{rank}.log").read_text() for rank in range(len(ranks))]
        files = [Path(folder, "results", f"rank{rank}.json") for rank in range(len(ranks))]
        results = tuple(json.loads(file.read_text()) if file.exists() else None for file in files)
    who = tuple(
        Rank(rank, local, job.nodes[node].name, "here", ranks[rank].pid, "127.0.0.1")
        for rank, (node, local) in enumerate(places)
    )
    lines = tuple(f"[rank {rank}] {line}" for rank, text in enumerate(outputs) for line in text.splitlines())
    failure = None
    if first is not None:
        failure = _explain(first, outputs[first], codes[first], Path(job.script))
    elif None in codes:
        failure = Failure("limit", f"The job ran into its time limit of {limit} s.")
    return JobResult(failure is None, results, who, failure, (), {}, {}, Path(folder), lines)


@contextlib.contextmanager
def _keep_store(agent_store):
    """The port on which the ranks meet: of a store that this process keeps, or a free one."""
    if agent_store:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        try:
            yield store.port
        finally:
            del os.environ["TORCHELASTIC_USE_AGENT_STORE"], store
    else:
        yield find_free_port()


def _start(job, command, rank, node, local, size, port, folder):
    work = Path(job.nodes[node].folder, "work")
    work.mkdir(parents=True, exist_ok=True)
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": job.nproc_per_node}
    meet = {"GROUP_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "quick"}
    ours = {"LAB_JOB_FOLDER": folder, "LAB_JOB_ID": "quick", "GLOO_SOCKET_IFNAME": "lo"}
    environment = {**os.environ, **job.env, **{name: str(one) for name, one in {**numbers, **meet, **ours}.items()}}
    with Path(folder, f"{rank}.log").open("w") as log:
        words = [*command, str(job.script), *map(str, job.args)]
        return subprocess.Popen(words, cwd=work, env=environment, stdout=log, stderr=log)


def _wait(ranks, limit):
    """Which rank failed first, or None, and the exit codes of all."""
    end = time.monotonic() + limit
    try:
        while time.monotonic() < end:
            codes = [rank.poll() for rank in ranks]
            failed = [number for number, code in enumerate(codes) if code]
            if failed or None not in codes:
                return (failed or [None])[0], codes
            time.sleep(0.02)
        return None, codes
    finally:
        for rank in ranks:
            rank.kill()  # its fork ends with it
            rank.wait()


def _explain(rank, output, code, script):
    lines = output[output.rfind("Traceback (most recent call last)") :].splitlines()
    own = [found for line in lines if (found := FRAME.search(line)) and Path(found[1]).parent == script.parent]
    location = f"{Path(own[-1][1]).name}, line {own[-1][2]}" if own else ""
    message = next((line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)), lines[-1])
    kind, trace = "exception" if own else "exit", "\n".join(lines)
    return Failure(kind, f"Rank {rank} failed ({code})", rank, "here", message, location, trace)
