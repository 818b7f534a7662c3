"""The teams' tokens: long, random, all different, and in one file that only the instructor can read."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from hosting.settings import write_text
from hosting.teams import Team
from lab_common import LabError

NAME = "tokens.env"
# 32 characters are the least that nobody guesses; these signs are what a URL and a shell take as they are.
LINE = re.compile(r"(TOKEN_[A-Z0-9_]+)=([A-Za-z0-9_-]{32,})")


def keep_tokens(folder: Path, teams: Sequence[Team], *, renew: str = "") -> dict[str, str]:
    """Returns the tokens of these teams by their names; makes one for each team that has none.

    Args:
        folder: Folder of ``tokens.env``, with a line ``TOKEN_RED=...`` for team red.
        teams: Of the class; the token of a team that has left stays, should it come back.
        renew: The name of a team that gets a new one.

    Raises:
        LabError: A line was edited so that it holds no token, or a short one; names the line.
    """
    path = folder / NAME
    kept: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), start=1):
        found = LINE.fullmatch(line)
        if not found:
            what, fix = "This line holds no token.", "remove the line; a token that is missing is made"
            raise LabError(what, where=f"{path}, line {number}", cause="the file was edited", fix=fix)
        kept[found[1]] = found[2]
    fresh = {team.variable: secrets.token_hex(24) for team in teams if team.variable not in kept or team.name == renew}
    tokens = kept | fresh
    if fresh:
        write_text(path, "".join(f"{name}={token}\n" for name, token in sorted(tokens.items())), mode=0o600)
    return {team.name: tokens[team.variable] for team in teams}
