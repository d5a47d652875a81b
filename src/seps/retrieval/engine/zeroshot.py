"""Search with a published dual encoder, nothing trained: pictures by its vectors, descriptions by the embedded model.

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
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.encoders import DUAL_PRESETS, Embedder, dual_encoder
from seps.encoders.dual import is_dual, presets_sentence, refuse_other_kind
from seps.encoders.weights import EncoderUnavailable, hub_folder
from seps.hub.download import HubError
from seps.hub.download import hub_folder as download
from seps.method.score import masked_mean
from seps.photos.store.rows import StoreSettings
from seps.plugins import load_plugins
from seps.retrieval.engine.codec import merge_words, pack, text_hash
from seps.retrieval.heads import SlimmingHead, TextFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import EMBEDDED, MINI, ModelError, from_pretrained

if TYPE_CHECKING:
    from seps.photos.store.rows import StoreSettings

TEMPERATURE = 0.18
"""Of D of the embedded model: the one with the least cross-entropy over dev is 0.19, over dev-llava 0.16."""
CENTRE = 0.38
"""D of sentences and descriptions of other pictures, on average: 0.34 on dev, 0.43 on dev-llava."""
SLOPE, OFFSET = 3.0, 0.9
"""D is about `SLOPE` times the cosine of both means plus `OFFSET` (correlation 0.99 on dev): it finds candidates."""
NATS = 25.0
"""`Head.score_range` of our own models is about this many nats: 28 for the embedded one on dev."""
CPU_BATCH = 4
"""Pictures a CPU encodes at a time."""


@dataclass
class Query:
    """Sentences for a dual encoder and for descriptions."""

    vectors: Tensor
    """(T, C) of length one."""
    words: TextFeatures | None
    """(T, M, E) for the descriptions; None where they take no part."""


class ZeroShotModel(nn.Module):
    """A dual encoder that searches (any `Embedder`), and the embedded model for descriptions.

    `image_size` is what its pictures are resized to, for decoding; `prepare` makes what it takes of one.
    """

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder: Embedder = embedder
        self.describer = from_pretrained(MINI)
        self.net = cast(SlimmingHead, self.describer.head).net
        self.eval()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.embedder.device

    @property
    def nat(self) -> float:
        """What the score changes by when a match becomes e times likelier."""
        return 1.0 / self.embedder.scale

    @property
    def languages(self) -> tuple[str, ...]:
        """Languages that it reads; empty: not known, or many."""
        return tuple(getattr(self.embedder, "languages", ()))

    def pieces(self, word: str) -> int:
        """How many tokens a word has in the embedded model, whose vocabulary is English."""
        return self.describer.pieces(word)

    def cut(self, text: str) -> tuple[int, int] | None:
        """Tokens of a text and how many the dual encoder reads, where these are fewer; else None."""
        return self.embedder.cut(text)

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width), square: the longest side that the model's processor resizes to."""
        return self.embedder.side, self.embedder.side

    def settings(self, root: str, name: str, **more: Any) -> StoreSettings:
        """The settings of a store of this model."""
        from seps.photos.store.rows import StoreSettings

        return StoreSettings(
            root=root,
            model=name,
            model_hash=self.embedder.digest(),
            width=self.embedder.width,
            grid=(1, 1),
            num_prefix_tokens=0,
            kind="vectors",
            words_width=self.describer.config.embed_size,
            words_hash=words_digest(self.describer),
            **more,
        )

    def images(self, prepared: Sequence[Any]) -> Tensor:
        """(B, C) of length one, from what `embedder.prepare` made, a few at a time on a CPU."""
        step = CPU_BATCH if self.device.type == "cpu" else max(1, len(prepared))
        parts = [self.embedder.image_vectors(prepared[i : i + step]) for i in range(0, len(prepared), step)]
        return torch.cat(parts)

    def query(self, texts: Sequence[str], *, described: bool = True) -> Query:
        """Sentences as both encoders see them."""
        batches = [texts[i : i + 128] for i in range(0, len(texts), 128)]
        vectors = torch.cat([self.embedder.text_vectors(batch) for batch in batches])
        return Query(vectors, self.describer.encode_texts(texts) if described else None)

    def search_vectors(self, query: Query) -> Tensor:
        """(T, C + E + 1): the products of a sentence's vector with the pictures' are about their scores."""
        if query.words is None:
            more = query.vectors.new_zeros(len(query.vectors), self.describer.config.embed_size + 1)
        else:
            means = F.normalize(masked_mean(query.words.words, query.words.mask), dim=-1)
            more = torch.cat([means, means.new_ones(len(means), 1)], dim=1)
        return torch.cat([query.vectors, more], dim=1)

    @torch.no_grad()
    def states(
        self, prepared: Sequence[Any], descriptions: Sequence[str | None], settings: StoreSettings
    ) -> list[dict[str, Any]]:
        """What a store keeps of each picture (`seps.photos.indexing.embedding.PreparedImage`)."""
        vectors = self.images(prepared)
        words, mask = self.describer.encode_descriptions(descriptions, batch_size=8)
        stored = self.index_vectors(vectors, words, mask).cpu().numpy().astype(np.float16)
        if settings.keep_words is not None:
            words, mask = merge_words(words, mask, settings.keep_words)
        return [
            {
                "vector": stored[i],
                "tokens": b"",
                "positions": None,
                "mean": None,
                "words": pack(words[i][mask[i]], settings.precision) if descriptions[i] is not None else None,
            }
            for i in range(len(prepared))
        ]

    def index_vectors(self, vectors: Tensor, words: Tensor, mask: Tensor) -> Tensor:
        """(B, C + E + 1): the vectors, then the description's part of the score as a product with `search_vectors`."""
        described = mask.any(dim=1, keepdim=True)
        means = F.normalize(masked_mean(F.normalize(words, dim=-1), mask), dim=-1)
        unit = self.nat / TEMPERATURE
        parts = torch.cat([unit * SLOPE * means, means.new_full((len(means), 1), unit * (OFFSET - CENTRE))], dim=1)
        return torch.cat([vectors, torch.where(described, parts, 0.0)], dim=1)

    @torch.no_grad()
    def scores(self, vectors: Tensor, words: Tensor, mask: Tensor, query: Query) -> Tensor:
        """(B, T) S of pictures, vectors (B, C), with their descriptions' words (B, L, E) and mask (B, L)."""
        cosines = vectors.float() @ query.vectors.T
        if query.words is None or not words.shape[1]:
            return cosines
        parts = [
            description_scores(self.net, words, mask, some[valid])
            for some, valid in zip(query.words.words, query.words.mask, strict=True)
        ]
        added = self.nat / TEMPERATURE * (torch.stack(parts, dim=1) - CENTRE)
        return torch.where(mask.any(dim=1, keepdim=True), cosines + added, cosines)


def description_scores(net: nn.Module, dense: Tensor, mask: Tensor, words: Tensor) -> Tensor:
    """(B,) D of one sentence, words (M, E), and descriptions (B, L, E); rows without a description mean nothing.

    As in `PatchSlimming.score_text`: Eq. 5 over the cosines of words, and the weighted cosine of both means.
    """
    model: Any = net
    unit = F.normalize(words.float(), dim=-1)
    texts = F.normalize(dense.float(), dim=-1)
    valid = mask | ~mask.any(dim=1, keepdim=True)
    aligned: Tensor = model.hrpa.align(torch.einsum("mc,blc->bml", unit, texts), None, valid)
    pooled: Tensor = model.pooled_score(masked_mean(texts, mask), words.float().mean(dim=0, keepdim=True))
    return aligned + pooled[:, 0]


def words_digest(describer: RetrievalModel) -> str:
    """Of their model's text side, and of the constants by which their part of a search vector is made."""
    made = [text_hash(describer), TEMPERATURE, CENTRE, SLOPE, OFFSET]
    return hashlib.sha256("\n".join(map(str, made)).encode()).hexdigest()[:32]


def nat_of(model: RetrievalModel | ZeroShotModel) -> float:
    """What a score of the model changes by when a match becomes e times likelier."""
    return model.nat if isinstance(model, ZeroShotModel) else model.head.score_range / NATS


def other_words(location: str) -> str:
    """The sentence for a store whose descriptions were encoded by another release's model."""
    return (
        f"The descriptions in the store {location} were encoded by the embedded model of another release of seps. Use "
        "that release, or index the folder into another store."
    )


def load_search_model(
    name: str | Path,
    *,
    device: torch.device | str = "cpu",
    local_files_only: bool = False,
    plugins: Iterable[str | os.PathLike[str]] = (),
) -> RetrievalModel | ZeroShotModel:
    """A model of ours as `from_pretrained` loads it, or a published dual encoder.

    A dual encoder is named by a preset (`seps.encoders.DUAL_PRESETS`), a hub id, or the folder it was saved to; a
    folder of that name comes first. `plugins` are run first, see `from_pretrained`.

    Raises ModelError and EncoderUnavailable (both ValueErrors), a sentence each.
    """
    load_plugins(plugins)
    text = str(name)
    local = Path(name).expanduser()
    if text in EMBEDDED or (local.is_dir() and not is_dual(local)):
        return from_pretrained(name, device=device)
    if not local.is_dir():
        hub = DUAL_PRESETS[text].hub if text in DUAL_PRESETS else text
        if hub.count("/") != 1 or hub.startswith((".", "/", "~")) or "\\" in hub:
            raise ModelError(
                f"There is no model {text!r}: give {' or '.join(map(repr, EMBEDDED))}, a preset, a model folder, a run "
                "of seps train, or a hub "
                f"id like organisation/name. Presets: {presets_sentence()}."
            )
        try:
            config = download(hub, ["config.json"], local_files_only=local_files_only)
        except HubError as error:
            raise (EncoderUnavailable if text in DUAL_PRESETS else ModelError)(str(error)) from error
        if not is_dual(config):
            return from_pretrained(name, device=device, local_files_only=local_files_only)
        refuse_other_kind(config)
        local = hub_folder(hub, weights=True, local_files_only=local_files_only)
    return ZeroShotModel(dual_encoder(local)).to(device)
