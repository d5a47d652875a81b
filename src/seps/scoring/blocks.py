"""How many images meet how many texts at once, so that a memory budget is kept, and the run over all blocks.

Images are prepared once per block and meet every text. On the CPU each thread takes whole images: the work of one
image is some two hundred operations, most too small to be shared by cores.

Shapes: B images, T texts; see `factored` for the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from seps.config import SlimmingConfig
from seps.nn.checks import InputError
from seps.nn.image_side import ImageSide
from seps.nn.slimming import PatchSlimming
from seps.scoring.factored import BlockScorer, DirectScorer, factored_scorer, unsafe_images
from seps.scoring.inputs import ImageBlock, Texts, count_images, take_images
from seps.scoring.terms import SLAB

_CACHE = 12 * 2**20
"""What one step on the CPU may touch: about a core's share of the last cache."""
_MOST_IMAGES = 64
_FEW_IMAGES = 8
"""At most so many at once on a core, at least so many on a GPU where half the memory holds them."""
_MOST_TRAINED = 128
"""Images at once in training: a second block would double the launches of a step."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shapes:
    """What the memory of a call depends on."""

    patches: int
    width: int
    merged: int
    prefix: int
    words: int
    """Words of the longest caption."""
    description_words: int
    """Words of the longest description that stands beside the patches."""
    paired_words: int
    """Words of the longest description that comes with a caption."""
    branches: int
    dual: bool


def shapes_of(config: SlimmingConfig, patches: int, texts: Texts, dense: Tensor | None) -> Shapes:
    """The shapes of a call; `dense` are the images' own descriptions (B, L, C)."""
    beside = 0 if dense is None or config.dense != "tokens" or texts.longest_description else dense.shape[1]
    return Shapes(
        patches,
        config.embed_size,
        config.num_merged,
        config.num_prefix_tokens,
        texts.longest,
        beside,
        texts.longest_description,
        len(config.branches),
        config.aggregation == "dual",
    )


@dataclass(frozen=True)
class Costs:
    """Bytes of what lives at the same time: per image, per text, per pair, and once."""

    image: int
    """Encoding, patches in two forms, H; with gradients what H is made from."""
    text: int
    """Normalised words, and the steps to them."""
    pair: int
    direct: int
    """Of a pair in the direct form: a weight per patch and merged patch, and the merged patches."""
    shared: int
    """The float32 slab from which H is made."""
    least: int
    """One image against one text."""


def block_costs(
    shapes: Shapes, dtype: torch.dtype, *, cuda: bool = False, gradient: bool = False, fused: bool = False
) -> Costs:
    """The bytes of a call, counted tensor by tensor.

    Counted and not measured: block sizes must not depend on the machine, or the last bits of the scores would.
    """
    size, padded = dtype.itemsize, shapes.patches + 16
    table = padded * padded * shapes.merged
    tables = shapes.branches + shapes.dual
    made = tables * table * size
    if gradient and not shapes.dual:
        made = table * size  # H of one branch at a time, or its gradient
    elif gradient:
        made = made * 3 // 4 + tables * table * 3 + table * 4
    image = padded * shapes.width * (6 * 4 + size) + made + 4 * 4 * padded * padded
    text = 3 * 4 * (shapes.words + shapes.paired_words) * shapes.width
    direct = 4 * shapes.branches * shapes.merged * (5 * shapes.patches + 3 * shapes.width)
    shared = 2 * 4 * min(SLAB, table)
    smallest = max(_pair_bytes(shapes, size, False, gradient), direct * (3 if gradient else 1))
    pair = _fused_pair_bytes(shapes, size) if fused else _pair_bytes(shapes, size, cuda, gradient)
    return Costs(image, text, pair, direct, shared, image + text + shared + smallest)


def _pair_bytes(shapes: Shapes, size: int, cuda: bool, gradient: bool) -> int:
    """Bytes of one pair: selection, products, norms, cosines, the extra token, and its description's words."""
    padded, tokens = shapes.patches + 16, shapes.prefix + shapes.merged + 1
    apart = shapes.paired_words and shapes.branches == 2 and not shapes.dual
    most = max(shapes.words, shapes.paired_words) if apart else shapes.words
    held = 4 * 3 * shapes.branches * shapes.patches + 2 * size * padded
    selection = 4 * 8 * shapes.patches
    described = size * shapes.words * shapes.description_words
    if gradient and not shapes.dual:
        # The backward pass of `train`, at its widest step, forward or backward.
        held += 24 * most * shapes.branches
        products = most * (size * padded + (shapes.merged + 8) * (size + 4) + 24)
        norms = shapes.merged * padded * (size if size == 4 else 2 * size)
        others = shapes.width * (4 * size + 16) + 16 * most * (shapes.prefix + 2)
        return (held + max(selection, products, norms, others, 6 * described)) * 9 // 8
    products = (1 + shapes.dual) * size * most * padded + most * tokens * (4 if shapes.dual else size)
    # Without a wider output of the product, half norms pass through float32.
    norms = size * shapes.merged * padded * 6 // 10 + (0 if cuda or size == 4 else 4 * shapes.merged * padded)
    cosines = most * tokens * (size + 8) + shapes.width * (2 * size + 8)
    if gradient:
        held += size * padded * most * 2 + most * tokens * (size + 8) + 2 * size * shapes.width
        products += size * most * padded
        norms *= 2
    return (held + max(selection, products, norms + most * tokens * size, cosines, 3 * described)) * 5 // 4


def _fused_pair_bytes(shapes: Shapes, size: int) -> int:
    """Bytes of one pair with the fused kernels: cosines of the selection, two weights, products, norms, maxima."""
    padded = shapes.patches + 16
    held = 4 * shapes.patches + 2 * size * padded + 4 * (shapes.merged + 4)
    products = size * shapes.words * (padded + shapes.prefix)
    beside = max(shapes.description_words, shapes.merged + 2 if shapes.branches > 1 else 0)
    return (held + max(products, 3 * size * shapes.words * beside)) * 9 // 8


@dataclass
class Plan:
    """Block sizes, and what they were made from."""

    images: int
    texts: int
    costs: Costs

    def halve(self) -> bool:
        """Halve the block after the device ran out of memory; False when nothing is left to halve."""
        if self.texts > 16 or (self.images == 1 and self.texts > 1):
            self.texts = max(1, self.texts // 2)
        elif self.images > 1:
            self.images //= 2
        else:
            return False
        return True

    def direct_texts(self, images: int) -> int:
        """Texts at once in the direct form, within the bytes of the planned block."""
        room = max(self.images * self.texts * self.costs.pair, self.costs.direct)
        return max(1, room // (max(1, images) * self.costs.direct))


def make_plan(
    shapes: Shapes,
    memory: int,
    images: int,
    texts: int,
    *,
    dtype: torch.dtype,
    cuda: bool,
    gradient: bool = False,
    fused: bool = False,
    kept: bool = False,
) -> Plan:
    """Block sizes within `memory` bytes, for the factored form or the `fused` kernels.

    Normalised words that are `kept` for the whole call are made while no pair is held.

    Raises `InputError` with the smallest budget that works when this one cannot.
    """
    costs = block_costs(shapes, dtype, cuda=cuda, gradient=gradient, fused=fused)
    if memory < costs.least:
        raise InputError(
            f"memory is {memory} bytes, but one image against one text needs {costs.least} bytes here "
            f"({shapes.patches} patches, width {shapes.width}, up to {shapes.words} words); allow at least "
            f"{costs.least}."
        )
    image, text, pair = costs.image, costs.text, costs.pair
    memory -= costs.shared
    if not cuda and not gradient:
        # One image, or a few where few texts come: small operations cost more to start than to do.
        text = 0 if kept else text
        room = max(min(memory, _CACHE + image + text) - image, text + pair)
        fitting = min(_FEW_IMAGES, images // 8, room // max(1, texts * (text + pair)), (memory - room) // image)
        count = 1 << (max(1, fitting).bit_length() - 1)
        return Plan(count, max(1, min(texts, room // (text + count * pair))), costs)
    half = memory // 2 // image
    # Pairs are worth more of the memory than images, unless those are so large that few fit.
    if gradient:
        count = max(1, min(images, _MOST_TRAINED, half))
    else:
        count = max(1, min(images, _MOST_IMAGES, max(half // 2, min(half, _FEW_IMAGES))))
    while True:
        many = (memory - count * image) // (max(text, count * pair) if kept else text + count * pair)
        if count == 1 or many >= min(texts, 256):
            break
        count = max(1, count * 7 // 8)
    # Blocks of one size: a small last one would cost as many launches as the others.
    count = -(-images // -(-images // count)) if images else count
    return Plan(count, int(max(1, min(texts, many))), costs)


def few_texts(texts: int, patches: int, cuda: bool) -> bool:
    """Whether so few texts come that making H costs more than it saves; the direct form is taken then.

    H takes N N Q values to write, a text about as many multiplications with it, against N Q C without it.
    """
    if cuda:
        return texts < patches // 4
    saved = 23.0 / patches - 0.025
    return saved <= 0 or texts < 0.75 / saved


MakeScorer = Callable[[ImageSide], BlockScorer]


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
    least = block_costs(shapes, dtype).least
    kept = texts.unit_nbytes <= memory // 3 and memory - texts.unit_nbytes >= least
    if kept:
        texts.keep_blocks()
        memory -= texts.unit_nbytes
    threads = 1 if cuda else max(1, min(torch.get_num_threads(), count, memory // least))
    plan = make_plan(
        shapes, memory // threads, count, texts.count, dtype=dtype, cuda=cuda, fused=fused is not None, kept=kept
    )
    engine, step = Engine(net, texts, plan, dtype, fused), plan.images

    def rows(start: int) -> Tensor:
        if isinstance(block, ImageBlock):
            return engine.rows(texts.encode(net, block.part(start, start + step)))
        return engine.rows(take_images(block, slice(start, start + step)))

    yield from _map_images(rows, range(0, count, step), threads)


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


class Engine:
    """Rows of the score matrix for blocks of images; block sizes are halved where the device runs out of memory."""

    def __init__(
        self, net: PatchSlimming, texts: Texts, plan: Plan, dtype: torch.dtype, fused: MakeScorer | None = None
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
                self._fill(_trim_descriptions(take_images(side, slice(start, stop))), out[start:stop])
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

    def _fill(self, side: ImageSide, out: Tensor) -> None:
        if few_texts(self.texts.count, side.patches.shape[1], side.patches.is_cuda):
            self._fill_direct(side, out)
            return
        unsafe = unsafe_images(self.net, side, self.dtype)
        if not bool(unsafe.any()):
            self._fill_safe(side, out)
            return
        for fill, flags in ((self._fill_safe, ~unsafe), (self._fill_direct, unsafe)):
            chosen = torch.nonzero(flags).squeeze(-1)
            if len(chosen):
                part = torch.empty(len(chosen), out.shape[1], device=out.device)
                fill(take_images(side, chosen), part)
                out[chosen] = part

    def _fill_safe(self, side: ImageSide, out: Tensor) -> None:
        if self.fused is not None:
            scorer = self.fused(side)
        else:
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


def _trim_descriptions(side: ImageSide) -> ImageSide:
    """The same images without the columns of padding that all their descriptions share."""
    words, mask = side.dense_words, side.dense_mask
    # Only where the valid words of every description come first.
    if words is None or mask is None or not bool((mask[:, 1:] <= mask[:, :-1]).all()):
        return side
    used = max(1, int(mask.any(dim=0).sum()))
    trimmed = take_images(side, slice(None))
    trimmed.dense_words, trimmed.dense_mask = words[:, :used], mask[:, :used]
    return trimmed
