"""The program that the preflight runs on every node: it answers each JSON line on its stdin with one on its stdout.

The launcher sends it (:mod:`nodelaunch.transfer`), since nothing of ours may be installed on the node yet: it and what
it imports use the standard library alone, and run on Python 3.9. When a question fails, the answer contains the error.
The program ends when its stdin does, or after 30 s.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import socket
import sys
import threading
import time
from pathlib import Path

from nodelaunch.node import facts
from nodelaunch.node.facts import collect
from nodelaunch.node.processes import find_jobs, find_owner, stop_job
from nodelaunch.node.report import MARK

LIFETIME = 30.0
# Below the ports that Linux gives to outgoing connections, and above those of services and of Slurm's jobs
# (backends/slurm.py).
FREE_PORTS = (30000, 32767)


def examine(request):
    """Finds out all that needs no other node, and begins to listen for the others; see :func:`collect`."""
    tasks = {
        "system": facts.find_system,
        "versions": facts.find_versions,
        "interfaces": facts.find_interfaces,
        "gpus": facts.find_gpus,
        "gpu_users": facts.find_gpu_users,
    }
    for name, find in {"disk": facts.find_disk, "jobs": find_jobs, "ports": listen}.items():
        tasks[name] = functools.partial(find, request)
    tasks["data"] = lambda: facts.find_data(Path(request["data"]).expanduser())
    return {"time": time.time(), **collect(tasks, request["seconds"])}


def listen(request):
    """Listens on a random port (``any``); node 0 also finds out if the rendezvous could listen on its own.

    It reports ``chosen``, the rendezvous' port, and ``busy``, why it cannot be listened on, or None.
    """
    found = {"any": open_listener(request["address"], 0, request["token"])}
    if request["port"] is not None:
        found["chosen"] = request["port"] or find_free_port()
        found["busy"] = find_trouble(found["chosen"])
    return found


def find_free_port():
    """A port that nobody holds, and that the system does not give to outgoing connections."""
    tries = [random.randint(*FREE_PORTS) for _ in range(100)]
    return next((port for port in tries if find_trouble(port) is None), tries[0])


def find_trouble(port):
    """The reason why a port cannot be listened on at all addresses, as torch's rendezvous does; None if it can."""
    try:  # with SO_REUSEADDR, as torch does: closing connections of the last job do not hold it
        socket.create_server(("", port)).close()
    except OSError as error:
        return dict(find_owner(port) if error.errno == errno.EADDRINUSE else {}, error=os.strerror(error.errno))
    return None


def open_listener(address, port, token):
    """Listens at an address, "" for all, and answers each connection with the token; returns the port."""
    listener = socket.create_server((address, port), backlog=64)
    threading.Thread(target=serve, args=(listener, token.encode()), daemon=True).start()
    return listener.getsockname()[1]


def serve(listener, token):
    """Answers one connection after the other, until the program ends."""
    while True:
        try:
            client, _ = listener.accept()
            with client:
                client.settimeout(0.5)
                client.sendall(token)
                client.recv(1)  # the client closes first, so that no closing connection holds the port here
        except OSError:
            time.sleep(0.01)


def connect(request):
    """Tries to reach other nodes: {"reached": {key: outcome}}."""
    tasks = {key: functools.partial(reach, *target, request["seconds"]) for key, target in request["targets"].items()}
    return {"reached": collect(tasks, request["seconds"] + 0.3)}


def reach(address, port, token, seconds):
    """Connects and reads the token: "ok", "refused", "dropped", "stranger", or the system's words."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as client:
            try:
                return "ok" if client.recv(256) == token.encode() else "stranger"
            except OSError:
                return "stranger"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        silent = error.errno in (None, errno.ETIMEDOUT)
        return "dropped" if silent else os.strerror(error.errno)


ANSWERS = {"examine": examine, "connect": connect, "jobs": find_jobs, "stop_job": stop_job}


def main():
    """Answers until stdin ends, or the time is over."""
    alarm = threading.Timer(LIFETIME, os._exit, (3,))
    alarm.daemon = True
    alarm.start()
    for line in sys.stdin:
        request = json.loads(line)
        answer = collect({"it": functools.partial(ANSWERS[request["do"]], request)}, LIFETIME)["it"]
        # The mark tells an answer from what a login script prints.
        sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
        sys.stdout.flush()
    os._exit(0)  # without waiting for threads that still hang, for a driver or a disk


if __name__ == "__main__":
    main()
