"""Descriptions from any server that speaks the OpenAI chat protocol with images (vLLM and others).

urllib and threads are enough: a request takes seconds, and nothing else has to be installed.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import partial
from typing import Any

from seps.retrieval.data import ImageSource

from .backends import Answer, Fatal, Fault, Finish, Health, Rejected
from .config import BackendConfig, Sampling
from .pictures import data_url
from .throttle import Throttle

MAX_ANSWER = 1 << 24
# Codes that say nothing about the next try; everything else in 4xx is about the request itself.
_AGAIN = frozenset({408, 409, 425, 429})
_NO_IMAGE_CAN = {
    401: "Give a valid key with --api-key-file.",
    403: "This key may not use the model.",
    404: "Check the address and the model's name.",
    405: "Check the address: it should end like /v1.",
}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    # urllib would carry the API key along to whatever host a redirect names.
    def redirect_request(self, *_: Any) -> None:
        return None


class OpenAIBackend:
    """Sends each picture as a data URL to `{url}/chat/completions`."""

    name = "openai"
    batch_size = 1

    def __init__(self, config: BackendConfig, halt: threading.Event) -> None:
        self.config = config
        self.parallel = config.parallel
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(dict(config.proxies)), _NoRedirect)
        self._throttle = Throttle(
            Health(config.give_up_after),
            halt,
            retries=config.retries,
            backoff=config.backoff,
            requests_per_minute=config.requests_per_minute,
        )
        self.model = config.model or self._only_model()

    def prepare(self, data: bytes, source: ImageSource) -> str:
        """The picture as a data URL. Raises UnreadableImage."""
        return data_url(data, source, self.config.max_side)

    def describe(self, pictures: Sequence[str], sampling: Sampling) -> list[Answer | ValueError]:
        """One request a picture. Raises Fatal or Stopped."""
        answers: list[Answer | ValueError] = []
        for url in pictures:
            body = request_body(self.model, url, sampling, dict(self.config.extra))
            try:
                answers.append(self._throttle.call(partial(self._ask, body)))
            except (Fault, Rejected) as error:
                answers.append(error)
        return answers

    def _ask(self, body: bytes) -> Answer:
        return read_answer(self._exchange(body))

    def _only_model(self) -> str:
        found = self._throttle.call(lambda: self._exchange(None, "models"))
        listed = found.get("data")
        names = [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        if len(names) != 1 or not isinstance(names[0], str):
            raise Fatal(
                f"The server at {self.config.url} offers {len(names)} models"
                f"{': ' + ', '.join(map(str, names[:20])) if names else ''}. Choose one with --model."
            )
        return names[0]

    def _exchange(self, body: bytes | None, path: str = "chat/completions") -> dict[str, Any]:
        """One request and its JSON object. Raises Fault, Rejected or Fatal."""
        url = f"{self.config.url.rstrip('/')}/{path}"
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "seps"}
        if self.config.api_key:
            headers["Authorization"] = f"Bearer {self.config.api_key}"
        request = urllib.request.Request(url, data=body, headers=headers)
        deadline = time.monotonic() + self.config.timeout
        try:
            with self._opener.open(request, timeout=self.config.timeout) as response:
                data = _read(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise fault_of_status(url, error.code, error.headers.get("Retry-After"), _said(error)) from error
        except TimeoutError as error:
            raise Fault(f"{url} gave no whole answer in {self.config.timeout:g} s.") from error
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise Fault(f"{url} gave no whole answer in {self.config.timeout:g} s.") from error
            raise Fault(f"{url} cannot be reached ({str(reason) or type(reason).__name__}).") from error
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Fault(f"{url} sent something that is not JSON ({data[:80]!r}).") from error
        if not isinstance(value, dict):
            raise Fault(f"{url} sent JSON that is not an object ({data[:80]!r}).")
        return value


def request_body(model: str, image_url: str, sampling: Sampling, extra: dict[str, Any]) -> bytes:
    """The JSON of one chat request; keys of `extra` are added, those that are None left out."""
    content = [
        {"type": "image_url", "image_url": {"url": image_url}},
        {"type": "text", "text": sampling.prompt},
    ]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        **extra,
    }
    return json.dumps({key: value for key, value in body.items() if value is not None}).encode("ascii")


def read_answer(value: dict[str, Any]) -> Answer:
    """The first choice of a chat answer. Raises Fault for one that has not the protocol's shape."""
    try:
        choice = value["choices"][0]
        message = choice["message"]
        content, refusal = message.get("content"), message.get("refusal")
        reason = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Fault(f"The server's answer has no message in it ({str(value)[:120]}).") from error
    if isinstance(content, list):  # some servers send parts, as requests have them
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if content is not None and not isinstance(content, str):
        raise Fault(f"The server's answer is no text but {type(content).__name__}.")
    finish: Finish = "length" if reason == "length" else "filter" if reason == "content_filter" else "stop"
    if not content and isinstance(refusal, str) and refusal:
        content, finish = refusal, "filter"
    usage = value.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Answer(content or "", finish, tokens if isinstance(tokens, int) else None)


def fault_of_status(url: str, code: int, retry_after: str | None, said: str) -> Fault | Rejected | Fatal:
    """What an HTTP status other than success means for the run."""
    message = f"{url} answered {code}{f' ({said})' if said else ''}."
    if code in _NO_IMAGE_CAN:
        return Fatal(f"{message} {_NO_IMAGE_CAN[code]}")
    if code in _AGAIN or code >= 500:
        return Fault(message, parse_retry_after(retry_after), limited=code == 429)
    if 300 <= code < 400:
        return Fatal(f"{message} Redirects are not followed: give the address it points to.")
    return Rejected(message)


def parse_retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header: a number, or a date; None if there is none to understand."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(seconds, 0.0) if seconds == seconds else None


def _read(response: Any, deadline: float) -> bytes:
    """The body; a server that sends a byte a minute must not hold a thread for ever."""
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER:
            raise Fault(f"The server sent more than {MAX_ANSWER >> 20} MiB for one answer.")
        if time.monotonic() > deadline:
            raise TimeoutError
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _said(error: urllib.error.HTTPError) -> str:
    """What the server says about a status, in a line."""
    try:
        data = error.read(2000)
    except (OSError, http.client.HTTPException):
        return ""
    try:
        value = json.loads(data)
        value = value.get("error", value)
        text = str(value.get("message", "") if isinstance(value, dict) else value)
    except (ValueError, AttributeError, RecursionError):
        text = data.decode("utf-8", "replace")
    return " ".join(text.split())[:200].rstrip(".")
