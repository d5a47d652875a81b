"""What encoding a photo costs on one thread of this CPU, by torch, OpenVINO and onnxruntime, and what it does to rSum.

    python -m benchmarks.index.indexing_cpu --model base --data DEV.jsonl --train TRAIN.jsonl --photos 200 --out FILE

All ways in one run, in turn, photo by photo; processor time, medians over `--rounds`: compare them as ratios. rSum is
that of the first PHOTOS as gallery and their captions as queries, pixels alone, with all patches. In the row "int8 by
groups" what comes into a linear layer has one scale per 128 values of a token. The other rows with 8-bit integers are
static: one scale per layer, found on 24 training photos, one per output channel for the weights;
in a vision transformer the linear layers alone. They need `--train`, and onnx and onnxruntime. `--whole` measures what
`seps index` does with a photo instead, with and without OpenVINO and the bank; photos per second are 2000 over its sum.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.lines import append_line
from seps.encoders import ViT
from seps.encoders.compiled import CompiledVision, fastest_precision, is_installed, load_openvino, multiplies_bfloat16
from seps.images.shards import read_source
from seps.metrics import recall
from seps.photos.indexing.build import index_folder
from seps.photos.indexing.embedding import ImageJob, Preparer
from seps.photos.store.store import Store
from seps.retrieval.data import decode_all, load_data
from seps.retrieval.engine import patches
from seps.retrieval.engine.faster import half_copy, with_vision
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.engine.pictures import PatchPictures
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.ranking import bank
from seps.scoring import score_matrix

CALIBRATION = 24
Encode = Callable[[Tensor], Tensor]
"""One photo (1, 3, H, W) in [0, 1] -> tokens of the vision encoder."""


def ways(model: RetrievalModel, train: str | None, work: Path) -> Iterator[tuple[str, Encode]]:
    """By name, the first being float32 by torch."""
    yield "torch, float32", model.vision
    half = half_copy(model)
    if half is not None:
        yield "torch, bfloat16", half
    if is_installed():
        yield "OpenVINO, float32", CompiledVision(model.vision, "f32")
        yield "OpenVINO, bfloat16", CompiledVision(model.vision, "bf16")
        if isinstance(model.vision, ViT):
            yield "OpenVINO, int8 by groups, rest bfloat16", CompiledVision(model.vision, "int8")
    if train is None:
        return
    plain, rounded = export(model.vision, work), work / "rounded.onnx"
    quantise(plain, rounded, model, train)
    yield "onnxruntime, float32", onnx_session(plain)
    yield "onnxruntime, int8", onnx_session(rounded)
    if is_installed():
        yield "OpenVINO, int8, rest float32", openvino_file(rounded, "f32")
        yield "OpenVINO, int8, rest bfloat16", openvino_file(rounded, "bf16")


def export(vision: nn.Module, work: Path) -> Path:
    """The encoder as ONNX, prepared for rounding."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    example = torch.zeros(1, 3, *vision.image_size)  # type: ignore[misc]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(vision, (example,), work / "first.onnx", input_names=["x"], opset_version=17, dynamo=False)
    quant_pre_process(work / "first.onnx", work / "plain.onnx")
    return work / "plain.onnx"


def quantise(plain: Path, rounded: Path, model: RetrievalModel, train: str) -> None:
    """Write the encoder with static 8-bit products, calibrated on every 200th training photo."""
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    data = load_data(train)
    photos = decode_all(replace(data, records=data.records[::200][:CALIBRATION]), model.image_size)
    graph = onnx.load(str(plain)).graph
    weights = {tensor.name for tensor in graph.initializer}
    dense = [node.name for node in graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in weights]
    chosen: dict[str, Any] = {"nodes_to_quantize": dense, "op_types_to_quantize": ["MatMul", "Gemm"]}
    if any(node.op_type == "Clip" for node in graph.node):
        chosen = {"op_types_to_quantize": ["Conv", "Add", "Clip"]}

    class Photos:
        """As onnxruntime asks for them."""

        def __init__(self) -> None:
            self.left = iter(photos)

        def get_next(self) -> dict[str, np.ndarray] | None:
            photo = next(self.left, None)
            return None if photo is None else {"x": (photo[None].float() / 255).numpy()}

    quantize_static(
        str(plain), str(rounded), Photos(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, **chosen,
    )  # fmt: skip


def onnx_session(path: Path) -> Encode:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return lambda photo: torch.from_numpy(session.run(None, {"x": photo.numpy()})[0])


def openvino_file(path: Path, precision: str) -> Encode:
    openvino = load_openvino()
    settings = {"INFERENCE_PRECISION_HINT": precision, "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": 1}
    request = openvino.Core().compile_model(str(path), "CPU", settings).create_infer_request()
    return lambda photo: torch.from_numpy(request.infer({0: photo.numpy()})[0].copy())


def small_store(options: argparse.Namespace, model: RetrievalModel, work: Path, count: int) -> Store:
    """A store of the first `count` photos, made with the default options."""
    folder = work / "photos"
    folder.mkdir()
    for number, source in enumerate(load_data(options.data).sources[:count]):
        (folder / f"{number:04}.jpg").write_bytes(read_source(source))
    index_folder(folder, work / "store", model, options.model)
    return Store.open(work / "store")


def whole(options: argparse.Namespace, model: RetrievalModel, work: Path) -> None:
    """Photos as `seps index` prepares them, read, encoded, packed and with their levels, in batches of 16 in turn."""
    jobs = [ImageJob(source, None) for source in load_data(options.data).sources[: 16 * options.rounds]]
    settings, engine = small_store(options, model, work, 4).settings, engine_of(model)
    encoders: dict[str, Any] = {"torch": half_copy(model)}
    if is_installed():
        precisions = dict.fromkeys(["bf16" if multiplies_bfloat16() else "f32", fastest_precision(model.vision)])
        encoders |= {f"OpenVINO, {name}": CompiledVision(model.vision, name) for name in precisions}  # type: ignore
    spent: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for start in range(0, len(jobs), 16):
        for name, encoder in encoders.items():
            for with_bank in (True, False):
                prepare = Preparer(engine, settings.layout, bank=with_bank)
                prepare.set_fast(with_vision(engine, encoder))
                before = time.process_time()  # that of a thread leaves out what OpenVINO's threads do
                made = prepare(jobs[start : start + 16])
                rest = time.process_time() - before - made.decoding
                spent.setdefault((name, with_bank), []).append((1000 * made.decoding / 16, 1000 * rest / 16))
    for (name, with_bank), times in spent.items():
        decoding, encoding = (median(values) for values in zip(*times, strict=True))
        line = {
            "model": options.model,
            "photos": len(jobs),
            "whole": name,
            "bank": with_bank,
            "decoding_ms": decoding,
            "encoding_ms": encoding,
            "photos_per_second_of_two_cores": 2000 / (decoding + encoding),
        }
        append_line(options.out, line)
        print(json.dumps(line), flush=True)


def levels(options: argparse.Namespace, model: RetrievalModel, work: Path) -> None:
    """Levels over the bank, one photo at a time and several at once, in turn: processor time and differences."""
    store = small_store(options, model, work, 16 * options.rounds)
    layout, engine = store.settings.layout, engine_of(model)
    rows = store.select(sorted(store.known()), ["vector", *layout.columns])
    vectors, stored = torch.from_numpy(rows.vectors()), layout.unpack(rows)
    own, ways = bank.bank_of(engine), ("one at a time", "several at once")
    own.texts.pool  # made once per process  # noqa: B018
    spent: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, list[Tensor]] = {way: [] for way in ways}
    for start in range(0, len(vectors), 16):
        some = stored.rows(start, start + 16)
        for way in ways:
            with patch.object(patches, "can_score", lambda net, way=way: way == ways[1]):
                before = time.process_time()
                levels = own.levels(engine, some, vectors[start : start + 16])
            spent[way].append(1000 * (time.process_time() - before) / 16)
            found[way].append(levels)
    line = {
        "model": options.model,
        "data": Path(options.data).name,
        "photos": len(vectors),
        "level_ms": {way: median(times) for way, times in spent.items()},
        "speed": median(spent[ways[0]]) / median(spent[ways[1]]),
        "largest_difference": float((torch.cat(found[ways[0]]) - torch.cat(found[ways[1]])).abs().max()),
    }
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def nearest(options: argparse.Namespace, model: RetrievalModel) -> None:
    """How far levels of fewer sentences of the bank are from those of the nearest 128."""
    data = load_data(options.data)
    data = replace(data, records=data.records[: options.photos])
    pixels = decode_all(data, model.image_size)
    images = ImageFeatures(torch.cat([model.encode_pixels(photo[None].float() / 255) for photo in pixels]))
    described = ImageFeatures(images.tokens, *model.encode_descriptions([one.dense for one in data.records]))
    engine = engine_of(model)
    own = bank.bank_of(engine)
    for name, features in (("pixels", images), ("description", described)):
        pictures = PatchPictures(features, model.vision.num_prefix_tokens)
        close = (engine.vectors(pictures) @ own.vectors.T).topk(128, dim=1).indices
        scores = engine.score(pictures, own.texts, chosen=close)
        for count in (64, 48, 40, 32, 24, 16):
            apart = (bank.level(scores[:, :count]) - bank.level(scores)).abs()
            line = {
                "model": options.model,
                "data": Path(options.data).name,
                "photos": len(pixels),
                "levels_of": name,
                "nearest": count,
                "largest_difference": float(apart.max()),
                "photos_with_another_level": int((apart > 1e-7).sum()),
            }
            append_line(options.out, line)
            print(json.dumps(line), flush=True)


def ten_best(scores: Tensor) -> Tensor:
    """(10, T) photos of each caption, best first."""
    return scores.topk(10, dim=0).indices


def scorer(options: argparse.Namespace, model: RetrievalModel) -> None:
    """All pairs of the photos and their captions on one thread with products of each precision, in turn."""
    data = load_data(options.data)
    data = replace(data, records=data.records[: options.photos])
    pixels = decode_all(data, model.image_size)
    images = torch.cat([model.encode_pixels(photo[None].float() / 255) for photo in pixels])
    texts, owner = model.encode_texts(data.captions), torch.as_tensor(data.image_of_caption)
    net = model.head.net  # type: ignore[union-attr]
    spent: dict[str, list[float]] = {}
    scores: dict[str, Tensor] = {}
    for _ in range(options.rounds):
        for precision in ("float32", "bfloat16", "half"):
            start = time.process_time()
            scores[precision] = score_matrix(net, images, texts.words, texts.lengths, precision=precision)  # type: ignore
            spent.setdefault(precision, []).append(time.process_time() - start)
    exact = scores["float32"]
    for precision, found in scores.items():
        line = {
            "model": options.model,
            "scorer": precision,
            "pairs": exact.numel(),
            "speed": median(spent["float32"]) / median(spent[precision]),
            "largest_difference": float((found - exact).abs().max()),
            "captions_with_other_ten_best": float((ten_best(found) != ten_best(exact)).any(dim=0).float().mean()),
            "rsum": recall(found, owner).rsum,
        }
        append_line(options.out, line)
        print(json.dumps(line), flush=True)


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--data", required=True)
    parser.add_argument("--train", help="JSONL of training photos, for the rows with 8-bit integers")
    parser.add_argument("--photos", type=int, default=200, help="0: time the ways alone")
    parser.add_argument("--skip", type=int, default=0, help="photos at the beginning that are left out")
    parser.add_argument("--only", default="", metavar="WORDS", help="beside torch, the ways with these words alone")
    parser.add_argument("--whole", action="store_true", help="all that `seps index` does with a photo but writing it")
    parser.add_argument("--levels", action="store_true", help="the levels over the bank alone, as before and as now")
    parser.add_argument("--scorer", action="store_true", help="the scorer instead, with products of each precision")
    parser.add_argument("--nearest", action="store_true", help="how many sentences of the bank a level needs, instead")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = from_pretrained(options.model).eval()
    if options.whole or options.levels:
        with tempfile.TemporaryDirectory() as work:
            (whole if options.whole else levels)(options, model, Path(work))
        return 0
    if options.scorer or options.nearest:
        (scorer if options.scorer else nearest)(options, model)
        return 0
    data = load_data(options.data)
    data = replace(data, records=data.records[options.skip :][: max(options.photos, 8)])
    pixels = decode_all(data, model.image_size)
    owner = torch.as_tensor(data.image_of_caption)
    texts = model.encode_texts(data.captions) if options.photos else None
    with tempfile.TemporaryDirectory() as work:
        found = ways(model, options.train, Path(work))
        first = next(found)
        encoders = dict([first, *(way for way in found if options.only in way[0])])
        spent: dict[str, list[float]] = {name: [] for name in encoders}
        for turn in range(options.rounds + 1):
            photo = pixels[turn % len(pixels)][None].float() / 255
            for name, encode in encoders.items():
                start = time.process_time()
                encode(photo)
                spent[name].append(1000 * (time.process_time() - start))
        usual = "torch, bfloat16" if "torch, bfloat16" in encoders else "torch, float32"
        exact: Tensor | None = None
        for name, encode in encoders.items():
            seen = torch.cat([encode(photo[None].float() / 255).float() for photo in pixels])
            tokens = model.project_patches(seen).float()
            exact = tokens if exact is None else exact
            cosines = F.cosine_similarity(tokens, exact, dim=-1)
            line = {
                "model": options.model,
                "data": Path(options.data).name,
                "photos": options.photos,
                "skip": options.skip,
                "way": name,
                "ms_per_photo": median(spent[name][1:]),
                "speed": median(spent[usual][1:]) / median(spent[name][1:]),
                "cosine_mean": float(cosines.mean()),
                "cosine_least": float(cosines.min()),
                "rsum": None if texts is None else recall(model.score(ImageFeatures(tokens), texts), owner).rsum,
            }
            append_line(options.out, line)
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
