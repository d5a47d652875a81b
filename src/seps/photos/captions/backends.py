"""What every backend is: pictures and sampling settings in, answers out, and the errors it may raise."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from seps.images.sources import ImageSource

from .config import BackendConfig, Sampling

Finish = Literal["stop", "length", "filter"]


@dataclass(frozen=True)
class Answer:
    """What a model wrote; `finish` says why it ended, `tokens` how many it wrote, if known."""

    text: str
    finish: Finish
    tokens: int | None = None


class RetryableError(ValueError):
    """A request failed and may be sent again, after the seconds that the server asked to wait."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RejectedError(ValueError):
    """This image cannot be described by this backend; asking again would not help."""


class FatalError(ValueError):
    """No image can be described any more: the run has to stop."""


class Stopped(Exception):
    """The run was asked to stop while a request waited to be sent."""


class Backend(Protocol):
    """Describes pictures. `batch_size` pictures are given at once, by `parallel` threads."""

    name: str
    model: str
    batch_size: int
    parallel: int

    def prepare(self, data: bytes, source: ImageSource) -> Any:
        """The picture as `describe` wants it. Raises UnreadableImage."""

    def describe(self, pictures: Sequence[Any], sampling: Sampling) -> list[Answer | ValueError]:
        """An answer, or what went wrong, for each picture. Raises FatalError or Stopped for all of them."""


class Health:
    """Counts failures in a row over all threads and ends the run when there are too many."""

    def __init__(self, give_up_after: int) -> None:
        self.give_up_after = give_up_after
        self._count = 0
        self._lock = threading.Lock()

    def succeeded(self) -> None:
        """An answer came: the count starts again."""
        with self._lock:
            self._count = 0

    def failed(self, error: Exception) -> None:
        """Count a failure. Raises FatalError when it was the last one allowed."""
        with self._lock:
            self._count += 1
            count = self._count
        if count >= self.give_up_after:
            raise FatalError(
                f"{count} failures in a row without an answer; the last: {error} Written descriptions stay. "
                "Fix the cause, then run the same command again."
            ) from error


def build(config: BackendConfig, halt: threading.Event) -> Backend:
    """The backend that `config` asks for; `halt` ends its waiting. Raises ValueError if it cannot be had."""
    if config.kind == "openai":
        try:
            from .openai_backend import OpenAIBackend
        except ImportError as error:
            raise ValueError(
                f"Asking a server needs the packages openai and tenacity ({error}): pip install 'seps[caption]'"
            ) from error
        return OpenAIBackend(config, halt)
    from .transformers_backend import TransformersBackend

    return TransformersBackend(config)
