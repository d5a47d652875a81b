"""OpenVINO, where installed, encodes many images of an evaluation in float32: the same tokens within rounding."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from seps.encoders.compiled import CompiledVision
from seps.retrieval.data import load_jsonl
from seps.retrieval.evaluate import encoding
from seps.retrieval.evaluate.encoding import encode_images, encode_readable
from seps.retrieval.pretrained import from_pretrained


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The precisions of the encoders that were compiled so far."""
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("could not import 'openvino'")
    monkeypatch.delenv("SEPS_OPENVINO")  # tests/conftest.py sets it
    made: list[str] = []
    plain = CompiledVision.__init__

    def counted(own: CompiledVision, vision: object, precision: str) -> None:
        made.append(precision)
        plain(own, vision, precision)  # type: ignore[arg-type]

    monkeypatch.setattr(CompiledVision, "__init__", counted)
    return made


def test_few_images_are_encoded_by_torch(dev_scenes: Path, compiled: list[str]) -> None:
    encode_images(from_pretrained("mini"), load_jsonl(dev_scenes))
    assert compiled == []


def test_many_images_are_encoded_in_float32(
    dev_scenes: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dataset = from_pretrained("mini"), load_jsonl(dev_scenes)
    expected = encode_images(model, dataset)
    monkeypatch.setattr(encoding, "MANY", len(dataset))
    found, (readable, _) = encode_images(model, dataset), encode_readable(model, dataset)
    assert compiled == ["f32", "f32"] and readable is not None
    assert torch.equal(found, readable)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
