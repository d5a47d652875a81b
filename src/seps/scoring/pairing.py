"""The published pairing: each caption brings a description, which acts on every image.

It hands each query a description of the image it should find, and is there to reproduce published figures alone.

Shapes: T texts, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seps.method.checks import InputError, check_features
from seps.method.encoded import EncodedImages
from seps.method.network import PatchSlimming
from seps.method.published import encode_for_pairing
from seps.scoring.inputs import ImageBlock, Lengths, SortedTexts, TextBlock, checked_lengths


class PairedTexts(SortedTexts):
    """Captions and descriptions, one of each in every pair.

    Args:
        words, lengths, dtype, products: see `SortedTexts`.
        descriptions: (T, L, C), one per caption; `description_lengths` (T,) valid words of each.
        by_description: sort by the descriptions, where those cost more: `dense="branch"` aligns their words too.
    """

    def __init__(
        self,
        words: Tensor,
        lengths: Lengths,
        descriptions: Tensor,
        description_lengths: Lengths,
        *,
        dtype: torch.dtype,
        products: torch.dtype = torch.float32,
        by_description: bool = False,
    ) -> None:
        if descriptions.shape[0] != words.shape[0]:
            raise InputError(
                f"paired_dense holds {descriptions.shape[0]} texts for {words.shape[0]} captions; the published "
                "pairing needs one each."
            )
        own = checked_lengths("paired_dense", descriptions, description_lengths)
        super().__init__(words, lengths, dtype=dtype, products=products, key=own if by_description else None)
        self.descriptions, self.description_lengths = descriptions, own
        self.longest_description = max(own, default=0)
        self.word_count += sum(own)
        self._description_lengths = self._in_order(own)

    def block(self, start: int, stop: int) -> TextBlock:
        """See `SortedTexts.block`."""
        block = super().block(start, stop)
        if block.description is None:
            block.description = self._make(self.descriptions, slice(start, stop), *self._description_lengths)
        return block

    def encode(self, net: PatchSlimming, images: ImageBlock) -> EncodedImages:
        """The images with every set of patches and no description."""
        return encode_for_pairing(net, images.images, images.guides, images.patch_mask)


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
        by_description=net.config.dense == "branch",
    )
