"""Why a picture has its score by one vector: what each patch adds to the cosine, and the words of the description.

A dual encoder gives a sentence one vector, so its words have no parts of their own: the explanation has one entry for
the sentence as a whole. What a patch adds is that of `seps.encoders.parts`, its part of the picture's vector times the
sentence's vector.

Shapes: N patches, L words of a description, M words of a sentence, C width of the vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.network import PatchSlimming
from seps.retrieval.explain.explanation import DescriptionPart, Explanation, WordPart
from seps.retrieval.explain.patches import description_parts
from seps.retrieval.explain.shares import description_shares
from seps.retrieval.model import RetrievalModel


@dataclass(frozen=True)
class SeenPatches:
    """A picture as a dual encoder sees it."""

    parts: Tensor
    """(N, C) what each patch adds to the picture's vector."""
    grid: tuple[int, int]
    """Cells over the whole picture."""
    places: Tensor
    """(N,) the cell of each patch."""


def explain_vector(
    seen: SeenPatches,
    vector: Tensor,
    text: Tensor,
    caption: str,
    description: tuple[list[DescriptionPart], float] | None,
) -> Explanation:
    """The score of a picture, `vector` (C,), and a caption, `text` (C,), and of its description by `explain_words`."""
    added, cosine = seen.parts @ text, float(vector @ text)
    cells = torch.zeros(seen.grid[0] * seen.grid[1])
    cells[seen.places] = added.float().cpu()
    shown = torch.zeros(len(cells), dtype=torch.bool)
    shown[seen.places] = True
    terms, (parts, rest) = {"pixels": cosine}, description or ([], 0.0)
    if description is not None:
        terms["description"] = sum(part.contribution for part in parts) + rest
    score = sum(terms.values())
    return Explanation(
        caption=caption,
        score=score,
        grid=seen.grid,
        words=[WordPart(caption, False, score - rest, cells.tolist())],
        patches=cells.tolist(),
        kept=shown.tolist(),
        stored=shown.tolist(),
        groups=[],
        description=parts,
        elsewhere=cosine - float(added.sum()),
        rest=rest,
        terms=terms,
        whole_sentence=True,
    )


def explain_words(
    model: RetrievalModel, net: PatchSlimming, words: Tensor, described: Tensor, text: str, unit: float, centre: float
) -> tuple[list[DescriptionPart], float]:
    """What each word of a description (L, E) adds, and what belongs to none: the centre and the MLP of Eq. 5."""
    words = words.float()
    parts = description_shares(
        net,
        F.normalize(words, dim=-1),
        words,
        words.mean(dim=0, keepdim=True),
        F.normalize(described.float(), dim=-1),
    )
    values = unit * (parts.aligned + parts.pooled).sum(dim=0)
    return description_parts(model, values, text), unit * (parts.rest - centre)


def cells_of(grid: tuple[int, int], down: float, across: float) -> tuple[tuple[int, int], Tensor]:
    """A grid over the whole picture where the patches cover its middle, `down` of its height and `across` of its width.

    Patches keep their size, up to rounding to whole cells on each side. Returns the larger grid and the cell (N,) of
    each patch, row by row.
    """
    rows, columns = grid
    above, left = (round((1 / part - 1) * count / 2) for part, count in ((down, rows), (across, columns)))
    whole = (rows + 2 * above, columns + 2 * left)
    places = (torch.arange(rows)[:, None] + above) * whole[1] + torch.arange(columns) + left
    return whole, places.flatten()
