"""All pairs by what a text changes (`scoring.difference`): the scores of `forward`, whatever texts decide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from scoring_cases import CONFIGS, make_inputs, make_net
from seps.method.config import SlimmingConfig
from seps.method.encoded import Texts
from seps.scoring import difference, score_matrix
from seps.scoring.difference import DifferenceMaxima, _Norms
from seps.scoring.inputs import SortedTexts

NEAR = 1e-6
SHAPE = {"embed_size": 48, "num_patches": 40, "sparse_ratio": 0.5, "aggr_ratio": 0.4}


def scene(config: SlimmingConfig, images: int, texts: int, common: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """Features with a common direction of this size, captions of 1 to 9 words."""
    torch.manual_seed(seed)
    shared = common * torch.randn(config.embed_size)
    tokens = config.num_prefix_tokens + config.num_patches
    return {
        "images": torch.randn(images, tokens, config.embed_size) + shared,
        "words": torch.randn(texts, 9, config.embed_size) + shared,
        "lengths": torch.randint(1, 10, (texts,)),
    }


@torch.no_grad()
def differ(net, data, **options) -> tuple[torch.Tensor, int]:
    """The largest difference to `forward` among pairs that keep the same patches, and how many keep others."""
    exact = net(data["images"], data["words"], data["lengths"], **options)
    found = score_matrix(net, data["images"], data["words"], data["lengths"], **options)
    gap = (found - exact).abs()
    # A patch that flips by rounding moves a score by far more than rounding does.
    flipped = gap > 1e-4
    return gap[~flipped].max(), int(flipped.sum())


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts met `DifferenceMaxima` itself, call by call."""
    calls: list[int] = []
    whole = difference._Merged.maxima

    def counted(self, texts, kept):
        calls.append(texts.count)
        return whole(self, texts, kept)

    monkeypatch.setattr(difference._Merged, "maxima", counted)
    return calls


@pytest.mark.parametrize("preset", ["default", "open_source", "paper"])
@pytest.mark.parametrize("common", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("texts", [12, 150, 700])
def test_scores_are_those_of_forward(preset: str, common: float, texts: int, met: list[int]) -> None:
    config = getattr(SlimmingConfig, preset)(**SHAPE)
    gap, flips = differ(make_net(config), scene(config, 3, texts, common))
    assert gap <= NEAR and flips <= 2
    assert sum(met) == 3 * texts or sum(met) == texts  # image by image, or together


@settings(max_examples=30, deadline=None)
@given(
    patches=st.integers(6, 70),
    width=st.integers(4, 40),
    prefix=st.integers(0, 2),
    ratio=st.floats(0.2, 0.95),
    texts=st.integers(9, 130),
    images=st.integers(1, 17),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
    common=st.sampled_from([0.0, 1.0]),
    scoring=st.sampled_from(["sum", "learned"]),
    described=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(patches, width, prefix, ratio, texts, images, spread, common, scoring, described, seed) -> None:
    config = SlimmingConfig.default(
        embed_size=width,
        num_patches=patches,
        num_prefix_tokens=prefix,
        sparse_ratio=ratio,
        aggr_ratio=min(1.0, max(0.3, 1.01 / (patches * ratio))),
        scoring=scoring,
    )
    data = scene(config, images, texts, common, seed)
    options = {}
    if described:
        options = {"dense": torch.randn(images, 7, width), "dense_lengths": torch.randint(0, 8, (images,))}
    gap, flips = differ(make_net(config, seed, spread), data, **options)
    assert gap <= 3e-6 and flips <= 2


@pytest.mark.parametrize("preset", ["default", "open_source", "paper"])
class TestAdversarial:
    """Decisions and weights for which sums of differences would be worst."""

    def check(self, preset: str, change=None, spread: float = 1.0, texts: int = 200) -> None:
        config = getattr(SlimmingConfig, preset)(**SHAPE)
        data = scene(config, 2, texts, 0.5)
        if change is not None:
            change(data)
        gap, flips = differ(make_net(config, spread=spread), data)
        assert gap <= NEAR and flips <= 4

    @pytest.mark.parametrize("spread", [1e-4, 3.0, 6.0, 12.0, 300.0])
    def test_any_logits(self, preset: str, spread: float) -> None:
        self.check(preset, spread=spread)

    @pytest.mark.parametrize("times", [30.0, 1e4])
    def test_one_patch_dominates(self, preset: str, times: float) -> None:
        self.check(preset, lambda data: data["images"][:, 5].mul_(times))

    def test_one_patch_is_the_opposite_of_the_others(self, preset: str) -> None:
        self.check(preset, lambda data: data["images"][:, 9].copy_(-data["images"][:, 1:].sum(dim=1)))

    def test_all_captions_are_alike(self, preset: str) -> None:
        self.check(preset, lambda data: data["words"].copy_(data["words"][:1].clone().expand_as(data["words"])))

    def test_two_kinds_of_captions_decide_against_each_other(self, preset: str) -> None:
        def two_kinds(data: dict[str, torch.Tensor]) -> None:
            data["words"][::2] = -data["words"][:1] + 0.05 * data["words"][::2]
            data["words"][1::2] = data["words"][:1] + 0.05 * data["words"][1::2]

        self.check(preset, two_kinds)

    def test_every_caption_looks_at_another_patch(self, preset: str) -> None:
        def own_patch(data: dict[str, torch.Tensor]) -> None:
            wanted = torch.arange(len(data["words"])) % 40 + 1
            data["words"] += 20 * data["images"][0, wanted][:, None]

        self.check(preset, own_patch)

    def test_equal_patches(self, preset: str) -> None:
        self.check(preset, lambda data: data["images"].copy_(data["images"][:, :1].clone().expand_as(data["images"])))

    @pytest.mark.parametrize("scale", [1e-6, 1e6])
    def test_features_of_any_size(self, preset: str, scale: float) -> None:
        self.check(preset, lambda data: (data["images"].mul_(scale), data["words"].mul_(scale)))


@settings(max_examples=40, deadline=None)
@given(
    images=st.integers(1, 3),
    texts=st.integers(1, 220),
    patches=st.integers(2, 60),
    merged=st.integers(1, 9),
    groups=st.integers(1, 6),
    rate=st.floats(0.0, 0.6),
    spread=st.sampled_from([0.1, 2.0, 20.0]),
    seed=st.integers(0, 2**16),
)
def test_norms_keep_their_digits(images, texts, patches, merged, groups, rate, spread, seed) -> None:
    torch.manual_seed(seed)
    vectors = torch.randn(images, patches, 16) + torch.randn(16)
    weights = (spread * torch.randn(images, patches, merged)).clamp(-20, 20)
    weights = (weights - weights.amax(dim=1, keepdim=True)).exp()
    kinds = torch.rand(groups, images, patches) < 0.5
    keep = kinds[torch.randint(groups, (texts,))] ^ (
        torch.rand(texts, images, patches) < rate * torch.rand(texts, 1, 1)
    )
    keep = keep.float()
    found = _Norms(vectors, [weights], [keep])([keep.transpose(0, 1)])[0].double().square()
    tokens = torch.einsum("tbn,bnq,bnc->btqc", keep.double(), weights.double(), vectors.double())
    exact = tokens.square().sum(dim=-1)
    # What a sum in float32 may lose, whatever its order: terms against the sum.
    terms = (
        torch.einsum("tbn,bnq,bnc->btqc", keep.double(), weights.double(), vectors.abs().double()).square().sum(dim=-1)
    )
    present = exact > 1e-30
    assert ((1 / found - exact).abs() <= 3e-5 * exact + 2e-6 * terms)[present].all()


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"gumbel"}))
def test_maxima_are_those_of_the_reference(name: str) -> None:
    """Also where it leaves the work to others: two sets in one token, sets that no text changes, learned numbers."""
    config = CONFIGS[name]
    net, data = make_net(config), make_inputs(config, texts=30)
    dense = {} if config.dense == "none" else {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    with torch.no_grad():
        images = net.encode_images(data["images"], **dense)
        texts = SortedTexts(data["words"], data["lengths"], dtype=torch.float32)
        block = texts.block(0, 30)
        found = net.score(images, block, DifferenceMaxima(net, images)).similarity
        torch.testing.assert_close(found, net.score(images, block).similarity, atol=2e-6, rtol=0)


def test_it_says_where_it_does_not_apply() -> None:
    net, data = make_net(CONFIGS["default"]), make_inputs(CONFIGS["default"])
    images = net.encode_images(data["images"])
    assert "gradients" in str(DifferenceMaxima.supports(net, images))
    with torch.no_grad():
        assert DifferenceMaxima.supports(net, images) is None
        # Texts that are no sorted block go another way, to the same scores.
        texts = Texts.of(F.normalize(data["words"], dim=-1))
        other = net.score(images, texts, DifferenceMaxima(net, images)).similarity
        torch.testing.assert_close(other, net.score(images, texts).similarity, atol=2e-6, rtol=0)
