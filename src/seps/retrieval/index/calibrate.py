"""What indexing does for the bank of background queries once the images are stored: missing levels, and calibration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from seps.retrieval.heads import TextFeatures
from seps.retrieval.index.bank import Calibration, bank_of, stored_levels
from seps.retrieval.index.search import Searcher
from seps.retrieval.index.store import Store
from seps.retrieval.model import RetrievalModel

AT_ONCE = 256
"""Images whose levels are written in one commit."""
CANDIDATES = 16
"""Images that are scored exactly per background query: the best one alone is wanted."""


def bring_up_to_date(store: Store, model: RetrievalModel, *, changed: bool) -> None:
    """Fill in missing levels, and calibrate again where the gallery has `changed`; the caller holds the lock."""
    missing = store.without_level()
    for start in range(0, len(missing), AT_ONCE):
        images = store.select(missing[start : start + AT_ONCE], ["id", "vector", *store.settings.state])
        vectors = torch.from_numpy(np.asarray(images.values("vector"), np.float32))
        levels = zip(images.values("id"), stored_levels(model, images, vectors, store.settings), strict=True)
        store.put_levels({identity: value for identity, value in levels if value is not None})
    known, count = Calibration.from_dict(store.settings.calibration), len(store)
    if changed or missing or known is None or known.images != count:
        found = calibrate(Searcher(store, model), model, count)
        store.set_settings(replace(store.settings, calibration={} if found is None else found.as_dict()))
    if missing:
        store.tidy(always=True)  # levels that came later leave a copy of their rows behind


def calibrate(searcher: Searcher, model: RetrievalModel, images: int) -> Calibration | None:
    """Ask the gallery the last sentences of the bank. None for an empty gallery."""
    if not images:
        return None
    asked = bank_of(model, searcher.store.settings.model_hash).asked
    texts = [TextFeatures(asked.words[i : i + 1], asked.mask[i : i + 1]) for i in range(len(asked.words))]
    return Calibration.of([searcher.search_words(text, 1, CANDIDATES)[0].score for text in texts], images)
