"""How far bfloat16 products turn the gradient of a training step: its cosine with the gradient of float32 products.

    python -m benchmarks.speed.gradient_precision [--device cuda] [--batch 128] [--width 384] [--patches 196]

Inputs are random. Trained features share a common direction, which random ones do not have: `--common 0 1 3` adds one
vector of that size, relative to the noise, to all patches and words. The gradient is that of InfoNCE over the batch,
with respect to the image tokens and to the weights of the network.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from benchmarks.common.machine import clock
from seps.method.config import SlimmingConfig
from seps.method.network import PatchSlimming
from seps.scoring import score_with_gradient

PRESETS = {"paper": SlimmingConfig.paper, "open_source": SlimmingConfig.open_source, "default": SlimmingConfig.default}
LOGIT_SCALE = 20.0
"""InfoNCE at temperature 0.05, the default of training."""


@dataclass(frozen=True)
class Sizes:
    """Shapes of the step: B images and captions, P patches beside one CLS token, M words, L words per description."""

    batch: int
    width: int
    patches: int
    words: int
    description: int


@dataclass(frozen=True)
class Gradient:
    """One step's loss, its gradient as two flat float64 vectors, and the seconds it took."""

    loss: float
    images: Tensor
    weights: Tensor
    seconds: float


class Step:
    """One training step on fixed random inputs, at a precision of the matrix products.

    Args:
        preset: a name of `PRESETS`.
        common: size of the direction that all features share, relative to their noise.
    """

    def __init__(self, preset: str, common: float, sizes: Sizes, device: torch.device) -> None:
        torch.manual_seed(0)
        config = PRESETS[preset](embed_size=sizes.width, num_patches=sizes.patches, num_prefix_tokens=1)
        self.net = PatchSlimming(config).to(device)
        self.device, self.batch = device, sizes.batch
        shared = torch.randn(sizes.width, device=device) * common

        def features(count: int) -> Tensor:
            return torch.randn(sizes.batch, count, sizes.width, device=device) + shared

        self.images = features(1 + sizes.patches).requires_grad_()
        self.words, self.description = features(sizes.words), features(sizes.description)
        self.description_lengths = torch.full((sizes.batch,), sizes.description)

    def run(self, precision: str) -> Tensor:
        """Forward and backward; returns the loss."""
        self.images.grad = None
        self.net.zero_grad(set_to_none=True)
        scored = score_with_gradient(
            self.net,
            self.images,
            self.words,
            dense=self.description,
            dense_lengths=self.description_lengths,
            precision=precision,
        )
        loss = cross_entropy(scored.similarity * LOGIT_SCALE, torch.arange(self.batch, device=self.device))
        torch.autograd.backward(loss)
        return loss.detach()

    def gradient(self, precision: str, repeats: int) -> Gradient:
        """The gradient at one precision, and the time of a step."""
        seconds = clock(lambda: self.run(precision), self.device, repeats)
        torch.manual_seed(1)  # a Gumbel decision draws the same noise at both precisions
        loss = float(self.run(precision))
        assert self.images.grad is not None
        weights = (weight.grad for weight in self.net.parameters() if weight.grad is not None)
        return Gradient(loss, flat([self.images.grad]), flat(weights), seconds)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All values as one float64 vector."""
    return torch.cat([tensor.flatten().double() for tensor in tensors])


def cosine(left: Tensor, right: Tensor) -> float:
    """Cosine of two vectors."""
    return float(cosine_similarity(left, right, dim=0))


def main() -> None:
    """Measure every preset at every size of the common direction, and print a row each."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.gradient_precision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--presets", nargs="+", choices=sorted(PRESETS), default=list(PRESETS))
    parser.add_argument("--common", nargs="+", type=float, default=[0.0, 1.0, 3.0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--patches", type=int, default=196)
    parser.add_argument("--words", type=int, default=16, help="words per caption")
    parser.add_argument("--description", type=int, default=40, help="words per description")
    parser.add_argument("--repeats", type=int, default=5, help="steps that are timed; the fastest counts")
    options = parser.parse_args()
    sizes = Sizes(options.batch, options.width, options.patches, options.words, options.description)
    print("preset       common  cosine: images   weights   ms: float32  bfloat16   loss: float32  bfloat16")
    for preset in options.presets:
        for common in options.common:
            step = Step(preset, common, sizes, torch.device(options.device))
            exact, half = (step.gradient(precision, options.repeats) for precision in ("float32", "bfloat16"))
            print(
                f"{preset:12} {common:6.1f}  {cosine(exact.images, half.images):14.5f} "
                f"{cosine(exact.weights, half.weights):9.5f}  {exact.seconds * 1e3:12.1f} {half.seconds * 1e3:9.1f}  "
                f"{exact.loss:14.5f} {half.loss:9.5f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
