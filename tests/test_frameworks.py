"""Frameworks in their own environments: built once, repaired, clearly refused; on toy wheels, without a network."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from harness import engines
from packaging.utils import canonicalize_name
from test_pins import read_lock

from course import frameworks

# What a checkout has to have before a framework's environment can be built in it.
FILES = ("Makefile", "setup_venv.py", "setup_engine.py", "lab_common/__init__.py", "lab_common/text.py")
FILES += ("course/__init__.py", "course/frameworks.py", "engines/compiled.py", "engines/frameworks.json")
NAMES = "lightning, ray, horovod, tensorflow, jax, sphinx"


# What the toy that has to be compiled does in the place of a compilation: it keeps what it was given, and calls the
# compiler once, as CMake would for C++14.
BACKEND = """
import os, pathlib, subprocess, sys, tempfile, zipfile

METADATA = "Metadata-Version: 2.1\\nName: horovod\\nVersion: 1.0\\n"

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder) / "horovod-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    return info.name

def build_wheel(folder, config_settings=None, metadata_directory=None):
    print("Building the toy", flush=True)
    subprocess.run([os.environ["CXX"], "-O2", "-g", "-std=gnu++14", "a b.cc"], check=True)
    torch = "import torch; print(torch.version.cuda)"
    site = pathlib.Path(os.environ["VENV"]).glob("lib/python*/site-packages/torch-*.dist-info")
    seen = {
        "tool": subprocess.run(["toytool"], capture_output=True, text=True, check=True).stdout.strip(),
        "options": sorted(f"{n}={text}" for n, text in os.environ.items() if n.startswith(("HOROVOD_", "CXXFLAGS"))),
        "cuda": subprocess.run([sys.executable, "-c", torch], capture_output=True, text=True).stdout.strip(),
        "temporary": tempfile.gettempdir(),
        "torch": [path.name for path in site],
    }
    info = "horovod-1.0.dist-info"
    with zipfile.ZipFile(pathlib.Path(folder) / "horovod-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("horovod.py", f"SEEN = {seen!r}")
        wheel.writestr(f"{info}/METADATA", METADATA)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return "horovod-1.0-py3-none-any.whl"
"""
COMPILED = ["-O2", "-std=c++20", "a b.cc"]
# The compiler: notes its last call, then does what the test wants.
GPP = """#!/bin/sh
for word do echo "$word"; done > "{place}/compiler.log"
{then}
"""
# What `python -m ipykernel install` writes, without what needs packages.
KERNEL = """import json, pathlib, sys
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
folder = pathlib.Path(words["--prefix"], "share", "jupyter", "kernels", words["--name"])
folder.mkdir(parents=True)
(folder / "kernel.json").write_text(json.dumps({"argv": [sys.executable], "display_name": words["--display-name"]}))
"""


def write_wheel(folder: Path, name: str, version: str, *needs: str, script: str = "") -> str:
    """Writes a package of one empty module, and a script if asked; returns its line in a lock."""
    needed = "".join(f"Requires-Dist: {need}\n" for need in needs)
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        if script:
            entry = zipfile.ZipInfo(f"{name}-{version}.data/scripts/{name}")
            entry.external_attr = 0o100755 << 16
            wheel.writestr(entry, script)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def write_sources(folder: Path) -> str:
    """Writes a package that has to be compiled; returns its line in a lock."""
    path, top = folder / "horovod-1.0.tar.gz", folder / "horovod-1.0"
    top.mkdir(exist_ok=True)
    (top / "backend.py").write_text(BACKEND, encoding="utf-8")
    settings = '[build-system]\nrequires = ["absent"]\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (top / "pyproject.toml").write_text(settings, encoding="utf-8")
    (top / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 1.0\n", encoding="utf-8")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(top, top.name)
    shutil.rmtree(top)
    return f"horovod==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


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

    def put_uv(self, does: str) -> Path:
        """Puts a uv that runs other shell code before the real one."""
        (self.bin / "uv").write_text(f"#!/bin/sh\n{does}\n")
        (self.bin / "uv").chmod(0o755)
        return self.bin / "uv"

    def link(self, name: str) -> None:
        """Links a program into the folder that is first on PATH."""
        (self.bin / name).symlink_to(shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/bin"))

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


class CompilingCheckout(Checkout):
    """A checkout with a lock of sources, whose .venv has a torch, and with a stand-in for g++ on PATH."""

    name = "horovod"

    def __init__(self, root: Path, folder: Path) -> None:
        super().__init__(root, folder)
        self.lock.write_text(write_sources(self.wheels))
        self.tools = self.lock.with_name("horovod.build.lock")
        self.tools.write_text(write_wheel(self.wheels, "toytool", "1.0", script="#!/bin/sh\necho $0\n"))
        self.temporary = folder.parent / "temporary"
        self.temporary.mkdir()
        self.settings: dict[str, str] = {}  # of a build, besides
        self.set_compiler()

    def make_venv(self, torch: str = "2.14.1") -> None:
        """Makes .venv, with a torch that has CUDA."""
        super().make_venv()
        (seen,) = self.folder.glob(".venv/lib/python*/site-packages")
        (seen / f"torch-{torch}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
        (seen / f"torch-{torch}.dist-info" / "METADATA").write_text(metadata)
        (seen / "torch.py").write_text("class version:\n    cuda = '13.0'\n")

    def set_compiler(self, then: str = "", name: str = "g++") -> None:
        """Sets the shell code that the compiler runs."""
        (self.bin / name).write_text(GPP.format(place=self.folder.parent, then=then), encoding="utf-8")
        (self.bin / name).chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        environment = super().environment
        for name in ("CXX", "LC_ALL"):
            environment.pop(name, None)
        environment["VENV"] = str(self.folder / ".venv")
        environment["TMPDIR"] = str(self.temporary)
        return environment | self.settings

    @property
    def compiled(self) -> list[str]:
        """The words of the compiler's last call."""
        log = self.folder.parent / "compiler.log"
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []

    @property
    def leaves_nothing(self) -> bool:
        """True if neither an environment nor temporary files of its compilation are left."""
        return not self.engine.exists() and not list(self.temporary.iterdir())


@pytest.fixture
def checkout(root, tmp_path):
    """A checkout in a folder whose name is hard on shells and encodings."""
    return Checkout(root, tmp_path / "Zoë's labs")


@pytest.fixture
def compiling(root, tmp_path):
    return CompilingCheckout(root, tmp_path / "Zoë's labs")


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


def lose_python(made):
    made.python.unlink()
    made.python.symlink_to("/nowhere/python")


CASES = {
    cut_off: "is incomplete",
    change_lock: "has other versions than its lock",
    take_another_python: "",
    lose_python: "has lost its Python",
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


def test_one_that_is_compiled_is_built_once_for_the_torch_of_the_labs(compiling):
    code, out = compiling.build()
    assert code == 0, out
    lines = out.splitlines()
    assert lines[0].startswith("Horovod has had no release since June 2023.")
    assert lines[1].startswith("Building Horovod's environment in")
    assert "Horovod's environment is ready: .engines/horovod" in lines
    # A standard that torch's headers take, and no debug information.
    assert compiling.compiled == COMPILED
    seen = json.loads(compiling.ask("import horovod, json; print(json.dumps(horovod.SEEN))"))
    place = Path(seen["temporary"])
    assert seen == {
        "tool": str(place / "bin" / "toytool"),
        "options": sorted(f"{name}={text}" for name, text in frameworks.read_table()["horovod"]["options"].items()),
        "cuda": "None",
        "temporary": str(place),
        "torch": ["torch-2.14.1.dist-info"],
    }
    # What it was built with is gone, and torch says again what it has.
    assert compiling.ask("import torch; print(torch.version.cuda)") == "13.0"
    assert "No module named 'toytool'" in compiling.ask("import toytool")
    assert place.parent == compiling.temporary and not list(compiling.temporary.iterdir())
    shutil.rmtree(compiling.wheels)
    shutil.rmtree(compiling.bin)
    assert compiling.build() == (0, "Horovod's environment is ready: .engines/horovod\n")


def test_another_torch_asks_for_another_compilation(compiling):
    """Even if uv has the compiled package in its cache."""
    assert compiling.build()[0] == 0
    compiling.make_venv(torch="2.14.1+cpu")
    code, out = compiling.build()
    assert code == 0 and "Building Horovod's environment in" in out, out
    assert compiling.find_python() == str(compiling.python)
    assert compiling.ask("import horovod; print(horovod.SEEN['torch'])") == "['torch-2.14.1+cpu.dist-info']"


def test_a_failed_compilation_shows_its_error_and_can_be_repeated(compiling):
    compiling.set_compiler(then='echo "a b.cc:7:1: error: no uint32_t"; exit 1')
    code, out = compiling.build()
    assert code == 1 and "a b.cc:7:1: error: no uint32_t" in out
    assert out.endswith("To try again: make engines ENGINE=horovod\n"), out
    assert compiling.leaves_nothing
    compiling.set_compiler()
    assert compiling.build()[0] == 0


def test_make_says_which_frameworks_there_are(checkout):
    for words in ([], ["ENGINE=lightning spark"]):
        code, out = checkout.run("make", "engines", *words)
        assert code != 0
        assert f"ENGINE must be one of {NAMES}. For example: make engines ENGINE=lightning\n" in out
        assert "Traceback" not in out and not (checkout.folder / ".engines").exists()


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


def test_every_framework_has_a_lock_and_a_fixture_of_the_system_tests(root, request):
    files = {path.name for path in (root / "engines").iterdir() if path.suffix in (".in", ".lock")}
    table = frameworks.read_table()
    names = {*table, *(f"{name}.build" for name, row in table.items() if "options" in row)}
    assert files == {f"{name}{ending}" for name in names for ending in (".in", ".lock")}
    settings, fixtures = (
        request.config.pluginmanager.get_plugin(str(root / name)) for name in ("conftest.py", "tests/conftest.py")
    )
    assert table.keys() <= settings.SYSTEM & vars(fixtures).keys()


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


def test_the_labs_that_need_a_framework_are_known(root):
    """The cells and pages of those that need one for all cells are skipped without it."""
    for path in (root / "notebooks").glob("*.ipynb"):
        text = path.read_text(encoding="utf-8")
        named = {name for name in frameworks.read_table() if f'\\"{name}\\"' in text}
        needed = engines.NEEDED.get(path.stem)
        assert named == {*engines.USED.get(path.stem, ()), *([needed] if needed else [])}, path.stem
