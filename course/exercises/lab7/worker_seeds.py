"""Exercise 7.4: each worker draws its own random numbers, new ones in each epoch, the same ones in each run."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from course.check.verdicts import OpenError, expect

WORKERS, EPOCHS, DRAWN = 2, 3, 4
# Of a worker that neither starts nor answers.
TIMEOUT_SECONDS = 60


class _Drawing(Dataset):
    """A dataset whose items are numbers from its own generator."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return WORKERS * DRAWN

    def __getitem__(self, index: int) -> int:
        draw = getattr(self.random, "integers", None)
        return int(draw(2**40)) if callable(draw) else -1


def verify_seed_worker(seed_worker: Callable) -> str:
    """Draws in forked workers: those of a notebook cannot be spawned."""
    first, again = _draw(seed_worker), _draw(seed_worker)
    kept = np.random.default_rng(0).integers(2**40, size=DRAWN).tolist()
    case = "what the workers draw"
    expect(
        all(number >= 0 for drawn in first.values() for number in drawn),
        case,
        yours="from something else",
        expected="from a NumPy generator",
        hint="the dataset's `random` has to be a generator as before: np.random.default_rng(…)",
    )
    left = [name for name, drawn in first.items() if drawn == kept]
    hint = "the worker's own copy of the dataset is get_worker_info().dataset: put a newly seeded one into `random`"
    expect(len(left) < len(first), case, yours="the old generator's numbers", expected="new ones", hint=hint)
    for one, other in itertools.combinations(first, 2):
        if first[one] != first[other]:
            continue
        if one[0] == other[0]:
            hint = "the workers have one seed: get_worker_info().seed differs between them, and so does worker_id"
        else:
            hint = "the seed has to change with the epoch: get_worker_info().seed does, worker_id does not"
        names = [f"epoch {epoch}, worker {worker}" for epoch, worker in (one, other)]
        shown = f"{first[one][:2]} … in both"
        expect(False, f"{names[0]} and {names[1]}", yours=shown, expected="different numbers", hint=hint)
    same = "the same numbers"
    hint = "take the seed from get_worker_info().seed: it follows from the DataLoader's generator"
    expect(first == again, "a second run with the same generator", yours="other numbers", expected=same, hint=hint)
    return f"{WORKERS} workers in {EPOCHS} epochs drew different numbers, and the same in a second run"


def _draw(seed_worker: Callable) -> dict[tuple[int, int], list[int]]:
    """Returns the numbers that each worker draws in each epoch."""
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(
        _Drawing(),
        DRAWN,
        num_workers=WORKERS,
        worker_init_fn=seed_worker,
        generator=generator,
        timeout=TIMEOUT_SECONDS,
        multiprocessing_context="fork",
    )
    try:
        return {(epoch, worker): batch.tolist() for epoch in range(EPOCHS) for worker, batch in enumerate(loader)}
    except NotImplementedError:
        raise
    except Exception as error:
        # torch quotes the worker's traceback, whose last line is the error.
        cause = str(error).strip().splitlines()[-1][:200]
        what = "✘ 7.4 stopped with an error in your code; this counts as no try."
        raise OpenError(what, where=_find_line(str(error), seed_worker) or "in a worker", cause=cause) from error


def _find_line(quoted: str, seed_worker: Callable) -> str:
    """Returns the last line of the learner's own code in a worker's traceback."""
    code = getattr(inspect.unwrap(seed_worker), "__code__", None)
    own = Path(code.co_filename).parent if code else None
    frames = re.findall(r'^ *File "([^"]+)", line (\d+), in .+\n +(.+)$', quoted, re.MULTILINE)
    lines = [f"line {number}: {text}" for file, number, text in frames if Path(file).parent == own]
    return lines[-1] if lines else ""
