"""Properties of the composed network: padding, order, sizes, gradients, guidance, numerics under other regimes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import seps
from seps.method.encoded import Texts
from seps.method.score import cosine_attention, min_max

OPTIONS = list(
    itertools.product(("sum", "learned"), ("none", "guide", "branch", "tokens"), ("single", "dual"), ("mean", "topk"))
)
LEGAL = [o for o in OPTIONS if o[2] == "single" or o[1] in ("guide", "tokens")]


def make_net(option=("learned", "tokens", "single", "mean"), **overrides) -> seps.PatchSlimming:
    scoring, dense, aggregation, alignment = option
    settings = {"embed_size": 16, "num_patches": 12, "sparse_ratio": 0.5, "aggr_ratio": 0.5, "num_prefix_tokens": 1}
    config = seps.SlimmingConfig(
        scoring=scoring, dense=dense, aggregation=aggregation, alignment=alignment, **{**settings, **overrides}
    )
    torch.manual_seed(0)
    return seps.PatchSlimming(config).eval()


def make_inputs(images=3, texts=4, patches=12, words=5, dense=7, prefix=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "images": torch.randn(images, prefix + patches, 16, generator=generator),
        "words": torch.randn(texts, words, 16, generator=generator),
        "lengths": torch.randint(1, words + 1, (texts,), generator=generator),
        "dense": torch.randn(images, dense, 16, generator=generator),
        "dense_lengths": torch.randint(0, dense + 1, (images,), generator=generator),
    }


@pytest.mark.parametrize("option", LEGAL)
@pytest.mark.parametrize("similarity", ["cosine", "leaky"])
def test_every_legal_combination_scores_and_trains(option, similarity):
    net = make_net(option, similarity=similarity).train()
    inputs = make_inputs()
    inputs["images"].requires_grad_()
    sims, masks = net(**inputs)
    assert sims.shape == (3, 4)
    assert all(mask.shape == (4, 3, 12) and (mask.sum(dim=-1) == 6).all() for mask in masks)
    sims.sum().backward()
    assert torch.isfinite(inputs["images"].grad).all()


@settings(max_examples=25, deadline=None)
@given(option=st.sampled_from(LEGAL), padding=st.integers(1, 4), seed=st.integers(0, 99))
def test_padding_never_changes_a_score(option, padding, seed):
    net, inputs = make_net(option, check_num_patches=False), make_inputs(seed=seed)
    before = net(**inputs)
    generator = torch.Generator().manual_seed(seed + 1)

    def pad(tensor):
        return torch.cat([tensor, 9 * torch.randn(len(tensor), padding, 16, generator=generator)], dim=1)

    valid = torch.arange(12 + padding).expand(3, -1) < 12
    padded = {
        **inputs,
        "images": pad(inputs["images"]),
        "words": pad(inputs["words"]),
        "dense": pad(inputs["dense"]),
        "patch_mask": valid,
    }
    torch.testing.assert_close(net(**padded), before, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(option=st.sampled_from(LEGAL), seed=st.integers(0, 99))
def test_order_and_company_never_matter(option, seed):
    net, inputs = make_net(option), make_inputs(seed=seed)
    scores = net(**inputs)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.randperm(3, generator=generator), torch.randperm(4, generator=generator)
    mixed = {k: v[columns if k in ("words", "lengths") else rows] for k, v in inputs.items()}
    torch.testing.assert_close(net(**mixed), scores[rows][:, columns], atol=1e-5, rtol=1e-5)
    alone = {k: v[:1] for k, v in inputs.items()}
    torch.testing.assert_close(net(**alone), scores[:1, :1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ratio", [0.01, 1.0])
def test_one_image_one_word_one_patch_and_everything_kept(ratio):
    net = make_net(num_patches=1, sparse_ratio=1.0, aggr_ratio=1.0)
    image, word = torch.randn(1, 2, 16), torch.randn(1, 1, 16)
    cls, patch = torch.nn.functional.cosine_similarity(image[0], word[0], dim=-1).tolist()
    # The only patch is the only merged one, and nothing is left for the extra token, whose cosine is 0.
    by_hand = max(cls, patch, 0.0) + (cls + patch + 0.0) / 3 + net.config.pooled * patch
    assert net(image, word).item() == pytest.approx(by_hand, abs=1e-6)
    wide = make_net(num_patches=400, sparse_ratio=ratio, aggr_ratio=1.0).train()
    images = torch.randn(2, 401, 16, requires_grad=True)
    sims, masks = wide(images, torch.randn(2, 1, 16))
    assert (masks[0].sum(dim=-1) == max(1, 400 * ratio)).all()
    sims.sum().backward()
    assert torch.isfinite(images.grad).all()


def test_a_16_by_8_grid_is_read_as_told():
    for prefix in (0, 1):
        net = make_net(num_patches=128, num_prefix_tokens=prefix).train()
        _, masks = net(torch.randn(2, prefix + 128, 16), torch.randn(2, 3, 16))
        assert masks[0].shape == (2, 2, 128)
        assert (masks[0].sum(dim=-1) == 64).all()
    published = seps.CrossSparseAggrNet(16, 128, has_cls=False).train()
    assert published(torch.randn(2, 128, 16), torch.randn(2, 3, 16))[1].shape == (2, 2, 128)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("option", LEGAL)
def test_gradient_reaches_every_kept_and_every_merged_patch(option, prefix):
    net = make_net(option, num_prefix_tokens=prefix).train()
    inputs = make_inputs(images=2, texts=1, prefix=prefix)
    inputs["images"].requires_grad_()
    sims, _ = net(**inputs)
    sims.sum().backward()
    reached = inputs["images"].grad.abs().sum(dim=-1) > 0
    assert reached.all()  # kept ones through the merged tokens, the others through the extra token


def test_dense_text_belongs_to_its_image():
    net, inputs = make_net(), make_inputs()
    inputs["dense_lengths"] = torch.tensor([7, 7, 7])
    before = net(**inputs)
    changed = inputs["dense"].clone()
    changed[1] += 1
    after = net(**{**inputs, "dense": changed})
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not torch.allclose(after[1], before[1])


def test_an_image_without_description_is_scored_by_its_patches():
    net, inputs = make_net(), make_inputs()
    inputs["dense_lengths"] = torch.tensor([7, 0, 7])
    with_some = net(**inputs)
    none = net(inputs["images"], inputs["words"], inputs["lengths"])
    torch.testing.assert_close(with_some[1], none[1], atol=1e-6, rtol=1e-6)


def test_audio_is_a_configuration():
    beta = 0.2
    net = make_net(("learned", "guide", "single", "mean"), beta=beta, extra_guides={"audio": beta}, num_prefix_tokens=0)
    images, words, dense = torch.randn(2, 12, 16), torch.randn(1, 3, 16), torch.randn(2, 4, 16)
    audio = torch.randn(2, 16)
    side = net.encode_images(images, dense=dense, guides={"audio": audio})
    caption = words.mean(dim=1)
    scores = net.patch_scores(side, Texts.of(words))[0]

    def attention(vector):
        return min_max(cosine_attention(images, vector))

    predicted = net.sparse_net_cap.predict(images)
    expected = (1 - 3 * beta) * predicted + beta * (
        attention(caption) + attention(dense.mean(dim=1)) + attention(audio) + 2 * attention(images.mean(dim=1))
    )
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("times", [0.0, 0.5, 2.0])
def test_the_image_itself_guides_as_often_as_the_configuration_says(times):
    net = make_net(("learned", "guide", "single", "mean"), own_guide=times, num_prefix_tokens=0)
    images, caption, dense = torch.randn(2, 12, 16), torch.randn(1, 16), torch.randn(2, 4, 16)
    side = net.encode_images(images, dense=dense)

    def attention(vector):
        return min_max(cosine_attention(images, vector))

    expected = 0.5 * net.sparse_net_cap.predict(images) + 0.25 * (
        attention(caption) + attention(dense.mean(dim=1)) + times * attention(images.mean(dim=1))
    )
    torch.testing.assert_close(net.patch_scores(side, Texts.of(caption[None]))[0], expected)


def test_published_pairing_is_not_the_native_call():
    net = make_net(("sum", "branch", "single", "mean"))
    inputs = make_inputs(images=4, texts=4)
    inputs["dense_lengths"] = torch.full((4,), 7)
    native = net(**inputs)
    paired = seps.score_published_pairing(
        net, inputs["images"], inputs["words"], inputs["lengths"], inputs["dense"], inputs["dense_lengths"]
    )
    assert not torch.allclose(native, paired)


def test_two_token_counts_in_one_network():
    # Photos of another size have another number of patches: nothing of the first call may stay behind.
    net, whole = make_net(check_num_patches=False), {count: make_inputs(patches=count) for count in (12, 20)}
    alone = {count: make_net(check_num_patches=False)(**inputs) for count, inputs in whole.items()}
    for count in (12, 20, 12):
        assert torch.equal(net(**whole[count]), alone[count])
        sims, masks = net.train()(**whole[count])
        assert (masks[0].sum(dim=-1) == count // 2).all() and masks[0].shape[-1] == count
        torch.testing.assert_close(sims, alone[count], atol=1e-6, rtol=1e-6)
        net.eval()


def test_compile_runs_the_network():
    net, inputs = make_net(), make_inputs()
    expected = net(**inputs)
    torch.testing.assert_close(torch.compile(net, backend="aot_eager")(**inputs), expected, atol=1e-5, rtol=1e-5)


def test_image_side_exports_to_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class ImageOnly(torch.nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, images):
            side = self.net.encode_images(images)
            return side.sets[0].fixed, side.sets[0].logits

    module = ImageOnly(make_net(("learned", "guide", "single", "mean"))).eval()
    path = tmp_path / "image_side.onnx"
    torch.onnx.export(
        module,
        (torch.randn(2, 13, 16),),
        path,
        input_names=["images"],
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},),
        dynamo=True,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    images = torch.randn(5, 13, 16)
    for ours, theirs in zip(module(images), session.run(None, {"images": images.numpy()}), strict=True):
        torch.testing.assert_close(torch.from_numpy(theirs), ours, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("options", "kept"), [({}, "25"), ({"decision": "binary"}, "learned")])
def test_a_printed_network_shows_its_numbers_of_patches_and_beta(options, kept):
    config = seps.SlimmingConfig(embed_size=16, num_patches=49, sparse_ratio=0.5, aggr_ratio=0.4, beta=0.2, **options)
    printed = repr(seps.PatchSlimming(config)).splitlines()
    assert printed[1].strip() == f"N -> K -> Q: 49 -> {kept} -> 9 + 1 extra token, beta=0.2"


def test_a_printed_module_of_sensors_shows_its_numbers_of_patches_and_beta():
    printed = repr(seps.MultiModalSDTPS(embed_dim=16, num_patches=32, sparse_ratio=0.5, aggr_ratio=0.4, beta=0.2))
    assert printed.splitlines()[1].strip() == "rgb, nir, tir: N -> K -> Q: 32 -> 16 -> 6 + 1 extra token, beta=0.2"
