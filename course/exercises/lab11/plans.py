"""Exercises 11.2 to 11.4: the order of 1F1B, where to cut a network into stages, and the bytes that each way sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise, product
from numbers import Integral

from course.check.judge import AnyOf, judge
from course.check.verdicts import expect
from course.pipelines import simulate

RANKS, MICRO = (2, 3, 4, 6, 1), (1, 2, 3, 4, 5, 8)
FORWARD, BACKWARD = 1, 2  # how long a pass takes
WARM_UP = "a rank begins with min(ranks − 1 − rank, micro) forward passes, then one forward and one backward in turn"

# Seconds of each layer, and how many stages. Common mistakes give different counts in the first.
CUTS = (
    ((0.9, 0.9, 0.4, 0.1, 0.3, 0.2, 0.7, 0.8), 3),
    ((0.3, 0.1, 0.1, 0.1), 2),
    ((0.1, 0.1, 0.1, 0.3), 2),
    ((0.2, 0.2, 0.2), 1),
    ((0.1, 0.1, 0.6), 3),
    ((0.5, 0.9, 0.4, 0.5, 0.7), 3),
    ((0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2), 3),
    ((0.3, 0.2, 0.6, 0.3, 0.8, 0.2), 4),
)
CLOSE = 1 + 1e-9  # sums of seconds differ in their last digits
TRY_ALL = "try all places of the cuts, combinations(range(1, len(times)), stages − 1), and keep the best"

SIZE = 2  # bytes of a number
# Weights, tokens, widths and layers: the lab's GPT, and one like GPT-2 small.
MODELS = ((1_200_000, 2_048, 320, 3), (85_000_000, 4_096, 768, 12))


def verify_one_f_one_b(one_f_one_b: Callable) -> str:
    """Judges by what the orders of all ranks achieve together; any order is right that achieves it."""
    cases = list(product(RANKS, MICRO))
    for ranks, micro in cases:
        orders = [_read_order(one_f_one_b(rank, ranks, micro), rank, ranks, micro) for rank in range(ranks)]
        rows, waiting = simulate(orders, forward=FORWARD, backward=BACKWARD)
        total = max(some[-1]["end"] for some in rows.values() if some)
        right = (micro + ranks - 1) * (FORWARD + BACKWARD)
        expect(
            not waiting and total <= right,
            f"ranks: {ranks}, micro-batches: {micro}: the time of all, with {FORWARD} for a forward and {BACKWARD} for "
            "a backward",
            yours=f"{'endless' if waiting else f'{total:g}'}; rank 0: {' '.join(orders[0])}",
            expected=f"{right}, (micro + ranks − 1) · {FORWARD + BACKWARD}",
            hint=f"a rank waits where it could work: {WARM_UP}",
        )
    held = "rank r never holds more than ranks − r micro-batches"
    return (
        f"{len(cases)} pipelines of 1 to {max(RANKS)} ranks take (micro + ranks − 1) · {FORWARD + BACKWARD}, and {held}"
    )


def _read_order(yours: object, rank: int, ranks: int, micro: int) -> list[str]:
    """Expects each forward and each backward pass once, in order, backward after forward, and few held at once."""
    order = [str(one) for one in yours] if isinstance(yours, list | tuple) else [str(yours)]
    case = f"ranks: {ranks}, micro-batches: {micro}, rank {rank}"
    warm_up = ranks - 1 - rank
    form = 'return one list of strings, such as ["F0", "B0"]: each pass once, in the order of the micro-batches'
    many = "there are only micro micro-batches: no more than micro forward passes at the beginning, min(…, micro)"
    judge(
        [one for one in order if one.startswith("F")],
        right=[f"F{number}" for number in range(micro)],
        case=f"{case}: the forward passes",
        hint=form,
        wrong={
            "micro-batches count from 0": [f"F{number + 1}" for number in range(micro)],
            many: [f"F{number}" for number in range(max(warm_up, micro))],
        },
    )
    judge(
        [one for one in order if one.startswith("B")],
        right=[f"B{number}" for number in range(micro)],
        case=f"{case}: the backward passes",
        hint=form,
        wrong={
            "at the end come the backward passes that are left, one for each forward pass of the beginning": [
                f"B{number}" for number in range(micro - min(warm_up, micro))
            ]
        },
    )
    held = list(accumulate(1 if one.startswith("F") else -1 for one in order))
    most = min(ranks - rank, micro)
    shown, hint = " ".join(order), f"too many forward passes before a backward: {WARM_UP}"
    if len(order) > 2 * micro or min(held) < 0:
        hint = "a micro-batch's backward comes after its forward, and nothing else is in the list"
    expect(
        len(order) == 2 * micro and min(held) >= 0 and max(held) <= most,
        f"{case}: micro-batches held at once",
        yours=f"{min(held)} to {max(held)}: {shown}",
        expected=f"0 to {most}, min(ranks − rank, micro)",
        hint=hint,
    )
    return order


def verify_cut(cut: Callable) -> str:
    """Compares the counts of layers with the best ones; where several are best, each is right."""
    for times, stages in CUTS:
        _verify_cut(cut(list(times), stages), times, stages)
    return f"no other cuts have a faster slowest stage, for {len(CUTS)} networks and 1 to 4 stages"


def _verify_cut(yours: object, times: Sequence[float], stages: int) -> None:
    case, layers = f"cut({list(times)}, {stages})", len(times)

    def find_slowest(counts: Sequence[int]) -> float:
        ends = accumulate(counts)
        return max((sum(times[end - count : end]) for count, end in zip(counts, ends, strict=True)), default=0.0)

    counts = yours.tolist() if hasattr(yours, "tolist") else yours
    expect(
        isinstance(counts, list | tuple) and all(isinstance(one, Integral) for one in counts),
        case,
        yours=str(counts)[:100],
        expected=f"{stages} whole numbers of 1 or more, whose sum is {layers}",
        hint="return how many layers each stage gets, as a list: [1, 3] gives stage 0 one layer and stage 1 three",
    )
    places = [(0, *some, layers) for some in combinations(range(1, layers), stages - 1)]
    every = [[end - begin for begin, end in pairwise(some)] for some in places]
    least = min(map(find_slowest, every))
    best = [one for one in every if find_slowest(one) <= least * CLOSE]
    ends = [list(accumulate(one)) for one in best]
    each, more = divmod(layers, stages)
    judge(
        counts,
        right=AnyOf(tuple(best)),
        case=f"{case}: layers of each stage",
        hint=f"each stage has layers, each layer one stage, and only the largest sum of seconds counts: {TRY_ALL}",
        wrong={
            "these are the places of the cuts: return the differences between them": AnyOf(
                (*(one[:-1] for one in ends), *ends, *([0, *one] for one in ends))
            ),
            f"equal counts of layers do not take equal seconds: {TRY_ALL}": AnyOf(
                ([each + 1] * more + [each] * (stages - more), [each] * (stages - 1) + [each + more])
            ),
        },
        show=lambda some: f"{some}, the slowest stage {find_slowest(some):.3f} s",
    )


def verify_bytes_sent(bytes_sent: Callable) -> str:
    """Asks for each way on 5 ranks, 16 and 1; a pipeline of one rank has no stage in the middle."""
    cases = 0
    for ranks, model in product((5, 16, 1), MODELS):
        words = "ranks {}, weights {:,}, tokens {:,}, width {}, layers {}".format(ranks, *model)
        for way, (right, hint, wrong) in _list_ways(ranks, *model).items():
            if ranks == 1 and way == "pipeline":
                continue
            judge(
                bytes_sent(way, ranks, *model),
                right=right,
                case=f'"{way}", {words}: bytes that one rank sends',
                hint=hint,
                wrong={**wrong, "each number has 2 bytes, and not 4": 2 * right},
                within=1e-6,  # a rounding to whole bytes is right, also of each message, and so is float32's
            )
            cases += 1
    return f"{cases} cases of data, tensor and pipeline parallelism, to the byte"


def _list_ways(
    ranks: int, weights: int, tokens: int, width: int, layers: int
) -> dict[str, tuple[float, str, dict[str, object]]]:
    """Returns for each way the bytes that a rank sends, the hint, and what mistakes give.

    Source: M. Shoeybi et al., "Megatron-LM" (2019), arXiv:1909.08053, section 3, for the four all-reduces.
    """
    ring, gradients, activations = 2 * (ranks - 1) / ranks, SIZE * weights, SIZE * tokens * width
    data, tensor, pipeline = ring * gradients, ring * 4 * layers * activations, 2 * activations
    factor = "a ring sends n − 1 of n parts, twice: the factor is 2 · (n − 1)/n"
    half = "this is half of it: each number has 2 bytes,"
    return {
        "data": (
            data,
            "return one number: one all-reduce of weights numbers, 2 · (n − 1)/n · weights · 2 bytes",
            {
                f"{half} and a ring sends (n − 1)/n of the size twice": data / 2,
                factor: AnyOf((gradients, 2 * gradients)),
            },
        ),
        "tensor": (
            tensor,
            "4 · layers all-reduces, each of tokens · width numbers: 2 · (n − 1)/n · tokens · width · 2 bytes each",
            {
                f"{half} and attention and MLP have one all-reduce each, in forward and again in backward": tensor / 2,
                factor: AnyOf((4 * layers * activations, 8 * layers * activations)),
                "each layer has its four all-reduces: multiply by 4 · layers": AnyOf((tensor / 4, tensor / layers)),
            },
        ),
        "pipeline": (
            pipeline,
            "outputs forward and gradients back to the two neighbours: 2 · tokens · width · 2 bytes",
            {
                f"{half} and a stage in the middle sends outputs forward, and the gradients of its inputs back": (
                    pipeline / 2
                ),
                "one stage sends to another: that is no ring, and there is no factor (n − 1)/n": AnyOf(
                    (ring * pipeline, ring * pipeline / 2)
                ),
            },
        ),
    }
