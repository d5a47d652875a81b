"""Questions of `seps search` to a service that runs over the same store: answered as that command would by itself."""

from __future__ import annotations

import json
import os
from typing import Any

from fastapi import FastAPI, HTTPException, Request

import seps
from seps.library.answers import Question, answer
from seps.retrieval.index.store import Store
from seps.serve.guard import forwarded
from seps.serve.service import Service, made_by

LONGEST = 64 * 1024
"""Bytes of a question."""
_LARGEST = 2**62
"""Numbers of a question; beyond it the store has no place for them."""


def add_shell(app: FastAPI, service: Service) -> None:
    """Answer POST /api/shell, a `Question` as JSON, from this machine: answers hold the paths of files."""

    @app.post("/api/shell", include_in_schema=False)
    async def shell(request: Request) -> dict[str, Any]:
        if not service.local or forwarded(request):
            raise HTTPException(404, "There is nothing at this address.")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LONGEST:
                raise HTTPException(413, "The question is too long.")
        try:
            values = json.loads(bytes(body))
            if not all(abs(value) < _LARGEST for value in values.values() if isinstance(value, int | float)):
                raise ValueError("a number is too large")
            question = Question.from_dict(values)
        except RecursionError as error:
            raise HTTPException(400, "This is no question (it is nested too deeply).") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise HTTPException(400, f"This is no question ({str(error)[:200]}).") from error

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
