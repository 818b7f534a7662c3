"""Exercise 7.3: what a rank counts, so that the sums over the ranks give the exact accuracy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import TensorDataset

from course.check.verdicts import expect

# Images, ranks.
CASES = ((10, 4), (7, 2), (150, 1), (131, 2), (260, 3), (2, 3))
BATCH = 64


class _Model(nn.Module):
    """Right for every third image; keeps which images it saw, in which mode, and in batches of which size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[int] = []
        self.batches: list[int] = []
        self.faults: set[str] = set()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        numbers = images.flatten(1)[:, 0].long()
        self.seen += numbers.tolist()
        self.batches.append(len(images))
        self.faults |= {"train"} if self.training else set()
        self.faults |= {"gradients"} if torch.is_grad_enabled() else set()
        answers = torch.where(numbers % 3 == 0, numbers % 5, (numbers + 1) % 5)
        return nn.functional.one_hot(answers, 5) * self.weight - 3


def verify_count_share(count_share: Callable) -> str:
    """Asks each rank for its counts, and adds them up."""
    for images, ranks in CASES:
        numbers = torch.arange(images)
        dataset = TensorDataset(numbers.float().view(-1, 1, 1, 1).expand(-1, 3, 2, 2), numbers % 5)
        seen: Counter[int] = Counter()
        total = torch.zeros(2, dtype=torch.int64)
        for rank in range(ranks):
            model, case = _Model().train(), f"rank {rank} of {ranks}, {images} images"
            yours = count_share(model, dataset, rank, ranks)
            _expect_counts(case, yours, model)
            seen.update(model.seen)
            total += yours.long()
        _expect_sums(f"{ranks} rank{'s' * (ranks > 1)}, {images} images", total, seen, images)
    return f"sums over up to {max(ranks for _, ranks in CASES)} ranks, one of them without an image: each image once"


def _expect_counts(case: str, yours: object, model: _Model) -> None:
    """That a rank's counts are counts, and of the images that the model saw on this rank."""
    counts = isinstance(yours, torch.Tensor) and yours.shape == (2,)
    shown = f"{type(yours).__name__} {tuple(getattr(yours, 'shape', ()))}"
    hint = "return one tensor, torch.tensor([right, seen]): a job adds it up over the ranks"
    if not model.seen:
        hint = (
            "a rank can have no image: start from right = seen = 0, and return torch.tensor([right, seen]) there, too"
        )
    expect(counts, f"{case}: what the function returns", yours=shown, expected="a tensor of 2 numbers", hint=hint)
    right = sum(number % 3 == 0 for number in model.seen)
    wanted = [right, len(model.seen)]
    expect(
        not yours.requires_grad, case, yours="a tensor with a gradient", expected=wanted, hint="use .item(), or int()"
    )
    whole = yours.dtype == torch.int64
    if yours.tolist() == wanted and whole:
        expect("train" not in model.faults, case, yours="the model in train mode", expected="eval mode", hint=_MODE)
        expect("gradients" not in model.faults, case, yours="gradients are on", expected="off", hint=_GRADIENTS)
        many = len(model.batches) > -(-len(model.seen) // BATCH) or any(size > BATCH for size in model.batches)
        sizes = f"batches of {', '.join(map(str, model.batches[:4]))}{', …' * (len(model.batches) > 4)}"
        wanted = f"batches of {BATCH}, and a smaller last one"
        hint = f"DataLoader(share, {BATCH}) makes batches of {BATCH} images"
        expect(not many, f"{case}: the batches", yours=sizes, expected=wanted, hint=hint)
        return
    if yours.tolist() == wanted:
        hint = "the counts are right; make the tensor one of whole numbers, dtype=torch.int64"
    elif not whole:
        hint = "return whole numbers, dtype int64: shares of right answers, or short integers, do not add up to counts"
    elif yours.tolist() == wanted[::-1]:
        hint = "first how many are right, then how many the rank has seen"
    elif len(model.seen) > BATCH and yours[1] in (model.batches[-1], BATCH):
        hint = "add up over all batches of the rank: this is one batch's count"
    elif yours[1] == len(model.seen):
        hint = "right is the number of images whose highest score is that of the label: logits.argmax(1) == labels"
    else:
        hint = "seen is how many images of this rank the model was asked about: len(labels) of each batch, added up"
    expect(False, f"{case}: [right, seen]", yours=yours.tolist(), expected=wanted, hint=hint)


_MODE = "call model.eval() first: dropout and BatchNorm work differently in training"
_GRADIENTS = "put the loop under torch.inference_mode() or torch.no_grad(): nothing is trained here"


def _expect_sums(case: str, total: torch.Tensor, seen: Counter[int], images: int) -> None:
    twice, never = sorted(n for n in seen if seen[n] > 1), [n for n in range(images) if not seen[n]]
    wanted = [len(range(0, images, 3)), images]
    hint = "each image belongs to one rank: share_indices(…, rank, world_size) without padding"
    if seen and min(seen.values()) > 1 and not never:
        hint = (
            "every rank counts all images: give each its share, share_indices([*range(len(images))], rank, world_size)"
        )
    elif twice:
        hint = "these images count twice: share without padding, share_indices(…, pad=False)"
    elif never:
        hint = "these images are lost: leave drop_last off, and let the ranks have unequal shares"
    shown = f"{total.tolist()}; twice: {twice[:5]}, never: {never[:5]}"
    right = total.tolist() == wanted and not twice and not never
    expect(right, f"{case}: the sum of all ranks", yours=shown, expected=wanted, hint=hint)
