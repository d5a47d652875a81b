"""One call for all pairs: chooses a backend, cuts the work to a memory budget, reports progress.

Shapes: B images, T texts, P prefix tokens, N patches, M words, C width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from seps.nn.checks import InputError, check_features
from seps.nn.known import call_forward, evaluating, own_forward, say_readable, why_not_fast
from seps.nn.slimming import ImageSide, PatchSlimming, score_published_pairing
from seps.scoring import fused, reference
from seps.scoring.engine import Engine
from seps.scoring.plan import make_plan, shapes_of, smallest_budget
from seps.scoring.precision import product_dtype
from seps.scoring.state import convert_state, count_images, take_images
from seps.scoring.texts import Texts
from seps.scoring.topk import BestPerImage, BestPerText, Matrix, TopK
from seps.scoring.workers import map_images

Backend = Literal["auto", "reference", "factored", "triton"]
Gallery = Tensor | ImageSide | Iterable[Any]
Lengths = Tensor | Sequence[int] | None
Progress = Callable[[int, int | None], None]
MEMORY = 512 * 2**20


@dataclass
class ImageBlock:
    """Some of the gallery's images as features, with what belongs to each; see `PatchSlimming.encode_images`."""

    images: Tensor
    dense: Tensor | None = None
    dense_lengths: Tensor | None = None
    guides: Mapping[str, Tensor] | None = None
    patch_mask: Tensor | None = None

    def part(self, start: int, stop: int) -> ImageBlock:
        """Images `start` to `stop`."""
        chosen = slice(start, stop)
        return ImageBlock(
            self.images[chosen],
            None if self.dense is None else self.dense[chosen],
            None if self.dense_lengths is None else self.dense_lengths[chosen],
            None if self.guides is None else {name: vector[chosen] for name, vector in self.guides.items()},
            None if self.patch_mask is None else self.patch_mask[chosen],
        )

    def check(self, net: PatchSlimming) -> None:
        """Raise `InputError` unless everything that belongs to the images has one row per image.

        Before the block is cut: a part of it would not show what is missing or left over.
        """
        count = self.images.shape[0]
        net.check_guides(self.guides, count)
        for name, rows in (
            ("dense", self.dense),
            ("dense_lengths", self.dense_lengths),
            ("patch_mask", self.patch_mask),
        ):
            if rows is not None and rows.shape[:1] != (count,):
                raise InputError(
                    f"{name} has the shape {tuple(rows.shape)} for {count} images; give one row per image."
                )

    def encode(self, net: PatchSlimming, paired: bool) -> ImageSide:
        """The image-only state; for the published pairing with every branch and no description."""
        if paired:
            # A zero vector guides nothing, but makes both branches appear.
            nothing = self.images.new_zeros(self.images.shape[0], 1, self.images.shape[-1])
            side = net.encode_images(self.images, dense=nothing, guides=self.guides, patch_mask=self.patch_mask)
            return replace(side, dense_words=None, dense_mask=None)
        return net.encode_images(
            self.images,
            dense=self.dense,
            dense_lengths=self.dense_lengths,
            guides=self.guides,
            patch_mask=self.patch_mask,
        )


@dataclass(frozen=True)
class Choice:
    """A backend and why it was chosen."""

    backend: str
    reason: str


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
    unknown = why_not_fast(net)
    if unknown is not None:
        if backend == "triton":
            raise InputError(
                f"backend='triton' cannot score this: the fast paths do not know this network ({unknown}). Use "
                "backend='auto' or 'reference'."
            )
        return Choice("reference", f"the fast paths do not know this network: {unknown}")
    if backend == "factored":
        return Choice(backend, "asked for")
    obstacle = fused.supports(
        net,
        device,
        paired=paired,
        masked=masked,
        dtype=product_dtype(precision, device),
        patches=patches,
        words=words,
    )
    if backend == "triton":
        if obstacle is not None:
            raise InputError(f"backend='triton' cannot score this: {obstacle}. Use backend='factored' or 'auto'.")
        return Choice("triton", "asked for")
    if obstacle is not None:
        return Choice("factored", f"the fused kernels do not apply: {obstacle}")
    return Choice("triton", f"half precision on {device.type} with kernels for this configuration")


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
    memory: int = MEMORY,
    out: Tensor | None = None,
    topk: int | None = None,
    query: Literal["text", "image"] = "text",
    progress: Progress | None = None,
    dense_lens: Lengths = None,
    paired_dense_lens: Lengths = None,
) -> Tensor | TopK:
    """Score every image against every text, exactly, without gradients.

    The scores are those of evaluation, whatever mode the network is in: nothing is drawn at random. A network that
    the fast paths do not know (a subclass, a swapped part, a hook; see `known`) is scored in the readable form, with
    a warning that says why.

    Args:
        net: the network.
        img_embs: (B, P + N, C) features, an `ImageSide` made earlier, or an iterable of such blocks (also
            `ImageBlock`), read one at a time, so that a gallery larger than memory can be scored.
        cap_embs: (T, M, C) caption words; `cap_lens` (T,) valid words of each.
        dense, dense_lengths, guides, patch_mask: belong to the images; see `PatchSlimming.encode_images`.
        paired_dense, paired_dense_lengths: the published pairing: dense text t comes with caption t. Leaks; only to
            reproduce published figures.
        backend: "auto", "reference", "factored" or "triton"; `choose_backend` says which and why.
        precision: of the products, "float32", "half" or "bfloat16"; the selection is float32 always.
        memory: bytes to use beyond inputs and output.
        out: (B, T) float32 or float64 tensor to write into, on any device.
        topk: return only the best `topk` images per text (`query="text"`) or texts per image (`query="image"`);
            the matrix is never held.
        progress: called with (images done, images in all or None).
        dense_lens, paired_dense_lens: former names of `dense_lengths` and `paired_dense_lengths`.

    Returns:
        (B, T) float32, or `TopK`; without any image or text it is empty along that axis.

    Raises:
        InputError: for inputs that do not fit, an impossible `memory` (with the smallest possible) or backend.
    """
    dense_lengths = _renamed("dense_lens", dense_lens, "dense_lengths", dense_lengths)
    paired_dense_lengths = _renamed(
        "paired_dense_lens", paired_dense_lens, "paired_dense_lengths", paired_dense_lengths
    )
    _check_call(net, img_embs, cap_embs, dense, guides, patch_mask, paired_dense, out, topk, query)
    device = cap_embs.device
    dtype = product_dtype(precision, device)
    paired = paired_dense is not None
    texts = Texts(
        cap_embs,
        cap_lens,
        dtype=net.aggr_net.scale.dtype,
        products=dtype,
        paired=paired_dense,
        paired_lengths=paired_dense_lengths,
        by_paired=net.config.dense == "branch",
    )
    blocks = _blocks(img_embs, dense, dense_lengths, guides, patch_mask)
    total = _size(img_embs)
    sink: Matrix | BestPerText | BestPerImage
    if topk is None:
        sink = Matrix(out, total, texts.count, device)
    elif query == "text":
        sink = BestPerText(topk, texts.count, device)
    else:
        sink = BestPerImage(topk)
    done = 0
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for block in blocks:
            with evaluating(net):
                for rows in _block_rows(net, block, texts, backend, precision, dtype, memory, paired):
                    sink.add(rows)
                    done += rows.shape[0]
                    if progress is not None:
                        progress(done, total)
    return sink.result()


def _renamed(old: str, old_value: Lengths, new: str, value: Lengths) -> Lengths:
    """The value of an argument that may still come by its former name."""
    if old_value is None:
        return value
    if value is not None:
        raise InputError(f"Both {new} and {old}, its former name, came; pass {new} alone.")
    warnings.warn(
        f"{old} is now called {new}; the former name goes with the next major release.", DeprecationWarning, 3
    )
    return old_value


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
    if paired_dense is not None:
        check_features("paired_dense", paired_dense[:1], "texts, words, width", net.config.embed_size)
        if dense is not None:
            raise InputError(
                "Both dense and paired_dense came. A description belongs to its image (dense) or, in the published "
                "pairing, to a caption (paired_dense); leave one out."
            )
        if isinstance(img_embs, ImageSide):
            raise InputError(
                "paired_dense changes what is computed of the images, so they must come as features, not as an "
                "ImageSide; pass the (images, tokens, width) tensor."
            )
    if not isinstance(img_embs, Tensor) and any(x is not None for x in (dense, guides, patch_mask)):
        raise InputError(
            "dense, guides and patch_mask belong to an image tensor; an ImageSide holds them already, and blocks "
            "carry their own (ImageBlock)."
        )
    if isinstance(img_embs, Tensor):
        check_features("img_embs", img_embs[:1], "images, tokens, width", net.config.embed_size)
    if out is not None and out.dtype not in (torch.float32, torch.float64):
        raise InputError(f"out holds {out.dtype}, which would round the scores; make it torch.float32 or float64.")
    if topk is not None and (topk < 1 or out is not None):
        raise InputError(
            f"topk is {topk!r} with out={'given' if out is not None else None}; topk must be at least 1, "
            "and `out` holds a whole matrix, which topk never makes."
        )
    if query not in ("text", "image"):
        raise InputError(f"query is {query!r}; choose 'text' (best images per text) or 'image' (best texts per image).")


def _size(gallery: Gallery) -> int | None:
    if isinstance(gallery, Tensor):
        return gallery.shape[0]
    return count_images(gallery) if isinstance(gallery, ImageSide) else None


def _blocks(
    gallery: Gallery,
    dense: Tensor | None,
    dense_lengths: Lengths,
    guides: Mapping[str, Tensor] | None,
    patch_mask: Tensor | None,
) -> Iterator[ImageBlock | ImageSide]:
    if isinstance(gallery, Tensor):
        lengths = None if dense_lengths is None else torch.as_tensor(dense_lengths)
        yield ImageBlock(gallery, dense, lengths, guides, patch_mask)
    elif isinstance(gallery, ImageSide):
        yield gallery
    else:
        for item in gallery:
            if isinstance(item, Tensor):
                yield ImageBlock(item)
            elif isinstance(item, ImageBlock | ImageSide):
                yield item
            else:
                raise InputError(
                    f"A block of the gallery is a {type(item).__name__}; blocks must be tensors (images, tokens, "
                    "width), ImageBlock or ImageSide."
                )


def _block_rows(
    net: PatchSlimming,
    block: ImageBlock | ImageSide,
    texts: Texts,
    backend: str,
    precision: str | None,
    dtype: torch.dtype,
    memory: int,
    paired: bool,
) -> Iterator[Tensor]:
    """Rows (b, T) of the images of one block, a few images at a time."""
    if isinstance(block, ImageBlock):
        check_features("img_embs", block.images[:1], "images, tokens, width", net.config.embed_size)
        block.check(net)
    features = block.images if isinstance(block, ImageBlock) else block.patches
    prefix = net.prefix_count(block.images.shape[1]) if isinstance(block, ImageBlock) else 0
    dense = block.dense if isinstance(block, ImageBlock) else block.dense_words
    masked = (block.patch_mask if isinstance(block, ImageBlock) else block.valid) is not None
    count, patches = features.shape[0], features.shape[1] - prefix
    if not count or not texts.count:
        yield torch.zeros(count, texts.count, device=features.device)
        return
    choice = choose_backend(
        net,
        features.device,
        patches=patches,
        words=texts.longest,
        paired=paired,
        backend=backend,
        masked=masked,
        precision=precision,
    )
    if choice.backend == "reference":
        if backend != "reference":
            say_readable(why_not_fast(net) or choice.reason)
        yield _reference_rows(net, block, texts, paired)
        return
    dense_words = texts.longest_paired if paired else 0
    if not paired and dense is not None and net.config.dense == "tokens":
        dense_words = dense.shape[1]
    shapes = shapes_of(net.config, patches, texts.longest, dense_words, paired)
    kept = texts.unit_nbytes
    keeps = kept <= memory // 3 and memory - kept >= smallest_budget(shapes, dtype)
    if keeps:
        texts.keep_blocks()
        memory -= kept
    threads = 1
    if not features.is_cuda:
        threads = max(1, min(torch.get_num_threads(), count, memory // smallest_budget(shapes, dtype)))
    make = fused.scorer(net, dtype) if choice.backend == "triton" else None
    plan = make_plan(
        shapes,
        memory // threads,
        count,
        texts.count,
        dtype=dtype,
        cuda=features.is_cuda,
        fused=make is not None,
        kept=keeps,
    )
    engine = Engine(net, texts, plan, dtype, make)
    step = plan.images

    def rows(start: int) -> Tensor:
        if isinstance(block, ImageBlock):
            return engine.rows(block.part(start, start + step).encode(net, paired))
        return engine.rows(take_images(block, slice(start, start + step)))

    yield from map_images(rows, range(0, count, step), threads)


def _reference_rows(net: PatchSlimming, block: ImageBlock | ImageSide, texts: Texts, paired: bool) -> Tensor:
    if own_forward(net):
        return _own_rows(net, block, texts, paired)
    if isinstance(block, ImageSide):
        # A state may be kept in half precision; the network computes in its own.
        side = convert_state(block, net.aggr_net.scale.dtype)
        return reference.score_pairs(net, lambda: side, texts.words, texts.lengths)
    if texts.paired is not None and paired:
        scored = score_published_pairing(
            net,
            block.images,
            texts.words,
            texts.lengths,
            texts.paired,
            texts.paired_lengths,
            block.patch_mask,
            block.guides,
        )
        return scored if isinstance(scored, Tensor) else scored[0]
    return reference.score_pairs(net, lambda: block.encode(net, False), texts.words, texts.lengths)


def _own_rows(net: PatchSlimming, block: ImageBlock | ImageSide, texts: Texts, paired: bool) -> Tensor:
    """Rows of a network that has a forward of its own: what it says, and nothing else."""
    if isinstance(block, ImageSide) or paired:
        what = "paired_dense" if paired else "an ImageSide"
        raise InputError(
            f"{type(net).__name__} has a forward of its own (or a hook on it), which {what} would go round; pass the "
            "images as features, with their own descriptions."
        )
    extras = {name: getattr(block, name) for name in ("dense", "dense_lengths", "guides", "patch_mask")}
    scored = call_forward(net, block.images, texts.words, texts.lengths, extras)
    rows: Tensor = scored if isinstance(scored, Tensor) else scored[0]
    return rows


def score_state(
    net: PatchSlimming, side: ImageSide, words: Tensor, lengths: Lengths = None, **options: Any
) -> Tensor | TopK:
    """`score_matrix` from image-only state made earlier (`PatchSlimming.encode_images`)."""
    return score_matrix(net, side, words, lengths, **options)
