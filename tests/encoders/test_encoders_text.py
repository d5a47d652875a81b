"""Text encoders: words and tokens, masks, gradients."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from messages import naming
from seps.encoders import TextEncoder, text_encoder
from seps.encoders.text import piece_spans, word_spans, words_of_tokens

FAMILIES = ["bert", "roberta", "clip", "siglip"]


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_and_words(saved: Any, family: str) -> None:
    encoder = text_encoder(saved(family))
    batch = encoder.tokenize(["A dog, running", "the park"])
    assert len(batch.ids) == 2 and batch.ids.dtype == torch.long and batch.mask.dtype == torch.bool
    assert batch.words == [["A", "dog", ",", "running"], ["the", "park"]]
    assert batch.word_of_token == [[None, 0, 1, 2, 3, 3, None], [None, 0, 1, None, None, None, None]]
    assert batch.mask.sum(dim=1).tolist() == [7, 4]
    features = encoder(batch.ids, batch.mask)
    assert features.shape == (*batch.ids.shape, encoder.width) and encoder.width == 32


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_never_changes_valid_tokens(saved: Any, family: str) -> None:
    encoder = text_encoder(saved(family))
    alone = encoder.tokenize(["a dog"])
    batch = encoder.tokenize(["a dog", "the dog runs in the park, the park, the park"])
    length = alone.ids.shape[1]
    expected = encoder(alone.ids, alone.mask)[0]
    torch.testing.assert_close(encoder(batch.ids, batch.mask)[0, :length], expected, atol=1e-5, rtol=0)
    other_padding = torch.where(batch.mask, batch.ids, torch.full_like(batch.ids, 7))
    torch.testing.assert_close(encoder(other_padding, batch.mask)[0, :length], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_gets_a_gradient(saved: Any, family: str) -> None:
    encoder = text_encoder(saved(family)).train()
    batch = encoder.tokenize(["a dog runs", "the park"])
    encoder(batch.ids, batch.mask)[batch.mask].square().sum().backward()
    assert [name for name, value in encoder.named_parameters() if value.grad is None] == []


def test_long_texts_are_cut(saved: Any) -> None:
    encoder = text_encoder(saved("bert"), max_length=6)
    batch = encoder.tokenize(["the dog runs in the park"])
    assert batch.ids.shape == (1, 6) and batch.ids[0, -1] == 3
    assert batch.words == [["the", "dog", "runs", "in", "the", "park"]]
    assert text_encoder(saved("bert")).max_length == 24
    assert text_encoder(saved("roberta")).max_length == 23


@pytest.mark.parametrize("length", [1, 25])
def test_max_length_out_of_range(saved: Any, length: int) -> None:
    with pytest.raises(ValueError, match=f"3 to 24.*{length}"):
        text_encoder(saved("bert"), max_length=length)


@pytest.mark.parametrize("texts", [[], "a dog"])
def test_texts_of_another_kind(saved: Any, texts: Any) -> None:
    with pytest.raises(ValueError, match="texts"):
        text_encoder(saved("bert")).tokenize(texts)


def test_empty_text_keeps_its_special_tokens(saved: Any) -> None:
    encoder = text_encoder(saved("bert"))
    batch = encoder.tokenize(["", "a dog"])
    assert batch.mask.sum(dim=1).tolist() == [2, 4] and batch.words[0] == []
    alone = encoder.tokenize([""])
    with torch.no_grad():
        beside, own = encoder(batch.ids, batch.mask)[0, :2], encoder(alone.ids, alone.mask)[0, :2]
    torch.testing.assert_close(beside, own, atol=1e-5, rtol=1e-4)


def test_slow_tokenizer_is_mapped_by_its_pieces(saved: Any) -> None:
    class Slow:
        """A tokenizer without offsets, as sentencepiece ones are."""

        is_fast = False
        model_max_length = 24

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, texts: list[str], return_offsets_mapping: bool, **options: Any) -> Any:
            assert not return_offsets_mapping
            return self.inner(texts, **options)

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return list(self.inner.convert_ids_to_tokens(ids))

    fast = text_encoder(saved("bert"))
    slow = TextEncoder(fast.model, Slow(fast.tokenizer))
    texts = ["A dog, runs in the t-shirt", "the park"]
    assert slow.tokenize(texts).word_of_token == fast.tokenize(texts).word_of_token


def test_unknown_tokenizer_class_falls_back_to_its_json(saved: Any, tmp_path: Path) -> None:
    """SigLIP's own class needs sentencepiece; its tokenizer.json does not."""
    folder = tmp_path / "model"
    shutil.copytree(saved("siglip"), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "SiglipTokenizer"}))
    batch = text_encoder(folder).tokenize(["a dog"])
    assert batch.word_of_token == [[None, 0, 1, None]]


def test_word_spans_keep_apostrophes_and_hyphens() -> None:
    text = "A man's T-shirt, 2 dogs!"
    assert [text[a:b] for a, b in word_spans(text)] == ["A", "man's", "T-shirt", ",", "2", "dogs", "!"]


@given(st.text(alphabet="ab -,'", max_size=30), st.data())
def test_tokens_find_the_word_that_holds_them(text: str, data: st.DataObject) -> None:
    spans = word_spans(text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    offsets = list(pairwise(cuts))
    slow = [
        next((index for index, (start, end) in enumerate(spans) if start < b and a < end), None) for a, b in offsets
    ]
    assert words_of_tokens(offsets, [0] * len(offsets), spans) == slow


def test_piece_spans_skip_what_they_cannot_find() -> None:
    assert piece_spans("Two dogs", ["▁two", "▁", "▁dog", "s", "<unk>", "</s>"], [0, 0, 0, 0, 0, 1]) == [
        (0, 3),
        (0, 0),
        (4, 7),
        (7, 8),
        (0, 0),
        (0, 0),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_half_of_a_character_is_refused_with_a_sentence(saved: Any, family: str) -> None:
    """Bytes of a shell that are no UTF-8 become such halves; tokenizers answer them with a TypeError."""
    with pytest.raises(ValueError, match=naming("a \\udcff dog")):
        text_encoder(saved(family)).tokenize(["a dog", "a \udcff dog"])
