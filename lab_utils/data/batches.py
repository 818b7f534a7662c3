"""Batches by gather: pick the images out of the map, send them as bytes, and augment the whole batch at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from lab_common import LabError

PADDING = 4


class Batches:
    """One rank's share of a split, a batch at a time: (float32 (B, 3, 32, 32) normalised, int64 (B,)) on the device.

    Training batches come in a new order every epoch, moved by up to four pixels and mirrored at random, as in section
    4.2 of He et al. (arXiv:1512.03385). Order, shifts and mirrors are drawn for the whole epoch, by image, from (seed,
    epoch): an image looks the same whatever the batch size and on whichever rank it lands. The border that a shift lets
    in is black, because the image is padded before it is normalised, as torchvision's RandomCrop does on a PIL image.
    The first image of a split is never moved down or right, and its last never up or left.

    Call :meth:`set_epoch` before each epoch; without it every epoch has the order of the first.

    Attributes:
        batch_size: Images per batch.
        images: The number of images that this rank's next pass hands out.
        chosen: int64 (B,): which images of the split the batch handed out last consists of; None before the first.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        batch_size: int,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device | str = "cpu",
        train: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        """Checks the share.

        Args:
            images: uint8 (N, 3, H, W); to train, 3 · H · W has to be a multiple of 16.
            labels: int64 (N,).
            batch_size: Images per batch and rank.
            mean: Per channel, in 0..1; subtracted.
            std: Standard deviation, by which the images are divided.
            device: Where the batches are made and end up.
            train: Shuffle and augment.
            seed: Seed of the order and the augmentation; the same on every rank.
            rank: This process, from 0.
            world_size: Number of processes that share the images.
            drop_last: Leave out what does not fill a batch, so that every rank has as many batches as the others.

        Raises:
            LabError: There is no such rank, or no batch of this size.
        """
        if batch_size < 1:
            cause = "the global batch was divided by more ranks than it has images"
            raise LabError(f"A batch of {batch_size} images cannot be made.", cause=cause, fix="batch_size=1 or more")
        if world_size < 1 or not 0 <= rank < world_size:
            fix = "pass rank=int(os.environ['RANK']), world_size=int(os.environ['WORLD_SIZE']), and not LOCAL_RANK"
            raise LabError(f"There is no rank {rank} among {world_size} rank(s).", fix=fix)
        self._images, self._labels = images, labels
        self._device, self._train, self._seed = torch.device(device), train, seed
        self._rank, self._world_size = rank, world_size
        self._drop_last, self.batch_size = drop_last, batch_size
        self.chosen: torch.Tensor | None = None
        self.set_epoch(0)
        if drop_last and not self.images:
            raise LabError(
                f"There is not one full batch of {batch_size} among {len(images)} images on {world_size} rank(s).",
                fix="take a smaller batch_size, or drop_last=False",
            )
        # One multiplication and one addition a pixel: (value / 255 - mean) / std, with the constants folded, and as
        # large as an image, since to repeat one number over each channel took longer.
        scale = torch.tensor([1 / (255 * s) for s in std]).view(1, 3, 1, 1)
        offset = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(1, 3, 1, 1)
        shape = (1, *images.shape[1:])
        self._scale, self._offset = (one.expand(shape).contiguous().to(self._device) for one in (scale, offset))
        self._inside = _find_inside(*images.shape[2:]).to(self._device)

    def __len__(self) -> int:
        return -(-self.images // self.batch_size)

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Chooses the epoch whose order and augmentation the next pass has; the same on every rank.

        Args:
            epoch: From 0.
            start: Leaves out this many images from the start of the epoch's order, over all ranks together: those that
                a run had used before it was cut off. The rest is shared among the ranks there are now, however many
                there were then.
        """
        self._epoch, self._skipped = epoch, min(start, len(self._images))
        total = len(self._images) - self._skipped
        self.images = len(range(self._rank, total, self._world_size))
        if self._drop_last:
            # As many full batches on every rank: a rank with one batch more would wait for the others for ever.
            self.images = total // self._world_size // self.batch_size * self.batch_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if not self.images:
            return
        total, (channels, height, width) = len(self._images), self._images.shape[1:]
        size = channels * height * width
        order, shifts, mirrored = torch.arange(total), torch.full((total, 2), PADDING), torch.zeros(total, dtype=bool)
        if self._train:
            generator = torch.Generator().manual_seed(_mix(self._seed, self._epoch))
            order = torch.randperm(total, generator=generator)
            shifts = torch.randint(0, 2 * PADDING + 1, (total, 2), generator=generator)
            mirrored = torch.rand(total, generator=generator) < 0.5
            # There is nothing to read before the first image and behind the last.
            shifts[0].clamp_(min=PADDING)
            shifts[-1].clamp_(max=PADDING)
        order = order[self._skipped :][self._rank :: self._world_size][: self.images]
        rows, columns = shifts[order].unbind(1)
        # A moved image is the same run of bytes from an earlier or later start, so that to gather images moves them.
        runs = self._images.flatten().unfold(0, size, 1)
        starts = order * size + (rows - PADDING) * width + columns - PADDING
        # By image: which, its first byte, the number of its shift (a row of _inside), and if it is mirrored.
        numbers = torch.stack((order, starts, rows * (2 * PADDING + 1) + columns, mirrored[order]))
        for part in numbers.split(self.batch_size, dim=1):
            self.chosen, start, shift, mirror = part.unbind()
            images = self._upload(runs, start).view(-1, channels, height, width)
            if self._train:
                flipped = mirror.nonzero().flatten()  # found on the CPU: a GPU would have to be waited for
                self._blacken_and_mirror(images, self._send(shift), self._send(flipped))
            images = images.to(torch.float32)
            yield torch.addcmul(self._offset, images, self._scale, out=images), self._upload(self._labels, self.chosen)

    def _blacken_and_mirror(self, images: torch.Tensor, shifts: torch.Tensor, flipped: torch.Tensor) -> None:
        """Blackens what came from beyond an image's border, of the next row or image, and mirrors some images."""
        images.view(*images.shape[:2], -1).mul_(self._inside.index_select(0, shifts))
        mirrored = images.index_select(0, flipped).flip(3)
        # Sixteen pixels at a time, the widest that torch copies: single bytes took longer than all the rest on a CPU.
        images.flatten(1).view(torch.complex128).index_copy_(0, flipped, mirrored.flatten(1).view(torch.complex128))

    def _upload(self, source: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Gathers rows straight into page-locked memory where a GPU will fetch them from it without waiting."""
        if self._device.type != "cuda":
            return self._send(source.index_select(0, chosen))
        staging = torch.empty((len(chosen), *source.shape[1:]), dtype=source.dtype, pin_memory=True)
        return self._send(torch.index_select(source, 0, chosen, out=staging))

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)


def _find_inside(height: int, width: int) -> torch.Tensor:
    """For each shift, row by row, 1 where a moved image's pixel comes from the image: uint8 (81, 1, H * W)."""
    places = [torch.arange(2 * PADDING + 1)[:, None] - PADDING + torch.arange(length) for length in (height, width)]
    rows, columns = ((place >= 0) & (place < place.shape[1]) for place in places)
    return (rows[:, None, :, None] & columns[None, :, None, :]).view(-1, 1, height * width).to(torch.uint8)


def _mix(seed: int, epoch: int) -> int:
    """Makes one seed of two numbers, such that (0, 1) and (1, 0) differ; 63 bits, as torch takes them."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1)
