"""Each image against texts of its own, exactly: a few large operations for all pairs of a block of images.

`score_matrix` scores every image with every text. Where each image has its own texts, chosen among many that are the
same for all images, that would be one call per image. Here the many texts are prepared once (`TextPool`), and the
words that a block of images needs stand one after the other, without padding.

What a text decides about an image is which patches are kept (D), as in `factored`. With P = words V^T, G = V V^T and
e the weights of the merged patches, merged patch k of a pair is `u_k = sum_i a_ik v_i` with `a_ik = D_i e_ik`, and the
extra token the same with its own weights, so that both need no vector of width C:

    word_j . u_k = sum_i P_ji a_ik        |u_k|^2 = a_k^T G a_k

Shapes: B images, T texts of each, W words of all of them, M words of the longest, N patches, P prefix tokens,
C width, Q merged patches, K tokens, A all texts of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.checks import evaluating
from seps.method.encoded import EncodedImages, Kept, Texts
from seps.method.network import PatchSlimming
from seps.method.precision import strict_float32
from seps.method.score import masked_mean
from seps.scoring.factored import GramMaxima
from seps.scoring.terms import branch_weights, inverse_norms, other_forward, scaled_patches, unsafe_images

_ON_CPU, _ON_GPU = 8, 64
"""Images per call. Fewer leave many small operations; on a CPU more do not stay in the cache of a core."""


def images_at_once(device: torch.device) -> int:
    """How many images per call of `score_own_texts` suit a device."""
    return _ON_CPU if device.type == "cpu" else _ON_GPU


class TextPool:
    """Many texts, prepared once: L2-normalised words one after the other, and L2-normalised mean words.

    Args:
        words: (A, M, C) word features.
        mask: (A, M) bool, True at words, of which each text has at least one.
    """

    def __init__(self, words: Tensor, mask: Tensor) -> None:
        self._set(words[mask], mask.sum(dim=1), F.normalize(masked_mean(words, mask), dim=-1))

    @classmethod
    def packed(cls, words: Tensor, counts: Tensor, means: Tensor) -> TextPool:
        """From words (W, C) without padding, those of text t together, `counts` (A,) and normalised means (A, C)."""
        pool = cls.__new__(cls)
        pool._set(words, counts, means)
        return pool

    def _set(self, words: Tensor, counts: Tensor, means: Tensor) -> None:
        self.words = F.normalize(words.float(), dim=-1)
        self.means, self.counts = means, counts
        self.starts = counts.cumsum(dim=0) - counts


@dataclass
class _OwnWords:
    """The words of the texts of some images, those of a text together, those of an image together."""

    words: Tensor
    """(W, C)."""
    texts: Tensor
    """(W,) which of the B * T texts a word belongs to."""
    places: Tensor
    """(W,) where it stands among B * T * M."""
    counts: Tensor
    """(B * T,) words of each text."""
    of_image: list[int]
    """Words of each image."""
    mask: Tensor
    """(B, T, M) bool."""

    @classmethod
    def of(cls, pool: TextPool, chosen_BT: Tensor) -> _OwnWords:
        """The words of the texts `chosen_BT` of the pool."""
        counts = pool.counts[chosen_BT]
        flat = counts.flatten()
        longest = int(flat.max())
        mask = torch.arange(longest, device=flat.device) < counts[..., None]
        places = mask.flatten().nonzero().squeeze(-1)
        texts = places // longest
        rows = pool.starts[chosen_BT].flatten()[texts] + places % longest
        return cls(pool.words.index_select(0, rows), texts, places, flat, counts.sum(dim=1).tolist(), mask)

    def times(self, rows_WX: Tensor, matrices_BXY: Tensor) -> Tensor:
        """The rows of each image times its own matrix: (W, X), (B, X, Y) -> (W, Y)."""
        if rows_WX.is_cuda:
            return self._times_padded(rows_WX, matrices_BXY)
        parts = zip(torch.split(rows_WX, self.of_image), matrices_BXY, strict=True)
        return torch.cat([rows @ matrix for rows, matrix in parts])

    def _times_padded(self, rows_WX: Tensor, matrices_BXY: Tensor) -> Tensor:
        """The same as one product, with the rows of the longest for every image: a GPU waits for many small ones."""
        longest, device = max(self.of_image), rows_WX.device
        starts = [longest * image - first for image, first in enumerate(accumulate(self.of_image[:-1], initial=0))]
        counts = torch.tensor(self.of_image, device=device)
        shift = torch.tensor(starts, device=device).repeat_interleave(counts, output_size=len(rows_WX))
        places = torch.arange(len(rows_WX), device=device) + shift
        padded = rows_WX.new_zeros(len(self.of_image) * longest, rows_WX.shape[1]).index_copy_(0, places, rows_WX)
        found = torch.bmm(padded.view(len(self.of_image), longest, -1), matrices_BXY)
        return found.flatten(0, 1).index_select(0, places)

    def maxima(self, cosines_WK: Tensor) -> tuple[Tensor, Tensor]:
        """Best token of each word (B, T, M), zero at padding, and best word of each token (B, T, K)."""
        rows = cosines_WK.new_zeros(self.mask.numel()).index_copy_(0, self.places, cosines_WK.amax(dim=-1))
        columns = torch.segment_reduce(cosines_WK, "max", lengths=self.counts, axis=0, unsafe=True)
        return rows.view(self.mask.shape), columns.view(*self.mask.shape[:2], -1)


class OwnMaxima:
    """`seps.method.maxima.Maxima` of images with packed words of their own texts, for one set of patches."""

    def __init__(self, net: PatchSlimming, images: EncodedImages, own: _OwnWords) -> None:
        self.net, self.images, self.own = net, images, own

    @staticmethod
    def supports(net: PatchSlimming, images: EncodedImages | None = None) -> str | None:
        """Why these are not the maxima of `net`, as part of a sentence; None when they are."""
        if len(net.config.branches) > 1:
            return "two sets of patches are selected"
        return other_forward(net) or GramMaxima.supports(net)

    def __call__(self, texts: Texts, kept: Sequence[Kept]) -> tuple[Tensor, Tensor]:
        """See `Maxima`."""
        (one,) = kept
        if one.fixed or bool((one.keep == 1).all()):
            # No text changes what is kept, so the tokens are those of the image alone.
            first = Kept(one.scores[:1], one.keep[:1], one.extra[:1])
            return self.beside(texts, self.net.tokens(self.images, [first])[0], None)
        return self.own.maxima(self._merged_cosines(one))

    def beside(self, texts: Texts, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Maxima`."""
        cosines = self.own.times(self.own.words, tokens.float().transpose(1, 2))
        rows, columns = self.own.maxima(cosines)
        if mask is not None:
            padding = ~mask.index_select(0, self.own.texts // texts.count)
            rows, _ = self.own.maxima(cosines.masked_fill(padding, torch.finfo(cosines.dtype).min))
        return rows, columns

    def _merged_cosines(self, one: Kept) -> Tensor:
        """Cosines (W, Q + P + 1) of the words with the merged patches, the extra token and the prefix of their pair."""
        own, scaled = self.own, scaled_patches(self.images)
        extra, keep = (part.transpose(0, 1).contiguous() for part in (one.extra, one.keep))
        prefix = F.normalize(self.images.prefix.float(), dim=-1)
        both = own.times(own.words, torch.cat([scaled, prefix], dim=1).transpose(1, 2))
        products, beside = torch.split(both, [scaled.shape[1], prefix.shape[1]], dim=1)
        weights = branch_weights(self.images.sets[one.place].logits, 0, torch.float32)
        merged = own.times(products * keep.flatten(0, 1).index_select(0, own.texts), weights)
        rest = (products * extra.flatten(0, 1).index_select(0, own.texts)).sum(dim=-1, keepdim=True)
        lengths = _inverse_lengths(scaled, keep, weights, extra).index_select(0, own.texts)
        found, alone = torch.cat([merged, rest], dim=1).mul_(lengths), [beside] if prefix.shape[1] else []
        return torch.cat([found, *alone], dim=1)


def can_score(net: PatchSlimming) -> bool:
    """Whether `score_own_texts` scores this network as it is."""
    return OwnMaxima.supports(net) is None


def score_own_texts(
    net: PatchSlimming, images: EncodedImages, pool: TextPool, chosen_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """S (B, T) float32 of image i with the texts `chosen_BT[i]` of the pool, without gradients, as in evaluation.

    Also (B,) bool: images whose scores are not to be used, because their logits spread too far for this form (see
    `factored`). The network must be one that `can_score` takes. About `images_at_once` images per call are fastest.
    """
    with torch.no_grad(), torch.autocast(images.patches.device.type, enabled=False), strict_float32(), evaluating(net):
        own = _OwnWords.of(pool, chosen_BT)
        mask = own.mask.transpose(0, 1)
        # The words stay packed: `OwnMaxima` alone reads them.
        texts = Texts(mask[..., None], mask, pool.means[chosen_BT].transpose(0, 1))
        similarity = net.score(images, texts, OwnMaxima(net, images, own)).similarity
        return similarity, unsafe_images(net, images, torch.float32)


def _inverse_lengths(scaled_BNC: Tensor, keep_BTN: Tensor, weights_BNQ: Tensor, extra_BTN: Tensor) -> Tensor:
    """`1 / |u_k|` of the merged patches of each pair, and of its extra token: (B * T, Q + 1)."""
    squared = []
    # On a CPU one image at a time: the sums of a block of images would take most of the memory of indexing.
    step = len(scaled_BNC) if scaled_BNC.is_cuda else 1
    for start in range(0, len(scaled_BNC), step):
        patches, keep, weights, extra = (
            part[start : start + step] for part in (scaled_BNC, keep_BTN, weights_BNQ, extra_BTN)
        )
        merged = keep[:, :, None] * weights.transpose(1, 2)[:, None]
        sums = torch.cat([merged, extra[:, :, None]], dim=2).flatten(1, 2)
        squared.append((torch.bmm(sums, torch.bmm(patches, patches.transpose(1, 2))).mul_(sums)).sum(dim=-1))
    return inverse_norms(torch.cat(squared)).view(keep_BTN.shape[0] * keep_BTN.shape[1], -1)
