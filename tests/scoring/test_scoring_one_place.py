"""Each step of the score is written once: replaced in its place, every path to a score follows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import fused_scores, on_device
from scoring_cases import CONFIGS, make_inputs, make_net
from seps.method import select, tokens
from seps.method.align import HRPA
from seps.method.network import PatchSlimming
from seps.retrieval.explain.shares import shares
from seps.scoring import choose_backend, score_matrix, score_with_gradient, take_images
from seps.scoring.gpu.fused import why_not_triton
from seps.scoring.own_texts import TextPool, can_score, score_own_texts


class OtherSum(PatchSlimming):
    """Eq. 3 with the sign turned: the worst patches are the best."""

    def patch_scores(self, *arguments: Any) -> Tensor:
        return -super().patch_scores(*arguments)


class OtherMix(PatchSlimming):
    """Descriptions count three times."""

    def mix(self, side: Any, patches: Tensor, description: Tensor) -> Tensor:
        return super().mix(side, patches, 3 * description)


@contextmanager
def functions(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, other: Any) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(place, name, other)
        yield


HONEST = {"topk": select.hard_topk, "weights": tokens.merge_factors, "pooling": HRPA.pool}
CHANGES: dict[str, tuple[type[PatchSlimming], tuple[Any, str, Any] | None]] = {
    "sum of Eq. 3": (OtherSum, None),
    "mix": (OtherMix, None),
    "top-K": (
        PatchSlimming,
        (select, "hard_topk", lambda scores, ratio, valid=None: HONEST["topk"](-scores, ratio, valid)),
    ),
    "merge weights": (
        PatchSlimming,
        (tokens, "merge_factors", lambda logits, top: HONEST["weights"](2 * logits, 2 * top)),
    ),
    "pooling of Eq. 5": (
        PatchSlimming,
        (HRPA, "pool", lambda hrpa, best, mask=None: 2 * HONEST["pooling"](hrpa, best, mask)),
    ),
}


PRESETS = ("default", "default_dual", "branch_learned")
CASES = [(change, preset) for change in CHANGES for preset in PRESETS if (change, preset) != ("mix", "branch_learned")]


@pytest.mark.parametrize(("change", "preset"), CASES)
def test_every_path_follows_a_step_changed_in_its_place(
    change: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, replaced = CHANGES[change]
    config = CONFIGS[preset]
    data = make_inputs(config, texts=40)
    dense = {"dense": data["dense"], "dense_lengths": torch.tensor([5, 2, 4, 1])}
    before = make_net(config)
    net = kind(config).eval()
    net.load_state_dict(before.state_dict())
    call = (data["images"], data["words"], data["lengths"])
    honest = score_matrix(before, *call, backend="reference", **dense)
    with (
        warnings.catch_warnings(),
        functions(monkeypatch, *(replaced or (HRPA, "pool", HRPA.pool))),
    ):
        warnings.simplefilter("error")  # none of them falls back to the loop over texts
        wanted = score_matrix(net, *call, backend="reference", **dense)
        assert (wanted - honest).abs().max() > 1e-2
        paths = {"forward": net(*call, **dense), "training": score_with_gradient(net, *call, **dense).similarity}
        for backend in ("auto", "factored", "reference"):
            paths[backend] = score_matrix(net, *call, backend=backend, **dense)
        best = score_matrix(net, *call, topk=40, query="image", **dense)
        paths["best"] = torch.zeros_like(wanted).scatter(1, best.indices, best.scores)
        side = net.encode_images(data["images"], **dense)
        if can_score(net):
            mask = torch.arange(data["words"].shape[1]) < data["lengths"][:, None]
            chosen = torch.arange(40).expand(4, -1)
            paths["texts of each image"] = score_own_texts(net, side, TextPool(data["words"], mask), chosen)[0]
        for name, found in paths.items():
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        one = take_images(side, slice(1, 2))
        explained = shares(net, one, data["words"][3, : int(data["lengths"][3])])
        assert explained.score == pytest.approx(float(wanted[1, 3]), abs=1e-4)
    assert can_score(net) == (preset == "default")


@pytest.mark.parametrize("change", CHANGES)
def test_the_kernels_follow_a_changed_step_or_refuse_it(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, replaced = CHANGES[change]
    config = CONFIGS["default"]
    net = kind(config).eval()
    net.load_state_dict(make_net(config).state_dict())
    net, data = on_device(net, make_inputs(config, images=2, texts=7))
    dense = {"dense": data["dense"], "dense_lengths": data["dense_lengths"]}
    assert why_not_triton(PatchSlimming(config)) is None
    with functions(monkeypatch, *(replaced or (HRPA, "pool", HRPA.pool))):
        reason = why_not_triton(net)
        if change in ("mix", "merge weights"):
            assert reason is None
            wanted = net(data["images"], data["words"], data["lengths"], **dense)
            torch.testing.assert_close(fused_scores(net, data, **dense), wanted, atol=2e-3, rtol=0)
        else:
            assert (kind.__name__ if replaced is None else replaced[1]) in str(reason)
            assert choose_backend(net, "cuda").backend == "factored"


@pytest.mark.parametrize("part", ["sparse_net_cap", "aggr_net", "hrpa"])
def test_hooks_on_the_parts_fire_on_every_path(part: str) -> None:
    config = CONFIGS["default"]
    net, data, fired = make_net(config), make_inputs(config, texts=40), []
    call = (data["images"], data["words"], data["lengths"])
    getattr(net, part).register_forward_hook(lambda *_: fired.append(part))
    mask = torch.arange(data["words"].shape[1]) < data["lengths"][:, None]
    paths = {
        "forward": lambda: net(*call),
        "all pairs": lambda: score_matrix(net, *call),
        "training": lambda: score_with_gradient(net, *call),
        "texts of each image": lambda: score_own_texts(
            net, net.encode_images(data["images"]), TextPool(data["words"], mask), torch.arange(40).expand(4, -1)
        ),
        "explanation": lambda: shares(net, net.encode_images(data["images"][:1]), data["words"][0]),
    }
    for name, path in paths.items():
        fired.clear()
        path()
        assert fired, name
