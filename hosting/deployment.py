"""A class's deployment: teams, tokens, settings and engine, all read and checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hosting.engine import Engine, Machine, find_engine
from hosting.limits import Shares, keep_shares
from hosting.settings import NAME, TLS, Settings, check_settings, load_settings
from hosting.teams import Team, check_gpus, find_gpus, read_teams
from hosting.tokens import keep_tokens
from lab_common import LabError, read_path

# Where our own files are in a team's container; the team cannot write there.
LABS = "/srv/labs"


@dataclass(frozen=True)
class Deployment:
    """Everything that one class is deployed with, read and checked; nothing is started yet."""

    folder: Path
    settings: Settings
    teams: list[Team]
    tokens: dict[str, str]
    engine: Engine
    machine: Machine
    shares: Shares

    def find(self, name: str) -> Team:
        """Returns the team of that name.

        Raises:
            LabError: There is no such team.
        """
        for team in self.teams:
            if team.name == name:
                return team
        known = ", ".join(team.name for team in self.teams)
        what = f"There is no team {ascii(name)[:60]}."
        raise LabError(what, where=self.settings.teams, cause="a typing error", fix=f"one of: {known}")

    def name_container(self, team: Team, node: int = 0) -> str:
        """Returns the name of one of a team's containers."""
        return f"{self.settings.project}-{team.name}-node{node}"

    def name_nodes(self, team: Team) -> list[str]:
        """Returns the names of all of a team's containers."""
        return [self.name_container(team, node) for node in range(self.settings.nodes)]

    def run_in(self, container: str, *command: str, timeout: float = 60.0) -> tuple[int, str]:
        """Runs a command in a container; returns its exit status and what it printed.

        It runs in our own folder: in the team's folder, programs could find the team's files in place of ours.
        """
        asked = self.engine.ask("exec", "-w", LABS, container, *command, timeout=timeout)
        return asked.returncode, (asked.stdout if asked.returncode == 0 else asked.stderr or asked.stdout).strip()


def read_deployment(
    folder: Path, settings: Settings, *, engine: str = "", renew: str = "", starts: bool = True
) -> Deployment:
    """Reads and checks everything that a deployment is made of, before anything starts.

    Args:
        folder: Where the deployment's files are kept.
        settings: Of the deployment.
        engine: ``docker`` or ``podman``; by default whichever is installed.
        renew: The name of a team that gets a new token.
        starts: True if containers are started, so that the teams' GPUs and data must exist.

    Raises:
        LabError: The first thing that would go wrong.
    """
    path = Path(settings.teams)
    teams = read_teams(path, project=settings.project)
    if starts:
        check_settings(settings)
        if any(team.gpus for team in teams):
            check_gpus(teams, find_gpus(), path=path, share=settings.share_gpus)
    found = find_engine(folder, wanted=engine)
    machine = found.measure()
    tokens = keep_tokens(folder, teams, renew=renew)
    shares = keep_shares(folder, machine, teams, settings, save=starts)
    return Deployment(folder, settings, teams, tokens, found, machine, shares)


def merge_settings(folder: Path, given: dict) -> Settings:
    """Returns the stored settings, if there are any, updated with those of the command line; None was not given."""
    kept = load_settings(folder) if (folder / NAME).exists() else Settings()
    given = {name: value for name, value in given.items() if value is not None}
    # The next command may be given in another folder.
    for name in {"teams", "data", "tls"} & set(given):
        if given[name] and given[name] not in TLS:
            given[name] = str(read_path(given[name]).resolve())
    if "bind" in given:
        given["bind"] = str(given["bind"])
    settings = replace(kept, **given)
    # The hub starts one container per team.
    return replace(settings, nodes=1) if settings.hub else settings
