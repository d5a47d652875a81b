"""Custom components: all pairs are scored with them as by the network, or the kernels say why not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kernel_cases import fused_scores, on_device
from messages import naming
from scoring_cases import SMALL, make_inputs
from seps.method.checks import InputError
from seps.method.config import SlimmingConfig
from seps.method.network import PatchSlimming
from seps.method.select import hard_topk
from seps.scoring import score_matrix
from seps.scoring.factored import GramMaxima

PLAIN = SlimmingConfig.default(**SMALL)


class Slots(nn.Module):
    def __init__(self):
        super().__init__()
        self.slots = nn.Parameter(torch.randn(PLAIN.num_merged, PLAIN.embed_size))

    def forward(self, patches):
        return patches @ self.slots.T / 4


class Norms(nn.Module):
    def forward(self, patches, attentions, weights, valid):
        return (patches.norm(dim=-1) / 8).expand(next(iter(attentions.values())).shape)


class Largest(nn.Module):
    def forward(self, best, mask):
        return (best if mask is None else best.masked_fill(~mask, -1.0)).amax(dim=-1)


class Two(nn.Module):
    def forward(self, scores, count, valid):
        return hard_topk(scores, 2 / scores.shape[-1], valid)


@pytest.mark.parametrize(
    ("kind", "idea", "obstacle"),
    [
        ("aggregation", Slots, None),
        ("scoring", Norms, naming("scoring='own'")),
        ("alignment", Largest, naming("alignment='own'")),
        ("decision", Two, "decision"),
    ],
)
def test_kernels_compute_an_idea_of_ones_own_or_say_why_not(kind, idea, obstacle):
    config = SlimmingConfig.default(dense="none", **SMALL)
    net, data = on_device(PatchSlimming(config, **{kind: idea()}).eval(), make_inputs(config, images=2, texts=7))
    assert GramMaxima.supports(net) is None
    expected = net(data["images"], data["words"], data["lengths"])
    found = score_matrix(net, data["images"], data["words"], data["lengths"], backend="factored")
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    if obstacle is not None:
        with pytest.raises(InputError, match=obstacle):
            fused_scores(net, data)
        return
    torch.testing.assert_close(fused_scores(net, data), expected, atol=3e-3, rtol=0)
