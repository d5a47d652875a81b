"""Index a folder: find what is new, changed, moved or gone, embed it in batches, and write whole batches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seps.retrieval.cluster import RayConfig
from seps.retrieval.embedding import Batch, Job, Prepared, Preparer, prepare_locally
from seps.retrieval.gallery import Found, Problem, read_descriptions, walk
from seps.retrieval.model import RetrievalModel
from seps.retrieval.packing import Precision
from seps.retrieval.pretrained import MINI
from seps.retrieval.store import Known, Store, writer_lock
from seps.retrieval.store_rows import NewerStoreError, Row, StoreError, StoreSettings
from seps.retrieval.thumbnails import Picture
from seps.retrieval.vectors import model_hash

Progress = Callable[[int, int], None]
COMMIT_ROWS, COMMIT_SECONDS = 512, 15.0


@dataclass(frozen=True)
class IndexOptions:
    """How to index."""

    precision: Precision = "float16"
    keep_patches: int | None = None
    """Keep only so many patches an image, those that matter most whatever the caption."""
    keep_words: int | None = None
    """Merge each description to so many words."""
    batch_size: int = 32
    workers: int | None = None
    moved: bool = False
    """The folder itself has moved: take over the new place."""
    ray: RayConfig | None = None
    """Spread decoding and embedding over a Ray cluster; `workers` is then its own."""


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
    older_pixels: bool = False
    """The store was made when pixels were made another way; it keeps that way, for all of its images."""
    problems: list[Problem] = field(default_factory=list)
    seconds: float = 0.0
    decoding: float = 0.0
    encoding: float = 0.0
    own: float = 0.0
    """Processor seconds of decoding pictures, of the encoders and packing, and of everything else."""


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
    start, cpu = time.monotonic(), time.process_time()
    gallery = walk(folder)
    texts = read_descriptions(gallery.root, dense)
    with writer_lock(str(location)):
        store = _open(location, gallery.root, model, model_name, options)
        known = store.known()
        report = IndexReport(problems=gallery.problems, older_pixels=store.settings.pixels != "model")
        work = []
        for found in gallery.images:
            before, text = known.get(found.id), texts.of(found)
            report.described += text is not None
            if before and (before.size, before.mtime, before.dense) == (found.size, found.mtime, text):
                report.unchanged += 1
            else:
                work.append(_Work(found, text, before))
        _Indexer(store, model, options, known, report).run(work, gallery.root, progress)
        gone = sorted(known.keys() - {found.id for found in gallery.images})
        store.delete(gone)
        report.deleted += len(gone)
        store.tidy()
    report.seconds = time.monotonic() - start
    # A cluster's decoding and encoding is not this process's time.
    elsewhere = options.ray is not None
    report.own = time.process_time() - cpu - (0.0 if elsewhere else report.decoding + report.encoding)
    return report


def _open(
    location: str | os.PathLike[str], root: Path, model: RetrievalModel, model_name: str, options: IndexOptions
) -> Store:
    grid = model.vision.grid_for(*model.image_size)
    keep = options.keep_patches
    if keep is not None and not 1 <= keep <= grid[0] * grid[1]:
        raise StoreError(f"keep_patches is {keep}; this model has {grid[0] * grid[1]} patches an image.")
    if options.keep_words is not None and options.keep_words < 1:
        raise StoreError(f"keep_words is {options.keep_words}; a description needs at least one word.")
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
        keep_words=options.keep_words,
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
    if _kept(have) != _kept(wanted):
        raise StoreError(
            f"The store {store.location} keeps {_kept(have)}, not {_kept(wanted)}. Leave these options as they were, "
            "or use another store."
        )
    if have.root != wanted.root:
        if not moved:
            raise StoreError(
                f"The store {store.location} holds the folder {have.root}, not {wanted.root}. If the folder was moved, "
                "say so with --moved; for another folder use another store."
            )
        store.move_root(wanted.root)


def _kept(settings: StoreSettings) -> str:
    """What a store keeps of an image, in words."""
    patches, words = settings.keep_patches or "all", settings.keep_words or "all"
    return f"{patches} patches and {words} words of a description as {settings.precision}"


class _Indexer:
    """Takes prepared batches and commits now and then."""

    def __init__(
        self, store: Store, model: RetrievalModel, options: IndexOptions, known: dict[str, Known], report: IndexReport
    ) -> None:
        self.store, self.options, self.report = store, options, report
        self.same_content = {(row.sha256, row.dense): row.id for row in known.values()}
        self.prepare = Preparer(
            model,
            options.precision,
            options.keep_patches,
            options.keep_words,
            frozenset(self.same_content),
            store.settings.pixels,
        )
        self.pending: list[Row] = []
        self.committed = time.monotonic()

    def run(self, work: Sequence[_Work], root: Path, progress: Progress | None) -> None:
        """Index everything in `work`."""
        size, done = self.options.batch_size, 0
        batches = [work[start : start + size] for start in range(0, len(work), size)]
        jobs = [[Job(item.found.source(root), item.dense) for item in batch] for batch in batches]
        for place, prepared in self._engine(jobs):
            self._take(batches[place], prepared.outcomes)
            self.report.decoding += prepared.decoding
            self.report.encoding += prepared.encoding
            late = time.monotonic() - self.committed > COMMIT_SECONDS
            if len(self.pending) >= COMMIT_ROWS or late:
                self._commit()
            done += len(batches[place])
            if progress is not None:
                progress(done, len(work))
        self._commit()

    def _engine(self, jobs: Sequence[Sequence[Job]]) -> Iterator[tuple[int, Batch]]:
        if self.options.ray is None or not jobs:
            return prepare_locally(jobs, self.prepare, self.options.workers)
        from seps.retrieval.ray_indexing import prepare_on_cluster

        return prepare_on_cluster(jobs, self.prepare, self.options.ray)

    def _take(self, batch: Sequence[_Work], outcomes: Sequence[Prepared | str]) -> None:
        unknown: list[tuple[_Work, Picture]] = []
        alike = self._alike(batch, outcomes)
        for work, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, str):
                self.report.problems.append(Problem(str(work.found), outcome))
                if work.known:  # what the store holds is no longer what the file is
                    self.store.delete([work.known.id])
                    self.report.deleted += 1
                continue
            same = None if outcome.state is not None else alike.get((outcome.picture.sha256, work.dense))
            if same is not None:
                self.pending.append(_renamed(same, work.found))
            elif outcome.state is not None:
                self.pending.append(_row(work, outcome.picture, outcome.state))
            else:  # the row that held this content was written anew in the meantime
                unknown.append((work, outcome.picture))
            if work.known:
                self.report.changed += 1
            elif same is not None:
                self.report.moved += 1
            else:
                self.report.new += 1
        states = self.prepare.embed([picture for _, picture in unknown], [work.dense for work, _ in unknown])
        self.pending += [_row(*entry, state) for entry, state in zip(unknown, states, strict=True)]

    def _alike(self, batch: Sequence[_Work], outcomes: Sequence[Prepared | str]) -> dict[tuple[str, str | None], Row]:
        """Rows of the store with the same content and description as some of the batch."""
        wanted = {
            self.same_content[outcome.picture.sha256, work.dense]
            for work, outcome in zip(batch, outcomes, strict=True)
            if isinstance(outcome, Prepared) and outcome.state is None
        }
        # The digest is taken from what is read now: a row may have been written anew since `known`.
        return {(row.sha256, row.dense): row for row in self.store.rows(sorted(wanted)).values()}

    def _commit(self) -> None:
        self.store.put(self.pending)
        self.pending = []
        self.committed = time.monotonic()


def _row(work: _Work, picture: Picture, state: dict[str, Any]) -> Row:
    return Row(
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


def _renamed(row: Row, found: Found) -> Row:
    return replace(row, id=found.id, path=found.path, member=found.member, size=found.size, mtime=found.mtime)
