"""Exercise 13.2: a script that is told to stop in mid-epoch, saves, exits, and continues as if nothing had happened.

The script runs in forks of this process, two ranks each time. The signal is a real SIGTERM, which a rank sends to
itself after a step, so that each try is the same. The check watches from outside, whatever the script's style: the
images that pass through the wrapped model, the losses, the saved files, and the exit code. The reference is a run that
nobody stops, bit for bit: with two ranks the sum of two gradients has only one order.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from course.check.judge import AnyOf, judge
from course.check.verdicts import NotYetError, expect
from course.exercises.ranks import NETWORK
from course.exercises.scripts import expect_scripts, read_script
from course.ranks import Outcome, fork_ranks
from lab_common import read_path
from lab_utils import data
from lab_utils.calls import count_collectives
from lab_utils.data import pack_shapes

# Four full batches of each rank make an epoch; four images are left over.
RENDEZVOUS = import_module("torch.distributed.rendezvous")  # by its name torch.distributed has a function
RANKS, BATCH_SIZE, STEPS, EPOCHS = 2, 8, 4, 3
COUNTS = {"train": RANKS * BATCH_SIZE * STEPS + 4, "valid": 10, "test": 10}
TOTAL = STEPS * EPOCHS
CHECKPOINT = "saved-here.pt"  # not the name that the script itself has as an example
# After which steps, counted from the very first one, which ranks get a signal, and how often: one rank alone; another
# one, twice, after the last step of an epoch; both. None is in the first epoch, whose begin is that of all.
STOPS = ((6, {1: 1}), (2 * STEPS, {0: 2}), (10, {0: 1, 1: 1}))
LATE = 1  # steps that may follow the signal: a rank may be told right after the ranks agreed
LIMIT = 25.0  # seconds for a run
RIGHT = "both ranks save, and leave after the same step"
PROVED = (
    "in mid-epoch and at an epoch's end, whichever rank is told, both leave after the same step; what follows is what "
    "an undisturbed run does: each image once, the same losses and weights, bit for bit"
)
AGREE = "place 2: a rank that was told tells the others: dist.all_reduce of a flag, on every rank, after every step"
LEAVE = "place 3: after it has saved, main() ends: return, for all ranks, where `stop` is above 0"
SAVE = "place 3: `if stop or …:` is the place to save, where `state` is; torch.save(state, …) on rank 0"
ONLY_NOTE = "place 1: the handler may run between any two lines: let it only take a note, as told.append(number) does"
# By what a rank's own error says.
FAILURES = {
    "positional argument": "a handler gets two arguments: the signal's number, and the frame that it interrupted",
    "in the handler": ONLY_NOTE,
    "No such file": "another process has renamed this file already: one process saves, if rank == 0",
}
APART = f"the ranks did not call the same collectives, or one left alone. {AGREE}. And all leave: `return` stands in "
APART += "no `if rank == …`"


@dataclass(frozen=True)
class _Rank:
    """A rank's actions in a run.

    Attributes:
        images: The indices of each step's images.
        losses: The loss of each step.
        weights: The whole network at the end, including statistics.
        saves: For each ``torch.save``: the file, and whether the handler called it.
        renames: The files that got their name by a rename.
        code: The exit code.
        early: True if it exited from within the handler.
    """

    images: list[list[int]]
    losses: list[float]
    weights: dict[str, torch.Tensor]
    saves: list[tuple[str, bool]]
    renames: list[str]
    code: int
    early: bool


def verify_stopping(path: str | Path) -> str:
    """Runs the script to its end, then stops it three times, and compares."""
    # The first optimizer, or DDP, imports hundreds of modules: once here, and not in each rank.
    import torch._dynamo  # noqa: F401

    script = read_path(path).resolve()
    expect_scripts(script)
    read_script(script, path)
    print("Your script runs in two processes, which are told to stop three times ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="lab13-", ignore_cleanup_errors=True) as folder:
        pack_shapes(Path(folder, "data", "packed", "shapes10"), COUNTS)
        run = partial(_run, script, Path(folder))
        whole = run("whole", {}, 0, "nobody is told to stop")
        _expect_steps(whole, TOTAL, 0, "nobody is told to stop")
        done = 0
        for step, told in STOPS:
            case = _describe(step, told)
            ranks = run("stopped", told, step - done, case)
            _expect_steps(ranks, step - done, LATE, case)
            _expect_saved(ranks, Path(folder, "stopped", CHECKPOINT), case)
            _expect_same(ranks, whole, done, "the run that was started again" if done else case)
            done += len(ranks[0].losses)
        ranks = run("stopped", {}, 0, "the last start, which nobody stops")
        _expect_same(ranks, whole, done, "the run that was started again")
        _expect_steps(ranks, TOTAL - done, 0, "the last start, which nobody stops")
        hint = f"a crash does not tell before: {SAVE}, also at the end of each epoch"
        words, saves = "nobody is told to stop: who saves", any(rank.saves for rank in whole)
        expect(saves, words, yours="nobody", expected="rank 0, at the end of each epoch", hint=hint)
    return PROVED


def _describe(step: int, told: dict[int, int]) -> str:
    """Describes which ranks get the signal, and when."""
    times = {1: "", 2: ", twice"}
    who = "both ranks" if len(told) == RANKS else f"rank {next(iter(told))} alone"
    epoch, within = divmod(step - 1, STEPS)
    return f"SIGTERM to {who}{times[max(told.values())]} after step {within + 1} of {STEPS} of epoch {epoch + 1}"


def _run(script: Path, folder: Path, name: str, told: dict[int, int], step: int, case: str) -> list[_Rank]:
    """Runs the script on two ranks; in the folder ``name`` it finds its checkpoint, if there is one."""
    work = folder / name
    work.mkdir(exist_ok=True)
    store = Path(tempfile.mkdtemp(dir=folder), "store")
    outcomes = fork_ranks(
        lambda rank: _work(rank, script, work, store, told.get(rank, 0), step), None, RANKS, limit=LIMIT
    )
    _expect_end(outcomes, case, script)
    return [outcome.value for outcome in outcomes]


def _work(rank: int, script: Path, folder: Path, store: Path, times: int, step: int) -> _Rank:
    """Runs the script in a fork, in this folder, watched; after a step it gets this number of signals."""
    dist.barrier()
    dist.destroy_process_group()  # the script makes its own
    # They meet in a file: with rank 0's own TCPStore both ranks hung in 2 of some 2,000 runs on a busy machine.
    RENDEZVOUS._create_c10d_store = lambda *_, **__: dist.FileStore(str(store), RANKS)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": 29500}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LAB_DATA": str(folder.parent / "data"), "CUDA_VISIBLE_DEVICES": ""}
    for variable in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        os.environ.pop(variable, None)
    torch.cuda.is_available = lambda: False  # a fork cannot use the kernel's GPU
    os.chdir(folder)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    watch = _Watch(times, step)
    arguments = ["--data", "shapes10", "--net", "tiny", "--batch-size", BATCH_SIZE, "--epochs", EPOCHS]
    sys.argv = [str(script), *map(str, arguments), "--checkpoint", CHECKPOINT]
    sys.path.insert(0, str(script.parent))
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == script]
        error.line_of_answer = f"{script.name}, line {own[-1].lineno}: {own[-1].line}" if own else ""
        raise
    return watch.report(code)


class _Watch:
    """Watches the script in this process, and tells it to stop after a step."""

    def __init__(self, times: int, step: int) -> None:
        self.times, self.step = times, step
        self.images: list[list[int]] = []
        self.losses: list[float] = []
        self.saves: list[tuple[str, bool]] = []
        self.renames: list[str] = []
        self.model: torch.nn.Module | None = None
        self.inside = self.early = False  # of the handler
        self.steps = 0
        split = data.load("shapes10").train
        self.known = {self._name(split[index][0]): index for index in range(len(split))}
        self._hook_in()

    @staticmethod
    def _name(image: torch.Tensor) -> bytes:
        return image.detach().cpu().numpy().tobytes()

    def _hook_in(self) -> None:
        backward, save, replace, rename = torch.Tensor.backward, torch.save, os.replace, os.rename

        def note_loss(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
            self.losses.append(loss.item())
            backward(loss, *arguments, **options)

        def note_save(state: object, file: Any, *arguments: Any, **options: Any) -> None:
            # A tensor that is pickled, such as by broadcast_object_list, is saved into memory.
            if name := getattr(file, "name", file if isinstance(file, str | Path) else ""):
                self.saves.append((str(Path(name).absolute()), self.inside))
            save(state, file, *arguments, **options)

        def note_rename(old: Any, new: Any, *, how: Callable = replace, **options: Any) -> None:
            how(old, new, **options)
            self.renames.append(str(Path(os.fsdecode(new)).absolute()))

        def leave(code: int) -> None:
            raise SystemExit(code)

        torch.Tensor.backward, torch.save = note_loss, note_save
        os.replace, os.rename, os._exit = note_rename, partial(note_rename, how=rename), leave
        signal.signal = partial(self._set_handler, signal.signal)
        register_module_forward_pre_hook(self._note_images)
        register_optimizer_step_post_hook(self._tell)

    def _set_handler(self, install: Callable, number: int, handler: Any) -> Any:
        def note_handler(*arguments: Any) -> None:
            self.inside, before = True, count_collectives()
            try:
                handler(*arguments)
                if count_collectives() != before:
                    raise RuntimeError("a collective was called in the handler")
            except BaseException:
                self.early = True
                raise
            finally:
                self.inside = False

        return install(number, note_handler if number == signal.SIGTERM and callable(handler) else handler)

    def _note_images(self, module: torch.nn.Module, arguments: tuple) -> None:
        if isinstance(module, DistributedDataParallel) and module.training:
            self.model = module.module
            self.images.append([self.known.get(self._name(image), -1) for image in arguments[0]])

    def _tell(self, *_: object) -> None:
        self.steps += 1
        for _ in range(self.times if self.steps == self.step else 0):
            os.kill(os.getpid(), signal.SIGTERM)

    def report(self, code: int) -> _Rank:
        weights = {name: one.clone() for name, one in self.model.state_dict().items()} if self.model else {}
        return _Rank(self.images, self.losses, weights, self.saves, self.renames, code, self.early)


def _expect_end(outcomes: Sequence[Outcome], case: str, script: Path) -> None:
    """Expects both ranks to end together with code 0, which means that this was planned."""
    for rank, one in enumerate(outcomes):
        if one.number == signal.SIGTERM:
            hint = "place 1: signal.signal(signal.SIGTERM, …), before the training begins: else a process ends at once"
            raise NotYetError(case, yours=f"rank {rank} died of the signal", expected=RIGHT, hint=hint)
        if one.value and one.value.early:
            hint = f"it left from within the handler. {ONLY_NOTE}"
            raise NotYetError(case, yours=f"rank {rank} left at once", expected=RIGHT, hint=hint)
    failed = [(rank, one.error) for rank, one in enumerate(outcomes) if one.error]
    # An error of the script itself first: that the other rank is gone is a consequence.
    for rank, error in sorted(failed, key=lambda one: _is_apart(one[1])):
        said = f"{error.line_of_answer or script.name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        found = next((hint for words, hint in FAILURES.items() if words in str(error)), "")
        hint = APART if _is_apart(error) else found or "mend what this line says, and save the file"
        raise NotYetError(f"{case}: rank {rank} failed", yours=said, expected=RIGHT, hint=hint)
    stuck = [str(rank) for rank, one in enumerate(outcomes) if one.value is None]
    yours, expected = f"rank {' and '.join(stuck)} did not end", RIGHT
    expect(not stuck, case, yours=yours, expected=expected, hint=f"{APART}. Or a loop does not end")
    codes = [one.value.code for one in outcomes]
    hint = "to stop when told is no failure, and any other exit code is a crash to torchrun"
    judge(codes, right=[0] * RANKS, case=f"{case}: the exit codes", hint=hint)


def _is_apart(error: Exception) -> bool:
    return any(word in str(error) for word in NETWORK)


def _expect_steps(ranks: Sequence[_Rank], steps: int, late: int, case: str) -> None:
    """Expects the run to end with the step after which it got the signal, or soon after."""
    found = len(ranks[0].losses)
    hint = "the script trains to the end, if nobody tells it to stop: `stop` is above 0 only after a signal"
    if late and found > steps + late:
        hint = f"it was told, and went on: {AGREE.removeprefix('place 2: ')} (a sum, or the maximum). {LEAVE}"
    expect(
        steps <= found <= steps + late,
        f"{case}: how many steps the run has",
        yours=found,
        expected=f"{steps}, or one more" if late else steps,
        hint=hint,
    )


def _expect_saved(ranks: Sequence[_Rank], checkpoint: Path, case: str) -> None:
    """Expects only rank 0 to write the checkpoint: outside the handler, and renamed when it was complete."""
    name = str(checkpoint)
    by = [rank for rank, one in enumerate(ranks) if one.saves]
    expect(bool(by), f"{case}: who saves", yours="nobody", expected="rank 0", hint=SAVE)
    inside = any(inside for one in ranks for _, inside in one.saves)
    hint = f"a step may be half done when a signal comes. {ONLY_NOTE}"
    expect(not inside, f"{case}: where it saves", yours="in the handler", expected="after a whole step", hint=hint)
    hint = "two processes that write one file leave a mixture, some day: if rank == 0"
    expect(by == [0], f"{case}: who saves", yours=f"rank {' and '.join(map(str, by))}", expected="rank 0", hint=hint)
    where = sorted({Path(file).name for file, _ in ranks[0].saves})
    expect(
        checkpoint.exists(),
        f"{case}: the checkpoint",
        yours=f"none of this name, but {', '.join(where)}",
        expected="the file that --checkpoint names",
        hint="the next start looks for it at args.checkpoint: rename what you wrote, with .replace(args.checkpoint)",
    )
    direct = any(file == name for file, _ in ranks[0].saves)
    expect(
        not direct and name in ranks[0].renames,
        f"{case}: how it writes the checkpoint",
        yours="straight into the file" if direct else "without a rename",
        expected="to another name, then it renames it",
        hint="a process that is killed while it writes leaves half a file, and the old one is lost: "
        'args.checkpoint.with_suffix(".new"), then .replace(args.checkpoint)',
    )


def _expect_same(ranks: Sequence[_Rank], whole: Sequence[_Rank], done: int, case: str) -> None:
    """Expects the images, losses and weights of the run that nobody stopped, from step ``done`` on."""
    for rank, (one, other) in enumerate(zip(ranks, whole, strict=True)):
        order, begun = other.images, done // STEPS * STEPS
        judge(
            one.images[:1],
            right=order[done : done + 1],
            case=f"{case}: images of rank {rank} in the first step",
            wrong={
                f"it began at zero: the checkpoint was not there, or not read. {SAVE}": order[:1],
                "it began the epoch anew: keep `step` in the checkpoint, as well as `epoch`": order[begun : begun + 1],
                "images come twice: save after the step, with the number of steps that are done": AnyOf(
                    tuple([step] for step in order[:done])
                ),
                "images were left out: save the epoch and the step that are done, as they are": AnyOf(
                    ([], *([step] for step in order[done + 1 :]))
                ),
            },
            hint="leave the lines that make the loader, and set_epoch, as they were",
            show=partial(_name_steps, order),
        )
        judge(
            one.images,
            right=order[done : done + len(one.images)],
            case=f"{case}: images of rank {rank}",
            hint=f"sampler.set_epoch(epoch) with the right epoch, and break ends one loop of two. {LEAVE}",
            show=partial(_name_steps, order),
        )
    hint = "save the network and the optimizer, with its momentum, as they are after the step that you count as done"
    for rank, (one, other) in enumerate(zip(ranks, whole, strict=True)):
        words, right = f"{case}: the losses of rank {rank}, from step {done + 1} on", other.losses[done:]
        judge(one.losses, right=right[: len(one.losses)], case=words, hint=hint, within=0)
        if done + len(one.losses) == TOTAL:
            judge(one.weights, right=other.weights, case=f"{case}: the weights of rank {rank}", hint=hint, within=0)


def _name_steps(order: list[list[int]], images: list[list[int]]) -> str:
    """The steps that these images belong to, in the run that nobody stopped."""
    numbers = [str(order.index(step) + 1) if step in order else "none" for step in images]
    return f"those of step {', '.join(numbers)}" if numbers else "none: all is done"
