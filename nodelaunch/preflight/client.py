"""Asks the probes of all nodes at once: every wait has a limit, and a silent node delays no other."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from lab_common import LabError
from nodelaunch.backends.nodes import Node
from nodelaunch.node import probe
from nodelaunch.node.output import CHUNK, EVENT, Lines
from nodelaunch.program import make_command


class ProbeClient:
    """One probe on one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._process: subprocess.Popen | None = None
        self._closed, self._asking = False, threading.Lock()
        self._lines, self._answers = Lines(EVENT), []

    def open(self) -> None:
        """Starts the probe; returns before it answers.

        Raises:
            LabError: It could not be started.
        """
        try:
            self._process = self.node.popen(make_command(self.node.python, probe))
        except OSError as error:
            raise self.node.explain(127, str(error)) from error
        if self._closed:  # it took so long that nobody waits any more
            self.end(0.0)

    def ask(self, request: Mapping, seconds: float) -> dict:
        """Asks one question and waits for its answer.

        Raises:
            LabError: The probe has ended, did not answer in time, or could not find out.
        """
        end, pipe = time.monotonic() + seconds, self._process.stdout.raw
        with self._asking:
            with contextlib.suppress(OSError, ValueError):  # if it has ended, its own words explain why
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            while not self._answers:
                if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                    raise explain_silence(self.node.name, seconds)
                if not (piece := pipe.read(CHUNK)):
                    raise self._explain_end()
                lines = self._lines.feed(piece)  # a login script may print, too
                self._answers += [line[1:] for line in lines if line.startswith(probe.MARK.encode())]
            answer = json.loads(self._answers.pop(0))
        if "error" in answer:
            raise explain_failure(self.node.name, answer["error"])
        return answer

    def _explain_end(self) -> LabError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        pipe = self._process.stderr.raw
        os.set_blocking(pipe.fileno(), False)  # a shared connection of ssh may keep it open
        return self.node.explain(self._process.returncode or 1, (pipe.read() or b"").decode(errors="replace"))

    def close(self) -> None:
        """Lets the probe end by itself; a moment later :meth:`end` makes sure of it."""
        self._closed = True
        if self._process:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.close()

    def end(self, seconds: float) -> None:
        """Kills the probe's local process if it does not end by itself in time."""
        if not (process := self._process):
            return
        try:
            process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # it has a session of its own, see Node.popen
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        if self._asking.acquire(timeout=1.0):  # not while a thread still reads from them
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()
            self._asking.release()


def explain_silence(name: str, seconds: float) -> LabError:
    """The error of a node that did not answer in time."""
    cause = "the machine is off or overloaded, or a firewall drops what is sent to it"
    fix = "log in there by hand; when that works at once, run the preflight again"
    return LabError(f"{name} did not answer within {seconds:.1f} s.", where=name, cause=cause, fix=fix)


def explain_failure(name: str, words: str) -> LabError:
    """The error of a node that could not find out what it was asked."""
    fix = "run the preflight again; if it says the same, use a newer Python on that node"
    return LabError(f"{name} could not be examined.", where=name, cause=words, fix=fix)


@contextlib.contextmanager
def open_clients(nodes: Sequence[Node]) -> Iterator[dict[str, ProbeClient]]:
    """Provides a client for every node, by name, and leaves no process behind."""
    clients = {node.name: ProbeClient(node) for node in nodes}
    try:
        yield clients
    finally:
        for client in clients.values():
            client.close()
        end = time.monotonic() + 0.5
        try:
            for client in clients.values():
                client.end(end - time.monotonic())
        except BaseException:  # an interrupt: end all of them at once
            for client in clients.values():
                client.end(0.0)
            raise


def ask_all(tasks: Mapping[str, Callable[[], dict]], seconds: float) -> dict[str, dict | LabError]:
    """Runs a task for each node, all at once; returns what each returned, or the LabError that came instead."""

    def run(task: Callable[[], dict]) -> dict | LabError:
        try:
            return task()
        except LabError as error:
            return error

    found = probe.collect({name: lambda task=task: run(task) for name, task in tasks.items()}, seconds)
    answers = {name: found.get(name) or explain_silence(name, seconds) for name in tasks}  # in the nodes' order
    failed = {name: answer for name, answer in answers.items() if isinstance(answer, dict) and "error" in answer}
    return answers | {name: explain_failure(name, answer["error"]) for name, answer in failed.items()}


def ask_once(
    nodes: Sequence[Node], request: Mapping | Callable[[Node], Mapping], *, seconds: float = 10.0
) -> dict[str, dict | LabError]:
    """Asks every node one question, or the one that a function makes for it, in a probe of its own."""
    with open_clients(nodes) as clients:

        def ask(client: ProbeClient) -> dict:
            client.open()
            return client.ask(request(client.node) if callable(request) else request, seconds)

        return ask_all({name: lambda client=client: ask(client) for name, client in clients.items()}, seconds)
