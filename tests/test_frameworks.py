"""Frameworks in environments of their own: built once, repaired, refused in words; on toy wheels, without a network."""

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
from harness import engines
from packaging.utils import canonicalize_name
from test_pins import read_lock

from course import frameworks
from lab_common import LabError

# What a checkout has to have before a framework's environment can be built in it.
FILES = ("Makefile", "setup_venv.py", "setup_engine.py", "lab_common/__init__.py", "course/__init__.py")
FILES += ("course/frameworks.py",)


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
    """A checkout with a lock of one toy, whose .venv has this pip, and a package that only a .pth file leads to."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self.wheels = folder, folder.parent / "wheels"
        self.wheels.mkdir(parents=True)
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
        for name in ("requirements.lock", "pyproject.toml", "course/jupyterlab.json"):
            (folder / name).touch()
        self.lock = folder / "engines" / "lightning.lock"
        self.lock.parent.mkdir()
        self.lock.write_text(write_wheel(self.wheels, "toy", "1.0"))
        self.make_venv()

    def make_venv(self) -> None:
        """Makes .venv, as a set-up does that is just over."""
        venv = self.folder / ".venv"
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (seen,) = venv.glob("lib/python*/site-packages")
        (self.folder / "editable").mkdir(exist_ok=True)
        (self.folder / "editable" / "only_by_pth.py").touch()
        (seen / "editable.pth").write_text(f"{self.folder / 'editable'}\n", encoding="utf-8")
        (seen / "pip").symlink_to(Path(sysconfig.get_path("purelib")) / "pip")
        (venv / "ready").write_text(f"{self.folder}\n")

    def run(self, *words: str) -> tuple[int, str]:
        """Runs a command without a network and without the settings of a make around us."""
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": os.devnull}
        run = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)
        return run.returncode, run.stdout + run.stderr

    def build(self, *names: str) -> tuple[int, str]:
        return self.run(".venv/bin/python", "setup_engine.py", *(names or ("lightning",)))

    def ask(self, code: str, *, engine: bool = True) -> str:
        """What a Python of the checkout prints: the environment's own, or that of .venv."""
        python = ".engines/lightning/bin/python" if engine else ".venv/bin/python"
        return self.run(python, "-c", code)[1].strip()

    def find_python(self, folder: Path | None = None) -> str:
        """What find_python returns, or says, in a notebook that lies in another folder."""
        code = (
            "from course.frameworks import find_python\nfrom lab_common import LabError\n"
            "try:\n    print(find_python('lightning'))\nexcept LabError as error:\n    print(error)"
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
        return self.folder / ".engines" / "lightning"

    @property
    def python(self) -> Path:
        return self.engine / "bin" / "python"


@pytest.fixture
def checkout(root, tmp_path):
    """In a folder whose name no shell and no encoding takes lightly."""
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
    first, second, *_ = out.splitlines()
    assert first == "Lightning's environment is not here."
    assert second == "Building it in .engines/lightning (about 60 MB and half a minute) ..."
    assert out.splitlines()[-1] == "Lightning's environment is ready: .engines/lightning"
    # It has the toy, and sees what .venv has, also by a .pth file; .venv does not have the toy.
    assert checkout.ask("import toy, only_by_pth, pip, sys; print(sys.prefix)") == str(checkout.engine)
    assert "No module named 'toy'" in checkout.ask("import toy", engine=False)
    before = {path: path.lstat().st_mtime_ns for path in checkout.engine.rglob("*") if "__pycache__" not in path.parts}
    shutil.rmtree(checkout.wheels)
    assert checkout.build() == (0, "Lightning's environment is ready: .engines/lightning\n")
    after = {path: path.lstat().st_mtime_ns for path in checkout.engine.rglob("*") if "__pycache__" not in path.parts}
    assert after == before
    assert checkout.find_python() == str(checkout.python)


def cut_off(made):
    (made.engine / "ready").unlink()


def spoil_stamp(made):
    (made.engine / "ready").write_text("[1]")


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
    spoil_stamp: "is incomplete",
    change_lock: "has other versions than its lock",
    move: "was built for another folder",
    take_another_python: "was built for another Python",
    lose_python: "has lost its Python",
}


@pytest.mark.parametrize("harm", CASES, ids=lambda harm: harm.__name__)
def test_what_is_cut_off_moved_or_out_of_date_is_refused_and_built_anew(built, harm):
    harm(built)
    assert built.find_python().splitlines()[0] == f"Lightning's environment {CASES[harm]}."
    code, out = built.build()
    assert code == 0, out
    assert out.startswith(f"Lightning's environment {CASES[harm]}.\nBuilding it in")
    assert not (built.engine / "first").exists()
    assert built.find_python() == str(built.python)
    wanted = "2.0" if harm is change_lock else "1.0"
    seen = "import sys, only_by_pth; from importlib.metadata import version; print(sys.prefix, version('toy'))"
    assert built.ask(seen) == f"{built.engine} {wanted}"


def test_a_build_that_is_killed_half_way_is_repaired(checkout):
    """Killed by its own pip, at the moment when that begins."""
    (pip,) = checkout.folder.glob(".venv/lib/python*/site-packages/pip")
    real = pip.readlink()
    pip.unlink()
    pip.mkdir()
    (pip / "__main__.py").write_text("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n")
    assert checkout.build()[0] < 0
    assert checkout.python.exists() and checkout.find_python().startswith("Lightning's environment is incomplete.")
    shutil.rmtree(pip)
    pip.symlink_to(real)
    assert checkout.build()[0] == 0
    assert checkout.find_python() == str(checkout.python)


@pytest.mark.parametrize("reason", ["nothing to download", "another file of the same name", "interrupted"])
def test_a_failed_build_says_so_and_leaves_nothing(built, reason):
    other = write_wheel(built.wheels, "toy", "2.0")
    built.lock.write_text(other)
    why = "the packages could not be installed (pip says why above)"
    if reason == "nothing to download":
        shutil.rmtree(built.wheels)
    elif reason == "interrupted":
        (pip,) = built.folder.glob(".venv/lib/python*/site-packages/pip")
        pip.unlink()
        pip.mkdir()
        # The interrupt reaches both, as that of a terminal does.
        code = "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\nos.kill(os.getpid(), signal.SIGINT)\n"
        (pip / "__main__.py").write_text(code)
        why = "the build was interrupted"
    else:
        with zipfile.ZipFile(built.wheels / "toy-2.0-py3-none-any.whl", "a") as wheel:
            wheel.writestr("evil.py", "")
    code, out = built.build()
    assert code == 1
    last = f"Lightning's environment was not built: {why}.\nRun make engines ENGINE=lightning to try again.\n"
    assert out.endswith(last), out
    assert ("DO NOT MATCH THE HASHES" in out) == (reason == "another file of the same name")
    assert not built.engine.exists()
    assert built.find_python().startswith("Lightning's environment is not here.")


def test_only_what_the_lock_names_is_installed(checkout):
    """What a package needs beside it has to stand in the lock, with its hash."""
    write_wheel(checkout.wheels, "needed", "1.0")
    checkout.lock.write_text(write_wheel(checkout.wheels, "toy", "1.0", "needed"))
    assert checkout.build()[0] == 0
    assert "No module named 'needed'" in checkout.ask("import toy, needed")
    checkout.lock.write_text("toy==1.0\n")
    code, out = checkout.build()
    assert code == 1 and "Hashes are required" in out and not checkout.engine.exists()


def test_a_module_that_a_framework_hides_is_not_found(checkout):
    table = checkout.folder / "course" / "frameworks.py"
    table.write_text(table.read_text().replace('size="60 MB"', 'size="60 MB", hides=("only_by_pth",)'))
    assert checkout.build()[0] == 0
    assert "ModuleNotFoundError: import of only_by_pth" in checkout.ask("import toy, only_by_pth")
    assert checkout.ask("import only_by_pth; print('found')", engine=False) == "found"


def test_somebody_elses_folder_is_not_touched(checkout):
    checkout.engine.mkdir(parents=True)
    (checkout.engine / "theirs").touch()
    code, out = checkout.build()
    assert code == 1 and "was not made by these labs. Move it away" in out
    assert (checkout.engine / "theirs").exists()


@pytest.mark.parametrize("names", [[], ["spark"], ["lightning", "spark"]])
def test_make_says_which_frameworks_there_are(checkout, names):
    code, out = checkout.run("make", "engines", *([f"ENGINE={' '.join(names)}"] if names else []))
    assert code != 0
    assert "ENGINE has to be one of these: lightning, ray. For example: make engines ENGINE=lightning\n" in out
    assert "Traceback" not in out and not (checkout.folder / ".engines").exists()


def test_make_builds_it(checkout):
    code, out = checkout.run("make", "engines", "ENGINE=lightning")
    assert code == 0, out
    assert checkout.find_python() == str(checkout.python)


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


def test_a_notebook_in_a_workspace_beside_the_checkout_finds_it(built, tmp_path):
    workspace = tmp_path / "elsewhere" / "workspace"
    workspace.mkdir(parents=True)
    assert built.find_python(workspace) == str(built.python)
    assert list(workspace.iterdir()) == []


def test_another_name_is_refused():
    with pytest.raises(LabError) as caught:
        frameworks.find_python("spark")
    assert caught.value.what == "No framework is called 'spark'."
    assert caught.value.fix == "use one of these names: lightning, ray"


@pytest.mark.parametrize(
    ("setting", "outcome", "words"),
    [
        ("", pytest.skip.Exception, "NOT TESTED HERE: {}"),
        ("ray,lightnings", pytest.skip.Exception, "NOT TESTED HERE: {}"),
        ("ray,lightning", pytest.fail.Exception, "LAB_REQUIRE_ENGINES names lightning, but {}"),
    ],
)
def test_a_test_that_needs_one_is_skipped_in_words_or_fails(monkeypatch, tmp_path, setting, outcome, words):
    monkeypatch.setenv("LAB_REQUIRE_ENGINES", setting)
    monkeypatch.setattr(frameworks, "checkout", lambda: tmp_path)
    with pytest.raises(outcome) as caught:
        engines.find_engine("lightning")
    said = "Lightning's environment is not here: make engines ENGINE=lightning"
    assert caught.value.msg == words.format(said)


def test_every_framework_has_a_lock_and_a_fixture_of_the_system_tests(root, request):
    files = {path.name for path in (root / "engines").iterdir()}
    assert files == {f"{name}{ending}" for name in frameworks.FRAMEWORKS for ending in (".in", ".lock")}
    settings, fixtures = (
        request.config.pluginmanager.get_plugin(str(root / name)) for name in ("conftest.py", "tests/conftest.py")
    )
    assert frameworks.FRAMEWORKS.keys() <= settings.SYSTEM & vars(fixtures).keys()


def test_a_lock_is_exact_and_has_nothing_that_the_labs_have(root):
    """A second torch, say, would take 3 GB."""
    labs = {canonicalize_name(found.name) for found, _ in read_lock((root / "requirements.lock").read_text())}
    for name in frameworks.FRAMEWORKS:  # as a parameter the name would be taken for that of the fixture
        text = frameworks.find_lock(name).read_text()
        lock = read_lock(text)
        assert "://" not in text and name in {canonicalize_name(found.name) for found, _ in lock}
        assert not labs & {canonicalize_name(found.name) for found, _ in lock}
        for requirement, hashes in lock:
            assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), f"{requirement} is not exact"
            assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), requirement


IMPORTS = {"lightning": "accelerate, jsonargparse, lightning.pytorch.cli", "ray": "ray.train.torch"}


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
    check = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    assert check.returncode == 0, check.stdout


def test_the_labs_that_need_a_framework_are_known(root):
    """The cells and pages of those that need one for all cells are skipped without it."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (root / "notebooks").glob("*.ipynb")}
    found = {stem: re.findall(r'find_python\(\\"(\w+)\\"\)', text) for stem, text in texts.items()}
    assert {stem: names[0] for stem, names in found.items() if names} == engines.NEEDED | engines.USED
