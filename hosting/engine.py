"""Calls the engine that runs the containers, Docker or Podman, and its Compose."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab_utils import LabError, checkout

LOG = "engine.log"


@dataclass(frozen=True)
class Engine:
    """An engine and its Compose.

    Attributes:
        program: ``docker`` or ``podman``.
        compose: The command of Compose, in parts.
        folder: Where Compose's files lie, and the log of what it says.
    """

    program: str
    compose: tuple[str, ...]
    folder: Path

    @property
    def podman(self) -> bool:
        """Whether Podman runs the containers, also behind Docker's client."""
        return self.program == "podman" or "podman" in os.environ.get("DOCKER_HOST", "")

    @property
    def orphans(self) -> tuple[str, ...]:
        """What makes ``up`` end containers that the files no longer name.

        podman-compose 1.6 would then end every container but those that it makes anew.
        """
        return () if self.compose == ("podman-compose",) else ("--remove-orphans",)

    def run_compose(self, files: Sequence[Path], *arguments: str, tokens: Mapping[str, str]) -> None:
        """Runs Compose on its files, with the tokens in its environment; what it says goes into the log.

        Raises:
            LabError: Compose failed; ends with what it said last.
        """
        given = [part for file in files for part in ("-f", str(file))]
        self._call([*self.compose, *given, *arguments], cwd=self.folder, env={**os.environ, **tokens})

    def run(self, *arguments: str, cwd: Path | None = None) -> None:
        """Runs the engine itself; what it says goes into the log.

        Raises:
            LabError: It failed; ends with what it said last.
        """
        self._call([self.program, *arguments], cwd=cwd or self.folder, env=dict(os.environ))

    def ask(self, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """What the engine answers, whatever it is: for questions whose refusal is an answer, too."""
        command = [self.program, *arguments]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no answer within {timeout:g} s")

    def has_image(self, name: str) -> bool:
        """Whether an image is there without being fetched."""
        return self.ask("image", "inspect", name).returncode == 0

    def _call(self, command: list[str], *, cwd: Path, env: dict[str, str]) -> None:
        log = self.folder / LOG
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            begin = file.tell()
            ended = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        if ended.returncode:
            with log.open("rb") as file:
                file.seek(begin)
                said = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            raise LabError(
                f"{Path(command[0]).name} failed (exit status {ended.returncode}).",
                where=" ".join(command[:3]),
                cause=" / ".join(said[-3:])[-600:],
                fix=f"tail -n 40 {log}",
                log=log,
            )


def find_engine(folder: Path, *, wanted: str = "") -> Engine:
    """Finds an engine that answers and its Compose: Docker first, then Podman.

    Args:
        folder: Where Compose's files lie.
        wanted: ``docker`` or ``podman``, where both are there.

    Raises:
        LabError: None is there, or it does not answer, or it has no Compose; names what each said.
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
