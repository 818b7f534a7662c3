"""A job's outcome: its results by rank, or the rank that failed first and the messages of the others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab_common import LabError, env_folder
from lab_common.markup import write_card
from lab_common.text import cut_lines

MANY_RANKS = 8  # the most that a card in a notebook names one by one


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
    """Why a job failed."""

    #: "exception", "signal", "exit" (also of a rank that ended in order while others waited for it), "hang", "alone",
    #: "join", "mismatch", "lost", "stopped", "limit" or "torchrun" (also for what starts the ranks in its place).
    kind: str
    what: str  #: one sentence with the rank and the node
    rank: int | None = None  #: that failed first; None if none did
    node: str = ""  #: of that rank
    message: str = ""  #: the error's own text, which ends its traceback, or torchrun's message
    location: str = ""  #: in the training script, for example "train.py, line 33"
    traceback: str = ""  #: without the frames of the launcher
    cause: str = ""  #: the likely one
    fix: str = ""  #: what to do
    consequences: dict[int, str] = field(default_factory=dict)  #: by rank, messages of those that failed because of it
    others: dict[int, str] = field(default_factory=dict)  #: by rank, later errors of their own, perhaps the same one
    stacks: dict[int, str] = field(default_factory=dict)  #: by rank, where it stood when it was ended

    def __str__(self) -> str:
        lines = [self.what]
        if self.traceback:
            lines += ["", self.traceback.rstrip(), ""]
        hints = [*self._list_ranks(), ("likely", self.cause), ("fix", self.fix)]
        return "\n".join([*lines, *(f"  {label}: {text}" for label, text in hints if text)])

    def write_text(self, log: object = "") -> str:
        """The failure as a notebook keeps it: of very many lines the first and the last; with the log's path."""
        texts = {name: cut_lines(getattr(self, name)) for name in ("message", "traceback", "cause", "fix")}
        return f"{replace(self, **texts)}" + (f"\n  log: {log}" if log else "")

    def write_html(self, log: object = "") -> str:
        """The failure as a card for a notebook, with its traceback folded, and the log's path."""
        ranks = self._list_ranks()
        if len(ranks) > MANY_RANKS:
            ranks[MANY_RANKS:] = [("more ranks", f"{len(ranks) - MANY_RANKS} are not shown here")]
        hints = [("likely", self.cause), ("fix", self.fix), ("log", str(log))]
        rank = "" if self.rank is None else f"rank {self.rank}"
        return write_card(
            self.kind,
            self.what,
            [*ranks, *hints],
            place=" on ".join(part for part in (rank, self.node) if part),
            colour="note" if self.kind in ("limit", "stopped") else "red",
            title=f"traceback of {rank}" if rank else "the last lines before the end",
            lines=self.traceback,
        )

    def _list_ranks(self) -> list[tuple[str, str]]:
        """A label and a text for each rank that stood somewhere or had a message."""
        stood = self.stacks if self.kind == "hang" else {}
        kinds = {"stood at": stood, "failed, too": self.others, "failed as a consequence": self.consequences}
        return [(f"rank {rank} {kind}", texts[rank]) for kind, texts in kinds.items() for rank in sorted(texts)]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.write_text())

    def _repr_html_(self) -> str:
        return self.write_html()


@dataclass(frozen=True)
class JobResult:
    """A job's outcome."""

    ok: bool  #: every process on every node ended well
    results: tuple[Any, ...]  #: by rank, the value that its script gave to nodelaunch.report; None if it gave none
    ranks: tuple[Rank, ...]  #: who was who, by rank
    failure: Failure | None
    restarts: tuple[str, ...]  #: the failures after which torchrun restarted the workers, as one line each
    seconds: dict[str, float | None]  #: "preflight"; from the launch: "joined" (all workers started; or None), "total"
    memory: dict[int, int]  #: by rank, the largest resident set in bytes, as far as it was seen (Linux)
    folder: Path  #: of the job on the launcher's side, with the scripts and output.log
    lines: tuple[str, ...]  #: the output of all ranks, each with its rank in front; of very many, the last ones

    @property
    def log(self) -> Path:
        """The file that has all that was printed."""
        return self.folder / "output.log"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.failure.write_text(self.log) if self.failure else repr(self))

    def _repr_html_(self) -> str | None:
        return self.failure.write_html(self.log) if self.failure else None


class JobError(LabError):
    """A job that failed; ``result`` is its outcome."""

    def __init__(self, result: JobResult) -> None:
        failure = result.failure
        hints = {"where": failure.location, "cause": failure.cause, "fix": failure.fix, "log": result.log}
        super().__init__(failure.what, **hints)
        self.result = result

    def __str__(self) -> str:
        return self.result.failure.write_text(self.log)

    def _repr_html_(self) -> str:
        return self.result.failure.write_html(self.log)


def find_log(job_id: str | None = None) -> Path:
    """Returns the log of a job of this machine, by default the newest; also after the kernel was restarted.

    Raises:
        LabError: There is none.
    """
    jobs = env_folder("LAB_RUNS", "runs") / "jobs"
    logs = sorted(jobs.glob(f"{job_id or '*'}/output.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        what = f"Job {job_id:.60} has left no log here." if job_id else "No job has left a log yet."
        cause, fix = "none was run, or LAB_RUNS points elsewhere", f"ls {jobs}" if job_id else "job.run() writes one"
        raise LabError(what, where=jobs, cause=cause, fix=fix)
    return logs[-1]
