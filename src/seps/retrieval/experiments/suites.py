"""What `seps compare` trains: suites of variants, each a change of the recipe they all share.

`BASELINES` puts the published ways to score beside ours. `ABLATION` is a table of single changes: what each difference
between the paper, its published code and ours is worth. Its row `base` is the published code with the description on
the image's side, guiding the selection, and InfoNCE; every other row changes one thing of the row it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from seps.method.config import ConfigError, RatioForm
from seps.registry import registered
from seps.retrieval.config import PartWeights, RunConfig

Change = Callable[[RunConfig], RunConfig]


@dataclass(frozen=True)
class Variant:
    """One row of a comparison."""

    title: str
    change: Change
    """From the shared recipe to this variant's."""
    group: str = ""
    """Rows of one group stand in one table."""
    reference: str | None = None
    """The variant this one differs from in one thing; differences are taken to it."""


Suite = Mapping[str, Variant]


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
    """The published code, trained with query-side descriptions: every caption carries the text of its own image."""
    return replace(whole_score(preset="open_source")(base), pairing="published")


BASELINES: Suite = {
    "mean": Variant("mean patch against mean word (VSE++ style)", whole_score(head="mean")),
    "maxsim": Variant(
        "every word chooses its patch (late interaction)", whole_score(head="maxsim", slimming={"dense": "none"})
    ),
    "scan-t2i": Variant("stacked cross attention, words to patches", whole_score(head="scan-t2i")),
    "scan-i2t": Variant("stacked cross attention, patches to words", whole_score(head="scan-i2t")),
    "scan": Variant("stacked cross attention, both ways", whole_score(head="scan")),
    "slimming": Variant(
        "slimming by the caption alone (LAPS style)", whole_score(preset="open_source", slimming={"dense": "none"})
    ),
    "open-source": Variant(
        "SEPS as its published code, description on the image's side", whole_score(preset="open_source")
    ),
    "paper": Variant("SEPS as printed, description on the image's side", whole_score(preset="paper")),
    "published": Variant(
        "SEPS as its published code, trained with the query carrying its target's text", published_pairing
    ),
    "description": Variant("description alone, no pixels", whole_score(head="description")),
    "default": Variant("ours: pixels and description, each trained to its own best", lambda base: base),
}


def _base(**slimming: Any) -> Change:
    """`base` with some options of its selection and alignment changed."""
    return whole_score(preset="open_source", slimming={"dense": "guide", **slimming})


def _default(**slimming: Any) -> Change:
    """`default()` with some options changed, on the recipe's own losses: each branch has one."""
    return lambda recipe: replace(recipe, model=replace(recipe.model, preset="default", slimming=slimming))


def _ratio(form: RatioForm, **slimming: Any) -> Change:
    """`base` changed, with a ratio loss of the published weight."""

    def change(recipe: RunConfig) -> RunConfig:
        loss = replace(recipe.loss, ratio_form=form, ratio_weight=2.0)
        return replace(_base(**slimming)(recipe), loss=loss)

    return change


def _triplet(recipe: RunConfig) -> RunConfig:
    return replace(_base()(recipe), loss=replace(recipe.loss, kind="triplet"), warmup_epochs_sum=1)


def _tokens(recipe: RunConfig) -> RunConfig:
    # The description's words are a part of the score: as in default(), pixels and description have a loss each.
    return replace(recipe, model=_base(dense="tokens")(recipe).model)


_LEARNS: dict[str, Any] = {"dense": "branch", "decision": "binary"}


_TABLES: Mapping[tuple[str, str], Mapping[str, tuple[str, Change] | tuple[str, Change, str]]] = {
    ("differences", "base"): {
        "base": ("published code, description guides on the image's side, InfoNCE", _base()),
        "scoring-learned": ("1. learned scores instead of summed", _base(scoring="learned")),
        "dense-none": ("2. no description", _base(dense="none")),
        "dense-branch": ("2. description as a second branch: open_source()", whole_score(preset="open_source")),
        "dense-tokens": ("2. description's words as tokens, a loss a branch", _tokens),
        "aggregation-dual": ("3. dual aggregation", _base(aggregation="dual")),
        "alignment-topk": ("4. mean + MLP over the 5 best", _base(alignment="topk")),
        "similarity-cosine": ("5. plain cosine instead of leaky", _base(similarity="cosine")),
        "decision-gumbel": ("6. Gumbel top-K", _base(decision="gumbel")),
        "decision-binary": ("6. learned number of patches", _base(decision="binary")),
        "paper": ("all together as printed: paper()", whole_score(preset="paper")),
        "default": ("ours: default()", _default()),
    },
    ("ratio loss", "dense-branch"): {
        "ratio-topk": ("7. separate, with top-K, where it cannot act", _ratio("separate"), "base"),
        "ratio-off": ("learned number, nothing holds it", _base(**_LEARNS)),
        "ratio-unified": ("7. learned number held by unified, as the code", _ratio("unified", **_LEARNS)),
        "ratio-separate": ("7. by separate, as the dual code", _ratio("separate", **_LEARNS)),
        "ratio-printed": ("7. by Eq. 7 as printed (equal weights: unified)", _ratio("printed", **_LEARNS)),
    },
    ("training", "base"): {
        "triplet": ("triplet loss, first epoch the sum, then the hardest", _triplet),
        "detached": ("patches cut off from training, as published", _base(detach_patches=True)),
        "published": ("trained with the query carrying its target's text", published_pairing, "dense-branch"),
        "mean": ("mean patch against mean word, nothing else", whole_score(head="mean")),
        "description": ("description alone, no pixels", whole_score(head="description")),
    },
    ("numbers", "base"): {
        "pooled-2": ("cosine of the means added, weight 2", _base(pooled=2.0)),
        "rho-0.3": ("keeps 0.3 of the patches instead of 0.5", _base(sparse_ratio=0.3)),
        "rho-0.7": ("keeps 0.7", _base(sparse_ratio=0.7)),
        "rho-1.0": ("keeps all", _base(sparse_ratio=1.0)),
        "merged-0.2": ("merged to 0.2 of the kept instead of 0.4", _base(aggr_ratio=0.2)),
        "merged-0.6": ("merged to 0.6", _base(aggr_ratio=0.6)),
        "merged-1.0": ("as many merged as kept", _base(aggr_ratio=1.0)),
        "beta-0": ("learned scores, predictor alone", _base(scoring="learned", beta=0.0), "scoring-learned"),
        "beta-0.125": (
            "learned scores, beta 0.125 instead of 0.25",
            _base(scoring="learned", beta=0.125),
            "scoring-learned",
        ),
        "beta-0.5": ("learned scores, no predictor", _base(scoring="learned", beta=0.5), "scoring-learned"),
        "top-1": ("MLP over the 1 best instead of 5", _base(alignment="topk", top_k=1), "alignment-topk"),
        "top-10": ("MLP over the 10 best", _base(alignment="topk", top_k=10), "alignment-topk"),
    },
    ("around default()", "default"): {
        "default-sum": ("summed scores", _default(scoring="sum")),
        "default-dual": ("dual aggregation", _default(aggregation="dual")),
        "default-topk": ("mean + MLP over the 5 best", _default(alignment="topk")),
        "default-leaky": ("leaky cosine", _default(similarity="leaky")),
        "default-gumbel": ("Gumbel top-K", _default(decision="gumbel")),
        "default-rho-0.7": ("keeps 0.7 of the patches", _default(sparse_ratio=0.7)),
        "default-rho-1.0": ("keeps all", _default(sparse_ratio=1.0)),
        "default-merged-0.2": ("merged to 0.2 of the kept", _default(aggr_ratio=0.2)),
        "default-pooled-4": ("cosine of the means, weight 4", _default(pooled=4.0)),
        "default-rho-0.7-merged-0.2": ("keeps 0.7, merged to 0.2", _default(sparse_ratio=0.7, aggr_ratio=0.2)),
        "default-rho-1.0-merged-0.2": ("keeps all, merged to 0.2", _default(sparse_ratio=1.0, aggr_ratio=0.2)),
        "default-unpooled": ("no cosine of the means", _default(pooled=0.0)),
    },
}
"""By group and the row that its rows differ from: title, change, and the reference where it is another."""


def _ablation() -> Iterator[tuple[str, Variant]]:
    for (group, reference), rows in _TABLES.items():
        for name, (title, change, *other) in rows.items():
            named = other[0] if other else reference
            yield name, Variant(title, change, group, None if named == name else named)


ABLATION: Suite = dict(_ablation())
SUITES: Mapping[str, Suite] = {"baselines": BASELINES, "ablation": ABLATION}


def suite_with_own_rows(name: str) -> Suite:
    """The suite of that name, and the rows that were registered for it (`seps.register_row`).

    Raises ConfigError for a row that has the name of another, and for one that differs from a row that is not there.
    """
    own = {idea.name: idea for idea in registered("row").values() if idea.about["suite"] == name}
    rows = dict(SUITES[name])
    taken = sorted(rows.keys() & own.keys())
    if taken:
        raise ConfigError(f"The suite {name} has a row {taken[0]!r} already; register yours under another name.")
    for idea in own.values():
        reference = idea.about["reference"]
        if reference is not None and reference not in rows and reference not in own:
            raise ConfigError(f"The row {idea.name!r} names the reference {reference!r}, which {name} does not have.")
        group = idea.about["group"] or (rows[reference].group if reference in rows else "your own")
        rows[idea.name] = Variant(idea.about["title"], idea.thing, group if SUITES[name] is ABLATION else "", reference)
    return rows
