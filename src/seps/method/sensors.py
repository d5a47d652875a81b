"""SDTPS across sensors: the global vectors of all sensors guide which patches of each sensor are kept.

Shapes: B samples, M sensors, N patches, C width, Q merged patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from seps.method.checks import InputError, check_features, check_patch_count, check_ratio, check_shape, unwrapped
from seps.method.config import DecisionKind, GuideKind
from seps.method.score import combine_scores, cosine_attention
from seps.method.select import TokenSparse, extra_token, num_kept
from seps.method.tokens import TokenAggregation

_FURTHER = "further guide"


class MultiModalSDTPS(nn.Module):
    """Select and merge the patches of each sensor, guided by its own and the others' global vectors.

    Flow for one modality of M::

        s = (1 - (M - 1) b) s^p + b (sum of s_other + w s_own)    cosines, min-max normalised  (Eq. 1-3), w = 2
        keep the K = ceil(ratio N) best, merge them into Q (Eq. 4), append one extra token of the discarded
        (B, N, C) -> (B, Q + 1, C)       128 -> 64 -> 25 -> 26 at 256 x 128 pixels with the defaults

    Args:
        embed_dim: width C.
        num_patches: N of each sensor, from which Q = int(N * aggr_ratio * sparse_ratio) follows.
        sparse_ratio, aggr_ratio: parts kept and merged.
        use_gumbel, gumbel_tau: D carries the gradient of the Gumbel relaxation of `(score + noise) / gumbel_tau`; the
            kept set stays the plain top-K (`decision="relaxed"` with a sharpness of 1).
        beta: b of Eq. 3.
        modalities: names of the sensors, in the order of the arguments of `forward`.
        decision: overrides `use_gumbel`: "topk", "gumbel" (samples), "relaxed" or "binary".
        sharpness: of `decision`, the scale from scores to logits: `(sharpness * score + noise) / gumbel_tau`.
        dim_ratio: hidden width of the aggregation's MLP as a part of `embed_dim`.
        cross_attn_type, cross_attn_heads: of DeMo's versions. "cosine", which has no heads, is what this module
            computes; others are refused.
        own_guide: w, the weight of a sensor's own global vector. With 0 only the others guide: the vector of a sensor
            that is blinded by glare contains the glare, and would select more of it.
        check_num_patches: refuse a sensor without exactly `num_patches` patches. With False any number works (images of
            several sizes), and `num_patches` only sets Q.
        guides: how another sensor guides. "vector", as published, compares its global vector with this sensor's
            patches; that is meaningful only while both share one feature space, and no gradient keeps them there.
            "position" compares its global vector with its own patch at the same place; for sensors that see the
            same scene in the same frame.
        further_guide: weight of a further guide (see `slim`) beside the other sensors' 1. The weights are scaled to the
            same sum as without it, so that where it is absent nothing changes.
    """

    def __init__(
        self,
        embed_dim: int = 512,
        num_patches: int = 128,
        sparse_ratio: float = 0.5,
        aggr_ratio: float = 0.4,
        use_gumbel: bool = False,
        gumbel_tau: float = 1.0,
        beta: float = 0.25,
        dim_ratio: float = 0.2,
        cross_attn_type: str = "cosine",
        cross_attn_heads: int | None = None,
        *,
        modalities: Sequence[str] = ("rgb", "nir", "tir"),
        decision: DecisionKind | None = None,
        sharpness: float = 10.0,
        own_guide: float = 2.0,
        guides: GuideKind = "vector",
        check_num_patches: bool = True,
        further_guide: float = 1.0,
    ) -> None:
        super().__init__()
        check_ratio("sparse_ratio", sparse_ratio)
        check_ratio("aggr_ratio", aggr_ratio)
        self.check_settings(modalities, beta, own_guide, further_guide, guides, cross_attn_type, cross_attn_heads)
        self.embed_dim, self.num_patches, self.check_num_patches = embed_dim, num_patches, check_num_patches
        self.beta, self.own_guide, self.guides, self.further_guide = beta, own_guide, guides, further_guide
        self.modalities = tuple(modalities)
        self.predictor_weight = 1 - (len(modalities) - 1) * beta
        chosen: DecisionKind = decision or ("relaxed" if use_gumbel else "topk")
        scale = sharpness if decision else 1.0
        for name in self.modalities:
            sparse = TokenSparse(
                embed_dim, sparse_ratio, True, decision=chosen, temperature=gumbel_tau, sharpness=scale
            )
            self.add_module(f"{name}_sparse", sparse)
            merged = int(num_patches * aggr_ratio * sparse_ratio)
            self.add_module(f"{name}_aggr", TokenAggregation(embed_dim, merged, dim_ratio))

    @staticmethod
    def check_settings(
        modalities: Sequence[str],
        beta: float,
        own_guide: float,
        further_guide: float,
        guides: str,
        attention: str,
        heads: int | None,
    ) -> None:
        """Raise `InputError` for settings that cannot work."""
        if len(modalities) < 2 or len(set(modalities)) != len(modalities):
            raise InputError(f"modalities must be two or more different names, but {tuple(modalities)} came.")
        for name, weight in (("beta", beta), ("own_guide", own_guide), ("further_guide", further_guide)):
            if not 0 <= weight < math.inf:
                raise InputError(f"{name} must be a finite number, 0 or more, but {weight} came.")
        if guides not in get_args(GuideKind):
            raise InputError(f"guides must be one of {get_args(GuideKind)}, but {guides!r} came.")
        if (len(modalities) - 1) * beta > 1:
            raise InputError(
                f"beta={beta} with {len(modalities)} modalities gives the predictor the negative weight "
                f"{1 - (len(modalities) - 1) * beta:.3g}; use a beta of at most {1 / (len(modalities) - 1):.3g}."
            )
        if attention != "cosine" or heads is not None:
            told = "" if heads is None else f", cross_attn_heads={heads!r}"
            raise InputError(
                f"cross_attn_type={attention!r}{told}: this module guides by 'cosine', without weights, as "
                "the method has it; a learned cross attention with heads has other weights and is not part of it. "
                "Leave cross_attn_type and cross_attn_heads out."
            )

    def extra_repr(self) -> str:
        """Settings shown by `print(module)`."""
        sparse: TokenSparse = getattr(self, f"{self.modalities[0]}_sparse")
        kept = num_kept(self.num_patches, sparse.sparse_ratio)
        merged = getattr(self, f"{self.modalities[0]}_aggr").keeped_patches
        shown = f"N -> K -> Q: {self.num_patches} -> {kept} -> {merged} + 1 extra token, beta={self.beta}"
        return f"{', '.join(self.modalities)}: {shown}"

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """As `nn.Module.load_state_dict`; a checkpoint saved from `DataParallel` loads as well."""
        return super().load_state_dict(unwrapped(state_dict), *args, **options)

    def slim(
        self,
        name: str,
        patches: Mapping[str, Tensor],
        vectors: Mapping[str, Tensor],
        present: Mapping[str, Tensor] | None = None,
        features: Tensor | None = None,
        keep: Tensor | None = None,
        further: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Slim modality `name`: patches (B, N, C), global vectors (B, C) per modality -> (B, Q + 1, C), D (B, N).

        `present` says per modality which samples have it ((B,) bool); an absent sensor guides nothing, and the
        weights of the others are scaled up to the same sum. If `features` (B, N, C) are given, they are merged, and the
        patches of `name` only decide what is kept; so a camera embedding can be in the tokens without being scored.
        If `keep` (B, N) is given, it is D, and the scores only weigh the discarded patches in the extra token.
        `further` is one more guide, such as a text: vectors (B, C), and which samples have one, (B,) bool.
        Raises `InputError` when the tensors do not fit each other or this module.
        """
        self.check_sensors(patches, vectors, present)
        self.check_sensor(name, patches, features, keep)
        own = patches[name] if features is None else features  # (B, N, C)
        # Steps 2 to 4, `choose`: patches (B, N, C), global vectors (B, C) -> scores (B, N), D (B, N)
        scores, chosen = self.choose(name, patches, vectors, present, further)  # (B, N), (B, N)
        keep = chosen if keep is None else keep
        # Step 5, merge (Eq. 4): patches (B, N, C) where D is 1 -> merged patches (B, Q, C)
        merged = getattr(self, f"{name}_aggr")(own, keep)  # (B, N, C), (B, N) -> (B, Q, C)
        # Step 6, extra token: patches (B, N, C) where D is 0 -> (B, 1, C), behind the merged ones: (B, Q + 1, C)
        return torch.cat([merged, extra_token(own, scores, keep)], dim=1), keep  # (B, Q + 1, C), (B, N)

    def check_sensor(
        self, name: str, patches: Mapping[str, Tensor], features: Tensor | None, keep: Tensor | None
    ) -> None:
        """Raise `InputError` unless sensor `name` exists, and its features and D fit its patches."""
        if name not in self.modalities:
            raise InputError(f"{name!r} is not one of the modalities {self.modalities}.")
        shape = patches[name].shape
        if features is not None:
            check_shape(f"features of {name}", features, "samples, patches, width", shape)
        if keep is not None:
            check_shape(f"keep of {name}", keep, "samples, patches", shape[:2])

    def choose(
        self,
        name: str,
        patches: Mapping[str, Tensor],
        vectors: Mapping[str, Tensor],
        present: Mapping[str, Tensor] | None = None,
        further: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and decision D, both (B, N), of modality `name`; arguments as in `slim`."""
        sparse: TokenSparse = getattr(self, f"{name}_sparse")
        # Step 2, guides (Eq. 2): patches (B, N, C) and each global vector (B, C) -> cosines (B, N), one for each sensor
        attentions = {}
        for other, vector in vectors.items():
            attention = cosine_attention(patches[other if self.guides == "position" else name], vector)  # (B, N)
            if present is not None:
                # A constant attention is zero after min-max normalisation. Filled, not multiplied: NaN must not pass.
                attention = attention.masked_fill(~present[other][:, None], 0.0)  # (B, N)
            attentions[other] = attention
        there = {} if present is None else dict(present)
        if further is not None:
            self.check_further(further, patches[name])
            vector, has = further  # (B, C), (B,)
            attention = cosine_attention(patches[name], vector)  # (B, N)
            attention = attention.masked_fill(~has[:, None], 0.0)  # (B, N)
            attentions[_FURTHER], there[_FURTHER] = attention, has
        # Step 3, score (Eq. 1 and 3): s^p (B, N) and the cosines, min-max normalised -> scores (B, N)
        scores = self._scores(name, attentions, sparse.predict(patches[name]), there)  # (B, N)
        # Step 4, top-K: scores (B, N) -> D (B, N), 1 at the K best
        guides = len(self.modalities) - 1 + self.own_guide
        return scores, sparse.decide(scores, full_score=self.predictor_weight + self.beta * guides)  # (B, N), (B, N)

    def _scores(
        self,
        name: str,
        attentions: Mapping[str, Tensor],
        predicted: Tensor | None,
        present: Mapping[str, Tensor],
    ) -> Tensor:
        """Eq. 3 for modality `name`, (B, N); the weight of absent guides is shared by those that are present.

        `present` (B,) holds the guides that are absent somewhere; empty where none is.
        """
        weights = {other: self.own_guide * self.beta if other == name else self.beta for other in self.modalities}
        total = sum(weights.values())
        if not present:
            return combine_scores(  # (B, N)
                attentions,
                weights,
                predicted_BN=predicted,
                predictor_weight=self.predictor_weight,
                normalise=True,
            )
        weights[_FURTHER] = self.further_guide * self.beta
        guided = combine_scores(attentions, weights, normalise=True)  # (B, N)
        every = torch.ones_like(guided[:, 0])  # (B,)
        shares = {**dict.fromkeys(attentions, every), **present}
        parts = [weights[other] * shares[other].float() for other in attentions]  # each (B,)
        weighed = torch.stack(parts).sum(dim=0)  # (B,)
        # Without this the predictor would gain on the guides, and a learned threshold would keep less.
        guided = guided * (total / weighed.clamp_min(1e-8))[:, None]  # (B, N)
        return guided if predicted is None else self.predictor_weight * predicted.float() + guided  # (B, N)

    def check_further(self, further: tuple[Tensor, Tensor], patches: Tensor) -> None:
        """Raise `InputError` unless the further guide fits the patches (B, N, C)."""
        vector, there = further
        check_shape("the further guide", vector, "samples, width", (len(patches), self.embed_dim))
        check_shape("the presence of the further guide", there, "samples", (len(patches),), torch.bool)

    def check_sensors(
        self, patches: Mapping[str, Tensor], vectors: Mapping[str, Tensor], present: Mapping[str, Tensor] | None
    ) -> None:
        """Raise `InputError`, naming the sensor and the shapes, unless the tensors of all sensors fit each other."""
        given: dict[str, Mapping[str, Tensor]] = {"patches": patches, "global vector": vectors}
        for what, of in {**given, **({} if present is None else {"presence": present})}.items():
            if not isinstance(of, Mapping) or set(of) != set(self.modalities):
                came = tuple(of) if isinstance(of, Mapping) else f"a {type(of).__name__}"
                raise InputError(f"{what}: this module has the sensors {self.modalities}, but {came} came.")
        for name in self.modalities:
            for what, of in given.items():
                dims = "samples, patches, width" if what == "patches" else "samples, width"
                # Shapes alone: an absent sensor may hold anything.
                check_features(f"{name} {what}", of[name], dims, self.embed_dim, values=False)
            if self.check_num_patches:
                remedy = "Set num_patches to what the backbone gives."
                check_patch_count(f"{name} patches", patches[name], 0, self.num_patches, remedy)
        first, device = self.modalities[0], next(self.parameters()).device
        samples, count = patches[first].shape[:2]
        places, remedy = (
            None,
            f" The {first} patches are {tuple(patches[first].shape)}: give every sensor of each sample.",
        )
        if self.guides == "position":
            places, remedy = count, f"{remedy[:-1]}, and as many patches: they are compared place by place."
        for name in self.modalities:
            shape = (samples, places, None)
            check_shape(f"{name} patches", patches[name], "samples, patches, width", shape, remedy=remedy)
            check_shape(f"{name} global vector", vectors[name], "samples, width", (samples, None), remedy=remedy)
            for what, of in given.items():
                if of[name].device != device:
                    raise InputError(f"{name} {what} lie on {of[name].device}, this module on {device}: move one.")
            if present is not None:
                check_shape(f"the presence of {name}", present[name], "samples", (samples,), torch.bool)

    def forward(self, *inputs: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
        """Select and merge the patches of all modalities.

        Args:
            inputs: M patch tensors (B, N, C), then M global vectors (B, C) or (B, 1, C), in the order of `modalities`.
            named: the same by DeMo's names: RGB_cash, NI_cash, TI_cash, RGB_global, NI_global, TI_global.

        Returns:
            M token tensors (B, Q + 1, C), then M masks D (B, N).
        """
        # Step 1, inputs by sensor: M patch tensors (B, N, C), then M global vectors (B, C)
        count = len(self.modalities)
        if named:
            inputs = (*inputs, *self._by_name(named, len(inputs)))  # (B, N, C), ...
        if len(inputs) != 2 * count:
            raise InputError(
                f"{count} patch tensors and {count} global vectors are needed for {self.modalities}, but "
                f"{len(inputs)} tensors came."
            )
        vectors: dict[str, Tensor] = {}
        for name, vector in zip(self.modalities, inputs[count:], strict=True):
            has_axis = isinstance(vector, Tensor) and vector.ndim == 3 and vector.shape[1] == 1
            vectors[name] = vector[:, 0] if has_axis else vector
        patches_of = dict(zip(self.modalities, inputs[:count], strict=True))  # each (B, N, C)
        self.check_sensors(patches_of, vectors, None)
        for name in self.modalities:
            check_features(f"{name} patches", patches_of[name], "samples, patches, width", self.embed_dim)
            check_features(f"{name} global vector", vectors[name], "samples, width", self.embed_dim)
        # Steps 2 to 6, `slim`: each sensor's patches (B, N, C), guided by all vectors -> (B, Q + 1, C), D (B, N)
        slimmed = [self.slim(name, patches_of, vectors) for name in self.modalities]
        return (*(tokens for tokens, _ in slimmed), *(keep for _, keep in slimmed))  # (B, Q + 1, C), ...

    def _by_name(self, named: Mapping[str, Tensor], given: int) -> list[Tensor]:
        """The tensors that come by DeMo's names, behind the first `given` ones, in the order of `forward`."""
        demo = {"rgb": "RGB", "nir": "NI", "tir": "TI"}
        sensors = [demo.get(name, name) for name in self.modalities]
        order = [f"{sensor}_cash" for sensor in sensors] + [f"{sensor}_global" for sensor in sensors]
        wanted = order[given:]
        if sorted(named) != sorted(wanted):
            raise InputError(f"forward takes {', '.join(wanted)} by name here, but {', '.join(sorted(named))} came.")
        return [named[name] for name in wanted]
