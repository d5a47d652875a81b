"""From pictures to what the store keeps of them: decoded, embedded and packed, a batch at a time.

A `Preparer` is all that a worker needs, whether it is a thread of this process or an actor on another machine.
"""

from __future__ import annotations

import copy
import math
import os
import threading
import time
from collections import deque
from collections.abc import Container, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from seps.images.decoding import Picture, decode_picture
from seps.images.metadata import Metadata, read_metadata
from seps.images.shards import UnreadableImage, read_source
from seps.images.sources import ImageSource
from seps.photos.indexing.descriptions import described
from seps.photos.store.tables import Columns
from seps.ray_cluster import LOST, ClusterWork, RayConfig, connected, spread
from seps.retrieval.engine.engine import Engine
from seps.retrieval.engine.layout import PACKED, Kept, Layout
from seps.retrieval.engine.loading import drop_texts, faster, on_device, torch_pixels
from seps.retrieval.engine.queries import Array, joined
from seps.retrieval.ranking.bank import Bank, bank_of
from seps.threads import computing_threads, cores_used

CPU_PICTURES, CPU_PATCHES = 8, 1600
"""Pictures without description that a thread of a CPU embeds at a time, and patches, at which there are fewer."""
MANY = 100
"""Pictures for which an engine without torch takes the torch encoder all the same, whose faster forms save more, and
one with torch lets go what reads texts."""
CPU_TEXTS = 8
"""Descriptions a CPU encodes at a time, those of similar length together: less padding."""
Content = tuple[str, str | None]
"""What makes an image's state: digest and description."""
WRITTEN = "\0"
"""In place of the description: any that was written for the image, not read from its file."""
_MAKING = threading.Lock()
_NO_PIXELS: Array = np.empty(0, np.uint8)


@dataclass(frozen=True)
class ImageJob:
    """One image to prepare."""

    source: ImageSource
    written: str | None
    """The part of its description that does not come from its file."""
    metadata: bool = False
    """Whether that of its file is a part of its description, too."""
    sidecar: Path | None = None


@dataclass(frozen=True)
class PreparedImage:
    """A picture and its state: `vector`, `tokens`, `positions`, `mean`, `words` and `bank` of a `Row`."""

    picture: Picture
    """Without pixels once it is embedded."""
    state: dict[str, Any] | None
    """None where the store holds the content already, so that nothing was embedded."""
    metadata: Metadata = field(default_factory=Metadata)
    description: str | None = None
    sources: str | None = None
    """As in a `Row`."""


@dataclass(frozen=True)
class Unread:
    """Why an image cannot be read, as a sentence, and in a few words for counting."""

    why: str
    kind: str = "not readable"


@dataclass(frozen=True)
class PreparedBatch:
    """One outcome per job: the prepared image, or why it cannot be read."""

    outcomes: Sequence[PreparedImage | Unread]
    decoding: float = 0.0
    encoding: float = 0.0
    """Seconds of processor time."""


class Preparer:
    """Decodes and embeds batches of images for a store of this layout; any number of threads may call it.

    `bank`: levels are kept. `known_digests` are digests and descriptions that the store holds: such images are read and
    not embedded.
    """

    def __init__(
        self, engine: Engine, layout: Layout, known_digests: Container[Content] = (), *, bank: bool = True
    ) -> None:
        self.engine, self.layout, self.known_digests, self.has_bank = engine, layout, known_digests, bank
        self.bank: Bank | None = None
        """That of the engine, for a worker on another machine; others take what their process has."""
        self.gpu_lock: AbstractContextManager[Any] = nullcontext()
        """Held while the engine computes: a GPU takes one batch at a time, while other threads decode and pack."""
        self._fast: Engine | None = None

    @property
    def fast(self) -> Engine:
        """See `faster`. Made when it is first needed, by the process that embeds and for its device."""
        with _MAKING:
            if self._fast is None:
                self._fast = faster(self.engine)
            return self._fast

    def load_bank(self, drop: bool = False) -> None:
        """Have the bank of the engine ready, where the store keeps levels; with `drop` nothing else reads texts now."""
        if self.has_bank and self.bank is None:
            bank_of(self.engine)
        if drop:
            drop_texts(self.engine)

    def set_fast(self, engine: Engine) -> None:
        """Encode pictures with this form of the engine."""
        self._fast = engine

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also one in another process, makes its own form of the engine."""
        return {**self.__dict__, "_fast": None}

    def __call__(self, jobs: Sequence[ImageJob]) -> PreparedBatch:
        """Prepare some images."""
        start = time.thread_time()
        outcomes: list[PreparedImage | Unread] = [self._read(job) for job in jobs]
        decoded = time.thread_time()
        fresh = [
            (place, outcome)
            for place, (outcome, job) in enumerate(zip(outcomes, jobs, strict=True))
            if isinstance(outcome, PreparedImage) and not self._is_known(outcome, job)
        ]
        states = self.embed(
            [outcome.picture for _, outcome in fresh],
            [outcome.description for _, outcome in fresh],
        )
        for (place, outcome), state in zip(fresh, states, strict=True):
            outcomes[place] = replace(outcome, picture=replace(outcome.picture, pixels=_NO_PIXELS), state=state)
        return PreparedBatch(outcomes, decoded - start, time.thread_time() - decoded)

    def _read(self, job: ImageJob) -> PreparedImage | Unread:
        try:
            data = read_source(job.source)
            picture = decode_picture(data, job.source, self.engine.traits.image_size, self.engine.decoding)
        except UnreadableImage as error:
            return Unread(error.why, error.kind)
        metadata = read_metadata(data, job.source, job.sidecar, texts=job.metadata)
        return PreparedImage(picture, None, metadata, *described(job.written, metadata.texts))

    def _is_known(self, image: PreparedImage, job: ImageJob) -> bool:
        """Whether the store holds the content: with this description, or for one without any with a written one."""
        digest, known = image.picture.sha256, self.known_digests
        return (digest, image.description) in known or (job.written is None and (digest, WRITTEN) in known)

    def embed(self, pictures: Sequence[Picture], descriptions: Sequence[str | None]) -> list[dict[str, Any]]:
        """The packed state of each picture, with its description or None."""
        if not pictures:
            return []
        engine, on_cpu = self.engine, self.engine.device.type == "cpu"
        is_described = any(text is not None for text in descriptions)
        most = max(2, min(CPU_PICTURES, CPU_PATCHES // max(1, math.prod(self.layout.grid))))
        if on_cpu and not is_described and len(pictures) > most:
            # In parts, which take less memory. Descriptions stay together: those of similar length are encoded at once.
            cuts = [slice(start, start + most) for start in range(0, len(pictures), most)]
            return [state for cut in cuts for state in self.embed(pictures[cut], descriptions[cut])]
        step = engine.traits.cpu_batch if on_cpu else len(pictures)
        decoded = [picture.pixels for picture in pictures]
        with self.gpu_lock:
            fast = self.fast
            encoded = joined([fast.encode_pixels(decoded[i : i + step]) for i in range(0, len(decoded), step)])
            found = engine.pictures(
                encoded, descriptions if is_described else None, batch_size=CPU_TEXTS if on_cpu else 128
            )
            kept: Kept = engine.keep(found, self.layout)
        states = kept.packed(self.layout.precision)
        if not self.has_bank:
            return states
        with self.gpu_lock:
            return self._with_levels(states)

    def _with_levels(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The states, each with its level over the bank."""
        # Of the packed state: the levels of a store that gets its bank later are the same.
        levels = stored_levels(self.engine, packed_columns(states, self.layout), self.layout, self.bank)
        return [{**state, "bank": own} for state, own in zip(states, levels, strict=True)]


def stored_levels(engine: Engine, images: Columns, layout: Layout, bank: Bank | None = None) -> list[float | None]:
    """The level of each image, from its columns as a store with this layout keeps them.

    None for all where the engine scores descriptions alone and none of them has one. `bank`: that of the engine, where
    the caller has it.
    """
    pictures = layout.unpack(images, engine.device)
    if not engine.traits.reads_pixels and not bool(pictures.described.any()):
        return [None] * len(images)
    levels = (bank or bank_of(engine)).levels(engine, pictures, images.vectors())
    return [float(value) for value in levels]


def packed_columns(states: Sequence[Mapping[str, Any]], layout: Layout) -> Columns:
    """States that were packed but not stored yet, as if they had been read with the layout's columns and `vector`."""
    return Columns({name: [state[name] for state in states] for name in ("vector", *PACKED)})


def prepare_locally(
    batches: Sequence[Sequence[ImageJob]], prepare: Preparer, workers: int | None = None
) -> Generator[tuple[int, PreparedBatch]]:
    """Batches with their numbers, in order; each thread decodes and embeds a batch of its own."""
    cores = os.cpu_count() or 1
    workers = workers or min(16, cores)
    if prepare.engine.device.type != "cpu":
        prepare.gpu_lock = threading.Lock()
    # Torch, where it is used, is loaded before the threads are made: each sets torch's number of cores.
    many = sum(map(len, batches)) >= MANY
    if many and (pixels := torch_pixels(prepare.engine)) is not None:
        prepare.set_fast(pixels)
    waiting: deque[Future[PreparedBatch]] = deque()
    pool = computing_threads(workers, "seps-index", max(1, min(cores_used(), cores) // workers))
    maker = computing_threads(1, "seps-encoder")
    try:
        if len(batches) > 1:  # of a few pictures perhaps none has to be encoded
            maker.submit(lambda: prepare.fast)  # while the first batches and the bank are read; it uses one core
        if batches:
            described = any(job.written is not None for batch in batches for job in batch)
            pool.submit(prepare.load_bank, many and not described)
        for number in range(len(batches)):
            while len(waiting) < workers + 2 and number + len(waiting) < len(batches):
                waiting.append(pool.submit(prepare, batches[number + len(waiting)]))
            yield number, waiting.popleft().result()
    finally:
        maker.shutdown(wait=True, cancel_futures=True)
        pool.shutdown(wait=True, cancel_futures=True)


def prepare_on_cluster(
    batches: Sequence[Sequence[ImageJob]], prepare: Preparer, config: RayConfig
) -> Generator[tuple[int, PreparedBatch]]:
    """Batches with their numbers, as the actors of a Ray cluster have read, decoded and embedded them.

    Raises ValueError without Ray, or where the cluster fails.
    """
    with connected(config):  # first: the sentences of the bank take seconds
        prepare = copy.copy(prepare)
        if prepare.engine.device.type != "cpu":  # a machine without a GPU could not load it
            prepare.engine = on_device(prepare.engine, "cpu")
        if prepare.has_bank:  # each worker would encode its sentences anew
            prepare.bank = bank_of(prepare.engine)
        yield from spread(config, batches, ClusterWork(partial(on_worker, prepare), _lost, _joined))


def on_worker(prepare: Preparer, on_gpu: bool) -> Preparer:
    """What an actor works with; a GPU is used where the cluster gave it one."""
    if on_gpu:
        prepare.engine = on_device(prepare.engine, "cuda")
        prepare.bank = None if prepare.bank is None else prepare.bank.to("cuda")
    return prepare


def _lost(job: ImageJob) -> PreparedBatch:
    return PreparedBatch([Unread(LOST)])


def _joined(parts: Sequence[PreparedBatch]) -> PreparedBatch:
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    return PreparedBatch(outcomes, sum(part.decoding for part in parts), sum(part.encoding for part in parts))
