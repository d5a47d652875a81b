"""A checkpoint of DeMo becomes a model of ours: the same features, and nothing lost without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published_twin import hand_sdtps
from reid_toys import rgbnt201
from torch import Tensor
from torch.nn import functional as F

from messages import naming
from seps.cli.main import main
from seps.hub.folder import ModelError
from seps.reid.demo.convert import convert_demo, read_demo
from seps.reid.run import load_trained

WIDTH, OUT, DEPTH, PEOPLE, CAMERAS = 64, 24, 2, 5, 4
SHAPES: dict[str, tuple[int, ...]] = {
    "BACKBONE.cv_embed": (CAMERAS, 1, WIDTH),
    "BACKBONE.base.class_embedding": (WIDTH,),
    "BACKBONE.base.positional_embedding": (129, WIDTH),
    "BACKBONE.base.proj": (WIDTH, OUT),
    "BACKBONE.base.conv1.weight": (WIDTH, 3, 16, 16),
    **{f"BACKBONE.base.ln_{name}.{kind}": (WIDTH,) for name in ("pre", "post") for kind in ("weight", "bias")},
    **{f"{name}_reduce.0.{kind}": (2 * OUT,) for name in ("rgb", "nir", "tir") for kind in ("weight", "bias")},
    **{f"{name}_reduce.1.weight": (OUT, 2 * OUT) for name in ("rgb", "nir", "tir")},
    **{f"{name}_reduce.1.bias": (OUT,) for name in ("rgb", "nir", "tir")},
}
EXPERTS = (
    "generalFusion.r_token",
    "generalFusion.moe.experts.0.fc.weight",
    "classifier_moe.weight",
    "bottleneck_moe.bias",
)


def demo_state(*, direct: bool = True, sdtps: bool = False, experts: bool = True) -> dict[str, Tensor]:
    shapes = dict(SHAPES)
    for block in range(DEPTH):
        at = f"BACKBONE.base.transformer.resblocks.{block}"
        shapes |= {f"{at}.attn.in_proj_weight": (3 * WIDTH, WIDTH), f"{at}.attn.in_proj_bias": (3 * WIDTH,)}
        shapes |= {f"{at}.attn.out_proj.weight": (WIDTH, WIDTH), f"{at}.attn.out_proj.bias": (WIDTH,)}
        shapes |= {f"{at}.ln_{n}.{kind}": (WIDTH,) for n in (1, 2) for kind in ("weight", "bias")}
        shapes |= {f"{at}.mlp.c_fc.weight": (96, WIDTH), f"{at}.mlp.c_fc.bias": (96,)}
        shapes |= {f"{at}.mlp.c_proj.weight": (WIDTH, 96), f"{at}.mlp.c_proj.bias": (WIDTH,)}
    necks = {"": 3 * OUT} if direct else {f"_{sensor}": OUT for sensor in "rnt"}
    for name, width in (necks | ({"_sdtps": 3 * OUT} if sdtps else {})).items():
        shapes |= {f"bottleneck{name}.{kind}": (width,) for kind in ("weight", "bias", "running_mean", "running_var")}
        shapes[f"classifier{name}.weight"] = (PEOPLE, width)
    for sensor in ("rgb", "nir", "tir") if sdtps else ():
        at = f"sdtps.{sensor}"
        shapes |= {f"{at}_sparse.score_predictor.0.weight": (6, OUT), f"{at}_sparse.score_predictor.0.bias": (6,)}
        shapes |= {f"{at}_sparse.score_predictor.2.weight": (1, 6), f"{at}_sparse.score_predictor.2.bias": (1,)}
        shapes |= {
            f"{at}_aggr.scale": (1, 1, 1),
            f"{at}_aggr.weight.0.weight": (OUT,),
            f"{at}_aggr.weight.0.bias": (OUT,),
        }
        shapes |= {f"{at}_aggr.weight.1.weight": (4, OUT), f"{at}_aggr.weight.1.bias": (4,)}
        shapes |= {f"{at}_aggr.weight.3.weight": (25, 4), f"{at}_aggr.weight.3.bias": (25,)}
    shapes |= dict.fromkeys(EXPERTS, (3,)) if experts else {}
    generator = torch.Generator().manual_seed(9)
    state = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    state |= {
        f"{name.rpartition('.')[0]}.num_batches_tracked": torch.tensor(3) for name in shapes if "running_var" in name
    }
    return state


def demo_tokens(state: dict[str, Tensor], pixels: Tensor, camera: int) -> Tensor:
    """BACKBONE of DeMo by its names: (B, N + 1, 24)."""
    at = "BACKBONE.base"

    def norm(value: Tensor, name: str) -> Tensor:
        return F.layer_norm(value, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"])

    x = F.conv2d(pixels * 2 - 1, state[f"{at}.conv1.weight"], stride=16).flatten(2).mT
    x = torch.cat([state[f"{at}.class_embedding"].expand(len(x), 1, -1), x], 1)
    x[:, 0] += state["BACKBONE.cv_embed"][camera]
    x = norm(x + state[f"{at}.positional_embedding"], f"{at}.ln_pre").transpose(0, 1)
    for block in range(DEPTH):
        name = f"{at}.transformer.resblocks.{block}"
        inner = norm(x, f"{name}.ln_1")
        mixed = F.multi_head_attention_forward(
            inner, inner, inner, WIDTH, 1, state[f"{name}.attn.in_proj_weight"], state[f"{name}.attn.in_proj_bias"],
            None, None, False, 0.0, state[f"{name}.attn.out_proj.weight"], state[f"{name}.attn.out_proj.bias"],
            training=False, need_weights=False,
        )[0]  # fmt: skip
        x = x + mixed
        inner = F.linear(norm(x, f"{name}.ln_2"), state[f"{name}.mlp.c_fc.weight"], state[f"{name}.mlp.c_fc.bias"])
        inner = inner * torch.sigmoid(1.702 * inner)
        x = x + F.linear(inner, state[f"{name}.mlp.c_proj.weight"], state[f"{name}.mlp.c_proj.bias"])
    return norm(x.transpose(0, 1), f"{at}.ln_post") @ state[f"{at}.proj"]


def demo_features(state: dict[str, Tensor], images: Tensor, camera: int) -> tuple[Tensor, Tensor | None]:
    """The original feature and, where there is SDTPS, its feature."""
    tokens = [demo_tokens(state, images[:, sensor], camera) for sensor in range(3)]
    vectors = []
    for name, part in zip(("rgb", "nir", "tir"), tokens, strict=True):
        both = torch.cat([part[:, 0], part[:, 1:].mean(1)], -1)
        both = F.layer_norm(both, (2 * OUT,), state[f"{name}_reduce.0.weight"], state[f"{name}_reduce.0.bias"])
        inner = F.linear(both, state[f"{name}_reduce.1.weight"], state[f"{name}_reduce.1.bias"])
        vectors.append(inner * torch.sigmoid(1.702 * inner))
    if "classifier_sdtps.weight" not in state:
        return torch.cat(vectors, -1), None
    ours = {name: value for name, value in state.items() if name.startswith("sdtps.")}
    for number, name in enumerate(("rgb", "nir", "tir")):
        ours = {key.replace(f"sdtps.{name}_", f"sdtps.sensor{number}_"): value for key, value in ours.items()}
    patches = [part[:, 1:] for part in tokens]
    return torch.cat(vectors, -1), torch.cat([hand_sdtps(ours, s, patches, vectors) for s in range(3)], -1)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("layout", "direct", "sdtps"), [("rgbnt201", True, False), ("rgbnt100", False, True), ("rgbnt201", True, True)]
)
def test_features_are_those_of_the_checkpoint(
    layout: str, direct: bool, sdtps: bool, wrapped: bool, tmp_path: Path
) -> None:
    state = demo_state(direct=direct, sdtps=sdtps)
    saved = {f"module.{name}": value for name, value in state.items()} if wrapped else state
    torch.save(saved, tmp_path / "DeMobest.pth")
    made = convert_demo(tmp_path / "DeMobest.pth", layout)
    assert made.left_out == tuple(sorted(EXPERTS)) and made.mapped == len(state) - len(EXPERTS)
    assert made.groups() == {"bottleneck_moe": 1, "classifier_moe": 1, "generalFusion": 2}
    trained = made.trained
    assert trained.cameras == (1, 2, 3, 4) and trained.model.identities == PEOPLE
    images = torch.rand(2, 3, 3, *trained.config.model.image_size)
    with torch.no_grad():
        original, branch = demo_features(state, images, 2)
        fused = trained.model.embed(images, torch.tensor([2, 2]))
    torch.testing.assert_close(fused.original, original, atol=1e-5, rtol=1e-4)
    assert (fused.sdtps is None) == (branch is None)
    if branch is not None:
        torch.testing.assert_close(fused.sdtps, branch, atol=1e-5, rtol=1e-4)
    scores = trained.model.classify(fused)
    assert len(scores) == (1 if direct else 3) + sdtps and all(score.shape == (2, PEOPLE) for score in scores)


def test_a_branch_of_another_make_is_left_out_whole_and_named(tmp_path: Path) -> None:
    """Later versions of the SDTPS branch attend with weights of their own."""
    state = demo_state(sdtps=True, experts=False)
    del state["sdtps.rgb_sparse.score_predictor.0.weight"]
    state["sdtps.rgb_cross.in_proj_weight"] = torch.zeros(3)
    state["BACKBONE.base.transformer.resblocks.0.adapter_ffn.0.weight"] = torch.zeros(3)
    torch.save(state, tmp_path / "DeMo.pth")
    made = convert_demo(tmp_path / "DeMo.pth", "rgbnt201")
    assert made.trained.model.sdtps is None
    assert made.left_out == tuple(sorted(name for name in state if "sdtps" in name or "adapter" in name))


def test_what_does_not_fit_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "DeMo.pth"
    torch.save(demo_state(sdtps=True), path)
    with pytest.raises(ModelError, match=naming("--sparse-ratio", "--aggr-ratio")):
        convert_demo(path, "rgbnt201", sparse_ratio=0.7, aggr_ratio=0.5)
    with pytest.raises(ModelError, match="market"):
        convert_demo(path, "market")
    cut = {name: value for name, value in demo_state().items() if not name.startswith("nir_reduce.1")}
    torch.save(cut, path)
    with pytest.raises(ModelError, match=naming("2", "'global_local.1")):
        convert_demo(path, "rgbnt201")
    torch.save({"weight": torch.zeros(2)}, path)
    assert read_demo(path) is None
    with pytest.raises(ModelError, match="DeMo"):
        convert_demo(path, "rgbnt201")


def test_the_command_converts_and_the_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(demo_state(), tmp_path / "DeMobest.pth")
    arguments = ["convert", str(tmp_path / "DeMobest.pth"), "-o", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "--layout rgbnt201" in capsys.readouterr().err
    assert main([*arguments, "--layout", "rgbnt201"]) == 0
    told = capsys.readouterr().out
    assert "generalFusion: 2" in told and f"{len(EXPERTS)}" in told and "pattern 1" in told
    about: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())["about"]
    assert about["left_out"] == sorted(EXPERTS)
    again = load_trained(tmp_path / "out")
    first = convert_demo(tmp_path / "DeMobest.pth", "rgbnt201").trained
    images, cameras = torch.rand(1, 3, 3, 256, 128), torch.tensor([3])
    with torch.no_grad():
        assert torch.equal(again.model(images, cameras), first.model(images, cameras))
    tree = str(rgbnt201(tmp_path / "tree"))
    # The toy tree has two of the four cameras, and their embedding cannot serve others.
    assert main(["reid", "eval", str(tmp_path / "out"), "--data.root", tree]) == 2
    assert "(1, 2, 3, 4)" in capsys.readouterr().err
    torch.save(demo_state() | {"BACKBONE.cv_embed": torch.zeros(2, 1, WIDTH)}, tmp_path / "DeMobest.pth")
    assert main([*arguments, "--layout", "rgbnt201"]) == 0
    capsys.readouterr()
    assert main(["reid", "eval", str(tmp_path / "out"), "--data.root", tree, "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["pattern"] == 1
    # DeMo trains on all identities: a threshold chosen on some of them would be chosen on what was trained on.
    threshold = ["reid", "threshold", str(tmp_path / "out"), "--data.root", tree, "--out", str(tmp_path / "threshold")]
    assert main([*threshold, "--false-accept", "0.3", "--device", "cpu"]) == 2
    assert "identity" in capsys.readouterr().err
