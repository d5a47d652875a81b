"""Score a million pairs: 1,000 pictures with 1,000 captions, exactly, without ever holding the matrix.

`score_matrix` computes what the network's own loop over texts computes, in large matrix products; with `topk` it keeps
only the best pictures of each caption, within the memory you allow. The gallery comes as blocks, so that it could be
read from disk. It prints its progress, the time, the ranks of the right pictures, and the largest difference from
the readable loop on a part of the pairs.
"""

import time
from collections.abc import Iterator

import torch

import seps
from seps.scoring import score_matrix

PICTURES = CAPTIONS = 1000


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    config = seps.SlimmingConfig.default(embed_size=24, num_patches=12, num_prefix_tokens=1, aggr_ratio=0.5)
    net = seps.PatchSlimming(config).eval()
    captions = torch.randn(CAPTIONS, 5, 24, generator=generator)
    # Picture i shows what caption i says, in five of its twelve patches.
    pictures = torch.randn(PICTURES, 13, 24, generator=generator)
    pictures[:, 3:8] = captions + 0.3 * torch.randn(captions.shape, generator=generator)

    def blocks() -> Iterator[torch.Tensor]:
        yield from pictures.split(100)

    def progress(done: int, total: int | None) -> None:
        if done % 250 == 0:
            print(f"  {done} pictures, {done * CAPTIONS:,} pairs")

    started = time.perf_counter()
    best = score_matrix(net, blocks(), captions, topk=5, memory=64 * 2**20, progress=progress)
    seconds = time.perf_counter() - started
    first = (best.indices[:, 0] == torch.arange(CAPTIONS)).float().mean()
    print(
        f"{PICTURES * CAPTIONS:,} pairs in {seconds:.1f} s; the right picture comes first for {first:.0%} of captions"
    )

    part = score_matrix(net, pictures[:20], captions[:20])
    with torch.no_grad():
        loop = net(pictures[:20], captions[:20])
    print(f"largest difference from the readable loop: {(part - loop).abs().max():.0e}")


if __name__ == "__main__":
    main()
