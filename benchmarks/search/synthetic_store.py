"""A store of any size, made of the features of real photos: rows are written by the store's own code.

Every synthetic picture is made of two real ones, A and B, and a share s of A, uniform in [0.5, 1]:

- each stored patch is A's with probability s, else B's; the prefix token and the mean patch are s A + (1 - s) B;
- normal noise goes on every patch, and a shift of all patches and the mean together, both in standard deviations;
- every second picture has A's description: its text, with a made-up name at its end, and its words, with noise.

Two pictures with the same A are near each other, but a million pictures are not a million copies: their vectors lie
between those of real photos, as dense as the photos allow. Levels over the bank of background queries are mixed in
the same way from those of A and B: computing them takes some 20 ms of a core each. Paths, dates, sizes and thumbnails
(1,000 random bytes) are made up.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from seps.images.sources import row_id
from seps.photos.indexing.embedding import packed_columns, stored_levels
from seps.photos.store.rows import Row, StoreSettings
from seps.photos.store.store import Store
from seps.retrieval.data import RetrievalDataset
from seps.retrieval.engine.keeping import image_vectors, kept_patches
from seps.retrieval.engine.layout import PatchLayout
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.engine.packing import pack, unpack_all, unpack_padded
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.ranking.bank import bank_name
from seps.threads import computing_threads

ROWS = 32_000
"""Rows of one commit."""
MADE = 250
"""Pictures made at a time; their values fit the cache."""
NAMES = 20_000
"""Made-up names at the ends of descriptions."""
THUMBNAIL: bytes = b"\xff\xd8" + np.random.default_rng(0).bytes(998)
YEAR = 31_557_600 * 10**9


@dataclass(frozen=True)
class Originals:
    """Real photos as a store keeps them: P prefix tokens and M patches of width C, descriptions of W words."""

    tokens: Tensor
    """(B, P + M, C)."""
    positions: Sequence[bytes]
    means: Tensor
    """(B, C) mean of all patches."""
    words: Tensor
    mask: Tensor
    """(B, W, C) and (B, W)."""
    texts: Sequence[str]
    levels: Tensor
    """(B, 2): over the bank, without and with the description."""

    def __len__(self) -> int:
        return len(self.tokens)


def store_settings(model: RetrievalModel, name: str, size: str) -> StoreSettings:
    """Settings of a store as `seps index --size ...` makes it."""
    engine = engine_of(model)
    digests = engine.digests()
    return StoreSettings(
        root="/synthetic",
        model=name,
        model_hash=digests.pictures,
        text_hash=digests.texts,
        layout=engine.layout(size),
        bank=bank_name(),
    )


@torch.no_grad()
def originals(model: RetrievalModel, data: RetrievalDataset, tokens: Tensor, settings: StoreSettings) -> Originals:
    """The state of real photos, packed by the code of the index and unpacked again, and their levels."""
    texts = [record.dense or record.captions[0] for record in data.records]
    parts: list[dict[str, Any]] = []
    engine, layout = engine_of(model), cast(PatchLayout, settings.layout)
    for start in range(0, len(texts), 64):
        features = ImageFeatures(tokens[start : start + 64].float())
        features.dense, features.dense_mask = model.encode_descriptions(texts[start : start + 64], batch_size=8)
        parts += kept_patches(model, features, layout).packed(layout.precision)
    words, mask = map(torch.from_numpy, unpack_padded([part["words"] for part in parts], layout.width))
    found = torch.from_numpy(unpack_all([part["tokens"] for part in parts]))
    prefix = layout.num_prefix_tokens
    means = tokens[:, prefix:].float().mean(dim=1)
    bare = image_vectors(model, ImageFeatures(torch.cat([found[:, :prefix], means[:, None]], dim=1)))
    levels = []
    for start in range(0, len(parts), 256):
        some = parts[start : start + 256]
        alone_vectors = bare[start : start + 256].numpy().astype(np.float16)
        plain = [{**part, "words": None, "vector": own} for part, own in zip(some, alone_vectors, strict=True)]
        alone = stored_levels(engine, packed_columns(plain, layout), layout)
        both = stored_levels(engine, packed_columns(some, layout), layout)
        levels.append(torch.tensor([alone, both]).T)
    positions = [part["positions"] for part in parts]
    return Originals(found, positions, means, words, mask, texts, torch.cat(levels))


class Synthetic:
    """Synthetic pictures of a store with these settings: `rows(start, stop)` gives the same ones every time."""

    def __init__(
        self, model: RetrievalModel, real: Originals, settings: StoreSettings, *, noise: float, shift: float
    ) -> None:
        self.model, self.real, self.settings = model, real, settings
        self.noise, self.shift = noise, shift
        self.spread = float(real.tokens.std())
        # Parts of one pool: drawing new normal values for every patch takes longer than all the rest.
        self._pool = torch.randn(2**22, generator=torch.Generator().manual_seed(0))

    def _normal(self, shape: tuple[int, ...], chance: torch.Generator) -> Tensor:
        size = int(np.prod(shape))
        offset = int(torch.randint(len(self._pool) - size, (1,), generator=chance))
        return self._pool[offset : offset + size].view(shape)

    @torch.no_grad()
    def states(self, start: int, stop: int) -> tuple[list[dict[str, Any]], list[int]]:
        """Packed states of the pictures `start` to `stop`, and which photo is A of each."""
        real, count, prefix = self.real, stop - start, cast(PatchLayout, self.settings.layout).num_prefix_tokens
        chance = torch.Generator().manual_seed(start)
        a, b = (torch.randint(len(real), (count,), generator=chance) for _ in range(2))
        share = 0.5 + 0.5 * torch.rand(count, 1, generator=chance)
        tokens, others = real.tokens[a], real.tokens[b]
        mine = torch.where(torch.rand(tokens.shape[:2], generator=chance) < share, 1.0, 0.0)
        mine[:, :prefix] = share
        tokens = others.lerp_(tokens, mine[..., None])
        together = self.shift * self.spread * self._normal((count, 1, tokens.shape[-1]), chance)
        tokens.add_(self._normal(tuple(tokens.shape), chance), alpha=self.noise * self.spread).add_(together)
        means = real.means[b].lerp(real.means[a], share) + together[:, 0]
        described = torch.arange(start, stop) % 2 == 0
        words, mask = real.words[a], real.mask[a] & described[:, None]
        words.add_(self._normal(tuple(words.shape), chance), alpha=self.noise * float(words.std()))
        pooled = ImageFeatures(torch.cat([tokens[:, :prefix], means[:, None]], dim=1), words, mask)
        vectors = image_vectors(self.model, pooled).numpy().astype(np.float16)
        levels = real.levels[b, described.long()].lerp(real.levels[a, described.long()], share[:, 0]).tolist()
        layout = cast(PatchLayout, self.settings.layout)
        slim = layout.patches is not None
        states: list[dict[str, Any]] = []
        for i, photo in enumerate(a.tolist()):
            state: dict[str, Any] = {"vector": vectors[i], "tokens": pack(tokens[i], layout.precision)}
            state["words"] = pack(words[i][mask[i]], layout.precision) if described[i] else None
            state["positions"] = real.positions[photo] if slim else None
            state["mean"] = pack(means[i : i + 1], "float16") if slim else None
            states.append({**state, "bank": levels[i]})
        return states, a.tolist()

    def rows(self, start: int, stop: int) -> list[Row]:
        """The rows of the pictures `start` to `stop`."""
        return [row for place in range(start, stop, MADE) for row in self._rows(place, min(place + MADE, stop))]

    @staticmethod
    def path(number: int) -> str:
        """Folders of ten thousand, and of five hundred."""
        return f"{number // 10_000:03}/{number // 500 % 20:02}/{number:07}.jpg"

    def _rows(self, start: int, stop: int) -> list[Row]:
        states, photos = self.states(start, stop)
        taken = 50 * YEAR - np.random.default_rng(start).integers(0, 20 * YEAR, stop - start)
        found = []
        for number, state, photo, date in zip(range(start, stop), states, photos, taken.tolist(), strict=True):
            path = self.path(number)
            text = f"{self.real.texts[photo]} {name_of(number)}" if state["words"] is not None else None
            facts = (row_id(path, None), path, None, 1_000_000 + number, 50 * YEAR, f"{number:064x}", 640, 480)
            found.append(Row(*facts, THUMBNAIL, **state, dense=text, taken=date))
        return found


def name_of(number: int) -> str:
    """The made-up name in the description of a picture; few names are frequent, as of people."""
    rank = int(NAMES ** ((number * 2654435761 % 2**32) / 2**32))
    return f"Qu{rank:05x}a"


def fill(place: Path, pictures: Synthetic, count: int, first: int = 0) -> tuple[Store, dict[str, float]]:
    """A store of so many pictures, or as many more in the one that is there; seconds of making and writing rows.

    One thread makes rows while another writes them.
    """
    store = Store.open(place) if first else Store.create(place, pictures.settings)
    making = writing = 0.0
    starts = range(first, first + count, ROWS)

    def make(start: int) -> tuple[list[Row], float]:
        began = time.perf_counter()
        return pictures.rows(start, min(start + ROWS, first + count)), time.perf_counter() - began

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(make, starts[0])
        for after in [*starts[1:], None]:
            rows, spent = coming.result()
            if after is not None:
                coming = pool.submit(make, after)
            began = time.perf_counter()
            store.put(rows)
            making, writing = making + spent, writing + time.perf_counter() - began
    return store, {"making": round(making, 1), "writing": round(writing, 1)}


def exhaustive(store: Store, score: Any, queries: int, best: int) -> tuple[list[list[str]], float]:
    """Ids of the `best` pictures of each of `queries` queries by `score(images) -> (B, T)`, of all pictures."""
    start = time.perf_counter()
    kept: list[list[tuple[float, str]]] = [[] for _ in range(queries)]
    for ids, scores in _scored(store, score):
        top = scores.topk(min(best, len(ids)), dim=0)
        for query in range(queries):
            pairs = zip(top.values[:, query].tolist(), top.indices[:, query].tolist(), strict=True)
            kept[query] += [(-value, ids[place]) for value, place in pairs]
            if len(kept[query]) > 64 * best:
                kept[query] = sorted(kept[query])[:best]
    return [[name for _, name in sorted(some)[:best]] for some in kept], time.perf_counter() - start


def _scored(store: Store, score: Any) -> Iterator[tuple[list[str], Tensor]]:
    """Ids and scores of all pictures, a batch at a time on each core."""
    columns, cores = ["id", *store.settings.layout.columns, "bank"], os.cpu_count() or 1
    pool, waiting = computing_threads(cores, "exact"), deque[Any]()
    for images in store.scan(columns, batch_size=256):
        waiting.append((images.values("id"), pool.submit(score, images)))
        if len(waiting) > 2 * cores:
            ids, job = waiting.popleft()
            yield ids, job.result()
    for ids, job in waiting:
        yield ids, job.result()
    pool.shutdown()
