"""The kernels that keep an operand in shared memory, and texts that are selected in chunks of several blocks."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_scoring_pairs import Live, Nothing, float64_scores
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_cases import DEVICE, TINY, fused_scores, on_device
from scoring_cases import SMALL, make_inputs, make_net
from seps.method.checks import values_unchecked
from seps.method.config import SlimmingConfig
from seps.scoring.blocks import Engine, Plan, block_costs, make_plan
from seps.scoring.gpu import fused, launches
from seps.scoring.gpu.fused import chunks, joined
from seps.scoring.gpu.launches import KernelSizes
from seps.scoring.inputs import ImageBlock, SortedTexts, cut_by_length, shapes_of


def config_of(patches, prefix=1, **options):
    """A small network of so many patches, whose cosines have both signs."""
    return SlimmingConfig.default(
        **{
            "num_patches": patches,
            "num_prefix_tokens": prefix,
            "embed_size": 32,
            "dense": "none",
            "aggr_ratio": 7 / patches,
            **options,
        }
    )


# In the interpreter few tiles, whose number its time goes by, and few rows; on a GPU those of every call.
WIDE, SHORT = KernelSizes(), KernelSizes()
if DEVICE == "cpu":
    WIDE = KernelSizes(select_rows=16, norm_rows=16, held_rows=16, align_patches=256, split_patches=256)
    SHORT = TINY
# Half precision, and float32, of which the loop on a GPU has an error of its own.
ERROR = {torch.float16: 5e-4, torch.float32: 1e-6 if DEVICE == "cpu" else 2e-6}


def described_of(config, data):
    if config.dense == "none":
        return {}
    return {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("padded", "texts"), [(64, 17), (80, 1), (80, 17), (96, 1), (112, 17), (144, 1), (208, 17), (240, 3), (256, 3)]
)
def test_norms_with_d_in_shared_memory(padded, texts):
    torch.manual_seed(padded)
    merged, images = 5, 2
    left = (torch.rand(texts, images, padded, device=DEVICE) < 0.5).half()
    left[-1, 1] = 0.0
    vectors = torch.randn(images, padded, 7, device=DEVICE)
    # The last places are padding; a prefix token may stand there in D.
    count = padded - texts % 16
    vectors[:, count:] = 0.0
    gram = vectors @ vectors.transpose(1, 2)
    weights = torch.rand(images, padded, merged, device=DEVICE)
    whole = (weights[:, :, :, None] * gram[:, :, None, :] * weights.transpose(1, 2)[:, None]).half()
    table = launches.doubled(whole.transpose(1, 2).flatten(0, 1).float(), launches.HELD_STEP)
    table = table.view(images, merged, padded, padded).transpose(1, 2).half().contiguous()
    wanted = torch.einsum("tbi,biqj,tbj->bqt", left.double(), whole.double(), left.double())
    # The table is symmetric only up to rounding.
    scale = float(wanted.abs().max())
    out = torch.full((images, merged + 2, texts), float("nan"), device=DEVICE)
    launches.held_norms(left, table, out, WIDE, count=count, first=1)
    assert out[:, 0].isnan().all() and out[:, -1].isnan().all()
    assert (out[:, 1:-1] - wanted).abs().max() <= 1e-3 * scale
    launches.held_norms(left, table, out, WIDE, count=count, first=1, inverse=True)
    inverse = torch.where(wanted > 1e-36, wanted.clamp_min(1e-36).rsqrt(), 0.0)
    sure = (wanted == 0) | (wanted > 0.05 * scale)
    assert ((out[:, 1:-1] / inverse.clamp_min(1e-30) - 1).abs() <= 2e-2)[sure & (inverse > 0)].all()
    assert not out[1, 1:-1, -1].any(), "a merged patch of length zero has no inverse norm"
    single = torch.full((images, 1, texts), float("nan"), device=DEVICE)
    launches.held_norms(left, table[:, :, 2:3].contiguous(), single, WIDE, count=count)
    assert (single[:, 0] - wanted[:, 2]).abs().max() <= 1e-3 * scale


SHAPES = {
    "49, in 64": config_of(49),
    "60 and 2, odd": config_of(60, 2, embed_size=20),
    "61 and 2": config_of(61, 2),
    "no prefix": config_of(77, 0),
    "leaky": config_of(100, 2, similarity="leaky"),
    "mlp": config_of(70, alignment="topk"),
    "branch": SlimmingConfig.open_source(num_patches=66, embed_size=32, aggr_ratio=0.1),
    "tokens": config_of(50, dense="tokens"),
    "196": config_of(196),
    "256": config_of(256),
    "below 64": config_of(40),
    "above 256": config_of(270),
}


def scored(name, dtype):
    """The fused scores, the network's own in float64, and the scorer, for some texts of several lengths."""
    config = SHAPES[name]
    net, data = on_device(make_net(config), make_inputs(config, images=2, texts=6, words=7))
    described = described_of(config, data)
    block = SortedTexts(data["words"], data["lengths"], dtype=torch.float32).block(0, 6)
    with torch.no_grad():
        scorer = fused.scorer(net, dtype, WIDE)(net.encode_images(data["images"], **described))
        got = scorer.score(block)
    return got, float64_scores(net, data, **described)[:, block.index], scorer


@pytest.mark.parametrize("name", SHAPES)
def test_half_precision_of_every_shape(name):
    got, exact, scorer = scored(name, torch.float16)
    assert scorer.slots == (name not in ("mlp", "256", "above 256"))
    assert scorer.held == (name not in ("below 64", "above 256"))
    assert (got - exact).abs().max() <= ERROR[torch.float16]


@pytest.mark.parametrize("name", ["61 and 2", "no prefix", "mlp", "branch", "tokens", "below 64", "above 256"])
def test_float32_of_every_shape(name):
    got, exact, scorer = scored(name, torch.float32)
    assert not scorer.slots and scorer.held == (name not in ("below 64", "above 256"))
    assert (got - exact).abs().max() <= ERROR[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_large_kernels_and_those_for_other_shapes_agree(dtype, monkeypatch):
    config = config_of(70, 2)
    net, data = on_device(make_net(config), make_inputs(config, images=2, texts=5))
    new = fused_scores(net, data, WIDE, dtype)
    # As on a GPU with little shared memory.
    monkeypatch.setattr(launches, "_large_memory", lambda device: False)
    old = fused_scores(net, data, WIDE, dtype)
    assert (new - old).abs().max() <= ERROR[dtype]


@pytest.mark.parametrize(
    ("words", "lengths", "similarity"),
    [
        *[(1, "equal", "cosine"), (8, "ragged", "cosine"), (9, "equal", "cosine"), (9, "one text", "cosine")],
        *[(16, "equal", "cosine"), (17, "equal", "cosine"), (20, "ragged", "leaky"), (24, "one text", "cosine")],
        *[(25, "ragged", "cosine"), (32, "equal", "leaky"), (70, "ragged", "cosine")],
    ],
)
def test_slots_of_every_length(words, lengths, similarity):
    config = config_of(30, 2, aggr_ratio=0.3, similarity=similarity)
    count = 1 if lengths == "one text" else 11
    net, data = on_device(make_net(config), make_inputs(config, images=2, texts=count, words=words))
    if lengths == "equal":
        data["lengths"][:] = words
    block = SortedTexts(data["words"], data["lengths"], dtype=torch.float32).block(0, count)
    with torch.no_grad():
        scorer = fused.scorer(net, torch.float16, SHORT)(net.encode_images(data["images"]))
        got = torch.full((2, count), float("nan"), device=DEVICE)
        got[:, block.index] = scorer.score(block)
        assert scorer.slots
    exact = float64_scores(net, data)
    assert (got - exact).abs().max() <= ERROR[torch.float16]


@pytest.mark.parametrize(
    ("dtype", "dense", "limit", "chunk"),
    [
        (torch.float16, "none", 3, 7),
        (torch.float16, "tokens", 3, 100),
        (torch.float16, "none", 4, 0),
        (torch.float32, "none", 3, 7),
        (torch.float32, "tokens", 100, 0),
    ],
)
def test_chunks_give_the_scores_of_single_blocks(dtype, dense, limit, chunk):
    config = config_of(66, dense=dense)
    net, data = on_device(make_net(config), make_inputs(config, images=1, texts=8))
    texts = SortedTexts(data["words"], data["lengths"], dtype=torch.float32, products=dtype)
    texts.keeps_blocks = True
    out = torch.full((1, 8), float("nan"), device=DEVICE)
    with torch.no_grad():
        scorer = fused.scorer(net, dtype, WIDE)(net.encode_images(data["images"], **described_of(config, data)))
        scorer.fill(texts, limit, chunk, out)
        for start, stop in texts.runs(limit):
            torch.testing.assert_close(out[:, start:stop], scorer.score(texts.block(start, stop)), atol=2e-6, rtol=0)


def test_joined_blocks_hold_what_the_selection_needs_and_are_made_once():
    config = config_of(12)
    data = make_inputs(config, texts=9)
    texts = SortedTexts(data["words"], data["lengths"], dtype=torch.float32)
    runs = texts.runs(4)
    blocks = [texts.block(*run) for run in runs]
    assert joined(texts, runs[:1], blocks[:1]) is blocks[0]
    one = joined(texts, runs, blocks)
    assert torch.equal(one.mean, torch.cat([block.mean for block in blocks])) and one.count == 9
    assert torch.equal(one.index, texts.block(0, 9).index)
    assert joined(texts, runs, blocks) is not one, "nothing is kept unless blocks are"
    texts.keeps_blocks = True
    kept = joined(texts, runs, blocks)
    assert joined(texts, runs, blocks) is kept


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 40))
def test_chunks_are_all_runs_in_order_and_as_long_as_allowed(sizes, most):
    edges = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    runs = list(pairwise(edges))
    made = list(chunks(runs, most))
    assert [run for chunk in made for run in chunk] == runs
    for chunk, following in zip(made, [*made[1:], []], strict=True):
        assert len(chunk) == 1 or chunk[-1][1] - chunk[0][0] <= most
        assert not following or following[0][1] - chunk[0][0] > most


def slow_cut(ordered, limit, least):
    """`cut_by_length`, text by text."""
    runs, start = [], 0
    for position, length in enumerate(ordered):
        size = position - start
        longer = 1.13 if size < 512 else 1.0
        wasteful = size >= min(least, limit) and length > longer * ordered[start]
        if size and (size >= limit or wasteful):
            runs.append((start, position))
            start = position
    return runs + ([(start, len(ordered))] if len(ordered) > start else [])


@given(
    st.lists(st.integers(1, 40), max_size=12),
    st.lists(st.sampled_from([1, 3, 60, 300, 511, 512, 513, 700]), min_size=12, max_size=12),
    st.sampled_from([1, 2, 7, 63, 64, 100, 512, 600, 5000]),
    st.sampled_from([0, 1, 64, 600]),
)
def test_texts_are_cut_as_text_by_text(lengths, repeats, limit, least):
    ordered = sorted(length for length, count in zip(lengths, repeats, strict=False) for _ in range(count))
    assert cut_by_length(ordered, limit, least) == slow_cut(ordered, limit, least)


def shapes_and_texts(dtype, texts=4000):
    config = SlimmingConfig.default(dense="none")
    made = SortedTexts(torch.zeros(1, 23, 512).expand(texts, -1, -1), None, dtype=torch.float32, products=dtype)
    return shapes_of(config, 196, made, None), made.count


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("mebibytes", [80, 100, 200, 400, 1500, 6000])
def test_the_plan_counts_the_chunk(dtype, mebibytes):
    shapes, texts = shapes_and_texts(dtype, 25000)
    memory = mebibytes * 2**20
    plan = make_plan(shapes, memory, 5000, texts, dtype=dtype, cuda=True, fused=True, kept=True)
    costs = plan.costs
    used = costs.shared + plan.images * costs.image
    used += plan.images * (plan.chunk * costs.decided + plan.texts * (costs.pair - costs.decided))
    assert used <= memory and 1 <= plan.texts <= plan.chunk <= texts
    if mebibytes == 6000:
        assert plan.images == 64 and 6500 <= plan.chunk <= 7000 and plan.texts > 1000
    assert make_plan(shapes, memory, 5000, texts, dtype=dtype, cuda=True, fused=True, kept=False).chunk == 0


def test_halving_takes_the_chunk_too():
    plan = Plan(4, 1000, mock.Mock(), 6500)
    seen = []
    while plan.halve():
        seen.append((plan.texts, plan.chunk))
    assert seen[0] == (500, 3250) and plan.texts == plan.images == 1 and plan.chunk < 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_chunk_keeps_its_budget(dtype, monkeypatch):
    from seps.scoring.gpu import held_kernels, kernels

    for module, names in (
        (kernels, ("select", "table", "norms", "align")),
        (held_kernels, ("held_norms", "slot_align")),
    ):
        for name in names:
            monkeypatch.setattr(module, f"{name}_kernel", Nothing())
    config = config_of(196, embed_size=64)
    net, data = make_net(config), make_inputs(config, images=4, texts=600, words=10)
    texts = SortedTexts(data["words"], [5] * 300 + [10] * 300, dtype=torch.float32, products=dtype)
    texts.keeps_blocks = True
    costs = block_costs(shapes_of(config, 196, texts, None), dtype, cuda=True, fused=True)
    plan = Plan(4, 50, costs, 300)
    budget = costs.shared + 4 * costs.image + 4 * (300 * costs.decided + 50 * (costs.pair - costs.decided))
    budget += texts.unit_nbytes(fused=True) * (1 if DEVICE == "cuda" else 2)
    engine = Engine(net, texts, plan, dtype, fused.scorer(net, dtype))
    with torch.no_grad(), Live() as live:
        waiting = [engine.ready(texts.encode(net, ImageBlock(data["images"]))) for _ in range(2)]
        engine.rows(waiting[0])
    assert budget / 4 < live.most <= budget, (live.most, budget)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_running_out_of_memory_halves_the_chunk_and_changes_no_score(dtype, monkeypatch):
    config = config_of(66, sparse_ratio=0.5)
    net, data = on_device(make_net(config), make_inputs(config, images=2, texts=20, words=5))
    texts = SortedTexts(data["words"], data["lengths"], dtype=torch.float32, products=dtype)
    costs = block_costs(shapes_of(config, 66, texts, None), dtype, cuda=True, fused=True)
    engine = Engine(net, texts, Plan(2, 20, costs, 20), dtype, fused.scorer(net, dtype, WIDE))
    whole, sizes = fused.TritonScorer.decide, []

    def decide(self, block):
        sizes.append(block.count)
        if block.count > 10:
            raise torch.OutOfMemoryError("as if")
        return whole(self, block)

    monkeypatch.setattr(fused.TritonScorer, "decide", decide)
    monkeypatch.setattr("seps.scoring.blocks.few_texts", lambda *shape: False)
    with torch.no_grad():
        got = engine.rows(engine.ready(texts.encode(net, ImageBlock(data["images"]))))
    assert max(sizes) == 20 and sizes[-1] <= 10
    assert (got - float64_scores(net, data)).abs().max() <= ERROR[dtype]


def test_encoding_images_makes_nothing_on_another_device(monkeypatch):
    config = SlimmingConfig.default(**SMALL)
    seen = set()

    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            seen.update(one.device.type for one in [result] if isinstance(one, torch.Tensor))
            return result

    # A device without autocast, which stands for a GPU.
    monkeypatch.setattr("seps.method.precision.without_autocast", lambda tensor: nullcontext())
    net, images = make_net(config).to("meta"), torch.empty(2, 13, 16, device="meta")
    with torch.no_grad(), values_unchecked(), Devices():
        net.encode_images(images)
    assert seen == {"meta"}, "a copy from the host makes it wait for the GPU"


def test_many_tokens_and_the_shapes_of_the_slots():
    device = torch.device("cpu")
    assert launches.fits_slots(255, 1, 62, device) and launches.fits_slots(12, 0, 3, device)
    assert not launches.fits_slots(255, 2, 40, device) and not launches.fits_slots(100, 1, 63, device)
    assert [launches.fits_held(padded, device) for padded in (48, 64, 256, 272)] == [False, True, True, False]


def test_default_sizes_are_those_that_were_measured():
    sizes = KernelSizes()
    assert (sizes.select_rows, sizes.held_rows, sizes.held_warps, sizes.held_stages) == (1, 256, 16, 3)
    assert (sizes.slot_rows, sizes.slot_warps, sizes.slot_stages, sizes.slot_tiles) == (64, 4, 3, 16)
