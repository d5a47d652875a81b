"""Search a folder of pictures by a sentence: python search.py "a dog" photos. Check this installation: python search.py

Needs: pip install numpy onnxruntime pillow tokenizers
"""

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps
from tokenizers import Tokenizer

HERE = Path(__file__).parent
FACTS = json.loads((HERE / "preprocessing.json").read_text())
FIRST, SECOND = ((one["width"], one["height"]) for one in FACTS["resize"])
tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
image_graph, text_graph = (onnxruntime.InferenceSession(str(HERE / name)) for name in ("image.onnx", "text.onnx"))


def text_vector(text: str) -> np.ndarray:
    ids = np.array([tokenizer.encode(text).ids])
    return text_graph.run(None, {"ids": ids, "mask": np.ones_like(ids, dtype=bool)})[0][0]


def image_vector(image: Image.Image) -> np.ndarray:
    image = ImageOps.exif_transpose(image).convert("RGB").resize(FIRST, Image.Resampling.BICUBIC)
    return pixels_vector(image.transform(SECOND, Image.Transform.EXTENT, (0, 0, *FIRST), Image.Resampling.BILINEAR))


def pixels_vector(image: Image.Image) -> np.ndarray:
    """Of a picture that has the model's size already."""
    pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1)[None] / 255
    return image_graph.run(None, {"pixels": pixels})[0][0]


def check() -> float:
    """The largest difference from the vectors of conformance.json, as a share of what is allowed."""
    facts = json.loads((HERE / "conformance.json").read_text())
    pairs = [(text_vector(one["text"]), one["vector"]) for one in facts["texts"]]
    for one in facts["pictures"]:
        pairs.append((pixels_vector(Image.open(io.BytesIO(base64.b64decode(one["png"])))), one["vector"]))
    return max(float(np.abs(mine - np.array(wanted)).max()) for mine, wanted in pairs) / facts["tolerance"]


if __name__ == "__main__" and len(sys.argv) == 3:
    paths = [path for path in sorted(Path(sys.argv[2]).rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg", ".png")]
    vectors = np.stack([image_vector(Image.open(path)) for path in paths])  # keep these: they do not change
    scores = vectors @ text_vector(sys.argv[1])
    for place in np.argsort(-scores)[:5]:
        print(f"{scores[place]:.3f}  {paths[place]}")
elif __name__ == "__main__":
    share = check()
    print(f"Largest difference: {share:.2f} of the tolerance: {'passed' if share <= 1 else 'FAILED'}")
    sys.exit(share > 1)
