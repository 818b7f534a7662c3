"""Bars of progress: in a notebook and a terminal, and not in a file or a pipe."""

from typing import Any


def open_bar(total: float | None, title: str, *, show: bool = True, **options: Any) -> Any:
    """Returns tqdm's bar of progress, to ``update``, and to close, as ``with`` does.

    Args:
        total: How much there is to do; None where nobody knows.
        title: Text before the bar.
        show: Whether to show it where one can see it; in a log it would be a line per update.
        options: What else ``tqdm`` takes, such as ``unit`` and ``delay``.
    """
    from tqdm.auto import tqdm

    # tqdm asks itself where None: its bar in a notebook is always shown, any other one in a terminal.
    return tqdm(total=total, desc=title, disable=None if show else True, **options)
