"""Exercise 11.4: the bytes that a rank sends in a training step, by data, tensor and pipeline parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from course.check.verdicts import expect
from course.exercises.lab10.formulas import as_number

SIZE = 2  # bytes of a number
# Weights, tokens, widths and layers: the lab's GPT, and one like GPT-2 small.
MODELS = ((1_200_000, 2_048, 320, 3), (85_000_000, 4_096, 768, 12))
RANKS = (5, 16, 1)
WAYS = ("data", "tensor", "pipeline")
UNITS = (10**3, 2**10, 10**6, 2**20, 10**9, 2**30)


def find_bytes_sent(way: str, ranks: int, weights: int, tokens: int, width: int, layers: int) -> float:
    """Bytes that a rank sends per step, with rings for all-reduces.

    Source: M. Shoeybi et al., "Megatron-LM" (2019), arXiv:1909.08053, section 3, for the four all-reduces.

    Args:
        way: ``data``, ``tensor`` or ``pipeline``; there, of a stage in the middle.
        ranks: How many there are.
        weights: Parameters of the whole network.
        tokens: Tokens of a step.
        width: Numbers for each token between two layers.
        layers: Layers with attention and an MLP each.
    """
    ring = 2 * (ranks - 1) / ranks
    numbers = {
        "data": ring * weights,
        "tensor": 4 * layers * ring * tokens * width,
        "pipeline": 2 * tokens * width,
    }
    return SIZE * numbers[way]


def verify_bytes_sent(bytes_sent: Callable) -> str:
    """Asks for each way on 5 ranks, 16 and 1; a pipeline of one rank has no stage in the middle."""
    cases = 0
    for ranks in RANKS:
        for model in MODELS:
            ways = WAYS if ranks > 1 else WAYS[:2]
            words = f"ranks {ranks}, weights {model[0]:,}, tokens {model[1]:,}, "
            words += f"width {model[2]}, layers {model[3]}"
            yours = {way: _read_number(bytes_sent(way, ranks, *model), f'"{way}", {words}') for way in ways}
            for way in ways:
                right = find_bytes_sent(way, ranks, *model)
                expect(
                    # A rounding to whole bytes is right, also of each message, and so is float32's.
                    math.isclose(yours[way], right, rel_tol=1e-6),
                    f'"{way}", {words}',
                    yours=f"{yours[way]:,.0f} bytes",
                    expected=f"{right:,.0f} bytes",
                    hint=_explain(way, yours, ranks, *model),
                )
            cases += len(ways)
    return f"{cases} cases of data, tensor and pipeline parallelism, to the byte"


def _read_number(yours: object, case: str) -> float:
    yours = as_number(yours)
    shown = f"{type(yours).__name__}: {str(yours)[:60]}"
    hint = "return one number, the bytes that one rank sends, for each of the three ways"
    expect(isinstance(yours, Real), case, yours=shown, expected="a number of bytes", hint=hint)
    return float(yours)


def _explain(way: str, yours: dict[str, float], ranks: int, weights: int, tokens: int, width: int, layers: int) -> str:
    """The hint that fits wrong bytes of one way; those of the other ways say which mistake it is."""
    if ranks == 1:
        return "one rank has nobody to send to: (n − 1)/n is 0 for n = 1"
    model = ranks, weights, tokens, width, layers
    ratios = {name: found / find_bytes_sent(name, *model) for name, found in yours.items()}
    ring = 2 * (ranks - 1) / ranks

    def is_like(*numbers: float) -> bool:
        return any(math.isclose(ratios[way], number, rel_tol=1e-6) for number in numbers)

    def are_all(ratio: float, *names: str) -> bool:
        return all(math.isclose(ratios[name], ratio, rel_tol=1e-6) for name in names)

    wrong = {
        "these are numbers: each has 2 bytes": are_all(1 / 2, *WAYS),
        "each number has 2 bytes, and not 4": are_all(2, *WAYS),
        "these are bits: each number has 2 bytes": are_all(8, *WAYS),
        "that is what all ranks send together: return the bytes of one rank": are_all(ranks, *WAYS),
        "return bytes: do not divide by the bytes of a KB, MB or GB": is_like(*(1 / unit for unit in UNITS)),
    }
    if hint := next((hint for hint, fits in wrong.items() if fits), ""):
        return hint
    if way == "pipeline":
        return _explain_pipeline(is_like, *model)
    twice = "a ring sends 2 · (n − 1)/n times the size: (n − 1)/n in the reduce-scatter, and as much in the all-gather"
    rings = {
        twice: are_all(1 / 2, *WAYS[:2]),
        "a ring sends n − 1 of n parts, twice: the factor is 2 · (n − 1)/n": is_like(1 / ring, 2 / ring),
        "each message of a ring has 1/n of the size: the factor is 2 · (n − 1)/n": is_like(ranks, ranks / 2),
    }
    if hint := next((hint for hint, fits in rings.items() if fits), ""):
        return hint
    return (_explain_data if way == "data" else _explain_tensor)(is_like, *model)


def _explain_data(is_like: Callable[..., bool], ranks: int, weights: int, tokens: int, width: int, layers: int) -> str:
    if is_like(layers, 4 * layers):
        return "weights are those of all layers together: do not multiply by layers"
    if is_like(*(times * tokens * width / weights for times in (1, layers, 4 * layers))):
        return "data parallelism sends gradients, as many numbers as there are weights, whatever the tokens"
    if is_like(tokens):
        return "the gradients of all tokens are summed before they are sent: weights numbers, whatever the tokens"
    if is_like(1 / ranks):
        return "each rank has gradients of all weights: do not divide the weights by ranks"
    if is_like(1 / 2, 2):
        return "one all-reduce of the gradients: 2 · (n − 1)/n times weights numbers, of 2 bytes each"
    return "one all-reduce of weights numbers: 2 · (n − 1)/n · weights · 2 bytes"


def _explain_tensor(
    is_like: Callable[..., bool], ranks: int, weights: int, tokens: int, width: int, layers: int
) -> str:
    if is_like(1 / 2, 1 / 4):
        return "four all-reduces in each layer: attention and MLP have one each, in forward and again in backward"
    if is_like(*(part / layers for part in (1 / 4, 1 / 2, 1))):
        return "each layer has its four all-reduces: multiply by layers"
    if is_like(*(weights / (tokens * width) / part for part in (1, layers, 4 * layers))):
        return "tensor parallelism sums the outputs of layers, tokens · width numbers each, and no gradients of weights"
    if is_like(1 / width, 1 / tokens):
        return "each all-reduce has a number for each token and each place of the width: tokens · width"
    if is_like(1 / ranks, tokens // ranks / tokens):
        return "each rank has outputs for all tokens and the whole width: do not divide them by ranks"
    return "4 · layers all-reduces, each of tokens · width numbers: 2 · (n − 1)/n · tokens · width · 2 bytes each"


def _explain_pipeline(
    is_like: Callable[..., bool], ranks: int, weights: int, tokens: int, width: int, layers: int
) -> str:
    ring = 2 * (ranks - 1) / ranks
    if is_like(1 / 2):
        return "a stage in the middle sends its outputs forward, and the gradients of its inputs back: twice"
    if is_like(ranks, ranks - 1, 1 / ranks, ranks / 2, (ranks - 1) / 2):
        return "a stage in the middle sends to its two neighbours, whatever the number of ranks"
    if is_like(ring, ring / 2):
        return "one stage sends to another: that is no ring, and there is no factor (n − 1)/n"
    if is_like(layers, layers / 2, layers / ranks, 2 * layers):
        return "a stage sends only where the network is cut, and not after each layer"
    if is_like(*(times * weights / (tokens * width) for times in (1 / 2, 1, 1 / ranks, 1 / ranks / 2))):
        return "a pipeline sends outputs and their gradients, tokens · width numbers each, and no weights"
    if is_like(1 / width, 1 / tokens):
        return "the outputs have a number for each token and each place of the width: tokens · width"
    if is_like(0):
        return "a pipeline sends, too: outputs forward and gradients back"
    return "outputs forward and gradients back, tokens · width numbers each: 2 · tokens · width · 2 bytes"
