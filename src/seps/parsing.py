"""JSON from outside, within bounds: how deep it is, what numbers it holds, and the shapes of its values.

Every fault of a text is a ValueError; its message completes "FILE is not valid JSON: ...".
"""

from __future__ import annotations

import json
import math
from itertools import chain
from typing import Any, TypeGuard

MAX_CHARACTERS = 20_000
"""Of one text. A model reads a few hundred tokens; a tokenizer takes memory for every character it gets."""
MAX_DEPTH = 100
"""Objects and lists inside one another. The standard library cannot print, copy or save what is much deeper."""
TOO_DEEP = f"its objects and lists are more than {MAX_DEPTH} levels deep"


def parse_json(data: str | bytes, *, finite: bool = False) -> Any:
    """The value of a JSON text. With `finite`, NaN, Infinity and numbers like 1e999 are errors. Raises ValueError."""
    try:
        value = (
            json.loads(data, parse_float=finite_number, parse_constant=finite_number) if finite else json.loads(data)
        )
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_depth(value)
    return value


class ShapeError(ValueError):
    """JSON of another shape."""


def parse_object(data: str | bytes, *, finite: bool = False) -> dict[str, Any]:
    """The object of a JSON text. Raises ShapeError for another value, ValueError for no JSON."""
    value = parse_json(data, finite=finite)
    if not isinstance(value, dict):
        raise ShapeError(f"it must hold a JSON object like {{...}}, not a {type(value).__name__}")
    return value


def as_object(value: object) -> dict[str, Any]:
    """An object of JSON; empty for anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """A list of JSON; empty for anything else."""
    return value if isinstance(value, list) else []


def has_words(value: object) -> TypeGuard[str]:
    """Whether a value is a text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Whether a value is a whole number of at least `least`; True and False are none."""
    return isinstance(value, int) and is_number(value) and value >= least


def finite_number(text: str) -> float:
    """A number that is neither infinite nor NaN. Raises ValueError."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def check_depth(value: Any) -> None:
    """Raise ValueError for dicts and lists that are too deep, level by level: a recursion would end early."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return
        level = list(chain.from_iterable(part.values() if isinstance(part, dict) else part for part in level))
    raise ValueError(TOO_DEEP)
