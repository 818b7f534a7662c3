"""Exercises 10.1 and 10.2: the bytes of weights, gradients, optimizer and activations on a rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product

from course.check.judge import AnyOf, judge

# How many parameters on how many ranks. Each number of ranks divides its parameters.
MODELS = ((1_200_000, 5), (7_040_000, 64), (1_200_000, 1))
# The first stage that divides weights, gradients, optimizer.
BEGIN = (3, 2, 1)
# What forward keeps for each token: by block in widths, and once at the end, in widths and in logits.
PER_BLOCK, AT_THE_END, LOGITS = 16, 2, 256
# Tokens, widths and blocks, in such an order that two mistakes differ in the first case that they fail.
TOKENS, WIDTHS, LAYERS = (256, 1), (320, 64), (3, 1)


def find_state_bytes(
    parameters: float,
    ranks: int,
    stage: int,
    mixed: bool,
    *,
    each: tuple[float, float, float] | None = None,
    begin: tuple[int, int, int] = BEGIN,
) -> list[float]:
    """Returns the bytes of weights, gradients and optimizer on each rank, for Adam.

    Source: S. Rajbhandari et al., "ZeRO" (2020), arXiv:1910.02054, section 3.1 and figure 1.

    Args:
        parameters: Number of parameters.
        ranks: Number of ranks that share them.
        stage: 0 for DDP, 1 to 3 for ZeRO.
        mixed: Weights and gradients of two bytes, and a float32 copy of the weights in the optimizer.
        each: Other bytes of a parameter, for a wrong answer.
        begin: Other stages that begin to divide, for a wrong answer.
    """
    each = each or ((2, 2, 12) if mixed else (4, 4, 8))
    rows = zip(each, begin, strict=True)
    return [parameters * size / (ranks if stage >= first else 1) for size, first in rows]


def verify_state_bytes(state_bytes: Callable) -> str:
    """Asks for each stage in both precisions, for 5 ranks, 64 and 1."""
    cases = list(product(MODELS, (False, True), range(4)))
    for (parameters, ranks), mixed, stage in cases:
        yours = state_bytes(parameters, ranks, stage, mixed)
        _judge_states(yours.tolist() if hasattr(yours, "tolist") else yours, parameters, ranks, stage, mixed)
    return f"{len(cases)} cases of precision, stage and number of ranks, to the byte"


def _judge_states(yours: object, parameters: int, ranks: int, stage: int, mixed: bool) -> None:
    right = find_state_bytes(parameters, ranks, stage, mixed)

    def of(*each: float) -> list[float]:
        return find_state_bytes(parameters, ranks, stage, mixed, each=each)

    def dividing_from(*begin: int) -> list[float]:
        return find_state_bytes(parameters, ranks, stage, mixed, begin=begin)

    words = f"{'mixed' if mixed else 'float32'}, {f'ZeRO-{stage}' if stage else 'DDP'}, "
    judge(
        yours,
        right=right,
        case=f"{words}{parameters:,} parameters, ranks: {ranks}; bytes of weights, gradients, optimizer",
        within=1e-6,  # a rounding to whole bytes is right, and so is float32's
        wrong={
            "divide by ranks: from ZeRO-1 on the optimizer, from ZeRO-2 on also the gradients, from ZeRO-3 on all": (
                dividing_from(4, 4, 4)
            ),
            "divided too early, or in another order: ZeRO-1 divides the optimizer, ZeRO-2 also the gradients": AnyOf(
                (dividing_from(0, 0, 0), *(dividing_from(*one) for one in permutations(BEGIN)))
            ),
            "with mixed precision the optimizer also holds a float32 copy of the weights: 4 + 4 + 4 bytes": (
                of(2, 2, 8) if mixed else right
            ),
            "Adam has two moments for each parameter, float32 both: 4 + 4 bytes": (
                AnyOf((of(2, 2, 4), of(2, 2, 6))) if mixed else of(4, 4, 4)
            ),
            "a float32 number has 4 bytes, one of 16 bits has 2": AnyOf(
                (of(1, 1, 3), of(4, 4, 8), of(4, 4, 12)) if mixed else (of(1, 1, 2), of(2, 2, 4))
            ),
        },
        hint="return weights, gradients, optimizer: each parameters · bytes, divided by ranks if this stage shards it",
    )


def find_activation_bytes(tokens: int, width: int, layers: int, mixed: bool, *, block: int = PER_BLOCK) -> int:
    """Returns the bytes that the forward pass of ``scripts/gpt.py`` keeps for backward, without norms' statistics.

    A wrong answer has another ``block``, the numbers for each token in widths.
    """
    return tokens * (layers * block * width + AT_THE_END * width + LOGITS) * (2 if mixed else 4)


def verify_activation_bytes(activation_bytes: Callable) -> str:
    """Asks for models of several widths and depths, in both precisions."""
    cases = list(product(TOKENS, WIDTHS, LAYERS, (False, True)))
    for tokens, width, layers, mixed in cases:
        _judge_activations(activation_bytes(tokens, width, layers, mixed), tokens, width, layers, mixed)
    return f"{len(cases)} models, to the byte"


def _judge_activations(yours: object, tokens: int, width: int, layers: int, mixed: bool) -> None:
    right = find_activation_bytes(tokens, width, layers, mixed)
    size = 2 if mixed else 4
    blocks = tokens * size * layers * PER_BLOCK * width

    def keeping(*blocks: int) -> AnyOf:
        return AnyOf(tuple(find_activation_bytes(tokens, width, layers, mixed, block=block) for block in blocks))

    judge(
        yours,
        right=right,
        case=f"{'mixed' if mixed else 'float32'}, width {width}, blocks: {layers}, tokens: {tokens}; bytes",
        wrong={
            "a float32 number has 4 bytes, one of 16 bits has 2": AnyOf((right // size, right // size * (6 - size))),
            "that is for one token: multiply by tokens": right // tokens,
            "that is for one block: multiply 16 · width by layers": find_activation_bytes(tokens, width, 1, mixed),
            "the last rows come once, and not in each block: 2 · width + 256": (
                find_activation_bytes(tokens, width, 1, mixed) * layers
            ),
            "after all blocks come 2 · width + 256, once: final norm, head and loss keep their inputs": AnyOf(
                tuple(blocks + tokens * size * end for end in (0, width + LOGITS, LOGITS, 2 * width, width))
            ),
            "two norms, the linear of q, k, v and the MLP's first keep 1 · width each, attention keeps 4 · width": (
                keeping(14, 15)
            ),
            "attention keeps q, k, v and its result; GELU and the linear after it keep 4 · width each": (
                keeping(8, 9, 10, 11, 12, 13)
            ),
            "a result that is the next part's input, as attention's, is one tensor, count it once": (
                keeping(17, 18, 19, 20, 21)
            ),
        },
        hint="add the table's rows: 16 · width for each block, then once 2 · width + 256; times tokens and bytes",
    )
