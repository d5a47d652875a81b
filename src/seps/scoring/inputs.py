"""What comes into a call: blocks of images, and texts sorted by length and cut into blocks.

Short texts never pay for long ones: a block holds texts of about the same length. `pairing` has the texts of the
published pairing, in which each caption brings a description.

Shapes: B images, T texts, M words of the longest in a block, N patches, C width.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.checks import InputError, check_features, check_lengths, check_patch_mask
from seps.method.config import SlimmingConfig
from seps.method.encoded import EncodedImages, Texts, map_tensors
from seps.method.network import PatchSlimming
from seps.method.score import masked_mean

Lengths = Tensor | Sequence[int] | None

_SLACK = 1.13
_MANY = 512
"""Texts that fill a device on their own: from there on a block holds one length alone."""


@dataclass
class ImageBlock:
    """Some of the gallery's images as features, with what belongs to each; see `PatchSlimming.encode_images`."""

    images: Tensor
    dense: Tensor | None = None
    dense_lengths: Lengths = None
    guides: Mapping[str, Tensor] | None = None
    patch_mask: Tensor | None = None

    def __post_init__(self) -> None:
        self.dense_lengths = None if self.dense_lengths is None else torch.as_tensor(self.dense_lengths)

    def check(self, net: PatchSlimming) -> None:
        """Raise `InputError` unless everything that belongs to the images has one row per image.

        Before the block is cut: a part of it would not show what is missing or left over.
        """
        check_features("img_embs", self.images[:1], "images, tokens, width", net.config.embed_size)
        count = self.images.shape[0]
        if self.guides or net.config.extra_guides:
            net.check_guides(self.guides, count)
        for name in ("dense", "dense_lengths", "patch_mask"):
            rows = getattr(self, name)
            if rows is not None and rows.shape[:1] != (count,):
                raise InputError(f"{name} has the shape {tuple(rows.shape)} for {count} images; give one row each.")

    def checked(self, net: PatchSlimming) -> ImageBlock:
        """The block with its lengths on the device of the images.

        Raises `InputError` as `PatchSlimming.encode_images` does of each part, for all images at once.
        """
        check_features("images", self.images, "images, tokens, width", net.config.embed_size)
        if self.patch_mask is not None:
            check_patch_mask(self.patch_mask, self.images[:, net.prefix_count(self.images.shape[1]) :])
        lengths = None if self.dense_lengths is None else torch.as_tensor(self.dense_lengths)
        if self.dense is not None and net.config.dense != "none":
            check_features("dense", self.dense, "images, words, width", net.config.embed_size)
            if lengths is not None:
                check_lengths("dense_lengths", lengths, *self.dense.shape[:2], allow_empty=True)
        # On the device once: a copy for each part would make the host wait.
        return replace(self, dense_lengths=None if lengths is None else lengths.to(self.images.device))


Images = TypeVar("Images", bound=EncodedImages | ImageBlock)


def count_images(images: EncodedImages) -> int:
    """B, the number of images."""
    return images.patches.shape[0]


def take_images(images: Images, chosen: slice | Tensor) -> Images:
    """The chosen images, by slice (views) or by index tensor (copies)."""
    taken: Images = map_tensors(images, itemgetter(chosen))
    return taken


class ReadyImages:
    """Images, and what the host must know of them before it can score them.

    On a GPU that is copied while other work runs, and waited for when it is asked for.

    Args:
        side: the images.
        unsafe: (B,) bool, images that take the direct form; None when all do.
    """

    def __init__(self, side: EncodedImages, unsafe: Tensor | None) -> None:
        self.side = side
        facts = torch.zeros(2, dtype=torch.int32, device=side.patches.device)
        mask = side.dense_mask
        if side.dense_words is not None and mask is not None:
            # Padding that all descriptions share, and whether the valid words of each come first.
            facts = torch.stack([mask.any(dim=0).sum(), (mask[:, 1:] <= mask[:, :-1]).all()]).to(torch.int32)
        if unsafe is not None:
            facts = torch.cat([facts, unsafe.to(torch.int32)])
        self._facts = facts.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(facts.device).record_event() if facts.is_cuda else None

    def read(self) -> tuple[EncodedImages, list[bool]]:
        """The images without the columns of padding that all their descriptions share, and which are unsafe."""
        if self._copied is not None:
            self._copied.synchronize()
        used, sorted_words, *unsafe = self._facts.tolist()
        side, words, mask = self.side, self.side.dense_words, self.side.dense_mask
        if words is not None and mask is not None and sorted_words:
            used = max(1, used)
            side = replace(side, dense_words=words[:, :used], dense_mask=mask[:, :used])
        return side, list(map(bool, unsafe))


def one_ahead(items: Iterable[ReadyImages]) -> Iterator[ReadyImages]:
    """The items, each handed out after the next one is made."""
    waiting: ReadyImages | None = None
    for item in items:
        if waiting is not None:
            yield waiting
        waiting = item
    if waiting is not None:
        yield waiting


@dataclass(kw_only=True)
class TextBlock(Texts):
    """Texts of about the same length; words are zero at padding, in the products' dtype without gradients."""

    index: Tensor
    """(T,) their positions among all texts."""
    lengths: Tensor
    """(T,) int32 words of each."""
    pairs: dict[str, Tensor] = field(default_factory=dict)
    """What the fused kernels have made of the block, kept for the next images."""

    def part(self, start: int, stop: int) -> TextBlock:
        """Texts `start` to `stop` of the block."""
        part: TextBlock = map_tensors(replace(self, pairs={}), itemgetter(slice(start, stop)))
        return part


class SortedTexts:
    """All captions of a call, served in blocks.

    Args:
        words: (T, M, C) word features.
        lengths: (T,) valid words of each; None when all are.
        dtype: the network's dtype, which the features take first.
        products: the dtype that normalised words are kept in.
        key: what the texts are sorted by; their lengths where it is None.
    """

    longest_description: int = 0
    """Words of the longest description that comes with a caption."""
    keeps_blocks = False
    """Whether each block is made once and kept, for texts that many images meet."""

    def __init__(
        self,
        words: Tensor,
        lengths: Lengths,
        *,
        dtype: torch.dtype,
        products: torch.dtype = torch.float32,
        key: Sequence[int] | None = None,
    ) -> None:
        self.words, self.lengths = words, checked_lengths("cap", words, lengths)
        self.dtype, self.products = dtype, products
        self.count, self.longest = len(self.lengths), max(self.lengths, default=1)
        self.word_count = sum(self.lengths)
        # Stable; sorting a list of 25,000 would leave a GPU idle for some milliseconds.
        by = torch.tensor(self.lengths if key is None else key, dtype=torch.int32)
        ordered, self._order = torch.sort(by, stable=True)
        self._ordered = ordered.numpy().tolist()
        self._index = on_device(self._order, torch.long, words.device)
        self.back = torch.argsort(self._index)
        """Places of the caller's texts among the sorted ones."""
        self._lengths = self._in_order(self.lengths)
        self._kept: dict[tuple[int, int], TextBlock] = {}
        self._runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.joined: dict[tuple[int, int], TextBlock] = {}

    def _in_order(self, lengths: list[int]) -> tuple[list[int], Tensor]:
        """Lengths of the sorted texts as numbers, and on the device once: a copy for each block would make it wait."""
        ordered = torch.tensor(lengths, dtype=torch.int32)[self._order]
        return ordered.numpy().tolist(), on_device(ordered, torch.int32, self.words.device)

    def unit_nbytes(self, fused: bool = False) -> int:
        """Bytes that all normalised words take at once, for the `fused` kernels with their pairs of numbers."""
        values = self.products.itemsize * self.word_count
        if fused:
            values += 10 * self.count + (6 * self.word_count if self.products == torch.float32 else 0)
        return values * self.words.shape[-1]

    def runs(self, limit: int, least: int | None = None) -> list[tuple[int, int]]:
        """Runs of the sorted texts, at most `limit` each; see `cut_by_length`."""
        least = min(64, max(16, self.count // 2)) if least is None else least
        # Every block of images asks: cutting 25,000 texts again would leave a GPU idle for some milliseconds.
        if (limit, least) not in self._runs:
            self._runs[limit, least] = cut_by_length(self._ordered, limit, least)
        return self._runs[limit, least]

    def block(self, start: int, stop: int) -> TextBlock:
        """The block of sorted texts `start` to `stop`."""
        found = self._kept.get((start, stop))
        if found is None:
            found = self._make(self.words, slice(start, stop), *self._lengths)
            if self.keeps_blocks:
                self._kept[start, stop] = found
        return found

    def encode(self, net: PatchSlimming, images: ImageBlock) -> EncodedImages:
        """The image-only state that these texts are scored with."""
        return net.encode_images(
            images.images,
            dense=images.dense,
            dense_lengths=images.dense_lengths,
            guides=images.guides,
            patch_mask=images.patch_mask,
        )

    def _make(self, features: Tensor, part: slice, lengths: list[int], counts: Tensor) -> TextBlock:
        shortest, longest = min(lengths[part]), max(lengths[part])
        # A copy starts at a full address, for which kernels are made once.
        index, counts = self._index[part], counts[part].clone()
        words = features[:, :longest].index_select(0, index).to(self.dtype)
        mask = None
        if shortest < longest:
            mask = torch.arange(longest, device=words.device)[None, :] < counts[:, None]
        unit = F.normalize(words.float(), dim=-1)
        if mask is not None:
            unit = unit.masked_fill(~mask[..., None], 0.0)
        mean = F.normalize(masked_mean(words, mask), dim=-1)
        return TextBlock(unit.to(self.products), mask, mean, index=index, lengths=counts)


@dataclass(frozen=True)
class Shapes:
    """What the memory of a call depends on."""

    patches: int
    width: int
    merged: int
    prefix: int
    words: int
    """Words of the longest caption."""
    description_words: int
    """Words of the longest description that stands beside the patches."""
    paired_words: int
    """Words of the longest description that comes with a caption."""
    branches: int
    dual: bool


def shapes_of(config: SlimmingConfig, patches: int, texts: SortedTexts, dense: Tensor | None) -> Shapes:
    """The shapes of a call; `dense` are the images' own descriptions (B, L, C)."""
    beside = 0 if dense is None or config.dense != "tokens" or texts.longest_description else dense.shape[1]
    return Shapes(
        patches,
        config.embed_size,
        config.num_merged,
        config.num_prefix_tokens,
        texts.longest,
        beside,
        texts.longest_description,
        len(config.branches),
        config.aggregation == "dual",
    )


def cut_by_length(ordered: Sequence[int], limit: int, least: int = 64) -> list[tuple[int, int]]:
    """Cut lengths in rising order into runs (start, stop) of at most `limit` texts and little padding.

    A run of fewer than `least` texts ends at `limit` only: small products cost more than some padding.
    """
    runs: list[tuple[int, int]] = []
    start, some = 0, max(1, min(least, limit))
    while start < len(ordered):
        # Where the lengths begin that waste too much beside the first, of few texts and of many.
        wasteful = max(start + some, bisect_right(ordered, _SLACK * ordered[start], start))
        if wasteful - start >= _MANY:
            wasteful = max(start + some, start + _MANY, bisect_right(ordered, ordered[start], start))
        stop = min(start + limit, wasteful, len(ordered))
        runs.append((start, stop))
        start = stop
    return runs


def checked_lengths(name: str, words: Tensor, lengths: Lengths) -> list[int]:
    """Check features and lengths as the network does, a slice at a time, and return the lengths as numbers."""
    count = max(1, words.shape[0]) if words.dim() == 3 else 1
    # Each slice makes the caller wait for a GPU, and fits the cache of a CPU.
    step = count if words.is_cuda else 1024
    for start in range(0, count, step):
        check_features(f"{name}_embs", words[start : start + step], "texts, words, width")
    if lengths is None:
        return [words.shape[1]] * words.shape[0]
    values = torch.as_tensor(lengths).cpu() if isinstance(lengths, Tensor) else torch.as_tensor(lengths)
    check_lengths(f"{name}_lens", values, words.shape[0], words.shape[1])
    return values.tolist() if isinstance(lengths, Tensor) else [int(value) for value in lengths]


def on_device(values: Tensor | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Whole numbers on the CPU as a tensor on `device`; the caller does not wait until a GPU has come to the copy."""
    made = values.to(dtype) if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
