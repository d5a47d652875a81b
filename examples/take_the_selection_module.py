"""Take the selection module into your own network: ten lines that let a text choose 49 of 196 patches.

`TokenSparse` scores the patches of a picture by their cosines with the caption and with the picture itself, keeps the
best and merges the others into one token. Everything after it computes on 50 tokens instead of 197, and gradients
reach every patch. It prints the shapes on the way and which patches the first caption kept.
"""

import torch
from torch import nn
from torch.nn import functional as F

from seps import TokenSparse


class YourNetwork(nn.Module):
    """A classifier of (picture, caption) pairs; the lines between the marks are the new ones."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.select = TokenSparse(width, sparse_ratio=0.25, use_paper_version=True)  # <- new
        self.classify = nn.Linear(width, 2)

    def forward(self, patches: torch.Tensor, caption: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # --- new: (B, 196, C) patches and a (B, C) caption vector -> (B, 50, C) tokens
        own = F.cosine_similarity(patches, patches.mean(dim=1, keepdim=True), dim=-1)
        asked = F.cosine_similarity(patches, caption[:, None], dim=-1)
        kept, rest, mask = self.select(patches, own, asked)
        tokens = torch.cat([kept, rest], dim=1)
        # --- and your network goes on with fewer tokens
        return self.classify(tokens.mean(dim=1)), mask


def main() -> None:
    torch.manual_seed(0)
    network = YourNetwork()
    patches, caption = torch.randn(2, 196, 64, requires_grad=True), torch.randn(2, 64)
    logits, mask = network(patches, caption)
    logits.sum().backward()
    reached = int((patches.grad.abs().sum(dim=-1) > 0).sum())
    print(f"patches {tuple(patches.shape)} -> kept {int(mask[0].sum())} of {mask.shape[1]} in each picture")
    print(f"logits {tuple(logits.shape)}; gradients reach {reached} of {2 * 196} patches")
    print(f"the first caption kept patches {mask[0].nonzero().flatten().tolist()[:8]} ...")


if __name__ == "__main__":
    main()
