"""The fused backend: drives the Triton kernels (`launches`), which write no tensor per pair but D.

What stays with torch: the cosines of the selection, the word-patch products (the vendor's GEMM beats ours by more than
the writing costs), prefix cosines, and the description's words. In float32 all products are of pairs of half-precision
numbers (`half_pairs`); on a GPU the cosines of the selection are so in half precision too.

Several blocks of texts are selected and normed at once, a chunk of texts: these kernels take the texts of all lengths,
and large launches fill a GPU better. Words are multiplied and aligned block by block.

Shapes: B images, T texts, M words, N patches (Z padded), C width, Q merged patches, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seps.method import align, network, score, select
from seps.method.align import HRPA
from seps.method.checks import InputError
from seps.method.encoded import EncodedImages, Texts
from seps.method.network import PatchSlimming
from seps.method.parts import Pooling
from seps.method.precision import strict_float32
from seps.method.select import num_kept
from seps.scoring.factored import GramMaxima
from seps.scoring.gpu import half_pairs as pairs
from seps.scoring.gpu import launches
from seps.scoring.gpu.launches import KernelSizes
from seps.scoring.inputs import SortedTexts, TextBlock
from seps.scoring.terms import branch_weights, changed_step, inverse_norms, keeps_whole_patches, other_forward

_STEPS = {
    (place, name): getattr(place, name)
    for place, names in (
        (select, ("hard_topk",)),
        (network, ("extra_weights", "combine_scores")),
        (score, ("min_max",)),
        (align, ("largest",)),
        (HRPA, ("pool", "pool_both")),
    )
    for name in names
}
"""The functions that the kernels compute by themselves, as they were when this module was loaded."""

Run = tuple[int, int]
"""First text of a block, and the one after its last."""


def why_not_triton(
    net: PatchSlimming,
    *,
    paired: bool = False,
    masked: bool = False,
    patches: int | None = None,
    words: int | None = None,
) -> str | None:
    """Why the fused kernels cannot score this on a GPU, or None when they can."""
    if net.config.aggregation == "dual":
        return "aggregation='dual' needs both softmax denominators, which only `GramMaxima` computes"
    unsupported = other_forward(net) or GramMaxima.supports(net)
    if unsupported is not None:
        return unsupported
    changed = changed_step(net, "score", "select", "patch_scores", "pool")
    if changed is not None:
        return f"{type(net).__name__} has another {changed}, which they compute themselves"
    for (place, name), step in _STEPS.items():
        if getattr(place, name) is not step:
            return f"{place.__name__}.{name} was replaced, and they compute it themselves"
    # In evaluation "gumbel" and "relaxed" draw nothing and are top-K.
    if net.config.decision not in ("topk", "gumbel", "relaxed"):
        return f"decision={net.config.decision!r} keeps another number of patches in each pair"
    if not keeps_whole_patches(net) or net.sparse_net_cap.sparse_ratio != net.config.sparse_ratio:
        return "they select by `TokenSparse.decide` and sparse_ratio, and sparse_net_cap selects otherwise"
    if net.own_scoring is not None:
        return f"they sum the guides of Eq. 3, and scoring={net.config.scoring!r} combines them otherwise"
    changed_mlp = _changed_mlp(net.hrpa)
    if changed_mlp is not None:
        return f"they pool by Eq. 5, and alignment={net.config.alignment!r} pools otherwise: {changed_mlp}"
    if not net.hrpa.bidirectional:
        return "they align in both directions, and hrpa.bidirectional is False"
    if paired:
        return "the published pairing changes the dense branch per pair"
    if masked:
        return "patch_mask keeps another number of patches in each image"
    if patches is not None and patches > 4096:
        return f"{patches} patches do not fit a row of the selection kernel (4096)"
    if words is not None and words > 128:
        return f"a text of {words} words does not fit a block of the alignment kernel (128)"
    return None


def _changed_mlp(hrpa: HRPA) -> str | None:
    """What of the pooling is not the library's own: the kernels read the weights of its MLP directly."""
    if type(hrpa) is not Pooling or vars(hrpa).keys() & {"pool", "pool_both", "forward"}:
        return f"hrpa is a changed {type(hrpa).__name__}"
    if any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in hrpa.modules()):
        return "hrpa has a hook, or another forward"
    mlp, top = hrpa.relevance_mlp, hrpa.top_k
    if mlp is None:
        return None
    layers = list(mlp) if type(mlp) is nn.Sequential else []
    if [type(layer) for layer in layers] != [nn.Linear, nn.GELU, nn.Linear]:
        return "hrpa.relevance_mlp has other layers"
    first, middle, last = layers
    sizes = [first.in_features, first.out_features, last.in_features, last.out_features]
    plain = sizes == [top, 2 * top, 2 * top, 1] and first.bias is not None and last.bias is not None
    return None if plain and middle.approximate == "none" else "hrpa.relevance_mlp has other settings"


def scorer(
    net: PatchSlimming, dtype: torch.dtype, sizes: KernelSizes | None = None
) -> Callable[[EncodedImages], TritonScorer]:
    """Makes, from images, the scorer of blocks of texts.

    Raises `InputError` for a network that the kernels do not know.
    """
    obstacle = why_not_triton(net)
    if obstacle is not None:
        raise InputError(f"The fused kernels cannot score this: {obstacle}.")
    mlp = _flat_mlp(net)
    return lambda images: TritonScorer(net, images, dtype, sizes or KernelSizes(), mlp)


def _flat_mlp(net: PatchSlimming) -> Tensor:
    """The weights of the top-k MLP in the order the kernel reads them; one zero without MLP."""
    if net.hrpa.relevance_mlp is None:
        return torch.zeros(1, device=net.aggr_net.scale.device)
    # Its parameters come in the kernel's order: W1, b1, W2, b2.
    return torch.cat([parameter.detach().float().flatten() for parameter in net.hrpa.relevance_mlp.parameters()])


@dataclass
class Decision:
    """What a chunk of texts decides about the images: D and the extra token's weights, two (T, B, Z), and the norms."""

    keep: Tensor
    extra: Tensor
    norms: Tensor
    """(B, Q + 1, T) inverse norms for the alignment by slots, the extra token's last. Else (B, T, Q) squared norms, in
    float32 (B, T, 2 Q) of both halves."""
    extra_norms: Tensor | None
    """(B, T, 1) squared norms of the extra token, where they do not stand among the others."""


class TritonScorer(GramMaxima):
    """Scores blocks of texts against the images of `images` with the fused kernels; `dtype` float32 is by pairs.

    `slots` says whether e stays in shared memory in the alignment, `held` whether D does in the norms.
    """

    def __init__(
        self, net: PatchSlimming, images: EncodedImages, dtype: torch.dtype, sizes: KernelSizes, mlp: Tensor
    ) -> None:
        self.sizes, self.mlp, self.split = sizes, mlp, dtype == torch.float32
        count, prefix, device = images.patches.shape[1], images.prefix.shape[1], images.patches.device
        self.num_merged = images.sets[0].logits.shape[-1]
        plain = not self.split and net.hrpa.relevance_mlp is None
        self.slots = plain and launches.fits_slots(count, prefix, self.num_merged, device)
        # Prefix tokens that stand in the padding of the patches.
        self.placed = prefix if self.slots else 0
        self.held = launches.fits_held(count + self.padding(count), device)
        super().__init__(net, images, dtype)
        if self.placed:
            self.patches[:, count : count + prefix] = self.prefix

    def padding(self, count: int) -> int:
        """Tensor cores multiply in every precision: up to a multiple of 16, with room for the prefix tokens."""
        return launches.sixteens(count + self.placed) - count

    def prepare(self, scaled: Tensor) -> None:
        """Make G with doubled upper blocks, the whole of H, and e padded for the kernels."""
        images, padded = self.images, scaled.shape[1]
        count, prefix = images.patches.shape[1], images.prefix.shape[1]
        dtype = torch.float16 if self.split else self.dtype
        weights = branch_weights(images.sets[0].logits, padded - count, dtype)
        rounded = scaled if self.split else scaled.to(dtype).float()
        with strict_float32() if self.split else nullcontext():
            gram = torch.bmm(rounded, rounded.transpose(1, 2))
        step = launches.HELD_STEP if self.held else self.sizes.norm_columns
        with torch.cuda.device_of(gram):  # type: ignore[no-untyped-call]
            upper = launches.doubled(gram, step)
            self.table = launches.table(upper, weights.contiguous(), dtype, self.sizes, self.split)
        if not (self.held and self.slots):
            upper = launches.doubled(gram, self.sizes.norm_columns)
        # (B, Z, 1, Z): the one table of the extra token.
        self.extra_gram = upper.to(self.dtype)[:, :, None].contiguous()
        self.columns = launches.token_columns(self.num_merged + 1 + prefix)
        weights = F.pad(weights, (0, self.columns - self.num_merged))
        self.kernel_weights = torch.cat(pairs.split(weights), dim=-1) if self.split else weights.to(dtype).contiguous()
        for place in range(self.placed):
            self.kernel_weights[:, count + place, self.num_merged + 1 + place].fill_(1.0)
        # (B N, 3 C), (B, Z, 3 C), (B, P, 3 C): right sides of products of pairs. Float32 selects by strict float32: 22
        # bits would keep another patch in ten times as many pairs.
        by_pairs = scaled.is_cuda and not self.split
        self.unit_pairs = (
            pairs.as_right(F.normalize(images.patches.float(), dim=-1)).flatten(0, 1) if by_pairs else None
        )
        if self.split:
            self.patch_pairs = pairs.as_right(scaled)
            self.prefix_pairs = pairs.as_right(F.normalize(images.prefix.float(), dim=-1))
        self.fixed_scores = images.sets[0].fixed.float().contiguous()

    def score(self, block: TextBlock) -> Tensor:
        """Scores (B, T) of the block."""
        out = torch.empty(self.patches.shape[0], block.count, device=self.patches.device)
        # Kernels start on the current device, which need not be that of the features.
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            self._score_into(block, self.decide(block), 0, out, 0)
        return out

    def fill(self, texts: SortedTexts, limit: int, chunk: int, out: Tensor) -> None:
        """Scores of all texts, in their sorted order, into `out` (B, T) with rows one after the other.

        Words meet the images in blocks of at most `limit` texts; up to `chunk` texts are selected and normed at once.
        """
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            for runs in chunks(texts.runs(limit), chunk):
                blocks = [texts.block(*run) for run in runs]
                decision = self.decide(joined(texts, runs, blocks))
                for (start, _), block in zip(runs, blocks, strict=True):
                    self._score_into(block, decision, start - runs[0][0], out, start)
                # Before the next chunk makes its own.
                del blocks, block, decision

    def decide(self, block: TextBlock) -> Decision:
        """Select and norm for all texts of a block, whose words are not looked at."""
        keep, extra = self.select(block)
        (texts, images, _), count = keep.shape, self.fixed_scores.shape[1]
        if not self.slots:
            extra_norms = launches.squared_norms(extra, self.extra_gram, self.sizes)
            if not self.held:
                return Decision(keep, extra, launches.squared_norms(keep, self.table, self.sizes), extra_norms)
            norms = torch.empty(images, self.table.shape[2], texts, device=keep.device)
            launches.held_norms(keep, self.table, norms, self.sizes, count=count)
            return Decision(keep, extra, norms.transpose(1, 2).contiguous(), extra_norms)
        norms = torch.empty(images, self.num_merged + 1, texts, device=keep.device)
        if self.held:
            launches.held_norms(keep, self.table, norms, self.sizes, count=count, inverse=True)
            launches.held_norms(
                extra, self.extra_gram, norms, self.sizes, count=count, first=self.num_merged, inverse=True
            )
        else:
            for left, table, part in ((keep, self.table, norms[:, :-1]), (extra, self.extra_gram, norms[:, -1:])):
                part.copy_(inverse_norms(launches.squared_norms(left, table, self.sizes)).transpose(1, 2))
        return Decision(keep, extra, norms, None)

    def select(self, block: TextBlock) -> tuple[Tensor, Tensor]:
        """D and the extra token's weights, two (T, B, Z) in the products' dtype; in float32 D is float16."""
        images, count = self.fixed_scores.shape
        if self.unit_pairs is None:
            cosines, scale = self.images.text_attention(block.mean), 1.0
        else:
            cosines, scale = pairs.products(_left_pairs(block, "mean"), self.unit_pairs), pairs.UNSCALE
        extra = torch.empty(block.count, images, self.patches.shape[1], dtype=self.dtype, device=cosines.device)
        keep = torch.empty_like(extra, dtype=torch.float16 if self.split else self.dtype)
        launches.select(
            cosines,
            self.fixed_scores,
            keep,
            extra,
            weight=float(self.net.config.branches[0].guides.get("caption", 0.0)),
            scale=scale,
            kept=num_kept(count, self.net.config.sparse_ratio),
            prefix=self.placed,
            learned=self.net.config.scoring == "learned",
            sizes=self.sizes,
        )
        return keep, extra

    def word_products(self, texts: Texts, tokens: Tensor) -> Tensor:
        """See `GramMaxima.word_products`; in float32 by pairs."""
        if not self.split:
            return super().word_products(texts, tokens)
        assert isinstance(texts, TextBlock)
        return self._pair_products(texts, pairs.as_right(tokens)).mul_(pairs.UNSCALE)

    def _pair_products(self, block: TextBlock, tokens: Tensor) -> Tensor:
        """Words with tokens `as_right` (B, K, 3 C): (T, M, B, K) float32, without `UNSCALE`."""
        batch, count, width = tokens.shape
        flat = pairs.products(_left_pairs(block, "words").view(-1, width), tokens.view(-1, width))
        return flat.view(block.count, -1, batch, count)

    def _score_into(self, block: TextBlock, decision: Decision, first: int, out: Tensor, column: int) -> None:
        """Scores of a block into the columns of `out` (B, any) from `column` on; its texts are `first` and on of a
        decision."""
        part = slice(first, first + block.count)
        place = out[:, column : column + block.count]
        if self.slots:
            launches.slot_align(
                self.word_products(block, self.patches),
                decision.keep[part],
                decision.extra[part],
                self.kernel_weights,
                decision.norms,
                block.lengths,
                out,
                merged=self.num_merged,
                prefix=self.placed,
                norm_first=first,
                out_first=column,
                leaky=self.net.hrpa.scan,
                ragged=block.mask is not None,
                sizes=self.sizes,
            )
            patches = place
        else:
            patches = self._align_block(block, decision, first)
        scores = self._finish(block, patches)
        if scores is not place:
            place.copy_(scores)

    def _finish(self, block: TextBlock, pixels: Tensor) -> Tensor:
        """S (B, T) from that of the caption's set: a second set that no text changes, and the description."""
        net, images = self.net, self.images
        for second in range(1, len(images.sets)):
            score = net.pool(*self(block, net.select(images, block, [second])), block.word_mask)
            pixels = pixels + (
                score if images.described is None else torch.where(images.described[:, None], score, 0.0)
            )
        if net.config.pooled:
            pixels = pixels + net.pooled_score(images.pooled, block.mean)
        description = net.score_description(images, block, self)
        return pixels if description is None else net.mix(images, pixels, description)

    def _align_block(self, block: TextBlock, decision: Decision, first: int) -> Tensor:
        """The patches' part of S, (B, T), where the alignment is not by slots."""
        prefix = self.prefix.shape[1]
        if self.split:
            products = self._pair_products(block, self.patch_pairs)
            prefix_cosines = self._pair_products(block, self.prefix_pairs) if prefix else products
        else:
            products = self.word_products(block, self.patches)
            prefix_cosines = self.word_products(block, self.prefix).contiguous() if prefix else products
        part = slice(first, first + block.count)
        assert decision.extra_norms is not None
        return launches.align(
            products,
            decision.keep[part],
            decision.extra[part],
            self.kernel_weights,
            decision.norms,
            decision.extra_norms,
            prefix_cosines,
            block.lengths,
            self.mlp,
            merged=self.num_merged,
            columns=self.columns,
            prefix=prefix,
            first=first,
            top=self.net.hrpa.top_k if self.net.hrpa.relevance_mlp is not None else 0,
            leaky=self.net.hrpa.scan,
            split=self.split,
            sizes=self.sizes,
        )


def _left_pairs(block: TextBlock, name: str) -> Tensor:
    """ "words" (T, M, 3 C) or "mean" (T, 3 C) of the block as the left side of products of pairs, made once."""
    if name not in block.pairs:
        block.pairs[name] = pairs.as_left(getattr(block, name))
    return block.pairs[name]


def chunks(runs: Sequence[Run], most: int) -> Iterator[list[Run]]:
    """The runs (start, stop), as many neighbours together as hold at most `most` texts, and at least one."""
    start = 0
    while start < len(runs):
        stop = start + 1
        while stop < len(runs) and runs[stop][1] - runs[start][0] <= most:
            stop += 1
        yield list(runs[start:stop])
        start = stop


def joined(texts: SortedTexts, runs: Sequence[Run], blocks: Sequence[TextBlock]) -> TextBlock:
    """The blocks of neighbouring `runs` as one, without words: what the selection needs of them.

    Made once where `texts` keeps its blocks.
    """
    if len(blocks) == 1:
        return blocks[0]
    key = (runs[0][0], runs[-1][1])
    if key in texts.joined:
        return texts.joined[key]
    mean = torch.cat([block.mean for block in blocks])
    lengths = torch.cat([block.lengths for block in blocks])
    index = torch.cat([block.index for block in blocks])
    made = TextBlock(mean.new_empty(mean.shape[0], 0, mean.shape[1]), None, mean, index=index, lengths=lengths)
    if texts.keeps_blocks:
        texts.joined[key] = made
    return made
