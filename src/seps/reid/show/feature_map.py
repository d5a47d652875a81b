"""The features of shots as points of a plane: a colour per identity, a shape per camera, queries ringed."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from typing import Literal

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from seps.reid.data import ReidDataset, ReidReader, ReidRecord
from seps.reid.evaluate import default_cases, extract
from seps.reid.network.model import Pattern, ReidModel
from seps.reid.show.embedding import explained, pca, tsne

Projection = Literal["tsne", "pca"]
SIZE, BORDER, LEGEND, RADIUS = 900, 50, 210, 9
# Corners of each camera's mark, on the unit circle; the first is a circle. More cameras than marks begin anew.
MARKS: tuple[tuple[tuple[float, float], ...], ...] = (
    (),
    ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    ((0, -1.15), (1.05, 0.75), (-1.05, 0.75)),
    ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)),
    ((0, 1.15), (1.05, -0.75), (-1.05, -0.75)),
    ((-0.4, -1), (0.4, -1), (0.4, -0.4), (1, -0.4), (1, 0.4), (0.4, 0.4), (0.4, 1), (-0.4, 1), (-0.4, 0.4), (-1, 0.4),
     (-1, -0.4), (-0.4, -0.4)),
)  # fmt: skip


def shots_of(dataset: ReidDataset, identities: int) -> tuple[list[ReidRecord], int]:
    """Queries, then gallery shots, of some identities spread over those that are queried; and how many are queries."""
    queried = sorted({record.pid for record in dataset.query})
    count = min(identities, len(queried))
    chosen = {queried[number * len(queried) // count] for number in range(count)}
    queries = [record for record in dataset.query if record.pid in chosen]
    if dataset.query == dataset.gallery:
        return queries, len(queries)
    return [*queries, *(record for record in dataset.gallery if record.pid in chosen)], len(queries)


def features_picture(
    model: ReidModel,
    dataset: ReidDataset,
    reader: ReidReader,
    *,
    identities: int = 12,
    projection: Projection = "tsne",
    pattern: Pattern | None = None,
    batch_size: int = 64,
) -> Image.Image:
    """The map of the features of `identities` identities' queries and gallery shots. Raises ValueError without any."""
    records, queries = shots_of(dataset, identities)
    if len(records) < 3:
        raise ValueError(f"A map of features needs three or more shots, and the data set has {len(records)}.")
    case = default_cases(model, pattern=pattern)[0]
    features = extract(model, dataset, records, [case], reader, batch_size=batch_size)[0].flat()
    title = f"{len(records)} shots, pattern {case.pattern}, by "
    if projection == "pca":
        title += f"PCA ({explained(features):.0%} of the variance)"
        points = pca(features)
    else:
        title += "t-SNE (near points are similar; distances between groups mean little)"
        points = tsne(features)
    # Of one shot that is both query and gallery shot nothing need be told apart.
    ringed = 0 if dataset.query == dataset.gallery else queries
    return map_picture(points, records, ringed, title + f". {neighbours(features, dataset, records)}")


def neighbours(features: Tensor, dataset: ReidDataset, records: Sequence[ReidRecord]) -> str:
    """How often the nearest other shot, by the features and not by the plane, is of the same identity or camera."""
    cosines = (features @ features.T).fill_diagonal_(-math.inf)
    nearest = cosines.argmax(dim=1).tolist()
    pairs = [(record, records[index]) for record, index in zip(records, nearest, strict=True)]
    person = sum(a.pid == b.pid for a, b in pairs) / len(pairs)
    camera = sum(a.camid == b.camid for a, b in pairs) / len(pairs)
    return f"Nearest shot: same identity {person:.0%}, same camera {camera:.0%}"


def colour(number: int, count: int) -> tuple[int, int, int]:
    """Colours that follow each other around the circle, every other one darker, so that neighbours differ twice."""
    light = (0.62, 0.42)[number % 2]
    red, green, blue = colorsys.hls_to_rgb(number / max(count, 1), light, 0.75)
    return round(255 * red), round(255 * green), round(255 * blue)


def map_picture(points: Tensor, records: Sequence[ReidRecord], ringed: int, title: str) -> Image.Image:
    """Points (B, 2) of records as a picture with a legend; the first `ringed` are queries."""
    font = ImageFont.load_default(15)
    people = sorted({record.pid for record in records})
    cameras = sorted({record.camid for record in records})
    sheet = Image.new("RGB", (SIZE + LEGEND, SIZE + 2 * BORDER), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((BORDER, 14), title, fill="black", font=ImageFont.load_default(13))
    low, high = points.amin(dim=0), points.amax(dim=0)
    # One scale for both directions: distances are what the picture shows.
    scale = (SIZE - 2 * BORDER) / float((high - low).max().clamp_min(1e-12))
    middle = (low + high) / 2
    placed = ((points - middle) * scale + torch.tensor([SIZE / 2, SIZE / 2 + BORDER])).tolist()
    # Queries last, so that nothing covers them.
    for number in reversed(range(len(records))):
        record = records[number]
        shade = colour(people.index(record.pid), len(people))
        mark(pen, placed[number], cameras.index(record.camid), shade, ring=number < ringed)
    y = BORDER
    for index, camera in enumerate(cameras):
        mark(pen, (SIZE + 20, y + 9), index, (120, 120, 120), ring=False)
        pen.text((SIZE + 42, y), f"camera {camera}", fill="black", font=font)
        y += 24
    if ringed:
        mark(pen, (SIZE + 20, y + 9), 0, (255, 255, 255), ring=True)
        pen.text((SIZE + 42, y), "ringed: a query", fill="black", font=font)
        y += 24
    y += 12
    for index, person in enumerate(people):
        if y > sheet.height - 24:
            pen.text((SIZE + 20, y), f"and {len(people) - index} more", fill="black", font=font)
            break
        pen.rectangle([SIZE + 12, y + 2, SIZE + 28, y + 16], fill=colour(index, len(people)))
        pen.text((SIZE + 42, y), f"identity {person}", fill="black", font=font)
        y += 22
    return sheet


def mark(
    pen: ImageDraw.ImageDraw, at: Sequence[float], camera: int, shade: tuple[int, int, int], *, ring: bool
) -> None:
    """One shot: the shape of its camera in its identity's colour; a query with a black ring."""
    x, y = at
    if ring:
        size = RADIUS + 5
        pen.ellipse([x - size, y - size, x + size, y + size], outline="black", width=2)
    corners = MARKS[camera % len(MARKS)]
    if corners:
        pen.polygon([(x + RADIUS * a, y + RADIUS * b) for a, b in corners], fill=shade, outline=(60, 60, 60))
    else:
        pen.ellipse([x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS], fill=shade, outline=(60, 60, 60))
