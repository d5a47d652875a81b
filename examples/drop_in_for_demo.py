"""A drop-in for DeMo: give a model with three sensors our patch selection, in three lines.

`ThreeSensors` is written in DeMo's manner: a backbone gives patches and a global vector per sensor, `sdtps` selects,
training returns `sdtps_score, sdtps_feat, ori_score, ori_feat`, and `return_pattern` says which features evaluation
returns. `HandWritten` is the selection such a model brings with it. It prints the shapes of all outputs, how far the
features of both selections are apart with the same weights, and the largest gradient at the predictors with Gumbel.
Where the package cannot be installed (it needs Python 3.10 and torch 2.4), the file of `seps modules` takes its place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    from seps import MultiModalSDTPS  # <- line 1
    from seps.reid import check
except ImportError:
    from selection_check import check  # src/seps/reid/selection_check.py, which needs torch alone
    from seps_modules import MultiModalSDTPS  # <- line 1, with the single file

SENSORS = {"rgb": "RGB", "nir": "NI", "tir": "TI"}
SETTINGS = {"embed_dim": 64, "num_patches": 128, "sparse_ratio": 0.5, "aggr_ratio": 0.4, "beta": 0.25}


class HandWritten(nn.Module):
    """Per sensor (B, N, C) patches -> (B, Q + 1, C) tokens and D (B, N); D is the mask of the aggregation."""

    def __init__(self, embed_dim, num_patches, sparse_ratio, aggr_ratio, beta, use_gumbel=False) -> None:
        super().__init__()
        self.keep, self.beta, self.use_gumbel = math.ceil(sparse_ratio * num_patches), beta, use_gumbel
        merged, inner, hidden = int(num_patches * aggr_ratio * sparse_ratio), embed_dim // 4, int(0.2 * embed_dim)
        for name in SENSORS:
            predict = nn.Sequential(nn.Linear(embed_dim, inner), nn.GELU(), nn.Linear(inner, 1), nn.Sigmoid())
            weigh = (nn.LayerNorm(embed_dim), nn.Linear(embed_dim, hidden), nn.GELU(), nn.Linear(hidden, merged))
            aggregate = nn.ModuleDict({"weight": nn.Sequential(*weigh)})
            aggregate.scale = nn.Parameter(torch.ones(1, 1, 1))
            self.add_module(f"{name}_sparse", nn.ModuleDict({"score_predictor": predict}))
            self.add_module(f"{name}_aggr", aggregate)

    def forward(self, RGB_cash, NI_cash, TI_cash, RGB_global, NI_global, TI_global):
        vectors = (RGB_global, NI_global, TI_global)
        made = [self.select(*sensor, vectors) for sensor in enumerate((RGB_cash, NI_cash, TI_cash))]
        return (*(tokens for tokens, _ in made), *(decision for _, decision in made))

    def select(self, number: int, patches: Tensor, vectors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        sparse, aggregate = (getattr(self, f"{list(SENSORS)[number]}_{part}") for part in ("sparse", "aggr"))
        with torch.no_grad():
            seen = torch.stack([F.cosine_similarity(patches, vector[:, None], dim=-1) for vector in vectors])
            seen = seen - seen.amin(dim=-1, keepdim=True)  # (3, B, N)
            seen = seen / (seen.amax(dim=-1, keepdim=True) + 1e-8)
        predicted = sparse["score_predictor"](patches).squeeze(-1)
        score = (1 - 2 * self.beta) * predicted + self.beta * (seen.sum(dim=0) + seen[number])  # own counts twice
        kept, dropped = score.argsort(dim=1, descending=True, stable=True).tensor_split([self.keep], dim=1)
        decision = torch.zeros_like(score).scatter(1, kept, 1.0)
        if self.training and self.use_gumbel:
            soft = torch.softmax(score - torch.log(-torch.log(torch.rand_like(score) + 1e-9) + 1e-9), dim=1)
            decision = decision + (soft - soft.detach())  # straight through
        chosen, rest = (patches.take_along_dim(which[..., None], dim=1) for which in (kept, dropped))
        logits = (aggregate["weight"](chosen) * aggregate.scale).transpose(1, 2)  # (B, Q, K)
        logits = logits - (1 - decision.gather(1, kept))[:, None] * 1e10  # nothing forward, a factor of 1e10 backward
        extra = torch.softmax(score.gather(1, dropped), dim=1)[:, None] @ rest  # (B, 1, C)
        return torch.cat([logits.softmax(dim=2) @ chosen, extra], dim=1), decision


class ThreeSensors(nn.Module):
    def __init__(self, selection: nn.Module, identities: int = 10, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, kernel_size=16, stride=16)
        self.encode = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.sdtps = selection
        for name in ("", "_sdtps"):
            self.add_module(f"bottleneck{name}", nn.BatchNorm1d(3 * width))
            self.add_module(f"classifier{name}", nn.Linear(3 * width, identities, bias=False))

    def forward(self, x: dict[str, Tensor], return_pattern: int = 3) -> Tensor | tuple[Tensor, ...]:
        patches = [self.encode(self.embed(x[key]).flatten(2).mT) for key in SENSORS.values()]  # (B, 128, C)
        vectors = [own.amax(dim=1) + own.mean(dim=1) for own in patches]  # (B, C)
        tokens = self.sdtps(*patches, *vectors)[:3]  # (B, 26, C)
        sdtps_feat, ori_feat = torch.cat([part.mean(dim=1) for part in tokens], dim=-1), torch.cat(vectors, dim=-1)
        if self.training:
            sdtps_score = self.classifier_sdtps(self.bottleneck_sdtps(sdtps_feat))
            return sdtps_score, sdtps_feat, self.classifier(self.bottleneck(ori_feat)), ori_feat
        return {1: ori_feat, 2: sdtps_feat, 3: torch.cat([ori_feat, sdtps_feat], dim=-1)}[return_pattern]


def main() -> None:
    torch.manual_seed(0)
    shots = {key: torch.randn(4, 3, 256, 128) for key in SENSORS.values()}
    for gumbel in (False, True):
        theirs = ThreeSensors(HandWritten(**SETTINGS, use_gumbel=gumbel))
        ours = ThreeSensors(MultiModalSDTPS(**SETTINGS, use_gumbel=gumbel))  # <- line 2
        ours.load_state_dict(theirs.state_dict())  # <- line 3: every name fits
        print(f"Gumbel {gumbel}: training returns {[tuple(part.shape) for part in ours.train()(shots)]}")
        for name, model in (("hand-written", theirs), ("ours", ours)):
            sum(part.square().mean() for part in model.train()(shots)).backward()
            largest = max(float(part.grad.abs().max()) for key, part in model.named_parameters() if "predictor" in key)
            print(f"  {name}: largest gradient at the predictors {largest:.1e}")
        for pattern in (1, 2, 3):
            before, after = (model.eval()(shots, return_pattern=pattern).detach() for model in (theirs, ours))
            print(f"  pattern {pattern}: {tuple(after.shape)}, apart by {(after - before).abs().max():.0e}")
    print(check(ours, shots))


if __name__ == "__main__":
    main()
