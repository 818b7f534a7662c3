"""Two teams in real containers: neither can take more than its share from the machine or from the other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.containers import PROJECT, Hosted, bring_up, run
from harness.jobs import wait_for

pytestmark = [pytest.mark.hosting, pytest.mark.drill]
RED = "labtest-red-node0"
META, HOST_END, META_END = "labmeta", "labmeta0", "labmeta1"
ADDRESS = "169.254.169.254"
# A server as clouds have one, at the two ports that matter: names, and credentials.
SERVER = f"""
import socket, threading
def serve(port):
    with socket.create_server(("{ADDRESS}", port)) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"credentials")
for port in (53, 80):
    threading.Thread(target=serve, args=(port,)).start()
"""
ASK = f"""
import socket, sys
try:
    with socket.create_connection(("{ADDRESS}", int(sys.argv[1])), 5) as link:
        print(link.recv(100).decode())
except OSError as error:
    print(type(error).__name__)
"""
THREADS = """
import threading, time
threading.stack_size(65536)
count = 0
try:
    while count < 20000:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
print(count, flush=True)
import os; os._exit(0)
"""


@pytest.fixture(scope="module")
def hosted(podman, tmp_path_factory) -> Iterator[Hosted]:
    """A class of two teams with a node each, little memory, and as many CPUs for each as the machine has."""
    options = ("--nodes", 1, "--memory", "1gb", "--shm", "256m", "--cpus", "auto")
    with bring_up(podman, tmp_path_factory.mktemp("class"), *options) as found:
        yield found


@pytest.fixture
def metadata() -> Iterator[None]:
    """A machine beside this one that answers at the address of the clouds' metadata service."""
    remove_metadata()
    inside = ["ip", "netns", "exec", META]
    server = None
    try:
        for command in (
            f"ip netns add {META}",
            f"ip link add {HOST_END} type veth peer name {META_END} netns {META}",
            f"ip addr add 192.0.2.1/30 dev {HOST_END}",
            f"ip link set {HOST_END} up",
            f"ip netns exec {META} ip addr add 192.0.2.2/30 dev {META_END}",
            f"ip netns exec {META} ip addr add {ADDRESS}/32 dev {META_END}",
            f"ip netns exec {META} ip link set {META_END} up",
            f"ip netns exec {META} ip route add default via 192.0.2.1",
            f"ip route add {ADDRESS}/32 via 192.0.2.2 dev {HOST_END}",
        ):
            run(*command.split())
        server = subprocess.Popen([*inside, "python3", "-c", SERVER])
        wait_for(lambda: run("python3", "-c", ASK, 80).stdout.strip() == "credentials", 20.0)
        yield
    finally:
        if server:
            server.kill()
            server.wait()
        remove_metadata()


def remove_metadata() -> None:
    run("ip", "link", "del", HOST_END, check=False)
    run("ip", "netns", "del", META, check=False)


def ask(hosted: Hosted, port: int, *, container: str = RED) -> str:
    """Returns the metadata service's answer to a team's container."""
    return hosted.podman.ask(container, "python", "-I", "-c", ASK, port)


def test_the_metadata_of_the_cloud_cannot_be_reached_before_a_team_could_run_anything(hosted, metadata):
    blue = RED.replace("red", "blue")
    for container in (RED, blue):
        assert ask(hosted, 80, container=container) != "credentials"
        assert ask(hosted, 53, container=container) == "credentials", "names are asked for there on some clouds"
    assert run("python3", "-c", ASK, 80).stdout.strip() == "credentials", "the machine itself needs it"
    assert "metadata service: kept from the teams" in hosted.host("status").stdout
    # Somebody flushes the rules: they come back.
    run("ip", "rule", "flush", "pref", "5102", check=False)
    wait_for(lambda: ask(hosted, 80) != "credentials", 20.0)
    hosted.podman.call("stop", "-t", "5", f"{PROJECT}-guard")
    assert ask(hosted, 80) == "credentials", "the guard it was that kept them apart"
    assert "The guard does NOT run" in hosted.host("status").stdout
    # As after a start of the machine, when the team's container comes first: it waits.
    hosted.podman.call("restart", "-t", "2", RED)
    wait_for(lambda: "waiting for the guard" in hosted.podman.call("logs", "--tail", "5", RED).stderr, 30.0)
    assert "jupyter" not in hosted.podman.ask(RED, "sh", "-c", "cat /proc/*/cmdline | tr '\\0' ' '")
    hosted.host("up")
    assert ask(hosted, 80) != "credentials"
    assert hosted.ask("/red/api/contents", token=hosted.token("red"))[0] == 200
    guard = hosted.podman.inspect(f"{PROJECT}-guard")
    assert guard["HostConfig"]["RestartPolicy"]["Name"] == "always" and not guard["HostConfig"]["Privileged"]
    assert guard["EffectiveCaps"] == ["CAP_NET_ADMIN"] and guard["Mounts"] == []


def test_no_token_stands_on_a_command_line_while_a_class_is_started(hosted):
    """Every user of the machine can read all command lines, podman-compose's and podman's, too."""
    seen, ended = set(), threading.Event()

    def look():
        while not ended.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(path.read_bytes())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        hosted.host("rotate", "red")
        hosted.host("down")
        hosted.host("up")
    finally:
        ended.set()
        watcher.join()
    lines = b"\n".join(seen).replace(b"\0", b" ")
    assert re.search(rb"podman .*(run|create) .*labtest-red-node0", lines), "it was seen how podman is called"
    for team in ("red", "blue"):
        assert hosted.token(team).encode() not in lines
        assert hosted.ask(f"/{team}/api/contents", token=hosted.token(team))[0] == 200
    assert hosted.token("blue") not in json.dumps(hosted.podman.inspect(RED))


def test_a_team_that_takes_memory_without_end_ends_its_own_program(hosted):
    eat = "import ctypes; ctypes.memset(ctypes.create_string_buffer(3 << 30), 1, 3 << 30)"
    ended = hosted.podman.call("exec", RED, "python", "-c", eat, check=False)
    assert ended.returncode not in (0, 1), "it was killed"
    fill = "head -c 3000000000 /dev/zero > /dev/shm/full; stat -c %s /dev/shm/full; rm /dev/shm/full"
    assert int(hosted.podman.ask(RED, "sh", "-c", fill)) == 256 << 20
    found = hosted.podman.inspect(RED)["HostConfig"]
    assert found["Memory"] == 1 << 30 and found["ShmSize"] == 256 << 20
    assert hosted.ask("/blue/api/contents", token=hosted.token("blue"))[0] == 200


def test_a_team_that_starts_processes_without_end_stops_at_its_limit(hosted):
    most = hosted.podman.inspect(RED)["HostConfig"]["PidsLimit"]
    count = int(hosted.podman.ask(RED, "python", "-c", THREADS))
    assert 0 < count < most <= 4096
    assert hosted.ask("/blue/api/contents", token=hosted.token("blue"))[0] == 200


def test_each_team_has_its_own_cpus(hosted):
    if (os.cpu_count() or 1) < 2:
        pytest.skip("NOT TESTED HERE: one CPU cannot be divided")
    see = "import os, sys; print(*sorted(os.sched_getaffinity(0)))"
    seen = [set(hosted.podman.ask(RED.replace("red", team), "python", "-c", see).split()) for team in ("red", "blue")]
    assert seen[0] and seen[1] and not seen[0] & seen[1]


def test_status_says_what_the_teams_are_held_to(hosted):
    said = hosted.host("status").stdout
    assert "limits of red, blue: memory node0 1.0 GB and /dev/shm 256 MB" in said, said
    assert "disk: NOT limited by the engine" in said and "processes in a container" in said


def test_status_runs_no_program_that_a_team_puts_in_the_place_of_ours(hosted):
    """Neither in its home, nor where Python looks first."""
    program = "print('\\033]0;owned\\007\\033[2J')"
    home = "/home/learner"
    plant = [f"{home}/json.py", f"{home}/course/__init__.py", f"{home}/usercustomize.py"]
    site = "$(python -m site --user-site)"
    lines = [f"mkdir -p {home}/course {site}"]
    lines += [f'printf "%s\\n" "{program}; raise SystemExit" > {path}' for path in plant]
    lines += [f"cp {home}/usercustomize.py {site}/; echo 'import usercustomize' > {site}/own.pth"]
    try:
        hosted.podman.ask(RED, "sh", "-c", "\n".join(lines))
        said = hosted.host("status").stdout
        for team in ("red", "blue"):
            assert re.search(rf"^{team} +running +yes +\d+ MB", said, re.M), "ours are not theirs"
        assert "\33" not in said
    finally:
        hosted.podman.ask(RED, "sh", "-c", f"rm -rf {home}/course {home}/*.py {site}")
