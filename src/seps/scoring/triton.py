"""The fused backend: drives the Triton kernels (`kernels`), which write no tensor per pair but D.

What stays with torch: the cosines of the selection (float32, strict), the word-patch products (the vendor's GEMM beats
ours by more than the writing costs), prefix cosines, and the description's words.

Shapes: B images, T texts, M words, N patches (Z padded), C width, Q merged patches, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Callable
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
from seps.scoring.factored import BlockScorer, word_products
from seps.scoring.inputs import TextBlock
from seps.scoring.terms import branch_weights, unit_attention


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


def why_not_triton(
    net: PatchSlimming,
    device: torch.device | None,
    *,
    paired: bool = False,
    masked: bool = False,
    dtype: torch.dtype = torch.float16,
    patches: int | None = None,
    words: int | None = None,
) -> str | None:
    """Why the fused kernels cannot score this, or None when they can; without a `device`, what no device changes."""
    if device is not None and device.type != "cuda":
        return f"they run on a GPU, and the features are on {device.type}"
    if device is not None and find_spec("triton") is None:
        return "triton is not installed (pip install 'seps[kernels]')"
    if dtype == torch.float32:
        return "their products are half precision, and float32 was asked for"
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
    obstacle = why_not_triton(net, None, dtype=dtype)
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
    """Scores blocks of texts against the images of `side` with the fused kernels."""

    def __init__(
        self, net: PatchSlimming, side: ImageSide, dtype: torch.dtype, sizes: KernelSizes, mlp: Tensor
    ) -> None:
        self.sizes, self.mlp = sizes, mlp
        super().__init__(net, side, dtype)

    def prepare(self, scaled: Tensor) -> None:
        """Make G with doubled upper blocks, the whole of H, and e padded for the kernels."""
        side, dtype, padded = self.side, self.dtype, scaled.shape[1]
        weights = branch_weights(side.logits["caption"], padded - side.patches.shape[1], dtype)
        rounded = scaled.to(dtype).float()
        gram = torch.bmm(rounded, rounded.transpose(1, 2))
        gram = gram * _doubling(padded, self.sizes.norm_columns, gram.device)
        self.gram = gram.to(dtype).contiguous()
        self.merged = weights.shape[-1]
        with torch.cuda.device_of(gram):  # type: ignore[no-untyped-call]
            self.table = _table(gram, weights.contiguous(), dtype, self.sizes)
        columns = max(16, _power(self.merged + 1 + side.prefix.shape[1]))
        self.weights = F.pad(weights, (0, columns - self.merged)).to(dtype).contiguous()
        self.fixed_scores = side.fixed_scores["caption"].float().contiguous()

    def score(self, block: TextBlock) -> Tensor:
        """Scores (B, T) of the block."""
        # Kernels start on the current device, which need not be that of the features.
        with torch.cuda.device_of(block.words):  # type: ignore[no-untyped-call]
            score = self._patch_scores(block)
        return self.mix(self.add_fixed_parts(block, score), self.describe(block))

    def _patch_scores(self, block: TextBlock) -> Tensor:
        from seps.scoring import kernels

        keep, extra = self.select(block)
        norms = self.squared_norms(keep, self.table)
        extra_norms = self.squared_norms(extra, self.gram[:, :, None, :])
        sizes, hrpa = self.sizes, self.net.hrpa
        images, padded, _ = self.patches.shape
        texts, longest = block.words.shape[:2]
        products = word_products(block, self.patches)
        prefix = self.prefix.shape[1]
        prefix_cosines = word_products(block, self.prefix).contiguous() if prefix else products
        top = hrpa.top_k if hrpa.relevance_mlp is not None else 0
        # A wide row of tokens leaves registers for half the words.
        wide = self.weights.shape[-1] > 64
        rows = max(sizes.align_rows // (2 if wide else 1), _power(longest))
        per = rows // longest
        out = torch.empty(images, texts, device=products.device)
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
            BN=sizes.align_patches,
            PX=max(16, _power(per)),
            QP=self.weights.shape[-1],
            TOP=top,
            HP=_power(max(2, 2 * top)),
            LEAKY=hrpa.scan,
            num_warps=sizes.warps,
            num_stages=sizes.align_stages,
            **({} if sizes.align_registers is None else {"maxnreg": sizes.align_registers}),
        )
        return out

    def select(self, block: TextBlock) -> tuple[Tensor, Tensor]:
        """D and the extra token's weights, two (T, B, Z) in the products' dtype."""
        from seps.scoring import kernels

        images, count = self.fixed_scores.shape
        padded = self.patches.shape[1]
        cosines = unit_attention(self.unit_patches, block.mean)
        keep = torch.empty(block.count, images, padded, dtype=self.patches.dtype, device=cosines.device)
        extra = torch.empty_like(keep)
        kernels.select_kernel[(-(-block.count // self.sizes.select_rows), images)](
            cosines,
            self.fixed_scores,
            keep,
            extra,
            float(self.net.config.branches[0].guides.get("caption", 0.0)),
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
        """`left^T table_k left`: (T, B, Z), (B, Z, Q, Z) -> (B, T, Q) float32."""
        from seps.scoring import kernels

        texts, images, padded = left.shape
        merged = table.shape[2]
        out = torch.empty(images, texts, merged, device=left.device)
        sizes = self.sizes
        group = min(sizes.norm_group, _power(merged))
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
            num_warps=sizes.norm_warps,
            num_stages=sizes.norm_stages,
        )
        return out


def _table(gram: Tensor, weights: Tensor, dtype: torch.dtype, sizes: KernelSizes) -> Tensor:
    """H of all images: (B, Z, Z), (B, Z, Q) -> (B, Z, Q, Z) in the products' dtype, without a float32 form."""
    from seps.scoring import kernels

    images, padded, merged = weights.shape
    table = torch.empty(images, padded, merged, padded, dtype=dtype, device=gram.device)
    rows, columns = 16, sizes.table_columns
    kernels.table_kernel[(-(-padded // rows), merged, images)](
        gram, weights, table, merged, padded, BI=rows, BJ=columns, num_warps=4
    )
    return table


def _doubling(count: int, step: int, device: torch.device) -> Tensor:
    """2 above the diagonal blocks of `step` patches, 1 in them, 0 below."""
    block = torch.arange(count, device=device) // step
    return (block[:, None] < block[None, :]).float() * 2 + (block[:, None] == block[None, :]).float()


def _power(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()
