"""What came of a job: its results by rank, or the rank that failed first, and what the others said."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab_common import LabError, env_folder


@dataclass(frozen=True)
class Rank:
    """One process of the job: its number in all, on its node, and where it runs."""

    rank: int
    local_rank: int
    node: str
    host: str
    pid: int
    address: str


@dataclass(frozen=True)
class Failure:
    """Why a job failed.

    Attributes:
        kind: "exception", "signal", "exit", "hang", "join", "mismatch", "lost", "stopped", "limit" or "torchrun" (also
            what starts the ranks in its place).
        what: One sentence with the rank and the node.
        rank: The rank that failed first; None where no rank did.
        node: Its node.
        message: The last line of its traceback, or what torchrun said.
        location: Where in the training script, for example "train.py, line 33".
        traceback: Its traceback, without the frames of the launcher.
        cause: The likely cause.
        fix: What to do.
        consequences: By rank, in one line, what the others said; they failed because the first one did.
        stacks: By rank, where it stood when it was ended.
    """

    kind: str
    what: str
    rank: int | None = None
    node: str = ""
    message: str = ""
    location: str = ""
    traceback: str = ""
    cause: str = ""
    fix: str = ""
    consequences: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [self.what]
        if self.traceback:
            lines += ["", self.traceback.rstrip(), ""]
        if self.kind == "hang":
            for rank, text in sorted(self.stacks.items()):
                lines += [f"  rank {rank} stood at: {text}"]
        lines += [f"  rank {rank} failed as a consequence: {text}" for rank, text in sorted(self.consequences.items())]
        hints = [("likely", self.cause), ("fix", self.fix)]
        return "\n".join([*lines, *(f"  {label}: {text}" for label, text in hints if text)])


@dataclass(frozen=True)
class JobResult:
    """What came of a job.

    Attributes:
        ok: Whether every process on every node ended well.
        results: By rank, what its script gave to ``launch.report``; None for a rank that reported nothing.
        ranks: Who was who, by rank.
        failure: Why it failed, if it did.
        restarts: Failures after which torchrun started the workers anew, as one line each.
        seconds: Seconds from the launch: "preflight", "joined" (all workers started), "total".
        memory: By rank, the largest resident set in bytes, as far as it was seen (Linux).
        folder: Folder of the job on the launcher's side, with the scripts and ``output.log``.
        lines: The output of all ranks, each line with its rank in front.
    """

    ok: bool
    results: tuple[Any, ...]
    ranks: tuple[Rank, ...]
    failure: Failure | None
    restarts: tuple[str, ...]
    seconds: dict[str, float]
    memory: dict[int, int]
    folder: Path
    lines: tuple[str, ...]


class JobError(LabError):
    """A job that failed; ``result`` holds what came of it all the same."""

    def __init__(self, result: JobResult) -> None:
        failure = result.failure
        super().__init__(
            failure.what,
            where=failure.location,
            cause=failure.cause,
            fix=failure.fix,
            log=result.folder / "output.log",
        )
        self.result = result

    def __str__(self) -> str:
        return f"{self.result.failure}\n  log: {self.log}"


def find_log(job_id: str | None = None) -> Path:
    """Returns the log of a job of this machine, the newest where no id is given; also after the kernel was restarted.

    Raises:
        LabError: There is none.
    """
    jobs = env_folder("LAB_RUNS", "runs") / "jobs"
    logs = sorted(jobs.glob(f"{job_id or '*'}/output.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        cause = "none was run, or LAB_RUNS points elsewhere"
        raise LabError("No job has left a log yet.", where=jobs, cause=cause, fix="job.run() writes one")
    return logs[-1]
