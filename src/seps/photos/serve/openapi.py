"""What the schema of the API says beside the endpoints: errors, the token, and that other parameters are refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastapi import FastAPI, HTTPException, Request

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


async def only_known_parameters(request: Request) -> None:
    """Raise HTTPException 422 for parameters that the schema does not have, and for those given twice."""
    methods = request.app.openapi()["paths"].get(request.scope["route"].path)
    if methods is None:
        return  # the page: its address is its own
    about = methods.get(request.method.lower(), {})
    names = [each["name"] for each in about.get("parameters", []) if each["in"] == "query"]
    given = Counter(name for name, _ in request.query_params.multi_items())
    for name, count in given.items():
        if name not in names:
            known = f"It takes {', '.join(names)}" if names else "It takes none"
            raise HTTPException(422, f"This address takes no parameter {name[:100]!r}. {known}.")
        if count > 1:
            raise HTTPException(422, f"The parameter {name} is given {count} times. Give it once.")


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
