"""Training the text side for what people type, with the pictures' vectors as they are.

Only the text encoder (its embeddings stay) and its projection learn. A step has three parts:

- typed queries: each against all training pictures at once, by the vector that finds candidates in a store (mean word
  and mean patch), with every picture right that its captions say is (`several_infonce`);
- captions, by InfoNCE of their rows against all training pictures (`typed.captions`);
- captions and sentences of descriptions keep the words that they had at the start (`typed.keep`). So sentences, and
  the descriptions of a store, score as they did.

With `typed.short` a projection of short queries learns instead, from that of sentences on and by the first part alone;
`typed.keep` then holds their words to those of the other projection. Sentences and descriptions are read as before, to
the last bit.

Shapes: Q queries, T captions, B training pictures, C width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from seps.encoders.freezing import freeze
from seps.images.sources import DataError
from seps.method.losses import several_infonce
from seps.metrics import recall
from seps.retrieval.config import RunConfig
from seps.retrieval.data import ImageRecord, RetrievalDataset, mixed_seed
from seps.retrieval.data.typed import TypedQueries, load_queries, queries_of_captions, sentences_of
from seps.retrieval.heads import TextFeatures
from seps.retrieval.languages import is_short
from seps.retrieval.model import RetrievalModel
from seps.training.task import Figures, ParameterGroup

FROM_CAPTIONS = "captions"
"""Value of `typed.queries` for queries made by the rules of `seps.retrieval.data.typed`."""
REMEMBERED = 20_000
"""Texts whose features are kept in memory: about 10 KB each at width 384."""
FEWEST_ON_DEV = 10
"""Right pictures on dev of the queries whose precision is measured: so many are looked at."""


@dataclass
class TypedBatch:
    """One step."""

    ids: Tensor
    mask: Tensor
    """(Q, M) tokens of the queries."""
    right: Tensor
    unknown: Tensor
    """(Q, B) bool."""
    caption_ids: Tensor
    caption_mask: Tensor
    """(T, M) tokens of captions and sentences of descriptions."""
    images: Tensor
    """(T,) picture of each."""


class TextSide(nn.Module):
    """The model of a run; of it the text side alone has gradients, without its first `frozen` blocks (-1: all).

    `short`: only the projection of short queries has.
    """

    def __init__(self, model: RetrievalModel, frozen: int | None = None, short: bool = False) -> None:
        super().__init__()
        self.model = model
        model.requires_grad_(False)
        if short:
            model.project_short.requires_grad_(True)
            return
        for name, parameter in model.text.named_parameters():
            parameter.requires_grad_("embedding" not in name)
        if frozen is not None:
            freeze(model.text, None if frozen == -1 else frozen)
        model.project_words.requires_grad_(True)


class TypedTask:
    """Implements `seps.training.Task`; `vectors` and `dev_vectors` are those of `picture_vectors`.

    Raises DataError where no typed query names a training picture, and ValueError for more than one process.
    """

    def __init__(
        self,
        model: RetrievalModel,
        config: RunConfig,
        train: RetrievalDataset,
        dev: Sequence[RetrievalDataset],
        *,
        vectors: Tensor,
        dev_vectors: Sequence[Tensor],
    ) -> None:
        self.model = TextSide(model, config.freeze_text, config.typed.short)
        self.config, self.data, self.dev = config, train, dev
        self.queries = typed_queries(config, train)
        self.dev_queries = [_on_dev(config, part) for part in dev]
        self.vectors, self.dev_vectors = vectors, dev_vectors
        # No module of the run: its text side is that of `start`, which no checkpoint needs; the rest is shared.
        shared = (model.vision, model.project_patches, model.head)
        self.first = model if config.typed.short else copy.deepcopy(model, {id(part): part for part in shared}).eval()
        self.seen = SeenTexts(model)
        # One query in two is a single word, as people type; a phrase is drawn from many more.
        words = torch.tensor([len(texts[0].split()) for texts in self.queries.texts])
        self.chances = torch.where(words == 1, 1.0, config.typed.phrases)
        said = [(image, text) for image, record in enumerate(train.records) for text in _texts(record)]
        self.owners = torch.tensor([image for image, _ in said])
        self.texts = [text for _, text in said]

    @property
    def begins_trained(self) -> bool:
        """The model is trained: it may stay the best."""
        return bool(self.dev)

    def steps_per_epoch(self, world: int) -> int:
        """As many steps as show each typed query once, on the mean. Raises ValueError for several processes."""
        if world > 1:
            raise ValueError("typed.queries trains in one process: start it without torchrun.")
        return -(-len(self.queries) // self.config.typed.batch_size)

    def parameter_groups(self, lr: float, backbone_scale: float) -> list[ParameterGroup]:
        """The projection at `lr`; the text encoder as for any run."""
        config, model = self.config, self.model.model
        if config.typed.short:
            return [{"params": list(model.project_short.parameters()), "lr": lr}]
        rate = lr * backbone_scale * config.text_lr_scale if config.text_lr is None else config.text_lr
        encoder = [parameter for parameter in model.text.parameters() if parameter.requires_grad]
        projection: ParameterGroup = {"params": list(model.project_words.parameters()), "lr": lr}
        return [{"params": encoder, "lr": rate}, projection] if encoder else [projection]

    def batch(self, epoch: int, step: int, rank: int, world: int) -> TypedBatch:
        """Queries, a form of each, and captions: a function of seed, epoch and step."""
        generator = torch.Generator().manual_seed(mixed_seed(self.config.train.seed, epoch, step))
        rows = torch.multinomial(
            self.chances, min(self.config.typed.batch_size, len(self.queries)), generator=generator
        )
        forms = torch.rand(len(rows), generator=generator).tolist()
        texts = [self.queries.texts[row] for row in rows.tolist()]
        typed = [several[int(form * len(several))] for several, form in zip(texts, forms, strict=True)]
        drawn = torch.randint(len(self.texts), (self.config.train.batch_size,), generator=generator)
        return TypedBatch(
            *self._tokens(typed),
            *self.queries.marks(rows.tolist()),
            *self._tokens([self.texts[number] for number in drawn.tolist()]),
            self.owners[drawn],
        )

    def _tokens(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        model = self.model.model
        tokenized = model.text.tokenize(texts)
        return tokenized.ids[:, : model.config.max_words], tokenized.mask[:, : model.config.max_words]

    def loss(self, batch: TypedBatch, epoch: int) -> tuple[Tensor, Figures]:
        """The three parts, weighted."""
        model, settings = self.model.model.eval(), self.config.typed  # without dropout: the start had none either
        self.vectors = self.vectors.to(batch.ids.device)
        scale = 1 / settings.temperature
        if settings.short:
            seen = self.seen(batch.ids, batch.mask)
            known = model.project_words(seen).float().detach()
            queries = TextFeatures(model.project_short(seen).float(), model.is_word(batch.ids, batch.mask))
        else:
            queries = _features(model, batch.ids, batch.mask)
        scores = queries.mean_word @ self.vectors.T
        typed = several_infonce(scores, scale, batch.right, batch.unknown)
        if settings.short:
            kept = _moved(queries, known)
            return settings.weight * typed + settings.keep * kept, {
                "loss_typed": typed.detach(),
                "moved": kept.detach(),
            }
        captions = _features(model, batch.caption_ids, batch.caption_mask)
        scores = captions.mean_word @ self.vectors.T
        named = F.cross_entropy(scale * scores, batch.images)
        with torch.no_grad():
            first = _features(self.first.to(batch.ids.device), batch.caption_ids, batch.caption_mask)
        kept = _moved(captions, first.words)
        total = settings.weight * typed + settings.captions * named + settings.keep * kept
        return total, {"loss_typed": typed.detach(), "loss_captions": named.detach(), "moved": kept.detach()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Of each dev set, by vectors: rSum of captions and mean precision at 10 of typed queries, in percent.

        "score" is the mean of the mean recall (a sixth of rSum) and of that precision. Nothing without a dev set.
        """
        model = self.model.model
        figures: dict[str, float] = {}
        scores = []
        for data, queries, vectors in zip(self.dev, self.dev_queries, self.dev_vectors, strict=True):
            pictures = vectors.to(model.device)
            captions = model.encode_texts(data.captions).mean_word
            rsum = recall(pictures @ captions.T, data.image_of_caption).rsum
            figures[f"rsum_{data.label}"] = rsum
            parts = [rsum / 6]
            if queries is not None:
                typed = precision_at_10(model, queries, pictures)
                figures[f"typed_{data.label}"] = typed
                parts.append(typed)
            scores.append(sum(parts) / len(parts))
        return {**figures, "score": sum(scores) / len(scores)} if scores else figures


class SeenTexts:
    """What a text encoder that stays makes of texts: each is encoded once, up to `REMEMBERED` of them."""

    def __init__(self, model: RetrievalModel) -> None:
        self.model = model
        self.found: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token ids and mask (T, M) -> features (T, M, width of the encoder), zeros outside the mask."""
        keys = [tuple(row[:length]) for row, length in zip(ids.tolist(), mask.sum(dim=1).tolist(), strict=True)]
        rows = [row for row, key in enumerate(keys) if key not in self.found]
        encoded = self.model.text(ids[rows], mask[rows]) if rows else ()
        new = {keys[row]: text[: len(keys[row])].clone() for row, text in zip(rows, encoded, strict=True)}
        found = [self.found[key] if key in self.found else new[key] for key in keys]
        if len(self.found) < REMEMBERED:
            self.found |= new
        return pad_sequence([*found, found[0].new_zeros(ids.shape[1], found[0].shape[1])], batch_first=True)[:-1]


@torch.no_grad()
def precision_at_10(model: RetrievalModel, queries: TypedQueries, vectors: Tensor) -> float:
    """Percent of right pictures among the ten nearest to a query, the mean over queries and their forms."""
    found = []
    right, _ = queries.marks(range(len(queries)))
    for row, texts in enumerate(queries.texts):
        nearest = (model.encode_texts(texts).mean_word @ vectors.T).topk(min(10, len(vectors))).indices
        found.append(right[row][nearest.cpu()].float().mean())
    return 100 * float(torch.stack(found).mean())


def typed_queries(config: RunConfig, train: RetrievalDataset) -> TypedQueries:
    """The typed queries of a run. Raises DataError."""
    given = config.typed.queries
    queries = queries_of_captions(train) if given == FROM_CAPTIONS else load_queries(given)
    if config.typed.short:
        kept = ((query, tuple(filter(is_short, query.texts))) for query in queries)
        queries = tuple(replace(query, texts=texts) for query, texts in kept if texts)
    return TypedQueries(queries, train)


def _on_dev(config: RunConfig, dev: RetrievalDataset) -> TypedQueries | None:
    """The typed queries of a dev set; None where there is none to measure."""
    given = config.typed.queries
    queries = queries_of_captions(dev, fewest=FEWEST_ON_DEV) if given == FROM_CAPTIONS else load_queries(given)
    try:
        return TypedQueries(queries, dev)
    except DataError:
        return None


def _texts(record: ImageRecord) -> list[str]:
    """Captions, sentences of the description, and the description as a store reads it."""
    return list(dict.fromkeys([*sentences_of(record), *([record.dense] if record.dense else [])]))


def _features(model: RetrievalModel, ids: Tensor, mask: Tensor) -> TextFeatures:
    words, valid = model.encode_words(ids, mask)
    return TextFeatures(words, valid.bool())


def _moved(texts: TextFeatures, known: Tensor) -> Tensor:
    """How far the words of texts are from the `known` ones of the start: mean squared distance by length."""
    distance = (texts.words - known).square().sum(dim=-1) / known.square().sum(dim=-1).clamp_min(1e-12)
    return distance[texts.mask].mean()
