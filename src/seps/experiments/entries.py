"""What `seps compare` trains: entries, each a change of the recipe they all share, and the list of baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from seps.retrieval.config import PartWeights, RunConfig

Change = Callable[[RunConfig], RunConfig]


@dataclass(frozen=True)
class Entry:
    """One row of a comparison."""

    title: str
    change: Change
    """From the shared recipe to this entry's."""
    group: str = ""
    """Rows of one group stand in one table."""
    reference: str | None = None
    """The entry this one differs from in one thing; differences are taken to it."""


Suite = Mapping[str, Entry]


def whole_score(**model: Any) -> Change:
    """The recipe with those model settings and the loss on the whole score, the description on the image's side."""
    whole = PartWeights(fused=1.0)
    return lambda base: replace(
        base,
        model=replace(base.model, **{"slimming": {}, **model}),
        parts=whole,
        choose_trust=False,
        pairing="image",
    )


def published_pairing(base: RunConfig) -> RunConfig:
    """The published code, trained with every caption carrying the text of its own image."""
    return replace(whole_score(preset="open_source")(base), pairing="published")


BASELINES: Suite = {
    "mean": Entry("mean patch against mean word (VSE++ style)", whole_score(head="mean")),
    "scan-t2i": Entry("stacked cross attention, words to patches", whole_score(head="scan-t2i")),
    "scan-i2t": Entry("stacked cross attention, patches to words", whole_score(head="scan-i2t")),
    "scan": Entry("stacked cross attention, both ways", whole_score(head="scan")),
    "slimming": Entry(
        "slimming by the caption alone (LAPS style)", whole_score(preset="open_source", slimming={"dense": "none"})
    ),
    "open-source": Entry(
        "SEPS as its published code, description on the image's side", whole_score(preset="open_source")
    ),
    "paper": Entry("SEPS as printed, description on the image's side", whole_score(preset="paper")),
    "published": Entry(
        "SEPS as its published code, trained with the query carrying its target's text", published_pairing
    ),
    "description": Entry("description alone, no pixels", whole_score(head="description")),
    "default": Entry("ours: pixels and description, each trained to its own best", lambda base: base),
}
