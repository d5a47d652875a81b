"""A changed network: every path agrees with `net.forward`, whatever step is overridden, swapped, patched or hooked.

Each case changes one step. Nothing may be scored as the network of the library.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from kernel_cases import DEVICE, fused_scores, on_device
from messages import naming
from scoring_cases import SMALL, make_inputs, make_net
from seps.method.checks import InputError
from seps.method.config import Branch, SlimmingConfig
from seps.method.network import PatchSlimming
from seps.method.parts import Merger, Pooling, Selector
from seps.method.published import CrossSparseAggrNet
from seps.method.select import extra_weights, hard_topk
from seps.retrieval.explain.shares import shares
from seps.scoring import choose_backend, score_matrix, score_with_gradient
from seps.scoring.gpu.fused import why_not_triton

PLAIN = SlimmingConfig.default(**SMALL)
TOPK = SlimmingConfig.default(alignment="topk", **SMALL)


def worst_first(scores, ratio, valid=None):
    return hard_topk(-scores, ratio, valid)


def worst_kept(one, ratio, valid):
    keep = worst_first(one.scores, ratio, valid)
    return replace(one, keep=keep, extra=extra_weights(one.scores, keep, valid))


class OtherSelect(PatchSlimming):
    def select(self, images, texts, places=None):
        found = super().select(images, texts, places)
        return tuple(worst_kept(one, self.config.sparse_ratio, images.valid) for one in found)


class OtherScores(PatchSlimming):
    def patch_scores(self, images, texts, place=0):
        return -super().patch_scores(images, texts, place)


class OtherTokens(PatchSlimming):
    def tokens(self, images, kept):
        return super().tokens(images, kept).flip(-1)


class OtherImages(PatchSlimming):
    def encode_images(self, images, **extras):
        return super().encode_images(images.flip(-1), **extras)


class OtherScore(PatchSlimming):
    def score(self, images, texts, maxima=None):
        found = super().score(images, texts, maxima)
        found.similarity = 2 * found.similarity
        return found


class OtherPooled(PatchSlimming):
    def pooled_score(self, image_BC, means):
        return super().pooled_score(image_BC, means).square()


class OtherPooling(PatchSlimming):
    def pool(self, rows, columns, word_mask=None, token_mask=None):
        return 2 * super().pool(rows, columns, word_mask, token_mask)


class OtherTrust(PatchSlimming):
    @property
    def description_weight(self):
        return torch.tensor(0.9)


class OtherForward(PatchSlimming):
    def forward(self, images, words, lengths=None, **extras):
        found = super().forward(images, words, lengths, **extras)
        return found * 3 if isinstance(found, torch.Tensor) else (found[0] * 3, found[1])


class OtherSparse(Selector):
    def forward(self, scores, valid=None, full_score=1.0):
        return worst_first(scores, self.sparse_ratio, valid)


class OtherPool(Pooling):
    def pool(self, best, mask=None):
        return 2 * super().pool(best, mask)


class OtherDecide(Selector):
    def decide(self, scores, valid=None, full_score=1.0):
        return worst_first(scores, self.sparse_ratio, valid)


class OtherMerge(Merger):
    def logits(self, x):
        return -super().logits(x)


class OtherConfig(SlimmingConfig):
    def _branches(self):
        (first, *rest) = super()._branches()
        return (Branch(first.name, 0.0, {**first.guides, "image": -3.0}), *rest)


def subclass(kind):
    def make():
        net = make_net(PLAIN)
        net.__class__ = kind
        return net

    return make


def changed(change, config=PLAIN):
    def make():
        net = make_net(config)
        change(net)
        return net

    return make


def swap(name, kind):
    def change(net):
        part = copy.deepcopy(getattr(net, name))
        part.__class__ = kind
        setattr(net, name, part)

    return change


def patched_select(net):
    honest = net.select
    net.select = lambda *arguments: tuple(worst_kept(one, 0.5, None) for one in honest(*arguments))


def patched_pool(net):
    honest = net.hrpa.pool
    net.hrpa.pool = lambda *arguments: 2 * honest(*arguments)


def patched_sparse(net):
    net.sparse_net_cap.forward = lambda scores, valid=None, full=1.0: worst_first(scores, 0.5, valid)


def patched_decide(net):
    net.sparse_net_cap.decide = lambda scores, valid=None, full=1.0: worst_first(scores, 0.5, valid)


def patched_forward(net):
    honest = net.forward

    def forward(*arguments, **extras):
        found = honest(*arguments, **extras)
        return found + 1 if isinstance(found, torch.Tensor) else (found[0] + 1, found[1])

    net.forward = forward


def other_ratio(net):
    net.sparse_net_cap.sparse_ratio = 0.25


def new_decision(net):
    object.__setattr__(net.config, "decision", "worst")
    swap("sparse_net_cap", OtherSparse)(net)


def one_direction(net):
    net.hrpa.bidirectional = False


def other_config(net):
    net.config = OtherConfig(**asdict(PLAIN))


def mlp_layers(net):
    net.hrpa.relevance_mlp[1] = nn.Tanh()


def mlp_hook(net):
    net.hrpa.relevance_mlp.register_forward_hook(lambda _, __, out: out * 5)


def predictor(net):
    net.sparse_net_cap.score_predictor = nn.Sequential(nn.Linear(16, 1), nn.Tanh())


def merge_layers(net):
    net.aggr_net.weight[2] = nn.Tanh()


def hook(net):
    net.register_forward_hook(lambda _, __, out: out * 2 if isinstance(out, torch.Tensor) else (out[0] * 2, out[1]))


def doubled(name):
    """A hook on a part, which its `forward` must fire."""

    def twice(_, __, out):
        return tuple(2 * one for one in out) if isinstance(out, tuple) else 2 * out

    return lambda net: getattr(net, name).register_forward_hook(twice)


def flipped(net):
    net.sparse_net_cap.register_forward_hook(lambda _, __, keep: keep.flip(-1))


IDEAS = {
    **{f"subclass: {kind.__name__}": subclass(kind) for kind in (
        OtherSelect, OtherScores, OtherTokens, OtherImages, OtherScore, OtherPooled, OtherPooling, OtherTrust,
        OtherForward,
    )},
    "swapped: sparse_net_cap": changed(swap("sparse_net_cap", OtherSparse)),
    "swapped: sparse_net_cap, decide": changed(swap("sparse_net_cap", OtherDecide)),
    "swapped: hrpa, pool": changed(swap("hrpa", OtherPool)),
    "swapped: aggr_net": changed(swap("aggr_net", OtherMerge)),
    "patched: select": changed(patched_select),
    "patched: hrpa.pool": changed(patched_pool),
    "patched: sparse_net_cap.forward": changed(patched_sparse),
    "patched: sparse_net_cap.decide": changed(patched_decide),
    "patched: forward": changed(patched_forward),
    "setting: another ratio in a part": changed(other_ratio),
    "setting: a new decision": lambda: changed(new_decision, SlimmingConfig.default(**SMALL))(),
    "setting: one direction": changed(one_direction),
    "setting: a configuration class": changed(other_config),
    "layers: relevance MLP": changed(mlp_layers, TOPK),
    "layers: predictor": changed(predictor),
    "layers: aggregation": changed(merge_layers),
    "hook: on the network": changed(hook),
    "hook: on the MLP": changed(mlp_hook, TOPK),
    "hook: on the pooling": changed(doubled("hrpa")),
    "hook: on the aggregation": changed(doubled("aggr_net")),
    "hook: on the selection": changed(flipped),
}  # fmt: skip
BY_FORWARD = {"subclass: OtherForward", "patched: forward", "hook: on the network"}
SLOW = {"subclass: OtherTokens", *BY_FORWARD}
"""Changes with which all pairs are scored by the reference or by `forward`; with all others they are scored fast."""


@pytest.fixture(params=IDEAS)
def idea(request):
    net = IDEAS[request.param]()
    data = make_inputs(net.config, texts=9)
    described = {"dense": data["dense"], "dense_lengths": torch.tensor([3, 5, 0, 1])}
    with torch.no_grad():
        truth = net(data["images"], data["words"], data["lengths"], **described)
    old = make_net(TOPK if net.config.alignment == "topk" else PLAIN)
    plain = old(data["images"], data["words"], data["lengths"], **described).detach()
    assert (truth - plain).abs().max() > 1e-3, "the change changes no score: the test could not fail"
    return request.param, net, data, described, truth


def scored(call):
    """The result, and the warnings that it was scored slowly, each with its reason."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    slow = [str(one.message) for one in caught if "slow" in str(one.message)]
    assert not any("None" in message for message in slow)
    return result, slow


@pytest.mark.parametrize("backend", ["auto", "factored", "reference"])
def test_score_matrix(idea, backend):
    name, net, data, described, truth = idea
    call = {"dense": described["dense"], "dense_lengths": described["dense_lengths"], "backend": backend}
    found, said = scored(lambda: score_matrix(net, data["images"], data["words"], data["lengths"], **call))
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=0)
    assert bool(said) == (backend != "reference" and name in SLOW)
    assert len(said) <= 1
    assert (choose_backend(net, "cpu").backend == "reference") == (name in SLOW)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_score_with_gradient(idea, mode):
    name, net, data, described, truth = idea
    if mode == "train":
        net.train()
    images = data["images"].requires_grad_()
    found, said = scored(lambda: score_with_gradient(net, images, data["words"], data["lengths"], **described))
    torch.testing.assert_close(found.similarity.detach(), truth, atol=1e-5, rtol=0)
    assert bool(said) == (name in SLOW)
    (ours,) = torch.autograd.grad(found.similarity.sum(), images)
    expected = net(images, data["words"], data["lengths"], **described)
    (theirs,) = torch.autograd.grad((expected if mode == "eval" else expected[0]).sum(), images)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_kernels_refuse_with_a_reason(idea):
    name, net, data, described, truth = idea
    net, data = on_device(net, data)
    described = {key: tensor.to(DEVICE) for key, tensor in described.items()}
    if why_not_triton(net) is None:
        torch.testing.assert_close(fused_scores(net, data, **described), truth.to(DEVICE), atol=2e-3, rtol=0)
        return
    with pytest.raises(InputError, match="score"):
        fused_scores(net, data, **described)
    choice = choose_backend(net, "cuda", precision="half")
    assert choice.backend == ("reference" if name in SLOW else "factored")
    with pytest.raises(InputError, match=naming("backend='triton'")):
        choose_backend(net, "cuda", precision="half", backend="triton")


def test_explanations_agree_or_refuse(idea):
    _, net, data, _, truth = idea
    with torch.no_grad():
        side = net.encode_images(data["images"][:1], dense=data["dense"][:1], dense_lengths=[3])
    words = data["words"][0, : data["lengths"][0]]
    try:
        found = shares(net, side, words)
    except InputError as error:
        assert "apart" in str(error)
    else:
        assert found.score == pytest.approx(float(truth[0, 0]), abs=1e-4)


def test_most_explanations_agree():
    """A refusal of everything would pass the test above."""
    agreed = []
    for name, make in IDEAS.items():
        net = make()
        data = make_inputs(net.config)
        side = net.encode_images(data["images"][:1])
        try:
            agreed.append((name, shares(net, side, data["words"][0])))
        except InputError:
            continue
    names = {name for name, _ in agreed}
    assert {"subclass: OtherSelect", "patched: select", "hook: on the selection", "layers: predictor"} <= names
    assert not BY_FORWARD & names


def test_what_is_scored_fast():
    nets = [CrossSparseAggrNet(16, 12, use_paper_version=p, use_dual_aggr=d) for p in (0, 1) for d in (0, 1)]
    for config in (PLAIN, TOPK, SlimmingConfig.paper(**SMALL), SlimmingConfig.open_source(**SMALL)):
        nets += [make_net(replace(config, decision=name)) for name in ("topk", "gumbel", "binary")]
    for net in nets:
        assert (
            choose_backend(net, "cpu").backend
            == choose_backend(copy.deepcopy(net).train(), "cpu").backend
            == "factored"
        )


def test_a_subclass_of_the_compatible_network():
    class Mine(CrossSparseAggrNet):
        def select(self, images, texts, places=None):
            found = super().select(images, texts, places)
            return tuple(worst_kept(one, self.config.sparse_ratio, images.valid) for one in found)

    torch.manual_seed(0)
    net = Mine(16, 12, aggr_ratio=0.5, has_cls=True).eval()
    data = make_inputs(net.config)
    pair = {"paired_dense": data["paired"], "paired_dense_lengths": data["paired_lengths"]}
    call = (data["images"], data["words"], data["lengths"])
    found, said = scored(lambda: score_matrix(net, *call, **pair))
    assert not said
    torch.testing.assert_close(found, net(*call, data["paired"], data["paired_lengths"]), atol=1e-5, rtol=0)
    again, _ = scored(lambda: score_with_gradient(
        net, *call, paired_dense=data["paired"], paired_dense_lengths=data["paired_lengths"], want_masks=True
    ))  # fmt: skip
    torch.testing.assert_close(again.similarity, found, atol=1e-5, rtol=0)
    assert [tuple(mask.shape) for mask in again.masks] == [(7, 4, 12)] * 2


def test_a_forward_of_its_own_takes_features_alone():
    net = subclass(OtherForward)()
    data = make_inputs(PLAIN)
    with torch.no_grad():
        side = net.encode_images(data["images"])
    for call in ({"img_embs": side}, {"img_embs": data["images"], "paired_dense": data["paired"]}):
        with pytest.raises(InputError, match="forward"), pytest.warns(UserWarning, match="slow"):
            score_matrix(net, cap_embs=data["words"], **call)
    with pytest.raises(InputError, match="forward"), pytest.warns(UserWarning, match="slow"):
        score_with_gradient(net, data["images"], data["words"], paired_dense=data["paired"])
    net.forward = lambda images, words, lengths: torch.zeros(len(images), len(words))
    with pytest.raises(InputError, match=naming("['dense']")), pytest.warns(UserWarning, match="slow"):
        score_matrix(net, data["images"], data["words"], dense=data["dense"])
    with pytest.raises(InputError, match="want_masks"), pytest.warns(UserWarning, match="slow"):
        score_with_gradient(net, data["images"], data["words"], want_masks=True)
