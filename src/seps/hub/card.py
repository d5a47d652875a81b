"""Model cards: a README.md with the header that model hubs read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def card(
    title: str,
    about: Mapping[str, Any],
    *,
    tags: Sequence[str],
    pipeline: str,
    summary: str,
    sections: Mapping[str, str],
) -> str:
    """README.md of a model folder: the hub's header, the title, a summary and the sections, in that order.

    `about` may hold a `license` (an identifier that the hub knows) and a `summary` that replaces the one given here.
    """
    header = {
        # Only the owner of the model can name its licence; the hub accepts "unknown".
        "license": str(about.get("license") or "unknown"),
        "library_name": "seps",
        "pipeline_tag": pipeline,
        "tags": ["seps", *tags],
    }
    # JSON values are YAML: quotes keep a colon or a bracket in a user's text from breaking the header.
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in header.items()]
    parts = ["\n".join(["---", *lines, "---"]), f"# {_plain(title)}", str(about.get("summary") or summary)]
    parts += [f"## {name}\n\n{text}" for name, text in sections.items()]
    return "\n\n".join(parts) + "\n"


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _plain(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
