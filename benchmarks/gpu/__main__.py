"""Tests and measures on a machine with a GPU: ``make gpu``, or ``python -m benchmarks.gpu``, in at most 9 minutes.

The most valuable comes first: the tests of what runs on a GPU, the notebooks of labs 0, 1, 4 and 5, their records as
reference runs, and ResNet-152 against other people's scripts. Each step is its own process with a time limit and a log,
OUT/STEP.log. What came of it is in OUT/results.json after each, and another call goes on where this one ended. On a GPU
the files of OUT/reference/ are copied to data/reference/. ``--dry`` rehearses everything on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import psutil

from benchmarks.gpu import TIME_IS_UP, report, write_json
from course.reference import describe_machine
from lab_common import LabError, checkout
from lab_common.commandline import read_option

GRACE = 8.0  # seconds after an interrupt, in which pytest still writes its report
LABS = (0, 1, 4, 5)
LAST_LINES = 12  # of a step's log, which are shown


@dataclass(frozen=True)
class Step:
    """One step: its name, command (``{seconds}`` is what it may take), most seconds, and settings of its environment.

    Attributes:
        after: Called when it has ended, also where its time was up.
        always: True to run it again where it has passed.
    """

    name: str
    command: tuple[str, ...]
    cap: float
    env: dict[str, str] = field(default_factory=dict)
    after: Callable[[], None] = lambda: None
    always: bool = False


def list_steps(out: Path, *, dry: bool) -> list[Step]:
    """Returns the steps, the most valuable first; ``dry`` makes them small."""
    python, reference = (sys.executable, "-m"), out / "reference"
    tests = (*python, "pytest", "-c", "tests/gpu/pytest.ini", "--confcutdir=tests/gpu", "tests/gpu")
    tests += ("-p", "no:cacheprovider", f"--junitxml={out / 'tests.xml'}")
    scale = {"LAB_SCALE": "small", "LAB_ROUNDS": "2"} if dry else {"LAB_SCALE": "full"}
    notebooks = [
        Step(
            f"lab{lab}",
            (*python, "benchmarks.gpu.notebook", str(lab), "--out", str(out / "notebooks")),
            cap,
            env=scale | {"TQDM_DISABLE": "1"},
        )
        for lab, cap in zip(LABS, (40, 180, 60, 60), strict=True)
        if not (dry and lab)
    ]
    labs = [f"lab{lab}" for lab in LABS]
    references = (*python, "course.reference", *labs, "--some", "--into", str(reference))
    speed = (*python, "benchmarks.gpu.speed", "--out", str(out / "speed.json"), "--seconds", "{seconds}")
    steps = [
        Step("tests", tests, 150, after=lambda: keep_outcomes(out)),
        *notebooks[:2],
        Step("references", (*references, *["--allow-cpu"] * dry), 60, always=True),
        Step("speed", (*speed, *["--dry"] * dry), 540, after=lambda: keep_speed(out)),
        *notebooks[2:],
    ]
    return [replace(one, cap=3600) for one in steps] if dry else steps


def run_capped(step: Step, out: Path, seconds: float) -> int | None:
    """Runs a step in a session of its own, and ends all its descendants with it or when its time is up.

    Returns:
        The exit status, negative for a signal; None if its time was up.
    """
    command = [part.replace("{seconds}", f"{max(1.0, 0.95 * seconds - GRACE):.0f}") for part in step.command]
    env = {**os.environ, "LAB_RUNS": str(out / "runs"), "PYTHONPATH": str(checkout()), "PYTHONUNBUFFERED": "1"}
    with (out / f"{step.name}.log").open("wb") as log:
        more = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": checkout(), "start_new_session": True}
        child = subprocess.Popen(command, env=env | step.env, **more)
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # torchrun gives its ranks sessions of their own: they are found while their parents live.
            family = []
            with contextlib.suppress(psutil.Error):
                family = psutil.Process(child.pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses where only zombies are left
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def describe_outcome(status: int | None) -> str:
    """Returns an outcome in words: ``passed``, ``failed: …``, or that another call will go on."""
    if status in (None, TIME_IS_UP):
        return "unfinished: its time was up, call again to go on"
    if status == 0:
        return "passed"
    return f"failed: {f'exit status {status}' if status > 0 else f'ended by signal {-status}'}"


def run_all(steps: list[Step], out: Path, seconds: float) -> bool:
    """Runs the steps that have not passed, in order, as long as there is time; returns True if all have passed."""
    path, end = out / "results.json", time.monotonic() + seconds
    results = read_results(path)
    for step in steps:
        left = end - time.monotonic()
        if results["steps"].get(step.name, {}).get("outcome") == "passed" and not step.always:
            print(f"{step.name}: passed before; --fresh runs it anew", flush=True)
            continue
        if left < 20:
            print(f"{step.name}: not begun, {max(0, left):.0f} s were left", flush=True)
            continue
        print(f"{step.name}: at most {min(step.cap, left):.0f} s ...", flush=True)
        start = time.monotonic()
        status = run_capped(step, out, min(step.cap, left))
        outcome = describe_outcome(status)
        try:
            step.after()
        except (LabError, OSError) as error:
            outcome = outcome if status is None else f"failed: {error}"
        when = datetime.now(UTC).isoformat(timespec="seconds")
        results["steps"][step.name] = {"outcome": outcome, "seconds": round(time.monotonic() - start, 1), "when": when}
        write_json(path, results)
        for line in (out / f"{step.name}.log").read_text(errors="replace").splitlines()[-LAST_LINES:]:
            print("   ", line[:160])
        print(f"{step.name}: {outcome}, {results['steps'][step.name]['seconds']:.0f} s", flush=True)
    return all(results["steps"].get(step.name, {}).get("outcome") == "passed" for step in steps)


def read_results(path: Path) -> dict:
    """Returns what came of the steps of earlier calls on this machine, with its facts."""
    here = describe_machine()
    facts = {"machine": here, "torch": here["torch"], "when": datetime.now(UTC).isoformat(timespec="seconds")}
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(path.read_bytes())
        if (before["machine"]["label"], before["torch"]) == (here["label"], here["torch"]):
            return facts | {"steps": before["steps"]}
    return facts | {"steps": {}}


def keep_outcomes(out: Path) -> None:
    """Writes each test's outcome to ``reference/gpu_tests.json``, from pytest's report in ``tests.xml``.

    Raises:
        LabError: There is no such report: pytest did not get that far.
    """
    try:
        cases = list(ElementTree.parse(out / "tests.xml").iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise LabError("pytest left no report.", where=out / "tests.xml", fix=f"less {out / 'tests.log'}") from error
    tests = {}
    for case in cases:
        marks = {child.tag for child in case}  # JUnit's words for what was no pass
        outcome = "failed" if marks & {"failure", "error"} else "skipped" if "skipped" in marks else "passed"
        tests[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = outcome
    facts = read_results(out / "results.json")
    (out / "reference").mkdir(exist_ok=True)
    kept = {"machine": facts["machine"], "torch": facts["torch"], "when": facts["when"], "tests": tests}
    write_json(out / "reference" / "gpu_tests.json", kept)


def keep_speed(out: Path) -> None:
    """Copies the benchmark's result to ``reference/``, once a group has been measured."""
    if (out / "speed.json").exists():
        (out / "reference").mkdir(exist_ok=True)
        shutil.copy(out / "speed.json", out / "reference" / "gpu_speed.json")


def publish_references(out: Path, root: Path) -> None:
    """Copies ``reference/`` to data/reference, and writes the page that is made from it.

    What has measured or run less than the record that is there does not replace it.
    """
    for path in sorted((out / "reference").glob("*.json")):
        target = root / "data" / "reference" / path.name
        if not target.exists() or _count_parts(path) >= _count_parts(target):
            shutil.copy(path, target)
    if (out / "reference" / "gpu_speed.json").exists():
        report.keep(root)


def _count_parts(path: Path) -> int:
    """Returns how much is in a record: groups of arms, tests that passed, or records of a lab."""
    content = json.loads(path.read_bytes())
    passed = [name for name, outcome in content.get("tests", {}).items() if outcome == "passed"]
    return len(content.get("groups", passed or content.get("records", ())))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 if a step failed or was cut off, 130 after an interrupt."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=read_option, metavar="FOLDER", help="runs/gpu; runs/gpu-dry for a rehearsal")
    parser.add_argument("--dry", action="store_true", help="a rehearsal, on a CPU too, at the smallest size")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="only these steps")
    parser.add_argument("--fresh", action="store_true", help="run again what is done")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all together (9)")
    arguments = parser.parse_args(argv)
    dry = arguments.dry
    out = (arguments.out or checkout() / "runs" / ("gpu-dry" if dry else "gpu")).resolve()
    steps = list_steps(out, dry=dry)
    if unknown := set(arguments.only or ()) - {step.name for step in steps}:
        parser.error(f"there is no step {min(unknown)!r}; choose from {', '.join(step.name for step in steps)}")
    here = describe_machine()
    if not (here["gpus"] or dry):
        fix = "run it on a machine with a GPU, or rehearse: python -m benchmarks.gpu --dry"
        print(LabError("There is no GPU that torch can use.", where=here["label"], fix=fix), file=sys.stderr)
        return 1
    print(f"{here['label']}: torch {here['torch']}, CUDA {here['cuda']}, driver {here['driver'] or 'not known'}")
    out.mkdir(parents=True, exist_ok=True)
    if arguments.fresh:
        (out / "results.json").unlink(missing_ok=True)
        (out / "speed.json").unlink(missing_ok=True)
    chosen = [step for step in steps if not arguments.only or step.name in arguments.only]
    try:
        passed = run_all(chosen, out, 3600 if dry else 60 * arguments.minutes - 10)
        if not dry:
            publish_references(out, checkout())
    except KeyboardInterrupt:
        print("\nStopped; what is done is kept, and another call goes on from there.", file=sys.stderr)
        return 130
    print(f"results: {out / 'results.json'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
