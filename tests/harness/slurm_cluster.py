"""A Slurm of two nodes, c1 and c2, on the loopback interface: real daemons, with everything in one folder."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONFIG = """ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
KillWait=5
InactiveLimit=0
SlurmdTimeout=30
NodeName=c1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000 State=UNKNOWN
NodeName=c2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=lab Nodes=c1,c2 Default=YES MaxTime=60 State=UP
"""


def find_missing_slurm() -> str:
    """What is missing here for such a cluster, in words; "" where nothing is."""
    if os.geteuid():
        return "the tests start Slurm as root only"
    missing = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=PATH)}
    return f"not installed: {', '.join(sorted(missing))}" if missing else ""


class SlurmCluster:
    """The cluster; while it is there, SLURM_CONF leads this process, and what it starts, to it."""

    def __enter__(self) -> SlurmCluster:
        self.folder = Path(tempfile.mkdtemp(prefix="lab-slurm-"))
        self._daemons: list[subprocess.Popen] = []
        self._before = os.environ.get("SLURM_CONF")
        for name in ("c1", "c2", "state"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, ports=_find_ports(3)))
        (self.folder / "cgroup.conf").write_text(_write_cgroup())
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def list_jobs(self) -> list[str]:
        """The numbers of the jobs that wait, run, or are ending."""
        return _run("squeue", "--noheader", "--format=%A").split()

    def wait_empty(self, seconds: float = 20.0) -> None:
        """Returns when no job is left."""
        _wait(lambda: not self.list_jobs(), f"jobs are left: {self.list_jobs()}", seconds)

    def close(self) -> None:
        """Cancels all jobs, and ends the daemons."""
        try:
            if len(self._daemons) == 4 and (jobs := self.list_jobs()):
                # A daemon that ends before its job would leave the job's processes behind.
                _run("scancel", *jobs)
                self.wait_empty()
        finally:
            for daemon in reversed(self._daemons):
                daemon.terminate()
            for daemon in reversed(self._daemons):
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
            os.environ.pop("SLURM_CONF", None)
            if self._before is not None:
                os.environ["SLURM_CONF"] = self._before
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        own = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munged.seed"}
        self._run_daemon("munged", "--foreground", "--force", *(f"--{key}={self.folder / own[key]}" for key in own))
        _wait(lambda: (self.folder / "munge.sock").exists(), self._read_log("munged"))
        self._run_daemon("slurmctld", "-D", "-i")
        for name in ("c1", "c2"):
            self._run_daemon("slurmd", "-D", "-N", name)
        _wait(lambda: _run("sinfo", "--noheader", "--Node", "--format=%T", check=False).split() == ["idle"] * 2, self)

    def __str__(self) -> str:
        return "\n".join(self._read_log(name) for name in ("munged", "slurmctld", "slurmd"))

    def _run_daemon(self, name: str, *argv: str) -> None:
        # Should the tests be killed, the daemons are too; what runs in a job has the launcher's lease.
        follow = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [*follow, shutil.which(name, path=PATH), *argv]
            self._daemons.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            )

    def _read_log(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return f"{name}: {log.read_text(errors='replace')[-2000:] if log.exists() else 'no log'}"


def _write_cgroup() -> str:
    """Slurm without control groups, which a container may not have."""
    version = re.search(r"(\d+)\.(\d+)", _run(shutil.which("slurmctld", path=PATH), "-V"))
    new = version and (int(version[1]), int(version[2])) >= (23, 2)
    return "CgroupPlugin=disabled\n" if new else "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n"


def _find_ports(count: int) -> list[int]:
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    return ports


def _run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    if check and done.returncode:
        raise RuntimeError(f"{argv[0]}: {done.stderr.strip()}")
    return done.stdout


def _wait(holds, complaint: object, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(str(complaint))
        time.sleep(0.1)
