"""The main job on the photos that ship with the package: embed them, answer queries, show what was kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from seps.method.encoded import Texts
from seps.metrics import RetrievalMetrics, recall
from seps.retrieval.config import DEFAULT_MODEL
from seps.retrieval.data import RetrievalDataset, decode_all, load_jsonl
from seps.retrieval.evaluate.encoding import StageProgress, encode_images
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained

QUERIES = (
    "a black dog in the woods",
    "people swimming at the beach",
    "a cup of coffee",
    "a train or a city street",
    "an astronaut in a space suit",
)
SHOWN = 4
"""Photos per query."""
TILE = 192
MARGIN = 10
TITLE = 34
INK, PAPER = (24, 24, 27), (250, 250, 249)


@dataclass(frozen=True)
class QueryAnswer:
    """The best photos for one query, by name, with and without the photos' descriptions."""

    query: str
    pixels_only: list[tuple[str, float]]
    with_description: list[tuple[str, float]]


@dataclass(frozen=True)
class DemoResult:
    """What the demo found."""

    images: int
    answers: list[QueryAnswer]
    pixels_only: RetrievalMetrics
    with_description: RetrievalMetrics
    picture: Image.Image


def gallery_file() -> Path:
    """The JSONL of the photos that ship with the package."""
    return Path(str(files("seps"))) / "assets" / "gallery" / "gallery.jsonl"


def _best(dataset: RetrievalDataset, scores: Tensor) -> list[tuple[str, float]]:
    order = scores.argsort(descending=True, stable=True)[:SHOWN].tolist()
    return [(dataset.records[i].id, float(scores[i])) for i in order]


def _sheet(
    model: RetrievalModel,
    dataset: RetrievalDataset,
    images: ImageFeatures,
    pixels: Tensor,
    queries: Sequence[str],
    scores: Tensor,
) -> Image.Image:
    net = model.head.network
    if net is None:
        raise ValueError(f"The demo shows kept patches, but head {model.config.head!r} keeps none.")
    texts = model.encode_texts(queries)
    rows = []
    for column, query in enumerate(queries):
        chosen = scores[:, column].argsort(descending=True, stable=True)[:SHOWN]
        dense = None if images.dense is None else images.dense[chosen]
        lengths = None if images.dense_lengths is None else images.dense_lengths[chosen]
        side = net.encode_images(images.tokens[chosen], dense=dense, dense_lengths=lengths)
        text = Texts.of(texts.words[column : column + 1], texts.mask[column : column + 1])
        keep = net.select(side, text)[0].keep[0]
        photos = [
            (overlay(pixels[i], keep[place], model.vision.grid), f"{dataset.records[i].id}  {scores[i, column]:.2f}")
            for place, i in enumerate(chosen.tolist())
        ]
        rows.append((query, photos))
    return result_sheet(rows, "Patches each query kept (bright) and dropped (dark)")


@torch.no_grad()
def run_demo(
    model: RetrievalModel | str = DEFAULT_MODEL,
    queries: Sequence[str] = QUERIES,
    *,
    photos: int | None = None,
    progress: StageProgress | None = None,
) -> DemoResult:
    """Embed the shipped gallery, or its first `photos`, and answer `queries` with and without their descriptions."""
    if isinstance(model, str):
        model = from_pretrained(model)
    dataset = load_jsonl(gallery_file())
    if photos is not None:
        dataset = dataset.subset(range(photos))
    pixels = decode_all(dataset, model.image_size)
    tokens = encode_images(model, dataset, pixels=pixels, progress=progress)
    bare = ImageFeatures(tokens)
    full = ImageFeatures(tokens, *model.encode_descriptions(dataset.dense))
    texts = model.encode_texts(queries)
    captions = model.encode_texts(dataset.captions)
    scores = {name: model.score(images, texts) for name, images in (("bare", bare), ("full", full))}
    answers = [
        QueryAnswer(query, _best(dataset, scores["bare"][:, i]), _best(dataset, scores["full"][:, i]))
        for i, query in enumerate(queries)
    ]
    return DemoResult(
        len(dataset),
        answers,
        recall(model.score(bare, captions), dataset.image_of_caption),
        recall(model.score(full, captions), dataset.image_of_caption),
        _sheet(model, dataset, full, pixels, queries, scores["full"]),
    )


def overlay(pixels: Tensor, keep: Tensor, grid: tuple[int, int]) -> Image.Image:
    """Pixels (3, H, W) uint8 with the patches that `keep` (N,) drops darkened and grey, each a cell of `grid`."""
    photo = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((TILE, TILE), Image.Resampling.BICUBIC)
    cells = (keep.reshape(grid).numpy() > 0.5).astype(np.uint8) * 255
    mask = Image.fromarray(cells).resize((TILE, TILE), Image.Resampling.NEAREST)
    dimmed = Image.blend(photo.convert("L").convert("RGB"), Image.new("RGB", photo.size, INK), 0.55)
    return Image.composite(photo, dimmed, mask)


def result_sheet(rows: Sequence[tuple[str, Sequence[tuple[Image.Image, str]]]], title: str) -> Image.Image:
    """One row per query: its words, then its best photos, each with what to write under it."""
    columns = max(len(photos) for _, photos in rows)
    height = MARGIN + TITLE + len(rows) * (TITLE + TILE + 22 + MARGIN)
    sheet = Image.new("RGB", (MARGIN + columns * (TILE + MARGIN), height), PAPER)
    pen = ImageDraw.Draw(sheet)
    large, small = ImageFont.load_default(17), ImageFont.load_default(12)
    pen.text((MARGIN, MARGIN), title, INK, font=large)
    top = MARGIN + TITLE
    for query, photos in rows:
        pen.text((MARGIN, top + 6), f"“{query}”", INK, font=large)
        for column, (photo, label) in enumerate(photos):
            left = MARGIN + column * (TILE + MARGIN)
            sheet.paste(photo, (left, top + TITLE))
            pen.text((left, top + TITLE + TILE + 4), label, INK, font=small)
        top += TITLE + TILE + 22 + MARGIN
    return sheet
