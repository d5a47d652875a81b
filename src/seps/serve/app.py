"""The service: search, pictures and explanations of one store, and the page that shows them.

Nothing is read by a path from a request: pictures have ids, and an id leads to a row of the store and from there to a
file inside the indexed folder.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse, Response

import seps
from seps.retrieval.data import UnreadableImage, read_source
from seps.retrieval.explanation import Explainer, Explanation
from seps.retrieval.search import CANDIDATES, Filters, Searcher, nanoseconds
from seps.retrieval.store_rows import STATE
from seps.retrieval.stored import restore
from seps.retrieval.thumbnails import resized_jpeg, upright_size
from seps.serve.guard import install_errors, install_guard
from seps.serve.models import ExplanationAnswer, Results, Status

STATIC = Path(__file__).parent / "static"
FILES = {"index.html": "text/html", "style.css": "text/css", "app.js": "text/javascript"}
UPLOAD_BYTES, UPLOAD_PIXELS = 20 * 2**20, 50_000_000
SHOWN_PIXELS = 1600
WAITING = 200
Result = TypeVar("Result")

Identity = Annotated[str, InPath(pattern="^[0-9a-f]{20}$", description="Id of an image, from a search")]
Sentence = Annotated[str, Query(min_length=1, max_length=2000, description="What to look for")]
Count = Annotated[int, Query(ge=1, le=200, description="How many images")]
Candidates = Annotated[int, Query(ge=1, le=5000, description="How many images are scored exactly")]
Exact = Annotated[bool, Query(description="Score every image")]
Folder = Annotated[str | None, Query(max_length=1000, description="Only below this folder, or in this shard")]
After = Annotated[str | None, Query(max_length=40, description="Only files of this date (2024-05-31) or later")]
Before = Annotated[str | None, Query(max_length=40, description="Only files before this date, as above")]
Shorter = Annotated[int | None, Query(ge=1, le=100_000, description="Least pixels of the shorter side")]


class Service:
    """The work behind the endpoints, a few requests at a time on threads of its own."""

    def __init__(self, searcher: Searcher, workers: int = 2) -> None:
        self.searcher = searcher
        self.explainer = Explainer(searcher.model, searcher.scorer) if searcher.scorer.net is not None else None
        # Each thread that computes keeps memory of its own: few threads keep it flat, whatever the clients do.
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="seps-serve")
        self.quick = ThreadPoolExecutor(2, thread_name_prefix="seps-files")
        self._waiting = 0
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], Result], *, quick: bool = False) -> Result:
        """Do `work` on a pool; pictures (`quick`) do not wait for searches.

        Raises HTTPException 503 when too many wait.
        """
        with self._lock:
            if self._waiting >= WAITING:
                raise HTTPException(503, "Too many requests are waiting. Try again in a moment.")
            self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.quick if quick else self.pool, work)
        finally:
            with self._lock:
                self._waiting -= 1

    def row(self, identity: str, columns: tuple[str, ...]) -> dict[str, Any]:
        """Some columns of an image. Raises HTTPException 404."""
        row = self.searcher.store.get(identity, columns)
        if row is None:
            raise HTTPException(404, f"There is no image {identity} in this store; it may have been removed.")
        return row

    def original(self, identity: str) -> tuple[bytes, Any]:
        """The bytes of an image's file, and where they came from. Raises HTTPException 404."""
        source = self.searcher.image_source(self.row(identity, ("path", "member")))
        try:
            return read_source(source), source
        except UnreadableImage as error:
            raise HTTPException(404, f"The file of image {identity} cannot be read any more.") from error

    def explain(self, identity: str, text: str) -> dict[str, Any]:
        """The explanation of one image and one sentence."""
        if self.explainer is None:
            raise HTTPException(501, "The model of this store selects no patches, so there is nothing to explain.")
        columns = ("path", "member", "width", "height", "dense", *STATE)
        table = self.searcher.store.table(identity, columns)
        if not table.num_rows:
            raise HTTPException(404, f"There is no image {identity} in this store; it may have been removed.")
        row = table.to_pylist()[0]
        image = restore(table, self.searcher.store.settings, self.searcher.model.device)
        found = self.explainer.stored(image, text, row["dense"])
        facts = {name: row[name] for name in ("path", "member", "width", "height")}
        return {"id": identity, **facts, **_rounded(found)}


def _rounded(found: Explanation) -> dict[str, Any]:
    def shorten(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 7)
        if isinstance(value, dict):
            return {name: shorten(inner) for name, inner in value.items()}
        return [shorten(inner) for inner in value] if isinstance(value, list | tuple) else value

    plain: dict[str, Any] = shorten(found.as_dict())
    return plain


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
    install_guard(app, token, hosts)
    _add_search(app, service)
    _add_images(app, service)
    _add_page(app)
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
        q: Sentence, filters: Chosen, k: Count = 24, candidates: Candidates = CANDIDATES, exact: Exact = False
    ) -> dict[str, Any]:
        hits = await service.run(lambda: searcher.search(q, k, candidates=candidates, exact=exact, filters=filters))
        return {"query": q, "results": [hit.as_dict() for hit in hits]}

    @app.post(
        "/api/search-image",
        response_model=Results,
        summary="Images like an uploaded picture (the request's body is the picture's bytes)",
        openapi_extra={"requestBody": {"content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def search_image(
        request: Request, filters: Chosen, k: Count = 24, candidates: Candidates = CANDIDATES, exact: Exact = False
    ) -> dict[str, Any]:
        data = await bounded_body(request)

        def work() -> Any:
            try:
                upright_size(data, _UPLOAD, UPLOAD_PIXELS)
                return searcher.search_image(data, k, candidates=candidates, exact=exact, filters=filters)
            except UnreadableImage as error:
                raise HTTPException(422, f"The picture cannot be used: {error.why}") from error

        hits = await service.run(work)
        return {"query": "", "results": [hit.as_dict() for hit in hits]}

    @app.get("/api/similar/{identity}", response_model=Results, summary="Images like one of the store")
    async def similar(identity: Identity, k: Count = 24) -> dict[str, Any]:
        hits = await service.run(lambda: searcher.search_image(service.original(identity)[0], k))
        return {"query": "", "results": [hit.as_dict() for hit in hits]}

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
    kept = {"Cache-Control": "private, max-age=3600"}
    jpeg: dict[int | str, dict[str, Any]] = {200: {"content": {"image/jpeg": {}}}}

    @app.get("/api/thumb/{identity}", response_class=Response, responses=jpeg, summary="Thumbnail")
    async def thumb(identity: Identity) -> Response:
        row = await service.run(lambda: service.row(identity, ("thumbnail",)), quick=True)
        return Response(row["thumbnail"], media_type="image/jpeg", headers=kept)

    @app.get(
        "/api/image/{identity}", response_class=Response, responses=jpeg, summary="The image, at most 1600 pixels wide"
    )
    async def image(identity: Identity) -> Response:
        def work() -> bytes:
            data, source = service.original(identity)
            try:
                # Never the file's own bytes: what is sent is a JPEG, whatever the file holds.
                return resized_jpeg(data, source, SHOWN_PIXELS)
            except UnreadableImage as error:
                raise HTTPException(404, f"The file of image {identity} is not an image any more.") from error

        return Response(await service.run(work, quick=True), media_type="image/jpeg", headers=kept)


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


class _Upload:
    """Stands for an uploaded picture in messages."""

    def __str__(self) -> str:
        return "that was sent"


_UPLOAD: Any = _Upload()


async def bounded_body(request: Request) -> bytes:
    """The body of a request. Raises HTTPException 413 as soon as it is known to be too long, 400 if it is empty."""
    limit = f"The picture is larger than {UPLOAD_BYTES // 2**20} MiB. Make it smaller."
    try:
        stated = int(request.headers.get("content-length", "0"))
    except ValueError:
        raise HTTPException(400, "The length of the request is not a number.") from None
    if stated > UPLOAD_BYTES:
        raise HTTPException(413, limit)
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > UPLOAD_BYTES:
            raise HTTPException(413, limit)
    if not parts:
        raise HTTPException(400, "The request holds no picture. Send its bytes as the request's body.")
    return bytes(parts)
