"""Vision encoders of every family: counts, sizes, normalisation, gradients."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from messages import naming
from seps.encoders import preset_names, vision_encoder
from seps.encoders.vision import CLIP, HALF, IMAGENET

PREFIX = {"vit": 1, "swin": 0, "clip": 1, "siglip": 0, "dinov2": 1, "registers": 4, "ijepa": 0}
STRIDE = dict.fromkeys(PREFIX, 8) | {"swin": 4}


@pytest.mark.parametrize("family", PREFIX)
def test_shapes_and_prefix_are_told(saved: Any, family: str) -> None:
    encoder = vision_encoder(saved(family))
    side = 32 // STRIDE[family]
    assert (encoder.width, encoder.num_prefix_tokens, encoder.image_size) == (32, PREFIX[family], (32, 32))
    assert (encoder.grid, encoder.num_patches) == ((side, side), side * side)
    tokens = encoder(torch.rand(2, 3, 32, 32))
    assert tokens.shape == (2, PREFIX[family] + side * side, 32)
    assert not encoder.training and not encoder.model.training


@pytest.mark.parametrize("family", PREFIX)
def test_every_parameter_gets_a_gradient(saved: Any, family: str) -> None:
    encoder = vision_encoder(saved(family)).train()
    pixels = torch.rand(2, 3, 32, 32, requires_grad=True)
    encoder(pixels).square().sum().backward()
    silent = [name for name, value in encoder.named_parameters() if value.grad is None]
    assert silent == []
    assert pixels.grad is not None and pixels.grad.abs().sum() > 0


@pytest.mark.parametrize("family", PREFIX)
@pytest.mark.parametrize("size", [(64, 64), (48, 32), (32, 64)])
def test_other_sizes(saved: Any, family: str, size: tuple[int, int]) -> None:
    encoder = vision_encoder(saved(family), image_size=size)
    rows, columns = size[0] // STRIDE[family], size[1] // STRIDE[family]
    assert encoder.grid == encoder.grid_for(*size) == (rows, columns)
    assert encoder(torch.rand(1, 3, *size)).shape == (1, PREFIX[family] + rows * columns, 32)


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_patches_run_row_by_row(saved: Any, family: str) -> None:
    """A change in one corner of a wide image moves that patch most."""
    encoder = vision_encoder(saved(family), image_size=(32, 64))
    rows, columns = encoder.grid
    plain = torch.full((1, 3, 32, 64), 0.5)
    marked = plain.clone()
    marked[..., :4, -4:] = 1.0
    moved = (encoder(marked) - encoder(plain)).norm(dim=-1)[0, encoder.num_prefix_tokens :]
    assert moved.argmax().item() == columns - 1
    assert len(moved) == rows * columns


def test_swin_does_not_remember_earlier_sizes(saved: Any) -> None:
    large = torch.rand(1, 3, 64, 64)
    fresh = vision_encoder(saved("swin"))(large)
    used = vision_encoder(saved("swin"))
    used(torch.rand(1, 3, 16, 16))
    assert torch.equal(used(large), fresh)


@pytest.mark.parametrize(
    ("family", "size", "words"),
    [
        ("vit", (30, 32), "8"),
        ("swin", (12, 16), "16"),
        ("dinov2", (0, 8), "8"),
    ],
)
def test_sizes_that_do_not_fit(saved: Any, family: str, size: tuple[int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vision_encoder(saved(family), image_size=size)
    with pytest.raises(ValueError, match=f"{size[0]}x{size[1]}"):
        vision_encoder(saved(family)).grid_for(*size)


@pytest.mark.parametrize(
    "pixels", [torch.zeros(3, 32, 32), torch.zeros(1, 1, 32, 32), torch.zeros(1, 3, 32, 32).byte()]
)
def test_pixels_of_another_kind(saved: Any, pixels: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=naming("(B, 3, H, W)")):
        vision_encoder(saved("vit"))(pixels)


@pytest.mark.parametrize(
    ("family", "figures"),
    [("vit", HALF), ("siglip", HALF), ("clip", CLIP), ("swin", IMAGENET), ("dinov2", IMAGENET)],
)
def test_normalisation_by_family(saved: Any, family: str, figures: Any) -> None:
    encoder = vision_encoder(saved(family))
    assert encoder.mean.flatten().tolist() == pytest.approx(figures[0])
    assert encoder.std.flatten().tolist() == pytest.approx(figures[1])


def test_output_is_the_models_on_normalised_pixels(saved: Any) -> None:
    encoder = vision_encoder(saved("vit"))
    pixels = torch.rand(2, 3, 32, 32)
    expected = encoder.model(pixel_values=pixels * 2 - 1).last_hidden_state
    torch.testing.assert_close(encoder(pixels), expected)


def test_clip_norms_every_token(saved: Any) -> None:
    encoder = vision_encoder(saved("clip"))
    pixels = torch.rand(2, 3, 32, 32)
    normalised = (pixels - encoder.mean) / encoder.std
    expected = encoder.model(pixel_values=normalised).pooler_output
    torch.testing.assert_close(encoder(pixels)[:, 0], expected)


STATED = [
    ({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3], "size": {"height": 64, "width": 32}}, (64, 32)),
    ({"size": {"shortest_edge": 40}, "crop_size": 24}, (24, 24)),
    ({"size": {"shortest_edge": 40}, "crop_size": 24, "do_center_crop": False}, (40, 40)),
    ({"image_processor": {"size": 16, "do_normalize": False}}, (16, 16)),
    ({"size": 30}, (32, 32)),
]


@pytest.mark.parametrize(("stated", "size"), STATED)
def test_preprocessor_file(saved: Any, tmp_path: Path, stated: dict[str, Any], size: tuple[int, int]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved("vit"), folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(stated))
    encoder = vision_encoder(folder)
    assert encoder.image_size == size
    if "image_mean" in stated:
        assert encoder.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    if "image_processor" in stated:
        assert encoder.mean.abs().sum() == 0 and encoder.std.min() == 1


def test_state_dict_holds_what_is_learned_and_round_trips(saved: Any) -> None:
    first = vision_encoder(saved("siglip"))
    second = vision_encoder(saved("siglip"), pretrained=False)
    pixels = torch.rand(1, 3, 32, 32)
    assert not torch.allclose(first(pixels), second(pixels))
    assert set(first.state_dict()) == {name for name, _ in first.named_parameters()}
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(pixels), second(pixels))


def test_half_precision_module_takes_float_pixels(saved: Any) -> None:
    encoder = vision_encoder(saved("vit")).to(torch.bfloat16)
    assert encoder(torch.rand(1, 3, 32, 32)).dtype == torch.bfloat16


def test_presets_describe_the_published_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights by preset need no file; the figures of method.md section 1."""
    from seps.encoders import registry

    published = {
        "vit-b-224": (768, 1, (14, 14)),
        "vit-b-384": (768, 1, (24, 24)),
        "swin-b-224": (1024, 0, (7, 7)),
        "swin-b-384": (1024, 0, (12, 12)),
        "clip-b-32": (768, 1, (7, 7)),
        "clip-b-16": (768, 1, (14, 14)),
        "siglip-b-16": (768, 0, (14, 14)),
        "siglip2-b-16": (768, 0, (14, 14)),
        "siglip2-so400m": (1152, 0, (27, 27)),
        "dinov2-s": (384, 1, (16, 16)),
        "dinov2-b": (768, 1, (16, 16)),
        "dinov3-s": (384, 5, (14, 14)),
        "dinov3-b": (768, 5, (14, 14)),
    }
    assert set(published) | {"mini", "dinov2-s-focus"} == set(preset_names("vision"))

    def on_meta(config: Any, build: Any = registry.build_model) -> Any:
        with torch.device("meta"):
            return build(config)

    monkeypatch.setattr(registry, "build_model", on_meta)
    for name, figures in published.items():
        encoder = vision_encoder(name, pretrained=False)
        assert (encoder.width, encoder.num_prefix_tokens, encoder.grid) == figures, name


@pytest.mark.parametrize("family", ["convnext", "mae", "siglip2"])
def test_architectures_without_a_plain_grid_are_refused(saved: Any, family: str) -> None:
    with pytest.raises(ValueError, match="supported"):
        vision_encoder(saved(family), pretrained=False)
