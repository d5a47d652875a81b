"""Generated reference pages of the documentation site: commands from their parsers, settings from dataclasses, the HTTP
API from its OpenAPI schema, and the columns of a store from its Arrow schema."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from seps.cli.shared.commands import COMMANDS, parser_of
from seps.photos.serve.app import create_app
from seps.photos.store import rows
from seps.photos.store.lance.table import schema
from seps.reid.config import ReidConfig
from seps.retrieval.config import RunConfig
from seps.retrieval.engine.layout import PatchLayout
from seps.setting_docs import described, field_docs
from seps.settings import defaults


def _parsers(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command and the commands within it."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from ((f"{name} {inner}", found) for inner, found in action.choices.items())


def commands_page() -> str:
    """The help of every command; settings are on their page."""
    parts = [
        "# Commands\n\nThe help of every command, as `seps COMMAND --help` prints it. "
        "[Settings](settings.md) have a page.\n"
    ]
    with mock.patch.dict(os.environ, {"COLUMNS": "100"}):
        for top, about in COMMANDS.items():
            for name, parser in _parsers(top, parser_of(top)):
                text = argparse.ArgumentParser.format_help(parser).replace(str(Path.home()), "~")
                parts.append(f"## seps {name}\n\n" + (f"{about[0].upper()}{about[1:]}.\n\n" if name == top else ""))
                parts[-1] += f"```text\n{text.rstrip()}\n```\n"
    return "\n".join(parts)


def settings_page() -> str:
    """Every setting of training with its default and its whole description."""
    parts = [
        "# Settings\n\nSettings of `seps train`, `seps compare` and `seps reid train`: in a YAML file (`--config`), as "
        "`--section.name VALUE`, or in Python. `--explain KEY` prints one of them.\n"
    ]
    for title, cls in (("Retrieval", RunConfig), ("Re-identification", ReidConfig)):
        values = defaults(cls)
        rows = [
            f"| `{name}` | `{json.dumps(values[name])}` | {text.replace('|', chr(92) + '|')} |"
            for name, text in described(cls).items()
        ]
        parts.append("\n".join([f"## {title}\n", "| setting | default | effect |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells)) + "\n"


def _kind(schema: dict[str, Any]) -> str:
    """The type of a value: a link to its table, or the name that JSON has for it."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    return f"list of {_kind(schema['items'])}" if "items" in schema else str(schema.get("type", "value"))


def http_page() -> str:
    """Every address of `seps serve`, its parameters, and the values of its answers."""
    schema = create_app(mock.MagicMock()).openapi()
    parts = [
        "# HTTP API\n\n`seps serve` answers these addresses, in JSON unless a row says otherwise. `/openapi.json` is "
        'the schema, `/docs` this list. An error is `{"error": "a sentence"}` with a status of 400 or more. '
        "[Run the page for others](deploy.md) has tokens and proxies.\n"
    ]
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            parts.append(f"## `{method.upper()} {path}`\n\n{about['summary']}.\n")
            lines = [
                [f"`{each['name']}`", str(each["schema"].get("default", "")), each.get("description", "")]
                for each in about.get("parameters", [])
            ]
            if lines:
                parts.append(_table(["parameter", "default", "meaning"], lines))
            answers = about["responses"]["200"].get("content", {}).items()
            kinds = [_kind(each["schema"]) if each.get("schema") else f"`{name}`" for name, each in answers]
            parts.append(f"Answer: {', '.join(kinds)}.\n")
    parts.append("## Values\n")
    for name, about in sorted(schema["components"]["schemas"].items()):
        lines = [
            [f"`{key}`", _kind(each), each.get("description", "")] for key, each in about.get("properties", {}).items()
        ]
        parts.append(f"### {name}\n\n{_table(['name', 'type', 'meaning'], lines)}")
    return "\n".join(parts)


def store_page() -> str:
    """The columns of a store and its settings."""
    width = 384
    settings = rows.StoreSettings("photos", "base", "", PatchLayout.of("patches", width, (20, 20), 1), bank="name")
    docs, shared = field_docs(rows.Row), field_docs(rows.StoreSettings)
    columns = [[f"`{field.name}`", f"`{field.type}`", docs.get(field.name, "")] for field in schema(settings)]
    values = [[f"`{name}`", shared.get(name, "")] for name in rows.StoreSettings.__dataclass_fields__]
    return (
        f"# The store\n\nA store is a folder with one table of [Lance](https://lancedb.github.io/lance/), "
        f"`{rows.TABLE}.lance`, with one row per picture; without the extra `lance` new stores have SQLite's "
        f"`{rows.TABLE}.sqlite` with the same columns. The pictures stay in their place. Any reader of Lance or SQLite "
        f"reads it; write it only with `seps index`. The format is {rows.FORMAT}. A store of another format is not "
        "read: index the folders again.\n\n"
        f"## Columns\n\nTypes of a store of `base`, width {width}.\n\n"
        + _table(["column", "type", "content"], columns)
        + "\n## Settings\n\nThe metadata of the table has one value `seps`, a JSON object:\n\n"
        + _table(["key", "content"], values)
    )
