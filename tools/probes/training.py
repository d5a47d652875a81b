"""`seps train` with each of its options, and `seps compare`: losses, figures, weights."""

from __future__ import annotations

from typing import Any

from probes.bench import Bench, log_lines
from probes.fixtures import encoders, scenes, settings, trained
from probes.registry import probe

RUNS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"model__preset": "paper"},
    "open source": {"model__preset": "open_source"},
    "triplet": {"loss__kind": "triplet", "warmup_epochs_sum": 1},
    "sigmoid": {"loss__kind": "sigmoid"},
    "ratio": {"model__slimming": {"decision": "binary"}, "loss__ratio_weight": 2.0, "loss__ratio_form": "printed"},
    "gumbel": {"model__slimming": {"decision": "gumbel"}},
    "relaxed": {"model__slimming": {"decision": "relaxed"}},
    "parts": {"parts__pixels": 0.5, "parts__description": 0.5, "parts__distill": 0.2},
    "trust": {"choose_trust": True, "parts__pixels": 1.0, "parts__description": 1.0},
    "published pairing": {"pairing": "published", "model__preset": "open_source"},
    "mixed texts": {"data__texts": "mixed", "data__caption_noise": 0.2},
    "chunks": {"train__chunk_size": 4},
    "bf16": {"train__precision": "bf16"},
    "average": {"train__ema_decay": 0.9},
    "rates": {"train__schedule": "step", "train__step_epochs": [1], "layer_decay": 0.8, "text_lr": 1e-4},
    "constant": {"train__schedule": "constant", "train__optimizer": "adam", "train__warmup_fraction": 0.0},
    "frozen": {"freeze_vision": True, "freeze_text": 1},
    "pruned": {"model__prune": {"keep": 0.5, "blocks": [1]}, "model__special_tokens": False},
    "dropout": {"model__dropout": 0.3, "model__drop_path": 0.2},
    "another seed": {"train__seed": 5},
}


@probe("training", each=RUNS)
def run(bench: Bench, name: str) -> dict[str, Any]:
    """The log of the run, and the figures of its model."""
    out = trained(bench, name, **RUNS[name])
    words = ("--model", out / "model", "--data", scenes(bench)[1], "--device", "cpu", "--json", "-")
    return {"log": log_lines(out / "metrics.jsonl"), "figures": bench.seps("eval", *words).json()}


@probe("training")
def families(bench: Bench) -> dict[str, Any]:
    """Other kinds of vision encoders."""
    import tiny

    found: dict[str, Any] = {}
    for family in ("swin", "clip"):
        folder = tiny.save_vision_encoder(bench.scratch / family, family)
        out = trained(bench, family, **{"model__vision": str(folder)})
        found[family] = log_lines(out / "metrics.jsonl")
    return found


@probe("training")
def long_run(bench: Bench) -> Any:
    """The losses of fifty steps."""
    out = trained(bench, "long", train__epochs=17, train__eval_every=17)
    return log_lines(out / "metrics.jsonl")


@probe("training")
def continued(bench: Bench) -> Any:
    """A run that begins with the weights of another."""
    first = trained(bench, "default")
    return log_lines(trained(bench, "continued", start=str(first / "model")) / "metrics.jsonl")


@probe("training", each=("baselines", "ablation"))
def comparison(bench: Bench, suite: str) -> Any:
    """`seps compare` of two rows."""
    (vision, text), (train, dev) = encoders(bench), scenes(bench)
    recipe = bench.scratch / "recipe.yaml"
    recipe.write_text(
        f"model: {{vision: '{vision}', text: '{text}', image_size: [32, 32], embed_size: 16}}\n"
        "train: {batch_size: 8, epochs: 2, prefetch: 0}\n"
    )
    rows = {"baselines": ("mean", "default"), "ablation": ("base", "dense-none")}[suite]
    out = bench.scratch / f"compared {suite}"
    words = ("--suite", suite, "--config", recipe, "--only", *rows, "--seeds", "0", "--dev", dev, "--data", train)
    answer = bench.seps("compare", *words, "--out", out, "--device", "cpu")
    return {"lines": log_lines(out / "results.jsonl"), "printed": answer.text()}


@probe("training")
def printed_settings(bench: Bench) -> Any:
    """All settings with their defaults."""
    return bench.seps("train", "--print_config", "--out", bench.scratch / "none", *settings(bench)).text()
