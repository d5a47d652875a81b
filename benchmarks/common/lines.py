"""Measurements as JSON lines, written as they come: a run that is stopped keeps what it has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one measurement to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
