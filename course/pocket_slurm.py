"""A Slurm of two nodes on this machine: ``make slurm`` starts it, ``make slurm-down`` ends it.

It is real Slurm: ``munged``, ``slurmctld``, and one ``slurmd`` for each of the nodes c1 and c2, run by yourself, on the
loopback interface if possible. They outlive the terminal that started them. Their files are in one private folder,
whose ``slurm.conf`` tells Slurm's commands where they are: ``export SLURM_CONF=…``. :func:`find` does that for a
notebook.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lab_common import LabError, checkout
from lab_common.commandline import read_option
from lab_common.files import write_atomically

NODES, PARTITIONS = ("c1", "c2"), ("lab", "spot", "urgent")
# The daemons, in the order in which they are started.
ROLES = ("munged", "slurmctld", *NODES)
PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
INSTALL = f"sudo apt-get install -y --no-install-recommends {' '.join(PROGRAMS.values())}"
# Debian has the daemons where the PATH of an ordinary user does not lead.
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
# A socket's path has room for 107 bytes.
LONGEST_FOLDER = 90
LOOPBACK, BOUND = "127.0.0.1", "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"
READY_SECONDS, CANCEL_SECONDS, END_SECONDS = 30.0, 20.0, 5.0
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
        self.folder = (folder or Path(f"/tmp/lab-slurm-{os.geteuid()}")).absolute()
        self.conf = self.folder / "slurm.conf"
        self._follow, self._children = follow, dict[str, subprocess.Popen]()

    def up(self) -> list[str]:
        """Starts the daemons that do not run yet, and returns their names: [] if all ran already.

        Raises:
            LabError: Slurm's programs are missing, the folder cannot be used, or a daemon did not start.
        """
        self._check_here()
        self._check_folder()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with self._locked():
            running = self.find_processes()
            missing = [role for role in ROLES if role not in running.values()]
            if not running:
                self._write_files()
            try:
                for role in missing:
                    self._start(role)
                self._wait_ready()
            except BaseException:
                if not running:
                    self._end_all()
                raise
        return missing

    def down(self) -> tuple[bool, list[str]]:
        """Cancels all jobs and ends all daemons.

        Returns:
            True if something ran, and the jobs that did not end in time and were killed.
        """
        if not self.folder.exists():
            return self._end_all(), []
        self._check_folder()
        left: list[str] = []
        with self._locked():
            # Where a daemon is missing, a job cannot end as it should.
            if set(self.find_processes().values()).issuperset(ROLES):
                with contextlib.suppress(LabError):
                    left = self._cancel_all()
            ended = self._end_all()
            shutil.rmtree(self.folder)
        return ended, left

    def find_processes(self) -> dict[int, str]:
        """Returns the living processes of this cluster: one of ``ROLES`` for each daemon, "step" for a job's."""
        for child in self._children.values():
            child.poll()  # or it stays a zombie
        found = {int(entry.name): self._find_role(entry) for entry in Path("/proc").glob("[0-9]*")}
        return {pid: role for pid, role in found.items() if role}

    def list_jobs(self) -> list[str]:
        """Returns the numbers of the jobs that wait, run, or are ending."""
        return list(dict.fromkeys(self.run("squeue", "--noheader", "--format=%A").split()))

    def wait_empty(self, seconds: float = 20.0) -> None:
        """Waits until no job is left.

        Raises:
            LabError: Some jobs are left after that many seconds.
        """
        if not _wait(lambda: not self.list_jobs(), seconds):
            fix = "scancel NUMBER"
            raise LabError(f"Jobs are left: {', '.join(self.list_jobs())}.", where=self.conf, fix=fix)

    def run(self, *argv: str) -> str:
        """Runs one of Slurm's commands on this cluster and returns what it prints.

        Raises:
            LabError: It failed.
        """
        return _ask(*argv, conf=self.conf)

    def _cancel_all(self) -> list[str]:
        """Cancels all jobs; returns those that do not end."""
        if jobs := self.list_jobs():
            self.run("scancel", *jobs)
            _wait(lambda: not self.list_jobs(), CANCEL_SECONDS)
        return self.list_jobs()

    def _check_here(self) -> None:
        """Raises LabError if this machine or user cannot run the cluster."""
        if missing := find_missing_packages():
            cause, fix = f"these packages are not installed: {', '.join(missing)}", INSTALL
            if not shutil.which("apt-get", path=PATH):
                fix = "install munge and Slurm with your system's packages"
            raise LabError("Slurm's programs are not all on this machine.", where="PATH", cause=cause, fix=fix)
        _find_user()

    def _check_folder(self) -> None:
        """Raises LabError if the folder cannot be used for the cluster."""
        elsewhere = "python -m course.pocket_slurm up --folder /tmp/another"
        if len(os.fsencode(self.folder)) > LONGEST_FOLDER or not re.fullmatch(r"[A-Za-z0-9._/+-]+", str(self.folder)):
            cause = f"a socket's path is short, and slurm.conf knows no quotes: at most {LONGEST_FOLDER} plain letters"
            raise LabError("Slurm cannot have its files there.", where=self.folder, cause=cause, fix=elsewhere)
        if not os.path.lexists(self.folder):
            return
        found = self.folder.lstat()
        own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if not own:
            cause = "it is no private folder of this user (mode 700)"
            raise LabError("This folder is not the pocket Slurm's.", where=self.folder, cause=cause, fix=elsewhere)

    def _check_content(self) -> None:
        """Raises LabError if the folder contains other files."""
        # A file of ours that did not get its name in time may be there, too.
        if all(path.name.startswith(f".{self.conf.name}.") for path in self.folder.iterdir()):
            return
        text = self.conf.read_text(errors="replace") if self.conf.is_file() else ""
        if f"StateSaveLocation={self.folder}/" not in text:
            cause, fix = "it has other files in it", "python -m course.pocket_slurm up --folder /tmp/another"
            raise LabError("This folder is not the pocket Slurm's.", where=self.folder, cause=cause, fix=fix)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Prevents others from starting or ending the cluster meanwhile."""
        while True:
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if self.folder.exists() and os.path.samestat(os.fstat(descriptor), self.folder.stat()):
                    self._check_content()
                    yield
                    return
                self.folder.mkdir(mode=0o700, exist_ok=True)  # who had the lock has removed it
            finally:
                os.close(descriptor)

    def _write_files(self) -> None:
        """Recreates the folder; leftovers from before a power cut are useless."""
        for old in self.folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        # First: by it the folder is known as ours.
        with write_atomically(self.conf) as file:
            address, bound = _find_address()
            own = {"address": address, "bound": bound, "ports": _find_ports(3, address)}
            file.write(CONFIG.format(user=_find_user(), folder=self.folder, **own).encode())
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
        follow = ["setpriv", "--pdeathsig", "KILL"] if self._follow and shutil.which("setpriv") else []
        with (self.folder / f"{role}.log").open("ab") as log:
            child = subprocess.Popen(
                [*follow, shutil.which(argv[0], path=PATH), *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env | {"SLURM_CONF": str(self.conf), "PATH": PATH},
                cwd=self.folder,
                start_new_session=True,
            )
        self._children[role] = child
        if role == "munged" and not _wait(lambda: _is_open(self.folder / "munge.sock"), END_SECONDS):
            raise self._explain(role)

    def _wait_ready(self) -> None:
        usable = {"idle", "mixed", "allocated", "completing"}

        def is_ready() -> bool:
            with contextlib.suppress(LabError):
                states = set(self.run("sinfo", "--noheader", "--Node", "--format=%T").split())
                return bool(states) and states <= usable
            return False

        end = time.monotonic() + READY_SECONDS
        while not is_ready():
            for role, child in self._children.items():
                if child.poll() is not None:
                    raise self._explain(role)
            if time.monotonic() > end:
                raise self._explain("slurmctld")
            time.sleep(0.1)

    def _explain(self, role: str) -> LabError:
        log = self.folder / f"{role}.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        said = [line for line in lines if "error" in line.lower() or "fatal" in line] or lines or ["it wrote nothing"]
        fix = f"{_name_command('down')}, then {_name_command('up')}"
        return LabError(f"{role} did not start, or did not get ready.", where=log, cause=said[-1][:300], fix=fix)

    def _find_role(self, entry: Path) -> str:
        """Returns a process's role in this cluster, by its folder in /proc; "" for any other."""
        with contextlib.suppress(OSError):
            if f"SLURM_CONF={self.conf}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                return ""
            program, argv = (entry / "exe").readlink().name, (entry / "cmdline").read_bytes().split(b"\0")[:-1]
            if program.startswith(("munged", "slurmctld")):
                role = "munged" if program.startswith("munged") else "slurmctld"
                return role if b"--foreground" in argv or b"-D" in argv else "step"
            if program.startswith("slurmstepd"):
                return "step"
            if program.startswith("slurmd"):
                return argv[-1].decode(errors="replace") if b"-N" in argv else "step"
        return ""

    def _end_all(self) -> bool:
        """Ends every process of this cluster and of its jobs; returns True if there was one."""
        found = self.find_processes()
        # First the one that would start a job anew, last the one that answers for all others.
        for role in ("slurmctld", "step", *NODES, "munged"):
            for pid in self._list(role) if role == "step" else []:
                with contextlib.suppress(psutil.Error):
                    for child in psutil.Process(pid).children(recursive=True):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            child.kill()
            for number in (signal.SIGTERM, signal.SIGKILL)[role == "step" :]:
                self._signal(role, number)
                if _wait(lambda role=role: not self._list(role), END_SECONDS):
                    break
        return bool(found)

    def _list(self, role: str) -> list[int]:
        return [pid for pid, found in self.find_processes().items() if found == role]

    def _signal(self, role: str, number: int) -> None:
        for pid in self._list(role):
            # Asked anew: the number may be another process's by now.
            with contextlib.suppress(ProcessLookupError):
                if self._find_role(Path(f"/proc/{pid}")) == role:
                    os.kill(pid, number)


def find(
    folder: Path | None = None, *, needs: Sequence[str] = (), say: Callable[[str], object] = print
) -> Cluster | None:
    """Returns the Slurm that a notebook uses: one that answers already, otherwise the pocket Slurm, if it runs.

    In the second case SLURM_CONF is set, so that all programs that are started from here find it. A notebook may itself
    run in a job of Slurm: that job's ``SLURM_…`` variables are removed, since ``srun`` would start its tasks in it.

    Args:
        folder: Folder of the pocket Slurm; None means this user's own.
        needs: Partitions that a Slurm must have.
        say: Receives a sentence on what was found, or on what to do if nothing was.
    """
    mine, given, words = PocketSlurm(folder), os.environ.get("SLURM_CONF"), "No Slurm answers."
    running = set(mine.find_processes().values()) if sys.platform.startswith("linux") else set()
    if shutil.which("sinfo") and (given != str(mine.conf) or "slurmctld" in running) and (found := _look(given)):
        if {*needs} <= {*found.partitions}:
            return _tell(found, say)
        words = f"The Slurm of this machine has no partition {' or '.join(sorted({*needs} - {*found.partitions}))}."
    if running.issuperset(ROLES) and (found := _look(mine.conf)):
        os.environ["SLURM_CONF"] = str(mine.conf)
        return _tell(found, say)
    if running:
        words = f"The Slurm of two nodes is incomplete: {', '.join({*ROLES} - running) or 'slurmctld'} is missing."
    say(f"{words} {_advise()}")
    return None


def _tell(found: Cluster, say: Callable[[str], object]) -> Cluster:
    for name in [one for one in os.environ if one.startswith("SLURM_") and one != "SLURM_CONF"]:
        del os.environ[name]
    say(f"{found}: {', '.join(found.nodes[:8])}; partitions {', '.join(found.partitions)}")
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
    env = dict(os.environ) | ({"SLURM_CONF": str(conf)} if conf else {})
    program, fix = shutil.which(argv[0], path=PATH), _name_command("up")
    if not program:
        raise LabError(f"There is no program {argv[0]}.", where="PATH", cause="Slurm is not installed", fix=fix)
    try:
        done = subprocess.run(
            [program, *argv[1:]], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, env=env
        )
    except subprocess.TimeoutExpired as error:
        raise LabError("Slurm does not answer.", where=argv[0], fix=fix) from error
    if done.returncode:
        raise LabError(f"{argv[0]} failed.", where=argv[0], cause=done.stderr.strip()[-300:], fix=fix)
    return done.stdout


def _find_user() -> str:
    """Returns this user's name, without which Slurm does not start."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError as error:
        cause, fix = "Slurm starts only for users of whom the system knows a name", "start it as another user"
        raise LabError("This user has no name.", where=f"uid {os.geteuid()}", cause=cause, fix=fix) from error


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


def _is_open(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _wait(holds: Callable[[], object], seconds: float, *, pause: float = 0.1) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m course.pocket_slurm", description=__doc__)
    parser.add_argument("what", choices=("up", "down", "status"))
    parser.add_argument("--folder", type=read_option, help="where its files are; if not given, this user's own in /tmp")
    given = parser.parse_args(arguments)
    slurm = PocketSlurm(given.folder)
    try:
        return {"up": _say_up, "down": _say_down, "status": _say_status}[given.what](slurm)
    except (LabError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _say_up(slurm: PocketSlurm) -> int:
    started = slurm.up()
    done = f"runs again ({', '.join(started)} had ended)" if started else "ran already"
    done = "runs" if started == [*ROLES] else done
    own = slurm.folder == PocketSlurm().folder
    print(f"A Slurm of two nodes {done}: {' and '.join(NODES)}, partitions {', '.join(PARTITIONS)}.")
    told = slurm.conf.read_text()
    (address,) = {*re.findall(r"NodeAddr=(\S+)", told)}
    place = f"at {address}" if BOUND in told else "at all addresses of this machine"
    place = "on this machine only" if (address, BOUND in told) == (LOOPBACK, True) else f"{place}, to who has its key"
    print(f"It listens {place}, and its jobs run as you.\n")
    for what, how in (
        ("in lab 13", "nothing: its notebook finds it" if own else f"SLURM_CONF={slurm.conf} make lab"),
        ("in a terminal", f"export SLURM_CONF={slurm.conf}"),
        ("for lab 5", f"SLURM_CONF={slurm.conf} LAB_NODES=slurm:2 make lab"),
        ("to end it", _name_command("down") if own else f"python -m course.pocket_slurm down --folder {slurm.folder}"),
    ):
        print(f"  {what:14} {how}")
    return 0


def _say_down(slurm: PocketSlurm) -> int:
    ended, left = slurm.down()
    if left:
        print(f"These jobs did not end when they were cancelled, and were killed: {', '.join(left)}.")
    print("The Slurm of two nodes has ended, with all its jobs." if ended else "No Slurm of two nodes ran.")
    return 0


def _say_status(slurm: PocketSlurm) -> int:
    running = {role: pid for pid, role in slurm.find_processes().items()}
    for role in ROLES:
        print(f"{role:10} {f'runs, process {running[role]}' if role in running else 'does not run'}")
    if not running.keys() >= {*ROLES}:
        print(f"`{_name_command('up')}` starts what does not run.")
        return 1
    print(f"jobs       {len(slurm.list_jobs())}")
    print(slurm.run("sinfo"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
