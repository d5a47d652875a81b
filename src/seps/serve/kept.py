"""Which patches of an image a sentence keeps, without the rest of an explanation."""

from __future__ import annotations

from typing import Any, cast

import torch

from seps.nn.guidance import masked_mean
from seps.nn.known import evaluating
from seps.retrieval.heads import TextFeatures
from seps.retrieval.index.codec import restore
from seps.retrieval.index.search import Searcher


@torch.no_grad()
def kept_patches(searcher: Searcher, identity: str, text: str) -> dict[str, Any] | None:
    """`grid`, and `kept`: per cell of it "1" or "0", row by row. None where the store has no such image.

    Raises ValueError for a model that selects no patches.
    """
    scorer, settings = searcher.scorer, searcher.store.settings
    if scorer is None or scorer.net is None:
        raise ValueError("The model of this store selects no patches.")
    images = searcher.store.select([identity], list(settings.state))
    if not len(images):
        return None
    stored = restore(images, settings, searcher.model.device)
    query = cast(TextFeatures, searcher.encode(text))
    with evaluating(scorer.net):
        _, masks = scorer.net.image_tokens(scorer.side(stored), masked_mean(query.words, query.mask))
    cells = torch.zeros(settings.grid[0] * settings.grid[1], dtype=torch.bool)
    kept = masks[0][0].cpu() > 0.5
    places = torch.arange(len(kept)) if stored.positions is None else stored.positions[0].cpu()
    cells[places[kept]] = True
    return {"grid": settings.grid, "kept": "".join("1" if cell else "0" for cell in cells.tolist())}
