"""Runs the blocks: image-only work once per block of images, then every text, within the plan's block sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from seps.nn.slimming import ImageSide, PatchSlimming
from seps.scoring import pairs
from seps.scoring.factored import Prepared, few_texts, prepare, unsafe_images
from seps.scoring.plan import Plan
from seps.scoring.state import count_images, take_images
from seps.scoring.texts import TextBlock, Texts

_log = logging.getLogger(__name__)


class BlockScorer(Protocol):
    """Scores one block of texts against images already prepared: (B, T)."""

    def __call__(self, block: TextBlock) -> Tensor:
        """Scores (B, T) of the block."""
        ...


def trim_descriptions(side: ImageSide) -> ImageSide:
    """The same images without the columns of padding that all their descriptions share."""
    if side.dense_mask is None or side.dense_words is None:
        return side
    used = int(side.dense_mask.any(dim=0).sum()) if _is_prefix(side.dense_mask) else side.dense_mask.shape[1]
    trimmed = take_images(side, slice(None))
    trimmed.dense_words, trimmed.dense_mask = (
        side.dense_words[:, : max(1, used)],
        side.dense_mask[:, : max(1, used)],
    )
    return trimmed


def _is_prefix(mask: Tensor) -> bool:
    """Whether the valid positions of every row come first."""
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


def _mixed(net: PatchSlimming, prep: Prepared, block: TextBlock) -> Tensor:
    """S (B, T) of a block."""
    parts = pairs.score_block(net, prep, block)
    return pairs.mix(net, prep.side, parts.patches, parts.description)


class Engine:
    """Rows of the score matrix for blocks of images.

    Args:
        net: the network.
        texts: all texts of the call.
        plan: block sizes; halved where the device runs out of memory.
        dtype: dtype of the products.
        fused: makes the scorer of the fused kernels from images; None for the factored form.
    """

    def __init__(
        self,
        net: PatchSlimming,
        texts: Texts,
        plan: Plan,
        dtype: torch.dtype,
        fused: Callable[[ImageSide], BlockScorer] | None = None,
    ) -> None:
        self.net, self.texts, self.plan, self.dtype, self.fused = net, texts, plan, dtype, fused
        self._warned = False

    def rows(self, side: ImageSide) -> Tensor:
        """Scores (B, T) float32 of the images with all texts.

        Blocks are written side by side in the order of the sorted texts, and put back once.
        """
        out = torch.empty(count_images(side), self.texts.count, device=side.patches.device)
        start = 0
        while start < count_images(side):
            stop = min(start + self.plan.images, count_images(side))
            try:
                self._fill(take_images(side, slice(start, stop)), out[start:stop])
            except torch.OutOfMemoryError:
                if not self.plan.halve():
                    raise
                self._warn()
                torch.cuda.empty_cache()
                continue
            start = stop
        return self.texts.restore(out)

    def _warn(self) -> None:
        if not self._warned:
            _log.warning(
                "The device ran out of memory; going on with blocks of %d images and %d texts.",
                self.plan.images,
                self.plan.texts,
            )
            self._warned = True

    def _fill(self, side: ImageSide, out: Tensor) -> None:
        side = trim_descriptions(side)
        if few_texts(self.texts.count, side.patches.shape[1], side.patches.is_cuda):
            self._fill_direct(side, out)
            return
        unsafe = unsafe_images(self.net, side, self.dtype)
        if not bool(unsafe.any()):
            self._fill_safe(side, out)
            return
        for direct in (False, True):
            chosen = torch.nonzero(unsafe == direct).squeeze(-1)
            if not len(chosen):
                continue
            part = torch.empty(len(chosen), out.shape[1], device=out.device)
            if direct:
                self._fill_direct(take_images(side, chosen), part)
            else:
                self._fill_safe(take_images(side, chosen), part)
            out[chosen] = part

    def _fill_safe(self, side: ImageSide, out: Tensor) -> None:
        scorer: BlockScorer
        if self.fused is not None:
            scorer = self.fused(side)
        else:
            prep = prepare(self.net, side, self.dtype, paired=self.texts.paired is not None)

            def scorer(block: TextBlock) -> Tensor:
                return _mixed(self.net, prep, block)

        for start, stop in self.texts.runs(self.plan.texts):
            out[:, start:stop] = scorer(self.texts.block(start, stop))

    def _fill_direct(self, side: ImageSide, out: Tensor) -> None:
        prep = prepare(self.net, side, torch.float32, paired=self.texts.paired is not None, direct=True)
        step = self.plan.direct_texts(count_images(side))
        for start, stop in self.texts.runs(self.plan.texts):
            block = self.texts.block(start, stop)
            for first in range(0, block.count, step):
                part = block.part(first, first + step)
                out[:, start + first : start + first + part.count] = _mixed(self.net, prep, part)
