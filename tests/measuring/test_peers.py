"""Plain MaxSim of torch, which `benchmarks.speed.defaults` measures beside our scorer, is computed right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.speed import peers


def inputs(images: int = 5, captions: int = 7) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(3)
    return {
        "img_embs": torch.randn(images, 45, 16, generator=draw),
        "cap_embs": torch.randn(captions, 6, 16, generator=draw),
        "cap_lens": torch.randint(1, 7, (captions,), generator=draw),
    }


@pytest.mark.parametrize("workspace", [1, 2**30])
def test_maxsim_of_torch_is_that_of_the_slow_loop(workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WORKSPACE", workspace)  # one caption at a time, or all
    data = inputs()
    images, words, lengths = data["img_embs"], data["cap_embs"], data["cap_lens"]
    slow = torch.tensor(
        [
            [sum(max(float(w @ t) for t in image) for w in caption[:length]) for image in images]
            for caption, length in zip(words, lengths.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(peers.torch_maxsim(images, words, lengths), slow, atol=1e-5, rtol=0)
