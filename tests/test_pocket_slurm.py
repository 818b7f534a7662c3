"""The pocket Slurm: started and ended more than once, repaired, also as an ordinary user, and clearly refused."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.drawn import assert_explains

from course import pocket_slurm
from course.pocket_slurm import INSTALL, NODES, PARTITIONS, ROLES, Cluster, PocketSlurm
from lab_common import LabError

# A job on both nodes that gives way to urgent ones.
SPOT = "#!/bin/bash\n#SBATCH --partition=spot --nodes=2 --open-mode=append --output={output}\n{body}\n"


@pytest.fixture
def short():
    """A folder with a short path, as sockets need it, and without a Slurm in it after the test."""
    with tempfile.TemporaryDirectory(prefix="lab-slurm-") as folder:
        yield Path(folder)
        PocketSlurm(Path(folder, "s")).down()


@pytest.fixture
def own(short, request, monkeypatch):
    """A cluster of the test's own that does not run yet."""
    request.getfixturevalue("slurm")  # skips the test where there can be none
    monkeypatch.delenv("SLURM_CONF")
    return PocketSlurm(short / "s", follow=True)


def run_cli(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "course.pocket_slurm", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(Path(pocket_slurm.__file__).parents[1])} | env,
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )


def find_pid(cluster, role):
    return next(pid for pid, name in cluster.find_processes().items() if name == role)


def assert_nothing_left(cluster, *more):
    assert cluster.find_processes() == {} and not cluster.folder.exists()
    named = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(cluster.folder).encode() in read(path)]
    assert named == []


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_what_is_not_installed_is_named_with_the_one_command(monkeypatch, tmp_path):
    monkeypatch.setattr(pocket_slurm, "PATH", str(tmp_path))
    with pytest.raises(LabError) as caught:
        PocketSlurm(tmp_path / "s").up()
    assert_explains(caught.value, "munge, slurmctld, slurmd, slurm-client", "munge and Slurm")
    (tmp_path / "apt-get").write_text("#!/bin/sh\n")
    (tmp_path / "apt-get").chmod(0o755)
    (tmp_path / "sbatch").symlink_to("apt-get")
    with pytest.raises(LabError) as caught:
        PocketSlurm(tmp_path / "s").up()
    assert caught.value.fix == INSTALL and "slurm-client" not in caught.value.cause
    assert not (tmp_path / "s").exists()


def test_a_system_without_slurm_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "darwin")
    said = []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pocket_slurm.find(tmp_path, say=said.append) is None
    assert "recorded on Linux" in said[0]


@pytest.mark.parametrize(
    "kind", ["open to others", "other files", "another's slurm.conf", "a link", "a file", "long", "quoted"]
)
def test_a_folder_that_is_not_its_own_is_refused_and_untouched(kind, short, monkeypatch):
    monkeypatch.setattr(pocket_slurm, "find_missing_packages", list)
    folder = short / "s"
    folder.mkdir(mode=0o755 if kind == "open to others" else 0o700)
    (folder / "mine.txt").touch()
    if kind == "another's slurm.conf":
        (folder / "slurm.conf").write_text("StateSaveLocation=/var/spool\n")
    if kind in ("a link", "a file"):
        folder.rename(short / "real")
        folder.symlink_to(short / "real") if kind == "a link" else folder.write_text("")
    folder = {"long": short / ("x" * 90), "quoted": short / "a b"}.get(kind, folder)
    for action in ("up", "down"):
        if kind in ("long", "quoted") and action == "down":
            continue  # there is nothing
        with pytest.raises(LabError) as caught:
            getattr(PocketSlurm(folder), action)()
        assert caught.value.fix and caught.value.where == str(folder)
    assert kind in ("a file", "long", "quoted") or (folder / "mine.txt").exists()
    shutil.rmtree(short / "s") if kind not in ("a link", "a file") else (short / "s").unlink()


def test_a_notebook_without_slurm_hears_what_to_do(monkeypatch, short):
    monkeypatch.setenv("PATH", str(short))
    monkeypatch.setattr(pocket_slurm, "PATH", str(short))
    said = []
    assert pocket_slurm.find(short / "s", say=said.append) is None
    assert INSTALL in said[0] and "make slurm" in said[0]
    pocket_slurm.wait(None, "7")  # at once


def test_a_folder_without_a_cluster_has_nothing_to_end(short):
    assert PocketSlurm(short / "s").down() == (False, [])
    done = run_cli("down", "--folder", short / "s")
    assert (done.returncode, done.stdout) == (0, "No Slurm of two nodes ran.\n")
    done = run_cli("status", "--folder", short / "s")
    assert done.returncode == 1 and "make slurm" in done.stdout


def test_a_notebook_uses_what_answers_and_else_the_pocket_one(slurm, short, monkeypatch):
    said = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # as in a job of that Slurm
    cluster = pocket_slurm.find(short / "s", say=said.append)
    assert {one for one in os.environ if one.startswith("SLURM_")} == {"SLURM_CONF"}
    assert cluster == Cluster(cluster.version, NODES, PARTITIONS) and cluster.pocket
    assert said == [f"Slurm {cluster.version}, 2 nodes on one machine: c1, c2; partitions lab, spot, urgent"]
    assert pocket_slurm.find(short / "s", needs=["lab", "gpu"], say=said.append) is None
    assert "has no partition gpu" in said[-1]
    monkeypatch.delenv("SLURM_CONF")
    assert pocket_slurm.find(short / "s", say=said.append) is None and "make slurm" in said[-1]
    assert pocket_slurm.find(slurm.folder, say=said.append) == cluster
    assert os.environ["SLURM_CONF"] == str(slurm.conf)
    job = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 1").strip()
    with pytest.raises(LabError) as caught:
        pocket_slurm.wait(cluster, job, seconds=0.1)
    assert_explains(caught.value, job, f"scancel {job}")
    pocket_slurm.wait(cluster, job, seconds=20)
    slurm.wait_empty()


def test_the_command_line_starts_it_once_mends_it_and_ends_it(own, monkeypatch):
    try:
        with ThreadPoolExecutor() as pool:  # the second waits, and finds that all is done
            both = [*pool.map(lambda _: run_cli("up", "--folder", own.folder), range(2))]
        first, second = sorted(both, key=lambda one: "ran already" in one.stdout)
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        assert "nodes runs:" in first.stdout and "ran already" in second.stdout
        assert f"export SLURM_CONF={own.conf}" in first.stdout and "down --folder" in first.stdout
        before = own.find_processes()
        assert set(before.values()) >= {*ROLES}
        assert own.up() == [] and own.find_processes() == before
        assert own.folder.stat().st_mode & 0o777 == 0o700
        job = own.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 300").strip()
        os.kill(find_pid(own, "c2"), signal.SIGKILL)
        broken = run_cli("status", "--folder", own.folder)
        assert broken.returncode == 1 and "c2         does not run" in broken.stdout
        assert "runs again (c2 had ended)" in run_cli("up", "--folder", own.folder).stdout
        whole = run_cli("status", "--folder", own.folder)
        assert whole.returncode == 0 and "jobs       1" in whole.stdout and own.list_jobs() == [job]
    finally:
        last = run_cli("down", "--folder", own.folder)
    assert last.stdout == "The Slurm of two nodes has ended, with all its jobs.\n"
    assert_nothing_left(own)
    assert run_cli("down", "--folder", own.folder).stdout == "No Slurm of two nodes ran.\n"


@pytest.mark.parametrize("lost", [["slurmctld"], ["munged", "c1"], [*ROLES], "folder"], ids=str)
def test_what_a_broken_cluster_left_is_ended_too(own, short, lost):
    own.up()
    (short / "job").write_text(SPOT.format(output="/dev/null", body="trap '' TERM\nsleep 300"))
    own.run("sbatch", str(short / "job"))
    assert pocket_slurm._wait(lambda: "R" in own.run("squeue", "-h", "-o", "%t"), 10)
    job = own.run("squeue", "-h", "-o", "%i").strip()
    assert pocket_slurm._wait(lambda: find_job(own, job), 10)
    if lost == "folder":
        shutil.rmtree(own.folder)
    for role in [] if lost == "folder" else lost:
        os.kill(find_pid(own, role), signal.SIGKILL)
    assert own.down()[0]
    assert_nothing_left(own)
    assert find_job(own, job) == []


def find_job(cluster, job):
    """The processes of a job, by what they inherited."""
    wanted = {f"SLURM_CONF={cluster.conf}".encode(), f"SLURM_JOB_ID={job}".encode()}
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if wanted <= {*read(path).split(b"\0")}]


def test_what_a_switched_off_machine_left_is_of_no_hindrance(own):
    own.up()
    own.run("sbatch", "--output=/dev/null", "--begin=now+600", "--wrap=true")
    for pid in own.find_processes():
        with contextlib.suppress(ProcessLookupError):  # a daemon's helper ends with it
            os.kill(pid, signal.SIGKILL)
    assert pocket_slurm._wait(lambda: not own.find_processes(), 10) and own.conf.exists()
    assert own.up() == [*ROLES] and own.list_jobs() == []
    own.down()
    assert_nothing_left(own)


def test_a_daemon_that_does_not_start_is_explained_and_leaves_nothing_running(own, monkeypatch):
    monkeypatch.setattr(pocket_slurm, "CONFIG", pocket_slurm.CONFIG + "NoSuchKey=1\n")
    with pytest.raises(LabError) as caught:
        own.up()
    assert "did not start" in caught.value.what and "slurm" in caught.value.cause
    assert own.find_processes() == {}


@pytest.mark.parametrize(
    ("name", "address", "words", "places"),
    [
        ("lab-pc", "127.0.0.1", "on this machine only", ["127.0.0.1"]),
        ("lab-pc", "127.0.1.1", "at all addresses of this machine, to who has its key", ["0.0.0.0"]),
        ("lab-pc", "10.78.9.1", "at 10.78.9.1, to who has its key", ["10.78.9.1"]),
        ("lab-pc", "203.0.113.9", "at all addresses of this machine, to who has its key", ["0.0.0.0"]),
        ("unknown", "127.0.1.1", "at all addresses of this machine, to who has its key", ["0.0.0.0"]),
    ],
    ids=["loopback", "Debian", "container", "another machine's", "no address"],
)
def test_it_works_wherever_the_machine_s_own_name_leads(own, tmp_path, name, address, words, places):
    """As on Debian, and as in a container."""
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{address} lab-pc\n")
    command = f"{sys.executable} -m course.pocket_slurm"
    lines = f"""set -e
        hostname {name}; mount --bind {tmp_path}/hosts /etc/hosts
        ip link add lab0 type veth peer name lab1; ip address add 10.78.9.1/24 dev lab0
        for one in lo lab0 lab1; do ip link set $one up; done
        {command} up --folder {own.folder}
        SLURM_CONF={own.conf} srun --nodes=2 hostname
        ss -Htln | awk '{{print $4}}' | cut -d: -f1 | sort -u
        {command} down --folder {own.folder}"""
    done = subprocess.run(
        ["unshare", "--uts", "--mount", "--net", "bash", "-c", lines],
        env=os.environ | {"PYTHONPATH": str(Path(pocket_slurm.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"It listens {words}, and" in done.stdout
    assert done.stdout.splitlines()[-4:-1] == [name, name, *places]


def test_an_ordinary_user_has_one_of_their_own(own, short):
    """nobody has neither rights of root nor a home; a container's user is no better off."""
    (short / "home").mkdir()
    for folder in (short, short / "home"):
        shutil.chown(folder, "nobody", "nogroup")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom course.pocket_slurm import PocketSlurm, find\n"
        "slurm = PocketSlurm(Path(sys.argv[2], 's'))\n"
        "try:\n    slurm.up()\n"
        "    print(slurm.run('srun', '--nodes=2', 'id', '-un').split(), find(slurm.folder, say=len))\n"
        "finally:\n    print(slurm.down())\n"
    )
    root = str(Path(pocket_slurm.__file__).parents[1])
    drop = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    done = subprocess.run(
        [*drop, sys.executable, "-c", script, root, str(short)],
        env={"PATH": os.environ["PATH"], "HOME": str(short / "home")},
        cwd=short,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "Permission denied" in done.stderr and "course" in done.stderr:
        pytest.skip("the checkout lies where no other user may read")
    assert "['nobody', 'nobody'] Slurm" in done.stdout and "(True, [])" in done.stdout, done.stderr
    assert_nothing_left(own)


def test_a_job_in_spot_hears_a_signal_makes_room_and_starts_again(slurm, tmp_path):
    output = tmp_path / "spot.out"
    body = (
        "trap 'echo heard; scontrol requeue $SLURM_JOB_ID; sleep 60' USR1\n"
        'echo run ${SLURM_RESTART_COUNT:-0}\n[ -n "$SLURM_RESTART_COUNT" ] || { sleep 60 & wait; }'
    )
    (tmp_path / "spot").write_text(SPOT.format(output=output, body=body))
    spot = slurm.run("sbatch", "--parsable", "--signal=B:USR1@60", str(tmp_path / "spot")).strip()
    assert pocket_slurm._wait(lambda: output.exists() and "run 0" in output.read_text(), 20)
    slurm.run("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true")  # it waits for its turn
    facts = slurm.run("scontrol", "show", "job", spot)
    assert "Restarts=1" in facts and output.read_text().startswith("run 0\nheard\n")
    assert pocket_slurm._wait(lambda: "run 1" in output.read_text(), 30), "after the credential's ten seconds"
    slurm.wait_empty()
