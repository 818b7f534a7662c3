"""The exercises of lab 7: a Dataset over files, the indices of a rank, an exact accuracy, a seed for each worker."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Callable, Sequence
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from course.check.judge import AnyOf, judge
from course.check.verdicts import Exercise, OpenError, expect

# 7.1: a Dataset that reads its images from files.

# No label is its image's index, and two images have the same one.
LABELS = (3, 7, 1, 7, 0, 9)
GREY = 4  # the index of the image that is stored with one channel
CHANGED = 1  # the index of the image whose file is changed once the dataset is there
BATCH = (4, 0, 2, 2, 5)
BYTES = "torch.uint8 (3, 32, 32)"


class _CountFloats(TorchDispatchMode):
    """Counts the operations that make floating point numbers of bytes, and the float images that are stacked."""

    count, stacked = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        bytes_in = any(isinstance(one, torch.Tensor) and one.dtype == torch.uint8 for one in args)
        self.count += bytes_in and isinstance(result, torch.Tensor) and result.is_floating_point()
        joined = [one for many in args if isinstance(many, list | tuple) for one in many]
        self.stacked += sum(isinstance(one, torch.Tensor) and one.is_floating_point() for one in joined)
        return result

    def count_conversions(self, images: Sequence[torch.Tensor]) -> int:
        """Returns the least there were: NumPy's are not seen, but images of one conversion share their memory."""
        parts = len({image.untyped_storage().data_ptr() for image in images})
        return self.count or max(self.stacked, parts)


class _Brighten:
    """An "augmentation" that makes every call's images brighter than those of the call before; keeps what it got."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def __call__(self, image: object) -> object:
        if not isinstance(image, torch.Tensor):
            self.given.append(type(image).__name__)
            return image
        self.given.append(f"{image.dtype} {tuple(image.shape)}")
        return image + 10 * len(self.given)


def verify_image_files(image_files: Callable) -> str:
    """Reads images that were written for it, one of them grey, one by one and in a batch."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(0, 150, (len(LABELS), 3, 32, 32), generator=generator, dtype=torch.uint8)
    images[GREY] = images[GREY, :1]
    with tempfile.TemporaryDirectory(prefix="images-") as folder:
        paths = [str(Path(folder, f"{index}.png")) for index in range(len(LABELS))]
        for index, (image, path) in enumerate(zip(images, paths, strict=True)):
            _write(image[:1] if index == GREY else image, path)
        dataset = image_files(paths, list(LABELS))
        images[CHANGED] = images[CHANGED].flip(2)
        _write(images[CHANGED], paths[CHANGED])
        judge(len(dataset), right=len(LABELS), case="len(dataset)", hint="len(self.paths)")
        for index in (0, 2, GREY, CHANGED, 5):
            _judge_item(dataset[index], images, index)
        _verify_batch(dataset, images)
        _verify_augment(image_files, paths, images)
    return (
        "files read when they are asked for, grey ones, too; a batch in its order, converted at once, augmented singly"
    )


def _write(image: torch.Tensor, path: str) -> None:
    """Writes an image of one channel or three."""
    Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(path)


def _judge_item(yours: object, images: torch.Tensor, index: int) -> None:
    image, label = images[index] / 255, LABELS[index]
    case = f"dataset[{index}]{' (a grey image)' if index == GREY else ''}"
    judge(
        yours,
        right=(image, label),
        case=case,
        within=1e-6,
        wrong={
            'Image.open(path).convert("RGB") makes three channels of any image': (image[:1], label),
            "the values have to lie between 0 and 1: image / 255 makes float32 of bytes": (images[index], label),
        },
        hint="when the item is asked for, read the file of this index, divide by 255, and return image, label",
    )
    judge(str(yours[0].dtype), right="torch.float32", case=case, hint="image / 255 makes float32 of bytes")


def _verify_batch(dataset: object, images: torch.Tensor) -> None:
    case = f"dataset.__getitems__({list(BATCH)})"
    named = hasattr(dataset, "__getitems__")
    expect(named, case, yours="no such method", expected="a list of pairs", hint="its name ends in s")
    with _CountFloats() as floats:
        yours = dataset.__getitems__(list(BATCH))
    judge(
        yours,
        right=[(images[index] / 255, LABELS[index]) for index in BATCH],
        case=case,
        within=1e-6,
        wrong={
            "return a list of pairs, list(zip(images, labels)): DataLoader stacks them itself": (
                images[list(BATCH)] / 255,
                [LABELS[index] for index in BATCH],
            ),
        },
        hint="a list, not a generator: list(zip(images, labels)), one pair for each index, in the order of the indices",
    )
    hint = "stack the bytes first: torch.stack(images) / 255 converts all of them in one operation"
    conversions = floats.count_conversions([image for image, _ in yours])
    expect(conversions <= 1, f"{case}: conversions of bytes to float", yours=conversions, expected=1, hint=hint)


def _verify_augment(image_files: Callable, paths: list[str], images: torch.Tensor) -> None:
    """Augments one image, and then a batch."""
    for indices in ((2,), (5, 3, 3)):
        augment = _Brighten()
        dataset = image_files(paths, list(LABELS), augment)
        yours = [dataset[2]] if indices == (2,) else dataset.__getitems__(list(indices))
        case = f"images {', '.join(map(str, indices))} with an augment"
        count = len(indices)
        judge(
            augment.given,
            right=[BYTES] * count,
            case=f"{case}: what it got",
            wrong={
                "where self.augment is there, the image goes through it: image = self.augment(image)": [],
                "make the tensor first, with pil_to_tensor: augment gets uint8 (3, 32, 32), not the opened image": [
                    "Image"
                ]
                * count,
                "augment the bytes, as they come from the file, and convert to float afterwards": [
                    BYTES.replace("uint8", "float32")
                ]
                * count,
            },
            hint="call `augment` once for each image, before they are stacked: it draws its random numbers once a call",
        )
        right = [((images[index] + 10 * place) / 255, LABELS[index]) for place, index in enumerate(indices, start=1)]
        hint = "the pairs have what augment returned, in the order of the indices, divided by 255"
        judge(yours, right=right, case=case, hint=hint, within=1e-6)


# 7.2: the indices of a rank.

# Images, ranks.
SHARE_CASES = ((10, 4), (8, 4), (7, 2), (12, 1), (9, 6), (3, 5), (2, 7), (1, 9))


def verify_share_indices(share_indices: Callable) -> str:
    """Compares with torch's DistributedSampler, and without padding with every world size-th index."""
    for images, ranks in SHARE_CASES:
        order = torch.randperm(images, generator=torch.Generator().manual_seed(images)).add(100).tolist()
        for pad in (False, True):
            given = list(order)
            yours = [share_indices(given, rank, ranks, pad) for rank in range(ranks)]
            _judge_shares(yours, order, ranks, pad)
            hint = "leave `order` as it is: all ranks, and the next epoch, may read it; make a new list"
            judge(given, right=order, case=f"the order afterwards, {ranks} ranks, pad={pad}", hint=hint)
    return f"{len(SHARE_CASES)} pairs of images and ranks; padded, the same as torch's DistributedSampler"


def _share(order: Sequence[int], ranks: int, pad: bool) -> list[list[int]]:
    """The indices of each rank."""
    if not pad:
        return [list(order[rank::ranks]) for rank in range(ranks)]
    samplers = [DistributedSampler(order, ranks, rank, shuffle=False) for rank in range(ranks)]
    return [[order[place] for place in sampler] for sampler in samplers]


def _judge_shares(yours: list, order: list[int], ranks: int, pad: bool) -> None:
    right, count = _share(order, ranks, pad), len(order)
    even, each, missing = count // ranks, -(-count // ranks), -count % ranks
    judge(
        yours,
        right=right,
        case=f"the indices of each of {ranks} ranks, pad={pad}, order {order}",
        wrong={
            "these are places in `order`; return the indices that are there: order[place]": _share(
                range(count), ranks, pad
            ),
            "with pad=True all ranks need equally many: repeat the order from its start until the ranks divide it": (
                _share(order, ranks, False)
            ),
            "take every world_size-th index, order[rank::world_size], not a block of neighbours": AnyOf(
                tuple([order[rank * size : (rank + 1) * size] for rank in range(ranks)] for size in (even, each))
            ),
            "the last indices are lost: nothing may be dropped, the ranks need not have equally many": [
                one[:even] for one in right
            ],
            "with more ranks than images the order is repeated more than once: order * world_size is long enough": (
                _share(order + order[:missing], ranks, False) if pad else right
            ),
        },
        hint="a list, order[rank::world_size], of an order that is repeated from its start first if pad is True",
    )


# 7.3: what a rank counts, so that the sums over the ranks give the exact accuracy.

# Images, ranks.
COUNT_CASES = ((10, 4), (7, 2), (150, 1), (131, 2), (260, 3), (2, 3))
LOADED = 64


class _Model(nn.Module):
    """Right for every third image; keeps which images it saw, in which mode, and in batches of which size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.batches: list[list[int]] = []
        self.modes: set[str] = set()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        numbers = images.flatten(1)[:, 0].long()
        self.batches.append(numbers.tolist())
        self.modes |= {"train" if self.training else "eval", "gradients" if torch.is_grad_enabled() else "no gradients"}
        answers = torch.where(numbers % 3 == 0, numbers % 5, (numbers + 1) % 5)
        return nn.functional.one_hot(answers, 5) * self.weight - 3


def verify_count_share(count_share: Callable) -> str:
    """Asks each rank for its counts, and adds up which images they are of."""
    for images, ranks in COUNT_CASES:
        numbers = torch.arange(images)
        dataset = TensorDataset(numbers.float().view(-1, 1, 1, 1).expand(-1, 3, 2, 2), numbers % 5)
        seen = torch.zeros(images, dtype=torch.int64)
        for rank in range(ranks):
            model = _Model().train()
            yours = count_share(model, dataset, rank, ranks)
            _judge_counts(yours, model.batches, f"rank {rank} of {ranks}, {images} images: [right, seen]")
            _judge_loop(model, f"rank {rank} of {ranks}, {images} images")
            seen += torch.bincount(torch.tensor([*chain(*model.batches)], dtype=torch.int64), minlength=images)
        padded = [*chain(*_share(range(images), ranks, True))]
        judge(
            seen.tolist(),
            right=[1] * images,
            case=f"{images} images, ranks: {ranks}; how often each image counts",
            wrong={
                "every rank counts all images: give each its share, share_indices(list(range(n)), rank, world_size)": [
                    ranks
                ]
                * images,
                "some images count twice: share without padding, share_indices(…, pad=False)": [
                    padded.count(image) for image in range(images)
                ],
            },
            hint="each image belongs to one rank: leave drop_last off, and let the ranks have unequal shares",
        )
    return (
        f"sums over up to {max(ranks for _, ranks in COUNT_CASES)} ranks, one of them without an image: each image once"
    )


def _judge_counts(yours: object, batches: list[list[int]], case: str) -> None:
    seen, last = [*chain(*batches)], batches[-1] if batches else []
    right, right_last = (sum(number % 3 == 0 for number in some) for some in (seen, last))
    hint = (
        "return torch.tensor([right, seen]): of this rank's images, how many logits.argmax(1) == labels, and how many"
    )
    if not seen:
        hint = "a rank can have no image: start from right = seen = 0, and return torch.tensor([right, seen])"
    judge(
        yours,
        right=torch.tensor([right, len(seen)]),
        case=case,
        wrong={
            "add up over all batches of the rank: this is one batch's count": torch.tensor([right_last, len(last)]),
            "return counts, not shares of right answers: torch.tensor([right, seen])": AnyOf(
                (right / max(1, len(seen)), torch.tensor([right / max(1, len(seen)), len(seen)]))
            ),
        },
        hint=hint,
    )
    hint = "the counts are right; make the tensor one of whole numbers that add up, dtype=torch.int64"
    judge(str(yours.dtype), right="torch.int64", case=f"{case}: the dtype", hint=hint)


def _judge_loop(model: _Model, case: str) -> None:
    hint = "call model.eval() first: dropout and BatchNorm work differently in training"
    expect("train" not in model.modes, case, yours="the model in train mode", expected="eval mode", hint=hint)
    hint = "put the loop under torch.inference_mode() or torch.no_grad(): nothing is trained here"
    expect("gradients" not in model.modes, case, yours="gradients are on", expected="off", hint=hint)
    sizes = [len(batch) for batch in model.batches]
    full, rest = divmod(sum(sizes), LOADED)
    hint = f"DataLoader(share, {LOADED}) makes batches of {LOADED} images, and a smaller last one"
    judge(sizes, right=[LOADED] * full + [rest] * (rest > 0), case=f"{case}: the batches", hint=hint)


# 7.4: each worker draws its own random numbers, new ones in each epoch, the same ones in each run.

WORKERS, EPOCHS, DRAWN = 2, 3, 4
TIMEOUT_SECONDS = 60  # of a worker that neither starts nor answers


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
    drawn, case = list(first.values()), "what the workers draw"
    hint = "the dataset's `random` has to be a generator as before: np.random.default_rng(…)"
    generators = min(map(min, drawn)) >= 0
    expect(generators, case, yours="from something else", expected="from a NumPy generator", hint=hint)
    hint = "the worker's own copy of the dataset is get_worker_info().dataset: put a newly seeded one into `random`"
    expect(drawn != [kept] * len(drawn), case, yours="the old generator's numbers", expected="new ones", hint=hint)
    for one, other in combinations(first, 2):
        hint = "the seed has to change with the epoch: get_worker_info().seed does, worker_id does not"
        if one[0] == other[0]:
            hint = "the workers have one seed: get_worker_info().seed differs between them, and so does worker_id"
        names = " and ".join(f"epoch {epoch}, worker {worker}" for epoch, worker in (one, other))
        shown = f"{first[one][:2]} … in both"
        expect(first[one] != first[other], names, yours=shown, expected="different numbers", hint=hint)
    hint = "take the seed from get_worker_info().seed: it follows from the DataLoader's generator"
    judge(again, right=first, case="a second run with the same generator", hint=hint)
    return f"{WORKERS} workers in {EPOCHS} epochs drew different numbers, and the same in a second run"


def _draw(seed_worker: Callable) -> dict[tuple[int, int], list[int]]:
    """Returns the numbers that each worker draws in each epoch."""
    how = {"num_workers": WORKERS, "timeout": TIMEOUT_SECONDS, "multiprocessing_context": "fork"}
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(_Drawing(), DRAWN, worker_init_fn=seed_worker, generator=generator, **how)
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


EXERCISES = {
    "7.1": Exercise("A Dataset over files", verify_image_files),
    "7.2": Exercise("The indices of a rank", verify_share_indices),
    "7.3": Exercise("An exact accuracy", verify_count_share),
    "7.4": Exercise("A seed for each worker", verify_seed_worker),
}
