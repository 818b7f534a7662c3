"""Questions to the probes of all nodes at once: every wait is bounded, and a node that is silent costs no other."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType

from lab_common import LabError, nvidia
from nodelaunch.backends.nodes import Node
from nodelaunch.node import cleaning, facts, guard, probe, processes
from nodelaunch.node.output import read_lines

# At the beginning of a line: `from nodelaunch.node.x import (…)`, over as many lines as it takes.
OWN_IMPORT = re.compile(r"^from (?:nodelaunch|lab_common|__future__)\S* import (?:\([^)]*\)|.*)$", re.MULTILINE)
OWN_MAIN = '\nif __name__ == "__main__":\n'
# Python 3.9 cannot evaluate annotations such as `str | None`.
FUTURE = "from __future__ import annotations\n"


PROBE = (nvidia, facts, guard, processes, cleaning, probe)


def make_program(*modules: ModuleType) -> str:
    """Returns modules, by default the probe's, as one text for ``python -c``, without imports of ours.

    Args:
        modules: Each before those that import it; the last is the one that is run.
    """
    *sources, last = [inspect.getsource(module) for module in modules or PROBE]
    sources = [source.partition(OWN_MAIN)[0] for source in sources]
    # Not by ast.parse: in Python 3.11 two threads cannot do that at a time.
    text = FUTURE + "".join(OWN_IMPORT.sub("", source) for source in [*sources, last])
    # An argument is bytes in the system's encoding, which need not have every sign. Strings and patterns say
    # the same with escapes.
    return text.encode("ascii", "backslashreplace").decode("ascii")


class ProbeClient:
    """One probe on one node.

    Args:
        node: Where it runs.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self._process: subprocess.Popen | None = None
        self._reader: threading.Thread | None = None
        self._closed = False
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._errors: deque[bytes] = deque(maxlen=50)

    def open(self) -> None:
        """Starts the probe; returns before it answers.

        Raises:
            LabError: It could not be started.
        """
        # Safe path: a random.py in the home folder must not stand in for Python's own.
        argv = ["env", "PYTHONSAFEPATH=1", self.node.python, "-c", make_program()]
        try:
            process = self.node.popen(argv)
        except OSError as error:
            raise self.node.explain(127, str(error)) from error
        self._process = process
        # Each closes its own pipe: closing it from elsewhere would wait for the reading to end, maybe forever.
        self._reader = threading.Thread(target=self._read_errors, args=(process,), daemon=True)
        self._reader.start()
        threading.Thread(target=self._read_answers, args=(process,), daemon=True).start()
        if self._closed:  # in the meantime nobody waited any more
            self._end(process)

    def _read_answers(self, process: subprocess.Popen) -> None:
        with contextlib.suppress(OSError, ValueError), process.stdout as stream:
            for line in read_lines(stream):
                if line.startswith(probe.MARK.encode()):
                    self._answers.put(line[1:])
        self._answers.put(None)

    def _read_errors(self, process: subprocess.Popen) -> None:
        with contextlib.suppress(OSError, ValueError), process.stderr as stream:
            self._errors.extend(read_lines(stream, 10_000))

    def ask(self, request: Mapping, seconds: float) -> dict:
        """Asks one question and waits for its answer.

        Raises:
            LabError: The probe has ended, did not answer in time, or could not find out.
        """
        with contextlib.suppress(OSError, ValueError):  # it has ended: the next line says so, and why
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            raise explain_silence(self.node, seconds) from None
        if line is None:
            raise self._explain_end()
        answer = json.loads(line)
        if "error" in answer:
            cause, fix = (
                answer["error"],
                "run the preflight again; if it says the same, use a newer Python on that node",
            )
            raise LabError(f"{self.node.name} could not be examined.", where=self.node.name, cause=cause, fix=fix)
        return answer

    def _explain_end(self) -> LabError:
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = 1
        if self._reader:  # the last words come beside the end; a shared connection of ssh may hold their pipe open
            self._reader.join(0.5)
        return self.node.explain(status or 1, b"".join(self._errors).decode(errors="replace"))

    def close(self) -> None:
        """Lets the probe end by itself; a moment later :meth:`end` sees to it."""
        self._closed = True
        if self._process:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.close()

    def end(self, seconds: float) -> None:
        """Ends the probe's local process, where it did not end by itself in time."""
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(seconds, 0.0))
                return
            self._end(self._process)

    def _end(self, process: subprocess.Popen) -> None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own, see Node.popen
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)


def explain_silence(node: Node, seconds: float) -> LabError:
    """Says that a node was started to be asked and did not answer."""
    return LabError(
        f"{node.name} did not answer within {seconds:.1f} s.",
        where=node.name,
        cause="the machine is off or overloaded, or a firewall drops what is sent to it",
        fix="log in there by hand; when that works at once, run the preflight again",
    )


@contextlib.contextmanager
def open_clients(nodes: Sequence[Node]) -> Iterator[dict[str, ProbeClient]]:
    """Holds a client with every node, by name, for a block, and leaves no process behind."""
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
        except BaseException:  # an interrupt: now at once, and all of them
            for client in clients.values():
                client.end(0.0)
            raise


def ask_all(tasks: Mapping[str, Callable[[], dict]], nodes: Mapping[str, Node], seconds: float) -> dict:
    """Runs a task per node, all at once.

    Returns:
        Per node what its task returned, or the LabError that came instead.
    """
    errors: dict[str, LabError] = {}

    def run(name: str) -> dict:
        try:
            return tasks[name]()
        except LabError as error:
            errors[name] = error
            raise

    found = probe.collect({name: lambda name=name: run(name) for name in tasks}, seconds)
    answers = {}
    for name in tasks:  # in the nodes' order, not in that of their answers
        answer = errors.get(name) or found.get(name) or explain_silence(nodes[name], seconds)
        if isinstance(answer, dict) and "error" in answer:
            # Those of one machine have no names by which ssh would find them.
            asked = f"--local {count}" if (count := getattr(nodes[name], "together", 0)) else nodes[name].name
            cause, fix = answer["error"], f"python -m nodelaunch preflight {asked}   (asks it again)"
            answer = LabError(f"{name} could not be asked.", where=name, cause=cause, fix=fix)
        answers[name] = answer
    return answers


def ask_once(
    nodes: Sequence[Node], request: Mapping | Callable[[Node], Mapping], *, seconds: float = 10.0
) -> dict[str, dict | LabError]:
    """Asks every node one question, or the one that a function makes for it, in a probe of its own."""
    with open_clients(nodes) as clients:

        def ask(client: ProbeClient) -> dict:
            client.open()
            return client.ask(request(client.node) if callable(request) else request, seconds)

        tasks = {name: lambda client=client: ask(client) for name, client in clients.items()}
        return ask_all(tasks, {node.name: node for node in nodes}, seconds)
