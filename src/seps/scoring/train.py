"""Training: all pairs, a few images at a time, with the backward pass recomputed instead of stored.

With one set per merged patch (`aggregation="single"`) the backward pass is written by hand (`merged_maxima`); dual
aggregation and the reference go through autograd, recomputed block by block.

Shapes: B images, T texts, M words, N patches, C width, Q merged patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seps.method.checks import check_features
from seps.method.encoded import EncodedImages, Kept, Scores, Texts, map_tensors
from seps.method.maxima import joined
from seps.method.network import PatchSlimming
from seps.scoring.blocks import Plan, make_plan
from seps.scoring.factored import GramMaxima
from seps.scoring.inputs import ImageBlock, Lengths, SortedTexts, TextBlock, count_images, shapes_of, take_images
from seps.scoring.maxima import merged_maxima
from seps.scoring.other_forward import scores_of_forward, warn_slow
from seps.scoring.pairing import paired_texts
from seps.scoring.terms import other_forward, product_dtype, unsafe_images

TRAINING_MEMORY = 5 * 2**29
_KEPT = 2**24
"""Values of extra tokens (about 8 bytes each) of a call that wait for the backward pass rather than be made again."""
_TABLES = 5.0
"""Times the patches: the width, and the texts times its root, from which on the tables of two merged sets cost less
than merging per pair, on a CPU. Measured with 49, 100 and 196 patches, 128 and 512 wide."""
_DIRECT = 2**20
"""Merge weights of pairs that the direct form makes at once on a CPU. What the backward pass needs is held for all
pairs; what it makes on its way is of so many alone."""
_LEAST_TEXTS = 128
"""A batch is launched many times a second: fewer, larger steps are worth some padding."""


def score_with_gradient(
    net: PatchSlimming,
    images: Tensor,
    words: Tensor,
    lengths: Lengths = None,
    *,
    dense: Tensor | None = None,
    dense_lengths: Lengths = None,
    paired_dense: Tensor | None = None,
    paired_dense_lengths: Lengths = None,
    guides: Mapping[str, Tensor] | None = None,
    patch_mask: Tensor | None = None,
    precision: str | None = "float32",
    memory: int = TRAINING_MEMORY,
    want_masks: bool = False,
) -> Scores:
    """Similarity of every image with every text, with gradients to inputs and parameters.

    As in `score_matrix` the steps of the network are called. Unlike there the network's mode counts: in training
    decisions may be random.

    Args:
        images: (B, P + N, C); `words` (T, M, C) with `lengths` (T,); the rest as in `score_matrix`.
        precision: of the products, float32 also under autocast (None follows it); the kernels of a GPU multiply it as
            pairs of numbers, to 22 bits. "bfloat16" is faster there, but
            where features share a direction its gradients point elsewhere (cosine with float32 down to 0, measured);
            "half" underflows.
        memory: bytes for what lives only within one block of images, forward or backward; what waits for the
            backward pass comes on top: image-only state (about 3 times the patches), and of each pair its maxima.
        want_masks: also return D of each branch, (T, B, N), as a ratio loss needs it.

    Returns:
        Scores (B, T) float32 with the parts they are made of, and the masks (empty unless wanted).

    Raises:
        InputError: for inputs that do not fit, or a `memory` that cannot work (with the smallest that can).
    """
    check_features("images", images[:1], "images, tokens, width", net.config.embed_size)
    check_features("words", words[:1], "texts, words, width", net.config.embed_size)
    dtype = product_dtype(precision, images.device)
    if paired_dense is None:
        texts = SortedTexts(words, lengths, dtype=net.aggr_net.scale.dtype)
    else:
        texts = paired_texts(net, words, lengths, paired_dense, paired_dense_lengths, dense=dense)
    gallery = ImageBlock(images, dense, dense_lengths, guides, patch_mask)
    gallery.check(net)
    if not len(images) or not texts.count:
        return _nothing(net, gallery, texts, want_masks)
    other, unsupported = other_forward(net), GramMaxima.supports(net)
    if other or unsupported:
        warn_slow(other or str(unsupported))
    with torch.autocast(images.device.type, enabled=False):
        if other is not None:
            return scores_of_forward(net, gallery, texts, want_masks)
        encoded = texts.encode(net, gallery)
        shapes = shapes_of(net.config, encoded.patches.shape[1], texts, dense)
        plan = make_plan(shapes, memory, images.shape[0], texts.count, dtype=dtype, cuda=images.is_cuda, gradient=True)
        blocks = [texts.block(start, stop) for start, stop in texts.runs(plan.texts, _LEAST_TEXTS)]
        order, parts = _parts(net, encoded, dtype, plan, memory, texts.count, unsupported is not None)
        keep_extra = images.shape[0] * texts.count * images.shape[-1] <= _KEPT
        once = len(parts) == 1 and texts.count <= parts[0].texts
        rows = [_score_part(net, part, blocks, dtype, want_masks, keep_extra, once) for part in parts]
    back = torch.argsort(torch.cat([block.index for block in blocks]))

    def whole(values: Sequence[Tensor | None], axis: int) -> Tensor | None:
        """What all parts of the images have, texts and images in the caller's order; images are along `axis`."""
        if values[0] is None:
            return None
        found = torch.cat([value for value in values if value is not None], dim=axis).index_select(1 - axis, back)
        return found if order is None else found.index_select(axis, order)

    similarity, pixels, description = (
        whole([getattr(row, name) for row in rows], 0) for name in ("similarity", "pixels", "description")
    )
    assert similarity is not None
    masks = tuple(whole(sets, 1) for sets in zip(*(row.masks for row in rows), strict=True))
    return Scores(similarity, pixels, description, encoded.described, masks)  # type: ignore[arg-type]


def _nothing(net: PatchSlimming, gallery: ImageBlock, texts: SortedTexts, want_masks: bool) -> Scores:
    """The scores of no image or no text, empty along that axis; a backward pass through them finds zeros."""
    encoded = texts.encode(net, gallery)
    batch, count = encoded.patches.shape[:2]
    sims = (gallery.images.sum() + texts.words.sum()).float() * encoded.pooled.new_zeros(batch, texts.count)
    masks = tuple(encoded.pooled.new_zeros(texts.count, batch, count) for _ in encoded.sets) if want_masks else ()
    return Scores(sims, sims, None if encoded.dense_words is None else sims, encoded.described, masks)


def _group_texts(blocks: list[TextBlock], limit: int) -> list[list[TextBlock]]:
    """Blocks put together to at most `limit` texts: what one recomputed step takes."""
    groups: list[list[TextBlock]] = []
    size = limit + 1
    for block in blocks:
        if size + block.count > limit:
            groups.append([])
            size = 0
        groups[-1].append(block)
        size += block.count
    return groups


def _split_images(images: EncodedImages, size: int) -> list[EncodedImages]:
    """Parts of `size` images, in order. `split` hands gradients back in one piece, slices one padded copy each."""
    pieces: dict[int, Sequence[Tensor]] = {}

    def piece(tensor: Tensor, place: int) -> Tensor:
        if id(tensor) not in pieces:
            pieces[id(tensor)] = torch.split(tensor, size)
        return pieces[id(tensor)][place]

    count = -(-count_images(images) // size)
    return [map_tensors(images, lambda tensor, place=place: piece(tensor, place)) for place in range(count)]  # type: ignore[misc]


@dataclass
class _Part:
    """Some images, and how they are scored."""

    images: EncodedImages
    direct: bool
    texts: int
    """Texts that one recomputed step takes."""


def _parts(
    net: PatchSlimming,
    images: EncodedImages,
    dtype: torch.dtype,
    plan: Plan,
    memory: int,
    texts: int,
    reference: bool,
) -> tuple[Tensor | None, list[_Part]]:
    """The images in parts, those with far-spread logits apart, and the order that puts the rows back (or None)."""
    unsafe = unsafe_images(net, images, dtype)
    dual = net.config.aggregation == "dual" and not images.patches.is_cuda
    if reference or (dual and _merges_per_pair(texts, *images.patches.shape[1:])):
        unsafe = torch.ones_like(unsafe)
    # One value is read from the device, and none where the answer is known: with noise every image is flagged.
    count = count_images(images)
    flagged = count if net.draws_noise else int(unsafe.sum())
    room = max(1, memory // (3 * plan.costs.direct))
    few = max(1, min(count, room // texts)) if texts else 1
    if flagged in (0, count):
        direct = bool(flagged)
        size, limit = (few, min(texts, room)) if direct else (plan.images, plan.texts)
        return None, [_Part(part, direct, limit) for part in _split_images(images, size)]
    groups = [torch.nonzero(~unsafe).squeeze(-1), torch.nonzero(unsafe).squeeze(-1)]
    safe, far = (take_images(images, chosen) for chosen in groups)
    parts = [_Part(part, False, plan.texts) for part in _split_images(safe, plan.images)]
    parts += [_Part(part, True, min(texts, room)) for part in _split_images(far, few)]
    return torch.argsort(torch.cat(groups)), parts


def _merges_per_pair(texts: int, patches: int, width: int) -> bool:
    """Whether two merged sets cost less built per pair than by tables (N N Q values each), forward and backward."""
    return _TABLES * patches > min(width, texts * math.sqrt(width))


def _score_part(
    net: PatchSlimming,
    part: _Part,
    blocks: list[TextBlock],
    dtype: torch.dtype,
    want_masks: bool,
    keep_extra: bool,
    once: bool,
) -> Scores:
    """Scores (b, T) of some images, with texts in block order, and D of each set (T, b, N).

    `once`: these are all pairs of the call, so making them again in the backward pass would save no memory.
    """
    by_hand = None
    if net.config.aggregation != "dual" and not part.direct:
        by_hand = RecomputedMaxima(net, part.images, dtype)
        by_hand.keep_extra = keep_extra
    step = part.texts
    if part.direct and not part.images.patches.is_cuda:
        step = max(1, min(step, _DIRECT // max(1, part.images.sets[0].logits.numel())))
    small = [block.part(i, i + step) for block in blocks for i in range(0, block.count, step)]
    outputs: list[Scores] = []
    for group in _group_texts(small, part.texts):

        def run(group: list[TextBlock] = group) -> tuple[Any, ...]:
            with torch.autocast(part.images.patches.device.type, enabled=False):
                fast = by_hand or GramMaxima(net, part.images, dtype) if not part.direct else None
                scored = joined([net.score(part.images, block, fast) for block in group])
                description = scored.description
                if description is not None:
                    description = description.expand(count_images(part.images), -1)
                return scored.similarity, scored.pixels, description, scored.masks if want_masks else ()

        held = once or by_hand is not None
        similarity, pixels, description, masks = run() if held else checkpoint(run, use_reentrant=False)
        outputs.append(Scores(similarity, pixels, description, None, masks))
    return joined(outputs)


class RecomputedMaxima(GramMaxima):
    """With G in the place of H, and the backward pass written by hand; for one set per merged patch."""

    keep_extra = False
    """Keep the extra tokens for the backward pass rather than make them again."""

    def padding(self, count: int) -> int:
        """The kernels of a GPU read rows of 16 values in float32 too."""
        return -count % 16 if self.images.patches.is_cuda else super().padding(count)

    def tables(self, weights: Tensor) -> Tensor:
        """G (B, Z, Z): H is made again in the backward pass."""
        return self.gram()

    def single(self, texts: Texts, kept: Sequence[Kept]) -> tuple[Tensor, Tensor]:
        """See `GramMaxima.single`."""
        (one,) = kept
        weights, gram = self.weights(one.place)
        keep = self.fit(one.keep.detach())
        return merged_maxima(texts.words, self.patches, weights, gram, keep, texts.mask, self.merged(one.place))

    def others(self, texts: Texts, extra: Tensor) -> tuple[Tensor, Tensor]:
        """See `GramMaxima.others`."""
        make = super().others
        return make(texts, extra) if self.keep_extra else _recomputed(lambda: make(texts, extra))

    def beside(self, texts: Texts, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Maxima`."""
        make = super().beside
        return _recomputed(lambda: make(texts, tokens, mask))


def _recomputed(make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`make()`, made again in the backward pass."""
    if not torch.is_grad_enabled():
        return make()
    found: tuple[Tensor, Tensor] = checkpoint(make, use_reentrant=False, preserve_rng_state=False)
    return found
