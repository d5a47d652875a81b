"""The embedded model without torch gives the vectors of the torch model."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from seps.images.decoding import read_image
from seps.images.sources import ImageSource
from seps.retrieval.heads import TextFeatures
from seps.retrieval.light.model import LightModel
from seps.retrieval.light.text import gelu
from seps.retrieval.light.vision import bicubic
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import embedded_folder, from_pretrained

TEXTS = [
    "a dog",
    "two children play football on green grass",
    "Cafés, naïve façades & 3 umbrellas!",
    "...",
    "sunset over the sea " * 60,
]


@pytest.fixture(scope="module")
def light() -> LightModel:
    return LightModel()


@pytest.fixture(scope="module")
def whole() -> RetrievalModel:
    return from_pretrained("base")


def test_sentences_are_those_of_torch(light: LightModel, whole: RetrievalModel) -> None:
    ours, theirs = light.sentences(TEXTS), whole.encode_texts(TEXTS).mean_word.numpy()
    assert np.abs(ours - theirs).max() < 2e-5 and np.allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)
    described = TextFeatures(*whole.encode_descriptions(TEXTS)).mean_word.numpy()
    assert np.abs(light.descriptions(TEXTS) - described).max() < 2e-5
    assert np.abs(described[0] - theirs[0]).max() > 1e-2  # a short query has its own projection


def test_texts_that_cannot_be_read_are_refused(light: LightModel) -> None:
    with pytest.raises(ValueError, match="list of texts"):
        light.sentences("a dog")
    with pytest.raises(ValueError, match="Unicode"):
        light.sentences(["a \ud800 dog"])


@torch.no_grad()
def test_pictures_are_those_of_torch(light: LightModel, whole: RetrievalModel) -> None:
    paths = sorted(embedded_folder("gallery").glob("*.jpg"))[:2]
    pixels = torch.stack([read_image(ImageSource(path), whole.image_size) for path in paths])
    patches = whole.encode_pixels(pixels / 255)[:, whole.vision.num_prefix_tokens :]
    theirs = F.normalize(patches.mean(dim=1), dim=-1).numpy()
    assert np.abs(light.pictures(paths) - theirs).max() < 2e-5


def test_functions_are_those_of_torch() -> None:
    x = torch.linspace(-6, 6, 1001)
    assert np.abs(gelu(x.numpy()) - F.gelu(x).numpy()).max() < 2e-6
    for before, after in ((37, 20), (5, 9)):
        table = torch.randn(1, 1, before, before)
        theirs = F.interpolate(table, size=(after, after), mode="bicubic", align_corners=False)[0, 0].numpy()
        ours = bicubic(before, after) @ table[0, 0].numpy() @ bicubic(before, after).T
        assert np.abs(ours - theirs).max() < 1e-5


def test_no_torch_is_imported() -> None:
    code = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from seps.retrieval.light.model import LightModel
model, files = LightModel(), [Path(name) for name in sys.argv[1:]]
print((model.sentences(["a cup of coffee", "a black dog"]) @ model.pictures(files).T).argmax(axis=0).tolist())
"""
    names = [str(embedded_folder("gallery") / f"{name}.jpg") for name in ("black-dog-floor", "coffee-cup")]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert done.stdout.strip() == "[1, 0]", done.stderr
