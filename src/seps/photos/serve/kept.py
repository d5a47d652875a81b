"""Which patches of an image a sentence keeps, or its words choose, without the rest of an explanation."""

from __future__ import annotations

from typing import Any, cast

import torch

from seps.method.known import evaluating
from seps.method.score import masked_mean
from seps.photos.search.searcher import Searcher
from seps.retrieval.engine.codec import StoredImages, StoredScorer, restore
from seps.retrieval.explain.maxsim import chosen_tokens
from seps.retrieval.heads import MaxSimHead, TextFeatures


def selects_patches(scorer: StoredScorer | None) -> bool:
    """Whether the model of a store has patches to show: a slimming head keeps some, with "maxsim" words choose some."""
    return scorer is not None and (scorer.net is not None or isinstance(scorer.model.head, MaxSimHead))


def _kept(scorer: StoredScorer, stored: StoredImages, query: TextFeatures) -> torch.Tensor:
    """(N,) bool, of the patches that the store holds of one image."""
    if scorer.net is None:
        patches = stored.features.tokens[0, scorer.model.vision.num_prefix_tokens :].float()
        return chosen_tokens(query.words[0][query.mask[0]], patches).any(dim=0)
    with evaluating(scorer.net):
        _, masks = scorer.net.image_tokens(scorer.side(stored), masked_mean(query.words, query.mask))
    return masks[0][0] > 0.5


@torch.no_grad()
def kept_patches(searcher: Searcher, identity: str, text: str) -> dict[str, Any] | None:
    """`grid`, and `kept`: per cell of it "1" or "0", row by row. None where the store has no such image.

    Raises ValueError for a model that selects no patches.
    """
    scorer, settings = searcher.scorer, searcher.store.settings
    if scorer is None or not selects_patches(scorer):
        raise ValueError("The model of this store selects no patches.")
    images = searcher.store.select([identity], list(settings.state))
    if not len(images):
        return None
    stored = restore(images, settings, searcher.model.device)
    query = cast(TextFeatures, searcher.encode(text))
    cells = torch.zeros(settings.grid[0] * settings.grid[1], dtype=torch.bool)
    kept = _kept(scorer, stored, query).cpu()
    places = torch.arange(len(kept)) if stored.positions is None else stored.positions[0].cpu()
    cells[places[kept]] = True
    return {"grid": settings.grid, "kept": "".join("1" if cell else "0" for cell in cells.tolist())}
