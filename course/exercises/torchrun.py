"""The words of a torchrun that a learner typed, read by torchrun's own parser."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence

from torch.distributed.run import get_args_parser

from course.check.verdicts import NotYetError


def parse_torchrun(words: Sequence[str], *, case: str, expected: str, hint: str) -> argparse.Namespace:
    """Parses the words behind ``torchrun``; missing options come from ``PET_`` variables, as torchrun has them.

    Raises:
        NotYetError: torchrun would refuse them; it has this case, expectation and hint, and torchrun's last line.
    """
    said, parser = io.StringIO(), get_args_parser()
    parser.prog = "torchrun"  # or it names the program that this process was started as
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parser.parse_args(list(words))
    except SystemExit:
        last = said.getvalue().strip().splitlines()[-1:] or ["it shows its help"]
        raise NotYetError(case, yours=last[0][:200], expected=expected, hint=hint) from None
