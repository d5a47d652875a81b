"""Index a folder: find what is new, changed, moved or gone, embed it in batches, and write whole batches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seps.nn.selection import rank_patches
from seps.retrieval.data import UnreadableImage
from seps.retrieval.gallery import Found, Problem, read_descriptions, walk
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.packing import Precision, pack
from seps.retrieval.pretrained import MINI
from seps.retrieval.store import Known, Store, writer_lock
from seps.retrieval.store_rows import NewerStoreError, Row, StoreError, StoreSettings
from seps.retrieval.thumbnails import Picture, read_picture
from seps.retrieval.vectors import fixed_patch_scores, image_vectors, model_hash

Progress = Callable[[int, int], None]
COMMIT_ROWS, COMMIT_SECONDS = 512, 15.0
CPU_BATCH = 4


@dataclass(frozen=True)
class IndexOptions:
    """How to index."""

    precision: Precision = "float16"
    keep_patches: int | None = None
    """Keep only so many patches an image, those that matter most whatever the caption."""
    batch_size: int = 32
    workers: int | None = None
    moved: bool = False
    """The folder itself has moved: take over the new place."""


@dataclass
class IndexReport:
    """What one run of indexing did."""

    new: int = 0
    changed: int = 0
    moved: int = 0
    """Images known under another name: their state was taken over, not computed."""
    unchanged: int = 0
    deleted: int = 0
    described: int = 0
    """Images of the store with a description."""
    problems: list[Problem] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class _Work:
    found: Found
    dense: str | None
    known: Known | None


def index_folder(
    folder: str | os.PathLike[str],
    location: str | os.PathLike[str],
    model: RetrievalModel,
    model_name: str,
    *,
    dense: Sequence[str | os.PathLike[str]] = (),
    options: IndexOptions | None = None,
    progress: Progress | None = None,
) -> IndexReport:
    """Bring the store at `location` up to date with `folder`; `progress(done, total)` counts images.

    Safe to interrupt anywhere and to run again. Raises DataError for a folder or JSONL that cannot be read,
    StoreError for a store of another model, folder or release, or one that is being written.
    """
    options = options or IndexOptions()
    start = time.monotonic()
    gallery = walk(folder)
    texts = read_descriptions(gallery.root, dense)
    with writer_lock(str(location)):
        store = _open(location, gallery.root, model, model_name, options)
        known = store.known()
        report = IndexReport(problems=gallery.problems)
        work = []
        for found in gallery.images:
            before, text = known.get(found.id), texts.of(found)
            report.described += text is not None
            if before and (before.size, before.mtime, before.dense) == (found.size, found.mtime, text):
                report.unchanged += 1
            else:
                work.append(_Work(found, text, before))
        _Indexer(store, model, gallery.root, options, known, report).run(work, progress)
        gone = sorted(known.keys() - {found.id for found in gallery.images})
        store.delete(gone)
        report.deleted += len(gone)
        store.tidy()
    report.seconds = time.monotonic() - start
    return report


def _open(
    location: str | os.PathLike[str], root: Path, model: RetrievalModel, model_name: str, options: IndexOptions
) -> Store:
    grid = model.vision.grid_for(*model.image_size)
    keep = options.keep_patches
    if keep is not None and not 1 <= keep <= grid[0] * grid[1]:
        raise StoreError(f"keep_patches is {keep}; this model has {grid[0] * grid[1]} patches an image.")
    name = str(Path(model_name).resolve()) if model_name != MINI and Path(model_name).is_dir() else model_name
    settings = StoreSettings(
        root=str(root),
        model=name,
        model_hash=model_hash(model),
        width=model.config.embed_size,
        grid=grid,
        num_prefix_tokens=model.vision.num_prefix_tokens,
        precision=options.precision,
        keep_patches=None if keep == grid[0] * grid[1] else keep,
    )
    if not store_exists(location):
        return Store.create(location, settings)
    store = Store.open(location)
    _check_same(store, settings, options.moved)
    return store


def store_exists(location: str | os.PathLike[str]) -> bool:
    """Whether a table with at least one commit is there."""
    try:
        Store.open(location)
    except NewerStoreError:
        raise
    except StoreError:
        return False
    return True


def _check_same(store: Store, wanted: StoreSettings, moved: bool) -> None:
    have = store.settings
    if have.model_hash != wanted.model_hash:
        raise StoreError(
            f"The store {store.location} was made with another model ({have.model}, {have.model_hash[:8]}) than "
            f"{wanted.model} ({wanted.model_hash[:8]}): their states do not mix. Use that model or another store."
        )
    if (have.precision, have.keep_patches) != (wanted.precision, wanted.keep_patches):
        raise StoreError(
            f"The store {store.location} keeps {have.keep_patches or 'all'} patches as {have.precision}, not "
            f"{wanted.keep_patches or 'all'} as {wanted.precision}. Leave these options as they were, or use another "
            "store."
        )
    if have.root != wanted.root:
        if not moved:
            raise StoreError(
                f"The store {store.location} holds the folder {have.root}, not {wanted.root}. If the folder was moved, "
                "say so with --moved; for another folder use another store."
            )
        store.move_root(wanted.root)


class _Indexer:
    """Reads ahead in threads, embeds in batches and commits now and then."""

    def __init__(
        self,
        store: Store,
        model: RetrievalModel,
        root: Path,
        options: IndexOptions,
        known: dict[str, Known],
        report: IndexReport,
    ) -> None:
        self.store, self.model, self.root, self.options, self.report = store, model, root, options, report
        self.same_content = {(row.sha256, row.dense): row.id for row in known.values()}
        self.present = known.keys()
        self.pending: list[Row] = []
        self.committed = time.monotonic()

    def run(self, work: Sequence[_Work], progress: Progress | None) -> None:
        """Index everything in `work`."""
        done = 0
        for batch, pictures in self._read_ahead(work):
            self._take(batch, pictures)
            late = time.monotonic() - self.committed > COMMIT_SECONDS
            if len(self.pending) >= COMMIT_ROWS or late:
                self._commit()
            done += len(batch)
            if progress is not None:
                progress(done, len(work))
        self._commit()

    def _read_ahead(self, work: Sequence[_Work]) -> Iterator[tuple[Sequence[_Work], list[Picture | UnreadableImage]]]:
        """Batches with their pictures; the next ones are decoded while one is embedded."""
        size = self.options.batch_size
        batches = [work[start : start + size] for start in range(0, len(work), size)]
        workers = self.options.workers or min(16, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers, thread_name_prefix="seps-index") as pool:
            ahead: list[list[Future[Picture | UnreadableImage]]] = []
            try:
                for position, batch in enumerate(batches):
                    while len(ahead) < 3 and position + len(ahead) < len(batches):
                        ahead.append([pool.submit(self._read, item) for item in batches[position + len(ahead)]])
                    yield batch, [future.result() for future in ahead.pop(0)]
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, work: _Work) -> Picture | UnreadableImage:
        try:
            return read_picture(work.found.source(self.root), self.model.image_size)
        except UnreadableImage as error:
            return error

    def _take(self, batch: Sequence[_Work], pictures: Sequence[Picture | UnreadableImage]) -> None:
        fresh: list[tuple[_Work, Picture]] = []
        alike = self._alike(batch, pictures)
        for work, picture in zip(batch, pictures, strict=True):
            if isinstance(picture, UnreadableImage):
                self.report.problems.append(Problem(str(work.found), picture.why))
                if work.known:  # what the store holds is no longer what the file is
                    self.store.delete([work.known.id])
                    self.report.deleted += 1
                continue
            same = alike.get((picture.sha256, work.dense))
            if same is not None:
                self.pending.append(_renamed(same, work.found))
            else:
                fresh.append((work, picture))
            if work.known:
                self.report.changed += 1
            elif same is not None:
                self.report.moved += 1
            else:
                self.report.new += 1
        if fresh:
            self.pending += self._embed(fresh)

    def _alike(
        self, batch: Sequence[_Work], pictures: Sequence[Picture | UnreadableImage]
    ) -> dict[tuple[str, str | None], Row]:
        """Rows of the store with the same content and description as some of the batch."""
        wanted = {
            self.same_content[picture.sha256, work.dense]
            for work, picture in zip(batch, pictures, strict=True)
            if isinstance(picture, Picture) and (picture.sha256, work.dense) in self.same_content
        }
        # The digest is taken from what is read now: a row may have been written anew since `known`.
        return {(row.sha256, row.dense): row for row in self.store.rows(sorted(wanted)).values()}

    def _embed(self, fresh: Sequence[tuple[_Work, Picture]]) -> list[Row]:
        pixels = torch.stack([picture.pixels for _, picture in fresh])
        texts = [work.dense for work, _ in fresh]
        states = embed(self.model, pixels, texts, self.options.precision, self.options.keep_patches)
        return [
            Row(
                id=work.found.id,
                path=work.found.path,
                member=work.found.member,
                size=work.found.size,
                mtime=work.found.mtime,
                sha256=picture.sha256,
                width=picture.width,
                height=picture.height,
                thumbnail=picture.thumbnail,
                dense=work.dense,
                **state,
            )
            for (work, picture), state in zip(fresh, states, strict=True)
        ]

    def _commit(self) -> None:
        self.store.put(self.pending)
        self.pending = []
        self.committed = time.monotonic()


def _renamed(row: Row, found: Found) -> Row:
    return replace(row, id=found.id, path=found.path, member=found.member, size=found.size, mtime=found.mtime)


@torch.no_grad()
def embed(
    model: RetrievalModel,
    pixels: torch.Tensor,
    dense: Sequence[str | None],
    precision: Precision = "float16",
    keep_patches: int | None = None,
) -> list[dict[str, Any]]:
    """Vector and packed state of each image: the fields `vector`, `tokens`, `positions`, `mean`, `words` of a `Row`.

    `pixels` (B, 3, H, W) uint8; `dense` one description an image, or None.
    """
    # Large activations make the allocator hand memory back and forth: on a CPU few images at a time are much faster.
    step = CPU_BATCH if model.device.type == "cpu" else len(pixels)
    parts = torch.split(pixels.to(model.device), step)
    tokens = torch.cat([model.encode_pixels(part.float() / 255) for part in parts])
    words = mask = None
    if model.head.uses_description and any(text is not None for text in dense):
        words, mask = model.encode_descriptions(dense)
    images = ImageFeatures(tokens, words, mask)
    vectors = image_vectors(model, images).cpu().numpy().astype(np.float16)
    prefix = model.vision.num_prefix_tokens
    slim = keep_patches is not None and keep_patches < tokens.shape[1] - prefix
    best = rank_patches(fixed_patch_scores(model, images))[:, :keep_patches].sort(dim=1).values if slim else None
    states = []
    for i in range(len(pixels)):
        state: dict[str, Any] = {"vector": vectors[i], "positions": None, "mean": None, "words": None}
        rows = tokens[i]
        if best is not None:
            state["positions"] = best[i].cpu().numpy().astype("<u2").tobytes()
            state["mean"] = pack(rows[prefix:].mean(dim=0, keepdim=True), "float16")
            rows = torch.cat([rows[:prefix], rows[prefix:][best[i]]])
        state["tokens"] = pack(rows, precision)
        if words is not None and mask is not None and bool(mask[i].any()):
            state["words"] = pack(words[i][mask[i]], precision)
        states.append(state)
    return states
