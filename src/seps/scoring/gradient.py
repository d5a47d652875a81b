"""Training: the same factored form, a few images at a time, recomputed in the backward pass instead of stored.

Shapes: B images, T texts, N patches, M words, L words of a dense text, C width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seps.nn.checks import InputError, check_features
from seps.nn.slimming import ImageSide, PatchSlimming
from seps.scoring import pairs
from seps.scoring.api import ImageBlock, Lengths
from seps.scoring.factored import prepare, unsafe_images
from seps.scoring.plan import make_plan, shapes_of
from seps.scoring.precision import product_dtype
from seps.scoring.state import count_images, take_images
from seps.scoring.texts import TextBlock, Texts

MEMORY = 2**30


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
    precision: str | None = None,
    memory: int = MEMORY,
    want_masks: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Similarity of every image with every text, with gradients to inputs and parameters.

    Args:
        images: (B, P + N, C); `words` (T, M, C) with `lengths` (T,); the rest as in `score_matrix`.
        precision: of the products; None follows autocast. Prefer "bfloat16" to "half" here: gradients underflow.
        memory: bytes for what lives only within one block of images, forward or backward.
        want_masks: also return D of each branch, (T, B, N), as a ratio loss needs it.

    Returns:
        Scores (B, T) float32, and the masks (empty unless wanted).

    Raises:
        InputError: for inputs that do not fit, or a `memory` that cannot work (with the smallest that can).
    """
    check_features("images", images, "images, tokens, width", net.config.embed_size)
    check_features("words", words, "texts, words, width", net.config.embed_size)
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
    patches = images.shape[1] - net.config.num_prefix_tokens
    shapes = shapes_of(net.config, patches, texts.longest, dense_words, paired)
    plan = make_plan(shapes, memory, images.shape[0], texts.count, dtype=dtype, cuda=images.is_cuda, gradient=True)
    with torch.autocast(images.device.type, enabled=False):
        blocks = [texts.block(start, stop) for start, stop in texts.runs(plan.texts)]
        groups = _group_texts(blocks, plan.texts)
        parts = _split(ImageBlock(images, dense, _as_tensor(dense_lengths), guides, patch_mask), plan.images)
        rows = [_score_part(net, part, groups, dtype, paired, want_masks) for part in parts]
    order = torch.argsort(torch.cat([block.index for block in blocks]))
    sims = torch.cat([row[0] for row in rows]).index_select(1, order)
    masks = tuple(
        torch.cat(branch, dim=1).index_select(0, order) for branch in zip(*(row[1] for row in rows), strict=True)
    )
    return sims, masks


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


def _split(block: ImageBlock, size: int) -> list[ImageBlock]:
    """Blocks of `size` images. `split` hands all gradients back in one piece, slices one padded copy each."""
    images = torch.split(block.images, size)
    dense = None if block.dense is None else torch.split(block.dense, size)
    parts = []
    for position, own in enumerate(images):
        part = block.part(position * size, position * size + own.shape[0])
        part.images = own
        part.dense = None if dense is None else dense[position]
        parts.append(part)
    return parts


def _score_part(
    net: PatchSlimming,
    part: ImageBlock,
    groups: list[list[TextBlock]],
    dtype: torch.dtype,
    paired: bool,
    want_masks: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Scores (b, T) of some images, texts in block order, and D of each branch (T, b, N)."""
    outputs: list[tuple[Tensor, ...]] = []
    for group in groups:

        def run(images: Tensor, dense: Tensor | None, group: list[TextBlock] = group) -> tuple[Tensor, ...]:
            with torch.autocast(images.device.type, enabled=False):
                own = ImageBlock(images, dense, part.dense_lengths, part.guides, part.patch_mask)
                return _score_images(net, own.encode(net, paired), group, dtype, paired, want_masks)

        outputs.append(checkpoint(run, part.images, part.dense, use_reentrant=False))
    sims = torch.cat([output[0] for output in outputs], dim=1)
    masks = [torch.cat(branch) for branch in zip(*(output[1:] for output in outputs), strict=True)]
    return sims, masks


def _score_images(
    net: PatchSlimming,
    side: ImageSide,
    blocks: list[TextBlock],
    dtype: torch.dtype,
    paired: bool,
    want_masks: bool,
) -> tuple[Tensor, ...]:
    """Scores (b, T) and the masks, images with far-spread logits by the direct form."""
    unsafe = unsafe_images(net, side, dtype)
    flags = unsafe.tolist()
    parts: list[tuple[list[Tensor], list[list[Tensor]]]] = []
    orders: list[Tensor] = []
    for direct in (False, True):
        if direct not in flags:
            continue
        chosen = torch.nonzero(unsafe == direct).squeeze(-1)
        own = side if len(chosen) == count_images(side) else take_images(side, chosen)
        prep = prepare(net, own, torch.float32 if direct else dtype, paired=paired, direct=direct)
        scored = [pairs.score_block(net, prep, block, want_masks=want_masks) for block in blocks]
        parts.append(([sims for sims, _ in scored], [masks for _, masks in scored]))
        orders.append(chosen)
    sims = torch.cat([torch.cat(rows, dim=1) for rows, _ in parts])
    masks = [
        torch.cat([torch.cat(branch) for branch in branches], dim=1)
        for branches in zip(*(list(zip(*masks, strict=True)) for _, masks in parts), strict=True)
    ]
    if len(orders) == 1:
        return sims, *masks
    back = torch.argsort(torch.cat(orders))
    return sims.index_select(0, back), *(mask.index_select(1, back) for mask in masks)
