"""Generated reference pages of the documentation site: commands from their parsers, settings from dataclasses."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from seps.cli.shared.commands import COMMANDS, parser_of
from seps.reid.config import ReidConfig
from seps.retrieval.config import RunConfig
from seps.setting_docs import described
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
