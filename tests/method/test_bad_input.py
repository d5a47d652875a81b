"""Bad input gets a sentence that names the argument, what came and what was expected."""

from __future__ import annotations

import pytest
import torch

import seps
from messages import naming
from seps.method.checks import InputError, check_features, values_unchecked


@pytest.fixture
def net():
    config = seps.SlimmingConfig(embed_size=16, num_patches=9, aggr_ratio=0.5, extra_guides={})
    return seps.PatchSlimming(config).eval()


GOOD = {"images": torch.ones(2, 10, 16), "words": torch.ones(3, 4, 16), "lengths": torch.tensor([1, 2, 4])}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"images": torch.ones(2, 10, 8)}, naming("images", "16", "(2, 10, 8)")),
        ({"words": torch.ones(3, 4, 32)}, naming("words", "16", "(3, 4, 32)")),
        ({"images": torch.ones(10, 16)}, naming("images", "3", "(10, 16)")),
        ({"images": "picture.jpg"}, naming("images", "str")),
        ({"images": torch.ones(2, 10, 16, dtype=torch.long)}, naming("images", "torch.int64")),
        ({"images": torch.full((2, 10, 16), float("nan"))}, naming("images", "NaN")),
        ({"words": torch.full((3, 4, 16), float("inf"))}, naming("words", "NaN")),
        ({"lengths": torch.tensor([1, 0, 2])}, naming("lengths", "0")),
        ({"lengths": torch.tensor([1, 5, 2])}, naming("5", "4", "lengths")),
        ({"lengths": torch.tensor([1, 2])}, naming("lengths", "3")),
        ({"lengths": torch.tensor([1.0, 2.0, 3.0])}, "lengths"),
        ({"words": torch.ones(3, 0, 16)}, "words"),
        ({"images": torch.ones(2, 1, 16)}, "patch"),
        ({"lengths": [[1], [2, 3]]}, naming("lengths", "3", "[[1]")),
        ({"patch_mask": [[True] * 9] * 2}, naming("patch_mask", "list")),
        ({"dense": torch.ones(3, 4, 16)}, naming("dense", "3", "2")),
        ({"patch_mask": torch.ones(2, 3, dtype=torch.bool)}, naming("patch_mask", "(2, 9)")),
        ({"patch_mask": (torch.arange(2) == 0)[:, None].expand(2, 9)}, naming("patch_mask", "1")),
        ({"guides": {"audio": torch.ones(2, 16)}}, naming("audio", "extra_guides")),
    ],
)
def test_network(net, change, sentence):
    with pytest.raises(seps.InputError, match=sentence):
        net(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sparse_ratio": 0.0}, naming("sparse_ratio", "0.0")),
        ({"sparse_ratio": 1.5}, naming("sparse_ratio", "1.5")),
        ({"aggr_ratio": -0.1}, naming("aggr_ratio", "-0.1")),
        ({"num_patches": 2, "aggr_ratio": 0.1}, "merged"),
        ({"num_patches": 0}, naming("num_patches", "0")),
        ({"scoring": "guess"}, naming("scoring", "guess", "sum", "learned")),
        ({"aggregation": "dual", "dense": "none"}, naming("dual", "dense='guide'")),
        ({"detach_patches": True, "decision": "gumbel"}, "learn"),
        ({"beta": 0.6}, "negative"),
        ({"extra_guides": {"image": 0.1}}, "built"),
        ({"extra_guides": {"audio": -0.1}}, naming("extra_guides['audio']", "-0.1")),
        ({"extra_guides": {"audio": float("nan")}, "scoring": "sum"}, r"extra_guides\['audio'\] is nan"),
        ({"beta": -0.1}, "beta is -0.1"),
        ({"own_guide": -1.0}, naming("own_guide", "-1.0")),
        ({"pooled": float("inf")}, "pooled is inf"),
        ({"temperature": 0.0}, naming("temperature", "0.0")),
        ({"sharpness": float("inf")}, naming("sharpness", "inf")),
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
    with pytest.raises(seps.ConfigError, match=naming(name)):
        seps.LossConfig(**change)


def test_nothing_is_broadcast_silently():
    tokens, words = torch.ones(2, 9, 16), torch.ones(2, 4, 16)
    aggregate, dual = seps.TokenAggregation(16, 3), seps.DualTokenAggregation(16, 3)
    with pytest.raises(seps.InputError, match=naming("D", "(2, 9)")):
        aggregate(tokens, torch.ones(1, 9))
    with pytest.raises(seps.InputError, match=naming("tokens_dense", "2", "(1, 9, 16)")):
        dual(tokens, tokens[:1])
    with pytest.raises(seps.InputError, match=naming("img_embs", "2", "cap_i_expand")):
        seps.HRPA(16)(tokens, words[:1])
    with pytest.raises(seps.InputError, match=naming("img_mask", "(2, 9)")):
        seps.HRPA(16)(tokens, words, torch.ones(1, 9))
    with pytest.raises(seps.InputError, match="img_mask"):
        seps.HRPA(16)(tokens, words, torch.zeros(2, 9))
    with pytest.raises(seps.InputError, match="attention_y_dense"):
        seps.TokenSparse(16, 0.5, True)(tokens, torch.ones(2, 9), torch.ones(2, 9), torch.ones(1, 9))


def test_modules():
    with pytest.raises(seps.InputError, match=naming("decision", "gumble")):
        seps.TokenSparse(16, 0.5, decision="gumble")
    with pytest.raises(seps.InputError, match="temperature"):
        seps.TokenSparse(16, 0.5, decision="gumbel", temperature=0.0)
    with pytest.raises(seps.InputError, match="beta"):
        seps.MultiModalSDTPS(beta=-0.1)
    with pytest.raises(seps.InputError, match="sparse_ratio"):
        seps.TokenSparse(16, 0.0)
    with pytest.raises(seps.InputError, match="keeped_patches"):
        seps.TokenAggregation(16, 0)
    with pytest.raises(seps.InputError, match="names"):
        seps.MultiModalSDTPS(modalities=("rgb",))
    with pytest.raises(seps.InputError, match="own_guide"):
        seps.MultiModalSDTPS(own_guide=-1.0)
    with pytest.raises(seps.InputError, match="guides"):
        seps.MultiModalSDTPS(guides="hearsay")
    with pytest.raises(seps.InputError, match=naming("3", "patch", "global")):
        seps.MultiModalSDTPS(16, 12)(torch.ones(2, 12, 16))
    with pytest.raises(seps.InputError, match="scores"):
        seps.ContrastiveLoss()(torch.ones(2, 3))
    with pytest.raises(seps.InputError, match=naming("img_ids", "2")):
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
    with pytest.raises(InputError, match="NaN"):
        check_features("images", features, "images, tokens, width")


def sensors(samples: int = 2, patches: int = 12) -> list[torch.Tensor]:
    return [torch.randn(samples, patches, 16)] * 3 + [torch.randn(samples, 16)] * 3


@pytest.mark.parametrize("what", [None, [1.0], "tensor"])
@pytest.mark.parametrize(("place", "name"), [(0, "rgb patches"), (4, "nir")])
def test_what_is_no_tensor_is_named(what, place, name):
    inputs = sensors()
    inputs[place] = what
    with pytest.raises(seps.InputError, match=naming(name, type(what).__name__)):
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
        with pytest.raises(seps.InputError, match=naming(name)):
            call()


def test_no_sample_is_selected_and_no_pair_has_no_loss():
    assert [tuple(part.shape) for part in seps.MultiModalSDTPS(16, 12)(*sensors(0))] == [(0, 3, 16)] * 3 + [(0, 12)] * 3
    for loss in (seps.ContrastiveLoss(), seps.ContrastiveLoss(0.2, True), seps.InfoNCELoss(), seps.SigmoidLoss()):
        with pytest.raises(seps.InputError, match=naming("scores", "(0, 0)")):
            loss(torch.ones(0, 0))
    words = torch.ones(0, 4, 16)
    with pytest.raises(seps.InputError, match="one caption or more"):
        seps.CrossSparseAggrNet(16, 12, 0.5, 0.5, has_cls=True)(torch.ones(2, 13, 16), words, None, words)
