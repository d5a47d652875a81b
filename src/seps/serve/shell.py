"""Questions of `seps search` to a service that runs over the same store: answered as that command would by itself."""

from __future__ import annotations

import json
import os
from typing import Any

from fastapi import FastAPI, HTTPException, Request

import seps
from seps.library.answers import Question, answer
from seps.retrieval.index.store import Store
from seps.serve.service import Service, made_by

LONGEST = 64 * 1024
"""Bytes of a question."""


def add_shell(app: FastAPI, service: Service) -> None:
    """Answer POST /api/shell, a `Question` as JSON."""

    @app.post("/api/shell", include_in_schema=False)
    async def shell(request: Request) -> dict[str, Any]:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LONGEST:
                raise HTTPException(413, "The question is too long.")
        try:
            question = Question.from_dict(json.loads(bytes(body)))
        except (ValueError, TypeError, AttributeError) as error:
            raise HTTPException(422, f"This is no question ({error}).") from error

        def work() -> dict[str, Any]:
            newest(service)
            return answer(service.searcher, question)

        found = await service.run(work)
        place = os.path.realpath(service.searcher.store.location)
        return {**found, "store": place, "version": seps.__version__}


def newest(service: Service) -> None:
    """Go on with the newest commit of the store, as a new process would. Raises HTTPException 409 for another store."""
    store = service.searcher.store
    fresh = Store.open(store.location).settings
    if made_by(fresh) != made_by(store.settings):
        raise HTTPException(409, "The store was made anew in another way. Start the service again.")
    store.refresh()
    store.settings = fresh
