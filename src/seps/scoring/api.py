"""One call for all pairs: chooses a backend, goes through the gallery, keeps all scores or the best.

Shapes: B images, T texts, P prefix tokens, N patches, M words, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from seps.method.checks import InputError, check_features, evaluating
from seps.method.encoded import EncodedImages
from seps.method.network import PatchSlimming
from seps.scoring.blocks import SCORING_MEMORY as SCORING_MEMORY
from seps.scoring.blocks import score_rows, scoring_memory
from seps.scoring.gpu import fused
from seps.scoring.inputs import ImageBlock, Lengths, SortedTexts
from seps.scoring.other_forward import scores_of_forward, warn_slow
from seps.scoring.pairing import PairedTexts, paired_texts
from seps.scoring.terms import other_forward, other_tokens, product_dtype

Gallery = Tensor | EncodedImages | Iterable[Any]


@dataclass(frozen=True)
class Choice:
    """A backend and why it was chosen."""

    backend: str
    reason: str


@dataclass
class TopK:
    """The k best images of each query: `scores` and `indices`, (queries, k), best first.

    Of equal scores the lower index comes first.
    """

    scores: Tensor
    """(queries, k) float32."""
    indices: Tensor
    """(queries, k) positions in the gallery."""


def choose_backend(
    net: PatchSlimming,
    device: torch.device | str,
    *,
    patches: int | None = None,
    words: int | None = None,
    paired: bool = False,
    backend: str = "auto",
    masked: bool = False,
    precision: str | None = "float32",
) -> Choice:
    """The backend that `score_matrix` takes, and the reason in words.

    Raises `InputError` when the backend asked for cannot do it.
    """
    device = torch.device(device)
    if backend not in ("auto", "reference", "factored", "triton"):
        raise InputError(f"backend is {backend!r}; choose 'auto', 'reference', 'factored' or 'triton'.")
    if backend == "reference":
        return Choice(backend, "asked for")
    unsupported = other_forward(net) or other_tokens(net)
    if unsupported is not None:
        if backend == "triton":
            raise InputError(f"backend='triton' cannot score this: {unsupported}. Use backend='auto' or 'reference'.")
        return Choice("reference", unsupported)
    if backend == "factored":
        return Choice(backend, "asked for")
    dtype = product_dtype(precision, device)
    obstacle: str | None
    if device.type != "cuda":
        obstacle = f"they run on a GPU, and the features are on {device.type}"
    elif find_spec("triton") is None:
        obstacle = "triton is not installed (pip install 'seps[kernels]')"
    else:
        obstacle = fused.why_not_triton(net, paired=paired, masked=masked, patches=patches, words=words)
    if backend == "triton":
        if obstacle is not None:
            raise InputError(f"backend='triton' cannot score this: {obstacle}. Use backend='factored' or 'auto'.")
        return Choice("triton", "asked for")
    if obstacle is not None:
        return Choice("factored", f"the fused kernels do not apply: {obstacle}")
    how = "float32 as pairs of half-precision numbers" if dtype == torch.float32 else "half precision"
    return Choice("triton", f"{how} on {device.type} with kernels for this configuration")


def score_matrix(
    net: PatchSlimming,
    img_embs: Gallery,
    cap_embs: Tensor,
    cap_lens: Lengths = None,
    *,
    dense: Tensor | None = None,
    dense_lengths: Lengths = None,
    paired_dense: Tensor | None = None,
    paired_dense_lengths: Lengths = None,
    guides: Mapping[str, Tensor] | None = None,
    patch_mask: Tensor | None = None,
    backend: str = "auto",
    precision: str | None = "float32",
    memory: int | None = None,
    out: Tensor | None = None,
    topk: int | None = None,
    query: Literal["text", "image"] = "text",
    progress: Callable[[int, int | None], None] | None = None,
) -> Tensor | TopK:
    """Score every image against every text, exactly, without gradients.

    The scores are those of evaluation, whatever mode the network is in: nothing is drawn at random. All backends call
    the steps of the network (`PatchSlimming.score`), so a subclass or a custom component is followed. A network that
    makes its tokens otherwise is scored by the reference, and one with another `forward` by that, with a warning.

    Args:
        net: the network.
        img_embs: (B, P + N, C) features, an `EncodedImages` made earlier, or an iterable of such blocks (also
            `ImageBlock`), read one at a time, so that a gallery larger than memory can be scored.
        cap_embs: (T, M, C) caption words; `cap_lens` (T,) valid words of each.
        dense, dense_lengths, guides, patch_mask: belong to the images; see `PatchSlimming.encode_images`.
        paired_dense, paired_dense_lengths: the published pairing: dense text t comes with caption t. Leaks; only to
            reproduce published figures.
        backend: "auto", "reference", "factored" or "triton"; `choose_backend` says which and why.
        precision: of the products, "float32", "half" or "bfloat16"; the selection is float32 always. On a GPU with
            kernels float32 is multiplied as pairs of half-precision numbers; `backend="factored"` is strict float32.
        memory: bytes to use beyond inputs and output; None takes a share of the free memory on a GPU (6 GiB where 12
            are free, 1.5 where 3 are) and 512 MiB elsewhere.
        out: (B, T) float32 or float64 tensor to write into, on any device.
        topk: return only the best `topk` images per text (`query="text"`) or texts per image (`query="image"`);
            the matrix is never held.
        progress: called with (images done, images in all or None).

    Returns:
        (B, T) float32, or `TopK`; without any image or text it is empty along that axis.

    Raises:
        InputError: for inputs that do not fit, an impossible `memory` (with the smallest possible) or backend.
    """
    _check_call(net, img_embs, cap_embs, dense, guides, patch_mask, paired_dense, out, topk, query)
    device = cap_embs.device
    dtype = product_dtype(precision, device)
    memory = scoring_memory(device) if memory is None else memory
    if paired_dense is None:
        texts = SortedTexts(cap_embs, cap_lens, dtype=net.aggr_net.scale.dtype, products=dtype)
    else:
        texts = paired_texts(net, cap_embs, cap_lens, paired_dense, paired_dense_lengths, dtype, dense=dense)
    blocks: Iterable[ImageBlock | EncodedImages]
    total: int | None = None
    if isinstance(img_embs, Tensor):
        blocks, total = [ImageBlock(img_embs, dense, dense_lengths, guides, patch_mask)], img_embs.shape[0]
    elif isinstance(img_embs, EncodedImages):
        blocks, total = [img_embs], len(img_embs.patches)
    else:
        blocks = map(_block, img_embs)
    sink: _Matrix | _BestPerText | _BestPerImage
    if topk is None:
        sink = _Matrix(out, total, texts.count, device)
    elif query == "text":
        sink = _BestPerText(topk, texts.count, device)
    else:
        sink = _BestPerImage(topk)
    done = 0
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for block in blocks:
            with evaluating(net):
                for rows in _block_rows(net, block, texts, backend, precision, memory):
                    sink.add(rows)
                    done += rows.shape[0]
                    if progress is not None:
                        progress(done, total)
    return sink.result()


def _check_call(
    net: PatchSlimming,
    img_embs: Gallery,
    cap_embs: Tensor,
    dense: Tensor | None,
    guides: Mapping[str, Tensor] | None,
    patch_mask: Tensor | None,
    paired_dense: Tensor | None,
    out: Tensor | None,
    topk: int | None,
    query: str,
) -> None:
    check_features("cap_embs", cap_embs[:1], "texts, words, width", net.config.embed_size)
    if paired_dense is not None and isinstance(img_embs, EncodedImages):
        raise InputError(
            "paired_dense changes what is computed of the images, so they must come as features, not as an "
            "EncodedImages; pass the (images, tokens, width) tensor."
        )
    if isinstance(img_embs, Tensor):
        check_features("img_embs", img_embs[:1], "images, tokens, width", net.config.embed_size)
    elif any(x is not None for x in (dense, guides, patch_mask)):
        raise InputError(
            "dense, guides and patch_mask belong to an image tensor; an EncodedImages holds them already, and blocks "
            "carry their own (ImageBlock)."
        )
    if out is not None and out.dtype not in (torch.float32, torch.float64):
        raise InputError(f"out holds {out.dtype}, which would round the scores; make it torch.float32 or float64.")
    if topk is not None and (topk < 1 or out is not None):
        raise InputError(
            f"topk is {topk!r} with out={'given' if out is not None else None}; topk must be at least 1, "
            "and `out` holds a whole matrix, which topk never makes."
        )
    if query not in ("text", "image"):
        raise InputError(f"query is {query!r}; choose 'text' (best images per text) or 'image' (best texts per image).")


def _block(item: Any) -> ImageBlock | EncodedImages:
    """A block of the gallery; a tensor is one without descriptions, guides and mask."""
    if isinstance(item, Tensor):
        return ImageBlock(item)
    if isinstance(item, ImageBlock | EncodedImages):
        return item
    raise InputError(
        f"A block of the gallery is a {type(item).__name__}; blocks must be tensors (images, tokens, width), "
        "ImageBlock or EncodedImages."
    )


def _block_rows(
    net: PatchSlimming,
    block: ImageBlock | EncodedImages,
    texts: SortedTexts,
    backend: str,
    precision: str | None,
    memory: int,
) -> Iterator[Tensor]:
    """Rows (b, T) of the images of one block, a few images at a time."""
    if isinstance(block, ImageBlock):
        block.check(net)
        features, mask = block.images, block.patch_mask
        patches = features.shape[1] - net.prefix_count(features.shape[1])
    else:
        features, mask = block.patches, block.valid
        patches = features.shape[1]
    if not features.shape[0] or not texts.count:
        yield torch.zeros(features.shape[0], texts.count, device=features.device)
        return
    choice = choose_backend(
        net,
        features.device,
        patches=patches,
        words=texts.longest,
        paired=isinstance(texts, PairedTexts),
        backend=backend,
        masked=mask is not None,
        precision=precision,
    )
    reference = choice.backend == "reference"
    if reference and backend != "reference":
        warn_slow(choice.reason)
    if reference and other_forward(net) is not None:
        yield scores_of_forward(net, block, texts).similarity
        return
    scorer = fused.scorer(net, texts.products) if choice.backend == "triton" else None
    yield from score_rows(net, block, texts, patches, texts.products, memory, scorer, reference)


def _best_of(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row and their positions, ties to the lower position."""
    ranked = torch.sort(scores, dim=-1, descending=True, stable=True)
    return ranked.values[:, :count], ranked.indices[:, :count]


class _Matrix:
    """Collects rows into (B, T), in `out` where given."""

    def __init__(self, out: Tensor | None, images: int | None, texts: int, device: torch.device) -> None:
        if out is not None and (
            out.dim() != 2 or out.shape[1] != texts or (images is not None and out.shape[0] != images)
        ):
            raise InputError(
                f"out has the shape {tuple(out.shape)}, but the scores are "
                f"({images if images is not None else 'images'}, {texts})."
            )
        self._device, self._texts = device, texts
        if out is None and images is not None:
            out = torch.empty(images, texts, device=device)
        self._out = out
        self._rows: list[Tensor] = []
        self._done = 0

    def add(self, rows: Tensor) -> None:
        """Take the scores (b, T) of the next images."""
        if self._out is None:
            self._rows.append(rows)
            return
        stop = self._done + rows.shape[0]
        if stop > self._out.shape[0]:
            raise InputError(f"out has room for {self._out.shape[0]} images, but more came; make it larger.")
        self._out[self._done : stop] = rows.to(self._out.device)
        self._done = stop

    def result(self) -> Tensor:
        """The matrix (B, T)."""
        if self._out is not None:
            return self._out[: self._done] if self._done < self._out.shape[0] else self._out
        if not self._rows:
            return torch.empty(0, self._texts, device=self._device)
        return torch.cat(self._rows)


class _BestPerText:
    """Keeps the best k images of every text while images stream by."""

    def __init__(self, count: int, texts: int, device: torch.device) -> None:
        self._count = count
        self._scores = torch.empty(texts, 0, device=device)
        self._indices = torch.empty(texts, 0, dtype=torch.long, device=device)
        self._done = 0

    def add(self, rows: Tensor) -> None:
        """Take the scores (b, T) of the next images."""
        new = torch.arange(self._done, self._done + rows.shape[0], device=rows.device)
        scores = torch.cat([self._scores, rows.T], dim=1)
        indices = torch.cat([self._indices, new.expand(rows.shape[1], -1)], dim=1)
        self._scores, places = _best_of(scores, self._count)
        self._indices = indices.gather(1, places)
        self._done += rows.shape[0]

    def result(self) -> TopK:
        """The best of each text: (T, k)."""
        return TopK(self._scores, self._indices)


class _BestPerImage:
    """Keeps the best k texts of every image."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, rows: Tensor) -> None:
        """Take the scores (b, T) of the next images."""
        self._parts.append(_best_of(rows, self._count))

    def result(self) -> TopK:
        """The best of each image: (B, k)."""
        if not self._parts:
            return TopK(torch.empty(0, self._count), torch.empty(0, self._count, dtype=torch.long))
        scores, indices = zip(*self._parts, strict=True)
        return TopK(torch.cat(scores), torch.cat(indices))
