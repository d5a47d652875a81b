"""Bad input gets a sentence that names the argument, what came and what was expected."""

from __future__ import annotations

import pytest
import torch

import seps
from seps.method.checks import InputError, check_features, values_unchecked


@pytest.fixture
def net():
    config = seps.SlimmingConfig(embed_size=16, num_patches=9, aggr_ratio=0.5, extra_guides={})
    return seps.PatchSlimming(config).eval()


GOOD = {"images": torch.ones(2, 10, 16), "words": torch.ones(3, 4, 16), "lengths": torch.tensor([1, 2, 4])}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"images": torch.ones(2, 10, 8)}, r"images must be 16 wide .* \(2, 10, 8\)"),
        ({"words": torch.ones(3, 4, 32)}, r"words must be 16 wide .* \(3, 4, 32\)"),
        ({"images": torch.ones(10, 16)}, r"images must have 3 axes .* \(10, 16\)"),
        ({"images": "picture.jpg"}, "images must be a tensor .* got a str"),
        ({"images": torch.ones(2, 10, 16, dtype=torch.long)}, "images must hold floating point .* torch.int64"),
        ({"images": torch.full((2, 10, 16), float("nan"))}, "images holds NaN"),
        ({"words": torch.full((3, 4, 16), float("inf"))}, "words holds NaN or infinite"),
        ({"lengths": torch.tensor([1, 0, 2])}, "lengths holds the length 0; every text needs at least one word"),
        ({"lengths": torch.tensor([1, 5, 2])}, "lengths holds the length 5, but the tensor has only 4"),
        ({"lengths": torch.tensor([1, 2])}, "lengths must hold 3 lengths"),
        ({"lengths": torch.tensor([1.0, 2.0, 3.0])}, "lengths must hold whole numbers"),
        ({"words": torch.ones(3, 0, 16)}, "words must not be empty"),
        ({"images": torch.ones(2, 1, 16)}, "no patch is left"),
        ({"lengths": [[1], [2, 3]]}, r"lengths must hold 3 whole numbers.*\[\[1\]"),
        ({"patch_mask": [[True] * 9] * 2}, "patch_mask must be a tensor .* list"),
        ({"dense": torch.ones(3, 4, 16)}, "dense holds 3 descriptions for 2 images"),
        ({"patch_mask": torch.ones(2, 3, dtype=torch.bool)}, r"patch_mask must be a bool tensor .* \(2, 9\)"),
        ({"patch_mask": (torch.arange(2) == 0)[:, None].expand(2, 9)}, "patch_mask leaves row 1 without any valid"),
        ({"guides": {"audio": torch.ones(2, 16)}}, "guides names .*audio.*extra_guides"),
    ],
)
def test_network(net, change, sentence):
    with pytest.raises(seps.InputError, match=sentence):
        net(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sparse_ratio": 0.0}, r"sparse_ratio is 0.0; it must lie in \(0, 1\]"),
        ({"sparse_ratio": 1.5}, "sparse_ratio is 1.5"),
        ({"aggr_ratio": -0.1}, "aggr_ratio is -0.1"),
        ({"num_patches": 2, "aggr_ratio": 0.1}, "leave no merged patch"),
        ({"num_patches": 0}, "num_patches is 0; it must be a whole number of at least 1"),
        ({"scoring": "guess"}, "scoring is 'guess'; choose one of 'sum', 'learned'"),
        ({"aggregation": "dual", "dense": "none"}, "dual' merges a second set .* dense='guide'"),
        ({"detach_patches": True, "decision": "gumbel"}, "could not learn"),
        ({"beta": 0.6}, "negative weight"),
        ({"extra_guides": {"image": 0.1}}, "built in"),
        ({"extra_guides": {"audio": -0.1}}, r"extra_guides\['audio'\] is -0.1; it must not be negative"),
        ({"extra_guides": {"audio": float("nan")}, "scoring": "sum"}, r"extra_guides\['audio'\] is nan"),
        ({"beta": -0.1}, "beta is -0.1"),
        ({"own_guide": -1.0}, "own_guide is -1.0"),
        ({"pooled": float("inf")}, "pooled is inf"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be positive"),
        ({"sharpness": float("inf")}, "sharpness is inf; it must be positive and finite"),
    ],
)
def test_configuration(change, sentence):
    with pytest.raises(seps.ConfigError, match=sentence):
        seps.SlimmingConfig(**change)


@pytest.mark.parametrize(
    "change",
    [{"margin": -0.1}, {"ratio_weight": -1.0}, {"lambda_sparse": -1.0}, {"lambda_dense": float("nan")}],
)
def test_loss_configuration(change):
    (name,) = change
    with pytest.raises(seps.ConfigError, match=f"{name} is .*; it must not be negative"):
        seps.LossConfig(**change)


def test_nothing_is_broadcast_silently():
    tokens, words = torch.ones(2, 9, 16), torch.ones(2, 4, 16)
    aggregate, dual = seps.TokenAggregation(16, 3), seps.DualTokenAggregation(16, 3)
    with pytest.raises(seps.InputError, match=r"D must have the shape \(images, patches\) = \(2, 9\)"):
        aggregate(tokens, torch.ones(1, 9))
    with pytest.raises(seps.InputError, match="tokens_sparse holds 2 images and tokens_dense 1"):
        dual(tokens, tokens[:1])
    with pytest.raises(seps.InputError, match="img_embs holds 2 images and cap_i_expand 1 rows"):
        seps.HRPA(16)(tokens, words[:1])
    with pytest.raises(seps.InputError, match=r"img_mask must have the shape \(images, tokens\) = \(2, 9\)"):
        seps.HRPA(16)(tokens, words, torch.ones(1, 9))
    with pytest.raises(seps.InputError, match="img_mask leaves row 0 without any valid position"):
        seps.HRPA(16)(tokens, words, torch.zeros(2, 9))
    with pytest.raises(seps.InputError, match="attention_y_dense must have the shape"):
        seps.TokenSparse(16, 0.5, True)(tokens, torch.ones(2, 9), torch.ones(2, 9), torch.ones(1, 9))


def test_modules():
    with pytest.raises(seps.InputError, match=r"decision must be one of .*'gumble' came"):
        seps.TokenSparse(16, 0.5, decision="gumble")
    with pytest.raises(seps.InputError, match="temperature must be positive and finite"):
        seps.TokenSparse(16, 0.5, decision="gumbel", temperature=0.0)
    with pytest.raises(seps.InputError, match="beta must be a finite number"):
        seps.MultiModalSDTPS(beta=-0.1)
    with pytest.raises(seps.InputError, match="sparse_ratio must lie in"):
        seps.TokenSparse(16, 0.0)
    with pytest.raises(seps.InputError, match="keeped_patches must be at least 1"):
        seps.TokenAggregation(16, 0)
    with pytest.raises(seps.InputError, match="two or more different names"):
        seps.MultiModalSDTPS(modalities=("rgb",))
    with pytest.raises(seps.InputError, match="own_guide must be a finite number"):
        seps.MultiModalSDTPS(own_guide=-1.0)
    with pytest.raises(seps.InputError, match="guides must be one of"):
        seps.MultiModalSDTPS(guides="hearsay")
    with pytest.raises(seps.InputError, match="3 patch tensors and 3 global vectors"):
        seps.MultiModalSDTPS(16, 12)(torch.ones(2, 12, 16))
    with pytest.raises(seps.InputError, match="scores must be square"):
        seps.ContrastiveLoss()(torch.ones(2, 3))
    with pytest.raises(seps.InputError, match="img_ids must hold 2"):
        seps.ContrastiveLoss()(torch.ones(2, 2), torch.tensor([1, 2, 3]))


def test_values_are_not_looked_at_where_the_caller_looks_at_the_result():
    bad = torch.full((2, 3, 4), float("nan"))
    with pytest.raises(InputError, match="NaN"):
        check_features("images", bad, "images, tokens, width")
    with values_unchecked():
        check_features("images", bad, "images, tokens, width")
        with pytest.raises(InputError, match="axes"):
            check_features("images", bad[0], "images, tokens, width")
    with pytest.raises(InputError, match="NaN"):
        check_features("images", bad, "images, tokens, width")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_value_that_is_not_finite_is_found(value, dtype):
    features = torch.randn(3, 5, 7).to(dtype)
    check_features("images", features, "images, tokens, width")
    features[1, 2, 3] = value
    with pytest.raises(InputError, match="NaN or infinite"):
        check_features("images", features, "images, tokens, width")


def sensors(samples: int = 2, patches: int = 12) -> list[torch.Tensor]:
    return [torch.randn(samples, patches, 16)] * 3 + [torch.randn(samples, 16)] * 3


@pytest.mark.parametrize("what", [None, [1.0], "tensor"])
@pytest.mark.parametrize(("place", "name"), [(0, "rgb patches"), (4, "nir global vector")])
def test_what_is_no_tensor_is_named(what, place, name):
    inputs = sensors()
    inputs[place] = what
    with pytest.raises(seps.InputError, match=f"{name} must be a tensor.* {type(what).__name__}"):
        seps.MultiModalSDTPS(16, 12)(*inputs)


def test_parts_of_the_network_name_what_is_no_tensor():
    tokens, scores = torch.ones(2, 9, 16), torch.ones(2, 9)
    select, aggregate = seps.TokenSparse(16), seps.TokenAggregation(16, 3)
    calls = {
        "tokens": lambda: select(None, scores, scores),
        "attention_x": lambda: select(tokens, None, scores),
        "attention_y": lambda: select(tokens, scores, [1.0]),
        "patches": lambda: aggregate([tokens]),
        "decision D": lambda: aggregate(tokens, [1.0]),
        "tokens_dense": lambda: seps.DualTokenAggregation(16, 3)(tokens, [tokens]),
        "img_mask": lambda: seps.HRPA(16)(tokens, tokens, [1.0]),
        "scores": lambda: seps.ContrastiveLoss()(None),
        "img_ids": lambda: seps.InfoNCELoss()(torch.ones(2, 2), [1, 2]),
        "score_mask": lambda: seps.RatioLoss()(None),
    }
    for name, call in calls.items():
        with pytest.raises(seps.InputError, match=f"{name} must be a tensor"):
            call()


def test_no_sample_is_selected_and_no_pair_has_no_loss():
    assert [tuple(part.shape) for part in seps.MultiModalSDTPS(16, 12)(*sensors(0))] == [(0, 3, 16)] * 3 + [(0, 12)] * 3
    for loss in (seps.ContrastiveLoss(), seps.ContrastiveLoss(0.2, True), seps.InfoNCELoss(), seps.SigmoidLoss()):
        with pytest.raises(seps.InputError, match=r"scores must hold one pair .*\(0, 0\)"):
            loss(torch.ones(0, 0))
    words = torch.ones(0, 4, 16)
    with pytest.raises(seps.InputError, match="words holds no caption"):
        seps.CrossSparseAggrNet(16, 12, 0.5, 0.5, has_cls=True)(torch.ones(2, 13, 16), words, None, words)
