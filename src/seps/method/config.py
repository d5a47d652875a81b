"""Typed configuration of the method: the only place where a default of it lives.

Each published difference between the paper and its code is one independent option of `SlimmingConfig`
(differences 1-6) or `LossConfig` (difference 7). `paper()`, `open_source()` and `default()` are points in
that space. A combination that cannot work is refused here, at construction, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from seps.registry import unknown_name

Scoring = Literal["sum", "learned"]
DenseRole = Literal["none", "guide", "branch", "tokens"]
Aggregation = Literal["single", "dual"]
Alignment = Literal["mean", "topk"]
Similarity = Literal["cosine", "leaky"]
DecisionKind = Literal["topk", "gumbel", "relaxed", "binary"]
GuideKind = Literal["vector", "position"]
RatioForm = Literal["unified", "separate", "printed"]
LossKind = Literal["triplet", "infonce", "sigmoid"]


class ConfigError(ValueError):
    """A setting that cannot work; the message names the field, the value and the remedy."""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_choice(name: str, value: object, choices: object) -> None:
    """Raise `ConfigError` unless `value` is one of the values of the Literal type `choices`."""
    allowed = get_args(choices)
    require(value in allowed, f"{name} is {value!r}; choose one of {', '.join(map(repr, allowed))}.")


def require_idea(name: str, kind: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is built in as such a kind, or registered (`seps.registry`)."""
    unknown = unknown_name(name, kind, value)
    require(unknown is None, unknown or "")


@dataclass(frozen=True)
class Branch:
    """The weights of one selection branch in `s = w_p s^p + sum_g w_g s_g` (Eq. 3)."""

    name: str
    predictor_weight: float
    guides: Mapping[str, float]


@dataclass(frozen=True)
class SlimmingConfig:
    """Patch slimming and alignment (Eq. 1-5).

    The six options in which paper and published code differ:

    - `scoring`: "learned" (Eq. 1-3: predictor and min-max normalised attentions) or "sum" (of raw cosines).
    - `dense`: what the image's description does. "none"; "guide" the selection; "branch", a second selection
      aligned on its own; "tokens", guide and let its words stand beside the merged patches.
    - `aggregation`: "dual" (Eq. 4, one weight matrix per kept set) or "single".
    - `alignment`: "topk" (Eq. 5, mean + MLP over the `top_k` best) or "mean".
    - `similarity`: "cosine", or "leaky" (LeakyReLU of slope 0.1 on the cosine).
    - `decision`: "topk"; "gumbel", K sampled patches with the gradient of a relaxation that sums to K; "relaxed",
      the K best with that gradient; "binary", a keep/drop decision per patch whose number is learned.

    Four of them (`scoring`, `aggregation`, `alignment`, `decision`) may name an idea of your own: `seps.registry`.
    """

    embed_size: int = 512
    num_patches: int = 196
    num_prefix_tokens: int = 1
    sparse_ratio: float = 0.5
    aggr_ratio: float = 0.4
    scoring: Scoring | str = "learned"
    dense: DenseRole = "tokens"
    aggregation: Aggregation | str = "single"
    alignment: Alignment | str = "mean"
    similarity: Similarity = "cosine"
    decision: DecisionKind | str = "topk"
    pooled: float = 2.0
    """Weight of the cosine of mean patch and mean word, added to S. Not in the paper or its code: 0 there."""
    beta: float = 0.25
    """Weight of one guidance in learned scoring."""
    own_guide: float = 2.0
    """How often the image's own guidance counts in learned scoring: twice in Eq. 3. With 0 it is left out."""
    extra_guides: Mapping[str, float] = field(default_factory=dict)
    """Further guidance vectors by name, with weights: `{"audio": 0.25}`."""
    top_k: int = 5
    temperature: float = 1.0
    """Temperature of the relaxation in the "gumbel", "relaxed" and "binary" decisions."""
    sharpness: float = 10.0
    """Scale from scores (about 0 to 1.5) to the logits of those decisions."""
    check_num_patches: bool = True
    """Refuse images without exactly `num_patches` patches. With False any number works (images of several sizes), and
    `num_patches` only sets the number of merged patches."""
    detach_patches: bool = False
    """Cut kept patches off from training, as the published code does. For reproduction only."""
    num_merged = 0
    """N_c, the number of merged patches; no field but made of them."""
    branches = cast(tuple[Branch, ...], ())
    """The selection branches, no field but made of them: always "caption", and "dense" where a second set of patches is
    kept."""

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, choices in (("dense", DenseRole), ("similarity", Similarity)):
            require_choice(name, getattr(self, name), choices)
        for kind in ("scoring", "aggregation", "alignment", "decision"):
            require_idea(kind, kind, getattr(self, kind))
        require(
            self.aggregation != "dual" or self.dense in ("guide", "tokens"),
            f"aggregation='dual' merges a second set of patches, kept for the dense text, but dense={self.dense!r} "
            "gives it none; set dense='guide' or 'tokens', or aggregation='single'.",
        )
        require(
            not (self.detach_patches and self.decision != "topk"),
            f"detach_patches=True stops every gradient at the selection, so decision={self.decision!r} could not "
            "learn; set detach_patches=False or decision='topk'.",
        )
        object.__setattr__(self, "branches", tuple(self._branches()))

    def _check_numbers(self) -> None:
        for name, low in (("embed_size", 4), ("num_patches", 1), ("num_prefix_tokens", 0), ("top_k", 1)):
            value = getattr(self, name)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value >= low,
                f"{name} is {value!r}; it must be a whole number of at least {low}.",
            )
        for name in ("sparse_ratio", "aggr_ratio"):
            value = getattr(self, name)
            require(0 < value <= 1, f"{name} is {value!r}; it must lie in (0, 1].")
        for name in ("temperature", "sharpness"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{name} is {value!r}; it must be positive and finite.")
        object.__setattr__(self, "num_merged", int(self.num_patches * self.aggr_ratio * self.sparse_ratio))
        require(
            self.num_merged >= 1,
            f"num_patches={self.num_patches}, sparse_ratio={self.sparse_ratio} and aggr_ratio={self.aggr_ratio} "
            "leave no merged patch (their product is below 1); raise one of the ratios.",
        )
        named = isinstance(self.extra_guides, Mapping)
        require(named, f"extra_guides is {self.extra_guides!r}; give weights by name, such as {{'audio': 0.2}}.")
        weights = {"pooled": self.pooled, "beta": self.beta, "own_guide": self.own_guide}
        weights.update({f"extra_guides[{name!r}]": weight for name, weight in self.extra_guides.items()})
        for name, value in weights.items():
            require(0 <= value < math.inf, f"{name} is {value!r}; it must not be negative, and finite.")
        reserved = {"image", "caption", "dense"} & set(self.extra_guides)
        require(not reserved, f"extra_guides names {sorted(reserved)}, which are built in; choose other names.")
        require(
            self.scoring == "sum" or self.predictor_weight >= -1e-9,
            f"beta={self.beta} and extra_guides={dict(self.extra_guides)} give the predictor the negative weight "
            f"{self.predictor_weight:.3g}; lower them until 2 beta + the extra weights are at most 1.",
        )

    @property
    def predictor_weight(self) -> float:
        """Weight of `s^p` in Eq. 3: what the caption, the dense text and the extra guides leave over."""
        return 1 - 2 * self.beta - sum(self.extra_guides.values()) if self.scoring == "learned" else 0.0

    def _branches(self) -> Iterator[Branch]:
        """With learned scoring and `dense="guide"` both branches read both texts (Eq. 3, as printed); with the sum
        of cosines, or as independent branches, each reads its own.
        """
        unit = self.beta if self.scoring == "learned" else 1.0
        image = {"image": self.own_guide * unit if self.scoring == "learned" else 1.0}
        caption, dense = {"caption": unit}, {"dense": unit}
        extra = dict(self.extra_guides)
        shares = self.dense in ("guide", "tokens") and (self.scoring == "learned" or self.aggregation != "dual")
        first = {**image, **caption, **(dense if shares else {}), **extra}
        yield Branch("caption", self.predictor_weight, first)
        if self.aggregation == "dual" or self.dense == "branch":
            second = {**image, **dense, **(caption if shares else {}), **extra}
            yield Branch("dense", self.predictor_weight, second)

    @classmethod
    def paper(cls, **overrides: Any) -> SlimmingConfig:
        """The method as the paper prints it (Eq. 1-5)."""
        preset: dict[str, Any] = {
            "scoring": "learned",
            "dense": "guide",
            "aggregation": "dual",
            "alignment": "topk",
            "similarity": "cosine",
            "pooled": 0.0,
        }
        return cls(**{**preset, **overrides})

    @classmethod
    def open_source(cls, **overrides: Any) -> SlimmingConfig:
        """The method as its published code computes it, with gradients to the patches."""
        preset: dict[str, Any] = {
            "scoring": "sum",
            "dense": "branch",
            "aggregation": "single",
            "alignment": "mean",
            "similarity": "leaky",
            "pooled": 0.0,
        }
        return cls(**{**preset, **overrides})

    @classmethod
    def default(cls, **overrides: Any) -> SlimmingConfig:
        """What we recommend."""
        return cls(**overrides)


@dataclass(frozen=True)
class LossConfig:
    """The training objective (Eq. 6-7): `kind` of alignment loss, and `ratio_form`, the seventh difference."""

    kind: LossKind = "infonce"
    """Choose the alignment loss: "triplet" (Eq. 6), "infonce" or "sigmoid"."""
    margin: float = 0.2
    """Set the margin of the triplet loss."""
    hardest: bool = True
    """Use the hardest negative in the batch (triplet loss); false uses the sum of all violations."""
    temperature: float = 0.05
    """Set the initial temperature of InfoNCE and sigmoid; it is learned."""
    ratio_form: RatioForm = "separate"
    """Choose the form of the ratio loss (Eq. 7): "unified", of the published code; "separate", of the dual-mode file;
    or "printed", of the paper."""
    ratio_weight: float = 0.0
    """Weight the ratio loss, which acts where the number of kept patches is learned; 0 is off."""
    target_ratio: float = 0.5
    """Set the fraction of kept patches that the ratio loss aims at."""
    lambda_sparse: float = 1.0
    """Weight the ratio of the patches kept for the caption within the ratio loss."""
    lambda_dense: float = 1.0
    """Weight the ratio of the patches kept for the description within the ratio loss."""

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, LossKind)
        require_choice("ratio_form", self.ratio_form, RatioForm)
        for name in ("margin", "ratio_weight", "lambda_sparse", "lambda_dense"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} is {value!r}; it must not be negative, and finite.")
        require(
            0 < self.temperature < math.inf, f"temperature is {self.temperature!r}; it must be positive and finite."
        )
        require(0 < self.target_ratio <= 1, f"target_ratio is {self.target_ratio!r}; it must lie in (0, 1].")
