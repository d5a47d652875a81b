"""`VectorEngine`: published dual encoders, nothing trained; descriptions are scored by the embedded model.

The score of a picture v for a sentence q is

    S(q, v) = cos(q, v) + (D(q, v) - CENTRE) / (TEMPERATURE * scale)        the second term where v has a description

`cos` is the dual encoder's own, and S is nothing else for a picture without description. D is the embedded model's
score of a sentence and a description. Either part, divided by its temperature (1 / `scale` of the dual encoder, which
it learned; `TEMPERATURE` of D), is the logarithm of how much likelier a match is, so they are added as such: no weight
is chosen on labels of the dual encoder. `CENTRE` is D of a description that has nothing to do with the sentence.

Shapes: B pictures, T sentences, L words of a description, M words of a sentence, C width of the dual encoder, E width
of the embedded model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.encoders import Embedder
from seps.encoders.parts import PatchParts
from seps.images.decoding import PixelMaker, decode_image
from seps.method.network import PatchSlimming
from seps.method.score import masked_mean
from seps.retrieval.embedded import MINI
from seps.retrieval.engine.engine import FIT, Digests, Photo, Progress, Traits, Unread
from seps.retrieval.engine.layout import Kept, VectorLayout
from seps.retrieval.engine.pictures import VectorPictures
from seps.retrieval.engine.queries import Array, Queries
from seps.retrieval.explain.explanation import Explanation
from seps.retrieval.explain.vectors import SeenPatches, cells_of, explain_vector, explain_words
from seps.retrieval.languages import reads
from seps.retrieval.merging import merge_words
from seps.retrieval.model import text_hash
from seps.retrieval.pretrained import from_pretrained

KIND = "vectors"
TEMPERATURE = 0.18
"""Of D of the embedded model: the one with the least cross-entropy over dev is 0.19, over dev-llava 0.16."""
CENTRE = 0.38
"""D of sentences and descriptions of other pictures, on average: 0.34 on dev, 0.43 on dev-llava."""
SLOPE, OFFSET = 3.0, 0.9
"""D is about `SLOPE` times the cosine of both means plus `OFFSET` (correlation 0.99 on dev): it finds candidates."""
CPU_BATCH = 4
"""Pictures a CPU encodes at a time."""
TEXTS = 128
"""Sentences that are encoded at a time."""


class VectorEngine(nn.Module):
    """A dual encoder (any `Embedder`), and the embedded model for descriptions."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder: Embedder = embedder
        self.describer = from_pretrained(MINI)
        self.net = cast(PatchSlimming, self.describer.head.network)
        self._digests: Digests | None = None
        self.eval()

    @property
    def device(self) -> torch.device:
        """See `Engine`."""
        return self.embedder.device

    @property
    def decoding(self) -> PixelMaker:
        """See `Engine`."""
        return self.embedder.prepare

    @property
    def traits(self) -> Traits:
        """See `Engine`."""
        return Traits(
            kind=KIND,
            reads_pixels=True,
            reads_descriptions=True,
            selects_patches=False,
            explains=self._unexplained,
            pairs_queries=(
                "Protocol 'published' pairs captions with descriptions inside a slimming head; a dual encoder has "
                "none. Use protocol 'none' or 'image'."
            ),
            guides=(),
            languages=tuple(getattr(self.embedder, "languages", ())),
            width=self.embedder.width,
            score_unit=self._unit,
            score_range=1.0,
            vector_slope=1.0,
            word_fit=FIT,
            background_weight=None,
            short_background=None,
            sizes=(VectorLayout.size,),
            default_size=VectorLayout.size,
            image_size=(self.embedder.side, self.embedder.side),
            cpu_batch=CPU_BATCH,
            settings=repr(self.describer.config),
        )

    def digests(self) -> Digests:
        """See `Engine`. That of words has the constants by which their part of a search vector is made."""
        if self._digests is None:
            made = [text_hash(self.describer), TEMPERATURE, CENTRE, SLOPE, OFFSET]
            words = hashlib.sha256("\n".join(map(str, made)).encode()).hexdigest()[:32]
            self._digests = Digests(self.embedder.digest(), words)
        return self._digests

    @torch.no_grad()
    def encode_pixels(self, decoded: Sequence[Any]) -> Tensor:
        """See `Engine`: what `Embedder.prepare` made -> (B, C) of length one, a few at a time on a CPU."""
        step = CPU_BATCH if self.device.type == "cpu" else max(1, len(decoded))
        parts = [self.embedder.image_vectors(decoded[i : i + step]) for i in range(0, len(decoded), step)]
        return torch.cat(parts)

    @torch.no_grad()
    def pictures(
        self,
        encoded: Tensor,
        descriptions: Sequence[str | None] | None = None,
        *,
        guides: Mapping[str, Tensor] | None = None,
        keep_words: int | None = None,
        batch_size: int = TEXTS,
        progress: Progress | None = None,
    ) -> VectorPictures:
        """See `Engine`."""
        if descriptions is None:
            none = encoded.new_zeros(len(encoded), 0, self.describer.config.embed_size)
            return VectorPictures(encoded, none, none[..., 0].bool())
        words, mask = self.describer.encode_descriptions(descriptions, batch_size=batch_size)
        if keep_words is not None:
            words, mask = merge_words(words, mask, keep_words)
        return VectorPictures(encoded, words, mask)

    def encode_texts(
        self, texts: Sequence[str], *, as_sentences: bool = False, progress: Progress | None = None
    ) -> Queries:
        """See `Engine`."""
        batches = [texts[i : i + TEXTS] for i in range(0, len(texts), TEXTS)]
        vectors = torch.cat([self.embedder.text_vectors(batch) for batch in batches])
        # They meet words of descriptions alone, which are read so.
        return Queries(self.describer.encode_texts(texts, as_sentences=True), vectors)

    @torch.no_grad()
    def vectors(self, encoded: VectorPictures | Queries) -> Tensor:
        """See `Engine`: (B or T, C + E + 1), of pictures their vector, then the description's part as a product."""
        if isinstance(encoded, VectorPictures):
            if not encoded.words.shape[1]:
                return torch.cat([encoded.vectors, encoded.vectors.new_zeros(len(encoded), self._more)], dim=1)
            described = encoded.mask.any(dim=1, keepdim=True)
            means = F.normalize(masked_mean(F.normalize(encoded.words, dim=-1), encoded.mask), dim=-1)
            unit = self._unit / TEMPERATURE
            parts = torch.cat([unit * SLOPE * means, means.new_full((len(means), 1), unit * (OFFSET - CENTRE))], dim=1)
            return torch.cat([encoded.vectors, torch.where(described, parts, 0.0)], dim=1)
        vectors = cast(Tensor, encoded.vectors)
        if encoded.words is None:
            more = vectors.new_zeros(len(vectors), self._more)
        else:
            means = F.normalize(masked_mean(encoded.words.words, encoded.words.mask), dim=-1)
            more = torch.cat([means, means.new_ones(len(means), 1)], dim=1)
        return torch.cat([vectors, more], dim=1)

    @torch.no_grad()
    def score(
        self,
        pictures: VectorPictures,
        queries: Queries,
        *,
        chosen: Array | None = None,
        paired: Sequence[str] | None = None,
        memory: int | None = None,
    ) -> Tensor:
        """See `Engine`."""
        if chosen is not None:
            scores = torch.zeros(*chosen.shape, device=self.device)
            for i, rows in enumerate(torch.from_numpy(chosen).to(self.device)):
                scores[i] = self.score(pictures.rows(i, i + 1), queries.rows(rows))[0]
            return scores
        cosines = pictures.vectors.float() @ cast(Tensor, queries.vectors).T
        words, mask = pictures.words, pictures.mask
        if queries.words is None or not words.shape[1]:
            return cosines
        parts = [
            self.description_scores(words, mask, some[valid])
            for some, valid in zip(queries.words.words, queries.words.mask, strict=True)
        ]
        added = self._unit / TEMPERATURE * (torch.stack(parts, dim=1) - CENTRE)
        return torch.where(mask.any(dim=1, keepdim=True), cosines + added, cosines)

    def description_scores(self, dense: Tensor, mask: Tensor, words: Tensor) -> Tensor:
        """(B,) D of one sentence, words (M, E), and descriptions (B, L, E); rows without one mean nothing.

        As in `PatchSlimming.score_description`: Eq. 5 over the cosines of words, and the weighted cosine of both means.
        """
        unit = F.normalize(words.float(), dim=-1)
        texts = F.normalize(dense.float(), dim=-1)
        valid = mask | ~mask.any(dim=1, keepdim=True)
        aligned: Tensor = self.net.hrpa.align(torch.einsum("mc,blc->bml", unit, texts), None, valid)
        pooled: Tensor = self.net.pooled_score(masked_mean(texts, mask), words.float().mean(dim=0, keepdim=True))
        return aligned + pooled[:, 0]

    @torch.no_grad()
    def explain(
        self,
        caption: str,
        description: str | None,
        photo: Callable[[], Photo],
        *,
        stored: VectorPictures | None = None,
        guides: Mapping[str, Tensor] | None = None,
    ) -> Explanation:
        """See `Engine`. The patches are those of the file, or of what `photo` gives in its place."""
        if self._unexplained:
            raise ValueError(self._unexplained)
        if not caption.strip():
            raise ValueError("The caption is blank. Write the sentence whose score to explain.")
        file = photo()
        embedder: Any = self.embedder
        size, prepared = decode_image(
            file.data, file.source, self.traits.image_size, lambda image: (image.size, embedder.prepare(image))
        )
        parts: PatchParts = embedder.patch_parts(prepared)
        down, across = embedder.seen(*size) if hasattr(embedder, "seen") else (1.0, 1.0)
        missing = "The store holds no description of this picture: its score is that of its pixels alone."
        if stored is None:
            missing = "No description of the picture took part: its score is its pixels' alone."
            given = description if description and description.strip() else None
            stored = self.pictures(parts.vector[None], [given])
        words = stored.words[0, stored.mask[0]]
        query = self.encode_texts([caption.strip()])
        shares = None
        if len(words):
            sentence = query.text_features
            shares = explain_words(
                self.describer,
                self.net,
                sentence.words[0, sentence.mask[0]],
                words,
                description or "",
                self._unit / TEMPERATURE,
                CENTRE,
            )
        seen = SeenPatches(parts.patches, *cells_of(parts.grid, down, across))
        explanation = explain_vector(seen, stored.vectors[0], cast(Tensor, query.vectors)[0], caption.strip(), shares)
        explanation.note = file.note or (missing if not len(words) else "")
        return explanation

    def layout(self, size: str) -> VectorLayout:
        """See `Engine`."""
        if size != VectorLayout.size:
            raise ValueError(
                f"The size is {size!r}, but of this model one vector per picture is kept: leave it out, or give "
                f"{VectorLayout.size!r}."
            )
        return VectorLayout(self.embedder.width, self.describer.config.embed_size)

    def keep(self, pictures: VectorPictures, layout: VectorLayout) -> Kept:
        """See `Engine`."""
        return Kept(self.vectors(pictures).cpu(), words=pictures.words.cpu(), mask=pictures.mask.cpu())

    def unread(self, text: str) -> Unread:
        """See `Engine`. The embedded model, whose vocabulary is English, counts the pieces of words."""
        return Unread(self.embedder.cut(text), not reads(self.traits.languages, text, self.describer.pieces))

    @property
    def _more(self) -> int:
        """Values of a search vector beside those of a picture."""
        return self.describer.config.embed_size + 1

    @property
    def _unit(self) -> float:
        return 1.0 / self.embedder.scale

    @property
    def _unexplained(self) -> str:
        if hasattr(self.embedder, "patch_parts"):
            return ""
        return (
            f"The embedder {type(self.embedder).__name__} does not split its vectors among patches: it has no "
            "patch_parts. Explanations need a model of seps, like 'mini', or a dual encoder of transformers."
        )
