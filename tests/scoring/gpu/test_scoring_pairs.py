"""Float32 as pairs of half-precision numbers: the products, the fused kernels with them, and what they cost."""

from __future__ import annotations

import copy
import weakref
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_cases import CASES, DEVICE, TINY, fused_scores, on_device
from scoring_cases import SMALL, make_inputs, make_net
from seps.method.config import SlimmingConfig
from seps.method.precision import strict_float32
from seps.method.select import hard_topk
from seps.scoring import choose_backend
from seps.scoring.blocks import SCORING_MEMORY, Engine, Plan, block_costs, budget_of, score_rows, scoring_memory
from seps.scoring.gpu import fused
from seps.scoring.gpu import half_pairs as pairs
from seps.scoring.inputs import ImageBlock, SortedTexts, one_ahead, shapes_of

GIB = 2**30


@torch.no_grad()
def float64_scores(net, data, **described):
    """The network's own loop with every number in float64."""
    wide = {name: value.double() if value.is_floating_point() else value for name, value in described.items()}
    with (
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch, "float32", torch.float64),
    ):
        return copy.deepcopy(net).double()(data["images"].double(), data["words"].double(), data["lengths"], **wide)


def unit(*shape, common=0.0):
    """Random unit vectors, with a common direction."""
    return torch.nn.functional.normalize(torch.randn(*shape) + common * torch.randn(shape[-1]), dim=-1)


def test_a_number_and_its_pair_are_equal_to_22_bits():
    values = torch.randn(2000) * torch.logspace(-3, 2, 2000)
    high, low = pairs.split(values)
    back = high.double() + low.double() / pairs.LOW
    # Below 2^-14 half precision has a fixed step.
    assert ((back - values.double()).abs() <= 2**-22 * values.double().abs().clamp_min(2**-14)).all()
    assert not torch.equal(high.double(), values.double())


@pytest.mark.parametrize("common", [0.0, 3.0])
def test_products_of_pairs_are_as_exact_as_float32(common):
    left, right = unit(60, 512, common=common), unit(300, 512, common=common)
    exact = left.double() @ right.double().T
    got = pairs.products(pairs.as_left(left), pairs.as_right(right)) * pairs.UNSCALE
    strict = left @ right.T
    assert (got - exact).abs().max() <= max(3e-7, 2 * float((strict - exact).abs().max()))
    # One half-precision product would be a thousand times worse.
    assert (left.half().double() @ right.half().double().T - exact).abs().max() > 1e-5


@pytest.mark.parametrize("texts", [1, 2, 3, 17, 64])
def test_equal_patches_get_equal_products(texts):
    right = unit(7, 64).repeat(29, 1)
    got = pairs.products(pairs.as_left(unit(texts, 64)), pairs.as_right(right)).view(texts, 29, 7)
    assert torch.equal(got, got[:, :1].expand_as(got))


@pytest.mark.parametrize("common", [0.0, 2.0])
def test_kept_patches_flip_no_more_often_than_in_strict_float32(common):
    patches, means = unit(40, 196, 128, common=common), unit(250, 128, common=common)
    exact = hard_topk(torch.einsum("tc,bnc->tbn", means.double(), patches.double()), 0.5)
    with strict_float32():
        strict = hard_topk((means @ patches.flatten(0, 1).T).view(250, 40, 196), 0.5)
    cosines = pairs.products(pairs.as_left(means), pairs.as_right(patches).flatten(0, 1)) * pairs.UNSCALE
    ours = hard_topk(cosines.view(250, 40, 196), 0.5)
    flips, allowed = ((kept != exact).any(-1).sum().item() for kept in (ours, strict))
    assert flips <= 2 * max(allowed, 2), (flips, allowed)


@pytest.mark.parametrize("name", CASES)
def test_float32_by_pairs_matches_the_network_in_float64(name):
    config = CASES[name]
    net, data = on_device(make_net(config), make_inputs(config, images=2, texts=5))
    described = {} if config.dense == "none" else {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    gap = fused_scores(net, data, dtype=torch.float32, **described).double() - float64_scores(net, data, **described)
    assert gap.abs().max() <= 2e-6


@pytest.mark.parametrize("learned", [False, True])
def test_ties_of_the_selection_by_pairs_are_those_of_the_network(learned):
    config = SlimmingConfig(dense="none", scoring="learned" if learned else "sum", **SMALL)
    net, data = on_device(make_net(config), make_inputs(config, images=3, texts=6))
    data["images"][0, 1:] = data["images"][0, 1]
    data["images"][1, 7:] = data["images"][1, 1:7]
    block = SortedTexts(data["words"], data["lengths"], dtype=torch.float32).block(0, 6)
    with torch.no_grad():
        side = net.encode_images(data["images"])
        keep, extra = fused.scorer(net, torch.float32, TINY)(side).select(block)
        assert (keep.dtype, extra.dtype) == (torch.float16, torch.float32)
        for t in range(6):
            raw = net.patch_scores(side, block.part(t, t + 1))[0]
            assert torch.equal(keep[t, :, :12].float(), hard_topk(raw, config.sparse_ratio))


def test_the_selection_kernel_ends_early_and_keeps_the_same():
    from seps.scoring.gpu import kernels

    count, rows = 24, torch.randn(9, 24)
    rows[0], rows[1] = 0.0, -rows[1].abs()
    rows[2] = torch.tensor([1e-30, -1e-30, 0.0, -0.0]).repeat(6)
    rows[3] = (rows[3] * 2).round()
    rows[4] = 1.0 + torch.arange(24.0).flip(0) * 2**-23
    rows[5] *= torch.logspace(-38, 38, 24)
    rows = rows.to(DEVICE)
    for kept in (1, 11, 24):
        keep, extra = (torch.empty(9, 1, 32, device=DEVICE) for _ in range(2))
        kernels.select_kernel[(3, 1)](
            rows, torch.zeros(1, count, device=DEVICE), keep, extra, 1.0, 1.0, kept, 9, 1, count, 32,
            PREFIX=0, NP=32, ROWS=4, LEARNED=False, num_warps=1,
        )  # fmt: skip
        assert torch.equal(keep[:, 0, :count], hard_topk(rows, kept / count))
        assert not keep[..., count:].any()


def test_images_out_of_the_range_of_half_precision_take_the_direct_form():
    config = CASES["caption only"]
    net, data = on_device(make_net(config, spread=6.0), make_inputs(config, images=4, texts=9))
    texts = SortedTexts(data["words"], data["lengths"], dtype=torch.float32)
    make = fused.scorer(net, torch.float32, TINY)
    scored = []

    def spy(side):
        scored.append(side.patches.shape[0])
        return make(side)

    with torch.no_grad():
        rows = score_rows(net, ImageBlock(data["images"]), texts, 12, torch.float32, 2**26, spy)
        got = torch.cat(list(rows))
        plain = net(data["images"], data["words"], data["lengths"])
        assert sum(scored) < 4, "every image was within the range: the case tests nothing"
    torch.testing.assert_close(got, plain, atol=2e-6, rtol=0)


def test_float32_on_a_gpu_goes_to_the_kernels():
    net = make_net(SlimmingConfig.default(**SMALL))
    for precision in ("float32", None):
        choice = choose_backend(net, "cuda", precision=precision, patches=196)
        assert choice.backend == "triton" and "half" in choice.reason
    assert choose_backend(net, "cuda", precision="half").reason.startswith("half precision")
    assert choose_backend(net, "cuda", backend="factored").backend == "factored"
    assert choose_backend(net, "cpu").backend == "factored"


def test_the_budget_is_a_coarse_share_of_the_free_memory():
    assert [budget_of(int(free * GIB)) for free in (140, 12, 11.9, 3, 2.9, 0)] == [
        6 * GIB,
        6 * GIB,
        3 * GIB // 2,
        3 * GIB // 2,
        SCORING_MEMORY,
        SCORING_MEMORY,
    ]
    assert scoring_memory("cpu") == SCORING_MEMORY == 512 * 2**20
    assert scoring_memory("cpu", 7) == 7


def test_the_next_images_are_made_before_these_are_scored():
    told = []

    def make(number):
        told.append(f"make {number}")
        return number

    for number in one_ahead(map(make, range(3))):
        told.append(f"score {number}")
    assert told == ["make 0", "make 1", "score 0", "make 2", "score 1", "score 2"]
    assert list(one_ahead([])) == [] and list(one_ahead([5])) == [5]


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that live, of those made within it."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                storage = tensor.untyped_storage()
                if storage not in self.seen:
                    self.seen[storage] = size = storage.nbytes()
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, size)
        return result

    def _gone(self, size):
        self.now -= size


class Nothing:
    """A kernel that does nothing: what a block allocates does not depend on it."""

    def __getitem__(self, grid):
        return lambda *arguments, **options: None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("described", [False, True])
def test_a_block_of_the_kernels_keeps_its_budget(dtype, described, monkeypatch):
    from seps.scoring.gpu import held_kernels, kernels

    for name in ("select", "table", "norms", "align"):
        monkeypatch.setattr(kernels, f"{name}_kernel", Nothing())
    for name in ("held_norms", "slot_align"):
        monkeypatch.setattr(held_kernels, f"{name}_kernel", Nothing())
    config = SlimmingConfig.default(dense="tokens" if described else "none", embed_size=256)
    net, data = make_net(config), make_inputs(config, images=4, texts=128, words=23, dense=40)
    texts = SortedTexts(data["words"], [23] * 128, dtype=torch.float32, products=dtype)
    costs = block_costs(shapes_of(config, 196, texts, data["dense"]), dtype, cuda=True, fused=True)
    budget = costs.shared + 4 * costs.image + 128 * (costs.text + 4 * costs.pair)
    images = ImageBlock(data["images"], *((data["dense"], data["dense_lengths"]) if described else ()))
    engine = Engine(net, texts, Plan(4, 128, costs), dtype, fused.scorer(net, dtype))
    with torch.no_grad(), Live() as live:
        # As on a GPU: the next images are encoded already.
        waiting = [engine.ready(texts.encode(net, images)) for _ in range(2)]
        engine.rows(waiting[0])
    assert budget / 4 < live.most <= budget, (live.most, budget)
