"""Saved re-identification models: the same features again, with a card, and the checks of every model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from reid_toys import SENSORS, ToyEncoder, toy_config

import seps
from messages import naming
from seps.hub.folder import ModelError
from seps.reid.network.model import ReidModel
from seps.reid.pretrained import from_pretrained, save_pretrained
from seps.reid.run import load_trained
from seps.reid.trained import TrainedReid
from tiny import save_vision_encoder


def made(**model: object) -> TrainedReid:
    config = toy_config(Path("/secret/photos"), model=model)
    return TrainedReid(ReidModel(config.model, SENSORS, 5, 2).eval(), config, (1, 4), Path("run"))


def features(model: ReidModel) -> torch.Tensor:
    images = torch.rand(2, 3, 3, *model.config.image_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.embed(images).pattern(3)


@pytest.mark.parametrize("encoder", ["mini", "vit", "vit, overlapping"])
def test_round_trip_gives_identical_features(tmp_path: Path, encoder: str) -> None:
    settings: dict[str, object] = {"encoder": "mini", "backbones": "separate"}
    if encoder != "mini":
        folder = save_vision_encoder(tmp_path / "vit")
        settings = {"encoder": str(folder), "stride": 4 if "overlapping" in encoder else None}
    trained = made(**settings)
    expected = features(trained.model)
    save_pretrained(trained, tmp_path / "saved", about={"figures": [{"present": ["RGB", "NI"], "mAP": 0.5}]})
    shutil.rmtree(tmp_path / "vit", ignore_errors=True)
    for back in (from_pretrained(tmp_path / "saved"), load_trained(tmp_path / "saved")):
        assert torch.equal(features(back.model), expected)
        assert back.cameras == (1, 4) and back.model.modalities == SENSORS
    card = (tmp_path / "saved" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == "image-feature-extraction"
    assert "RGB, NI | 0.500" in card
    assert "/secret" not in card + (tmp_path / "saved" / "config.json").read_text()


def test_other_and_hostile_folders_are_refused(tmp_path: Path) -> None:
    save_pretrained(made(), tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    good = json.loads(path.read_text())
    for change, sentence in (
        ({"application": "retrieval"}, "configuration"),
        ({"weights": {"file": "../x.safetensors"}}, "inside"),
        ({"encoders": {"vision": "../vit"}}, "inside"),
        ({"reid": {**good["reid"], "model": {**good["reid"]["model"], "encoder": "/vit"}}}, "files"),
        ({"reid": {"nonsense": {}}}, "build"),
        ({"identities": None}, "build"),
        ({"identities": "many"}, "build"),
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ModelError, match=sentence):
            from_pretrained(tmp_path / "saved")
    with pytest.raises(ModelError, match="model"):
        from_pretrained(tmp_path / "none")


def test_an_encoder_of_ones_own_is_saved_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model was saved without a word, and no call could load the folder again."""
    monkeypatch.setattr("seps.registry._IDEAS", {})
    seps.register_encoder("toy")(ToyEncoder.of_size)
    trained = made(encoder="toy", stride=None)
    expected = features(trained.model)
    save_pretrained(trained, tmp_path / "saved")
    assert torch.equal(features(from_pretrained(tmp_path / "saved").model), expected)
    monkeypatch.setattr("seps.registry._IDEAS", {})
    with pytest.raises(ModelError, match=naming("'toy'", "@seps.register_encoder")):
        from_pretrained(tmp_path / "saved")


def test_an_encoder_that_no_folder_can_name_is_not_saved(tmp_path: Path) -> None:
    config = toy_config(tmp_path)
    model = ReidModel(config.model, SENSORS, 5, 2, [ToyEncoder()]).eval()
    with pytest.raises(ModelError, match=naming("ToyEncoder", "register_encoder")):
        save_pretrained(TrainedReid(model, config, (1, 4), Path("run")), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
