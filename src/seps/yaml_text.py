"""YAML from outside: numbers without surprises, no key twice, no aliases, and bounded depth.

Every fault of a text is a ValueError; its message completes "FILE is not valid YAML: ...".
"""

from __future__ import annotations

import re
from typing import Any

import yaml  # type: ignore[import-untyped]

from seps.parsing import TOO_DEEP, check_depth, finite_number

_INT, _FLOAT, _TIME = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))
_WHOLE = re.compile(r"[-+]?[0-9][0-9_]*$|0o[0-7]+$|0x[0-9a-fA-F]+$")
_NUMBER = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Numbers are those of YAML 1.2: `010` is ten, and `1:30` is a text.

    Raises ValueError, also for a key that is given twice in one mapping, and for aliases: a few of them stand for
    values without end.
    """
    try:
        value = yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except (yaml.YAMLError, AttributeError) as error:  # PyYAML's AttributeError: a tag like !!timestamp on a word
        raise ValueError(" ".join(str(error).split())) from error
    check_depth(value)
    return value


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own attribute)
        first: [(tag, rule) for tag, rule in rules if tag not in (_INT, _FLOAT, _TIME)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            line = event.start_mark.line + 1
            raise ValueError(f"line {line}: *{event.anchor} repeats another value. Write the value itself")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ValueError(f"lines {lines[name]} and {line} both give {name!r}. Keep one of them")
            lines[name] = line
        return super().construct_mapping(node, deep)


def _whole(loader: Any, node: Any) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 0 if text[:2] in ("0x", "0o") else 10)


def _number(loader: Any, node: Any) -> float:
    text = str(loader.construct_scalar(node)).replace("_", "").lower()
    bare = text.replace(".", "", 1)
    return float(bare) if bare.lstrip("+-") in ("inf", "nan") else finite_number(text)


_Loader.add_implicit_resolver(_INT, _WHOLE, list("-+0123456789"))
_Loader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+.0123456789"))
_Loader.add_constructor(_INT, _whole)
_Loader.add_constructor(_FLOAT, _number)
