"""Every call checks the number of tokens against `num_patches`; one flag switches the check off."""

from __future__ import annotations

import pytest
import torch

import seps

SIZES = {"embed_size": 16, "num_patches": 12, "aggr_ratio": 0.5}
WORDS = torch.ones(3, 4, 16)


def tokens(count: int) -> torch.Tensor:
    return torch.randn(2, count, 16)


def sensors(*counts: int) -> list[torch.Tensor]:
    return [tokens(count) for count in counts] + [torch.randn(2, 16)] * 3


def slimming(prefix: int = 1, **settings) -> seps.PatchSlimming:
    return seps.PatchSlimming(seps.SlimmingConfig(**SIZES, num_prefix_tokens=prefix, **settings)).eval()


def published(has_cls: bool | None, **settings) -> seps.CrossSparseAggrNet:
    return seps.CrossSparseAggrNet(**SIZES, has_cls=has_cls, **settings).eval()


@pytest.mark.parametrize(
    ("net", "right", "wrong"),
    [
        (slimming(), 13, {12: "CLS", 14: "CLS", 65: "num_prefix_tokens", 2: "num_patches"}),
        (slimming(0), 12, {13: "CLS", 11: "num_patches"}),
        (slimming(3), 15, {12: "CLS", 13: "num_prefix_tokens"}),
        (published(True), 13, {12: "CLS", 14: "CLS", 50: "has_cls"}),
        (published(False), 12, {13: "CLS", 50: "has_cls"}),
    ],
)
def test_each_call_is_checked(net, right, wrong):
    for count, remedy in wrong.items():
        assert net(tokens(right), WORDS).shape == (2, 3)
        with pytest.raises(seps.InputError, match=rf"num_patches=12.*\(2, {count}, 16\).*{remedy}") as error:
            net(tokens(count), WORDS)
        assert "check_num_patches=False" in str(error.value)
        with pytest.raises(seps.InputError, match="num_patches=12"):
            seps.scoring.score_matrix(net, tokens(count), WORDS)


def test_sensors_are_checked_one_by_one():
    net = seps.MultiModalSDTPS(16, 12).eval()
    for place, name in enumerate(net.modalities):
        for count, remedy in ((13, "CLS"), (6, "num_patches"), (1, "num_patches")):
            counts = [12, 12, 12]
            net(*sensors(*counts))
            counts[place] = count
            with pytest.raises(seps.InputError, match=rf"{name} patches.*num_patches=12.*\(2, {count}, 16\).*{remedy}"):
                net(*sensors(*counts))


def test_inputs_of_several_sizes_have_a_flag():
    for count in (13, 40, 7):
        assert slimming(check_num_patches=False)(tokens(count), WORDS).shape == (2, 3)
        assert published(True, check_num_patches=False)(tokens(count), WORDS).shape == (2, 3)
    net = seps.MultiModalSDTPS(16, 12, check_num_patches=False).eval()
    found = net(*sensors(12, 20, 7))
    assert [tuple(part.shape) for part in found] == [(2, 3, 16)] * 3 + [(2, 12), (2, 20), (2, 7)]
    with pytest.raises(seps.InputError, match="has_cls"):
        published(None, check_num_patches=False)(tokens(40), WORDS)
