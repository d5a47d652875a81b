"""From pictures to what the store keeps of them: decoded, embedded and packed, a batch at a time.

A `Preparer` is all that a worker needs, whether it is a thread of this process or an actor on another machine.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from seps.nn.selection import rank_patches
from seps.retrieval.data import ImageSource, Mode, UnreadableImage
from seps.retrieval.data.images import Picture, read_picture
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.index.codec import Precision, pack
from seps.retrieval.index.fewer_words import merge_words
from seps.retrieval.index.threads import computing_threads
from seps.retrieval.index.vectors import fixed_patch_scores, image_vectors
from seps.retrieval.model import RetrievalModel

CPU_BATCH = 2
"""Images a CPU encodes at a time: larger activations make the allocator hand memory back and forth."""
CPU_TEXTS = 8
"""Descriptions a CPU encodes at a time, those of like length together: less padding."""
_NO_PIXELS = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Job:
    """One image to prepare, and its description."""

    source: ImageSource
    dense: str | None


@dataclass(frozen=True)
class Prepared:
    """A picture and its packed state: the fields `vector`, `tokens`, `positions`, `mean` and `words` of a row."""

    picture: Picture
    """Without pixels once it is embedded."""
    state: dict[str, Any] | None
    """None where the store knows the content, so that nothing was embedded."""


@dataclass(frozen=True)
class Batch:
    """What became of some jobs, one outcome a job: prepared, or why it cannot be read."""

    outcomes: Sequence[Prepared | str]
    decoding: float = 0.0
    encoding: float = 0.0
    """Seconds of processor time."""


class Preparer:
    """Decodes and embeds batches; any number of threads may call it."""

    def __init__(
        self,
        model: RetrievalModel,
        precision: Precision,
        keep_patches: int | None,
        keep_words: int | None = None,
        familiar: frozenset[tuple[str, str | None]] = frozenset(),
        mode: Mode = "model",
    ) -> None:
        self.model, self.precision = model, precision
        self.keep_patches, self.keep_words = keep_patches, keep_words
        self.mode: Mode = mode
        """How pixels are made: the store's way."""
        self.turn: AbstractContextManager[Any] = nullcontext()
        """Held while embedding: a GPU takes one batch at a time, while other threads decode."""
        self.familiar = familiar
        """Digests and descriptions the store holds: such images are read and not embedded."""

    def __call__(self, jobs: Sequence[Job]) -> Batch:
        """Prepare some images."""
        start = time.thread_time()
        outcomes: list[Prepared | str] = [self._read(job) for job in jobs]
        decoded = time.thread_time()
        fresh = [
            (place, outcome.picture, job.dense)
            for place, (outcome, job) in enumerate(zip(outcomes, jobs, strict=True))
            if isinstance(outcome, Prepared) and (outcome.picture.sha256, job.dense) not in self.familiar
        ]
        with self.turn:
            states = self.embed([picture for _, picture, _ in fresh], [dense for _, _, dense in fresh])
        for (place, picture, _), state in zip(fresh, states, strict=True):
            outcomes[place] = Prepared(replace(picture, pixels=_NO_PIXELS), state)
        return Batch(outcomes, decoded - start, time.thread_time() - decoded)

    def _read(self, job: Job) -> Prepared | str:
        try:
            return Prepared(read_picture(job.source, self.model.image_size, self.mode), None)
        except UnreadableImage as error:
            return error.why

    def embed(self, pictures: Sequence[Picture], dense: Sequence[str | None]) -> list[dict[str, Any]]:
        """The state of each picture."""
        if not pictures:
            return []
        pixels = torch.stack([picture.pixels for picture in pictures])
        return embed(self.model, pixels, dense, self.precision, self.keep_patches, self.keep_words)


def prepare_locally(
    batches: Sequence[Sequence[Job]], prepare: Preparer, workers: int | None = None
) -> Iterator[tuple[int, Batch]]:
    """Batches and their places, in order; each thread decodes and embeds a batch of its own."""
    cores = os.cpu_count() or 1
    workers = workers or min(16, cores)
    if prepare.model.device.type != "cpu":
        prepare.turn = threading.Lock()
    waiting: deque[Future[Batch]] = deque()
    pool = computing_threads(workers, "seps-index", max(1, min(torch.get_num_threads(), cores) // workers))
    try:
        for place in range(len(batches)):
            while len(waiting) < workers + 2 and place + len(waiting) < len(batches):
                waiting.append(pool.submit(prepare, batches[place + len(waiting)]))
            yield place, waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@torch.no_grad()
def embed(
    model: RetrievalModel,
    pixels: torch.Tensor,
    dense: Sequence[str | None],
    precision: Precision = "float16",
    keep_patches: int | None = None,
    keep_words: int | None = None,
) -> list[dict[str, Any]]:
    """Vector and packed state of each image: the fields `vector`, `tokens`, `positions`, `mean`, `words` of a `Row`.

    `pixels` (B, 3, H, W) uint8; `dense` one description an image, or None.
    """
    on_cpu = model.device.type == "cpu"
    parts = torch.split(pixels.to(model.device), CPU_BATCH if on_cpu else len(pixels))
    tokens = torch.cat([model.encode_pixels(part.float() / 255) for part in parts])
    words = mask = None
    if model.head.uses_description and any(text is not None for text in dense):
        words, mask = model.encode_descriptions(dense, batch_size=CPU_TEXTS if on_cpu else 128)
    return packed_states(model, ImageFeatures(tokens, words, mask), precision, keep_patches, keep_words)


@torch.no_grad()
def packed_states(
    model: RetrievalModel,
    images: ImageFeatures,
    precision: Precision,
    keep_patches: int | None = None,
    keep_words: int | None = None,
) -> list[dict[str, Any]]:
    """What `embed` returns, from features."""
    tokens, words, mask = images.tokens, images.dense, images.dense_mask
    vectors = image_vectors(model, images).cpu().numpy().astype(np.float16)
    prefix = model.vision.num_prefix_tokens
    slim = keep_patches is not None and keep_patches < tokens.shape[1] - prefix
    best = rank_patches(fixed_patch_scores(model, images))[:, :keep_patches].sort(dim=1).values if slim else None
    if keep_words is not None and words is not None and mask is not None:
        words, mask = merge_words(words, mask, keep_words)
    states = []
    for i in range(len(tokens)):
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
