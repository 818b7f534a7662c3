"""Asks a Weights & Biases server, in two seconds at most, whether it takes a key; what is said never holds the key."""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.error
import urllib.request
from typing import Any

ASK_SECONDS = 2.0  # of the five that a learner waits at most


def find_obstacle(key: str, server: str, mode: str) -> str:
    """Says what stands against going online, or nothing.

    Args:
        key: What ``WANDB_API_KEY`` holds.
        server: The server's address.
        mode: What ``WANDB_MODE`` says, or "".
    """
    if mode and mode != "online":
        return f"WANDB_MODE is {mode[:20]!r}"
    if not key:
        return "there is no WANDB_API_KEY"
    # The form that the SDK asks for, of which a longer prefix (local-...) is part on servers of one's own.
    if not re.fullmatch(r"(?:[\w.]+-)?[\w.-]{40,}", key, re.ASCII):
        return "WANDB_API_KEY does not have the form of a key"
    if not is_address(server):
        return "WANDB_BASE_URL is not the address of a server"
    return _ask_server(key, server)


def is_address(server: str) -> bool:
    """Says whether this is the address of a server, without a password in it."""
    return bool(re.fullmatch(r"https?://[\w.-]+(?::\d{1,5})?(?:/[^\s?#]*)?", server, re.ASCII))


def _ask_server(key: str, server: str) -> str:
    """Asks the server whose key this is, and says what went wrong, or nothing.

    A thread, since looking up a name can hang longer than any limit that a request takes.
    """
    answers = [_silent(server)]

    def ask() -> None:
        answers.append(_query(key, server))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ASK_SECONDS)
    return answers[-1]


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which would take the key along to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _query(key: str, server: str) -> str:
    body = json.dumps({"query": "query Viewer { viewer { id } }"}).encode()
    credentials = base64.b64encode(f"api:{key}".encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {credentials}"}
    request = urllib.request.Request(f"{server.rstrip('/')}/graphql", body, headers)
    try:
        with urllib.request.build_opener(_Stay).open(request, timeout=ASK_SECONDS) as response:
            viewer = json.load(response)["data"]["viewer"]
    except urllib.error.HTTPError as error:
        refused = error.code in (401, 403)
        return f"{server} refuses the key" if refused else f"{server} answers with error {error.code}"
    except OSError as error:
        # The request's own limit can run out a moment before the thread's: it is the same finding.
        late = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
        return _silent(server) if late else f"{server} cannot be reached"
    except (ValueError, KeyError, TypeError):
        return f"{server} does not answer as a W&B server does"
    return "" if viewer else f"{server} refuses the key"


def _silent(server: str) -> str:
    return f"{server} did not answer within {ASK_SECONDS:g} s"
