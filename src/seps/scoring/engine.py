"""The run over all blocks of images and texts.

Images are prepared once per block and meet every text. On the CPU each thread takes whole images: the work of one
image is some two hundred operations, most too small to be shared by cores. On a GPU the next images are encoded before
these are scored, so that what the host must know of them is there when their turn comes, and the GPU never waits.

Shapes: B images, T texts; see `factored` for the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from seps.nn.checks import values_unchecked
from seps.nn.image_side import ImageSide
from seps.nn.slimming import PatchSlimming
from seps.scoring.blocks import Plan, block_costs, make_plan, shapes_of
from seps.scoring.factored import DirectScorer, factored_scorer, unsafe_images
from seps.scoring.inputs import ImageBlock, Texts, count_images, take_images
from seps.scoring.lengths import on_device
from seps.scoring.triton import TritonScorer

_log = logging.getLogger(__name__)

MakeScorer = Callable[[ImageSide], TritonScorer]


def few_texts(texts: int, patches: int, cuda: bool) -> bool:
    """Whether so few texts come that making H costs more than it saves; the direct form is taken then.

    H takes N N Q values to write, a text about as many multiplications with it, against N Q C without it.
    """
    if cuda:
        return texts < patches // 4
    saved = 23.0 / patches - 0.025
    return saved <= 0 or texts < 0.75 / saved


def score_rows(
    net: PatchSlimming,
    block: ImageBlock | ImageSide,
    texts: Texts,
    patches: int,
    dtype: torch.dtype,
    memory: int,
    fused: MakeScorer | None,
) -> Iterator[Tensor]:
    """Rows (b, T) of the images of one block, a few images at a time, within `memory` bytes.

    `fused` makes the scorer of the fused kernels from images; None for the factored form.
    """
    features, dense = (
        (block.images, block.dense) if isinstance(block, ImageBlock) else (block.patches, block.dense_words)
    )
    count, cuda = features.shape[0], features.is_cuda
    shapes = shapes_of(net.config, patches, texts, dense)
    least = block_costs(shapes, dtype, cuda=cuda, fused=fused is not None).least
    words = texts.unit_nbytes(fused is not None)
    kept = words <= memory // (2 if cuda else 3) and memory - words >= least
    if kept:
        texts.keep_blocks()
        memory -= words
    threads = 1 if cuda else max(1, min(torch.get_num_threads(), count, memory // least))
    plan = make_plan(
        shapes, memory // threads, count, texts.count, dtype=dtype, cuda=cuda, fused=fused is not None, kept=kept
    )
    engine, step = Engine(net, texts, plan, dtype, fused), plan.images

    def images(start: int) -> ReadyImages:
        if isinstance(block, ImageBlock):
            return engine.ready(texts.encode(net, block.part(start, start + step)))
        return engine.ready(take_images(block, slice(start, start + step)))

    starts = range(0, count, step)
    if not cuda:
        yield from _map_images(lambda start: engine.rows(images(start)), starts, threads)
        return
    if isinstance(block, ImageBlock):
        block.check_values(net)
        lengths = block.dense_lengths
        # On the device once: a copy for each part would make the host wait.
        block = replace(block, dense_lengths=None if lengths is None else torch.as_tensor(lengths).to(features.device))

    def unchecked(start: int) -> ReadyImages:
        # Reading the values of each part again would make the host wait.
        with values_unchecked():
            return images(start)

    yield from map(engine.rows, one_ahead(map(unchecked, starts)))


def one_ahead(items: Iterable[ReadyImages]) -> Iterator[ReadyImages]:
    """The items, each handed out after the next one is made."""
    waiting: ReadyImages | None = None
    for item in items:
        if waiting is not None:
            yield waiting
        waiting = item
    if waiting is not None:
        yield waiting


def _map_images(work: Callable[[int], Tensor], starts: Iterable[int], threads: int) -> Iterator[Tensor]:
    """`work(start)` for each start, in order, on `threads` threads without gradients."""
    if threads <= 1:
        yield from map(work, starts)
        return
    before = torch.get_num_threads()

    def alone(start: int) -> Tensor:
        # Gradient mode and autocast belong to a thread.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return work(start)

    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(alone, starts)
    finally:
        torch.set_num_threads(before)


class ReadyImages:
    """Images, and what the host must know of them before it can score them.

    On a GPU that is copied while other work runs, and waited for when it is asked for.

    Args:
        side: the images.
        unsafe: (B,) bool, images that take the direct form; None when all do.
    """

    def __init__(self, side: ImageSide, unsafe: Tensor | None) -> None:
        self.side = side
        facts = torch.zeros(2, dtype=torch.int32, device=side.patches.device)
        mask = side.dense_mask
        if side.dense_words is not None and mask is not None:
            # Padding that all descriptions share, and whether the valid words of each come first.
            facts = torch.stack([mask.any(dim=0).sum(), (mask[:, 1:] <= mask[:, :-1]).all()]).to(torch.int32)
        if unsafe is not None:
            facts = torch.cat([facts, unsafe.to(torch.int32)])
        self._facts = facts.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(facts.device).record_event() if facts.is_cuda else None

    def read(self) -> tuple[ImageSide, list[bool]]:
        """The images without the columns of padding that all their descriptions share, and which are unsafe."""
        if self._copied is not None:
            self._copied.synchronize()
        used, sorted_words, *unsafe = self._facts.tolist()
        side, words, mask = self.side, self.side.dense_words, self.side.dense_mask
        if words is not None and mask is not None and sorted_words:
            used = max(1, used)
            side = replace(side, dense_words=words[:, :used], dense_mask=mask[:, :used])
        return side, [bool(flag) for flag in unsafe]


class Engine:
    """Rows of the score matrix for blocks of images; block sizes are halved where the device runs out of memory."""

    def __init__(
        self, net: PatchSlimming, texts: Texts, plan: Plan, dtype: torch.dtype, fused: MakeScorer | None = None
    ) -> None:
        self.net, self.texts, self.plan, self.dtype, self.fused = net, texts, plan, dtype, fused
        self._warned = False

    def ready(self, side: ImageSide) -> ReadyImages:
        """The images with what `rows` must know of them."""
        if few_texts(self.texts.count, side.patches.shape[1], side.patches.is_cuda):
            return ReadyImages(side, None)
        # Pairs of half-precision numbers have the range of one.
        paired = self.fused is not None and self.dtype == torch.float32
        return ReadyImages(side, unsafe_images(self.net, side, torch.float16 if paired else self.dtype))

    def rows(self, images: ReadyImages) -> Tensor:
        """Scores (B, T) float32 of the images with all texts.

        Blocks are written side by side in the order of the sorted texts, and put back once.
        """
        side, unsafe = images.read()
        out = torch.empty(count_images(side), self.texts.count, device=side.patches.device)
        start = 0
        while start < count_images(side):
            stop = min(start + self.plan.images, count_images(side))
            try:
                self._fill(take_images(side, slice(start, stop)), unsafe[start:stop], out[start:stop])
            except torch.OutOfMemoryError:
                if not self.plan.halve():
                    raise
                if not self._warned:
                    told = "The device ran out of memory; going on with blocks of %d images and %d texts."
                    _log.warning(told, self.plan.images, self.plan.texts)
                    self._warned = True
                torch.cuda.empty_cache()
                continue
            start = stop
        return self.texts.restore(out)

    def _fill(self, side: ImageSide, unsafe: list[bool], out: Tensor) -> None:
        if not unsafe:
            self._fill_direct(side, out)
            return
        if not any(unsafe):
            self._fill_safe(side, out)
            return
        for fill, wanted in ((self._fill_safe, False), (self._fill_direct, True)):
            places = [place for place, flag in enumerate(unsafe) if flag == wanted]
            if places:
                chosen = on_device(places, torch.long, out.device)
                part = torch.empty(len(places), out.shape[1], device=out.device)
                fill(take_images(side, chosen), part)
                out[chosen] = part

    def _fill_safe(self, side: ImageSide, out: Tensor) -> None:
        if self.fused is not None:
            self.fused(side).fill(self.texts, self.plan.texts, self.plan.chunk, out)
            return
        scorer = factored_scorer(self.net, side, self.dtype, self.texts.guides)
        for start, stop in self.texts.runs(self.plan.texts):
            out[:, start:stop] = scorer.score(self.texts.block(start, stop))

    def _fill_direct(self, side: ImageSide, out: Tensor) -> None:
        scorer = DirectScorer(self.net, side, torch.float32, self.texts.guides)
        step = self.plan.direct_texts(count_images(side))
        for start, stop in self.texts.runs(self.plan.texts):
            block = self.texts.block(start, stop)
            for first in range(0, block.count, step):
                part = block.part(first, first + step)
                out[:, start + first : start + first + part.count] = scorer.score(part)
