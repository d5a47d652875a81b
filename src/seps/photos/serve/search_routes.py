"""The addresses that search: by a sentence, a picture, or both; page by page."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi import Path as InPath
from fastapi import Query as InQuery

from seps.images.dates import nanoseconds
from seps.images.shards import UnreadableImage
from seps.photos.search.query import CANDIDATES, Query, Sort, Term, terms_of
from seps.photos.serve import uploads
from seps.photos.serve.models import Listing, Overview, Results, Uploaded
from seps.photos.serve.service import Service
from seps.photos.serve.uploads import UPLOADED
from seps.photos.store.filters import Filters, place_of

_ADDRESS = "^[0-9a-f]{20}(-[0-9a-f]{12})?$"
_MOST = 5000

Identity = Annotated[str, InPath(pattern=_ADDRESS, description="Id of an image, from a search")]
Sentence = Annotated[str, InQuery(min_length=1, max_length=2000, description="What to look for")]
Words = Annotated[str | None, InQuery(min_length=1, max_length=2000, description="What to look for")]
Like = Annotated[str | None, InQuery(pattern=_ADDRESS, description="Id of an image to compare with")]
Upload = Annotated[str | None, InQuery(pattern="^[0-9a-f]{32}$", description="Id of a picture sent to /api/upload")]
Weight = Annotated[
    float, InQuery(ge=0, le=1, description="Share of the picture beside a sentence; 0: the sentence alone")
]
Count = Annotated[int, InQuery(ge=1, le=200, description="How many images per page")]
Offset = Annotated[int, InQuery(ge=0, le=20_000, description="Results before this page; see `next` of the page before")]
Candidates = Annotated[
    int, InQuery(ge=1, le=_MOST, description="How many images are scored exactly; no more can be found")
]
Exact = Annotated[bool, InQuery(description="Score every image")]
Order = Annotated[Sort, InQuery(description="By score, or by date: the good matches, then the rest of the 24 best")]
ByDate = Annotated[Literal["newest", "oldest"], InQuery(description="newest or oldest first")]
Fold = Annotated[bool, InQuery(description="Put near-duplicates among the results behind the best of them")]
Folder = Annotated[str | None, InQuery(max_length=1000, description="Only below this folder, or in this shard")]
Since = Annotated[str | None, InQuery(max_length=40, description="Only files of this date (2024-05-31) or later")]
Until = Annotated[str | None, InQuery(max_length=40, description="Only files before this date, as above")]
Sure = Annotated[float | None, InQuery(ge=0, le=1, description="Only images of this confidence or more")]
Shorter = Annotated[int | None, InQuery(ge=1, le=100_000, description="Least pixels of the shorter side")]
Near = Annotated[str | None, InQuery(max_length=60, description="Only photos taken near latitude,longitude in degrees")]
Within = Annotated[float | None, InQuery(gt=0, le=21_000, description="Kilometres around `near`; default 10")]


def chosen(
    folder: Folder = None,
    since: Since = None,
    until: Until = None,
    min_size: Shorter = None,
    near: Near = None,
    within: Within = None,
) -> Filters:
    """The filters of a request. Raises HTTPException 422 for what is no date or place, or leaves nothing."""
    try:
        first, last = (None if text is None else nanoseconds(text) for text in (since, until))
        return Filters(folder, first, last, min_size, None if near is None else place_of(near), within)
    except ValueError as error:
        raise HTTPException(422, f"{str(error).rstrip('.')}.") from error


def _terms(text: str | None, picture: str | None = None, weight: float = 0.5) -> tuple[Term, ...]:
    """The sentences, each of the weight 1 - `weight`, and the picture, if any, last."""
    terms = terms_of(text, () if picture is None else (picture,))
    if picture is None:
        return terms
    return tuple(replace(term, weight=weight if term.is_image else 1 - weight) for term in terms)


Chosen = Annotated[Filters, Depends(chosen)]
_FILE = {"type": "string", "format": "binary"}
_FORM = {"type": "object", "properties": {"file": _FILE}, "required": ["file"]}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"image/*": {"schema": _FILE}, "multipart/form-data": {"schema": _FORM}},
    }
}


def add_search(app: FastAPI, service: Service) -> None:
    """Add the addresses."""
    searcher = service.searcher

    @app.get("/api/search", response_model=Results, summary="Images that fit a sentence, a picture, or both")
    async def search(
        filters: Chosen,
        q: Words = None,
        like: Like = None,
        upload: Upload = None,
        weight: Weight = 0.5,
        k: Count = 24,
        offset: Offset = 0,
        candidates: Candidates = CANDIDATES,
        exact: Exact = False,
        min_confidence: Sure = None,
        sort: Order = "score",
        fold: Fold = False,
    ) -> dict[str, Any]:
        if q is None and like is None and upload is None:
            raise HTTPException(422, "The query is empty. Give a sentence (q), a picture (like or upload), or both.")
        if like is not None and upload is not None:
            raise HTTPException(422, "One picture can be compared with: give like or upload, not both.")
        if min_confidence is not None and (like is not None or upload is not None):
            raise HTTPException(422, "Confidence is that of a sentence; leave out min_confidence beside a picture.")
        if min_confidence is not None and searcher.calibration is None:
            raise HTTPException(
                422, "This store has no confidence calibration; leave out min_confidence, or index it again."
            )
        picture = like if upload is None else UPLOADED + upload
        depth = max(k, candidates)
        query = Query(
            _terms(q, picture, weight),
            filters,
            depth,
            depth,
            exact=exact,
            sort=sort,
            fold=fold,
            min_confidence=min_confidence,
            text=q or "",
        )
        return await service.run(lambda: service.search(query, offset, k))

    @app.get("/api/similar/{identity}", response_model=Results, summary="Images like one of the store")
    async def similar(
        identity: Identity,
        filters: Chosen,
        k: Count = 24,
        offset: Offset = 0,
        sort: Order = "score",
        fold: Fold = False,
    ) -> dict[str, Any]:
        query = Query(_terms(None, identity), filters, max(k, CANDIDATES), sort=sort, fold=fold)
        return await service.run(lambda: service.search(query, offset, k))

    async def sent(request: Request, work: Any) -> Any:
        """`work` on the picture in the body of a request."""
        with service.uploads.place():
            data = uploads.picture_in(await uploads.bounded_body(request), request.headers.get("content-type", ""))

            def careful() -> Any:
                try:
                    return work(data)
                except UnreadableImage as error:
                    raise HTTPException(422, f"The picture cannot be used: {error.why}") from error

            return await service.run(careful)

    @app.post(
        "/api/search-image",
        response_model=Results,
        summary="Images like an uploaded picture (the body is its bytes, or a form with one file)",
        openapi_extra=_BODY,
    )
    async def search_image(
        request: Request,
        filters: Chosen,
        q: Words = None,
        weight: Weight = 0.5,
        k: Count = 24,
        candidates: Candidates = CANDIDATES,
        exact: Exact = False,
    ) -> dict[str, Any]:
        depth = max(k, candidates)

        def work(data: bytes) -> dict[str, Any]:
            picture = UPLOADED + service.upload(data)
            return service.search(Query(_terms(q, picture, weight), filters, depth, depth, exact, text=q or ""), 0, k)

        answer: dict[str, Any] = await sent(request, work)
        return answer

    @app.post(
        "/api/upload",
        response_model=Uploaded,
        summary="Send a picture to search by, as for /api/search-image; the service remembers the last 64",
        openapi_extra=_BODY,
    )
    async def upload(request: Request) -> dict[str, str]:
        identity: str = await sent(request, service.upload)
        return {"upload": identity, "thumbnail": f"{service.root_path}/api/upload/{identity}"}

    @app.get("/api/pictures", response_model=Listing, summary="Images by date, without a query; the first 10,000")
    async def pictures(filters: Chosen, k: Count = 24, offset: Offset = 0, sort: ByDate = "newest") -> dict[str, Any]:
        return await service.run(lambda: service.listing(filters, sort, offset, k))

    @app.get("/api/overview", response_model=Overview, summary="What the store holds: folders, dates, sentences to try")
    async def overview() -> dict[str, Any]:
        return await service.run(service.overview)
