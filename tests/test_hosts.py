"""The hosts that other tests stand on are what they claim to be."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.hosts import NODES, STATE, Hosts, _clear_leftovers
from harness.jobs import wait_for

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1).close()"


def reaches(hosts, source, target, port=22):
    return (
        subprocess.run(
            [*hosts._enter(source), sys.executable, "-IS", "-c", CONNECT, hosts.address(target), str(port)],
            capture_output=True,
        ).returncode
        == 0
    )


def ssh(hosts, node, command):
    argv = ["ssh", "-F", str(hosts.ssh_config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "--", node, command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)


def test_each_host_has_its_own_name_address_and_processes(hosts):
    for node in NODES:
        assert ssh(hosts, node, "hostname; echo ~").stdout == f"{node}\n/node/home\n"
        assert hosts.address(node) in hosts.run_on(node, ["ip", "-4", "-br", "addr", "show", "eth0"])
        processes = hosts.run_on(node, ["sh", "-c", "cat /proc/1/comm; ls -d /proc/[0-9]* | wc -l"]).split()
        assert processes[0] == "sshd"
        assert int(processes[1]) < 12
    assert hosts.run_on("n0", ["hostname"]) == "n0\n"
    assert subprocess.run(["hostname"], capture_output=True, text=True).stdout.strip() not in ("n0", *NODES)


def test_memory_and_disk_are_not_shared_but_tmp_is(hosts, tmp_path):
    for node in NODES:
        hosts.run_on(node, ["sh", "-c", f"echo {node} > /dev/shm/lab-own; echo {node} > /node/own"])
    for node in NODES:
        assert hosts.run_on(node, ["cat", "/dev/shm/lab-own", "/node/own"]) == f"{node}\n{node}\n"
        assert (hosts.disk(node) / "own").read_text() == f"{node}\n"
    assert not Path("/dev/shm/lab-own").exists()
    (tmp_path / "shared").write_text("all")
    assert hosts.run_on("n1", ["cat", str(tmp_path / "shared")]) == "all"


def test_they_reach_each_other_and_a_firewall_works_one_way_and_by_port(hosts):
    assert reaches(hosts, "n1", "n2")
    assert reaches(hosts, "n2", "n1")
    hosts.drop("n1", "n2", new=True)
    assert not reaches(hosts, "n1", "n2")
    assert reaches(hosts, "n2", "n1"), "answers pass"
    hosts.undrop("n1", "n2", new=True)
    hosts.drop("n1", "n2", 29500)
    assert reaches(hosts, "n1", "n2")
    hosts.drop("n1", "n2", 22)
    assert not reaches(hosts, "n1", "n2")
    assert reaches(hosts, "n0", "n2")
    hosts.mend()
    assert reaches(hosts, "n1", "n2")


def test_the_root_namespace_has_no_way_to_them(hosts):
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout
    addresses = subprocess.run(["ip", "-br", "addr"], capture_output=True, text=True).stdout
    assert "to-n1" not in links
    assert hosts.address("n0") not in addresses


def test_a_cable_can_be_pulled(hosts):
    hosts.link_down("n2")
    assert not reaches(hosts, "n1", "n2")
    hosts.link_up("n2")
    assert reaches(hosts, "n1", "n2")


def test_names_can_be_changed_under_a_running_host(hosts):
    look = "getent ahostsv4 n2 | head -n1"
    assert ssh(hosts, "n1", look).stdout.split()[0] == hosts.address("n2")
    hosts.set_hosts("n1", "127.0.0.1 localhost\n127.0.1.1 n2\n")
    assert ssh(hosts, "n1", look).stdout.split()[0] == "127.0.1.1"
    assert hosts.run_on("n0", ["sh", "-c", look]).split()[0] == hosts.address("n2")
    hosts.mend()
    assert ssh(hosts, "n1", look).stdout.split()[0] == hosts.address("n2")


def test_a_crash_takes_all_processes_and_a_boot_brings_the_disk_back(hosts, survivors):
    job = f"crash-{os.getpid()}"
    hosts.run_on("n2", ["sh", "-c", "echo kept > /node/file; echo lost > /dev/shm/lab-file"])
    # `exec` alone would let ssh wait for the program; its three streams are what ssh waits for.
    ssh(hosts, "n2", f"LAB_JOB_ID={job} setsid sleep 600 > /dev/null 2>&1 < /dev/null & sleep 0.3")
    assert len(survivors(job)) == 1
    hosts.crash("n2")
    wait_for(lambda: not survivors(job), 2)  # a process that was killed is not gone at once on a busy machine
    assert not reaches(hosts, "n1", "n2")
    hosts.boot("n2")
    assert ssh(hosts, "n2", "cat /node/file; ls /dev/shm").stdout == "kept\n"


def test_ssh_says_what_it_says_of_real_hosts(hosts):
    """The ssh of ``ssh_config`` and the one that runs wholly inside n0 word the same trouble in the same way."""
    hosts.drop("n0", "n2")
    for name, words in (("n9", "Could not resolve hostname n9"), ("n2", "timed out"), ("127.0.0.9", "refused")):
        inside = [hosts.tools / "ssh", "-F", hosts.inner_config, "-o", "BatchMode=yes", "-o", "ConnectTimeout=1"]
        real = subprocess.run([*inside, "--", name, "true"], capture_output=True, text=True).stderr.splitlines()[0]
        assert words in real
        assert ssh(hosts, name, "true").stderr.splitlines()[0] == real


@pytest.mark.drill
def test_a_killed_owner_leaves_hosts_that_the_next_one_removes(hosts):
    code = "import time\nfrom harness.hosts import Hosts\n"
    code += "with Hosts() as h: print(h.state, flush=True); time.sleep(600)"
    folder = Path(__file__).parent
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=folder)
    left = Path(child.stdout.readline().strip())
    assert left.parent == STATE
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert left.exists()
    assert left.name in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    begin = time.monotonic()
    with Hosts() as second:
        assert not left.exists()
        assert left.name not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert second.run_on("n1", ["hostname"]) == "n1\n"
        assert hosts.run_on("n1", ["hostname"]) == "n1\n", "the living instance was left alone"
    assert time.monotonic() - begin < 10
    assert not second.state.exists()


def test_an_owner_with_process_ids_of_its_own_is_left_alone_and_alive(hosts):
    """Each process of the tests has such; one's clean-up must not end another's hosts."""
    code = "from harness.hosts import Hosts\nwith Hosts() as h: print(h.state)"
    own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", code]
    done = subprocess.run(own, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=300)
    assert done.returncode == 0, done.stderr
    assert hosts.run_on("n1", ["hostname"]) == "n1\n"
    assert not Path(done.stdout.strip()).exists()


def read_ticks(stat):
    """How long a process has computed, in hundredths of seconds."""
    return int(stat.read_text().rsplit(")", 1)[1].split()[11])


def test_clearing_the_last_leftover_keeps_the_folder_for_who_clears(tmp_path, monkeypatch):
    """Else the first run after one that was killed would have nowhere to put its hosts."""
    (tmp_path / "none-0").mkdir()  # of no living process
    monkeypatch.setattr("harness.hosts.STATE", tmp_path)
    _clear_leftovers()
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())


def test_a_busy_machine_is_busy_only_inside(busy):
    with busy(2):
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        own = [Path(f"/proc/{pid}/stat") for pid in children]
        wait_for(lambda: sum(read_ticks(path) >= 5 for path in own) >= 2, 10)
    wait_for(lambda: sum(not path.exists() for path in own) >= 2, 2)
