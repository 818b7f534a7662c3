"""Settings for all tests, which the notebooks' kernels inherit: threads, scale, and their own folders.

It is at the root so that the notebooks are tested under the same settings as the modules.
"""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

# Before anything imports torch: sums of floats differ with the number of threads, and on a shared machine two threads
# that wait for each other can be ten times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

FOLDERS = pytest.StashKey[Path]()
SETTINGS = pytest.StashKey[dict[str, str]]()
WATCH = pytest.StashKey()
WARM = pytest.StashKey[subprocess.Popen]()
# The fixtures of what needs root, or packages that the lock does not have.
SYSTEM = {"hosts", "slurm", "chromium", "nbgrader", "small_disk"}
SYSTEM |= {"lightning", "ray", "jax", "tensorflow", "horovod", "sphinx"}
# The longest: one process takes them, one after the other, so that two never measure beside each other.
LABS = ("notebooks/01", "notebooks/04", "notebooks/05")
# Takes the labs through a browser, and looks at no time: two processes share them.
BROWSER = "tests/test_browser.py"
LONGEST = (
    "tests/test_launch_drills.py",
    "tests/test_launch_slurm.py",
    BROWSER,
    "tests/test_lab5.py",
    *LABS,
    "notebooks/",
    "tests/test_launch",
    "tests/test_check_lab",
    "tests/test_wandb.py",
)


def pytest_configure(config):
    """Gives all tests, and the kernels of the notebooks, their own folders and the small scale."""
    config.addinivalue_line("markers", "drill: starts processes, cuts them off, and looks at what is left")
    config.addinivalue_line("markers", "gpu: of a path that runs on a GPU; `make gpu` alone runs it (tests/gpu)")
    config.addinivalue_line("markers", "hosting: builds images and runs containers; `make test-hosting` alone runs it")
    config.addinivalue_line("markers", "system: needs root or packages, or takes long; `make test-system` runs it")
    # Not a fixture: the cells of a notebook are no functions, and fixtures do not reach them.
    root = Path(tempfile.mkdtemp(prefix="labs-"))
    config.stash[FOLDERS] = root
    # The data sets are one folder for all processes of `pytest -n 3`: to draw one takes a core half a minute.
    data = Path(getattr(config, "workerinput", {}).get("data", root / "data"))
    for name, folder in {"data": data, "runs": root / "runs"}.items():
        folder.mkdir(exist_ok=True)
        os.environ[f"LAB_{name.upper()}"] = str(folder)
    # The stored outputs are those of the small scale.
    os.environ["LAB_SCALE"] = "small"
    config.stash[SETTINGS] = {name: value for name, value in os.environ.items() if name.startswith("LAB_")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks tests that need more than Python, before ``-m`` selects by marks, and puts the longest tests first.

    A long test at the end would keep one process busy while the others have nothing left to do.
    """
    for item in items:
        if is_lab(item):
            from tests.harness.fewer import take_fewer

            take_fewer(item)
        # A parameter may be the name of a fixture, for which the test asks later.
        chosen = [name for name in getattr(getattr(item, "callspec", None), "params", {}).values() if type(name) is str]
        if not SYSTEM.isdisjoint([*getattr(item, "fixturenames", ()), *chosen]):
            item.add_marker("system")
    items.sort(
        key=lambda item: next((n for n, part in enumerate(LONGEST) if item.nodeid.startswith(part)), len(LONGEST))
    )


@functools.cache
def start_kernels_again():
    """Lets nbval start a kernel a second time if the first one dies at its start.

    Jupyter chooses a kernel's ports before the kernel binds them, and meanwhile another test's process may take one.
    """
    from nbval import kernel

    start = kernel.start_new_kernel

    def start_again(*args, **options):
        try:
            return start(*args, **options)
        except RuntimeError:
            return start(*args, **options)

    kernel.start_new_kernel = start_again


def warm_notebooks(config):
    """Gives the nodes that notebooks make on this machine a Python that has imported torch already.

    That import is most of what a small job takes. `make notebooks`, and the learner in the browser, do without.
    """
    from tests.harness import warm

    folder = config.stash[FOLDERS] / "w"
    folder.mkdir()
    command, config.stash[WARM] = warm.start_server(str(folder))
    warm.write_python(folder / "python", command)
    warm.write_profile(folder / "ipython", folder / "python")
    os.environ["IPYTHONDIR"] = str(folder / "ipython")


@functools.cache
def draw_data():
    """Draws the data set before a notebook does: on a slow machine that shows progress, which no notebook stores."""
    from lab_utils import data

    data.load()


def is_lab(item):
    """Returns True if a test is a cell of one of the labs."""
    return item is not None and item.path.parent == Path(__file__).parent / "notebooks"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Prepares the notebooks' data, and watches the memory of each notebook from its first cell on.

    Its kernel, which starts now, measures in one round: on processors that three processes share no time is a finding.
    """
    if time.time() > float(os.environ.get("LAB_UNTIL", "inf")):
        pytest.skip("NOT TESTED HERE: the time for these tests is up (LAB_UNTIL)")
    if is_lab(item):
        os.environ["LAB_ROUNDS"] = "1"
        from tests.harness.engines import need_engine_of
        from tests.harness.memory import MemoryWatch

        need_engine_of(item.path)
        start_kernels_again()
        draw_data()
        if WARM not in item.config.stash:
            warm_notebooks(item.config)
        if WATCH not in item.parent.stash:
            item.parent.stash[WATCH] = MemoryWatch(item.config.stash[WARM].pid).__enter__()


def end_watch(item):
    """Ends the watch over a notebook's memory at its last cell; returns what is wrong with the peak, or ""."""
    import torch

    from tests.harness.memory import find_memory_fault, read_stored_peak

    watch = item.parent.stash.get(WATCH, None)
    if watch is None:
        return ""  # its framework is not here: all its cells are skipped
    watch.__exit__()
    if torch.cuda.is_available():
        return ""  # CUDA takes main memory too; the limit is for CPUs
    return find_memory_fault(watch.peak_gib, read_stored_peak(item.parent.nb))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Fails a test that changes the settings for the next one, for example because it forgot monkeypatch.

    Also fails a notebook that took more memory than it may.
    """
    fault = ""
    if is_lab(item):
        os.environ.pop("LAB_ROUNDS", None)
        if item.parent is not getattr(nextitem, "parent", None):
            fault = end_watch(item)  # now: behind the yield its kernel is gone
    result = yield
    if fault:
        pytest.fail(f"{item.path.name}: {fault}", pytrace=False)
    left = {name: value for name, value in os.environ.items() if name.startswith("LAB_")}
    before = item.config.stash[SETTINGS]
    if left != before:
        for name in left.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        pytest.fail(f"left other settings behind: {dict(left.items() ^ before.items())}")
    return result


# bash as the first process buries what others leave behind, as init does; it must not become what it starts.
OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", '"$0" "$@"; exit $?')


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Gives each process of ``pytest -n 3`` the folder of the data sets."""
    node.workerinput["data"] = str(node.config.stash[FOLDERS] / "data")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Gives each process of ``pytest -n 3`` its own process ids, if the user is root.

    A preflight sees every job of its user, and tests leave some behind on purpose, which are red to those of another.
    """
    if not os.geteuid() and shutil.which("unshare") and not subprocess.run([*OWN_PIDS, "true"]).returncode:
        for spec in specs:
            spec.python = shlex.join([*OWN_PIDS, sys.executable])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keeps a file's tests in one process of ``pytest -n 3``, except for one file; groups the longest labs."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # which would begin with the file of the most tests

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if file == BROWSER and (number := re.search(r"-(\d\d)_\w+\]$", nodeid)):
                return f"{file} {int(number[1]) // 2 % 2}"  # so that both take about as long
            return "labs" if file.startswith(LABS) else file

    return FileScheduling(config, log)


def pytest_unconfigure(config):
    """Removes those folders, and ends the warm Python."""
    if WARM in config.stash:
        config.stash[WARM].communicate()
    if FOLDERS in config.stash:
        shutil.rmtree(config.stash[FOLDERS], ignore_errors=True)


@pytest.fixture(scope="session")
def root():
    """The checkout."""
    return Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def sample(root):
    """A few thousand real CINIC-10 images in CINIC-10's layout, which are not part of the repository."""
    folder = Path(os.environ.get("LAB_SAMPLE") or root.parent / "shared" / "data" / "cinic10-sample")
    if not (folder / "train").is_dir():
        pytest.skip("no real CINIC-10 sample is here; name one with LAB_SAMPLE")
    return folder


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MiB that can be filled; only root can mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk, and not everywhere")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
