"""Weights & Biases without surprises: offline unless a server answers, silent, and nothing outside the run folder.

:func:`connect` decides once whether runs go online, :meth:`Connection.start` opens one, and :func:`read_run` reads back
what a run left on the disk. Nothing here asks a question, waits longer than :data:`PATIENCE`, or writes a key anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab_utils.wandb_runs.reading import list_runs, read_run
from lab_utils.wandb_runs.records import Recorded
from lab_utils.wandb_runs.server import find_obstacle, is_address

if TYPE_CHECKING:
    import wandb

__all__ = ["Connection", "Recorded", "connect", "list_runs", "read_run"]

PATIENCE = 5.0  # seconds that a learner waits for a server: two to ask it, the next to open a run, and some reserve
INIT_SECONDS = 2.5
DEFAULT_SERVER = "https://api.wandb.ai"
# Silent, so that outputs are the same everywhere; no host details, package lists or source code in the record; and on
# the disk after a second, where the SDK by itself writes every 15 s and a killed process loses what is not written.
SETTINGS: Mapping[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "save_code": False,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": 1.0,
}


@dataclass
class Connection:
    """Whether runs go to a server, and why; ``print(connection)`` says it in one line.

    Args:
        folder: Where runs are recorded, below ``wandb/``, in either mode.
        mode: ``online`` or ``offline``; becomes ``offline`` for good when a server stops answering.
        reason: Why, in words that never hold a key.
    """

    folder: Path
    mode: str
    reason: str
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS, repr=False)

    def __str__(self) -> str:
        return f"{self.mode}: {self.reason}"

    def start(self, **options: Any) -> wandb.Run:
        """Opens a run: ``wandb.init(**options)`` in this connection's mode, folder and settings.

        Where the server fails after all, one line says so, and this run and all later ones are offline.

        Args:
            options: Of ``wandb.init``: project, name, config, group, tags, id, ...

        Raises:
            wandb.errors.UsageError: The options do not go together, such as an id with a slash.
        """
        import wandb

        # Newer and older SDKs lack some of the settings that begin with x_; the labs work without them, less tidily.
        known = {name: value for name, value in self.settings.items() if name in wandb.Settings.model_fields}

        def init() -> wandb.Run:
            limits = {"init_timeout": INIT_SECONDS, "finish_timeout": PATIENCE} if self.mode == "online" else {}
            return wandb.init(
                dir=str(self.folder),
                mode=self.mode,
                settings=wandb.Settings(**known, **limits),
                **{"reinit": "finish_previous"} | options,
            )

        if self.mode == "online":
            try:
                return init()
            except (wandb.errors.CommError, wandb.errors.AuthenticationError, TimeoutError):
                self.mode, self.reason = "offline", "the server took the key, but opened no run in time"
                print(self)
        return init()


def connect(folder: Path | str) -> Connection:
    """Decides whether runs go online, in a few seconds and without a question.

    Online takes a key in ``WANDB_API_KEY`` that the server named by ``WANDB_BASE_URL`` accepts now. Everything else,
    and ``WANDB_MODE=offline``, is offline. The folders that the SDK would make in the home folder are moved into
    ``folder`` by environment variables, so this comes before anything else of wandb in a process.

    Args:
        folder: Where runs, caches and settings go; made if it is not there.
    """
    folder = Path(folder).absolute()
    (folder / "wandb").mkdir(parents=True, exist_ok=True)  # the SDK takes another place where this one is missing
    home = folder / "wandb-home"
    for part in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        os.environ[f"WANDB_{part}_DIR"] = str(home / part.lower())
    os.environ["WANDB_SILENT"] = "true"
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # crashes of the SDK are not reported over the network
    # A notebook's wandb-core would serve the processes that it starts, too, and go on writing when they are killed.
    os.environ.pop("WANDB_SERVICE", None)
    key, server = os.environ.get("WANDB_API_KEY", ""), os.environ.get("WANDB_BASE_URL") or DEFAULT_SERVER
    reason = find_obstacle(key, server, os.environ.get("WANDB_MODE", ""))
    if not reason:
        return Connection(folder, "online", f"{server} takes the key in WANDB_API_KEY")
    # What cannot be used would make even an offline run fail: the SDK checks its form in any mode.
    if key != key.strip():
        del os.environ["WANDB_API_KEY"]
    if not is_address(server):
        del os.environ["WANDB_BASE_URL"]
    return Connection(folder, "offline", f"{reason}; what is recorded stays in the folder of the runs")
