"""Named tensors from weight files that others wrote, without running anything that is in them.

A TorchScript archive, as OpenAI publishes CLIP (`ViT-B-16.pt`), is a zip: `data.pkl`, a pickle of the module, `data/`
with the numbers of each tensor, and `code/`, its program. `torch.jit.load` would compile that program, and a plain
unpickler would call whatever the pickle names. Here the pickle can name four kinds of things: a module of the archive
(it becomes a bag of attributes), a tensor (a place in `data/` with a shape), a list, and a number type. Anything else
is refused. Files of `torch.save` are read by torch's own restricted unpickler (`weights_only`).
"""

from __future__ import annotations

import collections
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .weights import EncoderUnavailable, read_pickled_tensors

_DTYPES = {
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str
    count: int


@dataclass(frozen=True)
class _Place:
    """Where in a storage a tensor lies."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Module:
    """A module of the archive: its attributes, and none of its code."""

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.attributes = dict(state)


class _Call:
    """A function that the pickle may call; an object without room for attributes, so that it cannot be changed."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of a function")

    def __call__(self, *values: Any) -> Any:
        return self._function(*values)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _Place:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor has no storage")
    return _Place(storage, int(offset), tuple(map(int, size)), tuple(map(int, stride)))


_FUNCTIONS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("collections", "OrderedDict"): lambda *pairs: dict(*pairs),
    ("torch.jit._pickle", "restore_type_tag"): lambda value, _: value,
    **{("torch.jit._pickle", f"build_{kind}list"): list for kind in ("int", "double", "bool", "tensor")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "__torch__" or module.startswith("__torch__."):
            return _Module
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) in _FUNCTIONS:
            return _Call(_FUNCTIONS[module, name])
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of weights needs")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it holds a {kind!r} where numbers should be")
        return _Storage(dtype, str(key), int(count))


def read_tensors(path: Path | str) -> dict[str, Tensor]:
    """The named tensors of a .pt, .pth, .bin or .safetensors file, in float32 where they are floating point.

    Raises EncoderUnavailable when the file is not there, is damaged, or holds anything but tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise EncoderUnavailable(f"There is no file {path}.")
    if path.suffix == ".safetensors":
        found = _read_safetensors(path)
    elif is_script_archive(path):
        found = read_script_archive(path)
    else:
        found = read_pickled_tensors(path)
    return {name: value.float() if value.is_floating_point() else value for name, value in found.items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found: dict[str, Tensor] = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise EncoderUnavailable(f"The file {path} cannot be read: {error}. Download it again.") from error
    return found


def is_script_archive(path: Path) -> bool:
    """Whether the file is a TorchScript archive (a zip with constants.pkl), not one of `torch.save`."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def read_script_archive(path: Path) -> dict[str, Tensor]:
    """The tensors of a TorchScript archive (`torch.jit.save`) by their names in the module's state dict.

    Nothing of the archive is run. Raises EncoderUnavailable for one that is damaged or holds more than weights.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (listing,) = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            folder = listing.removesuffix("data.pkl")
            if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
                raise pickle.UnpicklingError("its numbers are stored in another byte order")
            with archive.open(listing) as stream:
                root = _Unpickler(stream).load()
            if not isinstance(root, _Module):
                raise pickle.UnpicklingError("its root is no module")
            return {name: _numbers(place, archive, folder) for name, place in _places(root)}
    except Exception as error:  # a broken pickle surfaces as almost any type
        raise EncoderUnavailable(
            f"The TorchScript archive {path} was not read: {error or type(error).__name__}. It is damaged, or holds "
            "more than weights."
        ) from error


def _places(root: _Module) -> Iterator[tuple[str, _Place]]:
    """(name, place) of every tensor below `root`."""
    waiting = collections.deque([("", root)])
    seen = {id(root)}
    while waiting:
        prefix, module = waiting.popleft()
        for name, value in module.attributes.items():
            match value:
                case _Place():
                    yield f"{prefix}{name}", value
                case _Module() if id(value) not in seen:
                    seen.add(id(value))
                    waiting.append((f"{prefix}{name}.", value))


def _numbers(place: _Place, archive: zipfile.ZipFile, folder: str) -> Tensor:
    """The tensor at a place, a copy of its own."""
    storage = place.storage
    entry = archive.getinfo(f"{folder}data/{storage.key}")
    width = torch.empty(0, dtype=storage.dtype).element_size()
    last = place.offset + sum((size - 1) * stride for size, stride in zip(place.size, place.stride, strict=True))
    inside = min((place.offset, *place.stride), default=0) >= 0 and (0 in place.size or last < storage.count)
    if entry.file_size != storage.count * width or not inside:
        raise pickle.UnpicklingError(f"the numbers of tensor {storage.key} are cut or do not fit its shape")
    if not storage.count or 0 in place.size:
        return torch.empty(place.size, dtype=storage.dtype)
    flat = torch.frombuffer(bytearray(archive.read(entry)), dtype=storage.dtype)
    return flat.as_strided(place.size, place.stride, place.offset).clone()
