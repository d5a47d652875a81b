"""The gate that learns where to look: it finds planted patches, changes nothing else, and is saved and loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from reid_toys import SENSORS, ToyEncoder, rgbnt201, slow_features, tiny_vit_file, toy_config, toy_model
from torch import Tensor
from torch.nn import functional as F

from messages import naming
from seps.cli.main import call, main
from seps.encoders import ViT, ViTConfig
from seps.reid.config import ReidModelConfig, load_config
from seps.reid.evaluate import all_cases, cost, extract
from seps.reid.network.gate import PatchGate, Standardise
from seps.reid.network.model import ReidModel
from seps.reid.pretrained import from_pretrained, save_pretrained
from seps.reid.run import load_trained, train_reid
from seps.reid.task import ReidBatch, ReidTask, load_dataset, make_reader

LABELS = torch.tensor([0, 0, 1, 1])
GATE = {"selection": "gate", "sparse_ratio": 0.125, "aggr_ratio": 1.0}


def planted(people: int, shots: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images (B, 3, 3, 64, 32) of noise in which one patch of 16 pixels per sensor is blue and of its person's red and
    green, the person of each, and the place of that patch (B, 3) among the 8."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(people).repeat_interleave(shots)
    look = torch.rand(people, 3, 2, generator=torch.Generator().manual_seed(0))
    images = torch.rand(len(labels), 3, 3, 4, 2, generator=draw)
    images[:, :, 2] *= 0.5
    places = torch.randint(8, (len(labels), 3), generator=draw)
    for shot, person in enumerate(labels.tolist()):
        for sensor in range(3):
            colour = torch.cat([look[person, sensor], torch.ones(1)])
            images[shot, sensor, :, places[shot, sensor] // 2, places[shot, sensor] % 2] = colour
    return images.repeat_interleave(16, dim=3).repeat_interleave(16, dim=4), labels, places


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_the_task_teaches_the_gate_where_the_planted_patches_are(weight: float, tmp_path: Path) -> None:
    config = toy_config(rgbnt201(tmp_path), "rgbnt201", model=GATE, loss={"gate": weight})
    torch.manual_seed(0)
    model = toy_model(4, 2, **GATE)
    task = ReidTask(config, load_dataset(config.data), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = last = 0.0
    for step in range(60):
        images, labels, _ = planted(4, 4, seed=100 + step)
        batch = ReidBatch(images, labels, labels * 0, torch.ones(len(labels), 3, dtype=torch.bool))
        loss, figures = task.loss(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(figures["gate"])
        first = first or last
    images, _, places = planted(4, 25, seed=7)
    keep = model.eval().embed(images).keep
    assert keep is not None and torch.equal(keep.sum(dim=2), torch.ones(100, 3))
    found = float((keep.argmax(dim=2) == places).float().mean())
    # Chance is 1 in 8. A gate whose loss is not part of the whole stays as it was drawn.
    assert (found > 0.9 and last < 0.7 * first) if weight else found < 0.4, (found, first, last)
    task.reader.close()


def test_the_gate_sends_no_gradient_into_the_encoder(tmp_path: Path) -> None:
    gradients = []
    for weight in (0.0, 1.0):
        config = toy_config(rgbnt201(tmp_path), "rgbnt201", model={"selection": "gate"}, loss={"gate": weight})
        torch.manual_seed(0)
        task = ReidTask(config, load_dataset(config.data), toy_model(4, 2, selection="gate"))
        task.loss(task.batch(0, 0, 0, 1), 0)[0].backward()
        gradients.append({name: p.grad for name, p in task.model.named_parameters() if p.grad is not None})
        task.reader.close()
    without, with_gate = gradients
    others = [name for name in with_gate if not name.startswith("patch_gate.")]
    assert any(name.startswith("backbones.0.patch") for name in others)
    assert all(torch.equal(with_gate[name], without[name]) for name in others)
    own = [name for name, _ in task.model.named_parameters() if name.startswith("patch_gate.")]
    assert own and all(with_gate[name].abs().sum() > 0 for name in own)
    assert task.model.patch_gate is not None
    early = torch.rand(4, 3, 8, 24, requires_grad=True)
    task.model.patch_gate.loss(task.model.patch_gate.pool(early), LABELS).backward()
    assert early.grad is None


def test_the_default_draws_and_computes_what_it_did() -> None:
    """Nothing of the gate is in a default model, and beside one everything else is the same bit by bit."""
    models = []
    for settings in ({}, {"selection": "published"}, {"selection": "gate"}):
        torch.manual_seed(3)
        models.append(toy_model(**settings))
    default, published, gated = models
    assert default.patch_gate is None and set(default.state_dict()) == set(published.state_dict())
    extra = set(gated.state_dict()) - set(default.state_dict())
    assert extra and all(name.startswith("patch_gate.") for name in extra)
    for name, value in default.state_dict().items():
        assert torch.equal(value, gated.state_dict()[name])
    images = torch.rand(4, 3, 3, 64, 32)
    plain, with_gate = default.eval().embed(images), gated.eval().embed(images)
    assert plain.early is None and torch.equal(plain.original, with_gate.original)
    assert plain.keep is not None and with_gate.keep is not None and with_gate.sdtps is not None
    # With the decision of the published scores the gated branch is the published one.
    assert gated.patch_gate is not None and not torch.equal(plain.keep, with_gate.keep)
    gated.patch_gate.keep = lambda early, ratio: plain.keep  # type: ignore[method-assign]
    again = gated.embed(images).sdtps
    assert again is not None and plain.sdtps is not None and torch.equal(again, plain.sdtps)
    assert not torch.equal(with_gate.sdtps, plain.sdtps)


def test_keep_pool_and_loss_are_what_the_head_of_the_file_says() -> None:
    torch.manual_seed(1)
    gate = PatchGate(2, 6, 5, identities=3)
    early, present = torch.randn(4, 2, 6, 5), torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1]]).bool()
    gate.standardise.observe(early, present)
    keep, pooled = gate.keep(early, 0.5), gate.pool(early, present)
    expected = []
    for sample in range(4):
        for m in range(2):
            x = (early[sample, m] - gate.standardise.mean[m]) / (gate.standardise.variance[m] + 1e-6).sqrt()
            a = gate.weights[m].out(F.gelu(gate.weights[m].hidden(x) + gate.weights[m].places))[:, 0]  # type: ignore
            u = gate.values[m].out(F.gelu(gate.values[m].hidden(x) + gate.values[m].places))  # type: ignore
            best = sorted(range(6), key=a.tolist().__getitem__)[3:]
            assert sorted(best) == keep[sample, m].nonzero()[:, 0].tolist()
            opened = [1 / (1 + math.exp(-value)) for value in a.tolist()]
            block = sum(opened[i] / sum(opened) * u[i] for i in range(6))
            scale = (2 / int(present[sample].sum())) ** 0.5
            expected.append(block * scale if present[sample, m] else torch.zeros(64))
    torch.testing.assert_close(pooled, torch.stack(expected).view(4, 128), atol=1e-5, rtol=1e-5)
    labels, unit = LABELS, F.normalize(pooled.detach(), dim=1)
    entropy = F.cross_entropy(gate.classifier(pooled), labels, label_smoothing=0.1)
    triplets = []
    for i in range(4):
        apart = [float((unit[i] - unit[j]).norm()) for j in range(4)]
        far = max(apart[j] for j in range(4) if labels[j] == labels[i])
        near = min(apart[j] for j in range(4) if labels[j] != labels[i])
        triplets.append(F.softplus(torch.tensor(far - near)))
    torch.testing.assert_close(gate.loss(pooled, labels), entropy + torch.stack(triplets).mean(), atol=1e-4, rtol=0)


def test_statistics_are_those_of_the_present_sensors_alone() -> None:
    statistics = Standardise(2, 3)
    parts: list[Tensor] = []
    for step in range(4):
        early = 5 + torch.randn(6, 2, 4, 3, generator=torch.Generator().manual_seed(step)) * torch.tensor([1, 2, 0.01])
        present = torch.ones(6, 2, dtype=torch.bool)
        present[2:, 1] = False
        if step == 2:
            present[:, 1] = False
        shown = torch.where(present[:, :, None, None], early, float("nan"))
        statistics.observe(shown, present)
        parts.append(early)
    # Fewer than ten batches count evenly; the second sensor was there in three of the four, in two shots each.
    first = torch.stack([part[:, 0].reshape(-1, 3).mean(dim=0) for part in parts]).mean(dim=0)
    second = torch.stack([parts[i][:2, 1].reshape(-1, 3).mean(dim=0) for i in (0, 1, 3)]).mean(dim=0)
    torch.testing.assert_close(statistics.mean[:, 0], torch.stack([first, second]), atol=1e-5, rtol=0)
    spread = torch.stack([part[:, 0].reshape(-1, 3).var(dim=0, unbiased=False) for part in parts]).mean(dim=0)
    torch.testing.assert_close(statistics.variance[0, 0], spread, rtol=0.05, atol=0)
    assert statistics.batches.flatten().tolist() == [4, 3]
    assert not statistics(parts[0]).isnan().any()


def test_an_absent_sensor_takes_no_part(tmp_path: Path) -> None:
    config = toy_config(rgbnt201(tmp_path), "rgbnt201", model={"selection": "gate"})
    present = torch.tensor([[True, True, False]] * 4)
    found = []
    for filled in (0.3, float("nan")):
        torch.manual_seed(0)
        task = ReidTask(config, load_dataset(config.data), toy_model(4, 2, selection="gate"))
        images = torch.rand(4, 3, 3, 64, 32, generator=torch.Generator().manual_seed(2))
        images[:, 2] = filled
        loss, figures = task.loss(ReidBatch(images, LABELS, LABELS * 0, present), 0)
        loss.backward()
        gate = task.model.patch_gate
        assert gate is not None and gate.standardise.batches.flatten().tolist() == [1, 1, 0]
        for looks in (gate.weights, gate.values):
            absent, there = (looks[m].out.weight.grad for m in (2, 1))
            assert isinstance(there, Tensor) and there.abs().sum() > 0
            assert isinstance(absent, Tensor) and absent.abs().sum() == 0
        found.append((loss.detach(), figures["gate"], gate.classifier.weight.grad))
        task.reader.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"backbones": "separate"}, {"camera_embedding": True}, {"guides": "position"}])
def test_other_settings_beside_the_gate(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = toy_model(selection="gate", **settings)
    images, cameras = torch.rand(4, 3, 3, 64, 32), torch.tensor([0, 1, 2, 0])
    scores = model(images, cameras)
    sum(part.sum() for part in scores).backward()
    keep, again = (model.eval().embed(images, other).keep for other in (cameras, cameras.flip(0)))
    assert keep is not None and torch.equal(keep.sum(dim=2), torch.full((4, 3), 4.0))
    assert again is not None and torch.equal(keep, again)  # the camera is no part of what decides


def test_autocast_keeps_the_same_patches() -> None:
    torch.manual_seed(0)
    gate = PatchGate(3, 8, 24, identities=5)
    early = torch.randn(6, 3, 8, 24)
    plain = gate.keep(early, 0.25)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate.keep(early, 0.25), plain)
        torch.testing.assert_close(gate.pool(early), gate.pool(early.clone()), rtol=0, atol=0)
    half = PatchGate(3, 8, 24, identities=5).to(torch.bfloat16)
    assert half.pool(early).dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model.fusion=concat"], naming("model.fusion", "concat", "sdtps")),
        (["model.decision=gumbel"], naming("model.decision", "topk", "gumbel")),
        (["model.decision=binary"], naming("model.decision", "topk", "binary")),
    ],
)
def test_what_does_not_go_with_a_gate(settings: list[str], sentence: str) -> None:
    load_config(None, settings)
    with pytest.raises(ValueError, match=sentence):
        load_config(None, [*settings, "model.selection=gate"])


def test_an_encoder_without_patches_by_themselves_is_refused() -> None:
    encoder = ToyEncoder()
    encoder.early_width = None
    config = ReidModelConfig(image_size=(64, 32), width=16, aggr_ratio=0.5, selection="gate")
    with pytest.raises(ValueError, match="mini"):
        ReidModel(config, SENSORS, 5, backbones=[encoder])


def test_a_trained_gate_is_saved_measured_and_loaded(tmp_path: Path) -> None:
    """A tiny ViT: the run, its model folder and every missing case give the features of the plain call."""
    encoder = tiny_vit_file(tmp_path / "vit.pth")
    model = {"encoder": str(encoder), "selection": "gate", "sparse_ratio": 0.5}
    config = toy_config(rgbnt201(tmp_path / "data"), "rgbnt201", model=model, train={"epochs": 1})
    dataset = load_dataset(config.data)
    train_reid(config, dataset, tmp_path / "run")
    trained = load_trained(tmp_path / "run")
    gate = trained.model.patch_gate
    assert gate is not None and (gate.standardise.batches > 0).all()
    save_pretrained(trained, tmp_path / "folder")
    other = from_pretrained(tmp_path / "folder")
    images = torch.rand(3, 3, 3, 64, 32)
    with torch.no_grad():
        features = trained.model(images)
        assert torch.equal(other.model(images), features)
    with make_reader(config, dataset) as reader:
        cases = all_cases(trained.model)
        for case, found in zip(cases, extract(trained.model, dataset, dataset.query, cases, reader), strict=True):
            slow, _ = slow_features(trained.model, dataset, reader, case)
            torch.testing.assert_close(found.vectors, torch.stack(slow), atol=1e-5, rtol=1e-5)
    plain = cost(toy_model())
    deciding = sum(p.numel() for p in toy_model(selection="gate").patch_gate.weights.parameters())  # type: ignore
    gated = cost(toy_model(selection="gate"))
    assert gated["parameters_m"] - plain["parameters_m"] == pytest.approx(deciding / 1e6)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, run = rgbnt201(tmp_path / "data"), str(tmp_path / "run")
    words = ["--data.layout", "rgbnt201", "--data.root", str(root), "--data.identities", "2", "--data.images", "2"]
    words += ["--data.holdout", "2", "--model.image_size", "[64, 32]", "--model.width", "16"]
    words += ["--model.encoder", str(tiny_vit_file(tmp_path / "vit.pth"))]
    words += ["--model.aggr_ratio", "0.5", "--train.epochs", "1", "--device", "cpu"]
    train = ["train", "--out", run, *words, "--model.selection", "gate"]
    assert call("reid", train) == 0 and call("reid", train) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "gate" in line]
    assert steps and all(line["gate"] > 0 for line in steps)
    assert main(["reid", "train", "--out", run, *words]) == 2
    assert "model.selection: 'gate' -> 'published'" in " ".join(capsys.readouterr().err.split())
    assert call("reid", ["eval", run, "--missing", "--json", "--cost", "--device", "cpu"]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == 13
    assert call("reid", ["show", run, "--out", str(tmp_path / "pictures"), "--queries", "2"]) == 0
    assert (tmp_path / "pictures" / "kept.png").stat().st_size
    threshold = ["threshold", run, "--out", str(tmp_path / "threshold"), "--false-accept", "0.25", "--device", "cpu"]
    assert call("reid", threshold) == 0
    file = str(tmp_path / "features.npz")
    assert call("reid", ["features", run, str(root / "test"), "--out", file, "--device", "cpu"]) == 0


def vit_model(**settings: Any) -> ReidModel:
    """A tiny ViT of two blocks over 8 patches, with weights that make every token matter."""
    config = ReidModelConfig(image_size=(64, 32), width=16, aggr_ratio=0.5, selection="gate", **settings)
    shape = ViTConfig(patch_size=16, width=24, depth=2, heads=2, hidden=32, grid=(4, 2))
    torch.manual_seed(4)
    count = 1 if config.backbones == "shared" else 3
    model = ReidModel(config, SENSORS, 5, 3, [ViT(shape, (64, 32)) for _ in range(count)])
    for parameter in model.backbones.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("backbones", ["shared", "separate"])
def test_patches_dropped_before_the_first_block_have_no_influence(backbones: str) -> None:
    images = torch.rand(4, 3, 3, 64, 32, generator=torch.Generator().manual_seed(0))
    model = vit_model(select_at="first", backbones=backbones).eval()
    fused = model.embed(images)
    keep = fused.keep
    assert keep is not None and keep.shape == (4, 3, 8) and (keep.sum(dim=2) == 4).all()
    assert len({tuple(row) for row in keep.flatten(0, 1).tolist()}) > 1
    # By hand: the kept patches of a shot and sensor alone through the blocks, then the mean of what they are merged to.
    encoded = model.encode(images)
    for shot, sensor in ((0, 0), (3, 2)):
        encoder: Any = model.backbones[0 if backbones == "shared" else sensor]
        patches = encoder.patch(encoder.normalise(images[shot, sensor][None])).flatten(2).transpose(1, 2)
        tokens = (patches + encoder.positions)[:, keep[shot, sensor] > 0]
        tokens = torch.cat([encoder.prefix, tokens], dim=1)
        for block in encoder.blocks:
            tokens = block(tokens)
        expected = model.projections[0 if backbones == "shared" else sensor](encoder.norm(tokens))[0, 1:]
        torch.testing.assert_close(encoded.patches[shot, sensor], expected, atol=1e-5, rtol=1e-5)
    # The decision held, pixels of dropped patches may be anything.
    gate = model.patch_gate
    assert gate is not None
    held = (lambda early, ratio, sensors: keep[:, sensors]) if backbones == "separate" else lambda *_: keep
    gate.keep = held  # type: ignore[assignment, method-assign]
    pixels = keep.view(4, 3, 1, 4, 2).repeat_interleave(16, dim=3).repeat_interleave(16, dim=4)
    changed = torch.where(pixels > 0, images, torch.rand_like(images))
    assert torch.equal(model.embed(changed).pattern(3), fused.pattern(3))


def test_dropping_first_learns_costs_less_and_is_saved(tmp_path: Path) -> None:
    first, end = vit_model(select_at="first", sparse_ratio=0.25), vit_model(sparse_ratio=0.25)
    assert set(first.state_dict()) == set(end.state_dict())
    # Six of eight patches of three sensors save the linear layers of two blocks and the projection, and attention.
    linear = 2 * (24 * 72 + 24 * 24 + 2 * 24 * 32) + 24 * 16
    assert 1e9 * (cost(end)["gflops"] - cost(first)["gflops"]) > 3 * 6 * 2 * linear
    images = torch.rand(4, 3, 3, 64, 32)
    present = torch.tensor([[True, True, False]] * 4)
    fused = first.embed(images, present=present)
    assert fused.sdtps is not None and (fused.sdtps.view(4, 3, 16)[:, 2] == 0).all()
    fused.pattern(3).sum().backward()
    assert first.backbones[0].patch.weight.grad.abs().sum() > 0  # type: ignore[union-attr]
    encoder = tiny_vit_file(tmp_path / "vit.pth")
    model = {"encoder": str(encoder), "selection": "gate", "select_at": "first", "camera_embedding": True}
    config = toy_config(rgbnt201(tmp_path / "data"), "rgbnt201", model=model, train={"epochs": 1})
    dataset = load_dataset(config.data)
    train_reid(config, dataset, tmp_path / "run")
    trained = load_trained(tmp_path / "run")
    with make_reader(config, dataset) as reader:
        cases = all_cases(trained.model)
        for case, found in zip(cases, extract(trained.model, dataset, dataset.query, cases, reader), strict=True):
            slow, _ = slow_features(trained.model, dataset, reader, case)
            torch.testing.assert_close(found.vectors, torch.stack(slow), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"selection": "published"}, naming("selection", "gate")),
        ({"selection": "gate", "guides": "position"}, naming("model.guides", "vector")),
    ],
)
def test_what_does_not_go_with_dropping_first(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ReidModelConfig(select_at="first", **settings)
    with pytest.raises(ValueError, match="ViT"):
        toy_model(selection="gate", select_at="first")
