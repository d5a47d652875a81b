"""Candidate kernels (`trial_kernels`) beside those of the fused backend, in half precision, on one GPU.

    python -m benchmarks.kernel_trial --out FILE.json [--limit 140]

First each kernel alone on 64 images and all texts, as milliseconds for 512 x 25,000; then whole calls; then the gaps
in which the GPU waits. A candidate that does not compile, or gives other numbers, is told and left out. `--quick` runs
the same on a few images and texts, also in Triton's interpreter (TRITON_INTERPRET=1), to test this file.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import trial_kernels
from benchmarks.machine import describe, synchronise
from benchmarks.scoring import make_inputs, make_net, part_of
from seps.nn.image_side import ImageSide
from seps.nn.selection import num_kept
from seps.scoring import blocks, engine, score_matrix
from seps.scoring import half_pairs as pairs
from seps.scoring import triton as fused
from seps.scoring.inputs import TextBlock, Texts

STARTED = time.perf_counter()
FEW = 64
"""Images of the kernels' own timings."""


@dataclass(frozen=True)
class Select:
    """Of `search_select_kernel`; `old` runs today's kernel with these sizes."""

    rows: int = 4
    warps: int = 1
    old: bool = False


@dataclass(frozen=True)
class Norms:
    """Of `held_norms_kernel`."""

    rows: int = 256
    warps: int = 16
    stages: int = 3
    group: int = 1
    last: int = 4
    splits: int = 2


@dataclass(frozen=True)
class Align:
    """Of `slot_align_kernel`."""

    rows: int = 64
    warps: int = 4
    stages: int = 3
    tiles: int = 16


SELECTS = [
    Select(4, 4, old=True),
    Select(4, 1, old=True),
    Select(1, 1, old=True),
    Select(4, 1),
    Select(2, 1),
    Select(1, 1),
    Select(8, 4),
]
NORMS = [
    Norms(),
    Norms(warps=8),
    Norms(rows=128, warps=8, group=2, last=8),
    Norms(rows=128, warps=4, stages=2),
    Norms(splits=1),
    Norms(splits=4),
]
OLD_NORMS: list[dict[str, int]] = [
    {},
    {"norm_rows": 256, "norm_warps": 8, "norm_stages": 4},
    {"norm_rows": 256, "norm_warps": 8, "norm_stages": 4, "norm_columns": 64, "norm_inner": 64, "norm_group": 2},
]
ALIGNS = [Align(), Align(tiles=64), Align(stages=4), Align(rows=128, warps=8), Align(stages=2)]


class TrialScorer(fused.TritonScorer):
    """The fused backend with the candidates; the prefix stands in the padding of the patches."""

    select_choice: Select = Select()
    norms_choice: Norms | None = Norms()
    """None for today's kernel."""
    align_choice: Align = Align()

    def __init__(self, net: Any, side: ImageSide, sizes: fused.KernelSizes, mlp: Tensor) -> None:
        super().__init__(net, side, torch.float16, replace(sizes, norm_columns=64), mlp)
        count, prefix = side.patches.shape[1], side.prefix.shape[1]
        padded = self.patches.shape[1]
        if padded < count + prefix or not 64 <= padded <= 256 or net.hrpa.relevance_mlp is not None:
            raise ValueError("the candidates do not fit these shapes")
        self.count, self.prefixes = count, prefix
        self.patches[:, count : count + prefix] = self.prefix
        for place in range(prefix):
            self.weights[:, count + place, self.merged + 1 + place] = 1.0
        self.whole = self.gram[:, :, None, :].contiguous()

    def decide(self, cosines: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """D and the extra weights (T, B, Z), and the inverse norms (B, Q + 1, T), from cosines (T, B N)."""
        keep, extra = self.choose(self.select_choice, cosines, scale)
        if self.select_choice.old:
            self.keep_prefix(keep)
        norms = torch.empty(keep.shape[1], self.merged + 1, keep.shape[0], device=keep.device)
        if self.norms_choice is None:
            norms[:, :-1] = self.squared_norms(keep, self.table).transpose(1, 2).rsqrt()
            norms[:, -1] = self.squared_norms(extra, self.whole)[..., 0].rsqrt()
            return keep, extra, norms
        self.merged_norms(self.norms_choice, keep, norms)
        self.extra_norms(extra, norms)
        return keep, extra, norms

    def keep_prefix(self, keep: Tensor) -> None:
        """Ones at the places of the prefix in the padding."""
        keep[..., self.count : self.count + self.prefixes] = 1.0

    def choose(self, choice: Select, cosines: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """D and the extra weights (T, B, Z)."""
        images, padded = self.patches.shape[:2]
        texts = cosines.numel() // (images * self.count)
        keep = torch.empty(texts, images, padded, dtype=torch.float16, device=cosines.device)
        extra = torch.empty_like(keep)
        weight = float(self.net.config.branches[0].guides.get("caption", 0.0))
        common: dict[str, Any] = {
            "NP": fused._power(padded),
            "ROWS": choice.rows,
            "LEARNED": self.net.config.scoring == "learned",
            "num_warps": choice.warps,
        }
        kept = num_kept(self.count, self.net.config.sparse_ratio)
        sizes = (weight, scale, kept, texts, images, self.count, padded)
        grid = (-(-texts // choice.rows), images)
        if choice.old:
            from seps.scoring import kernels

            kernels.select_kernel[grid](cosines, self.fixed_scores, keep, extra, *sizes, **common)
        else:
            trial_kernels.search_select_kernel[grid](
                cosines, self.fixed_scores, keep, extra, *sizes, PREFIX=self.prefixes, **common
            )
        return keep, extra

    def _blocks(self) -> dict[str, int]:
        padded = self.patches.shape[1]
        whole = min(3, padded // 64)
        rest = padded - 64 * whole
        last = fused._power(rest) if rest else 0
        return {"W": 64, "BLOCKS": whole, "WL": last, "EXACT": rest == last}

    def merged_norms(self, choice: Norms, left: Tensor, norms: Tensor) -> None:
        """`(D^T H_k D)^-1/2` into (B, Q + 1, T)."""
        texts, images, padded = left.shape
        per = -(-self.merged // choice.splits)
        per += -per % max(choice.group, choice.last)
        trial_kernels.held_norms_kernel[(-(-texts // choice.rows), images, -(-self.merged // per))](
            left,
            self.table,
            norms,
            texts,
            images,
            self.merged,
            padded,
            norms.shape[1],
            0,
            per,
            ROWS=choice.rows,
            GROUP=choice.group,
            LAST=choice.last,
            STAGES=choice.stages,
            num_warps=choice.warps,
            **self._blocks(),
        )

    def extra_norms(self, extra: Tensor, norms: Tensor) -> None:
        """The inverse norm of the extra token into the last row of (B, Q + 1, T)."""
        texts, images, padded = extra.shape
        trial_kernels.held_norms_kernel[(-(-texts // 128), images, 1)](
            extra,
            self.whole,
            norms,
            texts,
            images,
            1,
            padded,
            norms.shape[1],
            self.merged,
            1,
            ROWS=128,
            GROUP=1,
            LAST=1,
            STAGES=1,
            num_warps=8,
            **self._blocks(),
        )

    def align(
        self,
        choice: Align,
        block: TextBlock,
        products: Tensor,
        keep: Tensor,
        extra: Tensor,
        norms: Tensor,
        first: int,
        out: Tensor,
    ) -> None:
        """S into the columns of `out` (B, T), which may be a part of a larger matrix; norms count from `first`."""
        texts, longest, images, padded = products.shape
        slot = max(8, fused._power(longest))
        slots = max(1, choice.rows // slot)
        whole = min(3, padded // 64)
        rest = padded - 64 * whole
        widths = [64] * whole + ([fused._power(rest)] if rest else [])
        widths += [0] * (4 - len(widths))
        base = out if out._base is None else out._base
        if base.dim() != 2 or base.stride() != out.stride():
            base = out
        at_once = slots * choice.tiles
        trial_kernels.slot_align_kernel[(images, -(-texts // at_once))](
            products,
            keep,
            extra,
            self.weights,
            norms,
            block.lengths,
            base,
            texts,
            images,
            longest,
            self.merged,
            padded,
            norms.shape[1],
            norms.shape[2],
            first,
            out.stride(0),
            out.storage_offset() - base.storage_offset(),
            choice.tiles,
            PREFIX=self.prefixes,
            SLOTS=slots,
            L=slot,
            W0=widths[0],
            W1=widths[1],
            W2=widths[2],
            W3=widths[3],
            QP=self.columns,
            LEAKY=self.net.hrpa.scan,
            RAGGED=block.mask is not None,
            EXACT=sum(widths) == padded,
            STAGES=choice.stages,
            num_warps=choice.warps,
        )

    def cosines(self, paired: Tensor) -> tuple[Tensor, float]:
        """Cosines of the selection for `TextBlock.paired("mean")`, and what to multiply them by."""
        right = self.unit_pairs if self.unit_pairs is not None else pairs.as_right(self.unit_patches).flatten(0, 1)
        return pairs.products(paired, right), pairs.UNSCALE

    def fill(self, texts: Texts, runs: list[tuple[int, int]], chunk: int, out: Tensor) -> None:
        """Scores of all texts; up to `chunk` of them are selected and normed at once."""
        start = 0
        while start < len(runs):
            stop = start + 1
            while stop < len(runs) and runs[stop][1] - runs[start][0] <= chunk:
                stop += 1
            group = [texts.block(*run) for run in runs[start:stop]]
            known: dict[Any, Tensor] = texts.__dict__.setdefault("_trial_means", {})
            key = (runs[start], runs[stop - 1])
            if key not in known:
                means = [block.paired("mean") for block in group]
                known[key] = means[0] if len(means) == 1 else torch.cat(means)
            keep, extra, norms = self.decide(*self.cosines(known[key]))
            for (low, high), block in zip(runs[start:stop], group, strict=True):
                first = low - runs[start][0]
                products = self.word_products(block, self.patches)
                part = slice(first, first + block.count)
                self.align(self.align_choice, block, products, keep[part], extra[part], norms, first, out[:, low:high])
            start = stop


@contextmanager
def candidates(chunk: int, images: int = 64) -> Iterator[None]:
    """`score_matrix` with the candidates, the texts in chunks, `images` at once."""
    before = fused.scorer, engine.Engine._fill_safe, blocks._MOST_IMAGES

    def scorer(net: Any, dtype: torch.dtype, sizes: Any = None) -> Any:
        mlp = fused._flat_mlp(net)
        return lambda side: TrialScorer(net, side, sizes or fused.KernelSizes(), mlp)

    def fill_safe(self: Any, side: ImageSide, out: Tensor) -> None:
        self.fused(side).fill(self.texts, self.texts.runs(self.plan.texts), chunk, out)

    fused.scorer, engine.Engine._fill_safe, blocks._MOST_IMAGES = scorer, fill_safe, images  # type: ignore[method-assign]
    try:
        yield
    finally:
        fused.scorer, engine.Engine._fill_safe, blocks._MOST_IMAGES = before  # type: ignore[method-assign]


class Trial:
    """Times and checks; what fails is told."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.cuda = self.device.type == "cuda"
        self.limit, self.out = arguments.limit, arguments.out
        self.quick = arguments.quick
        self.rows: list[dict[str, Any]] = []

    def add(self, part: str, name: str, **row: Any) -> None:
        """Print a row and write all of them."""
        self.rows.append({"part": part, "name": name, **row})
        shown = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
        )
        print(f"[{time.perf_counter() - STARTED:5.0f} s] {part:9} {name:60} {shown}", flush=True)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps({**describe(self.device), "rows": self.rows}, indent=1))

    def late(self) -> bool:
        """Whether the time is used up."""
        return time.perf_counter() - STARTED > self.limit

    def milliseconds(self, work: Callable[[], object], repeats: int = 3) -> float:
        """The median of some runs, after one that compiles."""
        work()
        found = []
        for _ in range(repeats if self.cuda else 1):
            synchronise(self.device)
            start = time.perf_counter()
            work()
            synchronise(self.device)
            found.append((time.perf_counter() - start) * 1e3)
        return sorted(found)[len(found) // 2]

    def tries(self, part: str, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The row of `work`, or None where it failed or no time is left."""
        if self.late():
            self.add(part, name, failed="no time left")
            return None
        try:
            row = work()
        except Exception as error:
            lines = traceback.format_exc().strip().splitlines()
            self.add(part, name, failed=f"{type(error).__name__}: {lines[-1][:300]}")
            if self.cuda:
                synchronise(self.device)
            return None
        self.add(part, name, **row)
        return row


def _kernels(trial: Trial, net: Any, data: dict[str, Any], all_images: int) -> None:
    """Each kernel alone, on a few images and all texts; times are scaled to `all_images`."""
    texts = Texts(data["cap_embs"], data["cap_lens"], dtype=torch.float32, products=torch.float16)
    runs = texts.runs(4096)
    group = [texts.block(*run) for run in runs]
    side = net.encode_images(data["img_embs"][:FEW])
    times = all_images / side.patches.shape[0]
    today = fused.scorer(net, torch.float16)(side)
    new = TrialScorer(net, side, fused.KernelSizes(), fused._flat_mlp(net))
    scores_of = [new.cosines(block.paired("mean")) for block in group]

    def timed(work: Callable[[], object]) -> float:
        return trial.milliseconds(work) * times

    gemm = timed(lambda: [new.cosines(block.paired("mean")) for block in group])
    trial.add("products", "cosines of the selection, by pairs", ms=gemm)
    # Today's values, to compare with; the first row of each part is today's.
    old = [new.choose(Select(4, 4, old=True), *found) for found in scores_of]

    def select(choice: Select) -> dict[str, Any]:
        work = [partial(new.choose, choice, *found) for found in scores_of]
        ms = timed(lambda: [one() for one in work])
        other, error = 0, 0.0
        for one, (true, weights) in zip(work, old, strict=True):
            keep, extra = one()
            other += int((keep[..., : new.count] != true[..., : new.count]).sum())
            error = max(error, float((extra - weights).abs().max()))
        return {"ms": ms, "other_patches": other, "largest_difference": error}

    for choice in SELECTS:
        trial.tries("select", str(choice), partial(select, choice))
    chosen = [(keep.clone(), extra) for keep, extra in old]
    for keep, _ in chosen:
        new.keep_prefix(keep)
    keeps = [keep for keep, _ in old]
    exact = [today.squared_norms(keep, today.table) for keep in keeps]
    exact_extra = [today.squared_norms(extra, today.gram[:, :, None, :]) for _, extra in old]

    def old_norms(sizes: dict[str, int]) -> dict[str, Any]:
        own = fused.TritonScorer(net, side, torch.float16, replace(fused.KernelSizes(), **sizes), today.mlp)
        ms = timed(lambda: [own.squared_norms(keep, own.table) for keep in keeps])
        found = own.squared_norms(keeps[-1], own.table)
        return {"ms": ms, "largest_share": float((found / exact[-1] - 1).abs().max())}

    for sizes in OLD_NORMS:
        trial.tries("norms", f"today {sizes}", partial(old_norms, sizes))
    spaces = [torch.empty(new.patches.shape[0], new.merged + 1, keep.shape[0], device=keep.device) for keep in keeps]

    def norms(choice: Norms) -> dict[str, Any]:
        for space in spaces:
            space.fill_(float("nan"))
        work = [partial(new.merged_norms, choice, *both) for both in zip(keeps, spaces, strict=True)]
        ms = timed(lambda: [one() for one in work])
        shares = [
            float((space[:, :-1].transpose(1, 2).square() * true - 1).abs().max())
            for space, true in zip(spaces, exact, strict=True)
        ]
        return {"ms": ms, "largest_share": max(shares)}

    for norm in NORMS:
        trial.tries("norms", str(norm), partial(norms, norm))
    joined = Norms()

    def one_launch() -> dict[str, Any]:
        left = torch.cat(keeps)
        space = torch.empty(left.shape[1], new.merged + 1, left.shape[0], device=left.device)
        return {"ms": timed(lambda: new.merged_norms(joined, left, space))}

    trial.tries("norms", f"all texts in one launch {joined}", one_launch)

    def old_extra() -> dict[str, Any]:
        return {"ms": timed(lambda: [today.squared_norms(extra, today.gram[:, :, None, :]) for _, extra in old])}

    def new_extra() -> dict[str, Any]:
        work = [partial(new.extra_norms, extra, space) for (_, extra), space in zip(old, spaces, strict=True)]
        ms = timed(lambda: [one() for one in work])
        both = zip(spaces, exact_extra, strict=True)
        return {
            "ms": ms,
            "largest_share": max(float((s[:, -1].square() * true[..., 0] - 1).abs().max()) for s, true in both),
        }

    trial.tries("extra", "today", old_extra)
    trial.tries("extra", "held", new_extra)
    for space, true, more in zip(spaces, exact, exact_extra, strict=True):
        space[:, :-1], space[:, -1] = true.transpose(1, 2).rsqrt(), more[..., 0].rsqrt()
    gemm = timed(lambda: _products(new, group))
    trial.add("products", "words and patches", ms=gemm)
    products = [new.word_products(block, new.patches) for block in group]
    prefixes = [today.word_products(block, today.prefix).contiguous() for block in group]
    # Today's kernel sees zeros in the padding: D and the extra weights are zero there.
    found = [
        _align_today(today, block, p, x, *kept, n, more)
        for block, p, x, kept, n, more in zip(group, products, prefixes, old, exact, exact_extra, strict=True)
    ]

    def old_align() -> dict[str, Any]:
        def work() -> None:
            for block, p, x, kept, n, more in zip(group, products, prefixes, old, exact, exact_extra, strict=True):
                _align_today(today, block, p, x, *kept, n, more)

        return {"ms": timed(work)}

    trial.tries("align", "today", old_align)
    outs = [torch.empty_like(one) for one in found]

    def align(choice: Align) -> dict[str, Any]:
        for out in outs:
            out.fill_(float("nan"))

        def work() -> None:
            for block, p, both, n, out in zip(group, products, chosen, spaces, outs, strict=True):
                new.align(choice, block, p, *both, n, 0, out)

        ms = timed(work)
        error = max(float((out - true).abs().max()) for out, true in zip(outs, found, strict=True))
        return {"ms": ms, "largest_difference": error}

    for choice_ in ALIGNS:
        trial.tries("align", str(choice_), partial(align, choice_))
    _best(trial)


def _products(new: TrialScorer, group: list[TextBlock]) -> None:
    for block in group:
        new.word_products(block, new.patches)


def _align_today(
    today: fused.TritonScorer,
    block: TextBlock,
    products: Tensor,
    prefix: Tensor,
    keep: Tensor,
    extra: Tensor,
    norms: Tensor,
    extra_norms: Tensor,
) -> Tensor:
    """Today's alignment kernel alone: (B, T)."""
    from seps.scoring import kernels

    sizes, hrpa = today.sizes, today.net.hrpa
    texts, longest, images, padded = products.shape
    rows = max(sizes.align_rows, fused._power(longest))
    per = rows // longest
    out = torch.empty(images, texts, device=products.device)
    kernels.align_kernel[(-(-texts // per), images)](
        products,
        keep,
        extra,
        today.weights,
        norms,
        extra_norms,
        prefix,
        block.lengths,
        today.mlp,
        out,
        texts,
        images,
        padded,
        longest,
        today.merged,
        per,
        PREFIX=today.prefix.shape[1],
        ROWS=rows,
        BN=sizes.align_patches,
        PX=max(16, fused._power(per)),
        QP=today.columns,
        TOP=0,
        HP=2,
        LEAKY=hrpa.scan,
        SPLIT=False,
        num_warps=sizes.warps,
        num_stages=sizes.align_stages,
    )
    return out


def _best(trial: Trial) -> None:
    """Take the fastest candidate of each kernel that gave the right numbers."""

    def fastest(part: str, choices: list[Any], limit: tuple[str, float]) -> Any:
        named = {str(choice): choice for choice in choices}
        good = [
            row
            for row in trial.rows
            if row["part"] == part and row["name"] in named and row.get(limit[0], float("inf")) <= limit[1]
        ]
        return named[min(good, key=lambda row: row["ms"])["name"]] if good else None

    TrialScorer.select_choice = fastest("select", SELECTS, ("other_patches", 0)) or Select(4, 4, old=True)
    TrialScorer.norms_choice = fastest("norms", NORMS, ("largest_share", 2e-3))
    TrialScorer.align_choice = fastest("align", ALIGNS, ("largest_difference", 5e-4)) or Align()
    for choice in (TrialScorer.select_choice, TrialScorer.norms_choice, TrialScorer.align_choice):
        trial.add("chosen", str(choice))


def _calls(trial: Trial, net: Any, data: dict[str, Any]) -> None:
    """Whole calls, today's and with the candidates."""
    images, texts = data["img_embs"].shape[0], data["cap_embs"].shape[0]
    exact = score_matrix(net, **part_of(data, 256, 64), backend="reference")
    out = torch.empty(images, texts, device=trial.device)
    before = torch.empty_like(out)
    backend = "auto" if trial.cuda else "triton"

    def call(target: Tensor, images_at_once: int, chunk: int | None) -> dict[str, Any]:
        work = partial(score_matrix, net, precision="half", backend=backend)
        warm = part_of(data, 2 * images_at_once, texts)
        seconds = []
        with candidates(chunk, images_at_once) if chunk else _nothing():
            work(**warm)
            for _ in range(2):
                synchronise(trial.device)
                start = time.perf_counter()
                work(**data, out=target)
                synchronise(trial.device)
                seconds.append(time.perf_counter() - start)
        gaps = (target[: exact.shape[0], : exact.shape[1]] - exact).abs()
        row = {"seconds": min(seconds), "to_loop": float(gaps.masked_fill(gaps > 1e-3, 0).max())}
        row["flips_to_loop"] = int((gaps > 1e-3).sum())
        if chunk:
            parts = [(a - b).abs() for a, b in zip(target.split(500), before.split(500), strict=True)]
            row["to_today"] = max(float(part.max()) for part in parts)
            row["pairs_off_5e-4"] = sum(int((part > 5e-4).sum()) for part in parts)
        return row

    trial.tries("call", "today", partial(call, before, 64, None))
    for name, at_once, chunk in (
        ("candidates, run by run", 64, 1),
        ("candidates, 6,500 texts selected at once", 64, 6500),
        ("candidates, 13,000 texts, 128 images", 128, 13000),
    ):
        trial.tries("call", name, partial(call, out, at_once, chunk))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _gaps(trial: Trial, net: Any, data: dict[str, Any]) -> None:
    """Busy time, gaps between kernels, and calls in which the host waits."""
    from torch.profiler import ProfilerActivity, profile

    few = part_of(data, 1024, data["cap_embs"].shape[0])
    for name, chunk in (("today", None), ("candidates, 6,500 texts", 6500)):
        if trial.late():
            return
        with candidates(chunk) if chunk else _nothing():
            work = partial(score_matrix, net, **few, precision="half")
            wall = trial.milliseconds(work, 2)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                work()
                synchronise(trial.device)
        spans, waits = [], {}
        for event in trace.events() or []:
            if str(event.device_type).endswith("CUDA"):
                spans.append((event.time_range.start, event.time_range.end, event.name))
            elif "Synchronize" in event.name or event.name in ("cudaMalloc", "cudaFree", "aten::item", "aten::nonzero"):
                count, total = waits.get(event.name, (0, 0.0))
                waits[event.name] = (count + 1, total + event.cpu_time_total / 1e3)
        spans.sort()
        busy, end, last, gaps = 0.0, spans[0][0], "", []
        kernels: dict[str, tuple[int, float]] = {}
        for start, stop, kind in spans:
            count, total = kernels.get(kind[:48], (0, 0.0))
            kernels[kind[:48]] = (count + 1, total + (stop - start) / 1e3)
            if start > end and last:
                gaps.append((start - end, last[:40], kind[:40], (end - spans[0][0]) / 1e3))
            busy += max(0.0, stop - max(start, end))
            end, last = max(end, stop), kind
        gaps.sort(reverse=True)
        trial.add(
            "profile",
            f"{name}, {few['img_embs'].shape[0]} images",
            wall_ms=wall,
            busy_ms=busy / 1e3,
            span_ms=(end - spans[0][0]) / 1e3,
            idle_ms=sum(gap[0] for gap in gaps) / 1e3,
            gaps=len(gaps),
            gaps_above_50us=sum(gap[0] > 50 for gap in gaps),
            waits={key: (count, round(total, 1)) for key, (count, total) in waits.items()},
        )
        for gap, left, right, when in gaps[:10]:
            print(f"      gap {gap / 1e3:8.3f} ms at {when:8.1f} ms  after {left}  before {right}", flush=True)
        for kind, (count, total) in sorted(kernels.items(), key=lambda item: -item[1][1])[:10]:
            print(f"      {total:9.2f} ms {count:6} x {kind}", flush=True)
        trial.rows[-1]["kernels"] = {kind: value for kind, value in kernels.items() if value[1] > 0.5}


def main() -> None:
    """Run all parts, print a table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=135.0, help="seconds after which nothing new is started")
    parser.add_argument("--quick", action="store_true", help="few images and texts, to test this file")
    arguments = parser.parse_args()
    trial = Trial(arguments)
    images, texts = (2, 10) if arguments.quick else (5000, 25000)
    with torch.no_grad():
        net = make_net("vit224", "caption", trial.device)
        data = make_inputs(net, images, texts, "caption", trial.device)
        try:
            _kernels(trial, net, data, 512)
        except Exception:
            trial.add("kernels", "stopped", failed=traceback.format_exc()[-800:])
        if trial.cuda:
            torch.cuda.empty_cache()
        if not arguments.quick or trial.cuda:
            _calls(trial, net, data)
        if trial.cuda and not trial.late():
            try:
                _gaps(trial, net, data)
            except Exception:
                trial.add("profile", "stopped", failed=traceback.format_exc()[-800:])
    print("\nms for 512 x 25,000, seconds for calls")
    for row in trial.rows:
        value = row.get("ms", row.get("seconds", row.get("wall_ms", row.get("failed", ""))))
        told = value if isinstance(value, str) else f"{value:.3f}"
        print(f"{row['part']:9} {row['name'][:76]:76} {told[:60]}")


if __name__ == "__main__":
    main()
