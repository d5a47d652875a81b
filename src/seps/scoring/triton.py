"""The fused backend: drives the Triton kernels (`kernels`), which write no tensor per pair but D.

What stays with torch: the cosines of the selection, the word-patch products (the vendor's GEMM beats ours by more than
the writing costs), prefix cosines, and the description's words. In float32 all products are of pairs of half-precision
numbers (`pairs`); on a GPU the cosines of the selection are so in every precision.

Shapes: B images, T texts, M words, N patches (Z padded), C width, Q merged patches, P prefix tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.nn.checks import InputError
from seps.nn.image_side import ImageSide
from seps.nn.known import why_not_fast
from seps.nn.selection import num_kept
from seps.nn.slimming import PatchSlimming
from seps.scoring import half_pairs as pairs
from seps.scoring.factored import BlockScorer
from seps.scoring.inputs import TextBlock
from seps.scoring.terms import branch_weights, strict_float32, unit_attention

_log = logging.getLogger(__name__)
_compiled: set[tuple[object, ...]] = set()


@dataclass(frozen=True)
class KernelSizes:
    """Block sizes of the kernels."""

    select_rows: int = 4
    norm_rows: int = 128
    norm_group: int = 4
    norm_columns: int = 32
    norm_inner: int = 32
    norm_warps: int = 4
    norm_stages: int = 5
    table_columns: int = 128
    align_rows: int = 64
    align_patches: int = 64
    warps: int = 4
    align_stages: int = 3
    align_registers: int | None = None
    """Most registers of a thread in the alignment kernel; None leaves it to the compiler."""
    split_patches: int = 32
    split_stages: int = 3
    split_warps: int = 4
    """Of the alignment kernel in float32."""
    extra_stages: int = 2
    """Of the norms of the extra token in float32."""


def why_not_triton(
    net: PatchSlimming,
    device: torch.device | None,
    *,
    paired: bool = False,
    masked: bool = False,
    patches: int | None = None,
    words: int | None = None,
) -> str | None:
    """Why the fused kernels cannot score this, or None when they can; without a `device`, what no device changes."""
    if device is not None and device.type != "cuda":
        return f"they run on a GPU, and the features are on {device.type}"
    if device is not None and find_spec("triton") is None:
        return "triton is not installed (pip install 'seps[kernels]')"
    if net.config.aggregation == "dual":
        return "aggregation='dual' needs both softmax denominators, which only the factored form computes"
    unknown = why_not_fast(net)
    if unknown is not None:
        return f"they do not know this network: {unknown}"
    if "alignment" in net.forms:
        return f"they pool by Eq. 5, and alignment={net.config.alignment!r} pools otherwise"
    if not net.hrpa.bidirectional:
        return "they align in both directions, and hrpa.bidirectional is False"
    # In evaluation "gumbel" and "relaxed" draw nothing and are top-K.
    if net.config.decision not in ("topk", "gumbel", "relaxed"):
        return f"decision={net.config.decision!r} keeps another number of patches in each pair"
    if paired:
        return "the published pairing changes the dense branch per pair"
    if masked:
        return "patch_mask keeps another number of patches in each image"
    if patches is not None and patches > 4096:
        return f"{patches} patches do not fit a row of the selection kernel (4096)"
    if words is not None and words > 128:
        return f"a text of {words} words does not fit a block of the alignment kernel (128)"
    return None


def scorer(
    net: PatchSlimming, dtype: torch.dtype, sizes: KernelSizes | None = None
) -> Callable[[ImageSide], TritonScorer]:
    """Makes, from images, the scorer of blocks of texts.

    Raises `InputError` for a network that the kernels do not know.
    """
    obstacle = why_not_triton(net, None)
    if obstacle is not None:
        raise InputError(f"The fused kernels cannot score this: {obstacle}.")
    mlp = _flat_mlp(net)
    return lambda side: TritonScorer(net, side, dtype, sizes or KernelSizes(), mlp)


def _flat_mlp(net: PatchSlimming) -> Tensor:
    """The weights of the top-k MLP in the order the kernel reads them; one zero without MLP."""
    if net.hrpa.relevance_mlp is None:
        return torch.zeros(1, device=net.aggr_net.scale.device)
    # Its parameters come in the kernel's order: W1, b1, W2, b2.
    return torch.cat([parameter.detach().float().flatten() for parameter in net.hrpa.relevance_mlp.parameters()])


class TritonScorer(BlockScorer):
    """Scores blocks of texts against the images of `side` with the fused kernels; `dtype` float32 is by pairs."""

    tensor_cores = True

    def __init__(
        self, net: PatchSlimming, side: ImageSide, dtype: torch.dtype, sizes: KernelSizes, mlp: Tensor
    ) -> None:
        self.sizes, self.mlp, self.split = sizes, mlp, dtype == torch.float32
        super().__init__(net, side, dtype)

    def prepare(self, scaled: Tensor) -> None:
        """Make G with doubled upper blocks, the whole of H, and e padded for the kernels."""
        side, padded = self.side, scaled.shape[1]
        dtype = torch.float16 if self.split else self.dtype
        weights = branch_weights(side.logits["caption"], padded - side.patches.shape[1], dtype)
        rounded = scaled if self.split else scaled.to(dtype).float()
        with strict_float32() if self.split else nullcontext():
            gram = torch.bmm(rounded, rounded.transpose(1, 2))
        gram = gram * _doubling(padded, self.sizes.norm_columns, gram.device)
        self.gram = gram.to(self.dtype).contiguous()
        self.merged = weights.shape[-1]
        with torch.cuda.device_of(gram):  # type: ignore[no-untyped-call]
            self.table = _table(gram, weights.contiguous(), dtype, self.sizes, self.split)
        self.columns = max(16, _power(self.merged + 1 + side.prefix.shape[1]))
        weights = F.pad(weights, (0, self.columns - self.merged))
        self.weights = torch.cat(pairs.split(weights), dim=-1) if self.split else weights.to(dtype).contiguous()
        # (B N, 3 C), (B, Z, 3 C), (B, P, 3 C): right sides of products of pairs. Float32 selects by strict float32: 22
        # bits would keep another patch in ten times as many pairs.
        by_pairs = scaled.is_cuda and not self.split
        self.unit_pairs = pairs.as_right(self.unit_patches).flatten(0, 1) if by_pairs else None
        if self.split:
            self.patch_pairs = pairs.as_right(scaled)
            self.prefix_pairs = pairs.as_right(F.normalize(side.prefix.float(), dim=-1))
        self.fixed_scores = side.fixed_scores["caption"].float().contiguous()

    def score(self, block: TextBlock) -> Tensor:
        """Scores (B, T) of the block."""
        # Kernels start on the current device, which need not be that of the features.
        with torch.cuda.device_of(block.words):  # type: ignore[no-untyped-call]
            score = self._patch_scores(block)
        return self.mix(self.add_fixed_parts(block, score), self.describe(block))

    def word_products(self, block: TextBlock, tokens: Tensor) -> Tensor:
        """See `BlockScorer.word_products`; in float32 by pairs."""
        if not self.split:
            return super().word_products(block, tokens)
        return self._pair_products(block, pairs.as_right(tokens)).mul_(pairs.UNSCALE)

    def _pair_products(self, block: TextBlock, tokens: Tensor) -> Tensor:
        """Words with tokens `as_right` (B, K, 3 C): (T, M, B, K) float32, without `UNSCALE`."""
        batch, count, width = tokens.shape
        flat = pairs.products(block.paired("words").view(-1, width), tokens.view(-1, width))
        return flat.view(block.count, -1, batch, count)

    def _patch_scores(self, block: TextBlock) -> Tensor:
        from seps.scoring import kernels

        keep, extra = self.select(block)
        norms = self.squared_norms(keep, self.table)
        extra_norms = self.squared_norms(extra, self.gram[:, :, None, :])
        sizes, hrpa = self.sizes, self.net.hrpa
        images, padded, _ = self.patches.shape
        texts, longest = block.words.shape[:2]
        prefix = self.prefix.shape[1]
        if self.split:
            products = self._pair_products(block, self.patch_pairs)
            prefix_cosines = self._pair_products(block, self.prefix_pairs) if prefix else products
        else:
            products = self.word_products(block, self.patches)
            prefix_cosines = self.word_products(block, self.prefix).contiguous() if prefix else products
        top = hrpa.top_k if hrpa.relevance_mlp is not None else 0
        # A wide row of tokens leaves registers for half the words.
        wide = self.columns > 64
        rows = max(sizes.align_rows // (2 if wide else 1), _power(longest))
        per = rows // longest
        out = torch.empty(images, texts, device=products.device)
        _announce("alignment", rows, self.columns, prefix, top, self.dtype)
        kernels.align_kernel[(-(-texts // per), images)](
            products,
            keep,
            extra,
            self.weights,
            norms,
            extra_norms,
            prefix_cosines,
            block.lengths,
            self.mlp,
            out,
            texts,
            images,
            padded,
            longest,
            self.merged,
            per,
            PREFIX=prefix,
            ROWS=rows,
            BN=sizes.split_patches if self.split else sizes.align_patches,
            PX=max(16, _power(per)),
            QP=self.columns,
            TOP=top,
            HP=_power(max(2, 2 * top)),
            LEAKY=hrpa.scan,
            SPLIT=self.split,
            num_warps=sizes.warps if not self.split else sizes.split_warps * (2 if rows * self.columns > 4096 else 1),
            num_stages=sizes.split_stages if self.split else sizes.align_stages,
            **({} if sizes.align_registers is None else {"maxnreg": sizes.align_registers}),
        )
        return out

    def select(self, block: TextBlock) -> tuple[Tensor, Tensor]:
        """D and the extra token's weights, two (T, B, Z) in the products' dtype; in float32 D is float16."""
        from seps.scoring import kernels

        images, count = self.fixed_scores.shape
        padded = self.patches.shape[1]
        if self.unit_pairs is None:
            cosines, scale = unit_attention(self.unit_patches, block.mean), 1.0
        else:
            cosines, scale = pairs.products(block.paired("mean"), self.unit_pairs), pairs.UNSCALE
        extra = torch.empty(block.count, images, padded, dtype=self.dtype, device=cosines.device)
        keep = torch.empty_like(extra, dtype=torch.float16 if self.split else self.dtype)
        _announce("selection", _power(padded), self.net.config.scoring, self.dtype)
        kernels.select_kernel[(-(-block.count // self.sizes.select_rows), images)](
            cosines,
            self.fixed_scores,
            keep,
            extra,
            float(self.net.config.branches[0].guides.get("caption", 0.0)),
            scale,
            num_kept(count, self.net.config.sparse_ratio),
            block.count,
            images,
            count,
            padded,
            NP=_power(padded),
            ROWS=self.sizes.select_rows,
            LEARNED=self.net.config.scoring == "learned",
            num_warps=4,
        )
        return keep, extra

    def squared_norms(self, left: Tensor, table: Tensor) -> Tensor:
        """`left^T table_k left`: (T, B, Z), (B, Z, Q, Z) -> (B, T, Q) float32; the operands share their dtype."""
        from seps.scoring import kernels

        texts, images, padded = left.shape
        merged = table.shape[2]
        out = torch.empty(images, texts, merged, device=left.device)
        sizes = self.sizes
        group = min(sizes.norm_group, _power(merged))
        single = left.dtype == torch.float32
        _announce("norms", group, left.dtype)
        kernels.norms_kernel[(-(-texts // sizes.norm_rows), images, -(-merged // group))](
            left,
            table.contiguous(),
            out,
            texts,
            images,
            merged,
            padded,
            ROWS=sizes.norm_rows,
            GROUP=group,
            BJ=sizes.norm_columns,
            BI=sizes.norm_inner,
            PRECISION="tf32x3" if single else "tf32",
            num_warps=sizes.norm_warps,
            num_stages=sizes.extra_stages if single else sizes.norm_stages,
        )
        return out


def _announce(name: str, *shape: object) -> None:
    """Log, once a process, that a kernel is compiled for a shape, or read from Triton's cache on disk."""
    if (name, *shape) not in _compiled:
        _compiled.add((name, *shape))
        _log.info("Compiling the %s kernel, or reading it from Triton's cache: %s", name, ", ".join(map(str, shape)))


def _table(gram: Tensor, weights: Tensor, dtype: torch.dtype, sizes: KernelSizes, split: bool) -> Tensor:
    """H of all images: (B, Z, Z), (B, Z, Q) -> (B, Z, Q, Z), with `split` (B, Z, 2 Q, Z), without a float32 form."""
    from seps.scoring import kernels

    images, padded, merged = weights.shape
    table = torch.empty(images, padded, merged * (2 if split else 1), padded, dtype=dtype, device=gram.device)
    rows, columns = 16, sizes.table_columns
    _announce("table", columns, dtype, split)
    kernels.table_kernel[(-(-padded // rows), merged, images)](
        gram, weights, table, merged, padded, BI=rows, BJ=columns, SPLIT=split, num_warps=4
    )
    return table


def _doubling(count: int, step: int, device: torch.device) -> Tensor:
    """2 above the diagonal blocks of `step` patches, 1 in them, 0 below."""
    block = torch.arange(count, device=device) // step
    return (block[:, None] < block[None, :]).float() * 2 + (block[:, None] == block[None, :]).float()


def _power(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()
