"""The factored form against the readable one: presets, independent options, adversarial inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scoring_cases import CONFIGS, SMALL, make_inputs, make_net
from seps.method.config import SlimmingConfig
from seps.method.published import score_published_pairing
from seps.method.select import hard_topk, keep_best, kept_counts
from seps.scoring import score_matrix


def both(net, images, words, lengths=None, **options):
    slow = score_matrix(net, images, words, lengths, backend="reference", **options)
    return slow, score_matrix(net, images, words, lengths, backend="factored", **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_matches_the_network(name):
    config = CONFIGS[name]
    net, data = make_net(config), make_inputs(config)
    extra = {} if config.dense == "none" else {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    slow, fast = both(net, data["images"], data["words"], data["lengths"], **extra)
    forward = {"dense": extra.get("dense"), "dense_lengths": extra.get("dense_lengths")}
    torch.testing.assert_close(slow, net(data["images"], data["words"], data["lengths"], **forward))
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)
    slow, fast = both(net, data["images"], data["words"])
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.dense != "none"])
def test_published_pairing(name):
    net, data = make_net(CONFIGS[name]), make_inputs(CONFIGS[name])
    pair = {"paired_dense": data["paired"], "paired_dense_lengths": data["paired_lengths"]}
    slow, fast = both(net, data["images"], data["words"], data["lengths"], **pair)
    spec = score_published_pairing(
        net, data["images"], data["words"], data["lengths"], data["paired"], data["paired_lengths"]
    )
    torch.testing.assert_close(slow, spec)
    torch.testing.assert_close(fast, spec, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("precision", ["half", "bfloat16"])
def test_half_products(name, precision):
    config = CONFIGS[name]
    net, data = make_net(config), make_inputs(config)
    slow = score_matrix(net, data["images"], data["words"], data["lengths"], backend="reference")
    fast = score_matrix(net, data["images"], data["words"], data["lengths"], backend="factored", precision=precision)
    assert fast.dtype == torch.float32
    torch.testing.assert_close(fast, slow, atol=2e-3 if precision == "half" else 2e-2, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    patches=st.integers(2, 21),
    width=st.integers(4, 24),
    prefix=st.integers(0, 2),
    ratio=st.floats(0.2, 1.0),
    scoring=st.sampled_from(["sum", "learned"]),
    dense=st.sampled_from(["none", "guide", "branch", "tokens"]),
    dual=st.booleans(),
    alignment=st.sampled_from(["mean", "topk"]),
    similarity=st.sampled_from(["cosine", "leaky"]),
    masked=st.booleans(),
    words=st.integers(1, 8),
    texts=st.integers(1, 9),
    seed=st.integers(0, 2**16),
)
def test_any_combination(
    patches, width, prefix, ratio, scoring, dense, dual, alignment, similarity, masked, words, texts, seed
):
    config = (
        SlimmingConfig(
            embed_size=width,
            num_patches=patches,
            num_prefix_tokens=prefix,
            sparse_ratio=ratio,
            aggr_ratio=min(1.0, max(0.5, 1.01 / (patches * ratio))) if patches * ratio >= 1.02 else 1.0,
            scoring=scoring,
            dense=dense,
            aggregation="dual" if dual and dense in ("guide", "tokens") else "single",
            alignment=alignment,
            similarity=similarity,
        )
        if patches * ratio >= 1.02
        else SlimmingConfig(**{**SMALL, "dense": "none"})
    )
    net = make_net(config, seed)
    data = make_inputs(config, images=3, texts=texts, words=words, seed=seed)
    options = {} if config.dense == "none" else {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    if masked:
        options["patch_mask"] = torch.rand(3, config.num_patches) < 0.7
        options["patch_mask"][:, 0] = True
    slow, fast = both(net, data["images"], data["words"], data["lengths"], **options)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["default", "paper", "open_source"])
class TestAdversarial:
    def test_duplicated_patches(self, name):
        config = CONFIGS[name]
        net, data = make_net(config), make_inputs(config)
        start = config.num_prefix_tokens
        data["images"][:, start + 6 :] = data["images"][:, start : start + 6]
        slow, fast = both(net, data["images"], data["words"], data["lengths"])
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)

    def test_all_scores_equal(self, name):
        config = CONFIGS[name]
        net, data = make_net(config), make_inputs(config)
        data["images"][:] = data["images"][:, :1]
        for texts in (1, 2, 7):
            slow, fast = both(net, data["images"], data["words"][:texts], data["lengths"][:texts])
            torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("spread", [1e-4, 30.0, 300.0, 1e4])
    def test_tiny_and_huge_logits(self, name, spread):
        config = CONFIGS[name]
        net, data = make_net(config, spread=spread), make_inputs(config)
        slow, fast = both(net, data["images"], data["words"], data["lengths"])
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)
        half = score_matrix(net, data["images"], data["words"], data["lengths"], backend="factored", precision="half")
        torch.testing.assert_close(half, slow, atol=2e-3, rtol=0)

    @pytest.mark.parametrize("scale", [1e-6, 1e6])
    def test_features_of_any_size(self, name, scale):
        config = CONFIGS[name]
        net, data = make_net(config), make_inputs(config)
        slow, fast = both(net, data["images"] * scale, data["words"] * scale, data["lengths"])
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)

    def test_one_word(self, name):
        config = CONFIGS[name]
        net, data = make_net(config), make_inputs(config, words=1)
        slow, fast = both(net, data["images"], data["words"], data["lengths"])
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"sparse_ratio": 1.0, "aggr_ratio": 0.2},
        {"num_patches": 4, "sparse_ratio": 0.5, "aggr_ratio": 0.5},
        {"num_patches": 1, "sparse_ratio": 1.0, "aggr_ratio": 1.0},
    ],
    ids=["all kept", "one merged patch", "one patch"],
)
def test_edges_of_the_ratios(changes):
    config = SlimmingConfig.paper(**{**SMALL, **changes})
    net, data = make_net(config), make_inputs(config)
    slow, fast = both(net, data["images"], data["words"], data["lengths"], dense=data["dense"])
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)


def test_order_of_ragged_texts_does_not_matter():
    config = CONFIGS["default"]
    net, data = make_net(config), make_inputs(config, texts=40, words=9)
    scores = score_matrix(net, data["images"], data["words"], data["lengths"])
    order = torch.randperm(40)
    shuffled = score_matrix(net, data["images"], data["words"][order], data["lengths"][order])
    torch.testing.assert_close(shuffled, scores[:, order], atol=1e-6, rtol=0)


def test_padding_words_do_not_matter():
    config = CONFIGS["paper"]
    net, data = make_net(config), make_inputs(config)
    scores = score_matrix(net, data["images"], data["words"], data["lengths"])
    beyond = torch.arange(data["words"].shape[1])[None, :] >= data["lengths"][:, None]
    other = data["words"].masked_fill(beyond[..., None], 9.0)
    torch.testing.assert_close(score_matrix(net, data["images"], other, data["lengths"]), scores, atol=0, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=17), st.floats(0.01, 1.0))
def test_hard_topk_without_sorting_is_that_of_sorted_scores(values, ratio):
    scores = torch.tensor([values, values[::-1]], dtype=torch.float32)
    assert torch.equal(hard_topk(scores, ratio), keep_best(scores, kept_counts(scores, ratio, None)))


@pytest.mark.parametrize("patches", [1, 7, 49, 196, 203])
@pytest.mark.parametrize("texts", [1, 2, 37])
def test_equal_patches_get_equal_attention(patches, texts):
    config = SlimmingConfig.default(
        **{**SMALL, "embed_size": 64, "num_patches": patches, "aggr_ratio": 1.0, "sparse_ratio": 1.0}
    )
    tokens = torch.randn(2, 1 + patches, 64)
    tokens[:, 1:] = torch.randn(2, 1, 64)
    attention = make_net(config).encode_images(tokens).text_attention(torch.randn(texts, 64))
    assert torch.equal(attention, attention[..., :1].expand_as(attention))


def test_extra_guides():
    config = SlimmingConfig.default(extra_guides={"audio": 0.2}, **SMALL)
    net, data = make_net(config), make_inputs(config)
    guides = {"audio": torch.randn(4, config.embed_size)}
    slow, fast = both(net, data["images"], data["words"], data["lengths"], guides=guides)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)
    other, _ = both(net, data["images"], data["words"], data["lengths"], guides={"audio": -guides["audio"]})
    assert (other - slow).abs().max() > 1e-3
