"""Weights saved under another release of transformers find their place, and give what they gave there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from make_old_releases import FAMILIES, TOWERS, build
from safetensors.torch import load_file

from seps.hub.tensor_names import common_form, fitted, renamed

OLD = Path(__file__).parent / "old_releases"
VERSIONS = sorted(path.stem.removeprefix("names-") for path in OLD.glob("names-*.json"))


def names(version: str, family: str) -> dict[str, list[int]]:
    return json.loads((OLD / f"names-{version}.json").read_text())[family]


def test_both_old_releases_are_there() -> None:
    assert VERSIONS == ["4.57.6", "5.17.0"]


@pytest.mark.parametrize("version", ["4.57.6", "5.17.0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_of_an_old_release_has_its_place(version: str, family: str) -> None:
    old = names(version, family)
    new = {name: list(value.shape) for name, value in build(family).state_dict().items()}
    assert fitted(old, new) == new
    # No two tensors of one model may be mistaken for one another, in either release.
    for layout in (old, new):
        assert len({common_form(name) for name in layout}) == len(layout)


def test_a_folder_of_this_release_loads_under_the_oldest_of_our_pin() -> None:
    for family in FAMILIES:
        old = names("5.17.0", family)
        new = {name: list(value.shape) for name, value in build(family).state_dict().items()}
        assert fitted(new, old) == old


@pytest.mark.parametrize(
    ("version", "family"), [(version, family) for version in VERSIONS for family in TOWERS[version[0]]]
)
def test_weights_of_an_old_release_give_what_they_gave_there(version: str, family: str) -> None:
    held = load_file(OLD / f"towers-{version}.safetensors")
    mine = {name.removeprefix(f"{family}//"): held[name] for name in held if name.startswith(f"{family}//")}
    pixels, output = mine.pop("pixels"), mine.pop("output")
    model = build(family)
    own = model.state_dict()
    assert set(mine) != set(own), "the names did not change, so this test would prove nothing"
    model.load_state_dict(fitted(mine, own), strict=True)
    with torch.no_grad():
        # Swin sums its attention in another order since: 1.3e-6 at the most. A swapped tensor is off by 0.1.
        torch.testing.assert_close(model(pixels).last_hidden_state, output, atol=3e-6, rtol=1e-5)


def test_names_that_fit_stay_and_a_place_is_never_given_twice() -> None:
    query, projection = "encoder.layer.0.attention.attention.query.weight", "encoder.layer.0.attention.q_proj.weight"
    assert renamed([query], [projection]) == {query: projection}
    assert renamed([projection, query], [projection]) == {projection: projection, query: query}
    self_query = query.replace("attention.attention", "attention.self")
    assert renamed([query, self_query], [projection]) == {query: query, self_query: self_query}
    assert fitted({"a.b": 1}, ["c"]) == {"a.b": 1}
    assert transformers.__version__ not in VERSIONS
