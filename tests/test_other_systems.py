"""macOS and WSL, by a stand-in: what Linux alone has is absent, and each of its uses has a way without it."""

import contextlib
import errno
import fcntl
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil  # which looks at sys.platform when it is imported
import pytest
from harness.elsewhere import leave_linux
from packaging.markers import default_environment
from test_pins import read_lock

from course import environment
from course.check import NotYetError
from course.exercises import ranks
from lab_common import LabError, cores, files
from lab_utils import machine
from nodelaunch import local_nodes
from nodelaunch.node import facts, probe, processes, supervisor, watch
from scripts import loading

PACKAGES = ("lab_common", "lab_utils", "nodelaunch", "course")
CUDA_PARTS = ("nvidia-", "cuda-", "triton")
# A Mac with one of Apple's processors.
MAC = {"os_name": "posix", "sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"}
IMPORT_ALL = """
import importlib, pkgutil, sys
import pytest
from harness.elsewhere import leave_linux
def import_all():
    imported = set()
    for package in sys.argv[1:]:
        for one in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not one.name.endswith("__main__"):
                try:
                    importlib.import_module(one.name)
                    imported.add(one.name)
                except ModuleNotFoundError as error:  # it runs in another framework's environment
                    assert error.name in ("lightning", "ray", "jax", "sphinx", "tensorflow", "horovod"), error
    return imported
imported = import_all()  # and with them the packages of others, which may well look at sys.platform
for name in [name for name in sys.modules if name.partition(".")[0] in sys.argv[1:]]:
    del sys.modules[name]
leave_linux(pytest.MonkeyPatch())
assert import_all() == imported
print(len(imported))
"""
SUPERVISE = """
import sys
import pytest
from harness.elsewhere import leave_linux
leave_linux(pytest.MonkeyPatch())
from nodelaunch.node import supervisor
sys.exit(supervisor.main())
"""


@pytest.fixture
def elsewhere(monkeypatch):
    leave_linux(monkeypatch)


def start_python(program: str, root: Path, *arguments: str, **options) -> subprocess.Popen:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=environ, text=True, **options)


def test_every_module_can_be_imported(root):
    process = start_python(IMPORT_ALL, root, *PACKAGES, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-2000:]
    assert int(out) > 100


def test_cores_and_the_machine_are_described(elsewhere):
    assert cores.count_cores() == os.cpu_count()
    assert machine.describe().cores >= 1
    assert environment.check_shared_memory().ok
    assert math.isnan(loading.sum_pss(["self"]))


def test_a_node_s_facts_are_found(elsewhere, tmp_path):
    assert facts.find_system()["machine"] == socket.gethostname()
    found = facts.find_disk({"folder": str(tmp_path)})
    assert found["shm"] is None and found["free"] > 0
    assert {(node.address, node.interface) for node in local_nodes(2)} == {("127.0.0.1", "lo0")}


def test_ports_are_found_and_whose_they_are_stays_unknown(elsewhere):
    port = probe.find_free_port()
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        assert probe.find_trouble(port) == {"user": "", "error": os.strerror(errno.EADDRINUSE)}
    assert processes.find_jobs({}) == {"jobs": []}


def test_a_job_ends_with_all_its_processes(root, tmp_path):
    command = ["bash", "-c", "sleep 77 & sleep 77"]
    arguments = ["--job-folder", str(tmp_path), "--lease=6", "--grace=2", "--limit=60", "--", *command]
    process, family = start_python(SUPERVISE, root, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE), []
    try:
        assert '"started"' in process.stdout.readline()
        deadline = time.monotonic() + 30
        while len(family := psutil.Process(process.pid).children(recursive=True)) < 4:  # the guard is one of them
            assert time.monotonic() < deadline, family
            time.sleep(0.05)
        process.stdin.close()  # the launcher lets go
        assert process.wait(30) == supervisor.STOPPED_STATUS
        assert not psutil.wait_procs(family, timeout=10)[1]
    finally:
        for one in [*family, process]:
            with contextlib.suppress(psutil.Error):
                one.kill()


def test_a_rank_starts_and_is_watched(elsewhere):
    assert processes.set_process(processes.PR_SET_PDEATHSIG, 9) is None
    assert watch._count_bytes() == 0
    assert watch._read_clock(threading.get_ident()) == 0


def test_a_rank_that_macos_ends_is_not_the_answer_s_fault(elsewhere, monkeypatch):
    outcomes = [ranks.Outcome(number=6), ranks.Outcome(error=RuntimeError("Connection closed by peer"))]
    monkeypatch.delenv(ranks.FORK_SAFETY, raising=False)
    with pytest.raises(LabError, match="killed") as caught:
        ranks._raise_failure(outcomes, "two ranks")
    assert f"export {ranks.FORK_SAFETY}=YES" in caught.value.fix
    monkeypatch.setenv(ranks.FORK_SAFETY, "YES")
    with pytest.raises(NotYetError, match="did not end"):
        ranks._raise_failure(outcomes, "two ranks")


def test_threads_are_shared_where_there_is_no_nproc(tmp_path, monkeypatch):
    from test_launch_script import write_texts

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "getconf").symlink_to(shutil.which("getconf"))
    lines = write_texts()[0].splitlines()
    (line,) = [line for line in lines if line.startswith("export OMP_NUM_THREADS")]
    command = [shutil.which("bash"), "-c", f'{line}\necho "$OMP_NUM_THREADS"']
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{os.sysconf('SC_NPROCESSORS_ONLN')}\n", "")


def test_a_disk_without_locks_or_synchronised_folders_is_used(tmp_path, monkeypatch):
    def fail(number):
        def call(*arguments):
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(fcntl, "flock", fail(errno.ENOLCK))
    with files.hold_folder(tmp_path, "never"):
        pass
    monkeypatch.setattr(os, "fsync", fail(errno.EINVAL))
    files.sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        files.sync_folder(tmp_path)


@pytest.mark.parametrize("name", ["requirements", "engines/lightning", "engines/ray", "engines/jax"])
def test_a_mac_gets_no_package_that_only_linux_has(root, name):
    environ = default_environment() | MAC
    lock = [one for one, _ in read_lock((root / f"{name}.lock").read_text())]
    names = {one.name for one in lock if not one.marker or one.marker.evaluate(environ)}
    assert not [one for one in names if one.startswith(CUDA_PARTS)]
    assert name != "requirements" or {"torch", "torchvision", "appnope", "jupyterlab"} <= names
