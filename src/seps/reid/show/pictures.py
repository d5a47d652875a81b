"""Pictures: ranked lists with right and wrong marked, and the patches that were kept, on all sensors side by side.

Right and wrong are told by colour and by symbol (a tick, a cross), so that no one depends on the colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from seps.method.checks import evaluating
from seps.reid.data import ReidDataset, ReidReader, ReidRecord
from seps.reid.data.transforms import unit_float
from seps.reid.evaluate import default_cases, distances, extract
from seps.reid.network.model import Pattern, ReidModel
from seps.reid.network.text import texts_of

Mark = Literal["query", "right", "wrong"]
# Blue and orange stay apart for people who do not tell red from green.
COLOURS: dict[Mark, tuple[int, int, int]] = {"query": (70, 70, 70), "right": (0, 114, 178), "wrong": (213, 94, 0)}
FRAME, BAR, GAP = 4, 22, 8


def strip(pixels: Tensor) -> Image.Image:
    """Sensors side by side: (M, 3, H, W) bytes -> one picture (H, M W)."""
    return Image.fromarray(torch.cat(list(pixels), dim=2).permute(1, 2, 0).contiguous().numpy())


def framed(picture: Image.Image, mark: Mark, text: str) -> Image.Image:
    """The picture in a frame of the mark's colour, under a bar with its symbol and a text."""
    width, height = picture.width + 2 * FRAME, picture.height + 2 * FRAME + BAR
    tile = Image.new("RGB", (width, height), COLOURS[mark])
    tile.paste(picture, (FRAME, BAR + FRAME))
    pen = ImageDraw.Draw(tile)
    left, top, size = FRAME + 2, 5, 12
    if mark == "right":
        points = [(left, top + size // 2), (left + size // 3, top + size), (left + size, top)]
        pen.line(points, fill="white", width=3)
    elif mark == "wrong":
        pen.line([(left, top), (left + size, top + size)], fill="white", width=3)
        pen.line([(left, top + size), (left + size, top)], fill="white", width=3)
    else:
        pen.ellipse([left, top, left + size, top + size], outline="white", width=3)
    pen.text((left + size + 5, top), text, fill="white")
    return tile


def stack(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Rows of pictures under each other on white."""
    width = max(sum(tile.width + GAP for tile in row) for row in rows) + GAP
    height = sum(max(tile.height for tile in row) + GAP for row in rows) + GAP
    sheet = Image.new("RGB", (width, height), "white")
    top = GAP
    for row in rows:
        left = GAP
        for tile in row:
            sheet.paste(tile, (left, top))
            left += tile.width + GAP
        top += max(tile.height for tile in row) + GAP
    return sheet


def ranked_picture(
    dataset: ReidDataset, reader: ReidReader, matrix: Tensor, queries: Sequence[int], places: int = 5
) -> Image.Image:
    """One row per query (its number in `dataset.query`): the query, then its `places` nearest gallery shots.

    matrix: distances (Q, G). Shots that the data set's rule passes over are not shown.
    """
    rows = []
    for number in queries:
        record = dataset.query[number]
        row = [framed(strip(reader.read(record)), "query", f"query  id {record.pid}  cam {record.camid}")]
        order = [int(i) for i in matrix[number].sort(stable=True).indices]
        shown = [i for i in order if not passed_over(dataset, record, dataset.gallery[i])][:places]
        for place, index in enumerate(shown, 1):
            found = dataset.gallery[index]
            mark: Mark = "right" if found.pid == record.pid else "wrong"
            text = f"{place}.  id {found.pid}  cam {found.camid}  {float(matrix[number, index]):.3f}"
            row.append(framed(strip(reader.read(found)), mark, text))
        rows.append(row)
    return stack(rows)


def passed_over(dataset: ReidDataset, query: ReidRecord, found: ReidRecord) -> bool:
    """Whether the data set's rule leaves this gallery shot out for this query."""
    same = found.sceneid == query.sceneid if dataset.excludes == "scene" else found.camid == query.camid
    return same and found.pid == query.pid


def kept_picture(
    model: ReidModel, dataset: ReidDataset, reader: ReidReader, records: Sequence[ReidRecord]
) -> Image.Image:
    """One row per shot: its sensors as they are, then with the patches that were not kept dimmed.

    Raises ValueError for a model without selection.
    """
    if model.sdtps is None:
        raise ValueError("This model has fusion 'concat' and selects no patches: there is nothing to show.")
    device = next(model.parameters()).device
    pixels = reader.batch(records)
    cameras = torch.tensor(dataset.camera_indices(records), device=device)
    with evaluating(model), torch.no_grad():
        texts = texts_of(reader, records) if model.text_head is not None else None
        keep = model.embed(
            unit_float(pixels.to(device)), cameras, texts=None if texts is None else texts.to(device)
        ).keep
    if keep is None:
        raise ValueError("The model returned no decisions.")
    rows = []
    for record, shot, masks in zip(records, pixels, keep.cpu(), strict=True):
        plain = framed(strip(shot), "query", f"id {record.pid}  " + " / ".join(model.modalities))
        dimmed = torch.stack([dim(image, mask, model.grid) for image, mask in zip(shot, masks, strict=True)])
        parts = " / ".join(f"{float(mask.mean()):.0%}" for mask in masks)
        rows.append([plain, framed(strip(dimmed), "query", f"kept {parts}")])
    return stack(rows)


def dim(image: Tensor, mask: Tensor, grid: tuple[int, int]) -> Tensor:
    """(3, H, W) bytes with the patches whose mask (N,) is 0 at a quarter of their light and hatched."""
    height, width = image.shape[1:]
    # With overlapping patches a pixel belongs to the nearest one.
    rows = torch.arange(height) * grid[0] // height
    columns = torch.arange(width) * grid[1] // width
    kept = mask.view(grid)[rows[:, None], columns[None, :]] > 0.5
    hatch = (torch.arange(height)[:, None] + torch.arange(width)[None, :]) % 8 == 0
    dark = image.float() * 0.25 + 60 * hatch
    return torch.where(kept, image.float(), dark).clamp(0, 255).to(torch.uint8)


def ranking(
    model: ReidModel,
    dataset: ReidDataset,
    reader: ReidReader,
    batch_size: int = 64,
    pattern: Pattern | None = None,
) -> Tensor:
    """Distances (Q, G) of the data set with all sensors, as the pictures show them."""
    cases = default_cases(model, pattern=pattern)
    query = extract(model, dataset, dataset.query, cases, reader, batch_size=batch_size)[0]
    same = dataset.query == dataset.gallery
    gallery = query if same else extract(model, dataset, dataset.gallery, cases, reader, batch_size=batch_size)[0]
    return distances(query, gallery)
