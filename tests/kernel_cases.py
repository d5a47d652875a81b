"""Cases and helpers of the fused kernels' tests: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from scoring_cases import SMALL
from seps.method.config import SlimmingConfig
from seps.scoring.gpu import fused
from seps.scoring.gpu.fused import KernelSizes
from seps.scoring.inputs import SortedTexts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Before the kernels are first imported: without a GPU they run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

TINY = KernelSizes(
    select_rows=4,
    norm_rows=16,
    norm_group=2,
    norm_columns=16,
    norm_inner=16,
    align_rows=16,
    align_patches=16,
    slot_rows=16,
    slot_tiles=2,
)

CASES = {
    "caption only": SlimmingConfig.open_source(dense="none", **SMALL),
    "branch": SlimmingConfig.open_source(**SMALL),
    "tokens": SlimmingConfig.default(**SMALL),
    "mlp": SlimmingConfig.paper(aggregation="single", **SMALL),
    "no prefix": SlimmingConfig.default(num_prefix_tokens=0, alignment="topk", similarity="leaky", **SMALL),
    "two prefix, odd": SlimmingConfig.open_source(
        **{**SMALL, "num_prefix_tokens": 2, "num_patches": 37, "embed_size": 20, "aggr_ratio": 0.3, "dense": "none"}
    ),
    "all kept": SlimmingConfig.paper(aggregation="single", **{**SMALL, "sparse_ratio": 1.0, "aggr_ratio": 0.2}),
}


def on_device(net, data):
    """Network and inputs on the device under test."""
    return net.to(DEVICE), {name: tensor.to(DEVICE) for name, tensor in data.items()}


def fused_scores(net, data, sizes=TINY, dtype=torch.float16, **described):
    """The fused backend without its check for a GPU."""
    texts = SortedTexts(data["words"], data["lengths"], dtype=torch.float32)
    out = torch.empty(data["images"].shape[0], texts.count, device=DEVICE)
    with torch.no_grad():
        side = net.encode_images(data["images"], **described)
        scorer = fused.scorer(net, dtype, sizes)(side)
        for start, stop in texts.runs(5):
            block = texts.block(start, stop)
            out[:, block.index] = scorer.score(block)
    return out
