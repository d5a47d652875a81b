"""What the schema of the API says beside the endpoints: errors, the token, and that other parameters are refused."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from seps.photos.serve.guard import COOKIE, OPEN
from seps.photos.serve.models import Failure

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Failure, "description": "The request cannot be answered"},
    401: {"model": Failure, "description": "The token is missing or wrong"},
    403: {"model": Failure, "description": "A page of another site sent the request"},
    404: {"model": Failure, "description": "There is no such picture, folder or address"},
    410: {"model": Failure, "description": "The picture has changed since, or is of another store"},
    422: {"model": Failure, "description": "A parameter or the picture sent is not valid"},
    503: {"model": Failure, "description": "Too many requests, or the store is away"},
}
_METHODS = ("get", "post")


def describe_token(app: FastAPI) -> None:
    """Say in the schema that requests need the token: as a header, or in the cookie that the page sets."""
    schema = app.openapi()
    schema["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "The token of seps serve"},
        "cookie": {"type": "apiKey", "in": "cookie", "name": COOKIE, "description": "Set by opening /?token=TOKEN"},
    }
    schema["security"] = [{"token": []}, {"cookie": []}]
    for path in OPEN:
        for method in _METHODS:
            if method in schema["paths"].get(path, {}):
                schema["paths"][path][method]["security"] = []
