"""The service: search, pictures and explanations of one store, and the page that shows them.

Nothing is read by a path from a request: pictures have ids, and an id leads to a row of the store and from there to a
file inside the indexed folder.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse, Response

import seps
from seps.retrieval.index.search import Searcher
from seps.serve.guard import Guard, install_errors
from seps.serve.kept import selects_patches
from seps.serve.models import Status
from seps.serve.picture_routes import add_pictures
from seps.serve.search_routes import add_search
from seps.serve.service import Service
from seps.serve.shell import add_shell

STATIC = Path(__file__).parent / "static"
FILES = {
    "index.html": "text/html",
    "style.css": "text/css",
    **dict.fromkeys(("theme.js", "app.js", "api.js", "grid.js", "detail.js"), "text/javascript"),
}


def create_app(searcher: Searcher, *, token: str | None = None, hosts: tuple[str, ...] | None = None) -> FastAPI:
    """The application. With `token` every request must carry it; `hosts` are the names it answers to."""
    service = Service(searcher, local=hosts is not None)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        yield
        for pool in (service.pool, service.quick):
            pool.shutdown(wait=True, cancel_futures=True)

    # FastAPI's own documentation pages load scripts from elsewhere; /api is ours.
    app = FastAPI(
        title="SEPS",
        version=seps.__version__,
        description="Search pictures by sentence or picture, and see why.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
    )
    install_errors(app)
    app.add_middleware(Guard, token=token, hosts=hosts)
    add_search(app, service)
    add_pictures(app, service)
    _add_status(app, service)
    _add_page(app)
    add_shell(app, service)
    return app


def _add_status(app: FastAPI, service: Service) -> None:
    searcher = service.searcher

    @app.get("/api/status", response_model=Status, summary="What is being served")
    async def status() -> dict[str, Any]:
        settings = searcher.store.settings
        return {
            "images": await service.run(lambda: len(searcher.store), quick=True),
            "folder": Path(settings.root).name,
            "model": Path(settings.model).name,
            "grid": settings.grid,
            "version": seps.__version__,
            "explains": service.explainer is not None,
            "keeps": selects_patches(searcher.scorer),
        }


def _add_page(app: FastAPI) -> None:
    def static(name: str) -> Response:
        return Response((STATIC / name).read_bytes(), media_type=FILES[name], headers={"Cache-Control": "no-cache"})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return static("index.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in FILES:
            raise HTTPException(404, "There is no such file.")
        return static(name)

    @app.get("/api", include_in_schema=False)
    async def documentation() -> HTMLResponse:
        from seps.serve.models import documentation_page

        return HTMLResponse(documentation_page(app.openapi()))
