"""Sentences to vectors in NumPy: the text side of an embedded model, a BERT of six layers.

The vector of a sentence is the mean of its words at length one, as the torch model computes it
(`seps.encoders.bert`, `seps.retrieval.heads.TextFeatures.mean_word`).

Shapes: T texts, L tokens, H heads, C width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from seps.files import load_json
from seps.retrieval.languages import is_short
from seps.retrieval.light.weights import Array, LightWeights, text_folder

MAX_CHARACTERS = 20_000
"""Of one text, as in `seps.encoders.text`."""
TOKENS_AT_ONCE = 2048
"""With padding: what they need stays in the cache of a core."""
_SPECIAL = ("[CLS]", "[SEP]", "[PAD]")
_EPS = 1e-12


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, each linear one as (in, out) and bias."""

    qkv: tuple[Array, Array]
    attended: tuple[Array, Array]
    norm1: tuple[Array, Array]
    inner: tuple[Array, Array]
    output: tuple[Array, Array]
    norm2: tuple[Array, Array]


class LightTexts:
    """The text side of an embedded model. Any thread may call it.

    Raises OSError or ValueError where its files cannot be read.
    """

    def __init__(self, weights: LightWeights) -> None:
        import tokenizers

        self.weights = weights
        folder = text_folder()
        self.config = load_json(folder / "config.json")
        self.tokenizer: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self._special: list[Any] = [self.tokenizer.token_to_id(token) for token in _SPECIAL]
        self.max_words, self.max_dense_words = (int(weights.model[key]) for key in ("max_words", "max_dense_words"))
        self.sentences = weights.linear("project_words")
        self.short = weights.linear("project_short") if weights.model.get("short_queries") else None

    @cached_property
    def _embeddings(self) -> tuple[Array, Array, tuple[Array, Array]]:
        """Of words, of places with what all tokens share, and the norm."""
        place = "text.model.embeddings"
        shared = self.weights.tensor(f"{place}.token_type_embeddings.weight")[0]
        places = self.weights.tensor(f"{place}.position_embeddings.weight") + shared
        return self.weights.tensor(f"{place}.word_embeddings.weight"), places, self._norm(f"{place}.LayerNorm")

    @cached_property
    def _layers(self) -> list[Layer]:
        return [self._layer(f"text.model.encoder.layer.{i}") for i in range(self.config["num_hidden_layers"])]

    def _layer(self, name: str) -> Layer:
        linear, own = self.weights.linear, f"{name}.attention.self"
        parts = [linear(f"{own}.{part}") for part in ("query", "key", "value")]
        joined = np.concatenate([weight for weight, _ in parts], axis=1), np.concatenate([bias for _, bias in parts])
        return Layer(
            joined,
            linear(f"{name}.attention.output.dense"),
            self._norm(f"{name}.attention.output.LayerNorm"),
            linear(f"{name}.intermediate.dense"),
            linear(f"{name}.output.dense"),
            self._norm(f"{name}.output.LayerNorm"),
        )

    def _norm(self, name: str) -> tuple[Array, Array]:
        return self.weights.tensor(f"{name}.weight"), self.weights.tensor(f"{name}.bias")

    def ids(self, text: str, most: int | None = None) -> list[int]:
        """The tokens of a text, at most so many. Raises ValueError for a text that is not valid Unicode."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"The text {text!r} is not valid Unicode: it holds half of a character. Write it again in UTF-8."
            ) from error
        # As a tokenizer that cuts does: the end mark stays the last token.
        ids: list[int] = self.tokenizer.encode(text[:MAX_CHARACTERS]).ids
        longest = int(self.config["max_position_embeddings"])
        ids = ids if len(ids) <= longest else [*ids[: longest - 1], ids[-1]]
        return ids[:most]

    def pieces(self, word: str) -> int:
        """How many tokens a word has; one of the vocabulary has one."""
        return sum(number not in self._special for number in self.ids(word))

    def cut(self, text: str) -> tuple[int, int] | None:
        """Tokens of a query and how many the model reads, where these are fewer; else None."""
        count = len(self.ids(text))
        return (count, self.max_words) if count > self.max_words else None

    def vectors(self, texts: Sequence[str], *, most: int | None = None, as_sentences: bool = False) -> Array:
        """(T, C) of length one; short queries by their own projection where there is one, but not `as_sentences`."""
        if isinstance(texts, str):
            raise ValueError(f"A list of texts is required, but got one text: write [{texts[:40]!r}].")
        found = np.zeros((len(texts), self.sentences[1].size), np.float32)
        every = [self.ids(text, most or self.max_words) for text in texts]
        order = sorted(range(len(texts)), key=lambda row: len(every[row]))
        start = 0
        while start < len(order):
            stop = start + 1
            while stop < len(order) and (stop + 1 - start) * len(every[order[stop]]) <= TOKENS_AT_ONCE:
                stop += 1
            rows = order[start:stop]
            found[rows] = self._means([every[row] for row in rows])
            start = stop
        mean = found @ self.sentences[0] + self.sentences[1]
        if self.short is not None and not as_sentences:
            own = np.array([is_short(text) for text in texts], bool)
            mean[own] = found[own] @ self.short[0] + self.short[1]
        vectors: Array = mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)
        return vectors

    def _means(self, ids: Sequence[Sequence[int]]) -> Array:
        """(T, C) mean features of the words of each text, of all its tokens where none is a word."""
        longest = max(map(len, ids))
        table = np.zeros((len(ids), longest), np.int64)
        valid = np.zeros((len(ids), longest), bool)
        for row, own in enumerate(ids):
            table[row, : len(own)], valid[row, : len(own)] = own, True
        words = valid & ~np.isin(table, self._special)
        words |= valid & ~words.any(axis=1, keepdims=True)
        counted: Array = words.astype(np.float32) / words.sum(axis=1, keepdims=True, dtype=np.float32)
        means: Array = np.einsum("tl,tlc->tc", counted, self._features(table, valid), optimize=True)
        return means

    def _features(self, ids: Array, valid: Array) -> Array:
        """(T, L, C) features of tokens (T, L)."""
        words, places, norm = self._embeddings
        features = _normed(words[ids] + places[: ids.shape[1]], norm)
        hidden = None if valid.all() else np.where(valid, 0.0, -np.inf).astype(np.float32)[:, None, None, :]
        heads = int(self.config["num_attention_heads"])
        for layer in self._layers:
            mixed = _attention(_linear(features, layer.qkv), heads, hidden)
            features = _normed(_linear(mixed, layer.attended) + features, layer.norm1)
            inner = _linear(gelu(_linear(features, layer.inner)), layer.output)
            features = _normed(inner + features, layer.norm2)
        return features


def _linear(x: Array, layer: tuple[Array, Array]) -> Array:
    weight, bias = layer
    found: Array = x.reshape(-1, x.shape[-1]) @ weight + bias
    shaped: Array = found.reshape(*x.shape[:-1], -1)
    return shaped


def _normed(x: Array, norm: tuple[Array, Array]) -> Array:
    less: Array = x - x.mean(axis=-1, keepdims=True)
    variance = np.mean(less * less, axis=-1, keepdims=True)
    found: Array = less / np.sqrt(variance + np.float32(_EPS)) * norm[0] + norm[1]
    return found


def _attention(qkv: Array, heads: int, hidden: Array | None) -> Array:
    """(T, L, 3 C) -> (T, L, C); `hidden` is added to the products of queries and keys."""
    texts, length, wide = qkv.shape
    query, key, value = qkv.reshape(texts, length, 3, heads, wide // 3 // heads).transpose(2, 0, 3, 1, 4)
    products: Array = query @ key.transpose(0, 1, 3, 2) / np.float32(math.sqrt(wide // 3 // heads))
    if hidden is not None:
        products = products + hidden
    weights = np.exp(products - products.max(axis=-1, keepdims=True))
    mixed: Array = weights / weights.sum(axis=-1, keepdims=True) @ value
    joined: Array = mixed.transpose(0, 2, 1, 3).reshape(texts, length, wide // 3)
    return joined


def gelu(x: Array) -> Array:
    """x Phi(x). The error function is that of Abramowitz and Stegun 7.1.26, exact to 1.5e-7."""
    size = np.abs(x) * np.float32(math.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * size)
    tail = np.float32(1.061405429) * t
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail += np.float32(factor)
        tail *= t
    tail *= np.exp(-size * size)
    found: Array = np.float32(0.5) * x * (1 + np.copysign(1 - tail, x))
    return found
