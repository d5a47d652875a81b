"""JSON from outside, within bounds: how deep it is, and what numbers it holds.

Every fault of a text is a ValueError; its message completes "FILE is not valid JSON: ...".
"""

from __future__ import annotations

import json
import math
from itertools import chain
from typing import Any

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
