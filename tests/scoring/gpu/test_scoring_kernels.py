"""The fused kernels against the readable form: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernel_cases import CASES, DEVICE, TINY, fused_scores, on_device
from scoring_cases import SMALL, make_inputs, make_net
from seps.method.config import SlimmingConfig
from seps.method.select import hard_topk
from seps.scoring import choose_backend, score_matrix
from seps.scoring.gpu import fused
from seps.scoring.gpu.fused import KernelSizes
from seps.scoring.inputs import SortedTexts

on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [16, 64])
def test_fused_matches_the_network(name, rows):
    config = CASES[name]
    net, data = on_device(make_net(config), make_inputs(config, images=2, texts=7))
    described = {} if config.dense == "none" else {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    sizes = KernelSizes(**{**vars(TINY), "align_rows": rows, "slot_rows": rows})
    scores = fused_scores(net, data, sizes, **described)
    torch.testing.assert_close(
        scores, net(data["images"], data["words"], data["lengths"], **described), atol=2e-3, rtol=0
    )


@pytest.mark.parametrize("learned", [False, True])
def test_selection_is_that_of_the_network(learned):
    config = SlimmingConfig(dense="none", scoring="learned" if learned else "sum", **SMALL)
    net, data = on_device(make_net(config), make_inputs(config, images=3, texts=6))
    # Ties: equal patches, and scores of both signs of zero.
    data["images"][0, 1:] = data["images"][0, 1]
    data["images"][1, 7:] = data["images"][1, 1:7]
    texts = SortedTexts(data["words"], data["lengths"], dtype=torch.float32)
    block = texts.block(0, 6)
    with torch.no_grad():
        side = net.encode_images(data["images"])
        keep, extra = fused.scorer(net, torch.float16, TINY)(side).select(block)
        for t in range(6):
            raw = net.patch_scores(side, block.part(t, t + 1))[0]
            assert torch.equal(keep[t, :, :12].float(), hard_topk(raw, config.sparse_ratio))
    # The prefix token stands in the padding, and is kept always.
    assert keep[..., 12].all() and not keep[..., 13:].any() and not extra[..., 12:].any()
    assert ((keep > 0) & (extra > 0)).sum() == 0


def test_one_word_and_one_text():
    config = CASES["mlp"]
    net, data = on_device(make_net(config), make_inputs(config, images=1, texts=1, words=1))
    expected = net(data["images"], data["words"], data["lengths"])
    torch.testing.assert_close(fused_scores(net, data), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (SlimmingConfig.paper(**SMALL), {}, "dual"),
        (SlimmingConfig.default(decision="binary", **SMALL), {}, "binary"),
        (SlimmingConfig.default(**SMALL), {"paired": True}, "published pairing"),
        (SlimmingConfig.default(**SMALL), {"masked": True}, "patch_mask"),
        (SlimmingConfig.default(**SMALL), {"patches": 5000}, "5000 patches"),
        (SlimmingConfig.default(**SMALL), {"words": 300}, "300 words"),
    ],
)
def test_what_is_not_supported_goes_to_the_factored_form(config, options, reason):
    choice = choose_backend(make_net(config), "cuda", **{"precision": "half", **options})
    assert choice.backend == "factored" and reason in choice.reason
    choice = choose_backend(make_net(SlimmingConfig.default(**SMALL)), "cuda", precision="half", patches=196)
    assert choice.backend == "triton"


def test_matrix_call_refuses_the_kernels_on_the_cpu():
    config = CASES["tokens"]
    net, data = make_net(config), make_inputs(config)
    with pytest.raises(ValueError, match="GPU"):
        score_matrix(net, data["images"], data["words"], backend="triton", precision="half")


@on_gpu
@pytest.mark.parametrize("patches", [49, 144, 196, 256, 576])
@pytest.mark.parametrize("alignment", ["mean", "topk"])
@pytest.mark.parametrize("backend", ["factored", "triton"])
def test_real_shapes_in_half_precision(patches, alignment, backend):
    config = SlimmingConfig.default(num_patches=patches, alignment=alignment)
    net, data = on_device(make_net(config), make_inputs(config, images=5, texts=300, words=23, dense=40))
    options = {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    fast = score_matrix(
        net, data["images"], data["words"], data["lengths"], backend=backend, precision="half", **options
    )
    few = {"cap_embs": data["words"][:20], "cap_lens": data["lengths"][:20]}
    slow = score_matrix(net, data["images"], **few, backend="reference", **options)
    torch.testing.assert_close(fast[:, :20], slow, atol=2e-3, rtol=0)


@on_gpu
@pytest.mark.parametrize("name", ["paper", "open_source", "default"])
@pytest.mark.parametrize("backend", ["factored", "auto"])
def test_float32_on_the_gpu(name, backend):
    config = getattr(SlimmingConfig, name)()
    net, data = on_device(make_net(config), make_inputs(config, images=5, texts=60, words=23, dense=40))
    options = {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    slow = score_matrix(net, data["images"], data["words"], data["lengths"], backend="reference", **options)
    fast = score_matrix(net, data["images"], data["words"], data["lengths"], backend=backend, **options)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)


@on_gpu
@pytest.mark.parametrize("patches", [49, 196, 576])
@pytest.mark.parametrize("words", [23, 100])
def test_real_shapes_in_float32_by_pairs(patches, words):
    config = SlimmingConfig.default(num_patches=patches, alignment="topk")
    net, data = on_device(make_net(config), make_inputs(config, images=5, texts=300, words=words, dense=40))
    options = {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    fast = score_matrix(net, data["images"], data["words"], data["lengths"], backend="triton", **options)
    slow = score_matrix(net, data["images"], data["words"], data["lengths"], backend="factored", **options)
    gaps = (fast - slow).abs()
    # A kept patch may flip by rounding.
    assert (gaps > 1e-5).sum() <= 2 and gaps[gaps <= 1e-5].max() <= 3e-6


@on_gpu
def test_the_memory_budget_is_kept_on_the_gpu():
    config = SlimmingConfig.default(dense="none")
    net, data = on_device(make_net(config), make_inputs(config, images=200, texts=2000, words=23))
    out = torch.empty(200, 2000, device=DEVICE)
    for precision in ("float32", "half"):
        score_matrix(net, data["images"][:8], data["words"][:100], precision=precision)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        budget = 400 * 2**20
        score_matrix(net, data["images"], data["words"], precision=precision, memory=budget, out=out)
        assert torch.cuda.max_memory_allocated() - before <= budget
