"""What selection keeps on the synthetic set, and what it could keep at best.

`kept_rows` counts, by sensor, how much of the figure, of clutter, of background and of blinded regions was kept. The
oracle is SDTPS with another decision: it keeps the patches on the figure that the sensor sees, by ground truth, in
training and in testing. It needs no labels of the method, only of the drawing.

Shapes: B or S samples, M sensors, (H, W) pixels, N patches, K = 4 kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from seps.nn import MultiModalSDTPS
from seps.nn.guidance import cosine_attention, min_max
from seps.nn.known import evaluating
from seps.nn.selection import hard_topk
from seps.reid.config import Missing, ReidConfig
from seps.reid.data import ReidDataset, ReidReader, ReidRecord
from seps.reid.data.transforms import unit_float
from seps.reid.model import Encoded, Fused, ReidModel
from seps.reid.synthetic.canvas import FIGURE
from seps.reid.synthetic.truth import BLIND, KINDS, truth

# A figure's pixel in a truth plane, as the three channels of a picture; erasing fills with noise, which is never that.
MARK = (255, 0, 255)


def patch_shares(kinds: Tensor, grid: tuple[int, int]) -> Tensor:
    """The part of every patch that is of each kind: (S, M, H, W) numbers -> (S, M, N, K), rows that sum to 1."""
    planes = F.one_hot(kinds.long(), len(KINDS)).float().permute(0, 1, 4, 2, 3)
    pooled = F.adaptive_avg_pool2d(planes.flatten(0, 1), grid)
    return pooled.flatten(2).transpose(1, 2).reshape(*kinds.shape[:2], grid[0] * grid[1], len(KINDS))


def on_figure(shares: Tensor, least: float = 0.25) -> Tensor:
    """The decision of someone who knows: 1 at patches that show `least` or more of the figure, (S, M, N) float32.

    Where a sensor shows none, its best patch is kept, as selection keeps at least one.
    """
    seen = shares[..., FIGURE]
    best = F.one_hot(seen.argmax(dim=-1), seen.shape[-1]).bool()
    return ((seen >= least) | best).float()


class Truth:
    """Kinds (M, H, W) of every shot of a set, kept in one file beside the runs."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as stored:
            self.kinds = torch.from_numpy(stored["kinds"])
            self.index = {str(name): number for number, name in enumerate(stored["names"])}

    def of(self, records: Sequence[ReidRecord]) -> Tensor:
        """(B, M, H, W) numbers into `KINDS`."""
        return self.kinds[[self.index[record.name] for record in records]]


def write_truth(path: Path, root: Path, names: Sequence[str], workers: int) -> None:
    """Draw the truth of a set once for all runs."""
    temporary = path.with_name(f".{path.stem}.partial.npz")
    np.savez_compressed(temporary, kinds=truth(root, names, workers), names=np.array(names))
    temporary.replace(path)


def kept_rows(
    model: ReidModel, dataset: ReidDataset, reader: ReidReader, known: Truth, batch_size: int = 64
) -> list[dict[str, Any]]:
    """What was there and what was kept, by sensor, by whether it is blind in part of the shot, and by who decides.

    "area": the part of the picture of each kind; "kept": the part of that area which was kept, to compare with
    "rate", the part kept of everything, which is what chance would keep of any kind. "by" is "score" for the model's
    own decision; the others are its sources, each as if it decided alone.
    """
    device = next(model.parameters()).device
    records = (*dataset.query, *dataset.gallery)
    sums: dict[tuple[str, bool, str], list[Tensor]] = {}
    with evaluating(model), torch.no_grad():
        for start in range(0, len(records), batch_size):
            chosen = records[start : start + batch_size]
            cameras = torch.tensor(dataset.camera_indices(chosen), device=device)
            shares = patch_shares(known.of(chosen).to(device), model.grid).double()
            blinded = shares[..., BLIND].mean(dim=2) > 0.02
            decisions = _decisions(model, unit_float(reader.batch(chosen).to(device)), cameras)
            for (sensor, by), keep in decisions.items():
                for state in (False, True):
                    rows = blinded[:, sensor] == state
                    area = shares[rows, sensor]
                    found = [area.sum(dim=(0, 1)), (keep.double()[rows, :, None] * area).sum(dim=(0, 1)), rows.sum()]
                    key = (model.modalities[sensor], state, by)
                    sums[key] = [a + b for a, b in zip(sums[key], found, strict=True)] if key in sums else found
    return [_row(*key, *(part.cpu() for part in parts)) for key, parts in sums.items() if int(parts[2])]


def _decisions(model: ReidModel, pixels: Tensor, cameras: Tensor) -> dict[tuple[int, str], Tensor]:
    """D (B, N) by (sensor, who decides)."""
    encoded = model.encode(pixels, cameras)
    keep = model.fuse(encoded).keep
    if keep is None or model.sdtps is None:
        return {}
    ratio, found = model.config.sparse_ratio, {}
    pairs = list(zip(encoded.patches.unbind(1), encoded.vectors.unbind(1), strict=True))
    maps = [min_max(cosine_attention(patches, vector)) for patches, vector in pairs]
    for number, name in enumerate(model.sdtps.modalities):
        patches = encoded.patches[:, number]
        others = [other for other in range(len(pairs)) if other != number]
        found[number, "score"] = keep[:, number]
        found[number, "own vector"] = hard_topk(maps[number], ratio)
        vectors = torch.stack([min_max(cosine_attention(patches, pairs[other][1])) for other in others])
        found[number, "others' vectors"] = hard_topk(vectors.sum(dim=0), ratio)
        found[number, "others by position"] = hard_topk(torch.stack([maps[i] for i in others]).sum(dim=0), ratio)
        found[number, "predictor"] = hard_topk(getattr(model.sdtps, f"{name}_sparse").predict(patches), ratio)
    return found


def _row(sensor: str, blinded: bool, by: str, area: Tensor, kept: Tensor, shots: Tensor) -> dict[str, Any]:
    return {
        "sensor": sensor,
        "blinded": blinded,
        "by": by,
        "shots": int(shots),
        "rate": float(kept.sum() / area.sum()),
        "area": {kind: float(area[i] / area.sum()) for i, kind in enumerate(KINDS)},
        "kept": {kind: float(kept[i] / area[i]) for i, kind in enumerate(KINDS) if area[i] > 0},
    }


@dataclass
class KnowingEncoded(Encoded):
    """Also the decisions (B, M, N) by ground truth, or None where the pictures came without."""

    decisions: Tensor | None = None

    def replaced(self, other: Encoded, absent: Tensor) -> KnowingEncoded:
        plain = super().replaced(other, absent)
        return KnowingEncoded(**vars(plain), decisions=self.decisions)


class KnowingSelection(MultiModalSDTPS):
    """SDTPS that is told what to keep: `decisions` (B, M, N), set before each call."""

    decisions: Tensor | None = None

    def choose(
        self,
        name: str,
        patches: Mapping[str, Tensor],
        vectors: Mapping[str, Tensor],
        present: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        scores, keep = super().choose(name, patches, vectors, present)
        if self.decisions is not None:
            keep = self.decisions[:, self.modalities.index(name)].to(scores)
        return scores, keep


class KnowingModel(ReidModel):
    """A model that takes 2 M pictures: the sensors, then where the figure is seen by each, painted in `MARK`."""

    selection = KnowingSelection

    def encode(self, images: Tensor, cameras: Tensor | None = None) -> KnowingEncoded:
        count = len(self.modalities)
        plain = super().encode(images[:, :count], cameras)
        decisions = None
        if images.shape[1] == 2 * count:
            mark = torch.tensor(MARK, device=images.device)[:, None, None] / 255
            seen = ((images[:, count:] - mark).abs().amax(dim=2) < 0.01).long() * FIGURE
            decisions = on_figure(patch_shares(seen, self.grid))
        return KnowingEncoded(**vars(plain), decisions=decisions)

    def fuse(self, encoded: Encoded, present: Tensor | None = None) -> Fused:
        if isinstance(self.sdtps, KnowingSelection) and isinstance(encoded, KnowingEncoded):
            self.sdtps.decisions = encoded.decisions
        return super().fuse(encoded, None if present is None else present[:, : len(self.modalities)])

    def embed(
        self,
        images: Tensor,
        cameras: Tensor | None = None,
        present: Tensor | None = None,
        missing: Missing | None = None,
    ) -> Fused:
        if present is not None and images.shape[1] == 2 * present.shape[1]:
            present = torch.cat([present, present], dim=1)
        return super().embed(images, cameras, present, missing)


class KnowingReader(ReidReader):
    """Pictures of the sensors, then the truth of each as a picture: (B, 2 M, 3, H, W)."""

    def __init__(self, known: Truth, config: ReidConfig, modalities: Sequence[str]) -> None:
        data = config.data
        super().__init__(modalities, config.model.image_size, threads=data.threads, cache_bytes=data.cache_mib * 2**20)
        self.known = known

    def batch(self, records: Sequence[ReidRecord]) -> Tensor:
        pixels = super().batch(records)
        seen = (self.known.of(records) == FIGURE)[:, :, None]
        mark = torch.tensor(MARK, dtype=torch.uint8)[:, None, None]
        return torch.cat([pixels, torch.where(seen, mark, torch.zeros_like(mark))], dim=1)
