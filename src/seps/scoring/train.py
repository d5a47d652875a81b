"""Training: the factored form, a few images at a time, with its backward pass recomputed instead of stored.

With one kept set per merged patch (`aggregation="single"`) the backward pass is written by hand (`merged_maxima`);
dual aggregation and the direct form go through autograd, recomputed block by block.

Shapes: B images, T texts, M words, N patches, C width, Q merged patches.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seps.method.checks import InputError, check_features, length_mask
from seps.method.encoded import ImageSide
from seps.method.known import call_forward, own_forward, say_readable, why_not_fast
from seps.method.network import PatchSlimming
from seps.method.pairing import score_pairing_texts
from seps.scoring.blocks import Plan, make_plan
from seps.scoring.factored import DirectScorer, FactoredScorer, Group, factored_scorer
from seps.scoring.inputs import (
    ImageBlock,
    Lengths,
    TextBlock,
    Texts,
    count_images,
    map_tensors,
    shapes_of,
    take_images,
)
from seps.scoring.maxima import merged_maxima
from seps.scoring.pairing import PairedTexts, paired_texts
from seps.scoring.terms import draws_noise, product_dtype, unsafe_images

TRAINING_MEMORY = 5 * 2**29
_KEPT = 2**24
"""Values of extra tokens (about 8 bytes each) of a call that wait for the backward pass rather than be made again."""
_TABLES = 5.5
"""Times patches / sqrt(width): texts from which on the tables of two merged sets cost less than merging per pair, on a
CPU. Measured with 49 and 196 patches, 128 and 512 wide."""
_LEAST_TEXTS = 128
"""A batch is launched many times a second: fewer, larger steps are worth some padding."""


@dataclass
class GradientScores:
    """Similarities (B, T) with gradients, the parts they are made of where there are two, and D of each branch."""

    similarity: Tensor
    masks: tuple[Tensor, ...] = ()
    """(T, B, N) each; empty unless asked for."""
    patches: Tensor | None = None
    description: Tensor | None = None
    """(B, T); its rows of images without description (`described`) are computed on padding: leave them out."""
    described: Tensor | None = None
    """(B,) bool, images that have a description; None where none came with the images."""


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
) -> GradientScores:
    """Similarity of every image with every text, with gradients to inputs and parameters.

    A network that the fast paths do not know (see `seps.method.known`) is scored by its own loop over the texts, with a
    warning that says why. Unlike in `score_matrix`, the network's mode counts: in training decisions may be random.

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
        texts = Texts(words, lengths, dtype=net.aggr_net.scale.dtype)
    else:
        texts = paired_texts(net, words, lengths, paired_dense, paired_dense_lengths, dense=dense)
    gallery = ImageBlock(images, dense, dense_lengths, guides, patch_mask)
    gallery.check(net)
    if not len(images) or not texts.count:
        return _nothing(net, gallery, texts, want_masks)
    unknown = why_not_fast(net)
    if unknown is not None:
        say_readable(unknown)
        with torch.autocast(images.device.type, enabled=False):
            return score_readably(net, gallery, texts, want_masks)
    patches = images.shape[1] - net.prefix_count(images.shape[1])
    shapes = shapes_of(net.config, patches, texts, dense)
    plan = make_plan(shapes, memory, images.shape[0], texts.count, dtype=dtype, cuda=images.is_cuda, gradient=True)
    with torch.autocast(images.device.type, enabled=False):
        side = texts.encode(net, gallery)
        blocks = [texts.block(start, stop) for start, stop in texts.runs(plan.texts, _LEAST_TEXTS)]
        order, parts = _parts(net, side, dtype, plan, memory, texts.count)
        keep_extra = images.shape[0] * texts.count * images.shape[-1] <= _KEPT
        rows = [_score_part(net, part, blocks, dtype, texts.guides, want_masks, keep_extra) for part in parts]
    back = torch.argsort(torch.cat([block.index for block in blocks]))
    joined = [_joined([getattr(row, name) for row in rows], back, order) for name in ("patches", "description")]
    similarity = _joined([row.similarity for row in rows], back, order)
    masks = [torch.cat(branch, dim=1).index_select(0, back) for branch in zip(*(r.masks for r in rows), strict=True)]
    if order is not None:
        masks = [mask.index_select(1, order) for mask in masks]
    if similarity is None:
        raise ValueError("no image was scored")
    return GradientScores(
        similarity, tuple(masks), None if joined[1] is None else joined[0], joined[1], _described(texts, side)
    )


def _described(texts: Texts, side: ImageSide) -> Tensor | None:
    """(B,) bool, images with a description of their own; in the published pairing none came with the images."""
    return None if isinstance(texts, PairedTexts) else side.described


def _nothing(net: PatchSlimming, gallery: ImageBlock, texts: Texts, want_masks: bool) -> GradientScores:
    """The scores of no image or no text, empty along that axis; a backward pass through them finds zeros."""
    side = texts.encode(net, gallery)
    batch, count = side.patches.shape[:2]
    sims = (gallery.images.sum() + texts.words.sum()).float() * side.pooled.new_zeros(batch, texts.count)
    masks = tuple(side.pooled.new_zeros(texts.count, batch, count) for _ in side.fixed_scores) if want_masks else ()
    part = None if side.dense_words is None else sims
    return GradientScores(sims, masks, part, part, _described(texts, side))


def score_readably(
    net: PatchSlimming, images: ImageBlock | ImageSide, texts: Texts, want_masks: bool = False
) -> GradientScores:
    """The network's own loop over the texts, or its own forward, for a network that the fast paths do not know."""
    if own_forward(net):
        return _own_forward(net, images, texts, want_masks)
    side: ImageSide | None = None
    if isinstance(texts, PairedTexts):
        if isinstance(images, ImageSide):
            raise ValueError("the published pairing needs the images as features")
        paired = (texts.words, texts.lengths, texts.descriptions, texts.description_lengths)
        scored = score_pairing_texts(net, images.images, *paired, images.patch_mask, images.guides)
    else:
        side = _convert_images(images, texts.dtype) if isinstance(images, ImageSide) else texts.encode(net, images)
        pairs = zip(texts.words.to(texts.dtype), length_mask("lengths", texts.lengths, texts.words), strict=True)
        scored = [net.score_text(side, text, valid) for text, valid in pairs]
    masks = zip(*(one.masks for one in scored), strict=True) if want_masks else ()
    return GradientScores(
        torch.stack([one.similarity for one in scored], dim=1),
        tuple(torch.stack(branch) for branch in masks),
        _side_by_side([one.patches for one in scored]),
        _side_by_side([one.description for one in scored]),
        None if side is None else side.described,
    )


def _convert_images(side: ImageSide, dtype: torch.dtype) -> ImageSide:
    """The state with features of this dtype; the selection's scores are float32 always."""
    if side.patches.dtype == dtype:
        return side
    converted = map_tensors(side, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    converted.fixed_scores = {name: scores.float() for name, scores in side.fixed_scores.items()}
    return converted


def _side_by_side(columns: list[Tensor | None]) -> Tensor | None:
    """Columns (B,) of all texts as (B, T); None where a text has none."""
    present = [column for column in columns if column is not None]
    return torch.stack(present, dim=1) if len(present) == len(columns) else None


def _own_forward(net: PatchSlimming, images: ImageBlock | ImageSide, texts: Texts, want_masks: bool) -> GradientScores:
    """The result of a forward that is not this library's: similarities, and masks where it returns them."""
    if isinstance(images, ImageSide) or isinstance(texts, PairedTexts):
        what = "paired_dense" if isinstance(texts, PairedTexts) else "an ImageSide"
        raise InputError(
            f"{type(net).__name__} has a forward of its own (or a hook on it), which {what} would bypass; pass the "
            "images as features, with their own descriptions."
        )
    scored = call_forward(net, images.images, texts.words, texts.lengths, images.extras)
    sims, masks = (scored, ()) if isinstance(scored, Tensor) else scored[:2]
    masks = (masks,) if isinstance(masks, Tensor) else tuple(masks)
    if want_masks and not masks:
        raise InputError(
            f"want_masks needs D of each branch, but the forward of {type(net).__name__} returned similarities "
            "alone; let it return (similarities, masks) as PatchSlimming does in training."
        )
    return GradientScores(sims, masks if want_masks else ())


def _joined(rows: list[Tensor | None], back: Tensor, order: Tensor | None) -> Tensor | None:
    """Rows of all parts of the images, texts and images in the caller's order."""
    present = [row for row in rows if row is not None]
    if not present:
        return None
    joined = torch.cat(present).index_select(1, back)
    return joined if order is None else joined.index_select(0, order)


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


def _split_images(side: ImageSide, size: int) -> list[ImageSide]:
    """Parts of `size` images, in order. `split` hands gradients back in one piece, slices one padded copy each."""
    columns = map_tensors(side, lambda tensor: torch.split(tensor, size))
    return [map_tensors(columns, operator.itemgetter(position)) for position in range(len(columns.patches))]


@dataclass
class _Part:
    """Some images, and how they are scored."""

    side: ImageSide
    direct: bool
    texts: int
    """Texts that one recomputed step takes."""


def _parts(
    net: PatchSlimming, side: ImageSide, dtype: torch.dtype, plan: Plan, memory: int, texts: int
) -> tuple[Tensor | None, list[_Part]]:
    """The images in parts, those with far-spread logits apart, and the order that puts the rows back (or None)."""
    unsafe = unsafe_images(net, side, dtype)
    if net.config.aggregation == "dual" and not side.patches.is_cuda and _few_trained(texts, *side.patches.shape[1:]):
        unsafe = torch.ones_like(unsafe)
    # One value is read from the device, and none where the answer is known: with noise every image is flagged.
    count = count_images(side)
    flagged = count if draws_noise(net) else int(unsafe.sum())
    room = max(1, memory // (3 * plan.costs.direct))
    few = max(1, min(count, room // texts)) if texts else 1
    if flagged in (0, count):
        direct = bool(flagged)
        size, limit = (few, min(texts, room)) if direct else (plan.images, plan.texts)
        return None, [_Part(part, direct, limit) for part in _split_images(side, size)]
    groups = [torch.nonzero(~unsafe).squeeze(-1), torch.nonzero(unsafe).squeeze(-1)]
    safe, far = (take_images(side, chosen) for chosen in groups)
    parts = [_Part(part, False, plan.texts) for part in _split_images(safe, plan.images)]
    parts += [_Part(part, True, min(texts, room)) for part in _split_images(far, few)]
    return torch.argsort(torch.cat(groups)), parts


def _few_trained(texts: int, patches: int, width: int) -> bool:
    """Whether so few texts come that two merged sets cost less built per pair than by tables, forward and backward."""
    return texts < _TABLES * patches / math.sqrt(width)


def _score_part(
    net: PatchSlimming,
    part: _Part,
    blocks: list[TextBlock],
    dtype: torch.dtype,
    text_guides: Collection[str],
    want_masks: bool,
    keep_extra: bool,
) -> GradientScores:
    """S and its parts (b, T), with texts in block order, and D of each branch (T, b, N)."""
    by_hand = None
    if net.config.aggregation != "dual" and not part.direct:
        by_hand = RecomputedScorer(net, part.side, dtype, text_guides)
        by_hand.keep_extra = keep_extra
    small = [block.part(i, i + part.texts) for block in blocks for i in range(0, block.count, part.texts)]
    count = count_images(part.side)
    outputs: list[tuple[Tensor | None, ...]] = []
    for group in _group_texts(small, part.texts):

        def run(group: list[TextBlock] = group) -> tuple[Tensor | None, ...]:
            with torch.autocast(part.side.patches.device.type, enabled=False):
                if by_hand is not None:
                    scorer: FactoredScorer | DirectScorer = by_hand
                elif part.direct:
                    scorer = DirectScorer(net, part.side, torch.float32, text_guides)
                else:
                    scorer = factored_scorer(net, part.side, dtype, text_guides)
                scored = [scorer.parts(block, want_masks=want_masks) for block in group]
                patches = torch.cat([one.patches for one in scored], dim=1)
                described = [one.description for one in scored if one.description is not None]
                description = torch.cat(described, dim=1).expand(count, -1) if described else None
                masks = [torch.cat(branch) for branch in zip(*(one.masks for one in scored), strict=True)]
                return scorer.mix(patches, description), patches, description, *masks

        outputs.append(run() if by_hand is not None else checkpoint(run, use_reentrant=False))
    columns = [[t for t in column if t is not None] for column in zip(*outputs, strict=True)]
    similarity, patches, description = (torch.cat(column, dim=1) if column else None for column in columns[:3])
    if similarity is None:
        raise ValueError("no text was scored")
    return GradientScores(similarity, tuple(torch.cat(column) for column in columns[3:]), patches, description)


class RecomputedScorer(FactoredScorer):
    """One kept set per merged patch, with G in the place of H, and the backward pass written by hand."""

    keep_extra = False
    """Keep the extra tokens for the backward pass rather than make them again."""

    def padding(self, count: int) -> int:
        """The kernels of a GPU read rows of 16 values in float32 too."""
        return -count % 16 if self.side.patches.is_cuda else super().padding(count)

    def make_tables(self, gram: Tensor, weights: dict[str, Tensor]) -> None:
        """Keep G (B, Z, Z): H is made again in the backward pass."""
        self.gram = gram

    def recompute(self, work: Callable[[], Any]) -> Any:
        """`work()`, made again in the backward pass."""
        if not torch.is_grad_enabled():
            return work()
        return checkpoint(work, use_reentrant=False, preserve_rng_state=False)

    def maxima(self, block: TextBlock, group: Group) -> tuple[Tensor, Tensor]:
        """See `BlockScorer.maxima`."""
        name, keep = group.only
        merged = self.side.logits[name].shape[-1]
        kept = self.fit(keep.detach())
        return merged_maxima(block.words, self.patches, self.weights[name], self.gram, kept, block.mask, merged)

    def other_maxima(self, block: TextBlock, extra: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlockScorer.other_maxima`."""
        make = super().other_maxima
        if self.keep_extra:
            return make(block, extra)
        found: tuple[Tensor, Tensor] = self.recompute(lambda: make(block, extra))
        return found
