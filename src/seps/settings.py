"""Settings: YAML files and overrides to typed dataclasses, in one way for every command and for Python.

    load(RunConfig, "configs/mini.yaml", {"train.epochs": 5})

The name of a setting is its path through the sections, `train.epochs`. What a value must be is the type of the field
(read by jsonargparse, so text such as "5", "1e-4" or "[64, 32]" becomes what the field holds); whether it can work
says the dataclass. Presets of runs are the files in configs/; those of the method are functions of its dataclass
(`SlimmingConfig.paper()`). Every mistake is a ConfigError: a sentence with the setting, the value and what to do.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from seps.files import read_regular
from seps.method.config import ConfigError

MAX_YAML_BYTES = 2**20
MAX_NESTED = 1000
"""Characters of a text that may begin a list in a list: jsonargparse's YAML reader crashes on tens of thousands."""
_CLOCK = re.compile(r"[-+]?[0-9]+(:[0-9]+)+(\.[0-9]*)?")
"""A text that YAML 1.1 takes for a number to the base 60."""
T = TypeVar("T")
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}


def load(
    cls: type[T],
    files: str | Path | Iterable[str | Path] | None = None,
    overrides: Mapping[str, Any] | Iterable[str] = (),
) -> T:
    """A dataclass from YAML files (later ones win), then overrides: `{"train.epochs": 5}` or `["train.epochs=5"]`.

    Raises ConfigError for a file that cannot be read, a name that does not exist and a value that does not fit.
    """
    return build(cls, told(cls, files, overrides))


def told(
    cls: type[T],
    files: str | Path | Iterable[str | Path] | None = None,
    overrides: Mapping[str, Any] | Iterable[str] = (),
) -> dict[str, Any]:
    """The settings that are given, without defaults, as nested values of their types; the arguments of `load`."""
    tree: dict[str, Any] = {}
    for path in [files] if isinstance(files, str | Path) else files or ():
        _merge(cls, tree, read_yaml(Path(path)), "", str(path))
    named = overrides if isinstance(overrides, Mapping) else dict(map(parse_override, overrides))
    _merge(cls, tree, named, "", "the settings")
    return tree


def build(cls: type[T], tree: Mapping[str, Any]) -> T:
    """The dataclass of what `told` gave, sections first.

    `cls.complete(tree)`, where there is one, adds what follows from what is given.
    """
    complete = getattr(cls, "complete", None)
    values = complete(tree) if complete is not None else tree
    hints = get_type_hints(cls)
    return cls(**{name: build(hints[name], v) if is_dataclass(hints[name]) else v for name, v in values.items()})


def from_mapping(cls: type[T], values: Mapping[str, Any], source: str = "the settings") -> T:
    """A dataclass from nested plain values, as `to_plain` gives them; `source` is named where they are wrong."""
    tree: dict[str, Any] = {}
    _merge(cls, tree, values, "", source)
    return build(cls, tree)


def to_plain(config: Any) -> dict[str, Any]:
    """The fields of a dataclass as nested JSON values, tuples as lists."""
    plain: dict[str, Any] = _plain(asdict(config))
    return plain


def to_yaml(config: Any, *, changed: bool = False) -> str:
    """The fields as a YAML file that `load` reads; `changed`: those alone that are not the defaults."""
    import yaml  # type: ignore[import-untyped]

    plain = to_plain(config)
    return str(yaml.safe_dump(_without(plain, to_plain(type(config)())) if changed else plain, sort_keys=False))


def _without(plain: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """The values that differ from the usual ones, section by section."""
    found: dict[str, Any] = {}
    for name, value in plain.items():
        match value, usual.get(name):
            case dict(), dict() as default:
                if rest := _without(value, default):
                    found[name] = rest
            case (dict(), _) if value:
                found[name] = value
            case (_, default) if value != default and value != {}:
                found[name] = value
    return found


def defaults(cls: Any) -> dict[str, Any]:
    """Every setting of the dataclass by its dotted name, with its default as a JSON value."""
    return dict(_leaves(to_plain(cls()), cls))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError for a missing file and for anything else in it."""
    # Loaded here: settings that come from no file need no YAML.
    from seps.yaml_text import parse_yaml

    try:
        values = parse_yaml(read_regular(path, MAX_YAML_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"The settings {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}.") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path} must hold sections with names and values, not {values!r:.200}.")
    return values or {}


def parse_override(text: str) -> tuple[str, str]:
    """`section.name=value` -> ("section.name", "value")."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"{text!r} is no override; write section.name=value, such as train.epochs=5.")
    return name.strip(), value


def _merge(cls: Any, tree: dict[str, Any], given: Mapping[Any, Any], section: str, source: str) -> None:
    """Put `given` into the nested `tree`, each value as the type of its field; names may be dotted."""
    if not isinstance(given, Mapping):
        what = f"the section {section[:-1]} of {source}" if section else source
        raise ConfigError(f"{what[:1].upper()}{what[1:]} must hold names and values, not {given!r:.200}.")
    hints = {part.name: get_type_hints(cls)[part.name] for part in fields(cls)}
    for key, value in given.items():
        name, _, rest = str(key).partition(".")
        if name not in hints:
            unknown = f"{section}{key}"
            raise ConfigError(f"In {source} there is no setting {unknown}; {unknown_setting(unknown, cls, section)}")
        hint, full = hints[name], f"{section}{name}"
        if is_dataclass(hint):
            part = {rest: value} if rest else _section(value)
            _merge(hint, tree.setdefault(name, {}), part, f"{full}.", source)
        elif rest and get_origin(hint) is Mapping:
            tree[name] = {**tree.get(name, {}), rest: _convert(value, Any, f"{full}.{rest}")}
        elif rest:
            raise ConfigError(f"In {source} there is no setting {full}.{rest}: {full} is one value.")
        else:
            tree[name] = _convert(value, hint, full)


def _section(value: Any) -> Any:
    """A whole section: empty in a file (None), or on a command line as the name of a file or as YAML."""
    match value:
        case None:
            return {}
        case str() if os.path.isfile(value):
            return read_yaml(Path(value))
        case str() if (listed := _list_or_mapping(value)) is not None:
            return listed
    return value


def unknown_setting(name: str, cls: Any, section: str = "") -> str:
    """The end of the sentence about an unknown name: the one that is most like it, or all of its section."""
    known = [f"{section}{rest}" for rest in defaults(cls)]
    ends = {full.rpartition(".")[2]: full for full in known}
    close = difflib.get_close_matches(name, known, 1)
    close += [ends[end] for end in difflib.get_close_matches(name.rpartition(".")[2], ends, 1)]
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."


def _convert(value: Any, hint: Any, name: str) -> Any:
    problem = f"{name} is {value!r:.200}; give {_wanted(hint)}."
    if isinstance(value, str) and hint is not str:
        if sum(map(value.count, "[{-?")) > MAX_NESTED:
            raise ConfigError(problem)
        listed = _list_or_mapping(value)
        if listed is not None:
            try:
                return _convert(listed, hint, name)
            except ConfigError:
                if str not in get_args(hint):
                    raise
    # Imported here, so that programs that make their settings in Python need no jsonargparse.
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        converted = parser.parse_object({"value": value})["value"]
    except argparse.ArgumentError as error:
        raise ConfigError(problem) from error
    if any(map(_CLOCK.fullmatch, _texts(value) - _texts(converted))):
        raise ConfigError(problem)
    return converted


def _list_or_mapping(text: str) -> list[Any] | dict[Any, Any] | None:
    """What a text is in YAML, where that is a list or a mapping."""
    from seps.yaml_text import parse_yaml

    try:
        value = parse_yaml(text)
    except ValueError:
        return None
    return value if isinstance(value, list | dict) else None


def _texts(value: Any) -> set[str]:
    """The texts in nested lists."""
    match value:
        case str():
            return {value}
        case list() | tuple():
            return set().union(*map(_texts, value))
    return set()


def _wanted(hint: Any) -> str:
    """What a field of this type takes, in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(part) for part in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"a list such as [a, b], each {_wanted(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {_wanted(arguments[0])}"
    return _KINDS.get(hint, "options by name, such as {name: value}")


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {name: _plain(part) for name, part in value.items()}
        case tuple() | list():
            return [_plain(part) for part in value]
    return value


def _leaves(values: Mapping[str, Any], cls: Any, section: str = "") -> Iterable[tuple[str, Any]]:
    hints = get_type_hints(cls)
    for name, value in values.items():
        if is_dataclass(hints[name]):
            yield from _leaves(value, hints[name], f"{section}{name}.")
        else:
            yield f"{section}{name}", value
