"""Why a picture has its score by patches and words: shares by words of the caption and of the description.

Shapes: M words, N patches, L description words, C width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.encoders.text import TextBatch
from seps.method.encoded import EncodedImages
from seps.method.network import PatchSlimming
from seps.retrieval.explain.explanation import DescriptionPart, Explanation, WordPart
from seps.retrieval.explain.maxsim import maxsim_shares
from seps.retrieval.explain.shares import Shares, shares
from seps.retrieval.heads import ImageFeatures, MaxSimHead
from seps.retrieval.merging import segment_ids
from seps.retrieval.model import RetrievalModel


@dataclass(frozen=True)
class OneVector:
    """A picture as a store with one vector per picture keeps it."""

    vector: Tensor
    """(C,) its product with a caption's vector is the score."""
    pixels: Tensor
    """(C,) the part of the pixels, of length one."""
    weight: float
    """Of the description in `vector`."""
    slope: float
    """What the score gains where the product gains 1."""


def explain_patches(
    model: RetrievalModel,
    image: ImageFeatures,
    caption: str,
    description: str | None,
    *,
    side: EncodedImages | None = None,
    net: PatchSlimming | None = None,
    grid: tuple[int, int] | None = None,
    positions: Tensor | None = None,
    mean: OneVector | None = None,
) -> Explanation:
    """The score of one image (B = 1) and a caption. Raises ValueError for a blank caption.

    Of an image as a store keeps it: `side` and `net` for as many patches, their `grid`, and their `positions` on it; or
    its one vector (`mean`), whose score is split among the patches of `image`.
    """
    if not caption.strip():
        raise ValueError("The caption is blank. Write the sentence whose score to explain.")
    rows, columns = grid = grid or model.vision.grid_for(*model.image_size)
    cells = rows * columns
    batch = model.text.tokenize([caption.strip()])
    words = model.encode_texts([caption.strip()])
    tokens = _tokens(model, batch, model.config.max_words)
    places = torch.arange(cells) if positions is None else positions[0].cpu()
    parts = _shares(model, image, words.words[0, : len(tokens)], cells, side, net)
    if mean is not None:
        parts = _mean_shares(model, parts, image, words.words[0, : len(tokens)], mean)
    stored = torch.zeros(cells, dtype=torch.bool)
    stored[places] = True
    return Explanation(
        caption=caption.strip(),
        score=parts.score,
        grid=grid,
        words=_words(parts, batch, tokens, places, cells),
        patches=_spread(parts.patches.sum(dim=0), places, cells).tolist(),
        kept=(_spread(parts.kept.float(), places, cells) > 0.5).tolist(),
        stored=stored.tolist(),
        groups=_spread(parts.groups, places, cells).tolist(),
        description=_description(model, parts, description),
        elsewhere=float(parts.elsewhere.sum()),
        rest=parts.rest,
        terms=parts.terms,
    )


def _shares(
    model: RetrievalModel,
    image: ImageFeatures,
    words_MC: Tensor,
    cells: int,
    side: EncodedImages | None,
    net: PatchSlimming | None,
) -> Shares:
    net = net or model.head.network
    if net is None:  # of the heads that select patches
        return maxsim_shares(cast(MaxSimHead, model.head), image, words_MC, cells)
    if side is None:
        side = net.encode_images(
            image.tokens, dense=image.dense, dense_lengths=image.dense_lengths, guides=image.guides
        )
    return shares(net, side, words_MC, None if image.mean is None else cells * float(image.mean[0].norm()))


def _mean_shares(
    model: RetrievalModel, selected: Shares, image: ImageFeatures, words_MC: Tensor, mean: OneVector
) -> Shares:
    """The score by one vector, which is linear in words and patches; the selection is that of `found`."""

    def parts(rows: Tensor) -> Tensor:
        """(X, C) rows as parts of their mean at length one."""
        length: Tensor = len(rows) * rows.float().mean(dim=0).norm().clamp_min(1e-12)
        return rows.float() / length

    words = parts(words_MC)
    texts = words[:0]
    if mean.weight and image.dense is not None and image.dense_mask is not None:
        texts = parts(image.dense[0, image.dense_mask[0]])
    own = mean.slope * (1 - mean.weight) * words
    by_patch = own @ parts(image.tokens[0, model.vision.num_prefix_tokens :]).T
    pixels = own @ mean.pixels.to(own)
    by_text = mean.slope * mean.weight * (words @ texts.T)
    score = mean.slope * float(F.normalize(words_MC.float().mean(dim=0), dim=0) @ mean.vector.to(own))
    terms = {"pixels": float(pixels.sum())} | ({"description": float(by_text.sum())} if mean.weight else {})
    return Shares(
        patches=by_patch,
        elsewhere=pixels - by_patch.sum(dim=1),
        description=by_text,
        rest=score - sum(terms.values()),
        kept=selected.kept,
        importance=selected.importance,
        groups=selected.groups[:0],
        terms=terms,
    )


def _description(model: RetrievalModel, parts: Shares, description: str | None) -> list[DescriptionPart]:
    if not parts.description.shape[1] or description is None:
        return []
    return description_parts(model, parts.description.sum(dim=0), description)


def description_parts(model: RetrievalModel, values: Tensor, description: str) -> list[DescriptionPart]:
    """The words of a description, from what each of its (L,) encoded words, or merged segments of them, adds."""
    batch = model.text.tokenize([description])
    tokens = _tokens(model, batch, model.config.max_dense_words)
    # Words that the store merged into one segment share equally what the segment adds.
    ids = segment_ids(len(tokens), len(values))
    each = values.cpu() / torch.bincount(ids, minlength=len(values))
    joined = _join(each[ids][:, None], batch, tokens)
    return [DescriptionPart(word, special, float(value[0])) for word, special, value in joined]


def _tokens(model: RetrievalModel, batch: TextBatch, limit: int) -> list[int]:
    """The tokens of the first text that are aligned with the image."""
    words: list[int] = model.is_word(batch.ids[:1, :limit], batch.mask[:1, :limit])[0].nonzero()[:, 0].tolist()
    return words


def _spread(values: Tensor, places: Tensor, cells: int) -> Tensor:
    """(..., N) values of patches onto the (..., cells) of the grid, zero elsewhere."""
    spread = torch.zeros(*values.shape[:-1], cells)
    spread[..., places] = values.float().cpu()
    return spread


def _words(parts: Shares, batch: TextBatch, tokens: Sequence[int], places: Tensor, cells: int) -> list[WordPart]:
    heat = _spread(parts.patches, places, cells)
    total = heat.sum(dim=1) + parts.elsewhere.cpu() + parts.description.sum(dim=1).cpu()
    joined = _join(torch.cat([total[:, None], heat], dim=1), batch, tokens)
    return [WordPart(word, special, float(values[0]), values[1:].tolist()) for word, special, values in joined]


def _join(values: Tensor, batch: TextBatch, tokens: Sequence[int]) -> list[tuple[str, bool, Tensor]]:
    """Add up what belongs to the tokens of one word: (tokens, X) -> (word, special, (X,)) in order."""
    joined: list[tuple[str, bool, Tensor]] = []
    last: int | None = None
    for row, token in enumerate(tokens):
        owner = batch.word_of_token[0][token]
        if owner is not None and owner == last:
            word, special, before = joined[-1]
            joined[-1] = (word, special, before + values[row])
        elif owner is None:
            joined.append(("[start]" if token == 0 else "[end]", True, values[row]))
        else:
            joined.append((batch.words[0][owner], False, values[row]))
        last = owner
    return joined
