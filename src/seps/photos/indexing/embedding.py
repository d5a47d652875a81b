"""From pictures to what the store keeps of them: decoded, embedded and packed, a batch at a time.

A `Preparer` is all that a worker needs, whether it is a thread of this process or an actor on another machine.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from seps.encoders import ViT
from seps.encoders.compiled import compiled_vision
from seps.encoders.compiled import multiplies_bfloat16 as multiplies_bfloat16
from seps.images.dates import date_taken
from seps.images.decoding import Mode, Picture, PixelMaker, read_picture
from seps.images.shards import UnreadableImage
from seps.images.sources import DataError, ImageSource
from seps.photos.indexing.descriptions import Descriptions
from seps.photos.indexing.gallery import Gallery, Problem
from seps.photos.store.rows import Columns, StoreSettings, schema
from seps.photos.threads import computing_threads
from seps.retrieval.config import StoredPrecision
from seps.retrieval.data.guides import stacked
from seps.retrieval.engine.codec import image_vectors, mean_grid, merge_words, pack, patches_to_keep, unpack_guides
from seps.retrieval.engine.zeroshot import ZeroShotModel
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.ranking.bank import Bank, bank_of, stored_levels

CPU_BATCH = 2
"""Images a CPU encodes at a time: larger activations make the allocator hand memory back and forth."""
CPU_TEXTS = 8
"""Descriptions a CPU encodes at a time, those of similar length together: less padding."""
Vision = Callable[[torch.Tensor], torch.Tensor]
"""A vision encoder: pixels (B, 3, H, W) -> tokens (B, P + N, width)."""
Content = tuple[str, str | None, bytes | None]
"""What makes an image's state: digest, description, guides."""
_MAKING = threading.Lock()
_NO_PIXELS = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class ImageJob:
    """One image to prepare, and its description and guides."""

    source: ImageSource
    description: str | None
    guides: bytes | None = None


@dataclass(frozen=True)
class PreparedImage:
    """A picture and its state: `vector`, `tokens`, `positions`, `mean`, `words`, `guides` and `bank` of a `Row`."""

    picture: Picture
    """Without pixels once it is embedded."""
    state: dict[str, Any] | None
    """None where the store holds the content already, so that nothing was embedded."""
    taken: int | None = None
    """See `seps.images.dates`."""


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


def fast_vision(model: RetrievalModel | ZeroShotModel) -> Vision | None:
    """The vision encoder as this device runs it fastest: on a CPU by OpenVINO where installed, else `half_copy`.

    Products are of bfloat16, or by OpenVINO of 8 bits, where the device has them. None where the model's own encoder is
    to be taken.
    """
    if isinstance(model, ZeroShotModel) or model.device.type != "cpu":
        return half_copy(model)
    compiled = compiled_vision(model.vision)
    return half_copy(model) if compiled is None else compiled


def half_copy(model: RetrievalModel | ZeroShotModel) -> ViT | None:
    """The vision transformer in bfloat16, where the device has products of it; None where it has not.

    On a CPU it is twice as fast, with the same rSum; on a GPU neither was measured. Other encoders and machines encode
    with the model's own weights.
    """
    if isinstance(model, ZeroShotModel) or not isinstance(model.vision, ViT):
        return None
    kind = model.device.type
    fast = multiplies_bfloat16() if kind == "cpu" else kind == "cuda" and gpu_multiplies_bfloat16(model.device)
    return copy.deepcopy(model.vision).bfloat16() if fast else None


def gpu_multiplies_bfloat16(device: torch.device) -> bool:
    """Whether this GPU has tensor cores for bfloat16: from compute capability 8 on."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class FolderGuides:
    """The guides that the model reads: their widths, and by image id their float32 values one after the other."""

    widths: dict[str, int] = field(default_factory=dict)
    of: dict[str, bytes] = field(default_factory=dict)


def guides_of_folder(
    gallery: Gallery, texts: Descriptions, model: RetrievalModel, problems: list[Problem]
) -> FolderGuides:
    """What the lines bring; nothing where they bring none at all. Files that cannot be read are told to `problems`.

    Raises DataError where only some of the model's guides come, and where their widths differ.
    """
    names, sources = model.head.guides, {found.id: texts.guides_of(found) for found in gallery.images}
    if not any(name in source for source in sources.values() for name in names):
        return FolderGuides()

    def failed(number: int, error: DataError) -> None:
        problems.append(Problem(str(gallery.images[number]), str(error)))

    made = stacked(list(sources.values()), names, str(gallery.root), failed)
    joined = np.concatenate([made[name] for name in names], axis=1).astype("<f4")
    of = {identity: row.tobytes() for identity, row in zip(sources, joined, strict=True) if row.any()}
    return FolderGuides({name: made[name].shape[1] for name in names}, of)


class Preparer:
    """Decodes and embeds batches of images for a store with these settings; any number of threads may call it.

    `known_digests` are digests, descriptions and guides that the store holds: such images are read and not embedded.
    """

    def __init__(
        self,
        model: RetrievalModel | ZeroShotModel,
        settings: StoreSettings,
        known_digests: Container[Content] = (),
    ) -> None:
        self.model, self.settings, self.known_digests = model, settings, known_digests
        self.bank: Bank | None = None
        """That of the model, for a worker on another machine; others take what their process has."""
        self.gpu_lock: AbstractContextManager[Any] = nullcontext()
        """Held while the model computes: a GPU takes one batch at a time, while other threads decode and pack."""
        self._vision: list[Vision | None] = []

    @property
    def vision(self) -> Vision | None:
        """See `fast_vision`. Made when it is first asked for, by the process that embeds and for its device."""
        with _MAKING:
            if not self._vision:
                self._vision.append(fast_vision(self.model))
        return self._vision[0]

    def load_bank(self) -> None:
        """Have the bank of the model ready, where the store keeps levels."""
        if self.settings.bank and self.bank is None:
            bank_of(self.model, self.settings)

    def take_vision(self, vision: Vision | None) -> None:
        """Encode with this form of the vision encoder; None: with the model's own."""
        self._vision = [vision]

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also one in another process, makes its own form of the vision encoder."""
        return {**self.__dict__, "_vision": []}

    def __call__(self, jobs: Sequence[ImageJob]) -> PreparedBatch:
        """Prepare some images."""
        start = time.thread_time()
        outcomes: list[PreparedImage | Unread] = [self._read(job) for job in jobs]
        decoded = time.thread_time()
        fresh = [
            (place, outcome.picture, job)
            for place, (outcome, job) in enumerate(zip(outcomes, jobs, strict=True))
            if isinstance(outcome, PreparedImage)
            and (outcome.picture.sha256, job.description, job.guides) not in self.known_digests
        ]
        states = self.embed(
            [picture for _, picture, _ in fresh],
            [job.description for _, _, job in fresh],
            [job.guides for _, _, job in fresh],
        )
        for (place, picture, _), state in zip(fresh, states, strict=True):
            prepared = cast(PreparedImage, outcomes[place])
            outcomes[place] = replace(prepared, picture=replace(picture, pixels=_NO_PIXELS), state=state)
        return PreparedBatch(outcomes, decoded - start, time.thread_time() - decoded)

    def _read(self, job: ImageJob) -> PreparedImage | Unread:
        model = self.model
        mode: Mode | PixelMaker = model.embedder.prepare if isinstance(model, ZeroShotModel) else "model"
        try:
            picture = read_picture(job.source, model.image_size, mode)
            return PreparedImage(picture, None, date_taken(job.source))
        except UnreadableImage as error:
            return Unread(error.why, error.kind)

    @torch.no_grad()
    def embed(
        self,
        pictures: Sequence[Picture],
        descriptions: Sequence[str | None],
        guides: Sequence[bytes | None] | None = None,
    ) -> list[dict[str, Any]]:
        """The packed state of each picture, with its description and its guides, or None."""
        if not pictures:
            return []
        model = self.model
        if isinstance(model, ZeroShotModel):
            with self.gpu_lock:
                found = model.states([picture.pixels for picture in pictures], descriptions, self.settings)
                return self._with_levels(found)
        packed = list(guides or [None] * len(pictures))
        pixels = torch.stack([picture.pixels for picture in pictures])
        if model.device.type == "cuda":  # only a copy from page-locked memory lets the caller go on
            pixels = pixels.pin_memory()
        with self.gpu_lock:
            kept = kept_features(model, self._features(model, pixels, descriptions, packed), self.settings)
        states = [{**state, "guides": own} for state, own in zip(kept.packed(self.settings), packed, strict=True)]
        with self.gpu_lock:
            return self._with_levels(states)

    def _features(
        self,
        model: RetrievalModel,
        pixels: Tensor,
        descriptions: Sequence[str | None],
        guides: Sequence[bytes | None],
    ) -> ImageFeatures:
        """What the model makes of pixels (B, 3, H, W) uint8, on its device."""
        on_cpu = model.device.type == "cpu"
        parts = torch.split(pixels.to(model.device, non_blocking=True), CPU_BATCH if on_cpu else len(pixels))
        vision = self.vision
        features = ImageFeatures(torch.cat([model.encode_pixels(part.float() / 255, vision) for part in parts]))
        if model.head.uses_description and any(text is not None for text in descriptions):
            features.dense, features.dense_mask = model.encode_descriptions(
                descriptions, batch_size=CPU_TEXTS if on_cpu else 128
            )
        if self.settings.guides:
            features.guides = unpack_guides(guides, self.settings.guides, model.device)
        return features

    def _with_levels(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The states, each with its level over the bank where the store keeps levels."""
        if not self.settings.bank:
            return states
        # Of the packed state: the levels of a store that gets its bank later are the same.
        vectors = torch.from_numpy(np.stack([state["vector"] for state in states]))
        packed = packed_columns(states, self.settings)
        levels = stored_levels(self.model, packed, vectors, self.settings, self.bank)
        return [{**state, "bank": own} for state, own in zip(states, levels, strict=True)]


def packed_columns(states: Sequence[Mapping[str, Any]], settings: StoreSettings) -> Columns:
    """States that were packed but not stored yet, as if they had been read with the columns `StoreSettings.state`."""
    kinds = schema(settings)
    return Columns(
        pa.table({name: pa.array([state[name] for state in states], kinds.field(name).type) for name in settings.state})
    )


@dataclass(frozen=True)
class KeptFeatures:
    """What the store keeps of B images, not yet packed, in the processor's memory."""

    vectors: Tensor
    """(B, C)."""
    tokens: Tensor
    """(B, P + K, C): the prefix and the kept patches, or means of patches."""
    positions: Tensor | None
    """(B, K) places of the kept patches; None where all are kept, or their means."""
    means: Tensor | None
    """(B, 1, C) the mean of all patches, where not all are kept."""
    words: Tensor | None
    mask: Tensor | None

    def packed(self, settings: StoreSettings) -> list[dict[str, Any]]:
        """The state of each image: see `PreparedImage`."""
        vectors = self.vectors.numpy().astype(np.float16)
        of_mean: StoredPrecision = "int4" if settings.precision in ("int4", "int2") else "float16"
        states = []
        for i, rows in enumerate(self.tokens):
            state: dict[str, Any] = {"vector": vectors[i], "positions": None, "mean": None, "words": None}
            if self.positions is not None:
                state["positions"] = self.positions[i].numpy().astype("<u2").tobytes()
            if self.means is not None:
                state["mean"] = pack(self.means[i], of_mean)
            state["tokens"] = pack(rows, settings.precision)
            if self.words is not None and self.mask is not None and bool(self.mask[i].any()):
                state["words"] = pack(self.words[i][self.mask[i]], settings.precision)
            states.append(state)
        return states


@torch.no_grad()
def kept_features(model: RetrievalModel, images: ImageFeatures, settings: StoreSettings) -> KeptFeatures:
    """What the store keeps of these images, chosen on the model's device: the rest is not copied from it."""
    tokens, words, mask = images.tokens, images.dense, images.dense_mask
    vectors = image_vectors(model, images)
    prefix, keep = model.vision.num_prefix_tokens, settings.keep_patches
    best = means = None
    slim = keep is not None and keep < tokens.shape[1] - prefix
    if slim or settings.means:
        # One image at a time: sums over a whole batch are rounded in another order.
        means = torch.stack([rows[prefix:].mean(dim=0, keepdim=True) for rows in tokens])
    if settings.means:
        cells = mean_grid(tokens[:, prefix:], model.vision.grid_for(*model.image_size), settings.grid)
        tokens = torch.cat([tokens[:, :prefix], cells.to(tokens.dtype)], dim=1)
    if slim:
        best = patches_to_keep(model, images, cast(int, keep))
        chosen = tokens[:, prefix:].gather(1, best[:, :, None].expand(-1, -1, tokens.shape[-1]))
        tokens = torch.cat([tokens[:, :prefix], chosen], dim=1)
    if settings.keep_words is not None and words is not None and mask is not None:
        words, mask = merge_words(words, mask, settings.keep_words)
    there = (None if value is None else value.cpu() for value in (best, means, words, mask))
    return KeptFeatures(vectors.cpu(), tokens.cpu(), *there)


def packed_states(model: RetrievalModel, images: ImageFeatures, settings: StoreSettings) -> list[dict[str, Any]]:
    """The state of each image as the store keeps it: see `PreparedImage`."""
    return kept_features(model, images, settings).packed(settings)


def prepare_locally(
    batches: Sequence[Sequence[ImageJob]], prepare: Preparer, workers: int | None = None
) -> Generator[tuple[int, PreparedBatch]]:
    """Batches with their numbers, in order; each thread decodes and embeds a batch of its own."""
    cores = os.cpu_count() or 1
    workers = workers or min(16, cores)
    if prepare.model.device.type != "cpu":
        prepare.gpu_lock = threading.Lock()
    waiting: deque[Future[PreparedBatch]] = deque()
    pool = computing_threads(workers, "seps-index", max(1, min(torch.get_num_threads(), cores) // workers))
    maker = computing_threads(1, "seps-encoder")
    try:
        if len(batches) > 1:  # of a few pictures perhaps none has to be encoded
            maker.submit(lambda: prepare.vision)  # while the first batches and the bank are read; it uses one core
        if batches:
            pool.submit(prepare.load_bank)
        for number in range(len(batches)):
            while len(waiting) < workers + 2 and number + len(waiting) < len(batches):
                waiting.append(pool.submit(prepare, batches[number + len(waiting)]))
            yield number, waiting.popleft().result()
    finally:
        maker.shutdown(wait=True, cancel_futures=True)
        pool.shutdown(wait=True, cancel_futures=True)
