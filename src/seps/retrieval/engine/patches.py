"""`PatchEngine`: our models, which score the patches of a picture and the words of its description."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.encoders import TextEncoder, VisionEncoder
from seps.images.decoding import Mode, decode_image
from seps.method.checks import evaluating, values_unchecked
from seps.method.encoded import EncodedImages, Texts
from seps.method.network import PatchSlimming
from seps.method.select import num_kept
from seps.retrieval.config import DEFAULT_SIZE, SIZES, VECTOR
from seps.retrieval.engine.engine import (
    BACKGROUND_STRENGTH,
    FIT,
    NATS,
    PATCHES,
    SHORT_BACKGROUND,
    SHORT_FIT,
    UNDESCRIBED,
    Digests,
    Photo,
    Progress,
    Traits,
    Unread,
)
from seps.retrieval.engine.keeping import image_vectors, kept_mean, kept_patches, vector_weight
from seps.retrieval.engine.layout import Kept, PatchLayout
from seps.retrieval.engine.mean import ALIGNED_SLOPE, MeanLayout, MeanPictures
from seps.retrieval.engine.paired import score_paired
from seps.retrieval.engine.pictures import PatchPictures
from seps.retrieval.engine.queries import Array, Queries, as_array
from seps.retrieval.explain.explanation import Explanation
from seps.retrieval.explain.patches import OneVector, explain_patches
from seps.retrieval.heads import ImageFeatures, TextFeatures
from seps.retrieval.languages import reads
from seps.retrieval.merging import merge_words
from seps.retrieval.model import (
    AbsentVision,
    RetrievalModel,
    TextProgress,
    model_hash,
    set_grid,
    short_hash,
    text_hash,
    with_grid,
)
from seps.scoring import score_matrix
from seps.scoring.blocks import scoring_memory
from seps.scoring.own_texts import can_score, images_at_once, score_own_texts
from seps.scoring.terms import other_forward

SCORING_MEMORY = 256 * 2**20
UNEXPLAINED = "The model's head is {!r}, which selects no patches; explanations need 'slimming' or 'maxsim'."
UNPAIRED = (
    "Protocol 'published' pairs captions with descriptions inside a slimming head with descriptions; head "
    "{!r} takes none. Use protocol 'none' or 'image'."
)
Vision = Callable[[Tensor], Tensor]
"""A vision encoder: pixels (B, 3, H, W) -> tokens (B, P + N, width)."""


class PatchScorer:
    """Exact scores of pictures that are kept in this way; None: as they come from the encoder."""

    def __init__(self, model: RetrievalModel, layout: PatchLayout | None = None) -> None:
        self.model, self.layout = model, layout
        self.net = model.head.network
        """Of a slimming head, for as many patches as are kept."""
        if self.net is None or layout is None:
            return
        if layout.patches is not None or layout.means:
            # Of all patches of the store's pictures, which may be others than the model's are now.
            whole = None if layout.means else layout.grid[0] * layout.grid[1]
            self.net = fewer_patches(self.net, layout.stored, whole)
        elif layout.stored != self.net.config.num_patches:
            # A store keeps the grid it was made with; the model may have another one now.
            self.net = copy.copy(self.net)
            self.net.config = replace(self.net.config, check_num_patches=False)

    def side(self, images: ImageFeatures) -> EncodedImages:
        """What no caption changes, for a slimming head. The mean patch is that of all patches."""
        if self.net is None:
            raise ValueError(f"head={self.model.config.head!r} has no patch selection; use a model with 'slimming'.")
        with values_unchecked(), evaluating(self.net):  # checking values would take a quarter of the time
            side = self.net.encode_images(
                images.tokens, dense=images.dense, dense_lengths=images.dense_lengths, guides=images.guides
            )
        return side if images.mean is None else replace(side, pooled=F.normalize(images.mean, dim=-1))

    @torch.no_grad()
    def score(self, images: ImageFeatures, texts: TextFeatures, memory: int | None = None) -> Tensor:
        """(B, T) similarities; the lowest of all for images that have nothing of what the head scores."""
        if self.layout is None:
            return self.model.score(images, texts, memory=memory)
        if not self.model.head.uses_pixels and images.dense is None:
            return texts.words.new_full((len(images.tokens), len(texts.words)), -self.model.head.score_range)
        memory = scoring_memory(images.tokens.device, SCORING_MEMORY)
        if self.net is None:
            return self.model.score(images, texts, memory=memory)
        if len(texts.words) == 1 and other_forward(self.net) is None:
            # `score_matrix` prepares for many captions; for a single one the network itself is several times faster.
            length = int(texts.mask[0].sum())
            with evaluating(self.net):
                return self.net.score(self.side(images), Texts.of(texts.words[:, :length])).similarity
        scores = score_matrix(self.net, self.side(images), texts.words, texts.lengths, memory=memory)
        return cast(Tensor, scores)  # not the best alone

    @torch.no_grad()
    def score_chosen(self, pictures: PatchPictures, queries: Queries, chosen: Tensor, memory: int | None) -> Tensor:
        """(B, K) exact scores of each picture with `chosen` (B, K) queries of its own.

        Some pictures are scored at once where the network is a known one.
        """
        scores_BK, left = torch.zeros_like(chosen, dtype=torch.float32), list(range(len(chosen)))
        if self.net is not None and can_score(self.net):
            left = []
            step = images_at_once(chosen.device)
            for start in range(0, len(chosen), step):
                some = chosen[start : start + step]
                side = self.side(pictures.rows(start, start + len(some)).features)
                scores, unsafe = score_own_texts(self.net, side, queries.pool, some)
                scores_BK[start : start + step] = scores
                left += [start + i for i, flag in enumerate(unsafe.tolist()) if flag]
        for i in left:
            words = cast(TextFeatures, queries.rows(chosen[i]).words)
            scores_BK[i] = self.score(pictures.rows(i, i + 1).features, words, memory)[0]
        return scores_BK


def fewer_patches(net: PatchSlimming, stored: int, whole: int | None = None) -> PatchSlimming:
    """The network for images with only `stored` patches: it selects as many of them as it would of all, or `whole`."""
    config = net.config
    kept = min(stored, num_kept(whole or config.num_patches, config.sparse_ratio))
    ratio = kept / stored
    slim = copy.deepcopy(net)
    # The number of merged patches belongs to the weights and stays as it is.
    aggregation = min(1.0, (config.num_merged + 0.5) / kept)
    slim.config = replace(config, num_patches=stored, sparse_ratio=ratio, aggr_ratio=aggregation)
    slim.sparse_net_cap.sparse_ratio = ratio
    if len(config.branches) > 1:
        slim.sparse_net_long.sparse_ratio = ratio
    return slim


class PatchEngine:
    """A model of ours. `read_vision` reads the vision encoder of one that was read for sentences, with these digests,
    and `read_texts` its text encoder, so that it can be let go.

    The model is in eval mode from now on.
    """

    def __init__(
        self,
        model: RetrievalModel,
        *,
        digests: Digests | None = None,
        read_vision: Callable[[], VisionEncoder] | None = None,
        read_texts: Callable[[], TextEncoder] | None = None,
    ) -> None:
        self.model = model.eval()
        self.vision: Vision | None = None
        """The vision encoder in another form, in the place of the model's own."""
        self._digests, self._read_vision, self._read_texts = digests, read_vision, read_texts
        self._texts_in_use = 0
        self._loading = threading.Lock()
        self._scorers: dict[PatchLayout | None, PatchScorer] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has a lock, scorers and a form of the vision encoder of its own."""
        self.load_pixels()
        with self._texts() as model:
            return {"model": model, "_digests": self._digests}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], digests=state["_digests"])  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        """See `Engine`."""
        return self.model.device

    @property
    def decoding(self) -> Mode:
        """See `Engine`."""
        return "model"

    @functools.cached_property
    def traits(self) -> Traits:
        """See `Engine`."""
        model, head, net = self.model, self.model.head, self.model.head.network
        selects = net is not None or head.selects_patches
        fast = net is not None and other_forward(net) is None
        return Traits(
            kind=PATCHES,
            reads_pixels=head.uses_pixels,
            reads_descriptions=head.uses_description,
            selects_patches=selects,
            explains="" if selects else UNEXPLAINED.format(model.config.head),
            pairs_queries="" if net is not None and head.uses_description else UNPAIRED.format(model.config.head),
            guides=head.guides,
            languages=model.languages,
            width=model.config.embed_size,
            score_unit=head.score_range / NATS,
            score_range=head.score_range,
            vector_slope=1.0 if net is None else 2 * net.config.pooled or 1.0,
            word_fit=SHORT_FIT if model.config.short_queries else FIT,
            background_weight=BACKGROUND_STRENGTH,
            short_background=SHORT_BACKGROUND if model.config.short_queries else None,
            sizes=(VECTOR, *SIZES),
            default_size=DEFAULT_SIZE if fast else "full",
            image_size=model.image_size,
            cpu_batch=2,
            settings=repr(model.config),
        )

    def digests(self) -> Digests:
        """See `Engine`."""
        if self._digests is None:
            self._digests = Digests(model_hash(self.model), texts=text_hash(self.model), short=short_hash(self.model))
        return self._digests

    def load_pixels(self) -> None:
        """Read the vision encoder where it was not needed yet. Raises ValueError for weights of another model."""
        with self._loading:
            absent = self.model.vision
            if self._read_vision is not None and isinstance(absent, AbsentVision):
                self.model.vision = self._read_vision().to(self.device).eval()
                if model_hash(self.model) != self.digests().pictures:
                    self.model.vision = absent
                    raise ValueError("The model's files have changed since its sentence side was read; start again.")

    def drop_pixels(self) -> None:
        """Let go the vision encoder where `load_pixels` can read it again."""
        with self._loading:
            if self._read_vision is not None and not isinstance(self.model.vision, AbsentVision):
                self.digests()
                self.model.vision = AbsentVision.of(self.model.vision)

    def drop_texts(self) -> None:
        """Let go the weights of the text encoder where they can be read again and nobody uses them now."""
        with self._loading:
            if self._read_texts is not None and not self._texts_in_use:
                self.digests()
                for module in self.model.text.modules():
                    for name, value in module.named_parameters(recurse=False):
                        setattr(module, name, nn.Parameter(value.to("meta"), requires_grad=False))

    @contextlib.contextmanager
    def _texts(self) -> Iterator[RetrievalModel]:
        """The model with its text encoder, which is not let go within."""
        with self._loading:
            text = self.model.text
            if self._read_texts is not None and any(value.is_meta for value in text.parameters()):
                text.load_state_dict(self._read_texts().to(self.device).state_dict(), assign=True)
            self._texts_in_use += 1
        try:
            yield self.model
        finally:
            with self._loading:
                self._texts_in_use -= 1

    def to(self, device: torch.device | str) -> PatchEngine:
        """The engine, on another device from now on."""
        self.model.to(device)
        return self

    def with_grid(self, grid: tuple[int, int]) -> PatchEngine:
        """The engine for pictures of `grid` patches."""
        with self._texts() as own:
            model, read = with_grid(own, grid), self._read_vision
        if model is self.model:
            return self
        read_vision = None if read is None else lambda: set_grid(read(), grid)
        return PatchEngine(model, digests=self._digests, read_vision=read_vision, read_texts=self._read_texts)

    @torch.no_grad()
    def encode_pixels(self, decoded: Sequence[Tensor]) -> Tensor:
        """See `Engine`: pixels (3, H, W) uint8 each -> tokens (B, P + N, C)."""
        self.load_pixels()
        pixels = decoded if isinstance(decoded, Tensor) else torch.stack(list(decoded))
        return self.model.encode_pixels(pixels.to(self.device).float() / 255, self.vision)

    @torch.no_grad()
    def pictures(
        self,
        encoded: Tensor,
        descriptions: Sequence[str | None] | None = None,
        *,
        guides: Mapping[str, Tensor] | None = None,
        keep_words: int | None = None,
        batch_size: int = 128,
        progress: Progress | None = None,
    ) -> PatchPictures:
        """See `Engine`."""
        features = ImageFeatures(encoded, guides=guides)
        if descriptions is not None and self.model.head.uses_description:
            with self._texts() as model:
                features.dense, features.dense_mask = model.encode_descriptions(
                    descriptions, batch_size=batch_size, progress=_stage(progress, "descriptions")
                )
            if keep_words is not None:
                features.dense, features.dense_mask = merge_words(features.dense, features.dense_mask, keep_words)
        return PatchPictures(features, self.model.vision.num_prefix_tokens)

    def encode_texts(
        self, texts: Sequence[str], *, as_sentences: bool = False, progress: Progress | None = None
    ) -> Queries:
        """See `Engine`."""
        with self._texts() as model:
            return Queries(model.encode_texts(texts, as_sentences=as_sentences, progress=_stage(progress, "captions")))

    @torch.no_grad()
    def vectors(self, encoded: PatchPictures | MeanPictures | Queries) -> Tensor:
        """See `Engine`."""
        if isinstance(encoded, PatchPictures):
            return image_vectors(self.model, encoded.features)
        if isinstance(encoded, MeanPictures):
            return torch.from_numpy(encoded.vectors)
        return encoded.text_features.mean_word

    @torch.no_grad()
    def score(
        self,
        pictures: PatchPictures | MeanPictures,
        queries: Queries,
        *,
        chosen: Array | None = None,
        paired: Sequence[str] | None = None,
        memory: int | None = None,
    ) -> Tensor:
        """See `Engine`."""
        if isinstance(pictures, MeanPictures):
            vectors = as_array(self.vectors(queries))
            return torch.from_numpy(pictures.score(vectors, chosen))
        if paired is not None:
            with self._texts() as model:
                return score_paired(model, pictures.features, queries.text_features, paired, memory)
        scorer = self.scorer(pictures.layout)
        if chosen is not None:
            places = torch.from_numpy(chosen).to(self.device)
            return scorer.score_chosen(pictures, queries, places, memory)
        return scorer.score(pictures.features, queries.text_features, memory)

    def scorer(self, layout: PatchLayout | None) -> PatchScorer:
        """The scorer of pictures that are kept in this way."""
        with self._loading:
            if layout not in self._scorers:
                self._scorers[layout] = PatchScorer(self.model, layout)
            return self._scorers[layout]

    @torch.no_grad()
    def explain(
        self,
        caption: str,
        description: str | None,
        photo: Callable[[], Photo],
        *,
        stored: PatchPictures | MeanPictures | None = None,
        guides: Mapping[str, Tensor] | None = None,
    ) -> Explanation:
        """See `Engine`."""
        if self.traits.explains:
            raise ValueError(self.traits.explains)
        layout = None if stored is None else stored.layout
        if isinstance(stored, PatchPictures) and not getattr(layout, "means", False):
            scorer = self.scorer(stored.layout)
            side = None if scorer.net is None else scorer.side(stored.features)
            with self._texts() as model:
                explanation = explain_patches(
                    model,
                    stored.features,
                    caption,
                    description,
                    side=side,
                    net=scorer.net,
                    grid=None if layout is None else layout.grid,
                    positions=stored.positions,
                )
            if description is None and self.model.head.uses_description:
                explanation.note = UNDESCRIBED
            return explanation
        file = photo()
        pixels = decode_image(file.data, file.source, self.model.image_size)
        given = description if description is not None and description.strip() else None
        own = {name: vector[None].to(self.device) for name, vector in (guides or {}).items()} or None
        features = self.pictures(self.encode_pixels([pixels]), None if given is None else [given], guides=own)
        one = None
        if isinstance(stored, MeanPictures):
            (pixels,), (vector,) = torch.from_numpy(stored.pixels), torch.from_numpy(stored.vectors)
            weight = vector_weight(self.model) if stored.described[0] else 0.0
            one = OneVector(vector, pixels, weight, stored.layout.slope)
        with self._texts() as model:
            explanation = explain_patches(model, features.features, caption, description, mean=one)
        if isinstance(stored, PatchPictures):  # means, whose score is another one than that of the patches
            score = float(self.score(stored, self.encode_texts([caption.strip()])))
            rest = explanation.rest + score - explanation.score
            explanation = replace(explanation, score=score, rest=rest)
        if stored is not None and file.note:
            explanation.note = file.note
        elif given is None and self.model.head.uses_description:
            explanation.note = (
                "No description of the picture took part: a store that holds one gives the picture another score."
                if stored is None
                else UNDESCRIBED
            )
        return explanation

    def layout(self, size: str) -> PatchLayout | MeanLayout:
        """See `Engine`."""
        vision, width, head = self.model.vision, self.model.config.embed_size, self.model.head
        grid = vision.grid_for(*self.model.image_size)
        if size == VECTOR:
            slope = head.score_range if head.network is None else head.network.config.pooled + ALIGNED_SLOPE
            return MeanLayout(width, grid, slope)
        return PatchLayout.of(size, width, grid, vision.num_prefix_tokens)

    def keep(self, pictures: PatchPictures, layout: PatchLayout | MeanLayout) -> Kept:
        """See `Engine`."""
        if isinstance(layout, MeanLayout):
            return kept_mean(self.model, pictures.features)
        return kept_patches(self.model, pictures.features, layout)

    def unread(self, text: str) -> Unread:
        """See `Engine`."""
        return Unread(self.model.cut(text), not reads(self.model.languages, text, self.model.pieces))


def _stage(progress: Progress | None, name: str) -> TextProgress | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
