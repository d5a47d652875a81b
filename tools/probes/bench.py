"""Where probes run: a scratch folder, the commands, and the fixtures that several probes share."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from probes.registry import Gone
from probes.values import Prose

DAY = 1_600_000_000
"""The time of every file that a probe indexes: a Sunday in September 2020."""
TIMES = re.compile(r"\d+(\.\d+)? (s|ms|images a second|photos a second)\b|\d+(\.\d+)? images/s")
VOLATILE = re.compile(
    "seconds|time$|times$|decoding|encoding|^own|per_second|speed|elapsed|peak|memory|rate$|disk_bytes|ms$|version$|^date"
)
"""Entries of JSON that no two runs share."""
Made = TypeVar("Made")


@dataclass(frozen=True)
class Answer:
    """What a command printed."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        """Its output as JSON without times."""
        return without_times(json.loads(self.out))

    def text(self) -> dict[str, Any]:
        """Its exit status and texts."""
        return {"status": self.status, "out": Prose(self.out), "err": Prose(self.err)}


class Bench:
    """The scratch folder of one area. Every file that a probe writes lies in it."""

    def __init__(self, tree: Path, scratch: Path) -> None:
        self.tree, self.scratch = tree, scratch
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What `make` returns, made by the first probe that needs it. An error is raised again for the others."""
        if name not in self._made:
            try:
                self._made[name] = make()
            except Exception as error:
                self._made[name] = error
        value = self._made[name]
        if isinstance(value, Exception):
            raise Gone(f"{name}: {value}") from value
        return value

    def folder(self, name: str) -> Path:
        """A folder of the scratch folder, made."""
        path = self.scratch / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def seps(self, *words: object, status: int = 0) -> Answer:
        """Run a command. Raises Gone where it ends with another status."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = entry_point(self.tree)([str(word) for word in words])
            except SystemExit as end:
                code = int(end.code or 0) if not isinstance(end.code, str) else 1
        answer = Answer(code or 0, self.clean(out.getvalue()), self.clean(err.getvalue()))
        if answer.status != status:
            lines = [line for line in (answer.err or answer.out).strip().splitlines() if line.strip()]
            raise Gone(f"seps {' '.join(map(str, words[:3]))} ended with {answer.status}: {lines[-1] if lines else ''}")
        return answer

    def clean(self, text: str) -> str:
        """Text without the folders and times of this run."""
        for path, name in ((self.scratch, "SCRATCH"), (self.tree, "ROOT")):
            text = text.replace(str(path), name)
        return re.sub(r"[ \t]+", " ", TIMES.sub("TIME", text))


@functools.cache
def entry_point(tree: Path) -> Callable[[list[str]], int | None]:
    """The function behind the command `seps`, as the package declares it."""
    declared = re.search(r'^seps = "([\w.]+):(\w+)"$', (tree / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    if declared is None:
        raise Gone("pyproject.toml declares no command seps.")
    module, name = declared.groups()
    function: Callable[[list[str]], int | None] = getattr(importlib.import_module(module), name)
    return function


def without_times(value: Any) -> Any:
    """A JSON value without the entries that no two runs share."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not VOLATILE.search(key)}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def log_lines(path: Path) -> list[Any]:
    """The lines of a run's log without times."""
    return [without_times(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def columns(store: Path) -> dict[str, Any]:
    """Every column of a store by name, its rows in the order of paths: numbers as arrays, the rest as digests."""
    import lance
    import numpy as np

    tables = sorted(store.glob("*.lance"))
    if not tables:
        raise Gone(f"{store.name} holds no table *.lance")
    found: dict[str, Any] = {}
    for path in tables:
        table = lance.dataset(str(path)).to_table()
        keys = [name for name in ("path", "member", "id") if name in table.column_names]
        table = table.sort_by([(name, "ascending") for name in keys])
        for name in table.column_names:
            values = table[name].to_pylist()
            if any(word in name for word in ("indexed", "seen", "version")):
                continue
            if values and isinstance(values[0], bytes) and len({len(value or b"") for value in values}) == 1:
                found[name] = np.stack([np.frombuffer(value, np.uint8) for value in values])
            elif values and isinstance(values[0], list) and len({len(value or ()) for value in values}) == 1:
                found[name] = np.asarray(values)
            else:
                found[name] = values
    return found


def keep_times(folder: Path) -> Iterator[Path]:
    """Give every file below a folder the same time; yields the files."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            os.utime(path, (DAY, DAY))
            yield path
