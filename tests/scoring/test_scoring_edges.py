"""Edges of the calls: nothing to score, what belongs to the images, modes, `out`, guides, several token counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernel_cases import fused_scores, on_device
from messages import naming
from scoring_cases import CONFIGS, SMALL, make_inputs, make_net
from seps.method.checks import InputError
from seps.method.config import SlimmingConfig
from seps.retrieval.explain.shares import shares
from seps.scoring import ImageBlock, choose_backend, score_matrix, score_with_gradient

BACKENDS = ["auto", "reference", "factored"]
GUIDED = SlimmingConfig.default(extra_guides={"audio": 0.2}, **SMALL)


@pytest.mark.parametrize("name", ["gumbel", "binary", "binary_sum", "default"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_network_left_in_training_is_evaluated(name, backend):
    """It was random without a word; the mode comes back as it was."""
    config = CONFIGS[name]
    net, data = make_net(config), make_inputs(config, texts=40)
    options = {"dense": data["dense"], "dense_lengths": data["dense_lengths"], "backend": backend}
    expected = score_matrix(net, data["images"], data["words"], data["lengths"], **options)
    net.train()
    net.hrpa.eval()
    before = {name: module.training for name, module in net.named_modules()}
    for _ in range(2):
        found = score_matrix(net, data["images"], data["words"], data["lengths"], **options)
        assert torch.equal(found, expected)
    with pytest.raises(InputError):
        score_matrix(net, ["no block"], data["words"])
    assert {name: module.training for name, module in net.named_modules()} == before


def test_the_kernels_and_explanations_of_a_network_in_training():
    net, data = make_net(CONFIGS["gumbel"]), make_inputs(CONFIGS["gumbel"])
    net, data = on_device(net, data)
    expected = net(data["images"], data["words"], data["lengths"]).detach()
    net.train()
    torch.testing.assert_close(fused_scores(net, data), expected, atol=2e-3, rtol=0)
    assert choose_backend(net, "cuda", precision="half").backend == "triton"
    with torch.no_grad():
        side = net.encode_images(data["images"][:1])
    for _ in range(3):
        found = shares(net, side, data["words"][0, : data["lengths"][0]])
        assert found.score == pytest.approx(float(expected[0, 0]), abs=1e-4)
    assert net.training


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float16, torch.bfloat16])
def test_out_must_hold_the_scores(dtype):
    net, data = make_net(CONFIGS["default"]), make_inputs(CONFIGS["default"])
    with pytest.raises(InputError, match="scores"):
        score_matrix(net, data["images"], data["words"], out=torch.zeros(4, 7, dtype=dtype))


def test_out_in_double():
    net, data = make_net(CONFIGS["default"]), make_inputs(CONFIGS["default"])
    out = torch.zeros(4, 7, dtype=torch.float64)
    score_matrix(net, data["images"], data["words"], out=out)
    assert torch.equal(out.float(), score_matrix(net, data["images"], data["words"]))


@pytest.mark.parametrize("name", ["default", "paper", "open_source", "binary"])
@pytest.mark.parametrize(("images", "texts"), [(0, 7), (4, 0), (0, 0)])
class TestNothing:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_matrix(self, name, images, texts, backend):
        config = CONFIGS[name]
        net, data = make_net(config), make_inputs(config)
        pictures, words = data["images"][:images], data["words"][:texts]
        described = {"dense": data["dense"][:images], "dense_lengths": data["dense_lengths"][:images]}
        paired = {"paired_dense": data["paired"][:texts], "paired_dense_lengths": data["paired_lengths"][:texts]}
        for extra in ({}, described, paired, {"out": torch.empty(images, texts)}):
            found = score_matrix(net, pictures, words, data["lengths"][:texts], backend=backend, **extra)
            assert found.shape == (images, texts) and found.dtype == torch.float32
        with torch.no_grad():
            side = net.encode_images(pictures, dense=described["dense"], dense_lengths=described["dense_lengths"])
        assert score_matrix(net, side, words, backend=backend).shape == (images, texts)
        assert score_matrix(net, [pictures, side], words, backend=backend).shape == (2 * images, texts)
        for query, queries, gallery in (("text", texts, images), ("image", images, texts)):
            best = score_matrix(net, pictures, words, backend=backend, topk=2, query=query)
            assert best.scores.shape == best.indices.shape == (queries, min(2, gallery))

    def test_network_and_gradients(self, name, images, texts):
        config = CONFIGS[name]
        net, data = make_net(config).train(), make_inputs(config)
        pictures = data["images"][:images].requires_grad_()
        words, lengths = data["words"][:texts], data["lengths"][:texts]
        described = {"dense": data["dense"][:images], "dense_lengths": data["dense_lengths"][:images]}
        expected, expected_masks = net(pictures, words, lengths, **described)
        found = score_with_gradient(net, pictures, words, lengths, want_masks=True, **described)
        assert expected.shape == found.similarity.shape == (images, texts)
        assert [mask.shape for mask in found.masks] == [mask.shape for mask in expected_masks]
        found.similarity.sum().backward()
        assert pictures.grad is not None and not pictures.grad.any()
        pair = {"paired_dense": data["paired"][:texts], "paired_dense_lengths": data["paired_lengths"][:texts]}
        assert score_with_gradient(net, pictures, words, lengths, **pair).similarity.shape == (images, texts)
        assert net.eval()(pictures, words, lengths).shape == (images, texts)


FAULTS = [
    (None, naming("extra_guides", "audio", "guides")),
    ({}, naming("extra_guides", "audio", "guides")),
    ({"audio": torch.ones(1, 16)}, "holds 1 vectors for 4 images"),
    ({"audio": torch.ones(3, 16)}, "holds 3 vectors for 4 images"),
    ({"audio": torch.ones(6, 16)}, "holds 6 vectors for 4 images"),
    ({"audio": torch.ones(4, 16), "heat": torch.ones(4, 16)}, "guides names .'heat'."),
    ({"audio": torch.ones(4, 5)}, "16 wide"),
]


@pytest.mark.parametrize(("guides", "message"), FAULTS)
def test_guides_that_do_not_fit(guides, message):
    net, data = make_net(GUIDED), make_inputs(GUIDED)
    call = (data["images"], data["words"], data["lengths"])
    pair = data["paired"], data["paired_lengths"]
    with pytest.raises(InputError, match=message):
        net(*call, guides=guides)
    for backend in BACKENDS:
        with pytest.raises(InputError, match=message):
            score_matrix(net, *call, guides=guides, backend=backend)
        with pytest.raises(InputError, match=message):
            score_matrix(net, [ImageBlock(data["images"], guides=guides)], *call[1:], backend=backend)
        with pytest.raises(InputError, match=message):
            score_matrix(net, *call, guides=guides, backend=backend, paired_dense=pair[0], paired_dense_lengths=pair[1])
    with pytest.raises(InputError, match=message):
        score_with_gradient(net, *call, guides=guides)


def test_a_guide_acts_in_every_path():
    net, data = on_device(make_net(GUIDED), make_inputs(GUIDED))
    call = (data["images"], data["words"], data["lengths"])
    for seed in (0, 1):
        torch.manual_seed(seed)
        guides = {"audio": torch.randn(4, 16).to(data["images"].device)}
        expected = net(*call, guides=guides)
        for backend in BACKENDS:
            found = score_matrix(net, *call, guides=guides, backend=backend)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        found = score_with_gradient(net, *call, guides=guides).similarity
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(fused_scores(net, data, guides=guides), expected, atol=2e-3, rtol=0)
    other = net(*call, guides={"audio": -guides["audio"]})
    assert (other - expected).abs().max() > 1e-3


@pytest.mark.parametrize("rows", [3, 6])
@pytest.mark.parametrize("name", ["dense", "dense_lengths", "patch_mask"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_do_not_fit_the_images(name, rows, backend):
    """More rows than images were cut off without a word where the images were cut into parts."""
    net, data = make_net(CONFIGS["default"]), make_inputs(CONFIGS["default"])
    wrong = {"dense": torch.ones(rows, 5, 16), "dense_lengths": torch.ones(rows, dtype=torch.long)}
    wrong["patch_mask"] = torch.ones(rows, 12, dtype=torch.bool)
    fields = {"dense": data["dense"], "dense_lengths": data["dense_lengths"], name: wrong[name]}
    with pytest.raises(InputError, match="for 4 images"):
        score_matrix(net, [ImageBlock(data["images"], **fields)], data["words"], backend=backend)
    with pytest.raises(InputError, match="for 4 images"):
        score_matrix(net, data["images"], data["words"], backend=backend, **fields)
    with pytest.raises(InputError, match="for 4 images"):
        score_with_gradient(net, data["images"], data["words"], **fields)


@pytest.mark.parametrize("name", CONFIGS)
def test_two_token_counts_in_one_network(name):
    """K follows the patches that come, not the number the network was made for."""
    config = replace(CONFIGS[name], check_num_patches=False)
    net, data = make_net(config), make_inputs(config, texts=40)
    prefix = config.num_prefix_tokens
    sizes = [data["images"], torch.randn(3, prefix + 19, 16), torch.randn(2, prefix + 5, 16)]
    expected = torch.cat([net(images, data["words"], data["lengths"]) for images in sizes]).detach()
    with torch.no_grad():
        mixed = [sizes[0], net.encode_images(sizes[1]), ImageBlock(sizes[2])]
    for backend in BACKENDS:
        found = score_matrix(net, mixed, data["words"], data["lengths"], backend=backend)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    rows = [score_with_gradient(net, images, data["words"], data["lengths"]).similarity for images in sizes]
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-5, rtol=0)
