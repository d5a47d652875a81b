"""From images to outcomes: read, compare the hash, describe, judge, ask again. No files are written here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from seps.retrieval.data import UnreadableImage, read_source

from .backends import Answer, Backend, Fatal, Stopped
from .config import CaptionConfig
from .quality import fault_of, words_of
from .sources import Item, content_hash

# same: described before. aside: set aside before. fault: the backend failed on it, the next start tries again.
# fatal: no image's outcome, but the end of the run.
OutcomeKind = Literal["good", "same", "aside", "bad", "fault", "unreadable", "fatal"]


@dataclass
class Outcome:
    """What became of one image. `bad`: the kind of every bad answer on the way, the last one included."""

    id: str
    kind: OutcomeKind
    sha256: str = ""
    text: str = ""
    reason: str = ""
    finish: str = ""
    tokens: int | None = None
    attempts: int = 0
    bad: list[str] = field(default_factory=list)
    words: int = 0


@dataclass
class _Pending:
    item: Item
    sha256: str
    picture: Any
    bad: list[str] = field(default_factory=list)


def describe_items(items: Sequence[Item], backend: Backend, config: CaptionConfig) -> list[Outcome]:
    """The outcomes of a batch, in no particular order; fewer than items if the run was stopped.

    After a Fatal the outcomes reached so far come with one of kind "fatal" at the end.
    """
    outcomes: list[Outcome] = []
    pending: list[_Pending] = []
    for item in items:
        read = _read(item, backend)
        (outcomes if isinstance(read, Outcome) else pending).append(read)  # type: ignore[arg-type]
    for attempt in range(config.bad_retries + 1):
        if not pending:
            break
        try:
            answers = backend.describe([one.picture for one in pending], config.sampling.retry(attempt))
        except Stopped:
            break
        except Fatal as error:
            return [*outcomes, Outcome("", "fatal", reason=str(error))]
        again = []
        for one, answer in zip(pending, answers, strict=True):
            outcome = _judge(one, answer, attempt, config)
            if outcome is None:
                again.append(one)
            else:
                outcomes.append(outcome)
        pending = again
    return outcomes


def _read(item: Item, backend: Backend) -> Outcome | _Pending:
    try:
        data = read_source(item.source)
        sha256 = content_hash(data)
        if sha256 == item.known:
            return Outcome(item.id, "same", sha256)
        if sha256 == item.aside:
            return Outcome(item.id, "aside", sha256)
        return _Pending(item, sha256, backend.prepare(data, item.source))
    except UnreadableImage as error:
        return Outcome(item.id, "unreadable", reason=str(error))


def _judge(one: _Pending, answer: Answer | ValueError, attempt: int, config: CaptionConfig) -> Outcome | None:
    """The outcome of an answer, None to ask again."""
    outcome = Outcome(one.item.id, "fault", one.sha256, attempts=attempt + 1, bad=one.bad)
    if not isinstance(answer, Answer):
        outcome.reason = str(answer)
        return outcome
    # Half a surrogate pair is valid JSON and no text: it could not be written as UTF-8.
    text = answer.text.encode("utf-8", "replace").decode("utf-8").strip()
    outcome.text, outcome.finish, outcome.tokens = text, answer.finish, answer.tokens
    outcome.words = len(words_of(text))
    reason = fault_of(text, answer.finish)
    if reason is None or reason in config.accept:
        outcome.kind = "good"
        return outcome
    one.bad.append(reason)
    if attempt < config.bad_retries:
        return None
    outcome.kind, outcome.reason = "bad", reason
    return outcome


def good_line(outcome: Outcome, backend: str, model: str, config: CaptionConfig) -> dict[str, Any]:
    """The line of a description: `image` and `dense` as `attach_dense` reads them, and where it comes from."""
    line: dict[str, Any] = {
        "image": outcome.id,
        "sha256": outcome.sha256,
        "dense": outcome.text,
        "model": model,
        "backend": backend,
        "settings": asdict(config.sampling),
        "finish": outcome.finish,
        "words": outcome.words,
        "tokens": outcome.tokens,
        "attempts": outcome.attempts,
    }
    if outcome.attempts > 1:
        used = config.sampling.retry(outcome.attempts - 1)
        line["retry"] = {"after": outcome.bad, "temperature": used.temperature, "seed": used.seed}
    return line


def failed_line(outcome: Outcome, backend: str, model: str, config: CaptionConfig) -> dict[str, Any]:
    """The line of an image that was set aside, with the reason and the last answer for a person to judge."""
    return {
        "image": outcome.id,
        "sha256": outcome.sha256,
        "kind": outcome.kind,
        "reason": outcome.reason,
        "bad": outcome.bad,
        "answer": outcome.text,
        "finish": outcome.finish,
        "model": model,
        "backend": backend,
        "settings": asdict(config.sampling),
        "attempts": outcome.attempts,
    }
