"""Exercise 13.2: a script that is told to stop in mid-epoch, saves, exits, and continues as if nothing had happened.

The script runs in forks of this process, two ranks each time. The signal is a real SIGTERM, which a rank sends to
itself after a step, so that each try is the same. The check watches from outside, whatever the script's style: the
images that pass through the wrapped model, the losses, the saved files, and the exit code. The reference is a run that
nobody stops, bit for bit: with two ranks the sum of two gradients has only one order.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rendezvous
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from course.check.verdicts import NotYetError, expect
from course.exercises.ranks import NETWORK
from course.exercises.scripts import draw_shapes, expect_scripts, read_script
from course.ranks import Outcome, fork_ranks
from lab_common import read_path
from lab_utils import data
from lab_utils.calls import count_collectives

# Four full batches of each rank make an epoch; four images are left over.
RANKS, BATCH_SIZE, STEPS, EPOCHS = 2, 8, 4, 3
COUNTS = {"train": RANKS * BATCH_SIZE * STEPS + 4, "valid": 10, "test": 10}
TOTAL = STEPS * EPOCHS
CHECKPOINT = "saved-here.pt"  # not the name that the script itself has as an example
# After which steps, counted from the very first one, which ranks get a signal, and how often: one rank alone; another
# one, twice, after the last step of an epoch; both. None is in the first epoch, whose begin is that of all.
STOPS = ((6, {1: 1}), (2 * STEPS, {0: 2}), (10, {0: 1, 1: 1}))
LATE = 1  # steps that may follow the signal: a rank may be told right after the ranks agreed
LIMIT, ALONE = 25.0, 3.0  # seconds: for a run; for the other rank, once one has left
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
FAILURES = (
    ("'stop'", "place 2: the lines that follow use the name `stop`"),
    ("'told'", "the handler and place 2 have to use one name, such as told = [] before the handler"),
    ("positional argument", "a handler gets two arguments: the signal's number, and the frame that it interrupted"),
    ("in the handler", ONLY_NOTE),
    ("No such file", "another process has renamed this file already: one process saves, if rank == 0"),
    ("main thread", "signal.signal works in the main thread only: leave it in main()"),
)


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


class _LeftAloneError(Exception):
    """A rank exited and another did not: its number, its steps, whether in the handler, where the other is."""


def verify_stopping(path: str | Path) -> str:
    """Runs the script to its end, then stops it three times, and compares."""
    # The first optimizer, or DDP, imports hundreds of modules: once here, and not in each rank.
    import torch._dynamo  # noqa: F401

    script = read_path(path).resolve()
    expect_scripts(script)
    read_script(script, path)
    print("Your script runs in two processes, which are told to stop three times ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="lab13-", ignore_cleanup_errors=True) as folder:
        draw_shapes(Path(folder, "data", "packed", "shapes10"), COUNTS)
        run = partial(_run, script, Path(folder))
        whole = run("whole", {}, 0, "nobody is told to stop")
        _expect_steps(whole, TOTAL, 0, "nobody is told to stop")
        done = 0
        for step, told in STOPS:
            case = _describe(step, told)
            ranks = run("stopped", told, step - done, case)
            _expect_steps(ranks, step - done, LATE, case)
            _expect_saved(ranks, Path(folder, "stopped", CHECKPOINT), case)
            _expect_same(ranks, whole, done, "the run that was started again" if done else case, Path(folder))
            done += len(ranks[0].losses)
        ranks = run("stopped", {}, 0, "the last start, which nobody stops")
        _expect_same(ranks, whole, done, "the run that was started again", Path(folder))
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
    notes = Path(tempfile.mkdtemp(dir=folder))
    outcomes = fork_ranks(
        lambda rank: _work(rank, script, work, notes, told.get(rank, 0), step), None, RANKS, limit=LIMIT
    )
    _expect_end(outcomes, told, case, script)
    return [outcome.value for outcome in outcomes]


def _work(rank: int, script: Path, folder: Path, notes: Path, times: int, step: int) -> _Rank:
    """Runs the script in a fork, in this folder, watched; after a step it gets this number of signals."""
    dist.barrier()
    dist.destroy_process_group()  # the script makes its own
    # They meet in a file: with rank 0's own TCPStore both ranks hung in 2 of some 2,000 runs on a busy machine.
    rendezvous._create_c10d_store = lambda *_, **__: dist.FileStore(f"{notes}/store", RANKS)
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
    threading.Thread(target=_say_where, args=(rank, script, notes), daemon=True).start()
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == script]
        error.line_of_answer = f"{script.name}, line {own[-1].lineno}: {own[-1].line}" if own else ""
        if any(word in str(error) for word in NETWORK) and (left := _find_left(notes)):
            raise _LeftAloneError(*left, error.line_of_answer) from None
        raise
    result = watch.report(code)
    (notes / f"leaves{rank}").write_text(json.dumps([rank, len(result.losses), result.early]))
    (notes / f"leaves{rank}").rename(notes / f"left{rank}")
    end = time.monotonic() + ALONE + 1
    while not all((notes / f"left{other}").exists() for other in range(RANKS)):
        if time.monotonic() > end:
            place = " ".join(one.read_text() for one in notes.glob("stands*"))
            raise _LeftAloneError(rank, len(result.losses), result.early, place)
        time.sleep(0.02)
    return result


def _find_left(notes: Path) -> list | None:
    """Returns the note of a rank that has exited, or exits within half a second."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        for file in notes.glob("left*"):
            return json.loads(file.read_text())
        time.sleep(0.02)
    return None


def _say_where(rank: int, script: Path, notes: Path) -> None:
    """Notes where this rank's main thread is in the script, some time after another rank has exited."""
    main = threading.main_thread().ident
    while not list(notes.glob("left*")):
        time.sleep(0.05)
    time.sleep(ALONE)
    if not (notes / f"left{rank}").exists():
        own = [one for one in traceback.extract_stack(sys._current_frames()[main]) if Path(one.filename) == script]
        (notes / f"stands{rank}").write_text(f"line {own[-1].lineno}: {own[-1].line}" if own else "")


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


def _expect_end(outcomes: Sequence[Outcome], told: dict[int, int], case: str, script: Path) -> None:
    """Expects both ranks to end together with code 0, which means that this was planned."""
    failed = [(rank, one.error) for rank, one in enumerate(outcomes) if one.error]
    for rank, one in enumerate(outcomes):
        if one.number == signal.SIGTERM:
            hint = "place 1: signal.signal(signal.SIGTERM, …), before the training begins: else a process ends at once"
            raise NotYetError(case, yours=f"rank {rank} died of the signal", expected=RIGHT, hint=hint)
    for _, error in failed:
        if isinstance(error, _LeftAloneError):
            _raise_alone(*error.args, told, case)
    for rank, error in sorted(failed, key=lambda one: any(word in str(one[1]) for word in NETWORK)):
        said = f"{error.line_of_answer or script.name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        hint = next(
            (hint for word, hint in FAILURES if word in str(error)), "mend what this line says, and save the file"
        )
        if any(word in str(error) for word in NETWORK):
            hint = f"the ranks did not call the same collectives. {AGREE}"
        raise NotYetError(f"{case}: rank {rank} failed", yours=said, expected=RIGHT, hint=hint)
    stuck = [str(rank) for rank, one in enumerate(outcomes) if one.value is None]
    if stuck:
        hint = f"the ranks did not call the same collectives, or a loop does not end. {AGREE}"
        raise NotYetError(case, yours=f"rank {' and '.join(stuck)} did not end", expected=RIGHT, hint=hint)
    for rank, one in enumerate(outcomes):
        hint = "to stop when told is no failure, and any other exit code is a crash to torchrun"
        if one.value.early:
            hint = f"it left from within the handler. {ONLY_NOTE}"
            raise NotYetError(case, yours=f"rank {rank} left at once", expected=RIGHT, hint=hint)
        expect(one.value.code == 0, f"{case}: exit code of rank {rank}", yours=one.value.code, expected=0, hint=hint)


def _raise_alone(rank: int, steps: int, early: bool, where: str, told: dict[int, int], case: str) -> None:
    """Raises the error for a rank that exited while another waits for it."""
    hint = f"{AGREE}. And all leave: `return` stands in no `if rank == …`"
    if early:
        hint = f"it left from within the handler, and the other rank waits for it. {ONLY_NOTE}"
    elif not told.keys() >= {rank} or len(told) == RANKS:
        hint = "all ranks leave, by what all agreed on, which is `stop`: `return` stands in no `if rank == …`"
    yours = f"rank {rank} left after {steps} steps, and the other one waits for it: {where or 'it has not left'}"
    raise NotYetError(case, yours=yours, expected=RIGHT, hint=hint)


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


def _expect_same(ranks: Sequence[_Rank], whole: Sequence[_Rank], done: int, case: str, folder: Path) -> None:
    """Expects the images, losses and weights of the run that nobody stopped, from step ``done`` on."""
    words = "images of rank {} in the first step" if done else "images of rank {}"
    for rank, (one, other) in enumerate(zip(ranks, whole, strict=True)):
        if one.images[:1] != other.images[done : done + 1]:
            yours, hint = _explain_images(one.images[:1], other.images, done)
            expected = f"those of step {done + 1}, which comes next" if done < TOTAL else "none: all is done"
            raise NotYetError(f"{case}: {words.format(rank)}", yours=yours, expected=expected, hint=hint)
        if one.images != other.images[done : done + len(one.images)]:
            hint = "sampler.set_epoch(epoch) with the right epoch: leave the lines of the loop as they were"
            if one.images[-1] in other.images[done + len(one.images) :]:
                hint = f"it began another epoch: break ends one loop of two. {LEAVE}"
            raise NotYetError(f"{case}: images of rank {rank}", yours="others", expected="as undisturbed", hint=hint)
    hint = _explain_state(Path(folder, "stopped", CHECKPOINT))
    for rank, (one, other) in enumerate(zip(ranks, whole, strict=True)):
        pairs = zip(one.losses, other.losses[done:], strict=False)
        step = next((number for number, (a, b) in enumerate(pairs) if a != b), None)
        if step is not None:
            words = f"{case}: the loss of rank {rank} in step {done + step + 1}"
            yours, expected = f"{one.losses[step]:.6f}", f"{other.losses[done + step]:.6f}, as in a run undisturbed"
            raise NotYetError(words, yours=yours, expected=expected, hint=hint)
        if done + len(one.losses) == TOTAL:
            far = max(float((one.weights[key] - other.weights[key]).abs().max()) for key in other.weights)
            words = f"{case}: the weights of rank {rank} at the end, the largest difference"
            expect(far == 0, words, yours=f"{far:.1e}", expected="0, from a run undisturbed", hint=hint)


def _explain_images(first: list[list[int]], order: list[list[int]], done: int) -> tuple[str, str]:
    """Describes the first images of a restarted run, and returns the hint for them."""
    if not first:
        return "none", "`step` is the number of steps done in this epoch, and `epoch` the one that is not over"
    found = order.index(first[0]) if first[0] in order else None
    if found is None:
        return "of no step at all", "leave the lines that make the loader, and set_epoch, as they were"
    yours = f"those of step {found + 1}, again" if found < done else f"those of step {found + 1}"
    if found == 0:
        return yours, f"it began at zero: the checkpoint was not there, or not read. {SAVE}"
    if found == done // STEPS * STEPS and found < done:
        return yours, "it began the epoch anew: keep `step` in the checkpoint, as well as `epoch`"
    if found > done:
        return yours, "images were left out: save the epoch and the step that are done, as they are"
    return yours, "images come twice: save after the step, with the number of steps that are done"


def _explain_state(checkpoint: Path) -> str:
    """Returns the hint for losses that do not continue as they should."""
    hint = "save the network and the optimizer as they are after the step that you count as done"
    try:
        text = str(torch.load(checkpoint, map_location="cpu"))
    except Exception:  # whatever a learner's own way of saving left there
        return hint
    missing = "'momentum_buffer'" not in text
    return "the optimizer's momentum is not in the checkpoint: save optimizer.state_dict(), too" if missing else hint
