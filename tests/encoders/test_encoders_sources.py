"""Where encoders come from, what is said when they cannot be had, and freezing."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from messages import naming
from seps.encoders import EncoderUnavailable, freeze, text_encoder, to_safetensors, unfreeze, vision_encoder


@pytest.fixture
def copied(saved: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(saved("bert"), folder)
    return folder


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vit-b-224", "google/vit-base-patch16-224-in21k"),
        ("some/model", "hf download some/model"),
        ("vitb", "vit-b-384"),
    ],
)
def test_a_model_that_is_not_here(name: str, words: str, local: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EncoderUnavailable, match=words) as caught:
        vision_encoder(name, local_files_only=local)
    assert "--local-dir" in str(caught.value) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "~/nowhere"])
def test_a_folder_that_is_not_there(name: str) -> None:
    with pytest.raises(EncoderUnavailable, match=naming(name)):
        text_encoder(name)


def test_other_kind_of_encoder(saved: Any) -> None:
    with pytest.raises(ValueError, match=naming("vit-b-224", "bert-base")):
        text_encoder("vit-b-224")
    with pytest.raises(ValueError, match="vision"):
        vision_encoder(saved("bert"))
    with pytest.raises(ValueError, match="text"):
        text_encoder(saved("vit"))


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("config.json", naming("config.json")),
        ("model.safetensors", naming("model.safetensors")),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_a_missing_file_is_named(copied: Path, gone: str, words: str) -> None:
    (copied / gone).unlink()
    with pytest.raises(EncoderUnavailable, match=words) as caught:
        text_encoder(copied)
    assert str(copied) in str(caught.value)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("config.json", naming("config.json")),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_a_broken_file_is_named(copied: Path, broken: str, words: str) -> None:
    (copied / broken).write_text("{ not what it should be")
    with pytest.raises(EncoderUnavailable, match=words):
        text_encoder(copied)


def test_weights_of_another_shape(copied: Path) -> None:
    path = copied / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 48}))
    with pytest.raises(EncoderUnavailable, match="bert"):
        text_encoder(copied)


def test_weights_that_leave_a_part_random(copied: Path) -> None:
    state = load_file(copied / "model.safetensors")
    kept = {name: value for name, value in state.items() if "layer.1.attention" not in name}
    assert len(kept) < len(state)
    save_file(kept, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EncoderUnavailable, match=r"layer.1.attention.*random"):
        text_encoder(copied)


def test_missing_pooler_does_not_matter(copied: Path) -> None:
    state = load_file(copied / "model.safetensors")
    kept = {name: value for name, value in state.items() if "pooler" not in name}
    assert len(kept) < len(state)
    save_file(kept, copied / "model.safetensors", metadata={"format": "pt"})
    assert text_encoder(copied).width == 32


def test_a_folder_may_hold_its_weights_as_a_pickle_that_is_read_safely(copied: Path) -> None:
    batch_of = text_encoder(copied)
    state = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    torch.save({**state, "tied": state[min(state)]}, copied / "pytorch_model.bin")
    pickled = text_encoder(copied)
    assert to_safetensors(copied) == copied / "model.safetensors"
    again = text_encoder(copied)
    batch = again.tokenize(["a dog"])
    for encoder in (pickled, again):
        assert torch.equal(encoder(batch.ids, batch.mask), batch_of(batch.ids, batch.mask))


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("owned"),))


def test_conversion_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(EncoderUnavailable, match="tensors"):
        to_safetensors(tmp_path)
    torch.save({"epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(EncoderUnavailable, match="tensors"):
        to_safetensors(tmp_path)
    assert not (tmp_path / "owned").exists() and not (tmp_path / "model.safetensors").exists()


def test_a_pickle_in_a_folder_runs_no_code(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied)
    (copied / "model.safetensors").unlink()
    torch.save({"embeddings.word_embeddings.weight": Evil()}, copied / "pytorch_model.bin")
    with pytest.raises(EncoderUnavailable, match="bert"):
        text_encoder(copied)
    assert not (copied / "owned").exists()


def test_without_transformers(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError("No module named 'transformers'")
        return original(name, *args, **kwargs)

    folder = saved("vit")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EncoderUnavailable, match=naming("seps[encoders]")):
        vision_encoder(folder)
    assert vision_encoder("mini", pretrained=False).width == 1280


def test_a_tower_saved_alone(saved: Any, tokenizer_saver: Any, tmp_path: Path) -> None:
    import transformers

    for family, cls in (("siglip", "SiglipTextModel"), ("clip", "CLIPTextModel")):
        folder = tmp_path / family
        getattr(transformers, cls).from_pretrained(saved(family)).save_pretrained(folder)
        tokenizer_saver(folder)
        alone, whole = text_encoder(folder), text_encoder(saved(family))
        batch = whole.tokenize(["a dog"])
        assert torch.equal(alone(batch.ids, batch.mask), whole(batch.ids, batch.mask))
    folder = tmp_path / "vision"
    transformers.CLIPVisionModel.from_pretrained(saved("clip")).save_pretrained(folder)
    pixels = torch.rand(1, 3, 32, 32)
    assert torch.equal(vision_encoder(folder)(pixels), vision_encoder(saved("clip"))(pixels))


@pytest.mark.parametrize("family", ["vit", "swin", "clip", "siglip", "dinov2"])
def test_freeze_upto(saved: Any, family: str) -> None:
    encoder = vision_encoder(saved(family))
    freeze(encoder, upto=1)
    trained = {name for name, value in encoder.named_parameters() if value.requires_grad}
    assert trained and not any("embeddings" in name or ".0." in name.split("blocks")[0] for name in trained)
    assert any(".1." in name for name in trained) and any("norm" in name for name in trained)
    freeze(encoder, upto=2)
    assert all("encoder" not in name for name, value in encoder.named_parameters() if value.requires_grad)
    freeze(encoder)
    assert not any(value.requires_grad for value in encoder.parameters())
    unfreeze(encoder)
    assert all(value.requires_grad for value in encoder.parameters())


def test_freeze_a_block_that_is_not_there(saved: Any) -> None:
    with pytest.raises(ValueError, match="2 blocks"):
        freeze(vision_encoder(saved("vit")), upto=3)
    with pytest.raises(ValueError, match="0 blocks"):
        freeze(torch.nn.Linear(2, 2), upto=0)


def test_a_preset_reads_what_the_hub_client_fetched(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fetch(
        model: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool, **_: object
    ) -> str:
        asked.append((model, allow_patterns))
        return str(saved("bert"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    encoder = text_encoder("bert-base")
    assert encoder.width == 32 and asked[0][0] == "bert-base-uncased"
    assert "model*.safetensors" in asked[0][1] and not any("bin" in pattern for pattern in asked[0][1])
    assert len(asked) == 1


def test_a_pickle_is_fetched_only_where_there_are_no_safetensors(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """openai/clip-vit-base-patch16 was published so."""
    asked: list[list[str]] = []
    state = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()

    def fetch(
        model: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool, **_: object
    ) -> str:
        asked.append(allow_patterns)
        if "pytorch_model.bin" in allow_patterns:
            torch.save(state, copied / "pytorch_model.bin")
        return str(copied)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert text_encoder("bert-base").width == 32
    assert [any("bin" in pattern for pattern in patterns) for patterns in asked] == [False, True]


@pytest.mark.parametrize(
    ("error", "words"),
    [("GatedRepoError", "login"), ("RepositoryNotFoundError", "some/model")],
)
def test_what_the_hub_refuses(error: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise type(error, (Exception,), {})("403")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(EncoderUnavailable, match=words):
        vision_encoder("some/model")
