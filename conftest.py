"""Settings that all tests share, and the kernels of the notebooks inherit: threads, scale, and folders of their own.

It lies at the root so that the notebooks are tested under the same settings as the modules.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

# Before anything imports torch: sums of floats differ with the number of threads, and on a shared machine two threads
# that wait for each other can be ten times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

FOLDERS = pytest.StashKey[Path]()


def pytest_configure(config):
    """Gives all tests, and the kernels of the notebooks, folders of their own and the small scale."""
    config.addinivalue_line("markers", "drill: starts processes, cuts them off, and looks at what is left")
    # Not a fixture: the cells of a notebook are no functions, and fixtures do not reach them.
    root = Path(tempfile.mkdtemp(prefix="labs-"))
    config.stash[FOLDERS] = root
    for name in ("data", "runs"):
        (root / name).mkdir()
        os.environ[f"LAB_{name.upper()}"] = str(root / name)
    # The stored outputs are those of the small scale.
    os.environ["LAB_SCALE"] = "small"


def pytest_unconfigure(config):
    """Removes those folders."""
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
