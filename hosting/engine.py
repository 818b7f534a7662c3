"""Calls the engine that runs the containers, Docker or Podman, and its Compose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lab_common import LabError, checkout

LOG = "engine.log"
# Bytes of an answer that are read. A team's container can answer without end.
LONGEST_ANSWER = 1 << 20
# What holds containers to their limits; an engine without root may have fewer of them.
CONTROLLERS = frozenset({"memory", "swap", "cpu", "cpuset", "pids"})
# Docker's words for them.
WORDS = {"memory": "MemoryLimit", "swap": "SwapLimit", "cpu": "CpuCfsQuota", "cpuset": "CPUSet", "pids": "PidsLimit"}
# Engines, each with the command of its Compose.
CANDIDATES = (
    ("docker", ("docker", "compose")),
    ("docker", ("docker-compose",)),
    ("podman", ("podman-compose",)),
    ("podman", ("podman", "compose")),
)


@dataclass(frozen=True)
class Machine:
    """Resources that the engine can give to containers.

    Attributes:
        memory: Bytes.
        cpus: The numbers of its CPUs.
        limits: Those of ``CONTROLLERS`` with which the engine can limit a container.
    """

    memory: int
    cpus: tuple[int, ...]
    limits: frozenset[str] = CONTROLLERS


@dataclass(frozen=True)
class Engine:
    """A container engine and its Compose.

    Attributes:
        program: ``docker`` or ``podman``.
        compose: The command of Compose, in parts.
        folder: Folder of Compose's files and its log.
    """

    program: str
    compose: tuple[str, ...]
    folder: Path

    @property
    def podman(self) -> bool:
        """True if Podman runs the containers, even behind Docker's client."""
        return self.program == "podman" or "podman" in os.environ.get("DOCKER_HOST", "")

    @property
    def log(self) -> Path:
        """File with the output of Compose and of the engine."""
        return self.folder / LOG

    def run_compose(self, project: str, files: Sequence[Path], *arguments: str) -> None:
        """Runs Compose on a project's files; its output goes into the log.

        Raises:
            LabError: Compose failed; the message ends with its last output.
        """
        given = [part for file in files for part in ("-f", str(file))]
        self._call([*self.compose, "-p", project, *given, *arguments])

    def run(self, *arguments: str) -> None:
        """Runs the engine itself; its output goes into the log.

        Raises:
            LabError: It failed; the message ends with its last output.
        """
        self._call([self.program, *arguments])

    def _call(self, command: list[str]) -> None:
        with self.log.open("ab") as file:
            file.write(f"$ {' '.join(command)}\n".encode())
            file.flush()
            begun = file.tell()
            pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            status = subprocess.run(command, cwd=self.folder, **pipes).returncode
        if status:
            said = self.log.read_bytes()[begun:].decode(errors="replace").split("\n")
            raise LabError(
                f"{Path(command[0]).name} failed (exit status {status}).",
                where=" ".join(command[:3]),
                cause=" / ".join([line.strip() for line in said if line.strip()][-3:])[-600:],
                fix=f"tail -n 40 {self.log}",
                log=self.log,
            )

    def ask(self, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Returns the engine's answer, even an error: for questions whose refusal is an answer, too.

        A command that takes longer than ``timeout`` seconds, or prints more than ``LONGEST_ANSWER`` bytes, is killed.
        Its status is then below zero, which no command in a container can return.
        """
        with self.start(*arguments, timeout=timeout) as process, ThreadPoolExecutor(2) as pool:

            def read(pipe: BinaryIO) -> str:
                said = pipe.read(LONGEST_ANSWER)
                if pipe.read(1):
                    _kill(process)
                return said.decode(errors="replace")

            stdout, stderr = pool.map(read, (process.stdout, process.stderr))
            status = process.wait()
        if status < 0:
            stderr += f"\nno answer within {timeout:g} s, or one of more than {LONGEST_ANSWER} bytes"
        return subprocess.CompletedProcess(arguments, status, stdout, stderr)

    @contextmanager
    def start(
        self, *arguments: str, timeout: float, stderr: int = subprocess.PIPE
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Runs a command during the block; kills it, and all that it started, with the block or after a time."""
        command = [self.program, *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": stderr}
        # A group of its own: what it started may hold its pipes open when it has ended.
        with subprocess.Popen(command, **pipes, start_new_session=True) as process:
            timer = threading.Timer(timeout, _kill, [process])
            timer.daemon = True
            timer.start()
            try:
                yield process
            finally:
                timer.cancel()
                _kill(process)

    def measure(self) -> Machine:
        """Asks the engine about its machine, which need not be this one: Docker Desktop runs a smaller one."""
        told: dict = {}
        with suppress(ValueError):
            told = json.loads(self.ask("info", "--format", "{{json .}}").stdout)
        host = told.get("host", {})  # Podman's words; Docker's are one level up
        memory, count = told.get("MemTotal") or host.get("memTotal"), told.get("NCPU") or host.get("cpus")
        here = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        # The engine counts those that it may use. They may be some in the middle.
        cpus = here if count in (None, len(here)) else range(count)
        if host:
            named = set(host.get("cgroupControllers", CONTROLLERS))
            limits = CONTROLLERS & (named | ({"swap"} if "memory" in named else set()))  # one controller has both
        else:
            limits = frozenset(name for name, word in WORDS.items() if told.get(word, True))
        return Machine(memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), tuple(cpus), limits)


def _kill(process: subprocess.Popen) -> None:
    """Kills a process and the process group that it leads, unless somebody has waited for its end."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def find_engine(folder: Path, *, wanted: str = "") -> Engine:
    """Finds an engine that answers and has Compose: the wanted one, or Docker, or Podman.

    Raises:
        LabError: None is installed, or it does not answer, or it has no Compose; quotes what each said.
    """
    said = []
    for engine in (Engine(*candidate, folder) for candidate in CANDIDATES):
        for command in ([engine.program, "info"], [*engine.compose, "version"]):
            fault = _find_fault(command)
            if fault:
                said.append(f"{' '.join(command)}: {fault}")
                break
        else:
            if wanted in ("", engine.program):
                return engine
    what, cause = "No engine with Compose answers on this machine.", "; ".join(dict.fromkeys(said))
    fix = f"install Docker and its Compose plugin, or podman and podman-compose: {checkout()}/hosting/README.md"
    raise LabError(what, where=wanted or "docker and podman", cause=cause, fix=fix)


def _find_fault(command: Sequence[str]) -> str:
    """Returns why a command fails; "" if it does not."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return "not installed"
    except subprocess.TimeoutExpired:
        return "no answer within a minute"
    return (ended.stderr.strip().splitlines() or ["failed"])[-1] if ended.returncode else ""
