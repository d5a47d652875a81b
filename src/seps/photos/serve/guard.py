"""Who may ask, and how a refused or failed request is answered: always with a sentence."""

from __future__ import annotations

import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import urlencode, urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seps.photos.store.rows import StoreError

COOKIE = "seps_token"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PAGES = ("/", "/docs")
"""What a link on another site may open: documents that hold nothing of the store."""
OPEN = ("/health",)
"""What programs may ask without a token and by any name: it says nothing of the store."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::\d*)?", re.I)
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_PLAIN = {
    400: "The Range header asks for no part of the file. Write it like bytes=0-99.",
    416: "The file is shorter than the requested range.",
}
"""Errors that the libraries below answer themselves, with plain text."""
_PORTS = {"http": ":80", "https": ":443"}
log = logging.getLogger("seps.photos.serve")


class AwayError(HTTPException):
    """The file of an image cannot be shown; its thumbnail can."""

    def __init__(self, why: str, thumbnail: str) -> None:
        super().__init__(404, why)
        self.thumbnail = thumbnail


def host_name(header: str) -> str:
    """The name in a Host header, without its port: `[::1]:80` -> `::1`; empty for what is no such header."""
    parts = _HOST.fullmatch(header)
    return parts[1].strip("[]").lower() if parts else ""


def forwarded(request: Request) -> bool:
    """Whether a proxy passed the request on: its client may be on another machine."""
    return any(name in request.headers for name in _FORWARDED)


def from_elsewhere(request: Request) -> bool:
    """Whether a page of another origin sent the request: its address, picture, form or script.

    Browsers say so in `Sec-Fetch-Site`, which pages cannot change. Where it is missing (old browsers, and plain HTTP
    beyond this machine), `Origin` or `Referer` must name the host that was asked; programs send none of the three.
    """
    headers = request.headers
    opening = request.method in ("GET", "HEAD") and request.scope["path"] in PAGES
    site = headers.get("sec-fetch-site")
    if site is not None:
        document = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return site not in ("same-origin", "none") and not (opening and document)
    named = headers.get("origin")
    if named is None:
        named = None if opening else headers.get("referer")
    return named is not None and _place(named) != _place(f"{request.url.scheme}://{headers.get('host', '')}")


def _place(address: str) -> str:
    """Host and port of an address; of what is none ("null"), the empty text."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""
    return parts.netloc.rpartition("@")[2].lower().removesuffix(_PORTS.get(parts.scheme, "\0"))


class Guard:
    """Asks for the token, refuses other sites and host names, adds the headers that keep a browser honest.

    The host check is for a service on the loopback address without a token: a page elsewhere could have its own
    name point there and read the answers. Every answer passes here, those to failures as well; HEAD is answered
    as GET without a body.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: tuple[str, ...] | None, root_path: str = "") -> None:
        self.app, self.token, self.hosts, self.root_path = app, token, hosts, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        head, started = scope["method"] == "HEAD", False
        if head:
            scope = {**scope, "method": "GET"}
        # A proxy may take the prefix away, or leave it.
        prefix, path = self.root_path, scope["path"]
        if prefix and path.startswith(f"{prefix}/"):
            scope = {**scope, "path": path[len(prefix) :]}
        elif prefix and path == prefix:
            # The addresses of the page begin where the page is, so its address needs the last slash.
            query = scope["query_string"].decode("latin-1")
            moved = f"{prefix}/{f'?{query}' if query else ''}"
            await RedirectResponse(moved, 308, {**_HEADERS})(scope, receive, send)
            return

        body: bytes | None = None

        async def sending(message: Message) -> None:
            nonlocal started, body
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                if message["status"] >= 400 and headers.get("content-type") != JSONResponse.media_type:
                    answer = sentence(message["status"], _PLAIN.get(message["status"], "The request failed."))
                    headers.update(answer.headers)
                    body = bytes(answer.body)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            elif message["type"] == "http.response.body":
                if body is not None:
                    message, body = {**message, "body": body}, b""
                if head:
                    message = {**message, "body": b""}
            await send(message)

        answer: ASGIApp = _refusal(Request(scope), self.token, self.hosts, prefix) or self.app
        try:
            await answer(scope, receive, sending)
        except ClientDisconnect:
            return  # nobody is there to answer
        except Exception as error:
            log.error("%s %r failed", scope["method"], scope["path"], exc_info=error)
            if started:
                raise
            await sentence(500, "The service failed on this request; its log says why.")(scope, receive, sending)


def _refusal(request: Request, token: str | None, hosts: tuple[str, ...] | None, root_path: str) -> Response | None:
    path = request.scope["path"]
    if hosts is not None and path not in OPEN and host_name(request.headers.get("host", "")) not in hosts:
        text = f"This service answers to {', '.join(hosts)} only. For another name start it with --allow-host NAME."
        return sentence(400, text)
    header = request.headers.get("authorization", "")
    if token is not None and header.startswith("Bearer ") and _same(header.removeprefix("Bearer "), token):
        return None  # no page of another site can send this header
    if from_elsewhere(request):
        return sentence(403, "A page of another site sent the request. Open the page of this service.")
    if token is None or path in OPEN:
        return None
    given = request.query_params.get("token")
    if given is not None and _same(given, token) and path == "/":
        # The page's address keeps no secret: the token moves into a cookie that scripts cannot read.
        rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        answer = RedirectResponse("./" + ("?" + urlencode(rest) if rest else ""), 303)
        answer.set_cookie(
            COOKIE,
            token,
            path=root_path or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
            max_age=30 * 86400,
        )
        return answer
    if _same(request.cookies.get(COOKIE, ""), token):
        return None
    return sentence(401, "A token is needed: open /?token=TOKEN, or send the header Authorization: Bearer TOKEN.")


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), token.encode("utf-8"))


def sentence(status: int, text: str, headers: Mapping[str, str] | None = None, **more: Any) -> JSONResponse:
    """An error as the API answers it."""
    waiting = {"Retry-After": "2"} if status == 503 else {}
    return JSONResponse({"error": text, **more}, status, {**waiting, **(headers or {})})


def install_errors(app: FastAPI, without_places: Callable[[str], str]) -> None:
    """Answer every error with `{"error": sentence}`; `without_places` takes the paths of this machine out of it."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # what it is installed for
        status, text = error.status_code, str(error.detail)
        names = {404: "There is nothing at this address.", 405: "This address does not take that method."}
        if text in ("Not Found", "Method Not Allowed"):
            text = names[status]
        more = {"thumbnail": error.thumbnail} if hasattr(error, "thumbnail") else {}  # of AwayError
        return sentence(status, text, error.headers, **more)  # such as Allow, of a method

    async def malformed(_: Request, error: Exception) -> Response:
        faults = cast(RequestValidationError, error).errors()
        parts = [f"{fault['loc'][-1]}: {fault['msg'][:1].lower()}{fault['msg'][1:]}" for fault in faults]
        return sentence(422, f"The request is not well formed ({'; '.join(parts)}).")

    def told(status: int) -> Any:
        async def answer(_: Request, error: Exception) -> Response:
            return sentence(status, without_places(str(error)))

        return answer

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(ValueError, told(400))
    app.add_exception_handler(StoreError, told(503))


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
