"""The demo presets train DeMo's recipe: rates, batches, augmentation and first loss, each against a twin by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from published_twin import hand_loss, hand_sdtps, hand_tokens
from reid_toys import msvr310, rgbnt100, rgbnt201, tiny_vit_file
from torch.nn import functional as F

from messages import naming
from seps.cli.main import main
from seps.encoders import registry
from seps.metrics import rerank
from seps.reid.config import ReidConfig, from_mapping, load_config
from seps.reid.data import Augmentation
from seps.reid.demo.batches import PublishedBatches, apply_per_sensor, draw_per_sensor, published_epoch
from seps.reid.evaluate import Features, distances, evaluate, measure
from seps.reid.run import load_trained, train_reid
from seps.reid.task import ReidTask, load_dataset
from seps.training.optim import build_optimizer, set_scheduled_rates

CONFIGS = Path(__file__).parents[2] / "configs" / "reid"
TREES = {"RGBNT201": rgbnt201, "RGBNT100": rgbnt100, "MSVR310": msvr310}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}


@pytest.fixture
def tiny_clip(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """clip-b-16 with two narrow blocks; patches of 16 pixels, positions of a 14 x 14 grid."""
    config = {
        "vision_config": {"patch_size": 16, **SMALL},
        "text_config": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64},
        "projection_dim": 24,
    }
    monkeypatch.setitem(registry.PRESETS, "clip-b-16", replace(registry.PRESETS["clip-b-16"], config=config))
    yield


def tiny_preset(name: str, root: Path, **changes: dict[str, Any]) -> ReidConfig:
    """demo-NAME on a tree of synthetic pictures, narrow and small; everything else as in the file."""
    values = yaml.safe_load((CONFIGS / f"demo-{name}.yaml").read_text(encoding="utf-8"))
    values["data"] |= {"root": str(TREES[name](root)), "identities": 3, "images": 2}
    size = [64, 32] if name == "RGBNT201" else [32, 64]
    values["model"] |= {"pretrained": False, "image_size": size, "width": 24, "aggr_ratio": 0.5}
    values["train"] |= {"precision": "float32"}
    for section, part in changes.items():
        values[section] |= part
    return from_mapping(values)


def published_rate(epoch: int, kind: str, epochs: int, warmup: int) -> float:
    """The rate of one parameter in an epoch (from 1), written from the facts: no noise."""
    base = {"backbone": 5e-6, "bias": 7e-4, "other": 3.5e-4}[kind]
    if epoch < warmup:
        return 3.5e-5 + epoch * (base - 3.5e-5) / warmup
    if epoch == epochs:
        return 3.5e-7
    return 3.5e-7 + 0.5 * (base - 3.5e-7) * (1 + math.cos(math.pi * epoch / epochs))


@pytest.mark.usefixtures("tiny_clip")
@pytest.mark.parametrize(("name", "epochs", "warmup"), [("RGBNT201", 50, 10), ("RGBNT100", 30, 5), ("MSVR310", 50, 10)])
def test_rates_of_every_group_in_every_epoch(name: str, epochs: int, warmup: int, tmp_path: Path) -> None:
    full = load_config(CONFIGS / f"demo-{name}.yaml")
    assert full.train.epochs == epochs and full.train.batch_size == {"RGBNT100": 128}.get(name, 64)
    config = tiny_preset(name, tmp_path)
    task = ReidTask(config, load_dataset(config.data))
    optimizer = build_optimizer(task, config.train)
    assert type(optimizer) is torch.optim.Adam
    assert all(group["weight_decay"] == 1e-4 for group in optimizer.param_groups)
    kind_of = {}
    for parameter in dict(task.model.named_parameters()):
        outside = "bias" if parameter.endswith("bias") else "other"
        kind_of[parameter] = "backbone" if parameter.startswith("backbones.") else outside
    assert set(kind_of.values()) == {"backbone", "bias", "other"}
    # CLIP's projection learns with the backbone, the camera embedding with the new parts.
    assert kind_of["backbones.0.projection.weight"] == "backbone" and kind_of["camera_embedding.weight"] == "other"
    seen: dict[int, float] = {}
    for epoch in range(1, epochs + 1):
        generator = torch.Generator().manual_seed(42 + epoch)
        noise = next(n for n in iter(lambda: torch.randn(1, generator=generator).item(), None) if abs(n) < 0.67)  # noqa: B023
        set_scheduled_rates(optimizer, (epoch - 1) * 7 + 3, 7, config.train)
        rates = {n: group["lr"] for group in optimizer.param_groups for n in group["names"]}
        assert set(rates) == set(kind_of)
        for parameter, rate in rates.items():
            expected = published_rate(epoch, kind_of[parameter], epochs, warmup)
            assert rate == pytest.approx(expected * (1 + (noise if epoch < epochs else 0)), rel=1e-9), (
                epoch,
                parameter,
            )
        seen[epoch] = published_rate(epoch, "backbone", epochs, warmup)
    # The backbone falls from 3.2e-5 (of ten warm-up epochs) to 5e-6; a warm-up from zero would rise to it.
    assert seen[1] == pytest.approx(3.5e-5 - 3e-5 / warmup) and seen[warmup] < 5e-6 < seen[warmup - 1]
    task.reader.close()


def test_batches_are_those_of_the_published_sampler() -> None:
    counts = [9, 4, 3, 17, 8, 8, 5, 2]
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    groups = [max(1, count // 4) for count in counts]
    lengths = []
    for seed in range(60):
        plan = published_epoch(labels, 3, 4, np.random.default_rng(seed))
        used: Counter[int] = Counter()
        for batch in plan.reshape(len(plan), 3, 4).tolist():
            owners = [{labels[index] for index in group} for group in batch]
            assert all(len(owner) == 1 for owner in owners) and len(set.union(*owners)) == 3
            used.update(label for owner in owners for label in owner)
            for group, owner in zip(batch, owners, strict=True):
                assert len(set(group)) == 4 or counts[next(iter(owner))] < 4
        taken = [index for index in plan.flatten().tolist() if counts[labels[index]] >= 4]
        assert len(taken) == len(set(taken)), "an image of an identity with enough of them came twice"
        assert all(used[label] <= groups[label] for label in used)
        # The pass ends when fewer than P identities have a group left.
        assert sum(groups[label] > used[label] for label in range(len(counts))) < 3
        lengths.append(len(plan))
    assert min(lengths) < max(lengths)
    batches = PublishedBatches(labels, identities=3, images=4, seed=5)
    assert min(lengths) <= len(batches) <= max(lengths)
    drawn = [batches.global_batch(epoch, step) for epoch in range(3) for step in range(len(batches))]
    assert all(len(batch) == 12 and len({labels[index] for index in batch}) == 3 for batch in drawn)
    again = PublishedBatches(labels, identities=3, images=4, seed=5)
    assert again.global_batch(2, 1) == batches.global_batch(2, 1) != batches.global_batch(1, 1)


def test_augmentation_has_the_published_statistics() -> None:
    shots, sensors, size = 1500, 3, (64, 32)
    config = Augmentation(pad=10, flip=0.5, erase=0.5)
    draws = draw_per_sensor(shots, sensors, size, config, torch.Generator().manual_seed(0))
    flips = draws.flips.view(shots, sensors).float()
    assert flips.mean().item() == pytest.approx(0.5, abs=0.03)
    # Drawn per sensor: two sensors of a shot agree half of the time, not always.
    assert (flips[:, 0] == flips[:, 1]).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert draws.offsets.min() == 0 and draws.offsets.max() == 20
    assert len(draws.offsets.view(shots, -1)[:, :4].unique(dim=0)) > 1000
    # A hand-written twin of the erasing: the same shares, by another generator.
    chance = np.random.default_rng(1)
    areas: list[float] = []
    for _ in range(shots * sensors):
        if chance.random() > 0.5:
            continue
        for _ in range(10):
            area = chance.uniform(0.02, 1 / 3) * 64 * 32
            aspect = math.exp(chance.uniform(math.log(0.3), -math.log(0.3)))
            tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if wide < 32 and tall < 64:
                areas.append(tall * wide / (64 * 32))
                break
    boxes = draws.boxes[draws.boxes[:, 2] > 0].double()
    shares = boxes[:, 2] * boxes[:, 3] / (64 * 32)
    assert len(shares) / (shots * sensors) == pytest.approx(len(areas) / (shots * sensors), abs=0.03)
    for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert shares.quantile(quantile).item() == pytest.approx(float(np.quantile(areas, quantile)), abs=0.012)
    assert shares.max() <= 1 / 3 + 0.02 and (boxes[:, 3] < 32).all() and (boxes[:, 2] < 64).all()
    assert ((boxes[:, 0] + boxes[:, 2]) <= 64).all() and ((boxes[:, 1] + boxes[:, 3]) <= 32).all()
    # Normal noise after normalising, whatever the figures are.
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.5, 0.25, 0.2])
    grey = torch.full((shots // 10, sensors, 3, *size), 128, dtype=torch.uint8)
    erasing = Augmentation(pad=0, flip=0.0, erase=1.0)
    choices = draw_per_sensor(len(grey), sensors, size, erasing, torch.Generator().manual_seed(2))
    made = apply_per_sensor(grey, choices, erasing, mean, std)
    changed = made != 128 / 255
    assert not torch.equal(changed[:, 0], changed[:, 1])
    normalised = (made - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    for channel in range(3):
        noise = normalised[:, :, channel][changed[:, :, channel]]
        assert noise.mean().item() == pytest.approx(0, abs=0.02) and noise.std().item() == pytest.approx(1, abs=0.02)
        assert noise.abs().max() > 3


@pytest.mark.usefixtures("tiny_clip")
@pytest.mark.parametrize("name", list(TREES))
def test_the_first_loss_is_that_of_a_twin_by_hand(name: str, tmp_path: Path) -> None:
    config = tiny_preset(name, tmp_path)
    task = ReidTask(config, load_dataset(config.data))
    model = task.model.train()
    with torch.no_grad():
        # As drawn, a camera is a millionth; the twin must see it.
        model.camera_embedding.weight.normal_(generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr]
    batch = task.batch(0, 0, 0, 1)
    loss = task.loss(batch, 0)[0].item()
    state = {key: value.detach() for key, value in model.state_dict().items()}
    backbone = {key.removeprefix("backbones.0."): value for key, value in state.items() if key.startswith("backbones.")}
    camera = state["camera_embedding.weight"][batch.cameras]
    tokens = [hand_tokens(backbone, batch.images[:, sensor], camera, heads=2) for sensor in range(3)]
    patches, vectors = [part[:, 1:] for part in tokens], []
    for sensor, part in enumerate(tokens):
        both = torch.cat([part[:, 0], part[:, 1:].mean(1)], -1)
        fuse = f"global_local.{sensor}"
        both = F.layer_norm(both, (48,), state[f"{fuse}.norm.weight"], state[f"{fuse}.norm.bias"])
        inner = both @ state[f"{fuse}.linear.weight"].T + state[f"{fuse}.linear.bias"]
        vectors.append(inner * torch.sigmoid(1.702 * inner))
    branch = torch.cat([hand_sdtps(state, sensor, patches, vectors) for sensor in range(3)], -1)
    expected = 2.0 * hand_loss(branch, state["sdtps_neck.classifier.weight"], batch.labels)
    if name == "RGBNT201":
        expected += hand_loss(torch.cat(vectors, -1), state["original_neck.classifier.weight"], batch.labels)
    else:
        for sensor, vector in enumerate(vectors):
            expected += hand_loss(vector, state[f"original_neck.necks.{sensor}.classifier.weight"], batch.labels)
    assert loss == pytest.approx(expected, rel=2e-5)
    task.reader.close()


@pytest.mark.usefixtures("tiny_clip")
@pytest.mark.parametrize("name", list(TREES))
def test_a_demo_preset_trains_on_its_tree_and_is_read_back(name: str, tmp_path: Path) -> None:
    config = tiny_preset(name, tmp_path / "data", train={"epochs": 2, "warmup_fraction": 0.5, "workers": 1})
    dataset = load_dataset(config.data)
    result = train_reid(config, dataset, tmp_path / "run")
    assert result.step == result.total_steps and result.best_checkpoint == result.last_checkpoint
    trained = load_trained(tmp_path / "run")
    assert trained.model.identities == 5, "all identities train"
    task = ReidTask(config, dataset, model=trained.model)
    figures = evaluate(trained.model, dataset, task.reader, use_rerank=True, neighbours=config.data.rerank)
    assert [result.reranked for result in figures] == [False, True]
    task.reader.close()


def test_pattern_three_is_the_cosine_of_the_concatenation() -> None:
    chance = torch.Generator().manual_seed(3)
    vectors = torch.randn(7, 2, 3, 4, generator=chance) * torch.tensor([1.0, 9.0]).view(1, 2, 1, 1)
    present = torch.ones(7, 3, dtype=torch.bool)
    joined = Features(vectors, present, concatenated=True)
    flat = vectors.flatten(1)
    expected = 1 - F.cosine_similarity(flat[:, None], flat[None], dim=-1)
    torch.testing.assert_close(distances(joined, joined), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(1 - joined.flat() @ joined.flat().T, expected, atol=1e-6, rtol=0)
    assert (distances(Features(vectors, present), Features(vectors, present)) - expected).abs().max() > 0.05


def test_re_ranking_takes_the_neighbours_it_is_told(tmp_path: Path) -> None:
    rgbnt201(tmp_path)
    config = tiny_preset("RGBNT201", tmp_path)
    dataset = load_dataset(config.data)
    vectors = torch.randn(len(dataset.query), 1, 3, 4, generator=torch.Generator().manual_seed(0))
    features = Features(vectors, torch.ones(len(vectors), 3, dtype=torch.bool))
    wide, usual = (measure(dataset, rerank(features.flat(), features.flat(), *k)) for k in ((4, 2), ()))
    assert config.data.rerank == (50, 15) and wide.mAP != usual.mAP
    assert not torch.equal(rerank(features.flat(), features.flat(), 4, 2), rerank(features.flat(), features.flat()))


def test_nothing_held_out_needs_no_evaluation() -> None:
    with pytest.raises(ValueError, match=naming("data.holdout")):
        load_config(None, ["data.holdout=0"])
    assert load_config(None, ["data.holdout=0", "train.eval_every=0"]).data.holdout == 0


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.warmup_start=0.1"], "cosine"),
        (["train.lr_noise=0.5"], "cosine"),
        (["train.schedule=epoch-cosine", "train.warmup_steps=3"], "counts"),
        (["model.direct=false"], naming("model.network", "demo")),
        (["data.rerank=[0, 3]"], "each 1 or more"),
    ],
)
def test_settings_without_effect_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_config(None, overrides)


@pytest.mark.usefixtures("tiny_clip")
def test_what_a_plain_vit_cannot_do_is_a_sentence(tmp_path: Path) -> None:
    for change, sentence in (
        ({"stride": 8}, "patches"),
        ({"width": 32}, "set model.width to 24"),
        ({"encoder": "mini"}, "has none"),
    ):
        config = tiny_preset("RGBNT201", tmp_path, model=change)
        with pytest.raises(ValueError, match=sentence):
            ReidTask(config, load_dataset(config.data))


def test_a_run_is_not_continued_with_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the files lie may change; what is learned may not."""
    from seps.reid import run

    now = {"reid": load_config(None).to_json(), "modalities": [], "cameras": [], "shots": ""}
    monkeypatch.setattr(run, "find_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(run, "read_json", lambda _: {"about": now})
    run._same_run({**now, "reid": load_config(None, ["data.root=elsewhere"]).to_json()}, tmp_path)
    for changes, message in (
        ({"reid": load_config(None, ["model.width=64"]).to_json()}, r"model\.width: 512 -> 64"),
        ({"shots": "others"}, "shots: '' -> 'others'"),
    ):
        with pytest.raises(ValueError, match=message):
            run._same_run({**now, **changes}, tmp_path)


def test_the_command_trains_a_demo_preset_from_a_file_of_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command on a tree in the published layout; the file of weights is needed for nothing afterwards."""
    encoder = tiny_vit_file(tmp_path / "weights" / "jx_vit.pth")
    words = ["reid", "train", "--config", str(CONFIGS / "demo-MSVR310.yaml"), "--out", str(tmp_path / "run")]
    changes = {
        "data.root": msvr310(tmp_path / "data"),
        "data.identities": 2,
        "data.images": 2,
        "model.encoder": encoder,
        "model.image_size": "[32,64]",
        "model.width": 64,
        "model.aggr_ratio": 0.5,
        "train.epochs": 2,
    }
    words += [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    assert main([*words, "--device", "cpu"]) == 0
    assert "checkpoint" in capsys.readouterr().out
    encoder.unlink()
    run = str(tmp_path / "run")
    assert main(["reid", "eval", run, "--rerank", "--missing", "--json", "--device", "cpu"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert len(rows) == 2 * 13 and {row["reranked"] for row in rows} == {False, True}
    assert main(["reid", "threshold", run, "--out", str(tmp_path / "t"), "--device", "cpu"]) == 2
    assert "identity" in capsys.readouterr().err
