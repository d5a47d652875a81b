"""Encoded texts of a model in the user's cache, so that a process reads what another one has encoded."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from seps.retrieval.engine.queries import Array

KEPT_FILES = 8
"""Files of one kind in the cache; the oldest go. A bank takes 30 MB at width 384, nouns 1.5 MB."""
_DIGEST = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """Where encoded texts are kept: in the cache of the model hub (`HF_HOME`), beside the models. Raises OSError."""
    from huggingface_hub import cached_assets_path

    try:
        return cached_assets_path("seps", namespace="bank", subfolder="sentences")
    except ValueError as error:  # a file where the folder, or one above it, should be
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error


def write(name: str, values: Mapping[str, Array]) -> None:
    """Keep arrays under the name of a file; its suffix is their kind. Warns where the cache cannot be written."""
    from safetensors.numpy import save

    data = save({key: np.ascontiguousarray(value) for key, value in values.items()})
    try:
        folder = cache_folder()
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-", delete=False) as file:
            try:
                file.write(hashlib.sha256(data).digest() + data)
                file.close()
                Path(file.name).replace(folder / name)
            finally:
                Path(file.name).unlink(missing_ok=True)
        kept = sorted(folder.glob(f"*{Path(name).suffix}"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-KEPT_FILES]:
            path.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"The encoded background queries cannot be kept ({error.strerror or error}), so that each run encodes them "
            "again, which takes seconds. Set HF_HOME to a folder that can be written.",
            stacklevel=2,
        )


def read(name: str) -> dict[str, Array] | None:
    """What `write` kept under the name; None where there is nothing, or it is not whole."""
    from safetensors.numpy import load

    try:
        with open(cache_folder() / name, "rb") as file:
            digest, data = file.read(_DIGEST), file.read()
    except OSError:
        return None
    if hashlib.sha256(data).digest() != digest:
        return None
    values: dict[str, Array] = load(data)
    return values
