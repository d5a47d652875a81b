"""The published call shapes: which tokens are patches, one mask without long captions, the fast scorers agree."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch.nn import functional as F

import seps
from messages import naming
from seps.scoring import score_matrix, score_with_gradient

WIDTH, PATCHES = 32, 16


def make_net(paper: bool = False, has_cls: bool | None = None, seed: int = 0, **overrides) -> seps.CrossSparseAggrNet:
    torch.manual_seed(seed)
    settings = {"sparse_ratio": 0.5, "aggr_ratio": 0.5, **overrides}
    net = seps.CrossSparseAggrNet(WIDTH, PATCHES, use_paper_version=paper, has_cls=has_cls, **settings)
    for parameter in net.parameters():  # far from the initial values, or the two predictors hardly differ
        torch.nn.init.normal_(parameter, std=0.5)
    return net.eval()


def make_inputs(tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images, words = (torch.randn(n, m, WIDTH, generator=generator) for n, m in ((3, tokens), (4, 5)))
    return images, words, torch.tensor([5, 2, 1, 4])


def slow_scores(net, image, text, dense=None):
    """Eq. 1-5 for one pair as the users' file computes them, a patch at a time; also the kept patches by branch.

    `image` (1 + N, C), `text` (M, C), `dense` (L, C) or None: then the dense branch does not exist.
    """
    cls, patches = image[0], image[1:]
    count = len(patches)
    kept_number = math.ceil(count * net.config.sparse_ratio)

    def normalised(vector):
        cosines = [float(F.cosine_similarity(patch, vector, dim=0)) for patch in patches]
        low, high = min(cosines), max(cosines)
        return [(value - low) / (high - low + 1e-8) for value in cosines]

    own, caption = normalised(patches.mean(dim=0)), normalised(text.mean(dim=0))
    second = [0.0] * count if dense is None else normalised(dense.mean(dim=0))
    branches = [("sparse", net.sparse_net_cap)] + ([] if dense is None else [("dense", net.sparse_net_long)])
    merged, extras, kept_sets = 0, [], []
    for name, selector in branches:
        beta = net.config.beta
        scores = [
            (1 - 2 * beta) * float(selector.score_predictor(patches[i])) + beta * (caption[i] + second[i] + 2 * own[i])
            for i in range(count)
        ]
        order = sorted(range(count), key=lambda i: (-scores[i], i))
        kept, dropped = order[:kept_number], order[kept_number:]
        mlp = getattr(net.aggr_net, f"weight_{name}")
        weights = torch.softmax(torch.stack([mlp(patches[i]) for i in kept]) * net.aggr_net.scale.squeeze(), dim=0)
        merged = merged + torch.stack(
            [sum(weights[n, k] * patches[i] for n, i in enumerate(kept)) for k in range(weights.shape[1])]
        )
        shares = torch.softmax(torch.tensor([scores[i] for i in dropped]), dim=0)
        extras.append(sum(share * patches[i] for share, i in zip(shares, dropped, strict=True)))
        kept_sets.append([float(i in kept) for i in range(count)])
    tokens = F.normalize(torch.cat([cls[None], merged, torch.stack(extras).mean(dim=0)[None]]), dim=-1)
    cosines = F.normalize(text, dim=-1) @ tokens.T
    score = 0.0
    for best in (cosines.amax(dim=1), cosines.amax(dim=0)):
        top = sorted(best.tolist(), reverse=True)[:5]
        top += [0.0] * (5 - len(top))
        score += float(best.mean()) + float(net.hrpa.relevance_mlp(torch.tensor(top)))
    return score, kept_sets


@pytest.mark.parametrize("long_captions", [False, True])
@torch.no_grad()
def test_paper_version_against_the_users_file(long_captions):
    net = make_net(paper=True, has_cls=True)
    images, words, lengths = make_inputs(1 + PATCHES)
    dense = torch.randn(4, 7, WIDTH) if long_captions else None
    sims, masks = net.train()(images, words, lengths, dense)
    assert isinstance(masks, tuple) and len(masks) == 1 + long_captions  # W_s alone where no dense text came
    for t, length in enumerate(lengths.tolist()):
        for v in range(3):
            expected, kept = slow_scores(net, images[v], words[t, :length], dense[t] if long_captions else None)
            assert sims[v, t].item() == pytest.approx(expected, abs=1e-5)
            assert [mask[t, v].tolist() for mask in masks] == kept


@pytest.mark.parametrize(
    ("has_cls", "tokens"), [(True, PATCHES + 1), (False, PATCHES), (None, PATCHES + 1), (None, PATCHES)]
)
@pytest.mark.parametrize("paper", [False, True])
def test_fast_scorers_agree_before_the_first_forward(paper, has_cls, tokens):
    images, words, lengths = make_inputs(tokens)
    calls = {
        "reference": lambda net: score_matrix(net, images, words, lengths, backend="reference"),
        "factored": lambda net: score_matrix(net, images, words, lengths, backend="factored"),
        "gradient": lambda net: score_with_gradient(net, images, words, lengths).similarity.detach(),
    }
    told = make_net(paper, tokens == PATCHES + 1)
    expected = told(images, words, lengths).detach()
    for name, call in calls.items():
        net = make_net(paper, has_cls)  # a fresh one each time: nothing has been called yet
        torch.testing.assert_close(call(net), expected, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(net(images, words, lengths), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("paper", [False, True])
def test_fast_scorers_agree_with_long_captions(paper):
    net = make_net(paper, True)
    images, words, lengths = make_inputs(1 + PATCHES)
    dense, dense_lengths = torch.randn(4, 7, WIDTH), torch.tensor([7, 1, 3, 5])
    expected = net(images, words, lengths, dense, dense_lengths)
    for backend in ("reference", "factored"):
        ours = score_matrix(
            net, images, words, lengths, paired_dense=dense, paired_dense_lengths=dense_lengths, backend=backend
        )
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_two_token_counts_in_one_network():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = make_net().train()
        for tokens in (PATCHES + 1, PATCHES, PATCHES + 1):
            images, words, lengths = make_inputs(tokens)
            sims, mask = net(images, words, lengths)
            assert mask.shape == (4, 3, PATCHES)
            told, told_mask = make_net(has_cls=tokens > PATCHES).train()(images, words, lengths)
            assert torch.equal(sims, told) and torch.equal(mask, told_mask)


@pytest.mark.parametrize(
    ("has_cls", "tokens", "sentence"),
    [
        (None, 25, naming("25", "num_patches=16", "has_cls", "16", "17", "CLS")),
        (None, 15, "15"),
        (True, 16, r"num_patches=16.*\(\d, 16, 32\).*has_cls"),
        (False, 17, r"num_patches=16.*\(\d, 17, 32\).*has_cls"),
    ],
)
def test_a_number_of_tokens_that_cannot_be_right_is_refused_by_every_call(has_cls, tokens, sentence):
    net, inputs = make_net(has_cls=has_cls), make_inputs(tokens)
    for call in (net, lambda *x: score_matrix(net, *x), lambda *x: score_with_gradient(net, *x)):
        with pytest.raises(seps.InputError, match=sentence):
            call(*inputs)


def test_another_resolution_is_read_as_told():
    for has_cls in (False, True):
        net = make_net(has_cls=has_cls, check_num_patches=False).train()
        _, mask = net(*make_inputs(25 + has_cls))
        assert mask.shape == (4, 3, 25) and (mask.sum(dim=-1) == 13).all()
