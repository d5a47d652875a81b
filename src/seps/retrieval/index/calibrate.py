"""What indexing does for the bank of background queries once the images are stored: missing levels, and calibration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from seps.retrieval.index.bank import (
    REFERENCE,
    STRENGTH,
    Calibration,
    SearchModel,
    bank_of,
    stored_levels,
    strength_without_labels,
)
from seps.retrieval.index.search import Searcher
from seps.retrieval.index.store import Store
from seps.retrieval.index.zeroshot import ZeroShotModel

AT_ONCE = 256
"""Images whose levels are written in one commit."""
CANDIDATES = 16
"""Images that are scored exactly per background query: the best one alone is wanted."""
SAMPLED = 1000
"""Images whose scores with the bank give the strength of a model without measured queries."""


def bring_up_to_date(store: Store, model: SearchModel, *, changed: bool) -> None:
    """Fill in missing levels, and calibrate again where the gallery has `changed`; the caller holds the lock."""
    missing = store.without_level()
    for start in range(0, len(missing), AT_ONCE):
        images = store.select(missing[start : start + AT_ONCE], ["id", "vector", *store.settings.state])
        vectors = torch.from_numpy(np.asarray(images.values("vector"), np.float32))
        levels = zip(images.values("id"), stored_levels(model, images, vectors, store.settings), strict=True)
        store.put_levels({identity: value for identity, value in levels if value is not None})
    known, count = Calibration.from_dict(store.settings.calibration), len(store)
    older = "strength" not in store.settings.calibration  # of a release that did not look at the gallery's size
    if changed or missing or older or known is None or known.images != count:
        if isinstance(model, ZeroShotModel):
            calibration = {"strength": gallery_strength(store, model)}
            store.set_settings(replace(store.settings, calibration=calibration))
        found = calibrate(Searcher(store, model), model, count)
        store.set_settings(replace(store.settings, calibration={} if found is None else found.as_dict()))
    if missing:
        store.tidy(always=True)  # levels that came later leave a copy of their rows behind


def calibrate(searcher: Searcher, model: SearchModel, images: int) -> Calibration | None:
    """Ask the gallery the last sentences of the bank. None for an empty gallery."""
    if not images:
        return None
    bank = bank_of(model, searcher.store.settings)
    if images < REFERENCE:
        parts = [searcher.query_scores(part, bank.asked) for part in searcher.store.scan(["id", *searcher.columns])]
        return Calibration.of_scores(torch.cat(parts), searcher.strength)
    best = [searcher.search_words(text, 1, CANDIDATES)[0].score for text in bank.each_asked()]
    return Calibration.of(best, images, searcher.strength)


def gallery_strength(store: Store, model: ZeroShotModel) -> float:
    """`strength_without_labels` of at most `SAMPLED` images, with the scores of their vectors, nearly the exact."""
    ids = sorted(identity for some in store.scan(["id"], batch_size=8192) for identity in some.values("id"))
    images = store.select(ids[:: max(1, len(ids) // SAMPLED)][:SAMPLED], ["vector"])
    bank = bank_of(model, store.settings)
    vectors = torch.from_numpy(np.asarray(images.values("vector"), np.float32)).to(bank.vectors.device)
    return strength_without_labels(vectors.reshape(len(images), -1) @ bank.vectors.T) if len(images) else STRENGTH
