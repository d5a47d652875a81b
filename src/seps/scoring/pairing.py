"""The published pairing: each caption brings a description, which acts on every image.

It hands each query a description of the image it should find, and is there to reproduce published figures alone. All
that is special about it in the scores is here.

Shapes: T texts, C width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.checks import InputError, check_features
from seps.method.encoded import ImageSide
from seps.method.network import PatchSlimming
from seps.scoring.inputs import ImageBlock, Lengths, TextBlock, Texts, checked_lengths


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


class PairedTexts(Texts):
    """Captions and descriptions, one of each in every pair.

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


def paired_texts(
    net: PatchSlimming,
    words: Tensor,
    lengths: Lengths,
    paired_dense: Tensor,
    paired_dense_lengths: Lengths,
    products: torch.dtype = torch.float32,
    *,
    dense: Tensor | None,
) -> PairedTexts:
    """The texts of a call to `net` in which caption t comes with the description `paired_dense[t]`.

    Raises `InputError` where the images have descriptions `dense` as well.
    """
    if dense is not None:
        raise InputError(
            "Both dense and paired_dense came. A description belongs to its image (dense) or, in the published "
            "pairing, to a caption (paired_dense); leave one out."
        )
    check_features("paired_dense", paired_dense[:1], "texts, words, width", net.config.embed_size)
    return PairedTexts(
        words,
        lengths,
        paired_dense,
        paired_dense_lengths,
        dtype=net.aggr_net.scale.dtype,
        products=products,
        second_branch=net.config.dense == "branch",
    )
