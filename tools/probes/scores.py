"""Scores of every option of the method by every backend, their gradients, the losses and the metrics."""

from __future__ import annotations

from typing import Any

import torch

import seps
from probes.bench import Bench
from probes.registry import probe

SIZES: dict[str, Any] = {"embed_size": 32, "num_patches": 16, "num_prefix_tokens": 1}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("paper", {}),
    "open-source": ("open_source", {}),
    "default": ("default", {}),
    "paper gumbel": ("paper", {"decision": "gumbel"}),
    "open-source without description": ("open_source", {"dense": "none"}),
    "open-source detached": ("open_source", {"detach_patches": True}),
    "no description": ("default", {"dense": "none"}),
    "description guides": ("default", {"dense": "guide"}),
    "description branch": ("default", {"dense": "branch"}),
    "summed scores": ("default", {"scoring": "sum"}),
    "dual": ("default", {"aggregation": "dual"}),
    "topk alignment": ("default", {"alignment": "topk", "top_k": 3}),
    "leaky": ("default", {"similarity": "leaky"}),
    "gumbel": ("default", {"decision": "gumbel"}),
    "relaxed": ("default", {"decision": "relaxed", "temperature": 0.5}),
    "binary": ("default", {"decision": "binary"}),
    "unpooled": ("default", {"pooled": 0.0}),
    "few kept": ("default", {"sparse_ratio": 0.3, "aggr_ratio": 0.6}),
    "all kept": ("default", {"sparse_ratio": 1.0, "aggr_ratio": 0.2}),
    "beta": ("default", {"beta": 0.125, "own_guide": 1.0}),
    "extra guide": ("default", {"beta": 0.2, "extra_guides": {"audio": 0.2}}),
    "no prefix": ("default", {"num_prefix_tokens": 0}),
    "any number of patches": ("default", {"check_num_patches": False}),
}


class Case:
    """A network with weights by seed, and inputs for it."""

    def __init__(self, name: str) -> None:
        preset, options = NETWORKS[name]
        config = getattr(seps.SlimmingConfig, preset)(**{**SIZES, **options})
        torch.manual_seed(0)
        self.net = seps.PatchSlimming(config).eval()
        generator = torch.Generator().manual_seed(1)
        tokens = config.num_patches + config.num_prefix_tokens
        self.images = torch.randn(7, tokens, 32, generator=generator)
        self.words = torch.randn(9, 8, 32, generator=generator)
        self.lengths = [8, 3, 5, 8, 1, 2, 7, 4, 6]
        self.paired = torch.randn(9, 11, 32, generator=generator)
        self.own: dict[str, Any] = {}
        self.described = config.dense != "none"
        if self.described:
            self.own["dense"] = torch.randn(7, 11, 32, generator=generator)
            self.own["dense_lengths"] = torch.tensor([11, 5, 9, 1, 11, 3, 7])
        if config.extra_guides:
            self.own["guides"] = {"audio": torch.randn(7, 32, generator=generator)}


@probe("scores", each=NETWORKS)
def scores(_: Bench, name: str) -> dict[str, Any]:
    """All pairs by every backend, precision and direction."""
    from seps.scoring import score_matrix

    case, found = Case(name), dict[str, Any]()
    given = (case.net, case.images, case.words, case.lengths)
    with torch.no_grad():
        forward = case.net(*given[1:], **case.own)
        found["forward"] = forward
        found["two shapes of call"] = case.net(case.images, case.words, torch.tensor(case.lengths), **case.own)
    for backend in ("reference", "factored", "auto"):
        found[backend] = score_matrix(*given, backend=backend, **case.own)
    if "guides" not in case.own:
        many = (case.net, case.images.repeat(3, 1, 1), case.words.repeat(20, 1, 1), case.lengths * 20)
        for backend in ("reference", "factored"):
            found[f"{backend} many"] = score_matrix(*many, backend=backend)
        found["blocks"] = score_matrix(case.net, [case.images[:3], case.images[3:]], *given[2:])
    for precision in ("half", "bfloat16"):
        found[precision] = score_matrix(*given, precision=precision, **case.own)
    found["little memory"] = score_matrix(*given, memory=2**19, **case.own)
    mask = torch.ones(7, SIZES["num_patches"], dtype=torch.bool)
    mask[2, 9:] = False
    mask[5, ::3] = False
    found["masked"] = score_matrix(*given, patch_mask=mask, **case.own)
    for query in ("text", "image"):
        best = score_matrix(*given, topk=3, query=query, **case.own)
        found[f"topk {query}"] = {"scores": best.scores, "indices": best.indices}
    if case.described and "guides" not in case.own:
        found["published pairing"] = score_matrix(*given, paired_dense=case.paired)
    return found


@probe("scores", each=NETWORKS)
def gradients(_: Bench, name: str) -> dict[str, Any]:
    """The differentiable form: scores, masks and gradients, in evaluation and in training mode."""
    from seps.scoring import score_with_gradient

    found: dict[str, Any] = {}
    for mode in ("eval", "train"):
        case = Case(name)
        case.net.train(mode == "train")
        torch.manual_seed(3)
        images, words = case.images.requires_grad_(), case.words.requires_grad_()
        scored = score_with_gradient(case.net, images, words, case.lengths, want_masks=True, **case.own)
        weights = torch.linspace(-1, 1, scored.similarity.numel()).view_as(scored.similarity)
        (scored.similarity * weights).sum().backward()
        found[mode] = {
            "scores": scored.similarity,
            "masks": list(scored.masks),
            "images": images.grad,
            "words": words.grad,
            "weights": {key: value.grad for key, value in case.net.named_parameters() if value.grad is not None},
        }
    return found


@probe("scores", each=["paper", "open-source", "default", "binary", "dual"])
def readable_gradients(_: Bench, name: str) -> dict[str, Any]:
    """Gradients of the network's own forward."""
    case = Case(name)
    images = case.images.requires_grad_()
    out = case.net(images, case.words, case.lengths, **case.own)
    out = out if isinstance(out, torch.Tensor) else out[0]
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return {"images": images.grad, "weights": {k: p.grad for k, p in case.net.named_parameters() if p.grad is not None}}


@probe("scores")
def losses(_: Bench) -> dict[str, Any]:
    """Every loss of the method with its gradient."""
    generator = torch.Generator().manual_seed(4)
    similarity = torch.randn(8, 8, generator=generator)
    masks = torch.rand(8, 8, 16, generator=generator)
    ids = torch.tensor([0, 1, 2, 3, 3, 4, 5, 6])
    found: dict[str, Any] = {}

    def take(name: str, loss: Any, *given: torch.Tensor) -> None:
        first = given[0].clone().requires_grad_()
        value = loss(first, *given[1:])
        value.backward()
        found[name] = {"loss": value, "gradient": first.grad}

    for hardest in (False, True):
        take(f"triplet {hardest}", seps.ContrastiveLoss(margin=0.3, max_violation=hardest), similarity, ids)
    take("infonce", seps.InfoNCELoss(0.1), similarity, ids)
    take("sigmoid", seps.SigmoidLoss(), similarity, ids)
    for form in ("unified", "separate", "printed"):
        ratio = seps.RatioLoss(0.4, 0.7, 1.3, form=form)
        take(f"ratio {form}", lambda both, ratio=ratio: ratio((both, masks[1:])), masks[:-1])
    for kind in ("triplet", "infonce", "sigmoid"):
        loss = seps.SEPSLoss.from_config(seps.LossConfig(kind=kind, ratio_weight=2.0))
        take(f"whole {kind}", lambda scores, loss=loss: loss(scores, (masks, masks))[0], similarity)
    from seps.method.losses import batch_hard_triplet, identity_loss

    people = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    take("identity", identity_loss, torch.randn(8, 5, generator=generator), people)
    take("batch-hard triplet", batch_hard_triplet, torch.randn(8, 6, generator=generator), people)
    return found


@probe("scores")
def recall_figures(_: Bench) -> dict[str, Any]:
    """Recall and ranks with ties, images without captions, and folds."""
    from seps import metrics

    generator = torch.Generator().manual_seed(5)
    scores = (torch.randn(20, 60, generator=generator) * 8).round() / 8
    owners = torch.arange(60) // 3
    first, second = metrics.ranks(scores, owners)
    return {
        "ranks": [first, second],
        "recall": metrics.recall(scores, owners),
        "fold": metrics.five_fold(scores, owners),
        "by image": metrics.rsum_by_image(first, second, owners),
    }


@probe("scores")
def reid_figures(_: Bench) -> dict[str, Any]:
    """mAP and CMC, re-ranking, and verification."""
    from seps import metrics

    generator = torch.Generator().manual_seed(6)
    query, gallery = torch.randn(12, 8, generator=generator), torch.randn(40, 8, generator=generator)
    distances = torch.cdist(query, gallery)
    ids, places = torch.arange(12) % 5, torch.arange(12) % 3
    others, there = torch.arange(40) % 5, torch.arange(40) % 4
    return {
        "figures": metrics.reid_metrics(distances, ids, others, places, there),
        "curve": metrics.cmc_map(distances, ids, others, places, there),
        "re-ranked": metrics.rerank(query, gallery, k1=6, k2=3),
    }
