"""Where a match comes from: the gradient of two shots' similarity at the pixels, beside the patches that were kept.

Shapes: B shots, M sensors, N patches on a grid, R branches, C width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from seps.method.checks import evaluating
from seps.reid.data import ReidDataset, ReidReader
from seps.reid.data.transforms import unit_float
from seps.reid.evaluate import Features, default_cases, distances
from seps.reid.network.model import Pattern, ReidModel
from seps.reid.network.text import ShotTexts, texts_of
from seps.reid.show.pictures import Mark, dim, framed, passed_over, stack, strip

# From dark to light: the strength can be read without telling the colours apart.
_SHADES = ((0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164))


def gradients_picture(
    model: ReidModel,
    dataset: ReidDataset,
    reader: ReidReader,
    matrix: Tensor,
    queries: Sequence[int],
    pattern: Pattern | None = None,
) -> Image.Image:
    """Two rows per query, the query and its nearest gallery shot: sensors, gradients, and with a selection the patches.

    matrix: distances (Q, G). The gradient is that of the cosine similarity of the two shots.
    """
    rows = []
    for number in queries:
        query = dataset.query[number]
        order = (int(index) for index in matrix[number].sort(stable=True).indices)
        nearest = next((index for index in order if not passed_over(dataset, query, dataset.gallery[index])), None)
        if nearest is None:
            continue
        pair = (query, dataset.gallery[nearest])
        pixels = reader.batch(pair)
        texts = texts_of(reader, pair) if model.text_head is not None else None
        strengths, keep = pair_gradients(model, pixels, torch.tensor(dataset.camera_indices(pair)), pattern, texts)
        verdict: Mark = "right" if pair[0].pid == pair[1].pid else "wrong"
        marks: tuple[tuple[Mark, str], ...] = (
            ("query", "query"),
            (verdict, f"nearest  {1 - matrix[number, nearest]:.2f}"),
        )
        for side, (mark, text) in enumerate(marks):
            row = [framed(strip(pixels[side]), mark, f"{text}  id {pair[side].pid}  cam {pair[side].camid}")]
            strength = strengths[side]
            parts = strength.sum(dim=1) / strength.sum().clamp_min(1e-30)
            told = " / ".join(f"{name} {float(part):.0%}" for name, part in zip(model.modalities, parts, strict=True))
            row.append(framed(strip(overlay(pixels[side], strength, model.grid)), "query", f"gradient  {told}"))
            if keep is not None:
                masks = keep[side]
                inside = float((strength * masks).sum() / strength.sum().clamp_min(1e-30))
                dimmed = [dim(image, mask, model.grid) for image, mask in zip(pixels[side], masks, strict=True)]
                share = f"kept {float(masks.mean()):.0%}, with {inside:.0%} of the gradient"
                row.append(framed(strip(torch.stack(dimmed)), "query", share))
            rows.append(row)
    if not rows:
        raise ValueError("No query has a gallery shot that counts: there is no pair to show.")
    return stack(rows)


def pair_gradients(
    model: ReidModel,
    pixels: Tensor,
    cameras: Tensor,
    pattern: Pattern | None = None,
    texts: ShotTexts | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(strengths (2, M, N), D (2, M, N) or None) of two shots (2, M, 3, H, W), bytes.

    A patch's strength is the sum of `|gradient x (pixel - the encoder's mean)|` over its pixels: what the similarity
    would lose, to first order, if the patch were blank.
    """
    device = next(model.parameters()).device
    images = unit_float(pixels.to(device)).requires_grad_(True)
    chosen = default_cases(model, pattern=pattern)[0].pattern
    with evaluating(model), torch.enable_grad():
        fused = model.embed(images, cameras.to(device), texts=None if texts is None else texts.to(device))
        vectors = fused.pattern(chosen).view(2, 2 if chosen == 3 else 1, len(model.blocks), -1)
        there = torch.ones(2, len(model.blocks), dtype=torch.bool, device=device)
        if len(model.blocks) > len(model.modalities):
            there[:, -1] = False if texts is None else texts.present
        features = Features(vectors, there, model.concatenated)
        similarity = 1 - distances(features[:1], features[1:])[0, 0]
        (gradient,) = torch.autograd.grad(similarity, images)
    # Nothing of it stays in the parameters: the gradient was taken at the pixels alone.
    effect = (gradient * (images - model.blank(images))).detach().abs().sum(dim=2)  # (2, M, H, W)
    keep = None if fused.keep is None else (fused.keep.detach() > 0.5).float().cpu()
    return per_patch(effect, model.grid).cpu(), keep


def per_patch(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Sums of pixels (..., H, W) over the patches of a grid, (..., N); each pixel belongs to its nearest patch."""
    height, width = values.shape[-2:]
    rows = torch.arange(height, device=values.device) * grid[0] // height
    columns = torch.arange(width, device=values.device) * grid[1] // width
    cells = (rows[:, None] * grid[1] + columns[None, :]).flatten()
    sums = torch.zeros(*values.shape[:-2], grid[0] * grid[1], device=values.device)
    return sums.index_add(-1, cells, values.flatten(-2).float())


def overlay(pixels: Tensor, strength: Tensor, grid: tuple[int, int]) -> Tensor:
    """Pictures (M, 3, H, W) in grey under the strengths (M, N) in colour, all sensors on one scale -> bytes."""
    height, width = pixels.shape[-2:]
    # The few strongest patches must not darken all others.
    scaled = (strength / torch.quantile(strength, 0.98).clamp_min(1e-30)).clamp(0, 1)
    rows, columns = torch.arange(height) * grid[0] // height, torch.arange(width) * grid[1] // width
    spread = scaled.view(-1, *grid)[:, rows[:, None], columns[None, :]]  # (M, H, W)
    place = spread * (len(_SHADES) - 1)
    lower = place.floor().clamp_max(len(_SHADES) - 2)
    shades = torch.tensor(_SHADES, dtype=torch.float32)
    low, part = shades[lower.long()], (place - lower)[..., None]
    heat = (low + (shades[lower.long() + 1] - low) * part).movedim(-1, 1)  # (M, 3, H, W)
    grey = pixels.float().mean(dim=1, keepdim=True)
    return (0.35 * grey + 0.65 * heat).clamp(0, 255).to(torch.uint8)
