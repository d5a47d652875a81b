"""Explanations of scores: shares (`seps.method.attribution`, `maxsim`) by words of the caption and the description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from seps.encoders.text import TextBatch
from seps.method.attribution import Shares, shares
from seps.method.network import PatchSlimming
from seps.retrieval.engine.codec import StoredImages, StoredScorer, segment_ids
from seps.retrieval.engine.zeroshot import ZeroShotModel
from seps.retrieval.explain.maxsim import maxsim_shares
from seps.retrieval.heads import Head, ImageFeatures, MaxSimHead, SlimmingHead
from seps.retrieval.model import RetrievalModel
from seps.retrieval.stopwords import is_stop_word


@dataclass
class DescriptionPart:
    """One word of the image's description."""

    word: str
    special: bool
    """A mark of the tokenizer and not a word of the text."""
    contribution: float
    """Its part of the score."""
    stop: bool = field(init=False)
    """A function word ("the", "is", "of") or a mark, which no picture shows."""

    def __post_init__(self) -> None:
        self.stop = self.special or is_stop_word(self.word)


@dataclass
class WordPart(DescriptionPart):
    """One word of the caption, and what it adds to the score."""

    heat: list[float]
    """What of its contribution comes from each cell of the patch grid, row by row."""


@dataclass
class Explanation:
    """A score and what it is made of.

    `sum(words) + rest + added` and `sum(patches) + elsewhere + sum(description) + rest + added` both are the score.
    """

    caption: str
    score: float
    grid: tuple[int, int]
    words: list[WordPart]
    """Of a dual encoder one entry, the whole sentence: it has one vector."""
    patches: list[float]
    """What each cell of the grid adds."""
    kept: list[bool]
    """Cells whose patches the caption kept, or, with head "maxsim", some word chose; of a dual encoder all that it
    sees."""
    stored: list[bool]
    """Cells whose patches the store holds; all, unless indexing left some out. Of a dual encoder those that it sees:
    some crop the picture."""
    groups: list[list[float]]
    """Merge weights of each group over the cells; none where nothing is merged."""
    description: list[DescriptionPart]
    elsewhere: float
    """Prefix tokens, and patches left out at indexing time; of a dual encoder all that its last attention did not take
    from patches."""
    rest: float
    """What belongs to no word: the MLP of Eq. 5, where the model has it, or what an alignment of one's own adds to the
    means; of a dual encoder the constant of the description's part."""
    terms: dict[str, float]
    """The same score by its terms."""
    added: float = 0.0
    """What a store's search adds to the model's score; `terms` has its parts by name ("lexical",
    "background")."""
    found_words: dict[str, float] = field(default_factory=dict)
    """Of the lexical term: the words of the caption that occur in the description, and what each adds."""
    note: str = ""
    """What took no part in the score, as a sentence; empty where nothing was left out."""
    background: float = 0.0
    """Of `added`: what the bank of background queries adds, the same for every sentence; 0 outside a store, or without
    a bank."""

    whole_sentence: bool = False
    """Whether the sentence has one vector and no words of its own, as with a dual encoder."""

    @property
    def shown_words(self) -> tuple[list[WordPart], list[WordPart]]:
        """The words that a picture can show, in the order of the sentence, and the others (`DescriptionPart.stop`).

        The encoder writes the meaning of a sentence into all its tokens, so that "the" may add more than "dog": a list
        of words for people names the first ones and gives what the others add in one sum. Where a sentence has no other
        word, function words are shown.
        """
        shown = [part for part in self.words if not part.stop]
        return (shown, [part for part in self.words if part.stop]) if shown else (list(self.words), [])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class Explainer:
    """Explains scores of one model; `scorer` is that of a store, for its images."""

    def __init__(self, model: RetrievalModel | ZeroShotModel, scorer: StoredScorer | None = None) -> None:
        if isinstance(model, ZeroShotModel):
            raise ValueError("Scores of a dual encoder are explained by ZeroShotExplainer.")
        if not isinstance(model.head, SlimmingHead | MaxSimHead):
            raise ValueError(
                f"The model's head is {model.config.head!r}, which selects no patches; explanations need 'slimming' or "
                "'maxsim'."
            )
        self.model = model
        self.scorer = scorer
        self.grid = model.vision.grid_for(*model.image_size)

    @torch.no_grad()
    def picture(
        self, pixels: Tensor, caption: str, dense: str | None = None, guides: Mapping[str, Tensor] | None = None
    ) -> Explanation:
        """Explain an image, pixels (3, H, W) uint8 of the model's size; `dense` is its own description, if any.

        `guides`: by name the vectors (width,) of the guides that the model reads.
        """
        features = ImageFeatures(self.model.encode_pixels(pixels[None].to(self.model.device).float() / 255))
        if dense is not None and dense.strip() and self.model.head.uses_description:
            features.dense, features.dense_mask = self.model.encode_descriptions([dense])
        if guides:
            features.guides = {name: vector[None].to(self.model.device) for name, vector in guides.items()}
        found = self._explain(self._taken_apart(features), caption, dense)
        if features.dense is None and self.model.head.uses_description:
            found.note = (
                "No description of the picture took part: a store that holds one gives the picture another score."
            )
        return found

    @torch.no_grad()
    def stored(self, image: StoredImages, caption: str, description: str | None) -> Explanation:
        """Explain one image of a store, from what the store holds of it."""
        if self.scorer is None:
            raise ValueError("This explainer was made without the scorer of a store.")
        found = self._explain(self._taken_apart(image.features, image), caption, description, image)
        if description is None and self.model.head.uses_description:
            found.note = "The store holds no description of this picture: its score is that of its pixels alone."
        return found

    def _taken_apart(self, features: ImageFeatures, image: StoredImages | None = None) -> Callable[[Tensor], Shares]:
        """From the words (M, C) of a caption to the shares of this image's score; `image` is its state in a store."""
        head: Head = self.model.head
        cells = self._cells(image)
        if isinstance(head, MaxSimHead):
            seen = features if image is None else replace(features, mean=image.mean)
            return lambda words: maxsim_shares(head, seen, words, cells)
        assert isinstance(head, SlimmingHead)
        net: PatchSlimming = head.net
        if image is not None and self.scorer is not None and self.scorer.net is not None:
            net, side = self.scorer.net, self.scorer.side(image)
        else:
            side = net.encode_images(
                features.tokens, dense=features.dense, dense_lengths=features.dense_lengths, guides=features.guides
            )
        mean = None if image is None else image.mean
        length = None if mean is None else cells * float(mean[0].norm())
        return lambda words: shares(net, side, words, length)

    def _grid(self, image: StoredImages | None) -> tuple[int, int]:
        return self.grid if image is None or self.scorer is None else self.scorer.grid

    def _cells(self, image: StoredImages | None) -> int:
        rows, columns = self._grid(image)
        return rows * columns

    def _explain(
        self,
        taken_apart: Callable[[Tensor], Shares],
        caption: str,
        description: str | None,
        image: StoredImages | None = None,
    ) -> Explanation:
        if not caption.strip():
            raise ValueError("The caption is blank. Write the sentence whose score to explain.")
        batch = self.model.text.tokenize([caption.strip()])
        words = self.model.encode_texts([caption.strip()])
        tokens = _tokens(self.model, batch, self.model.config.max_words)
        length = len(tokens)
        grid, cells = self._grid(image), self._cells(image)
        places = torch.arange(cells)
        if image is not None and image.positions is not None:
            places = image.positions[0].cpu()
        found = taken_apart(words.words[0, :length])
        stored = torch.zeros(cells, dtype=torch.bool)
        stored[places] = True
        return Explanation(
            caption=caption.strip(),
            score=found.score,
            grid=grid,
            words=_words(found, batch, tokens, places, cells),
            patches=_spread(found.patches.sum(dim=0), places, cells).tolist(),
            kept=(_spread(found.kept.float(), places, cells) > 0.5).tolist(),
            stored=stored.tolist(),
            groups=_spread(found.groups, places, cells).tolist(),
            description=self._description(found, description),
            elsewhere=float(found.elsewhere.sum()),
            rest=found.rest,
            terms=found.terms,
        )

    def _description(self, found: Shares, description: str | None) -> list[DescriptionPart]:
        count = found.description.shape[1]
        if not count or description is None:
            return []
        return description_parts(self.model, found.description.sum(dim=0), description)


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


def _words(found: Shares, batch: TextBatch, tokens: Sequence[int], places: Tensor, cells: int) -> list[WordPart]:
    heat = _spread(found.patches, places, cells)
    total = heat.sum(dim=1) + found.elsewhere.cpu() + found.description.sum(dim=1).cpu()
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
