"""Indexing with OpenVINO where it is installed: the same tokens within rounding, from any thread, and a way back."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from seps.cli.main import call
from seps.encoders import PruneConfig, ViT, compiled
from seps.encoders.compiled import CompiledVision, can_compile, compiled_vision
from seps.encoders.vit import ViTConfig
from seps.retrieval.index import embedding
from seps.retrieval.index.rows import StoreSettings
from seps.retrieval.pretrained import embedded_folder, from_pretrained

SMALL = ViTConfig(patch_size=8, width=32, depth=2, heads=2, hidden=64, grid=(4, 4))


def small_vit(seed: int = 0, **options: object) -> ViT:
    torch.manual_seed(seed)
    vit = ViT(SMALL, (32, 32), **options)  # type: ignore[arg-type]
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return vit


def pixels(count: int, side: int = 32) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_float32_tokens_differ_from_torch_by_rounding_alone() -> None:
    pytest.importorskip("openvino")
    vit, mini = small_vit(), from_pretrained("mini").vision
    for vision, side in ((vit, 32), (mini, mini.image_size[0])):
        images = pixels(2, side)
        made, expected = CompiledVision(vision, "f32")(images), vision(images)
        assert made.shape == expected.shape and made.dtype == torch.float32
        assert (made - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.no_grad()
def test_threads_get_the_tokens_of_their_own_pictures() -> None:
    """A request writes where it wrote before: tokens that are not copied, or a shared request, would be another's."""
    pytest.importorskip("openvino")
    vision, images = CompiledVision(small_vit(), "f32"), pixels(24)
    alone = [vision(one[None]) for one in images]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: vision(one[None]), [*images] * 8))
    assert all(torch.equal(made, alone[i % 24]) for i, made in enumerate(together))
    assert torch.equal(vision(images), torch.cat(alone))


@torch.no_grad()
def test_bfloat16_stays_within_its_rounding() -> None:
    pytest.importorskip("openvino")
    model = from_pretrained("base")
    images = pixels(1, 224)
    exact, half = model.encode_pixels(images), model.encode_pixels(images, CompiledVision(model.vision, "bf16"))
    cosines = torch.nn.functional.cosine_similarity(exact, half, dim=-1)
    assert cosines.min() > 0.99 and cosines.mean() > 0.999


@pytest.mark.parametrize("use", ["compiled.CompiledVision(ViT(SMALL, (32, 32)), 'f32')", "doctor.CHECKS['fast'][1]()"])
def test_openvino_reports_nothing_to_its_makers(use: str, tmp_path: Path) -> None:
    """A package in the place of the one that reports is not even imported."""
    pytest.importorskip("openvino")
    told = tmp_path / "told"
    (tmp_path / "openvino_telemetry.py").write_text(f"open({str(told)!r}, 'w').close()\n")
    start = "from seps import doctor; from seps.encoders import ViT, compiled; from seps.encoders.vit import *; "
    small = "SMALL = ViTConfig(patch_size=8, width=32, depth=2, heads=2, hidden=64, grid=(4, 4)); "
    path = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run([sys.executable, "-c", start + small + use], check=True, env={**os.environ, "PYTHONPATH": path})
    assert not told.exists()


def test_only_encoders_that_were_measured_are_compiled() -> None:
    class Own(ViT):
        """An encoder of somebody's own, whose forward pass may do anything."""

    assert can_compile(small_vit()) and can_compile(from_pretrained("mini").vision)
    assert not can_compile(Own(SMALL, (32, 32)))
    assert not can_compile(small_vit(prune=PruneConfig(0.5, (1,), "merge")))


def test_without_the_package_torch_encodes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_installed", lambda: False)
    monkeypatch.setattr(embedding, "multiplies_bfloat16", lambda: False)
    assert embedding.fast_vision(from_pretrained("mini")) is None
    monkeypatch.setattr(embedding, "multiplies_bfloat16", lambda: True)
    assert isinstance(embedding.fast_vision(from_pretrained("base")), ViT)


def test_with_the_package_it_encodes_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    model = from_pretrained("mini")
    assert embedding.fast_vision(model) is None  # conftest.py sets SEPS_OPENVINO=0
    monkeypatch.delenv("SEPS_OPENVINO")
    assert isinstance(embedding.fast_vision(model), CompiledVision)


def test_a_package_that_fails_is_told_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "openvino", types.ModuleType("openvino"))
    monkeypatch.delitem(sys.modules, "openvino.frontend", raising=False)
    with pytest.warns(UserWarning, match="torch encodes"):
        assert compiled_vision(small_vit(), "f32") is None


def test_a_long_run_without_it_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "is_installed", lambda: False)
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cup.jpg").write_bytes((embedded_folder("gallery") / "coffee-cup.jpg").read_bytes())
    command = ["--model", "mini", "--no-bank"]
    assert call("index", [str(photos), "--store", str(tmp_path / "short"), *command]) == 0
    assert compiled.TIP not in capsys.readouterr().out
    monkeypatch.setattr("seps.cli.pictures.index.LONG_SECONDS", 0.0)
    assert call("index", [str(photos), "--store", str(tmp_path / "long"), *command]) == 0
    assert compiled.TIP in capsys.readouterr().out


def test_the_encoder_is_chosen_for_the_device_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may move the model of the driver to a GPU; a copy made before would stay on the CPU."""
    monkeypatch.setattr(embedding, "multiplies_bfloat16", lambda: True)
    model = from_pretrained("base")
    prepare = embedding.Preparer(model, StoreSettings.__new__(StoreSettings))
    model.to("meta")
    assert prepare.vision is None
