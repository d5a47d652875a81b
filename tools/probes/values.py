"""Recorded values: a tree of numbers, arrays and text, its file, and what differs between two of them."""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

Leaf = Any
"""A number, a text, a prose text (`Prose`), None, or an array."""


class Prose(str):
    """Text for people: a deliberate change of it is no change of a number, so that it is counted apart."""

    __slots__ = ()


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Leaf]]:
    """Every value of a tree with its place; lists of numbers become arrays, lists of rows columns."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{place}/{key}" if place else str(key))
        if not value:
            yield place, "{}"
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value):
            whole = all(isinstance(item, int) and abs(item) < 2**62 for item in value)
            yield place, np.array(value, np.int64 if whole else np.float64)
        elif value and all(type(item) is str for item in value):
            yield place, "\n".join(value)
        elif len(value) > 1 and all(isinstance(item, dict) and item.keys() == value[0].keys() for item in value):
            yield from leaves({key: [item[key] for item in value] for key in value[0]}, place)
        else:
            for number, item in enumerate(value):
                yield from leaves(item, f"{place}/{number}")
            if not value:
                yield place, "[]"
    elif hasattr(value, "detach"):  # a tensor
        tensor = value.detach().cpu()
        yield place, tensor.float().numpy() if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy().copy()
    elif isinstance(value, np.generic):
        yield place, value.item()
    elif isinstance(value, bytes):
        yield place, f"sha256 {hashlib.sha256(value).hexdigest()[:16]} of {len(value)} bytes"
    elif value is None or isinstance(value, (bool, int, float, str, np.ndarray)):
        yield place, value
    else:
        raise TypeError(f"A probe returned a {type(value).__name__} at {place}.")


def write(path: Path, record: Mapping[str, Leaf]) -> None:
    """Write a record: a zip with the arrays as .npy and the rest as JSON."""
    plain: list[Any] = []
    arrays: list[np.ndarray] = []
    for key, value in record.items():
        if isinstance(value, np.ndarray):
            plain.append([key, "array", len(arrays)])
            arrays.append(value)
        else:
            plain.append([key, "prose" if isinstance(value, Prose) else "value", value])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("values.json", json.dumps(plain, ensure_ascii=False))
        for number, array in enumerate(arrays):
            buffer = io.BytesIO()
            np.save(buffer, array, allow_pickle=False)
            file.writestr(f"{number}.npy", buffer.getvalue())


def read(path: Path) -> dict[str, Leaf]:
    """A written record. Raises ValueError where the file is none."""
    try:
        with zipfile.ZipFile(path) as file:
            record: dict[str, Leaf] = {}
            for key, kind, value in json.loads(file.read("values.json")):
                if kind == "array":
                    record[key] = np.load(io.BytesIO(file.read(f"{value}.npy")), allow_pickle=False)
                else:
                    record[key] = Prose(value) if kind == "prose" else value
            return record
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path} is no record of this tool; write it again with: record {path}") from error


@dataclass(frozen=True)
class Difference:
    """One value that differs."""

    place: str
    kind: str
    """ "value", "prose", "gone", "new" or "renamed"."""
    told: str

    def __str__(self) -> str:
        return f"{self.place}: {self.told}"


def compare(before: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> Iterator[Difference]:
    """What differs, in the order of the first record, then what is new. A probe that is gone is one difference."""
    for key, reason in after.items():
        if is_gone(reason) and not same(before.get(key), reason):
            yield Difference(key, "gone", str(reason))
    for key, reason in before.items():
        if is_gone(reason) and key not in after:
            yield Difference(key, "new", f"works now; it was {reason}")
    apart = {key for record in (before, after) for key, value in record.items() if is_gone(value)}
    first, second = ({key: value for key, value in r.items() if not _within(key, apart)} for r in (before, after))
    added = {key: value for key, value in second.items() if key not in first}
    for key, value in first.items():
        if key in second:
            yield from _compare(key, value, second[key])
            continue
        twin = next((name for name, other in added.items() if _probe(name) == _probe(key) and same(value, other)), None)
        if twin is not None and isinstance(value, np.ndarray):
            del added[twin]
            yield Difference(key, "renamed", f"is now {twin}, with the same values")
        else:
            yield Difference(key, "gone", f"gone; it was {_short(value)}")
    for key, value in added.items():
        yield Difference(key, "new", f"new: {_short(value)}")


def is_gone(value: Leaf) -> bool:
    """Whether a probe could not run; the text says why."""
    return isinstance(value, str) and value.startswith("gone: ")


def _within(key: str, probes: set[str]) -> bool:
    """Whether a place is one of these probes or areas, or lies in one."""
    return any("/".join(key.split("/")[:depth]) in probes for depth in (1, 2)) or key in probes


def same(before: Leaf, after: Leaf) -> bool:
    """Whether two values are equal, bit by bit."""
    if isinstance(before, np.ndarray) or isinstance(after, np.ndarray):
        both = isinstance(before, np.ndarray) and isinstance(after, np.ndarray)
        return (
            both and before.shape == after.shape and before.dtype == after.dtype and before.tobytes() == after.tobytes()
        )
    nan = isinstance(before, float) and isinstance(after, float) and math.isnan(before) and math.isnan(after)
    return nan or (type(before) is type(after) and before == after)


def _compare(place: str, before: Leaf, after: Leaf) -> Iterator[Difference]:
    if same(before, after):
        return
    if isinstance(before, str) and isinstance(after, str):
        yield Difference(place, "prose" if isinstance(before, Prose) else "value", _first_line(before, after))
    elif _is_number(before) and _is_number(after):
        yield Difference(place, "value", _distance(np.asarray(before), np.asarray(after)))
    else:
        yield Difference(place, "value", f"{_short(before)} before, {_short(after)} after")


def _is_number(value: Leaf) -> bool:
    return isinstance(value, (np.ndarray, int, float)) and (
        not isinstance(value, np.ndarray) or value.dtype.kind in "biuf"
    )


def _distance(before: np.ndarray, after: np.ndarray) -> str:
    """How far numbers are apart: how many differ, the largest absolute and relative difference."""
    if before.shape != after.shape:
        return f"shape {before.shape} {before.dtype} before, {after.shape} {after.dtype} after"
    kind = f"{before.dtype}" if before.dtype == after.dtype else f"{before.dtype} before, {after.dtype} after"
    first, second = before.astype(np.float64), after.astype(np.float64)
    unequal = ~((first == second) | (np.isnan(first) & np.isnan(second)))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        apart = np.abs(first - second)[unequal]
        scale = np.maximum(np.abs(first), np.abs(second))[unequal]
        relative = apart / scale
    if not len(apart):
        return f"equal values of other bits, {kind}"
    shown = f"absolute {np.max(apart):.3g}, relative {np.max(relative):.3g}"
    if before.ndim == 0:
        return f"{first.item():.9g} before, {second.item():.9g} after ({shown})"
    return f"{unequal.sum()} of {before.size} numbers differ, at most {shown}; shape {before.shape} {kind}"


def _first_line(before: str, after: str) -> str:
    """The first line of two texts that differs."""
    first, second = before.splitlines(), after.splitlines()
    for number, (one, other) in enumerate(zip(first, second, strict=False), 1):
        if one != other:
            return f"line {number}: {one[:160]!r} before, {other[:160]!r} after"
    return f"{len(first)} lines before, {len(second)} after"


def _short(value: Leaf) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} {value.dtype}"
    return repr(value if not isinstance(value, str) else str(value)[:100])


def _probe(key: str) -> str:
    return "/".join(key.split("/")[:2])
