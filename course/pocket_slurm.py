"""A Slurm of two nodes on this machine: ``make slurm`` starts it, ``make slurm-down`` ends it.

It is real Slurm: ``munged``, ``slurmctld``, and one ``slurmd`` for each of the nodes c1 and c2, run by yourself, on the
loopback interface if possible. They outlive the terminal that started them. Their files are in one private folder,
whose ``slurm.conf`` tells Slurm's commands where they are: ``export SLURM_CONF=…``. :func:`find` does that for a
notebook.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lab_common import LabError, checkout
from lab_common.commandline import run_command
from lab_common.files import hold_folder

FOLDER = Path(f"/tmp/lab-slurm-{os.geteuid()}")
NODES, PARTITIONS = ("c1", "c2"), ("lab", "spot", "urgent")
# The daemons, in the order in which they are started.
ROLES = ("munged", "slurmctld", *NODES)
PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
INSTALL = f"sudo apt-get install -y --no-install-recommends {' '.join(PROGRAMS.values())}"
# Debian has the daemons where the PATH of an ordinary user does not lead.
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
LOOPBACK, BOUND = "127.0.0.1", "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"
READY_SECONDS, END_SECONDS = 30.0, 5.0
BUSY = "Another terminal starts or ends this Slurm"
# A job in `spot` makes room for one in `urgent`. A requeued job waits as long as a credential is valid.
CONFIG = """ClusterName=lab
SlurmctldHost=localhost({address})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
CredType=cred/munge
{bound}
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
InactiveLimit=0
SlurmdTimeout=30
NodeName=c1 NodeHostname=localhost NodeAddr={address} Port={ports[1]} CPUs=2 RealMemory=2000 State=UNKNOWN
NodeName=c2 NodeHostname=localhost NodeAddr={address} Port={ports[2]} CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=lab Nodes=c1,c2 Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=OFF
PartitionName=spot Nodes=c1,c2 MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=urgent Nodes=c1,c2 MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Cluster:
    """A Slurm that answers.

    Attributes:
        version: Slurm's version, such as ``"22.05.8"``.
        nodes: The names of its nodes.
        partitions: The names of its partitions.
    """

    version: str
    nodes: tuple[str, ...]
    partitions: tuple[str, ...]

    @property
    def pocket(self) -> bool:
        """True if it has two nodes on one machine, as made by this module."""
        return (self.nodes, self.partitions) == (NODES, PARTITIONS)

    def __str__(self) -> str:
        return f"Slurm {self.version}, {len(self.nodes)} nodes{' on one machine' * self.pocket}"


class PocketSlurm:
    """The cluster, whether it runs or not.

    Args:
        folder: Folder of its files; None means this user's own in /tmp.
        follow: True to kill its daemons when the thread that starts them ends: for tests.
    """

    def __init__(self, folder: Path | None = None, *, follow: bool = False) -> None:
        self.folder = folder or FOLDER
        self.conf = self.folder / "slurm.conf"
        self._follow, self._children = follow, dict[str, subprocess.Popen]()

    def up(self) -> bool:
        """Starts the daemons, after ending what an incomplete cluster left; returns False if all ran already.

        Raises:
            LabError: Slurm's programs are missing, the folder cannot be used, or a daemon did not start.
        """
        if missing := find_missing_packages():
            cause, fix = f"these packages are not installed: {', '.join(missing)}", INSTALL
            if not shutil.which("apt-get", path=PATH):
                fix = "install munge and Slurm with your system's packages"
            raise LabError("Slurm's programs are not all on this machine.", where="PATH", cause=cause, fix=fix)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._check_folder()
        with hold_folder(self.folder, BUSY):
            if {*self.find_processes().values()}.issuperset(ROLES):
                return False
            self._end_all()
            try:
                self._write_files()
                for role in ROLES:
                    self._start(role)
                self._wait_ready()
            except BaseException:
                self._end_all()
                raise
        return True

    def down(self) -> bool:
        """Ends all jobs and daemons; returns True if something ran."""
        if not self.folder.exists():
            return self._end_all()
        self._check_folder()
        with hold_folder(self.folder, BUSY):
            ended = self._end_all()
            shutil.rmtree(self.folder)
        return ended

    def find_processes(self) -> dict[psutil.Process, str]:
        """Returns the living processes of this cluster: one of ``ROLES`` for each daemon, "step" for a job's."""
        found, own = {}, f"SLURM_CONF={self.conf}".encode()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                # Not process.environ(), which stops at the zeros that a changed title of a process leaves there.
                if own not in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    continue
                program, argv = Path(process.exe()).name, process.cmdline()
                daemon = next((role for role in ("munged", "slurmctld") if program.startswith(role)), "")
                if program.startswith("slurmd") and "-N" in argv:
                    found[process] = argv[-1]
                elif daemon and {"--foreground", "-D"} & {*argv}:
                    found[process] = daemon
                elif daemon or program.startswith("slurm"):
                    found[process] = "step"
        return found

    def list_jobs(self) -> list[str]:
        """Returns the numbers of the jobs that wait, run, or are ending."""
        return list(dict.fromkeys(self.run("squeue", "--noheader", "--format=%A").split()))

    def run(self, *argv: str) -> str:
        """Runs one of Slurm's commands on this cluster and returns what it prints.

        Raises:
            LabError: It failed.
        """
        return _ask(*argv, conf=self.conf)

    def _check_folder(self) -> None:
        """Raises LabError if the folder is a link, or others can use it: anybody may make one in /tmp."""
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            cause, fix = "it is no private folder of this user (mode 700)", f"remove it: rm -r {self.folder}"
            raise LabError("This folder is not the pocket Slurm's.", where=self.folder, cause=cause, fix=fix)

    def _write_files(self) -> None:
        """Recreates what is in the folder; leftovers from before a power cut are useless."""
        for old in self.folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        address, bound = _find_address()
        own = {"address": address, "bound": bound, "ports": _find_ports(3, address)}
        self.conf.write_text(CONFIG.format(user=pwd.getpwuid(os.geteuid()).pw_name, folder=self.folder, **own))
        for name in (*NODES, "state"):
            (self.folder / name).mkdir()
        (self.folder / "cgroup.conf").write_text(_write_cgroup())
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _start(self, role: str) -> None:
        own = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munged.seed"}
        argv = {
            "munged": ["munged", "--foreground", "--force", *(f"--{key}={self.folder / own[key]}" for key in own)],
            "slurmctld": ["slurmctld", "-D", "-i", "-f", str(self.conf)],
        }.get(role, ["slurmd", "-D", "-f", str(self.conf), "-N", role])
        # What a job of another Slurm, in which we may be, was given is not for these.
        env = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "LAB_"))}
        follow = ["setpriv", "--pdeathsig", "KILL"] if self._follow else []
        with (self.folder / f"{role}.log").open("ab") as log:
            self._children[role] = subprocess.Popen(
                [*follow, shutil.which(argv[0], path=PATH), *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env | {"SLURM_CONF": str(self.conf), "PATH": PATH},
                cwd=self.folder,
                start_new_session=True,
            )
        if role == "munged" and not _wait((self.folder / "munge.sock").exists, END_SECONDS):
            raise self._explain(role)

    def _wait_ready(self) -> None:
        def is_ready() -> bool:
            with contextlib.suppress(LabError):
                return {*self.run("sinfo", "--noheader", "--Node", "--format=%T").split()} == {"idle"}
            return False

        end = time.monotonic() + READY_SECONDS
        while not is_ready():
            ended = [role for role, child in self._children.items() if child.poll() is not None]
            if ended or time.monotonic() > end:
                raise self._explain((ended or ["slurmctld"])[0])
            time.sleep(0.1)

    def _explain(self, role: str) -> LabError:
        log = self.folder / f"{role}.log"
        lines = log.read_text(errors="replace").strip().splitlines()
        said = [line for line in lines if "error" in line.lower() or "fatal" in line] or lines or ["it wrote nothing"]
        fix = f"{_name_command('down')}, then {_name_command('up')}"
        return LabError(f"{role} did not start, or did not get ready.", where=log, cause=said[-1][:300], fix=fix)

    def _end_all(self) -> bool:
        """Ends every process of this cluster and of its jobs; returns True if there was one."""
        ended = False
        # First the one that would start a job anew, last the one that answers for all others.
        for role in ("slurmctld", "step", *NODES, "munged"):
            processes = [process for process, found in self.find_processes().items() if found == role]
            ended = ended or bool(processes)
            for process in [*processes]:
                with contextlib.suppress(psutil.Error):
                    processes += process.children(recursive=True) if role == "step" else []
                    process.kill() if role == "step" else process.terminate()
            _, left = psutil.wait_procs(processes, 0 if role == "step" else END_SECONDS)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, END_SECONDS)
        return ended


def find(*, needs: Sequence[str] = ()) -> Cluster | None:
    """Returns the Slurm that a notebook uses: one that answers already, otherwise the pocket Slurm, if it runs.

    A sentence says what was found, or what to do if nothing was.

    In the second case SLURM_CONF is set, so that all programs that are started from here find it. A notebook may itself
    run in a job of Slurm: that job's ``SLURM_…`` variables are removed, since ``srun`` would start its tasks in it.

    Args:
        needs: Partitions that a Slurm must have.
    """
    mine, given, words = PocketSlurm(), os.environ.get("SLURM_CONF"), "No Slurm answers."
    running = {*mine.find_processes().values()}
    # Where the controller has ended, sinfo would wait for it.
    found = _look(given) if given != str(mine.conf) or "slurmctld" in running else None
    if found and (lacking := {*needs} - {*found.partitions}):
        found, words = None, f"The Slurm of this machine has no partition {' or '.join(sorted(lacking))}."
    if not found and running.issuperset(ROLES) and (found := _look(mine.conf)):
        os.environ["SLURM_CONF"] = str(mine.conf)
    if not found:
        print(words, _advise())
        return None
    for name in [one for one in os.environ if one.startswith("SLURM_") and one != "SLURM_CONF"]:
        del os.environ[name]
    print(f"{found}: {', '.join(found.nodes[:8])}; partitions {', '.join(found.partitions)}")
    return found


def wait(cluster: Cluster | None, *jobs: str, seconds: float = 120.0) -> None:
    """Waits until none of these jobs is pending or running; returns immediately if there is no cluster.

    Args:
        cluster: Result of :func:`find`.
        jobs: The jobs' numbers.
        seconds: The longest wait.

    Raises:
        LabError: They are not over by then.
    """

    def is_over() -> bool:
        # A job that Slurm has forgotten is an error of squeue where it is asked for alone.
        return not {*_ask("squeue", "--noheader", "--format=%A %F").split()} & {*jobs}

    if cluster and not _wait(is_over, seconds, pause=0.3):
        fix = f"squeue shows why; scancel {' '.join(jobs)} ends them"
        raise LabError("The jobs are not over.", where=" ".join(jobs), cause="they wait, or still run", fix=fix)


def find_missing_packages() -> list[str]:
    """Returns the Debian packages of missing programs."""
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program, path=PATH)]
    return missing if sys.platform.startswith("linux") else list(PROGRAMS.values())


def _name_command(what: str) -> str:
    """Returns the command for "up" or "down" here: a team's container has no Makefile."""
    short = {"up": "make slurm", "down": "make slurm-down"}
    return short[what] if (checkout() / "Makefile").exists() else f"python -m course.pocket_slurm {what}"


def _advise() -> str:
    """Explains in two sentences how to get your own Slurm."""
    if not sys.platform.startswith("linux"):
        return "What follows was recorded on Linux: Slurm runs there only."
    first = f"install it ({INSTALL}), then " if find_missing_packages() else ""
    advice = f"{first}type `{_name_command('up')}` in a terminal, in the folder of the labs, and run this cell again"
    return f"What follows was recorded on another machine. For a Slurm of your own, {advice}."


def _look(conf: str | Path | None) -> Cluster | None:
    with contextlib.suppress(LabError):
        rows = [row.split("|") for row in _ask("sinfo", "-h", "-N", "-o", "%N|%P", conf=conf).split()]
        nodes, partitions = (dict.fromkeys(column) for column in zip(*rows, strict=True))
        version = _ask("sinfo", "--version", conf=conf).split()[-1]
        return Cluster(version, tuple(sorted(nodes)), tuple(sorted(name.rstrip("*") for name in partitions)))
    return None


def _ask(*argv: str, conf: str | Path | None = None) -> str:
    env = os.environ | {"PATH": PATH} | ({"SLURM_CONF": str(conf)} if conf else {})
    options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 30, "env": env}
    try:
        return subprocess.run(argv, check=True, **options).stdout
    except (OSError, subprocess.SubprocessError) as error:
        cause = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        fix = _name_command("up")
        raise LabError(f"{argv[0]} failed.", where=argv[0], cause=cause.strip()[-300:], fix=fix) from error


def _write_cgroup() -> str:
    """Returns settings for a Slurm without control groups, which a container may not have."""
    version = re.search(r"(\d+)\.(\d+)", _ask("slurmctld", "-V"))
    new = version and (int(version[1]), int(version[2])) >= (23, 2)
    return "CgroupPlugin=disabled\n" if new else "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n"


def _find_address() -> tuple[str, str]:
    """Returns the address at which daemons and commands meet, and the line that makes them listen at no other.

    With NoInAddrAny Slurm listens at the address of the machine's name. On Debian and Ubuntu that is often 127.0.1.1,
    from which answers arrive as 127.0.0.1, so that srun waits forever: there Slurm has to listen at all addresses.
    """
    with contextlib.suppress(OSError):  # the name has no address, or one that is not this machine's
        address = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0]
        _find_ports(1, address)
        if address == LOOPBACK or not address.startswith("127."):
            return address, BOUND
    return LOOPBACK, ""


def _find_ports(count: int, address: str) -> list[int]:
    holders = [socket.create_server((address, 0)) for _ in range(count)]
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    return ports


def _wait(holds: Callable[[], object], seconds: float, *, pause: float = 0.1) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m course.pocket_slurm", description=__doc__)
    parser.add_argument("what", choices=("up", "down"))
    slurm = PocketSlurm()
    if parser.parse_args(arguments).what == "down":
        print("The Slurm of two nodes has ended, with all its jobs." if slurm.down() else "No Slurm of two nodes ran.")
        return
    done = "runs" if slurm.up() else "ran already"
    print(f"A Slurm of two nodes {done}: {' and '.join(NODES)}, partitions {', '.join(PARTITIONS)}.")
    told = slurm.conf.read_text()
    address = re.search(r"NodeAddr=(\S+)", told)[1]
    place = f"at {address}" if BOUND in told else "at all addresses of this machine"
    place = "on this machine only" if (address, BOUND in told) == (LOOPBACK, True) else f"{place}, to who has its key"
    print(f"It listens {place}, and its jobs run as you.\n")
    print("  in lab 13      nothing: its notebook finds it")
    print(f"  in a terminal  export SLURM_CONF={slurm.conf}")
    print(f"  for lab 5      SLURM_CONF={slurm.conf} LAB_NODES=slurm:2 make lab")
    print(f"  to end it      {_name_command('down')}")


if __name__ == "__main__":
    sys.exit(run_command(main))
