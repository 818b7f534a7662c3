"""The sheet for the teams: one card each with its URL, its token, and what to do first."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from hosting.settings import Settings, write_text
from hosting.teams import Team

NAME = "handout.html"
STYLE = """
body { font: 11pt/1.5 system-ui, sans-serif; margin: 1.5cm; color: #111 }
section { border: 1px solid #555; border-radius: 6px; padding: 0.4cm 0.7cm; margin-bottom: 0.7cm; break-inside: avoid }
h2 { margin: 0 0 0.2cm } dt { color: #444; float: left; clear: left; width: 2.2cm } dd { margin: 0 0 0.1cm 2.4cm }
code { font-size: 10.5pt; overflow-wrap: anywhere }
"""
FIRST = (
    "Open the URL and enter the token once; the browser remembers it. If it asks for a user name, that is the team's.",
    "Open notebooks from the top of the list: 00_start_here first. Run each cell with Shift+Enter.",
    "Save with Ctrl+S. Your work is kept when the machine restarts.",
    "Keep your team's token secret: anyone who has it can run programs in your name.",
    "Do not open links to another team's pages while you work here: such a page could run programs in your name.",
)


def write_handout(folder: Path, teams: Sequence[Team], tokens: Mapping[str, str], settings: Settings) -> Path:
    """Writes the sheet, to be printed and cut, and returns its path; only the instructor can read the file."""
    path = folder / NAME
    steps = "".join(f"<li>{html.escape(step)}</li>" for step in FIRST)
    cards = "\n".join(
        f"<section><h2>Team {html.escape(team.name)}</h2><dl>"
        f"<dt>URL</dt><dd><code>{settings.find_url(team.name)}</code></dd>"
        f"<dt>Token</dt><dd><code>{tokens[team.name]}</code></dd>"
        f"<dt>You have</dt><dd>GPUs: {len(team.gpus)}; nodes: {settings.nodes}</dd></dl><ol>{steps}</ol></section>"
        for team in teams
    )
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Distributed Training Labs</title>'
        f"<style>{STYLE}</style></head><body>\n{cards}\n</body></html>\n"
    )
    write_text(path, text, mode=0o600)
    return path
