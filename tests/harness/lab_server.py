"""JupyterLab as `make lab` starts it, and a browser that uses it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from course import workspace
from harness import lab_pages
from harness.browser import Browser, Page
from harness.jobs import wait_for
from harness.wandb_server import WandbServer
from nodelaunch.node.probe import find_free_port

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-the-tests"
WANDB_KEY = "PLANTED" + "0123456789abcdef" * 3  # of the form that wandb asks for
KEEP = "from lab_utils.timing import records as kept\nkept.find_noise = lambda timings: ''"
LONG = 10.0  # seconds of a cell
# Continuous integration has an hour and a half: it leaves out what takes longest of what is tried elsewhere, too.
BRIEF = os.environ.get("LAB_BRIEF") == "1"


@dataclass(frozen=True)
class Lab:
    """A JupyterLab that `make lab` started.

    Attributes:
        url: Its address, without the token.
        folder: The learner's copy of the labs.
        runs: LAB_RUNS of its kernels.
        environment: What `make lab` inherited.
        browser: The browser that uses it.
        tracker: A pretend Weights & Biases server, for which the environment has a key.
    """

    url: str
    folder: Path
    runs: Path
    environment: dict[str, str]
    browser: Browser
    tracker: WandbServer

    def start(self) -> Page:
        """Opens the address that `make lab` prints, as a learner does first."""
        page = self.browser.open(f"{self.url}/?token={TOKEN}")
        page.wait_for("window.jupyterapp !== undefined", timeout=120)
        page.evaluate("jupyterapp.restored.then(() => true)", timeout=120)
        return page

    def open(self, name: str) -> Page:
        """Opens a notebook in its own tab and waits until the kernel is ready."""
        # A workspace of its own: a tab that finds the default one in use by another goes elsewhere in mid-load.
        page = self.browser.open(f"{self.url}/lab/workspaces/{secrets.token_hex(4)}?token={TOKEN}")
        lab_pages.open_notebook(page, name)
        return page

    def ask(self, path: str, method: str = "GET") -> Any:
        """Returns the answer of the server's REST interface."""
        request = urllib.request.Request(self.url + path, method=method, headers={"Authorization": f"token {TOKEN}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or "null")

    def end_kernels(self) -> None:
        """Ends every kernel, like a learner who shuts all of them down."""
        for kernel in self.ask("/api/kernels"):
            self.ask(f"/api/kernels/{kernel['id']}", "DELETE")

    def run_again(self, name: str) -> None:
        """Runs every cell of a finished lab again in a new kernel, as on the next evening; most of them twice.

            A slow cell is run only once here: it ran before, and finds its own leftovers this time.

        Raises:
            nbclient.exceptions.CellExecutionError: A cell raised; the error names it.
        """
        notebook = nbformat.read(self.folder / name, as_version=4)
        client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": self.folder}})
        with client.setup_kernel(env=self.environment):
            # What was measured in two rounds is called noise, and would be measured anew.
            client.execute_cell(new_code_cell(KEEP), 0)
            for index, cell in enumerate(notebook.cells):
                began = time.monotonic()
                client.execute_cell(cell, index)
                if time.monotonic() - began < LONG:
                    client.execute_cell(cell, index)


def find_processes(runs: Path) -> list[str]:
    """Returns the commands of living processes that `make lab` started with this LAB_RUNS, with kernels and jobs."""
    found = (process.info for process in psutil.process_iter(["environ", "cmdline"]))
    return [" ".join(one["cmdline"] or ()) for one in found if (one["environ"] or {}).get("LAB_RUNS") == str(runs)]


def find_listeners(url: str) -> list[str]:
    """Returns the address if somebody still listens there."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return [] if probe.connect_ex((host, int(port))) else [url]


def make_environment(data: Path, home: Path, sockets: str, tracker: str) -> dict[str, str]:
    """Makes the environment of `make lab`, as from a shell, with the test's folders for Jupyter and IPython."""
    config = home / "config"
    config.mkdir(parents=True)
    # Jupyter chooses ports for a kernel some seconds before that listens there; on a busy machine another program may
    # have one by then ("Address already in use"), and the kernel is dead.
    settings = {"LabApp": {"expose_app_in_browser": True}, "KernelManager": {"transport": "ipc"}}
    (config / "jupyter_lab_config.json").write_text(json.dumps(settings))
    ours = {"CI": "1", "LAB_DATA": data, "LAB_RUNS": home / "runs", "LAB_SCALE": "small", "OMP_NUM_THREADS": "1"}
    ours |= {"JUPYTER_TOKEN": TOKEN, "JUPYTER_CONFIG_DIR": config, "IPYTHONDIR": home / "ipython"}
    ours |= {"JUPYTER_DATA_DIR": home / "share", "JUPYTER_RUNTIME_DIR": sockets, "HOME": home / "user"}
    # No test looks at times here.
    ours |= {"LAB_ROUNDS": "1", "WANDB_API_KEY": WANDB_KEY, "WANDB_BASE_URL": tracker}
    unwanted = re.compile(r"MAKEFLAGS|MAKELEVEL|MFLAGS|WANDB.*|.*proxy", re.IGNORECASE)
    environment = {key: value for key, value in os.environ.items() if not unwanted.fullmatch(key)}
    return environment | {key: str(value) for key, value in ours.items()}


@contextmanager
def serve(folder: Path, home: Path, environment: dict[str, str]) -> Iterator[str]:
    """Runs `make lab` for a workspace and yields its address; its output goes to ``home``."""
    port = find_free_port()
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen(
            ["make", "lab", f"LAB_PORT={port}", f"WORKSPACE={folder}"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(f"{url}/api/status?token={TOKEN}", server, home / "server.log")
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def wait_for_server(address: str, server: subprocess.Popen, log: Path, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError), urllib.request.urlopen(address, timeout=10):
            return
        assert server.poll() is None and time.monotonic() < end, log.read_text(errors="replace")
        time.sleep(0.3)


@contextmanager
def start_lab(home: Path, data: Path) -> Iterator[Lab]:
    """Starts `make lab` and a browser; fails if any of their processes is left at the end.

    Args:
        home: Receives all files that they write.
        data: LAB_DATA of the labs.
    """
    workspace.update(ROOT / "notebooks", home / "workspace")
    (home / "user").mkdir()
    (home / "runs").mkdir()
    # As on a machine where the labs have run before: what nbval's kernels measured is not measured again.
    for records in Path(os.environ["LAB_RUNS"]).glob("lab*.jsonl"):
        shutil.copy(records, home / "runs")
    # Of the kernels' sockets: a name in pytest's own folder would be too long for one.
    sockets = tempfile.TemporaryDirectory(prefix="lab-")
    with sockets, WandbServer() as tracker, Browser(home / "profile") as browser:
        environment = make_environment(data, home, sockets.name, tracker.url)
        with serve(home / "workspace", home, environment) as url:
            yield Lab(url, home / "workspace", home / "runs", environment, browser, tracker)

    def find_left() -> list[str]:
        return find_processes(home / "runs") + find_listeners(url)

    with suppress(AssertionError):  # the next line says what is left
        wait_for(lambda: not find_left(), 10.0)
    assert not find_left()
