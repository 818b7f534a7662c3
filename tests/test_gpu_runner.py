"""The runner of ``make gpu`` with pretended steps, the notebooks without Jupyter, and the whole rehearsal once."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from benchmarks import gpu
from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import notebooks
from benchmarks.gpu.__main__ import Run, Step
from benchmarks.gpu.speed_report import ROUNDS
from course import reference
from lab_common import LabError, checkout
from lab_utils import machine, timing

FACTS = {
    "machine": {"label": "a machine", "torch": "2.11.0", "python": "3.12.1", "gpus": [], "clocks": []},
    "when": "2026-12-01T10:00:00+00:00",
    "commit": "unknown",
    "changed": None,
    "missing": [],
}
# A process that leaves another one behind in a session of its own, says its number, and waits, or ends by itself.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=SESSION)
print(child.pid, flush=True)
WAIT
"""


def make_step(program="print('ran')", name="one", **more):
    """A step that runs Python code."""
    return Step(name, (sys.executable, "-S", "-c", program), **{"cap": 60, "code": (), "least": 0.5, **more})


def run_steps(out, *steps, seconds=60, again=(), **more):
    """Runs steps as one call does; returns what is on the disk afterwards."""
    Run(out, FACTS, seconds=seconds, **more).run(steps, again=again)
    return read_steps(out)


def read_steps(out):
    return json.loads((out / "results.json").read_text())["steps"]


def count_runs(out, name="one"):
    """The number of times that a step of :func:`counting` has run."""
    return len((out / f"{name}.count").read_text())


def counting(out, name="one", end="", **more):
    """A step that leaves a trace each time that it runs."""
    return make_step(f"open({str(out / f'{name}.count')!r}, 'a').write('x'); {end}", name, **more)


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(holds, seconds=30):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert holds()


# --- steps -----------------------------------------------------------------------------------------------------------


def test_steps_run_in_order_and_a_failure_stops_none(tmp_path, capsys):
    bad = make_step("import sys; print('the reason'); sys.exit(3)", "bad")
    steps = run_steps(tmp_path, make_step(name="first"), bad, make_step(name="last"))
    assert list(steps) == ["first", "bad", "last"]
    assert [step["outcome"] for step in steps.values()] == ["passed", "failed: exit status 3", "passed"]
    assert (tmp_path / "bad.log").read_text() == "the reason\n"
    assert "the reason" in capsys.readouterr().out


def test_a_step_is_ended_whole_at_its_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code = stubborn + PARENT.replace("SESSION", "True").replace("WAIT", "time.sleep(600)")
    start = time.monotonic()
    steps = run_steps(tmp_path, make_step(code, cap=4), make_step(name="next"))
    assert steps["one"]["outcome"] == "cut off after 4 s: call again to go on" and time.monotonic() - start < 30
    assert steps["next"]["outcome"] == "passed"
    wait_until(lambda: not is_alive(int((tmp_path / "one.log").read_text())))


def test_a_step_may_end_by_itself_when_it_is_interrupted(tmp_path):
    code = "import time\ntry:\n    print('begun', flush=True); time.sleep(600)\nfinally:\n    print('report written')"
    assert run_steps(tmp_path, make_step(code, cap=4))["one"]["outcome"].startswith("cut off")
    assert "report written" in (tmp_path / "one.log").read_text()


def test_steps_that_no_longer_fit_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "GRACE", 1.0)
    wait = make_step("import sys, time; print(sys.argv[1], flush=True); time.sleep(600)", "long", cap=100)
    wait = replace(wait, command=(*wait.command, "{seconds}"))
    steps = run_steps(tmp_path, wait, make_step(name="late", least=20), seconds=6)
    assert steps["long"]["outcome"].startswith("cut off after 6 s"), "the budget caps it"
    told = float((tmp_path / "long.log").read_text().splitlines()[0])
    assert 1 <= told <= 5, "it is told of the time that it has, and what the end may take is left"
    assert steps["late"]["outcome"] == "not begun: 0 s were left of 0.1 minutes"
    assert "late: not begun" in capsys.readouterr().out


def test_what_is_done_is_not_run_again_until_its_sources_the_machine_or_the_user_say_so(tmp_path, monkeypatch):
    source = tmp_path / "folder" / "module.py"
    source.parent.mkdir()
    source.write_text("1")
    monkeypatch.setattr(runner, "checkout", lambda: tmp_path)
    step = counting(tmp_path, code=("folder",))
    for expected in (1, 1):
        assert run_steps(tmp_path, step)["one"]["outcome"] == "passed" and count_runs(tmp_path) == expected
    (source.parent / "notes.txt").write_text("no source")
    run_steps(tmp_path, step)
    assert count_runs(tmp_path) == 1
    source.write_text("2")
    run_steps(tmp_path, step)
    assert count_runs(tmp_path) == 2
    source.rename(source.with_name("renamed.py"))
    run_steps(tmp_path, step)
    assert count_runs(tmp_path) == 3
    run_steps(tmp_path, step, fresh=["another"])
    assert count_runs(tmp_path) == 3
    run_steps(tmp_path, step, fresh=["one"])
    assert count_runs(tmp_path) == 4
    Run(tmp_path, FACTS | {"machine": FACTS["machine"] | {"label": "another"}}, seconds=60).run([step])
    assert count_runs(tmp_path) == 5
    run_steps(tmp_path, replace(step, always=True))
    run_steps(tmp_path, replace(step, always=True))
    assert count_runs(tmp_path) == 7


@pytest.mark.parametrize(("end", "expected"), [("raise SystemExit(1)", 1), (f"raise SystemExit({gpu.TIME_IS_UP})", 2)])
def test_a_failure_would_fail_again_but_what_was_unfinished_goes_on(tmp_path, end, expected):
    step = counting(tmp_path, end=end)
    run_steps(tmp_path, step)
    steps = run_steps(tmp_path, step)
    assert count_runs(tmp_path) == expected
    assert steps["one"]["outcome"] == (
        "failed: exit status 1" if expected == 1 else "unfinished: its time was up, call again to go on"
    )
    run_steps(tmp_path, step, again=["one"])
    assert count_runs(tmp_path) == expected + 1, "where it is named it is run again"


def test_only_what_goes_on_finds_what_it_left(tmp_path):
    code = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); print(p.exists()); p.write_text(''); sys.exit(75)"
    for resumes in (True, False):
        out = tmp_path / str(resumes)
        out.mkdir()
        step = make_step(code, resumes=resumes, leaves=("left",))
        step = replace(step, command=(*step.command, str(out / "left")))
        for expected in (False, resumes):
            run_steps(out, step)
            assert (out / "one.log").read_text() == f"{expected}\n"
        run_steps(out, step, fresh=["one"])
        assert (out / "one.log").read_text() == "False\n"


def test_a_missing_package_or_file_is_named_and_the_rest_runs(tmp_path):
    steps = run_steps(
        tmp_path,
        make_step(name="books", needs=("json", "no_such_package", "no.such")),
        make_step(name="speed", files=("no/such.py", "pyproject.toml")),
        make_step(),
    )
    assert steps["books"]["outcome"] == "left out: no_such_package, no.such are not here"
    assert steps["speed"]["outcome"] == "left out: no/such.py is not here"
    assert steps["one"]["outcome"] == "passed"


def test_what_follows_a_step_may_fail_it_and_is_published_after_each(tmp_path):
    published = []

    def refuse():
        raise LabError("There is no report.")

    steps = run_steps(
        tmp_path,
        make_step(after=refuse),
        make_step(name="next"),
        publish=lambda: published.append(read_steps(tmp_path)["next"]["outcome"]),
    )
    assert steps["one"]["outcome"] == "failed: There is no report." and published == ["passed"]


CALL = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_gpu_runner import FACTS, make_step
from benchmarks.gpu import __main__ as runner
runner.describe_here = lambda root: FACTS
runner.print_facts = lambda facts: None
steps = [make_step("print('first')", "tests"), make_step({code!r}, "notebooks"), make_step(name="speed")]
runner.list_steps = lambda out, dry: steps
sys.exit(runner.main(["--dry", "--out", {out!r}]))
"""


@pytest.fixture
def called(tmp_path, root):
    """A call of the command with three pretended steps, of which the second waits; with the number of its child."""
    code = PARENT.replace("SESSION", "True").replace("WAIT", "time.sleep(600)")
    script = CALL.format(tests=str(root / "tests"), code=code, out=str(tmp_path / "out"))
    log = tmp_path / "out" / "notebooks.log"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), 60)
    child = int(log.read_text())
    yield process, child
    process.kill()
    process.communicate()
    if is_alive(child):  # Linux ends with a killed runner only what it had started itself
        psutil.Process(child).kill()


def test_an_interrupt_ends_the_steps_processes_and_keeps_what_is_known(called, tmp_path):
    process, child = called
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in out and "Stopped" in out
    steps = read_steps(tmp_path / "out")
    assert [step["outcome"] for step in steps.values()] == ["passed", "interrupted"]
    wait_until(lambda: not is_alive(child))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a child with its parent")
def test_a_killed_runner_leaves_its_results_whole_and_its_step_does_not_go_on(called, tmp_path):
    process, child = called
    step = psutil.Process(psutil.Process(child).ppid())
    process.kill()
    process.communicate(timeout=60)
    steps = read_steps(tmp_path / "out")
    assert [step["outcome"] for step in steps.values()] == ["passed", "running"]
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix == ".tmp"]
    wait_until(lambda: not step.is_running() or step.status() == psutil.STATUS_ZOMBIE)
    # Another call goes on: what is done is not run again, what was running is.
    steps = run_steps(tmp_path / "out", make_step("print('first')", "tests"), make_step(name="notebooks"))
    assert [step["outcome"] for step in steps.values()] == ["passed", "passed"]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pretend(monkeypatch):
    """Lets the command have these steps, on a machine with that many GPUs."""

    def run(out, *steps, gpus=0, arguments=("--dry",)):
        here = FACTS["machine"] | {"gpus": [{}] * gpus, "torchvision": "", "cuda": "", "cudnn": 1, "nccl": ""}
        facts = FACTS | {"machine": here | {"driver": None}, "missing": ["nvcc: none"], "changed": True}
        monkeypatch.setattr(runner, "describe_here", lambda root: facts)
        monkeypatch.setattr(runner, "list_steps", lambda out, dry, before=None: list(steps))
        return runner.main(["--out", str(out), *arguments])

    return run


def test_the_exit_status_is_1_where_a_step_failed(tmp_path, pretend, capsys):
    good, bad, never = make_step(), make_step("1 / 0", "bad"), make_step(name="never", needs=("no_such_package",))
    assert pretend(tmp_path, good, never) == 0
    out = capsys.readouterr().out
    assert "missing: nvcc: none" in out and "commit unknown, changed" in out and "a machine: torch 2.11.0" in out
    assert pretend(tmp_path, good, bad) == 1
    assert pretend(tmp_path, good, bad) == 1, "an earlier failure is one, too"
    assert pretend(tmp_path, good, bad, arguments=("--dry", "--only", "one")) == 0


def test_the_command_runs_the_failed_tests_again(tmp_path, pretend, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "")
    (tmp_path / "reference").mkdir()
    known = {
        "machine": FACTS["machine"],
        "torch": "2.11.0",
        "tests": {"a.py::test_x": "passed", "a.py::test_y": "failed"},
    }
    (tmp_path / "reference" / "gpu_tests.json").write_text(json.dumps(known))
    step, log = (
        make_step("import os, sys; sys.exit(repr(os.environ['PYTEST_ADDOPTS']))", "tests"),
        tmp_path / "tests.log",
    )
    assert pretend(tmp_path, step) == 1 and log.read_text() == "''\n"
    assert pretend(tmp_path, step, arguments=("--dry", "--failed")) == 1
    assert "test_y" in log.read_text() and "test_x" not in log.read_text()


def test_without_a_gpu_there_is_one_message(tmp_path, pretend, capsys):
    assert pretend(tmp_path, make_step(), arguments=()) == 1
    assert capsys.readouterr().err.startswith("There is no GPU that torch can use.\n  where: a machine\n")
    assert not (tmp_path / "results.json").exists()


def test_on_a_gpu_the_references_are_published(tmp_path, pretend, monkeypatch):
    monkeypatch.setattr(runner, "checkout", lambda: tmp_path / "checkout")
    out = tmp_path / "out"
    code = f"import pathlib; p = pathlib.Path({str(out)!r}, 'reference', 'gpu'); p.mkdir(parents=True)"
    step = make_step(code + "; (p / 'lab0.json').write_text('{}'); (p.parent / 'lab1.json').write_text('[]')")
    (tmp_path / "checkout").mkdir()
    published = tmp_path / "checkout" / "data" / "reference"
    assert pretend(out, step, gpus=1, arguments=("--dry",)) == 0 and not published.exists()
    assert pretend(tmp_path / "other", step, gpus=1, arguments=()) == 1, "its folder is there already"
    assert pretend(out, step, gpus=1, arguments=("--dry", "--fresh")) == 1
    runner.publish_references(out, tmp_path / "checkout")
    assert sorted(str(path.relative_to(published)) for path in published.rglob("*.json")) == [
        "gpu/lab0.json",
        "lab1.json",
    ]


def test_what_the_benchmark_found_is_published_and_told_in_the_readme(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(runner, "run_capped", lambda command, **_: told.append(command[-1]))
    out, root = tmp_path / "out", tmp_path / "checkout"
    out.mkdir()
    for groups in ([], [["imagenet", 1024, "eager"]]):
        assert not told
        (out / "speed.json").write_text(json.dumps({"groups": groups}))
        runner.keep_speed(out)
        runner.publish_references(out, root)
    assert told == ["benchmarks.gpu.speed_report"]
    assert json.loads((root / "data" / "reference" / "gpu_speed.json").read_text()) == {"groups": groups}


def test_every_step_exists_and_its_sources_do_too():
    steps = runner.list_steps(checkout(), dry=False)
    assert [step.name for step in steps] == ["tests", "notebooks", "references", "speed"]
    assert all((checkout() / name).exists() for step in steps for name in (*step.code, *step.files))
    assert sum(step.cap for step in steps[:3]) <= 480, "the last one has at least a minute"


def test_the_outcome_of_each_test_is_kept(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(FACTS))
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="test_a" name="test_x[1]" time="0.5"/>'
        '<testcase classname="test_a" name="test_y" time="1"><failure>no</failure></testcase>'
        '<testcase classname="test_a" name="test_y" time="1"><error/></testcase>'
        '<testcase classname="sub.test_b" name="test_z" time="0"><skipped/></testcase></testsuite></testsuites>'
    )
    runner.keep_outcomes(tmp_path)
    kept = json.loads((tmp_path / "reference" / "gpu_tests.json").read_text())
    names = {"test_a.py::test_x[1]": "passed", "test_a.py::test_y": "failed", "sub/test_b.py::test_z": "skipped"}
    assert kept["tests"] == names and kept["seconds"]["test_a.py::test_x[1]"] == 0.5
    assert kept["machine"]["label"] == "a machine" and kept["when"] == FACTS["when"] and kept["torch"] == "2.11.0"
    (tmp_path / "tests.xml").write_text("<testsuites>")
    with pytest.raises(LabError, match="no report"):
        runner.keep_outcomes(tmp_path)


def test_the_tests_that_failed_are_run_again_alone(tmp_path, monkeypatch, capsys):
    """Only on the same machine and torch; what passed before stays, with the commit of then."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "")
    monkeypatch.delenv("PYTEST_ADDOPTS")
    (tmp_path / "results.json").write_text(json.dumps(FACTS))
    case = '<testsuite><testcase classname="test_a" name="test_{}" time="1">{}</testcase></testsuite>'
    bad = '<testcase classname="test_a" name="test_y[1]" time="1"><failure>no</failure></testcase>'
    (tmp_path / "tests.xml").write_text(case.format("x", "").replace("</testsuite>", f"{bad}</testsuite>"))
    runner.keep_outcomes(tmp_path)
    assert runner.choose_failed(tmp_path, FACTS["machine"] | {"torch": "2.12.0"}) == {}
    assert "PYTEST_ADDOPTS" not in os.environ
    before = runner.choose_failed(tmp_path, FACTS["machine"])
    assert os.environ["PYTEST_ADDOPTS"] == "-k 'test_y'"

    (tmp_path / "results.json").write_text(json.dumps(FACTS | {"commit": "a later one"}))
    (tmp_path / "tests.xml").write_text(case.format("y[1]", ""))
    runner.keep_outcomes(tmp_path, before)
    kept = json.loads((tmp_path / "reference" / "gpu_tests.json").read_text())
    assert kept["tests"] == {"test_a.py::test_x": "passed", "test_a.py::test_y[1]": "passed"}
    assert kept["again"] == [{"when": FACTS["when"], "commit": "a later one", "tests": ["test_a.py::test_y[1]"]}]
    assert (kept["when"], kept["commit"]) == (FACTS["when"], FACTS["commit"])
    assert runner.choose_failed(tmp_path, FACTS["machine"]) == {}
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == ["run again: test_a.py::test_y[1]", said[0]] and said[0].endswith("all are run")
    (tmp_path / "tests.xml").write_text("<testsuites><testsuite/></testsuites>")
    with pytest.raises(LabError, match="No test was run"):
        runner.keep_outcomes(tmp_path, before)


def test_a_record_that_is_too_large_for_the_repository_is_refused(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "lab0.json").write_text("{}")
    runner.keep_notebooks(tmp_path)
    assert (tmp_path / "reference" / "gpu" / "lab0.json").exists()
    (tmp_path / "notebooks" / "lab1.json").write_text("x" * 250_001)
    with pytest.raises(LabError, match="too large"):
        runner.keep_notebooks(tmp_path)


# --- notebooks without Jupyter ---------------------------------------------------------------------------------------

CELLS = {
    "imports": "import inspect\nfrom pathlib import Path\nimport matplotlib.pyplot as plt\nx = 2",
    "value": "def double(y):\n    return 2 * y  # twice\n\nprint('printed')\ndouble(x)",
    "none": "print(end='')\nNone",
    "source": "class Two:\n    pass\n\nprint(inspect.getsource(double).splitlines()[1].strip())\nTwo.__module__",
    "shown": "from IPython.display import HTML, display as show\nshow(1, 'a'); HTML('<b>x &lt; y</b>')",
    "shell": "from IPython import get_ipython as ask\nask(), get_ipython()",
    "figures": "plt.plot([1, 2])\nplt.show()\nplt.figure(); plt.plot([2, 1])",
    "written": "Path('here.txt').write_text('kept in the copy')",
}


@pytest.fixture
def write_notebook(tmp_path, monkeypatch):
    """A checkout with one notebook, lab 0's, of these cells."""

    def write(cells):
        folder = tmp_path / "checkout" / "notebooks"
        (folder / "scripts").mkdir(parents=True, exist_ok=True)
        (folder / "scripts" / "train.py").write_text("pass")
        content = [
            {"cell_type": "code", "id": name, "source": source.splitlines(True), "outputs": [], "metadata": {}}
            for name, source in cells.items()
        ]
        text = [{"cell_type": "markdown", "id": "text", "source": ["# Lab 0"], "metadata": {}}]
        content = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": text + content}
        (folder / "00_tiny.ipynb").write_text(json.dumps(content))
        return folder / "00_tiny.ipynb"

    monkeypatch.setattr(notebooks, "checkout", lambda: tmp_path / "checkout")
    return write


# Runs a notebook of another checkout in a process of its own, which `run_here` asks for.
HERE = """
import sys
from pathlib import Path
from types import ModuleType
reference = sys.modules["course.reference"] = ModuleType("course.reference")  # the real one imports torch
reference.describe_machine = lambda: {{"label": "a machine", "torch": "2.11.0"}}
from benchmarks.gpu import notebooks
notebooks.checkout = lambda: Path({checkout!r})
sys.exit(0 if notebooks.run_here(0, Path({folder!r}), {changes!r} and [notebooks.Shorter(*{changes!r})]) else 1)
"""


def run_notebook(path, folder, changes=()):
    """Runs a notebook; returns the exit status and the record."""
    folder.mkdir(exist_ok=True)
    script = HERE.format(checkout=str(path.parents[1]), folder=str(folder), changes=changes)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=checkout(), capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, json.loads((folder / "lab0.json").read_text()), done


def test_a_notebook_runs_without_jupyter(write_notebook, tmp_path):
    path = write_notebook(CELLS)
    before = path.read_bytes()
    status, record, done = run_notebook(path, tmp_path / "out", ("imports", "x = 2", "x = 3", 1.5))
    assert (status, record["outcome"]) == (0, "passed"), done.stderr
    text = {name: cell["text"] for name, cell in record["cells"].items()}
    assert text["value"] == "printed\n6\n" and text["none"] == "" and text["shell"] == "(None, None)\n"
    assert text["source"] == "return 2 * y  # twice\n'__main__'\n"
    assert text["shown"] == "1\n'a'\nx < y\n"
    assert record["cells"]["figures"]["figures"] == ["lab0-07-0.png", "lab0-07-1.png"]
    for name in record["cells"]["figures"]["figures"]:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert all(cell["seconds"] >= 0 for cell in record["cells"].values())
    assert record["shortened"] == [{"cell": "imports", "text": "x = 2", "shorter": "x = 3", "factor": 1.5}]
    assert record["machine"]["label"] == "a machine" and record["when"] and record["scale"] == "small"
    assert "printed" in done.stdout, "the log has it too"
    # Nothing was written where the notebooks are.
    assert path.read_bytes() == before and sorted(file.name for file in path.parent.iterdir()) == [path.name, "scripts"]
    assert (tmp_path / "out" / "lab0" / "here.txt").exists() and (tmp_path / "out/lab0/scripts/train.py").exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("print('so far')\n1 / 0", "ZeroDivisionError: division by zero"),
        ("%matplotlib inline", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("from lab_common import LabError\nraise LabError('No such node.', fix='name one')", "No such node.\n  fix: "),
    ],
)
def test_a_cell_that_fails_ends_the_notebook_and_is_named(write_notebook, tmp_path, source, words):
    path = write_notebook({"good": "1", "bad": source, "never": "2"})
    status, record, _ = run_notebook(path, tmp_path / "out")
    assert (status, record["outcome"]) == (1, "failed in cell bad") and list(record["cells"]) == ["good", "bad"]
    error = record["cells"]["bad"]["error"]
    assert words in error and "benchmarks/gpu" not in error and str(tmp_path) not in error
    assert record["cells"]["bad"]["text"] == ("so far\n" if "so far" in source else "")


def test_notebooks_share_the_time_and_are_not_run_twice(write_notebook, tmp_path, monkeypatch):
    write_notebook({"one": "1"})
    ran, out = [], tmp_path / "notebooks.json"
    said = iter([0, 1, gpu.TIME_IS_UP])

    def pretend(command, *, seconds, log, env, cwd):
        ran.append(seconds)
        if (status := next(said)) == gpu.TIME_IS_UP:
            return None
        outcome = "passed" if status == 0 else f"{notebooks.FAILED} one"
        record = {"outcome": outcome, "identity": notebooks.identify(0, []), "cells": {"one": {}}}
        notebooks.write_json(tmp_path / "notebooks" / "lab0.json", record)
        return status

    monkeypatch.setattr(notebooks, "run_capped", pretend)
    assert notebooks.run_all([0], out, 60, lambda lab: []) == 0
    assert notebooks.run_all([0], out, 60, lambda lab: []) == 0 and len(ran) == 1, "it was done"
    write_notebook({"one": "2"})
    assert notebooks.run_all([0], out, 60, lambda lab: []) == 1 and len(ran) == 2, "it was changed"
    assert notebooks.run_all([0], out, 60, lambda lab: []) == 1 and len(ran) == 2, "it would fail again"
    write_notebook({"one": "3"})
    assert notebooks.run_all([0], out, 2, lambda lab: []) == gpu.TIME_IS_UP and len(ran) == 2
    assert json.loads(out.read_text()) == {"lab0": "not begun: the time was up"}
    assert notebooks.run_all([0], out, 60, lambda lab: []) == gpu.TIME_IS_UP and ran[-1] <= 60
    record = json.loads((tmp_path / "notebooks" / "lab0.json").read_text())
    assert record["outcome"] == "cut off: the time was up after 1 cells"


def test_what_is_shortened_stands_in_the_committed_notebooks():
    for changes in (notebooks.SHORTER, notebooks.REHEARSAL):
        for lab, some in changes.items():
            path = notebooks.find_notebook(lab, checkout() / "notebooks")
            cells = notebooks.read_cells(path, some)
            assert all(change.shorter in cells[change.cell] for change in some)
    with pytest.raises(LabError, match="cannot be shortened") as caught:
        notebooks.read_cells(path, [notebooks.Shorter("setups", "no such text", "", 1)])
    assert "0 times" in caught.value.cause


def test_no_cell_of_these_labs_has_a_magic():
    for lab in notebooks.LABS:
        for source in notebooks.read_cells(notebooks.find_notebook(lab, checkout() / "notebooks"), []).values():
            compile(source, "cell", "exec")


# --- reference runs --------------------------------------------------------------------------------------------------

SMI = """#!/bin/sh
case $1 in
*driver_version*) echo '580.95.05, P0, 345, 2619, 1980, 2619, 700.00, 31, 143771' ;;
*) echo '1' ;;
esac
"""


def test_a_gpus_clocks_are_known(tmp_path, monkeypatch):
    assert reference.read_gpus() == [] or os.access("/dev/nvidia0", os.R_OK)
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (gpu_found,) = reference.read_gpus()
    assert gpu_found["driver_version"] == "580.95.05" and gpu_found["clocks.max.sm"] == "1980"
    assert gpu_found.keys() == set(reference.GPU_FIELDS)
    here = reference.describe_machine()
    assert here["driver"] == "580.95.05" and here["clocks"] == [gpu_found] and here["label"]


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """A machine with a GPU, by its description, and records of its own."""
    here = replace(machine.describe(), gpus=(machine.Gpu("NVIDIA H200", 2**37, (9, 0)),), cuda="13.0")
    monkeypatch.setattr(machine, "describe", lambda: here)
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("course.reference.checkout", lambda: tmp_path)
    return tmp_path / "data" / "reference"


def test_a_reference_run_holds_what_was_measured_on_the_gpu_alone(on_gpu):
    slow, fast = (timing.Timing("one", (0.5,), device=device) for device in ("cpu", "cuda:0"))
    records = timing.Records("lab4")
    records.add("set-ups", {"cases": [slow]}, batch=8)
    with pytest.raises(LabError, match="no records of lab4 from a GPU of this machine") as caught:
        reference.save_reference("lab4")
    assert "two GPUs" in caught.value.cause
    records.add("set-ups", {"cases": [fast]}, batch=64)
    records.add("rates", {"GPU": {"GB/s": 3000.0}}, side=8192)
    reference.save_reference("lab4")
    label, found = reference.recorded("lab4", "set-ups", by="batch")
    assert found == {"64": {"cases": [fast]}}
    assert reference.recorded("lab4", "rates", by="side")[1] == {"8192": {"GPU": {"GB/s": 3000.0}}}
    assert (
        label.startswith("NVIDIA H200, torch 2.") and "+" not in label and label[-10:] == records.read()[0]["when"][:10]
    )
    assert reference.recorded("lab4", "training", by="batch") == reference.recorded("lab5", "x", by="y") == ("", {})


@pytest.mark.parametrize(
    ("name", "value"), [("clocks", None), ("python", 3), ("cuda", None), ("gpus", "one"), ("when", "yesterday")]
)
def test_a_reference_run_of_a_gpu_without_versions_clocks_or_date_is_refused(on_gpu, name, value):
    timing.Records("lab0").add("step", [timing.Timing("one", (0.5,), device="cuda:0")], model="tiny")
    path = reference.save_reference("lab0")
    assert reference.read("lab0")["machine"]["gpus"][0]["name"] == "NVIDIA H200"
    run = json.loads(path.read_text())
    (run if name == "when" else run["machine"])[name] = value
    path.write_text(json.dumps(run))
    with pytest.raises(LabError, match="cannot be read"):
        reference.read("lab0")


def test_several_labs_are_recorded_at_once(on_gpu, tmp_path, monkeypatch, capsys):
    timing.Records("lab0").add("step", [timing.Timing("one", (0.5,), device="cuda:0")], model="tiny")
    arguments = ["reference", "lab0", "lab1", "--into", str(tmp_path / "into")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert reference.main() == 1
    monkeypatch.setattr(sys, "argv", [*arguments, "--some"])
    assert reference.main() == 0
    said = capsys.readouterr()
    assert "wrote into/lab0.json" in said.out and "There are no records of lab1" in said.err
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["lab0.json"] and not on_gpu.exists()


# --- all of it -------------------------------------------------------------------------------------------------------


def test_the_whole_rehearsal(tmp_path, root):
    """The one test here that takes long: some tests, lab 0 in a few steps, its reference, and the benchmark."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", str(tmp_path), "--minutes", "20"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=1300, check=False)
    results = json.loads((tmp_path / "results.json").read_text())
    outcomes = {name: step["outcome"] for name, step in results["steps"].items()}
    assert outcomes == dict.fromkeys(("tests", "notebooks", "references", "speed"), "passed"), done.stdout + done.stderr
    assert done.returncode == 0 and results["machine"]["torch"] and results["machine"]["cudnn"] != 0
    assert json.loads((tmp_path / "reference" / "gpu_tests.json").read_text())["tests"]
    run = json.loads((tmp_path / "reference" / "lab0.json").read_text())
    assert run["machine"]["label"] == results["machine"]["label"] and run["records"][0]["kind"] == "step"
    record = json.loads((tmp_path / "reference" / "gpu" / "lab0.json").read_text())
    assert record["outcome"] == "passed" and "✔ 0.3" in record["cells"]["exercise-bytes"]["text"]
    assert str(root) not in json.dumps(record) and str(tmp_path) not in json.dumps(record)
    found = json.loads((tmp_path / "speed.json").read_text())
    timed = {one["arm"] for one in found["measurements"] if one.get("finite") and len(one["seconds"]) == ROUNDS}
    assert {"eager", "examples AMP", "torchvision AMP fp16", "torchvision fp32", "examples fp32"} <= timed
    assert "not on a CPU" in {one["status"] for one in found["measurements"] if one["arm"] == "graph"}
    assert found["profiles"][0]["arm"] == "eager" and found["roofline"]["imagenet"]["8"]["fused"] > 0
    assert not subprocess.run(
        ["git", "-C", root, "status", "--porcelain", "data", "notebooks"], capture_output=True, check=False
    ).stdout.strip()
