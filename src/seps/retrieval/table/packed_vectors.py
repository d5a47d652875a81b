"""Vectors of dual encoders in few bytes: eight bits per value, or seven where more would not fit `VECTOR_BYTES`.

Each has one scale. A fixed rotation before spreads single large values, as CLIP's vectors have, over many.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any, Literal, get_args

import numpy as np

VectorCodes = Literal["int8", "int7"]
VECTOR_BYTES = 1024
"""Bytes that a packed vector has at most, up to width 1,160."""
ROTATED = 128
"""Neighbouring values that a rotation mixes, where their number divides the width."""
BLOCK = 1024
"""Vectors that are compared at a time: what fits the cache is five times as fast."""
_HEAD = np.dtype([("kind", "u1"), ("width", "<u2"), ("scale", "<f4")])
_MOST = {"int8": 127, "int7": 63}
Array = np.ndarray[Any, np.dtype[Any]]


def vector_codes(width: int) -> VectorCodes:
    """How vectors are packed so that one takes at most `VECTOR_BYTES`: the most bits that fit.

    Beyond width 1,160 seven bits do not fit either, and are taken all the same.
    """
    return "int8" if vector_bytes(width, "int8") <= VECTOR_BYTES else "int7"


def vector_bytes(width: int, codes: VectorCodes) -> int:
    """Bytes of one packed vector."""
    return _HEAD.itemsize + (width if codes == "int8" else 7 * -(-width // 8))


@functools.cache
def _rotation(width: int) -> tuple[Array, Array]:
    """Signs (C,) and an orthogonal matrix (b, b) of equal values but for their signs, b a power of two that divides C.

    It is that of Walsh and Hadamard, its own inverse. Stores depend on both: they never change.
    """
    bits = np.unpackbits(np.frombuffer(hashlib.shake_256(b"seps vectors").digest(-(-width // 8)), np.uint8))[:width]
    matrix = np.ones((1, 1), np.float32)
    for _ in range(math.gcd(width, ROTATED).bit_length() - 1):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.float32(2**0.5)
    return 1 - 2 * bits.astype(np.float32), matrix


def rotated(vectors: Array, *, back: bool = False) -> Array:
    """(B, C) float32: products of two rotated vectors are those of the vectors. `back`: the inverse."""
    signs, matrix = _rotation(vectors.shape[1])
    blocks = (vectors if back else vectors * signs).reshape(len(vectors), -1, len(matrix))
    turned: Array = (blocks @ matrix).reshape(vectors.shape)
    return turned * signs if back else turned


def pack_vectors(vectors: Array, codes: VectorCodes) -> Array:
    """(B, C) floats -> (B, `vector_bytes`) uint8: kind, C, scale and codes of each; it keeps its length.

    Codes are of equal steps, up to the largest value of the rotated vector. Of seven bits each, eight lie in seven
    bytes: the low bits of a byte are a code plus 64, and the high bits of the seven bytes are that of the eighth.
    """
    values = rotated(vectors.astype(np.float32))
    steps: Array = np.maximum(np.abs(values).max(axis=1, keepdims=True), 1e-12) / _MOST[codes]
    rounded: Array = np.rint(values / steps)
    lengths, ours = (np.linalg.norm(some, axis=1) for some in (values, rounded))
    head = np.zeros(len(values), _HEAD)
    head["kind"], head["width"] = get_args(VectorCodes).index(codes), values.shape[1]
    head["scale"] = lengths / np.maximum(ours, 1.0)
    if codes == "int8":
        body: Array = rounded.astype(np.int8).view(np.uint8)
    else:
        padded = np.pad(rounded + 64, ((0, 0), (0, -values.shape[1] % 8)), constant_values=64).astype(np.uint8)
        groups = padded.reshape(len(values), -1, 8)
        body = (groups[..., :7] | ((groups[..., 7:] >> np.arange(7, dtype=np.uint8)) << 7)).reshape(len(values), -1)
    return np.concatenate([head.view(np.uint8).reshape(len(values), -1), body], axis=1)


def _parts(packed: Array) -> tuple[VectorCodes, int, Array, Array]:
    """Kind, width, scales (B,) and codes of packed vectors. Raises ValueError for bytes that are none."""
    head = np.ascontiguousarray(packed[:, : _HEAD.itemsize]).view(_HEAD)[:, 0]
    kind, width = int(head["kind"][0]), int(head["width"][0])
    kinds = get_args(VectorCodes)
    whole = kind < len(kinds) and packed.shape[1] == vector_bytes(width, kinds[kind])
    if not whole or (head["kind"] != kind).any() or (head["width"] != width).any():
        raise ValueError(f"{packed.shape[1]} bytes are no packed vector of kind {kind} and width {width}.")
    return kinds[kind], width, head["scale"], packed[:, _HEAD.itemsize :]


def unpack_vectors(packed: Array) -> Array:
    """(B, C) float32 of vectors that `pack_vectors` packed. Raises ValueError for bytes that are none."""
    codes, width, scales, body = _parts(packed)
    if codes == "int8":
        values: Array = np.ascontiguousarray(body).view(np.int8).astype(np.float32)
    else:
        groups = body.reshape(len(body), -1, 7)
        values = np.empty((*groups.shape[:2], 8), np.float32)
        values[..., :7] = groups & 127
        values[..., 7] = (groups >> 7) @ (1 << np.arange(7, dtype=np.uint8))
        values = (values - 64).reshape(len(body), -1)[:, :width]
    return rotated(values * scales[:, None], back=True)


def packed_products(packed: Array, query: Array) -> Array:
    """(B,) float32 products of packed vectors of one kind with a query (C,), without unpacking them.

    With seven bits a byte, as a signed number x with the high bit h, has the code x + 128 h - 64, and seven h make up
    the eighth code: the sum is a product of the bytes with the query and one of their high bits.
    Raises ValueError for bytes that are no vectors.
    """
    codes, width, scales, body = _parts(packed)
    wanted = rotated(query[None].astype(np.float32))[0]
    sums: Array = np.empty(len(body), np.float32)
    low, high, off = wanted, None, np.float32(0)
    if codes == "int7":
        groups = np.pad(wanted, (0, -width % 8)).reshape(-1, 8)
        low, off = groups[:, :7].ravel(), 64 * groups.sum()
        high = (groups[:, 7:] * (1 << np.arange(7))).astype(np.float32).ravel() + 128 * low
    for start in range(0, len(body), BLOCK):
        some = np.ascontiguousarray(body[start : start + BLOCK]).view(np.int8)
        sums[start : start + BLOCK] = some.astype(np.float32) @ low
        if high is not None:
            sums[start : start + BLOCK] -= (some >> 7).astype(np.float32) @ high  # -1 where it is set
    products: Array = (sums - off) * scales
    return products


def packed_width(packed: Array) -> int:
    """C of packed vectors (B, bytes). Raises ValueError for bytes that are none."""
    return _parts(packed[:1])[1]
