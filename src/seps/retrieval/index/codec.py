"""Token matrices as compact bytes: float32, float16, or int8 with a scale a row.

Shapes: R rows, C width, B matrices.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from seps.retrieval.config import StoredPrecision

Precision = StoredPrecision
_KINDS: tuple[Precision, ...] = get_args(StoredPrecision)
_HEAD = struct.Struct("<BHH")
Array = np.ndarray[Any, np.dtype[Any]]


class PackingError(ValueError):
    """Bytes that are no packed matrix."""


def pack(rows: Tensor, precision: Precision = "float16") -> bytes:
    """(R, C) -> bytes: kind, R, C, the rows' scales (int8 alone), the values."""
    values: Array = rows.detach().float().cpu().numpy()
    head = _HEAD.pack(_KINDS.index(precision), *values.shape)
    if precision == "float32":
        return head + values.astype("<f4").tobytes()
    if precision == "float16":
        largest = np.finfo(np.float16).max
        return head + values.clip(-largest, largest).astype("<f2").tobytes()
    scales: Array = np.maximum(np.abs(values).max(axis=1, keepdims=True), 1e-12) / 127
    rounded: Array = np.rint(values / scales).astype(np.int8)
    return head + scales.astype("<f4").tobytes() + rounded.tobytes()


def packed_shape(blob: bytes) -> tuple[int, int]:
    """(R, C) of packed bytes. Raises PackingError for bytes that are not whole."""
    if len(blob) < _HEAD.size:
        raise PackingError(f"{len(blob)} bytes are no packed matrix.")
    kind, rows, width = _HEAD.unpack_from(blob)
    sizes = {0: 4 * width, 1: 2 * width, 2: width + 4}
    if kind not in sizes or len(blob) != _HEAD.size + rows * sizes[kind]:
        raise PackingError(f"{len(blob)} bytes do not hold a {rows} x {width} matrix of kind {kind}.")
    return rows, width


def unpack(blob: bytes) -> Array:
    """The (R, C) matrix that `pack` packed, float32. Raises PackingError for bytes that are not whole."""
    rows, width = packed_shape(blob)
    kind = _KINDS[blob[0]]
    start = _HEAD.size
    if kind == "int8":
        scales = np.frombuffer(blob, "<f4", rows, start)[:, None]
        values = np.frombuffer(blob, np.int8, rows * width, start + 4 * rows).reshape(rows, width)
        scaled: Array = np.multiply(values, scales, dtype=np.float32)
        return scaled
    values = np.frombuffer(blob, "<f4" if kind == "float32" else "<f2", rows * width, start)
    return values.reshape(rows, width).astype(np.float32)


def unpack_alike(column: Any) -> Array:
    """(B, R, C) float32 of an Arrow column of B matrices of one shape, all at once where their bytes lie in a row.

    Raises PackingError for bytes that are not whole.
    """
    blobs = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    count = len(blobs)
    first = blobs[0].as_py() if count else b""
    rows, width = packed_shape(first)
    offsets = np.frombuffer(blobs.buffers()[1], "<i8", count + 1, 8 * blobs.offset)
    if blobs.null_count or (np.diff(offsets) != len(first)).any():
        return np.stack([unpack(blob) for blob in blobs.to_pylist()])
    whole = np.frombuffer(blobs.buffers()[2], np.uint8, count * len(first), int(offsets[0])).reshape(count, -1)
    if (whole[:, : _HEAD.size] != whole[0, : _HEAD.size]).any():
        return np.stack([unpack(blob) for blob in blobs.to_pylist()])
    kind, body = _KINDS[first[0]], whole[:, _HEAD.size :]
    if kind == "int8":
        scales = np.ascontiguousarray(body[:, : 4 * rows]).view("<f4")[..., None]
        values = body[:, 4 * rows :].view(np.int8).reshape(count, rows, width)
        scaled: Array = np.multiply(values, scales, dtype=np.float32)
        return scaled
    plain = np.ascontiguousarray(body).view("<f4" if kind == "float32" else "<f2")
    return plain.reshape(count, rows, width).astype(np.float32)


def unpack_padded(blobs: Sequence[bytes | None], width: int) -> tuple[Tensor, Tensor]:
    """B matrices, None for none, padded to the longest: values (B, R, C) float32 and mask (B, R) bool."""
    matrices = [np.zeros((0, width), np.float32) if blob is None else unpack(blob) for blob in blobs]
    longest = max((len(matrix) for matrix in matrices), default=0)
    values = np.zeros((len(matrices), longest, width), np.float32)
    mask = np.zeros((len(matrices), longest), bool)
    for row, matrix in enumerate(matrices):
        values[row, : len(matrix)] = matrix
        mask[row, : len(matrix)] = True
    return torch.from_numpy(values), torch.from_numpy(mask)
