"""Parts of a dual encoder's vector: they sum to it, and equal those of a slow twin with transformers' own attention."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from duals import FAMILIES, dual_folder
from seps.encoders import dual_encoder


def picture(seed: int = 0, size: tuple[int, int] = (60, 40)) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values)


def by_head(weights: Tensor, tokens: Tensor, value: Any, output: Tensor, token: int) -> Tensor:
    """What one token adds to an attention, head by head: weights (H, N), tokens (N, D), output (D, D)."""
    width = tokens.shape[1] // len(weights)
    total = torch.zeros(tokens.shape[1])
    for head in range(len(weights)):
        part = slice(head * width, (head + 1) * width)
        total += output[:, part] @ (float(weights[head, token]) * value(tokens[token])[part])
    return total


def slow_parts(family: str, prepared: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """Per patch its part of the vector, and the vector, with the attention weights that transformers itself gives."""
    model = transformers.AutoModel.from_pretrained(dual_folder(family), attn_implementation="eager").eval()
    vision = model.vision_model
    with torch.no_grad():
        whole = model.get_image_features(**prepared).pooler_output[0]
        out = vision(**prepared, output_attentions=True, output_hidden_states=True)
        if family.startswith("siglip"):
            attention, tokens = vision.head.attention, out.last_hidden_state
            count = int(prepared["spatial_shapes"][0].prod()) if "spatial_shapes" in prepared else tokens.shape[1]
            tokens = tokens[:, :count]
            weights = attention(vision.head.probe, tokens, tokens, average_attn_weights=False)[1][0, :, 0]
            values, biases = attention.in_proj_weight.chunk(3)[2], attention.in_proj_bias.chunk(3)[2]

            def value(token: Tensor) -> Tensor:
                return values @ token + biases

            parts = [by_head(weights, tokens[0], value, attention.out_proj.weight, j) for j in range(count)]
            return [part / whole.norm() for part in parts], whole / whole.norm()
        layer, norm = vision.encoder.layers[-1], vision.post_layernorm
        tokens = layer.layer_norm1(out.hidden_states[-2])[0]
        weights, output = out.attentions[-1][0, :, 0], layer.self_attn.out_proj.weight
        deviation = out.last_hidden_state[0, 0].var(unbiased=False).add(norm.eps).sqrt()
        parts = []
        for j in range(1, len(tokens)):
            part = by_head(weights, tokens, layer.self_attn.v_proj, output, j)
            normed = (part - part.mean()) / deviation * norm.weight
            parts.append(model.visual_projection.weight @ normed / whole.norm())
        return parts, whole / whole.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_equal_those_of_the_slow_twin(family: str) -> None:
    embedder = dual_encoder(dual_folder(family))
    for seed, size in enumerate([(60, 40), (32, 32), (30, 70)]):
        prepared = embedder.prepare(picture(seed, size))
        found = embedder.patch_parts(prepared)
        assert torch.allclose(found.vector, embedder.image_vectors([prepared])[0], atol=1e-6)
        slow, vector = slow_parts(family, prepared)
        assert len(slow) == len(found.patches) == found.grid[0] * found.grid[1]
        assert torch.allclose(found.patches, torch.stack(slow), atol=1e-5)
        assert torch.allclose(found.elsewhere, vector - torch.stack(slow).sum(dim=0), atol=1e-5)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_a_masked_patch_adds_nothing(family: str) -> None:
    """The vector without some patches in the last attention is another one; without any it is the same."""
    embedder = dual_encoder(dual_folder(family))
    prepared = embedder.prepare(picture())
    masked = torch.zeros(16, dtype=torch.bool)
    masked[[3, 8]] = True
    whole, found = embedder.patch_parts(prepared), embedder.patch_parts(prepared, masked)
    assert not found.patches[masked].any() and found.patches[~masked].any(dim=1).all()
    assert float(found.vector.norm()) == pytest.approx(1.0, abs=1e-6)
    assert not torch.allclose(found.vector, whole.vector, atol=1e-4)
    none = embedder.patch_parts(prepared, torch.zeros(16, dtype=torch.bool))
    assert torch.equal(none.vector, whole.vector)


def test_what_of_a_picture_is_seen() -> None:
    """CLIP crops the middle square, SigLIP stretches, and of a long strip the middle is taken first."""
    clip, siglip = dual_encoder(dual_folder("clip")), dual_encoder(dual_folder("siglip"))
    assert clip.seen(60, 40) == pytest.approx((1.0, 2 / 3)) and clip.seen(40, 60) == pytest.approx((2 / 3, 1.0))
    assert siglip.seen(60, 40) == (1.0, 1.0) == clip.seen(40, 40)
    assert siglip.seen(3200, 100) == (1.0, 0.5) and clip.seen(3200, 100) == pytest.approx((1.0, 1 / 32))
    # The cropped margin changes nothing, the seen middle does.
    image = picture()
    edge, middle = image.copy(), image.copy()
    edge.paste((255, 0, 0), (0, 0, 7, 40))
    middle.paste((255, 0, 0), (25, 10, 35, 30))
    vectors = [clip.image_vectors([clip.prepare(one)])[0] for one in (image, edge, middle)]
    assert torch.allclose(vectors[0], vectors[1], atol=1e-6) and not torch.allclose(vectors[0], vectors[2], atol=1e-3)


def test_parts_of_many_threads() -> None:
    """The tower is shared: what one thread looks at must not be another's."""
    embedder = dual_encoder(dual_folder("clip"))
    prepared = [embedder.prepare(picture(seed)) for seed in range(24)]
    wanted = [embedder.patch_parts(one).patches for one in prepared]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda one: embedder.patch_parts(one).patches, prepared))
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))
