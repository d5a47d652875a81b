"""Descriptions from any server that speaks the OpenAI chat protocol with images (vLLM and others).

The `openai` package sends the requests, `tenacity` repeats them. By hand, and why:
the rate limit and the pauses of a Retry-After header hold for all threads at once, which neither package can do;
answers are read from plain JSON, because the client does not check the shape of what a server sends.
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import openai
import tenacity

from seps.parsing import parse_json
from seps.retrieval.data import ImageSource

from .backends import Answer, FatalError, Finish, Health, RejectedError, RetryableError, Stopped
from .config import BackendConfig, Sampling
from .images import data_url

R = TypeVar("R")
MAX_ANSWER = 1 << 24
LONGEST_WAIT = 60.0
LONGEST_PAUSE = 600.0  # a server that asks for more is down; giving up is left to the count of failures
# Codes that say nothing about the next try; everything else in 4xx is about the request itself.
_RETRYABLE = frozenset({408, 409, 425, 429})
_NO_IMAGE_CAN = {
    401: "Give a valid key with --api-key-file.",
    403: "This key may not use the model.",
    404: "Check the address and the model's name.",
    405: "Check the address: it should end like /v1.",
}


class OpenAIBackend:
    """Sends each picture as a data URL to `{url}/chat/completions`."""

    name = "openai"
    batch_size = 1

    def __init__(self, config: BackendConfig, halt: threading.Event) -> None:
        self.config = config
        self.parallel = config.parallel
        self._url = config.url.rstrip("/")
        # The system's certificates, as other programs on this machine use them; the client brings its own.
        self._tls = ssl.create_default_context()
        self._throttle = Throttle(config, halt)
        self.model = config.model or self._only_model()

    def prepare(self, data: bytes, source: ImageSource) -> str:
        """The picture as a data URL. Raises UnreadableImage."""
        return data_url(data, source, self.config.max_side)

    def describe(self, pictures: Sequence[str], sampling: Sampling) -> list[Answer | ValueError]:
        """One request per picture. Raises FatalError or Stopped."""
        answers: list[Answer | ValueError] = []
        for url in pictures:
            body = request_body(self.model, url, sampling, dict(self.config.extra))
            try:
                answers.append(self._throttle.call(partial(self._ask, body)))
            except (RetryableError, RejectedError) as error:
                answers.append(error)
        return answers

    def _ask(self, body: dict[str, Any]) -> Answer:
        return read_answer(self._exchange(body))

    def _only_model(self) -> str:
        with ThreadPoolExecutor(1) as pool:  # the caller's thread may run an event loop, as in a notebook
            found = pool.submit(self._throttle.call, lambda: self._exchange(None)).result()
        listed = found.get("data")
        names = [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        if len(names) != 1 or not isinstance(names[0], str):
            raise FatalError(
                f"The server at {self.config.url} offers {len(names)} models"
                f"{': ' + ', '.join(map(str, names[:20])) if names else ''}. Choose one with --model."
            )
        return names[0]

    def _exchange(self, body: dict[str, Any] | None) -> dict[str, Any]:
        """The JSON object that answers a chat request, or the list of models for None.

        Raises RetryableError, RejectedError or FatalError.
        """
        url = f"{self._url}/models" if body is None else f"{self._url}/chat/completions"
        try:
            # The client's timeout starts again with every byte; this one holds for the whole answer.
            data = asyncio.run(asyncio.wait_for(self._receive(body), self.config.timeout))
        except asyncio.TimeoutError as error:
            raise RetryableError(f"{url} gave no whole answer in {self.config.timeout:g} s.") from error
        except openai.APIStatusError as error:
            raise error_of_status(url, error) from error
        except RetryableError:
            raise
        except Exception as error:  # besides its own errors, the client lets those of httpx or httpx2 through
            cause = error.__cause__ or error
            raise RetryableError(f"{url} cannot be reached ({str(cause) or type(cause).__name__}).") from error
        try:
            value = parse_json(data)
        except ValueError as error:
            raise RetryableError(f"{url} sent something that is not JSON ({data[:80]!r}).") from error
        if not isinstance(value, dict):
            raise RetryableError(f"{url} sent JSON that is not an object ({data[:80]!r}).")
        return value

    async def _receive(self, body: dict[str, Any] | None) -> bytes:
        """The bytes of an answer. Raises RetryableError for too many, else what the client raises."""
        proxy = self.config.proxies.get(urlsplit(self._url).scheme) or None
        if proxy and "://" not in proxy:
            proxy = f"http://{proxy}"
        left_out: dict[str, Any] = {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()}
        if not self.config.api_key:
            left_out["Authorization"] = openai.Omit()
        async with openai.DefaultAsyncHttpxClient(
            verify=self._tls, proxy=proxy, trust_env=False, follow_redirects=False
        ) as http:  # following a redirect would hand the API key to another host
            client = openai.AsyncOpenAI(
                api_key=self.config.api_key or "none",
                base_url=self._url,
                http_client=http,
                timeout=None,
                max_retries=0,
            )
            answering: Any
            if body is None:
                answering = client.models.with_streaming_response.list(extra_headers=left_out)
            else:
                answering = client.chat.completions.with_streaming_response.create(
                    model=self.model, messages=[], extra_body=body, extra_headers=left_out
                )
            data = bytearray()
            async with answering as response:
                async for part in response.iter_bytes():
                    data += part
                    if len(data) > MAX_ANSWER:
                        raise RetryableError(f"The server sent more than {MAX_ANSWER >> 20} MiB for one answer.")
            return bytes(data)


class Throttle:
    """Sends requests for many threads: spaced by the rate limit, again after failures. `halt` ends every wait."""

    def __init__(self, config: BackendConfig, halt: threading.Event) -> None:
        self.halt = halt
        self.retries = config.retries
        self.backoff = config.backoff
        self.health = Health(config.give_up_after)
        self.interval = 60.0 / config.requests_per_minute if config.requests_per_minute else 0.0
        self._next_start = 0.0
        self._lock = threading.Lock()

    def call(self, request: Callable[[], R]) -> R:
        """The result of `request`, sent again after a RetryableError.

        An answer that says requests come too fast uses up no retry, but counts as a failure in a row. Raises the last
        RetryableError, RejectedError at once, FatalError after too many failures in a row, Stopped when halted.
        """
        tries = 0

        def is_last(state: tenacity.RetryCallState) -> bool:
            nonlocal tries
            tries += not _error(state).limited
            return tries > self.retries

        repeated = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(RetryableError),
            stop=is_last,
            wait=self._pause,
            sleep=self._sleep,
            reraise=True,
        )
        result: R = repeated(self._send, request)
        return result

    def _send(self, request: Callable[[], R]) -> R:
        self._wait_for_start()
        try:
            result = request()
        except (RetryableError, RejectedError) as error:
            self.health.failed(error)
            raise
        self.health.succeeded()
        return result

    def _wait_for_start(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                wait = self._next_start - now
                if wait <= 0:
                    self._next_start = now + self.interval
                    break
            self._sleep(min(wait, 0.5))  # in parts: another thread may be told to wait longer
        self._sleep(0.0)

    def _pause(self, state: tenacity.RetryCallState) -> float:
        asked = _error(state).retry_after
        if asked is None:
            return growing_pause(self.backoff)(state)
        pause = min(max(asked, 0.0), LONGEST_PAUSE)
        with self._lock:  # no thread sends before the pause that one of them was asked for
            self._next_start = max(self._next_start, time.monotonic() + pause)
        return pause + random.random() * min(self.backoff, 1.0)

    def _sleep(self, seconds: float) -> None:
        if self.halt.wait(seconds):
            raise Stopped


def growing_pause(backoff: float) -> Callable[[tenacity.RetryCallState], float]:
    """Seconds before the next try: `backoff`, doubled with each try up to `LONGEST_WAIT`, times 0.5 to 1 at random."""
    half, longest = backoff / 2, LONGEST_WAIT / 2
    return tenacity.wait_exponential(half, max=longest) + tenacity.wait_random_exponential(half, max=longest)


def _error(state: tenacity.RetryCallState) -> RetryableError:
    error = state.outcome.exception() if state.outcome is not None else None
    assert isinstance(error, RetryableError)
    return error


def request_body(model: str, image_url: str, sampling: Sampling, extra: dict[str, Any]) -> dict[str, Any]:
    """One chat request; keys of `extra` are added, those that are None left out."""
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
    return {key: value for key, value in body.items() if value is not None}


def read_answer(value: dict[str, Any]) -> Answer:
    """The first choice of a chat answer. Raises RetryableError for one that has not the protocol's shape."""
    try:
        choice = value["choices"][0]
        message = choice["message"]
        content, refusal = message.get("content"), message.get("refusal")
        reason = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RetryableError(f"The server's answer has no message in it ({str(value)[:120]}).") from error
    if isinstance(content, list):  # some servers send parts, as requests have them
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if content is not None and not isinstance(content, str):
        raise RetryableError(f"The server's answer is no text but {type(content).__name__}.")
    finish: Finish = "length" if reason == "length" else "filter" if reason == "content_filter" else "stop"
    if not content and isinstance(refusal, str) and refusal:
        content, finish = refusal, "filter"
    usage = value.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Answer(content or "", finish, tokens if isinstance(tokens, int) else None)


def error_of_status(url: str, error: openai.APIStatusError) -> RetryableError | RejectedError | FatalError:
    """What an HTTP status other than success means for the run."""
    code = error.status_code
    text = error.body.get("message", "") if isinstance(error.body, dict) else error.body or ""
    said = " ".join(str(text).split())[:200].rstrip(".")
    message = f"{url} answered {code}{f' ({said})' if said else ''}."
    if code in _NO_IMAGE_CAN:
        return FatalError(f"{message} {_NO_IMAGE_CAN[code]}")
    if code in _RETRYABLE or code >= 500:
        return RetryableError(message, parse_retry_after(error.response.headers.get("Retry-After")), code == 429)
    if 300 <= code < 400:
        return FatalError(f"{message} Redirects are not followed: give the address it points to.")
    return RejectedError(message)


def parse_retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header: a number, or a date; None if there is none to understand.

    By hand: the client's own is private, and ignores pauses of more than two minutes.
    """
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
