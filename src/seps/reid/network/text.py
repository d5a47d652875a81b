"""Texts of shots in the network: vectors of a fixed text encoder, their place in the sensors' space, the loss for it.

A text guides the selection of every sensor (`MultiModalSDTPS.slim`), which takes no gradient. What brings it into the
space of the patches is a contrastive loss against its own shot (`text_loss`). With `model.text` "join" it is also one
more block of the feature, behind the sensors' blocks; distances are taken over the blocks that both shots have.

Shapes: B shots, M sensors, L tokens, T width of the text encoder, C width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.encoders import TextEncoder, text_encoder
from seps.method.config import ConfigError
from seps.method.losses.several import several_infonce
from seps.method.score import masked_mean
from seps.reid.data import ReidReader, ReidRecord

BLOCK = "text"
"""The name of the text's block of the feature."""
SCALE = 1 / 0.07
_TEXTS_AT_ONCE = 64


class ShotReader(ReidReader):
    """A reader of pictures that also has the vectors of the shots' texts; `texts` None for a model that reads none."""

    def __init__(self, *args: Any, texts: TextVectors | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.texts = texts


def texts_of(reader: ReidReader, records: Sequence[ReidRecord]) -> ShotTexts | None:
    """The texts of records, each its own; None where the reader has none or no record has one."""
    texts = getattr(reader, "texts", None)
    return texts.of(records) if isinstance(texts, TextVectors) else None


@dataclass(frozen=True)
class ShotTexts:
    """vectors (B, T) of the texts' words, zeros where a shot has none; present (B,) bool, which shots have one."""

    vectors: Tensor
    present: Tensor

    def __getitem__(self, part: slice | Tensor) -> ShotTexts:
        return ShotTexts(self.vectors[part], self.present[part])

    def to(self, device: torch.device | str) -> ShotTexts:
        """The same on another device."""
        return ShotTexts(self.vectors.to(device), self.present.to(device))

    def without(self) -> ShotTexts:
        """The same shots without their texts."""
        return ShotTexts(torch.zeros_like(self.vectors), torch.zeros_like(self.present))


class TextVectors:
    """The mean word feature of each text, at unit length, by a fixed encoder; every text is encoded once.

    The encoder is loaded with the first text. A shot's vector follows from its own text alone, whatever else is encoded
    with it.
    """

    def __init__(self, encoder: str | TextEncoder = "mini", width: int = 384) -> None:
        self._encoder, self.width = encoder, width
        self._known: dict[str, Tensor] = {}

    def of(self, records: Sequence[ReidRecord]) -> ShotTexts | None:
        """The texts of records; None where no record has one. Raises ConfigError for an encoder of another width."""
        texts = [record.text for record in records]
        present = torch.tensor([text is not None for text in texts])
        if not bool(present.any()):
            return None
        self._encode(sorted({text for text in texts if text is not None} - self._known.keys()))
        rows = [torch.zeros(self.width) if text is None else self._known[text] for text in texts]
        return ShotTexts(torch.stack(rows), present)

    @torch.no_grad()
    def _encode(self, texts: Sequence[str]) -> None:
        if not texts:
            return
        if isinstance(encoder := self._encoder, str):
            self._encoder = encoder = text_encoder(encoder)
            if encoder.width != self.width:
                raise ConfigError(
                    f"model.text_width = {self.width}, but the text encoder has vectors of {encoder.width} "
                    f"numbers: set it to {encoder.width}."
                )
        encoder.eval()
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            part = texts[start : start + _TEXTS_AT_ONCE]
            batch = encoder.tokenize(part)
            means = F.normalize(masked_mean(encoder(batch.ids, batch.mask), batch.mask), dim=1)
            self._known.update(zip(part, means, strict=True))


class TextHead(nn.Module):
    """Vectors of texts (B, T) to the sensors' space (B, C); as a block of the feature, as long as theirs.

    `gain` is learned: how much longer or shorter the text's block is than the mean of the sensors' blocks.
    """

    def __init__(self, text_width: int, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(text_width, width)
        self.log_gain = nn.Parameter(torch.zeros(()))

    def forward(self, texts: ShotTexts) -> Tensor:
        """(B, T) -> (B, C), zeros where a shot has no text."""
        vectors: Tensor = self.projection(texts.vectors.to(self.projection.weight.dtype))
        return torch.where(texts.present[:, None], vectors.float(), 0.0)

    def joined(self, blocks: Tensor, text: Tensor | None, present: Tensor | None) -> Tensor:
        """Blocks of the sensors (B, M, C), present (B, M), and the text's (B, C) -> (B, M + 1, C)."""
        if text is None:
            return torch.cat([blocks, torch.zeros_like(blocks[:, :1])], dim=1)
        lengths = blocks.detach().float().norm(dim=2)  # (B, M)
        there = torch.ones_like(lengths) if present is None else present.float()
        # Selected, not multiplied: whatever stands in an absent block, NaN included, must not pass.
        mean = torch.where(there > 0, lengths, 0.0).sum(dim=1) / there.sum(dim=1).clamp_min(1)  # (B,)
        block = F.normalize(text.float(), dim=1) * (mean * self.log_gain.exp())[:, None]
        return torch.cat([blocks, block[:, None].to(blocks.dtype)], dim=1)


def shot_vectors(vectors: Tensor, present: Tensor | None) -> Tensor:
    """What a shot's sensors have in common: the mean of their global vectors (B, M, C) at unit length -> (B, C)."""
    unit = F.normalize(vectors.float(), dim=2)
    if present is not None:
        unit = torch.where(present[:, :, None], unit, 0.0)
    return F.normalize(unit.sum(dim=1), dim=1)


def text_loss(
    texts: tuple[Tensor, Tensor], shots: tuple[Tensor, Tensor], labels: Tensor, told: Tensor, first: int = 0
) -> Tensor:
    """InfoNCE between texts and shots, both directions: of all shots, each text has to find its own.

    Shots of the same identity are not negatives. Shots without a text take no part; 0 where fewer than two have one.

    Args:
        texts, shots: of this process (A, C), and of all (B, C).
        labels, told: (B,) of all: identities, and which have a text.
        first: row i of this process is row `first + i` of all.
    """
    rows = torch.arange(first, first + len(texts[0]), device=labels.device)
    right = rows[:, None] == torch.arange(len(labels), device=labels.device)  # (A, B)
    same = labels[rows][:, None] == labels
    unknown = (same & ~right) | ~told[rows][:, None] | ~told
    parts = []
    for own, others in ((texts[0], shots[1]), (shots[0], texts[1])):
        cosines = F.normalize(own.float(), dim=1) @ F.normalize(others.float(), dim=1).T
        parts.append(several_infonce(cosines, SCALE, right, unknown))
    return torch.stack(parts).mean()
