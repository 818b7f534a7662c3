"""Asks the probes of all nodes at once: every wait has a limit, and a silent node delays no other."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence

from lab_common import LabError
from nodelaunch.backends.nodes import Node
from nodelaunch.node import probe
from nodelaunch.node.output import EVENT
from nodelaunch.program import make_command


class ProbeClient:
    """One probe on one node; :func:`ask_all` limits the time of all that waits here."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._process: subprocess.Popen | None = None
        self._ended = False

    def ask(self, request: Mapping) -> dict:
        """Asks one question, of which the first starts the probe; the answer has an "error" if it has none.

        Raises:
            LabError: The probe could not be started, or has ended.
        """
        if not self._process:
            self._start()
        process = self._process
        with contextlib.suppress(OSError, ValueError):  # if it has ended, its own words explain why
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        while line := process.stdout.readline(EVENT):
            if line.startswith(probe.MARK.encode()):  # a login script may print, too
                return json.loads(line[1:])
        status, pipe = process.wait(), process.stderr.raw
        os.set_blocking(pipe.fileno(), False)  # a shared connection of ssh may keep it open
        raise self.node.explain(status or 1, (pipe.read() or b"").decode(errors="replace"))

    def _start(self) -> None:
        try:
            self._process = self.node.popen(make_command(self.node.python, probe))
        except OSError as error:
            raise self.node.explain(127, str(error)) from error
        if self._ended:  # it took so long that nobody waits any more
            self.end()

    def end(self) -> None:
        """Lets the probe end by itself, and kills its local process if it does not."""
        self._ended = True
        if not (process := self._process):
            return
        with contextlib.suppress(OSError, ValueError):
            process.stdin.close()
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
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
