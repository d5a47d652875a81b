"""One vector per picture and text: the two graphs of `seps export --vector` against torch, by figures, size and speed.

    python -m benchmarks.quality.vectors --model base --data dev.jsonl --json docs/results/vectors-base.json

Speed: photos a second of the picture graph alone, on as many cores as the process has.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from tokenizers import Tokenizer

from benchmarks.common.machine import describe
from seps.images.decoding import read_image
from seps.metrics import recall
from seps.retrieval.data import load_jsonl
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.vector_export import ImageVector, TextVector, export_vectors

SPEED = 48
"""Photos whose encoding is timed."""


def session(path: Path, threads: int) -> Any:
    """A graph in onnxruntime on `threads` cores."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Print a row per kind of vector."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit", type=int, help="photos at most")
    parser.add_argument("--bits", type=int, nargs="+", choices=(32, 8), default=(32, 8), help="graphs of these numbers")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    model, data = from_pretrained(options.model), load_jsonl(options.data)
    records = data.records[: options.limit]
    captions = [caption for record in records for caption in record.captions]
    owner = torch.tensor([place for place, record in enumerate(records) for _ in record.captions])
    threads = len(os.sched_getaffinity(0))
    rows: dict[str, dict[str, float]] = {}

    images, texts = [], []
    with torch.no_grad():
        for record in records:
            pixels = read_image(record.source, model.image_size)[None] / 255
            images.append(ImageVector(model)(pixels)[0].numpy())
        for caption in captions:
            tokens = model.text.tokenize([caption])
            texts.append(TextVector(model)(tokens.ids, tokens.mask)[0].numpy())
    wanted = [np.stack(images), np.stack(texts)]
    rows["torch"] = {"rsum": rsum(*wanted, owner)}

    for bits in options.bits:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "export"
            export_vectors(model, out, bits=bits)  # type: ignore[arg-type]
            image, text = session(out / "image.onnx", threads), session(out / "text.onnx", threads)
            tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
            megabytes = sum((out / name).stat().st_size for name in ("image.onnx", "text.onnx")) / 1e6
            inputs = [read_image(record.source, model.image_size).numpy()[None] / 255 for record in records]
            inputs = [np.asarray(one, dtype=np.float32) for one in inputs]
            image.run(None, {"pixels": inputs[0]})
            start = time.perf_counter()
            for one in inputs[:SPEED]:
                image.run(None, {"pixels": one})
            seconds = time.perf_counter() - start
            images = [image.run(None, {"pixels": one})[0][0] for one in inputs]
            texts = []
            for caption in captions:
                ids = np.array([tokenizer.encode(caption).ids])
                texts.append(text.run(None, {"ids": ids, "mask": np.ones_like(ids, dtype=bool)})[0][0])
            made = [np.stack(images), np.stack(texts)]
            rows[f"{bits} bits"] = {
                "rsum": rsum(*made, owner),
                "image_cosine": float((made[0] * wanted[0]).sum(axis=1).mean()),
                "text_cosine": float((made[1] * wanted[1]).sum(axis=1).mean()),
                "megabytes": megabytes,
                "photos_a_second": min(SPEED, len(inputs)) / seconds,
            }
    for name, row in rows.items():
        print(f"{name:<8}", *(f"{key} {value:.4f}" for key, value in row.items()))
    if options.json:
        facts = {"model": options.model, "photos": len(records), "cores": threads, "rows": rows}
        machine = describe(torch.device("cpu"))
        Path(options.json).write_text(json.dumps({**facts, "machine": machine}, indent=1) + "\n", encoding="utf-8")


def rsum(images: np.ndarray, texts: np.ndarray, owner: torch.Tensor) -> float:
    """Of the cosines of all pairs."""
    return recall(torch.from_numpy(images @ texts.T), owner).rsum


if __name__ == "__main__":
    main()
