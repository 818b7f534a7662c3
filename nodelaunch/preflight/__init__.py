"""The preflight: finds in seconds what would make a job on these nodes fail or hang, each with its fix.

A small program on each node, the probe, answers questions; every wait has a limit, and a silent node delays no other.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lab_common import LabError
from nodelaunch.backends.nodes import Node
from nodelaunch.node import probe
from nodelaunch.node.facts import find_data
from nodelaunch.node.output import EVENT_BYTES
from nodelaunch.preflight import routes, verdicts
from nodelaunch.preflight.gpus import find_offers, judge_gpus, must_hide
from nodelaunch.preflight.verdicts import Verdict, Wanted
from nodelaunch.spec import DataFolder
from nodelaunch.transfer import make_command
from nodelaunch.values import PORT, PROCESSES, check_value


@dataclass(frozen=True, repr=False)
class Preflight:
    """The result of a preflight; empty if no node was asked."""

    verdicts: tuple[Verdict, ...] = ()  # in the order of the checks
    # Per node, the IPv4 address at which the others reach it (the likeliest one if none do), and its interface.
    addresses: Mapping[str, str] = field(default_factory=dict)
    interfaces: Mapping[str, str] = field(default_factory=dict)
    port: int = 0  # of the rendezvous, on node 0
    started: float = -math.inf  # by time.monotonic()
    seconds: float = 0.0
    hide_gpus: bool = False  # all nodes have to use the CPU, since not every process has a GPU

    @property
    def reds(self) -> tuple[Verdict, ...]:
        """The verdicts that have to be fixed first."""
        return tuple(verdict for verdict in self.verdicts if verdict.state == "red")

    @property
    def ok(self) -> bool:
        """True if the job can be started."""
        return not self.reds

    def raise_if_red(self) -> None:
        """Raises the first red verdict as a LabError, with the number of the others."""
        if self.ok:
            return
        first, *others = self.reds
        headline, *table = first.found.split("\n")
        what = textwrap.shorten(f"{first.check}: {headline}", 100, placeholder=" …")
        where = "; ".join([first.node, *([headline] if what.endswith(" …") else []), *map(str.strip, table)])
        more = f" (+ {len(others)} more)" if others else ""
        raise LabError(what + more, where=where, cause=first.cause, fix=first.fix)

    def __repr__(self) -> str:
        notes = sum(verdict.state == "note" for verdict in self.verdicts)
        counts = [f"{count} {word}" for count, word in ((len(self.reds), "red"), (notes, "to note")) if count]
        summary = f"Preflight: {', '.join(counts) or 'all is well'}; {self.seconds:.1f} s."
        return "\n".join([*verdicts.write_lines(self.verdicts), summary])


def check_nodes(nodes: Sequence[Node], *, port: int | None = None, timeout: float = 8.0, **needs: object) -> Preflight:
    """Checks all nodes of a job at once, and the network between them, in ``timeout`` seconds.

    The rendezvous listens on ``port`` of the first node; None picks a free one. ``needs`` are fields of ``Wanted``.
    """
    start, wanted = time.monotonic(), Wanted(**needs)
    port = check_value("preflight", "port", port, PORT)
    check_value("preflight", "nproc_per_node", wanted.nproc_per_node, PROCESSES)
    if wanted.data and wanted.data.copy_data:
        here = find_data(wanted.data.path / wanted.data.identity)
        wanted = replace(wanted, data_hash="" if here["missing"] else here["hash"] or "")
    by_name = {node.name: node for node in nodes}
    tokens = {name: secrets.token_hex(16) for name in by_name}
    # Two thirds for the start: SSH gives up on a host after 5 s, and reports why.
    starting, connecting = 0.7 * timeout, 0.2 * timeout
    examine = {"do": "examine", "seconds": 0.5 * starting}
    connect = {"do": "connect", "seconds": connecting}
    with open_clients(nodes) as clients:
        tasks = {}
        for index, (name, client) in enumerate(clients.items()):
            asked = {"token": tokens[name], "port": None if index else port or 0}  # of the rendezvous, on node 0
            tasks[name] = functools.partial(_examine, client, wanted.data, examine | asked)
        facts, errors = ask_all(tasks, starting)
        network = routes.Network(by_name, facts)
        questions = {name: {**connect, "targets": network.list_targets(name, tokens)} for name in facts}
        tasks = {name: functools.partial(clients[name].ask, question) for name, question in questions.items()}
        # A connection without an answer is reported when its time is over; 0.8 s are for the way there and back.
        answers, late = ask_all(tasks, max(connecting + 0.8, start + timeout - time.monotonic()))
    network = replace(network, reached={name: answer["reached"] for name, answer in answers.items()})
    chosen = {name: address for name in facts if (address := network.choose_address(name))}
    offers = find_offers(by_name, facts, wanted)
    judged = [
        *(verdicts.judge_error(name, error) for name, error in {**errors, **late}.items()),
        *(routes.judge_address(network, name, chosen.get(name)) for name in facts),
        *routes.judge_exposure(network, chosen),
        *routes.judge_routes(network, chosen, seconds=connecting),
        *routes.judge_port(network),
        *verdicts.judge_versions(facts, torchrun=wanted.torchrun),
        *verdicts.judge_disks(facts),
        *judge_gpus(offers, facts, wanted),
        *(verdicts.judge_data(facts, wanted) if wanted.data else ()),
        *verdicts.judge_jobs(by_name, facts),
        *(verdicts.judge_clock(name, own["clock"]) for name, own in facts.items()),
    ]
    return Preflight(
        verdicts=tuple(judged),
        addresses=chosen,
        interfaces={name: held for name, address in chosen.items() if (held := network.find_interface(name, address))},
        port=port or network.find_ports(network.head).get("chosen") or probe.find_free_port(),
        started=start,
        seconds=time.monotonic() - start,
        hide_gpus=must_hide(offers, wanted),
    )


def _examine(client: ProbeClient, data: DataFolder | None, question: dict) -> dict:
    """Starts a node's probe, and asks for all that it can find out without the other nodes."""
    start, node = time.time(), client.node
    path = f"{data.find_on(node)}/{data.identity}" if data else ""
    answer = client.ask(question | {"address": node.address or "", "folder": node.folder, "data": path})
    if "time" in answer:
        # The node looked at its clock between these two moments; the rest is how far it is off at least.
        answer["clock"] = answer["time"] - min(max(answer["time"], start), time.time())
    return answer


class ProbeClient:
    """One probe on one node; :func:`ask_all` limits the time of all that waits here."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._process: subprocess.Popen | None = None
        self._ended = False

    def ask(self, request: Mapping) -> dict:
        """Asks one question, the first of which starts the probe; raises a LabError if that is not there (any more)."""
        if not self._process:
            try:
                self._process = self.node.popen(make_command(self.node.python, probe))
            except OSError as error:
                raise self.node.explain(127, str(error)) from error
            if self._ended:  # it took so long that nobody waits any more
                self.end()
        process = self._process
        with contextlib.suppress(OSError, ValueError):  # if it has ended, its own words explain why
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        while line := process.stdout.readline(EVENT_BYTES):
            if line.startswith(probe.MARK.encode()):  # a login script may print, too
                return json.loads(line[1:])
        status, pipe = process.wait(), process.stderr.raw
        os.set_blocking(pipe.fileno(), False)  # a shared connection of ssh may keep it open
        raise self.node.explain(status or 1, (pipe.read() or b"").decode(errors="replace"))

    def end(self) -> None:
        """Lets the probe end by itself, and kills its local process if it does not."""
        self._ended = True
        if process := self._process:
            with contextlib.suppress(OSError, ValueError):
                process.stdin.close()
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # it has a session of its own, see Node.popen
                process.wait()


@contextlib.contextmanager
def open_clients(nodes: Sequence[Node]) -> Iterator[dict[str, ProbeClient]]:
    """Provides a client for every node, by name, and leaves no process behind."""
    clients = {node.name: ProbeClient(node) for node in nodes}
    try:
        yield clients
    finally:
        probe.collect({name: client.end for name, client in clients.items()}, 2.0)


def ask_all(tasks: Mapping[str, Callable[[], dict]], seconds: float) -> tuple[dict[str, dict], dict[str, LabError]]:
    """Runs a task for each node, all at once; returns the answers, and an error for each node that gave none."""
    errors: dict[str, LabError] = {}

    def run(name: str) -> dict:
        try:
            return tasks[name]()
        except LabError as error:
            errors[name] = error
            return {}

    answers = probe.collect({name: functools.partial(run, name) for name in tasks}, seconds)
    slow = "the machine is off or overloaded, or a firewall drops what is sent to it"
    for name in [name for name in tasks if name not in errors]:
        answer = answers.setdefault(name, {"error": slow, "late": True})
        if "error" in answer:
            what = f"did not answer within {seconds:.1f} s" if "late" in answer else "could not be examined"
            fix = "log in there by hand; when that works at once, run the preflight again"
            errors[name] = LabError(f"{name} {what}.", where=name, cause=answer["error"], fix=fix)
    answers = {name: answers[name] for name in tasks if name not in errors}
    return answers, {name: errors[name] for name in tasks if name in errors}


def ask_once(nodes: Sequence[Node], request: Mapping) -> dict[str, dict | LabError]:
    """Asks every node one question, in a probe of its own."""
    with open_clients(nodes) as clients:
        tasks = {name: functools.partial(client.ask, request) for name, client in clients.items()}
        answers, errors = ask_all(tasks, 10.0)
    return {name: answers.get(name) or errors[name] for name in clients}  # in the nodes' order
