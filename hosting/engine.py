"""Calls the engine that runs the containers, Docker or Podman, and its Compose."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lab_common import LabError, checkout
from lab_common.text import clean

LOG = "engine.log"
# Bytes of an answer that are read. A team's container can answer without end.
LONGEST_ANSWER = 1 << 20
LONGEST_LINE = 1 << 16
# What the engine said last arrives within this, in seconds, when it has ended.
LOG_SECONDS = 5.0


# What holds containers to their limits; an engine without root may have fewer of them.
CONTROLLERS = frozenset({"memory", "swap", "cpu", "cpuset", "pids"})


@dataclass(frozen=True)
class Machine:
    """Resources that the engine can give to containers.

    Attributes:
        memory: Bytes.
        cpus: The numbers of its CPUs.
        processes: Most processes and threads in total.
        limits: Those of ``CONTROLLERS`` with which the engine can limit a container.
    """

    memory: int
    cpus: tuple[int, ...]
    processes: int = 32768
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
    def orphans(self) -> tuple[str, ...]:
        """Options that make ``up`` end containers that the files no longer name.

        With them, podman-compose 1.6 would end every container except those that it recreates.
        """
        return () if self.compose == ("podman-compose",) else ("--remove-orphans",)

    def run_compose(self, files: Sequence[Path], *arguments: str, variables: Mapping[str, str] | None = None) -> None:
        """Runs Compose on its files; its output goes into the log.

        Raises:
            LabError: Compose failed; the message ends with its last output.
        """
        given = [part for file in files for part in ("-f", str(file))]
        self._call([*self.compose, *given, *arguments], cwd=self.folder, env={**os.environ, **(variables or {})})

    def run(self, *arguments: str, cwd: Path | None = None) -> None:
        """Runs the engine itself; its output goes into the log.

        Raises:
            LabError: It failed; the message ends with its last output.
        """
        self._call([self.program, *arguments], cwd=cwd or self.folder, env=dict(os.environ))

    def ask(self, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Returns the engine's answer, even an error: for questions whose refusal is an answer, too.

        If an answer takes too long, the status is 124. If it is longer than ``LONGEST_ANSWER`` bytes, the command is
        killed, and the status is that of the signal, below zero, which no command in a container can return.
        """
        command, said = [self.program, *arguments], {}
        with _start(command, timeout, stderr=subprocess.PIPE) as (process, late):
            pipes = {"stdout": process.stdout, "stderr": process.stderr}
            readers = [
                threading.Thread(target=_read_answer, args=(pipe, said, name, process), daemon=True)
                for name, pipe in pipes.items()
            ]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            status = process.wait()
        if late.is_set():
            return subprocess.CompletedProcess(command, 124, "", f"no answer within {timeout:g} s")
        if any(len(answer) > LONGEST_ANSWER for answer in said.values()):
            refusal = f"an answer of more than {LONGEST_ANSWER} bytes"
            return subprocess.CompletedProcess(command, -signal.SIGKILL, "", refusal)
        texts = {name: answer.decode(errors="replace") for name, answer in said.items()}
        return subprocess.CompletedProcess(command, status, **texts)

    @contextmanager
    def stream(self, *arguments: str, timeout: float) -> Iterator[BinaryIO]:
        """Streams the output of an engine command; it ends with the block, or after ``timeout`` s."""
        with _start([self.program, *arguments], timeout, stderr=subprocess.DEVNULL) as (process, _):
            yield process.stdout

    def measure(self) -> Machine:
        """Asks the engine about its machine, which need not be this one: Docker Desktop runs a smaller one.

        If it does not answer, this machine is measured.
        """
        told: dict = {}
        with suppress(ValueError, RecursionError):
            told = json.loads(self.ask("info", "--format", "{{json .}}").stdout)
        told = told if isinstance(told, dict) else {}
        host = told.get("host") or {}  # Podman's words; Docker's are one level up
        memory, count = (
            told.get(docker) or host.get(podman) for docker, podman in (("MemTotal", "memTotal"), ("NCPU", "cpus"))
        )
        here = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
        # The engine counts those that it may use. They may be some in the middle.
        cpus = here if count in (None, len(here)) else range(count)
        if host:
            named = set(host.get("cgroupControllers", CONTROLLERS))
            limits = CONTROLLERS & (named | ({"swap"} if "memory" in named else set()))  # one controller has both
        else:
            words = {"MemoryLimit": "memory", "CpuCfsQuota": "cpu", "CPUSet": "cpuset", "PidsLimit": "pids"}
            words |= {"SwapLimit": "swap"}
            limits = frozenset(name for word, name in words.items() if told.get(word, True))
        return Machine(memory or _measure_memory(), tuple(cpus), _measure_processes(), limits)

    def has_image(self, name: str) -> bool:
        """True if an image is here already, so that nothing has to be pulled."""
        return self.ask("image", "inspect", name).returncode == 0

    def _call(self, command: list[str], *, cwd: Path, env: dict[str, str]) -> None:
        log, said = self.folder / LOG, []
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(command)}\n")
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=cwd, env=env, **options)
        writer = threading.Thread(target=_write_log, args=(process.stdout, log, said), daemon=True)
        writer.start()
        try:
            status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        # Not for ever: what the engine leaves running may hold the pipe.
        writer.join(LOG_SECONDS)
        if status:
            raise LabError(
                f"{Path(command[0]).name} failed (exit status {status}).",
                where=" ".join(command[:3]),
                cause=" / ".join(said)[-600:],
                fix=f"tail -n 40 {log}",
                log=log,
            )


def _measure_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _measure_processes() -> int:
    """Returns how many processes and threads the kernel allows."""
    found = []
    for name in ("pid_max", "threads-max"):
        with suppress(OSError, ValueError):
            found.append(int(Path("/proc/sys/kernel", name).read_text()))
    return min(found, default=Machine.processes)


@contextmanager
def _start(
    command: Sequence[str], seconds: float, *, stderr: int
) -> Iterator[tuple[subprocess.Popen, threading.Event]]:
    """Runs a command during the block; ends it and all its children with the block or after a time.

    Yields the process, and an event that is set if the time was over first.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": stderr}
    late = threading.Event()
    # A group of its own: what it started may hold its pipes open when it has ended.
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:

        def end() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield process, late
        finally:
            timer.cancel()
            if process.poll() is None:
                _kill(process)


def _kill(process: subprocess.Popen) -> None:
    """Kills a process and the process group that it leads."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _read_answer(pipe: BinaryIO, said: dict[str, bytes], name: str, process: subprocess.Popen) -> None:
    """Reads a pipe to its end; kills the process if the answer is too long."""
    said[name] = pipe.read(LONGEST_ANSWER + 1)
    if len(said[name]) > LONGEST_ANSWER:
        _kill(process)


def _write_log(pipe: BinaryIO, log: Path, said: list[str]) -> None:
    """Appends a program's output to the log, and keeps its last three lines in ``said``."""
    with log.open("a", encoding="utf-8") as file:
        while line := pipe.readline(LONGEST_LINE):
            # Others' names and texts are in it, and somebody will read the log in a terminal.
            text = clean(line.decode(errors="replace").rstrip("\r\n"))
            file.write(f"{text}\n")
            file.flush()
            if text.strip():
                said[:] = [*said, text][-3:]


def find_engine(folder: Path, *, wanted: str = "") -> Engine:
    """Finds an engine that answers and its Compose: Docker first, then Podman.

    Args:
        folder: Folder of Compose's files.
        wanted: ``docker`` or ``podman``, if both are installed.

    Raises:
        LabError: None is installed, or it does not answer, or it has no Compose; quotes what each said.
    """
    said = []
    for program, candidates in (
        ("docker", (("docker", "compose"), ("docker-compose",))),
        ("podman", (("podman-compose",), ("podman", "compose"))),
    ):
        if wanted not in ("", program):
            continue
        if not shutil.which(program):
            said.append(f"{program} is not installed")
            continue
        try:
            asked = subprocess.run([program, "info"], capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            said.append(f"{program} info: no answer within a minute")
            continue
        if asked.returncode:
            said.append(f"{program} info: {(asked.stderr.strip().splitlines() or ['failed'])[-1]}")
            continue
        for compose in candidates:
            if shutil.which(compose[0]) and not subprocess.run([*compose, "version"], capture_output=True).returncode:
                return Engine(program, compose, folder)
        said.append(f"{program} has no Compose ({' or '.join(' '.join(compose) for compose in candidates)})")
    raise LabError(
        "No engine with Compose answers on this machine.",
        where="up",
        cause="; ".join(said) or f"{wanted} is none that is known",
        fix=f"install Docker and its Compose plugin, or podman and podman-compose: {checkout()}/hosting/README.md",
    )
