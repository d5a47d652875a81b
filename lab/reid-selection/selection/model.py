"""The network of the study: `ReidModel` over patches of a fixed stem, with other ways to decide what is kept.

Shapes: B samples, M = 3 sensors, N patches, F stem features, C width, Q merged patches, T tokens, K kept, I identities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.selection.data import FEATURES, SENSORS
from benchmarks.selection.rows import Row
from seps.encoders.vit import Block, ViTConfig
from seps.losses.identity import batch_hard_triplet, hardest_triplets, identity_loss
from seps.nn import MultiModalSDTPS
from seps.nn.alignment import align
from seps.nn.guidance import min_max
from seps.nn.selection import hard_topk, num_kept, rank_patches
from seps.reid.config import ReidModelConfig
from seps.reid.model import Encoded, Fused, ReidModel
from seps.reid.synthetic.canvas import FIGURE
from seps.reid.synthetic.truth import BLIND

NAMES = ("RGB", "NI", "TI")
TRAINED = ("left-out", "telling")
"""Rules that train the predictor for themselves."""
# Merged patches as a part of all, the same number in every row: at most as many as the lowest ratio keeps.
MERGED = 0.15


@dataclass(frozen=True)
class NetSize:
    """Width, heads and blocks of the trained encoder; `early` blocks come before an early selection."""

    width: int = 96
    heads: int = 3
    blocks: int = 4
    early: int = 2


SMALL = NetSize()


class Patches(nn.Module):
    """Transformer blocks over the stem's patches: (B M, N, F, 1) -> (B M, 1 + N, C), CLS first."""

    num_prefix_tokens = 1

    def __init__(self, grid: tuple[int, int], size: NetSize) -> None:
        super().__init__()
        self.width, self.grid, self.early = size.width, grid, size.early
        self.embed = nn.Linear(FEATURES, size.width)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, size.width))
        self.places = nn.Parameter(0.02 * torch.randn(1, grid[0] * grid[1], size.width))
        self.sensors = nn.Parameter(0.02 * torch.randn(SENSORS, 1, size.width))
        shape = ViTConfig(width=size.width, heads=size.heads, hidden=2 * size.width, layer_scale=False)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)

    def grid_for(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.grid

    def first(self, patches: Tensor) -> Tensor:
        """Tokens before the first block."""
        sensors = self.sensors.repeat(len(patches) // SENSORS, 1, 1)  # rows are sample by sample, sensor by sensor
        tokens = self.embed(patches[..., 0]) + self.places + sensors
        return torch.cat([self.cls + sensors, tokens], dim=1)

    def forward(self, patches: Tensor) -> Tensor:
        tokens = self.first(patches)
        for block in self.blocks:
            tokens = block(tokens)
        normed: Tensor = self.norm(tokens)
        return normed


class RowSelection(MultiModalSDTPS):
    """The published score and merging; what is kept is decided by `row`, from what `told` says of the batch."""

    row: Row
    told: dict[str, Tensor]

    def choose(
        self,
        name: str,
        patches: Mapping[str, Tensor],
        vectors: Mapping[str, Tensor],
        present: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        scores, everything = super().choose(name, patches, vectors, present)  # sparse_ratio is 1: all are kept
        rule, number = self.row.rule, self.modalities.index(name)
        told = {what: values[:, number] for what, values in self.told.items()}  # (B, N), shares (B, N, 4)
        if rule == "all" or "decided" in told:
            return scores, everything
        if rule == "sighted":
            seen = 1 - told["shares"][..., BLIND]
            return scores, torch.maximum((seen > 0.5).float(), hard_topk(seen, 1e-6))
        by = {
            "score": lambda: scores,
            "left-out": lambda: scores,
            "telling": lambda: scores,
            "inverted": lambda: -scores,
            "pooled": lambda: told["gate"],
            "random": lambda: told["noise"],
            # Beyond the figure: what is not blind first, and chance among equals.
            "oracle": lambda: told["shares"][..., FIGURE] - 0.1 * told["shares"][..., BLIND] + 1e-3 * told["noise"],
            "agreement": lambda: told["agreement"],
            "agreement+score": lambda: min_max(told["agreement"]) + min_max(scores.detach()),
        }[rule]()
        return scores, hard_topk(by, self.row.ratio)


class PooledGate(nn.Module):
    """Which patches matter, learned from identities alone: each sensor's patches are averaged under the gate's
    weights, and the averages must tell the identity. Nothing is mixed between patches before the gate."""

    def __init__(self, grid: tuple[int, int], identities: int, width: int = 64) -> None:
        super().__init__()
        self.places = nn.Parameter(0.02 * torch.randn(2, SENSORS, grid[0] * grid[1], width))
        self.hidden = nn.ModuleList(nn.Linear(FEATURES, width) for _ in range(2 * SENSORS))
        self.weight = nn.ModuleList(nn.Linear(width, 1) for _ in NAMES)
        self.value = nn.ModuleList(nn.Linear(width, width) for _ in NAMES)
        self.classifier = nn.Linear(SENSORS * width, identities)

    def _seen(self, features: Tensor, sensor: int, part: int) -> Tensor:
        hidden: Tensor = self.hidden[2 * sensor + part](features[:, sensor])
        return F.gelu(hidden + self.places[part, sensor])

    def forward(self, features: Tensor) -> Tensor:
        """Stem features (B, M, N, F) -> logits (B, M, N)."""
        return torch.stack([self.weight[m](self._seen(features, m, 0))[..., 0] for m in range(SENSORS)], dim=1)

    def loss(self, features: Tensor, gates: Tensor, labels: Tensor, groups: Tensor) -> Tensor:
        """Identity and triplet loss of the averages."""
        weights = torch.sigmoid(gates)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        values = torch.stack([self.value[m](self._seen(features, m, 1)) for m in range(SENSORS)], dim=1)
        pooled = (weights[..., None] * values).sum(dim=2).flatten(1)  # (B, M W)
        triplets = batch_hard_triplet(F.normalize(pooled, dim=1), groups)
        return identity_loss(self.classifier(pooled), labels) + triplets


@dataclass
class StudyFused(Fused):
    """Also the merged tokens (B, M, Q, C) of the second branch, without that of the dropped patches."""

    tokens: Tensor | None = None


class StudyModel(ReidModel):
    """A row's network. `forward` returns the loss where labels are given, else the features of both branches.

    All rows have the same parameters (but for the branch that "concat" does not have), drawn in the same order: a seed
    starts all of them at the same weights.
    """

    selection = RowSelection
    sdtps: RowSelection | None

    def __init__(self, row: Row, grid: tuple[int, int], identities: int, size: NetSize) -> None:
        config = ReidModelConfig(
            width=size.width,
            fusion="concat" if row.branch == "none" else "sdtps",
            sparse_ratio=1.0,
            aggr_ratio=MERGED,
            # The predictor decides alone where it is trained to.
            beta=0.0 if row.rule in TRAINED else 0.25,
        )
        super().__init__(config, NAMES, identities, backbones=[Patches(grid, size)])  # type: ignore[list-item]
        self.agreement = nn.ModuleList(
            nn.Sequential(nn.Linear((SENSORS - 1) * FEATURES, 128), nn.GELU(), nn.Linear(128, FEATURES)) for _ in NAMES
        )
        # Whose patch it is, by its stem features alone: nothing of the other patches has been mixed in.
        self.telling = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, identities)) for _ in NAMES
        )
        self.gate = PooledGate(grid, identities)
        self.scored: Tensor | None = None
        self.become(row)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                # Features are taken before the neck: nothing reads its running statistics.
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None

    def become(self, row: Row) -> None:
        """Decide and compare as `row` from now on."""
        self.row = row
        if self.sdtps is not None:
            self.sdtps.row, self.sdtps.told = row, {}

    def forward(  # type: ignore[override]
        self,
        features: Tensor,
        shares: Tensor,
        noise: Tensor,
        labels: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Features (B, M, N, F), shares (B, M, N, 4), noise (B, M, N), labels (B,), groups (B,) equal where the
        identity is: (loss,). Without labels: original (B, M C), sdtps (B, M C), tokens (B, M, Q, C), keep (B, M, N)."""
        told, extra = {"shares": shares, "noise": noise}, features.new_zeros(())
        if "agreement" in self.row.rule:
            misfit = self.misfit(features)
            told["agreement"], extra = -misfit.detach(), misfit.mean()
        gates = self.gate(features) if self.row.rule == "pooled" else None
        if gates is not None:
            told["gate"] = gates.detach()
        if self.sdtps is not None:
            self.sdtps.told = told
        encoded = self.encode(features[..., None])
        fused = self.fuse(encoded)
        if labels is None:
            assert isinstance(fused, StudyFused)
            nothing = fused.original.new_zeros(len(features), 0)
            return tuple(nothing if part is None else part for part in
                         (fused.original, fused.sdtps, fused.tokens, fused.keep))  # fmt: skip
        assert groups is not None
        if self.row.rule == "left-out":
            extra = self.left_out_loss(encoded, labels)
        if self.row.rule == "telling":
            scored = encoded.patches if self.scored is None else self.scored
            extra, self.scored = self.telling_loss(features, scored, labels), None
        if gates is not None:
            extra = self.gate.loss(features, gates, labels, groups)
        return (self.losses(fused, labels, groups) + extra,)

    def misfit(self, features: Tensor) -> Tensor:
        """How badly a sensor's patch is predicted by the others' at the same place: mean squared error (B, M, N)."""
        found = []
        for number, predict in enumerate(self.agreement):
            others = torch.cat([features[:, other] for other in range(SENSORS) if other != number], dim=-1)
            found.append((predict(others).float() - features[:, number]).square().mean(dim=-1))
        return torch.stack(found, dim=1)

    def encode(self, images: Tensor, cameras: Tensor | None = None) -> Encoded:
        if not (self.row.early or self.row.first) or self.sdtps is None:
            return super().encode(images, cameras)
        backbone = self.backbones[0]
        assert isinstance(backbone, Patches)
        tokens = backbone.first(images.flatten(0, 1))
        before = 0 if self.row.first else backbone.early
        for block in backbone.blocks[:before]:
            tokens = block(tokens)
        seen = self._encoded(backbone.norm(tokens))
        self.scored = seen.patches
        names = self.sdtps.modalities
        patches, vectors = (dict(zip(names, part.unbind(1), strict=True)) for part in (seen.patches, seen.vectors))
        keep = torch.stack([self.sdtps.choose(name, patches, vectors)[1] for name in names], dim=1)  # (B, M, N)
        count = num_kept(keep.shape[-1], self.row.ratio)
        places = rank_patches(keep.flatten(0, 1))[:, :count, None].expand(-1, -1, tokens.shape[-1])
        tokens = torch.cat([tokens[:, :1], tokens[:, 1:].gather(1, places)], dim=1)  # (B M, 1 + K, C)
        for block in backbone.blocks[before:]:
            tokens = block(tokens)
        self.sdtps.told = {"decided": keep}
        return self._encoded(backbone.norm(tokens))

    def _encoded(self, tokens: Tensor) -> Encoded:
        """Tokens (B M, 1 + X, C) of the encoder -> patches (B, M, X, C) and global vectors (B, M, C)."""
        projected = self.projections[0](tokens)
        projected = projected.view(-1, SENSORS, *projected.shape[1:])
        first, patches = projected[:, :, 0], projected[:, :, 1:]
        vectors = self._global_vectors(first, patches.float().mean(dim=2))
        return Encoded(patches, vectors, patches, vectors)

    def fuse(self, encoded: Encoded, present: Tensor | None = None) -> Fused:
        original = encoded.feature_vectors.flatten(1).float()
        if self.sdtps is None:
            return StudyFused(original, None, None)
        if self.row.branch == "mean":
            return StudyFused(original, encoded.patches.float().mean(dim=2).flatten(1), None)
        names = self.sdtps.modalities
        patches, vectors = (
            dict(zip(names, part.unbind(1), strict=True)) for part in (encoded.patches, encoded.vectors)
        )
        slimmed = [self.sdtps.slim(name, patches, vectors) for name in names]
        tokens = torch.stack([part.float() for part, _ in slimmed], dim=1)  # (B, M, Q + 1, C)
        keep = self.sdtps.told.get("decided", torch.stack([part for _, part in slimmed], dim=1))
        return StudyFused(original, tokens.mean(dim=2).flatten(1), keep, tokens[:, :, :-1])

    def losses(self, fused: Fused, labels: Tensor, groups: Tensor) -> Tensor:
        """Smoothed cross-entropy and soft-margin batch-hard triplet of unit vectors, of each branch, summed."""
        scores = self.classify(fused)
        features = [fused.original] if fused.sdtps is None else [fused.sdtps, fused.original]
        total = fused.original.new_zeros(())
        for number, (score, feature) in enumerate(zip(scores, features, strict=True)):
            total = total + identity_loss(score, labels)
            if number == 0 and self.row.branch == "match":
                assert isinstance(fused, StudyFused) and fused.tokens is not None
                # As far apart as unit vectors with that cosine.
                apart = (2 - 2 * matched(fused.tokens, fused.tokens)).clamp_min(1e-6).sqrt()
                total = total + hardest_triplets(apart, groups, groups)
            else:
                total = total + batch_hard_triplet(F.normalize(feature, dim=1), groups)
        return total

    def left_out_loss(self, encoded: Encoded, labels: Tensor) -> Tensor:
        """How far the predictor is from what leaving a patch out costs: the rise of the branch's cross-entropy. (The
        patch's own features get no gradient.)"""
        patches = encoded.patches.detach()
        rise = self.left_out_rise(patches.float(), labels)
        return self.predictor_loss(patches, rise)

    def telling_loss(self, features: Tensor, patches: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of patches (B, M, N, F) that are classified one by one, plus how far the predictor is from
        the log-probability that each gives to its own identity."""
        scores = torch.stack([self.telling[m](features[:, m]) for m in range(SENSORS)], dim=1)  # (B, M, N, I)
        entropy = _entropy(scores, labels)  # (B, M, N)
        return entropy.mean() + self.predictor_loss(patches.detach(), -entropy.detach())

    def predictor_loss(self, patches: Tensor, worth: Tensor) -> Tensor:
        """How far the predictor of patches (B, M, N, C) is from their worth (B, M, N), which is counted in standard
        deviations over the sensor's patches, through a sigmoid."""
        assert self.sdtps is not None
        spread = worth.std(dim=-1, keepdim=True) + 1e-8
        target = torch.sigmoid((worth - worth.mean(dim=-1, keepdim=True)) / spread)
        found = [
            getattr(self.sdtps, f"{name}_sparse").predict(patches[:, m]) for m, name in enumerate(self.sdtps.modalities)
        ]
        return (torch.stack(found, dim=1) - target).square().mean()

    @torch.no_grad()
    def left_out_rise(self, patches: Tensor, labels: Tensor) -> Tensor:
        """Rise of the second branch's cross-entropy if one patch is left out of all, for each of them: (B, M, N).

        A merged token without patch i is `(t_k - w_ik v_i) / (1 - w_ik)`; statistics of the batch norm stay.
        """
        assert self.sdtps is not None and self.sdtps_neck is not None
        means, changes = [], []
        for number, name in enumerate(self.sdtps.modalities):
            own = patches[:, number]
            weights = torch.softmax(getattr(self.sdtps, f"{name}_aggr").logits(own), dim=1)  # (B, N, Q)
            tokens = weights.transpose(1, 2) @ own  # (B, Q, C)
            rest = 1 / (1 - weights).clamp_min(1e-4)
            without = rest @ tokens - (weights * rest).sum(dim=2, keepdim=True) * own  # (B, N, C), summed over Q
            # The mean is over one token more, that of the dropped patches.
            means.append(tokens.sum(dim=1) / (weights.shape[2] + 1))
            changes.append(without / (weights.shape[2] + 1) - means[-1][:, None])
        neck, feature = self.sdtps_neck, torch.cat(means, dim=1)  # (B, M C)
        scale = neck.norm.weight / (feature.var(dim=0, unbiased=False) + neck.norm.eps).sqrt()
        scores = ((feature - feature.mean(dim=0)) * scale) @ neck.classifier.weight.T  # (B, I)
        change = torch.stack(changes, dim=1) * scale.view(SENSORS, 1, -1)  # (B, M, N, C)
        weight = neck.classifier.weight.view(-1, SENSORS, change.shape[-1])  # (I, M, C)
        moved = scores[:, None, None] + torch.einsum("bmnc,imc->bmni", change, weight)
        return _entropy(moved, labels) - _entropy(scores, labels)[:, None, None]


def _entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy (B, ...) of scores (B, ..., I) with labels (B,)."""
    at = labels.view(-1, *[1] * (scores.ndim - 1)).expand(*scores.shape[:-1], 1)
    return -torch.log_softmax(scores, dim=-1).gather(-1, at)[..., 0]


def matched(left: Tensor, right: Tensor) -> Tensor:
    """Similarity (A, B) by token: Eq. 5 of tokens (A, M, T, C) and (B, M, T, C), mean over sensors and directions."""
    left, right = F.normalize(left, dim=-1), F.normalize(right, dim=-1)
    cosines = torch.einsum("amtc,bmuc->abmtu", left, right)
    scores: Tensor = align(cosines.flatten(0, 2)).view(cosines.shape[:3])
    return scores.mean(dim=2) / 2
