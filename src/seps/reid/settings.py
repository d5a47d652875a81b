"""Plain values (YAML, overrides, JSON) to typed dataclasses, strictly: every mistake is a sentence."""

from __future__ import annotations

import contextlib
import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

from seps.config import ConfigError

T = TypeVar("T")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError for a missing file and for anything else in it."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The settings {path} cannot be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold sections with names and values, not a {type(values).__name__}.")
    return values


def parse_override(text: str) -> tuple[list[str], Any]:
    """`a.b=value` -> (["a", "b"], value), the value read as YAML."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"{text!r} is no override: write section.field=value, such as train.epochs=5.")
    try:
        return name.strip().split("."), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r}: the value cannot be read: {' '.join(str(error).split())}.") from error


def check_known(cls: Any, values: Mapping[str, Any], where: str) -> Iterable[tuple[str, Any]]:
    """The items of `values`, refused with the nearest name when the dataclass `cls` has no such field."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must hold names and values, not {values!r}.")
    known = [part.name for part in fields(cls)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
            raise ConfigError(f"{where} has no setting {name!r}: {hint}")
    for name, part in values.items():
        if part is not None and not isinstance(part, Mapping) and is_dataclass(get_type_hints(cls)[name]):
            raise ConfigError(f"{where}: section {name!r} must hold names and values, not {part!r}.")
    return values.items()


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """A dataclass from plain values, nested dataclasses included."""
    hints = get_type_hints(cls)
    made = {}
    for name, value in check_known(cls, values, where):
        hint = hints[name]
        inner = isinstance(hint, type) and is_dataclass(hint)
        made[name] = build(hint, value or {}, f"{where}, section {name}") if inner else convert(value, hint, name)
    try:
        return cls(**made)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def convert(value: Any, hint: Any, name: str) -> Any:
    """`value` as type `hint`: lists become tuples, whole numbers floats; anything else must fit."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return convert(value, next(part for part in arguments if part is not type(None)), name)
    if origin is Literal:
        # YAML reads a bare `off` or `no` as a truth value; the message shows what came.
        if value not in arguments:
            raise ConfigError(f"{name} = {value!r}: choose one of {', '.join(map(repr, arguments))}.")
        return value
    if origin is tuple:
        return _tuple(value, arguments, name)
    if hint is float and isinstance(value, str):
        # YAML 1.1 takes 1e-4 without a point for text.
        with contextlib.suppress(ValueError):
            value = float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{name} = {value!r}: must be {_PLAIN_NAMES.get(hint, hint)}.")
    return value


_PLAIN_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _tuple(value: Any, arguments: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name} = {value!r}: must be a list, such as [a, b].")
    if arguments[-1] is Ellipsis:
        return tuple(convert(part, arguments[0], name) for part in value)
    if len(value) != len(arguments):
        raise ConfigError(f"{name} = {value!r}: must have {len(arguments)} entries.")
    return tuple(convert(part, hint, name) for part, hint in zip(value, arguments, strict=True))
