"""The vectors of a store, written for other vector stores: a Parquet file, a Lance table, or a Qdrant collection.

n: pictures of a batch; C: width of a vector; T: patches; N: tokens that they are merged to.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from seps.extras import missing_package, require
from seps.photos.store.filters import Filters
from seps.photos.store.rows import StoreError
from seps.photos.store.store import Store
from seps.retrieval.engine.packing import Array

Target = Literal["parquet", "lance", "qdrant"]
TARGETS: tuple[Target, ...] = get_args(Target)
NAME = "pictures"
"""Of the table or collection in the written folder."""
MOST_TOKENS = 16
"""Tokens per picture that an export has at most."""
_BATCH = 512
_ROUNDS = 4
_FACTS = ("id", "path", "member", "width", "height", "dense")


def export_vectors(
    store: Store,
    to: Target,
    folder: str | os.PathLike[str],
    *,
    tokens: int | None = None,
    filters: Filters | None = None,
) -> int:
    """Write id, path, member, size, description and vector of all pictures into a new folder; returns how many.

    Vectors are compared by their dot product. With `tokens` the patches of a picture also become at most so many
    vectors of length one, for late interaction (MaxSim). Raises StoreError for a folder that has files, for a missing
    package, and for tokens of a store that keeps no patches.
    """
    place = Path(folder)
    if to not in TARGETS:
        raise StoreError(f"Vectors cannot be written to {to!r}; choose one of {', '.join(TARGETS)}.")
    if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
        raise StoreError(f"The number of tokens is {tokens}; it must be from 1 to {MOST_TOKENS}.")
    if tokens is not None and store.settings.layout.kind != "patches":
        raise StoreError(
            f"The store {store.location} keeps one vector per picture and no patches; leave out the tokens."
        )
    if os.path.lexists(place) and (not place.is_dir() or any(place.iterdir())):
        raise StoreError(f"{place} has files already; name a new folder.")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=place.parent) as made:
        staged = Path(made, "written")
        staged.mkdir()
        count = _WRITERS[to](store, staged, tokens, filters)
        staged.rename(place)
    return count


def merged_tokens(tokens: Array, count: int) -> Array:
    """(N, C) of length one: the means of at most `count` groups of (T, C) tokens, by k-means over cosines.

    The first centres are far apart, so that the same tokens give the same groups each time.
    """
    points: Array = tokens / np.maximum(np.linalg.norm(tokens, axis=1, keepdims=True), 1e-12)
    if len(points) <= count:
        return points
    mean = points.mean(axis=0)
    chosen = [int(np.argmax(points @ mean))]
    nearest = points @ points[chosen[0]]
    while len(chosen) < count:
        chosen.append(int(np.argmin(nearest)))
        nearest = np.maximum(nearest, points @ points[chosen[-1]])
    centres: Array = points[chosen]
    for _ in range(_ROUNDS):
        groups = np.argmax(points @ centres.T, axis=1)
        sums = np.zeros_like(centres)
        np.add.at(sums, groups, points)
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        centres = np.where(lengths > 1e-6, sums / np.maximum(lengths, 1e-12), centres)  # an empty group stays
    return centres


def _schema(store: Store, tokens: int | None) -> Any:
    import pyarrow as pa

    layout = store.settings.layout
    texts = [(name, pa.string()) for name in ("id", "path", "member", "description")]
    sizes = [(name, pa.int32()) for name in ("width", "height")]
    vectors = [("vector", pa.list_(pa.float32(), layout.vector_width))]
    if tokens is not None:
        vectors.append(("tokens", pa.list_(pa.list_(pa.float32(), layout.width))))
    return pa.schema([*texts, *sizes, *vectors])


def _rows(store: Store, tokens: int | None, filters: Filters | None) -> Iterator[list[dict[str, Any]]]:
    """The pictures that can be found, in batches."""
    settings, layout = store.settings, store.settings.layout
    more = () if tokens is None else layout.columns
    columns = list(dict.fromkeys([*_FACTS, "vector", *more]))
    for images in store.scan(columns, store.allowed(filters), batch_size=_BATCH):
        rows = list(images.rows(_FACTS))
        vectors = np.asarray(images.vectors(), np.float32)
        pictures = None if tokens is None else layout.unpack(images)
        for place, row in enumerate(rows):
            row["path"] = str(settings.file(row["path"]))
            row["description"] = row.pop("dense")
            row["vector"] = vectors[place]
            if pictures is not None and tokens is not None:
                patches = pictures.features.tokens[place, pictures.num_prefix_tokens :].float().numpy()
                row["tokens"] = list(merged_tokens(patches, tokens))
        yield rows


def _batches(store: Store, tokens: int | None, filters: Filters | None) -> Iterator[Any]:
    import pyarrow as pa

    schema = _schema(store, tokens)
    for rows in _rows(store, tokens, filters):
        yield pa.RecordBatch.from_pylist(rows, schema=schema)


def _write_parquet(store: Store, folder: Path, tokens: int | None, filters: Filters | None) -> int:
    require("pyarrow", "A Parquet file")
    import pyarrow.parquet

    count = 0
    with pyarrow.parquet.ParquetWriter(folder / f"{NAME}.parquet", _schema(store, tokens)) as writer:
        for batch in _batches(store, tokens, filters):
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def _write_lance(store: Store, folder: Path, tokens: int | None, filters: Filters | None) -> int:
    require("lance", "A Lance table")
    import lance
    import pyarrow as pa

    reader = pa.RecordBatchReader.from_batches(_schema(store, tokens), _batches(store, tokens, filters))
    return int(lance.write_dataset(reader, str(folder / f"{NAME}.lance")).count_rows())


def _write_qdrant(store: Store, folder: Path, tokens: int | None, filters: Filters | None) -> int:
    try:
        from qdrant_client import QdrantClient, models
    except ModuleNotFoundError as error:
        raise StoreError(missing_package("qdrant_client")) from error

    layout, count = store.settings.layout, 0
    spaces = {"vector": models.VectorParams(size=layout.vector_width, distance=models.Distance.DOT)}
    if tokens is not None:
        late = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
        spaces["tokens"] = models.VectorParams(size=layout.width, distance=models.Distance.DOT, multivector_config=late)
    client = QdrantClient(path=str(folder))
    try:
        client.create_collection(NAME, vectors_config=spaces)
        for rows in _rows(store, tokens, filters):
            points = []
            for row in rows:
                vectors = {name: np.asarray(row.pop(name)).tolist() for name in spaces}
                # Qdrant takes UUIDs; that of a picture is its id and zeros.
                identity = str(uuid.UUID(hex=row["id"].ljust(32, "0")))
                points.append(models.PointStruct(id=identity, vector=vectors, payload=row))
            client.upsert(NAME, points)
            count += len(points)
    finally:
        client.close()
    return count


_WRITERS: dict[str, Callable[[Store, Path, int | None, Filters | None], int]] = {
    "parquet": _write_parquet,
    "lance": _write_lance,
    "qdrant": _write_qdrant,
}
