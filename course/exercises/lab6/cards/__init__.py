"""Fault cards: a small job with one thing wrong, which the learner runs, names the cause of, and mends.

``cards.draw("stops")`` draws a card; ``card.run()`` runs its job on one or two nodes of this machine, on the CPU, so
that the symptom is the same everywhere; ``card.name("C")`` says whether that is the cause, and then writes the job into
``cards/`` beside the notebook; ``check.exercise("6.1", card)`` runs what the learner made of the file. A card is worth
three points: a wrong letter costs one, and so does ``card.hint()``.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import os
import random
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import nodelaunch as launch
from course.check import attempts
from course.check.verdicts import expect
from course.exercises import slurm_stand_in
from course.exercises.lab6.cards.faults import FAULTS, PILES, SUFFIXES, TOPICS, Fault, read_job
from lab_common import LabError
from lab_common.files import read_bounded, write_atomically

# Longer than an operation of these jobs takes on a busy laptop.
HANG_SECONDS = 20
SHOWN = "# Written by card.solve().\n"
POINTS = 3  # of a card whose cause was named at once
# Of a job that Slurm has started: its variables, as far as the job does not depend on the start.
SLURM = {
    "requeued": {"SLURM_JOB_ID": "4711"},
    # One task, which is torchrun.
    "logged": {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
}
# In place of torchrun, which takes longer to start than such a job to train.
ALONE = ("python", "-m", "nodelaunch.node.worker")
HOST = "localhost"  # the node of a batch script
PYTHON = sys.executable  # what runs torchrun and the training script of a batch script


@dataclass
class Card:
    """A card: its number, the file that the learner mends, and whether the cause was named.

    Attributes:
        number: From 1, the same for everybody.
        pile: Which pile it is from.
        path: The job, relative to the notebook's folder; the file is there once the cause is named.
        fault: What is wrong.
        named: Whether the learner has named the cause.
    """

    number: int
    pile: str
    path: Path
    fault: Fault = field(repr=False)  # printing a card must not give it away
    named: bool = False

    def run(self) -> launch.JobResult:
        """Runs the job as it is, shows what it prints, and says how it ended.

        Returns:
            The result, with the failure in it; a failed job does not raise.
        """
        from IPython.display import display

        shown, job = [], self._read_as_it_is()

        def show(line: str) -> None:
            shown.append(line)
            # A batch script is no rank.
            print(_shorten(_quote_lines(line.removeprefix("[rank 0] ") if self.fault.job == "batch" else line, job)))

        result = self.start(show=show)
        if result.failure:
            failure = _leave_out_shown(result.failure, shown)
            display(launch.JobError(replace(result, failure=failure)))
        else:
            print(f"\nCard {self.number} ran to its end.")
        return result

    def start(
        self,
        *,
        show: bool | Callable[[str], None] = False,
        layout: tuple[int, int] | None = None,
        points: int = 0,
        ends: tuple[int, ...] = (),
        **seconds: float,
    ) -> launch.JobResult:
        """Runs the job as it is, on so many nodes, with so many processes on each.

        Args:
            show: Where its lines go, see ``launch.TorchrunJob.run``.
            layout: Nodes, and processes on each; the first of the fault's where it is left out.
            points: How many points it trains on, where that is not the number that it says.
            ends: For a job that is started again and again, after how many epochs each start but the last one ends;
                the first of the fault's where it is left out.
            **seconds: What takes so long: ``PREPARE`` the points, ``SAVE`` the checkpoint.

        Returns:
            The result, with the failure in it; a failed job does not raise. A job that was started again has what each
            start reported.
        """
        nodes, processes = layout or self.fault.layouts[0]
        with tempfile.TemporaryDirectory(prefix="card-", ignore_cleanup_errors=True) as folder:
            path = self.path
            # The learner who has not named the cause yet does not see the job.
            if points or not path.exists():
                text = self._read_as_it_is()
                path = Path(folder, "drawn", path.name)
                _write(path, re.sub(r"^(POINTS, .* = )\d+", rf"\g<1>{points}", text, flags=re.M) if points else text)
            options = {"nodes": launch.local_nodes(nodes, folder=folder), "nproc_per_node": processes, "limit": 120}
            env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | SLURM.get(self.fault.job, {})
            env |= {f"SECONDS_TO_{what}": str(value) for what, value in seconds.items()}

            def run(program: Sequence[str] = (), **more: str) -> launch.JobResult:
                given = {"env": env | more, "program": program} if program else {"env": env | more}
                # That ranks train alone is the learner's to find out.
                given |= {"hang_timeout": HANG_SECONDS, "needs_group": False}
                job = launch.TorchrunJob(path, [folder], **options, **given)
                # What is red on this machine is none of the card's faults.
                return job.run(check=False, force=True, show=show)

            if self.fault.job == "batch":
                return _run_batch(run, self._read_as_it_is(), Path(folder), Path(options["nodes"][0].folder, "work"))
            return _run_again(run, ends or self.fault.ends[:1], show) if self.fault.ends else run()

    def name(self, letter: str) -> None:
        """Names the cause by its letter in the lab's list; if it is right, the job opens.

        Raises:
            NotYetError: It is another one, which costs a point; the hint says where to look.
            LabError: There is no such letter.
        """
        causes = {fault.letter: fault.cause for fault in FAULTS}
        if letter not in causes:
            fix = f"one of the letters {', '.join(causes)}, in quotes"
            raise LabError(f"There is no cause {letter!r:.40}.", where="card.name", cause="a typo", fix=fix)
        diagnosis, right = self._read_diagnosis(), letter == self.fault.letter
        if not diagnosis.solved and (right or letter != diagnosis.answer):  # a cell that is run again costs nothing
            attempts.note(self._diagnosis, "right" if right else "wrong", letter)
        expect(
            right,
            f"the cause of card {self.number}: {self.count_points()} of {POINTS} points left",
            yours=f"{letter}: {causes[letter]}",
            expected="the cause that explains what each rank printed, and where it stood",
            hint=self.fault.sign,
        )
        self.named = True
        print(f"✔ card {self.number}: {letter}, {self.fault.cause}; {self.count_points()} of {POINTS} points")
        self._open()

    def hint(self) -> None:
        """Prints where to look; costs a point. The second hint opens the job before its cause is named."""
        print(f"Card {self.number}: {self.fault.sign}{'' if self.fault.sign.endswith('?') else '.'}")
        if not (self.named or self.path.exists()):
            attempts.note(self._diagnosis, "asked")
            if _has_opened(self._read_diagnosis()):
                self._open()
        print(f"{self.count_points()} of {POINTS} points left")

    def count_points(self) -> int:
        """Returns how many points naming the cause has brought, or still brings."""
        diagnosis = self._read_diagnosis()
        return max(0, POINTS - diagnosis.tries - diagnosis.asked)

    def solve(self) -> None:
        """Mends the job in the learner's place, for who wants to see it; prints the lines that change.

        What the learner had changed is kept beside it, under another name. Where the cause is not named yet, no point
        is left.
        """
        if not self.named:
            for _ in range(self.count_points()):
                attempts.note(self._diagnosis, "asked")
        found, right = self._read_as_it_is(), read_job(self.fault.job) + SHOWN
        for line in difflib.ndiff(found.splitlines(), right.splitlines()):
            if line[0] in "+-" and line[2:].strip():
                print(line)
        if found not in (self.fault.break_job(), right):
            stem, suffix = self.path.stem, self.path.suffix
            names = (self.path.with_name(f"{stem}-yours-{number}{suffix}") for number in itertools.count(1))
            kept = next(name for name in names if not name.exists())
            _write(kept, found)
            print(f"Yours is kept: {kept}")
        _write(self.path, right)

    @property
    def _diagnosis(self) -> str:
        return f"card {self.number} cause"

    def _read_diagnosis(self) -> attempts.Standing:
        return attempts.read_standings().get(self._diagnosis, attempts.Standing())

    def _open(self) -> None:
        """Writes the job where the learner mends it, unless it is there already."""
        if not self.path.exists():
            _write(self.path, self.fault.break_job())
        print(f"Its job: {self.path}")

    def _read_as_it_is(self) -> str:
        """The job as it would run now."""
        return self.read() if self.path.exists() else self.fault.break_job()

    def read(self) -> str:
        """Returns the job as it stands in the file.

        Raises:
            LabError: The file cannot be read, or is no text, or none that a job has.
        """
        try:
            return read_bounded(self.path, attempts.SOURCE_BYTES).decode()
        except (OSError, ValueError) as error:
            cause, fix = getattr(error, "strerror", None) or str(error), "rename it, and draw the card again"
            raise LabError(f"{self.path} cannot be read.", where=self.path, cause=cause, fix=fix) from error

    def note_solved(self) -> None:
        """Keeps that this card is solved, so that a draw says which one is next."""
        attempts.note(f"card {self.number}", "right")


def draw(pile: str, turn: int = 1, *, seed: int = 0) -> Card:
    """Draws a card.

    Run again, it draws the same card: so may a cell be.

    Args:
        pile: ``"stops"``, ``"unmatched"`` or ``"wrong"``.
        turn: 1 for your first card of this pile, 2 for the next, and so on.
        seed: Your number; another number, another order of the cards.

    Returns:
        The card. A file that the learner has changed stays as it is.

    Raises:
        LabError: There is no such pile, or it has fewer cards.
    """
    if pile not in PILES:
        fix = f"one of {', '.join(map(repr, PILES))}"
        raise LabError(f"There is no pile {pile!r:.40}.", where="cards.draw", cause="a typo", fix=fix)
    standings = attempts.read_standings()
    cards = [card for card in _list_cards() if card.pile == pile]
    cards.sort(key=lambda card: (_rank_topic(card.fault), card.fault.hard, _shuffle(seed, card.number)))
    if turn not in range(1, len(cards) + 1):
        fix = f"a number from 1 to {len(cards)}"
        cause = "the pile has fewer cards"
        raise LabError(f"This pile has no card {turn!r:.40}.", where="cards.draw", cause=cause, fix=fix)
    solved = [standings.get(f"card {card.number}", attempts.Standing()).solved for card in cards]
    card, done = cards[turn - 1], solved[turn - 1]
    # What solve() wrote is ours; a learner's mend may read exactly like the right job, and stays.
    shown = False
    with contextlib.suppress(LabError):  # what cannot be read is not ours either
        shown = card.path.exists() and card.read() == read_job(card.fault.job) + SHOWN
    diagnosis = card._read_diagnosis()
    card.named = diagnosis.solved
    if ((card.named or _has_opened(diagnosis)) and not card.path.exists()) or (shown and not done):
        _write(card.path, card.fault.break_job())
    left = "all solved" if all(solved) else f"{solved.count(False)} of {len(cards)} left in this pile"
    print(f"Card {card.number} ({left})" + (f": {card.path}" if card.path.exists() else ""))
    if done and not all(solved):
        print(f"It is solved; the next one: cards.draw({pile!r}, {solved.index(False) + 1}, seed={seed!r})")
    return card


def count_points() -> None:
    """Prints how many points the named cards have brought."""
    points = [card.count_points() for card in _list_cards() if card._read_diagnosis().solved]
    print(f"Fault cards: {len(points)} of {len(FAULTS)} named, {sum(points)} of {POINTS * len(points)} points")


def _list_cards() -> list[Card]:
    """All cards. Their numbers must not give the letters away, nor change when there are more cards."""
    faults = sorted(FAULTS, key=lambda one: (_rank_topic(one), _shuffle("cards", one.letter)))
    names = (f"card-{number}{SUFFIXES.get(fault.job, '.py')}" for number, fault in enumerate(faults, start=1))
    cards = enumerate(zip(faults, names, strict=True), start=1)
    return [Card(number, fault.pile, Path("cards", name), fault) for number, (fault, name) in cards]


def _has_opened(diagnosis: attempts.Standing) -> bool:
    """True if hints have opened a job: the first one gives the hint, unless a wrong letter has brought it already."""
    return diagnosis.asked > 0 and diagnosis.asked + diagnosis.tries > 1


def _rank_topic(fault: Fault) -> int:
    return TOPICS.index(fault.topic)


def _shuffle(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _leave_out_shown(failure: launch.Failure, shown: list[str]) -> launch.Failure:
    """The failure as the learner sees it: with short paths, and without the traceback that a rank has printed."""
    texts = {part.name: getattr(failure, part.name) for part in fields(failure)}
    texts = {name: _shorten(text) for name, text in texts.items() if isinstance(text, str)}
    ranks = {
        name: {rank: _shorten(text) for rank, text in getattr(failure, name).items()}
        for name in ("consequences", "others")
    }
    # Its last line: the paths in those above may be shorter than in what the rank printed.
    last = failure.traceback.rstrip().rpartition("\n")[2]
    if f"[rank {failure.rank}] {last}" in shown:
        texts["traceback"] = ""
    return replace(failure, **texts, **ranks)


def _quote_lines(text: str, job: str) -> str:
    """Sets the line of the job beside its number where Python's own traceback does not."""
    lines = ["", *map(str.strip, job.splitlines())]
    place = r'(?<=card-)(\d+\.py"?, line (\d+))(?= in \w+$|: )'
    return re.sub(
        place, lambda found: f"{found[1]} `{lines[int(found[2])]}`" if int(found[2]) < len(lines) else found[1], text
    )


def _shorten(text: str) -> str:
    """Leaves out where Python, its packages and the job's folder lie, and what is loaded: long, and tells nothing."""
    for place in (sys.prefix, sys.base_prefix, tempfile.gettempdir()):
        text = text.replace(place, "…")
    text = re.sub(r"(?<=Extension modules: ).+", "…", text)
    return re.sub(r"…/card-\w+/node\d+/code/[0-9a-f]{64}/(script/)?", "", text)


def _run_again(run: Callable, ends: Sequence[int], show: bool | Callable[[str], None]) -> launch.JobResult:
    """Starts a job as Slurm starts one that it has preempted: with the same id, and a count of the starts before."""
    results = []
    for start, allowed in enumerate([*ends, None]):
        own = {} if allowed is None else {"PREEMPT_AFTER": str(allowed)}
        if start:
            own |= {"SLURM_RESTART_COUNT": str(start)}
            if callable(show):
                show("")
                show(f"the job is started again: SLURM_RESTART_COUNT={start}")
        results.append(run(ALONE, **own))
        if results[-1].failure:
            break
    reports, lines = (tuple(itertools.chain.from_iterable(part)) for part in zip(*map(_take, results), strict=True))
    return replace(results[-1], results=reports, lines=lines)


def _take(result: launch.JobResult) -> tuple[tuple, tuple[str, ...]]:
    return result.results, result.lines


def _run_batch(run: Callable, text: str, folder: Path, work: Path) -> launch.JobResult:
    """Runs a batch script, with what stands in for Slurm; the results are those of all ranks, by srun's tasks."""
    tools, reports = folder / "tools", folder / "reports"
    try:
        request = slurm_stand_in.read_request(text)
    except ValueError as error:
        cause, fix = str(error), "look at the lines that begin with #SBATCH"
        raise LabError("sbatch would not take this batch script.", where="#SBATCH", cause=cause, fix=fix) from error
    node = {"name": HOST, "address": "127.0.0.1", "host": HOST}
    found_by = slurm_stand_in.install(tools, [node] * int(request.get("SLURM_NNODES", 1)), PYTHON)
    work.mkdir(parents=True)
    (work / "train.py").write_text(read_job("logged"))
    # This notebook may itself run in a job of Slurm's.
    own = {name: "" for name in os.environ if name.startswith("SLURM_")} | {
        "SLURM_JOB_ID": str(_find_free_port(range(20_000, 30_000))),
        "SLURM_JOB_NODELIST": HOST,
        slurm_stand_in.REPORTS: str(reports),
    }
    # The error of a torchrun is enough: not each frame of torch's C++.
    own |= found_by | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    result = run(("bash",), **own | request)
    found = [json.loads(path.read_bytes()) for path in sorted(reports.glob("task*/results/rank*.json"))]
    started = len(slurm_stand_in.read_started(tools))
    failure = result.failure
    if failure and failure.kind == "exit":  # the process that the launcher calls rank 0 is none of the training's
        last = next((line.removeprefix("[rank 0] ") for line in result.lines[::-1] if "error" in line), failure.what)
        what = f"The batch script failed, {failure.what.partition(': ')[2]}"
        failure = replace(failure, what=what, rank=None, node="", message=last, cause="", fix="")
    return replace(result, results=({"torchruns": started, "reports": found},), failure=failure)


def _find_free_port(ports: Sequence[int]) -> int:
    """A port on which nobody listens; the batch script makes the same one of its job's id, which is this number."""
    for port in random.sample(ports, 20):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return port
    return ports[0]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as file:
            file.write(text.encode())
    except OSError as error:
        cause, fix = error.strerror or "", f"free some space, or rename what is at {path.parent}"
        raise LabError("The card cannot be written.", where=path, cause=cause, fix=fix) from error
