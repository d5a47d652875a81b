"""A store of three pictures and a client of the service over it; a module's own `searcher` goes before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stores import gallery, index, model


@pytest.fixture(scope="session")
def searcher(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from seps.photos.search.searcher import Searcher

    folder = tmp_path_factory.mktemp("served")
    index(gallery(folder / "g", 3, described=1), folder / "s")
    return Searcher(folder / "s", model())


@pytest.fixture
def client(searcher: Any) -> Iterator[Any]:
    from serving import near

    with near(searcher) as client:
        yield client
