"""The model card of a retrieval model: what it is, what it was measured at, how to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seps.hub.card import card, table


def model_card(name: str, model: Mapping[str, Any], about: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    """README.md of a saved model. `model` is its configuration, `about` what the caller told of it."""
    sections = {
        "What it is made of": table(
            ("", ""),
            [
                ("vision encoder", model["vision"]),
                ("text encoder", model["text"]),
                ("head", f"{model['head']}, preset {model['preset']}"),
                ("joint width", model["embed_size"]),
                *facts.items(),
            ],
        )
    }
    if model.get("slimming"):
        sections["Settings of the head"] = table(("setting", "value"), sorted(model["slimming"].items()))
    sections["Figures"] = _figures(about.get("figures"))
    sections["How to load it"] = (
        "```python\nfrom seps.retrieval.pretrained import from_pretrained\n\n"
        f'model = from_pretrained("{name}")  # this folder, or its hub id\n```\n\n'
        f"From the command line: `seps eval --model {name} --data FILE.jsonl --protocol image`, `seps index PHOTOS "
        f"--store STORE --model {name}`. Needs `pip install 'seps[encoders]'`."
    )
    return card(
        str(about.get("name") or name),
        about,
        tags=("image-text-retrieval", "cross-modal-alignment", "patch-selection"),
        pipeline="feature-extraction",
        summary="A text and image retrieval model: it scores every picture with every sentence, by the patches that "
        "the sentence keeps.",
        sections=sections,
    )


def _figures(figures: Sequence[Mapping[str, Any]] | None) -> str:
    if not figures:
        return "None were recorded when the model was saved. `seps eval` measures it under a named protocol."
    rows = [
        (
            report["dataset"],
            f"`{report['protocol']}`",
            report["images"],
            f"{report['rsum']:.1f}",
            *(f"{report[side][recall]:.1f}" for side in ("i2t", "t2i") for recall in ("r1", "r5", "r10")),
        )
        for report in figures
    ]
    names = ("data", "protocol", "images", "rSum", "i2t R@1", "R@5", "R@10", "t2i R@1", "R@5", "R@10")
    note = (
        "Protocol: `none` pixels alone; `image` with each image's own description; `published` hands each query a "
        "description of its target, which leaks the answer."
    )
    return f"{table(names, rows)}\n\n{note}"
