"""Scores and gradients as they were before the rooms of `scoring` were made anew: a refactoring changes no number.

The figures in tests/golden/recorded_scores.safetensors were computed by this library, with weights and inputs of fixed
seeds, not by the reference. `tools/identity.py` compares bit by bit on one machine, this test within rounding on any.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import seps
from seps.scoring import score_matrix, score_with_gradient

SIZES = {"embed_size": 32, "num_patches": 16, "num_prefix_tokens": 1}
CONFIGS = {
    "paper": seps.SlimmingConfig.paper(**SIZES),
    "open-source": seps.SlimmingConfig.open_source(**SIZES),
    "default": seps.SlimmingConfig.default(**SIZES),
    "binary": seps.SlimmingConfig.default(decision="binary", **SIZES),
    "gumbel": seps.SlimmingConfig.paper(decision="gumbel", **SIZES),
    "no-description": seps.SlimmingConfig.open_source(dense="none", **SIZES),
}
LENGTHS = [8, 3, 5, 8, 1, 2, 7, 4, 6]
DESCRIBED = torch.tensor([11, 5, 9, 1, 11, 3, 7])
RECORDED = load_file(Path(__file__).parents[1] / "golden" / "recorded_scores.safetensors")


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_and_gradients_are_the_recorded_ones(name: str) -> None:
    net = seps.PatchSlimming(CONFIGS[name]).eval()
    prefix = f"{name}/state/"
    net.load_state_dict({k.removeprefix(prefix): v for k, v in RECORDED.items() if k.startswith(prefix)})
    images, words = RECORDED["images"], RECORDED["words"]
    own = {} if net.config.dense == "none" else {"dense": RECORDED["dense"], "dense_lengths": DESCRIBED}
    for backend in ("reference", "factored"):
        scores = score_matrix(net, images, words, LENGTHS, backend=backend, **own)
        torch.testing.assert_close(scores, RECORDED[f"{name}/scores"], rtol=0, atol=2e-6)
    if own:
        paired = score_matrix(net, images, words, LENGTHS, paired_dense=RECORDED["paired"])
        torch.testing.assert_close(paired, RECORDED[f"{name}/published"], rtol=0, atol=2e-6)
    inputs = images.clone().requires_grad_()
    similarity = score_with_gradient(net, inputs, words, LENGTHS, **own).similarity
    (similarity * torch.linspace(-1, 1, similarity.numel()).view_as(similarity)).sum().backward()
    torch.testing.assert_close(inputs.grad, RECORDED[f"{name}/gradient"], rtol=1e-4, atol=1e-5)
