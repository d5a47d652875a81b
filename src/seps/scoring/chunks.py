"""Chunks of texts: blocks of several lengths whose texts are selected at once.

Shapes: T texts, C width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from seps.scoring.inputs import TextBlock, Texts

Run = tuple[int, int]


def chunks(runs: Sequence[Run], most: int) -> Iterator[list[Run]]:
    """The runs (start, stop), as many neighbours together as hold at most `most` texts, and at least one."""
    start = 0
    while start < len(runs):
        stop = start + 1
        while stop < len(runs) and runs[stop][1] - runs[start][0] <= most:
            stop += 1
        yield list(runs[start:stop])
        start = stop


def joined(texts: Texts, runs: Sequence[Run], blocks: Sequence[TextBlock]) -> TextBlock:
    """The blocks of neighbouring `runs` as one, without words: what the selection needs of them.

    Made once where `texts` keeps its blocks.
    """
    if len(blocks) == 1:
        return blocks[0]
    key = (runs[0][0], runs[-1][1])
    if key in texts.joined:
        return texts.joined[key]
    mean = torch.cat([block.mean for block in blocks])
    lengths = torch.cat([block.lengths for block in blocks])
    index = torch.cat([block.index for block in blocks])
    made = TextBlock(index, mean.new_empty(mean.shape[0], 0, mean.shape[1]), None, mean, lengths)
    if texts.keeps_blocks:
        texts.joined[key] = made
    return made
