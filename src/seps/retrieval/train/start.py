"""The settings of a run that goes on from a trained model: what is not told of the model is as that model has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from seps.retrieval.config import RunConfig
from seps.settings import build, told


def load_run(
    files: str | Path | Iterable[str | Path] | None = None,
    overrides: Mapping[str, Any] | Iterable[str] = (),
) -> RunConfig:
    """`seps.settings.load` for a run: with `start` set, settings of `model` that are not told are those of that model.

    So `{"start": "base"}` alone trains on from `base` as it is: its encoders, image size and head.
    Raises ConfigError, and ModelError where there is no such model.
    """
    tree = told(RunConfig, files, overrides)
    if tree.get("start"):
        # Imported here: without a model to start with settings need no torch.
        from seps.retrieval.pretrained import from_pretrained, resolved

        first = resolved(from_pretrained(tree["start"]))
        tree["model"] = {**first, **_model(tree.get("model", {}), first)}
    return build(RunConfig, tree)


def _model(given: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `given` for the model, with options of the head as the `first` model has them."""
    if "preset" in given or given.get("head", first["head"]) != first["head"]:
        return {"slimming": {}, **given}
    options = dict(first["slimming"])
    size = given.get("image_size")
    if "aggr_ratio" in options and size is not None and first["image_size"] is not None:
        # As many merged patches as before: the layer that weighs them was trained for that number.
        (height, width), (had_height, had_width) = size, first["image_size"]
        options["aggr_ratio"] = min(1.0, options["aggr_ratio"] * had_height * had_width / (height * width))
    return {**given, "slimming": {**options, **given.get("slimming", {})}}
