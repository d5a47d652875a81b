"""How many images meet how many texts at once, so that a memory budget is kept.

Shapes: see `factored`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from seps.config import SlimmingConfig
from seps.nn.checks import InputError
from seps.scoring.factored import SLAB

_CACHE = 12 * 2**20
"""What one step on the CPU may touch: about a core's share of the last cache."""
_MOST_IMAGES = 64
_FEW_IMAGES = 8
"""At most so many at once on a core, at least so many on a GPU where half the memory holds them."""
_MOST_TRAINED = 128
"""Images at once in training: a second block would double the launches of a step."""


@dataclass(frozen=True)
class Shapes:
    """What the cost of a call depends on."""

    patches: int
    width: int
    merged: int
    prefix: int
    words: int
    """Words of the longest caption."""
    dense_words: int
    """Words of the longest description that stands beside the patches, or of the longest paired dense text."""
    branches: int
    dual: bool
    paired: bool


def shapes_of(config: SlimmingConfig, patches: int, words: int, dense_words: int, paired: bool) -> Shapes:
    """The shapes of a call to a network of this configuration."""
    return Shapes(
        patches,
        config.embed_size,
        config.num_merged,
        config.num_prefix_tokens,
        words,
        dense_words,
        len(config.branches),
        config.aggregation == "dual",
        paired,
    )


@dataclass
class Plan:
    """Block sizes, and what they were made from."""

    images: int
    texts: int
    pair_bytes: int
    direct_bytes: int
    """Bytes of one pair in the direct form."""

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
        room = max(self.images * self.texts * self.pair_bytes, self.direct_bytes)
        return max(1, room // (max(1, images) * self.direct_bytes))


def image_bytes(shapes: Shapes, dtype: torch.dtype, gradient: bool = False) -> int:
    """Bytes of one image's own tensors: encoding, patches in two forms, H; with gradients what H is made from."""
    size = dtype.itemsize
    padded = shapes.patches + 16
    features = padded * shapes.width * (6 * 4 + size)
    tables = shapes.branches + (1 if shapes.dual else 0)
    table = padded * padded * shapes.merged
    made = tables * table * size
    if gradient and not shapes.dual:
        # H of one branch at a time, or its gradient.
        made = table * size
    elif gradient:
        made = made * 3 // 4 + tables * table * 3 + table * 4
    return features + made + 4 * 4 * padded * padded


def shared_bytes(shapes: Shapes) -> int:
    """Bytes of the float32 slab from which H is made."""
    return 2 * 4 * min(SLAB, (shapes.patches + 16) ** 2 * shapes.merged)


def text_bytes(shapes: Shapes) -> int:
    """Bytes of one text's own tensors: its normalised words, and the steps to them."""
    words = shapes.words + (shapes.dense_words if shapes.paired else 0)
    return 3 * 4 * words * shapes.width


def pair_bytes(shapes: Shapes, dtype: torch.dtype, gradient: bool, cuda: bool = False) -> int:
    """Bytes of one pair: selection, products, norms, cosines, the extra token."""
    size = dtype.itemsize
    padded = shapes.patches + 16
    tokens = shapes.prefix + shapes.merged + 1
    apart = shapes.paired and shapes.branches == 2 and not shapes.dual
    most = max(shapes.words, shapes.dense_words) if apart else shapes.words
    every = shapes.words + shapes.dense_words if apart else shapes.words
    held = 4 * 3 * shapes.branches * shapes.patches + 2 * size * padded
    selection = 4 * 8 * shapes.patches
    products = (1 + shapes.dual) * size * most * padded + most * tokens * (4 if shapes.dual else size)
    # Without a wider output of the product, half norms pass through float32.
    norms = size * shapes.merged * padded * 6 // 10 + (0 if cuda or size == 4 else 4 * shapes.merged * padded)
    cosines = most * tokens * (size + 8) + shapes.width * (2 * size + 8)
    dense = 0 if shapes.paired else 3 * size * shapes.words * shapes.dense_words
    if gradient:
        held += size * padded * every * (1 + shapes.dual) + every * tokens * (size + 8) + 2 * size * shapes.width
        products += size * most * padded
        norms *= 2
    return (held + max(selection, products, norms + most * tokens * size, cosines, dense)) * 5 // 4


def gradient_bytes(shapes: Shapes, dtype: torch.dtype) -> int:
    """Bytes of one pair with the backward pass of `maxima`, at its widest step, forward or backward."""
    size = dtype.itemsize
    padded, merged = shapes.patches + 16, shapes.merged + 8
    apart = shapes.paired and shapes.branches == 2
    most = max(shapes.words, shapes.dense_words) if apart else shapes.words
    held = 4 * 3 * shapes.branches * shapes.patches + 2 * size * padded + 24 * most * shapes.branches
    products = most * (size * padded + merged * (size + 4) + 24)
    norms = shapes.merged * padded * (size if size == 4 else 2 * size)
    others = shapes.width * (4 * size + 16) + 16 * most * (shapes.prefix + 2)
    dense = 0 if shapes.paired else 6 * size * shapes.words * shapes.dense_words
    return (held + max(4 * 8 * shapes.patches, products, norms, others, dense)) * 9 // 8


def fused_bytes(shapes: Shapes, dtype: torch.dtype) -> int:
    """Bytes of one pair with the fused kernels: cosines of the selection, two weights, products, norms, maxima."""
    size = dtype.itemsize
    padded = shapes.patches + 16
    held = 4 * shapes.patches + 2 * size * padded + 4 * (shapes.merged + 4)
    products = size * shapes.words * (padded + shapes.prefix)
    others = 3 * size * shapes.words * max(shapes.dense_words, shapes.merged + 2 if shapes.branches > 1 else 0)
    return (held + max(products, others)) * 9 // 8


def direct_bytes(shapes: Shapes) -> int:
    """Bytes of one pair in the direct form: a weight per patch and merged patch, and the merged patches."""
    return 4 * shapes.branches * shapes.merged * (5 * shapes.patches + 3 * shapes.width)


def _pair(shapes: Shapes, dtype: torch.dtype, gradient: bool, cuda: bool = False) -> int:
    if gradient and not shapes.dual:
        return gradient_bytes(shapes, dtype)
    return pair_bytes(shapes, dtype, gradient, cuda)


def smallest_budget(shapes: Shapes, dtype: torch.dtype, gradient: bool = False) -> int:
    """Bytes that one image against one text needs."""
    pair = max(_pair(shapes, dtype, gradient), direct_bytes(shapes) * (3 if gradient else 1))
    return image_bytes(shapes, dtype, gradient) + text_bytes(shapes) + shared_bytes(shapes) + pair


def _cpu_plan(shapes: Shapes, memory: int, images: int, texts: int, image: int, text: int, pair: int) -> Plan:
    """One image, or a few where few texts come: small operations cost more to start than to do."""
    room = max(min(memory, _CACHE + image + text) - image, text + pair)
    fitting = min(_FEW_IMAGES, images // 8, room // max(1, texts * (text + pair)), (memory - room) // image)
    count = 1 << (max(1, fitting).bit_length() - 1)
    return Plan(count, max(1, min(texts, room // (text + count * pair))), pair, direct_bytes(shapes))


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
    least = smallest_budget(shapes, dtype, gradient)
    if memory < least:
        raise InputError(
            f"memory is {memory} bytes, but one image against one text needs {least} bytes here "
            f"({shapes.patches} patches, width {shapes.width}, up to {shapes.words} words); allow at least {least}."
        )
    image, text = image_bytes(shapes, dtype, gradient), text_bytes(shapes)
    pair = fused_bytes(shapes, dtype) if fused else _pair(shapes, dtype, gradient, cuda)
    memory -= shared_bytes(shapes)
    if not cuda and not gradient:
        return _cpu_plan(shapes, memory, images, texts, image, 0 if kept else text, pair)
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
    return Plan(count, int(max(1, min(texts, many))), pair, direct_bytes(shapes))
