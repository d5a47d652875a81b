"""Every shape comment of `method` is compared with the tensor it names while the modules run.

The grammar of the comments is at the head of `tests/shape_comments.py`. The calls below reach all presets, decisions,
masks and losses; all sizes in them differ, so that a wrong letter is a wrong number.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import seps
from seps import registry
from seps.method import maxima
from seps.method.encoded import Texts
from seps.method.losses import identity, ratio, triplet
from seps.method.select import hard_topk, keep_best
from seps.modules.network import CrossSparseAggrNet
from seps.retrieval.explain.shares import shares
from shape_comments import Watch
from shape_source import Source

PACKAGE = Path(seps.__file__).parent
FILES = [*sorted((PACKAGE / "method").rglob("*.py")), PACKAGE / "modules/network.py"]
SHARE = 0.95
B, T, P, N, M, L, C = 3, 4, 2, 20, 5, 7, 16
LEGEND = {
    "B": {B, 1, T, 0, B * T},
    "T": {T, 0, 1},
    "P": {P, 1, 0},
    "N": {N, N // 2},
    "M": {M, L},
    "C": {C, N},
    "Q": {8},
}
"""What a letter can be: the explanation takes one image, and merges an identity matrix instead of features; losses take
T pairs; the aggregation takes also the kept half alone; the published pairing aligns a description as a caption."""
NETWORKS = [
    (scoring, dense, aggregation, "mean" if scoring == "sum" else "topk")
    for scoring, dense, aggregation in itertools.product(
        ("sum", "learned"), ("none", "guide", "branch", "tokens"), ("single", "dual")
    )
    if aggregation == "single" or dense in ("guide", "tokens")
] + [("learned", "tokens", "single", "mean")]


def make_net(option, **more) -> seps.PatchSlimming:
    names = ("scoring", "dense", "aggregation", "alignment")
    sizes = {"embed_size": C, "num_patches": N, "num_prefix_tokens": P, "sparse_ratio": 0.5, "aggr_ratio": 0.8}
    return seps.PatchSlimming(
        seps.SlimmingConfig(**dict(zip(names, option, strict=True)), **{"top_k": 6, **sizes, **more})
    )


def run_networks() -> None:
    images, words, dense = torch.randn(B, P + N, C), torch.randn(T, M, C), torch.randn(B, L, C)
    masked = {
        "lengths": torch.tensor([5, 1, 3, 4]),
        "dense_lengths": torch.tensor([7, 0, 2]),
        "patch_mask": torch.arange(N).expand(B, -1) < torch.tensor([[20], [13], [9]]),
    }
    for option in NETWORKS:
        net = make_net(option, similarity="leaky" if option[0] == "sum" else "cosine")
        net(images, words)
        net(images, words, dense=dense, **masked)
        net.eval()(images, words, dense=dense)
        net(images, words[:0], dense=dense)
        for text in (words[0], words[1]):
            for descriptions in (dense[:1], None):
                shares(net, net.encode_images(images[:1], dense=descriptions), text)
        for mask in (None, masked["patch_mask"]):
            seps.score_published_pairing(net, images, words, None, torch.randn(T, L, C), None, mask)
        side = net.encode_images(images)
        net.score(side, Texts.of(torch.randn(T, B, M, C)))  # texts of its own for each image
        with mock.patch.object(maxima, "_VALUES", 1):
            net(images, words, dense=dense)
    hard_topk(torch.rand(B, N), 1.0)
    hard_topk(torch.zeros(B, N), 0.5)
    seps.HRPA(C, 6).align(torch.randn(B, M, 11))
    for decision, scoring in itertools.product(("gumbel", "relaxed", "binary"), ("sum", "learned")):
        net = make_net((scoring, "tokens", "single", "mean"), decision=decision)
        for training in (True, False):
            net.train(training)(images, words, dense=dense)
            net(images, words, dense=dense, **masked)
    guided = make_net(NETWORKS[0], extra_guides={"audio": 0.25}, detach_patches=True)
    guided(images, words, guides={"audio": torch.randn(B, C)})
    half = make_net(("learned", "tokens", "dual", "topk")).bfloat16()
    half(images, words, dense=dense)


def run_own_ideas() -> None:
    """Custom components, by both hooks."""
    images, words, dense = torch.randn(B, P + N, C), torch.randn(T, M, C), torch.randn(B, L, C)
    lengths, dense_lengths = torch.tensor([5, 1, 3, 4]), torch.tensor([7, 0, 2])

    def decide(scores, count, valid):
        return keep_best(scores.detach(), count)

    def scoring(patches, attentions, weights, valid):
        return sum(weights[name] * attention for name, attention in attentions.items())

    class Align:
        def align(self, similarity, word_mask, token_mask):
            return similarity.mean(dim=(1, 2))

    class Merge:
        def merge(self, patches, keep, scores):
            return (patches * keep[..., None])[:, :8]

    plain = {"scoring": scoring, "decision": decide, "aggregation": Merge(), "alignment": Align()}
    first = {"aggregation": lambda patches: patches[..., :8], "alignment": lambda best, mask: best.mean(dim=-1)}
    for ideas in (plain, {**plain, **first}):
        for similarity in ("leaky", "cosine"):
            config = make_net(("sum", "tokens", "single", "mean"), similarity=similarity).config
            net = seps.PatchSlimming(config, **ideas)
            net(images, words, lengths, dense=dense, dense_lengths=dense_lengths)
            mask = torch.arange(N).expand(B, -1) < torch.tensor([[20], [13], [9]])
            net(images, words, lengths, dense=dense, patch_mask=mask)
    with mock.patch.dict(registry._IDEAS):
        seps.register_guide("loud")(lambda vectors: vectors[:, :C])
        seps.register_guide("bright", from_patches=True)(lambda patches: patches.amax(dim=1))
        net = make_net(NETWORKS[0], extra_guides={"loud": 0.5, "bright": 0.5})
        net(images, words, guides={"loud": torch.randn(B, 31)})


def run_parts() -> None:
    patches, attention, dense = torch.randn(B, N, C), torch.rand(B, N), torch.rand(B, N)
    for learned, gumbel in itertools.product((False, True), (False, True)):
        sparse = seps.TokenSparse(C, 0.5, learned)
        sparse(patches, attention, attention.flip(1))
        found = sparse.select(patches, attention, attention.flip(1), dense, use_gumbel=gumbel)
        seps.TokenAggregation(C, 8)(found.tokens, found.kept_mask)
        seps.TokenAggregation(C, 8)(patches)
        both = seps.DualTokenAggregation(C, 8)
        both(patches, None, found.mask)
        both(patches, found.tokens, found.mask, found.kept_mask)
    tokens, words = F.normalize(torch.randn(B, 11, C), dim=-1), F.normalize(torch.randn(B, M, C), dim=-1)
    for paper, both_ways in itertools.product((False, True), (False, True)):
        align = seps.HRPA(C, 6, use_paper_version=paper, bidirectional=both_ways)
        align(tokens, words)
        seps.mask_xattn_one_text(tokens, words)
        align(tokens, words, torch.arange(11).expand(B, -1) < torch.tensor([[11], [9], [6]]))


def run_readable_network() -> None:
    """That of the single file, in both modes."""
    images, words, dense = torch.randn(B, 1 + N, C), torch.randn(T, M, C), torch.randn(T, L, C)
    lengths, dense_lengths = torch.tensor([5, 1, 3, 4]), torch.tensor([7, 1, 2, 3])
    for paper, dual, long in itertools.product((False, True), (False, True), ((), (dense, dense_lengths))):
        net = CrossSparseAggrNet(C, N, 0.5, 0.8, paper, use_dual_aggr=dual, detach_patches=dual)
        net(images, words, lengths, *long)
        net.eval()(images[:, 1:], words)


def run_sensors() -> None:
    names = ("rgb", "nir", "tir")
    patches, vectors = [torch.randn(B, N, C) for _ in names], [torch.randn(B, C) for _ in names]
    for settings in ({}, {"guides": "position"}, {"decision": "binary"}, {"use_gumbel": True}):
        module = seps.MultiModalSDTPS(C, N, aggr_ratio=0.8, **settings)
        module(*patches, *vectors)
        module(*patches, *(vector[:, None] for vector in vectors))
        demo = dict(zip(("RGB_global", "NI_global", "TI_global"), vectors, strict=True))
        module(*patches, **demo)
        present = {name: torch.tensor([True, name != "nir", True]) for name in names}
        by_name = dict(zip(names, patches, strict=True)), dict(zip(names, vectors, strict=True))
        for name in names:
            module.slim(name, *by_name, present, features=torch.randn(B, N, C))
            module.slim(name, *by_name, further=(torch.randn(B, C), torch.tensor([True, False, True])))


def run_losses() -> None:
    scores, ids = torch.randn(T, T, requires_grad=True), torch.tensor([1, 2, 2, 3])
    masks = torch.rand(T, B, N, requires_grad=True), torch.rand(T, B, N)
    for kind, form, hardest in itertools.product(
        ("triplet", "infonce", "sigmoid"), ("unified", "separate", "printed"), (False, True)
    ):
        loss = seps.SEPSLoss.from_config(seps.LossConfig(kind=kind, ratio_form=form, hardest=hardest))
        for some in (None, ids):
            loss(scores, masks, some)[0].backward()
    seps.method.losses.distillation(scores, scores.flip(0))
    several = torch.tensor([[True, False, False]]).expand(T, B)
    seps.method.losses.several_infonce(torch.randn(T, B), 2.0, several, several.roll(1, 1))
    triplet.ContrastiveLoss()(scores)
    ratio.RatioLoss()(masks[0])
    features, labels = torch.randn(T, C), torch.tensor([0, 0, 1, 2])
    identity.identity_loss(torch.randn(T, L), labels)
    identity.batch_hard_triplet(features, labels)
    identity.batch_hard_triplet(features[1:], labels[1:], features, labels, first=1)


@pytest.fixture(scope="module")
def watched() -> Watch:
    torch.manual_seed(0)
    with warnings.catch_warnings(), Watch(FILES, LEGEND) as watch:
        warnings.simplefilter("ignore")
        run_networks()
        run_own_ideas()
        run_parts()
        run_readable_network()
        run_sensors()
        run_losses()
    return watch


def test_every_comment_is_executed_and_true(watched):
    problems = watched.finish()
    assert not problems, "\n".join(problems)


def test_nearly_every_tensor_has_its_shape_beside_it(watched):
    made, bare = watched.coverage()
    share = 1 - len(bare) / len(made)
    listed = "\n".join(f"{statement.place}: {ast.unparse(statement.node)}" for statement in bare)
    assert len(made) > 100
    told = f"{share:.1%} of {len(made)} statements that make a tensor carry its shape; these do not:"
    assert share >= SHARE, f"{told}\n{listed}"


@pytest.mark.parametrize("source", [source for path in FILES if any((source := Source(path)).letters)], ids=str)
def test_every_letter_is_explained_at_the_head_of_its_file(source):
    head = ast.get_docstring(ast.parse(source.path.read_text(encoding="utf-8"))) or ""
    explained = set(re.findall(r"\b[A-Z]\b", head.partition("Shapes: ")[2]))
    assert source.letters <= explained, f"{source.path.name}: {sorted(source.letters - explained)}"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problems_of(path: Path, call) -> list[str]:
    module = load(path)
    with Watch([path]) as watch:
        call(module)
    return watch.finish()


TINY = """
def turn(x_BNQ, mask=None):
    # (B, N, Q)
    weight = x_BNQ.softmax(1)
    weight = weight.transpose(1, 2)  # COMMENT
    if mask is not None:
        weight = weight * mask  # (B, Q, N)
    low, high = weight.amin(2), weight.amax(
        dim=1,
    )  # (B, Q), (B, N)
    parts = [low, low]  # each (B, Q): two of them
    both = low, 1, high  # (B, Q), ...
    low, count = low, 1  # (B, Q), -
    with __import__("contextlib").nullcontext():
        return high[:, None]  # (B, N) -> (B, 1, N)
"""


@pytest.mark.parametrize(
    "comment, fault",
    [
        ("(B, N, Q) -> (B, Q, N)", None),
        ("(B, Q, N): turned", None),
        ("(..., N)", None),
        ("(B, Q, Q + 2)", None),
        ("(B, Q, Q + Z)", None),
        ("(B, Q, N or 1)", None),
        ("(B, N, Q)", "found (2, 3, 5)"),
        ("(B, Q, Q) -> (B, Q, N)", "it reads [(2, 5, 3)]"),
        ("(B, Q)", "found (2, 3, 5)"),
        ("(B, Q, N), (B, N)", "1 values"),
        ("each (B, Q, N)", "found (3, 5)"),
        ("-, (B, N)", "1 values"),
        ("(B, Q, N + 1)", "5 where N + 1 = 6"),
        ("(B, Q, Y + Z)", "without a size"),
        ("(B, Q, n)", "'n' is not an axis"),
        ("(B, Q, N", "parentheses"),
    ],
)
def test_a_wrong_comment_is_found(tmp_path, comment, fault):
    path = tmp_path / "tiny.py"
    path.write_text(TINY.replace("COMMENT", comment))
    found = problems_of(path, lambda module: (module.turn(torch.rand(2, 5, 3)), module.turn(torch.rand(2, 5, 3), 1.0)))
    if fault is None:
        assert found == []
    else:
        assert len(found) == 1, found
        assert found[0].startswith("tiny.py:5: ")
        assert fault in found[0]


def test_a_comment_that_no_call_reaches_is_found(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(TINY.replace("COMMENT", "(B, Q, N)"))
    assert problems_of(path, lambda module: module.turn(torch.rand(2, 5, 3))) == [
        "tiny.py:7: # (B, Q, N): never compared"
    ]


def test_a_comment_that_names_nothing_is_found(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text("def f(x):\n    # (B, N)\n\n    return x.sum()  # a scalar\n")
    assert Source(path).problems == ["tiny.py:2: # (B, N): it stands at no assignment or return"]


def test_a_suffix_that_does_not_fit_is_found(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text("def f(x_BN, y_BN):\n    return x_BN.sum()\n")
    found = problems_of(path, lambda module: module.f(torch.rand(2, 5), torch.rand(2, 4)))
    assert len(found) == 1
    assert "y_BN has the shape (2, 4)" in found[0]


def test_a_letter_of_another_size_is_found(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text("def f(x):\n    return x + 1  # (N, B)\n")
    module = load(path)
    with Watch([path], {"B": {2}}) as watch:
        module.f(torch.rand(2, 5))
    assert watch.finish() == ["tiny.py:1: B is 5 in f, {'N': 2, 'B': 5}"]
