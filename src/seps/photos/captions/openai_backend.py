"""Descriptions from any server that speaks the OpenAI chat protocol with images (vLLM and others).

The `openai` package sends the requests, `tenacity` repeats them. Answers are read from plain JSON, because the client
does not check the shape of what a server sends; their size and the time for a whole answer are bounded here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import openai
import tenacity

from seps.images.sources import ImageSource
from seps.parsing import ShapeError, as_list, as_object, has_words, is_whole, parse_object

from .backends import Answer, FatalError, Finish, Health, RejectedError, RetryableError, Stopped
from .config import BackendConfig, Sampling
from .images import data_url

Value = TypeVar("Value")
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
    """Sends each picture as a data URL to `{url}/chat/completions`. `halt` ends the pauses between two tries."""

    name = "openai"
    batch_size = 1

    def __init__(self, config: BackendConfig, halt: threading.Event) -> None:
        self.config = config
        self.parallel = config.parallel
        self._url = config.url.rstrip("/")
        self._halt = halt
        self._health = Health(config.give_up_after)
        # A server on this machine is not reached through a proxy of the environment.
        remote = urlsplit(self._url).hostname not in ("localhost", "127.0.0.1", "::1")
        self._client = openai.OpenAI(
            api_key=config.api_key or "none",
            base_url=self._url,
            http_client=openai.DefaultHttpxClient(trust_env=remote, timeout=config.timeout),
            timeout=config.timeout,
            max_retries=0,
        )
        # The client sends what the environment has for OpenAI's own service.
        left_out = ["OpenAI-Organization", "OpenAI-Project", *([] if config.api_key else ["Authorization"])]
        self._headers: Any = {name: openai.Omit() for name in left_out}
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
                answers.append(self._repeated(partial(self._ask, body)))
            except (RetryableError, RejectedError) as error:
                answers.append(error)
        return answers

    def _ask(self, body: dict[str, Any]) -> Answer:
        return read_answer(self._exchange(body))

    def _only_model(self) -> str:
        listed = as_list(self._repeated(lambda: self._exchange(None)).get("data"))
        names = [as_object(entry).get("id") for entry in listed]
        if len(names) != 1 or not has_words(names[0]):
            raise FatalError(
                f"The server at {self.config.url} offers {len(names)} models"
                f"{': ' + ', '.join(map(str, names[:20])) if names else ''}. Choose one with --model."
            )
        return names[0]

    def _repeated(self, request: Callable[[], Value]) -> Value:
        """The result of `request`, sent again after a RetryableError with growing pauses.

        Raises the last RetryableError, RejectedError at once, FatalError after too many failures in a row, Stopped when
        the run ends.
        """
        half, longest = self.config.backoff / 2, LONGEST_WAIT / 2
        growing = tenacity.wait_exponential(half, max=longest) + tenacity.wait_random_exponential(half, max=longest)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(RetryableError),
            stop=tenacity.stop_after_attempt(self.config.retries + 1),
            wait=lambda state: max(growing(state), tenacity.wait_exception(_seconds_requested)(state)),
            sleep=tenacity.sleep_using_event(self._halt),
            reraise=True,
        )
        result: Value = retrying(self._send, request)
        return result

    def _send(self, request: Callable[[], Value]) -> Value:
        if self._halt.is_set():
            raise Stopped
        try:
            result = request()
        except (RetryableError, RejectedError) as error:
            self._health.failed(error)
            raise
        self._health.succeeded()
        return result

    def _exchange(self, body: dict[str, Any] | None) -> dict[str, Any]:
        """The JSON object that answers a chat request, or the list of models for None.

        Raises RetryableError, RejectedError or FatalError.
        """
        url = f"{self._url}/models" if body is None else f"{self._url}/chat/completions"
        try:
            data = self._receive(body)
        except openai.APITimeoutError as error:
            raise RetryableError(_late(url, self.config.timeout)) from error
        except openai.APIStatusError as error:
            raise error_of_status(url, error) from error
        except RetryableError:
            raise
        except Exception as error:  # besides its own errors, the client lets those of httpx or httpx2 through
            cause = error.__cause__ or error
            raise RetryableError(f"{url} cannot be reached ({str(cause) or type(cause).__name__}).") from error
        try:
            return parse_object(data)
        except ShapeError as error:
            raise RetryableError(f"{url} sent JSON that is not an object ({data[:80]!r}).") from error
        except ValueError as error:
            raise RetryableError(f"{url} sent something that is not JSON ({data[:80]!r}).") from error

    def _receive(self, body: dict[str, Any] | None) -> bytes:
        """The bytes of an answer. Raises RetryableError for too many or too late, else what the client raises."""
        answering: Any
        if body is None:
            answering = self._client.models.with_streaming_response.list(extra_headers=self._headers)
        else:
            answering = self._client.chat.completions.with_streaming_response.create(
                model=self.model, messages=[], extra_body=body, extra_headers=self._headers
            )
        data, end = bytearray(), time.monotonic() + self.config.timeout
        with answering as response:
            for part in response.iter_bytes():
                data += part
                if len(data) > MAX_ANSWER:
                    raise RetryableError(f"The server sent more than {MAX_ANSWER >> 20} MiB for one answer.")
                if time.monotonic() > end:  # the client's timeout starts again with every byte
                    raise RetryableError(_late(self._url, self.config.timeout))
        return bytes(data)


def _late(url: str, seconds: float) -> str:
    return f"{url} gave no whole answer in {seconds:g} s."


def _seconds_requested(error: BaseException) -> float:
    """The pause that a server asked for."""
    return min(getattr(error, "retry_after", 0.0), LONGEST_PAUSE)


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
    match content:
        case None | str():
            pass
        case list():  # some servers send parts, as requests have them
            content = "".join(filter(has_words, (as_object(part).get("text") for part in content)))
        case _:
            raise RetryableError(f"The server's answer is no text but {type(content).__name__}.")
    finish: Finish = "length" if reason == "length" else "filter" if reason == "content_filter" else "stop"
    if not content and has_words(refusal):
        content, finish = refusal, "filter"
    tokens = as_object(value.get("usage")).get("completion_tokens")
    return Answer(content or "", finish, tokens if is_whole(tokens) else None)


def error_of_status(url: str, error: openai.APIStatusError) -> RetryableError | RejectedError | FatalError:
    """What an HTTP status other than success means for the run."""
    code = error.status_code
    text = error.body.get("message", "") if isinstance(error.body, dict) else error.body or ""
    said = " ".join(str(text).split())[:200].rstrip(".")
    message = f"{url} answered {code}{f' ({said})' if said else ''}."
    if code in _NO_IMAGE_CAN:
        return FatalError(f"{message} {_NO_IMAGE_CAN[code]}")
    if code in _RETRYABLE or code >= 500:
        return RetryableError(message, seconds_of(error.response.headers.get("Retry-After")))
    return RejectedError(message)


def seconds_of(retry_after: str | None) -> float:
    """Seconds of a Retry-After header; 0 where there is none, or it is a date."""
    try:
        return max(0.0, float(retry_after or 0))  # `nan` is 0, too
    except ValueError:
        return 0.0
