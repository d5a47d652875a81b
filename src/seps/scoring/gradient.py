"""Training: the same factored form, a few images at a time, recomputed in the backward pass instead of stored.

With one kept set a merged patch (`aggregation="single"`) the backward pass is written by hand (`maxima`); dual
aggregation and the direct form go through autograd, recomputed block by block.

Shapes: B images, T texts, N patches, M words, L words of a dense text, C width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seps.nn.checks import InputError, check_features, length_mask
from seps.nn.known import call_forward, own_forward, say_readable, why_not_fast
from seps.nn.slimming import ImageSide, PatchSlimming, score_pairing_texts
from seps.scoring import pairs
from seps.scoring.api import ImageBlock, Lengths
from seps.scoring.factored import prepare, unsafe_images
from seps.scoring.plan import Plan, make_plan, shapes_of
from seps.scoring.precision import product_dtype
from seps.scoring.state import count_images, split_state, take_images
from seps.scoring.texts import TextBlock, Texts

MEMORY = 5 * 2**29
_KEPT = 2**24
"""Values of extra tokens (about 8 bytes each) of a call that wait for the backward pass rather than be made again."""
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
    memory: int = MEMORY,
    want_masks: bool = False,
) -> GradientScores:
    """Similarity of every image with every text, with gradients to inputs and parameters.

    A network that the fast paths do not know (see `known`) is scored in the readable form, with a warning that says
    why. Unlike `score_matrix`, the network's mode counts: in training its decisions may be drawn.

    Args:
        images: (B, P + N, C); `words` (T, M, C) with `lengths` (T,); the rest as in `score_matrix`.
        precision: of the products, float32 also under autocast (None follows it). "bfloat16" is faster on a GPU, but
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
    paired = paired_dense is not None
    if paired and dense is not None:
        raise InputError("Both dense and paired_dense came; a dense text belongs to its image or to a caption.")
    dtype = product_dtype(precision, images.device)
    texts = Texts(
        words,
        lengths,
        dtype=net.aggr_net.scale.dtype,
        paired=paired_dense,
        paired_lengths=paired_dense_lengths,
        by_paired=net.config.dense == "branch",
    )
    dense_words = texts.longest_paired if paired else 0
    if not paired and dense is not None and net.config.dense == "tokens":
        dense_words = dense.shape[1]
    gallery = ImageBlock(images, dense, _as_tensor(dense_lengths), guides, patch_mask)
    gallery.check(net)
    if not len(images) or not texts.count:
        return _nothing(net, gallery, texts, want_masks)
    unknown = why_not_fast(net)
    if unknown is not None:
        say_readable(unknown)
        with torch.autocast(images.device.type, enabled=False):
            return _readable(net, gallery, texts, want_masks)
    patches = images.shape[1] - net.prefix_count(images.shape[1])
    shapes = shapes_of(net.config, patches, texts.longest, dense_words, paired)
    plan = make_plan(shapes, memory, images.shape[0], texts.count, dtype=dtype, cuda=images.is_cuda, gradient=True)
    with torch.autocast(images.device.type, enabled=False):
        side = gallery.encode(net, paired)
        blocks = [texts.block(start, stop) for start, stop in texts.runs(plan.texts, _LEAST_TEXTS)]
        order, parts = _parts(net, side, dtype, plan, memory, texts.count)
        thrifty = images.shape[0] * texts.count * images.shape[-1] > _KEPT
        rows = [_score_part(net, part, blocks, dtype, paired, want_masks, thrifty) for part in parts]
    back = torch.argsort(torch.cat([block.index for block in blocks]))
    sims = _joined([row[0] for row in rows], back, order)
    patches_part = _joined([row[1] for row in rows], back, order)
    description = _joined([row[2] for row in rows], back, order)
    masks = tuple(
        torch.cat(branch, dim=1).index_select(0, back) for branch in zip(*(row[3] for row in rows), strict=True)
    )
    if order is not None:
        masks = tuple(mask.index_select(1, order) for mask in masks)
    if sims is None:
        raise ValueError("no image was scored")
    return GradientScores(
        sims, masks, None if description is None else patches_part, description, None if paired else side.described
    )


def _nothing(net: PatchSlimming, gallery: ImageBlock, texts: Texts, want_masks: bool) -> GradientScores:
    """The scores of no image or no text, empty along that axis; a backward pass through them finds zeros."""
    side = gallery.encode(net, texts.paired is not None)
    batch, count = side.patches.shape[:2]
    sims = (gallery.images.sum() + texts.words.sum()).float() * side.pooled.new_zeros(batch, texts.count)
    masks = tuple(side.pooled.new_zeros(texts.count, batch, count) for _ in side.fixed_scores) if want_masks else ()
    described = None if side.dense_words is None else sims
    return GradientScores(sims, masks, described, described, None if texts.paired is not None else side.described)


def _readable(net: PatchSlimming, gallery: ImageBlock, texts: Texts, want_masks: bool) -> GradientScores:
    """The network's own loop over the texts, for a network that the fast paths do not know."""
    if own_forward(net):
        return _own(net, gallery, texts, want_masks)
    side: ImageSide | None = None
    if texts.paired is not None:
        own = (gallery.images, texts.words, texts.lengths, texts.paired, texts.paired_lengths)
        scored = score_pairing_texts(net, *own, gallery.patch_mask, gallery.guides)
    else:
        side = gallery.encode(net, False)
        mask = length_mask("lengths", texts.lengths, texts.words)
        words = texts.words.to(texts.dtype)
        scored = [net.score_text(side, text, valid) for text, valid in zip(words, mask, strict=True)]
    columns = list(zip(*(one.masks for one in scored), strict=True)) if want_masks else []
    described = None if side is None else side.described
    parts = [_side_by_side([getattr(one, part) for one in scored]) for part in ("patches", "description")]
    return GradientScores(
        torch.stack([one.similarity for one in scored], dim=1),
        tuple(torch.stack(branch) for branch in columns),
        parts[0],
        parts[1],
        described,
    )


def _side_by_side(columns: list[Tensor | None]) -> Tensor | None:
    """Columns (B,) of all texts as (B, T); None where a text has none."""
    present = [column for column in columns if column is not None]
    return torch.stack(present, dim=1) if len(present) == len(columns) else None


def _own(net: PatchSlimming, gallery: ImageBlock, texts: Texts, want_masks: bool) -> GradientScores:
    """What a forward of the network's own says: similarities, and masks where it gives them."""
    if texts.paired is not None:
        raise InputError(
            f"{type(net).__name__} has a forward of its own (or a hook on it), which paired_dense would go round; "
            "call the network itself."
        )
    extras = {name: getattr(gallery, name) for name in ("dense", "dense_lengths", "guides", "patch_mask")}
    scored = call_forward(net, gallery.images, texts.words, texts.lengths, extras)
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


def _as_tensor(lengths: Tensor | Sequence[int] | None) -> Tensor | None:
    return None if lengths is None else torch.as_tensor(lengths)


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
    count, flagged = count_images(side), int(unsafe.sum())
    room = max(1, memory // (3 * plan.direct_bytes))
    few = max(1, min(count, room // texts)) if texts else 1
    if flagged in (0, count):
        direct = bool(flagged)
        size, limit = (few, min(texts, room)) if direct else (plan.images, plan.texts)
        return None, [_Part(part, direct, limit) for part in split_state(side, size)]
    groups = [torch.nonzero(~unsafe).squeeze(-1), torch.nonzero(unsafe).squeeze(-1)]
    safe, far = (take_images(side, chosen) for chosen in groups)
    parts = [_Part(part, False, plan.texts) for part in split_state(safe, plan.images)]
    parts += [_Part(part, True, min(texts, room)) for part in split_state(far, few)]
    return torch.argsort(torch.cat(groups)), parts


def _score_part(
    net: PatchSlimming,
    part: _Part,
    blocks: list[TextBlock],
    dtype: torch.dtype,
    paired: bool,
    want_masks: bool,
    thrifty: bool,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """S, its parts (b, T) with texts in block order, and D of each branch (T, b, N)."""
    outputs: list[tuple[Tensor | None, ...]] = []
    by_hand = net.config.aggregation == "single" and not part.direct
    ready = prepare(net, part.side, dtype, paired=paired, recompute=True) if by_hand else None
    if ready is not None:
        ready.thrifty = thrifty
    small = [block.part(i, i + part.texts) for block in blocks for i in range(0, block.count, part.texts)]
    count = count_images(part.side)
    for group in _group_texts(small, part.texts):

        def run(group: list[TextBlock] = group) -> tuple[Tensor | None, ...]:
            with torch.autocast(part.side.patches.device.type, enabled=False):
                products = torch.float32 if part.direct else dtype
                prep = ready or prepare(net, part.side, products, paired=paired, direct=part.direct)
                scored = [pairs.score_block(net, prep, block, want_masks=want_masks) for block in group]
                patches = torch.cat([one.patches for one in scored], dim=1)
                described = [one.description for one in scored if one.description is not None]
                description = torch.cat(described, dim=1).expand(count, -1) if described else None
                mixed = pairs.mix(net, part.side, patches, description)
                masks = [torch.cat(branch) for branch in zip(*(one.masks for one in scored), strict=True)]
                return mixed, patches, description, *masks

        outputs.append(run() if by_hand else checkpoint(run, use_reentrant=False))
    columns = list(zip(*outputs, strict=True))
    sims, patches = (torch.cat([t for t in column if t is not None], dim=1) for column in columns[:2])
    described = [t for t in columns[2] if t is not None]
    masks = [torch.cat([t for t in column if t is not None]) for column in columns[3:]]
    return sims, patches, torch.cat(described, dim=1) if described else None, masks
