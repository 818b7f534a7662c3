"""Damaged and forged checkpoints, under names with the right digest: each is loaded, skipped or refused in one message.

Whatever a file holds: nothing in it is run, no case takes longer than seconds, and the checkpoint before it is loaded
unless the file refers to code.
"""

import hashlib
import io
import os
import pickle
import random
import struct
import time
import warnings
import zipfile

import pytest
import torch
from harness.canary import assert_is_message, describe_tree, limit_seconds, make_canary
from harness.fuzzing import choose_seeds, mutate_bytes

from lab_common import LabError
from lab_utils.training import Checkpoints

SECONDS = 10
ODD_NUMBERS = (0, 1, -1, 7, 2**31 - 1, 2**31, 2**40, 2**62, -(2**62))


class Hostile:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


class Program:
    """A pickle that starts a program when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch was-started",)


class Call:
    """A pickle that calls what torch allows, with any arguments."""

    def __init__(self, function, arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def save_bytes(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def make_whole():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "note": "as it was"}


WHOLE = save_bytes(make_whole())


def rezip(change, dice, compress=zipfile.ZIP_STORED, others=True):
    """A checkpoint with its pickle, or one of its other records, changed; the archive around it is right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as old, zipfile.ZipFile(out, "w", compress) as new:
        names = old.namelist()
        wanted = dice.choice([name for name in names if name.endswith("data.pkl")] * 4 + names * others)
        for name in names:
            content = old.read(name)
            new.writestr(name, change(content) if name == wanted else content)
    return out.getvalue()


def mutate_record(dice, marker):
    return rezip(lambda content: mutate_bytes(content, dice), dice)


def forge_numbers(dice, marker):
    """Sizes, strides and offsets in the pickle are any others."""

    def change(content):
        spots = [at for at in range(len(content) - 1) if content[at] == ord("K")]
        at, number = dice.choice(spots), dice.choice(ODD_NUMBERS)
        return content[:at] + b"\x8a\x09" + struct.pack("<q", number) + bytes(1) + content[at + 2 :]

    return rezip(change, dice, others=False)


def mutate_file(dice, marker):
    return mutate_bytes(WHOLE, dice)


def cut(dice, marker):
    return WHOLE[: dice.randrange(len(WHOLE))]


def make_hostile(dice, marker):
    value = dice.choice([Hostile(marker), Program(), Call(eval, ("1",)), Call(open, ("written", "w"))])
    state = {"model": {"weight": value, "bias": torch.ones(2)}, "epoch": 1}
    return save_bytes(state) if dice.random() < 0.7 else pickle.dumps(state, protocol=dice.choice((2, 4)))


def make_call(dice, marker):
    """What the safe unpickler allows, with arguments that nobody gives."""
    number, tensor = dice.choice(ODD_NUMBERS), torch.ones(4)
    storage = torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
    calls = [
        (bytearray, (dice.choice((0, 10, 2**40)),)),
        (torch._utils._rebuild_tensor_v2, (storage, number, (number,), (1,), False, {})),
        (torch._utils._rebuild_tensor_v2, (storage, 0, (4, number), (number, 1), False, {})),
        (torch._utils._rebuild_parameter, (tensor, "x", [])),
        (torch._utils._rebuild_meta_tensor_no_storage, (torch.float32, (number,), (1,), False)),
        (torch.Size, ((number,),)),
        (complex, ("x",)),
        (set, (number,)),
    ]
    return save_bytes({"model": Call(*dice.choice(calls)), "epoch": 1})


def make_other(dice, marker):
    """Not a state, or not a file of torch.save."""
    values = [[1], "text", None, 3, torch.ones(2), {"a": [[]]}, {}, {1: 2}]
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(10**6))
        file.writestr("archive/version", "3\n")
    old = io.BytesIO()
    torch.save(make_whole(), old, _use_new_zipfile_serialization=False)
    others = [b"", b"\0" * 100, dice.randbytes(500), zipped.getvalue(), old.getvalue(), b"\x80\x02" + b"(" * 10_000]
    others.append(rezip(lambda content: bytes(10**7), dice, zipfile.ZIP_DEFLATED))
    deep = dice.choice((10, 1000, 50_000))
    nested = b"\x80\x02}X\x01\0\0\0a" + b"]" * deep + b"a" * (deep - 1) + b"s."
    others.append(rezip(lambda content: nested, dice, others=False))
    return dice.choice([*others, *(save_bytes(value) for value in values)])


ATTACKS = {mutate_record: 6, forge_numbers: 3, mutate_file: 3, cut: 1, make_hostile: 1, make_call: 2, make_other: 2}


@pytest.mark.drill
def test_hostile_checkpoints_are_loaded_skipped_or_refused(tmp_path, monkeypatch):
    seeds = choose_seeds(many=1000, few=80)
    canary = make_canary(tmp_path / "canary")
    monkeypatch.setenv("PATH", f"{canary / 'programs'}:{os.environ['PATH']}")
    monkeypatch.chdir(canary / "work")
    marker, outside = canary / "code was run", describe_tree(canary)
    checkpoints = Checkpoints(tmp_path / "run")
    good = checkpoints.save(1, {"step": 1})
    counts, slowest = {"loaded": 0, "skipped": 0, "refused": 0}, 0.0
    for seed in seeds:
        dice = random.Random(seed)
        content = dice.choices(list(ATTACKS), ATTACKS.values())[0](dice, marker)
        path = good.with_name(f"step-000000002-{hashlib.sha256(content).hexdigest()[:16]}.pt")
        path.write_bytes(content)
        start = time.monotonic()
        try:
            with limit_seconds(SECONDS), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                warnings.simplefilter("ignore", ResourceWarning)  # of tests before this one
                step, state = checkpoints.load()
        except LabError as error:
            assert_is_message(error, seed)
            assert "nothing in it was run" in error.what, (seed, str(error))
            counts["refused"] += 1
        else:
            assert isinstance(state, dict), seed
            if step == 1:
                (warning,) = said
                assert path.name in str(warning.message) and state == {"step": 1}, seed
                assert str(warning.message).isprintable(), seed
            else:
                assert not said, (seed, [str(one.message) for one in said])
            counts["skipped" if step == 1 else "loaded"] += 1
        slowest = max(slowest, time.monotonic() - start)
        path.unlink()
        assert not marker.exists(), seed
    assert describe_tree(canary) == outside
    assert [file.name for file in good.parent.iterdir()] == [good.name], "loading leaves the folder as it was"
    assert min(counts.values()) > len(seeds) // 50, f"one kind is missing: {counts}"
    print(f"{len(seeds)} checkpoints: {counts}; the slowest took {slowest:.2f} s")
