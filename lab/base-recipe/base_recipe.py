"""The search for the recipe of the embedded model `base`: single changes of configs/base.yaml, chosen on dev.

    python benchmarks/base_recipe.py --config configs/base.yaml --data TRAIN.jsonl --dev DEV.jsonl LLAVA.jsonl \
        --out runs/recipe --seeds 0 --processes 4 --only start taught

Takes the options of `seps compare`; results go to OUT/results.jsonl as they come.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from seps.cli.main import call
from seps.cli.models import compare
from seps.experiments.suites import SUITES, Change, Variant
from seps.retrieval.config import RunConfig


def changed(**parts: dict[str, Any] | Any) -> Change:
    """The recipe with settings changed by section: `changed(train={"epochs": 40}, layer_decay=0.8)`."""

    def change(recipe: RunConfig) -> RunConfig:
        made: dict[str, Any] = {}
        for name, value in parts.items():
            sectioned = isinstance(value, dict)
            made[name] = replace(getattr(recipe, name), **value) if sectioned else value
        return replace(recipe, **made)

    return change


HALF = {"keep": 0.5, "blocks": [3]}
# Where the search began; configs/base.yaml is where it ended.
START: dict[str, Any] = {
    "model": {"special_tokens": True},
    "data": {"crop_scale": (0.5, 1.0), "jitter": 0.2},
    "parts": {"distill": 0.0},
    "train": {"epochs": 20},
}


def start(**parts: Any) -> Change:
    """The first recipe with settings changed by section."""
    joined = {
        name: {**START.get(name, {}), **value} if isinstance(value, dict) else value for name, value in parts.items()
    }
    return changed(**{**START, **joined})


def mean() -> Change:
    """Mean patch and mean word, without a description to learn from."""
    whole = {"fused": 1.0, "pixels": 0.0, "description": 0.0, "distill": 0.0}
    return changed(model={"head": "mean"}, parts=whole, choose_trust=False)


ROWS: dict[str, Variant] = {
    "start": Variant("where the search began", start()),
    "words": Variant("special tokens are no words", start(model={"special_tokens": False})),
    "distill": Variant("the description teaches the pixels", start(parts={"distill": 1.0})),
    "distill-3": Variant("the same, weight 3", start(parts={"distill": 3.0})),
    "layers": Variant("rates rise with depth", start(layer_decay=0.8, vision_lr=1e-4)),
    "vision-6e-5": Variant("vision rate 6e-5", start(vision_lr=6e-5)),
    "crops": Variant("smaller crops, more colour", start(data={"crop_scale": (0.3, 1.0), "jitter": 0.4})),
    "drop-path": Variant("blocks dropped at random", start(model={"drop_path": 0.15})),
    "together": Variant("words and crops, 30 epochs", changed(parts={"distill": 0.0})),
    "taught": Variant("configs/base.yaml: words, crops, distillation, 30 epochs", changed()),
    "slower": Variant("base, vision rate 2e-5", changed(vision_lr=2e-5)),
    "pruned": Variant("base, half of the patches skip blocks 4 to 12", changed(model={"prune": HALF})),
    "keep-all": Variant("base, no patch is left out", changed(model={"slimming": {"sparse_ratio": 1.0}})),
    "mean": Variant("base, mean patch and mean word alone", mean()),
}
SUITES["recipe"] = ROWS  # type: ignore[index]
compare.SUITE_NAMES = (*compare.SUITE_NAMES, "recipe")

if __name__ == "__main__":
    sys.exit(call("compare", ["--suite", "recipe", *sys.argv[1:]]))
