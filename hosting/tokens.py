"""The teams' tokens: long, random, all different, and in one file that only the instructor can read."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from hosting.teams import Team
from lab_common import LabError
from lab_common.files import write_atomically

NAME = "tokens.env"
SHORTEST = 32
# What a URL, a shell and Compose's own files take as it is.
EDITED, MAKE = "the file was edited", "remove the line; a token that is missing is made"
TOKEN = re.compile(r"[A-Za-z0-9_-]+")


def keep_tokens(folder: Path, teams: Sequence[Team], *, renew: str = "") -> dict[str, str]:
    """Makes a token for each team that has none, and checks those that are there.

    Args:
        folder: Folder of ``tokens.env``, with a line ``TOKEN_RED=...`` for team red.
        teams: Of the class; the token of a team that has left stays, should it come back.
        renew: The name of a team that gets a new one.

    Returns:
        The tokens of these teams by their names.

    Raises:
        LabError: A token is empty, short, odd or another team's; names the line.
    """
    path = folder / NAME
    kept = _read(path)
    wanted = {team.variable for team in teams}
    fresh = {team.variable: secrets.token_hex(24) for team in teams if team.variable not in kept or team.name == renew}
    tokens = kept | fresh
    _check({name: token for name, token in tokens.items() if name in wanted}, path)
    if fresh:
        text = "".join(f"{name}={token}\n" for name, token in sorted(tokens.items()))
        with write_atomically(path, mode=0o600) as file:
            file.write(text.encode())
    return {team.name: tokens[team.variable] for team in teams}


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    if path.stat().st_mode & 0o077:
        cause = "the file was written anew or copied"
        raise LabError("Others can read the teams' tokens.", where=path, cause=cause, fix=f"chmod 600 {path}")
    tokens: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        name, equals, token = line.partition("=")
        if not line.strip() or line.startswith("#"):
            continue
        if not equals or not re.fullmatch(r"TOKEN_[A-Z0-9_]+", name) or name in tokens:
            what = "A team has two tokens." if name in tokens else "This line holds no token."
            raise LabError(what, where=f"{path}, line {number}", cause=EDITED, fix=MAKE)
        tokens[name] = token
    return tokens


def _check(tokens: dict[str, str], path: Path) -> None:
    owners: dict[str, str] = {}
    for name, token in tokens.items():
        what = ""
        if not token:
            what = f"{name} is empty."
        elif len(token) < SHORTEST:
            what = f"{name} has {len(token)} characters, which can be guessed; {SHORTEST} is the least."
        elif not TOKEN.fullmatch(token):
            what = f"{name} has signs that a URL would change."
        elif token in owners:
            what = f"{name} and {owners[token]} are the same token."
        if what:
            raise LabError(what, where=path, cause=EDITED, fix=MAKE)
        owners[token] = name
