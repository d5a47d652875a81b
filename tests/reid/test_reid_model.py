"""The network: shapes, return patterns, missing sensors, decisions, backbones."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from reid_toys import SENSORS, ToyEncoder, toy_model

from seps.encoders.vision import Preprocessing, TransformersVision
from seps.nn.guidance import cosine_attention, min_max
from seps.reid.backbone import build_backbone, overlapping
from seps.reid.config import ReidLossConfig, ReidModelConfig
from seps.reid.model import Fused, ReidModel, missing_cases
from seps.reid.task import reid_losses

CAMERAS = torch.tensor([0, 1, 2, 0])
LABELS = torch.tensor([0, 0, 1, 1])


def images(batch: int = 4, sensors: int = 3, size: tuple[int, int] = (64, 32)) -> torch.Tensor:
    return torch.rand(batch, sensors, 3, *size)


def test_published_shapes() -> None:
    config = ReidModelConfig(image_size=(256, 128), width=512)
    model = ReidModel(config, SENSORS, 201, backbones=[ToyEncoder(image_size=(256, 128))])
    pixels = images(4, 3, (256, 128))
    assert [tuple(part.shape) for part in model(pixels)] == [(4, 201), (4, 1536), (4, 201), (4, 1536)]
    encoded = model.encode(pixels)
    assert encoded.patches.shape == (4, 3, 128, 512) and model.sdtps is not None
    vectors = dict(zip(model.sdtps.modalities, encoded.vectors.unbind(1), strict=True))
    tokens, keep = model.sdtps.slim("sensor0", encoded.patches[:, 0], vectors)
    assert keep.sum(dim=1).tolist() == [64] * 4 and tokens.shape == (4, 26, 512)
    model.eval()
    assert [tuple(model(pixels, return_pattern=p).shape) for p in (1, 2, 3)] == [(4, 1536), (4, 1536), (4, 3072)]


def test_patterns_are_parts_of_each_other() -> None:
    model = toy_model().eval()
    pixels = images()
    original, slimmed, both = (model(pixels, return_pattern=p) for p in (1, 2, 3))
    assert torch.equal(both, torch.cat([original, slimmed], dim=1))
    fused = model.embed(pixels)
    assert torch.equal(fused.original, original) and fused.keep is not None
    with pytest.raises(ValueError, match="return_pattern"):
        model(pixels, return_pattern=4)


def test_sdtps_feature_is_the_mean_of_the_modules_own_tokens() -> None:
    model = toy_model().eval()
    encoded = model.encode(images())
    assert model.sdtps is not None
    expected = model.sdtps(*encoded.patches.unbind(1), *encoded.vectors.unbind(1))[:3]
    fused = model.fuse(encoded)
    assert fused.sdtps is not None
    torch.testing.assert_close(fused.sdtps, torch.cat([tokens.mean(dim=1) for tokens in expected], dim=1))


def test_concat_has_the_original_branch_alone() -> None:
    model = toy_model(fusion="concat")
    scores, features = model(images())
    assert scores.shape == (4, 5) and features.shape == (4, 48)
    model.eval()
    assert model(images()).shape == (4, 48)
    with pytest.raises(ValueError, match="concat"):
        model(images(), return_pattern=2)


@pytest.mark.parametrize("fusion", ["sdtps", "concat"])
def test_pixels_of_a_sensor_left_out_have_no_influence(fusion: str) -> None:
    model = toy_model(fusion=fusion, missing="leave-out").eval()
    pixels = images()
    present = torch.tensor([[True, True, False]] * 4)
    before = model(pixels, present=present)
    changed = pixels.clone()
    changed[:, 2] = torch.rand_like(changed[:, 2]) * 100
    assert torch.equal(model(changed, present=present), before)
    changed[:, 2] = float("nan")
    assert torch.equal(model(changed, present=present), before)
    blocks = before.view(4, -1, 3, 16)
    assert (blocks[:, :, 2] == 0).all() and (blocks[:, :, :2] != 0).any(dim=-1).all()


def test_zero_feeds_the_image_whose_normalised_pixels_are_zero() -> None:
    model = toy_model(missing="zero").eval()
    pixels = images()
    present = torch.tensor([[True, False, True]] * 4)
    by_hand = pixels.clone()
    by_hand[:, 1] = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
    torch.testing.assert_close(model(pixels, present=present), model(by_hand))


def test_leave_out_scales_the_rest_and_complete_samples_do_not_change() -> None:
    model = toy_model(fusion="concat", missing="leave-out").eval()
    pixels = images()
    full = model(pixels).view(4, 3, 16)
    present = torch.tensor([[True, True, True], [True, False, True], [False, True, False], [True, True, True]])
    mixed = model(pixels, present=present).view(4, 3, 16)
    torch.testing.assert_close(mixed[0], full[0])
    torch.testing.assert_close(mixed[1, 0], full[1, 0] * math.sqrt(3 / 2))
    torch.testing.assert_close(mixed[2, 1], full[2, 1] * math.sqrt(3))
    with pytest.raises(ValueError, match="without any sensor"):
        model(pixels, present=torch.zeros(4, 3, dtype=torch.bool))


def test_the_guides_left_share_the_weight_of_those_missing() -> None:
    """A sensor alone is guided by itself with the whole weight of the guides: its ranking stays its own."""
    model = toy_model(missing="leave-out")
    module = model.sdtps
    assert module is not None
    attentions = {name: torch.rand(2, 8) for name in module.modalities}
    everyone = {name: torch.ones(2, dtype=torch.bool) for name in module.modalities}
    torch.testing.assert_close(
        module._scores("sensor0", attentions, None, everyone), module._scores("sensor0", attentions, None, None)
    )
    alone = {name: torch.tensor([name == "sensor0"] * 2) for name in module.modalities}
    masked = {name: attention * alone[name][:, None] for name, attention in attentions.items()}
    scores = module._scores("sensor0", masked, None, alone)
    torch.testing.assert_close(scores.amax(dim=1), torch.ones(2), rtol=1e-5, atol=1e-5)


def test_own_guide_zero_leaves_the_judgement_to_the_others() -> None:
    vectors = {f"sensor{number}": torch.randn(2, 16) for number in range(3)}
    patches = torch.randn(2, 8, 16)
    for weight, matters in ((0.0, False), (2.0, True)):
        module = toy_model(own_guide=weight).sdtps
        assert module is not None
        scores, keep = module.choose("sensor0", patches, vectors)
        changed, _ = module.choose("sensor0", patches, {**vectors, "sensor0": torch.randn(2, 16)})
        assert torch.equal(scores, changed) is not matters and keep.sum(dim=1).tolist() == [4, 4]
        guided = sum(
            (weight if name == "sensor0" else 1.0) * 0.25 * min_max(cosine_attention(patches, vector))
            for name, vector in vectors.items()
        )
        torch.testing.assert_close(scores, 0.5 * module.sensor0_sparse.predict(patches) + guided)
    alone = {name: torch.tensor([name == "sensor0"] * 2) for name in vectors}
    module = toy_model(own_guide=0.0).sdtps
    assert module is not None
    # Nobody is left to guide: the predictor decides by itself.
    scores, _ = module.choose("sensor0", patches, vectors, alone)
    torch.testing.assert_close(scores, 0.5 * module.sensor0_sparse.predict(patches))
    with pytest.raises(ValueError, match="own_guide"):
        ReidModelConfig(own_guide=-1.0)


@pytest.mark.parametrize("sensors", [("A", "B"), ("RGB", "NI", "TI", "depth map")])
def test_two_to_many_sensors(sensors: tuple[str, ...]) -> None:
    model = toy_model(sensors=sensors).eval()
    assert model(images(sensors=len(sensors))).shape == (4, 2 * 16 * len(sensors))
    assert len(missing_cases(sensors)) == 2 ** len(sensors) - 1
    with pytest.raises(ValueError, match="modalities"):
        model(images(sensors=len(sensors) - 1))


def train_norms(decision: str, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = toy_model(decision=decision).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pixels, norms = images(), []
    for _ in range(steps):
        fused = model.embed(pixels)
        loss, _ = reid_losses(fused, fused, model.classify(fused), LABELS, ReidLossConfig())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
    return norms


def test_every_decision_trains_with_gradients_of_one_order() -> None:
    plain = train_norms("topk")
    for decision in ("gumbel", "binary"):
        for norm, reference in zip(train_norms(decision), plain, strict=True):
            assert math.isfinite(norm) and reference / 5 < norm < 5 * reference


def test_losses_weigh_the_branches() -> None:
    fused = Fused(torch.randn(4, 6), torch.randn(4, 6), None)
    scores = (torch.randn(4, 3), torch.randn(4, 3))
    total, parts = reid_losses(fused, fused, scores, LABELS, ReidLossConfig(identity=0.25, triplet=2.0, sdtps=0.5))
    by_hand = 0.25 * parts["original_identity"] + 2 * parts["original_triplet"]
    by_hand = by_hand + 0.5 * (0.25 * parts["sdtps_identity"] + 2 * parts["sdtps_triplet"])
    torch.testing.assert_close(total, by_hand)


def test_camera_embedding_moves_the_features() -> None:
    model = toy_model(camera_embedding=True).eval()
    pixels = images()
    assert not torch.equal(model(pixels, CAMERAS), model(pixels, CAMERAS.roll(1)))
    with pytest.raises(ValueError, match="camera index"):
        model(pixels)


def test_separate_backbones() -> None:
    model = toy_model(backbones="separate").eval()
    assert len(model.backbones) == 3
    pixels = images()[:, :1].expand(-1, 3, -1, -1, -1)
    blocks = model(pixels, return_pattern=1).view(4, 3, 16)
    assert not torch.allclose(blocks[:, 0], blocks[:, 1])


@pytest.mark.parametrize("family", ["vit", "clip", "dinov2"])
def test_overlapping_patches(family: str) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    settings = {**small, "image_size": 32, "patch_size": 8}
    models = {
        "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**settings)),
        "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**settings)),
        "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**settings)),
    }
    made = models[family]()
    tower = getattr(made, "vision_model", made)
    half = Preprocessing((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    pixels = torch.rand(2, 3, 48, 24)
    plain = TransformersVision(tower, half, (32, 32)).eval()
    expected = plain(pixels)
    same = overlapping(plain, 8, (48, 24), family)
    torch.testing.assert_close(same(pixels), expected)
    finer = overlapping(plain, 6, (48, 24), family)
    assert finer.grid == (7, 3) and finer(pixels).shape == (2, 1 + 21, 16)
    with pytest.raises(ValueError, match="patch size"):
        overlapping(plain, 9, (48, 24), family)


def test_embedded_encoder_with_a_finer_grid() -> None:
    pixels = torch.rand(1, 3, 64, 32)
    for stride, grid in ((8, (8, 4)), (16, (4, 2)), (32, (2, 1))):
        encoder = build_backbone("mini", (64, 32), stride, pretrained=False)
        assert encoder.grid == grid and encoder(pixels).shape == (1, grid[0] * grid[1], 1280)
    with pytest.raises(ValueError, match="8, 16 or 32"):
        build_backbone("mini", (64, 32), 12, pretrained=False)


def test_settings_that_leave_no_token_are_refused() -> None:
    with pytest.raises(ValueError, match="no merged token"):
        toy_model(image_size=(16, 16))


@pytest.mark.parametrize("decision", ["topk", "gumbel", "binary"])
def test_half_precision_with_cameras_and_missing_sensors(decision: str) -> None:
    model = toy_model(decision=decision, camera_embedding=True).train()
    present = torch.tensor([[True, False, True]] * 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused = model.embed(images(), CAMERAS, present)
        loss, _ = reid_losses(fused, fused, model.classify(fused), LABELS, ReidLossConfig(triplet_space="raw"))
    loss.backward()
    assert fused.original.dtype == torch.float32
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert torch.isfinite(torch.stack(norms)).all()
