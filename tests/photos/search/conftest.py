"""Twelve pictures, half of them described, and a store of them with the bank of background queries."""

from __future__ import annotations

from pathlib import Path

import pytest

from seps.photos import Searcher
from stores import gallery, index, model


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gallery(tmp_path_factory.mktemp("photos"), 12, described=6)


@pytest.fixture(scope="module")
def searcher(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    store = tmp_path_factory.mktemp("stores") / "s"
    index(photos, store, precision="float32", bank=True)
    return Searcher(store, model())
