"""What comes into a call: blocks of images, and texts sorted by length and cut into blocks.

Short texts never pay for long ones: a block holds texts of about the same length. `PairedTexts` is the published
pairing, in which each caption brings a description; all that is special about it is here.

Shapes: B images, T texts, M words of the longest in a block, N patches, C width.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.nn.checks import InputError, check_features, check_lengths, check_patch_mask
from seps.nn.guidance import masked_mean
from seps.nn.image_side import ImageSide
from seps.nn.slimming import PatchSlimming
from seps.scoring.half_pairs import as_left
from seps.scoring.lengths import Lengths, checked_lengths, cut_by_length, on_device

T = TypeVar("T")


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

    @property
    def extras(self) -> dict[str, Any]:
        """What belongs to the images, by the names of `PatchSlimming.forward`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "images"}

    def part(self, start: int, stop: int) -> ImageBlock:
        """Images `start` to `stop`."""
        return _map_tensors(self, lambda tensor: tensor[start:stop])

    def check(self, net: PatchSlimming) -> None:
        """Raise `InputError` unless everything that belongs to the images has one row per image.

        Before the block is cut: a part of it would not show what is missing or left over.
        """
        check_features("img_embs", self.images[:1], "images, tokens, width", net.config.embed_size)
        count = self.images.shape[0]
        net.check_guides(self.guides, count)
        for name in ("dense", "dense_lengths", "patch_mask"):
            rows = getattr(self, name)
            if rows is not None and rows.shape[:1] != (count,):
                raise InputError(f"{name} has the shape {tuple(rows.shape)} for {count} images; give one row each.")

    def check_values(self, net: PatchSlimming) -> None:
        """Raise `InputError` as `PatchSlimming.encode_images` does of each part, for all images at once."""
        check_features("images", self.images, "images, tokens, width", net.config.embed_size)
        if self.patch_mask is not None:
            check_patch_mask(self.patch_mask, self.images[:, net.prefix_count(self.images.shape[1]) :])
        if self.dense is not None and net.config.dense != "none":
            check_features("dense", self.dense, "images, words, width", net.config.embed_size)
            if self.dense_lengths is not None:
                lengths = torch.as_tensor(self.dense_lengths)
                check_lengths("dense_lengths", lengths, *self.dense.shape[:2], allow_empty=True)


def count_images(side: ImageSide) -> int:
    """B, the number of images in the state."""
    return side.patches.shape[0]


def take_images(side: ImageSide, chosen: slice | Tensor) -> ImageSide:
    """The chosen images, by slice (views) or by index tensor (copies)."""
    return _map_tensors(side, lambda tensor: tensor[chosen])


def split_images(side: ImageSide, size: int) -> list[ImageSide]:
    """Parts of `size` images, in order. `split` hands gradients back in one piece, slices one padded copy each."""
    columns = _map_tensors(side, lambda tensor: torch.split(tensor, size))
    return [_map_tensors(columns, operator.itemgetter(position)) for position in range(len(columns.patches))]


def convert_images(side: ImageSide, dtype: torch.dtype) -> ImageSide:
    """The state with features of this dtype; the selection's scores are float32 always."""
    if side.patches.dtype == dtype:
        return side
    converted = _map_tensors(side, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    converted.fixed_scores = {name: scores.float() for name, scores in side.fixed_scores.items()}
    return converted


def _map_tensors(side: T, change: Callable[[Any], Any]) -> T:
    """An `ImageSide` or `ImageBlock` with `change` applied to each of its tensors."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: change(tensor) for name, tensor in value.items()}
        return None if value is None else change(value)

    return type(side)(**{field.name: changed(getattr(side, field.name)) for field in fields(side)})  # type: ignore[arg-type]


@dataclass
class PackedWords:
    """The words of a block one after the other, without padding: (W, C), their texts (W,) and places in T * M (W,)."""

    words: Tensor
    texts: Tensor
    places: Tensor


@dataclass
class TextBlock:
    """Texts of about the same length, ready for the products."""

    index: Tensor
    """(T,) their positions among all texts."""
    words: Tensor
    """(T, M, C) L2-normalised words, zero at padding; float32, or the products' dtype without gradients."""
    mask: Tensor | None
    """(T, M) bool, True at words; None when no text is padded."""
    mean: Tensor
    """(T, C) L2-normalised mean word, float32."""
    lengths: Tensor
    """(T,) int32 words of each."""
    packed: PackedWords | None = None
    """On the CPU, where texts of several lengths stand in one block, and without gradients."""
    pairs: dict[str, Tensor] = field(default_factory=dict)
    """What `paired` has made."""

    @property
    def count(self) -> int:
        """T."""
        return self.words.shape[0]

    def paired(self, name: str) -> Tensor:
        """ "words" (T, M, 3 C) or "mean" (T, 3 C) as the left side of products of pairs, made once."""
        if name not in self.pairs:
            self.pairs[name] = as_left(getattr(self, name))
        return self.pairs[name]

    def part(self, start: int, stop: int) -> TextBlock:
        """Texts `start` to `stop` of the block."""
        own = TextBlock(self.index, self.words, self.mask, self.mean, self.lengths)
        return _map_tensors(own, lambda tensor: tensor[start:stop])

    @property
    def guides(self) -> dict[str, Tensor]:
        """The mean words (T, C) that guide the selection, by the name of the guide."""
        return {"caption": self.mean}

    def words_for(self, branch: str) -> TextBlock:
        """The words that the tokens of a branch are aligned with."""
        return self


@dataclass(kw_only=True)
class PairedBlock(TextBlock):
    """Captions of the published pairing, each with the description that comes with it."""

    descriptions: TextBlock
    second_branch: bool
    """Whether the descriptions' own words are aligned with the tokens of the second branch."""

    def part(self, start: int, stop: int) -> PairedBlock:
        """Texts `start` to `stop` of the block."""
        return PairedBlock(
            **vars(super().part(start, stop)),
            descriptions=self.descriptions.part(start, stop),
            second_branch=self.second_branch,
        )

    @property
    def guides(self) -> dict[str, Tensor]:
        """The mean words (T, C) that guide the selection, by the name of the guide."""
        return {"caption": self.mean, "dense": self.descriptions.mean}

    def words_for(self, branch: str) -> TextBlock:
        """The words that the tokens of a branch are aligned with."""
        return self.descriptions if self.second_branch and branch == "dense" else self

    def description_scores(self, net: PatchSlimming) -> Tensor:
        """S (1, T) of each caption with the words of its description: the same for every image."""
        words = self.descriptions.words.float()
        cosines = torch.bmm(self.words.float(), words.transpose(1, 2))
        aligned = net.hrpa.align(cosines, self.mask, self.descriptions.mask)
        means = F.normalize(words.sum(dim=1), dim=-1)
        return (aligned + net.config.pooled * (means * self.mean).sum(dim=-1))[None]


class Texts:
    """All captions of a call, served in blocks.

    Args:
        words: (T, M, C) word features.
        lengths: (T,) valid words of each; None when all are.
        dtype: the network's dtype, which the features take first.
        products: the dtype that normalised words are kept in.
    """

    guides: ClassVar[frozenset[str]] = frozenset({"caption"})
    """Names of the guides that come with a text."""
    longest_description: int = 0
    """Words of the longest description that comes with a caption."""

    def __init__(
        self, words: Tensor, lengths: Lengths, *, dtype: torch.dtype, products: torch.dtype = torch.float32
    ) -> None:
        self.words, self.lengths = words, checked_lengths("cap", words, lengths)
        self.dtype, self.products = dtype, products
        self._sort(self.lengths)
        self._counts = self._sorted_counts(self.lengths)
        self._kept: dict[tuple[int, int], TextBlock] | None = None
        self._runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.joined: dict[tuple[int, int], TextBlock] = {}

    def _sort(self, key: list[int]) -> None:
        # Stable; sorting a list of 25,000 would leave a GPU idle for some milliseconds.
        ordered, order = torch.sort(torch.tensor(key, dtype=torch.int32), stable=True)
        self._order, self._ordered = order.numpy().tolist(), ordered.numpy().tolist()
        self._index = on_device(order, torch.long, self.words.device)
        self._back = torch.argsort(self._index)

    def _sorted_counts(self, lengths: list[int]) -> Tensor:
        # On the device once: a copy for each block would make it wait.
        return on_device(lengths, torch.int32, self.words.device)[self._index]

    @property
    def count(self) -> int:
        """T."""
        return len(self._order)

    @property
    def longest(self) -> int:
        """Words of the longest caption."""
        return max(self.lengths, default=1)

    def unit_nbytes(self, fused: bool = False) -> int:
        """Bytes that all normalised words take at once, for the `fused` kernels with what `TextBlock.paired` makes."""
        copies, words = 1 if self.words.is_cuda else 2, self._word_count()
        values = copies * self.products.itemsize * words
        if fused:
            values += 10 * self.count + (6 * words if self.products == torch.float32 else 0)
        return values * self.words.shape[-1]

    def _word_count(self) -> int:
        return sum(self.lengths)

    def keep_blocks(self) -> None:
        """Make each block once and keep it, for texts that many images meet."""
        if self._kept is None:
            self._kept = {}

    @property
    def keeps_blocks(self) -> bool:
        """Whether each block is made once and kept."""
        return self._kept is not None

    def runs(self, limit: int, least: int = 64) -> list[tuple[int, int]]:
        """Runs of the sorted texts, at most `limit` each; see `cut_by_length`."""
        # Every block of images asks: cutting 25,000 texts again would leave a GPU idle for some milliseconds.
        if (limit, least) not in self._runs:
            self._runs[limit, least] = cut_by_length(self._ordered, limit, least)
        return self._runs[limit, least]

    def restore(self, rows: Tensor) -> Tensor:
        """Columns of the sorted texts, (B, T), in the caller's order."""
        return rows.index_select(1, self._back)

    def block(self, start: int, stop: int) -> TextBlock:
        """The block of sorted texts `start` to `stop`."""
        if self._kept is None:
            return self._block(start, stop)
        if (start, stop) not in self._kept:
            self._kept[start, stop] = self._block(start, stop)
        return self._kept[start, stop]

    def _block(self, start: int, stop: int) -> TextBlock:
        return self._make(self.words, slice(start, stop), self._counts, self.lengths)

    def encode(self, net: PatchSlimming, images: ImageBlock) -> ImageSide:
        """The image-only state that these texts are scored with."""
        return net.encode_images(images.images, **images.extras)

    def _make(self, features: Tensor, part: slice, counts: Tensor, lengths: list[int]) -> TextBlock:
        lengths = [lengths[i] for i in self._order[part]]
        # A copy starts at a full address, for which kernels are made once.
        index, counts = self._index[part], counts[part].clone()
        longest = max(lengths)
        words = features[:, :longest].index_select(0, index).to(self.dtype)
        mask = None
        if min(lengths) < longest:
            mask = torch.arange(longest, device=words.device)[None, :] < counts[:, None]
        unit = F.normalize(words.float(), dim=-1)
        if mask is not None:
            unit = unit.masked_fill(~mask[..., None], 0.0)
        mean = F.normalize(masked_mean(words, mask), dim=-1)
        block = TextBlock(index, unit.to(self.products), mask, mean, counts)
        if mask is not None and self.products == torch.float32 and not (words.is_cuda or torch.is_grad_enabled()):
            places = torch.nonzero(mask.flatten()).squeeze(-1)
            block.packed = PackedWords(unit.flatten(0, 1).index_select(0, places), places // longest, places)
        return block


class PairedTexts(Texts):
    """The published pairing: description t comes with caption t, and acts on every image.

    It hands each query a description of the image it should find; only to reproduce published figures.

    Args:
        words, lengths, dtype, products: see `Texts`.
        descriptions: (T, L, C), one per caption; `description_lengths` (T,) valid words of each.
        second_branch: `dense="branch"`: the second branch's tokens are aligned with the descriptions' own words.
    """

    guides = frozenset({"caption", "dense"})

    def __init__(
        self,
        words: Tensor,
        lengths: Lengths,
        descriptions: Tensor,
        description_lengths: Lengths,
        *,
        dtype: torch.dtype,
        products: torch.dtype = torch.float32,
        second_branch: bool = False,
    ) -> None:
        super().__init__(words, lengths, dtype=dtype, products=products)
        if descriptions.shape[0] != words.shape[0]:
            raise InputError(
                f"paired_dense holds {descriptions.shape[0]} texts for {words.shape[0]} captions; the published "
                "pairing needs one each."
            )
        self.descriptions, self.second_branch = descriptions, second_branch
        self.description_lengths = checked_lengths("paired_dense", descriptions, description_lengths)
        self.longest_description = max(self.description_lengths, default=0)
        if second_branch:  # descriptions cost more than captions there
            self._sort(self.description_lengths)
            self._counts = self._sorted_counts(self.lengths)
        self._description_counts = self._sorted_counts(self.description_lengths)

    def _word_count(self) -> int:
        return sum(self.lengths) + sum(self.description_lengths)

    def _block(self, start: int, stop: int) -> PairedBlock:
        part = slice(start, stop)
        own = self._make(self.descriptions, part, self._description_counts, self.description_lengths)
        return PairedBlock(**vars(super()._block(start, stop)), descriptions=own, second_branch=self.second_branch)

    def encode(self, net: PatchSlimming, images: ImageBlock) -> ImageSide:
        """The image-only state with every branch and no description."""
        # A zero vector guides nothing, but makes both branches appear.
        nothing = images.images.new_zeros(images.images.shape[0], 1, images.images.shape[-1])
        side = net.encode_images(images.images, dense=nothing, guides=images.guides, patch_mask=images.patch_mask)
        return replace(side, dense_words=None, dense_mask=None)


def make_texts(
    net: PatchSlimming,
    words: Tensor,
    lengths: Lengths,
    paired_dense: Tensor | None,
    paired_dense_lengths: Lengths,
    products: torch.dtype = torch.float32,
    *,
    dense: Tensor | None,
) -> Texts:
    """The texts of a call to `net`, in the published pairing where `paired_dense` came.

    Raises `InputError` where the images have descriptions `dense` as well.
    """
    dtype = net.aggr_net.scale.dtype
    if paired_dense is not None and dense is not None:
        raise InputError(
            "Both dense and paired_dense came. A description belongs to its image (dense) or, in the published "
            "pairing, to a caption (paired_dense); leave one out."
        )
    if paired_dense is None:
        return Texts(words, lengths, dtype=dtype, products=products)
    check_features("paired_dense", paired_dense[:1], "texts, words, width", net.config.embed_size)
    branch = net.config.dense == "branch"
    return PairedTexts(
        words, lengths, paired_dense, paired_dense_lengths, dtype=dtype, products=products, second_branch=branch
    )
