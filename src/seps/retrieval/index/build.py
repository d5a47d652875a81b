"""Index a folder: find what is new, changed, moved or gone, embed it in batches, and write whole batches.

A row leaves the store only if its file is known to be absent, and many rows only if the caller says so.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seps.retrieval.data import DataError
from seps.retrieval.data.descriptions import Descriptions, named_by, read_descriptions
from seps.retrieval.data.gallery import Found, Gallery, Problem, walk
from seps.retrieval.data.images import Picture
from seps.retrieval.index.calibrate import bring_up_to_date
from seps.retrieval.index.embedding import Content, ImageJob, PreparedBatch, PreparedImage, Preparer, prepare_locally
from seps.retrieval.index.guides import FolderGuides, guides_of_folder
from seps.retrieval.index.opening import IndexOptions, gone_from, open_store
from seps.retrieval.index.rows import IndexedFile, Row
from seps.retrieval.index.store import Store, writer_lock
from seps.retrieval.index.zeroshot import ZeroShotModel
from seps.retrieval.model import RetrievalModel

__all__ = ["IndexOptions", "IndexReport", "index_folder"]

COMMIT_ROWS, COMMIT_SECONDS = 512, 15.0


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
    """The store's pixels are made in an older way, which it keeps for all of its images."""
    problems: list[Problem] = field(default_factory=list)
    kept: int = 0
    """Rows kept although their file could not be read this time, or is in a place that is skipped."""
    description_problems: list[Problem] = field(default_factory=list)
    """Lines of descriptions that were not used, and descriptions that may be out of date."""
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """What of the folder is left out on purpose: names by reason."""
    seconds: float = 0.0
    decoding: float = 0.0
    encoding: float = 0.0
    own: float = 0.0
    """Processor seconds of decoding pictures, of the encoders and packing, and of everything else."""


@dataclass(frozen=True)
class _Work:
    """A file that has to be read."""

    found: Found
    description: str | None
    known: IndexedFile | None
    guides: bytes | None = None
    forget: bool = False
    """No description is wanted, not even that of the same content elsewhere in the store."""


def index_folder(
    folder: str | os.PathLike[str],
    location: str | os.PathLike[str],
    model: RetrievalModel | ZeroShotModel,
    model_name: str,
    *,
    dense: Sequence[str | os.PathLike[str]] = (),
    options: IndexOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> IndexReport:
    """Bring the store at `location` up to date with `folder`; `progress(done, total)` counts images.

    Safe to interrupt anywhere and to run again. Raises DataError for a folder or JSONL that cannot be read,
    StoreError for a store of another model, folder or release, one that is being written, or if more than a tenth
    of the store would go (see `IndexOptions.prune`); then nothing was changed.
    """
    options = options or IndexOptions()
    start, cpu = time.monotonic(), time.process_time()
    gallery = walk(folder)
    texts = read_descriptions(gallery.root, dense)
    report = IndexReport(problems=gallery.problems, skipped=gallery.skipped)
    report.description_problems = [*texts.problems, *texts.unused(gallery.images)]
    guides = FolderGuides()
    if isinstance(model, RetrievalModel):
        guides = guides_of_folder(gallery, texts, model, report.description_problems)
    if options.strict and report.description_problems:
        first, count = report.description_problems[0], len(report.description_problems)
        raise DataError(f"{count} lines of descriptions cannot be used; the first: {first}. Nothing was changed.")
    forgotten = named_by(options.forget_descriptions, gallery.images)
    with writer_lock(str(location)):
        store, known = open_store(location, gallery, model, model_name, options, guides.widths)
        report.older_pixels = store.settings.pixels != "model"
        gone, report.kept = gone_from(gallery, known, options.prune)
        work = _compare(gallery, known, texts, guides, forgotten, report)
        _Indexer(store, model, options, known, report).run(work, gallery.root, progress)
        store.delete(gone)
        report.deleted += len(gone)
        if store.settings.bank:
            bring_up_to_date(store, model, changed=bool(work or gone))
        store.tidy()
    report.seconds = time.monotonic() - start
    report.own = time.process_time() - cpu
    if options.ray is None:  # a cluster's decoding and encoding is not this process's time
        report.own -= report.decoding + report.encoding
    return report


def _compare(
    gallery: Gallery,
    known: dict[str, IndexedFile],
    texts: Descriptions,
    guides: FolderGuides,
    forgotten: set[str],
    report: IndexReport,
) -> list[_Work]:
    """What has to be read; the rest is counted. A description of the store stays where no file brings another."""
    work = []
    for found in gallery.images:
        before, text = known.get(found.id), texts.of(found)
        if found.id in forgotten and text is not None:
            report.description_problems.append(
                Problem(str(found), "its description comes from a JSONL file; take the line out to take it away")
            )
        same_file = before is not None and (before.size, before.mtime) == (found.size, found.mtime)
        if text is None and before is not None and found.id not in forgotten:
            text = before.description
            if text is not None and not same_file:
                why = "its file has changed since it was described; look whether the description still fits"
                report.description_problems.append(Problem(str(found), why))
        report.described += text is not None
        guided = guides.of.get(found.id, before.guides if before is not None else None)
        if before is not None and same_file and (before.description, before.guides) == (text, guided):
            report.unchanged += 1
        else:
            work.append(_Work(found, text, before, guided, found.id in forgotten))
    return work


class _Indexer:
    """Turns work into rows of the store and commits now and then."""

    def __init__(
        self,
        store: Store,
        model: RetrievalModel | ZeroShotModel,
        options: IndexOptions,
        known: dict[str, IndexedFile],
        report: IndexReport,
    ) -> None:
        self.store, self.options, self.report = store, options, report
        self.same_content = {(file.sha256, file.description, file.guides): file.id for file in known.values()}
        for file in known.values():
            for content in _taken_over(file.sha256, file.description, file.guides):
                self.same_content.setdefault(content, file.id)
        self.prepare = Preparer(model, store.settings, frozenset(self.same_content))
        self.pending: list[Row] = []
        self.committed = time.monotonic()

    def run(self, work: Sequence[_Work], root: Path, progress: Callable[[int, int], None] | None) -> None:
        """Index everything in `work`."""
        size, done = self.options.batch_size, 0
        batches = [work[start : start + size] for start in range(0, len(work), size)]
        jobs = [
            [ImageJob(item.found.source(root), item.description, item.guides) for item in batch] for batch in batches
        ]
        # Closed here and not some time later: a cluster must not outlive an interrupted run.
        with contextlib.closing(self._prepared(jobs)) as prepared_batches:
            for number, prepared in prepared_batches:
                self._take(batches[number], prepared.outcomes)
                self.report.decoding += prepared.decoding
                self.report.encoding += prepared.encoding
                if len(self.pending) >= COMMIT_ROWS or time.monotonic() - self.committed > COMMIT_SECONDS:
                    self._commit()
                done += len(batches[number])
                if progress is not None:
                    progress(done, len(work))
        self._commit()

    def _prepared(self, jobs: Sequence[Sequence[ImageJob]]) -> Generator[tuple[int, PreparedBatch]]:
        if self.options.ray is None or not jobs:
            return prepare_locally(jobs, self.prepare, self.options.workers)
        from seps.retrieval.index.ray import prepare_on_cluster

        return prepare_on_cluster(jobs, self.prepare, self.options.ray)

    def _take(self, batch: Sequence[_Work], outcomes: Sequence[PreparedImage | str]) -> None:
        """Make rows of one batch, and count what they are."""
        unknown: list[tuple[_Work, Picture]] = []
        rows = self._same_rows(batch, outcomes)
        for work, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, str):
                # The disk may answer the next time, and a damaged file may come back: what was known of it stays.
                stays = " The store keeps what it knew of it." if work.known else ""
                self.report.problems.append(Problem(str(work.found), outcome + stays))
                self.report.kept += work.known is not None
                continue
            same = None if outcome.state is not None else rows.get(_content(work, outcome.picture))
            if same is not None and same.dense is not None and work.description is None:
                self.report.described += not work.forget
                same = None if work.forget else same
            if same is not None:
                self.pending.append(_renamed(same, work.found))
            elif outcome.state is not None:
                self.pending.append(_row(work, outcome.picture, outcome.state))
            else:  # the row that held this content was changed in the meantime
                unknown.append((work, outcome.picture))
            if work.known:
                self.report.changed += 1
            elif same is not None:
                self.report.moved += 1
            else:
                self.report.new += 1
        states = self.prepare.embed(
            [picture for _, picture in unknown],
            [work.description for work, _ in unknown],
            [work.guides for work, _ in unknown],
        )
        self.pending += [_row(*entry, state) for entry, state in zip(unknown, states, strict=True)]

    def _same_rows(self, batch: Sequence[_Work], outcomes: Sequence[PreparedImage | str]) -> dict[Content, Row]:
        """Rows of the store with the same content, description and guides as some of the batch."""
        wanted = {
            self.same_content[_content(work, outcome.picture)]
            for work, outcome in zip(batch, outcomes, strict=True)
            if isinstance(outcome, PreparedImage) and outcome.state is None
        }
        # By the digests that are read now: this run may have changed a row since it began.
        rows = self.store.rows(sorted(wanted)).values()
        same: dict[Content, Row] = {(row.sha256, row.dense, row.guides): row for row in rows}
        for row in rows:
            for content in _taken_over(row.sha256, row.dense, row.guides):
                same.setdefault(content, row)
        return same

    def _commit(self) -> None:
        self.store.put(self.pending)
        self.pending = []
        self.committed = time.monotonic()


def _content(work: _Work, picture: Picture) -> Content:
    return picture.sha256, work.description, work.guides


def _taken_over(sha256: str, description: str | None, guides: bytes | None) -> list[Content]:
    """A picture without a description, or without guides, takes over those of the same content."""
    return [(sha256, None, guides), (sha256, description, None), (sha256, None, None)]


def _row(work: _Work, picture: Picture, state: dict[str, Any]) -> Row:
    return Row(
        id=work.found.id,
        **vars(work.found),
        sha256=picture.sha256,
        width=picture.width,
        height=picture.height,
        thumbnail=picture.thumbnail,
        dense=work.description,
        **state,
    )


def _renamed(row: Row, found: Found) -> Row:
    return replace(row, id=found.id, **vars(found))
