"""Compares an answer's value with the right one, and with the values that typical mistakes give.

A checker is inputs, a reference, and a table of wrong formulas, each with its hint::

    judge(
        yours,
        right=mean,
        case="step 2, rank 0: gradients",
        wrong={"this is the sum: divide by the world size": total, "divided twice": mean / ranks},
        hint="average over the ranks, then unpack",
    )

From the table most tests follow by themselves: ``tests/test_check_tables.py`` runs the notebook's own solution, and
hands each wrong value of each table to :meth:`Expected.check`, which has to answer with its hint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number

import torch

from course.check.verdicts import NotYetError

SHOWN = 4  # numbers of a tensor


@dataclass(frozen=True)
class AnyOf:
    """Several values of one mistake, or several right ones."""

    values: tuple[object, ...]


@dataclass(frozen=True)
class Expected:
    """One comparison of an exercise; :func:`judge` has the meaning of the fields."""

    right: object
    case: str
    hint: str
    wrong: Mapping[str, object] = field(default_factory=dict)
    within: float = 1e-9
    show: Callable[[object], str] | None = None

    def check(self, yours: object) -> None:
        """Raises :class:`NotYetError` unless ``yours`` is right."""
        if any(agree(yours, one, within=self.within) for one in _list_values(self.right)):
            return
        hints = (
            hint
            for hint, values in self.wrong.items()
            if any(agree(yours, value, within=self.within) for value in _list_values(values))
        )
        right = _list_values(self.right)[0]
        shown = (self.show(yours), self.show(right)) if self.show else _show_difference(yours, right, self.within)
        raise NotYetError(self.case, yours=shown[0], expected=shown[1], hint=next(hints, self.hint))


def judge(
    yours: object,
    *,
    right: object,
    case: str,
    hint: str,
    wrong: Mapping[str, object] | None = None,
    within: float = 1e-9,
    show: Callable[[object], str] | None = None,
) -> None:
    """Accepts an answer's value, or raises with yours, expected, and the hint of the mistake that gives this value.

    Args:
        yours: The answer's value: a tensor, an array, a number, text, or a list, tuple or dictionary of these.
        right: The reference's value, or :class:`AnyOf` several; a message shows the first.
        case: What was tried, in a few words.
        hint: For a wrong value that no mistake of the table gives.
        wrong: For each hint the value that this mistake gives, or :class:`AnyOf` several. The first that agrees
            counts; a value that happens to be right for these inputs does no harm.
        within: Relative and absolute difference that numbers may have.
        show: Makes the text of a value; without it, the numbers from the first that differs are shown.

    Raises:
        NotYetError: The value is not right.
    """
    Expected(right, case, hint, wrong or {}, within, show).check(yours)


def agree(one: object, other: object, *, within: float) -> bool:
    """True if two values are equal: numbers to rounding, tensors in shape, too, lists and dictionaries in all parts."""
    one, other = _simplify(one), _simplify(other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=within, atol=within, equal_nan=True)
    if isinstance(one, Number) and isinstance(other, Number):
        if isinstance(one, bool) or isinstance(other, bool):
            return one is other
        close = math.isclose(one, other, rel_tol=within, abs_tol=within)
        return close or (one != one and other != other)  # NaN
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(agree(one[key], other[key], within=within) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(
            agree(mine, theirs, within=within) for mine, theirs in zip(one, other, strict=True)
        )
    return type(one) is type(other) and bool(one == other)


def _list_values(value: object) -> tuple[object, ...]:
    return value.values if isinstance(value, AnyOf) else (value,)


def _simplify(value: object) -> object:
    """Numbers of one type, tensors in float64, a sequence as a list; anything else unchanged."""
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biuf":
        value = torch.as_tensor(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.item() if not value.ndim else value if value.is_complex() else value.double()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    return value


def _show_difference(yours: object, right: object, within: float) -> tuple[str, str]:
    """Texts of both: of lists and dictionaries the first part that differs, with its place."""
    yours, right = _simplify(yours), _simplify(right)
    places: Sequence[object] = ()
    if isinstance(right, Mapping) and isinstance(yours, Mapping) and yours.keys() == right.keys():
        places = list(right)
    elif isinstance(right, list) and isinstance(yours, list) and len(yours) == len(right):
        nested = any(isinstance(_simplify(one), torch.Tensor | list | Mapping) for one in right)
        places = range(len(right)) if nested else ()
    for place in places:
        if not agree(yours[place], right[place], within=within):
            shown = _show_difference(yours[place], right[place], within)
            return f"[{place!r}]: {shown[0]}", f"[{place!r}]: {shown[1]}"
    first = 0
    if isinstance(yours, torch.Tensor) and isinstance(right, torch.Tensor) and yours.shape == right.shape:
        far = (yours - right).abs() > within * (1 + right.abs())
        first = int(far.flatten().nonzero()[0]) if far.any() else 0
    return _show(yours, first), _show(right, first)


def _show(value: object, first: int = 0) -> str:
    if isinstance(value, torch.Tensor):
        shape = "×".join(map(str, value.shape))
        numbers = value.flatten()[first : first + SHOWN].tolist()
        more = ", …" if first + SHOWN < value.numel() else ""
        return f"{'…, ' if first else ''}{', '.join(f'{one:.6g}' for one in numbers)}{more} (a tensor of {shape})"
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(_show(_simplify(one)) for one in value)}]"
    return value if isinstance(value, str) else repr(value)
