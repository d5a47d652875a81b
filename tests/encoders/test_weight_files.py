"""Weights as people have them: OpenAI's TorchScript archive, timm's .pth, read without running what is in them."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from messages import naming
from seps.encoders import EncoderUnavailable, ViT, plain_vit, read_tensors, vision_encoder
from seps.encoders.vit.files import vit_from_file

WIDTH, DEPTH, OUT, GRID = 64, 2, 48, 4
RENAMED = (
    ("attn.out_proj", "self_attn.out_proj"),
    ("ln_1", "layer_norm1"),
    ("ln_2", "layer_norm2"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
)


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class OpenAIBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 1)
        self.ln_1 = nn.LayerNorm(WIDTH)
        layers = [("c_fc", nn.Linear(WIDTH, 4 * WIDTH)), ("gelu", Gelu()), ("c_proj", nn.Linear(4 * WIDTH, WIDTH))]
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.ln_2 = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.ln_1(x)
        x = x + self.attn(inner, inner, inner, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class OpenAITransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.resblocks = nn.Sequential(*(OpenAIBlock() for _ in range(DEPTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.resblocks(x)  # type: ignore[no-any-return]


class OpenAIVisual(nn.Module):
    """The image side with OpenAI's names; 16-pixel patches, a 4 x 4 grid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 16, 16, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(WIDTH))
        self.positional_embedding = nn.Parameter(torch.randn(GRID * GRID + 1, WIDTH))
        self.ln_pre = nn.LayerNorm(WIDTH)
        self.transformer = OpenAITransformer()
        self.ln_post = nn.LayerNorm(WIDTH)
        self.proj = nn.Parameter(torch.randn(WIDTH, OUT) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x).flatten(2).permute(0, 2, 1)
        first = self.class_embedding + torch.zeros(x.shape[0], 1, x.shape[2], dtype=x.dtype)
        x = self.ln_pre(torch.cat([first, x], dim=1) + self.positional_embedding)
        x = self.transformer(x.permute(1, 0, 2)).permute(1, 0, 2)
        return self.ln_post(x) @ self.proj


class OpenAIClip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = OpenAIVisual()
        self.token_embedding = nn.Embedding(7, 5)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("input_resolution", torch.tensor(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.visual(x) * self.logit_scale  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def clip() -> OpenAIClip:
    torch.manual_seed(3)
    made = OpenAIClip()
    with torch.no_grad():
        for parameter in made.parameters():
            # Norms and biases away from their defaults, so that a swap of two shows.
            parameter.add_(torch.randn_like(parameter) * 0.05)
            parameter.copy_(parameter.half().float())
    return made.eval()


@pytest.fixture(scope="module")
def archive(clip: OpenAIClip, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ViT-B-16.pt in small: a traced module, its weights in half precision, as OpenAI published it."""
    path = tmp_path_factory.mktemp("clip") / "ViT-B-16.pt"
    with torch.no_grad(), warnings.catch_warnings():
        # torch means to retire TorchScript; files of it stay.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(copy.deepcopy(clip), torch.rand(2, 3, 64, 64))
        for parameter in traced.parameters():
            parameter.data = parameter.data.half()
        torch.jit.save(traced, str(path))
    return path


def transformers_clip(state: dict[str, Tensor]) -> nn.Module:
    """transformers' CLIP with the same weights."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=DEPTH, num_attention_heads=1, image_size=64,
        patch_size=16, projection_dim=OUT,
    )  # fmt: skip
    model = CLIPVisionModelWithProjection(config)
    values = {"visual_projection.weight": state["visual.proj"].T, "E.class_embedding": state["visual.class_embedding"]}
    values |= {"E.patch_embedding.weight": state["visual.conv1.weight"]}
    values |= {"E.position_embedding.weight": state["visual.positional_embedding"]}
    for ours, theirs in (("ln_pre", "pre_layrnorm"), ("ln_post", "post_layernorm")):
        values |= {f"V.{theirs}.{kind}": state[f"visual.{ours}.{kind}"] for kind in ("weight", "bias")}
    for block in range(DEPTH):
        at, to = f"visual.transformer.resblocks.{block}", f"V.encoder.layers.{block}"
        for kind in ("weight", "bias"):
            for part, value in zip("qkv", state[f"{at}.attn.in_proj_{kind}"].chunk(3), strict=True):
                values[f"{to}.self_attn.{part}_proj.{kind}"] = value
            for ours, theirs in RENAMED:
                values[f"{to}.{theirs}.{kind}"] = state[f"{at}.{ours}.{kind}"]
    places = {"E": "vision_model.embeddings.", "V": "vision_model."}
    named = {places[name[0]] + name[2:] if name[1] == "." else name: value for name, value in values.items()}
    lacking, unknown = model.load_state_dict(named, strict=False)
    assert not unknown and all("position_ids" in name for name in lacking), (lacking, unknown)
    return model.eval()


def their_tokens(model: Any, pixels: Tensor) -> Tensor:
    hidden = model.vision_model(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state
    return model.visual_projection(model.vision_model.post_layernorm(hidden))  # type: ignore[no-any-return]


def test_tensors_of_an_archive_are_those_of_the_module(clip: OpenAIClip, archive: Path) -> None:
    found = read_tensors(archive)
    state = clip.state_dict()
    assert set(found) == set(state)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, atol=0, rtol=0)
        assert found[name].dtype == (torch.float32 if value.is_floating_point() else value.dtype)


def test_tokens_equal_those_of_transformers(clip: OpenAIClip, archive: Path) -> None:
    encoder = vit_from_file(archive, (64, 64))
    assert (encoder.width, encoder.num_prefix_tokens, encoder.num_patches) == (OUT, 1, 16)
    pixels = torch.rand(3, 3, 64, 64)
    normalised = encoder.normalise(pixels)
    with torch.no_grad():
        ours, theirs = encoder(pixels), their_tokens(transformers_clip(clip.state_dict()), normalised)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours, clip.visual(normalised), atol=1e-5, rtol=0)


def test_positions_are_resized_to_a_tall_grid(clip: OpenAIClip, archive: Path) -> None:
    """Bilinear, as DeMo resizes them, by hand; bicubic equals transformers at that size."""
    encoder = vit_from_file(archive, (256, 128))
    assert encoder.config.grid == (16, 8) and encoder.positions.shape == (1, 128, WIDTH)
    old = clip.visual.positional_embedding.detach()[1:].reshape(4, 4, WIDTH)
    for row, column in ((0, 0), (3, 5), (8, 2), (15, 7)):
        y, x = max(0.0, (row + 0.5) / 4 - 0.5), max(0.0, (column + 0.5) / 2 - 0.5)
        top, left = int(y), int(x)
        down, right = min(top + 1, 3), min(left + 1, 3)
        by_row = [old[edge, left] * (1 - (x - left)) + old[edge, right] * (x - left) for edge in (top, down)]
        expected = by_row[0] * (1 - (y - top)) + by_row[1] * (y - top)
        torch.testing.assert_close(encoder.positions[0, row * 8 + column], expected, atol=1e-5, rtol=0)
    cubic = vit_from_file(archive, (256, 128), resize="bicubic")
    pixels = torch.rand(2, 3, 256, 128)
    with torch.no_grad():
        theirs = their_tokens(transformers_clip(clip.state_dict()), cubic.normalise(pixels))
        torch.testing.assert_close(cubic(pixels), theirs, atol=1e-5, rtol=0)
        assert (encoder(pixels) - theirs).abs().max() > 1e-3


def test_a_folder_of_transformers_gives_the_same_encoder(clip: OpenAIClip, archive: Path, tmp_path: Path) -> None:
    model: Any = transformers_clip(clip.state_dict())
    model.save_pretrained(tmp_path / "safe")
    model.save_pretrained(tmp_path / "bin")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    (tmp_path / "bin" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    pixels = torch.rand(2, 3, 64, 32)
    with torch.no_grad():
        tokens = vit_from_file(archive, (64, 32))(pixels)
        for folder in ("safe", "bin"):
            encoder = plain_vit(tmp_path / folder, image_size=(64, 32))
            torch.testing.assert_close(encoder(pixels), tokens, atol=1e-5, rtol=0)


def timm_state(dist: bool = False) -> dict[str, Tensor]:
    """The tensors of a small timm vision transformer, with an ImageNet head."""
    generator = torch.Generator().manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, 17 + dist, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, 16, 16),
        "patch_embed.proj.bias": (WIDTH,),
        "norm.weight": (WIDTH,),
        "norm.bias": (WIDTH,),
        "head.weight": (1000, WIDTH),
        "head.bias": (1000,),
        "pre_logits.fc.weight": (WIDTH, WIDTH),
    } | ({"dist_token": (1, 1, WIDTH)} if dist else {})
    for block in range(DEPTH):
        for name, rows in (("norm1", 0), ("attn.qkv", 3 * WIDTH), ("attn.proj", WIDTH), ("norm2", 0), ("mlp.fc1", 96)):
            shapes[f"blocks.{block}.{name}.weight"] = (rows, WIDTH) if rows else (WIDTH,)
            shapes[f"blocks.{block}.{name}.bias"] = (rows or WIDTH,)
        shapes[f"blocks.{block}.mlp.fc2.weight"], shapes[f"blocks.{block}.mlp.fc2.bias"] = (WIDTH, 96), (WIDTH,)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def hand_timm(state: dict[str, Tensor], pixels: Tensor) -> Tensor:
    x = F.conv2d(pixels * 2 - 1, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], 16).flatten(2).mT
    first = [state[name].expand(len(x), -1, -1) for name in ("cls_token", "dist_token") if name in state]
    x = torch.cat([*first, x], 1) + state["pos_embed"]

    def norm(value: Tensor, name: str) -> Tensor:
        return F.layer_norm(value, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def linear(value: Tensor, name: str) -> Tensor:
        return value @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    for block in range(DEPTH):
        at = f"blocks.{block}"
        q, k, v = linear(norm(x, f"{at}.norm1"), f"{at}.attn.qkv").chunk(3, -1)
        x = x + linear((q @ k.mT / 8).softmax(-1) @ v, f"{at}.attn.proj")
        x = x + linear(F.gelu(linear(norm(x, f"{at}.norm2"), f"{at}.mlp.fc1")), f"{at}.mlp.fc2")
    return norm(x, "norm")


@pytest.mark.parametrize("dist", [False, True])
@pytest.mark.parametrize("form", ["plain", "model", "legacy"])
def test_timm_files(form: str, dist: bool, tmp_path: Path) -> None:
    state, path = timm_state(dist), tmp_path / "jx_vit_base_p16_224.pth"
    held = {"model": state} if form == "model" else state
    torch.save(held, path, _use_new_zipfile_serialization=form != "legacy")
    encoder = vit_from_file(path, (64, 64))
    assert encoder.num_prefix_tokens == 1 + dist and encoder.width == WIDTH
    pixels = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(encoder(pixels), hand_timm(state, pixels), atol=1e-5, rtol=0)


def rewritten(archive: Path, target: Path, pickled: bytes | None = None, cut: bool = False) -> Path:
    """A copy of the archive with another data.pkl, or with the numbers of one tensor cut short."""
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(target, "w") as made:
        largest = max((e for e in source.infolist() if "/data/" in e.filename), key=lambda e: e.file_size).filename
        for entry in source.infolist():
            content = source.read(entry)
            if pickled is not None and entry.filename.endswith("/data.pkl"):
                content = pickled
            made.writestr(entry.filename, content[:-4] if cut and entry.filename == largest else content)
    return target


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("owned"),))


def test_an_archive_runs_no_code_and_says_what_it_asked_for(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (Evil(), {"visual": Evil()}, print, torch.nn.Linear(1, 1)):
        stream = io.BytesIO()
        pickle.Pickler(stream, protocol=2).dump(value)
        path = rewritten(archive, tmp_path / "evil.pt", stream.getvalue())
        with pytest.raises(EncoderUnavailable, match="weights"):
            read_tensors(path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02]q\x00.",  # a list, not a module
        b"\x80\x02}q\x00U\x01aK\x01s.",  # a dict
        b"",
        b"\x80\x02c__torch__\nA\n)\x81K\x01b.",  # a module whose state is a number
        # A function that the pickle may call, with its attributes set: (None, {"_function": 1})
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}U\t_functionK\x01s\x86b.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00)))t\x85R.",
    ],
)
def test_other_pickles_in_an_archive_are_refused(archive: Path, tmp_path: Path, pickled: bytes) -> None:
    with pytest.raises(EncoderUnavailable, match="read"):
        read_tensors(rewritten(archive, tmp_path / "other.pt", pickled))


def test_a_damaged_archive_is_a_sentence(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(EncoderUnavailable, match="cut"):
        read_tensors(rewritten(archive, tmp_path / "cut.pt", cut=True))
    half = tmp_path / "half.pt"
    half.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    with pytest.raises(EncoderUnavailable, match="tensors"):
        read_tensors(half)
    with pytest.raises(EncoderUnavailable, match="file"):
        read_tensors(tmp_path / "none.pt")


def test_files_of_other_networks_are_refused(tmp_path: Path) -> None:
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "resnet.pth")
    with pytest.raises(EncoderUnavailable, match="transformer"):
        vit_from_file(tmp_path / "resnet.pth", (64, 64))
    state = timm_state()
    torch.save({**state, "blocks.0.attn.rel_pos": torch.zeros(3)}, tmp_path / "more.pth")
    with pytest.raises(EncoderUnavailable, match=r"blocks\.0\.attn\.rel_pos"):
        vit_from_file(tmp_path / "more.pth", (64, 64))
    torch.save({name: value for name, value in state.items() if "fc2" not in name}, tmp_path / "less.pth")
    with pytest.raises(EncoderUnavailable, match=r"fc2"):
        vit_from_file(tmp_path / "less.pth", (64, 64))


def test_a_camera_is_added_to_cls_alone(archive: Path) -> None:
    encoder = vit_from_file(archive, (64, 64))
    pixels, added = torch.rand(2, 3, 64, 64), torch.randn(2, WIDTH)
    with torch.no_grad():
        plain = encoder(pixels)
        torch.testing.assert_close(encoder(pixels, torch.zeros(2, WIDTH)), plain)
        moved = ViT(encoder.config, (64, 64))
        moved.load_state_dict(encoder.state_dict())
        moved.mean, moved.std = encoder.mean, encoder.std
        moved.prefix.data = moved.prefix.data + added[:1, None]
        torch.testing.assert_close(encoder(pixels, added)[:1], moved(pixels)[:1])
        assert (encoder(pixels, added) - plain).abs().max() > 0.01
    with pytest.raises(ValueError, match="CLS"):
        encoder(pixels, added[:1])


def test_a_file_is_an_encoder_like_any_other(clip: OpenAIClip, archive: Path, tmp_path: Path) -> None:
    """Without CLIP's projection, as a folder of transformers is read: the same tokens, and a model of ours on them."""
    from seps.reid.build import build_model
    from seps.reid.config import ReidModelConfig

    transformers_clip(clip.state_dict()).save_pretrained(tmp_path)  # type: ignore[operator]
    encoder, same = vision_encoder(archive), vision_encoder(tmp_path)
    assert encoder.width == WIDTH and encoder.image_size == (64, 64)
    pixels = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(encoder(pixels), same(pixels), atol=1e-5, rtol=0)
    settings = {"encoder": str(archive), "image_size": (64, 32), "width": 48, "aggr_ratio": 0.5}
    images = torch.rand(2, 2, 3, 64, 32)
    for more in ({"stride": 16}, {"network": "demo"}):
        model = build_model(ReidModelConfig(**settings, **more), ("RGB", "NI"), 3).eval()  # type: ignore[arg-type]
        assert model(images).shape == (2, 2 * 2 * 48)
    with pytest.raises(ValueError, match="overlap"):
        build_model(ReidModelConfig(**settings, stride=8), ("RGB", "NI"), 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=naming("prune", "drop_path")):
        vision_encoder(archive, drop_path=0.1)
