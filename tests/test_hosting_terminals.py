"""A terminal in a team's JupyterLab finds the programs of the notebooks: python and torchrun of the labs."""

import os
import subprocess
import sys
from pathlib import Path

from jupyter_server.serverapp import ServerApp
from jupyter_server_terminals.app import TerminalsExtensionApp
from traitlets.config import Config


def read_config(root, monkeypatch):
    """The settings of the image's configuration behind a hub, where it needs no token."""
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "a")
    monkeypatch.setenv("LAB_RUNS", "runs")
    config, path = Config(), root / "hosting" / "image" / "jupyter_server_config.py"
    exec(compile(path.read_text(), path, "exec"), {"get_config": lambda: config})
    return config


def test_a_terminal_has_the_labs_programs_though_the_server_has_no_terminal(root, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    server = ServerApp(config=read_config(root, monkeypatch))
    server.web_app = type("App", (), {"settings": {}})()
    terminals = TerminalsExtensionApp(parent=server)
    terminals.serverapp = server
    terminals.initialize_settings()
    command = terminals.terminal_manager.shell_command
    asked = subprocess.run([*command, "-c", "command -v python torchrun"], capture_output=True, text=True, timeout=300)
    assert asked.stdout.split() == [str(folder / "python"), str(folder / "torchrun")]
    assert "-l" not in command and "--login" not in command
