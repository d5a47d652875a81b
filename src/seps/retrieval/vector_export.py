"""A retrieval model as one vector per picture and per text: two small ONNX files for programs without torch.

    image.onnx         pixels (B, 3, H, W) in [0, 1] -> vector (B, C)
    text.onnx          ids and mask (T, M) -> vector (T, C); short queries by their own projection where there is one
    tokenizer.json     makes the ids and the mask of a text
    preprocessing.json makes the pixels of a picture
    conformance.json   texts and pictures with the vectors that a correct installation gives
    search.py, search.mjs   examples that need neither torch nor SEPS
    README.md          the card: licence, languages, size, usage

A vector is the normalised mean of the patches, or of the words; the product of two vectors is their cosine. Weights are
8-bit integers unless `bits=32`, and so are the products of the picture's graph. The layout "immich" has the names and
inputs that Immich's machine learning reads.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import shutil
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional as F

from seps.export import ExportError, export_onnx, open_session
from seps.files import write_json
from seps.images.sizes import stored_size
from seps.retrieval.export import ShortQueries, publish, vocabulary_size
from seps.retrieval.model import RetrievalModel

Layout = Literal["plain", "immich"]
Bits = Literal[8, 32]
TOLERANCE = {8: 0.02, 32: 1e-4}
"""By bits, the largest difference of a value from conformance.json that counts as correct.

Processors round 8-bit products in different ways.
"""
TEXTS = (
    "a dog",
    "a red car on a street",
    "two children play football on green grass",
    "Cafés, naïve façades & 3 umbrellas!",
    "sunset over the sea " * 12,
)
"""Of conformance.json: a word, a sentence, accents and signs, and more words than the model reads."""
_LARGE_TABLE = 2**16
"""Values of a table from which it is rounded."""
_EXAMPLES = ("search.py", "search.mjs", "package.json")


@dataclass(frozen=True)
class VectorExport:
    """What was written: megabytes by graph, and the least cosine with torch over the check's texts and pictures."""

    megabytes: dict[str, float]
    cosine: float


class ImageVector(nn.Module):
    """Pixels to one vector of length 1."""

    def __init__(self, model: RetrievalModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] -> (B, C)."""
        patches = self.model.encode_pixels(pixels)[:, self.model.vision.num_prefix_tokens :]  # (B, N, C)
        return F.normalize(patches.mean(dim=1), dim=-1)


class TextVector(nn.Module):
    """Token ids to one vector of length 1; more tokens than the model reads are cut off."""

    def __init__(self, model: RetrievalModel) -> None:
        super().__init__()
        self.model = model
        self.short = ShortQueries(model) if model.config.short_queries else None

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Ids and mask (T, M) -> (T, C)."""
        most = min(self.model.config.max_words, self.model.text.max_length)
        ids, mask = ids[:, :most], mask[:, :most]
        short = None if self.short is None else self.short(ids, mask)  # (T,)
        words = self.model.encode_ids(ids, mask, short)  # (T, M, C)
        valid = self.model.is_word(ids, mask).to(words.dtype)[:, :, None]  # (T, M, 1)
        return F.normalize((words * valid).sum(dim=1) / valid.sum(dim=1).clamp_min(1), dim=-1)


class EightBitTable(nn.Module):
    """A matrix as 8-bit integers with one scale per row; what is computed with it is float32."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        scale = matrix.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        self.num_embeddings = len(matrix)
        self.register_buffer("scale", scale)
        self.register_buffer("values", (matrix / scale).round().to(torch.int8))


class EightBitEmbedding(EightBitTable):
    """An embedding with 8-bit rows."""

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (T, M) -> (T, M, C)."""
        rows: Tensor = F.embedding(ids, self.values)  # type: ignore[arg-type]
        return rows.float() * F.embedding(ids, self.scale)  # type: ignore[arg-type]


class EightBitLinear(EightBitTable):
    """A linear layer with 8-bit weights, one scale per output. The products are float32.

    Inputs of a text encoder have outliers, so rounding them as well would cost far more than rounding the weights.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.weight.detach())
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., D)."""
        return F.linear(x, self.values.float() * self.scale, self.bias)  # type: ignore[operator]


def _with_eight_bits(model: RetrievalModel) -> RetrievalModel:
    """A copy of the model whose text side has 8-bit weights."""
    model = copy.deepcopy(model)
    for module in [model, *model.text.modules()]:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Embedding):
                setattr(module, name, EightBitEmbedding(child.weight.detach()))
            elif isinstance(child, nn.Linear) and (module is not model or name in ("project_words", "project_short")):
                setattr(module, name, EightBitLinear(child))
    return model


class PaddedTextVector(nn.Module):
    """As `TextVector`, for ids (T, M) int32 alone, filled up with the id of [PAD]."""

    def __init__(self, model: RetrievalModel) -> None:
        super().__init__()
        self.vector, self.padding = TextVector(model), int(model.text.tokenizer.pad_token_id)

    def forward(self, text: Tensor) -> Tensor:
        """Ids (T, M) -> (T, C)."""
        ids = text.long()
        vector: Tensor = self.vector(ids, ids != self.padding)
        return vector


def export_vectors(
    model: RetrievalModel,
    folder: Path | str,
    *,
    name: str = "model",
    layout: Layout = "plain",
    bits: Bits = 8,
    batch: int | None = None,
) -> VectorExport:
    """Write the files of this module's head into `folder`.

    Args:
        model: its score by one vector does not use descriptions or the selection of patches.
        name: of the model, for the card.
        layout: "plain", or "immich" for the folder of a model of Immich's machine learning.
        bits: of weights and products, 8 or 32.
        batch: fixed number of pictures per call of image.onnx, for runtimes that need static shapes; None: any.

    Raises:
        ExportError: without the extra `export`, for a tokenizer without tokenizer.json, or where a file that no export
            wrote is in the way.
    """
    model = model.to("cpu").eval()

    def write(staged: Path) -> tuple[VectorExport, dict[str, Any]]:
        graphs = _write_graphs(model, staged, layout, bits, batch)
        write_layout = _write_immich if layout == "immich" else _write_plain
        cosine = write_layout(model, staged, graphs, name, bits)
        sizes = {path.relative_to(staged).as_posix(): path.stat().st_size / 1e6 for path in graphs}
        return VectorExport(sizes, cosine), {"vector": True, "layout": layout, "bits": bits, "batch": batch}

    return publish(folder, write)


def _write_graphs(
    model: RetrievalModel, folder: Path, layout: Layout, bits: Bits, batch: int | None
) -> tuple[Path, Path]:
    """Write both graphs; their paths, the image's first."""
    immich = layout == "immich"
    image, text = (folder / name for name in (("visual", "textual") if immich else ("", "")))
    paths = (image / ("model.onnx" if immich else "image.onnx"), text / ("model.onnx" if immich else "text.onnx"))
    for path in paths:
        path.parent.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(batch or 2, 3, *model.image_size, generator=generator)
    pixel_name = "image" if immich else "pixels"
    axes: dict[str, dict[int, str]] = {} if batch else {pixel_name: {0: "picture"}}
    _write_graph(ImageVector(model), paths[0], {pixel_name: pixels}, axes, "vector")
    if bits == 8:
        _round_products(paths[0])
        model = _with_eight_bits(model)
    mask = torch.arange(7)[None, :] < torch.tensor([7, 4, 3])[:, None]
    ids = torch.randint(0, vocabulary_size(model), (3, 7), generator=generator)
    words = {0: "text", 1: "word"}
    if immich:
        inputs = {"text": torch.where(mask, ids, model.text.tokenizer.pad_token_id).int()}
        _write_graph(PaddedTextVector(model), paths[1], inputs, {"text": words}, "vector")
    else:
        inputs = {"ids": ids, "mask": mask}
        _write_graph(TextVector(model), paths[1], inputs, {"ids": words, "mask": words}, "vector")
    return paths


def _write_graph(
    module: nn.Module, path: Path, inputs: dict[str, Tensor], axes: dict[str, dict[int, str]], output: str
) -> None:
    export_onnx(module.eval(), path, inputs, axes, [output])


def _round_products(path: Path) -> None:
    """Weights of a graph to 8 bits with one scale per output; what comes into a product is rounded as it comes."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as made:
        prepared = Path(made) / "prepared.onnx"
        quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
        quantize_dynamic(str(prepared), str(path), per_channel=True, weight_type=QuantType.QInt8)
    _round_tables(path)


def _round_tables(path: Path) -> None:
    """Large float32 tables that a graph adds, such as those of positions, to 16 bits."""
    import onnx
    from onnx import helper, numpy_helper

    graph = onnx.load(str(path))
    for table in [one for one in graph.graph.initializer if one.data_type == onnx.TensorProto.FLOAT]:
        values, name = numpy_helper.to_array(table), f"{table.name}_half"
        if values.size >= _LARGE_TABLE:
            graph.graph.initializer.append(numpy_helper.from_array(values.astype(np.float16), name))
            graph.graph.node.insert(0, helper.make_node("Cast", [name], [table.name], to=onnx.TensorProto.FLOAT))
            graph.graph.initializer.remove(table)
    onnx.save(graph, str(path))


def _write_tokenizer(model: RetrievalModel, folder: Path) -> None:
    """tokenizer.json without padding and truncation: the caller pads, and the graph cuts."""
    with tempfile.TemporaryDirectory() as made:
        model.text.tokenizer.save_pretrained(made)
        path = Path(made) / "tokenizer.json"
        if not path.is_file():
            raise ExportError(
                f"The text encoder {model.config.text} has no tokenizer.json; a vector export needs a fast tokenizer."
            )
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        tokenizer |= {"padding": None, "truncation": None}
        write_json(folder / "tokenizer.json", tokenizer)
        shutil.copyfile(Path(made) / "tokenizer_config.json", folder / "tokenizer_config.json")


def _write_plain(model: RetrievalModel, folder: Path, graphs: tuple[Path, Path], name: str, bits: Bits) -> float:
    _write_tokenizer(model, folder)
    height, width = model.image_size
    stored = stored_size(model.image_size)
    write_json(
        folder / "preprocessing.json",
        {
            "color": "RGB, upright by EXIF, transparency on white",
            "resize": [
                {"width": stored[1], "height": stored[0], "keep_aspect": False, "filter": "bicubic", "antialias": True},
                {"width": width, "height": height, "keep_aspect": False, "filter": "bilinear", "antialias": False},
            ],
            "scale": "value / 255",
            "layout": "NCHW float32",
            "padding_id": int(model.text.tokenizer.pad_token_id),
            "most_tokens": model.config.max_words,
        },
    )
    cosine = _write_conformance(model, folder, graphs, bits)
    for file in _EXAMPLES:
        source = resources.files("seps") / "assets" / "vector_export" / file
        (folder / file).write_bytes(source.read_bytes())
    megabytes = sum(path.stat().st_size for path in graphs) / 1e6
    card = (resources.files("seps") / "assets" / "vector_export" / "README.md").read_text(encoding="utf-8")
    facts = {
        "name": name,
        "languages": ", ".join(model.languages) or "not stated",
        "megabytes": f"{megabytes:.1f}",
        "width": str(model.config.embed_size),
        "size": f"{width} x {height}",
        "bits": str(bits),
        "cosine": f"{cosine:.4f}",
    }
    for key, value in facts.items():
        card = card.replace("{" + key + "}", value)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return cosine


def _write_conformance(model: RetrievalModel, folder: Path, graphs: tuple[Path, Path], bits: Bits) -> float:
    """Texts and pictures with torch's vectors, and the least cosine of the graphs with them."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    image, text = (open_session(path) for path in graphs)
    records: dict[str, list[dict[str, Any]]] = {"texts": [], "pictures": []}
    least = 1.0
    with torch.no_grad():
        for sentence in TEXTS:
            ids = torch.tensor([tokenizer.encode(sentence).ids])
            mask = torch.ones_like(ids, dtype=torch.bool)
            vector = TextVector(model)(ids, mask)[0].numpy()
            made = text.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0][0]
            least = min(least, float(vector @ made))
            records["texts"].append({"text": sentence, "ids": ids[0].tolist(), "vector": _rounded(vector)})
        for picture in drawn_pictures(model.image_size):
            buffer = io.BytesIO()
            picture.save(buffer, "PNG", optimize=True)
            pixels = torch.from_numpy(np.array(picture, dtype=np.float32).transpose(2, 0, 1)[None] / 255)
            vector = ImageVector(model)(pixels)[0].numpy()
            count = image.get_inputs()[0].shape[0]
            batch = pixels.expand(count if isinstance(count, int) else 1, -1, -1, -1).contiguous()
            made = image.run(None, {"pixels": batch.numpy()})[0][0]
            least = min(least, float(vector @ made))
            records["pictures"].append(
                {"png": base64.b64encode(buffer.getvalue()).decode(), "vector": _rounded(vector)}
            )
    write_json(folder / "conformance.json", {"tolerance": TOLERANCE[bits], **records})
    return least


def _rounded(vector: Any) -> list[float]:
    return [round(float(value), 6) for value in vector]


def drawn_pictures(size: tuple[int, int]) -> list[Image.Image]:
    """A scene, stripes and a ball, in the model's own size (height, width), so that no way of resizing differs."""
    height, width = size
    scene = Image.new("RGB", (width, height), (120, 180, 240))
    draw = ImageDraw.Draw(scene)
    draw.rectangle((0, height * 2 // 3, width, height), fill=(60, 140, 60))
    draw.polygon(
        ((width // 4, height * 2 // 3), (width // 2, height // 4), (width * 3 // 4, height * 2 // 3)),
        fill=(110, 90, 80),
    )
    stripes = Image.new("RGB", (width, height), (240, 240, 235))
    draw = ImageDraw.Draw(stripes)
    for left in range(0, width, 20):
        draw.rectangle((left, 0, left + 9, height), fill=(30, 30, 40))
    ball = Image.new("RGB", (width, height), (200, 190, 170))
    draw = ImageDraw.Draw(ball)
    draw.ellipse((width // 4, height // 4, width * 3 // 4, height * 3 // 4), fill=(210, 40, 40), outline=(90, 10, 10))
    return [scene, stripes, ball]


def _write_immich(model: RetrievalModel, folder: Path, graphs: tuple[Path, Path], name: str, bits: Bits) -> float:
    textual, visual = folder / "textual", folder / "visual"
    _write_tokenizer(model, textual)
    height, width = model.image_size
    if height != width:
        raise ExportError(f"Immich takes square pictures, and the model takes {width} x {height}; use another layout.")
    write_json(
        folder / "config.json",
        {
            "embed_dim": model.config.embed_size,
            "vision_cfg": {"image_size": width},
            "text_cfg": {"context_length": model.config.max_words},
        },
    )
    write_json(
        visual / "preprocess_cfg.json",
        {
            "size": [height, width],
            "mode": "RGB",
            "mean": [0.0, 0.0, 0.0],
            "std": [1.0, 1.0, 1.0],
            "interpolation": "bicubic",
            "resize_mode": "squash",
            "fill_color": 0,
        },
    )
    session = open_session(graphs[0])
    least = 1.0
    for picture in drawn_pictures(model.image_size):
        pixels = np.array(picture, dtype=np.float32).transpose(2, 0, 1)[None] / 255
        with torch.no_grad():
            vector = ImageVector(model)(torch.from_numpy(pixels))[0].numpy()
        least = min(least, float(vector @ session.run(None, {"image": pixels})[0][0]))
    return least
