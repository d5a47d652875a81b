"""What each setting of a dataclass does: the docstrings below its fields, for help and for `--explain`."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from seps.method.config import ConfigError
from seps.settings import defaults, unknown_setting

_SENTENCE = re.compile(r"(?<=[a-z0-9)\]\"`])[.](?=\s+[A-Z\"]|$)")


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The docstring below each field of one dataclass, on one line; empty without source code."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    found = {}
    for pair in pairwise(getattr(tree.body[0], "body", [])):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def described(cls: type[Any]) -> dict[str, str]:
    """Every setting of a dataclass by its dotted name, with the whole description."""
    hints, docs, found = get_type_hints(cls), field_docs(cls), dict[str, str]()
    for name in cls.__dataclass_fields__:
        if is_dataclass(hints[name]):
            part: Any = hints[name]
            found.update({f"{name}.{rest}": text for rest, text in described(part).items()})
        else:
            found[name] = docs.get(name, "")
    return found


def short(text: str) -> str:
    """The first sentence of a description, without marks of code."""
    return _SENTENCE.split(text.replace("`", ""), maxsplit=1)[0]


def listing(cls: type[Any], names: Sequence[str] = ()) -> list[str]:
    """Lines of help: each setting with its default, and what it does below it; of `names` without the default."""
    texts = described(cls)
    lines = []
    for name, value in (dict.fromkeys(names) or defaults(cls)).items():
        lines.append(f"  --{name}" if names else f"  --{name} {json.dumps(value)}")
        lines += textwrap.wrap(short(texts[name]), 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines


def explained(cls: type[Any], name: str) -> str:
    """One setting: its type, its default and its whole description. Raises ConfigError for an unknown name."""
    texts = described(cls)
    name = name.removeprefix("--")
    if name not in texts:
        raise ConfigError(f"There is no setting {name}; {unknown_setting(name, cls)}")
    owner: Any = cls
    *sections, last = name.split(".")
    for section in sections:
        owner = get_type_hints(owner)[section]
    kind = owner.__annotations__[last]
    kind = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    choices = _choices(get_type_hints(owner)[last])
    rows = [name, f"  type: {kind}", *([f"  choices: {choices}"] if choices else [])]
    rows.append(f"  default: {json.dumps(defaults(cls)[name])}")
    return "\n".join([*rows, "", *textwrap.wrap(texts[name], 100, initial_indent="  ", subsequent_indent="  ")])


def _choices(hint: Any) -> str:
    """The values of the Literal types in a type."""
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return ", ".join(json.dumps(part) for part in parts)
    return "; ".join(filter(None, map(_choices, parts)))
