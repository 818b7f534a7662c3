"""The pocket Slurm: started and ended more than once, repaired, also as an ordinary user, and clearly refused."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from harness.drawn import assert_explains
from harness.jobs import wait_for

from course import pocket_slurm
from course.pocket_slurm import INSTALL, NODES, PARTITIONS, ROLES, Cluster, PocketSlurm
from lab_common import LabError

# A job on both nodes that gives way to urgent ones.
SPOT = "#!/bin/bash\n#SBATCH --partition=spot --nodes=2 --open-mode=append --output={output}\n{body}\n"
COMMAND = (
    "import sys; from pathlib import Path; from course import pocket_slurm; pocket_slurm.FOLDER = Path(sys.argv[1])"
)


@pytest.fixture
def short(monkeypatch):
    """A folder with a short path, as sockets need it, and without a Slurm in it after the test."""
    with tempfile.TemporaryDirectory(prefix="lab-slurm-") as folder:
        monkeypatch.setattr(pocket_slurm, "FOLDER", Path(folder, "s"))
        yield Path(folder)
        PocketSlurm(Path(folder, "s")).down()


@pytest.fixture
def own(short, request, monkeypatch):
    """A cluster of the test's own that does not run yet."""
    request.getfixturevalue("slurm")  # skips the test where there can be none
    monkeypatch.delenv("SLURM_CONF")
    return PocketSlurm(follow=True)


def assert_nothing_left(cluster):
    assert cluster.find_processes() == {} and not cluster.folder.exists()
    named = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(cluster.folder).encode() in read(path)]
    assert named == []


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_what_is_not_installed_is_named_with_the_one_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pocket_slurm, "FOLDER", tmp_path / "s")
    monkeypatch.setattr(pocket_slurm, "PATH", str(tmp_path))
    with pytest.raises(LabError) as caught:
        PocketSlurm().up()
    assert_explains(caught.value, "munge, slurmctld, slurmd, slurm-client", "munge and Slurm")
    (tmp_path / "apt-get").write_text("#!/bin/sh\n")
    (tmp_path / "apt-get").chmod(0o755)
    (tmp_path / "sbatch").symlink_to("apt-get")
    with pytest.raises(LabError) as caught:
        PocketSlurm().up()
    assert caught.value.fix == INSTALL and "slurm-client" not in caught.value.cause
    assert not (tmp_path / "s").exists()
    assert pocket_slurm.find() is None
    said = capsys.readouterr().out
    assert INSTALL in said and "make slurm" in said
    pocket_slurm.wait(None, "7")  # at once
    monkeypatch.setattr(sys, "platform", "darwin")
    assert pocket_slurm.find() is None
    assert "recorded on Linux" in capsys.readouterr().out


def test_a_folder_that_is_not_its_own_is_refused_and_untouched(tmp_path, monkeypatch):
    monkeypatch.setattr(pocket_slurm, "find_missing_packages", list)
    (folder := tmp_path / "s").mkdir(mode=0o755)
    (folder / "mine.txt").touch()
    for action in ("up", "down"):
        with pytest.raises(LabError) as caught:
            getattr(PocketSlurm(folder), action)()
        assert_explains(caught.value, "private folder", str(folder))
    assert (folder / "mine.txt").exists()


def test_a_notebook_uses_what_answers_and_else_the_pocket_one(slurm, short, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # as in a job of that Slurm
    cluster = pocket_slurm.find()
    assert {one for one in os.environ if one.startswith("SLURM_")} == {"SLURM_CONF"}
    assert cluster == Cluster(cluster.version, NODES, PARTITIONS) and cluster.pocket
    said = capsys.readouterr().out
    assert said == f"Slurm {cluster.version}, 2 nodes on one machine: c1, c2; partitions lab, spot, urgent\n"
    assert pocket_slurm.find(needs=["lab", "gpu"]) is None
    assert "has no partition gpu" in capsys.readouterr().out
    monkeypatch.delenv("SLURM_CONF")
    assert pocket_slurm.find() is None and "make slurm" in capsys.readouterr().out
    monkeypatch.setattr(pocket_slurm, "FOLDER", slurm.folder)
    assert pocket_slurm.find() == cluster
    assert os.environ["SLURM_CONF"] == str(slurm.conf)
    job = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 1").strip()
    with pytest.raises(LabError) as caught:
        pocket_slurm.wait(cluster, job, seconds=0.1)
    assert_explains(caught.value, job, f"scancel {job}")
    pocket_slurm.wait(cluster, job, seconds=20)
    wait_for(lambda: not slurm.list_jobs(), 20)


def test_the_command_line_starts_it_once_mends_it_and_ends_it_with_its_jobs(own, tmp_path, capsys):
    assert own.down() is False
    pocket_slurm.main(["up"])
    said = capsys.readouterr().out
    assert "nodes runs:" in said and f"export SLURM_CONF={own.conf}" in said
    before = own.find_processes()
    assert {*before.values()} == {*ROLES} | {"step"} & {*before.values()}
    pocket_slurm.main(["up"])
    assert "ran already" in capsys.readouterr().out and own.find_processes() == before
    assert own.folder.stat().st_mode & 0o777 == 0o700
    for process, role in before.items():
        if role in ("c2", "slurmctld"):
            process.kill()
            process.wait(10)
    assert own.up() is True
    (tmp_path / "job").write_text(SPOT.format(output="/dev/null", body="trap '' TERM\nsleep 300"))
    job = own.run("sbatch", "--parsable", str(tmp_path / "job")).strip()
    wait_for(lambda: "R" in own.run("squeue", "-h", "-o", "%t") and find_job(own, job), 20)
    pocket_slurm.main(["down"])
    assert capsys.readouterr().out == "The Slurm of two nodes has ended, with all its jobs.\n"
    assert_nothing_left(own)
    assert find_job(own, job) == []
    pocket_slurm.main(["down"])
    assert capsys.readouterr().out == "No Slurm of two nodes ran.\n"


def find_job(cluster, job):
    """The processes of a job, by what they inherited."""
    wanted = {f"SLURM_CONF={cluster.conf}".encode(), f"SLURM_JOB_ID={job}".encode()}
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if wanted <= {*read(path).split(b"\0")}]


@pytest.mark.parametrize(
    ("address", "words", "places"),
    [
        ("127.0.0.1", "on this machine only", ["127.0.0.1"]),
        ("127.0.1.1", "at all addresses of this machine, to who has its key", ["0.0.0.0"]),
        ("10.78.9.1", "at 10.78.9.1, to who has its key", ["10.78.9.1"]),
    ],
    ids=["loopback", "Debian", "container"],
)
def test_it_works_wherever_the_machine_s_own_name_leads(own, tmp_path, address, words, places):
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{address} lab-pc\n")
    command = f"{sys.executable} -c '{COMMAND}; pocket_slurm.main(sys.argv[2:])' {own.folder}"
    lines = f"""set -e
        hostname lab-pc; mount --bind {tmp_path}/hosts /etc/hosts
        ip link add lab0 type veth peer name lab1; ip address add 10.78.9.1/24 dev lab0
        for one in lo lab0 lab1; do ip link set $one up; done
        {command} up
        SLURM_CONF={own.conf} srun --nodes=2 hostname
        ss -Htln | awk '{{print $4}}' | cut -d: -f1 | sort -u
        {command} down"""
    done = subprocess.run(
        ["unshare", "--uts", "--mount", "--net", "bash", "-c", lines],
        env=os.environ | {"PYTHONPATH": str(Path(pocket_slurm.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"It listens {words}, and" in done.stdout
    assert done.stdout.splitlines()[-4:-1] == ["lab-pc", "lab-pc", *places]


def test_an_ordinary_user_has_one_of_their_own(own, short):
    """nobody has neither rights of root nor a home; a container's user is no better off."""
    (short / "home").mkdir()
    for folder in (short, short / "home"):
        shutil.chown(folder, "nobody", "nogroup")
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        f"{COMMAND}\n"
        "slurm = pocket_slurm.PocketSlurm()\n"
        "try:\n    slurm.up()\n"
        "    print(slurm.run('srun', '--nodes=2', 'id', '-un').split(), pocket_slurm.find())\n"
        "finally:\n    print(slurm.down())\n"
    )
    root = str(Path(pocket_slurm.__file__).parents[1])
    drop = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    done = subprocess.run(
        [*drop, sys.executable, "-c", script, str(own.folder), root],
        env={"PATH": os.environ["PATH"], "HOME": str(short / "home")},
        cwd=short,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "Permission denied" in done.stderr and "course" in done.stderr:
        pytest.skip("the checkout lies where no other user may read")
    assert "['nobody', 'nobody'] Slurm" in done.stdout and done.stdout.endswith("True\n"), done.stderr
    assert_nothing_left(own)
