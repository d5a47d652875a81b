"""Plain MaxSim beside our scorer: public kernels, and the same in torch alone.

Plain MaxSim adds up, for every word of a caption, its largest cosine with a token of the image: one direction, no
selection, no merging. Tokens are normalised and rounded to half precision before the clock starts. Public kernels are
no dependency of ours: a package that is not installed has no rows, and a line says so. Their kernels choose their block
sizes by trial, which happens before the clock starts, on a part of the pairs and for each number of tokens anew.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.common.machine import PeakMemory, clock

Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Images (I, T, C), words (B, L, C), lengths (B,) -> scores (B, I)."""
KERNELS = {
    "late-interaction-kernels": ("late_interaction_kernels", "late_interaction_kernels.forward"),
    "flash-maxsim": ("flash_maxsim", "flash_maxsim.flash_maxsim"),
}
"""Distribution: its module, and the module with the kernels that choose their sizes by trial."""
TOKENS = (None, 41)
"""Tokens per image: all, and as many as a slimmed image has."""
TRIAL = 512
"""Images and captions with which sizes are tried."""
LONGEST = 12.0
"""Seconds: what would take longer is timed on a part of the captions."""
PARTS = 10
WORKSPACE = 2**30
MIB = 2**20


class Report(Protocol):
    """Where lines and rows go."""

    def add(self, told: str, **row: Any) -> None:
        """Print a line, keep a row."""


def torch_maxsim(images: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
    """MaxSim by matrix products and maxima, without padding words, over as many captions at a time as memory allows."""
    many, tokens, width = images.shape
    table = images.reshape(-1, width).T
    scores = torch.zeros(words.shape[0], many, device=images.device)
    real = torch.arange(words.shape[1], device=words.device) < lengths[:, None]
    step = max(1, WORKSPACE // (words.shape[1] * table.shape[1] * words.element_size()))
    for start in range(0, words.shape[0], step):
        own = real[start : start + step]
        best = (words[start : start + step][own] @ table).view(-1, many, tokens).amax(dim=2)
        scores.index_add_(0, start + own.nonzero()[:, 0], best.float())
    return scores


def _late_interaction(images: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
    real = torch.arange(words.shape[1], device=words.device) < lengths[:, None]
    found: Tensor = importlib.import_module("late_interaction_kernels").maxsim(words, images, q_mask=real)
    return found


def _flash(images: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
    called = importlib.import_module("flash_maxsim").flash_maxsim_batched
    found: Tensor = called(words, images, shared_docs=True, query_lengths=lengths)
    return found


_CALLS: dict[str, Score] = {"late-interaction-kernels": _late_interaction, "flash-maxsim": _flash}


def forget_sizes(module: str) -> None:
    """Let the kernels of a module try their sizes again: their own keys leave out the number of tokens per image."""
    for value in vars(importlib.import_module(module)).values():
        if hasattr(value, "cache_results") and isinstance(getattr(value, "cache", None), dict):
            value.cache.clear()
            value.cache_results = False


def peers(device: torch.device, report: Report, skip: Collection[str]) -> Iterator[tuple[str, str, Score, str | None]]:
    """Name with version, package, call and the module whose sizes are tried, of all that can run here."""
    for name, (module, tried) in KERNELS.items():
        if any(word in name for word in skip):
            continue
        if importlib.util.find_spec(module) is None:
            report.add(f"plain MaxSim: {name} is not installed, its rows are left out")
        elif device.type != "cuda":
            report.add(f"plain MaxSim: {name} needs a GPU, its rows are left out")
        else:
            yield f"{name} {importlib.metadata.version(name)}", name, _CALLS[name], tried
    if not any(word in "torch" for word in skip):
        yield f"torch {torch.__version__}", "torch", torch_maxsim, None


def measure(data: dict[str, Any], device: torch.device, report: Report, skip: Collection[str] = ()) -> None:
    """A row per implementation and number of tokens; one that fails is told, and the others go on."""
    exact_images, exact_words = (normalize(data[name][:64].float(), dim=-1) for name in ("img_embs", "cap_embs"))
    images, words = (normalize(data[name].float(), dim=-1).half() for name in ("img_embs", "cap_embs"))
    lengths = data["cap_lens"].to(device)
    for title, package, score, tried in peers(device, report, skip):
        for tokens in TOKENS:
            some = images[:, :tokens].contiguous()
            exact = torch_maxsim(exact_images[:, :tokens], exact_words, lengths[:64])[:TRIAL, :TRIAL]
            try:
                row = _row(score, some, words, lengths, exact, tried, device)
            except Exception as error:
                report.add(f"plain MaxSim, {title}, {some.shape[1]} tokens: {type(error).__name__}: {str(error)[:300]}")
                continue
            part = "" if row["captions_timed"] == len(words) else f", timed on {row['captions_timed']:,} captions"
            report.add(
                f"plain MaxSim, {title}, {some.shape[1]:3} tokens {row['seconds']:8.3f} s  {row['peak_mib']:7.0f} MiB  "
                f"largest difference {row['largest_difference']:.1e}{part}",
                peer=title,
                package=package,
                tokens=some.shape[1],
                **row,
            )


def _row(
    score: Score,
    images: Tensor,
    words: Tensor,
    lengths: Tensor,
    exact: Tensor,
    tried: str | None,
    device: torch.device,
) -> dict[str, Any]:
    if tried is not None:
        forget_sizes(tried)
    score(images[:TRIAL], words[:TRIAL], lengths[:TRIAL])
    found = score(images[:TRIAL], words[:TRIAL], lengths[:TRIAL])[: exact.shape[0], : exact.shape[1]]
    few = min(len(words), max(TRIAL, len(words) // PARTS))
    seconds, peak = _timed(partial(score, images, words[:few], lengths[:few]), device)
    if few < len(words) and seconds * len(words) / few <= LONGEST:
        few = len(words)
        seconds, peak = _timed(partial(score, images, words, lengths), device)
    return {
        "seconds": seconds * len(words) / few,
        "captions_timed": few,
        "peak_mib": max(0.0, peak / MIB - few * len(images) * 4 / MIB),
        "largest_difference": float((found.float() - exact).abs().max()),
        "pairs_compared": exact.numel(),
    }


def _timed(work: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds of one run, and the most bytes in use beyond what was."""
    with PeakMemory(device) as peak:
        seconds = clock(work, device, 1, warm=False)
    return seconds, peak.bytes
