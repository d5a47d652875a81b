"""What each difference between paper, published code and ours is worth: a table of single changes.

The reference `base` is the published code with the description on the image's side, guiding the selection, and
InfoNCE. Every row names the row it differs from (`reference`) and changes one thing of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seps.config import RatioForm
from seps.experiments.entries import Change, Entry, Suite, published_pairing, whole_score
from seps.retrieval.config import RunConfig


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


_LEARNS = {"dense": "branch", "decision": "binary"}

ABLATION: Suite = {
    "base": Entry("published code, description guides on the image's side, InfoNCE", _base(), "differences"),
    "scoring-learned": Entry("1. learned scores instead of summed", _base(scoring="learned"), "differences", "base"),
    "dense-none": Entry("2. no description", _base(dense="none"), "differences", "base"),
    "dense-branch": Entry(
        "2. description as a second branch: open_source()", whole_score(preset="open_source"), "differences", "base"
    ),
    "dense-tokens": Entry("2. description's words as tokens, a loss a branch", _tokens, "differences", "base"),
    "aggregation-dual": Entry("3. dual aggregation", _base(aggregation="dual"), "differences", "base"),
    "alignment-topk": Entry("4. mean + MLP over the 5 best", _base(alignment="topk"), "differences", "base"),
    "similarity-cosine": Entry("5. plain cosine instead of leaky", _base(similarity="cosine"), "differences", "base"),
    "decision-gumbel": Entry("6. Gumbel top-K", _base(decision="gumbel"), "differences", "base"),
    "decision-binary": Entry("6. learned number of patches", _base(decision="binary"), "differences", "base"),
    "paper": Entry("all together as printed: paper()", whole_score(preset="paper"), "differences", "base"),
    "default": Entry("ours: default()", _default(), "differences", "base"),
    "ratio-topk": Entry("7. separate, with top-K, where it cannot act", _ratio("separate"), "ratio loss", "base"),
    "ratio-off": Entry("learned number, nothing holds it", _base(**_LEARNS), "ratio loss", "dense-branch"),
    "ratio-unified": Entry(
        "7. learned number held by unified, as the code", _ratio("unified", **_LEARNS), "ratio loss", "dense-branch"
    ),
    "ratio-separate": Entry(
        "7. by separate, as the dual code", _ratio("separate", **_LEARNS), "ratio loss", "dense-branch"
    ),
    "ratio-printed": Entry(
        "7. by Eq. 7 as printed (equal weights: unified)", _ratio("printed", **_LEARNS), "ratio loss", "dense-branch"
    ),
    "triplet": Entry("triplet loss, first epoch the sum, then the hardest", _triplet, "training", "base"),
    "detached": Entry("patches cut off from training, as published", _base(detach_patches=True), "training", "base"),
    "published": Entry(
        "trained with the query carrying its target's text", published_pairing, "training", "dense-branch"
    ),
    "mean": Entry("mean patch against mean word, nothing else", whole_score(head="mean"), "training", "base"),
    "description": Entry("description alone, no pixels", whole_score(head="description"), "training", "base"),
    "pooled-2": Entry("cosine of the means added, weight 2", _base(pooled=2.0), "numbers", "base"),
    "rho-0.3": Entry("keeps 0.3 of the patches instead of 0.5", _base(sparse_ratio=0.3), "numbers", "base"),
    "rho-0.7": Entry("keeps 0.7", _base(sparse_ratio=0.7), "numbers", "base"),
    "rho-1.0": Entry("keeps all", _base(sparse_ratio=1.0), "numbers", "base"),
    "merged-0.2": Entry("merged to 0.2 of the kept instead of 0.4", _base(aggr_ratio=0.2), "numbers", "base"),
    "merged-0.6": Entry("merged to 0.6", _base(aggr_ratio=0.6), "numbers", "base"),
    "merged-1.0": Entry("as many merged as kept", _base(aggr_ratio=1.0), "numbers", "base"),
    "beta-0": Entry(
        "learned scores, predictor alone", _base(scoring="learned", beta=0.0), "numbers", "scoring-learned"
    ),
    "beta-0.125": Entry(
        "learned scores, beta 0.125 instead of 0.25", _base(scoring="learned", beta=0.125), "numbers", "scoring-learned"
    ),
    "beta-0.5": Entry("learned scores, no predictor", _base(scoring="learned", beta=0.5), "numbers", "scoring-learned"),
    "top-1": Entry("MLP over the 1 best instead of 5", _base(alignment="topk", top_k=1), "numbers", "alignment-topk"),
    "top-10": Entry("MLP over the 10 best", _base(alignment="topk", top_k=10), "numbers", "alignment-topk"),
    "default-sum": Entry("summed scores", _default(scoring="sum"), "around default()", "default"),
    "default-dual": Entry("dual aggregation", _default(aggregation="dual"), "around default()", "default"),
    "default-topk": Entry("mean + MLP over the 5 best", _default(alignment="topk"), "around default()", "default"),
    "default-leaky": Entry("leaky cosine", _default(similarity="leaky"), "around default()", "default"),
    "default-gumbel": Entry("Gumbel top-K", _default(decision="gumbel"), "around default()", "default"),
    "default-rho-0.7": Entry("keeps 0.7 of the patches", _default(sparse_ratio=0.7), "around default()", "default"),
    "default-rho-1.0": Entry("keeps all", _default(sparse_ratio=1.0), "around default()", "default"),
    "default-merged-0.2": Entry("merged to 0.2 of the kept", _default(aggr_ratio=0.2), "around default()", "default"),
    "default-pooled-4": Entry("cosine of the means, weight 4", _default(pooled=4.0), "around default()", "default"),
    "default-rho-0.7-merged-0.2": Entry(
        "keeps 0.7, merged to 0.2", _default(sparse_ratio=0.7, aggr_ratio=0.2), "around default()", "default"
    ),
    "default-rho-1.0-merged-0.2": Entry(
        "keeps all, merged to 0.2", _default(sparse_ratio=1.0, aggr_ratio=0.2), "around default()", "default"
    ),
    "default-unpooled": Entry("no cosine of the means", _default(pooled=0.0), "around default()", "default"),
}
