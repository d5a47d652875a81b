"""ONNX files written by hand: protocol buffers of the few kinds that a feed-forward network needs.

The package `onnx` does the same and is not needed to run a model. The numbers are those of onnx.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_TYPES = {np.dtype(np.float32): 1, np.dtype(np.uint8): 2, np.dtype(np.int8): 3, np.dtype(np.int64): 7}
_IR_VERSION, _OPSET = 8, 17
_FLOAT, _INT, _INTS = 1, 2, 7
"""Types of attributes."""


class Graph:
    """A graph that grows node by node; `node` returns the name of what it computes."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._constants: list[bytes] = []
        self._count = 0

    def constant(self, values: Array) -> str:
        """The name of an array."""
        name = self._name()
        tensor = b"".join(_number(1, size) for size in values.shape)
        tensor += _number(2, _TYPES[values.dtype]) + _bytes(8, name.encode())
        self._constants.append(_bytes(5, tensor + _bytes(9, np.ascontiguousarray(values).tobytes())))
        return name

    def node(self, kind: str, *inputs: str, domain: str = "", **attributes: float | int | Sequence[int]) -> str:
        """One operation with one result; "" is an input that is left out."""
        return self.nodes(kind, 1, *inputs, domain=domain, **attributes)[0]

    def nodes(
        self, kind: str, results: int, *inputs: str, domain: str = "", **attributes: float | int | Sequence[int]
    ) -> list[str]:
        """One operation with several results."""
        names = [self._name() for _ in range(results)]
        node = b"".join(_bytes(1, name.encode()) for name in inputs)
        node += b"".join(_bytes(2, name.encode()) for name in names)
        node += _bytes(4, kind.encode())
        node += b"".join(_bytes(5, _attribute(name, value)) for name, value in attributes.items())
        if domain:
            node += _bytes(7, domain.encode())
        self._nodes.append(_bytes(1, node))
        return names

    def model(self, inputs: Sequence[tuple[str, type[Any], Sequence[int | str]]], output: str) -> bytes:
        """The whole file: its inputs with their types and sizes, a word for one that is free, and its output."""
        graph = b"".join(self._nodes) + _bytes(2, b"seps") + b"".join(self._constants)
        for name, kind, sizes in inputs:
            dims = b"".join(
                _bytes(1, _bytes(2, size.encode()) if isinstance(size, str) else _number(1, size)) for size in sizes
            )
            tensor = _number(1, _TYPES[np.dtype(kind)]) + _bytes(2, dims)
            graph += _bytes(11, _bytes(1, name.encode()) + _bytes(2, _bytes(1, tensor)))
        graph += _bytes(12, _bytes(1, output.encode()) + _bytes(2, _bytes(1, _number(1, 1))))
        opsets = _bytes(8, _bytes(1, b"") + _number(2, _OPSET)) + _bytes(8, _bytes(1, b"com.microsoft") + _number(2, 1))
        return _number(1, _IR_VERSION) + _bytes(2, b"seps") + _bytes(7, graph) + opsets

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"


def _attribute(name: str, value: float | int | Sequence[int]) -> bytes:
    start = _bytes(1, name.encode())
    if isinstance(value, float):
        return start + _key(2, 5) + struct.pack("<f", value) + _number(20, _FLOAT)
    if isinstance(value, int):
        return start + _number(3, value) + _number(20, _INT)
    return start + b"".join(_number(8, one) for one in value) + _number(20, _INTS)


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(value % 2**64)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
