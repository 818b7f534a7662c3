"""The labs in a Python that somebody else set up: installed beside its torch, by a user who may not write there.

Such a Python is made without a network: an environment whose packages are those of the tests' own, seen through a .pth,
which leaves out the labs' own packages because they are editable. So pip finds all that it would have to download, and
what it does on a real service, over a network, is not tried here.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

import setup_anywhere
from course import workspace

PACKAGES = ("lab_common", "lab_utils", "nodelaunch", "course")
PROGRAMS = {"torchrun": "torch.distributed.run:main", "tensorboard": "tensorboard.main:run_main"}
# Somebody's Python may lie in root's home, which nobody else can enter; this capability reads, and writes nothing.
MAY_READ = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
OTHER_USER = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", *MAY_READ)
# Of each lab the cells that are run; [] is all. The last ones start ranks, and type torchrun.
SOME = ["imports", "card", "four-numbers", "ddp-script", "two-commands"]
BRIEF = {"00_start_here": [], "05_ddp_two_nodes": SOME}
ROOT = Path(__file__).resolve().parents[1]
LABS = (
    BRIEF if os.environ.get("LAB_BRIEF") == "1" else {path.stem: [] for path in ROOT.glob("notebooks/0[0-5]_*.ipynb")}
)


@dataclass(frozen=True)
class Hub:
    """A stand-in for a JupyterHub: a learner's home and a Python beside it, whose folder the learner cannot write."""

    python: Path
    home: Path
    user: tuple[str, ...]

    @property
    def copy(self) -> Path:
        return self.home / "training-labs" / "workspace"

    def run(self, *command: object, limit: int = 900) -> str:
        """Runs a learner's command in the home folder; returns its output if it succeeds."""
        settings = {"HOME": str(self.home), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        # pip reads the second one as: no isolation, so that setuptools is not downloaded.
        settings |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "OMP_NUM_THREADS": "1", "LAB_SCALE": "small"}
        settings["LAB_ROUNDS"] = "2"  # as conftest.py: a busy machine would measure until it is quiet
        done = subprocess.run(
            [*self.user, *map(str, command)], cwd=self.home, env=settings, capture_output=True, text=True, timeout=limit
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def run_notebook(self, path: Path, *options: object) -> str:
        return self.run(self.python, Path(__file__).with_name("harness") / "run_elsewhere.py", path, *options)


def make_hub(folder: Path) -> Hub:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    settings = folder / "env" / "pyvenv.cfg"
    # With it comes ~/.local, as on a hub whose Python is no virtual environment.
    settings.write_text(settings.read_text().replace("packages = false", "packages = true"))
    python = folder / "env" / "bin" / "python"
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "torch_is_here.pth").write_text(sysconfig.get_path("purelib"))
    for name, entry in PROGRAMS.items():
        module, _, function = entry.partition(":")
        program = python.with_name(name)
        program.write_text(f"#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        program.chmod(0o755)
    (folder / "home").mkdir()
    root = os.geteuid() == 0 and shutil.which("setpriv")
    if not root:
        subprocess.run(["chmod", "-R", "a-w", packages.parent], check=True)
    return Hub(python, folder / "home", OTHER_USER if root else ())


def list_files(folder: Path) -> set[str]:
    """The files of our packages below a folder, without what Python compiled."""
    found = (path for name in PACKAGES for path in (folder / name).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in found if path.suffix != ".pyc"}


def give(hub: Hub) -> None:
    """Makes all in the home the learner's own."""
    if hub.user:
        subprocess.run(["chown", "-R", "nobody:nogroup", hub.home], check=True)


@pytest.fixture(scope="module")
def hub(root):
    """The hub, after a learner has uploaded a release and run the cells of start_anywhere.ipynb."""
    # Not pytest's own folder, which no other user can enter.
    with tempfile.TemporaryDirectory(prefix="labs-anywhere-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        made = make_hub(folder)
        release = folder / "release-1"
        subprocess.run(
            ["make", "student", f"STUDENT={release}"], cwd=root, check=True, capture_output=True, timeout=600
        )
        with tarfile.open(made.home / "labs.tar.gz", "w:gz") as file:
            file.add(release, release.name)
        shutil.copy(release / "docs" / "start_anywhere.ipynb", made.home)
        give(made)
        said = made.run_notebook(made.home / "start_anywhere.ipynb", "--source", "labs.tar.gz")
        assert "as they were. The kernel for the labs is called Training Labs." in said
        assert "written" in said and "Processor" in said and "[fail]" not in said, said
        yield made
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)


def test_a_copy_asks_for_the_kernel_that_was_made_for_it(tmp_path):
    lab = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A lab", id="title")])
    lab.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    (tmp_path / "labs").mkdir()
    nbformat.write(lab, tmp_path / "labs" / "00_lab.ipynb")
    for folder, kernel, wanted in (("a", "", "python3"), ("b", setup_anywhere.KERNEL, "training-labs")):
        workspace.update(tmp_path / "labs", tmp_path / folder, kernel=kernel)
        assert nbformat.read(tmp_path / folder / "00_lab.ipynb", as_version=4).metadata.kernelspec.name == wanted


def test_a_torch_that_is_too_old_is_named_with_a_build_for_the_same_cuda():
    old = {"torch": "2.10.0+cu128", "torchvision": "0.25.0+cu128", "numpy": "2.0.2"}
    said = setup_anywhere.explain_old(old)
    assert said.startswith("torch 2.10.0+cu128 is too old: the labs need 2.11 or newer.\ntorchvision 0.25.0+cu128 is")
    assert "Nothing was changed." in said
    assert "--upgrade torch torchvision --index-url https://download.pytorch.org/whl/cu128\n" in said
    said = setup_anywhere.explain_old(old | {"torch": "2.11.0a0+git1", "torchvision": "0.26", "numpy": "1.26.4"})
    assert said.startswith("numpy 1.26.4 is too old") and "--upgrade numpy\n" in said and "whl" not in said
    assert setup_anywhere.explain_old(old | {"torch": "2.11.0+cu128", "torchvision": "0.26.0+cu128"}) == ""
    assert setup_anywhere.explain_old({}) == "", "what is not there is installed"


@pytest.mark.parametrize("fault", ["python", "torch", "forbidden", "pip"])
def test_what_cannot_be_is_told_in_words(monkeypatch, fault, capfd):
    commands = []
    monkeypatch.setattr(setup_anywhere.subprocess, "run", lambda command, **more: commands.append(command))
    if fault == "python":
        monkeypatch.setattr(sys, "version_info", (3, 14, 0))
        words = "The labs need Python 3.11 to 3.13"
    elif fault == "torch":
        monkeypatch.setattr(setup_anywhere, "find_installed", lambda: {"torch": "2.9.1"})
        words = "torch 2.9.1 is too old"
    elif fault == "forbidden":
        monkeypatch.setattr(setup_anywhere.site, "ENABLE_USER_SITE", False)
        monkeypatch.setattr(setup_anywhere.os, "access", lambda *_: False)
        words = "You may not install packages"
    else:
        failed = subprocess.CalledProcessError(1, "pip")
        monkeypatch.setattr(setup_anywhere, "install", lambda kept: (_ for _ in ()).throw(failed))
        words = "The labs could not be installed"
    with pytest.raises(SystemExit, match=words):
        setup_anywhere.main()
    assert commands == []


@pytest.mark.system
def test_all_is_installed_for_the_user_alone_and_the_python_is_as_it_was(hub):
    (packages,) = (hub.home / ".local" / "lib").glob("python*/site-packages")
    assert {path.name for path in packages.iterdir()} == {*PACKAGES, "lab_utils-0.1.0.dist-info"}
    installed, released = list_files(packages), list_files(hub.copy.parent)
    assert installed == released and "course/race/thresholds.json" in installed
    (beside,) = (hub.python.parents[1] / "lib").glob("python*/site-packages")
    assert [path.name for path in beside.iterdir()] == ["torch_is_here.pth"]
    # Found by what is installed, from a copy whose folder it is not in.
    code = "import lab_common, lab_utils; print(lab_common.checkout(), lab_utils.__file__, lab_utils.choose_repair())"
    out = hub.run("sh", "-c", f'cd {hub.copy} && {hub.python} -c "{code}"').split()
    assert out == [
        str(hub.copy.parent),
        str(packages / "lab_utils/__init__.py"),
        str(hub.python),
        str(hub.copy.parent / "setup_anywhere.py"),
    ]


@pytest.mark.system
def test_a_second_run_goes_on_and_keeps_what_the_learner_wrote(hub):
    path = hub.copy / "00_start_here.ipynb"
    lab = nbformat.read(path, as_version=4)
    lab.cells[0].source += "\nmine"
    nbformat.write(lab, path)
    give(hub)
    said = hub.run_notebook(hub.home / "start_anywhere.ipynb", "--source", "a-file-that-is-gone.tar.gz")
    assert "The labs are here already." in said and "1 changed by you and kept" in said
    assert nbformat.read(path, as_version=4).cells[0].source.endswith("mine")


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(LABS))
def test_a_lab_runs_there_without_write_access_to_the_packages(hub, root, name):
    (packages,) = (hub.home / ".local" / "lib").glob("python*/site-packages")
    subprocess.run(["chmod", "-R", "a-w", packages], check=True)
    # With its solutions in it, as somebody who has solved it.
    path = hub.copy / "solved" / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    shutil.copy(root / "notebooks" / path.name, path)
    shutil.copytree(root / "notebooks" / "scripts", path.parent / "scripts", dirs_exist_ok=True)
    give(hub)
    cells = ["--cells", *LABS[name]] if LABS[name] else []
    said = hub.run_notebook(path, "--kernel", setup_anywhere.KERNEL, *cells)
    assert "✔ " in said
    assert (hub.copy.parent / "runs").is_dir() and (hub.copy.parent / "data" / "packed").is_dir()
