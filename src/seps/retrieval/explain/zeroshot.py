"""Explanations of a dual encoder's scores: what each patch adds to the cosine, and the words of the description.

A dual encoder gives a sentence one vector, so its words have no parts of their own: the explanation has one entry for
the sentence as a whole. What a patch adds is that of `seps.encoders.parts`, its part of the picture's vector times the
sentence's vector.

Shapes: N patches, L words of a description, M words of a sentence, C width of the dual encoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.encoders.parts import PatchParts
from seps.images.decoding import decode_image
from seps.images.shards import UnreadableImage, read_source
from seps.images.sources import ImageSource
from seps.method.attribution import description_shares
from seps.retrieval.engine.codec import unpack_padded
from seps.retrieval.engine.zeroshot import CENTRE, TEMPERATURE, ZeroShotModel
from seps.retrieval.explain.explanation import DescriptionPart, Explanation, WordPart, description_parts

if TYPE_CHECKING:
    from seps.photos.search.searcher import Searcher
    from seps.photos.store.rows import Columns


@dataclass(frozen=True)
class _Seen:
    """A picture as the model sees it: its parts, and where its patches are in the whole picture."""

    parts: PatchParts
    grid: tuple[int, int]
    """Cells over the whole picture."""
    places: Tensor
    """(N,) the cell of each patch."""


class ZeroShotExplainer:
    """Explains scores of one dual encoder. Raises ValueError for an embedder that does not split its vectors."""

    def __init__(self, model: ZeroShotModel) -> None:
        if not hasattr(model.embedder, "patch_parts"):
            raise ValueError(
                f"The embedder {type(model.embedder).__name__} does not split its vectors among patches: it has no "
                "patch_parts. Explanations need a model of seps, like 'mini', or a dual encoder of transformers."
            )
        self.model = model

    @torch.no_grad()
    def picture(self, data: bytes, source: ImageSource, caption: str, dense: str | None = None) -> Explanation:
        """Explain a picture by its bytes; `dense` is its own description, if any. Raises UnreadableImage."""
        found = self._see(data, source)
        words, mask = self.model.describer.encode_descriptions([dense if dense and dense.strip() else None])
        note = "" if bool(mask.any()) else "No description of the picture took part: its score is its pixels' alone."
        return self._explain(found, found.parts.vector, words[0, mask[0]], dense, caption, note)

    @torch.no_grad()
    def stored(self, searcher: Searcher, images: Columns, row: Mapping[str, Any], caption: str) -> Explanation:
        """Explain one image of a store, read with `vector` and `words`; `row` has its facts and its thumbnail.

        Its patches are those of its file. Where that is gone or another one now, they are those of the thumbnail, and
        what they lack is in `elsewhere`.
        """
        settings, note = searcher.store.settings, ""
        source = searcher.image_source(row)
        try:
            data = read_source(source)
            if hashlib.sha256(data).hexdigest() != row["sha256"]:
                raise UnreadableImage(source, "it was written again after it was indexed")
            found = self._see(data, source)
        except UnreadableImage as error:
            why = error.why.rstrip(".")
            note = f"The file cannot be used ({why}): what patches add is that of the store's thumbnail."
            found = self._see(bytes(row["thumbnail"]), source)
        vector = torch.from_numpy(images.vectors()[0, : settings.width]).to(self.model.device)
        words, mask = unpack_padded(images.values("words"), settings.words_width or settings.width)
        described = words[0, mask[0]].to(self.model.device)
        if not len(described):
            note = note or "The store holds no description of this picture: its score is that of its pixels alone."
        return self._explain(found, vector, described, row["dense"], caption, note)

    def _see(self, data: bytes, source: ImageSource) -> _Seen:
        embedder: Any = self.model.embedder
        size, prepared = decode_image(
            data, source, self.model.image_size, lambda image: (image.size, embedder.prepare(image))
        )
        parts: PatchParts = embedder.patch_parts(prepared)
        down, across = embedder.seen(*size) if hasattr(embedder, "seen") else (1.0, 1.0)
        return _Seen(parts, *cells_of(parts.grid, down, across))

    def _explain(
        self, found: _Seen, vector: Tensor, described: Tensor, description: str | None, caption: str, note: str
    ) -> Explanation:
        if not caption.strip():
            raise ValueError("The caption is blank. Write the sentence whose score to explain.")
        query = self.model.query([caption.strip()], described=bool(len(described)))
        text = query.vectors[0]
        added, cosine = found.parts.patches @ text, float(vector @ text)
        cells = torch.zeros(found.grid[0] * found.grid[1])
        cells[found.places] = added.float().cpu()
        seen = torch.zeros(len(cells), dtype=torch.bool)
        seen[found.places] = True
        terms, rest, parts = {"pixels": cosine}, 0.0, list[DescriptionPart]()
        if query.words is not None:
            parts, rest = self._description(query.words.words[0, query.words.mask[0]], described, description or "")
            terms["description"] = sum(part.contribution for part in parts) + rest
        score = sum(terms.values())
        return Explanation(
            caption=caption.strip(),
            score=score,
            grid=found.grid,
            words=[WordPart(caption.strip(), False, score - rest, cells.tolist())],
            patches=cells.tolist(),
            kept=seen.tolist(),
            stored=seen.tolist(),
            groups=[],
            description=parts,
            elsewhere=cosine - float(added.sum()),
            rest=rest,
            terms=terms,
            note=note,
            whole_sentence=True,
        )

    def _description(self, words: Tensor, described: Tensor, text: str) -> tuple[list[DescriptionPart], float]:
        """What each word of a description (L, E) adds, and what belongs to none: the centre and the MLP of Eq. 5."""
        words = words.float()
        found = description_shares(
            self.model.net,
            F.normalize(words, dim=-1),
            words,
            words.mean(dim=0, keepdim=True),
            F.normalize(described.float(), dim=-1),
        )
        unit = self.model.nat / TEMPERATURE
        values = unit * (found.aligned + found.pooled).sum(dim=0)
        return description_parts(self.model.describer, values, text), unit * (found.rest - CENTRE)


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
