"""The network: shapes, return patterns, missing sensors, decisions, backbones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reid_toys import SENSORS, ToyEncoder, toy_model

from messages import naming
from seps.method.checks import InputError
from seps.method.score import cosine_attention, min_max
from seps.method.sensors import MultiModalSDTPS
from seps.reid.config import ReidLossConfig, ReidModelConfig
from seps.reid.network.model import Fused, ReidModel, missing_cases
from seps.reid.task import reid_losses

CAMERAS = torch.tensor([0, 1, 2, 0])
LABELS = torch.tensor([0, 0, 1, 1])


def images(batch: int = 4, sensors: int = 3, size: tuple[int, int] = (64, 32)) -> torch.Tensor:
    return torch.rand(batch, sensors, 3, *size)


def test_patches_decided_elsewhere_are_the_ones_that_are_merged() -> None:
    sdtps = MultiModalSDTPS(16, num_patches=20)
    patches = {name: torch.randn(2, 20, 16) for name in sdtps.modalities}
    vectors = {name: torch.randn(2, 16) for name in sdtps.modalities}
    tokens, keep = sdtps.slim("nir", patches, vectors)
    again, same = sdtps.slim("nir", patches, vectors, keep=keep)
    assert torch.equal(again, tokens) and torch.equal(same, keep)
    other = 1 - keep
    scores, _ = sdtps.choose("nir", patches, vectors)
    slimmed, given = sdtps.slim("nir", patches, vectors, keep=other)
    weights = torch.softmax(sdtps.nir_aggr.logits(patches["nir"]).masked_fill(other[..., None] == 0, -torch.inf), dim=1)
    assert torch.allclose(slimmed[:, :-1], weights.transpose(1, 2) @ patches["nir"], atol=1e-6)
    dropped = torch.softmax(scores.masked_fill(keep == 0, -torch.inf), dim=1)
    assert torch.allclose(slimmed[:, -1], (dropped[..., None] * patches["nir"]).sum(dim=1), atol=1e-6)
    assert given is other
    with pytest.raises(InputError, match=naming("nir", "(2, 20)", "(2, 19)")):
        sdtps.slim("nir", patches, vectors, keep=other[:, 1:])


def test_published_shapes() -> None:
    config = ReidModelConfig(image_size=(256, 128), width=512)
    model = ReidModel(config, SENSORS, 201, backbones=[ToyEncoder(image_size=(256, 128))])
    pixels = images(4, 3, (256, 128))
    assert [tuple(part.shape) for part in model(pixels)] == [(4, 201), (4, 1536), (4, 201), (4, 1536)]
    encoded = model.encode(pixels)
    assert encoded.patches.shape == (4, 3, 128, 512) and model.sdtps is not None
    vectors = dict(zip(model.sdtps.modalities, encoded.vectors.unbind(1), strict=True))
    patches = dict(zip(model.sdtps.modalities, encoded.patches.unbind(1), strict=True))
    tokens, keep = model.sdtps.slim("sensor0", patches, vectors)
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
    with pytest.raises(ValueError, match="sensor"):
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


def guided() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Global vectors and patches of three sensors."""
    names = [f"sensor{number}" for number in range(3)]
    return {name: torch.randn(2, 16) for name in names}, {name: torch.randn(2, 8, 16) for name in names}


def test_guides_by_position_ask_the_others_about_their_own_patches() -> None:
    vectors, patches = guided()
    module = toy_model(guides="position").sdtps
    assert module is not None
    scores, _ = module.choose("sensor1", patches, vectors)
    maps = {name: min_max(cosine_attention(patches[name], vectors[name])) for name in vectors}
    expected = 0.5 * module.sensor1_sparse.predict(patches["sensor1"])
    expected = expected + 0.25 * (maps["sensor0"] + 2 * maps["sensor1"] + maps["sensor2"])
    torch.testing.assert_close(scores, expected)
    # Another sensor may turn its space as it likes: what it says stays the same.
    turned, _ = torch.linalg.qr(torch.randn(16, 16))
    again, _ = module.choose(
        "sensor1",
        {**patches, "sensor0": patches["sensor0"] @ turned},
        {**vectors, "sensor0": vectors["sensor0"] @ turned},
    )
    torch.testing.assert_close(again, scores)
    alone = {name: torch.tensor([name == "sensor1"] * 2) for name in vectors}
    scores, _ = module.choose("sensor1", patches, vectors, alone)
    expected = 0.5 * module.sensor1_sparse.predict(patches["sensor1"]) + maps["sensor1"]
    torch.testing.assert_close(scores, expected)
    with pytest.raises(ValueError, match="guides"):
        ReidModelConfig(guides="hearsay")  # type: ignore[arg-type]


def test_own_guide_zero_leaves_the_judgement_to_the_others() -> None:
    vectors, patches = guided()
    for weight, matters in ((0.0, False), (2.0, True)):
        module = toy_model(own_guide=weight).sdtps
        assert module is not None
        scores, keep = module.choose("sensor0", patches, vectors)
        changed, _ = module.choose("sensor0", patches, {**vectors, "sensor0": torch.randn(2, 16)})
        assert torch.equal(scores, changed) is not matters and keep.sum(dim=1).tolist() == [4, 4]
        sources = sum(
            (weight if name == "sensor0" else 1.0) * 0.25 * min_max(cosine_attention(patches["sensor0"], vector))
            for name, vector in vectors.items()
        )
        torch.testing.assert_close(scores, 0.5 * module.sensor0_sparse.predict(patches["sensor0"]) + sources)
    alone = {name: torch.tensor([name == "sensor0"] * 2) for name in vectors}
    module = toy_model(own_guide=0.0).sdtps
    assert module is not None
    # Nobody is left to guide: the predictor decides by itself.
    scores, _ = module.choose("sensor0", patches, vectors, alone)
    torch.testing.assert_close(scores, 0.5 * module.sensor0_sparse.predict(patches["sensor0"]))
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


def with_cameras(**settings: Any) -> ReidModel:
    """A model whose camera vectors are about as long as its patches, as trained ones are."""
    torch.manual_seed(3)
    model = toy_model(camera_embedding=True, **settings)
    assert model.camera_embedding is not None
    patches = model.encode(images(), CAMERAS).patches.detach()
    torch.nn.init.normal_(model.camera_embedding.weight, std=float(patches.std()))
    return model


def kept_of(model: ReidModel, pixels: torch.Tensor, present: torch.Tensor | None = None) -> torch.Tensor:
    """D of a call that starts from the same random state, as the Gumbel and binary decisions draw noise."""
    torch.manual_seed(7)
    keep = model.embed(pixels, torch.arange(len(pixels)) % 3, present).keep
    assert keep is not None
    return keep.detach()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("missing", ["zero", "leave-out", None])
@pytest.mark.parametrize(
    "settings",
    [{}, {"decision": "gumbel"}, {"decision": "binary"}, {"guides": "position"}, {"own_guide": 0.0}],
    ids=lambda settings: "-".join(map(str, settings.values())) or "default",
)
def test_the_camera_does_not_decide_which_patches_are_kept(
    settings: dict[str, Any], missing: str | None, training: bool
) -> None:
    chosen = settings if missing is None else {**settings, "missing": missing}
    model = with_cameras(**chosen).train(training)
    pixels = images(12)
    present = None if missing is None else torch.tensor([[True, False, True], [True, True, True]] * 6)
    with_them = kept_of(model, pixels, present)
    assert model.camera_embedding is not None
    torch.nn.init.zeros_(model.camera_embedding.weight)
    without = kept_of(model, pixels, present)
    for number, sensor in enumerate(SENSORS):
        assert torch.equal(with_them[:, number], without[:, number]), sensor
    # Else "equal" would say nothing.
    assert 0.2 < float(without.mean()) < 0.8 and len(without.flatten(0, 1).unique(dim=0)) > 3


def test_features_carry_the_camera_by_a_slow_twin() -> None:
    """Both branches are made of tokens with the camera's vector; the decision comes from those without it."""
    model = with_cameras().eval()
    pixels = images()
    assert model.camera_embedding is not None and model.sdtps is not None
    with torch.no_grad():
        fused = model.embed(pixels, CAMERAS)
        for sample in range(4):
            vector = model.camera_embedding.weight[CAMERAS[sample]]
            plain, marked = {}, {}
            for number, name in enumerate(model.sdtps.modalities):
                tokens = model.projections[0](model.backbones[0](pixels[sample, number][None]))[0]
                for found, added in ((plain, 0.0), (marked, vector)):
                    cls, patches = tokens[0] + added, tokens[1:] + added
                    mean = sum(patches) / len(patches)
                    found[name] = (patches, model.global_local[number](cls, mean))
            original = torch.cat([marked[name][1] for name in model.sdtps.modalities])
            torch.testing.assert_close(fused.original[sample], original, rtol=1e-4, atol=1e-5)
            blocks = []
            for number, name in enumerate(model.sdtps.modalities):
                scores, keep = model.sdtps.choose(
                    name, {n: p[None] for n, (p, _) in plain.items()}, {n: v[None] for n, (_, v) in plain.items()}
                )
                assert fused.keep is not None and torch.equal(keep[0], fused.keep[sample, number])
                own, kept = marked[name][0], keep[0] > 0
                logits = getattr(model.sdtps, f"{name}_aggr").logits(own[None])[0]
                merged = torch.softmax(logits[kept], dim=0).T @ own[kept]
                extra = torch.softmax(scores[0][~kept], dim=0) @ own[~kept]
                blocks.append(torch.cat([merged, extra[None]]).mean(dim=0))
            assert fused.sdtps is not None
            torch.testing.assert_close(fused.sdtps[sample], torch.cat(blocks), rtol=1e-4, atol=1e-5)


def test_wrong_cameras_and_presence_are_sentences() -> None:
    model, pixels = with_cameras(), images()
    for cameras, sentence in (
        (None, "camera"),
        (CAMERAS[:3], naming("4", "(3,)")),
        (CAMERAS.float(), "float32"),
        (CAMERAS + 1, "from 1 to 3.*3 cameras, 0 to 2"),
        (CAMERAS - 1, "from -1 to 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(pixels, cameras)
    for present in (torch.ones(4, 2, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool), torch.ones(4, 3)):
        with pytest.raises(ValueError, match=naming("present", "(4, 3)", "torch.bool")):
            model(pixels, CAMERAS, present)


def test_separate_backbones_see_their_own_sensor() -> None:
    model = toy_model(backbones="separate").eval()
    pixels = images()
    with torch.no_grad():
        blocks = model(pixels, return_pattern=1).view(4, 3, 16)
        for number in range(3):
            tokens = model.projections[number](model.backbones[number](pixels[:, number]))
            expected = model.global_local[number](tokens[:, 0], tokens[:, 1:].mean(dim=1))
            torch.testing.assert_close(blocks[:, number], expected)
        swapped = model(pixels.flip(1), return_pattern=1).view(4, 3, 16)
    assert (swapped - blocks.flip(1)).abs().amax() > 1e-2  # the backbones are three, not one


def test_settings_that_leave_no_token_are_refused() -> None:
    with pytest.raises(ValueError, match="merged"):
        toy_model(image_size=(16, 16))


@pytest.mark.parametrize("decision", ["topk", "gumbel", "binary"])
def test_half_precision_is_float32_up_to_rounding(decision: str) -> None:
    """With cameras and missing sensors: the same patches, features within bfloat16's rounding, the same direction."""
    model = toy_model(decision=decision, camera_embedding=True).train()
    present, pixels = torch.tensor([[True, False, True]] * 4), images()
    found = []
    for enabled in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            fused = model.embed(pixels, CAMERAS, present)
            scores = model.classify(fused)
        loss, _ = reid_losses(fused, fused, scores, LABELS, ReidLossConfig(triplet_space="raw"))
        loss.backward()
        assert fused.sdtps is not None and fused.keep is not None
        assert {part.dtype for part in (fused.original, fused.sdtps, *scores)} == {torch.float32}
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((fused.original.detach(), fused.sdtps.detach(), fused.keep.detach(), loss.item(), gradient))
    full, half = found
    assert torch.equal(full[2], half[2]) and half[3] == pytest.approx(full[3], rel=2e-3)
    for ours, expected in zip(half[:2], full[:2], strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    assert torch.cosine_similarity(half[4], full[4], dim=0) > 0.999
