"""Weights & Biases without surprises: offline unless a server accepts the key, quiet, and all in the run folder.

:func:`connect` decides once whether runs go online; its ``options`` are the arguments for ``wandb.init``.
:func:`read_run` reads back a run's files on the disk. Nothing here asks a question, waits long, or writes a key.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lab_common import read_path
from lab_utils.wandb_runs.reading import Recorded, list_runs, read_records, read_run

__all__ = ["QUIET", "Connection", "Recorded", "connect", "list_runs", "read_records", "read_run"]

ASK_SECONDS = 2  # that a server has for its answer; wandb.login itself waits for ten
INIT_SECONDS = 10.0  # that it has to open a run; wandb.init itself waits for 90
# No output but warnings; no host name or details, package lists or source code in the record; and on the disk after a
# second, where the SDK by itself writes every 15 s and a killed process loses what is not written.
QUIET: Mapping[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "host": "",
    "save_code": False,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": 1.0,
}


@dataclass(frozen=True)
class Connection:
    """The decision whether runs go to a server, and why; ``print(connection)`` shows it in one line.

    Args:
        folder: The folder where runs are recorded, below ``wandb/``, in either mode.
        mode: ``online`` or ``offline``.
        reason: Why, in words that never hold a key.
    """

    folder: Path
    mode: str
    reason: str

    def __str__(self) -> str:
        return f"{self.mode}: {self.reason}"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``wandb.init`` for every run of the lab: mode, dir and settings."""
        import wandb

        # Newer and older SDKs lack some of the settings that begin with x_; the labs work without them, less tidily.
        known = {name: value for name, value in QUIET.items() if name in wandb.Settings.model_fields}
        limits = {"init_timeout": INIT_SECONDS, "finish_timeout": INIT_SECONDS} if self.mode == "online" else {}
        return {"mode": self.mode, "dir": str(self.folder), "settings": known | limits}


def connect(folder: Path | str) -> Connection:
    """Decides whether runs go online, in a few seconds and without a question.

    Online needs a key, from ``WANDB_API_KEY`` or stored by ``wandb login``, that the server accepts now. Everything
    else, and ``WANDB_MODE=offline``, is offline. Environment variables move the SDK's caches from the home folder into
    ``folder``, so call this before any other wandb function in a process.

    Args:
        folder: The folder for runs and caches; made if it is missing.
    """
    folder = read_path(folder).absolute()
    (folder / "wandb").mkdir(parents=True, exist_ok=True)  # the SDK takes another place where this one is missing
    for part in ("CACHE", "DATA", "ARTIFACT"):
        os.environ[f"WANDB_{part}_DIR"] = str(folder / "wandb-home" / part.lower())
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # crashes of the SDK are not reported over the network
    # A notebook's wandb-core would serve the processes that it starts, too, and go on writing when they are killed.
    os.environ.pop("WANDB_SERVICE", None)
    with contextlib.redirect_stderr(io.StringIO()):  # what the SDK says of keys and files, we say in one line
        mode, reason = _log_in()
    return Connection(folder, mode, reason)


def _log_in() -> tuple[str, str]:
    """Makes the SDK find a key and check it with the server; returns the mode and the reason, without the key."""
    import wandb

    stays = "what is recorded stays in the folder of the runs"
    try:
        settings = wandb.setup().settings
        server = settings.base_url
        if "@" in urlsplit(server).netloc:
            raise ValueError("base_url: a password in it")
    except (ValueError, wandb.errors.UsageError) as error:
        # What has not its form would make even an offline run fail: the SDK looks at it in any mode.
        name = "WANDB_BASE_URL" if "base_url" in str(error) else "WANDB_API_KEY"
        name = "WANDB_MODE" if "mode\n" in str(error) else name
        os.environ.pop(name, None)
        wandb.teardown()
        form = "is not the address of a server" if name == "WANDB_BASE_URL" else "has not the form that wandb asks for"
        return "offline", f"{name} {form}; {stays}"
    if settings.mode != "online":
        return "offline", f"WANDB_MODE is {settings.mode!r}; {stays}"
    before = os.environ.get("WANDB_HTTP_TIMEOUT")
    os.environ["WANDB_HTTP_TIMEOUT"] = before or str(ASK_SECONDS)  # else wandb.login waits for ten seconds
    try:
        if wandb.login(verify=True, prompt=False):
            return "online", f"{server} takes the key"
        return "offline", f"there is no key for {server}; {stays}"
    except wandb.errors.AuthenticationError as error:
        late = "did not respond in time" in str(error)
        return "offline", f"{f'{server} gave no valid answer in time' if late else str(error)[:200]}; {stays}"
    finally:
        if before is None:
            del os.environ["WANDB_HTTP_TIMEOUT"]
