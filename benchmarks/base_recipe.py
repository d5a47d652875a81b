"""The search for the recipe of the embedded model `base`: single changes of configs/base.yaml, chosen on dev.

    python benchmarks/base_recipe.py --config configs/base.yaml --data TRAIN.jsonl --dev DEV.jsonl LLAVA.jsonl \
        --out runs/recipe --seeds 0 --processes 4 --only base distill

Takes the options of `seps compare`; results go to OUT/results.jsonl as they come.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from seps.cli import compare
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


TOGETHER: dict[str, Any] = {
    "model": {"special_tokens": False},
    "data": {"crop_scale": (0.3, 1.0), "jitter": 0.4},
    "train": {"epochs": 30},
}
TAUGHT = {**TOGETHER, "parts": {"distill": 1.0}}
HALF = {"keep": 0.5, "blocks": [3]}


def _with_model(**model: Any) -> dict[str, Any]:
    return {**TAUGHT, "model": {**TAUGHT["model"], **model}}


def _mean() -> dict[str, Any]:
    return {
        **_with_model(head="mean"),
        "parts": {"fused": 1.0, "pixels": 0.0, "description": 0.0},
        "choose_trust": False,
    }


ROWS: dict[str, Variant] = {
    "base": Variant("configs/base.yaml", changed()),
    "words": Variant("special tokens are no words", changed(model={"special_tokens": False})),
    "distill": Variant("the description teaches the pixels", changed(parts={"distill": 1.0})),
    "distill-3": Variant("the same, weight 3", changed(parts={"distill": 3.0})),
    "layers": Variant("rates rise with depth", changed(layer_decay=0.8, vision_lr=1e-4)),
    "vision-1e-4": Variant("vision rate 1e-4", changed(vision_lr=1e-4)),
    "vision-6e-5": Variant("vision rate 6e-5", changed(vision_lr=6e-5)),
    "epochs-40": Variant("twice as long", changed(train={"epochs": 40})),
    "batch-256": Variant("batches of 256", changed(train={"batch_size": 256, "epochs": 30})),
    "crops": Variant("smaller crops, more colour", changed(data={"crop_scale": (0.3, 1.0), "jitter": 0.4})),
    "drop-path": Variant("blocks dropped at random", changed(model={"drop_path": 0.15})),
    "noise": Variant("caption noise 0.1", changed(data={"caption_noise": 0.1})),
    "together": Variant("words and crops", changed(**TOGETHER)),
    "taught": Variant("words, crops, distillation", changed(**TAUGHT)),
    "slower": Variant("the same, vision rate 2e-5", changed(**TAUGHT, vision_lr=2e-5)),
    "pruned": Variant("the same, half of the patches skip blocks 4 to 12", changed(**_with_model(prune=HALF))),
    "keep-all": Variant("the same, no patch is left out", changed(**_with_model(slimming={"sparse_ratio": 1.0}))),
    "mean": Variant("mean patch and mean word alone", changed(**_mean())),
}
SUITES["recipe"] = ROWS  # type: ignore[index]
compare.SUITE_NAMES = (*compare.SUITE_NAMES, "recipe")

if __name__ == "__main__":
    sys.exit(compare.run(["--suite", "recipe", *sys.argv[1:]]))
