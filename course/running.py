"""``python -m course.running PORT`` checks that a port is free for JupyterLab, or prints the URL of a Jupyter on it."""

from __future__ import annotations

import os
import re
import socket
import sys

from lab_common.commandline import find_user, run_command


def find_url(port: int) -> str:
    """Returns the URL, with its token, of this user's Jupyter server on a port of this computer; "" if none is."""
    from jupyter_server.serverapp import list_running_servers  # takes seconds, which a free port does not need

    for server in list_running_servers():
        if server.get("port") == port and server.get("token"):
            return f"{server['url']}?token={server['token']}"  # which leads on to its first page
    return ""


def main() -> int:
    """Returns 0 if the port is free."""
    wanted = sys.argv[1] if len(sys.argv) == 2 else ""
    if not re.fullmatch("[0-9]{1,5}", wanted) or not 1 <= int(wanted) <= 65535:
        print(f"LAB_PORT has to be a number from 1 to 65535, and is {wanted[:60]!a}. Such as: make lab LAB_PORT=8899")
        return 1
    port = int(wanted)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            url = find_url(port)
        else:
            return 0
    if url:
        print(f"JupyterLab is running already on port {port}. To start another: make lab LAB_PORT=8899")
        print(f"Open the one that runs:\n\n    {url}")
        if len(reached := os.environ.get("SSH_CONNECTION", "").split()) > 2:
            print("\nOver SSH, run this on your own computer first, and leave it open:")
            print(f"    ssh -N -L {port}:127.0.0.1:{port} {find_user()}@{reached[2]}")
    else:
        print(f"Port {port} is in use, or not yours to use. Choose another: make lab LAB_PORT=8899")
    return 1


if __name__ == "__main__":
    sys.exit(run_command(main))
