"""A job's id in the environment of what is no part of that job, such as the kernel of a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lab_utils.launch.verdicts import Facts, Verdict


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
            where, cause = "in the environment of this kernel", "it was exported in the shell that started JupyterLab"
            fix = "unset LAB_JOB_ID in that shell, then start JupyterLab from it again"
            if place != machine:
                where, cause = "in every login there", "a profile exports it, such as ~/.profile or ~/.bashrc"
                fix = "on that node, remove the line that exports LAB_JOB_ID"
            what = f"LAB_JOB_ID={identity} is set {where}: all that is started from it looks like a part of that job"
            verdicts.append(Verdict(name, "jobs", "note", what, cause, fix))
    return verdicts
