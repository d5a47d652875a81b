"""All pairs on a CPU beside plain MaxSim and `net.forward`, in one run: real and random features.

    python -m benchmarks.speed.cores --data dev.jsonl --out docs/results/scoring-cpu.json
    python tools/printed.py write

Plain MaxSim is a product of all words with all patches and a maximum, in one direction, without selection; its tokens
are normalised before the clock starts. It is timed as torch multiplies (`@`) and, in a second row, with the faster
library that our products take (`seps.products`). Random features are normal values; with `--data` there are real ones
of `base`: 24 photos, captions of 160 photos, all 400 patches with the trained head, and the inner 14 x 14 patches with
heads of the other presets as they are initialised. Every round runs each way once, one after the other; a way's time
is its best round. `net.forward` is timed on some captions. Patches that another order of sums keeps instead (flips) are
told by the pairs whose score differs by more than 1e-5, and left out of the largest difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.common import machine
from benchmarks.speed.peers import torch_maxsim
from seps.method.config import SlimmingConfig
from seps.method.network import PatchSlimming
from seps.products import linear
from seps.retrieval.data import load_jsonl
from seps.retrieval.evaluate.encoding import encode_images
from seps.retrieval.heads import SlimmingHead
from seps.retrieval.pretrained import from_pretrained
from seps.scoring import score_matrix

SIZES = {"default": [(64, 64), (32, 320)], "open_source": [(64, 64), (32, 320)], "paper": [(64, 64), (32, 320)]}
"""By preset: images and captions of random features."""
PHOTOS, CAPTIONED = 24, 160
FORWARD = 64
"""Captions with which `net.forward` is timed at most."""


@dataclasses.dataclass
class Case:
    """A network and what it is to score."""

    name: str
    net: PatchSlimming
    images: Tensor
    words: Tensor
    lengths: Tensor
    extra: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def random_cases() -> Iterator[Case]:
    """ViT-224 features (196 patches and CLS), captions of 8 to 23 words."""
    for preset, sizes in SIZES.items():
        for images, captions in sizes:
            torch.manual_seed(0)
            config = getattr(SlimmingConfig, preset)()
            net, width = PatchSlimming(config).eval(), config.embed_size
            lengths = torch.randint(8, 24, (captions,))
            yield Case(
                f"{preset}, random", net, torch.randn(images, 197, width), torch.randn(captions, 23, width), lengths
            )


@torch.no_grad()
def real_cases(data: Path) -> Iterator[Case]:
    """Features of `base`, with its head and with untrained ones."""
    model, dataset = from_pretrained("base"), load_jsonl(data)
    if not isinstance(model.head, SlimmingHead):
        raise SystemExit("base has no slimming head")
    many = min(CAPTIONED, len(dataset))
    photos = list(range(0, many, -(-many // PHOTOS)))
    tokens = encode_images(model, dataset.subset(photos))
    texts = model.encode_texts([caption for record in dataset.records[:many] for caption in record.captions])
    dense, mask = model.encode_descriptions([dataset.dense[photo] for photo in photos])
    words, lengths = texts.words, texts.lengths
    yield Case("base", model.head.net, tokens, words, lengths)
    yield Case(
        "base, described", model.head.net, tokens, words, lengths, {"dense": dense, "dense_lengths": mask.sum(1)}
    )
    side = round((tokens.shape[1] - 1) ** 0.5)
    grid = torch.arange(side * side).view(side, side)[3:17, 3:17].flatten()
    inner = torch.cat([tokens[:, :1], tokens[:, 1 + grid]], dim=1)
    for preset in SIZES:
        torch.manual_seed(0)
        net = PatchSlimming(getattr(SlimmingConfig, preset)(embed_size=tokens.shape[-1])).eval()
        yield Case(f"{preset}, real", net, inner, words, lengths)


def maxsim_by_linear(images: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
    """`torch_maxsim` with the products of `seps.products`."""
    real = torch.arange(words.shape[1]) < lengths[:, None]
    own, texts = words[real], real.nonzero()[:, 0]
    scores = torch.zeros(len(words), len(images))
    for place, tokens in enumerate(images):
        scores[:, place].index_add_(0, texts, linear(own, tokens).amax(dim=1))
    return scores


def ways(case: Case) -> dict[str, tuple[int, Callable[[], Tensor]]]:
    """By name: how many captions a call scores, and the call, which returns (images, captions) scores."""
    captions = len(case.words)
    few = min(captions, FORWARD)
    tokens, words = normalize(case.images, dim=-1), normalize(case.words, dim=-1)

    def ours() -> Tensor:
        scores = score_matrix(case.net, case.images, case.words, case.lengths, **case.extra)  # type: ignore[arg-type]
        assert isinstance(scores, Tensor)
        return scores

    @torch.no_grad()
    def forward() -> Tensor:
        scores = case.net(case.images, case.words[:few], case.lengths[:few], **case.extra)
        assert isinstance(scores, Tensor)
        return scores

    return {
        "default": (captions, ours),
        "maxsim": (captions, lambda: torch_maxsim(tokens, words, case.lengths).T),
        "maxsim by oneDNN": (captions, lambda: maxsim_by_linear(tokens, words, case.lengths).T),
        "forward": (few, forward),
    }


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """The seconds of each way, its microseconds per pair, and how far `forward` is from the default call."""
    calls = ways(case)
    best: dict[str, float] = {}
    scores: dict[str, Tensor] = {}
    for turn in range(rounds + 1):
        for name, (_, call) in calls.items():
            if name == "forward" and turn > 1:
                continue
            start = time.perf_counter()
            scores[name] = call()
            taken = time.perf_counter() - start
            if turn:  # the first round warms up
                best[name] = min(best.get(name, taken), taken)
    images, captions = len(case.images), len(case.words)
    found: dict[str, Any] = {"case": case.name, "images": images, "captions": captions}
    found["patches"] = case.images.shape[1] - case.net.config.num_prefix_tokens
    plain = best["maxsim"] / (images * captions)
    found["ways"] = {
        name: {
            "captions": count,
            "us_per_pair": best[name] / (images * count) * 1e6,
            "of_maxsim": best[name] / (images * count) / plain,
        }
        for name, (count, _) in calls.items()
    }
    gap = (scores["default"][:, : scores["forward"].shape[1]] - scores["forward"]).abs()
    flips = gap > 1e-5
    found |= {"largest_difference": float(gap[~flips].max()), "compared": gap.numel(), "flips": int(flips.sum())}
    return found


def main() -> None:
    """Measure every case, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a data set whose first photos give real features")
    parser.add_argument("--out", type=Path, help="write the measurements here as JSON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="parts of the names of cases")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"machine": machine.describe(torch.device("cpu")), "rows": []}
    for cases in ([] if options.data is None else [real_cases(options.data)]) + [random_cases()]:
        for case in cases:
            if options.only is not None and not any(part in case.name for part in options.only):
                continue
            report["rows"].append(measure(case, options.rounds))
            print(json.dumps(report["rows"][-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"written to {options.out}; now python tools/printed.py write", file=sys.stderr)


if __name__ == "__main__":
    main()
