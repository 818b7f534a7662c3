"""The claims about launching a job on two nodes and about its preflight, in wall-clock seconds: most of it is waiting.

All of it runs on this machine. A launch is compared with the same torchrun commands typed into two terminals, in turn,
and only the differences of the pairs count, so that a busy machine slows both.
"""

from __future__ import annotations

import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.claims import Claim
from lab_utils.timing.comparison import find_middle
from nodelaunch import TorchrunJob, local_nodes, ssh_nodes
from nodelaunch.backends.nodes import Node
from nodelaunch.node.probe import find_free_port
from nodelaunch.node.processes import stop_job
from nodelaunch.preflight import check_nodes
from tests.harness.hosts import Hosts, find_missing

SCRIPT = Path(__file__).with_name("first_step.py")
PAIRS = 7
# The commands as one would type them; the names of the options are torchrun's.
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d")


def check_all(folder: Path) -> list[Claim]:
    """Measures all claims of this module."""
    return [*check_launch(folder), check_local_preflight(folder), *check_host_preflights()]


def check_launch(folder: Path) -> list[Claim]:
    """From ``TorchrunJob.run()`` to rank 0's first step, against two torchrun commands from their start to it."""
    preflights = []

    def launch(number: int, stamp: Path) -> tuple[float, float]:
        # A folder of its own for each: copying the code to nodes that have nothing yet is part of a launch.
        nodes = local_nodes(2, folder=folder / f"nodes{number}")
        job = TorchrunJob(SCRIPT, [stamp], nodes=nodes)
        start = time.time()
        result = job.run(show=False)
        preflights.append(result.seconds["preflight"])
        return read_stamp(stamp, start)

    def type_torchrun(number: int, stamp: Path) -> tuple[float, float]:
        identity, endpoint = f"benchmark-{secrets.token_hex(4)}", f"127.0.0.1:{find_free_port()}"
        nodes = local_nodes(2, folder=folder / "unused")
        meeting = [f"--rdzv-endpoint={endpoint}", f"--rdzv-id={identity}"]
        commands = [[*TORCHRUN, *meeting, f"--local-addr={node.address}", str(SCRIPT), str(stamp)] for node in nodes]
        # As in the scripts of the launcher: Gloo must not have to find out by itself which interface it is.
        start = run_together(commands, identity, {"GLOO_SOCKET_IFNAME": nodes[0].interface}, stamp.with_suffix(".log"))
        return read_stamp(stamp, start)

    ours, hand = interleave([launch, type_torchrun], folder)
    differences, works = (
        [one[place] - other[place] for one, other in zip(ours, hand, strict=True)] for place in range(2)
    )
    (more, low, high), (work, least, most) = find_middle(differences), 1e3 * np.array(find_middle(works))
    typed = statistics.median(seconds for seconds, _ in hand)
    text = f"launch of two nodes here to the first step against torchrun by hand ({typed:.1f} s)"
    measured = f"{more:+.2f} s ({low:+.2f} to {high:+.2f}, n = {PAIRS}; "
    measured += f"preflight {statistics.median(preflights):.2f})"
    cpu = f"{work:+.0f} ms ({least:+.0f} to {most:+.0f}, n = {PAIRS})"
    claims = [Claim(text, measured, "at most +0.2 s", more <= 0.2)]
    return [
        *claims,
        Claim("a rank to its first step, against torchrun by hand (CPU)", cpu, "at most +50 ms", work <= 50),
    ]


def read_stamp(stamp: Path, start: float) -> tuple[float, float]:
    """Returns rank 0's seconds from a moment to its first step, and the CPU seconds that it took."""
    done, work = map(float, stamp.read_text().split())
    return done - start, work


def interleave(
    ways: Sequence[Callable[[int, Path], tuple[float, float]]], folder: Path
) -> list[list[tuple[float, float]]]:
    """Runs all ways in turn, PAIRS times and once to warm up; returns what each run of each way took."""
    rounds = []
    for number in range(PAIRS + 1):
        # Each goes first as often as last: what the one before leaves behind is no way's alone.
        order = list(enumerate(ways))[:: -1 if number % 2 else 1]
        seconds = {index: way(number, folder / f"stamp-{number}-{index}") for index, way in order}
        rounds.append([seconds[index] for index in range(len(ways))])
    return [list(column) for column in zip(*rounds[1:], strict=True)]


def run_together(commands: Sequence[Sequence[str]], identity: str, env: dict[str, str], log: Path) -> float:
    """Runs commands at the same moment to their end; returns that moment.

    Raises:
        RuntimeError: One of them failed.
    """
    # The id is what finds all their processes again, whatever sessions torchrun gives them.
    env = {**os.environ, **env, "LAB_JOB_ID": identity}
    started = []
    try:
        with log.open("wb") as file:
            start = time.time()
            for command in commands:
                started.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                    )
                )
            if any([process.wait(60) for process in started]):
                raise RuntimeError(f"{commands[0]} failed: {log.read_text(errors='replace')[-2000:]}")
    finally:
        for process in started:
            process.terminate()
        stop_job({"id": identity})
        for process in started:
            process.wait(10)
    return start


def check_local_preflight(folder: Path) -> Claim:
    """The preflight of two nodes on this machine."""
    nodes = local_nodes(2, folder=folder / "preflight")
    return judge("preflight of two nodes on this machine", [time_preflight(nodes) for _ in range(5)], bound=2)


def check_host_preflights() -> list[Claim]:
    """The preflight of two hosts that ssh reaches: healthy, cut off from each other, and with one switched off."""
    healthy, cut, off = (
        "preflight of two healthy SSH hosts, connecting included",
        "preflight of two SSH hosts between which packets are dropped (the slowest)",
        "preflight of two SSH hosts, one of them switched off (the slowest)",
    )
    if missing := find_missing():
        bounds = {healthy: 2, cut: 10, off: 10}
        return [Claim(text, f"no hosts here: {missing}", f"at most {bounds[text]} s", None) for text in bounds]
    with Hosts() as hosts:
        time_fresh(hosts)
        claims = [judge(healthy, [time_fresh(hosts) for _ in range(5)], bound=2)]
        hosts.drop("n1", "n2")
        one_way = time_fresh(hosts, red=True)
        hosts.drop("n2", "n1")
        claims.append(judge(cut, [one_way, time_fresh(hosts, red=True)], bound=10, pick=max))
        hosts.mend()
        nodes = ssh_nodes(["n1", "n2"], config=hosts.ssh_config)
        time_preflight(nodes)
        hosts.link_down("n2")  # to the network, the same as switched off
        # Over a connection that is there already, and then over one that cannot be made.
        connected = time_preflight(nodes, red=True)
        claims.append(judge(off, [connected, time_fresh(hosts, red=True)], bound=10, pick=max))
    return claims


def time_fresh(hosts: Hosts, *, red: bool = False) -> float:
    """The seconds of a preflight that has to connect first."""
    return time_preflight(ssh_nodes(["n1", "n2"], config=hosts.ssh_config), red=red)


def time_preflight(nodes: Sequence[Node], *, red: bool = False) -> float:
    """The seconds of one preflight.

    Raises:
        RuntimeError: It found something wrong, or with ``red`` it did not; then its time says nothing.
    """
    start = time.monotonic()
    found = check_nodes(nodes)
    seconds = time.monotonic() - start
    if found.ok == red:
        raise RuntimeError(f"The preflight should {'' if red else 'not '}have found something wrong:\n{found}")
    return seconds


def judge(
    text: str, seconds: Sequence[float], *, bound: float, pick: Callable[[Sequence[float]], float] = statistics.median
) -> Claim:
    """Makes a claim out of repeated measurements."""
    picked = pick(seconds)
    measured = f"{picked:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
    return Claim(text, measured, f"at most {bound} s", picked <= bound)
