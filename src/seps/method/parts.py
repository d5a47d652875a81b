"""The modules of the network, called through `forward`, and custom components in their places (see `seps.registry`).

A module among the components is part of the network: it trains, moves and is saved with it.

Shapes: B images, T texts, N patches, C width, Q merged patches, M words, K image tokens, V values of a guide's data,
R rows (pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.method.align import HRPA, largest
from seps.method.checks import InputError
from seps.method.config import DecisionKind, SlimmingConfig
from seps.method.encoded import Kept
from seps.method.precision import float_matmul
from seps.method.select import TokenSparse, kept_counts
from seps.method.tokens import DualTokenAggregation, TokenAggregation
from seps.registry import CUSTOM, registered

Component = Callable[..., Any]


def own_component(kind: str, config: SlimmingConfig, given: Component | None) -> Component | None:
    """The custom component for an option of `config`; None where it is built in.

    `given` came as an object. Raises `InputError` where the option is "own" and no object came.
    """
    if given is not None:
        return given
    name = getattr(config, kind)
    if name == CUSTOM:
        raise InputError(
            f"{kind}={CUSTOM!r} requires the component as an object: PatchSlimming(config, {kind}=...), or the whole "
            "network: from_pretrained(folder, network=...)."
        )
    idea = registered(kind).get(name)
    return None if idea is None else idea.made(config)


def checked_result(what: str, found: Any, shape: tuple[int | None, ...]) -> Tensor:
    """`found`, if it is a tensor of that shape, like (B, None, C) with None for any size; `InputError` otherwise."""
    fits = isinstance(found, Tensor) and found.dim() == len(shape)
    if not fits or any(size not in (None, had) for size, had in zip(shape, found.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"{what} must return a tensor of the shape ({wanted}), and returned {came}.")
    result: Tensor = found
    return result


class Selector(TokenSparse):
    """The predictor and the decision of one set of patches; its `forward` decides about all pairs."""

    def forward(  # type: ignore[override]
        self, scores: Tensor, valid: Tensor | None = None, full_score: Tensor | float = 1.0
    ) -> Tensor:
        """D (..., N) for the scores (..., N), by `decide`."""
        return self.decide(scores, valid, full_score)


class CustomSelector(Selector):
    """A custom decision in the place of the built-in ones: `decision(scores, count, valid)`, one row per pair."""

    def __init__(self, decide_by: Component, name: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.decide_by = decide_by
        self.decision = name  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self, scores: Tensor, valid: Tensor | None = None, full_score: Tensor | float = 1.0
    ) -> Tensor:
        """D (..., N) for the scores (..., N); padding is never kept."""
        rows = scores.float().flatten(0, -2)  # (R, N)
        present = None if valid is None else valid.expand(scores.shape).flatten(0, -2)  # (R, N)
        count = kept_counts(rows, self.sparse_ratio, present)  # (R, 1)
        keep = checked_result(  # (R, N)
            f"The decision {self.decision!r}", self.decide_by(rows, count, present), tuple(rows.shape)
        )
        keep = keep.float() if present is None else keep.float() * present  # (R, N)
        return keep.view(scores.shape)  # (..., N)


class Merger(TokenAggregation):
    """Merge logits with one weight matrix for all sets."""

    def forward(self, patches: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Logits L of the merge weights, one for all sets: (B, N, C) -> (B, N, Q)."""
        return (self.logits(patches),)  # each (B, N, Q)


class DualMerger(DualTokenAggregation):
    """Merge logits with a weight matrix for each set."""

    def forward(self, patches: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Logits of the caption's and of the description's set: (B, N, C) -> each (B, N, Q)."""
        return self.logits(patches, "caption"), self.logits(patches, "dense")  # each (B, N, Q)


class CustomLogits(nn.Module):
    """A custom aggregation by merge logits (Eq. 4).

    Flow::

        patches (B, N, C) -> `aggregation(patches)` = L (B, N, Q)
    """

    scale: Tensor

    def __init__(self, aggregate: Component, num_merged: int) -> None:
        super().__init__()
        self.aggregate: Any = aggregate
        self.num_merged = num_merged
        # It holds the network's dtype, as the built-in `scale` does; it is no weight.
        self.register_buffer("scale", torch.ones(1, 1, 1), persistent=False)

    def forward(self, patches: Tensor) -> tuple[Tensor, ...]:
        """Logits L of the merge weights: (B, N, C) -> (B, N, Q)."""
        shape = (*patches.shape[:2], self.num_merged)
        return (checked_result("An aggregation by logits", self.aggregate(patches), shape).float(),)  # each (B, N, Q)


class CustomMerger(CustomLogits):
    """A custom aggregation that merges by itself: `aggregation.merge(patches, keep, scores)` -> (B, any number, C)."""

    def forward(self, patches: Tensor) -> tuple[Tensor, ...]:
        """Zeros, as it has no logits: (B, N, Q)."""
        return (patches.new_zeros(*patches.shape[:2], self.num_merged, dtype=torch.float32),)  # each (B, N, Q)

    def tokens(self, patches: Tensor, kept: Sequence[Kept]) -> Tensor:
        """The merged patches and the extra token of each pair, one text after another: (T, B, Q + 1, C)."""
        (one,) = kept
        shape, made = (patches.shape[0], None, patches.shape[2]), []
        for keep, scores, extra in zip(one.keep, one.scores, one.extra, strict=True):
            merged = checked_result("An aggregation", self.aggregate.merge(patches, keep, scores), shape)  # (B, Q, C)
            made.append(torch.cat([merged, float_matmul(extra[:, None], patches)], dim=1))
        return torch.stack(made)  # (T, B, Q + 1, C)


class Pooling(HRPA):
    """The pooling of Eq. 5, called with the maxima of all pairs."""

    reads_cosines = False
    """Whether it reads all cosines instead of the maxima."""

    maxima = staticmethod(largest)
    """What it is called with, from the cosines (..., M, K) and both masks."""
    forward = HRPA.pool_both  # type: ignore[assignment]


class CustomPooling(Pooling):
    """A custom alignment: `alignment(best, mask)` of each direction, or `alignment.align(cosines, masks)` of both."""

    def __init__(self, idea: Component, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.idea: Any = idea
        self.reads_cosines = hasattr(idea, "align")

    def maxima(
        self, cosines: Tensor, word_mask: Tensor | None = None, token_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The maxima of the cosines (..., M, K) or, where it reads all cosines, these, twice."""
        if self.reads_cosines:
            return cosines, cosines  # (..., M, K), (..., M, K)
        return largest(cosines, word_mask, token_mask)  # (..., M), (..., K)

    def pool(self, best: Tensor, mask: Tensor | None = None) -> Tensor:
        """One direction from its maxima: (..., X) -> (...)."""
        return checked_result("An alignment of maxima", self.idea(best, mask), tuple(best.shape[:-1]))  # (...)

    def forward(  # type: ignore[override]
        self, rows: Tensor, columns: Tensor, word_mask: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Tensor:
        """S (...) from the maxima; where it reads all cosines, `rows` are these, (..., M, K)."""
        if not self.reads_cosines:
            return super().forward(rows, columns, word_mask, token_mask)  # (...)
        shape = rows.shape[:-2]
        flat = rows.float().flatten(0, -3)  # (R, M, K)
        flat = F.leaky_relu(flat, 0.1) if self.scan else flat  # (R, M, K)
        masks = [
            None if mask is None else mask.expand(*shape, mask.shape[-1]).flatten(0, -2)
            for mask in (word_mask, token_mask)
        ]
        score = self.idea.align(flat, *masks)  # (R,)
        return checked_result("An alignment", score, (len(flat),)).float().view(shape)  # (...)


def make_selector(config: SlimmingConfig, given: Component | None) -> Selector:
    """The selector of one set of patches."""
    arguments = (config.embed_size, config.sparse_ratio, config.scoring == "learned")
    own = own_component("decision", config, given)
    if own is not None:
        return CustomSelector(own, config.decision, *arguments)
    return Selector(
        *arguments,
        decision=cast(DecisionKind, config.decision),
        temperature=config.temperature,
        sharpness=config.sharpness,
    )


def make_merger(config: SlimmingConfig, given: Component | None) -> Merger | DualMerger | CustomLogits:
    """The aggregation of all sets."""
    own = own_component("aggregation", config, given)
    if own is not None:
        return (CustomMerger if hasattr(own, "merge") else CustomLogits)(own, config.num_merged)
    return (DualMerger if config.aggregation == "dual" else Merger)(config.embed_size, config.num_merged)


def make_pooling(config: SlimmingConfig, given: Component | None) -> Pooling:
    """The pooling of the alignment."""
    own, leaky = own_component("alignment", config, given), config.similarity == "leaky"
    if own is not None:
        return CustomPooling(own, config.embed_size, scan=leaky)
    topk = config.alignment == "topk"
    return Pooling(config.embed_size, top_k=config.top_k, use_paper_version=topk, scan=leaky)


class Guides(nn.Module):
    """Custom guides: the vectors of `extra_guides`, by which Eq. 2 compares the patches.

    Flow::

        from_patches      patches (B, N, C) -> vectors (B, C)
        otherwise         data (B, V) -> vectors (B, C), zeros where the data are
    """

    def __init__(self, config: SlimmingConfig) -> None:
        super().__init__()
        self.width = config.embed_size
        self.names = tuple(config.extra_guides)
        ideas = {name: idea for name, idea in registered("guide").items() if name in self.names}
        self.from_patches = frozenset(name for name, idea in ideas.items() if idea.about["from_patches"])
        parts = {name: idea.made(config) for name, idea in ideas.items()}
        self.modules_by_name = nn.ModuleDict({n: part for n, part in parts.items() if isinstance(part, nn.Module)})
        self.functions = {name: part for name, part in parts.items() if not isinstance(part, nn.Module)}
        self.from_data = tuple(name for name in self.names if name not in self.from_patches)
        """The guides whose vectors must come with the images."""

    def part(self, name: str) -> Component | None:
        """What makes this guide; None where the vectors are used as they come."""
        if name in self.modules_by_name:
            return self.modules_by_name[name]
        return self.functions.get(name)

    def forward(self, patches: Tensor, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By name the vectors (B, C): made from patches (B, N, C), made from data, or as they came."""
        shape = (patches.shape[0], self.width)
        made: dict[str, Tensor] = {}
        for name in self.names:
            part = self.part(name)
            if part is None:
                made[name] = given[name]
            elif name in self.from_patches:
                made[name] = checked_result(f"The guide {name!r}", part(patches), shape)
            else:
                vectors = given[name].to(patches.dtype)  # (B, V)
                found = checked_result(f"The guide {name!r}", part(vectors), shape)  # (B, C)
                made[name] = torch.where(vectors.any(dim=-1, keepdim=True), found, 0.0)
        return made
