"""Exercise 9.3: batch normalisation over the images of all ranks, with one all-reduce per pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from course.check.verdicts import expect, refusing
from course.exercises.lab9.nets import are_close, is_close
from course.exercises.ranks import run_on_ranks
from lab_utils.calls import count_collectives

# Images of each rank: of two with equal shares, and of three with unequal ones.
CASES, EPS = ((4, 4), (2, 5, 1)), 1e-3


def verify_sync_batch_norm(sync_batch_norm: Callable) -> str:
    """Compares outputs and gradients with those of one process on the global batch."""
    for shares in CASES:
        case = f"{len(shares)} ranks with {', '.join(map(str, shares))} images"
        _verify(sync_batch_norm, shares, case)
    equal = "2 and 3 ranks, also with unequal shares, equal one process on the global batch in outputs and gradients"
    return f"{equal}; one all-reduce per pass"


def _draw(shares: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images (N, 3, 3, 2) of all ranks, the gradients of their outputs, weight and bias; float64."""
    generator = torch.Generator().manual_seed(sum(shares))
    images, gradients = torch.randn(2, sum(shares), 3, 3, 2, generator=generator, dtype=torch.float64)
    images += torch.arange(sum(shares)).view(-1, 1, 1, 1)  # no two ranks alike
    weight, bias = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    return images, gradients, weight, bias


def _verify(sync_batch_norm: Callable, shares: tuple[int, ...], case: str) -> None:
    parts = [part.split(shares) if len(part) == sum(shares) else part for part in _draw(shares)]

    def work(rank: int) -> dict:
        images, gradient = (part[rank].clone() for part in parts[:2])
        leaves = [leaf.clone().requires_grad_() for leaf in (images, *parts[2:])]
        # What is not a leaf may be changed in place, so that a change of the images shows.
        given, before = leaves[0] * 1, count_collectives()
        try:
            outputs = sync_batch_norm(given, *leaves[1:], EPS)
        except RuntimeError as error:
            if "size of tensor a" not in str(error):
                raise
            return {"kind": str(error)}
        if not isinstance(outputs, torch.Tensor) or outputs.shape != images.shape:
            return {"kind": str(getattr(outputs, "shape", type(outputs).__name__))}
        middle = count_collectives()
        (outputs * gradient).sum().backward()
        passes = [middle - before, count_collectives() - middle]
        changed = not is_close(given.detach(), images)
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return {"outputs": outputs.detach().clone(), "grads": grads, "passes": passes, "changed": changed}

    hint = "every operation has to leave a graph: in forward of SumOverRanks clone, all-reduce the clone, return it"
    with refusing(RuntimeError, case=case, expected="outputs with a gradient", hint=hint):
        ranks = run_on_ranks(work, sync_batch_norm, case=case, count=len(shares))
    kind = ranks[0].get("kind")
    hint = "return the normalised images, in the shape of the images: statistics need [:, None, None] beside them"
    expect(not kind, f"{case}: the outputs", yours=kind, expected=str(tuple(parts[0][0].shape)), hint=hint)
    hint = "all_reduce works in place: sum a clone, or a new tensor, and leave the images as they are"
    changed = any(rank["changed"] for rank in ranks)
    expect(not changed, f"{case}: the images", yours="changed", expected="as before", hint=hint)
    _expect_outputs(case, [rank["outputs"] for rank in ranks], shares)
    _expect_gradients(case, [rank["grads"] for rank in ranks], shares)
    hint = "join sums, squares and the count in one tensor, torch.cat([…]), and sum that over the ranks"
    for name, yours in zip(("forward", "backward"), ranks[0]["passes"], strict=True):
        expect(yours == 1, f"{case}: all-reduces in {name}", yours=yours, expected=1, hint=hint)


def _normalise(images: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, *, inside: bool = True) -> torch.Tensor:
    scale = (var + EPS).rsqrt() if inside else 1 / (var.sqrt() + EPS)
    return (images - mean.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1)


def _expect_outputs(case: str, yours: list[torch.Tensor], shares: tuple[int, ...]) -> None:
    images, _, weight, bias = _draw(shares)
    right = F.batch_norm(images, None, None, weight, bias, True, eps=EPS).split(shares)
    parts, dims = images.split(shares), (0, 2, 3)
    mean, var, count = images.mean(dims), images.var(dims, correction=0), images.numel() // 3
    squares = torch.stack([(part**2).mean(dims) for part in parts])
    means, each = torch.stack([part.mean(dims) for part in parts]), [part.var(dims, correction=0) for part in parts]
    wrong = {
        "these are statistics of a rank's own images: sum them over the ranks": [
            _normalise(part, part.mean(dims), part.var(dims, correction=0)) for part in parts
        ],
        "the ranks have unequal shares: sum the counts, too, and divide the sums by their sum": [
            _normalise(part, means.mean(0), (images**2).mean(dims) - means.mean(0) ** 2) for part in parts
        ],
        "shares are unequal: a mean of the ranks' means counts each rank alike; sum values, squares and counts": [
            _normalise(part, means.mean(0), squares.mean(0) - means.mean(0) ** 2) for part in parts
        ],
        "a mean of variances leaves out how far the ranks' means are apart: sum the squares, then E[x²] − E[x]²": [
            _normalise(part, mean, torch.stack(each).mean(0)) for part in parts
        ],
        "a mean of the ranks' means and variances is not the union's: sum counts, sums and squares": [
            _normalise(part, means.mean(0), torch.stack(each).mean(0)) for part in parts
        ],
        "batch norm divides by the count, and not by count − 1": [
            _normalise(part, mean, var * count / (count - 1)) for part in parts
        ],
        "eps belongs under the root: (variance + eps).rsqrt()": [
            _normalise(part, mean, var, inside=False) for part in parts
        ],
        "eps is left out: (variance + eps).rsqrt()": [_normalise(part, mean, var - EPS) for part in parts],
        "the squares: variance = E[x²] − E[x]², and not E[x²]": [
            _normalise(part, mean, (images**2).mean(dims)) for part in parts
        ],
    }
    hint = "mean = sum / count, variance = squares / count − mean²; count: images · height · width, of all ranks"
    affine = weight.view(1, -1, 1, 1), bias.view(1, -1, 1, 1)
    if are_close(yours, [_normalise(part, mean, var) for part in parts]):
        hint = "at last comes · weight + bias, one number for each channel"
    for words, candidates in wrong.items():
        if are_close(yours, [one * affine[0] + affine[1] for one in candidates]):
            hint = words
            break
    expect(
        are_close(yours, right),
        f"{case}: the outputs of rank 0, first channel",
        yours=_format(yours[0]),
        expected=_format(right[0]),
        hint=hint,
    )


def _format(images: torch.Tensor) -> str:
    return f"[{', '.join(f'{value:.4f}' for value in images[:, 0].flatten()[:4].tolist())}, …]"


def _expect_gradients(case: str, yours: list[list[torch.Tensor]], shares: tuple[int, ...]) -> None:
    images, gradients, weight, bias = _draw(shares)
    leaves = [leaf.requires_grad_() for leaf in (images, weight, bias)]
    (F.batch_norm(images, None, None, weight, bias, True, eps=EPS) * gradients).sum().backward()
    of_images = leaves[0].grad.split(shares)
    found = [rank[0] for rank in yours]
    hint = "the sums depend on the images of all ranks: backward has to sum the gradient of the sums over the ranks"
    if are_close(found, _cut(shares, keep_own=False)):
        hint = "no gradient flows through the statistics: dist.all_reduce alone has none; use SumOverRanks.apply"
    elif are_close(found, _cut(shares, keep_own=True)):
        hint = "backward gave each rank only its own part: all-reduce the gradient (a clone of it) in backward, too"
    expect(
        are_close(found, of_images),
        f"{case}: the gradient of rank 0's images, first channel",
        yours=_format(found[0]),
        expected=_format(of_images[0]),
        hint=hint,
    )
    for place, name in ((1, "weight"), (2, "bias")):
        total = sum(rank[place] for rank in yours)
        expect(
            is_close(total, leaves[place].grad),
            f"{case}: the gradient of {name}, summed over the ranks",
            yours=total.tolist(),
            expected=leaves[place].grad.tolist(),
            hint=f"leave the gradient of {name} to autograd: DDP averages it over the ranks later",
        )


def _cut(shares: tuple[int, ...], *, keep_own: bool) -> list[torch.Tensor]:
    """Gradients of the images where those of the statistics were not summed: each rank's own part, or none at all."""
    images, gradients, weight, bias = _draw(shares)
    found = []
    for part, gradient in zip(images.split(shares), gradients.split(shares), strict=True):
        own = part.clone().requires_grad_()
        share = own if keep_own else own.detach()
        count = images.numel() // 3
        mean, square = (
            (power(images) - power(part) + power(share)) / count
            for power in (lambda x: x.sum((0, 2, 3)), lambda x: (x**2).sum((0, 2, 3)))
        )
        outputs = _normalise(own, mean, square - mean**2) * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
        (outputs * gradient).sum().backward()
        found.append(own.grad)
    return found
