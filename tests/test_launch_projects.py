"""A project's folder as the unit of a job, and programs other than torchrun with the same lease, logs and diagnosis."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.drawn import assert_explains
from harness.jobs import Heard, assert_gone, copy_code, find_processes, hear, kill, run_badly, wait_for

from lab_common import LabError
from nodelaunch import DataFolder, TorchrunJob, local_nodes, ssh_nodes
from nodelaunch.failure import diagnose
from nodelaunch.node import target, worker
from nodelaunch.node.place import LAST
from nodelaunch.project import LARGEST, MOST, TOTAL, find_project

pytestmark = pytest.mark.usefixtures("runs")

# As other people write one: neighbours imported, files opened by relative paths, results left in the current folder.
PROJECT = {
    "examples/train.py": """
import json, os, pathlib, sys
import torch.distributed as dist
from helper import double          # beside the script
from net.model import WIDTH        # below the project's folder
import nodelaunch as launch
dist.init_process_group("gloo")
width = json.load(open("configs/small.json"))["width"]
runs = pathlib.Path("runs.txt")
runs.write_text(f"{runs.read_text() if runs.exists() else ''}{sys.argv[1]};")
launch.report([double(width), WIDTH, runs.read_text(), sys.argv[1:], sys.path[0] == os.path.dirname(__file__)])
dist.barrier()                     # or one rank may be gone while the other still connects
dist.destroy_process_group()
""",
    "examples/helper.py": "def double(x):\n    return 2 * x\n",
    "net/__init__.py": "",
    "net/model.py": "WIDTH = 7\n",
    "configs/small.json": '{"width": 21}',
}
# Without torch: what every rank is told, by the variables.
PLAIN = """
import json, os, signal, sys, time
import nodelaunch as launch
mode, faulty = sys.argv[1], os.environ["RANK"] == "1"
names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "COLOUR"]
launch.report([*(os.environ.get(name) for name in names), sys.argv[1:], "torch" in sys.modules])
print("connected")
print("to stderr", file=sys.stderr)
if mode == "raise" and faulty:
    print(f"fault at {time.time()}")
    raise ValueError("bad luck in batch 7")
if mode == "kill" and faulty:
    print(f"fault at {time.time()}")
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "exit" and faulty:
    print(f"fault at {time.time()}")
    sys.exit(3)
if mode == "stubborn" and faulty:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while mode != "ok":
    time.sleep(0.1)
"""


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "my project"
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)

    def make(*arguments, nodes=None, program=("python",), **options):
        return TorchrunJob(path, arguments, nodes=nodes or local_nodes(2), program=program, **options)

    return make


def test_a_project_runs_as_it_does_where_it_lies(project, monkeypatch):
    """`PYTHONPATH=. torchrun examples/train.py first`, moved into a cell; what it leaves stays for the next job."""
    monkeypatch.chdir(project)
    heard = Heard()
    for number, word in enumerate(("first", "second")):
        path = {"PYTHONPATH": "."}
        job = TorchrunJob("examples/train.py", [word], root=".", nodes=local_nodes(2), env=path)
        result = job.run(show=heard)
        for value in result.results:
            assert value == [42, 7, "first;second;"[: 6 if number == 0 else 13], [word], True]
    assert "project my project: 5 files, 0.0 MiB" in heard.lines
    assert not (project / "runs.txt").exists(), "the project itself is left alone"


@pytest.mark.usefixtures("warm_ranks")
def test_a_changed_project_is_what_runs_next(project):
    def run():
        job = TorchrunJob("examples/train.py", ["x"], root=project, nodes=local_nodes(1), env={"PYTHONPATH": "."})
        return job.run(show=False).results[0][1]

    assert run() == 7
    (project / "net/model.py").write_text("WIDTH = 8\n")
    assert run() == 8


def test_a_file_changed_within_the_same_second_is_not_taken_for_the_one_that_was_compiled(tmp_path):
    """As where a launch follows another within a second: Python compares a source's size and whole seconds only."""
    work, said = tmp_path / "work", []
    work.mkdir()
    for width in (7, 8):
        code = tmp_path / f"code{width}/project"
        code.mkdir(parents=True)
        (code / "model.py").write_text(f"WIDTH = {width}\n")
        subprocess.run([sys.executable, "-m", "nodelaunch.node.place", code.parent, work], check=True)
        os.utime(work / "model.py", (1_790_000_000, 1_790_000_000))
        command = [sys.executable, "-c", "import model; print(model.WIDTH)"]
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        said.append(subprocess.check_output(command, cwd=work, env=environment, text=True).strip())
    assert said == ["7", "8"]


def test_programs_of_a_project_can_be_run(project):
    """Also those that were made programs after a job had failed for it."""
    script = project / "run.py"
    script.write_text("import subprocess; subprocess.run(['tools/say.sh', 'hello'], check=True)")
    (project / "tools").mkdir()
    (project / "tools/say.sh").write_text("#!/bin/sh\necho $1\n")
    job = TorchrunJob(script, root=project, nodes=local_nodes(1), program=["python"])
    assert "Permission denied" in job.run(check=False, show=False).failure.what
    (project / "tools/say.sh").chmod(0o755)
    assert job.run(show=False).lines == ("[rank 0] hello",)


def test_what_an_earlier_job_left_in_the_way_of_a_file_is_named(project):
    script = project / "run.py"
    script.write_text("import pathlib; pathlib.Path('out').mkdir(); pathlib.Path('log').symlink_to('/dev/null')")
    job = TorchrunJob(script, root=project, nodes=local_nodes(1), program=["python"])
    job.run(show=False)
    script.write_text("print(open('log').read())")
    (project / "log").write_text("of the project")
    assert job.run(show=False).lines == ("[rank 0] of the project",)
    (project / "out").write_text("a file now")
    error = job.run(check=False, show=False).failure
    assert "out of the project cannot be copied" in error.what and "rm -r -- " in error.message, error


def test_a_file_of_a_project_is_whole_at_any_time(project, tmp_path):
    """Nodes that share a folder, and jobs of one project, copy into the same one, where others read already."""
    code, work = tmp_path / "code", tmp_path / "work"
    (code / "project").mkdir(parents=True)
    (code / "project/a.txt").write_text("x" * 2**20)
    command = [sys.executable, "-m", "nodelaunch.node.place", code, work]
    subprocess.run(command, check=True)
    before = (work / "a.txt").stat()
    copies = [subprocess.Popen(command) for _ in range(2)]
    while any(copy.poll() is None for copy in copies):
        now = (work / "a.txt").stat()
        assert (now.st_ino, now.st_size, now.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    (code / "project/a.txt").write_text("y" * 2**20)
    copies = [subprocess.Popen(command) for _ in range(2)]
    while any(copy.poll() is None for copy in copies):
        assert len((work / "a.txt").read_text()) == 2**20
    assert {path.name for path in work.iterdir()} == {"a.txt", LAST} and (work / "a.txt").read_text()[0] == "y"


def test_what_was_deleted_from_a_project_is_gone_from_its_copy_unless_a_job_changed_it(project, runs):
    for name in ("old.py", "results.txt"):
        (project / name).write_text("as it was")
    script = "import pathlib; pathlib.Path('results.txt').write_text('of the job'); pathlib.Path('own.txt').touch()"
    (project / "examples/train.py").write_text(script)

    def run():
        job = TorchrunJob("examples/train.py", root=project, nodes=local_nodes(1), program=["python"])
        assert job.run(show=False).ok
        (work,) = (runs / "nodes/node0/work").iterdir()
        return {path.name: path.read_text() for path in work.iterdir() if path.is_file() and path.name[0] != "."}

    assert run() == {"old.py": "as it was", "results.txt": "of the job", "own.txt": ""}
    for name in ("old.py", "results.txt"):
        (project / name).unlink()
    assert run() == {"results.txt": "of the job", "own.txt": ""}
    assert run() == {"results.txt": "of the job", "own.txt": ""}


def test_what_runs_around_a_script_imports_nothing_of_the_project(project):
    """As with torchrun itself: a file beside the project's folders may have the name of a module of Python's."""
    (project / "queue.py").write_text("raise SystemExit('this is not the standard library')\n")
    (project / "examples/train.py").write_text("import queue, nodelaunch as l; l.report(hasattr(queue, 'Queue'))")
    assert TorchrunJob("examples/train.py", root=project, nodes=local_nodes(1)).run(show=False).results == (True,)


# A package whose modules import each other by a dot, as torchtitan's and many others' do.
PACKAGE = {
    "train.py": """
import os, sys
from .model import WIDTH
if "--fail" in sys.argv:
    WIDTH / 0
import torch.distributed as dist
import nodelaunch as launch
dist.init_process_group("gloo")
place = [os.path.relpath(path) for path in (sys.argv[0], sys.path[0])]
launch.report([WIDTH, __name__, __package__, *place, sys.argv[1:], sys.modules["__main__"].WIDTH])
dist.barrier()
dist.destroy_process_group()
""",
    "__init__.py": "",
    "__main__.py": "import sys\nfrom .model import WIDTH\nprint(WIDTH, __package__, sys.argv[1:])\n",
    "model.py": "WIDTH = 7\n",
    "broken/__init__.py": "\nfrom .nothing import of_this_name\n",
    "broken/train.py": "",
    "odd.py": "\n\ndef f(:\n",
}


@pytest.fixture
def package(tmp_path):
    for name, text in PACKAGE.items():
        (tmp_path / "app/package" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "app/package" / name).write_text(text)
    return tmp_path / "app"


@pytest.mark.usefixtures("warm_torchrun")
def test_a_module_starts_as_torchrun_starts_it(package):
    """`torchrun -m package.train --lr 0.1` in the project's folder; by its path the same file knows no package."""
    job = TorchrunJob("package/train.py", root=package, nodes=local_nodes(1), program=["python"])
    assert "no known parent package" in job.run(check=False, show=False).failure.what
    job = TorchrunJob(module="package.train", args=["--lr", 0.1], root=package, nodes=local_nodes(2))
    assert job.id.startswith("train-")
    value = [7, "__main__", "package", "package/train.py", ".", ["--lr", "0.1"], 7]
    assert job.run(show=False).results == (value, value)


def test_another_program_starts_a_module_by_the_same_option(package):
    job = TorchrunJob(module="package", args=["a b"], root=package, nodes=local_nodes(1), program=["python"])
    assert job.run(show=False).lines == ("[rank 0] 7 package ['a b']",)
    job = TorchrunJob(module="package.train", args=["--fail"], root=package, nodes=local_nodes(1), program=["python"])
    error = job.run(check=False, show=False).failure
    assert error.location == "package/train.py, line 5" and 'File "package/train.py", line 5' in error.traceback


@pytest.mark.usefixtures("warm_torchrun")
def test_a_module_that_fails_is_named_by_its_path_in_the_project(package):
    job = TorchrunJob(module="package.train", args=["--fail"], root=package, nodes=local_nodes(1))
    error = job.run(check=False, show=False).failure
    assert (error.location, error.message) == ("package/train.py, line 5", "ZeroDivisionError: division by zero")
    assert error.traceback.splitlines()[1] == '  File "package/train.py", line 5, in <module>'


@pytest.mark.parametrize(("module", "location", "message", "traceback"), [
    ("package.broken.train", "package/broken/__init__.py, line 2", "No module named 'package.broken.nothing'",
     'File "package/broken/__init__.py", line 2, in <module>'),
    ("package.odd", "package/odd.py, line 3", "SyntaxError", 'File "package/odd.py", line 3'),
    ("package.trains", "", "No module named 'package.trains'", ""),
    ("package.broken", "package/broken/__init__.py, line 2", "No module named 'package.broken.nothing'", ""),
    ("nothing.train", "", "No module named 'nothing'", ""),
])  # fmt: skip
def test_what_keeps_a_module_from_its_start_is_located(package, monkeypatch, module, location, message, traceback):
    """Also in a package around it, which Python imports before."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.syspath_prepend(package)
    script = ""
    with pytest.raises((ImportError, SyntaxError)) as raised:
        for file in target.find_files(module):
            script = file
        target.run_target(script, module)
    facts = worker._describe(raised.value, script, package)
    assert facts["location"] == location and message in facts["message"] and traceback in facts["traceback"], facts
    assert location or "root=" in facts["fix"], facts


def test_an_installed_module_is_named_from_the_folder_of_what_is_installed(monkeypatch):
    """That may be within another one of the path, as it is in a Python that has no environment of its own."""
    monkeypatch.setattr(sys, "path", ["", "/n/work", "/lib/python3", "/lib/python3/site-packages"])
    assert target.shorten_path("/lib/python3/site-packages/net/cli/train.py") == "net/cli/train.py"
    assert target.shorten_path("/elsewhere/train.py") == "train.py"


def test_a_module_that_hangs_is_named_where_it_stands(state):
    """By the frames of the watch, which leaves out the folder of the project, and by those of faulthandler."""
    path = f"/n/work/app-{'0' * 6}/package/train.py"
    for rank, node in enumerate("ab"):
        text = f'  File "package/train.py", line {9 + rank}, in <module>\n  File "/v/torch/x.py", line 5, in f'
        hear(state, node, "hang", rank=rank, seconds=8, traceback=text)
        stack = f'Current thread 0x08 (most recent call first):\n  File "{path}", line {9 + rank} in <module>\n'
        hear(state, node, "stack", rank=rank, text=stack)
    wanted = {rank: f"package/train.py, line {9 + rank}, in <module>" for rank in (0, 1)}
    assert diagnose(state).stacks == wanted
    del state.errors[1]
    assert diagnose(state).stacks == wanted


@pytest.mark.parametrize(("options", "words"), [
    ({}, ("script or a module", "neither")),
    ({"script": "package/train.py", "module": "package.train"}, ("script or a module", "both")),
    ({"module": "package.train"}, ("not installed", "app/package/train.py", "module='package.train', root='.'")),
    ({"module": "package"}, ("not installed", "module='package', root='.'")),
    ({"module": "package.trains", "root": "."}, ("no module package.trains", "neither package/trains.py")),
    ({"module": "package.train", "root": "package"}, ("no module package.train", "the folder that contains package")),
    ({"module": "package.broken", "root": "."}, ("no module package.broken", "package/broken/__main__.py")),
    ({"module": "torch.utils", "files": ["a.py"]}, ("no files beside it", "root='.'")),
    ({"module": "package/train.py"}, ("by dots", "module='package.train'")),
    ({"module": "train.py"}, ("by dots", "module='package.train'")),
    ({"module": "; touch canary"}, ("by dots",)),
], ids=str)  # fmt: skip
def test_a_module_that_a_job_cannot_run_is_refused_at_once(package, monkeypatch, options, words):
    monkeypatch.chdir(package)
    with pytest.raises(LabError) as caught:
        TorchrunJob(nodes=local_nodes(1), **options)
    assert_explains(caught.value, *words)


def test_an_own_module_that_python_finds_elsewhere_is_not_taken_for_an_installed_one(package, monkeypatch):
    monkeypatch.syspath_prepend(package)
    for root in (None, package / "package"):
        with pytest.raises(LabError) as caught:
            TorchrunJob(module="package.train", nodes=local_nodes(1), root=root)
        assert_explains(caught.value, *([f"root={str(package)!r}"] if root is None else ["no module package.train"]))


def test_a_module_that_is_installed_runs_on_the_node_without_a_copy(package, runs):
    """Also with a project, whose folder is then the current one."""
    for root, copied in ((None, 0), (package, 5)):
        job = TorchrunJob(module="platform", nodes=local_nodes(1), program=["python"], root=root)
        (line,) = job.run(show=False).lines
        assert "Linux" in line or "macOS" in line
        assert not list(runs.glob("nodes/node0/code/*/script"))
        assert len(list(runs.glob("nodes/node0/code/*/project/package/*.py"))) == copied


def test_a_data_folder_of_this_machine_is_named_where_it_is(plain, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/index.json").write_text('{"sha256": {"a.bin": ""}}')
    job = plain("ok", data=DataFolder(tmp_path / "mine", "digits", "index.json"))
    assert f"{tmp_path}/mine/index.json: a.bin is missing" in " ".join(str(job.preflight()).split())


def test_two_projects_of_one_name_do_not_share_a_folder(tmp_path):
    places = []
    for number in "12":
        script = tmp_path / number / "app" / "train.py"
        script.parent.mkdir(parents=True)
        script.write_text("import os, nodelaunch as launch; launch.report(os.getcwd())")
        job = TorchrunJob("train.py", root=script.parent, nodes=local_nodes(1), program=["python"])
        places += job.run(show=False).results
    assert len(set(places)) == 2 and all("/work/app-" in place for place in places), places


def test_git_says_what_is_ignored_and_what_is_large_is_left_out(project):
    (project / ".gitignore").write_text("*.bin\nsecret.txt\n")
    for name in ("weights.bin", "secret.txt", "new.py"):
        (project / name).write_text("x")
    with (project / "images.tar").open("wb") as file:
        file.truncate(LARGEST + 1)
    (project / "gone").symlink_to("nowhere")
    (project / "shadow").symlink_to("/etc/passwd")
    (project / "again.py").symlink_to("new.py")
    for command in (["init", "-q"], ["add", "examples"]):
        subprocess.run(["git", *command], cwd=project, check=True)
    found = find_project(project)
    assert found.files.keys() == {*PROJECT, ".gitignore", "new.py", "again.py"}
    assert set(found.left_out) == {"images.tar (8 MiB)", "gone (not there)", "shadow (leads elsewhere)"}


def test_without_git_what_tools_make_is_left_out(project, monkeypatch, tmp_path):
    monkeypatch.setenv("LAB_DATA", str(project / "images"))
    for name in (".git/config", "env/pyvenv.cfg", "env/lib.py", "net/__pycache__/a.pyc", "images/a.png", "data/a.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    (project / "linked").symlink_to(tmp_path)
    found = find_project(project)
    assert found.files.keys() == {*PROJECT, "data/a.py"}
    assert set(found.left_out) == {".git", "env", "images", "linked"}


def _git(folder, *command):
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *names, *command], cwd=folder, check=True, capture_output=True)


def test_what_jobs_leave_in_a_project_is_not_copied_with_it(project, monkeypatch):
    """LAB_RUNS is `runs` in the current folder, which is the project's, and no .gitignore of it names that."""
    _git(project, "init")
    monkeypatch.setenv("LAB_RUNS", str(project / "runs"))
    for number in range(2):
        script = project / "plain.py"
        script.write_text(f"import os; print({number}, os.path.exists('runs'))")
        job = TorchrunJob(script, root=project, nodes=local_nodes(1), program=["python"])
        assert job.run(show=False).lines == (f"[rank 0] {number} False",)
    found = find_project(project)
    assert found.files.keys() == {*PROJECT, "plain.py"}
    assert found.left_out == ("runs",)


def test_what_git_tracks_is_copied_whatever_its_folder_is_called(project):
    for name in ("wandb/log.py", "data/loader.py", "net/__pycache__/model.pyc"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("")
    _git(project, "init")
    _git(project, "add", ".")
    (project / "wandb/new").write_text("")
    assert find_project(project).files.keys() == {*PROJECT, "wandb/log.py", "data/loader.py"}


def test_repositories_within_a_project_are_copied(project, tmp_path):
    """A submodule, one within that, and a repository that was only cloned there; each with what it ignores left out."""
    for name, inner in (("deep", None), ("lib", "deep")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "code.py").write_text("")
        (folder / ".gitignore").write_text("*.bin\n")
        _git(folder, "init")
        if inner:
            _git(folder, "submodule", "add", str(tmp_path / inner), inner)
        _git(folder, "add", ".")
        _git(folder, "commit", "-m", "x")
    _git(project, "init")
    _git(project, "submodule", "add", str(tmp_path / "lib"), "lib")
    _git(project, "submodule", "update", "--init", "--recursive")
    _git(project, "clone", str(tmp_path / "deep"), "cloned")
    (project / "lib" / "a.bin").write_text("x")
    found = find_project(project)
    inner = {f"{place}/{name}" for place in ("lib", "lib/deep", "cloned") for name in ("code.py", ".gitignore")}
    assert found.files.keys() == {*PROJECT, ".gitmodules", "lib/.gitmodules", *inner}
    assert not found.left_out
    shutil.rmtree(project / "lib")
    (project / "lib").mkdir()
    assert find_project(project).left_out == ("lib (git lists no files of it)",)


def test_folders_that_cannot_be_read_are_said(project, monkeypatch):
    (project / "closed").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    found = find_project(project)
    assert found.files.keys() == PROJECT.keys() and found.left_out == ("closed (Permission denied)",)


def test_what_is_too_large_is_refused_with_the_folder_that_is(project):
    start = time.monotonic()
    with pytest.raises(LabError, match="too large"):
        find_project(Path("/"))
    assert time.monotonic() - start < 60, "not all of it is listed first"
    (project / "many").mkdir()
    for number in range(MOST):
        (project / "many" / f"{number}").touch()
    with pytest.raises(LabError, match="too large"):
        find_project(project)
    shutil.rmtree(project / "many")
    (project / "images").mkdir()
    for number in range(TOTAL // LARGEST + 1):
        with (project / "images" / f"{number}").open("wb") as file:
            file.truncate(LARGEST)
    with pytest.raises(LabError) as caught:
        find_project(project)
    assert_explains(caught.value, "too large", "images", ".gitignore")


def test_a_root_that_cannot_be_one_is_refused(project, tmp_path):
    for options, words in (
        ({"script": "train.py", "root": project / "nowhere"}, ("is a folder", "root='.'")),
        ({"script": tmp_path / "train.py", "root": project}, ("not within", str(project))),
        ({"script": "../train.py", "root": project}, ("not within", str(project))),
        ({"script": "examples/train.py", "root": project, "files": ["a.py"]}, ("do not go together",)),
        ({"script": "examples/train.py", "root": 3}, ("root", "path")),
        ({"script": "examples/nothing.py", "root": project}, ("no file", "nothing.py")),
    ):
        with pytest.raises(LabError) as caught:
            TorchrunJob(nodes=local_nodes(1), **options).run(show=False)
        assert_explains(caught.value, *words)


@pytest.mark.usefixtures("warm_torchrun")
def test_a_file_that_is_not_copied_is_named_with_the_way_to_copy_it(project):
    job = TorchrunJob(project / "examples" / "train.py", ["x"], nodes=local_nodes(1))
    error = job.run(check=False, show=False).failure
    assert "No module named 'helper'" in error.message and "root=" in error.fix
    files = [project / "examples/helper.py", project / "net/model.py"]
    (project / "examples/train.py").write_text("open('configs/small.json')")
    error = TorchrunJob(project / "examples/train.py", files=files, nodes=local_nodes(1)).run(check=False, show=False)
    assert "configs/small.json" in error.failure.message and "root=" in error.failure.fix
    assert "runs in its own folder" in error.failure.cause


def test_another_program_gets_the_variables_of_torchrun(plain):
    heard = Heard()
    job = plain("ok", "two words", "$(touch canary)", nproc_per_node=2, env={"COLOUR": "deep blue"})
    result = job.run(show=heard)
    addresses = {rank.address for rank in result.ranks}
    assert addresses == {"127.0.0.1", "127.0.0.2"}
    for rank, value in enumerate(result.results):
        places = [str(rank), str(rank % 2), str(rank // 2), "4", "2", "127.0.0.1", "deep blue"]
        assert value == [*places, ["ok", "two words", "$(touch canary)"], False]
        assert {f"[rank {rank}] connected", f"[rank {rank}] to stderr"} <= set(heard.lines)
    assert_gone(job.id, 1)


@pytest.mark.parametrize(("mode", "kind", "words"), [
    ("raise", "exception", ["Rank 1 on node1 failed first: ValueError: bad luck in batch 7", 'File "plain.py", line']),
    ("kill", "signal", ["Rank 1 on node1 was killed by signal 9"]),
    ("exit", "exit", ["Rank 1 on node1 failed first: exit status 3"]),
])  # fmt: skip
def test_another_program_that_fails_is_explained_as_well(plain, mode, kind, words):
    error = run_badly(plain(mode), Heard(), seconds=8)
    assert error.result.failure.kind == kind
    for word in words:
        assert word in str(error), str(error)


def test_a_traceback_that_was_only_printed_is_not_the_failure(write):
    """Python ends with status 1 for an exception that nobody caught."""
    lines = ("import sys, traceback", "try: 1 / 0", "except Exception: traceback.print_exc()", "sys.exit(3)")
    script = write("caught.py", "\n".join(lines))
    error = TorchrunJob(script, nodes=local_nodes(1), program=["python"]).run(check=False, show=False).failure
    said = "Rank 0 on node0 failed first: exit status 3: ZeroDivisionError: division by zero"
    assert (error.kind, error.what, error.traceback) == ("exit", said, "")
    assert "the last line that it printed" in error.cause


def test_the_line_that_is_named_is_the_project_s(project, tmp_path):
    """Not one of a library in a folder called work, as the disks of clusters are."""
    (tmp_path / "work/site").mkdir(parents=True)
    (tmp_path / "work/site/library.py").write_text("def fail():\n    raise ValueError('bad')\n")
    (project / "train.py").write_text("\nimport library\nlibrary.fail()\n")
    path = {"PYTHONPATH": str(tmp_path / "work/site")}
    job = TorchrunJob("train.py", root=project, nodes=local_nodes(1), program=["python"], env=path)
    error = job.run(check=False, show=False).failure
    assert error.location == "train.py, line 3" and 'File "train.py", line 3' in error.traceback
    error = TorchrunJob("train.py", root=project, nodes=local_nodes(1), env=path).run(check=False, show=False).failure
    assert error.location == "train.py, line 3" and 'File "train.py", line 3' in error.traceback


def test_the_line_that_is_named_is_that_of_the_script_that_another_runs(tmp_path):
    """Not one of the script that watches it, be that the first frame or the last."""
    (tmp_path / "own.py").write_text("\n\nwatch(1)\n")
    watching = tmp_path / "watching.py"
    watching.write_text(
        "import runpy\ndef watch(number):\n    number / 0\nrunpy.run_path(own, {'watch': watch}, '__main__')\n"
    )
    with pytest.raises(ZeroDivisionError) as raised:
        runpy.run_path(str(watching), {"own": str(tmp_path / "own.py")}, "__main__")
    facts = worker._describe(raised.value, str(watching), tmp_path)
    assert facts["location"] == "own.py, line 3"
    assert facts["traceback"].splitlines()[1] == '  File "own.py", line 3, in <module>'


@pytest.mark.usefixtures("warm_torchrun")
def test_where_the_ranks_of_a_project_stand_is_said(project):
    begin = "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=5))"
    lines = ("import datetime, torch.distributed as dist", begin, "if dist.get_rank() == 0:")
    (project / "train.py").write_text("\n".join([*lines, "    while True: pass", "dist.barrier()"]))
    job = TorchrunJob("train.py", root=project, nodes=local_nodes(1), nproc_per_node=2, hang_timeout=3)
    error = job.run(check=False, show=False).failure
    assert error.kind == "hang"
    assert "train.py, line 4, in <module>" in str(error) and "train.py, line 5, in <module>" in str(error), error


def test_a_shell_script_is_a_program_too(write):
    script = write("each.sh", 'echo "node $GROUP_RANK of $1, $PWD"; test -d "$LAB_JOB_FOLDER"\n')
    job = TorchrunJob(script, ["two"], nodes=local_nodes(2), program=["bash", "-eu"])
    lines = job.run(show=False).lines
    assert sorted(line.partition(",")[0] for line in lines) == [f"[rank {n}] node {n} of two" for n in (0, 1)]


def test_a_program_that_is_not_there_is_named(plain):
    error = plain("ok", program=["no-such-program"]).run(check=False, show=False).failure
    assert "no-such-program cannot be started" in error.what
    assert "has no such program" in error.cause and "/path/to" in error.fix


def test_only_torchrun_starts_anew(plain):
    with pytest.raises(LabError) as caught:
        plain("ok", max_restarts=1).run(show=False)
    assert_explains(caught.value, "Only torchrun", "max_restarts=1")


@pytest.mark.parametrize("text", ["python", [3], [""], [["python"]], "x"])
def test_a_program_is_a_list_of_texts(plain, text):
    with pytest.raises(LabError, match="program"):
        plain("ok", program=text)


def test_by_hand_it_needs_no_launcher(plain, runs):
    job = plain("ok", nodes=local_nodes(1), nproc_per_node=2)
    (path,) = job.write()
    copy_code(job)
    done = subprocess.run(["bash", path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("connected") == 2, done.stderr
    assert len(list(runs.glob("nodes/node0/jobs/*/node0/results/rank*.json"))) == 2
    assert_gone(job.id, 1)


@pytest.mark.drill
@pytest.mark.parametrize("part", ["node.supervisor", "node.starter", "plain.py"])
def test_18_parts_of_such_a_job_that_are_killed(plain, part):
    """Whichever part goes, all of it goes: also a process that ignores SIGTERM."""
    job, heard, times = plain("stubborn"), Heard(), []

    def act(line):
        times.append(time.time())
        found = find_processes(job.id, part, 1)
        if part == "plain.py":
            found = [pid for pid in found if pid not in find_processes(job.id, "node.", 1)]
        kill(found, signal.SIGKILL)

    heard.when["[rank 1] connected"] = act
    error = run_badly(job, heard, seconds=10, since=lambda: times[0])
    who = {"node.supervisor": "The supervisor", "node.starter": "The starter of python", "plain.py": "Rank 1"}[part]
    assert error.what.startswith(f"{who} on node1 was "), str(error)


@pytest.mark.drill
def test_such_a_job_on_two_hosts_is_stopped(plain, hosts):
    nodes = ssh_nodes(["n1", "n2"], config=hosts.ssh_config, folder="/node/labs")
    try:
        job = plain("stubborn", nodes=nodes)
        running = job.start(show=(heard := Heard()))
        wait_for(lambda: sum("connected" in line for line in heard.lines) == 2)
        assert {rank for line in heard.lines for rank in ("[rank 0]", "[rank 1]") if rank in line}
        start = time.monotonic()
        running.stop()
        assert running.wait(check=False).failure.kind == "stopped"
        assert time.monotonic() - start < 5
        assert_gone(job.id, 5)
    finally:
        nodes[0].close()


def test_a_process_that_prints_without_end_is_bounded(write, runs):
    script = write("loud.py", "import sys\nfor _ in range(300_000):\n    print('x' * 100)\nprint('last')\n")
    result = TorchrunJob(script, nodes=local_nodes(1), program=["python"]).run(show=False)
    assert result.lines[-1] == "[rank 0] last"
    assert (result.folder / "output.log").stat().st_size < 64 * 2**20
    assert (runs / "nodes/node0/jobs" / result.folder.name / "node0/output.log").stat().st_size < 64 * 2**20


@pytest.mark.parametrize("end", ["", "raise ValueError\n", "raise SystemExit(3)\n"], ids=["well", "error", "exit"])
def test_what_a_script_leaves_open_is_written_out(write, tmp_path, end):
    """As when Python runs it, also where it fails; where it ends well, exit functions and threads end, too."""
    script = write(
        "open.py",
        f"import atexit, pathlib, threading, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "OUT = (folder / 'open').open('w')\n"
        "OUT.write('kept')\n"
        "def write(name, seconds=0):\n"
        "    time.sleep(seconds)\n"
        "    (folder / name).write_text('kept')\n"
        "atexit.register(write, 'exit')\n"
        "threading.Thread(target=write, args=('thread', 0.5)).start()\n" + end,
    )
    TorchrunJob(script, nodes=local_nodes(1)).run(show=False, check=not end)
    for name in ("open",) if end else ("open", "exit", "thread"):
        assert (tmp_path / name).read_text() == "kept"
