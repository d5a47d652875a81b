"""The presets: equal but for what the page states, and each built at its real size and trained for a step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from reid_toys import msvr310, rgbnt100, rgbnt201
from torch import Tensor

from seps.encoders import registry
from seps.reid.config import ReidConfig, ReidLossConfig, from_mapping, load_config
from seps.reid.network.model import Fused
from seps.reid.task import ReidTask, load_dataset, reid_losses
from seps.training.optim import build_optimizer, clip_gradients, lr_factor

ROOT = Path(__file__).parents[2]
PRESETS = {path.stem: path for path in sorted((ROOT / "configs" / "reid").glob("*.yaml"))}
TREES = {"RGBNT201": rgbnt201, "RGBNT100": rgbnt100, "MSVR310": msvr310}


def fields(config: ReidConfig) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, part in config.to_json().items() for name, value in part.items()}


def table(head: str) -> dict[str, dict[str, Any]]:
    """A table of the page, of settings in which presets differ: setting -> preset -> value."""
    lines = (ROOT / "docs" / "re-identification-sets.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head))
    names = [name.strip() for name in lines[start].strip("|").split("|")][1:]
    found: dict[str, dict[str, Any]] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        setting, *values = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        found[setting] = dict(zip(names, map(yaml.safe_load, values), strict=True))
    return found


def test_published_presets_differ_from_ours_exactly_in_what_the_page_states() -> None:
    """One table for the three pairs; a row that is not about all of them names its sets in brackets."""
    stated = table("| setting | ours | demo |")
    for name in TREES:
        rows = {row.split("`")[0]: values for row, values in stated.items() if "(" not in row or name in row}
        assert differing({"ours": PRESETS[name], "demo": PRESETS[f"demo-{name}"]}) == rows, name


def differing(presets: dict[str, Path]) -> dict[str, dict[str, Any]]:
    loaded = {name: fields(load_config(path)) for name, path in presets.items()}
    first = next(iter(loaded.values()))
    return {
        setting: {name: values[setting] for name, values in loaded.items()}
        for setting in first
        if any(values[setting] != first[setting] for values in loaded.values())
    }


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CLIP with one block and few words: the sizes of what comes after the backbone stay those of the preset."""
    small = {"num_hidden_layers": 1}
    config = {"vision_config": {"patch_size": 16, **small}, "text_config": {**small, "vocab_size": 64}}
    monkeypatch.setitem(registry.PRESETS, "clip-b-16", replace(registry.PRESETS["clip-b-16"], config=config))
    yield


def preset(name: str, root: Path, **changes: dict[str, Any]) -> ReidConfig:
    """The preset on a folder of tiny images, in batches of four, without weights from elsewhere."""
    values = yaml.safe_load(PRESETS[name].read_text(encoding="utf-8"))
    if name == "synthetic":
        values["data"]["layout"] = "rgbnt201"
    tree = TREES.get(name.removeprefix("demo-"), rgbnt201)
    held_out = {} if name.startswith("demo-") else {"holdout": 1}
    values["data"] |= {"root": str(tree(root)), "identities": 2, "images": 2, **held_out}
    values["model"] |= {"pretrained": False}
    for section, part in changes.items():
        values[section] |= part
    return from_mapping(values)


def slow_branch(features: Tensor, scores: Tensor, labels: Tensor, config: ReidLossConfig) -> float:
    """Smoothed cross-entropy and soft-margin batch-hard triplet, one number at a time in float64."""
    rows, logits = features.detach().double().tolist(), scores.detach().double().tolist()
    if config.triplet_space == "unit":
        rows = [[value / math.sqrt(sum(v * v for v in row)) for value in row] for row in rows]
    identity = triplet = 0.0
    for i, label in enumerate(labels.tolist()):
        top = max(logits[i])
        total = top + math.log(sum(math.exp(value - top) for value in logits[i]))
        spread = config.label_smoothing / len(logits[i])
        for j, value in enumerate(logits[i]):
            identity += ((1 - config.label_smoothing) * (j == label) + spread) * (total - value)
        apart = [math.dist(rows[i], other) for other in rows]
        farthest = max(d for d, other in zip(apart, labels.tolist(), strict=True) if other == label)
        nearest = min(d for d, other in zip(apart, labels.tolist(), strict=True) if other != label)
        triplet += math.log1p(math.exp(farthest - nearest))
    return (config.identity * identity + config.triplet * triplet) / len(rows)


def slow_loss(fused: Fused, scores: tuple[Tensor, ...], labels: Tensor, config: ReidLossConfig) -> float:
    assert fused.sdtps is not None
    blocks = fused.original.chunk(len(scores) - 1, dim=1)
    original = sum(slow_branch(block, score, labels, config) for block, score in zip(blocks, scores[1:], strict=True))
    return original + config.sdtps * slow_branch(fused.sdtps, scores[0], labels, config)


def autocast(precision: str) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


@pytest.mark.parametrize(
    ("name", "precision"),
    # Each set, each form of the settings and both precisions; the other pairs differ in what these vary.
    [("RGBNT201", "float32"), ("synthetic", "float32"), ("demo-RGBNT100", "float32"), ("MSVR310", "bf16")],
)
@pytest.mark.usefixtures("shallow")
def test_a_preset_is_built_and_takes_a_step(name: str, precision: str, tmp_path: Path) -> None:
    config = preset(name, tmp_path, train={"precision": precision})
    task = ReidTask(config, load_dataset(config.data))
    model = task.model.train()
    batch = task.batch(0, 0, 0, 1)
    with autocast(precision):
        fused = model.embed(batch.images, batch.cameras, batch.present)
        scores = model.classify(fused)
        loss, figures = task.loss(batch, 0)
    # The features and the scores as they are; everything after them must be float32 whatever autocast says.
    assert {part.dtype for part in (fused.original, fused.sdtps, *scores, loss)} == {torch.float32}
    assert loss.item() == pytest.approx(slow_loss(fused, scores, batch.labels, config.loss), rel=2e-5)
    first = loss.item()
    assert float(figures["kept"]) == math.ceil(model.num_patches * config.model.sparse_ratio) / model.num_patches
    before = {part: value.detach().clone() for part, value in model.named_parameters()}
    optimizer = build_optimizer(task, config.train)
    for _ in range(2):
        loss.backward()
        assert 0 < clip_gradients(model.parameters(), config.train.clip_norm) < math.inf
        optimizer.step()
        optimizer.zero_grad()
        # The norm of the global-local fusion learns from the second step on: the layer behind it begins as zero.
        with autocast(precision):
            loss = task.loss(batch, 0)[0]
    assert loss.item() != pytest.approx(first, rel=1e-6)
    resting = {n for n, value in model.named_parameters() if torch.equal(value, before[n])}
    assert resting == {n for n, value in model.named_parameters() if not value.requires_grad}
    task.reader.close()


@pytest.mark.parametrize(
    ("name", "batch", "warm_up_epochs"), [("RGBNT201", 64, 10), ("RGBNT100", 128, 5), ("MSVR310", 64, 10)]
)
@pytest.mark.usefixtures("shallow")
def test_what_follows_from_the_fields_is_as_published(
    name: str, batch: int, warm_up_epochs: int, tmp_path: Path
) -> None:
    """128 -> 64 -> 25 -> 26 tokens, CLIP at 5e-6, warm-up in epochs: none of them is a field."""
    config = load_config(PRESETS[name])
    assert config.train.batch_size == batch
    per_epoch = 12
    factors = [lr_factor(step, per_epoch, config.train) for step in range(per_epoch * config.train.epochs)]
    assert factors.index(max(factors)) == pytest.approx(per_epoch * warm_up_epochs, abs=1)
    small = preset(name, tmp_path)
    task = ReidTask(small, load_dataset(small.data))
    rates = {n: g["lr"] for g in build_optimizer(task, small.train).param_groups for n in g.get("names", [g["lr"]])}
    assert min(rates.values()) == pytest.approx(5e-6, rel=0.01) and max(rates.values()) == pytest.approx(3.5e-4)
    encoded = task.model.encode(torch.rand(1, 3, 3, *small.model.image_size), torch.zeros(1, dtype=torch.long))
    selection = task.model.sdtps
    assert selection is not None and encoded.patches.shape == (1, 3, 128, 512)
    patches, vectors = (
        dict(zip(selection.modalities, part.unbind(1), strict=True)) for part in (encoded.patches, encoded.vectors)
    )
    tokens, keep = selection.slim("sensor2", patches, vectors)
    assert int(keep.sum()) == 64 and tokens.shape == (1, 26, 512)
    task.reader.close()


@pytest.mark.parametrize("name", list(PRESETS))
def test_the_gradient_of_the_loss_is_that_of_float32_under_autocast(name: str) -> None:
    """Features of identities close together (cosine 0.95), as at the start of fine-tuning: bf16 cannot rank them."""
    config = load_config(PRESETS[name]).loss
    chance = torch.Generator().manual_seed(5)
    common = torch.randn(1, 96, generator=chance)
    labels = torch.arange(8).repeat_interleave(4)
    gradients = []
    noise = torch.randn(2, 32, 96, generator=chance) * 0.23
    scores = torch.randn(2, 32, 8, generator=chance)
    for enabled in (False, True):
        original, sdtps = ((common + part).clone().requires_grad_() for part in noise)
        fused = Fused(original, sdtps, None)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss, _ = reid_losses(fused, fused, (scores[0], scores[1]), labels, config)
        loss.backward()
        assert original.grad is not None and sdtps.grad is not None
        gradients.append(torch.cat([original.grad.flatten(), sdtps.grad.flatten()]))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.999


def test_a_bound_of_the_gradient_lies_above_what_the_variants_reach() -> None:
    """A bound between the norms of two variants acts on one of them alone, and then they are not compared fairly."""
    lines = (ROOT / "lab" / "reid-synthetic" / "reid-synthetic.md").read_text(encoding="utf-8").splitlines()
    rows = lines[next(i for i, line in enumerate(lines) if "median gradient norm" in line) + 2 :]
    seen = [float(re.split(r"\s*\|\s*", row)[4]) for row in rows[: rows.index("")]]
    assert seen and min(seen) < 10 < max(seen)
    for path in PRESETS.values():
        bound = load_config(path).train.clip_norm
        assert bound == 0 or bound > 1.5 * max(seen), path.name
