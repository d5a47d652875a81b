"""How photos are brought to the model's size, and what that is worth: rSum of one model by several ways.

    python -m benchmarks.pixels --data dev-llava.jsonl [--protocols none image] [--ways straight-bicubic model]

`model` is what every command uses (`seps.retrieval.data.read_image`); the others are what it was chosen from.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from benchmarks.lines import append_line
from seps.metrics import recall
from seps.retrieval.data import ImageSource, RetrievalDataset, load_jsonl, read_source
from seps.retrieval.data.images import Upright, pixels_of
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained

Way = Callable[[Image.Image, int], Tensor]
Filter = Image.Resampling


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def _straight(kind: Filter) -> Way:
    return lambda image, side: _tensor(image.resize((side, side), kind))


def _stored(image: Image.Image, side: int) -> Image.Image:
    """As training keeps its photos."""
    return image.resize((side * 8 // 7, side * 8 // 7), Filter.BICUBIC)


def _twice(kind: Filter) -> Way:
    return lambda image, side: _tensor(_stored(image, side).resize((side, side), kind))


def _whole_crop(image: Image.Image, side: int) -> Tensor:
    """What training's augmentation gives for a crop of the whole photo: bilinear, without averaging."""
    stored = _tensor(_stored(image, side))[None]
    grid = F.affine_grid(torch.eye(2, 3)[None], [1, 3, side, side], align_corners=False)
    return F.grid_sample(stored, grid, mode="bilinear", padding_mode="border", align_corners=False)[0]


def _float(image: Image.Image, side: int) -> Tensor:
    stored = _tensor(_stored(image, side))[None]
    return F.interpolate(stored, (side, side), mode="bilinear", antialias=True)[0]


def _model(image: Image.Image, side: int) -> Tensor:
    return pixels_of(Upright(image, *image.size), ImageSource(Path("photo")), (side, side)).float() / 255


WAYS: dict[str, Way] = {
    "model": _model,
    "straight-bicubic": _straight(Filter.BICUBIC),
    "straight-bilinear": _straight(Filter.BILINEAR),
    "straight-box": _straight(Filter.BOX),
    "8/7-bilinear": _twice(Filter.BILINEAR),
    "8/7-bilinear-float": _float,
    "8/7-whole-crop": _whole_crop,
    "8/7-bicubic": _twice(Filter.BICUBIC),
    "8/7-hamming": _twice(Filter.HAMMING),
}


@torch.no_grad()
def _tokens(model: RetrievalModel, data: RetrievalDataset, way: Way) -> Tensor:
    side, parts = model.image_size[0], []
    for start in range(0, len(data), 4):
        photos = [Image.open(io.BytesIO(read_source(s))).convert("RGB") for s in data.sources[start : start + 4]]
        parts.append(model.encode_pixels(torch.stack([way(photo, side) for photo in photos])))
    return torch.cat(parts)


def main() -> None:
    """Measure and print, one line of JSON a figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pixels", description=__doc__)
    parser.add_argument("--data", required=True, help="JSONL of photos and captions")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--protocols", nargs="+", choices=("none", "image"), default=["none", "image"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, help="append the lines here")
    options = parser.parse_args()
    model = from_pretrained(options.model).eval()
    data = load_jsonl(options.data)
    texts = model.encode_texts(data.captions)
    described = model.encode_descriptions(data.dense) if "image" in options.protocols else (None, None)
    for way in options.ways:
        tokens = _tokens(model, data, WAYS[way])
        for protocol in options.protocols:
            images = ImageFeatures(tokens, *described) if protocol == "image" else ImageFeatures(tokens)
            rsum = recall(model.score(images, texts), data.image_of_caption).rsum
            line = {"data": data.split, "way": way, "protocol": protocol, "rsum": round(rsum, 2)}
            print(json.dumps(line), flush=True)
            if options.out:
                append_line(options.out, line)


if __name__ == "__main__":
    main()
