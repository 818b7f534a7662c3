"""Starts TensorBoard beside a notebook, for this machine alone, and ends it with the notebook.

``board.start(folder)`` gives a :class:`Board`: ``.note`` says where it is, ``.show()`` is the frame for a cell,
``.stop()`` ends it. Without ``stop`` it ends with the process that started it, however that ends.
"""

from __future__ import annotations

import atexit
import html
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lab_common import LabError, env_folder, read_folder, read_path
from lab_common.text import clean, clean_name

if TYPE_CHECKING:
    from IPython.display import HTML

SERVER = Path(__file__).with_name("server.py")
PORT = 6006
NOTE_BYTES = 2**16  # of a note, which has some hundred, and of the end of a log
# The servers of this process, by folder: a cell that is run twice must not leave two behind.
_running: dict[Path, Board] = {}


@dataclass(frozen=True, eq=False)
class Board:
    """A TensorBoard that this process started.

    Attributes:
        logdir: The folder that it shows, with all runs below it.
        port: Its port on 127.0.0.1.
        url: URL for a browser: that port, or the path through the Jupyter server's proxy.
        note: One or two sentences for the learner.
        process: The server.
    """

    logdir: Path
    port: int
    url: str
    note: str
    process: subprocess.Popen = field(repr=False)

    @property
    def running(self) -> bool:
        """True while the server runs."""
        return self.process.poll() is None

    def show(self, *, height: int = 640) -> HTML:
        """Returns a link and the frame that shows TensorBoard in a cell, or a message if it has ended. In pixels."""
        from IPython.display import HTML

        url, words = html.escape(self.url), "No TensorBoard answers here. To start it again, run this cell."
        link = f'<a href="{url}" target="_blank">Open TensorBoard in a tab of its own</a>'
        frame = f'<object data="{url}" type="text/html" width="100%" height="{height}">{words}</object>'
        return HTML(f"{link}<br>{frame}")

    def stop(self) -> None:
        """Ends the server, after 3 s by force; does nothing if it has ended already."""
        _running.pop(self.logdir, None)
        atexit.unregister(self.stop)
        if self.running:
            self.process.terminate()
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(logdir: str | Path, *, port: int = PORT, seconds: float = 60.0) -> Board:
    """Starts TensorBoard on 127.0.0.1, or returns the one that this process already runs for the same folder.

    Args:
        logdir: The folder with the event files, or with folders of them (one path: TensorBoard shows all runs below
            it). If it is missing, it is made, and the note says so; if it is an event file, its folder is used.
        port: The port to try first. If it is taken, a free one is used and the note says so.
        seconds: How long to wait until the server answers.

    Raises:
        LabError: The server ended or did not answer in time, or a file lies where a folder is meant.
    """
    words, logdir = _find_logdir(logdir)
    if logdir in _running:
        if _running[logdir].running:
            return _running[logdir]
        _running[logdir].stop()
    log = env_folder("LAB_RUNS", "runs") / "tensorboard.log"
    for folder in (logdir, log.parent):
        read_folder(folder).mkdir(parents=True, exist_ok=True)
    # -P: what lies beside server.py must not be imported in place of other packages. A session of its own: an interrupt
    # of the kernel goes to the kernel's whole group, and is not meant for the server.
    command = [sys.executable, "-P", str(SERVER), str(logdir), str(port), str(os.getpid())]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    try:
        found = json.loads(_read_line(process, seconds))["port"]
    except (ValueError, LookupError, TypeError) as error:
        process.kill()
        process.wait()
        process.stdout.close()
        said = (_read_end(log).strip().splitlines() or ["it said nothing"])[-1]
        raise LabError(
            f"TensorBoard did not start within {seconds:g} s.",
            where=logdir,
            cause=clean(said, 300),
            fix="run the cell again; if it fails again: python -m course.environment",
            log=log,
        ) from error
    except BaseException:  # an interrupt while waiting must not leave a server behind
        process.kill()
        raise
    url = choose_url(found)
    if port not in (0, found):
        words.append(f"Port {port} is in use, so TensorBoard took {found}.")
    words.append(f"TensorBoard is at {url}")
    server = _running[logdir] = Board(logdir, found, url, "\n".join(words), process)
    atexit.register(server.stop)
    return server


def _find_logdir(typed: str | Path) -> tuple[list[str], Path]:
    """Returns notes for the user and the folder that a typed path means."""
    path = read_path(os.path.expandvars(os.fspath(typed))).resolve()
    if path.is_file():
        return [f"{clean_name(path.name, 80)} is a file, so TensorBoard shows its folder."], path.parent
    if not read_folder(path).exists():
        shown = clean_name(path, 300)
        return [f"{shown} was not there and was made: TensorBoard shows nothing until a run writes."], path
    return [], path


def choose_url(port: int) -> str:
    """Returns the address under which a browser reaches a port of 127.0.0.1 on this machine.

    It is the first of these: ``TENSORBOARD_PROXY_URL`` (TensorBoard's own variable, with %PORT% in it), as set in a
    hosted container; the path through jupyter-server-proxy, if that is installed and this kernel's server is known
    (the server then asks for its token); the port itself, which only a browser on this machine reaches, or one that has
    a tunnel to it.
    """
    template = os.environ.get("TENSORBOARD_PROXY_URL")
    if not template and importlib.util.find_spec("jupyter_server_proxy"):
        base = os.environ.get("JUPYTERHUB_SERVICE_PREFIX") or _find_base_url()
        template = f"{base.rstrip('/')}/proxy/%PORT%/" if base else None
    return (template or "http://127.0.0.1:%PORT%/").replace("%PORT%", str(port))


def _find_base_url() -> str | None:
    """Returns the path under which this kernel's Jupyter server answers, such as "/"."""
    from jupyter_server.serverapp import list_running_servers

    parent = os.environ.get("JPY_PARENT_PID")
    return next((server["base_url"] for server in list_running_servers() if str(server["pid"]) == parent), None)


def _read_line(process: subprocess.Popen, seconds: float) -> bytes:
    """Returns the first line that a process prints; b"" if it ends or takes too long."""
    end, text, pipe = time.monotonic() + seconds, b"", process.stdout.fileno()
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(0, end - time.monotonic()))
        piece = os.read(pipe, 4096) if ready else b""
        if not piece:
            return b""
        text += piece
    return text


def _read_end(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - NOTE_BYTES))
        return file.read(NOTE_BYTES).decode(errors="replace")
