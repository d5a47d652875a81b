"""Saved models: the same scores again, from a folder or a hub, whole or not at all, and nothing unsafe is read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from messages import naming
from seps.hub import folder as model_folder
from seps.hub import saving as model_saving
from seps.hub.folder import ModelError
from seps.retrieval.config import ModelConfig
from seps.retrieval.embedded import embedded_folder, undelta
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained

TEXTS = ["a red square on the left .", "a blue circle ."]


def make_model(encoders, seed: int = 0) -> RetrievalModel:
    torch.manual_seed(seed)
    config = ModelConfig(encoders["vision"], encoders["text"], embed_size=16, slimming={"aggr_ratio": 0.5})
    return RetrievalModel(config).eval()


def scores(model: RetrievalModel) -> torch.Tensor:
    pixels = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        images = ImageFeatures(model.encode_pixels(pixels), *model.encode_descriptions([TEXTS[0], None, TEXTS[1]]))
        return model.score(images, model.encode_texts(TEXTS))


class Bomb:
    def __reduce__(self):
        return os.system, ("echo unpickled > pwned",)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with the repositories of a folder; files arrive as the real client's patterns let them."""
    root = tmp_path / "hub"
    calls = []

    def snapshot_download(
        repo_id, *, revision=None, allow_patterns=None, local_files_only=False, token=None, cache_dir=None
    ):
        calls.append((repo_id, revision, local_files_only))
        source = root / repo_id
        if not source.is_dir():
            raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)  # made without the answer it wants
        target = tmp_path / "cache" / repo_id
        names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return root, calls


def test_round_trip_gives_identical_scores_without_the_encoders_folders(encoders, tmp_path):
    copies = {kind: shutil.copytree(path, tmp_path / kind) for kind, path in encoders.items()}
    model = make_model({kind: str(path) for kind, path in copies.items()})
    expected = scores(model)
    save_pretrained(model, tmp_path / "saved")
    for path in copies.values():
        shutil.rmtree(path)
    moved = shutil.move(tmp_path / "saved", tmp_path / "elsewhere")
    assert torch.equal(scores(from_pretrained(moved)), expected)
    assert sorted(path.name for path in Path(moved).iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "text",
        "vision",
    ]


def test_hub_id_fetches_safe_files_of_a_revision(encoders, tmp_path, hub, monkeypatch):
    root, calls = hub
    monkeypatch.chdir(tmp_path)
    model = make_model(encoders)
    save_pretrained(model, root / "people" / "model")
    torch.save(Bomb(), root / "people" / "model" / "training_args.bin")
    (root / "people" / "model" / "modeling.py").write_text("raise SystemExit")
    assert torch.equal(scores(from_pretrained("people/model", revision="v1")), scores(model))
    assert calls == [("people/model", "v1", False)]
    fetched = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert "model.safetensors" in fetched and "tokenizer.json" in fetched
    assert not fetched & {"training_args.bin", "modeling.py"} and not Path("pwned").exists()


def test_a_local_folder_comes_before_the_hub(encoders, tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(make_model(encoders), "people/model")
    from_pretrained("people/model")
    assert hub[1] == []


@pytest.mark.parametrize("name", ["nowhere", "./a/b", "/a/b", "a/b/c", "../b", "a/"])
def test_what_is_no_hub_id_never_asks_the_hub(name, hub, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError, match="model"):
        from_pretrained(name)
    assert hub[1] == []


def test_absent_and_unreachable_hub_models_get_a_sentence(hub, monkeypatch):
    with pytest.raises(ModelError, match="people/none"):
        from_pretrained("people/none")

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=naming("people/none", "--local-dir")):
        from_pretrained("people/none")
    with pytest.raises(ModelError, match="allowed"):
        from_pretrained("people/none", local_files_only=True)


def test_the_card_has_a_header_that_hubs_read_and_the_figures(encoders, tmp_path):
    side = {"r1": 10.0, "r5": 20.0, "r10": 30.0}
    figures = [{"dataset": "x/dev", "protocol": "none", "images": 5, "rsum": 120.0, "i2t": side, "t2i": side}]
    about = {"license": "mit", "name": 'odd: "name" | here', "figures": figures}
    save_pretrained(make_model(encoders), tmp_path / "m", about=about)
    text = (tmp_path / "m" / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header["license"] == "mit" and header["library_name"] == "seps" and "seps" in header["tags"]
    assert header["pipeline_tag"] == "feature-extraction"
    assert "| x/dev | `none` | 5 | 120.0 | 10.0 |" in text and 'from_pretrained("m")' in text
    assert "aggr_ratio | 0.5" in text
    save_pretrained(make_model(encoders), tmp_path / "bare")
    bare = (tmp_path / "bare" / "README.md").read_text()
    assert 'license: "unknown"' in bare and "recorded" in bare


@pytest.mark.parametrize("fails", ["save_file", "replace"])
def test_a_failed_save_leaves_the_model_that_was_there(encoders, tmp_path, monkeypatch, fails):
    first, second = make_model(encoders, 0), make_model(encoders, 1)
    save_pretrained(first, tmp_path / "m")
    before = scores(first)
    calls = []

    def broken(*args, **kwargs):
        calls.append(args)
        if fails == "save_file" or len(calls) == 4:
            raise OSError(28, "No space left on device")
        return os.rename(*args)

    with monkeypatch.context() as patch:
        patch.setattr(model_saving if fails == "save_file" else model_saving.os, fails, broken)
        with pytest.raises(ModelError, match="saved"):
            save_pretrained(second, tmp_path / "m")
    assert torch.equal(scores(from_pretrained(tmp_path / "m")), before)
    save_pretrained(second, tmp_path / "m")
    assert torch.equal(scores(from_pretrained(tmp_path / "m")), scores(second))


def test_saving_again_leaves_one_model_and_foreign_files(encoders, tmp_path):
    for seed in range(3):
        save_pretrained(make_model(encoders, seed), tmp_path / "m")
        (tmp_path / "m" / "notes.txt").write_text("mine")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 1
    assert len([path for path in (tmp_path / "m").iterdir() if path.is_dir()]) == 2
    assert (tmp_path / "m" / "notes.txt").exists()


SAVE_FOREVER = """
import sys
from seps.retrieval.pretrained import from_pretrained, save_pretrained
models = [from_pretrained(name) for name in sys.argv[2:]]
print("ready", flush=True)
while True:
    for model in models:
        save_pretrained(model, sys.argv[1])
"""


@pytest.mark.slow
def test_killed_saves_leave_one_of_the_models_whole(encoders, tmp_path):
    models = [make_model(encoders, seed) for seed in (0, 1)]
    for number, model in enumerate(models):
        save_pretrained(model, tmp_path / str(number))
    allowed = [scores(model) for model in models]
    save_pretrained(models[0], tmp_path / "m")
    source = str(Path(model_folder.__file__).parents[2])
    arguments = [str(tmp_path / name) for name in ("m", "0", "1")]
    with subprocess.Popen(
        [sys.executable, "-c", SAVE_FOREVER, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.4)
        process.kill()
    found = scores(from_pretrained(tmp_path / "m"))
    assert any(torch.equal(found, expected) for expected in allowed)
    save_pretrained(models[1], tmp_path / "m")
    assert len(list((tmp_path / "m").iterdir())) == 5


def test_pickled_weights_are_refused(encoders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(make_model(encoders), "m")
    weights = Path("m/model.safetensors")
    weights.unlink()
    torch.save(Bomb(), "m/pytorch_model.bin")
    with pytest.raises(ModelError, match=naming("pytorch_model.bin")):
        from_pretrained("m")
    change_config("m", weights={"file": "pytorch_model.bin"})
    with pytest.raises(ModelError, match=r"only \.safetensors"):
        from_pretrained("m")
    os.rename("m/pytorch_model.bin", weights)
    change_config("m", weights={"file": "model.safetensors"})
    with pytest.raises(ModelError, match="read"):
        from_pretrained("m")
    assert not Path("pwned").exists()


def change_config(folder, **changes):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_names_that_lead_out_of_the_folder_are_refused(encoders, tmp_path):
    save_pretrained(make_model(encoders), tmp_path / "m")
    save_file({"x": torch.ones(1)}, tmp_path / "outside.safetensors")
    good = json.loads((tmp_path / "m" / "config.json").read_text())
    outside = str(tmp_path / "outside.safetensors")
    for name in ("../outside.safetensors", outside, "a/../../outside.safetensors", "~/x.safetensors", "..\\x", "", 3):
        change_config(tmp_path / "m", weights={"file": name})
        with pytest.raises(ModelError, match="inside"):
            from_pretrained(tmp_path / "m")
    for place in ("..", "../vision", encoders["vision"]):
        change_config(tmp_path / "m", weights=good["weights"], encoders={**good["encoders"], "vision": place})
        with pytest.raises(ModelError, match="inside"):
            from_pretrained(tmp_path / "m")


def test_encoders_named_by_paths_are_refused_where_they_lead_out(encoders, tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_model(encoders)
    save_pretrained(model, hub[0] / "people" / "delta", form="delta")
    with pytest.raises(ModelError, match="leads"):
        from_pretrained("people/delta")
    assert torch.allclose(scores(from_pretrained(hub[0] / "people" / "delta")), scores(model), atol=1e-2)
    config = json.loads((hub[0] / "people" / "delta" / "config.json").read_text())
    change_config(hub[0] / "people" / "delta", model={**config["model"], "text": "../../bert"})
    with pytest.raises(ModelError, match="leads"):
        from_pretrained(hub[0] / "people" / "delta")


def test_a_configuration_with_values_of_another_kind_is_a_sentence(encoders, tmp_path):
    """Edited by hand or damaged: each ended in a traceback."""
    save_pretrained(make_model(encoders), tmp_path / "model")
    good = json.loads((tmp_path / "model" / "config.json").read_text())
    for changes in (
        {"format": "new"},
        {"encoders": True},
        {"model": {**good["model"], "vision": None}},
        {"model": {**good["model"], "text": [1]}},
    ):
        change_config(tmp_path / "model", **{**good, **changes})
        with pytest.raises(ModelError, match=r"config\.json"):
            from_pretrained(tmp_path / "model")
    slimming = {**good["model"]["slimming"], "extra_guides": "x"}
    change_config(tmp_path / "model", **{**good, "model": {**good["model"], "slimming": slimming}})
    with pytest.raises(ValueError, match=naming("extra_guides", "'x'")):
        from_pretrained(tmp_path / "model")


def test_changed_weights_are_noticed(encoders, tmp_path):
    save_pretrained(make_model(encoders), tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match=naming("config.json")):
        from_pretrained(tmp_path / "m")


@pytest.mark.parametrize("form", ["delta", "full"])
def test_a_tensor_of_another_shape_is_refused_and_never_broadcast(encoders, tmp_path, form):
    """torch takes a vector for a number, and a sum with a delta would spread a single value over a whole tensor."""
    save_pretrained(make_model(encoders), tmp_path / "m", form=form)
    file = tmp_path / "m" / "model.safetensors"
    tensors, refused = load_file(file), 0
    single = [name for name, tensor in tensors.items() if tensor.dim() == 0 and not name.startswith("scale.")]
    short = [name for name, tensor in tensors.items() if tensor.dim() == 1 and len(tensor) > 1]
    assert single and short
    wrong = {name: tensors[name][None].clone() for name in single}
    wrong |= {name: tensors[name][:1].clone() for name in short if not name.startswith("scale.")}
    wrong |= {name: tensors[name][None].clone() for name in short[:3]}
    for name, tensor in wrong.items():
        save_file({**tensors, name: tensor}, file)
        change_config(tmp_path / "m", weights=model_folder.describe_weights(file))
        with pytest.raises(ModelError, match=naming("model.safetensors")):
            from_pretrained(tmp_path / "m")
        refused += 1
    assert refused == len(wrong) > 5
    whole = {"vision.bias": torch.zeros(4)}
    assert undelta(whole, {"delta.vision.bias": torch.ones(1, dtype=torch.float16)})["vision.bias"].shape == (1,)


def test_the_embedded_model_states_its_own_weights():
    config = model_folder.read_config(embedded_folder())
    assert config["weights"] == model_folder.describe_weights(embedded_folder() / "model.safetensors")


def test_a_vision_transformer_of_our_own_is_saved_whole_in_8_bits(encoders, tmp_path):
    """Its first weights are not needed again; scores move by the rounding alone, and the text is a difference."""
    torch.manual_seed(0)
    config = ModelConfig(
        encoders["vision"],
        encoders["text"],
        embed_size=16,
        slimming={"aggr_ratio": 0.5},
        prune={"keep": 0.5, "blocks": [1]},
        special_tokens=False,
    )
    model = RetrievalModel(config).eval()
    expected = scores(model)
    save_pretrained(model, tmp_path / "small", form="delta")
    state = model_folder.read_weights(tmp_path / "small", model_folder.read_config(tmp_path / "small"))[0]
    assert state["int8.vision.blocks.0.fc1.weight"].dtype == torch.int8
    assert not [name for name in state if "text." in name]  # the text encoder is the pretrained one
    moved = shutil.copytree(encoders["vision"], tmp_path / "elsewhere")
    shutil.rmtree(encoders["vision"])
    try:
        again = from_pretrained(tmp_path / "small")
    finally:
        shutil.copytree(moved, encoders["vision"])
    assert again.vision.prune == model.vision.prune and not again.config.special_tokens
    torch.testing.assert_close(scores(again), expected, atol=0.02, rtol=0)
    for name, tensor in model.vision.named_parameters():
        error = (again.vision.get_parameter(name) - tensor).abs().max()
        assert error <= tensor.abs().max() / 127, name
