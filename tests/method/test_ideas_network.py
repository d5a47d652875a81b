"""A custom component in the network: what it computes, against a twin written out, and what is refused.

Every component is tried in the reference and in every other path, which must agree.
"""

from __future__ import annotations

import itertools
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import seps
from ideas import SIZES, Slots, features, first, median, readable
from messages import naming
from seps import registry
from seps.method.checks import InputError
from seps.method.config import SlimmingConfig
from seps.method.encoded import Texts
from seps.method.network import PatchSlimming
from seps.retrieval.explain.shares import shares
from seps.scoring import choose_backend, score_matrix, score_with_gradient
from seps.scoring.factored import GramMaxima

pytestmark = pytest.mark.usefixtures("own_registry")
B, T, N, K = 4, 5, 10, 4


def every_path(net, images, words, lengths, extras):
    """The scores of all paths: they must be those of the network's own loop."""
    expected = readable(net, images, words, lengths, extras)
    for backend in ("auto", "factored", "reference"):
        found = score_matrix(net, images, words, lengths, backend=backend, **extras)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    # A block of one text, one image, and the gradient's path.
    one = score_matrix(net, images[:1], words[:1], lengths[:1], **{k: v[:1] for k, v in extras.items()})
    torch.testing.assert_close(one, expected[:1, :1], atol=2e-5, rtol=0)
    scored = score_with_gradient(net, images, words, lengths, **extras)
    torch.testing.assert_close(scored.similarity, expected, atol=2e-5, rtol=0)
    return expected


def twin_score(net, image, caption, patch_keep, extra_scores):
    """S of one image (1 + N, C) and caption (M, C) without description, from the parts, step by step."""
    cls, patches = image[:1], image[1:]
    logits = net.aggr_net.logits(patches[None])[0]
    kept = patch_keep.bool()
    merged = torch.softmax(logits[kept], dim=0).T @ patches[kept]
    extra = torch.softmax(extra_scores[~kept], dim=0) @ patches[~kept]
    tokens = F.normalize(torch.cat([cls, merged, extra[None]]), dim=-1)
    cosines = F.normalize(caption, dim=-1) @ tokens.T
    score = cosines.amax(dim=1).mean() + cosines.amax(dim=0).mean()
    return score + net.config.pooled * F.cosine_similarity(patches.mean(dim=0), caption.mean(dim=0), dim=0)


def cosines_with(patches, vector):
    return F.normalize(patches, dim=-1) @ F.normalize(vector, dim=-1)


def test_a_decision_keeps_what_it_says():
    seps.register_decision("first")(first)
    net = PatchSlimming(SlimmingConfig(decision="first", scoring="sum", dense="none", **SIZES))
    images, words, lengths, _ = features()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = every_path(net, images, words, lengths, {})
    keep = (torch.arange(N) < K).float()
    for b, t in itertools.product(range(B), range(T)):
        caption = words[t, : lengths[t]]
        raw = cosines_with(images[b, 1:], images[b, 1:].mean(dim=0)) + cosines_with(images[b, 1:], caption.mean(dim=0))
        with torch.no_grad():
            torch.testing.assert_close(scores[b, t], twin_score(net, images[b], caption, keep, raw), atol=1e-5, rtol=0)
    plain = PatchSlimming(SlimmingConfig(scoring="sum", dense="none", **SIZES))
    plain.load_state_dict(net.state_dict())
    assert not torch.allclose(readable(plain, images, words, lengths, {}), scores, atol=1e-3)
    assert choose_backend(net, "cpu").backend == "factored"


def test_a_decision_may_weigh_patches():
    """Gram matrices are for zeros and ones: such pairs are scored by the reference."""
    seps.register_decision("half")(lambda scores, count, valid: torch.sigmoid(20 * (scores - scores.mean(-1, True))))
    net = PatchSlimming(SlimmingConfig(decision="half", dense="none", **SIZES))
    images, words, lengths, _ = features()
    scores = every_path(net, images, words.repeat(20, 1, 1), lengths.repeat(20), {})
    patches, caption = images[0, 1:], words[0]
    side = net.encode_images(images[:1])
    kept = net.select(side, Texts.of(caption[None]))[0]
    with torch.no_grad():
        weights = kept.keep[0, 0, :, None] * side.sets[0].logits[0].exp()
        merged = (weights / weights.sum(dim=0)).T @ patches
        tokens = torch.cat([images[0, :1], merged, kept.extra[0] @ patches])
        cosines = F.normalize(caption, dim=-1) @ F.normalize(tokens, dim=-1).T
        expected = cosines.amax(dim=1).mean() + cosines.amax(dim=0).mean()
        expected = expected + 2 * F.cosine_similarity(patches.mean(dim=0), caption.mean(dim=0), dim=0)
    torch.testing.assert_close(scores[0, 0], expected, atol=1e-5, rtol=0)


def test_a_decision_never_keeps_padding():
    seps.register_decision("all")(lambda scores, count, valid: torch.ones_like(scores))
    net = PatchSlimming(SlimmingConfig(decision="all", dense="none", **SIZES))
    images, words, lengths, _ = features()
    mask = torch.arange(N).expand(B, -1) < torch.tensor([[10], [6], [3], [1]])
    expected = every_path(net, images, words, lengths, {"patch_mask": mask})
    images[1, 1 + 6 :] = 100.0
    again = score_matrix(net, images, words, lengths, patch_mask=mask)
    torch.testing.assert_close(again, expected, atol=2e-5, rtol=0)


def test_a_kept_patch_that_weighs_next_to_nothing_is_still_scored():
    """Of logits that spread far the fast form must know that a decision of one's own may keep the lowest alone."""
    seps.register_decision("last")(
        lambda scores, count, valid: F.one_hot(torch.tensor(N - 1), N).float().expand_as(scores)
    )

    class First(nn.Module):
        def forward(self, patches):
            return patches[..., :2]

    net = PatchSlimming(SlimmingConfig(decision="last", dense="none", **SIZES), aggregation=First())
    images, words, lengths, _ = features()
    images[:, -1, :2] = -60.0
    every_path(net, images, words, lengths, {})


class Threshold(nn.Module):
    """Keep what is above a learned threshold, straight through."""

    def __init__(self, config):
        super().__init__()
        self.level = nn.Parameter(torch.tensor(0.1 * config.embed_size))

    def forward(self, scores, count, valid):
        soft = torch.sigmoid(scores - self.level)
        best = scores == scores.amax(dim=-1, keepdim=True)
        return ((scores > self.level) | best).float() + (soft - soft.detach())


def test_a_decision_with_weights_learns_and_is_saved():
    seps.register_decision("level")(Threshold)
    net = PatchSlimming(SlimmingConfig(decision="level", dense="branch", scoring="sum", **SIZES)).train()
    names = [name for name in net.state_dict() if name.endswith("level")]
    assert names == ["sparse_net_cap.decide_by.level", "sparse_net_long.decide_by.level"]
    assert net.sparse_net_cap.decide_by is not net.sparse_net_long.decide_by
    images, words, lengths, extras = features()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scored = score_with_gradient(net, images, words, lengths, want_masks=True, **extras)
    slow, masks = net(images, words, lengths, **extras)
    torch.testing.assert_close(scored.similarity, slow, atol=2e-5, rtol=0)
    for fast_mask, slow_mask in zip(scored.masks, masks, strict=True):
        torch.testing.assert_close(fast_mask, slow_mask)
    weights = torch.randn_like(slow)
    fast = torch.autograd.grad((scored.similarity * weights).sum(), list(net.parameters()), allow_unused=True)
    truth = torch.autograd.grad((slow * weights).sum(), list(net.parameters()), allow_unused=True)
    for one, other in zip(fast, truth, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
    assert fast[[name for name, _ in net.named_parameters()].index(names[0])].abs() > 0


def product(patches, attentions, weights, valid):
    """The product of all cosines, moved above zero."""
    total = torch.ones(())
    for name in weights:
        if name in attentions:
            total = total * (1.5 + weights[name] * attentions[name])
    return total


def test_a_scoring_reads_every_guide_of_each_pair():
    seps.register_scoring("product")(product)
    net = PatchSlimming(SlimmingConfig(scoring="product", dense="guide", **SIZES))
    images, words, lengths, extras = features()
    scores = every_path(net, images, words, lengths, extras)
    for b, t in itertools.product(range(B), range(T)):
        caption, patches = words[t, : lengths[t]], images[b, 1:]
        dense = extras["dense"][b, : extras["dense_lengths"][b]]
        raw = (1.5 + cosines_with(patches, patches.mean(dim=0))) * (1.5 + cosines_with(patches, caption.mean(dim=0)))
        raw = raw * (1.5 + (cosines_with(patches, dense.mean(dim=0)) if len(dense) else 0.0))
        keep = torch.zeros(N).scatter(0, raw.topk(K).indices, 1.0)
        with torch.no_grad():
            torch.testing.assert_close(scores[b, t], twin_score(net, images[b], caption, keep, raw), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dense", ["none", "branch", "tokens"])
def test_an_aggregation_by_logits_is_scored_fast_and_explained(dense):
    seps.register_aggregation("slots")(Slots)
    net = PatchSlimming(SlimmingConfig(aggregation="slots", dense=dense, **SIZES))
    images, words, lengths, extras = features()
    assert GramMaxima.supports(net) is None
    scores = every_path(net, images, words, lengths, extras if dense != "none" else {})
    side = net.encode_images(images[:1], **({k: v[:1] for k, v in extras.items()} if dense != "none" else {}))
    assert shares(net, side, words[0]).score == pytest.approx(float(scores[0, 0]), abs=1e-4)
    hand = 3 * F.normalize(images[:1, 1:], dim=-1) @ F.normalize(net.aggr_net.aggregate.slots, dim=-1).T
    torch.testing.assert_close(side.sets[0].logits, hand)
    net.train()
    scored = score_with_gradient(net, images, words, lengths, **(extras if dense != "none" else {}))
    slow = net(images, words, lengths, **(extras if dense != "none" else {}))[0]
    own = net.aggr_net.aggregate.slots
    fast, truth = (torch.autograd.grad(s.square().sum(), own)[0] for s in (scored.similarity, slow))
    assert truth.abs().max() > 0
    torch.testing.assert_close(fast, truth, atol=1e-4, rtol=1e-3)


def test_an_aggregation_that_merges_by_itself_is_scored_by_the_reference_and_not_explained():
    @seps.register_aggregation("best")
    class Best:
        def __init__(self, config):
            pass

        def merge(self, patches, keep, scores):
            return (patches * keep[..., None]).sum(1, keepdim=True)

    net = PatchSlimming(SlimmingConfig(aggregation="best", scoring="sum", dense="none", pooled=0.0, **SIZES))
    images, words, lengths, _ = features()
    with pytest.warns(UserWarning, match=naming("aggregation='best'", "reference")):
        scores = every_path(net, images, words, lengths, {})
    patches, caption = images[0, 1:], words[0]
    raw = cosines_with(patches, patches.mean(dim=0)) + cosines_with(patches, caption.mean(dim=0))
    best, rest = raw.topk(K).indices, raw.topk(N - K, largest=False).indices
    tokens = [images[0, 0], patches[best].sum(dim=0), torch.softmax(raw[rest], dim=0) @ patches[rest]]
    cosines = F.normalize(caption, dim=-1) @ F.normalize(torch.stack(tokens), dim=-1).T
    expected = cosines.amax(dim=1).mean() + cosines.amax(dim=0).mean()
    torch.testing.assert_close(scores[0, 0], expected, atol=1e-5, rtol=0)
    with pytest.raises(InputError, match=naming("aggregation='best'")):
        shares(net, net.encode_images(images[:1]), caption)


@pytest.mark.parametrize("similarity", ["cosine", "leaky"])
def test_an_alignment_of_maxima_is_scored_fast_and_explained(similarity):
    seps.register_alignment("median")(median)
    config = SlimmingConfig(alignment="median", similarity=similarity, **SIZES)
    net = PatchSlimming(config)
    images, words, lengths, extras = features()
    assert GramMaxima.supports(net) is None
    scores = every_path(net, images, words, lengths, extras)
    side = net.encode_images(images[:1], dense=extras["dense"][:1])
    assert shares(net, side, words[0]).score == pytest.approx(float(scores[0, 0]), abs=1e-4)
    plain = PatchSlimming(SlimmingConfig(similarity=similarity, dense="none", **SIZES)).eval()
    alone = PatchSlimming(SlimmingConfig(alignment="median", similarity=similarity, dense="none", **SIZES)).eval()
    alone.load_state_dict(plain.state_dict())
    side = plain.encode_images(images)
    tokens = plain.tokens(side, plain.select(side, Texts.of(words[1:2, :2])))
    cosines = F.normalize(words[1, :2], dim=-1) @ tokens[0, 2].T
    if similarity == "leaky":
        cosines = torch.where(cosines < 0, 0.1 * cosines, cosines)
    by_hand = cosines.amax(dim=1).sort().values[0] + cosines.amax(dim=0).median()
    by_hand = by_hand + 2 * F.cosine_similarity(images[2, 1:].mean(dim=0), words[1, :2].mean(dim=0), dim=0)
    torch.testing.assert_close(readable(alone, images, words, lengths, {})[2, 1], by_hand, atol=1e-5, rtol=0)


def test_an_alignment_of_all_cosines_is_scored_by_the_reference_and_not_explained():
    @seps.register_alignment("squares")
    class Squares:
        def __init__(self, config):
            pass

        def align(self, similarity, word_mask, token_mask):
            masked = similarity if word_mask is None else similarity.masked_fill(~word_mask[:, :, None], 0.0)
            return masked.square().sum(dim=(1, 2))

    net = PatchSlimming(SlimmingConfig(alignment="squares", dense="none", **SIZES))
    images, words, lengths, _ = features()
    with pytest.warns(UserWarning, match=naming("alignment='squares'", "reference")):
        scores = every_path(net, images, words, lengths, {})
    side = net.encode_images(images)
    tokens = net.tokens(side, net.select(side, Texts.of(words[1:2, :2])))
    cosines = F.normalize(words[1, :2], dim=-1) @ tokens[0, 3].T
    pooled = 2 * F.cosine_similarity(images[3, 1:].mean(dim=0), words[1, :2].mean(dim=0), dim=0)
    torch.testing.assert_close(scores[3, 1], cosines.square().sum() + pooled, atol=1e-5, rtol=0)
    with pytest.raises(InputError, match=naming("alignment='squares'")):
        shares(net, net.encode_images(images[:1]), words[0])


@pytest.mark.parametrize("scoring", ["sum", "learned"])
def test_guides_are_made_from_data_and_from_patches(scoring):
    matrix = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))

    @seps.register_guide("audio")
    def project(vectors):
        return vectors @ matrix + 3.0

    seps.register_guide("loudest", from_patches=True)(lambda patches: patches.amax(dim=1))
    config = SlimmingConfig(scoring=scoring, dense="none", extra_guides={"audio": 0.2, "loudest": 0.1}, **SIZES)
    net = PatchSlimming(config)
    images, words, lengths, _ = features()
    audio = torch.randn(B, 5)
    audio[2] = 0.0
    assert net.guides.from_data == ("audio",)
    scores = every_path(net, images, words, lengths, {"guides": audio_guides(audio)})
    # The twin takes vectors that are made already.
    with mock.patch.dict(registry._IDEAS, clear=True):
        plain = PatchSlimming(config)
    plain.load_state_dict(net.state_dict())
    made = audio @ matrix + 3.0
    made[2] = 0.0
    expected = readable(
        plain, images, words, lengths, {"guides": {"audio": made, "loudest": images[:, 1:].amax(dim=1)}}
    )
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    with pytest.raises(InputError, match=naming("audio", "guides")):
        net(images, words)


class audio_guides(dict):
    """One guide by name, which `every_path` may cut as it cuts tensors."""

    def __init__(self, audio):
        super().__init__(audio=audio)

    def __getitem__(self, key):
        return {"audio": super().__getitem__("audio")[key]} if isinstance(key, slice) else super().__getitem__(key)
