"""A class's deployment: teams, tokens, settings and engine, all read and checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hosting.engine import Engine, Machine, find_engine
from hosting.files import LABS, Setup, name_container, write_files
from hosting.limits import Share, check_shares, keep_shares
from hosting.settings import NAME, TLS, Settings, check_settings, load_settings
from hosting.teams import Team, check_gpus, find_gpus, read_teams
from hosting.tokens import keep_tokens
from lab_common import LabError, read_path


@dataclass(frozen=True)
class Deployment:
    """Everything that one class is deployed with, read and checked; nothing is started yet."""

    folder: Path
    settings: Settings
    teams: list[Team]
    tokens: dict[str, str]
    engine: Engine
    machine: Machine
    shares: dict[str, tuple[Share, ...]]

    @property
    def image_id(self) -> str:
        """Id of the teams' image; its name stays the same when it is rebuilt."""
        return self.engine.ask("image", "inspect", "-f", "{{.Id}}", self.settings.image).stdout.strip()

    @property
    def setup(self) -> Setup:
        """Decisions beyond the settings, for the files."""
        guarded, podman = self.settings.guarded, self.engine.podman
        return Setup(self.tokens, self.shares, self.machine, self.image_id, podman=podman, guarded=guarded)

    def write(self) -> list[Path]:
        """Writes Compose's files if they have changed."""
        return write_files(self.folder, self.teams, self.settings, self.setup)

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

    def ask(self, team: Team, *command: str, node: int = 0, timeout: float = 60.0) -> tuple[int, str]:
        """Runs a command in a team's container; returns its exit status and what it printed.

        It runs in our own folder: in the team's folder, programs could find the team's files in place of ours.
        """
        container = name_container(self.settings, team, node)
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
        renew: A team that gets a new token.
        starts: True if containers are started, so that the teams' GPUs must exist.

    Raises:
        LabError: The first thing that would go wrong.
    """
    path = Path(settings.teams)
    teams = read_teams(path, share=settings.share_gpus)
    _check_names(teams, settings)
    if starts and any(team.gpus for team in teams):
        check_gpus(teams, find_gpus(), path=path, share=settings.share_gpus)
    found = find_engine(folder, wanted=engine)
    machine = found.measure()
    if starts:
        check_shares(machine, teams, settings)
    make_private(folder)
    tokens = keep_tokens(folder, teams, renew=renew)
    shares = keep_shares(folder, machine, teams, settings, save=starts)
    return Deployment(folder, settings, teams, tokens, found, machine, shares)


def _check_names(teams: list[Team], settings: Settings) -> None:
    for team in teams:
        if team.name.startswith(f"{settings.project}-"):
            # To the front, the container of team red, labs-red-node0, and the service of a team labs-red are one name.
            cause = f"{settings.project} is what the names of all containers begin with"
            what = f"The name of team {team.name} can be taken for another team's container."
            fix = f"a name that does not begin with {settings.project}-, or --project with another word"
            raise LabError(what, where=settings.teams, cause=cause, fix=fix)


def open_deployment(folder: Path, *, engine: str = "", renew: str = "") -> Deployment:
    """Reads the deployment that was started from a folder.

    If its data or GPUs are gone, it can still be looked at, collected and ended; a new token (``renew``) starts a
    container, which needs them.
    """
    settings = load_settings(folder)
    if renew:
        check_settings(settings)
    return read_deployment(folder, settings, engine=engine, renew=renew, starts=bool(renew))


def make_private(folder: Path) -> None:
    """Makes the class's folder, for its owner alone.

    Raises:
        LabError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        fix = "give --state a folder that is yours"
        raise LabError(
            "The class's folder cannot be made.", where=folder, cause=error.strerror or "", fix=fix
        ) from error


def parse_settings(folder: Path, given: dict) -> Settings:
    """Returns the stored settings, if there are any, updated with those given now.

    Raises:
        LabError: The stored settings cannot be read, or the settings are unsafe or cannot work.
    """
    kept = load_settings(folder) if (folder / NAME).exists() else Settings()
    given = {name: value for name, value in given.items() if value is not None}
    # The next command may be given in another folder.
    for name in {"teams", "data", "tls"} & set(given):
        if given[name] and given[name] not in TLS:
            given[name] = str(read_path(given[name]).resolve())
    settings = replace(kept, **given)
    # The hub starts one container per team.
    return check_settings(replace(settings, nodes=1) if settings.hub else settings)
