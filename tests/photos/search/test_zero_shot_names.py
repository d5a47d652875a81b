"""Dual encoders by name, folder or hub id: what is downloaded, and what is said where one cannot be had."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from duals import dual_folder
from messages import naming
from seps.encoders import EncoderUnavailable
from seps.hub.folder import ModelError
from seps.retrieval.engine.loading import load_engine
from seps.retrieval.engine.vectors import VectorEngine

pytestmark = pytest.mark.usefixtures("no_network")


def test_wrong_names_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=naming("clop-b-32", "clip-b-32")):
        load_engine("clop-b-32")
    with pytest.raises(ModelError, match="reached"):
        load_engine("someone/clip")
    with pytest.raises(EncoderUnavailable, match="openai/clip-vit-base-patch32"):
        load_engine("clip-b-32")
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config.save_pretrained(tmp_path)
    with pytest.raises(EncoderUnavailable, match="bert"):
        load_engine(tmp_path)


def test_a_hub_model_of_another_kind_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked = []
    transformers.BertConfig().save_pretrained(tmp_path / "bert")

    def download(name: str, **more: Any) -> str:
        asked.append(more["allow_patterns"])
        return str(tmp_path / "bert")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(EncoderUnavailable, match="bert"):
        load_engine("google/bert")
    assert asked == [["config.json"]]


@pytest.mark.parametrize("converted", [True, False])
def test_weights_of_a_pickled_hub_model(converted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model published as a pickle alone is taken as the hub's service converted it, where it did."""
    import huggingface_hub

    main_branch, asked = tmp_path / "main", []
    shutil.copytree(dual_folder("clip"), main_branch)
    (main_branch / "model.safetensors").unlink()

    def download(name: str, revision: str | None = None, **more: Any) -> str:
        asked.append((revision, more["allow_patterns"]))
        return str(main_branch if revision is None else dual_folder("clip"))

    def discussions(self: Any, name: str, **more: Any) -> Any:
        assert more == {"author": "SFconvertbot", "discussion_type": "pull_request"}
        one = type("Discussion", (), {"git_reference": "refs/pr/7"})
        return iter([one] if converted else [])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_repo_discussions", discussions)
    if converted:
        assert isinstance(load_engine("clip-b-32"), VectorEngine)
        assert [revision for revision, _ in asked] == [None, None, "refs/pr/7"]
    else:
        with pytest.raises(EncoderUnavailable, match=naming("model.safetensors")):
            load_engine("openai/clip-vit-base-patch32")
    # A pickle is asked for only where the hub has nothing else; it is read by a restricted unpickler.
    pickles = any("bin" in pattern for _, patterns in asked for pattern in patterns)
    assert pickles is not converted


@pytest.mark.parametrize("kind", ["GatedRepoError", "RepositoryNotFoundError"])
def test_gated_and_missing_models_are_sentences(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(name: str, **more: Any) -> str:
        raise type(kind, (Exception,), {})()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=r"gated|no model someone/clip on the hub"):
        load_engine("someone/clip")
