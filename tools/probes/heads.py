"""Every head: trained for two epochs, evaluated, indexed, searched and explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from probes.bench import Bench, columns, log_lines
from probes.fixtures import QUERIES, scenes, store, trained
from probes.registry import probe

HEADS = ("slimming", "maxsim", "mean", "scan-t2i", "scan-i2t", "scan", "description")


def run(bench: Bench, head: str) -> Path:
    """The run of this head."""
    slimming = {"model__slimming": {"dense": "none"}} if head == "maxsim" else {}
    return trained(bench, head, model__head=head, train__epochs=3, train__eval_every=3, **slimming)


@probe("heads", each=HEADS)
def losses(bench: Bench, head: str) -> Any:
    """The log of the run."""
    return log_lines(run(bench, head) / "metrics.jsonl")


@probe("heads", each=HEADS)
def weights(bench: Bench, head: str) -> dict[str, Any]:
    """The weights after training, those of the encoders as one digest each."""
    from safetensors.torch import load_file

    files = sorted((run(bench, head) / "model").rglob("*.safetensors"))
    return {file.stem: {key: value for key, value in load_file(file).items() if value.numel() < 2000} for file in files}


@probe("heads", each=HEADS)
def figures(bench: Bench, head: str) -> dict[str, Any]:
    """`seps eval` under every protocol."""
    found: dict[str, Any] = {}
    protocols = {"slimming": ("none", "image", "published"), "description": ("image",)}
    for protocol in protocols.get(head, ("none", "image")):
        words = ("--model", run(bench, head) / "model", "--data", scenes(bench)[1], "--protocol", protocol)
        answer = bench.seps("eval", *words, "--json", "-", "--device", "cpu")
        found[protocol] = answer.json()
    return found


@probe("heads", each=HEADS)
def search(bench: Bench, head: str) -> dict[str, Any]:
    """Its store, what is found in it and why."""
    place = store(bench, head, model=run(bench, head) / "model")
    found: dict[str, Any] = {"columns": columns(place)}
    for query in QUERIES:
        found[query] = bench.seps("search", query, "--store", place, "--json").json()
    return found


@probe("heads", each=("slimming", "maxsim"))
def explanation(bench: Bench, head: str) -> Any:
    """What words and patches add; the other heads select no patches."""
    place = store(bench, head, model=run(bench, head) / "model")
    return bench.seps("explain", "p004.png", QUERIES[0], "--store", place, "--json").json()
