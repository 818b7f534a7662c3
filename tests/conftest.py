"""Shared test fixtures: notebook cells, temporary folders, hosts, a Slurm cluster, engines, a busy machine."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib as mpl
import nbformat
import psutil
import pytest
from harness import containers, warm
from harness.browser import Page, find_chromium
from harness.drawn import make_folder
from harness.engines import find_engine
from harness.hosts import Hosts, find_missing
from harness.jobs import hear

from course.pocket_slurm import PocketSlurm, find_missing_packages
from nodelaunch import TorchrunJob
from nodelaunch.state import JobState

# A shell that starts us in the background has interrupts ignored, and nohup hang-ups, which all our children would
# inherit; some tests send them.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def _need(missing: str, what: str) -> None:
    """Skips the test, or fails it if the environment promises that everything is here."""
    if missing and os.environ.get("LAB_REQUIRE_HOSTS") == "1":
        pytest.fail(f"LAB_REQUIRE_HOSTS=1, but {what} cannot be made here: {missing}", pytrace=False)
    if missing:
        pytest.skip(f"NOT TESTED HERE: {what} cannot be made: {missing}")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder for jobs and records."""
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def state() -> JobState:
    """The state of a job on two nodes, a and b, of one rank each, which have started."""
    made = JobState(["a", "b"], ["10.0.0.1", "10.0.0.2"])
    for rank, node in enumerate("ab"):
        hear(made, node, "worker", rank=rank, pid=57 + rank, host=node, local_rank=0, node=rank, processes=1)
    return made


@pytest.fixture(scope="session")
def warm_python() -> Iterator[list[str]]:
    """A command that runs a Python script in a fork of a process that has torch already: see tests/harness/warm.py."""
    # Not pytest's own folder: a socket has no room for so long a name.
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        command, server = warm.start_server(folder)
        with server:  # the end of the block closes its standard input, at which it ends
            yield command


@pytest.fixture(scope="session")
def warm_up(warm_python: list[str]) -> Callable[[pytest.MonkeyPatch], None]:
    """The work of :func:`warm_ranks`, as a function for shared fixtures."""
    start, program = TorchrunJob.__init__, [*warm_python, str(Path(warm.__file__).with_name("warm_worker.py"))]

    def run(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(TorchrunJob, "__init__", lambda job, *a, **b: start(job, *a, **{"program": program, **b}))

    return run


@pytest.fixture
def warm_ranks(warm_up: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes jobs import neither torchrun nor torch: for tests of what ranks do, whoever starts them."""
    warm_up(monkeypatch)


@pytest.fixture
def warm_torchrun(warm_python: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torchrun and its workers import no torch: for tests of their output and actions, in jobs on this machine.

    Not for tests of their environment or memory, or of stopped processes: these are forks of a warm Python.
    """
    warm.write_python(tmp_path / "warm-python", warm_python)
    warm.use_python(str(tmp_path / "warm-python"), monkeypatch.setitem)


@pytest.fixture
def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the jobs that the test has run, in a list that grows."""
    ids, run = [], TorchrunJob.run

    def note(job: TorchrunJob, **options: object) -> object:
        try:
            return run(job, **options)
        finally:
            ids.append(job.id)  # the next run has another

    monkeypatch.setattr(TorchrunJob, "run", note)
    return ids


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a file for the test, such as a training script, and returns its path."""

    def run(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return run


@pytest.fixture
def run_cells_of(root: Path, tmp_path: Path) -> Callable[..., dict]:
    """Runs cells of a notebook, by id, after its imports, and returns the names that they define."""

    def run(notebook: str, *cells: str, **names: object) -> dict:
        sources = {cell.id: cell.source for cell in nbformat.read(root / f"notebooks/{notebook}.ipynb", 4).cells}
        path = tmp_path / "cells.py"
        path.write_text("\n\n".join(sources[cell] for cell in ("imports", *cells)), encoding="utf-8")
        with mpl.rc_context({"backend": "agg"}):
            return runpy.run_path(str(path), init_globals=names)

    return run


@pytest.fixture
def no_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the recorded reference runs."""
    monkeypatch.setattr("course.reference.checkout", lambda: tmp_path)


@pytest.fixture(scope="session", params=["real", "drawn"])
def cinic_folder(request, tmp_path_factory):
    """A LAB_DATA with CINIC-10's layout: the real sample if it is here, otherwise drawn pictures; never both."""
    folder = tmp_path_factory.mktemp("data")
    if request.param == "real":
        # A link, so that what is packed lands beside it in this folder.
        (folder / "cinic10").symlink_to(request.getfixturevalue("sample"))
        return folder
    try:
        request.getfixturevalue("sample")
    except pytest.skip.Exception:
        return make_folder(folder / "cinic10", per_class={"train": 100, "valid": 50, "test": 50}).parent
    pytest.skip("the real sample is here")  # and a lab takes minutes


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Two hosts, n1 and n2, and the launcher's side n0, for the whole session; restored before each test."""
    _need(find_missing(), "hosts out of namespaces")
    with Hosts() as made:
        yield made


@pytest.fixture(autouse=True)
def _mend_hosts(request: pytest.FixtureRequest) -> Iterator[None]:
    made = request.getfixturevalue("hosts") if "hosts" in request.fixturenames else None
    yield
    if made:
        made.mend()


@pytest.fixture(scope="session")
def slurm() -> Iterator[PocketSlurm]:
    """A Slurm of two nodes, c1 and c2, on the loopback interface; SLURM_CONF names its configuration."""
    _need("the tests start it as root only" if os.geteuid() else ", ".join(find_missing_packages()), "a Slurm cluster")
    with tempfile.TemporaryDirectory(prefix="lab-slurm-") as folder, pytest.MonkeyPatch.context() as patch:
        cluster = PocketSlurm(Path(folder, "s"), follow=True)
        try:
            cluster.up()
            patch.setenv("SLURM_CONF", str(cluster.conf))
            yield cluster
        finally:
            cluster.down()


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> containers.Podman:
    """Podman with the teams' image of this checkout."""
    if os.geteuid() or (missing := containers.find_missing()):
        pytest.skip(f"NOT TESTED HERE: containers need root and {', '.join(containers.PROGRAMS)}; missing: {missing}")
    made = containers.prepare(tmp_path_factory.mktemp("podman"))
    made.build(tmp_path_factory.mktemp("build"))
    return made


@pytest.fixture(scope="session")
def lightning() -> Path:
    """The Python of Lightning's own environment."""
    return find_engine("lightning")


@pytest.fixture(scope="session")
def ray() -> Path:
    """The Python of Ray's own environment."""
    return find_engine("ray")


@pytest.fixture
def no_fork_is_left() -> Iterator[None]:
    """Fails if a fork is left, running or unreaped. Other children, such as wandb's, end with the process."""
    ours = psutil.Process()
    before = ours.children()
    yield
    new = [child for child in ours.children() if child not in before]
    assert not [child for child in new if child.status() == psutil.STATUS_ZOMBIE or child.cmdline() == ours.cmdline()]


@pytest.fixture(scope="session")
def jax() -> Path:
    """The Python of JAX's own environment."""
    return find_engine("jax")


@pytest.fixture(scope="session")
def sphinx() -> Path:
    """The Python of Sphinx's own environment."""
    return find_engine("sphinx")


@pytest.fixture(scope="session")
def tensorflow() -> Path:
    """The Python of TensorFlow's own environment."""
    return find_engine("tensorflow")


@pytest.fixture(scope="session")
def horovod() -> Path:
    """The Python of Horovod's own environment."""
    return find_engine("horovod")


@pytest.fixture(scope="session")
def chromium() -> str:
    """An installed Chromium."""
    found = find_chromium()
    _need("" if found else "it is not installed (apt-get install chromium)", "a learner's way in Chromium")
    return found


@pytest.fixture
def keep(tmp_path: Path, record_property: Callable[[str, object], None]) -> Callable[[Page, str], None]:
    """Saves a picture of a page as a test artefact: in LAB_ARTEFACTS, or in pytest's own folder."""

    def run(page: Page, name: str) -> None:
        picture = Path(os.environ.get("LAB_ARTEFACTS") or tmp_path) / f"{name}.png"
        page.screenshot(picture)
        record_property("screenshot", str(picture))

    return run


@pytest.fixture(scope="session")
def survivors() -> Callable[[str], list[int]]:
    """A function that finds a job's living processes, on this machine and its hosts, by their environment."""
    return find_survivors


def find_survivors(job_id: str) -> list[int]:
    """Returns the process ids, as seen outside the hosts, of all processes with LAB_JOB_ID=job_id; no zombies."""
    wanted, found = f"LAB_JOB_ID={job_id}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return sorted(found)


@pytest.fixture(scope="session")
def busy() -> Callable:
    """A context that keeps the cores busy with n processes: ``with busy(4): ...``."""
    return make_busy


@contextlib.contextmanager
def make_busy(count: int) -> Iterator[None]:
    burn = [sys.executable, "-ISc", "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"]
    burners = [subprocess.Popen(burn) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
