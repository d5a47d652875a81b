"""Networks, heads and encoders of somebody's own, given as objects: training takes them, and loading asks for them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import seps
from ideas import FirstTwin, model_config, quietly, run_config
from messages import naming
from seps import registry
from seps.encoders import Preprocessing, TextEncoder, VisionEncoder, text_encoder
from seps.hub.folder import ModelError
from seps.method.config import ConfigError
from seps.retrieval.config import ModelConfig
from seps.retrieval.data import load_jsonl
from seps.retrieval.evaluate.run import evaluate
from seps.retrieval.heads import Head, Scores
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from seps.retrieval.train.run import train_model

pytestmark = pytest.mark.usefixtures("own_registry")


class Steady(Head):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, images, texts, *, want_masks=False):
        words = (texts.words * texts.mask[..., None]).sum(dim=1) * self.weight
        similarity = F.normalize(images.tokens.mean(dim=1), dim=-1) @ F.normalize(words, dim=-1).T
        return Scores(similarity, pixels=similarity)


class Tiles(VisionEncoder):
    def __init__(self) -> None:
        plain = Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        super().__init__(width=8, num_prefix_tokens=0, image_size=(32, 32), stride=(8, 8), preprocessing=plain)
        self.patches = nn.Conv2d(3, 8, kernel_size=8, stride=8)

    def encode(self, normalised):
        return self.patches(normalised).flatten(2).transpose(1, 2)


def own_network(encoders) -> FirstTwin:
    return FirstTwin(RetrievalModel(model_config(encoders)).head.net.config)


@pytest.mark.parametrize("part", ["network", "head", "vision"])
def test_training_takes_objects_and_loading_asks_for_them(encoders, scenes, dev_scenes, tmp_path, part):
    make = {"network": lambda: own_network(encoders), "head": lambda: Steady(16), "vision": Tiles}[part]
    mine = make()
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    config = run_config(encoders, scenes, dev_scenes)
    quietly(lambda: train_model(config, tmp_path / "run", device="cpu", **{part: mine}))
    assert any(not torch.equal(value, before[name]) for name, value in mine.state_dict().items())
    saved = json.loads((tmp_path / "run/model/config.json").read_text())
    assert saved["objects"] == {part: f"{type(mine).__module__}.{type(mine).__qualname__}"}
    for place in ("run", "run/model"):
        with pytest.raises(ModelError, match=naming(part, "from_pretrained", f"{part}=")):
            from_pretrained(tmp_path / place)
        model = from_pretrained(tmp_path / place, **{part: make()})
        found = model.head.net if part == "network" else getattr(model, part)
        assert type(found) is type(mine)
        for name, value in found.state_dict().items():
            torch.testing.assert_close(value, mine.state_dict()[name])
    data = load_jsonl(dev_scenes)
    quietly(lambda: evaluate(model, data, "none"))


def test_objects_are_saved_as_a_difference_too(encoders, tmp_path):
    for part, make in (("head", lambda: Steady(16)), ("network", lambda: own_network(encoders))):
        model = RetrievalModel(model_config(encoders), **{part: make()})
        save_pretrained(model, tmp_path / part, form="delta")
        again = from_pretrained(tmp_path / part, **{part: make()}).state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(again[name], value, atol=2e-3, rtol=2e-3)


def test_a_text_encoder_of_ones_own(encoders, tmp_path):
    class Louder(TextEncoder):
        def forward(self, ids, mask):
            return 2 * super().forward(ids, mask)

    @seps.register_encoder("plain", kind="text")
    def plain():
        return text_encoder(encoders["text"])

    @seps.register_encoder("louder", kind="text")
    def louder():
        made = plain()
        return Louder(made.model, made.tokenizer)

    for name in ("plain", "louder"):
        model = RetrievalModel(ModelConfig(vision=encoders["vision"], text=name, embed_size=16))
        save_pretrained(model, tmp_path / name)
    features = [from_pretrained(tmp_path / name).text for name in ("plain", "louder")]
    ids = features[0].tokenize(["a red square"])
    torch.testing.assert_close(2 * features[0](ids.ids, ids.mask), features[1](ids.ids, ids.mask))
    registry._IDEAS.clear()
    assert from_pretrained(tmp_path / "plain").config.text == "plain"  # its files are in the folder
    # Without the kind it would be registered as a vision encoder, and would still be missing.
    with pytest.raises(ModelError, match=naming("louder", "register_encoder", "kind='text'")):
        from_pretrained(tmp_path / "louder")
    with pytest.raises(ValueError, match=r"register_encoder\('louder', kind='text'\)"):
        text_encoder("louder", local_files_only=True)


def test_objects_that_do_not_fit_are_sentences(encoders):
    network = own_network(encoders)
    with pytest.raises(ConfigError, match=naming("head", "network")):
        RetrievalModel(model_config(encoders), head=Steady(16), network=network)
    with pytest.raises(ConfigError, match=naming("embed_size=16", "32")):
        RetrievalModel(model_config(encoders, embed_size=32), network=network)
    with pytest.raises(ConfigError, match=naming("head='slimming'")):
        RetrievalModel(model_config(encoders, head="mean"), network=network)
    with pytest.raises(ConfigError, match="head"):
        RetrievalModel(model_config(encoders, head="own"))
    seps.register_head("odd")(lambda config: nn.Identity())
    with pytest.raises(ConfigError, match="'odd'"):
        RetrievalModel(model_config(encoders, head="odd"))
    for preset in ("vit-b-224", "dinov2-s-focus"):
        seps.register_encoder(preset)(Tiles)
        with pytest.raises(ValueError, match="preset"):
            RetrievalModel(ModelConfig(vision=preset))
