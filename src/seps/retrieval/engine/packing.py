"""Packed matrices: rows of features as compact bytes, and back.

A packed matrix is float32, float16, or codes of 4 or 2 bits with one scale per row (`_LEVELS`).

Shapes: B matrices, R rows, C width.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from seps.retrieval.config import StoredPrecision

Precision = StoredPrecision
_KINDS: dict[Precision, int] = {"float32": 0, "float16": 1, "int4": 3, "int2": 4}
_PRECISIONS = {number: precision for precision, number in _KINDS.items()}
_HEAD = struct.Struct("<BHH")
Array = np.ndarray[Any, np.dtype[Any]]
_LEVELS: dict[Precision, tuple[float, ...]] = {
    "int4": (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
    "int2": (0.4528, 1.5104),
}
"""Values that stand for the codes, and their negatives, in units of a row's root mean square. They have the least
squared error for normally distributed values (Max 1960), which the tokens of our models nearly are: no codebook is
trained, and an image's codes depend on no other image."""


class PackingError(ValueError):
    """Bytes that are no packed matrix."""


def pack(rows: Any, precision: Precision = "float16") -> bytes:
    """(R, C), an array or a tensor -> bytes: kind, R, C, the rows' scales (of codes), the values, of codes several per
    byte.
    """
    values: Array = np.asarray(rows, np.float32)
    head = _HEAD.pack(_KINDS[precision], *values.shape)
    if precision in _LEVELS:
        return head + _codes(values, precision)
    if precision == "float32":
        return head + values.astype("<f4").tobytes()
    largest = np.finfo(np.float16).max
    return head + values.clip(-largest, largest).astype("<f2").tobytes()


@functools.cache
def _code_values(precision: Precision) -> tuple[Array, Array]:
    """The levels (2**bits,), rising, and by byte the levels of the codes in it, (256, 8 / bits), lowest bits first."""
    positive = np.array(_LEVELS[precision], np.float32)
    levels = np.concatenate([-positive[::-1], positive])
    bits = len(levels).bit_length() - 1
    places = np.arange(0, 8, bits)
    return levels, levels[(np.arange(256)[:, None] >> places) & (len(levels) - 1)]


def _codes(values: Array, precision: Precision) -> bytes:
    """(R, C) -> the rows' scales, then codes of the nearest levels. The scale gives a row its length back."""
    levels, table = _code_values(precision)
    per_byte = table.shape[1]
    wide: Array = values.astype(np.float64)  # squares of float32 values can overflow
    size: Array = np.sqrt(np.mean(wide**2, axis=1, keepdims=True))
    nearest: Array = np.searchsorted((levels[1:] + levels[:-1]) / 2, wide / np.maximum(size, 1e-300))
    length: Array = np.sqrt(np.mean(levels[nearest].astype(np.float64) ** 2, axis=1, keepdims=True))
    padded = np.pad(nearest, ((0, 0), (0, -values.shape[1] % per_byte))).astype(np.uint8)
    shifts = np.arange(per_byte, dtype=np.uint8) * (8 // per_byte)
    packed = np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1)
    return bytes((size / length).astype("<f4").tobytes() + packed.tobytes())


def packed_shape(blob: bytes) -> tuple[int, int]:
    """(R, C) of packed bytes. Raises PackingError for bytes that are not whole."""
    if len(blob) < _HEAD.size:
        raise PackingError(f"{len(blob)} bytes are no packed matrix.")
    kind, rows, width = _HEAD.unpack_from(blob)
    sizes = {0: 4 * width, 1: 2 * width, 3: -(-width // 2) + 4, 4: -(-width // 4) + 4}
    if kind not in sizes or len(blob) != _HEAD.size + rows * sizes[kind]:
        raise PackingError(f"{len(blob)} bytes do not hold a {rows} x {width} matrix of kind {kind}.")
    return rows, width


def unpack(blob: bytes) -> Array:
    """The (R, C) matrix that `pack` packed, float32. Raises PackingError for bytes that are not whole."""
    matrix: Array = unpack_all(np.frombuffer(blob, np.uint8)[None])[0]
    return matrix


def unpack_all(blobs: Array | Sequence[bytes]) -> Array:
    """(B, R, C) float32 of B matrices of one shape, at once where they come as one array (B, bytes).

    Raises PackingError for bytes that are not whole.
    """
    if not isinstance(blobs, np.ndarray) or (blobs[:, : _HEAD.size] != blobs[0, : _HEAD.size]).any():
        return np.stack([unpack(bytes(blob)) for blob in blobs])
    rows, width = packed_shape(blobs[0].tobytes())
    precision, body = _PRECISIONS[int(blobs[0, 0])], blobs[:, _HEAD.size :]
    if precision not in _LEVELS:
        plain = np.ascontiguousarray(body).view("<f4" if precision == "float32" else "<f2")
        return plain.reshape(len(body), rows, width).astype(np.float32)
    scales = np.ascontiguousarray(body[:, : 4 * rows]).view("<f4")[..., None]
    values = _code_values(precision)[1][body[:, 4 * rows :]]
    padded = width + -width % values.shape[2]
    values = values.reshape(len(body), rows, padded)[..., :width]
    scaled: Array = np.multiply(values.reshape(len(body), rows, width), scales, dtype=np.float32)
    return scaled


def unpack_padded(blobs: Sequence[bytes | None], width: int) -> tuple[Array, Array]:
    """B matrices, None for none, padded to the longest: values (B, R, C) float32 and mask (B, R) bool."""
    matrices = [np.zeros((0, width), np.float32) if blob is None else unpack(blob) for blob in blobs]
    longest = max((len(matrix) for matrix in matrices), default=0)
    values = np.zeros((len(matrices), longest, width), np.float32)
    mask = np.zeros((len(matrices), longest), bool)
    for row, matrix in enumerate(matrices):
        values[row, : len(matrix)] = matrix
        mask[row, : len(matrix)] = True
    return values, mask
