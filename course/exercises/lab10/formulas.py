"""Exercises 10.1 and 10.2: the bytes of weights, gradients, optimizer and activations on a rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from numbers import Real

from course.check.verdicts import expect

PARTS = ("weights", "gradients", "optimizer")
# How many parameters on how many ranks. Each number of ranks divides its parameters.
MODELS = ((1_200_000, 5), (7_040_000, 64), (1_200_000, 1))
UNITS = (10**3, 2**10, 10**6, 2**20, 10**9, 2**30)
# What forward keeps for each token: by block in widths, and once at the end, in widths and in logits.
PER_BLOCK, AT_THE_END, LOGITS = 16, 2, 256
# Tokens, widths and blocks, in such an order that two mistakes differ in the first case that they fail.
TOKENS, WIDTHS, LAYERS = (256, 1), (320, 64), (3, 1)


def find_state_bytes(parameters: int, ranks: int, stage: int, mixed: bool) -> tuple[float, float, float]:
    """Returns the bytes of weights, gradients and optimizer on each rank, for Adam.

    Source: S. Rajbhandari et al., "ZeRO" (2020), arXiv:1910.02054, section 3.1 and figure 1.

    Args:
        parameters: Number of parameters.
        ranks: Number of ranks that share them.
        stage: 0 for DDP, 1 to 3 for ZeRO.
        mixed: Weights and gradients of two bytes, and a float32 copy of the weights in the optimizer.
    """
    each = (2, 2, 12) if mixed else (4, 4, 8)
    shares = (stage >= 3, stage >= 2, stage >= 1)
    weights, gradients, optimizer = (
        parameters * size / (ranks if share else 1) for size, share in zip(each, shares, strict=True)
    )
    return weights, gradients, optimizer


def verify_state_bytes(state_bytes: Callable) -> str:
    """Asks for each stage in both precisions, for 5 ranks, 64 and 1."""
    cases = list(product(MODELS, (False, True), range(4)))
    for (parameters, ranks), mixed, stage in cases:
        wanted = find_state_bytes(parameters, ranks, stage, mixed)
        words = f"{'mixed' if mixed else 'float32'}, {f'ZeRO-{stage}' if stage else 'DDP'}, "
        words += f"{ranks} {'ranks' if ranks > 1 else 'rank'}"
        yours = _as_numbers(state_bytes(parameters, ranks, stage, mixed), words)
        for place, (found, right) in enumerate(zip(yours, wanted, strict=True)):
            expect(
                # A rounding to whole bytes is right, and so is float32's.
                math.isclose(found, right, rel_tol=1e-6),
                f"{words}: bytes of the {PARTS[place]} of {parameters:,} parameters",
                yours=f"{found:,.0f}",
                expected=f"{right:,.0f}",
                hint=_explain_states([one / parameters for one in yours], place, parameters, ranks, stage, mixed),
            )
    return f"{len(cases)} cases of precision, stage and number of ranks, to the byte"


def as_number(found: object) -> object:
    """Returns the number in a tensor or array of one number; anything else unchanged."""
    return found.item() if hasattr(found, "item") and getattr(found, "ndim", 1) == 0 else found


def _as_numbers(found: object, words: str) -> tuple[float, ...]:
    found = found.tolist() if hasattr(found, "tolist") else found  # an array of NumPy's
    found = [as_number(one) for one in found] if isinstance(found, tuple | list) else found
    good = isinstance(found, list) and len(found) == 3 and all(isinstance(one, Real) for one in found)
    shown = "None" if found is None else f"{type(found).__name__} {str(found)[:60]}"
    hint = "return the three numbers: return weights, gradients, optimizer"
    expect(good, words, yours=shown, expected="three numbers", hint=hint)
    return tuple(found)


def _explain_states(yours: list[float], place: int, parameters: int, ranks: int, stage: int, mixed: bool) -> str:
    """Returns the hint for wrong bytes per parameter at one place."""
    per, right = yours[place], find_state_bytes(1, ranks, stage, mixed)
    part, each, begins = PARTS[place], ((2, 2, 12) if mixed else (4, 4, 8))[place], (3, 2, 1)[place]
    shared = stage >= begins
    share = each / ranks if shared else each

    def is_like(*numbers: float) -> bool:
        return any(math.isclose(per, number, rel_tol=1e-6) for number in numbers)

    default = "a float32 number has 4 bytes, one of 16 bits has 2: parameters · bytes, divided by ranks where sharded"
    if place == 2:
        default = (
            "Adam's moments are float32, 4 + 4 bytes; mixed precision adds a copy of 4; divide by ranks where sharded"
        )
    wrong = {
        f"from ZeRO-{begins} on, each rank holds only its part of the {part}: divide by ranks": shared
        and is_like(each),
        f"the bytes of the {part} are divided from ZeRO-{begins} on, and not before": (
            not shared and is_like(each / ranks)
        ),
        "that is for all ranks together: return the bytes of one rank": is_like(each * ranks),
        "each rank holds its own part of what is divided, and all of the rest: never 0 bytes": per == 0,
        "return bytes: do not divide by the bytes of a KB, MB or GB": is_like(*(share / unit for unit in UNITS)),
        "these are the bytes of one parameter: multiply by parameters": is_like(share / parameters),
        "the float32 copy belongs to the optimizer: the weights in 16 bits have 2 bytes": (
            mixed and place == 0 and is_like(share * 3)
        ),
        "with mixed precision the optimizer also holds a float32 copy of the weights: 4 + 4 + 4 bytes": (
            mixed and place == 2 and is_like(share * 8 / 12)
        ),
        "Adam has two moments for each parameter, float32 both: 4 + 4 bytes": (
            place == 2 and is_like(share / 2, share / 3)
        ),
        "in float32 there is no other copy of the weights: the optimizer holds only the two moments": (
            not mixed and place == 2 and is_like(share * 12 / 8)
        ),
        "return them in this order: weights, gradients, optimizer": all(
            map(math.isclose, sorted(yours), sorted(right))
        ),
    }
    return next((hint for hint, fits in wrong.items() if fits), default)


def find_activation_bytes(tokens: int, width: int, layers: int, mixed: bool) -> int:
    """Returns the bytes that the forward pass of ``scripts/gpt.py`` keeps for backward, without norms' statistics."""
    numbers = layers * PER_BLOCK * width + AT_THE_END * width + LOGITS
    return tokens * numbers * (2 if mixed else 4)


def verify_activation_bytes(activation_bytes: Callable) -> str:
    """Asks for models of several widths and depths, in both precisions."""
    cases = list(product(TOKENS, WIDTHS, LAYERS, (False, True)))
    for tokens, width, layers, mixed in cases:
        yours, right = (
            as_number(activation_bytes(tokens, width, layers, mixed)),
            find_activation_bytes(tokens, width, layers, mixed),
        )
        case = f"{'mixed' if mixed else 'float32'}, width {width}, blocks: {layers}, tokens: {tokens}"
        hint = "return one number: the bytes of all tokens"
        expect(isinstance(yours, Real), case, yours=type(yours).__name__, expected="a number of bytes", hint=hint)
        expect(
            abs(yours - right) <= 0.5,
            case,
            yours=f"{yours:,.0f} bytes",
            expected=f"{right:,.0f} bytes",
            hint=_explain_activations(yours, tokens, width, layers, mixed),
        )
    return f"{len(cases)} models, to the byte"


def _explain_activations(yours: float, tokens: int, width: int, layers: int, mixed: bool) -> str:
    """Returns the hint for a wrong number of bytes: which change of the formula gives it."""
    size, right = 2 if mixed else 4, (PER_BLOCK, AT_THE_END, LOGITS)

    def is_like(block: float, end: float, logits: float, times: float = tokens * size, blocks: int = layers) -> bool:
        return math.isclose(yours, times * (blocks * block * width + end * width + logits), rel_tol=1e-9)

    wrong = {
        "these are numbers; a float32 has 4 bytes, one of 16 bits has 2": is_like(*right, tokens),
        "with mixed precision each number has 2 bytes, else 4": is_like(*right, tokens * (6 - size)),
        "with mixed precision the 256 log-probabilities have 2 bytes each, too": is_like(*right[:2], LOGITS * 4 / size),
        "leave the statistics of the norms out, two numbers each: they are small": is_like(
            PER_BLOCK + 4 / width, AT_THE_END, LOGITS + 2
        ),
        "that is for one token: multiply by tokens": is_like(*right, size),
        "return bytes: do not divide by the bytes of a KB, MB or GB": any(
            is_like(*right, tokens * size / unit) for unit in UNITS
        ),
        "that is for one block: multiply 16 · width by layers": is_like(*right, blocks=1),
        "the last rows come once, and not in each block: 2 · width + 256": is_like(
            PER_BLOCK + AT_THE_END + LOGITS / width, 0, 0
        ),
        "after all blocks come 2 · width + 256, once": is_like(PER_BLOCK, 0, 0),
        "the final norm and the head keep their inputs, width numbers each, and the loss keeps 256": any(
            is_like(PER_BLOCK, *end) for end in ((1, LOGITS), (0, LOGITS), (AT_THE_END, 0), (1, 0))
        ),
    }
    if hint := next((hint for hint, fits in wrong.items() if fits), ""):
        return hint
    found = (yours / (tokens * size) - AT_THE_END * width - LOGITS) / (layers * width)
    block = round(found) if abs(found) < 2 * PER_BLOCK else 0
    if block < PER_BLOCK / 2 or not math.isclose(found, block, abs_tol=1e-6):
        return "add the table's rows: 16 · width for each block, then once 2 · width + 256; times tokens and bytes"
    return f"your blocks keep {block} · width for each token instead of 16 · width: {_explain_block(block)}"


def _explain_block(block: int) -> str:
    """Returns the hint for a block with this number of widths."""
    if block == PER_BLOCK + 1:
        return "attention and the linear after it share one tensor, count it once"
    if block > PER_BLOCK:
        return "a result that is the next part's input is one tensor, count it once"
    if block in (PER_BLOCK - 1, PER_BLOCK - 2):
        return "two norms, the linear of q, k, v and the MLP's first keep 1 · width each, attention keeps 4 · width"
    return "attention keeps q, k, v and its result; GELU and the linear after it keep 4 · width each"
