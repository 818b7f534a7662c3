"""Fault cards: a small job with one thing wrong, which the learner runs, names the cause of, and mends.

``cards.draw("stops")`` draws a card; ``card.run()`` runs its job on one or two nodes of this machine, on the CPU, so
that the symptom is the same everywhere; ``card.name("C")`` says whether that is the cause, and then writes the job into
``cards/`` beside the notebook; ``check.exercise("6.1", card)`` runs what the learner made of the file.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import nodelaunch as launch
from course.check import attempts
from course.check.verdicts import expect
from course.exercises.lab6.cards.faults import FAULTS, PILES, TOPICS, Fault, read_job
from lab_common import LabError
from lab_common.files import read_bounded, write_atomically

# Longer than an operation of these jobs takes on a busy laptop.
HANG_SECONDS = 20
SHOWN = "# Written by card.solve().\n"
# What Slurm would set for a job with one task, which is torchrun.
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}


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
            print(_shorten(_quote_lines(line, job)))

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
        text: str = "",
    ) -> launch.JobResult:
        """Runs the job as it is, on so many nodes, with so many processes on each.

        Args:
            show: Where its lines go, see ``launch.TorchrunJob.run``.
            layout: Nodes, and processes on each; the first of the fault's where it is left out.
            text: What to run in place of the job as it is.

        Returns:
            The result, with the failure in it; a failed job does not raise.
        """
        nodes, processes = layout or self.fault.layouts[0]
        with tempfile.TemporaryDirectory(prefix="card-", ignore_cleanup_errors=True) as folder:
            path = self.path
            # The learner who has not named the cause yet does not see the job.
            if text or not path.exists():
                path = Path(folder, "drawn", path.name)
                _write(path, text or self._read_as_it_is())
            options = {"nodes": launch.local_nodes(nodes, folder=folder), "nproc_per_node": processes, "limit": 120}
            env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            env |= SLURM if self.fault.job == "logged" else {}
            # That ranks train alone is the learner's to find out.
            options |= {"env": env, "hang_timeout": HANG_SECONDS, "needs_group": False}
            # What is red on this machine is none of the card's faults.
            return launch.TorchrunJob(path, [folder], **options).run(check=False, force=True, show=show)

    def name(self, letter: str) -> None:
        """Names the cause by its letter in the lab's list; if it is right, the job opens.

        Raises:
            NotYetError: It is another one; the hint says where to look.
            LabError: There is no such letter.
        """
        causes = {fault.letter: fault.cause for fault in FAULTS}
        if letter not in causes:
            fix = f"one of the letters {', '.join(causes)}, in quotes"
            raise LabError(f"There is no cause {letter!r:.40}.", where="card.name", cause="a typo", fix=fix)
        expect(
            letter == self.fault.letter,
            f"the cause of card {self.number}",
            yours=f"{letter}: {causes[letter]}",
            expected="the cause that explains what each rank printed, and where it stood",
            hint=self.fault.sign,
        )
        self.named = True
        if not self._read_diagnosis().solved:
            attempts.note(self._diagnosis, "right", letter)
        print(f"✔ card {self.number}: {letter}, {self.fault.cause}")
        self._open()

    def hint(self) -> None:
        """Prints where to look. The second hint opens the job before its cause is named."""
        print(f"Card {self.number}: {self.fault.sign}{'' if self.fault.sign.endswith('?') else '.'}")
        if not (self.named or self.path.exists()):
            attempts.note(self._diagnosis, "asked")
            if _has_opened(self._read_diagnosis()):
                self._open()

    def solve(self) -> None:
        """Mends the job in the learner's place, for who wants to see it; prints the lines that change.

        What the learner had changed is kept beside it, under another name.
        """
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
    cards.sort(key=lambda card: (_rank_topic(card.fault), _shuffle(seed, card.number)))
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


def _list_cards() -> list[Card]:
    """All cards, in an order that gives no letter away, and in which number 0 draws first what the lab solves."""
    faults = sorted(FAULTS, key=lambda one: (_rank_topic(one), _shuffle("deck 93", one.letter)))
    numbered = enumerate(faults, start=1)
    return [Card(number, fault.pile, Path("cards", f"card-{number}.py"), fault) for number, fault in numbered]


def _has_opened(diagnosis: attempts.Standing) -> bool:
    """True if hints have opened a job: the first one only says where to look."""
    return diagnosis.asked > 1


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


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as file:
            file.write(text.encode())
    except OSError as error:
        cause, fix = error.strerror or "", f"free some space, or rename what is at {path.parent}"
        raise LabError("The card cannot be written.", where=path, cause=cause, fix=fix) from error
