"""Who may ask, and how a refused or failed request is answered: always with a sentence."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from urllib.parse import urlencode

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

COOKIE = "seps_token"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
Next = Callable[[Request], Awaitable[Response]]
log = logging.getLogger("seps.serve")


def host_name(header: str) -> str:
    """The name in a Host header, without its port: `[::1]:80` -> `::1`."""
    if header.startswith("["):
        return header[1:].split("]")[0]
    return header.rsplit(":", 1)[0] if ":" in header else header


def install_guard(app: FastAPI, token: str | None, hosts: tuple[str, ...] | None) -> None:
    """Ask for the token, refuse other host names, and add the headers that keep a browser honest.

    The host check is for a service on the loopback address without a token: a page elsewhere could have its own
    name point there and read the answers.
    """

    @app.middleware("http")
    async def guard(request: Request, proceed: Next) -> Response:
        response = _refusal(request, token, hosts) or await proceed(request)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response


def _refusal(request: Request, token: str | None, hosts: tuple[str, ...] | None) -> Response | None:
    if hosts is not None and host_name(request.headers.get("host", "")) not in hosts:
        return sentence(400, f"This service answers to {', '.join(hosts)} only.")
    if token is None:
        return None
    given = request.query_params.get("token")
    if given is not None and _same(given, token) and request.url.path == "/":
        # The page's address keeps no secret: the token moves into a cookie that scripts cannot read.
        rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        answer = RedirectResponse("/" + ("?" + urlencode(rest) if rest else ""), 303)
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", max_age=30 * 86400)
        return answer
    header = request.headers.get("authorization", "")
    carried = [request.cookies.get(COOKIE, ""), header.removeprefix("Bearer ") if header.startswith("Bearer ") else ""]
    if any(_same(value, token) for value in carried):
        return None
    return sentence(401, "A token is needed: open /?token=TOKEN, or send the header Authorization: Bearer TOKEN.")


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), token.encode("utf-8"))


def sentence(status: int, text: str) -> JSONResponse:
    """An error as the API answers it."""
    return JSONResponse({"error": text}, status)


def install_errors(app: FastAPI) -> None:
    """Answer every error with `{"error": sentence}`."""

    async def refused(_: Request, error: Exception) -> Response:
        status, text = (error.status_code, str(error.detail)) if isinstance(error, HTTPException) else (500, "")
        names = {404: "There is nothing at this address.", 405: "This address does not take that method."}
        if text in ("Not Found", "Method Not Allowed"):
            text = names[status]
        return sentence(status, text)

    async def malformed(_: Request, error: Exception) -> Response:
        faults = error.errors() if isinstance(error, RequestValidationError) else []
        parts = [f"{fault['loc'][-1]}: {fault['msg'][:1].lower()}{fault['msg'][1:]}" for fault in faults]
        return sentence(422, f"The request is not well formed ({'; '.join(parts)}).")

    async def mistaken(_: Request, error: Exception) -> Response:
        return sentence(400, str(error))

    async def failed(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return sentence(500, "The service failed on this request; its log says why.")

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(ValueError, mistaken)
    app.add_exception_handler(Exception, failed)
