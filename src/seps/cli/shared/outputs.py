"""Files that a command writes at the end: checked before the work begins, and never put over something else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from seps.cli.shared.argtypes import refuse_same_file
from seps.files import write_text


def check_output(path: str | Path, option: str, ours: str, inputs: Iterable[str | None] = ()) -> Path:
    """The path of a JSON file to write. Raises ValueError where it holds what the command did not write.

    `ours` is a key that every such file has: an earlier result may be replaced, nothing else. `inputs` are files that
    the command reads.
    """
    path = Path(path)
    if path.exists() and path.stat().st_size:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            value = None
        if not isinstance(value, dict) or ours not in value:
            raise ValueError(
                f"{option} {path} exists and was not written by this command; it was left as it is. Choose "
                "another file."
            )
    refuse_same_file(option, str(path), inputs)
    return path


def write_output(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
