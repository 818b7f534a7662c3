"""`make setup` on a toy lock: cut off, moved, broken, offline, in a folder with a space in its name."""

import contextlib
import hashlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# A build backend of one function, so that nothing has to be fetched; the toy packages are made with the same one.
BACKEND = """
import zipfile

def write_wheel(folder, name, version, script=""):
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    path = f"{folder}/{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{module}.py", "")
        if script:
            entry = zipfile.ZipInfo(f"{module}-{version}.data/scripts/{name}")
            entry.external_attr = 0o100755 << 16
            wheel.writestr(entry, script)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path.rpartition("/")[2]

def build_editable(folder, config_settings=None, metadata_directory=None):
    return write_wheel(folder, "lab-utils", "0.1.0")
"""
UV = Path(sys.executable).with_name("uv")

pytestmark = pytest.mark.system


class Checkout:
    """A checkout of the set-up's own files with a lock of toys, in a folder with a space in its name."""

    def __init__(self, root, top):
        self.folder, self.wheels, self.programs = top / "the labs", top / "wheels", top / "programs"
        for folder in (self.folder / "course", self.wheels, self.programs):
            folder.mkdir(parents=True)
        for name in ("Makefile", "setup_venv.py", "course/jupyterlab.json"):
            shutil.copy(root / name, self.folder / name)
        (self.folder / "backend.py").write_text(BACKEND)
        self.write_wheel = runpy.run_path(str(self.folder / "backend.py"))["write_wheel"]
        (self.folder / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "lab-utils"\nversion = "0.1.0"\n'
        )
        (self.programs / "uv").symlink_to(UV)
        self.lock("toy==1.0")

    def offer(self, pin, script=""):
        """Puts a toy of a version where uv and pip find it; returns its SHA-256."""
        name, _, version = pin.partition("==")
        wheel = self.wheels / self.write_wheel(self.wheels, name, version, script)
        return hashlib.sha256(wheel.read_bytes()).hexdigest()

    def lock(self, *pins, **hashes):
        """Locks toys; with a hash of the test's own by the first three letters, or with the right one."""
        lines = [f"{pin} \\\n    --hash=sha256:{hashes.get(pin[:3]) or self.offer(pin)}\n" for pin in pins]
        (self.folder / "requirements.lock").write_text("".join(lines))
        ready = self.folder / ".venv" / "ready"
        if ready.exists():  # at once, and yet newer
            os.utime(ready, (later := ready.stat().st_mtime - 10, later))

    def setup(self, **more):
        """Runs `make setup` without a network; returns its status, and what it said."""
        unwanted = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        environment = {name: text for name, text in os.environ.items() if name not in unwanted}
        path = [self.programs, *(Path(part) for part in os.environ["PATH"].split(os.pathsep))]
        environment |= {"PATH": os.pathsep.join(str(part) for part in path if part != UV.parent)}
        environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": os.devnull}
        environment |= {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(self.wheels), "UV_OFFLINE": "1"}
        environment |= {"UV_CACHE_DIR": str(self.folder.parent / "cache"), "UV_PYTHON": ""} | more
        command = ["make", "setup"]
        run = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)
        return run.returncode, run.stdout + run.stderr

    @property
    def packages(self):
        (found,) = (self.folder / ".venv" / "lib").glob("python*/site-packages")
        return found

    @property
    def installed(self):
        return {path.name.removesuffix(".dist-info") for path in self.packages.glob("*.dist-info")} - {
            "lab_utils-0.1.0"
        }


@pytest.fixture
def checkout(root, tmp_path):
    return Checkout(root, tmp_path)


def toys(found):
    return {name for name in found if not name.startswith(("pip-", "setuptools-"))}


@pytest.mark.drill
def test_set_up_once_repeat_in_no_time_and_mend_what_was_cut_off_or_broken_or_moved(checkout):
    code, out = checkout.setup()
    assert code == 0, out
    assert toys(checkout.installed) == {"toy-1.0"} and (checkout.packages / "pip").exists()
    assert (checkout.folder / ".venv/share/jupyter/lab/settings/overrides.json").exists()
    assert "Nothing to be done" in checkout.setup()[1]

    (checkout.packages / "half").touch()  # what a killed set-up may leave
    (checkout.folder / ".venv" / "ready").unlink()
    code, out = checkout.setup()
    assert code == 0, out
    assert not (checkout.packages / "half").exists()

    python = checkout.folder / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python")  # the Python that it was made with is gone
    code, out = checkout.setup()
    assert code == 0, out
    assert "Nothing to be done" in checkout.setup()[1]

    checkout.folder = checkout.folder.rename(checkout.folder.parent / "elsewhere")
    code, out = checkout.setup()
    assert code == 0, out
    assert (checkout.folder / ".venv" / "ready").read_text() == f"{checkout.folder}\n"


@pytest.mark.drill
def test_an_update_without_a_network_leaves_the_environment_as_it_was(checkout):
    assert checkout.setup()[0] == 0
    (checkout.packages / "toy.py").write_text("kept = True")
    checkout.lock("toy==1.0", "not-there==1.0", **{"not": "0" * 64})
    for _ in range(2):
        code, _ = checkout.setup()
        assert code != 0
        assert (checkout.packages / "toy.py").read_text() == "kept = True"
    checkout.lock("toy==1.0")
    assert checkout.setup()[0] == 0
    assert (checkout.packages / "toy.py").read_text() == "kept = True"


def test_an_update_installs_what_is_new_and_removes_what_is_not_locked(checkout):
    assert checkout.setup()[0] == 0
    checkout.lock("toy==1.1", "other==2.0")
    code, out = checkout.setup()
    assert code == 0, out
    assert toys(checkout.installed) == {"toy-1.1", "other-2.0"}
    checkout.lock("other==2.0")
    assert checkout.setup()[0] == 0
    assert toys(checkout.installed) == {"other-2.0"}


def test_a_file_with_another_hash_is_refused(checkout):
    checkout.lock("toy==1.0", toy="0" * 64)
    code, out = checkout.setup()
    assert code != 0 and "Hash mismatch" in out
    assert toys(checkout.installed) == set()


@pytest.mark.parametrize("digest", ["", "0" * 64], ids=["right", "another"])
def test_without_a_uv_the_locked_one_is_taken_by_its_hash(checkout, digest):
    (checkout.programs / "uv").unlink()
    right = checkout.offer("uv==9.9", script=f'#!/bin/sh\necho "The locked uv, $2"\nexec {UV} "$@"\n')
    checkout.lock("toy==1.0", "uv==9.9", **{"uv=": digest or right})
    code, out = checkout.setup()
    if digest:
        assert code != 0 and "DO NOT MATCH THE HASHES" in out and "The locked uv" not in out
    else:
        assert code == 0 and "The locked uv, sync" in out, out
        assert toys(checkout.installed) == {"toy-1.0", "uv-9.9"}


def test_builds_without_cuda_come_from_their_own_index_in_the_locked_versions(checkout):
    for pin in ("torch==1.0", "torchvision==1.0"):
        checkout.offer(f"{pin}+cpu")
    names = {"tor": "0" * 64, "nvi": "1" * 64}
    checkout.lock("toy==1.0", "nvidia-cublas==1.0", "torch==1.0", "torchvision==1.0", **names)
    (checkout.programs / "uv").unlink()
    (checkout.programs / "uv").write_text(f'#!/bin/sh\necho "uv $*"\nexec {UV} "$@"\n')
    (checkout.programs / "uv").chmod(0o755)
    code, out = checkout.setup(TORCH="cpu")
    assert code == 0, out
    assert toys(checkout.installed) == {"toy-1.0", "torch-1.0+cpu", "torchvision-1.0+cpu"}
    assert re.search(r"^uv pip install .*--torch-backend cpu torch==1\.0 torchvision==1\.0$", out, re.MULTILINE), out


def test_an_update_that_is_interrupted_leaves_all_as_it_was(checkout):
    assert checkout.setup()[0] == 0
    (checkout.packages / "toy.py").write_text("kept = True")
    pid = checkout.folder.parent / "pid"
    (checkout.programs / "uv").unlink()
    wait = f'[ $1 = --version ] && echo uv 0.13.9 || {{ echo $$ > "{pid}"; exec sleep 60; }}'
    (checkout.programs / "uv").write_text(f"#!/bin/sh\n{wait}\n")
    (checkout.programs / "uv").chmod(0o755)
    command, pipes = [sys.executable, "setup_venv.py"], {"stderr": subprocess.PIPE, "text": True}
    path = f"{checkout.programs}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(command, cwd=checkout.folder, env=os.environ | {"PATH": path}, **pipes) as process:
        while not (pid.exists() and pid.read_text().strip()):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "interrupted\nTo try again: make setup" in out, out
    with contextlib.suppress(psutil.NoSuchProcess):  # nobody's child any more: its last state may stay for a while
        assert psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE
    assert (checkout.packages / "toy.py").read_text() == "kept = True"
    assert (checkout.folder / ".venv" / "ready").read_text() == f"{checkout.folder}\n"


def test_somebody_elses_environment_is_not_touched(checkout):
    (checkout.folder / ".venv").mkdir()
    (checkout.folder / ".venv" / "theirs").touch()
    code, out = checkout.setup()
    assert code != 0
    assert "was not made by these labs" in out
    assert (checkout.folder / ".venv" / "theirs").exists()
