"""Exercise 5.1, its checkpoint: saved by one rank, and good to go on from."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from course.check.verdicts import NotYetError, expect


def expect_saved_once(paths: Mapping[str, Path], first: str) -> None:
    """The node of rank 0 has the checkpoint, and no other node has one, under any name.

    Args:
        paths: What each node would save, by its name.
        first: The node of rank 0.
    """
    found = {name: files for name, path in paths.items() if (files := find_saved(path))}
    hint = "exactly one process saves, the one that loads later: if rank == 0"
    if len(found) > 1:
        hint = "every process saved: rank 0 alone may, and LOCAL_RANK is 0 on every node: if rank == 0"
    elif list(found) == [first]:
        hint = "save to args.checkpoint: there the script looks for it when it is started again"
    expect(
        list(found) == [first] and paths[first].name in found[first],
        "which nodes hold a checkpoint, with rank 0 on " + first,
        yours="; ".join(f"{name}: {', '.join(files)}" for name, files in found.items()) or "none",
        expected=f"{first} alone: {paths[first].name}",
        hint=hint,
    )


def find_saved(path: Path) -> list[str]:
    """The names of what ``torch.save`` wrote into a checkpoint's folder, and the checkpoint's own if it is there."""
    files = (file for file in path.parent.rglob("*") if file == path or zipfile.is_zipfile(file))
    return sorted(str(file.relative_to(path.parent)) for file in files)


def expect_state(path: Path, weights: Mapping[str, torch.Tensor], epochs: int) -> None:
    """The checkpoint has the weights at the end, under the bare network's names, and what is needed to go on.

    Args:
        path: The checkpoint of rank 0.
        weights: The parameters at the end, by their names in the bare network.
        epochs: How many were trained.
    """
    try:
        state = torch.load(path)
    except Exception as error:  # whatever a learner's own way of saving left there
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = "torch.save(state, ...) of a dictionary of state_dict()s"
        raise NotYetError("the checkpoint", yours=line[:160], expected="loads again", hint=hint) from None
    model = state.get("model", {}) if isinstance(state, Mapping) else {}
    missing = [name for name in weights if name not in model]
    expect(
        not missing,
        "the weights in the checkpoint",
        yours=", ".join(list(model)[:2]) + ", …" if model else "not there",
        expected=", ".join(list(weights)[:2]) + ", …",
        hint="save state as it was put together, with model and optimizer; model.module's names have no 'module.'",
    )
    expect(
        bool(state.get("optimizer")),
        "the optimizer in the checkpoint",
        yours="not there",
        expected="its state_dict(), as 'optimizer'",
        hint="save the state as it was put together: the script loads the optimizer's momentum when it goes on",
    )
    difference = max(float((model[name] - one).abs().max()) for name, one in weights.items())
    expect(
        difference == 0 and state.get("epoch") == epochs,
        "the last checkpoint",
        yours=f"of epoch {state.get('epoch')}, whose weights differ from those at the end by {difference:.1e}",
        expected=f"of epoch {epochs}, with the weights at the end",
        hint="save at the end of each epoch, the last one too",
    )
