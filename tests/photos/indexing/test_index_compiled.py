"""Indexing with OpenVINO where it is installed: the same tokens within rounding, from any thread, and a way back."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from seps.cli.main import call
from seps.encoders import PruneConfig, ViT, compiled
from seps.encoders.compiled import CompiledVision, can_compile, compiled_vision, load_openvino
from seps.encoders.vit import ViTConfig
from seps.encoders.vit.pruning import PruneKind
from seps.images.decoding import read_image
from seps.images.sources import ImageSource
from seps.photos.indexing import embedding
from seps.retrieval.embedded import embedded_folder
from seps.retrieval.engine import faster
from seps.retrieval.engine.layout import PatchLayout
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.pretrained import from_pretrained

SMALL = ViTConfig(patch_size=8, width=32, depth=2, heads=2, hidden=64, grid=(4, 4))


def needs_openvino() -> None:
    """Skip without the package. Not `importorskip`, whose import reports itself to the makers of OpenVINO."""
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("could not import 'openvino'")
    load_openvino()


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
    needs_openvino()
    vit, mini = small_vit(), from_pretrained("mini").vision
    for vision, side in ((vit, 32), (mini, mini.image_size[0])):
        images = pixels(2, side)
        made, expected = CompiledVision(vision, "f32")(images), vision(images)
        assert made.shape == expected.shape and made.dtype == torch.float32
        assert (made - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.no_grad()
def test_threads_get_the_tokens_of_their_own_pictures() -> None:
    """A request writes where it wrote before: tokens that are not copied, or a shared request, would be another's."""
    needs_openvino()
    vision, images = CompiledVision(small_vit(), "f32"), pixels(24)
    alone = [vision(one[None]) for one in images]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: vision(one[None]), [*images] * 8))
    assert all(torch.equal(made, alone[i % 24]) for i, made in enumerate(together))
    assert torch.equal(vision(images), torch.cat(alone))


@pytest.mark.slow
@torch.no_grad()
def test_bfloat16_stays_within_its_rounding() -> None:
    needs_openvino()
    model = from_pretrained("base")
    images = pixels(1, model.image_size[0])
    exact, half = model.encode_pixels(images), model.encode_pixels(images, CompiledVision(model.vision, "bf16"))
    cosines = torch.nn.functional.cosine_similarity(exact, half, dim=-1)
    assert cosines.min() > 0.99 and cosines.mean() > 0.999


@pytest.mark.slow
@torch.no_grad()
def test_eight_bits_stay_near_on_photos() -> None:
    """On photos: random pixels give tokens that no photo has."""
    needs_openvino()
    model, folder = from_pretrained("base"), embedded_folder("gallery")
    names = ("coffee-cup.jpg", *(path.name for path in sorted(folder.glob("*.jpg"))[:3]))
    images = torch.stack([read_image(ImageSource(folder / name), model.image_size) for name in names]).float() / 255
    exact, rounded = model.encode_pixels(images), model.encode_pixels(images, CompiledVision(model.vision, "int8"))
    cosines = torch.nn.functional.cosine_similarity(exact, rounded, dim=-1)
    assert cosines.mean() > 0.998 and cosines.min() > 0.9


def test_weights_of_linear_layers_are_rounded_with_one_scale_per_output() -> None:
    """Against the same by hand, with products in float32; other products keep their weights."""
    needs_openvino()
    from openvino import Core, Model, opset13

    values = np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32)
    values[2] *= 100
    pixels_in = opset13.parameter([1, 3, 16], np.float32)
    linear = opset13.matmul(pixels_in, opset13.constant(values), False, True)
    last = opset13.matmul(linear, opset13.constant(values), False, False)
    graph = Model([opset13.result(last)], [pixels_in])
    compiled._round_weights(graph)
    ours = np.random.default_rng(1).normal(size=(1, 3, 16)).astype(np.float32)
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    found = Core().compile_model(graph, "CPU", exact)(ours)[0]
    units = [max(map(abs, row)) / 127 for row in values]
    by_hand = np.array([[round(v / unit) * unit for v in row] for row, unit in zip(values, units, strict=True)])
    assert np.abs(by_hand - values).max() > 0.1  # rounding is seen
    assert found == pytest.approx(ours @ by_hand.T @ values, rel=1e-4, abs=1e-2)


def test_the_precision_is_what_the_processor_is_fast_with(monkeypatch: pytest.MonkeyPatch) -> None:
    has: set[str] = set()
    monkeypatch.setattr(compiled, "_processor_has", lambda name: name in has)
    wide = ViT(ViTConfig(patch_size=8, width=128, depth=1, heads=2, hidden=256, grid=(4, 4)), (32, 32))
    asked = (wide, small_vit(), from_pretrained("mini").vision)
    expected = {
        (): ("f32", "f32", "f32"),
        ("vnni",): ("f32", "f32", "f32"),
        ("avx512_bf16",): ("bf16", "bf16", "bf16"),
        ("avx512_bf16", "vnni"): ("int8", "bf16", "bf16"),
        ("avx512_bf16", "vnni", "amx_tile"): ("bf16", "bf16", "bf16"),
    }
    for names, precisions in expected.items():
        has.clear()
        has.update(names)
        assert tuple(map(compiled.fastest_precision, asked)) == precisions


def test_openvino_reports_nothing_to_its_makers(tmp_path: Path) -> None:
    """A package in the place of the one that reports is not even imported."""
    needs_openvino()
    told = tmp_path / "told"
    (tmp_path / "openvino_telemetry.py").write_text(f"open({str(told)!r}, 'w').close()\n")
    start = "from seps import doctor; from seps.encoders import ViT, compiled; from seps.encoders.vit import *; "
    small = "SMALL = ViTConfig(patch_size=8, width=32, depth=2, heads=2, hidden=64, grid=(4, 4)); "
    use = "doctor.CHECKS['fast'][1](); compiled.CompiledVision(ViT(SMALL, (32, 32)), 'f32')"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run([sys.executable, "-c", start + small + use], check=True, env={**os.environ, "PYTHONPATH": path})
    assert not told.exists()


def test_only_encoders_that_were_measured_are_compiled() -> None:
    class Own(ViT):
        """An encoder of somebody's own, whose forward pass may do anything."""

    assert can_compile(small_vit()) and can_compile(from_pretrained("mini").vision)
    assert not can_compile(Own(SMALL, (32, 32)))
    assert can_compile(small_vit(prune=PruneConfig(0.5, (1,), "merge")))


@pytest.mark.parametrize("kind", ["merge", "attention"])
@torch.no_grad()
def test_patches_that_skip_blocks_do_so_compiled_as_well(kind: PruneKind) -> None:
    """Tracing such an encoder failed, so that torch encoded."""
    needs_openvino()
    vit = small_vit(prune=PruneConfig(0.6, (1,), kind))
    images = pixels(4)
    made, expected = CompiledVision(vit, "f32")(images), vit(images)
    assert (made - expected).abs().max() < 1e-4 * expected.abs().max()
    vit.prune = None
    assert (expected - vit(images)).abs().max() > 1e-2


def test_without_the_package_torch_encodes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_installed", lambda: False)
    monkeypatch.setattr(faster, "multiplies_bfloat16", lambda: False)
    assert faster.fast_vision(from_pretrained("mini")) is None
    monkeypatch.setattr(faster, "multiplies_bfloat16", lambda: True)
    assert isinstance(faster.fast_vision(from_pretrained("base")), ViT)


def test_with_the_package_it_encodes_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_openvino()
    model = from_pretrained("mini")
    assert faster.fast_vision(model) is None  # conftest.py sets SEPS_OPENVINO=0
    monkeypatch.delenv("SEPS_OPENVINO")
    assert isinstance(faster.fast_vision(model), CompiledVision)


def test_a_package_that_fails_is_told_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "openvino", types.ModuleType("openvino"))
    monkeypatch.delitem(sys.modules, "openvino.frontend", raising=False)
    with pytest.warns(UserWarning, match="torch"):
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
    monkeypatch.setattr(faster, "multiplies_bfloat16", lambda: True)
    model = from_pretrained("base")
    prepare = embedding.Preparer(engine_of(model), PatchLayout("full", 384, (20, 20), 1))
    model.to("meta")
    assert prepare.fast.vision is None
