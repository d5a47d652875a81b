"""TokenSparse, TokenAggregation, DualTokenAggregation and HRPA alone, in the published call shapes, against figures.

The golden files hold the weights of the reference and what whole networks computed with them. The loops here do what
those networks do with our modules one by one, so that each module's own call is held by the same figures.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def part_of(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(f"{prefix}."): v for k, v in state.items() if k.startswith(f"{prefix}.")}


def loaded(module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str) -> torch.nn.Module:
    module.load_state_dict(part_of(state, prefix), strict=True)
    return module.eval()


def cosines(patches: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return F.cosine_similarity(patches, vector.expand_as(patches[:, 0])[:, None], dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["dual_mode_paper", "dual_mode_paper_single", "dual_mode_code_nodense"])
def test_composed_by_hand(seps, golden, name):
    data = golden(name)
    s = data.settings
    paper, dual = s["use_paper_version"], s["use_paper_version"] and s["use_dual_aggr"]
    merged_count = int(s["num_patches"] * s["aggr_ratio"] * s["sparse_ratio"])
    kind = seps.DualTokenAggregation if dual else seps.TokenAggregation
    aggregate = loaded(kind(s["embed_size"], merged_count), data.state, "aggr_net")
    hrpa = seps.HRPA(s["embed_size"], s["top_k"], use_paper_version=paper, scan=not paper)
    loaded(hrpa, data.state, "hrpa")
    sparse, long = (
        loaded(seps.TokenSparse(s["embed_size"], s["sparse_ratio"], paper), data.state, net)
        for net in ("sparse_net_cap", "sparse_net_long")
    )
    cls, patches = data["img_embs"][:, :1], data["img_embs"][:, 1:]
    own = cosines(patches, patches.mean(dim=1))
    for t, length in enumerate(data["cap_lens"].tolist()):
        words = data["cap_embs"][t, :length]
        caption = cosines(patches, words.mean(dim=0))
        dense = None
        if s["dense"]:
            dense = cosines(patches, data["long_cap_embs"][t, : data["long_cap_lens"][t]].mean(dim=0))
        kept, extra, mask = sparse(patches, own, caption, dense, s["beta"])
        torch.testing.assert_close(mask, data["score_mask.0"][t], **TOLERANCE)
        if dual:
            kept_long, extra_long, mask_long = long(patches, own, dense, caption, s["beta"])
            torch.testing.assert_close(mask_long, data["score_mask.1"][t], **TOLERANCE)
            merged, extra = aggregate(kept, kept_long), (extra + extra_long) / 2
        else:
            merged = aggregate(kept)
        tokens = F.normalize(torch.cat([cls, merged, extra], dim=1), dim=-1)
        score = hrpa(tokens, F.normalize(words, dim=-1).expand(len(tokens), -1, -1))
        torch.testing.assert_close(score.squeeze(1), data["sims"][:, t], **TOLERANCE)


@torch.no_grad()
def test_a_sensor_by_hand(seps, golden):
    data = golden("multimodal_sdtps")
    s = data.settings
    sensors = ("rgb", "nir", "tir")
    for own in sensors:
        others = [m for m in sensors if m != own]
        sparse = loaded(seps.TokenSparse(s["embed_dim"], s["sparse_ratio"], True), data.state, f"{own}_sparse")
        merged_count = s["out_tokens"] - 1
        aggregate = loaded(seps.TokenAggregation(s["embed_dim"], merged_count), data.state, f"{own}_aggr")
        attention = [cosines(data[own], data[f"{m}_global"]) for m in (own, *others)]
        kept, extra, mask = sparse(data[own], *attention, s["beta"])
        torch.testing.assert_close(mask, data[f"{own}_mask"], **TOLERANCE)
        torch.testing.assert_close(torch.cat([aggregate(kept), extra], dim=1), data[f"{own}_out"], **TOLERANCE)


def slow_hrpa(tokens, words, valid, mlp, scan, both):
    """Eq. 5 for one image, value by value."""
    table = [[sum(a * b for a, b in zip(word, token, strict=True)) for token in tokens] for word in words]
    if scan:
        table = [[value if value > 0 else 0.1 * value for value in row] for row in table]
    rows = [max(value for value, good in zip(row, valid, strict=True) if good) for row in table]
    columns = [max(row[k] for row in table) for k, good in enumerate(valid) if good]
    score = 0.0
    for best in (rows, columns) if both else (rows,):
        score += sum(best) / len(best)
        if mlp is not None:
            top = (sorted(best, reverse=True) + [0.0] * 5)[:5]
            score += mlp(torch.tensor(top)).item()
    return score


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("words", [3, 8])
def test_hrpa_value_by_value(seps, paper, scan, both, words):
    torch.manual_seed(words)
    hrpa = seps.HRPA(6, 5, use_paper_version=paper, bidirectional=both, scan=scan)
    tokens, text = (F.normalize(torch.randn(2, n, 6), dim=-1) for n in (7, words))
    mask = torch.ones(2, 7)
    mask[1, 2:5] = 0
    ours = hrpa(tokens, text, mask)
    assert ours.shape == (2, 1)
    for i in range(2):
        good = (mask[i] > 0).tolist()
        expected = slow_hrpa(tokens[i].tolist(), text[i].tolist(), good, hrpa.relevance_mlp, scan, both)
        assert ours[i].item() == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(hrpa(tokens[:1], text[:1]), ours[:1])  # no mask: every token counts


def test_dual_aggregation_value_by_value(seps):
    torch.manual_seed(0)
    aggregate = seps.DualTokenAggregation(4, 2)
    torch.nn.init.constant_(aggregate.scale, 1.7)
    first, second = torch.randn(2, 5, 4), torch.randn(2, 3, 4)
    keep = torch.tensor([[1.0, 0, 1, 1, 0], [0, 1, 0, 0, 0]])
    ours = aggregate(first, second, keep)
    for image in range(2):
        for k in range(2):
            expected = torch.zeros(4)
            for tokens, mlp, kept in (
                (first[image], aggregate.weight_sparse, keep[image].tolist()),
                (second[image], aggregate.weight_dense, [1.0] * 3),
            ):
                weights = [d * math.exp(1.7 * mlp(v)[k].item()) for v, d in zip(tokens, kept, strict=True)]
                for weight, token in zip(weights, tokens, strict=True):
                    expected = expected + weight / sum(weights) * token
            torch.testing.assert_close(ours[image, k], expected)
