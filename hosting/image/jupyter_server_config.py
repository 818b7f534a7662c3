"""JupyterLab of a team: behind the front, at the team's path, with the token in the file that the environment names."""

import os
from pathlib import Path

c = get_config()  # noqa: F821 - Jupyter puts it there

# Under JupyterHub the hub says where the server listens, and who may come in.
if "JUPYTERHUB_API_TOKEN" not in os.environ:
    # Without one the server would make a token that nobody knows, and print it.
    token = Path(os.environ.get("JUPYTER_TOKEN_FILE") or "no file")
    if not token.is_file() or not token.read_text().strip():
        raise SystemExit("JUPYTER_TOKEN_FILE names no token: this container starts with a token only.")
    c.ServerApp.ip = "0.0.0.0"
    c.ServerApp.port = 8888
    c.ServerApp.port_retries = 0
    c.ServerApp.base_url = os.environ.get("LAB_BASE_URL", "/")
    c.ServerApp.root_dir = str(Path.home() / "work")
    c.LabApp.default_url = "/lab/tree/labs"
    # The front passes the learners' own Host on; what is refused is decided by token and origin.
    c.ServerApp.allow_remote_access = True
    c.ServerApp.trust_xheaders = True
c.FileContentsManager.delete_to_trash = False
# Where the server has no terminal itself, it would start login shells, and Debian's /etc/profile takes the labs' Python
# (and torchrun) out of PATH.
c.ServerApp.terminado_settings = {"shell_command": ["/bin/bash"]}

# On demand at /tensorboard/, behind the server's own token; ends with the server.
c.ServerProxy.servers = {
    "tensorboard": {
        "command": ["tensorboard", "--logdir", os.environ["LAB_RUNS"], "--host", "127.0.0.1", "--port", "{port}"],
        "timeout": 60,
        "launcher_entry": {"title": "TensorBoard"},
    }
}
c.ResourceUseDisplay.track_cpu_percent = True
