"""A project's folder as the unit of a job, and programs other than torchrun with the same lease, logs and diagnosis."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.drawn import assert_explains
from harness.jobs import PLAIN, Heard, assert_gone, find_processes, kill, run_badly

from lab_common import LabError
from nodelaunch import TorchrunJob, local_nodes
from nodelaunch.node.copy_project import LAST
from nodelaunch.transfer import LARGEST, MOST, TOTAL, find_project, name_work

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
# What every rank is told, by the variables; without torch.
VARIABLES = """
import os, sys
import nodelaunch as launch
names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "COLOUR"]
launch.report([*(os.environ.get(name) for name in names), sys.argv[1:], "torch" in sys.modules])
print("connected")
print("to stderr", file=sys.stderr)
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


def test_a_file_of_a_project_is_whole_at_any_time(tmp_path):
    """Nodes that share a folder, and jobs of one project, copy into the same one, where others read already."""
    code, work = tmp_path / "code", tmp_path / "work"
    work.mkdir()
    (code / "project").mkdir(parents=True)
    command = [sys.executable, "-m", "nodelaunch.node.copy_project", code, work]
    for number in (7, 8):
        (code / "project/a.txt").write_text(str(number) * 2**20)
        copies = [subprocess.Popen(command) for _ in range(2)]
        while any(copy.poll() is None for copy in copies):
            assert number == 7 or len((work / "a.txt").read_text()) == 2**20
    before = (work / "a.txt").stat()
    subprocess.run(command, check=True)
    assert (work / "a.txt").stat().st_ino == before.st_ino, "an equal one is left alone"
    assert {path.name for path in work.iterdir()} == {"a.txt", LAST}


def test_the_next_launch_brings_what_changed_and_keeps_what_jobs_made(project, runs):
    """Also a file that was made a program after the job had failed for it, and one that is no longer there."""
    script, tool = project / "run.py", project / "say.sh"
    job = TorchrunJob(script, root=project, nodes=local_nodes(1), program=["python"])
    for name in ("old.py", "results.txt"):
        (project / name).write_text("as it was")
    tool.write_text("#!/bin/sh\necho $1\n")
    script.write_text(
        "import pathlib, subprocess\n"
        "pathlib.Path('results.txt').write_text('of the job')\n"
        "pathlib.Path('out').mkdir(exist_ok=True)\n"
        "subprocess.run(['./say.sh', 'hello'], check=True)"
    )
    assert job.run(show=False).lines == ("[rank 0] hello",)
    (work,) = (runs / "nodes/node0/work").iterdir()
    assert (work / "old.py").exists()
    for name in ("old.py", "results.txt"):
        (project / name).unlink()
    tool.write_text("#!/bin/sh\necho $1 again\n")
    assert job.run(show=False).lines == ("[rank 0] hello again",)
    assert not (work / "old.py").exists() and (work / "results.txt").read_text() == "of the job"
    (project / "out").write_text("a file now")
    error = job.run(check=False, show=False).failure
    assert "out of the project cannot be copied" in error.what and "rm -r -- " in error.message, error


def test_what_runs_around_a_script_imports_nothing_of_the_project(project):
    """As with torchrun itself: a file beside the project's folders may have the name of a module of Python's."""
    (project / "queue.py").write_text("raise SystemExit('this is not the standard library')\n")
    (project / "examples/train.py").write_text("import queue, nodelaunch as l; l.report(hasattr(queue, 'Queue'))")
    assert TorchrunJob("examples/train.py", root=project, nodes=local_nodes(1)).run(show=False).results == (True,)


def _git(folder, *command):
    subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True)


def write_files(folder, *names, text="x"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_project_has_its_own_folder_on_a_node():
    assert name_work(Path("/1/my app")).startswith("my-app-")
    assert name_work(Path("/1/my app")) != name_work(Path("/2/my app"))


@pytest.mark.parametrize("git", [True, False])
def test_what_is_ignored_made_by_tools_or_large_is_not_copied(project, monkeypatch, tmp_path, git):
    """LAB_RUNS is `runs` in the current folder, which is the project's, and no .gitignore of it names that."""
    monkeypatch.setenv("LAB_RUNS", str(project / "runs"))
    monkeypatch.setenv("LAB_DATA", str(project / "images"))
    write_files(project, "env/pyvenv.cfg", "env/lib.py", "net/__pycache__/a.pyc", "wandb/a.log", "images/a.png")
    write_files(project, "runs/a.log", "data/a.py", "net/new.py")
    write_files(project, ".gitignore", text="*.bin\nignored/\n")
    with (project / "images.tar").open("wb") as file:
        file.truncate(LARGEST + 1)
    for name, place in {
        "gone": "nowhere",
        "shadow": "/etc/passwd",
        "again.py": "net/new.py",
        "linked": tmp_path,
    }.items():
        (project / name).symlink_to(place)
    if git:
        write_files(project, "weights.bin", "net/weights.bin", "ignored/a/secret.txt", "kept.bin")
        _git(project, "init")
        _git(project, "add", "examples")
        _git(project, "add", "--force", "kept.bin")
    files, note = find_project(project)
    assert files.keys() == {*PROJECT, ".gitignore", "data/a.py", "net/new.py", "again.py", *["kept.bin"][:git]}
    left_out = "env, images, linked, runs, gone (leads elsewhere), and 2 more"
    assert note == f"project my project: {len(files)} files, 0.0 MiB; left out: {left_out}"


def test_what_is_too_large_is_refused_with_the_folder_that_is(project):
    start = time.monotonic()
    with pytest.raises(LabError, match="too large"):
        find_project(Path("/"))
    assert time.monotonic() - start < 60, "not all of it is listed first"
    (project / "images").mkdir()
    for number in range(TOTAL // LARGEST + 1):
        with (project / "images" / f"{number}").open("wb") as file:
            file.truncate(LARGEST)
    with pytest.raises(LabError) as caught:
        find_project(project)
    assert_explains(caught.value, "too large", f"{MOST:,} files", "images", ".gitignore")


def test_a_root_that_cannot_be_one_is_refused(project, tmp_path):
    for options, words in (
        ({"script": "train.py", "root": project / "nowhere"}, ("There is no file 'train.py'", "nowhere")),
        ({"script": tmp_path / "train.py", "root": project}, ("not within", str(project))),
        ({"script": "examples/train.py", "root": project, "files": ["a.py"]}, ("do not go together",)),
        ({"script": "examples/train.py", "root": 3}, ("root", "path")),
    ):
        with pytest.raises(LabError) as caught:
            TorchrunJob(nodes=local_nodes(1), **options).run(show=False)
        assert_explains(caught.value, *words)


def test_another_program_gets_the_variables_of_torchrun(write):
    heard, arguments, env = Heard(), ["two words", "$(touch canary)"], {"COLOUR": "deep blue"}
    script, program = write("plain.py", VARIABLES), ["python"]
    job = TorchrunJob(script, arguments, nodes=local_nodes(2), nproc_per_node=2, env=env, program=program)
    result = job.run(show=heard)
    addresses = {rank.address for rank in result.ranks}
    assert addresses == {"127.0.0.1", "127.0.0.2"}
    for rank, value in enumerate(result.results):
        places = [str(rank), str(rank % 2), str(rank // 2), "4", "2", "127.0.0.1", "deep blue"]
        assert value == [*places, arguments, False]
        assert {f"[rank {rank}] connected", f"[rank {rank}] to stderr"} <= set(heard.lines)
    assert_gone(job.id, 1)


@pytest.mark.parametrize(("mode", "kind", "words"), [
    ("raise", "exception", ["Rank 1 on node1 failed first: ValueError: bad luck in batch 7", 'File "plain.py", line']),
    ("exit", "exit", ["Rank 1 on node1 failed first: exit status 3"]),
])  # fmt: skip
def test_another_program_that_fails_is_explained_as_well(plain, mode, kind, words):
    error = run_badly(plain(mode), Heard(), seconds=8)
    assert error.result.failure.kind == kind
    for word in words:
        assert word in str(error), str(error)


def test_a_shell_script_is_a_program_too(write):
    script = write("each.sh", 'echo "node $GROUP_RANK of $1, $PWD"; test -d "$LAB_JOB_FOLDER"\n')
    job = TorchrunJob(script, ["two"], nodes=local_nodes(2), program=["bash", "-eu"])
    lines = job.run(show=False).lines
    assert sorted(line.partition(",")[0] for line in lines) == [f"[rank {n}] node {n} of two" for n in (0, 1)]


def test_a_program_that_is_not_there_is_named(plain):
    error = plain("ok", program=["no-such-program"]).run(check=False, show=False).failure
    assert "no-such-program cannot be started" in error.what
    assert "has no such program" in error.cause and "/path/to" in error.fix


@pytest.mark.drill
def test_18_the_starter_of_such_a_job_is_killed(plain):
    """All of it goes: also a process that ignores SIGTERM."""
    job, heard, times = plain("stubborn"), Heard(), []

    def act(line):
        times.append(time.time())
        kill(find_processes(job.id, "node.starter", 1), signal.SIGKILL)

    heard.when["[rank 1] connected"] = act
    error = run_badly(job, heard, seconds=10, since=lambda: times[0])
    assert error.what.startswith("The starter of python ended on node1"), str(error)


@pytest.mark.parametrize("end", ["", "raise ValueError\n"], ids=["well", "error"])
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
