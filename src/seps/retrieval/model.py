"""The retrieval model: encoders, projections to the joint space, and a head that scores."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from seps.encoders import PruneConfig, TextEncoder, VisionEncoder, freeze, text_encoder, vision_encoder
from seps.encoders.text import several_texts
from seps.encoders.vision import HALF, Preprocessing
from seps.method.config import ConfigError, SlimmingConfig
from seps.method.network import PatchSlimming
from seps.products import Linear
from seps.registry import CUSTOM, registered
from seps.retrieval.config import ModelConfig, RunConfig
from seps.retrieval.heads import (
    DescriptionHead,
    Head,
    ImageFeatures,
    MaxSimHead,
    MeanHead,
    ScanHead,
    SlimmingHead,
    TextFeatures,
)
from seps.retrieval.languages import is_short
from seps.scoring.blocks import scoring_memory

TextProgress = Callable[[int, int | None], None]


class RetrievalModel(nn.Module):
    """Pictures and sentences in one space, and the score of every pair.

    pixels (B, 3, H, W) in [0, 1] -> vision encoder -> projection -> tokens (B, P + N, C)
    texts -> tokenizer -> text encoder -> projection -> words (T, M, C)
    tokens, words, and the images' own descriptions -> head -> similarities (B, T)

    `vision`, `text`, `head` and `network` (of a slimming head) are objects of your own, in the place of those that
    `config` names. Raises ConfigError for a network of another width, and where both head and network came.
    """

    def __init__(
        self,
        config: ModelConfig,
        vision: VisionEncoder | None = None,
        text: TextEncoder | None = None,
        head: Head | None = None,
        network: PatchSlimming | None = None,
    ) -> None:
        super().__init__()
        self.stated_text_hash = ""
        """Digest of the text side as a release states it, of a model read for sentences alone; empty: computed."""
        if head is not None and network is not None:
            raise ConfigError("Pass either `head` or `network`, not both: a network is part of a slimming head.")
        config = config if head is None else replace(config, head=CUSTOM)
        self.config = config
        self.vision = vision or make_vision(config)
        self.text = text or text_encoder(config.text)
        self.project_patches = nn.Sequential(nn.Dropout(config.dropout), Linear(self.vision.width, config.embed_size))
        self.project_words = Linear(self.text.width, config.embed_size)
        if config.short_queries:
            # Typed training alone trains it.
            self.project_short = Linear(self.text.width, config.embed_size).requires_grad_(False)
        slimming = config.slimming_config(self.vision.num_patches, self.vision.num_prefix_tokens)
        if network is not None:
            self._check_network(network)
            head = SlimmingHead(network.config, network)
        self.head = head or make_head(config.head, self.vision.num_prefix_tokens, slimming)

    def set_short_queries(self, wanted: bool) -> None:
        """Give short queries a projection, equal to that of sentences at first, or take it away."""
        if wanted == self.config.short_queries:
            return
        self.config = replace(self.config, short_queries=wanted)
        if wanted:
            self.project_short = copy.deepcopy(self.project_words).requires_grad_(False)
        else:
            del self.project_short

    def _check_network(self, network: PatchSlimming) -> None:
        if self.config.head != "slimming":
            raise ConfigError(f"A network belongs to head='slimming', but head={self.config.head!r} is set.")
        for name, have, want in (
            ("embed_size", network.config.embed_size, self.config.embed_size),
            ("num_prefix_tokens", network.config.num_prefix_tokens, self.vision.num_prefix_tokens),
        ):
            if have != want:
                raise ConfigError(f"The network has {name}={have}, and the model {want}; make them the same.")

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.project_words.weight.device

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of the pictures it takes."""
        return self.vision.image_size

    @property
    def languages(self) -> tuple[str, ...]:
        """Languages that it reads, as ISO 639 codes; empty: not stated."""
        return self.config.languages

    def cut(self, text: str) -> tuple[int, int] | None:
        """Tokens of a query and how many the model reads, where these are fewer; else None."""
        count, most = int(self.text.tokenize([text]).mask.sum()), self.config.max_words
        return (count, most) if count > most else None

    def pieces(self, word: str) -> int:
        """How many tokens a word has; one of the vocabulary has one."""
        return sum(place is not None for place in self.text.tokenize([word]).word_of_token[0])

    def encode_pixels(self, pixels: Tensor, vision: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """(B, 3, H, W) float in [0, 1] -> tokens (B, P + N, C) float32; `vision`: the encoder in another form."""
        seen: Tensor = self.vision(pixels) if vision is None else vision(pixels).to(self.project_words.weight.dtype)
        tokens: Tensor = self.project_patches(seen)
        return tokens.float()

    def encode_ids(self, ids: Tensor, mask: Tensor, short: Tensor | None = None) -> Tensor:
        """Token ids and mask (T, M) -> words (T, M, C) float32; `short` (T,) bool: texts read as short queries."""
        seen = self.text(ids, mask)
        words: Tensor = self.project_words(seen)
        if short is not None:
            words = torch.where(short[:, None, None], self.project_short(seen), words)
        return words.float()

    def encode_words(self, ids: Tensor, mask: Tensor, short: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Token ids and mask (T, M) -> words (T, M, C) float32 and their mask, the valid ones first.

        Without `special_tokens` these are the tokens that are no [CLS], [SEP] or their like; a text of such tokens
        alone keeps them.
        """
        words = self.encode_ids(ids, mask, short)
        if self.config.special_tokens:
            return words, mask
        keep = self.is_word(ids, mask)
        # Valid tokens first, each in its place; keys are distinct, so that no stable sort is needed (ONNX has none).
        length = keep.shape[1]
        keys = keep.long() * length - torch.arange(length, device=keep.device)
        order = keys.topk(length, dim=1).indices
        return words.gather(1, order[:, :, None].expand_as(words)), keep.gather(1, order)

    def is_word(self, ids: Tensor, mask: Tensor) -> Tensor:
        """(T, M) bool: the tokens that are aligned with the image."""
        mask = mask.bool()
        if self.config.special_tokens:
            return mask
        special = torch.tensor(self.text.special_ids, device=ids.device, dtype=ids.dtype)
        words = mask & ~(ids[:, :, None] == special).any(dim=-1)  # torch.isin has no ONNX form
        return words | (mask & ~words.any(dim=1, keepdim=True))

    @torch.no_grad()
    def encode_texts(
        self,
        texts: Sequence[str],
        *,
        max_words: int | None = None,
        as_sentences: bool = False,
        batch_size: int = 128,
        progress: TextProgress | None = None,
    ) -> TextFeatures:
        """Queries to words, without gradients, padded to the longest; batches are of similar length.

        Short ones (`is_short`) have their own projection where the model has one, but not `as_sentences`.
        """
        limit = max_words or self.config.max_words
        tokenized = self.text.tokenize(several_texts(texts))
        ids, mask = tokenized.ids[:, :limit], tokenized.mask[:, :limit]
        own = self.config.short_queries and not as_sentences
        short = torch.tensor([is_short(text) for text in texts], device=self.device) if own else None
        order = torch.argsort(mask.sum(dim=1), stable=True)
        words = torch.zeros(*mask.shape, self.config.embed_size, device=self.device)
        shown = torch.zeros(mask.shape, dtype=torch.bool, device=self.device)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            longest = int(mask[rows].sum(dim=1).max())
            some = ids[rows, :longest].to(self.device), mask[rows, :longest].to(self.device)
            rows = rows.to(self.device)
            part, valid = self.encode_words(*some, None if short is None else short[rows])
            words[rows, :longest], shown[rows, :longest] = part, valid.bool()
            if progress is not None:
                progress(start + len(rows), len(order))
        longest = int(shown.sum(dim=1).max())
        return TextFeatures(words[:, :longest], shown[:, :longest])

    @torch.no_grad()
    def encode_descriptions(
        self, dense: Sequence[str | None], *, batch_size: int = 128, progress: TextProgress | None = None
    ) -> tuple[Tensor, Tensor]:
        """One description per image, or None, -> words (B, L, C) and mask (B, L), all False where there is none."""
        present = [i for i, text in enumerate(several_texts(dense)) if text is not None]
        features = self.encode_texts(
            [str(dense[i]) for i in present] or ["none"],
            max_words=self.config.max_dense_words,
            as_sentences=True,
            batch_size=batch_size,
            progress=progress,
        )
        words = torch.zeros(len(dense), *features.words.shape[1:], device=self.device)
        mask = torch.zeros(len(dense), features.mask.shape[1], dtype=torch.bool, device=self.device)
        rows = torch.tensor(present, dtype=torch.long, device=self.device)
        if present:
            words[rows], mask[rows] = features.words, features.mask
        return words, mask

    def score(self, images: ImageFeatures, texts: TextFeatures, *, memory: int | None = None) -> Tensor:
        """Similarities (B, T) float32 of every image with every caption, without gradients."""
        if memory is None:
            memory = scoring_memory(images.tokens.device)
        return self.head.score(images, texts, memory=memory)

    @property
    def description_weight(self) -> float | None:
        """Weight of the description in the score, where the head has one."""
        logit = self.head.description_logit
        return None if logit is None else float(torch.sigmoid(logit.detach().float()))

    def set_description_weight(self, weight: float) -> None:
        """Set the weight of the description, in (0, 1). Raises ValueError outside, or where the head has none."""
        if not 0 < weight < 1:
            raise ValueError(f"The weight of the description must lie between 0 and 1; got {weight!r}.")
        logit = self.head.description_logit
        if logit is None:
            raise ValueError(f"This model (head {self.config.head!r}) has no weight of the description to set.")
        with torch.no_grad():
            logit.fill_(torch.logit(torch.tensor(weight)).item())


class AbsentVision(VisionEncoder):
    """Stands for a vision encoder that was not read: its shape is known, and it encodes nothing."""

    @classmethod
    def of(cls, vision: VisionEncoder) -> AbsentVision:
        """In the place of an encoder that goes."""
        return cls(
            width=vision.width,
            num_prefix_tokens=vision.num_prefix_tokens,
            image_size=vision.image_size,
            stride=vision.stride,
            preprocessing=Preprocessing(*HALF),
        )

    def encode(self, normalised: Tensor) -> Tensor:
        """Raises RuntimeError."""
        raise RuntimeError("This model was read for sentences alone; from_pretrained reads all of it.")


def with_grid(model: RetrievalModel, grid: tuple[int, int]) -> RetrievalModel:
    """The model for pictures of `grid` patches: itself where its pictures have them, else a copy with another size.

    Weights stay as they are, and so does the number of merged patches, which belongs to them.
    """
    if model.vision.grid == grid:
        return model
    made = copy.deepcopy(model)
    set_grid(made.vision, grid)
    if (net := made.head.network) is not None:
        config = net.config
        patches = grid[0] * grid[1]
        merged = (config.num_merged + 0.5) / (patches * config.sparse_ratio)
        net.config = replace(config, num_patches=patches, aggr_ratio=merged)
    return made


def set_grid(vision: VisionEncoder, grid: tuple[int, int]) -> VisionEncoder:
    """The encoder, for pictures of `grid` patches from now on."""
    rows, columns = vision.stride
    vision.image_size, vision.grid = (grid[0] * rows, grid[1] * columns), grid
    return vision


def make_vision(config: ModelConfig, place: str | Path | None = None, *, pretrained: bool = True) -> VisionEncoder:
    """The vision encoder of a configuration, or the one at `place` with the configuration's options."""
    return vision_encoder(
        config.vision if place is None else place,
        image_size=config.image_size,
        pretrained=pretrained,
        prune=PruneConfig.from_json(config.prune) if config.prune else None,
        drop_path=config.drop_path,
    )


def freeze_parts(model: RetrievalModel, config: RunConfig) -> None:
    """Freeze what `config` says stays as it is. Frozen first blocks record nothing for a backward pass."""
    parts: tuple[tuple[nn.Module, int | None], ...] = (
        (model.vision, config.freeze_vision),
        (model.text, config.freeze_text),
    )
    for encoder, blocks in parts:
        if blocks is not None:
            freeze(encoder, None if blocks < 0 else blocks)


TEXT_SIDE = ("text.", "project_words.")
"""Beginnings of the names of the weights that read sentences and descriptions."""
SHORT_SIDE = ("project_short.",)
"""Of those that only short queries are read by: nothing in a store depends on them."""


def model_hash(model: RetrievalModel) -> str:
    """Hex digest of all weights but the text side's, and of their names: models with one give an image one state."""
    return _digest(model, lambda name: not name.startswith(TEXT_SIDE + SHORT_SIDE))


def text_hash(model: RetrievalModel) -> str:
    """Hex digest of the weights that read sentences and descriptions: the text encoder and its projection."""
    return model.stated_text_hash or _digest(model, lambda name: name.startswith(TEXT_SIDE))


def short_hash(model: RetrievalModel) -> str:
    """Hex digest of the projection of short queries."""
    return _digest(model, lambda name: name.startswith(SHORT_SIDE))


def _digest(model: RetrievalModel, of: Callable[[str], bool]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        if of(name):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def make_head(kind: str, num_prefix_tokens: int, slimming: SlimmingConfig) -> Head:
    """The head of that name; of the built-in ones `slimming` matters to "slimming" and "maxsim" alone.

    Raises ConfigError where what is registered is no Head, and for "own", the name of a head given as an object.
    """
    if kind == CUSTOM:
        raise ConfigError(
            f"head={CUSTOM!r} names a head that was passed as an object; pass it again: "
            "from_pretrained(folder, head=...)."
        )
    own = registered("head").get(kind)
    if own is not None:
        head = own.thing(slimming)
        if not isinstance(head, Head):
            raise ConfigError(f"The head {kind!r} is a {type(head).__name__}; make it a seps.retrieval.heads.Head.")
        return head
    if kind == "mean":
        return MeanHead(num_prefix_tokens)
    if kind == "description":
        return DescriptionHead()
    if kind == "slimming":
        return SlimmingHead(slimming)
    if kind == "maxsim":
        return MaxSimHead(slimming)
    return ScanHead(num_prefix_tokens, kind)
