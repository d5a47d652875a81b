"""Parts of the network that are somebody's own idea, in the places of the built-in ones (see `seps.registry`).

Each keeps to the interface of the part it stands for, so that the network and the fast paths call it alike. A module
among the ideas is a part of the network: it trains, moves and is saved with it.

Shapes: B images, N patches, C width, Q merged patches, M words, K image tokens, V values of a guide's data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.method.align import HRPA
from seps.method.checks import InputError
from seps.method.config import SlimmingConfig
from seps.method.precision import float_matmul
from seps.method.select import TokenSparse, kept_counts
from seps.method.tokens import merge
from seps.registry import FORMS, OWN, promised, registered

IdeaPart = Callable[..., Any]


def own_part(kind: str, config: SlimmingConfig, given: IdeaPart | None) -> tuple[IdeaPart | None, str | None]:
    """The idea that stands for an option of `config`, and the form it promises; (None, None) for a built-in one.

    `given` came as an object. Raises `InputError` where the option is "own" and no object came.
    """
    if given is not None:
        return given, promised(kind, given)
    name = getattr(config, kind)
    if name == OWN:
        raise InputError(
            f"{kind}={OWN!r} stands for an object, which did not come: pass it, PatchSlimming(config, {kind}=...), or "
            "give the whole network to from_pretrained(folder, network=...)."
        )
    idea = registered(kind).get(name)
    return (None, None) if idea is None else (idea.made(config), idea.form)


def checked_result(what: str, found: Any, shape: tuple[int | None, ...]) -> Tensor:
    """`found`, if it is a tensor of that shape, like (B, None, C) with None for any size; `InputError` otherwise."""
    fits = isinstance(found, Tensor) and found.dim() == len(shape)
    if not fits or any(size not in (None, had) for size, had in zip(shape, found.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"{what} must return a tensor of the shape ({wanted}), and returned {came}.")
    result: Tensor = found
    return result


def check_decision(name: str, keep: Tensor) -> None:
    """Raise `InputError` unless D holds zeros and ones alone, as form="scores" promises."""
    if not bool(((keep == 0) | (keep == 1)).all()):
        raise InputError(
            f"The decision {name!r} promises form={FORMS['decision']!r}, so D must hold zeros and ones alone, and "
            f"{float(keep.min()):.3g} to {float(keep.max()):.3g} came; register it without the form to keep weights."
        )


class OwnDecision(TokenSparse):
    """A decision of somebody's own, in the place of the K best."""

    def __init__(self, decide: IdeaPart, config: SlimmingConfig) -> None:
        super().__init__(config.embed_size, config.sparse_ratio, config.scoring == "learned")
        self.decision: str = config.decision  # type: ignore[assignment]
        self.decide_by = decide

    def decide(self, scores: Tensor, valid: Tensor | None = None, full_score: Tensor | float = 1.0) -> Tensor:
        """D (B, N) for `scores` (B, N)."""
        keep = self.decide_by(scores.float(), kept_counts(scores, self.sparse_ratio, valid), valid)  # (..., N)
        if not isinstance(keep, Tensor) or keep.shape != scores.shape:
            raise InputError(
                f"The decision {self.decision!r} must return D of the scores' shape {tuple(scores.shape)}, and "
                f"returned {tuple(keep.shape) if isinstance(keep, Tensor) else type(keep).__name__}."
            )
        # Padding is never kept, whatever the idea does with it.
        return keep.float() if valid is None else keep.float() * valid  # (..., N)


class OwnAggregation(nn.Module):
    """An aggregation of somebody's own, in the place of Eq. 4.

    Flow::

        form "logits"    patches (B, N, C) -> logits (B, N, Q) of the merge weights -> merged (B, Q, C)
        otherwise        patches (B, N, C), D (B, N), scores (B, N) -> merged (B, Q, C)
    """

    scale: Tensor

    def __init__(self, aggregate: IdeaPart, form: str | None, num_merged: int) -> None:
        super().__init__()
        self.aggregate, self.form, self.num_merged = aggregate, form, num_merged
        # What tells the network's dtype, as the built-in `scale` does; it is no weight.
        self.register_buffer("scale", torch.ones(1, 1, 1), persistent=False)

    def logits(self, x: Tensor) -> Tensor:
        """Logits L of the merge weights, (B, N, C) -> (B, N, Q) float32; zeros where the idea has none."""
        if self.form != FORMS["aggregation"]:
            return x.new_zeros(*x.shape[:2], self.num_merged, dtype=torch.float32)  # (B, N, Q)
        shape = (*x.shape[:2], self.num_merged)
        return checked_result("An aggregation by logits", self.aggregate(x), shape).float()  # (B, N, Q)

    def merged(self, patches: Tensor, logits: Tensor, keep: Tensor, scores: Tensor) -> Tensor:
        """The merged patches (B, Q, C) of one decision D (B, N)."""
        if self.form == FORMS["aggregation"]:
            return merge(patches, logits, keep)  # (B, Q, C)
        found = self.aggregate(patches, keep, scores)  # (B, Q, C)
        return checked_result("An aggregation", found, (patches.shape[0], None, patches.shape[2]))  # (B, Q, C)


class OwnAlignment(HRPA):
    """An alignment of somebody's own: of the maxima of each direction (form "maxima"), or of all cosines."""

    def __init__(self, idea: IdeaPart, form: str | None, embed_dim: int, *, scan: bool) -> None:
        super().__init__(embed_dim, scan=scan)
        self.idea, self.form = idea, form

    def pool(self, best: Tensor, mask: Tensor | None = None) -> Tensor:
        """One direction from its maxima: (..., X) -> (...)."""
        if self.form != FORMS["alignment"]:
            raise InputError("This alignment reads all cosines, and not the maxima of each direction.")
        return checked_result("An alignment of maxima", self.idea(best, mask), tuple(best.shape[:-1]))

    def align(self, similarity: Tensor, word_mask: Tensor | None = None, token_mask: Tensor | None = None) -> Tensor:
        """S from the cosines of words and tokens: (B, M, K) -> (B,)."""
        if self.form == FORMS["alignment"]:
            return super().align(similarity, word_mask, token_mask)  # (B, M, K) -> (B,)
        similarity = similarity.float()  # (B, M, K)
        if self.scan:
            similarity = F.leaky_relu(similarity, 0.1)  # (B, M, K)
        found = self.idea(similarity, word_mask, token_mask)  # (B,)
        return checked_result("An alignment", found, (similarity.shape[0],)).float()  # (B,)

    def forward(
        self,
        patch_features: Tensor,
        word_features: Tensor,
        patch_mask: Tensor | None = None,
        word_mask: Tensor | None = None,
    ) -> Tensor:
        """S from L2-normalised tokens (B, K, C) and words (B, M, C) -> (B, 1)."""
        cosines = float_matmul(word_features, patch_features.transpose(1, 2))  # (B, M, C), (B, K, C) -> (B, M, K)
        return self.align(cosines, word_mask, None if patch_mask is None else patch_mask > 0.5)[:, None]  # (B, 1)


class Guides(nn.Module):
    """Guides of somebody's own: the vectors of `extra_guides`, by which Eq. 2 compares the patches.

    Flow::

        form "patches"    patches (B, N, C) -> vectors (B, C)
        otherwise         data (B, V) -> vectors (B, C), zeros where the data are
    """

    def __init__(self, config: SlimmingConfig) -> None:
        super().__init__()
        self.width = config.embed_size
        self.names = tuple(config.extra_guides)
        ideas = {name: idea for name, idea in registered("guide").items() if name in self.names}
        self.from_patches = frozenset(name for name, idea in ideas.items() if idea.form is not None)
        parts = {name: idea.made(config) for name, idea in ideas.items()}
        self.modules_by_name = nn.ModuleDict({n: part for n, part in parts.items() if isinstance(part, nn.Module)})
        self.functions = {name: part for name, part in parts.items() if not isinstance(part, nn.Module)}

    @property
    def from_data(self) -> tuple[str, ...]:
        """The guides whose vectors must come with the images."""
        return tuple(name for name in self.names if name not in self.from_patches)

    def part(self, name: str) -> IdeaPart | None:
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
