"""Tests and measures on a machine with a GPU: ``make gpu``, or ``python -m benchmarks.gpu``, in at most 9 minutes.

The most valuable comes first: the tests of what runs on a GPU, the notebooks of labs 0, 1, 4 and 5, their records as
reference runs, and ResNet-152 against other people's scripts. Each step is its own process with a time limit. The
results are on the disk after each, in OUT/results.json and OUT/STEP.log, and another call continues where this one
ended: a finished step is not run again as long as its sources and the machine are the same. On a GPU the files of
OUT/reference/ are copied to data/reference/. ``--dry`` rehearses everything on a CPU, at the smallest size.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu import GRACE, TIME_IS_UP, run_capped
from benchmarks.gpu.notebooks import LABS, read_record, write_json
from lab_common import LabError, checkout
from lab_common.commandline import read_option
from lab_common.files import write_atomically
from lab_common.text import clean

PACKAGES = ("lab_common", "lab_utils", "nodelaunch", "course")
SOURCES = (".py", ".ipynb", ".ini")
# Of the files here: they do not change what the step "speed" finds.
NOT_MEASURED = ("__main__.py", "notebooks.py", "speed_report.py")
LAST_LINES = 12  # of a step's log, which are shown
REFERENCE_BYTES = 250_000  # of a notebook's record in data/reference: four of them are less than 1 MB
# Packages that some steps can use, and what is lost without them.
USEFUL = {
    "timm": "its loop is not measured",
    "lightning": "its Trainer is not measured",
    "triton": "nothing is compiled for the GPU",
    "tensorboard": "what writes for it is not tested",
}
ASK = "import json; from course.reference import describe_machine; print(json.dumps(describe_machine()))"


@dataclass(frozen=True)
class Step:
    """One step, which runs as its own process.

    Attributes:
        name: Its name, also that of the log.
        command: The command; ``{seconds}`` is replaced by the seconds that it may take.
        cap: The most seconds.
        needs: Packages without which it is skipped.
        code: Files and folders of the checkout: if a source there changes, the step is run again.
        least: It is not started with fewer seconds than this left.
        always: True to run it again even if nothing changed.
        files: Required files; if one is missing, the step is skipped.
        leaves: Files and folders of OUT that are removed before it starts over.
        resumes: True if it continues where it was cut off, with the files that it left.
        after: Called when it has ended by itself.
    """

    name: str
    command: tuple[str, ...]
    cap: float
    needs: tuple[str, ...] = ()
    code: tuple[str, ...] = PACKAGES
    least: float = 20.0
    always: bool = False
    files: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    resumes: bool = False
    after: Callable[[], None] = lambda: None


def list_steps(out: Path, *, dry: bool, before: dict[str, Any] | None = None) -> list[Step]:
    """Returns the steps, the most valuable first; ``dry`` makes them small.

    Args:
        out: The folder for their results.
        dry: True for the rehearsal.
        before: Earlier content of ``gpu_tests.json``, to which the outcomes of the tests are added.
    """
    python, labs = sys.executable, [f"lab{lab}" for lab in (LABS[:1] if dry else LABS)]
    pytest = (python, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--confcutdir=tests/gpu")
    pytest += ("tests/gpu/test_gpu_timing.py" if dry else "tests/gpu",)  # `make test` rehearses them all
    pytest += ("-p", "no:cacheprovider", f"--junitxml={out / 'tests.xml'}")
    notebooks = (python, "-m", "benchmarks.gpu.notebooks", "--out", str(out / "notebooks.json"))
    notebooks += ("--dry" if dry else "--short", "--seconds", "{seconds}", *map(str, LABS))
    reference = (python, "-m", "course.reference", *labs, "--some", "--into", str(out / "reference"))
    reference += ("--allow-cpu",) if dry else ()
    speed = (python, "-m", "benchmarks.gpu.speed", "--out", str(out / "speed.json"), "--seconds", "{seconds}")
    speed += ("--dry",) if dry else ()
    own = ("benchmarks/gpu/__init__.py", "benchmarks/gpu/notebooks.py", "notebooks")
    others = sorted(path.name for path in Path(__file__).parent.glob("*.py") if path.name not in NOT_MEASURED)
    steps = [
        Step(
            "tests",
            pytest,
            cap=150,
            needs=("pytest", "torch"),
            code=(*PACKAGES, *own, "tests/gpu"),
            files=("tests/gpu/pytest.ini",),
            leaves=("tests.xml",),
            after=lambda: keep_outcomes(out, before),
        ),
        Step(
            "notebooks",
            notebooks,
            cap=240,
            needs=("torch", "matplotlib", "pandas", "tqdm"),
            code=(*PACKAGES, *own),
            leaves=("notebooks", "notebooks.json", "runs"),
            resumes=True,
            after=lambda: keep_notebooks(out),
        ),
        Step("references", reference, cap=60, needs=("torch",), least=10, always=True),
        Step(
            "speed",
            speed,
            cap=540,
            needs=("torch", "torchvision"),
            code=("lab_common", "lab_utils", *(f"benchmarks/gpu/{name}" for name in others)),
            files=("benchmarks/gpu/speed.py",),
            leaves=("speed.json",),
            resumes=True,
            after=lambda: keep_speed(out),
        ),
    ]
    # A rehearsal may be on a CPU that does much else, and has no GPU to give back.
    return [replace(step, cap=3600) for step in steps] if dry else steps


def describe_here(root: Path) -> dict[str, Any]:
    """Returns the machine's facts, the date and the version of the code.

    A separate process asks for them, so that the GPU is released when it ends.

    Raises:
        LabError: torch cannot be imported, or does not answer.
    """
    try:
        said = subprocess.run([sys.executable, "-c", ASK], cwd=root, capture_output=True, text=True, timeout=120)
        machine = json.loads(said.stdout or "null")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise LabError("This machine could not be described.", cause=str(error)[:300], fix="nvidia-smi") from error
    if machine is None:
        cause = (said.stderr.strip().splitlines() or [f"it ended with {said.returncode}"])[-1]
        raise LabError("This machine could not be described.", cause=cause, fix="make setup")
    commit, changes = ask_git(root, "rev-parse", "HEAD"), ask_git(root, "status", "--porcelain")
    return {
        "machine": machine,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or "unknown",
        "changed": None if changes is None else bool(changes),
        "missing": name_missing(machine),
    }


def ask_git(root: Path, *arguments: str) -> str | None:
    """Returns git's answer about the checkout; None if there is no git or no repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
        return said.stdout.strip() if said.returncode == 0 else None
    return None


def name_missing(machine: dict[str, Any]) -> list[str]:
    """Lists what this machine lacks and what that costs."""
    found = [f"{name} is not installed: {loss}" for name, loss in USEFUL.items() if not has_package(name)]
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        found.append("there is no C compiler: torch.compile fails")
    if not shutil.which("nvcc"):
        found.append("there is no nvcc: nothing here needs it")
    if machine["gpus"] and not machine["clocks"]:
        found.append("nvidia-smi does not answer: driver and clocks are not known")
    if len(machine["gpus"]) == 1:
        found.append("there is one GPU: what takes two, DataParallel and DDP over NCCL, is not measured")
    return found


def has_package(name: str) -> bool:
    """Returns True if a package can be imported, judging by its files."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def identify(step: Step, facts: dict[str, Any], root: Path) -> str:
    """Returns a digest of a step's command, sources and machine: the step is run again when it changes."""
    here = facts["machine"]
    digest = hashlib.sha256(repr([step.command, here["label"], here["torch"], here["python"]]).encode())
    for name in step.code:
        place = root / name
        files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.suffix in SOURCES)
        for file in files:
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


class Run:
    """One call: runs the steps in order and keeps their results on the disk at all times.

    Args:
        out: The folder; ``results.json`` of an earlier call is continued.
        facts: Result of ``describe_here``.
        seconds: Time limit for all steps together.
        fresh: Steps whose earlier results are forgotten.
        publish: Called after each step that has ended by itself.
    """

    def __init__(
        self,
        out: Path,
        facts: dict[str, Any],
        *,
        seconds: float,
        fresh: Sequence[str] = (),
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.out, self.root, self.publish = out / "results.json", out, checkout(), publish
        self.minutes, self.end = seconds / 60, time.monotonic() + seconds
        steps = read_record(self.path).get("steps", {})
        steps = {name: known for name, known in steps.items() if name not in fresh}
        self.results: dict[str, Any] = {**facts, "minutes": self.minutes, "steps": steps}
        write_json(self.path, self.results)

    def run(self, steps: Sequence[Step], *, again: Sequence[str] = ()) -> None:
        """Runs the steps that are not done; those in ``again`` also if they have failed before."""
        for step in steps:
            identity = identify(step, self.results, self.root)
            before = self.results["steps"].get(step.name, {})
            outcome = str(before.get("outcome", ""))
            done = outcome == "passed" or (outcome.startswith("failed") and step.name not in again)
            if done and before.get("identity") == identity and not step.always:
                print(
                    f"{step.name}: {outcome} on {before['when'][:10]}, not run again (--fresh runs it anew)", flush=True
                )
            elif words := self.find_obstacle(step):
                self.note(step, words, identity, 0.0)
                print(f"{step.name}: {words}", flush=True)
            else:
                if not (step.resumes and before.get("identity") == identity and not outcome.startswith("failed")):
                    self.remove(step.leaves)
                self.run_step(step, identity)

    def remove(self, names: Sequence[str]) -> None:
        """Removes files that a step left in an earlier call."""
        for name in names:
            shutil.rmtree(self.out / name, ignore_errors=True)
            with contextlib.suppress(OSError):
                (self.out / name).unlink()

    def find_obstacle(self, step: Step) -> str:
        """Explains why a step cannot be run now; "" if it can."""
        packages = [name for name in step.needs if not has_package(name)]
        files = [name for name in step.files if not (self.root / name).exists()]
        if packages or files:
            return f"left out: {', '.join(packages + files)} {'are' if len(packages + files) > 1 else 'is'} not here"
        left = max(0.0, self.end - time.monotonic())
        return f"not begun: {left:.0f} s were left of {self.minutes:g} minutes" if left < step.least else ""

    def run_step(self, step: Step, identity: str) -> None:
        """Runs one step and notes its outcome."""
        cap = min(step.cap, self.end - time.monotonic())
        log = self.out / f"{step.name}.log"
        log.unlink(missing_ok=True)
        # Less than the cap, so that it has the time to end by itself what it had started.
        command = [part.replace("{seconds}", f"{max(1.0, 0.95 * cap - GRACE):.0f}") for part in step.command]
        print(f"{step.name}: at most {cap:.0f} s ...", flush=True)
        self.note(step, "running", identity, 0.0)
        start, env = time.monotonic(), {"LAB_RUNS": str(self.out / "runs"), "PYTHONUNBUFFERED": "1"}
        try:
            status = run_capped(command, seconds=cap, log=log, env=env, cwd=self.root)
        except KeyboardInterrupt:
            self.note(step, "interrupted", identity, time.monotonic() - start)
            raise
        except OSError as error:
            status, words = -1, f"failed: it could not be started: {error}"
        else:
            words = tell_status(status, cap)
        seconds = time.monotonic() - start
        self.note(step, words, identity, seconds)
        if status is not None:
            try:
                step.after()
                self.publish()
            except (LabError, OSError) as error:
                self.note(step, f"failed: {error}", identity, seconds)
        for line in (log.read_text(errors="replace").splitlines() if log.exists() else [])[-LAST_LINES:]:
            print("   ", clean(line, 160))
        print(f"{step.name}: {self.results['steps'][step.name]['outcome']}, {seconds:.0f} s", flush=True)

    def note(self, step: Step, outcome: str, identity: str, seconds: float) -> None:
        """Writes a step's outcome to the results."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        known = {"outcome": outcome, "seconds": round(seconds, 1), "identity": identity, "when": when}
        self.results["steps"][step.name] = known
        write_json(self.path, self.results)


def tell_status(status: int | None, cap: float) -> str:
    """Returns an outcome in words: ``passed``, ``failed: …``, or where another call will continue."""
    if status is None:
        return f"cut off after {cap:.0f} s: call again to go on"
    if status == TIME_IS_UP:
        return "unfinished: its time was up, call again to go on"
    if status == 0:
        return "passed"
    return f"failed: {f'exit status {status}' if status > 0 else f'ended by signal {-status}'}"


def choose_failed(out: Path, here: dict[str, Any]) -> dict[str, Any]:
    """Makes pytest run only the tests that failed before on this machine and torch, and prints which.

    Returns:
        The earlier content of ``gpu_tests.json``; {} if no such test is known, so that all are run.
    """
    before = read_record(out / "reference" / "gpu_tests.json")
    same = before.get("torch") == here["torch"] and before.get("machine", {}).get("label") == here["label"]
    failed = [name for name, outcome in before.get("tests", {}).items() if outcome == "failed"] if same else []
    if not failed:
        print("no test is known that failed here before: all are run")
        return {}
    print(f"run again: {', '.join(failed)}")
    names = sorted({name.rpartition("::")[2].partition("[")[0] for name in failed})
    # Not an argument: the step is the same, and what came of it counts for the next call.
    os.environ["PYTEST_ADDOPTS"] = f"-k '{' or '.join(names)}'"
    return before


def keep_outcomes(out: Path, before: dict[str, Any] | None = None) -> None:
    """Writes each test's outcome to ``reference/gpu_tests.json``, from pytest's report in ``tests.xml``.

    Args:
        out: The folder.
        before: Earlier content. It stays, with its date and commit, except for tests that were run again, which are
            listed with today's date and commit.

    Raises:
        LabError: There is no such report: pytest did not get that far.
    """
    try:
        cases = list(ElementTree.parse(out / "tests.xml").iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise LabError("pytest left no report.", where=out / "tests.xml", log=out / "tests.log") from error
    tests, seconds = {}, {}
    for case in cases:
        # JUnit's words for what was no pass; a test's own failure comes before that of its clean-up.
        marks = {child.tag for child in case}
        outcome = "failed" if marks & {"failure", "error"} else "skipped" if "skipped" in marks else "passed"
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        if tests.get(name) != "failed":
            tests[name], seconds[name] = outcome, float(case.get("time", 0))
    if not cases:
        fix = "run them all: python -m benchmarks.gpu --only tests"
        raise LabError("No test was run.", where=out / "tests.xml", fix=fix, log=out / "tests.log")
    facts = read_record(out / "results.json")
    content = {"machine": facts["machine"], "when": facts["when"], "commit": facts["commit"]}
    content |= {"torch": facts["machine"]["torch"], "tests": tests, "seconds": seconds}
    if before:
        again = {"when": content["when"], "commit": content["commit"], "tests": sorted(tests)}
        # A file that could not be read stands there as a test without a file.
        known = {name: outcome for name, outcome in before["tests"].items() if not name.startswith(".py::")}
        content = before | {"again": [*before.get("again", []), again]}
        content |= {"tests": known | tests, "seconds": before["seconds"] | seconds}
    (out / "reference").mkdir(exist_ok=True)
    write_json(out / "reference" / "gpu_tests.json", content)


def keep_notebooks(out: Path) -> None:
    """Copies the records of the notebooks to ``reference/gpu/``; the figures stay where they are.

    Raises:
        LabError: A record is too large for the repository.
    """
    (out / "reference" / "gpu").mkdir(parents=True, exist_ok=True)
    for path in sorted((out / "notebooks").glob("lab*.json")):
        if path.stat().st_size > REFERENCE_BYTES:
            cause = f"it has {path.stat().st_size:,} bytes, and {REFERENCE_BYTES:,} is the most"
            raise LabError("A notebook's record is too large.", where=path.name, cause=cause)
        shutil.copy(path, out / "reference" / "gpu" / path.name)


def keep_speed(out: Path) -> None:
    """Copies the benchmark's result to ``reference/``, once a group has been measured."""
    if read_record(out / "speed.json").get("groups"):
        (out / "reference").mkdir(exist_ok=True)
        shutil.copy(out / "speed.json", out / "reference" / "gpu_speed.json")


def publish_references(out: Path, root: Path) -> None:
    """Copies ``reference/`` to data/reference, and regenerates the pages made from it."""
    for path in sorted((out / "reference").rglob("*.json")):
        target = root / "data" / "reference" / path.relative_to(out / "reference")
        target.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(target) as file:
            file.write(path.read_bytes())
    if (root / "tests" / "gpu" / "paths.py").exists() and (out / "reference" / "gpu_tests.json").exists():
        run_capped([sys.executable, "-m", "tests.gpu.paths"], seconds=60, log=out / "paths.log", cwd=root)
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(root / "benchmarks" / "gpu" / "PATHS.md", out / "PATHS.md")
    if (out / "reference" / "gpu_speed.json").exists():
        log = out / "speed_report.log"
        if run_capped([sys.executable, "-m", "benchmarks.gpu.speed_report"], seconds=60, log=log, cwd=root):
            print(f"docs/performance.md was not written: {log.name} says why.", flush=True)


def print_facts(facts: dict[str, Any]) -> None:
    """Prints the machine's facts, and what is missing."""
    here, changed = facts["machine"], {True: ", changed", False: "", None: ""}[facts["changed"]]
    print(f"{here['label']}: torch {here['torch']}, torchvision {here['torchvision']}, Python {here['python']}")
    print(f"CUDA {here['cuda']}, cuDNN {here['cudnn']}, NCCL {here['nccl']}, driver {here['driver'] or 'not known'}")
    for gpu in here["clocks"]:
        print("   ", clean(", ".join(f"{field} {value}" for field, value in gpu.items()), 240))
    print(f"commit {facts['commit']}{changed}; {facts['when']}")
    for words in facts["missing"]:
        print(f"missing: {words}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 if a step failed or was cut off, 130 after an interrupt."""
    # A shell that starts us in the background has interrupts ignored, and what we start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = [step.name for step in list_steps(Path(), dry=True)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=read_option, default=checkout() / "runs" / "gpu", metavar="FOLDER")
    parser.add_argument("--dry", action="store_true", help="a rehearsal, on a CPU too, at the smallest size")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STEP", help=", ".join(names))
    parser.add_argument("--fresh", action="store_true", help="run again what is done")
    parser.add_argument("--failed", action="store_true", help="run those tests alone that failed before")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all together (9)")
    arguments = parser.parse_args(argv)
    out, root = arguments.out.resolve(), checkout()
    seconds = 60 * arguments.minutes - 10  # for the start and the end
    try:
        out.mkdir(parents=True, exist_ok=True)
        facts = describe_here(root)
        if not (facts["machine"]["gpus"] or arguments.dry):
            fix = "run it on a machine with a GPU, or rehearse: python -m benchmarks.gpu --dry"
            raise LabError("There is no GPU that torch can use.", where=facts["machine"]["label"], fix=fix)
        print_facts(facts)
        os.environ.update({"OMP_NUM_THREADS": "1"} if arguments.dry else {})
        publish = (lambda: None) if arguments.dry else lambda: publish_references(out, root)
        fresh = arguments.only if arguments.fresh else ()
        run = Run(out, facts | {"dry": arguments.dry}, seconds=seconds, fresh=fresh, publish=publish)
        before = {"before": choose_failed(out, facts["machine"])} if arguments.failed else {}
        steps = [step for step in list_steps(out, dry=arguments.dry, **before) if step.name in arguments.only]
        again = arguments.only if arguments.only != names else ["tests"] if arguments.failed else []
        run.run(steps, again=again)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; what is done is kept, and another call goes on from there.", file=sys.stderr)
        return 130
    print(f"results: {run.path}")
    outcomes = [str(run.results["steps"][step.name]["outcome"]) for step in steps]
    return 1 if any(outcome.startswith(("failed", "cut off")) for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
