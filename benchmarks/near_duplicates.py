"""How alike copies of a photo are, and how alike different photos: the cosine of two mean patches.

    python -m benchmarks.near_duplicates [--model mini] [--data dev.jsonl --photos 400]

Copies are made of the shipped photos. The page of `seps serve` folds results whose likeness is at least
`seps.library.duplicates.NEAR`.
"""

from __future__ import annotations

import argparse
import io
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.nn import functional as F

from seps.retrieval.data import ImageSource, load_jsonl, read_source
from seps.retrieval.data.images import decode_image
from seps.retrieval.demo import gallery_file
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained


def copies(photo: Any) -> dict[str, Any]:
    """A photo as it is found again: saved worse, smaller, cut, brighter."""
    width, height = photo.size
    worse = io.BytesIO()
    photo.save(worse, "JPEG", quality=40)
    return {
        "quality 40": Image.open(worse),
        "half the size": photo.resize((width // 2, height // 2)),
        "5 % cut off left and top": photo.crop((width // 20, height // 20, width, height)),
        "10 % cut off left and top": photo.crop((width // 10, height // 10, width, height)),
        "20 % brighter": ImageEnhance.Brightness(photo).enhance(1.2),
    }


@torch.no_grad()
def vector(model: RetrievalModel, data: bytes) -> Tensor:
    """(C,) the mean patch, of length one."""
    pixels = decode_image(data, ImageSource(Path("photo")), model.image_size)
    tokens = model.encode_pixels(pixels[None].float() / 255)[0, model.vision.num_prefix_tokens :]
    return F.normalize(tokens.float().mean(dim=0), dim=-1)


def saved(photo: Any) -> bytes:
    """As JPEG of quality 90."""
    out = io.BytesIO()
    photo.convert("RGB").save(out, "JPEG", quality=90)
    return out.getvalue()


def largest(vectors: list[Tensor]) -> str:
    """The most alike of all pairs, and the part of pairs from 0.8 and 0.9 on."""
    cosines = torch.stack(vectors) @ torch.stack(vectors).T
    pairs = cosines[torch.triu(torch.ones_like(cosines), 1).bool()]
    parts = ", ".join(f"{int((pairs >= least).sum())} of {len(pairs)} pairs >= {least}" for least in (0.8, 0.85, 0.9))
    return f"most alike {float(pairs.max()):.3f}; {parts}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.near_duplicates", description=__doc__)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--data", help="photos that are all different, as JSONL")
    parser.add_argument("--photos", type=int, default=400)
    options = parser.parse_args()
    model = from_pretrained(options.model).eval()
    found: dict[str, list[float]] = {}
    vectors = []
    for path in sorted(gallery_file().parent.glob("*.jpg")):
        photo = Image.open(path).convert("RGB")
        vectors.append(vector(model, saved(photo)))
        for name, copy in copies(photo).items():
            found.setdefault(name, []).append(float(vectors[-1] @ vector(model, saved(copy))))
    for name, cosines in found.items():
        folded = sum(cosine >= 0.9 for cosine in cosines)
        print(f"{name}: least {min(cosines):.3f}, {folded} of {len(cosines)} >= 0.9")
    print(f"different shipped photos: {largest(vectors)}")
    if options.data:
        sources = random.Random(0).sample(load_jsonl(options.data).sources, options.photos)
        print(f"different photos of {Path(options.data).name}: ", end="")
        print(largest([vector(model, read_source(source)) for source in sources]))


if __name__ == "__main__":
    main()
