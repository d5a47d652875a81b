"""Each image with texts of its own, against one image and one text at a time by the readable network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scoring_cases import CONFIGS, SMALL, make_inputs, make_net
from seps.method.config import SlimmingConfig
from seps.method.encoded import EncodedImages, Texts
from seps.method.network import PatchSlimming
from seps.scoring import take_images
from seps.scoring.own_texts import TextPool, _OwnWords, can_score, images_at_once, score_own_texts

OWN = {
    **{name: config for name, config in CONFIGS.items() if len(config.branches) == 1},
    "kept_all": SlimmingConfig.default(**{**SMALL, "sparse_ratio": 1.0}),
    "topk_alignment": SlimmingConfig.default(alignment="topk", similarity="leaky", **SMALL),
    "not_pooled": SlimmingConfig.default(pooled=0.0, num_prefix_tokens=2, **SMALL),
    "described_guide": SlimmingConfig(dense="guide", **SMALL),
}


def slow_scores(net: PatchSlimming, side: EncodedImages, words: Tensor, lengths: Tensor, chosen: Tensor) -> Tensor:
    """A loop over images and their texts, each pair by the reference."""
    found = torch.zeros(chosen.shape)
    for i, row in enumerate(chosen.tolist()):
        for place, text in enumerate(row):
            one = net.score(take_images(side, slice(i, i + 1)), Texts.of(words[text : text + 1, : int(lengths[text])]))
            found[i, place] = one.similarity[0, 0]
    return found


def compare(config: SlimmingConfig, *, seed: int = 0, **extra: Any) -> None:
    net, data = make_net(config, seed), make_inputs(config, images=5, texts=11, words=9, seed=seed + 1)
    words, lengths = data["words"], data["lengths"]
    side = net.encode_images(data["images"], **extra)
    chosen = torch.stack([torch.randperm(11)[:4] for _ in range(5)])
    mask = torch.arange(words.shape[1]) < lengths[:, None]
    assert can_score(net)
    fast, unsafe = score_own_texts(net, side, TextPool(words, mask), chosen)
    with torch.no_grad():
        slow = slow_scores(net, side, words, lengths, chosen)
    assert fast.dtype == torch.float32 and not unsafe.any()
    torch.testing.assert_close(fast, slow, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", OWN)
def test_matches_one_pair_at_a_time(name: str) -> None:
    for seed in range(3):
        compare(OWN[name], seed=seed)


@pytest.mark.parametrize("name", [name for name, config in OWN.items() if config.dense != "none"])
def test_with_descriptions_of_some_images(name: str) -> None:
    data = make_inputs(OWN[name], images=5, seed=1)
    for lengths in ([5, 0, 3, 1, 4], [0] * 5, [2] * 5):
        compare(OWN[name], dense=data["dense"], dense_lengths=torch.tensor(lengths))


@pytest.mark.parametrize("name", OWN)
def test_with_padding_patches(name: str) -> None:
    valid = torch.rand(5, SMALL["num_patches"], generator=torch.Generator().manual_seed(3)) < 0.7
    valid[:, 0] = True
    compare(OWN[name], patch_mask=valid)


def test_a_score_does_not_depend_on_the_images_beside_it() -> None:
    config = OWN["default"]
    net, data = make_net(config), make_inputs(config, images=6, texts=9)
    side = net.encode_images(data["images"])
    pool = TextPool(data["words"], torch.arange(6) < data["lengths"][:, None])
    chosen = torch.randint(0, 9, (6, 5))
    together, _ = score_own_texts(net, side, pool, chosen)
    for i in range(6):
        alone, _ = score_own_texts(net, take_images(side, slice(i, i + 1)), pool, chosen[i : i + 1])
        torch.testing.assert_close(alone[0], together[i], atol=1e-6, rtol=0)


def test_images_whose_weights_would_vanish_are_named() -> None:
    config = OWN["default"]
    net, data = make_net(config), make_inputs(config)
    images = data["images"]
    side = net.encode_images(images)
    side.sets[0].logits[2, 0] = 500.0
    pool = TextPool(data["words"], torch.arange(6) < data["lengths"][:, None])
    _, unsafe = score_own_texts(net, side, pool, torch.zeros(4, 1, dtype=torch.long))
    assert unsafe.tolist() == [False, False, True, False]


def test_networks_it_does_not_know() -> None:
    class Mine(PatchSlimming):
        def tokens(self, *arguments: Any) -> Tensor:
            return -super().tokens(*arguments)

    assert not can_score(Mine(OWN["default"]))
    for name in ("default_dual", "branch_learned"):
        assert not can_score(make_net(CONFIGS[name]))


def test_one_padded_product_is_that_of_each_image() -> None:
    torch.manual_seed(4)
    for lengths in ([3], [2, 5, 1], [4, 4]):
        own = _OwnWords(*(torch.empty(0) for _ in range(4)), lengths, torch.empty(0))
        rows, matrices = torch.randn(sum(lengths), 6), torch.randn(len(lengths), 6, 7)
        torch.testing.assert_close(own._times_padded(rows, matrices), own.times(rows, matrices))


def test_a_gpu_takes_more_images_at_once() -> None:
    assert images_at_once(torch.device("cuda")) > images_at_once(torch.device("cpu"))
