"""The service: search, pictures and explanations of one store, and the page that shows them.

Nothing is read by a path from a request: pictures have ids, and an id leads to a row of the store and from there to a
file inside the indexed folder.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute

import seps
from seps.photos.library import Library
from seps.photos.serve.guard import Guard, install_errors, only_known_parameters
from seps.photos.serve.models import Health, Status, documentation_page
from seps.photos.serve.openapi import ERRORS, describe_token
from seps.photos.serve.picture_routes import add_pictures
from seps.photos.serve.search_routes import add_search
from seps.photos.serve.service import Service

STATIC = Path(__file__).parent / "static"
FILES = {
    "index.html": "text/html",
    "style.css": "text/css",
    **dict.fromkeys(("theme.js", "app.js", "api.js", "grid.js", "detail.js", "viewer.js"), "text/javascript"),
}


def create_app(
    library: Library,
    *,
    token: str | None = None,
    hosts: tuple[str, ...] | None = None,
    root_path: str = "",
    local: bool = False,
) -> FastAPI:
    """The application.

    With `token` every request must carry it. `hosts` are the names that it answers to (None: all), `root_path` is the
    prefix of its addresses behind a proxy. With `local` it listens on this machine alone: such clients see where files
    are.
    """
    service = Service(library, local=local, root_path=root_path)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        yield
        for pool in (service.pool, service.quick):
            pool.shutdown(wait=True, cancel_futures=True)

    def name_of(route: APIRoute) -> str:
        return route.name

    # FastAPI's own documentation pages load scripts from elsewhere; /docs is ours.
    app = FastAPI(
        title="SEPS",
        version=seps.__version__,
        description="Search pictures by sentence or picture, and see why.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        servers=[{"url": root_path}] if root_path else None,
        # A redirect would name the address that the proxy asked for, not that of the browser.
        redirect_slashes=False,
        generate_unique_id_function=name_of,
        responses=ERRORS,
        dependencies=[Depends(only_known_parameters)],
        lifespan=lifespan,
    )
    install_errors(app, service.without_places)
    app.add_middleware(Guard, token=token, hosts=hosts, root_path=root_path)
    add_search(app, service)
    add_pictures(app, service)
    _add_status(app, service)
    _add_page(app)
    if token is not None:
        describe_token(app)
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
            "grid": settings.layout.grid,
            "version": seps.__version__,
            "explains": service.explainer is not None,
            "keeps": searcher.engine.traits.selects_patches,
        }

    @app.get("/health", response_model=Health, summary="Whether the service and its store are there; needs no token")
    async def health() -> dict[str, str]:
        await service.run(lambda: None, quick=True)
        return {"status": "ok"}


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

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> HTMLResponse:
        return HTMLResponse(documentation_page(app.openapi()))
