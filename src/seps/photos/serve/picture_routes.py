"""The addresses of single pictures: facts, thumbnails, originals, explanations."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from fastapi.responses import JSONResponse, Response

from seps.images.decoding import resized_jpeg
from seps.images.shards import UnreadableImage
from seps.photos.serve.guard import AwayError, forwarded
from seps.photos.serve.models import ExplanationAnswer, KeptPatches, Picture
from seps.photos.serve.search_routes import Identity, Sentence
from seps.photos.serve.service import Service

SHOWN_PIXELS, LARGE_PIXELS = 1600, 4096
_FOR_EVER = "max-age=31536000, immutable"


def add_pictures(app: FastAPI, service: Service) -> None:
    """Add the addresses."""
    jpeg: dict[int | str, dict[str, Any]] = {200: {"content": {"image/jpeg": {}}}}

    @app.get(
        "/api/picture/{identity}", response_model=Picture, summary="An image's facts, and whether its file is there"
    )
    async def picture(request: Request, identity: Identity) -> dict[str, Any]:
        local = not forwarded(request)
        return await service.run(lambda: service.picture(identity, local=local), quick=True)

    @app.get("/api/thumb/{identity}", response_class=Response, responses=jpeg, summary="Thumbnail")
    async def thumb(request: Request, identity: Identity) -> Response:
        row = await service.run(lambda: service.row(identity, ("thumbnail",)), quick=True)
        # An address with a tag means one content for ever; a bare row id means whatever is at that path now.
        age = _FOR_EVER if "-" in identity else "no-cache"
        return _jpeg(request, row["thumbnail"], _tag(row["thumbnail"]), age)

    @app.get("/api/upload/{upload}", response_class=Response, responses=jpeg, summary="Thumbnail of a picture sent")
    async def uploaded(request: Request, upload: Annotated[str, InPath(pattern="^[0-9a-f]{32}$")]) -> Response:
        thumbnail = service.uploaded(upload).thumbnail
        return _jpeg(request, thumbnail, _tag(thumbnail), _FOR_EVER)

    @app.get(
        "/api/image/{identity}", response_class=Response, responses=jpeg, summary="The image, at most 1600 pixels wide"
    )
    async def image(
        request: Request,
        identity: Identity,
        large: Annotated[bool, Query(description="At most 4096 pixels, to look closely")] = False,
    ) -> Response:
        pixels = LARGE_PIXELS if large else SHOWN_PIXELS

        def work() -> Response:
            data, source, row = service.original(identity)
            tag = _tag(data, pixels)
            if _known(request, tag):
                return _jpeg(request, b"", tag, "no-cache")
            try:
                # Never the file's own bytes: what is sent is a JPEG, whatever the file holds.
                return _jpeg(request, resized_jpeg(data, source, pixels), tag, "no-cache")
            except UnreadableImage as error:
                why = "The file is not an image any more. Only the thumbnail can be shown."
                raise AwayError(why, service.thumbnail_address(row)) from error

        return await service.run(work, quick=True)

    @app.get(
        "/api/original/{identity}",
        response_class=Response,
        responses={200: {"content": {"image/*": {}, "application/octet-stream": {}}}},
        summary="The file itself, as it is now, to open or to save",
    )
    async def original(
        identity: Identity,
        download: Annotated[bool, Query(description="To save, never to open in the browser")] = False,
    ) -> Response:
        return await service.run(lambda: service.download(identity, attached=download), quick=True)

    @app.get("/api/explain/{identity}", response_model=ExplanationAnswer, summary="Why an image has its score")
    async def explain(identity: Identity, q: Sentence) -> dict[str, Any]:
        return await service.run(lambda: service.explain(identity, q))

    @app.get("/api/kept/{identity}", response_model=KeptPatches, summary="Which patches of an image a sentence keeps")
    async def kept(identity: Identity, q: Sentence) -> Response:
        patches = await service.run(lambda: service.kept(identity, q))
        # The tag is that of the model and of the file: with it the answer stays the same.
        age = "private, max-age=86400" if "-" in identity else "no-store"
        return JSONResponse(patches, headers={"Cache-Control": age})


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
