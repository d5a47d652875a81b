"""All pairs of images and captions: each backend beside the reference loop, which is timed on a slice."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.machine import PeakMemory, clock
from seps.method.config import SlimmingConfig
from seps.method.network import PatchSlimming
from seps.scoring import choose_backend, score_matrix

SHAPES: dict[str, dict[str, Any]] = {
    "vit224": {"num_patches": 196, "num_prefix_tokens": 1},
    "vit384": {"num_patches": 576, "num_prefix_tokens": 1},
    "swin224": {"num_patches": 49, "num_prefix_tokens": 0, "sparse_ratio": 0.8, "aggr_ratio": 0.6},
}
SIZES = {"tiny": (4, 16), "small": (64, 64), "medium": (250, 1250), "f30k": (1000, 5000), "coco": (5000, 25000)}
TEXTS = ["caption", "described", "published"]


def make_net(shape: str, texts: str, device: torch.device) -> PatchSlimming:
    """A network: captions alone, with descriptions as tokens of the image, or both branches as published."""
    settings = SHAPES[shape]
    if texts == "caption":
        config = SlimmingConfig.open_source(dense="none", **settings)
    elif texts == "described":
        config = SlimmingConfig.default(**settings)
    else:
        config = SlimmingConfig.open_source(**settings)
    torch.manual_seed(0)
    return PatchSlimming(config).eval().to(device)


def make_inputs(
    net: PatchSlimming, images: int, texts: int, mode: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Captions of 8 to 23 words; descriptions of about 90."""
    generator = torch.Generator(device=device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    config = net.config
    data: dict[str, Any] = {
        "img_embs": random(images, config.num_prefix_tokens + config.num_patches, config.embed_size),
        "cap_embs": random(texts, 23, config.embed_size),
        "cap_lens": torch.randint(8, 24, (texts,), generator=torch.Generator().manual_seed(2)),
    }
    if mode == "described":
        data["dense"] = random(images, 96, config.embed_size)
        data["dense_lengths"] = torch.randint(80, 97, (images,))
    if mode == "published":
        data["paired_dense"] = random(texts, 96, config.embed_size)
        data["paired_dense_lengths"] = torch.randint(80, 97, (texts,))
    return data


def part_of(data: dict[str, Any], images: int, texts: int) -> dict[str, Any]:
    """The first images and texts."""
    of_images = ("img_embs", "dense", "dense_lengths")
    return {name: value[: images if name in of_images else texts] for name, value in data.items()}


def text_of(data: dict[str, Any], text: int) -> dict[str, Any]:
    """All images and one text."""
    of_texts = ("cap_embs", "cap_lens", "paired_dense", "paired_dense_lengths")
    return {name: value[text : text + 1] if name in of_texts else value for name, value in data.items()}


def pair_flops(net: PatchSlimming, words: float, mode: str) -> float:
    """Arithmetic that a pair needs at least: selection, products, weighting, symmetric norms, other tokens."""
    config = net.config
    patches, width, merged = config.num_patches, config.embed_size, config.num_merged

    def branch(count: float) -> float:
        products = 2 * count * width * patches + 2 * count * patches * merged
        others = 2 * count * width * config.num_prefix_tokens + 2 * count * patches
        return products + others + 2 * width * patches + merged * patches * (patches + 1)

    total = branch(words)
    if mode == "described":
        total += 2 * words * width * 88
    if mode == "published":
        total += branch(88)
    return total


def pair_traffic(net: PatchSlimming, words: float, mode: str, itemsize: int) -> float:
    """Bytes of a pair that pass through memory at least, written once and read once.

    Cosines of the selection, D and the extra token's weights, word-patch products, norms, and the score.
    """
    config = net.config
    padded = config.num_patches + (-config.num_patches % 16 if itemsize == 2 else 0)

    def branch(count: float) -> float:
        selection = 4 * config.num_patches + 2 * itemsize * padded
        return 2 * (selection + itemsize * count * (padded + config.num_prefix_tokens) + 4 * config.num_merged)

    total = branch(words) + 4
    if mode == "described":
        total += 2 * itemsize * words * 88
    if mode == "published":
        total += branch(88)
    return total


def _settings(
    arguments: argparse.Namespace, net: PatchSlimming, device: torch.device, mode: str
) -> list[tuple[str, str]]:
    precisions = arguments.precision or (["float32", "half"] if device.type == "cuda" else ["float32"])
    chosen = []
    for precision in precisions:
        for backend in arguments.backends or ["factored", "triton"]:
            if backend == "triton":
                best = choose_backend(
                    net, device, patches=net.config.num_patches, paired=mode == "published", precision=precision
                )
                if best.backend != "triton":
                    print(f"  triton, {precision}: left out; {best.reason}", flush=True)
                    continue
            chosen.append((backend, precision))
    return chosen


def run(arguments: argparse.Namespace, device: torch.device, limits: dict[str, float]) -> list[dict[str, Any]]:
    """Measure every shape asked for; one row each."""
    size = arguments.size or ("tiny" if arguments.quick else "f30k" if device.type == "cuda" else "small")
    images, texts = SIZES[size]
    print(
        "\nshape     texts      backend   precision      seconds   us/pair  x reference  of arithmetic"
        "  of bandwidth  peak MiB  largest difference"
    )
    rows = []
    for shape in arguments.shapes:
        for mode in arguments.branches:
            net = make_net(shape, mode, device)
            data = make_inputs(net, images, texts, mode, device)
            rows += _measure(arguments, net, data, shape, mode, device, limits)
            del data
    return rows


def _measure(
    arguments: argparse.Namespace,
    net: PatchSlimming,
    data: dict[str, Any],
    shape: str,
    mode: str,
    device: torch.device,
    limits: dict[str, float],
) -> list[dict[str, Any]]:
    images, texts = data["img_embs"].shape[0], data["cap_embs"].shape[0]
    few = part_of(
        data, min(images, 128 if device.type == "cuda" else 64), min(texts, 16 if device.type == "cuda" else 4)
    )
    each = [text_of(few, text) for text in range(few["cap_embs"].shape[0])]
    exact: Tensor | None = None

    def slow() -> None:
        nonlocal exact
        # Everything of the images again for every text; the published loop does so with selection and merging.
        columns = [score_matrix(net, **one, backend="reference") for one in each]
        exact = torch.cat(columns, dim=1)  # type: ignore[arg-type]

    slice_pairs = few["img_embs"].shape[0] * few["cap_embs"].shape[0]
    reference = clock(slow, device, 2) / slice_pairs
    note = f"timed on {few['img_embs'].shape[0]} x {few['cap_embs'].shape[0]} pairs"
    row = {"shape": shape, "texts": mode, "backend": "reference", "us_per_pair": reference * 1e6, "note": note}
    print(f"{shape:9} {mode:10} reference {'float32':14} {'':9} {reference * 1e6:8.2f}  ({note})", flush=True)
    rows = [row]
    words = float(data["cap_lens"].float().mean())
    out = torch.empty(images, texts, device=device)
    for backend, precision in _settings(arguments, net, device, mode):
        options: dict[str, Any] = {
            "backend": backend,
            "precision": precision,
            "memory": int(arguments.memory * 2**20),
            "out": out,
        }
        score_matrix(
            net,
            **part_of(data, min(images, 64), min(texts, 5000 if device.type == "cuda" else 64)),
            **{**options, "out": None},
        )
        with PeakMemory(device) as peak:
            # A slice has warmed it up; minutes on a CPU need no second run.
            long = device.type == "cpu" and images * texts > 10**6
            work = partial(score_matrix, net, **data, **options)
            seconds = clock(work, device, 1 if long or images > 2000 else 2, warm=not long)
        pairs = images * texts
        rate = pair_flops(net, words, mode) * pairs / seconds / 1e12
        share = rate / limits[f"{precision}_tflops"]
        moved = pair_traffic(net, words, mode, 4 if precision == "float32" else 2) * pairs / seconds / 1e9
        if exact is None:
            raise RuntimeError("the reference was not timed")
        error = float((out[: exact.shape[0], : exact.shape[1]] - exact).abs().max())
        row = {
            "shape": shape,
            "texts": mode,
            "images": images,
            "captions": texts,
            "backend": backend,
            "precision": precision,
            "seconds": seconds,
            "us_per_pair": seconds / pairs * 1e6,
            "times_reference": reference * pairs / seconds,
            "tflops": rate,
            "share_of_arithmetic_limit": share,
            "share_of_bandwidth_limit": moved / limits["copy_gbs"],
            "peak_mib": peak.bytes / 2**20,
            "largest_difference": error,
        }
        rows.append(row)
        print(
            f"{shape:9} {mode:10} {backend:9} {precision:10} {seconds:12.4f} {seconds / pairs * 1e6:9.3f} "
            f"{row['times_reference']:11.1f}x {share:13.1%} {moved / limits['copy_gbs']:12.1%} "
            f"{row['peak_mib']:9.0f}  {error:.1e}",
            flush=True,
        )
    return rows
