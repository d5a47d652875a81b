"""How many images meet how many texts at once, within a memory budget, and the run over these blocks.

Images are prepared once per block and meet every text. On the CPU each thread takes whole images: the work of one
image is some two hundred operations, most too small to be shared by cores. On a GPU the next images are encoded before
these are scored, so that what the host must know of them is there when their turn comes, and the GPU never waits.

Shapes: B images, T texts; see `factored` for the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from seps.method.checks import InputError, values_unchecked
from seps.method.encoded import EncodedImages
from seps.method.maxima import Maxima, ReferenceMaxima
from seps.method.network import PatchSlimming
from seps.scoring.difference import DifferenceMaxima
from seps.scoring.factored import GramMaxima
from seps.scoring.gpu.fused import TritonScorer
from seps.scoring.inputs import (
    ImageBlock,
    ReadyImages,
    Shapes,
    SortedTexts,
    on_device,
    one_ahead,
    shapes_of,
    take_images,
)
from seps.scoring.terms import SLAB, few_texts, unsafe_images

_log = logging.getLogger(__name__)

_CACHE = 12 * 2**20
"""What one step on the CPU may touch: about a core's share of the last cache."""
_MOST_IMAGES = 64
_FEW_IMAGES = 8
"""At most so many at once on a core, at least so many on a GPU where half the memory holds them."""
_CHUNK = 6500
"""Texts that the fused kernels select at once: some hundred thousand pairs fill a GPU, more would leave its cache."""
_TEXTS, _PAIRS = 128, 512
"""On a CPU: texts whose words meet an image at once, so that their products stay in a core's cache, and pairs whose
decisions are compared at once."""
_MOST_TRAINED = 128
"""Images at once in training: a second block would double the launches of a step."""

SCORING_MEMORY = 512 * 2**20
_GIB = 2**30
_BUDGETS = ((12 * _GIB, 6 * _GIB), (3 * _GIB, 3 * _GIB // 2))
"""(free bytes, budget) on a GPU: coarse steps, or block sizes, and the last bits of the scores, would change from call
to call."""


def scoring_memory(device: torch.device | str, elsewhere: int = SCORING_MEMORY) -> int:
    """The budget of a call that names none: a share of the free memory of a GPU, `elsewhere` on a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return elsewhere
    # What torch holds and does not use is free as well: the second call finds what the first left.
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return budget_of(free)


def budget_of(free: int) -> int:
    """The share of `free` bytes of a GPU that a call takes."""
    return next((budget for least, budget in _BUDGETS if free >= least), SCORING_MEMORY)


@dataclass(frozen=True)
class Costs:
    """Bytes of what lives at the same time: per image, per text, per pair, and once."""

    image: int
    """Encoding, patches in two forms, H; with gradients what H is made from."""
    text: int
    """Normalised words, and the steps to them."""
    pair: int
    decided: int
    """Of a pair, what the fused kernels hold for all texts that they select at once; it is part of `pair`."""
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
    size, padded = dtype.itemsize, shapes.patches + (15 + max(1, shapes.prefix) if fused else 16)
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
    if cuda and not gradient:
        # The next images are encoded while these are scored.
        image += 4 * shapes.width * (padded + shapes.description_words)
    if fused:
        # Patches and words in three parts. The steps to them, more, are made while no pair is held.
        paired = dtype == torch.float32
        image += 8 * padded * shapes.width * paired
        text += 16 * shapes.width * (1 + shapes.words * paired)
    shared = 2 * 4 * min(SLAB, table)
    smallest = max(_pair_bytes(shapes, size, False, gradient), direct * (3 if gradient else 1))
    decided, pair = _fused_pair_bytes(shapes, size) if fused else (0, _pair_bytes(shapes, size, cuda, gradient))
    return Costs(image, text, pair, decided, direct, shared, image + text + shared + smallest)


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


def _fused_pair_bytes(shapes: Shapes, size: int) -> tuple[int, int]:
    """Bytes of one pair with the fused kernels: cosines of the selection, two weights and norms; with products, all."""
    padded = shapes.patches + 15 + max(1, shapes.prefix)
    norms = shapes.merged * (2 if size == 4 else 1)  # float32 has two tables
    held = 4 * shapes.patches + 2 * size * padded + 4 * (norms + 4)
    products = size * shapes.words * (padded + shapes.prefix)
    beside = max(shapes.description_words, shapes.merged + 2 if shapes.branches > 1 else 0)
    return held * 9 // 8, (held + max(products, 3 * size * shapes.words * beside)) * 9 // 8


@dataclass
class Plan:
    """Block sizes, and what they were made from."""

    images: int
    texts: int
    costs: Costs
    chunk: int = 0
    """Texts that the fused kernels select at once; a block where that is more."""

    def halve(self) -> bool:
        """Halve the block after the device ran out of memory; False when nothing is left to halve."""
        if self.texts > 16 or (self.images == 1 and self.texts > 1):
            self.texts, self.chunk = max(1, self.texts // 2), self.chunk // 2
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
        if dtype == torch.float32:
            # What stands in a core's cache at once `DifferenceMaxima` sees to.
            at_once = min(_FEW_IMAGES, images // 6, _PAIRS // min(texts, _TEXTS), (memory - text - pair) // image)
            count = max(1, at_once)
            return Plan(count, max(1, min(texts, _TEXTS, (memory - count * image) // (text + count * pair))), costs)
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
    many = int(max(1, min(texts, many)))
    if not (fused and kept):
        return Plan(count, many, costs)
    # Texts selected at once, in a quarter of the room where that is more than a block; the block takes what is left.
    room = memory - count * image
    chunk = max(many, min(texts, _CHUNK, room // 4 // (count * costs.decided)))
    left = (room - chunk * count * costs.decided) // (count * (pair - costs.decided))
    return Plan(count, max(1, min(many, left)), costs, chunk)


MakeScorer = Callable[[EncodedImages], TritonScorer]


def score_rows(
    net: PatchSlimming,
    block: ImageBlock | EncodedImages,
    texts: SortedTexts,
    patches: int,
    dtype: torch.dtype,
    memory: int,
    fused: MakeScorer | None,
    reference: bool = False,
) -> Iterator[Tensor]:
    """Rows (b, T) of the images of one block, a few images at a time, within `memory` bytes.

    `fused` makes the scorer of the fused kernels from images; None for `GramMaxima`, or the `reference`.
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
        texts.keeps_blocks = True
        memory -= words
    threads = 1 if cuda else max(1, min(torch.get_num_threads(), count, memory // least))
    plan = make_plan(
        shapes, memory // threads, count, texts.count, dtype=dtype, cuda=cuda, fused=fused is not None, kept=kept
    )
    engine, step = Engine(net, texts, plan, dtype, fused, reference), plan.images

    def images(start: int) -> ReadyImages:
        part = take_images(block, slice(start, start + step))
        return engine.ready(texts.encode(net, part) if isinstance(part, ImageBlock) else part)

    starts = range(0, count, step)
    if not cuda:
        for run in texts.runs(plan.texts) if kept else ():
            texts.block(*run)  # once, before the threads would each make it
        yield from _rows_by_thread(engine, images, starts, threads)
        return
    if isinstance(block, ImageBlock):
        block = block.checked(net)

    def unchecked(start: int) -> ReadyImages:
        # Reading the values of each part again would make the host wait.
        with values_unchecked():
            return images(start)

    yield from map(engine.rows, one_ahead(map(unchecked, starts)))


def _rows_by_thread(
    engine: Engine, images: Callable[[int], ReadyImages], starts: Iterable[int], threads: int
) -> Iterator[Tensor]:
    """Rows of the images from each start on, in order, on `threads` threads without gradients."""
    if threads <= 1:
        for start in starts:
            yield engine.rows(images(start))
        return
    before = torch.get_num_threads()

    def alone(start: int) -> Tensor:
        # Gradient mode and autocast belong to a thread.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return engine.rows(images(start))

    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(alone, starts)
    finally:
        torch.set_num_threads(before)


@dataclass
class Engine:
    """Rows of the score matrix for blocks of images; block sizes are halved where the device runs out of memory."""

    net: PatchSlimming
    texts: SortedTexts
    plan: Plan
    dtype: torch.dtype
    fused: MakeScorer | None = None
    reference: bool = False
    _warned: bool = False

    def ready(self, side: EncodedImages) -> ReadyImages:
        """The images with what `rows` must know of them."""
        if self.reference or few_texts(self.texts.count, side.patches.shape[1], side.patches.is_cuda):
            return ReadyImages(side, None)
        # Pairs of half-precision numbers have the range of one.
        paired = self.fused is not None and self.dtype == torch.float32
        return ReadyImages(side, unsafe_images(self.net, side, torch.float16 if paired else self.dtype))

    def rows(self, images: ReadyImages) -> Tensor:
        """Scores (B, T) float32 of the images with all texts.

        Blocks are written side by side in the order of the sorted texts, and put back once.
        """
        side, unsafe = images.read()
        out = torch.empty(len(side.patches), self.texts.count, device=side.patches.device)
        start = 0
        while start < len(out):
            stop = min(start + self.plan.images, len(out))
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
        return out.index_select(1, self.texts.back)

    def _fill(self, side: EncodedImages, unsafe: list[bool], out: Tensor) -> None:
        direct = all(unsafe)
        if not direct and any(unsafe):
            for wanted in (False, True):
                places = [place for place, flag in enumerate(unsafe) if flag == wanted]
                chosen = on_device(places, torch.long, out.device)
                part = torch.empty(len(places), out.shape[1], device=out.device)
                self._fill(take_images(side, chosen), [wanted] * len(places), part)
                out[chosen] = part
            return
        if not direct and self.fused is not None:
            self.fused(side).fill(self.texts, self.plan.texts, self.plan.chunk, out)
            return
        maxima: Maxima
        if direct:
            maxima = ReferenceMaxima(self.net, side)
        elif self.dtype == torch.float32 and DifferenceMaxima.supports(self.net, side) is None:
            maxima = DifferenceMaxima(self.net, side)
        else:
            maxima = GramMaxima(self.net, side, self.dtype)
        for start, stop in self.texts.runs(self.plan.texts):
            block = self.texts.block(start, stop)
            step = self.plan.direct_texts(len(out)) if direct else block.count
            for first in range(0, block.count, step):
                part_of_block = block.part(first, first + step) if direct else block
                scores = self.net.score(side, part_of_block, maxima).similarity
                out[:, start + first : start + first + part_of_block.count] = scores
