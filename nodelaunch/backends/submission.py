"""A job in Slurm's queue: handing it over, how it stands, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from pathlib import Path

from lab_common import LabError

# The states from which a job does not come back; GONE is ours, for one that Slurm has forgotten.
OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "GONE"}
OVER |= {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
LOOK_SECONDS, STOP_SECONDS = 0.5, 5.0


def submit(path: Path, *, lease: Path | None = None) -> int:
    """Hands a batch script to Slurm from the script's own folder, and returns the job's number.

    Args:
        path: The script.
        lease: The file that says, as long as it is touched, that the launcher lives; None lets the job run by itself.

    Raises:
        LabError: Slurm is not here, or refuses.
    """
    # A notebook may itself run in a Slurm job, whose SLURM_… say what *that* job was given.
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}
    env |= {"LAB_LEASE": str(lease)} if lease else {}
    done = _ask("sbatch", "--parsable", path.name, cwd=path.parent, env=env)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines() or [""]
        raise LabError(
            "Slurm does not take the job.",
            where=path,
            cause=said[-1].rpartition("error: ")[2][:300],
            fix=f"sinfo shows what there is; by hand: cd {path.parent}; sbatch {path.name}",
        )
    return int(done.stdout.strip().split(";")[0])  # "12;cluster" where there are several


def list_partitions(partition: str | None) -> list[tuple[str, bool, str, str]]:
    """Returns, per partition and node: the partition's name, whether it is up, the node, and its state.

    Raises:
        LabError: Slurm is not here, or does not answer.
    """
    only = [f"--partition={partition}"] if partition else []
    done = _ask("sinfo", "--noheader", "--Node", "--format=%P|%a|%N|%t", *only)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["sinfo gave no reason"])[-1]
        fix = "ask who runs the cluster; sinfo shows when it is back"
        raise LabError("Slurm does not answer.", where="sinfo", cause=said[:300], fix=fix)
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 3]
    return [(name, up == "up", node, state) for name, up, node, state in rows]


def judge_queue(rows: list[tuple[str, bool, str, str]], count: int) -> tuple[str, str]:
    """Says whether there are ``count`` nodes: "ok", "note" (the job will wait) or "red"; and what there is."""
    # A state's last character may say more, such as * for a node that does not answer.
    # A node may be in several partitions.
    usable = {node: state for _, up, node, state in rows if up and state in ("idle", "mix", "alloc", "comp")}
    there, idle = len(usable), list(usable.values()).count("idle")
    names = ", ".join(sorted({name.rstrip("*") for name, *_ in rows})) or "none"
    found = f"{there} node(s) in service, {idle} of them idle (partitions: {names}); {count} asked for"
    return ("red" if there < count else "note" if idle < count else "ok"), found


def describe_queue(job: int) -> str:
    """Returns in words how a job stands: state, reason, nodes."""
    facts = look_up(job)
    reason = facts.get("Reason", "None")
    nodes = facts.get("NodeList") or ""
    on = f" on {nodes}" if nodes not in ("", "(null)") else ""
    return f"Slurm job {job}: {facts['JobState']}{on}{f' ({reason})' if reason != 'None' else ''}"


def look_up(job: int) -> dict[str, str]:
    """Returns what Slurm says of a job; its ``JobState`` is "GONE" where it knows it no longer."""
    done = _ask("scontrol", "show", "job", "--oneliner", str(job))
    if done.returncode:
        # Slurm forgets a job some minutes after its end; that the controller is away for a moment means nothing.
        return {"JobState": "GONE" if "Invalid job id" in done.stderr else "UNKNOWN"}
    return dict(re.findall(r"(\w+)=(\S*)", done.stdout))


def cancel(job: int, *, seconds: float = 10.0) -> bool:
    """Ends a job, running or not; returns whether it was over within ``seconds``."""
    _ask("scancel", str(job))
    deadline = time.monotonic() + seconds
    while look_up(job)["JobState"] not in OVER:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class SlurmJob:
    """A submitted job, as its links share it: its state, looked up twice a second at most, and its lease."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self._lock, self._looked, self._facts = threading.Lock(), 0.0, {"JobState": "UNKNOWN"}
        self._stopping = False

    @property
    def facts(self) -> dict[str, str]:
        """What Slurm says of it."""
        with self._lock:
            if self.state_known not in OVER and time.monotonic() - self._looked > LOOK_SECONDS:
                self._facts, self._looked = look_up(self.number), time.monotonic()
            return self._facts

    @property
    def state_known(self) -> str:
        """The state at the last look."""
        return self._facts["JobState"]

    @property
    def state(self) -> str:
        """The state now."""
        return self.facts["JobState"]

    def beat(self) -> None:
        """Says that the launcher lives."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / "lease")

    def stop(self) -> None:
        """Asks the supervisors to end everything, and cancels the job when that takes too long."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        (self.folder / "lease").unlink(missing_ok=True)
        timer = threading.Timer(STOP_SECONDS, self.end)
        timer.daemon = True
        timer.start()

    def end(self) -> None:
        """Cancels it."""
        (self.folder / "lease").unlink(missing_ok=True)
        if self.state not in OVER:
            _ask("scancel", str(self.number))


def _ask(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, **options)
    except FileNotFoundError as error:
        raise LabError(
            "Slurm's programs are not on this machine.",
            where="PATH",
            cause=f"there is no program `{argv[0]}`: this is no login node of a Slurm cluster",
            fix="launch from a login node, or use local_nodes(2) or ssh_nodes([...])",
        ) from error
