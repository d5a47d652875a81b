"""The service: search, pictures and explanations of one store, and the page that shows them.

Nothing is read by a path from a request: pictures have ids, and an id leads to a row of the store and from there to a
file inside the indexed folder.
"""

from __future__ import annotations

import hashlib
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse, Response

import seps
from seps.retrieval.data import UnreadableImage
from seps.retrieval.data.images import resized_jpeg, upright_size
from seps.retrieval.index.search import CANDIDATES, Filters, Hit, Searcher, nanoseconds
from seps.serve import uploads
from seps.serve.guard import AwayError, Guard, install_errors
from seps.serve.models import ExplanationAnswer, Picture, Results, Status
from seps.serve.service import Service
from seps.serve.shell import add_shell

STATIC = Path(__file__).parent / "static"
FILES = {"index.html": "text/html", "style.css": "text/css", "app.js": "text/javascript"}
SHOWN_PIXELS = 1600

Identity = Annotated[str, InPath(pattern="^[0-9a-f]{20}(-[0-9a-f]{12})?$", description="Id of an image, from a search")]
Sentence = Annotated[str, Query(min_length=1, max_length=2000, description="What to look for")]
Count = Annotated[int, Query(ge=1, le=200, description="How many images")]
Candidates = Annotated[int, Query(ge=1, le=5000, description="How many images are scored exactly")]
Exact = Annotated[bool, Query(description="Score every image")]
Folder = Annotated[str | None, Query(max_length=1000, description="Only below this folder, or in this shard")]
After = Annotated[str | None, Query(max_length=40, description="Only files of this date (2024-05-31) or later")]
Before = Annotated[str | None, Query(max_length=40, description="Only files before this date, as above")]
Sure = Annotated[float | None, Query(ge=0, le=1, description="Only images of this confidence or more")]
Shorter = Annotated[int | None, Query(ge=1, le=100_000, description="Least pixels of the shorter side")]


def create_app(searcher: Searcher, *, token: str | None = None, hosts: tuple[str, ...] | None = None) -> FastAPI:
    """The application. With `token` every request must carry it; `hosts` are the names it answers to."""
    service = Service(searcher)

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
    _add_search(app, service)
    _add_images(app, service)
    _add_page(app)
    add_shell(app, service)
    return app


def chosen(folder: Folder = None, after: After = None, before: Before = None, min_size: Shorter = None) -> Filters:
    """The filters of a request. Raises HTTPException 422 for what is no date, or for dates that leave nothing."""
    try:
        times = [None if text is None else nanoseconds(text) for text in (after, before)]
    except ValueError as error:
        raise HTTPException(422, f"{error}.") from error
    if times[0] is not None and times[1] is not None and times[0] >= times[1]:
        raise HTTPException(422, f"No file can be both after {after} and before {before}. Exchange the two dates.")
    return Filters(folder, times[0], times[1], min_size)


Chosen = Annotated[Filters, Depends(chosen)]


def _add_search(app: FastAPI, service: Service) -> None:
    searcher = service.searcher

    @app.get("/api/search", response_model=Results, summary="Images that fit a sentence")
    async def search(
        q: Sentence,
        filters: Chosen,
        k: Count = 24,
        candidates: Candidates = CANDIDATES,
        exact: Exact = False,
        min_confidence: Sure = None,
    ) -> dict[str, Any]:
        if min_confidence is not None and searcher.calibration is None:
            raise HTTPException(422, "This store knows no confidence; leave out min_confidence, or index it again.")

        def work() -> list[Hit]:
            return searcher.search(
                q, k, candidates=candidates, exact=exact, filters=filters, min_confidence=min_confidence
            )

        return service.results(q, await service.run(work))

    @app.post(
        "/api/search-image",
        response_model=Results,
        summary="Images like an uploaded picture (the request's body is the picture's bytes)",
        openapi_extra={"requestBody": {"content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def search_image(
        request: Request, filters: Chosen, k: Count = 24, candidates: Candidates = CANDIDATES, exact: Exact = False
    ) -> dict[str, Any]:
        with service.uploads.place():
            data = await uploads.bounded_body(request)

            def work() -> Any:
                try:
                    upright_size(data, uploads.UPLOAD, uploads.UPLOAD_PIXELS)
                    return searcher.search_image(data, k, candidates=candidates, exact=exact, filters=filters)
                except UnreadableImage as error:
                    raise HTTPException(422, f"The picture cannot be used: {error.why}") from error

            hits = await service.run(work)
        return service.results("", hits)

    @app.get("/api/similar/{identity}", response_model=Results, summary="Images like one of the store")
    async def similar(identity: Identity, k: Count = 24) -> dict[str, Any]:
        hits = await service.run(lambda: searcher.search_image(service.original(identity)[0], k))
        return service.results("", hits)

    @app.get("/api/explain/{identity}", response_model=ExplanationAnswer, summary="Why an image has its score")
    async def explain(identity: Identity, q: Sentence) -> dict[str, Any]:
        return await service.run(lambda: service.explain(identity, q))

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
        }


def _add_images(app: FastAPI, service: Service) -> None:
    jpeg: dict[int | str, dict[str, Any]] = {200: {"content": {"image/jpeg": {}}}}

    @app.get(
        "/api/picture/{identity}", response_model=Picture, summary="An image's facts, and whether its file is there"
    )
    async def picture(identity: Identity) -> dict[str, Any]:
        return await service.run(lambda: service.picture(identity), quick=True)

    @app.get("/api/thumb/{identity}", response_class=Response, responses=jpeg, summary="Thumbnail")
    async def thumb(request: Request, identity: Identity) -> Response:
        row = await service.run(lambda: service.row(identity, ("thumbnail",)), quick=True)
        # An address with a tag means one content for ever; a bare row id means whatever is at that path now.
        age = "max-age=31536000, immutable" if "-" in identity else "no-cache"
        return _jpeg(request, row["thumbnail"], _tag(row["thumbnail"]), age)

    @app.get(
        "/api/image/{identity}", response_class=Response, responses=jpeg, summary="The image, at most 1600 pixels wide"
    )
    async def image(request: Request, identity: Identity) -> Response:
        def work() -> Response:
            data, source, row = service.original(identity)
            tag = _tag(data, SHOWN_PIXELS)
            if _known(request, tag):
                return _jpeg(request, b"", tag, "no-cache")
            try:
                # Never the file's own bytes: what is sent is a JPEG, whatever the file holds.
                return _jpeg(request, resized_jpeg(data, source, SHOWN_PIXELS), tag, "no-cache")
            except UnreadableImage as error:
                why = "The file is not an image any more. Only the thumbnail can be shown."
                raise AwayError(why, service.thumbnail_address(row)) from error

        return await service.run(work, quick=True)


def _tag(data: bytes, size: int = 0) -> str:
    """An ETag of a content, shown at some size."""
    return f'"{hashlib.sha256(data).hexdigest()[:32]}-{size}"'


def _known(request: Request, tag: str) -> bool:
    return tag in [text.strip() for text in request.headers.get("if-none-match", "").split(",")]


def _jpeg(request: Request, data: bytes, tag: str, age: str) -> Response:
    """A JPEG to keep, or 304 where the browser has it already."""
    headers = {"Cache-Control": f"private, {age}", "ETag": tag, "Accept-Ranges": "none"}
    if _known(request, tag):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="image/jpeg", headers=headers)


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
