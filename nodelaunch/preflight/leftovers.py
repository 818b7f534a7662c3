"""What runs of other jobs, and a job's id where none of its processes is, such as in the kernel of a notebook."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from nodelaunch.preflight.verdicts import Facts, Verdict, Wanted


def judge_jobs(facts: Facts, wanted: Wanted, jobs: Mapping[str, Sequence[Mapping]]) -> list[Verdict]:
    """Names what runs of other jobs, each process once where several nodes are one machine.

    Red is what holds the memory of a GPU that this job will use; a held port is judged with the port.
    """
    verdicts, seen = [], set()
    for name, processes in jobs.items():
        system, gpus = facts.get(name, {}).get("system", {}), facts.get(name, {}).get("gpus", {})
        holders = {int(row[0]) for row in gpus.get("apps", []) if row[0].isdigit()}
        by_job: dict[str, list[Mapping]] = {}
        watched = {process["id"] for process in processes if process["supervisor"]}
        for process in processes:
            if process["id"] != wanted.job_id and (system.get("machine"), process["pid"]) not in seen:
                seen.add((system.get("machine"), process["pid"]))
                by_job.setdefault(process["id"], []).append(process)
        for job, own in by_job.items():
            pids = ", ".join(str(process["pid"]) for process in own[:8])
            what = f"job {job} still runs here: {len(own)} process{'es' if len(own) > 1 else ''} (pid {pids})"
            state, cause = "note", f"a leftover, or a node that was started by hand: {own[0]['command']}"
            fix = stop_command(job, name, system, wanted)
            if job in watched:
                cause = "another notebook or script runs it; the two share the machine"
                fix = "none is needed; to measure without it, wait until it has ended"
            elif holders & {process["pid"] for process in own}:
                state, what = "red", f"{what}, and holds GPU memory"
            verdicts.append(Verdict(name, "jobs", state, what, cause, fix))
    return verdicts


def stop_command(job: str, name: str, system: Mapping, wanted: Wanted) -> str:
    """The command that stops a job on a node."""
    here = wanted.machine and system.get("machine") == wanted.machine
    return f"python -m nodelaunch stop {shlex.quote(job)}{'' if here else f' {shlex.quote(name)}'}"


def judge_inherited(facts: Facts, inherited: Mapping[str, Sequence[str]], machine: str) -> list[Verdict]:
    """Says where LAB_JOB_ID was set by somebody else than the launcher, once per machine.

    Args:
        facts: Per node, what its probe found.
        inherited: Per node, the ids that its probe and what started it carry.
        machine: Where the launcher runs.
    """
    verdicts, seen = [], set()
    for name, ids in inherited.items():
        place = facts.get(name, {}).get("system", {}).get("machine")
        for identity in ids:
            if (place, identity) in seen:
                continue
            seen.add((place, identity))
            where, cause = "in the environment of the launcher", "it was exported in the shell that started Python"
            fix = "unset LAB_JOB_ID in that shell, then start Python (or JupyterLab) from it again"
            if place != machine:
                where, cause = "in every login there", "a profile exports it, such as ~/.profile or ~/.bashrc"
                fix = "on that node, remove the line that exports LAB_JOB_ID"
            what = f"LAB_JOB_ID={identity} is set {where}: all that is started from it looks like a part of that job"
            verdicts.append(Verdict(name, "jobs", "note", what, cause, fix))
    return verdicts
