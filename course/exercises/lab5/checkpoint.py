"""Exercise 5.1, its checkpoints: saved by one rank, and the same as those of one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from course.check import expect
from lab_utils.training import Checkpoints

CLOSE = 1e-10


def expect_saved_once(folders: Mapping[str, Path], first: str) -> None:
    """Only the node of rank 0 has checkpoints.

    Args:
        folders: Where each node would save, by its name.
        first: The node of rank 0.
    """
    found = [name for name, folder in folders.items() if any(folder.glob("step-*.pt"))]
    hint = "exactly one process saves, the one that loads later: if rank == 0"
    if len(found) > 1:
        hint = "every process saved: rank 0 alone may, and LOCAL_RANK is 0 on every node: if rank == 0"
    expect(
        found == [first],
        "which nodes hold checkpoints, with rank 0 on " + first,
        yours=" and ".join(found) or "none",
        expected=f"{first} alone",
        hint=hint,
    )


def expect_same_state(ours: Path, theirs: Path) -> None:
    """The last checkpoints agree in step, weights and the gradients of the last step."""
    (step, found), (last, wanted) = Checkpoints(ours).load(), Checkpoints(theirs).load()
    expect(
        step == last,
        "the step of the last checkpoint",
        yours=step,
        expected=last,
        hint="save where the stub stood: every few steps, and at the end of each epoch",
    )
    for part, tensors in (("model", "the weights"), ("gradients", "the gradients")):
        expect(
            part in found and _name(found[part]).keys() == _name(wanted[part]).keys(),
            f"{tensors} in the last checkpoint",
            yours=", ".join(list(_name(found[part]))[:2]) + ", …" if part in found else "not there",
            expected=", ".join(list(_name(wanted[part]))[:2]) + ", …",
            hint="save the state as it was put together: model.module.state_dict() has the names without 'module.'",
        )
        pairs = [(found_one, _name(wanted[part])[name]) for name, found_one in _name(found[part]).items()]
        difference = max(float((one - other).abs().max()) for one, other in pairs)
        expect(
            difference <= CLOSE,
            f"{tensors} in the last checkpoint: largest difference from one process's",
            yours=f"{difference:.1e}",
            expected=f"at most {CLOSE:.0e}",
            hint="save after the step, and before the next zero_grad()",
        )


def _name(tensors: Mapping[str, torch.Tensor] | list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by name; those of a list by their number."""
    return dict(tensors) if isinstance(tensors, Mapping) else {str(number): one for number, one in enumerate(tensors)}
