"""Features of images as compact bytes, and back: packed matrices, merged descriptions, vectors, exact scores.

A packed matrix is float32, float16, or with one scale per row int8 or codes of 4 or 2 bits (`_LEVELS`). Beside the
features each image and each query has one vector, by which a vector index finds the candidates that are then scored
exactly. For the slimming head the dot product of both vectors is the pooled part of the score, up to its weight:
`(1 - g) cos(mean patch, mean word) + g cos(mean description word, mean word)`. So the image's vector is not scaled to
length one: its length is part of the score.

Shapes: B images, R rows, P prefix tokens, N patches, M stored patches, L description words, W merged words, T texts,
C width.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.checks import values_unchecked
from seps.method.encoded import ImageSide
from seps.method.known import evaluating, why_not_fast
from seps.method.network import PatchSlimming
from seps.method.score import masked_mean
from seps.method.select import num_kept, rank_patches
from seps.retrieval.config import StoredPrecision
from seps.retrieval.heads import ImageFeatures, SlimmingHead, TextFeatures
from seps.retrieval.model import RetrievalModel
from seps.scoring import score_state
from seps.scoring.blocks import scoring_memory
from seps.training.batches import map_tensors

if TYPE_CHECKING:
    from seps.photos.store.rows import Columns, StoreSettings


Precision = StoredPrecision
_KINDS: tuple[Precision, ...] = get_args(StoredPrecision)
_HEAD = struct.Struct("<BHH")
Array = np.ndarray[Any, np.dtype[Any]]
_LEVELS: dict[Precision, tuple[float, ...]] = {
    "int4": (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
    "int2": (0.4528, 1.5104),
}
"""Values that stand for the codes, and their negatives, in units of a row's root mean square. They have the least
squared error for normally distributed values (Max 1960), which the tokens of our models nearly are: no codebook is
trained, and an image's codes depend on no other image."""
SCORING_MEMORY = 256 * 2**20
TEXT_SIDE = ("text.", "project_words.")
"""Beginnings of the names of the weights that read sentences and descriptions."""
SHORT_SIDE = ("project_short.",)
"""Of those that only short queries are read by: nothing in a store depends on them."""


class PackingError(ValueError):
    """Bytes that are no packed matrix."""


def pack(rows: Tensor, precision: Precision = "float16") -> bytes:
    """(R, C) -> bytes: kind, R, C, the rows' scales (not of floats), the values, of codes several per byte."""
    values: Array = rows.detach().float().cpu().numpy()
    head = _HEAD.pack(_KINDS.index(precision), *values.shape)
    if precision == "float32":
        return head + values.astype("<f4").tobytes()
    if precision == "float16":
        largest = np.finfo(np.float16).max
        return head + values.clip(-largest, largest).astype("<f2").tobytes()
    if precision in _LEVELS:
        return head + _codes(values, precision)
    scales: Array = np.maximum(np.abs(values).max(axis=1, keepdims=True), 1e-12) / 127
    rounded: Array = np.rint(values / scales).astype(np.int8)
    return head + scales.astype("<f4").tobytes() + rounded.tobytes()


@functools.cache
def _code_values(precision: Precision) -> tuple[Array, Array]:
    """The levels (2**bits,), rising, and by byte the levels of the codes in it, (256, 8 / bits), lowest bits first."""
    positive = np.array(_LEVELS[precision], np.float32)
    levels = np.concatenate([-positive[::-1], positive])
    bits = len(levels).bit_length() - 1
    places = np.arange(0, 8, bits)
    return levels, levels[(np.arange(256)[:, None] >> places) & (len(levels) - 1)]


def _codes(values: Array, precision: Precision) -> bytes:
    """(R, C) -> the rows' scales, then codes of the nearest levels. The scale gives a row its length back."""
    levels, table = _code_values(precision)
    per_byte = table.shape[1]
    wide: Array = values.astype(np.float64)  # squares of float32 values can overflow
    size: Array = np.sqrt(np.mean(wide**2, axis=1, keepdims=True))
    nearest: Array = np.searchsorted((levels[1:] + levels[:-1]) / 2, wide / np.maximum(size, 1e-300))
    length: Array = np.sqrt(np.mean(levels[nearest].astype(np.float64) ** 2, axis=1, keepdims=True))
    padded = np.pad(nearest, ((0, 0), (0, -values.shape[1] % per_byte))).astype(np.uint8)
    shifts = np.arange(per_byte, dtype=np.uint8) * (8 // per_byte)
    packed = np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1)
    return bytes((size / length).astype("<f4").tobytes() + packed.tobytes())


def packed_shape(blob: bytes) -> tuple[int, int]:
    """(R, C) of packed bytes. Raises PackingError for bytes that are not whole."""
    if len(blob) < _HEAD.size:
        raise PackingError(f"{len(blob)} bytes are no packed matrix.")
    kind, rows, width = _HEAD.unpack_from(blob)
    sizes = {0: 4 * width, 1: 2 * width, 2: width + 4, 3: -(-width // 2) + 4, 4: -(-width // 4) + 4}
    if kind not in sizes or len(blob) != _HEAD.size + rows * sizes[kind]:
        raise PackingError(f"{len(blob)} bytes do not hold a {rows} x {width} matrix of kind {kind}.")
    return rows, width


def unpack(blob: bytes) -> Array:
    """The (R, C) matrix that `pack` packed, float32. Raises PackingError for bytes that are not whole."""
    matrix: Array = unpack_all(np.frombuffer(blob, np.uint8)[None])[0]
    return matrix


def unpack_all(blobs: Array | Sequence[bytes]) -> Array:
    """(B, R, C) float32 of B matrices of one shape, at once where they come as one array (B, bytes).

    Raises PackingError for bytes that are not whole.
    """
    if not isinstance(blobs, np.ndarray) or (blobs[:, : _HEAD.size] != blobs[0, : _HEAD.size]).any():
        return np.stack([unpack(bytes(blob)) for blob in blobs])
    rows, width = packed_shape(blobs[0].tobytes())
    kind, body = _KINDS[blobs[0, 0]], blobs[:, _HEAD.size :]
    if kind in ("int8", "int4", "int2"):
        scales = np.ascontiguousarray(body[:, : 4 * rows]).view("<f4")[..., None]
        values = body[:, 4 * rows :].view(np.int8)
        if kind != "int8":
            values = _code_values(kind)[1][body[:, 4 * rows :]]
            padded = width + -width % values.shape[2]
            values = values.reshape(len(body), rows, padded)[..., :width]
        scaled: Array = np.multiply(values.reshape(len(body), rows, width), scales, dtype=np.float32)
        return scaled
    plain = np.ascontiguousarray(body).view("<f4" if kind == "float32" else "<f2")
    return plain.reshape(len(body), rows, width).astype(np.float32)


def unpack_padded(blobs: Sequence[bytes | None], width: int) -> tuple[Tensor, Tensor]:
    """B matrices, None for none, padded to the longest: values (B, R, C) float32 and mask (B, R) bool."""
    matrices = [np.zeros((0, width), np.float32) if blob is None else unpack(blob) for blob in blobs]
    longest = max((len(matrix) for matrix in matrices), default=0)
    values = np.zeros((len(matrices), longest, width), np.float32)
    mask = np.zeros((len(matrices), longest), bool)
    for row, matrix in enumerate(matrices):
        values[row, : len(matrix)] = matrix
        mask[row, : len(matrix)] = True
    return torch.from_numpy(values), torch.from_numpy(mask)


def segment_ids(count: int, most: int) -> Tensor:
    """(count,): the segment of each word, for at most `most` segments whose lengths differ by one at most."""
    places = torch.arange(count)
    return places if count <= most else places * most // count


def mean_grid(patches_BNC: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """(B, M, C): the means of the patches, which lie on `grid`, over the cells of a grid of `size`, row by row."""
    shaped = patches_BNC.float().transpose(1, 2).reshape(len(patches_BNC), -1, *grid)
    return F.adaptive_avg_pool2d(shaped, size).flatten(2).transpose(1, 2)


@torch.no_grad()
def merge_words(words_BLC: Tensor, mask_BL: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Segments of neighbouring words become their mean, at most `most` per description: (B, W, C), mask (B, W).

    Neighbours have similar vectors, and segments of equal length keep the mean of the whole. Shorter descriptions
    keep their words.
    """
    counts = mask_BL.sum(dim=1).tolist()
    width = min(most, max(counts, default=0))
    merged = words_BLC.new_zeros(len(counts), width, words_BLC.shape[-1])
    mask = torch.zeros(len(counts), width, dtype=torch.bool, device=mask_BL.device)
    for row, count in enumerate(counts):
        words = words_BLC[row][mask_BL[row]]
        if count > most:
            ids = segment_ids(count, most).to(words.device)
            words = F.normalize(torch.zeros_like(merged[row]).index_add_(0, ids, F.normalize(words, dim=-1)), dim=-1)
        merged[row, : len(words)], mask[row, : len(words)] = words, True
    return merged, mask


def image_vectors(model: RetrievalModel, images: ImageFeatures) -> Tensor:
    """(B, C) float32: the vector of each image; zero where the head looks at descriptions alone and it has none."""
    patches = F.normalize(images.tokens[:, model.vision.num_prefix_tokens :].float().mean(dim=1), dim=-1)
    if not model.head.uses_description:
        return patches
    if images.dense is None or images.dense_mask is None:
        return patches if model.head.uses_pixels else torch.zeros_like(patches)
    described = F.normalize(masked_mean(F.normalize(images.dense.float(), dim=-1), images.dense_mask), dim=-1)
    if not model.head.uses_pixels:
        return described
    weight = model.description_weight
    if weight is None:
        return patches
    mixed = (1 - weight) * patches + weight * described
    return torch.where(images.dense_mask.any(dim=1, keepdim=True), mixed, patches)


def text_vectors(texts: TextFeatures) -> Tensor:
    """(T, C) float32: the vector of each query, its mean word at length one."""
    return F.normalize(masked_mean(texts.words, texts.mask), dim=-1)


def fixed_patch_scores(model: RetrievalModel, images: ImageFeatures) -> Tensor:
    """(B, N): how much each patch matters before any caption is known."""
    if isinstance(model.head, SlimmingHead):
        side = model.head.net.encode_images(
            images.tokens, dense=images.dense, dense_lengths=images.dense_lengths, guides=images.guides
        )
        return side.fixed_scores["caption"]
    patches = images.tokens[:, model.vision.num_prefix_tokens :].float()
    return F.cosine_similarity(patches, patches.mean(dim=1, keepdim=True), dim=-1)


def patches_to_keep(model: RetrievalModel, images: ImageFeatures, count: int) -> Tensor:
    """(B, count) places of the patches that a store keeps, in the order of the grid, before any caption is known.

    The first half of them matter most (`fixed_patch_scores`), the others are spread evenly over the rest of the
    picture: captions also name what is round a subject (docs/retrieval-results.md). Of a head that selects no patches
    by a score all are spread: those most like their mean, by which one could go, are background.
    """
    tokens = images.tokens
    order = spread(model.vision.grid_for(*model.image_size)).to(tokens.device).repeat(len(tokens), 1)
    if not isinstance(model.head, SlimmingHead):
        return order.argsort(dim=1, stable=True)[:, :count].sort(dim=1).values
    first = rank_patches(fixed_patch_scores(model, images))[:, : count - count // 2]
    others = order.scatter_(1, first, 1.0).argsort(dim=1, stable=True)[:, : count // 2]
    return torch.cat([first, others], dim=1).sort(dim=1).values


def spread(grid: tuple[int, int]) -> Tensor:
    """(cells,) a number in [0, 1) per cell of a grid, row by row: the cells below any bound are spread evenly over it.

    A lattice of the plastic number p (p^3 = p + 1), whose points keep apart in two dimensions: row / p + column / p^2,
    without the whole part.
    """
    rows, columns = (torch.arange(size, dtype=torch.float64) for size in grid)
    plastic = 1.3247179572447460
    return ((rows[:, None] / plastic + columns / plastic**2) % 1).flatten()


def model_hash(model: RetrievalModel) -> str:
    """Hex digest of all weights but the text side's, and of their names: models with one give an image one state."""
    return _digest(model, lambda name: not name.startswith(TEXT_SIDE + SHORT_SIDE))


def text_hash(model: RetrievalModel) -> str:
    """Hex digest of the weights that read sentences and descriptions: the text encoder and its projection."""
    return model.stated_text_hash or _digest(model, lambda name: name.startswith(TEXT_SIDE))


def short_hash(model: RetrievalModel) -> str:
    """Hex digest of the projection of short queries."""
    return _digest(model, lambda name: name.startswith(SHORT_SIDE))


def _digest(model: RetrievalModel, of: Callable[[str], bool]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        if of(name):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass
class StoredImages:
    """The state of some images of a store."""

    features: ImageFeatures
    positions: Tensor | None = None
    """(B, M) which patches the tokens are; None: all, or the cells of a grid of means, in order."""
    mean: Tensor | None = None
    """(B, C) mean of all patches, where some were left out."""

    def rows(self, start: int, stop: int) -> StoredImages:
        """Images `start` to `stop`."""
        part: StoredImages = map_tensors(self, itemgetter(slice(start, stop)))
        return part

    def without_description(self) -> StoredImages:
        """The same images, their pixels (and guides) alone."""
        return replace(self, features=ImageFeatures(self.features.tokens, guides=self.features.guides))


def restore(images: Columns, settings: StoreSettings, device: torch.device | str = "cpu") -> StoredImages:
    """The state of images that were read with the columns `StoreSettings.state`."""
    words, mask = unpack_padded(images.values("words"), settings.width)
    features = ImageFeatures(torch.from_numpy(unpack_all(images.blobs("tokens"))).to(device))
    if mask.shape[1]:
        features.dense, features.dense_mask = words.to(device), mask.to(device)
    if settings.guides:
        features.guides = unpack_guides(images.values("guides"), settings.guides, device)
    if settings.keep_patches is None and not settings.means:
        return StoredImages(features)
    means = torch.from_numpy(np.concatenate([unpack(blob) for blob in images.values("mean")])).to(device)
    if settings.means:
        return StoredImages(features, None, means)
    places = np.stack([np.frombuffer(blob, "<u2") for blob in images.values("positions")]).astype(np.int64)
    return StoredImages(features, torch.from_numpy(places).to(device), means)


def appearance(images: Columns, settings: StoreSettings) -> Array:
    """(B, C) float32 vectors of length one of the pixels alone, of images read with `StoreSettings.appearance`.

    The mean patch, or the vector of a dual encoder. Not the column `vector`, in which descriptions take part.
    """
    if settings.kind == "vectors":
        means: Array = images.vectors()[:, : settings.width]
    elif settings.appearance == ("mean",):
        means = np.concatenate([unpack(blob) for blob in images.values("mean")])
    else:
        means = unpack_all(images.blobs("tokens"))[:, settings.num_prefix_tokens :].mean(axis=1)
    found: Array = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    return found


def unpack_guides(
    blobs: Sequence[bytes | None], widths: Mapping[str, int], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """By name the vectors (B, width) of guides that a store holds; zeros where there is none.

    Raises PackingError for bytes of another length.
    """
    total = sum(widths.values())
    if any(blob is not None and len(blob) != 4 * total for blob in blobs):
        raise PackingError(f"The guides of an image do not hold {total} values.")
    nothing = bytes(4 * total)
    joined = np.frombuffer(b"".join(blob or nothing for blob in blobs), "<f4").reshape(len(blobs), total)
    parts = torch.split(torch.from_numpy(joined.astype(np.float32)).to(device), list(widths.values()), dim=1)
    return dict(zip(widths, parts, strict=True))


def image_side(net: PatchSlimming, images: ImageFeatures) -> ImageSide:
    """What no caption changes of the images. Their values are not checked: that would take a quarter of the time."""
    with values_unchecked(), evaluating(net):
        return net.encode_images(
            images.tokens, dense=images.dense, dense_lengths=images.dense_lengths, guides=images.guides
        )


class StoredScorer:
    """Exact scores of the images of a store with these settings."""

    def __init__(self, model: RetrievalModel, settings: StoreSettings) -> None:
        self.model = model
        self.grid = settings.grid
        self.net: PatchSlimming | None = None
        if isinstance(model.head, SlimmingHead):
            self.net = model.head.net
            if settings.keep_patches is not None or settings.means:
                # Of all patches of the store's pictures, which may be others than the model's are now.
                whole = None if settings.means else settings.grid[0] * settings.grid[1]
                self.net = fewer_patches(model.head.net, settings.patches, whole)
            elif settings.patches != self.net.config.num_patches:
                # A store keeps the grid it was made with; the model may have another one now.
                self.net = copy.copy(model.head.net)
                self.net.config = replace(self.net.config, check_num_patches=False)

    def side(self, images: StoredImages) -> ImageSide:
        """What no caption changes, for a slimming head. The mean patch is that of all patches."""
        if self.net is None:
            raise ValueError(f"head={self.model.config.head!r} has no patch selection; use a model with 'slimming'.")
        side = image_side(self.net, images.features)
        return side if images.mean is None else replace(side, pooled=F.normalize(images.mean, dim=-1))

    @torch.no_grad()
    def score(self, images: StoredImages, texts: TextFeatures) -> Tensor:
        """(B, T) similarities; the lowest of all for images that have nothing of what the head scores."""
        if not self.model.head.uses_pixels and images.features.dense is None:
            return texts.words.new_full((len(images.features.tokens), len(texts.words)), -self.model.head.score_range)
        memory = scoring_memory(images.features.tokens.device, SCORING_MEMORY)
        if self.net is None:
            return self.model.score(replace(images.features, mean=images.mean), texts, memory=memory)
        if len(texts.words) == 1 and why_not_fast(self.net) is None:
            # `score_state` prepares for many captions; for a single one `score_text` is several times faster.
            length = int(texts.mask[0].sum())
            with evaluating(self.net):
                return self.net.score_text(self.side(images), texts.words[0, :length]).similarity[:, None]
        scores = score_state(self.net, self.side(images), texts.words, texts.lengths, memory=memory)
        return cast(Tensor, scores)  # not the best alone


def fewer_patches(net: PatchSlimming, stored: int, whole: int | None = None) -> PatchSlimming:
    """The network for images with only `stored` patches: it selects as many of them as it would of all, or `whole`."""
    config = net.config
    kept = min(stored, num_kept(whole or config.num_patches, config.sparse_ratio))
    ratio = kept / stored
    slim = copy.deepcopy(net)
    # The number of merged patches belongs to the weights and stays as it is.
    aggregation = min(1.0, (config.num_merged + 0.5) / kept)
    slim.config = replace(config, num_patches=stored, sparse_ratio=ratio, aggr_ratio=aggregation)
    slim.sparse_net_cap.sparse_ratio = ratio
    if config.uses_dense_branch:
        slim.sparse_net_long.sparse_ratio = ratio
    return slim
