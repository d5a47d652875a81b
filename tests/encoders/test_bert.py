"""The embedded text encoder without transformers: the ids, offsets and features of transformers' own classes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from seps.encoders import EncoderUnavailable, TextEncoder, mini_text_folder, text_encoder
from seps.encoders.bert import Bert, BertConfig, load_bert
from seps.encoders.saved import save_text_files
from seps.encoders.text import load_tokenizer
from seps.encoders.wordpiece import WordPieceTokenizer

TEXTS = [
    "a dog",
    "Two men in RED jackets, one with a café au lait; it's 7:30!",
    "狗在沙滩上跑 und ein Hund läuft über die Straße",
    "[MASK] and [SEP] are words that a user may write",
    "",
    "  \t tabs\u00a0and\u200bother spaces \u0000 ",
    "unbelievablylongwordwithoutanyspaces" * 5,
    "a dog runs " * 300,
]


@pytest.fixture(scope="module")
def theirs() -> TextEncoder:
    folder = str(mini_text_folder())
    return TextEncoder(
        transformers.BertModel.from_pretrained(folder, dtype=torch.float32), load_tokenizer(Path(folder))
    ).eval()


@pytest.fixture(scope="module")
def ours() -> TextEncoder:
    return text_encoder("mini")


def test_the_embedded_text_encoder_is_ours(ours: TextEncoder) -> None:
    assert isinstance(ours.model, Bert) and isinstance(ours.tokenizer, WordPieceTokenizer)


def test_names_and_order_of_tensors_are_theirs(ours: TextEncoder, theirs: TextEncoder) -> None:
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    expected = theirs.state_dict()
    assert list(ours.state_dict()) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())
    assert all(parameter.requires_grad for parameter in ours.parameters())


@pytest.mark.parametrize("texts", [TEXTS, *([text] for text in TEXTS)])
def test_tokens_and_features_are_theirs(ours: TextEncoder, theirs: TextEncoder, texts: list[str]) -> None:
    found, expected = ours.tokenize(texts), theirs.tokenize(texts)
    assert torch.equal(found.ids, expected.ids) and torch.equal(found.mask, expected.mask)
    assert (found.words, found.word_of_token) == (expected.words, expected.word_of_token)
    with torch.no_grad():
        ours_BLC, theirs_BLC = ours(found.ids, found.mask), theirs(found.ids, found.mask)
    torch.testing.assert_close(ours_BLC[found.mask], theirs_BLC[found.mask], atol=5e-6, rtol=0)


@settings(max_examples=60)
@given(st.lists(st.text(max_size=60), min_size=1, max_size=3))
def test_any_text_has_their_tokens(ours: TextEncoder, theirs: TextEncoder, texts: list[str]) -> None:
    found, expected = ours.tokenize(texts), theirs.tokenize(texts)
    assert torch.equal(found.ids, expected.ids) and found.word_of_token == expected.word_of_token


def test_special_tokens_are_theirs(ours: TextEncoder, theirs: TextEncoder) -> None:
    assert ours.special_ids == theirs.special_ids and ours.max_length == theirs.max_length == 512
    mine, other = ours.tokenizer, theirs.tokenizer
    assert (mine.mask_token_id, mine.pad_token_id, mine.unk_token_id, len(mine)) == (
        other.mask_token_id,
        other.pad_token_id,
        other.unk_token_id,
        len(other),
    )
    assert sorted(mine.all_special_ids) == sorted(other.all_special_ids)
    ids = ours.tokenize(["a dog runs, café"]).ids[0]
    assert mine.decode(ids) == other.decode(ids)
    assert mine.convert_ids_to_tokens(ids.tolist()) == other.convert_ids_to_tokens(ids.tolist())


def test_training_draws_and_learns_as_theirs(theirs: TextEncoder) -> None:
    """The same dropout from the same seed, and the same gradients: a run of seps train stays what it was."""
    ours, theirs = text_encoder("mini"), copy.deepcopy(theirs)
    batch = ours.tokenize(TEXTS[:3])
    losses = []
    for encoder in (ours, theirs):
        encoder.train()
        torch.manual_seed(5)
        loss = encoder(batch.ids, batch.mask)[batch.mask].square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=0)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-6, rtol=1e-4)


def test_saved_files_make_the_same_encoder_with_transformers(ours: TextEncoder, tmp_path: Path) -> None:
    assert save_text_files(ours, tmp_path / "text")
    again = text_encoder(tmp_path / "text", pretrained=False)
    again.load_state_dict(ours.state_dict())
    batch = again.tokenize(TEXTS[:3])
    assert torch.equal(batch.ids, ours.tokenize(TEXTS[:3]).ids)
    with torch.no_grad():
        found, expected = again(batch.ids, batch.mask), ours(batch.ids, batch.mask)
    torch.testing.assert_close(found[batch.mask], expected[batch.mask], atol=5e-6, rtol=0)


def test_a_copy_and_a_pickle_give_the_same(ours: TextEncoder) -> None:
    batch = ours.tokenize(TEXTS[:2])
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        again = other.tokenize(TEXTS[:2])
        assert torch.equal(again.ids, batch.ids)
        assert torch.equal(other(again.ids, again.mask), ours(batch.ids, batch.mask))


def test_random_weights_have_berts_spread() -> None:
    torch.manual_seed(0)
    state = load_bert(mini_text_folder(), pretrained=False).state_dict()
    assert abs(float(state["encoder.layer.3.output.dense.weight"].std()) - 0.02) < 1e-3
    assert (
        not state["encoder.layer.3.output.dense.bias"].any() and not state["embeddings.word_embeddings.weight"][0].any()
    )


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", "{", "BERT"),
        ("config.json", '{"model_type": "roberta"}', "BERT"),
        ("config.json", None, "BERT"),
        ("model.safetensors", "short", "bert"),
        ("tokenizer.json", "{", "tokenizer"),
        ("tokenizer.json", None, "tokenizer"),
    ],
)
def test_a_damaged_folder_is_a_sentence(tmp_path: Path, name: str, content: str | None, told: str) -> None:
    for part in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / part).symlink_to(mini_text_folder() / part)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)

    def load() -> Any:
        return load_bert(tmp_path), WordPieceTokenizer(tmp_path)

    with pytest.raises(EncoderUnavailable, match=told):
        load()


def test_a_bert_of_another_kind_is_refused(tmp_path: Path) -> None:
    BertConfig(100, 8, 1, 2, 16, hidden_act="relu").save(tmp_path)
    with pytest.raises(EncoderUnavailable, match="BERT"):
        BertConfig.read(tmp_path)
