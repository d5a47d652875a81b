"""An image without description scores the same however that is said, in every role of the description."""

from __future__ import annotations

import pytest
import torch

from kernel_cases import DEVICE, fused_scores, on_device
from scoring_cases import CONFIGS, SMALL, make_inputs, make_net
from seps.method.config import SlimmingConfig
from seps.method.published import score_published_pairing
from seps.retrieval.explain.shares import shares
from seps.scoring import (
    ImageBlock,
    score_matrix,
    score_with_gradient,
    take_images,
)

ROLES = {
    "guide": SlimmingConfig(dense="guide", **SMALL),
    "guide, dual": SlimmingConfig.paper(**SMALL),
    "branch": SlimmingConfig.open_source(**SMALL),
    "branch, learned": CONFIGS["branch_learned"],
    "branch, binary": CONFIGS["binary_sum"],
    "tokens": SlimmingConfig.default(**SMALL),
    "tokens, dual": CONFIGS["default_dual"],
    "tokens, binary": CONFIGS["binary"],
}
LENGTHS = torch.tensor([3, 0, 5, 0])
BARE = [1, 3]


@pytest.fixture(params=ROLES)
def case(request):
    config = ROLES[request.param]
    net, data = make_net(config), make_inputs(config)
    plain = net(data["images"], data["words"], data["lengths"])
    whole = net(data["images"], data["words"], data["lengths"], dense=data["dense"], dense_lengths=LENGTHS)
    return net, data, plain, whole


def test_the_network(case):
    net, data, plain, whole = case
    torch.testing.assert_close(whole[BARE], plain[BARE], atol=1e-6, rtol=0)
    described = [0, 2]
    alone = net(
        data["images"][described],
        data["words"],
        data["lengths"],
        dense=data["dense"][described],
        dense_lengths=LENGTHS[described],
    )
    torch.testing.assert_close(whole[described], alone, atol=1e-6, rtol=0)
    assert (whole[described] - plain[described]).abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["reference", "factored"])
@pytest.mark.parametrize("texts", [7, 90])
def test_the_scorer(case, backend, texts):
    net, data, _, _ = case
    words, lengths = make_inputs(net.config, texts=texts)["words"], None
    whole = net(data["images"], words, lengths, dense=data["dense"], dense_lengths=LENGTHS)
    described = {"dense": data["dense"], "dense_lengths": LENGTHS}
    found = score_matrix(net, data["images"], words, lengths, **described, backend=backend)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["guide", "branch", "branch, learned", "tokens"], indirect=True)
def test_the_kernels(case):
    net, data, _, whole = case
    net, data = on_device(net, data)
    found = fused_scores(net, data, dense=data["dense"], dense_lengths=LENGTHS.to(DEVICE))
    torch.testing.assert_close(found, whole.to(DEVICE), atol=2e-3, rtol=0)


def test_gradients_and_the_mask_beside_the_parts(case):
    net, data, _, whole = case
    images = data["images"].requires_grad_()
    scored = score_with_gradient(
        net, images, data["words"], data["lengths"], dense=data["dense"], dense_lengths=LENGTHS
    )
    torch.testing.assert_close(scored.similarity, whole, atol=1e-5, rtol=0)
    assert scored.described.tolist() == [True, False, True, False]
    (ours,) = torch.autograd.grad(scored.similarity[BARE].sum(), images)
    bare = net(images, data["words"], data["lengths"])
    (theirs,) = torch.autograd.grad(bare[BARE].sum(), images)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    if net.config.dense == "tokens":
        mixed = scored.pixels + net.description_weight * (scored.description - scored.pixels)
        torch.testing.assert_close(
            torch.where(scored.described[:, None], mixed, scored.pixels), scored.similarity, atol=1e-6, rtol=0
        )


def test_no_description_at_all_is_nobody_described(case):
    net, data, plain, _ = case
    for dense in (None, data["dense"]):
        lengths = None if dense is None else [0] * 4
        scored = score_with_gradient(
            net, data["images"], data["words"], data["lengths"], dense=dense, dense_lengths=lengths
        )
        torch.testing.assert_close(scored.similarity, plain, atol=1e-5, rtol=0)
        assert scored.described is None if dense is None else not scored.described.any()


def test_states_and_blocks_together(case):
    net, data, _, whole = case
    with torch.no_grad():
        parts = [
            net.encode_images(data["images"][:1], dense=data["dense"][:1], dense_lengths=LENGTHS[:1]),
            net.encode_images(data["images"][1:2]),
            net.encode_images(data["images"][2:], dense=data["dense"][2:], dense_lengths=LENGTHS[2:]),
        ]
    for ordered, rows in ((parts, [0, 1, 2, 3]), ([parts[1], parts[0], parts[2]], [1, 0, 2, 3])):
        for backend in ("reference", "factored"):
            found = score_matrix(net, ordered, data["words"], data["lengths"], backend=backend)
            torch.testing.assert_close(found, whole[rows], atol=1e-5, rtol=0)
    blocks = [ImageBlock(data["images"][:1], data["dense"][:1], LENGTHS[:1]), data["images"][1:2], parts[2]]
    found = score_matrix(net, blocks, data["words"], data["lengths"])
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)


def test_a_state_saved_before_the_mask_was_kept():
    """It has a second branch and no mask: all its images are described."""
    config = ROLES["branch"]
    net, data = make_net(config), make_inputs(config)
    with torch.no_grad():
        old = net.encode_images(data["images"][:2], dense=data["dense"][:2])
    expected = score_matrix(net, old, data["words"])
    old.dense_mask = None
    torch.testing.assert_close(score_matrix(net, old, data["words"]), expected)


def test_explanations(case):
    net, data, _, whole = case
    with torch.no_grad():
        side = net.encode_images(data["images"], dense=data["dense"], dense_lengths=LENGTHS)
    for row in range(4):
        found = shares(net, take_images(side, slice(row, row + 1)), data["words"][0, : data["lengths"][0]])
        assert found.score == pytest.approx(whole[row, 0].item(), abs=1e-4)


@pytest.mark.parametrize("role", ["guide", "guide, dual", "branch", "tokens"])
def test_guides_act_in_the_published_pairing(role):
    """The readable form left them out, and was 0.037 off."""
    options = {name: getattr(ROLES[role], name) for name in ROLES[role].__dataclass_fields__}
    config = SlimmingConfig(**{**options, "extra_guides": {"audio": 0.4}})
    net, data = make_net(config), make_inputs(config)
    guides = {"audio": torch.randn(4, config.embed_size)}
    call = (net, data["images"], data["words"], data["lengths"])
    pair = {"paired_dense": data["paired"], "paired_dense_lengths": data["paired_lengths"]}
    slow = score_matrix(*call, **pair, guides=guides, backend="reference")
    fast = score_matrix(*call, **pair, guides=guides, backend="factored")
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)
    spec = score_published_pairing(*call, data["paired"], data["paired_lengths"], guides=guides)
    torch.testing.assert_close(slow, spec)
    gradient = score_with_gradient(
        *call, paired_dense=data["paired"], paired_dense_lengths=data["paired_lengths"], guides=guides
    )
    torch.testing.assert_close(gradient.similarity, spec, atol=1e-5, rtol=0)
    other = score_matrix(*call, **pair, guides={"audio": -guides["audio"]}, backend="reference")
    assert (other - slow).abs().max() > 1e-3
