"""`make setup` on a toy lock: cut off, moved, broken, offline, in a folder with a space in its name."""

import hashlib
import os
import re
import runpy
import shutil
import subprocess

import pytest

import setup_venv

# A build backend of one function, so that nothing has to be fetched; the toy package is made with the same one.
BACKEND = """
import zipfile

def write_wheel(folder, name, version):
    info = f"{name}-{version}.dist-info"
    path = f"{folder}/{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path.rpartition("/")[2]

def build_editable(folder, config_settings=None, metadata_directory=None):
    return write_wheel(folder, "lab_utils", "0.1.0")
"""


@pytest.fixture
def checkout(root, tmp_path):
    """A checkout of the set-up's own files, with a toy lock, in a folder with a space in its name."""
    folder = tmp_path / "the labs"
    folder.mkdir()
    for name in ("Makefile", "setup_venv.py"):
        shutil.copy(root / name, folder)
    (folder / "backend.py").write_text(BACKEND)
    (tmp_path / "wheels").mkdir()
    write_wheel = runpy.run_path(str(folder / "backend.py"))["write_wheel"]
    toy = tmp_path / "wheels" / write_wheel(tmp_path / "wheels", "toy", "1.0")
    digest = hashlib.sha256(toy.read_bytes()).hexdigest()
    (folder / "requirements.lock").write_text(f"toy==1.0 --hash=sha256:{digest}\n")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "lab-utils"\nversion = "0.1.0"\n'
    )
    return folder


def make_setup(folder):
    """Runs `make setup` without a network."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder.parent / "wheels")}
    run = subprocess.run(["make", "setup"], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return run.returncode, run.stdout + run.stderr


def site_packages(folder):
    (found,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    return found


@pytest.mark.drill
def test_set_up_once_repeat_in_no_time_and_mend_what_was_cut_off_or_broken_or_moved(checkout):
    code, out = make_setup(checkout)
    assert code == 0, out
    assert (site_packages(checkout) / "toy.py").exists()
    assert "Nothing to be done" in make_setup(checkout)[1]

    (site_packages(checkout) / "half").touch()  # what a killed pip may leave
    (checkout / ".venv" / "ready").unlink()
    code, out = make_setup(checkout)
    assert code == 0, out
    assert not (site_packages(checkout) / "half").exists()

    python = checkout / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python")  # the Python that it was made with is gone
    code, out = make_setup(checkout)
    assert code == 0, out
    assert "Nothing to be done" in make_setup(checkout)[1]

    moved = checkout.rename(checkout.parent / "elsewhere")
    code, out = make_setup(moved)
    assert code == 0, out
    assert (moved / ".venv" / "ready").read_text() == f"{moved}\n"


@pytest.mark.drill
def test_an_update_without_a_network_leaves_the_environment_as_it_was(checkout):
    assert make_setup(checkout)[0] == 0
    (site_packages(checkout) / "kept").touch()
    lock = (checkout / "requirements.lock").read_text()
    (checkout / "requirements.lock").write_text(lock + f"not-there==1.0 --hash=sha256:{'0' * 64}\n")
    later = (checkout / ".venv" / "ready").stat().st_mtime + 10
    os.utime(checkout / "requirements.lock", (later, later))
    for _ in range(2):
        code, out = make_setup(checkout)
        assert code != 0
        assert ".venv is as it was" in out
        assert (site_packages(checkout) / "kept").exists()
    (checkout / "requirements.lock").write_text(lock)
    assert make_setup(checkout)[0] == 0
    assert (site_packages(checkout) / "kept").exists()


def test_somebody_elses_environment_is_not_touched(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "theirs").touch()
    code, out = make_setup(checkout)
    assert code != 0
    assert "was not made by these labs" in out
    assert (checkout / ".venv" / "theirs").exists()


def test_the_way_without_cuda_leaves_out_cuda_alone(root):
    text = (root / "requirements.lock").read_text()
    rest = setup_venv.without_cuda(text)
    names = [set(re.findall(r"^([a-z][\w.-]*)==", lock, flags=re.MULTILINE)) for lock in (text, rest)]
    gone = names[0] - names[1]
    assert {"torch", "torchvision", "triton"} <= gone
    assert all(name.startswith(("nvidia-", "cuda-")) for name in gone - {"torch", "torchvision", "triton"})
    assert {"numpy", "tensorboard", "torch"} - names[1] == {"torch"}
    assert rest.count("--hash") > 1000 and "sha256" in rest
