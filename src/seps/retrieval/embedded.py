"""The models that come with the package, by name. Nothing here imports torch."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

MINI, BASE = "mini", "base"
EMBEDDED = (MINI, BASE)
"""Models that come with the package."""
FILE = "sentences.json"
"""What a release states of an embedded model, so that it need not be computed: `seps.retrieval.packed`."""


def embedded_folder(name: str = MINI) -> Path:
    """Where an embedded model is."""
    return Path(str(files("seps"))) / "assets" / name


def stated_facts(name: str) -> dict[str, Any]:
    """What the release states of an embedded model. Raises OSError or ValueError where it cannot be read."""
    values: dict[str, Any] = json.loads((embedded_folder(name) / FILE).read_text(encoding="utf-8"))
    return values


def stated_text_hash(name: str) -> str:
    """The `text_hash` of an embedded model, without reading its weights; empty for any other."""
    if name not in EMBEDDED:
        return ""
    try:
        return str(stated_facts(name)["text_hash"])
    except (OSError, ValueError, KeyError):
        return ""
