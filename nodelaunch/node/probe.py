"""The program that the preflight runs on every node: it answers each JSON line on its stdin with one on its stdout.

The launcher sends it (:mod:`nodelaunch.program`), since nothing of ours may be installed on the node yet: it and what
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

from nodelaunch.node.facts import collect, find_facts, read
from nodelaunch.node.processes import find_jobs, find_owner, stop_job

MARK = "\x1e"  # before each answer, to tell it from what a login script prints
LIFETIME = 30.0
# Below the ports that Linux gives to outgoing connections, and above those of services and of Slurm's jobs (sbatch.py).
FREE_PORTS = (30000, 32767)
CLAIMS = []  # of this probe, until it ends


def listen(request):
    """Listens at each of the node's addresses: on a random port, and on node 0 also on that of the rendezvous.

    Returns:
        ``any`` and ``port``: per address, the port at which a listener answers with the token. On node 0 also
        ``chosen``, the rendezvous' port, and ``busy``, its owner.
    """
    found = {"any": {}, "port": {}}
    for address in request["addresses"]:
        found["any"][address] = open_listener(address, 0, request["token"])
    if request.get("port") is not None:
        found["chosen"] = request["port"] or find_free_port()
        found["busy"] = find_trouble(found["chosen"])
        for address in [] if found["busy"] else request["addresses"]:
            found["port"][address] = open_listener(address, found["chosen"], request["token"])
    return found


def find_free_port():
    """A port that nobody holds or claims, and that the system does not give to outgoing connections."""
    low = int((read("/proc/sys/net/ipv4/ip_local_port_range").split() or [FREE_PORTS[1] + 1])[0])
    last = min(FREE_PORTS[1], low - 1)
    # The same number to choose from if this Linux gives lower ones.
    first = max(1025, last - (FREE_PORTS[1] - FREE_PORTS[0]))
    tries = [random.randint(min(first, last), last) for _ in range(100)]
    claimed = []
    for port in tries:
        if find_trouble(port) is not None:
            continue
        # Two names, so that a launcher can claim its own before its probe ends and gives up the other.
        asked = claim(port, "preflight")
        job = asked and claim(port, "job")
        if job:
            job.close()
            CLAIMS.append(asked)
            return port
        if asked:
            asked.close()
        claimed.append(port)
    return [*claimed, *tries][0]


def claim(port, part):
    """Claims a port at which nothing listens yet: of several jobs that start at once on a machine, each needs its own.

    The claim is a name in Linux's abstract namespace of sockets (unix(7)), of which each network namespace has one, as
    with ports. It ends when the socket is closed, at the latest with the process. Other systems have no such names.

    Returns:
        The socket; None if another process claims the port.
    """
    holder = socket.socket(socket.AF_UNIX)
    if sys.platform.startswith("linux"):
        try:
            holder.bind(f"\0nodelaunch-{part}-{port}")
        except OSError:
            holder.close()
            return None
    return holder


def find_trouble(port):
    """The reason why a port cannot be listened on at all addresses, as torch's rendezvous does; None if it can."""
    with socket.socket() as trial:
        # As torch does: closing connections of the last job do not hold it.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
            trial.listen(1)
        except OSError as error:
            return dict(find_owner(port) if error.errno == errno.EADDRINUSE else {}, error=os.strerror(error.errno))
    return None


def open_listener(address, port, token):
    """Listens, and answers each connection with the token; returns the port, or None if that was not possible."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind((address, port))
        except OSError:
            listener.bind(("", port))  # the address of a router in front of this node
        listener.listen(64)
    except OSError:
        listener.close()
        return None
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


def tell_time(request):
    """The node's clock, in seconds since 1970."""
    return {"time": time.time()}


ANSWERS = {"facts": find_facts, "clock": tell_time, "listen": listen, "connect": connect}
ANSWERS.update({"jobs": find_jobs, "stop_job": stop_job})


def main():
    """Answers until stdin ends, or the time is over."""
    alarm = threading.Timer(LIFETIME, os._exit, (3,))
    alarm.daemon = True
    alarm.start()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = ANSWERS[request["do"]](request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
        sys.stdout.flush()
    os._exit(0)  # without waiting for threads that still hang for a silent name server


if __name__ == "__main__":
    main()
