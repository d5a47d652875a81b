"""Are explanations of dual encoders faithful? As `benchmarks.quality.faithful`, for one vector per picture.

    python -m benchmarks.quality.faithful_dual --data dev-llava.jsonl [--model clip-b-32] [--photos 120]

Each photo meets its first caption. The named patches are those whose parts of the vector add most to the cosine. They
are taken away in two ways: masked in the last attention, and painted over with the photo's mean colour before encoding.
As many random ones are drawn several times (seeded).

Without `--model` a stand-in is measured, since no dual encoder's weights ship with the package: the vision transformer
of `base` (DINOv2-small, 256 patches), whose projected CLS token meets the mean word of the caption. It was not
trained as a dual encoder, so its recall is printed as well.
"""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional as F

from seps.encoders.parts import PatchParts, cls_parts
from seps.encoders.vit import ViT
from seps.images.decoding import decode_image, pixels_of
from seps.images.shards import read_source
from seps.metrics import recall
from seps.retrieval.data import load_jsonl
from seps.retrieval.engine.loading import load_engine
from seps.retrieval.engine.vectors import VectorEngine
from seps.retrieval.explain.vectors import cells_of
from seps.retrieval.pretrained import from_pretrained


class StandIn:
    """`base` as a dual encoder: its CLS token and the mean word, both projected. Its parts are those of `cls_parts`."""

    def __init__(self) -> None:
        self.model = from_pretrained("base")
        vit = self.model.vision
        assert isinstance(vit, ViT)
        block: Any = vit.blocks[-1]
        query, key, value = block.qkv.weight.chunk(3)
        biases = block.qkv.bias.chunk(3)
        scale = block.scale1 if block.scale1 is not None else torch.ones(len(value))
        attention = SimpleNamespace(
            q_proj=SimpleNamespace(weight=query, bias=biases[0]),
            k_proj=SimpleNamespace(weight=key, bias=biases[1]),
            v_proj=SimpleNamespace(weight=value, bias=biases[2]),
            # The learned scale of the branch belongs to its last projection.
            out_proj=SimpleNamespace(weight=scale[:, None] * block.project.weight, bias=scale * block.project.bias),
            num_heads=block.heads,
        )
        layer = SimpleNamespace(
            layer_norm1=block.norm1,
            layer_norm2=nn.Identity(),
            self_attn=attention,
            mlp=lambda token: block.mlp(token[None, None])[0, 0] - token,
            register_forward_pre_hook=block.register_forward_pre_hook,
        )
        self.side = self.model.image_size[0]
        self.vision = _Tower(vit, layer)
        self.grid = vit.grid_for(self.side, self.side)

    def prepare(self, image: Image.Image) -> Tensor:
        """(1, 3, H, W) in [0, 1]."""
        upright = SimpleNamespace(image=image, width=image.width, height=image.height)
        pixels: Tensor = pixels_of(upright, None, self.model.image_size)  # type: ignore[arg-type]
        return pixels[None].float() / 255

    def patch_parts(self, prepared: Tensor, masked: Tensor | None = None) -> PatchParts:
        """See `DualEncoder.patch_parts`."""
        projection: Any = self.model.project_patches[-1]
        return cls_parts(self.vision, projection, {"pixels": prepared}, self.grid, masked)

    @torch.no_grad()
    def image_vectors(self, prepared: list[Tensor]) -> Tensor:
        """(B, C) of length one."""
        return F.normalize(self.model.encode_pixels(torch.cat(prepared))[:, 0], dim=-1)

    @torch.no_grad()
    def text_vectors(self, texts: list[str]) -> Tensor:
        """(T, C) of length one."""
        found = self.model.encode_texts(texts)
        means = (found.words * found.mask[..., None]).sum(dim=1) / found.mask.sum(dim=1, keepdim=True)
        return F.normalize(means, dim=-1)

    def seen(self, width: int, height: int) -> tuple[float, float]:
        """The whole picture, stretched."""
        return 1.0, 1.0


class _Tower:
    def __init__(self, vit: ViT, layer: SimpleNamespace) -> None:
        self.vit, self.encoder, self.post_layernorm = vit, SimpleNamespace(layers=[layer]), vit.norm

    def __call__(self, pixels: Tensor) -> Tensor:
        return self.vit(pixels)  # type: ignore[no-any-return]


def painted(image: Image.Image, cells: list[int], grid: tuple[int, int]) -> Image.Image:
    """The picture with some cells of the grid in its mean colour."""
    image = image.copy()
    colour = tuple(int(value) for value in np.asarray(image).reshape(-1, 3).mean(axis=0))
    pen = ImageDraw.Draw(image)
    rows, columns = grid
    for cell in cells:
        row, column = divmod(cell, columns)
        box = (column * image.width / columns, row * image.height / rows)
        pen.rectangle((*box, box[0] + image.width / columns - 1, box[1] + image.height / rows - 1), fill=colour)
    return image


def drops(embedder: Any, image: Image.Image, text: Tensor, part: float, draws: int, seed: int) -> list[list[float]]:
    """Masked and painted: what the named and what random patches take off the cosine."""
    prepared = embedder.prepare(image)
    whole = embedder.patch_parts(prepared)
    count = round(part * len(whole.patches))
    chance = torch.Generator().manual_seed(seed)
    grid, places = cells_of(whole.grid, *embedder.seen(*image.size))
    chosen = [(whole.patches @ text).argsort(descending=True)[:count]]
    chosen += [torch.randperm(len(whole.patches), generator=chance)[:count] for _ in range(draws)]
    score = float(whole.vector @ text)
    masked, repainted = [], []
    for some in chosen:
        mask = torch.zeros(len(whole.patches), dtype=torch.bool)
        mask[some] = True
        masked.append(score - float(embedder.patch_parts(prepared, mask).vector @ text))
        view = embedder.prepare(painted(image, places[some].tolist(), grid))
        repainted.append(score - float(embedder.image_vectors([view])[0] @ text))
    return [[values[0], sum(values[1:]) / draws] for values in (masked, repainted)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.faithful_dual", description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", help="a dual encoder (preset, hub id or folder); without, the stand-in")
    parser.add_argument("--photos", type=int, default=120)
    parser.add_argument("--part", type=float, nargs="*", default=[0.125, 0.25], help="parts of the patches taken away")
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args()
    embedder: Any = StandIn()
    if options.model:
        model = load_engine(options.model)
        if not isinstance(model, VectorEngine):
            raise ValueError(f"{options.model} is no dual encoder.")
        embedder = model.embedder
    dataset = load_jsonl(options.data)
    step = max(1, len(dataset) // options.photos)
    records = [dataset.records[i] for i in range(0, len(dataset), step)[: options.photos]]
    side = (embedder.side, embedder.side)
    images = [decode_image(read_source(one.source), one.source, side, lambda image: image) for one in records]
    texts = embedder.text_vectors([one.captions[0] for one in records])
    vectors = torch.cat([embedder.image_vectors([embedder.prepare(image)]) for image in images])
    parts = [embedder.patch_parts(embedder.prepare(image)) for image in images]
    worst = max(float((one.vector - vector).abs().max()) for one, vector in zip(parts, vectors, strict=True))
    inside = sum(float((one.patches @ text).sum()) for one, text in zip(parts, texts, strict=True)) / len(parts)
    facts = {"photos": len(images), "t2i": vars(recall(vectors @ texts.T, list(range(len(images)))).t2i)}
    facts |= {"sum_differs_by": worst, "mean_cosine": float((vectors * texts).sum(dim=1).mean()), "of_patches": inside}
    print(json.dumps(facts, default=str), flush=True)
    for part in options.part:
        found = [drops(embedder, images[i], texts[i], part, options.draws, i) for i in range(len(images))]
        for kind, how in enumerate(("masked", "painted over")):
            pairs = torch.tensor([photo[kind] for photo in found])
            named, random = pairs.T
            facts = {
                "part": part,
                "how": how,
                "named_lower_it_more": round(float((named > random).float().mean()), 3),
                "mean_drop_named": round(float(named.mean()), 4),
                "mean_drop_random": round(float(random.mean()), 4),
            }
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
