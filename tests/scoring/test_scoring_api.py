"""The call: blocks, best k, memory, out, progress, running out of memory, choice of backend, states."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from messages import naming
from scoring_cases import CONFIGS, make_inputs, make_net
from seps.method.checks import InputError
from seps.method.network import PatchSlimming
from seps.scoring import (
    ImageBlock,
    choose_backend,
    count_images,
    score_matrix,
    take_images,
)
from seps.scoring.inputs import cut_by_length


@pytest.fixture
def case():
    config = CONFIGS["default"]
    data = make_inputs(config, images=9, texts=11)
    net = make_net(config)
    described = {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    scores = score_matrix(net, data["images"], data["words"], data["lengths"], **described)
    return net, data, described, scores


@pytest.mark.parametrize("query", ["text", "image"])
@pytest.mark.parametrize("count", [1, 4, 100])
def test_best_k_is_that_of_the_matrix(case, query, count):
    net, data, described, scores = case
    best = score_matrix(net, data["images"], data["words"], data["lengths"], topk=count, query=query, **described)
    matrix = scores.T if query == "text" else scores
    expected = torch.sort(matrix, dim=1, descending=True, stable=True)
    torch.testing.assert_close(best.scores, expected.values[:, :count])
    assert torch.equal(best.indices, expected.indices[:, :count])


def test_gallery_in_blocks(case):
    net, data, _, scores = case
    with torch.no_grad():
        side = net.encode_images(data["images"], dense=data["dense"], dense_lengths=data["dense_lengths"])

    def read():
        yield take_images(side, slice(0, 2))
        yield ImageBlock(data["images"][2:7], data["dense"][2:7], data["dense_lengths"][2:7])
        yield take_images(side, slice(7, 9))

    whole = score_matrix(net, read(), data["words"], data["lengths"])
    torch.testing.assert_close(whole, scores)
    best = score_matrix(net, read(), data["words"], data["lengths"], topk=3)
    expected = torch.sort(scores.T, dim=1, descending=True, stable=True)
    assert torch.equal(best.indices, expected.indices[:, :3])
    plain = score_matrix(net, [data["images"][:4], data["images"][4:]], data["words"], data["lengths"])
    torch.testing.assert_close(plain, score_matrix(net, data["images"], data["words"], data["lengths"]))


def test_writes_into_out_and_reports_progress(case):
    net, data, described, scores = case
    out, seen = torch.full((9, 11), float("nan")), []
    result = score_matrix(
        net,
        data["images"],
        data["words"],
        data["lengths"],
        out=out,
        progress=lambda done, total: seen.append((done, total)),
        **described,
    )
    assert result.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, scores)
    assert seen[-1] == (9, 9) and seen == sorted(seen)
    with pytest.raises(InputError, match="out"):
        score_matrix(net, data["images"], data["words"], data["lengths"], out=torch.empty(2, 2))


def test_memory_is_refused_with_the_least_that_works(case):
    net, data, described, scores = case
    with pytest.raises(InputError, match="allow") as caught:
        score_matrix(net, data["images"], data["words"], data["lengths"], memory=10, **described)
    least = int(str(caught.value).rsplit(" ", 1)[1].rstrip("."))
    again = score_matrix(net, data["images"], data["words"], data["lengths"], memory=least, **described)
    torch.testing.assert_close(again, scores, atol=1e-6, rtol=0)
    with pytest.raises(InputError, match="allow"):
        score_matrix(net, data["images"], data["words"], data["lengths"], memory=least - 1, **described)


def test_runs_on_when_the_device_is_full(case, monkeypatch, caplog):
    net, data, described, scores = case
    honest, sizes = PatchSlimming.score, []

    def cramped(net, images, block, maxima):
        sizes.append(block.count)
        if block.count > 3:
            raise torch.OutOfMemoryError("full")
        return honest(net, images, block, maxima)

    monkeypatch.setattr(PatchSlimming, "score", cramped)
    with caplog.at_level(logging.WARNING):
        again = score_matrix(net, data["images"], data["words"], data["lengths"], **described)
    torch.testing.assert_close(again, scores, atol=1e-6, rtol=0)
    assert len(caplog.records) == 1 and "memory" in caplog.text
    monkeypatch.setattr(PatchSlimming, "score", lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        score_matrix(net, data["images"], data["words"], data["lengths"])


def test_threads_give_the_same_scores(case):
    net, data, described, scores = case
    torch.set_num_threads(2)
    try:
        again = score_matrix(net, data["images"], data["words"], data["lengths"], **described)
        assert torch.get_num_threads() == 2
        stopped = score_matrix(net, [data["images"][:3], data["images"][3:]], data["words"], topk=2)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(again, scores, atol=1e-6, rtol=0)
    assert stopped.scores.shape == (11, 2) and not again.requires_grad


def test_no_texts_and_no_images(case):
    net, data, _, _ = case
    assert score_matrix(net, data["images"], data["words"][:0]).shape == (9, 0)
    assert score_matrix(net, iter(()), data["words"]).shape == (0, 11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "magic"}, naming("backend", "magic")),
        ({"precision": "float8"}, naming("precision", "float8")),
        ({"backend": "triton", "precision": "float32"}, "score"),
        ({"topk": 0}, "topk"),
        ({"query": "word"}, naming("query", "word")),
        ({"cap_lens": [1] * 3}, "11 lengths"),
        ({"paired_dense": torch.randn(2, 3, 16)}, naming("2", "11", "texts")),
        ({"cap_embs": torch.randn(11, 3, 5)}, "16 wide"),
        ({"img_embs": ["x"]}, "str"),
    ],
)
def test_faults_are_sentences(case, changes, message):
    net, data, _, _ = case
    call = {"img_embs": data["images"], "cap_embs": data["words"], "cap_lens": data["lengths"], **changes}
    with pytest.raises(InputError, match=message):
        score_matrix(net, **call)


def test_a_nan_in_any_caption_is_refused(case):
    net, data, _, _ = case
    data["words"][7, 0, 0] = float("nan")
    with pytest.raises(InputError, match="NaN"):
        score_matrix(net, data["images"], data["words"], data["lengths"])


def test_auto_says_why(case):
    net = case[0]
    assert choose_backend(net, "cpu").backend == "factored"
    assert "kernels" in choose_backend(net, "cpu", precision="half").reason


@pytest.mark.parametrize("name", ["default", "paper", "open_source", "no_prefix"])
def test_a_state_gives_the_scores_of_its_features(name):
    config = CONFIGS[name]
    net, data = make_net(config), make_inputs(config)
    mask = torch.ones(4, config.num_patches, dtype=torch.bool)
    mask[1, 5:] = False
    own = {"dense": data["dense"], "dense_lengths": data["dense_lengths"], "patch_mask": mask}
    with torch.no_grad():
        side = net.encode_images(data["images"], **own)
    scores = score_matrix(net, data["images"], data["words"], data["lengths"], **own)
    assert count_images(side) == 4
    torch.testing.assert_close(score_matrix(net, side, data["words"], data["lengths"]), scores, atol=0, rtol=0)
    parts = [take_images(side, slice(0, 1)), take_images(side, torch.tensor([1, 2, 3]))]
    torch.testing.assert_close(score_matrix(net, parts, data["words"], data["lengths"]), scores)
    small = replace(side, **{name: getattr(side, name).half() for name in ("prefix", "patches", "pooled")})
    for backend in ("factored", "reference"):
        coarse = score_matrix(net, small, data["words"], data["lengths"], backend=backend)
        assert 0 < (coarse - scores).abs().max() < 5e-4


def test_runs_have_little_padding():
    lengths = sorted([8 + i % 16 for i in range(2000)])
    runs = cut_by_length(lengths, 500)
    assert [start for start, _ in runs] == [0, *[stop for _, stop in runs[:-1]]] and runs[-1][1] == 2000
    padded = sum((stop - start) * lengths[stop - 1] for start, stop in runs)
    assert padded < 1.12 * sum(lengths)
    assert all(stop - start <= 500 for start, stop in runs)
