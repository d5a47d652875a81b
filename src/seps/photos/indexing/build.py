"""Index one or more folders: find what is new, changed, moved or gone, embed it in batches, and write whole batches.

A row leaves the store only if its file is known to be absent, and many rows only if the caller says so.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seps.images.sources import DataError
from seps.photos.indexing.descriptions import Descriptions, described, named_by, read_descriptions, unusable
from seps.photos.indexing.embedding import (
    WRITTEN,
    Content,
    ImageJob,
    PreparedBatch,
    PreparedImage,
    Preparer,
    Unread,
    prepare_locally,
    prepare_on_cluster,
)
from seps.photos.indexing.gallery import Found, Gallery, Problem, walk
from seps.photos.indexing.maintenance import UNFINISHED, IndexReport, refresh_background
from seps.photos.indexing.opening import (
    IndexOptions,
    Root,
    missing_from,
    open_store,
    reads_metadata,
    remember_unreadable,
    roots_to_read,
    rows_of,
    settings_at,
)
from seps.photos.store.rows import IndexedFile, Row, StoreError, StoreSettings
from seps.photos.store.store import Store, writer_lock
from seps.retrieval.embedded import stated_text_hash
from seps.retrieval.engine.engine import Engine
from seps.retrieval.engine.loading import engine_of, fitting
from seps.retrieval.ranking.bank import is_outdated

__all__ = ["IndexOptions", "IndexReport", "index_folder", "report_if_current"]

COMMIT_ROWS, COMMIT_SECONDS = 256, 15.0
"""Rows and seconds after which a commit follows. Rows are in memory about three times while they are written."""
BAD_BEFORE = "it could not be read before, and has not changed since; seps index tries again"
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class _Work:
    """A file that has to be read."""

    found: Found
    job: ImageJob
    known: IndexedFile | None
    forget: bool = False
    """No written description is wanted, not even that of the same content elsewhere in the store."""

    @property
    def sidecar(self) -> int | None:
        """As in a `Row`."""
        return _sidecar_state(self.found, self.job.metadata)


def index_folder(
    folder: Folders,
    location: str | os.PathLike[str],
    model: object,
    model_name: str,
    *,
    options: IndexOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> IndexReport:
    """Bring the store at `location` up to date with `folder`, or several; `progress(done, total)` counts images.

    An empty list means all folders of the store. Of several folders one that is not there stays in the store as it is.
    Safe to interrupt anywhere and to run again. Raises DataError for a folder or JSONL that cannot be read,
    StoreError for a store of another model, folder or release, one that is being written, or if more than a tenth
    of the store would go (see `IndexOptions.prune`); then nothing was changed.
    """
    options = options or IndexOptions()
    start, cpu = time.monotonic(), time.process_time()
    survey = _Survey.of(folder, location, options)
    report, have = survey.report, settings_at(location)
    engine = engine_of(model)
    if have is not None:
        fitted = fitting(engine, have.layout)  # as the pictures that are there were encoded
        if fitted is not engine:
            engine, report.former_size = fitted, fitted.traits.image_size
    if options.strict and report.description_problems:
        first, count = report.description_problems[0], len(report.description_problems)
        raise DataError(f"{count} lines of descriptions cannot be used; the first: {first}. Nothing was changed.")
    forgotten = named_by(options.forget_descriptions, survey.images)
    with writer_lock(str(location)):
        before = settings_at(location)
        store, known = open_store(location, survey.galleries, survey.roots, engine, model_name, options)
        work, gone, excluded = survey.compare(known, store.settings, forgotten, store.settings.metadata)
        if work:
            _Indexer(store, engine, options, known, report).run(work, progress)
        store.delete(gone)
        report.deleted += len(gone)
        remember_unreadable(store, survey.galleries, report.unreadable)
        if excluded or store.settings.excluded:
            store.put_excluded(excluded)
        shown_rows = len(store) - store.settings.excluded
        if store.settings.bank and shown_rows:
            rescored = before is not None and (
                is_outdated(before.bank, before.calibration_tag) or _other_texts(before, store.settings.text_hash)
            )
            report.rescored = len(known) if rescored else 0
            changed = bool(len(work) > len(report.unreadable) or gone or excluded)
            refresh_background(store, engine, changed=changed)
        store.tidy()
    report.seconds = time.monotonic() - start
    report.own = time.process_time() - cpu
    if options.ray is None:  # a cluster's decoding and encoding is not this process's time
        report.own -= report.decoding + report.encoding
    return report


def report_if_current(
    folder: Folders,
    location: str | os.PathLike[str],
    *,
    options: IndexOptions | None = None,
) -> IndexReport | None:
    """What `index_folder` would report if it had nothing to do; None where it has. No model is needed to know.

    Raises as `index_folder` does where a folder cannot be read.
    """
    options = options or IndexOptions()
    settings = settings_at(location)
    if settings is None or options.forget_descriptions:
        return None
    survey = _Survey.of(folder, location, options)
    if not all(root.known for root in survey.roots):
        return None
    store = Store.open(location)
    work, gone, excluded = survey.compare(store.known(), settings, set(), reads_metadata(settings, options))
    bad = [item for item in work if _failed_before(settings, item.found)]
    broken = {name: facts for gallery in survey.galleries for name, facts in gallery.unreadable.items()}
    unfinished = settings.bank and (
        is_outdated(settings.bank, settings.calibration_tag)
        or _other_texts(settings, stated_text_hash(settings.model) or settings.text_hash)
        or store.without_level()
        or settings.calibration.get("images") == UNFINISHED
    )
    news = len(work) > len(bad) or any(settings.unreadable.get(name) != facts for name, facts in broken.items())
    if news or gone or excluded or unfinished:
        return None
    survey.report.problems += [Problem(str(item.found), BAD_BEFORE, again=True) for item in bad]
    return survey.report


def _other_texts(settings: StoreSettings, text_hash: str) -> bool:
    """Whether the levels of a store are of another text side than the one with this digest."""
    return bool(settings.bank) and settings.text_hash != text_hash


@dataclass
class _Survey:
    """What the folders hold now, before anything is compared with the store or changed."""

    roots: list[Root]
    galleries: list[Gallery]
    texts: list[Descriptions]
    """One per gallery."""
    report: IndexReport
    prune: bool = False

    @classmethod
    def of(cls, folder: Folders, location: str | os.PathLike[str], options: IndexOptions) -> _Survey:
        """Walk the folders. Raises DataError and StoreError; one of several that the store has may be away."""
        folders = [folder] if isinstance(folder, str | os.PathLike) else list(folder)
        settings = settings_at(location)
        known = {} if settings is None else settings.unreadable
        roots = roots_to_read(settings, location, folders, options)
        report = IndexReport()
        galleries = []
        for root in roots:
            if len(roots) > 1 and root.known and not os.path.isdir(root.folder):
                report.away.append(root.folder)
                continue
            galleries.append(walk(root.folder, options.exclude, root.base))
        if not galleries:
            raise DataError(f"None of the folders {', '.join(report.away)} is there. Nothing was changed.")
        for gallery in galleries:
            report.problems += [
                replace(problem, again=bool(problem.id) and known.get(problem.id) == gallery.unreadable[problem.id])
                for problem in gallery.problems
            ]
            for reason, names in gallery.skipped.items():
                report.skipped.setdefault(reason, []).extend(names)
        texts = [read_descriptions(gallery.root, options.dense) for gallery in galleries]
        report.description_problems = unusable(galleries, texts, options.dense)
        return cls(roots, galleries, texts, report, options.prune)

    @property
    def images(self) -> list[Found]:
        """All images of all folders."""
        return [found for gallery in self.galleries for found in gallery.images]

    def compare(
        self, known: dict[str, IndexedFile], settings: StoreSettings, forgotten: set[str], metadata: bool
    ) -> tuple[list[_Work], list[str], dict[str, bool]]:
        """What has to be read, ids of what is gone, and by id which rows become excluded, or are so no longer."""
        work: list[_Work] = []
        gone: list[str] = []
        changes: dict[str, bool] = {}
        for gallery, texts in zip(self.galleries, self.texts, strict=True):
            missing = missing_from(gallery, rows_of(gallery, known.values(), settings), self.prune)
            gone += missing.gone
            self.report.kept += missing.kept
            self.report.excluded += len(missing.excluded)
            changes |= {identity: True for identity in missing.excluded if not known[identity].excluded}
            there = (known[found.id] for found in gallery.images if found.id in known)
            changes |= {row.id: False for row in there if row.excluded}
            work += _compare(gallery, known, texts, forgotten, metadata, self.report)
        return work, gone, changes


def _failed_before(settings: StoreSettings, found: Found) -> bool:
    """Whether the store remembers that this file could not be read, and the file has not changed since."""
    return settings.unreadable.get(found.id) == (found.size, found.mtime)


def _compare(
    gallery: Gallery,
    known: dict[str, IndexedFile],
    texts: Descriptions,
    forgotten: set[str],
    metadata: bool,
    report: IndexReport,
) -> list[_Work]:
    """What has to be read; the rest is counted. What was written stays where no file brings another description."""
    work = []
    for found in gallery.images:
        before, text = known.get(found.id), texts.of(found)
        if found.id in forgotten and text is not None:
            report.description_problems.append(
                Problem(str(found), "its description comes from a JSONL file; take the line out to take it away")
            )
        same_file = before is not None and (before.size, before.mtime) == (found.size, found.mtime)
        if text is None and before is not None and found.id not in forgotten:
            text = before.written
            if text is not None and not same_file:
                why = "its file has changed since it was described; look whether the description still fits"
                report.description_problems.append(Problem(str(found), why))
        same_texts = before is not None and before.written == text and before.sidecar == _sidecar_state(found, metadata)
        if before is not None and same_file and same_texts:
            report.unchanged += 1
            report.described += before.description is not None
            continue
        sidecar = gallery.root / found.sidecar[0] if metadata and found.sidecar else None
        job = ImageJob(found.source(gallery.root), text, metadata, sidecar)
        work.append(_Work(found, job, before, found.id in forgotten))
    return work


def _sidecar_state(found: Found, metadata: bool) -> int | None:
    """As in a `Row`."""
    if not metadata:
        return None
    return found.sidecar[1] if found.sidecar else 0


class _Indexer:
    """Turns work into rows of the store and commits now and then."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        options: IndexOptions,
        known: dict[str, IndexedFile],
        report: IndexReport,
    ) -> None:
        self.store, self.options, self.report = store, options, report
        self.same_content = {(file.sha256, file.description): file.id for file in known.values()}
        for file in known.values():
            if file.written is not None:
                self.same_content.setdefault((file.sha256, WRITTEN), file.id)
        self.prepare = Preparer(engine, store.settings.layout, self.same_content, bank=bool(store.settings.bank))
        self.pending: list[Row] = []
        self.committed = time.monotonic()

    def run(self, work: Sequence[_Work], progress: Callable[[int, int], None] | None) -> None:
        """Index everything in `work`."""
        size, done = self.options.batch_size, 0
        batches = [work[start : start + size] for start in range(0, len(work), size)]
        jobs = [[item.job for item in batch] for batch in batches]
        try:
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
        except StoreError:
            raise
        except BaseException:  # above all Ctrl-C: what is computed is kept
            self._commit()
            raise
        self._commit()

    def _prepared(self, jobs: Sequence[Sequence[ImageJob]]) -> Generator[tuple[int, PreparedBatch]]:
        if self.options.ray is None or not jobs:
            return prepare_locally(jobs, self.prepare, self.options.workers)
        return prepare_on_cluster(jobs, self.prepare, self.options.ray)

    def _take(self, batch: Sequence[_Work], outcomes: Sequence[PreparedImage | Unread]) -> None:
        """Make rows of one batch, and count what they are."""
        unknown: list[tuple[_Work, PreparedImage]] = []
        rows = self._same_rows(outcomes)
        for work, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Unread):
                # The disk may answer the next time, and a damaged file may come back: what was known of it stays.
                stays = " The store keeps what it knew of it." if work.known else ""
                again = _failed_before(self.store.settings, work.found)
                self.report.problems.append(Problem(str(work.found), outcome.why + stays, outcome.kind, again))
                self.report.kept += work.known is not None
                self.report.described += work.known is not None and work.known.description is not None
                self.report.unreadable[work.found.id] = (work.found.size, work.found.mtime)
                continue
            self.report.description_problems += [Problem(str(work.found), why) for why in outcome.metadata.problems]
            same = None if outcome.state is not None else rows.get((outcome.picture.sha256, outcome.description))
            other = None if same is not None else rows.get((outcome.picture.sha256, WRITTEN))
            if outcome.state is None and other is not None and work.job.written is None and not work.forget:
                # A picture without a written description takes over that of the same content.
                work = replace(work, job=replace(work.job, written=other.written))
                text, sources = described(other.written, outcome.metadata.texts)
                outcome = replace(outcome, description=text, sources=sources)
                same = other if other.dense == text else None
            self.report.described += outcome.description is not None
            if same is not None:
                self.pending.append(replace(same, **_facts(work, outcome), excluded=False))
            elif outcome.state is not None:
                self.pending.append(_row(work, outcome, outcome.state))
            else:  # the row that held this content was changed in the meantime
                unknown.append((work, outcome))
            if work.known:
                self.report.changed += 1
            elif same is not None:
                self.report.moved += 1
            else:
                self.report.new += 1
        states = self.prepare.embed(
            [prepared.picture for _, prepared in unknown],
            [prepared.description for _, prepared in unknown],
        )
        self.pending += [_row(*entry, state) for entry, state in zip(unknown, states, strict=True)]

    def _same_rows(self, outcomes: Sequence[PreparedImage | Unread]) -> dict[Content, Row]:
        """Rows of the store with the same content as some of the batch: by description or by `WRITTEN`."""
        same = self.same_content
        wanted = {
            same.get((outcome.picture.sha256, outcome.description)) or same[outcome.picture.sha256, WRITTEN]
            for outcome in outcomes
            if isinstance(outcome, PreparedImage) and outcome.state is None
        }
        # By the digests that are read now: this run may have changed a row since it began.
        rows = self.store.rows(sorted(wanted)).values()
        found: dict[Content, Row] = {(row.sha256, row.dense): row for row in rows}
        for row in rows:
            if row.written is not None:
                found.setdefault((row.sha256, WRITTEN), row)
        return found

    def _commit(self) -> None:
        self.store.put(self.pending)
        self.pending = []
        self.committed = time.monotonic()


def _row(work: _Work, prepared: PreparedImage, state: dict[str, Any]) -> Row:
    picture, known = prepared.picture, work.known
    return Row(
        **_facts(work, prepared),
        sha256=picture.sha256,
        width=picture.width,
        height=picture.height,
        thumbnail=picture.thumbnail,
        ocr=known.ocr if known is not None and known.sha256 == picture.sha256 else None,
        **state,
    )


def _facts(work: _Work, prepared: PreparedImage) -> dict[str, Any]:
    """Columns of a row that depend on the place of its picture, or on what is read beside the pixels."""
    latitude, longitude = prepared.metadata.position or (None, None)
    return {
        "id": work.found.id,
        **work.found.columns(),
        "taken": prepared.metadata.taken,
        "dense": prepared.description,
        "written": work.job.written,
        "sources": prepared.sources,
        "sidecar": work.sidecar,
        "latitude": latitude,
        "longitude": longitude,
    }
