"""The synthetic sets as features of a fixed stem, and batches of many runs at a time, all made on the device.

A set is drawn with numpy and passed once through the first blocks of the embedded EfficientNet-Lite0 (stride 4), whose
2 x 2 neighbours become the 96 numbers of one patch of 8 x 8 pixels: what the trained part of every row starts from. A
shot is stored as it is and mirrored; crops move by whole patches. Every random choice of a run follows from its data
seed and seed alone, so that all rows see the same batches and no run depends on which others it is trained with.

Shapes: D sets, S shots, M = 3 sensors, N patches, F = 96 features, R runs, B samples, K = 4 kinds.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from seps.encoders import EfficientNetLite0
from seps.reid.data import IdentityBatches
from seps.reid.synthetic import Shot, SyntheticConfig, World, plan_shots
from seps.reid.synthetic.truth import BLIND, KINDS
from seps.training.seeding import derive_seed

CELL, FEATURES, SENSORS, STEM_BLOCKS = 8, 96, 3, 3
SPLITS = ("train", "query", "gallery")
TABLE = 1 << 16
ERASE, ERASE_AREA, ERASE_ASPECT = 0.3, (0.02, 0.4), (0.3, 1 / 0.3)


@dataclass(frozen=True)
class SetSize:
    """How large a set is, and how hard: the difficulty of the former study."""

    identities: int = 300
    images: int = 8
    height: int = 96
    width: int = 48
    blindness: float = 1.0
    clutter: float = 14.0

    def config(self, seed: int) -> SyntheticConfig:
        """The parameters of the set of one data seed."""
        size = (self.height, self.width)
        return SyntheticConfig(
            self.identities, self.images, 4, seed, "people", size, 0.4, 4, self.blindness, self.clutter, 90
        )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.height // CELL, self.width // CELL


@dataclass
class Sets:
    """The sets of some data seeds, all of one size: features (D, S, 2, M, N, F), plain and mirrored; shares
    (D, S, 2, M, N, K), the part of a patch that is of each kind; identities, cameras, splits (S,)."""

    seeds: list[int]
    grid: tuple[int, int]
    features: Tensor
    shares: Tensor
    pids: Tensor
    cameras: Tensor
    splits: Tensor

    def to(self, device: str | torch.device) -> Sets:
        """The same on another device."""
        tensors = (self.features, self.shares, self.pids, self.cameras, self.splits)
        return Sets(self.seeds, self.grid, *(part.to(device) for part in tensors))

    def chosen(self, seeds: Sequence[int]) -> Sets:
        """The sets of some of the seeds."""
        if list(seeds) == self.seeds:
            return self
        rows = [self.seeds.index(seed) for seed in seeds]
        return Sets(
            list(seeds), self.grid, self.features[rows], self.shares[rows], self.pids, self.cameras, self.splits
        )

    def split(self, name: str) -> Tensor:
        """Numbers of the shots of a split."""
        return (self.splits == SPLITS.index(name)).nonzero()[:, 0]


def save_sets(sets: Sets, path: Path) -> None:
    """Write sets as tensors and plain values."""
    torch.save(vars(sets), path)


def load_sets(path: Path) -> Sets:
    """The reverse of `save_sets`; nothing is unpickled but tensors and plain values."""
    return Sets(**torch.load(path, weights_only=True, mmap=True))


def write_stem(path: Path) -> None:
    """The weights of the stem alone (50 KB), for a machine that does not have the encoder's package."""
    names = ("stem.", *(f"blocks.{number}." for number in range(STEM_BLOCKS)))
    state = EfficientNetLite0(pretrained=True).state_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: value for name, value in state.items() if name.startswith(names)}, path)


def stem_network(path: Path | None) -> EfficientNetLite0:
    """The encoder with at least its stem's pretrained weights, from `path` or from the package."""
    encoder = EfficientNetLite0(pretrained=path is None)
    if path is not None:
        unknown = encoder.load_state_dict(torch.load(path, weights_only=True), strict=False).unexpected_keys
        if unknown:
            raise SystemExit(f"{path} does not hold the stem: it has {unknown[0]}. Write it with `stem`.")
    return encoder.requires_grad_(False).eval()


@torch.no_grad()
def stem_features(encoder: EfficientNetLite0, pictures: Tensor, batch: int = 512) -> Tensor:
    """Bytes (X, 3, H, W) -> (X, N, F) float32."""
    found = []
    for part in pictures.split(batch):
        maps = encoder.stem((part.float() / 255 - 0.5) / 0.5)
        for block in encoder.blocks[:STEM_BLOCKS]:
            maps = block(maps)
        found.append(F.pixel_unshuffle(maps.contiguous(), 2).flatten(2).transpose(1, 2))
    return torch.cat(found)


def patch_shares(kinds: Tensor, grid: tuple[int, int]) -> Tensor:
    """Numbers of kinds (X, H, W) -> the part of each patch that is of each kind, (X, N, K)."""
    planes = F.one_hot(kinds.long(), len(KINDS)).float().permute(0, 3, 1, 2)
    return F.adaptive_avg_pool2d(planes, grid).flatten(2).transpose(1, 2)


def _draw(task: tuple[SyntheticConfig, Sequence[Shot]]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pictures (S, M, H, W, 3) and kinds (S, M, H, W) of some shots."""
    config, shots = task
    world = World(config)
    looks = [world.look(shot) for shot in shots]
    grey = [[np.broadcast_to(i[..., None], (*i.shape, 3)) if i.ndim == 2 else i for i in k.images] for k in looks]
    kinds = [np.where(look.blind > 0.5, np.uint8(BLIND), look.kinds[None]) for look in looks]
    return np.array(grey), np.stack(kinds)


def make_sets(seeds: Sequence[int], size: SetSize, stem: Path | None, device: str = "cpu", workers: int = 1) -> Sets:
    """Draw the sets of the data seeds and pass them through the stem, standardised by each set's training shots."""
    plans = {seed: plan_shots(size.config(seed)) for seed in seeds}
    tasks = [
        (size.config(seed), shots[start : start + 50])
        for seed, shots in plans.items()
        for start in range(0, len(shots), 50)
    ]
    if workers > 1:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            drawn = list(pool.map(_draw, tasks))
    else:
        drawn = [_draw(task) for task in tasks]
    encoder = stem_network(stem).to(device)
    shots, per_set = plans[seeds[0]], len(tasks) // len(seeds)
    splits = torch.tensor([SPLITS.index(shot.split) for shot in shots])
    features, shares = [], []
    for number in range(len(seeds)):
        parts = drawn[number * per_set : (number + 1) * per_set]
        pictures = torch.from_numpy(np.concatenate([part[0] for part in parts])).permute(0, 1, 4, 2, 3).to(device)
        kinds = torch.from_numpy(np.concatenate([part[1] for part in parts])).to(device)
        both = torch.stack([pictures, pictures.flip(-1)], dim=1)  # (S, 2, M, 3, H, W)
        found = stem_features(encoder, both.flatten(0, 2)).view(len(shots), 2, SENSORS, -1, FEATURES)
        known = found[(splits == 0).to(device)]
        mean, deviation = known.mean(dim=(0, 1, 3)), known.std(dim=(0, 1, 3)) + 1e-3  # (M, F)
        features.append(((found - mean[:, None]) / deviation[:, None]).to(torch.bfloat16).cpu())
        both = torch.stack([kinds, kinds.flip(-1)], dim=1)  # (S, 2, M, H, W)
        found = patch_shares(both.flatten(0, 2), size.grid).view(len(shots), 2, SENSORS, -1, len(KINDS))
        shares.append(found.to(torch.bfloat16).cpu())
    return Sets(
        list(seeds),
        size.grid,
        torch.stack(features),
        torch.stack(shares),
        torch.tensor([shot.identity for shot in shots]),
        torch.tensor([shot.camera for shot in shots]),
        splits,
    )


@dataclass
class Batch:
    """One step of R runs: features (R, B, M, N, F), shares (R, B, M, N, K), noise (R, B, M, N) in [0, 1) for those
    who choose at random, labels (R, B)."""

    features: Tensor
    shares: Tensor
    noise: Tensor
    labels: Tensor


class Batches:
    """The training batches of R runs, each of a set and a seed: `identities` x `images` shots, augmented.

    Augmentation: mirrored or not; moved by up to one patch each way, zeros outside; with probability 0.3 a box of up to
    0.4 of the picture is replaced by noise in all sensors. What is outside or replaced counts as blind in `shares`.
    """

    def __init__(self, sets: Sets, runs: Sequence[tuple[int, int]], steps: int, identities: int, images: int) -> None:
        self.sets, self.device = sets, sets.features.device
        train = sets.split("train")
        self.train, self.labels = train, sets.pids[train]
        labels = tuple(self.labels.tolist())
        plans, draws = zip(*(_plan(labels, run, steps, identities, images) for run in runs), strict=True)
        self.plan = torch.from_numpy(np.stack(plans)).to(self.device)  # (R, steps, B)
        self.draws = torch.from_numpy(np.stack(draws)).to(self.device)  # (R, steps, B, 9)
        self.which = torch.tensor([sets.seeds.index(data_seed) for data_seed, _ in runs], device=self.device)
        self.tables = _tables(self.device)

    def __call__(self, step: int) -> Batch:
        """The batches of one step."""
        index, u = self.plan[:, step], self.draws[:, step]
        (rows, columns), sets = self.sets.grid, self.sets
        place = torch.arange(rows * columns, device=self.device)
        row = place // columns + (u[..., 1, None] * 3).long() - 1  # (R, B, N)
        column = place % columns + (u[..., 2, None] * 3).long() - 1
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        cell = row.clamp(0, rows - 1) * columns + column.clamp(0, columns - 1)
        shot = (self.which[:, None] * len(sets.pids) + self.train[index]) * 2 + (u[..., 0] < 0.5)  # (R, B)
        sensor = torch.arange(SENSORS, device=self.device)[:, None]
        at = (shot[..., None, None], sensor, cell[:, :, None])
        features = sets.features.flatten(0, 2)[at].float() * inside[:, :, None, :, None]
        erased = self._erased(u, place // columns, place % columns)
        offset = (u[..., 7] * TABLE).long()[..., None, None] + sensor * len(place) + place  # (R, B, M, N)
        fill = self.tables[0][offset % TABLE]
        features = torch.where(erased[:, :, None, :, None], fill, features)
        lost = torch.zeros(len(KINDS), device=self.device)
        lost[BLIND] = 1
        seen = (inside & ~erased)[:, :, None, :, None]
        shares = torch.where(seen, sets.shares.flatten(0, 2)[at].float(), lost)
        offset = (u[..., 8] * TABLE).long()[..., None, None] + sensor * len(place) + place
        return Batch(features, shares, self.tables[1][offset % TABLE], self.labels[index])

    def _erased(self, u: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """(R, B, N) bool: the box that is replaced by noise."""
        rows, columns = self.sets.grid
        area = (ERASE_AREA[0] + (ERASE_AREA[1] - ERASE_AREA[0]) * u[..., 3]) * rows * columns
        low, high = np.log(ERASE_ASPECT)
        aspect = torch.exp(low + (high - low) * u[..., 4])
        tall = (area * aspect).sqrt().round().clamp(1, rows)
        wide = (area / aspect).sqrt().round().clamp(1, columns)
        # One number says whether, and, where it does, is uniform again for the place.
        top, left = (u[..., 5] / ERASE * (rows - tall + 1)).floor(), (u[..., 6] * (columns - wide + 1)).floor()
        below, right = row - top[..., None], column - left[..., None]
        box = (below >= 0) & (below < tall[..., None]) & (right >= 0) & (right < wide[..., None])
        return box & (u[..., 5, None] < ERASE)


def evaluation_batch(sets: Sets, which: Tensor, shots: Tensor) -> Batch:
    """Test shots (B,) as they are for R runs, `which` (R,) saying the set of each."""
    features, shares = (part[which[:, None], shots[None], 0].float() for part in (sets.features, sets.shares))
    places = torch.arange(SENSORS * features.shape[3], device=shots.device).view(SENSORS, -1)
    offset = shots[:, None, None] * 977 + places
    noise = _tables(shots.device)[1][offset % TABLE].expand(len(which), -1, -1, -1)
    return Batch(features, shares, noise, sets.pids[shots].expand(len(which), -1))


@functools.cache
def _plan(
    labels: tuple[int, ...], run: tuple[int, int], steps: int, identities: int, images: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The shots (steps, B) of a run and its random numbers (steps, B, 9): the same in every row, so made once."""
    batches = IdentityBatches(labels, identities=identities, images=images, seed=derive_seed(*run))
    epochs = -(-steps // len(batches))
    plan = np.concatenate([batches.plan(epoch) for epoch in range(epochs)])[:steps]
    shape = (steps, identities * images, 9)
    return plan, np.random.default_rng([*run, 1]).random(shape, dtype=np.float32)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Normal noise (TABLE, F) and uniform noise (TABLE,), the same everywhere."""
    generator = torch.Generator().manual_seed(18)
    normal, uniform = torch.randn(TABLE, FEATURES, generator=generator), torch.rand(TABLE, generator=generator)
    return normal.to(device), uniform.to(device)
