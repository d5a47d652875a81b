"""The service over a store, asked inside the test's own process. Importing it skips a module without FastAPI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stores import model

pytest.importorskip("fastapi")
from starlette.testclient import TestClient as Client

from seps.photos.library import Library
from seps.photos.search.searcher import Searcher
from seps.photos.serve.app import create_app
from seps.photos.serve.guard import LOOPBACK

QUERY = "/api/search?q=a+dog"


def served(store: Searcher | Path, address: str = "http://localhost", *, engine: Any = None, **options: Any) -> Client:
    """A client of the service over a store, with the tiny model unless another one comes."""
    searcher = store if isinstance(store, Searcher) else Searcher(store, engine or model())
    return Client(create_app(Library.over(searcher), **options), base_url=address)


def near(store: Searcher | Path, **options: Any) -> Client:
    """`served` under the names of this machine alone, as `seps serve` does without a token."""
    return served(store, hosts=LOOPBACK, **options)
