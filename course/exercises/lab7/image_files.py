"""Exercise 7.1: a Dataset that reads its images from files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from course.check.verdicts import expect, refusing

# No label is its image's index, and two images have the same one.
LABELS = (3, 7, 1, 7, 0, 9)
GREY = 4  # the index of the image that is stored with one channel
BATCH = (4, 0, 2, 2, 5)

PAIR = "a pair: the image and its label"
ONE_BY_ONE = "call `augment` once for each image, before they are stacked: it draws its random numbers once per call"


class _CountFloats(TorchDispatchMode):
    """Counts the operations that make floating point numbers of bytes, and the float images that are stacked."""

    count, stacked = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        bytes_in = any(isinstance(one, torch.Tensor) and one.dtype == torch.uint8 for one in args)
        self.count += bytes_in and isinstance(result, torch.Tensor) and result.is_floating_point()
        joined = [one for many in args if isinstance(many, list | tuple) for one in many]
        self.stacked += sum(isinstance(one, torch.Tensor) and one.is_floating_point() for one in joined)
        return result

    def count_conversions(self, images: Sequence[torch.Tensor]) -> int:
        """Returns the least there were: NumPy's are not seen, but images of one conversion share their memory."""
        parts = len({image.untyped_storage().data_ptr() for image in images})
        return self.count or max(self.stacked, parts)


class _Brighten:
    """An "augmentation" that makes every call's images brighter than those of the call before; keeps what it got."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: set[torch.dtype] = set()

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        expect(
            isinstance(image, torch.Tensor),
            "what augment gets",
            yours=f"{type(image).__module__}.{type(image).__name__}",
            expected="a tensor, uint8 (3, 32, 32)",
            hint="make the tensor first, with pil_to_tensor: augment gets uint8 (3, 32, 32), not the opened image",
        )
        self.shapes.append(tuple(image.shape))
        self.dtypes.add(image.dtype)
        return image + 10 * len(self.shapes)


def verify_image_files(image_files: Callable) -> str:
    """Has images read that were written for it, one of them grey, one by one and in a batch."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(0, 150, (len(LABELS), 3, 32, 32), generator=generator, dtype=torch.uint8)
    images[GREY] = images[GREY, :1]
    with tempfile.TemporaryDirectory(prefix="images-") as folder:
        paths = [str(Path(folder, f"{index}.png")) for index in range(len(LABELS))]
        for index, (image, path) in enumerate(zip(images, paths, strict=True)):
            _write(image[:1] if index == GREY else image, path)
        dataset = image_files(paths, list(LABELS))
        images[1] = images[1].flip(2)
        _write(images[1], paths[1])
        expect(
            len(dataset) == len(LABELS),
            "len(dataset)",
            yours=len(dataset),
            expected=len(LABELS),
            hint="len(self.paths)",
        )
        for index in (0, 2, GREY, 1, 5):
            grey = " (a grey image)" if index == GREY else ""
            _expect_item(f"dataset[{index}]{grey}", _ask(dataset, index, grey), images[index], LABELS[index])
        _verify_batch(dataset, images)
        _verify_augment(image_files, paths, images)
    return (
        "files read when they are asked for, grey ones, too; a batch in its order, converted at once, augmented singly"
    )


def _write(image: torch.Tensor, path: str) -> None:
    """Writes an image of one channel or three."""
    Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(path)


def _ask(dataset: object, index: int, grey: str) -> object:
    hint = 'Image.open(path).convert("RGB") makes three channels of any image' if grey else "see the error's own words"
    with refusing(RuntimeError, case=f"dataset[{index}]{grey}", expected=PAIR, hint=hint):
        return dataset[index]


def _expect_item(case: str, yours: object, image: torch.Tensor, label: int) -> None:
    pair = isinstance(yours, tuple | list) and len(yours) == 2 and isinstance(yours[0], torch.Tensor)
    expect(pair, case, yours=_describe(yours), expected=PAIR, hint="return image, label: a tensor and a number")
    found = yours[0]
    form, expected = (found.dtype, tuple(found.shape)), (torch.float32, (3, 32, 32))
    if found.ndim == 4 and len(found) == 1:
        hint = "this is a batch of one image: take its row, [0]"
    elif found.ndim == 3 and len(found) == 1:
        hint = 'Image.open(path).convert("RGB") makes three channels of any image'
    elif found.dtype != torch.float32:
        hint = "image / 255 makes float32 of bytes, from 0 to 1"
    else:
        hint = "pil_to_tensor returns (3, H, W) already: leave the shape as it is"
    expect(form == expected, f"{case}: the image", yours=form, expected=expected, hint=hint)
    wanted = image / 255
    if not torch.allclose(found, wanted, atol=1e-6):
        hint = "read the file of this index, and only divide by 255"
        if torch.allclose(found, image.float()):
            hint = "the values have to lie between 0 and 1: divide by 255"
        elif torch.allclose(found, wanted.flip(2), atol=1e-6):
            hint = "the file was changed since the dataset was made: read it when the item is asked for"
        ranges = [f"values {one.min():.3f} to {one.max():.3f}, mean {one.mean():.4f}" for one in (found, wanted)]
        expect(False, f"{case}: the image", yours=ranges[0], expected=ranges[1], hint=hint)
    hint = "the label of an index is self.labels[index]"
    expect(yours[1] == label, f"{case}: the label", yours=_describe(yours[1]), expected=label, hint=hint)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(map(_describe, value[:3]))}"
    return repr(value)[:60]


def _verify_batch(dataset: object, images: torch.Tensor) -> None:
    case = f"dataset.__getitems__({list(BATCH)})"
    expect(
        hasattr(dataset, "__getitems__"),
        case,
        yours="no such method",
        expected="a list of pairs",
        hint="its name ends in s",
    )
    with _CountFloats() as floats:
        yours = dataset.__getitems__(list(BATCH))
    if (
        isinstance(yours, tuple | list)
        and len(yours) == 2
        and all(isinstance(one, Sequence | torch.Tensor) for one in yours)
    ):
        hint = "return a list of pairs, list(zip(images, labels)): DataLoader stacks them itself"
        expect(False, case, yours=_describe(yours), expected=f"{len(BATCH)} pairs", hint=hint)
    hint = "a list, not a generator or an iterator: list(zip(images, labels))"
    expect(isinstance(yours, list), case, yours=type(yours).__name__, expected=f"a list of {len(BATCH)}", hint=hint)
    hint = "one pair for each index, also where an index comes twice"
    expect(len(yours) == len(BATCH), case, yours=f"{len(yours)} pairs", expected=f"{len(BATCH)} pairs", hint=hint)
    ordered = [_is_item(one, images[index], LABELS[index]) for one, index in zip(yours, BATCH, strict=True)]
    found = [_is_item(one, images[index], LABELS[index]) for one, index in zip(yours, sorted(BATCH), strict=True)]
    hint = "keep the order of the indices: the sampler has shuffled them"
    expect(all(ordered) or not all(found), case, yours="the indices, sorted", expected=list(BATCH), hint=hint)
    for place, (one, index) in enumerate(zip(yours, BATCH, strict=True)):
        _expect_item(f"{case}[{place}]", one, images[index], LABELS[index])
    conversions = floats.count_conversions([image for image, _ in yours])
    expect(
        conversions <= 1,
        f"{case}: conversions of bytes to float",
        yours=f"{conversions}, for {len(BATCH)} images",
        expected="1",
        hint="stack the bytes first: torch.stack(images) / 255 converts all of them in one operation",
    )
    default_collate(yours)


def _is_item(pair: object, image: torch.Tensor, label: int) -> bool:
    return torch.equal(torch.as_tensor(pair[0]), image / 255) and pair[1] == label


def _verify_augment(image_files: Callable, paths: list[str], images: torch.Tensor) -> None:
    """Has one image augmented, and then a batch."""
    augment = _Brighten()
    dataset = image_files(paths, list(LABELS), augment)
    yours = dataset[2]
    _expect_augmented("dataset[2] with an augment", augment, 1)
    _expect_item("dataset[2] with an augment", yours, images[2] + 10, LABELS[2])
    augment = _Brighten()
    case = "dataset.__getitems__([5, 3, 3]) with an augment"
    yours = image_files(paths, list(LABELS), augment).__getitems__([5, 3, 3])
    _expect_augmented(case, augment, 3)
    for place, index in enumerate((5, 3, 3)):
        _expect_item(f"{case}[{place}]", yours[place], images[index] + 10 * (place + 1), LABELS[index])


def _expect_augmented(case: str, augment: _Brighten, count: int) -> None:
    wanted = f"{count} call{'s' * (count > 1)}, each with uint8 (3, 32, 32)"
    calls = ", ".join(map(str, augment.shapes)) or "none"
    hint = "where self.augment is there, the image goes through it: image = self.augment(image)"
    expect(bool(augment.shapes), f"{case}: calls of augment", yours=calls, expected=wanted, hint=hint)
    alone = all(len(shape) == 3 for shape in augment.shapes) and len(augment.shapes) == count
    expect(alone, f"{case}: calls of augment", yours=f"with {calls}", expected=wanted, hint=ONE_BY_ONE)
    hint = "augment the bytes, as they come from the file, and convert to float afterwards"
    types = ", ".join(map(str, augment.dtypes))
    expect(augment.dtypes == {torch.uint8}, f"{case}: what augment gets", yours=types, expected=wanted, hint=hint)
