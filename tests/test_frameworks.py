"""Frameworks in their own environments: built once, repaired, clearly refused; on toy wheels, without a network."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from test_pins import read_lock

from course import frameworks

# What a checkout has to have before a framework's environment can be built in it.
FILES = ("Makefile", "setup_venv.py", "setup_engine.py", "lab_common/__init__.py", "lab_common/text.py")
FILES += ("course/__init__.py", "course/frameworks.py", "engines/compiled.py", "engines/frameworks.json")


# What `python -m ipykernel install` writes, without what needs packages.
KERNEL = """import json, pathlib, sys
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
folder = pathlib.Path(words["--prefix"], "share", "jupyter", "kernels", words["--name"])
folder.mkdir(parents=True)
(folder / "kernel.json").write_text(json.dumps({"argv": [sys.executable], "display_name": words["--display-name"]}))
"""


def write_wheel(folder: Path, name: str, version: str, *needs: str) -> str:
    """Writes a package of one empty module; returns its line in a lock."""
    needed = "".join(f"Requires-Dist: {need}\n" for need in needs)
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


class Checkout:
    """A checkout with a lock of one toy, whose .venv has an ipykernel, and a package that only a .pth file leads to."""

    name = "lightning"

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self.wheels = folder, folder.parent / "wheels"
        self.bin = folder.parent / "bin"
        for new in (self.wheels, self.bin):
            new.mkdir(parents=True)
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
        for name in ("requirements.lock", "pyproject.toml", "course/jupyterlab.json"):
            (folder / name).touch()
        self.lock = folder / "engines" / f"{self.name}.lock"
        self.lock.parent.mkdir(exist_ok=True)
        self.lock.write_text(write_wheel(self.wheels, "toy", "1.0"))
        self.make_venv()

    def make_venv(self) -> None:
        """Makes .venv, as after a finished set-up."""
        venv = self.folder / ".venv"
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (seen,) = venv.glob("lib/python*/site-packages")
        (self.folder / "editable").mkdir(exist_ok=True)
        (self.folder / "editable" / "only_by_pth.py").touch()
        (seen / "editable.pth").write_text(f"{self.folder / 'editable'}\n", encoding="utf-8")
        (seen / "ipykernel").mkdir()
        (seen / "ipykernel" / "__main__.py").write_text(KERNEL)
        (seen / "setuptools").symlink_to(Path(sysconfig.get_path("purelib")) / "setuptools")
        (venv / "ready").write_text(f"{self.folder}\n")

    @property
    def environment(self) -> dict[str, str]:
        """Returns an environment without a network and without the settings of an outer make."""
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        uv = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(self.wheels), "UV_OFFLINE": "1", "UV_NO_CONFIG": "1"}
        path = os.pathsep.join((str(self.bin), str(Path(sys.executable).parent), environment["PATH"]))
        return environment | uv | {"UV_CACHE_DIR": str(self.folder.parent / "cache"), "PATH": path}

    def put_uv(self, does: str) -> None:
        """Puts a uv that runs other shell code before the real one."""
        (self.bin / "uv").write_text(f"#!/bin/sh\n{does}\n")
        (self.bin / "uv").chmod(0o755)

    def run(self, *words: str) -> tuple[int, str]:
        """Runs a command; returns its status and all of its output."""
        run = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300)
        return run.returncode, run.stdout + run.stderr

    def build(self, *names: str) -> tuple[int, str]:
        return self.run(".venv/bin/python", "setup_engine.py", *(names or (self.name,)))

    def ask(self, code: str, *, engine: bool = True) -> str:
        """Returns the output of a Python of the checkout: the environment's own, or that of .venv."""
        python = str(self.python) if engine else ".venv/bin/python"
        return self.run(python, "-c", code)[1].strip()

    def find_python(self, folder: Path | None = None) -> str:
        """Returns the result or the error of find_python in a notebook in another folder."""
        code = (
            "from course.frameworks import find_python\nfrom lab_common import LabError\n"
            f"try:\n    print(find_python({self.name!r}))\nexcept LabError as error:\n    print(error)"
        )
        run = subprocess.run(
            [self.folder / ".venv" / "bin" / "python", "-c", code],
            cwd=folder or self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return (run.stdout + run.stderr).strip()

    @property
    def engine(self) -> Path:
        return self.folder / ".engines" / self.name

    @property
    def python(self) -> Path:
        return self.engine / "bin" / "python"


@pytest.fixture
def checkout(root, tmp_path):
    """A checkout in a folder whose name is hard on shells and encodings."""
    return Checkout(root, tmp_path / "Zoë's labs")


@pytest.fixture
def built(checkout):
    code, out = checkout.build()
    assert code == 0, out
    (checkout.engine / "first").touch()  # gone where it is made anew
    return checkout


def test_an_environment_is_built_once_on_top_of_the_labs_own(checkout):
    code, out = checkout.build()
    assert code == 0, out
    first = out.splitlines()[0]
    assert first == "Building Lightning's environment in .engines/lightning (about 60 MB and half a minute) ..."
    assert "Lightning's environment is ready: .engines/lightning\n" in out
    # It has the toy, and sees what .venv has, also by a .pth file; .venv does not have the toy.
    assert checkout.ask("import toy, only_by_pth, sys; print(sys.prefix)") == str(checkout.engine)
    spec = checkout.folder / ".venv/share/jupyter/kernels/labs-lightning/kernel.json"
    assert json.loads(spec.read_text()) == {"argv": [str(checkout.python)], "display_name": "Labs with Lightning"}
    assert "No module named 'toy'" in checkout.ask("import toy", engine=False)
    before = {path: path.lstat().st_mtime_ns for path in checkout.engine.rglob("*") if "__pycache__" not in path.parts}
    shutil.rmtree(checkout.wheels)
    assert checkout.build() == (0, "Lightning's environment is ready: .engines/lightning\n")
    after = {path: path.lstat().st_mtime_ns for path in checkout.engine.rglob("*") if "__pycache__" not in path.parts}
    assert after == before
    workspace = checkout.folder.parent / "workspace"  # a notebook in one beside the checkout finds it
    workspace.mkdir()
    assert checkout.find_python(workspace) == str(checkout.python)
    assert list(workspace.iterdir()) == []


def cut_off(made):
    (made.engine / "ready").unlink()


def change_lock(made):
    made.lock.write_text(write_wheel(made.wheels, "toy", "2.0"))


def move(made):
    made.folder = made.folder.rename(made.folder.parent / "moved")
    made.lock = made.folder / "engines" / "lightning.lock"
    made.make_venv()


def take_another_python(made):
    config = made.folder / ".venv" / "pyvenv.cfg"
    config.write_text(config.read_text() + "version_info = 3.99\n")


CASES = {
    cut_off: "is incomplete",
    change_lock: "has other versions than its lock",
    take_another_python: "",
    move: "was built for another folder",
}


def test_what_is_cut_off_moved_or_out_of_date_is_refused_and_built_anew(built):
    for harm, fault in CASES.items():
        harm(built)
        assert not fault or built.find_python().splitlines()[0] == f"Lightning's environment {fault}."
        code, out = built.build()
        assert code == 0, out
        assert out.startswith("Building Lightning's environment in")
        assert not (built.engine / "first").exists()
        (built.engine / "first").touch()
        assert built.find_python() == str(built.python)
    seen = "import sys, only_by_pth; from importlib.metadata import version; print(sys.prefix, version('toy'))"
    assert built.ask(seen) == f"{built.engine} 2.0"


def test_an_interrupted_build_says_so_and_leaves_nothing(built):
    built.lock.write_text(write_wheel(built.wheels, "toy", "2.0"))
    built.put_uv("kill -2 $PPID; sleep 60")
    code, out = built.build()
    assert code == 1 and "Traceback" not in out
    assert "Lightning's environment is not ready: the build was interrupted\n" in out, out
    assert out.endswith("To try again: make engines ENGINE=lightning\n"), out
    assert not built.engine.exists()
    assert built.find_python().startswith("Lightning's environment is not here.")


def test_only_what_the_lock_names_is_installed(checkout):
    """A package's dependencies must be in the lock, with their hashes."""
    write_wheel(checkout.wheels, "needed", "1.0")
    checkout.lock.write_text(write_wheel(checkout.wheels, "toy", "1.0", "needed"))
    assert checkout.build()[0] == 0
    assert "No module named 'needed'" in checkout.ask("import toy, needed")
    checkout.lock.write_text("toy==1.0\n")
    code, out = checkout.build()
    assert code == 1 and "must have a hash" in out and not checkout.engine.exists()


def test_a_module_that_a_framework_hides_is_not_found(checkout):
    table = checkout.folder / "engines" / "frameworks.json"
    table.write_text(table.read_text().replace('"size": "60 MB"', '"size": "60 MB", "hides": ["only_by_pth"]'))
    assert checkout.build()[0] == 0
    assert "ModuleNotFoundError: import of only_by_pth" in checkout.ask("import toy, only_by_pth")
    assert checkout.ask("import only_by_pth; print('found')", engine=False) == "found"


def test_the_error_names_the_command_its_size_and_its_minutes(checkout, tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    assert checkout.find_python(workspace).splitlines() == [
        "Lightning's environment is not here.",
        f"  where: {checkout.engine}",
        "  likely: Lightning is not among the labs' own packages: its environment is built once, on demand",
        f"  fix: make engines ENGINE=lightning (in {checkout.folder}: 60 MB, half a minute)",
    ]
    (checkout.folder / "Makefile").unlink()  # a team's container has none
    assert checkout.find_python(workspace).splitlines()[-1] == "  fix: ask your instructor for an image with Lightning"


def test_a_lock_is_exact_and_has_nothing_that_the_labs_have(root):
    """A second torch, say, would take 3 GB."""
    labs = {canonicalize_name(found.name) for found, _ in read_lock((root / "requirements.lock").read_text())}
    for path in (root / "engines").glob("*.lock"):
        text, name = path.read_text(), path.name.split(".")[0]
        lock = read_lock(text)
        assert "://" not in text
        assert path.stem != name or name in {canonicalize_name(found.name) for found, _ in lock}
        assert not labs & {canonicalize_name(found.name) for found, _ in lock}
        for requirement, hashes in lock:
            assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), f"{requirement} is not exact"
            assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), requirement


IMPORTS = {
    "lightning": "accelerate, jsonargparse, lightning.pytorch.cli",
    "ray": "ray.train.torch",
    "horovod": "horovod.torch",
    "tensorflow": "tensorflow",
    "jax": "jax",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_an_environment_is_its_lock_on_the_torch_of_the_labs(request, name):
    python = request.getfixturevalue(name)
    code = (
        f"import json, torch, {IMPORTS[name]}\n"
        "from importlib.metadata import distributions\n"
        "print(json.dumps([torch.__file__, {found.name: found.version for found in distributions()}]))"
    )
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    torch, found = json.loads(run.stdout.splitlines()[-1])
    assert Path(torch) == Path(sysconfig.get_path("purelib")) / "torch" / "__init__.py"
    assert found["torch"] == version("torch")
    installed = {canonicalize_name(name): f"=={text}" for name, text in found.items()}
    for requirement, _ in read_lock(frameworks.find_lock(name).read_text()):
        if requirement.marker is None or requirement.marker.evaluate():
            assert installed[canonicalize_name(requirement.name)] == str(requirement.specifier)
    check = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, timeout=300)
    assert check.returncode == 0, check.stdout
