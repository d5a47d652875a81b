"""Packed vectors of dual encoders: at most a kilobyte each, errors within bounds, and stores of floats stay floats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duals import dual_folder
from seps.library.duplicates import read_gallery
from seps.retrieval.index import zeroshot
from seps.retrieval.index.build import IndexOptions, index_folder
from seps.retrieval.index.codec import whole_vectors
from seps.retrieval.index.connection import open_dataset
from seps.retrieval.index.maintenance import verify
from seps.retrieval.index.rows import FORMAT, PACKED, Filters, StoreError, StoreSettings, schema
from seps.retrieval.index.search import Searcher
from seps.retrieval.index.store import Store
from seps.retrieval.index.zeroshot import load_search_model
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.table import packed_vectors
from seps.retrieval.table.packed_vectors import VectorCodes, pack_vectors, packed_products, unpack_vectors
from seps.retrieval.table.vector_index import Prior
from stores import few_sentences, paint

pytestmark = pytest.mark.usefixtures("no_network")
QUERIES = ("A red dog", "the cat runs on a blue square", "dots")
CODES: tuple[VectorCodes, ...] = ("int8", "int7")


@pytest.fixture(scope="module")
def mini() -> Any:
    return from_pretrained("mini")


@pytest.fixture(autouse=True)
def _mini_once(monkeypatch: pytest.MonkeyPatch, mini: Any) -> None:
    monkeypatch.setattr(zeroshot, "from_pretrained", lambda name, **more: mini)
    few_sentences(monkeypatch)


def units(count: int, width: int, seed: int = 0) -> Any:
    found = np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.mark.parametrize("width", [512, 640, 768, 1024, 1152])
def test_a_vector_of_published_widths_takes_at_most_a_kilobyte(width: int) -> None:
    codes = packed_vectors.vector_codes(width)
    assert codes == ("int7" if width > 1000 else "int8")
    packed = pack_vectors(units(3, width), codes)
    kinds = StoreSettings("/x", "m", "0" * 32, width, (1, 1), 0, kind="vectors", vector_codes=codes, words_width=384)
    assert packed.shape[1] == packed_vectors.vector_bytes(width, codes) <= 1024
    assert schema(kinds).field("vector").type.list_size == packed.shape[1]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(0, 9), st.sampled_from(CODES), st.floats(0.0, 30.0))
def test_what_is_unpacked_is_near_and_as_long(width: int, seed: int, codes: VectorCodes, outlier: float) -> None:
    """Every rotated value is at most half a step off, before the scale gives the vector its length back."""
    vectors = units(4, width, seed)
    vectors[:2, 0] += np.float32(outlier)
    back = unpack_vectors(pack_vectors(vectors, codes))
    assert back.shape == vectors.shape and back.dtype == np.float32
    most = 127 if codes == "int8" else 63
    largest = np.abs(packed_vectors.rotated(vectors)).max(axis=1)
    assert (np.linalg.norm(back - vectors, axis=1) <= 1.01 * width**0.5 * largest / most / 2 + 1e-6).all()
    assert np.linalg.norm(back, axis=1) == pytest.approx(np.linalg.norm(vectors, axis=1), rel=1e-5)
    query = units(1, width, seed + 1)[0]
    assert packed_products(pack_vectors(vectors, codes), query) == pytest.approx(back @ query, abs=1e-4 * (1 + outlier))


@pytest.mark.parametrize("width", [512, 1152, 100, 7])
def test_the_rotation_keeps_products_and_spreads_a_large_value(width: int) -> None:
    a, b = units(2, width)
    turned = packed_vectors.rotated(np.stack([a, b]))
    assert float(turned[0] @ turned[1]) == pytest.approx(float(a @ b), abs=1e-6)
    assert packed_vectors.rotated(turned, back=True) == pytest.approx(np.stack([a, b]), abs=1e-6)
    one = np.zeros((1, width), np.float32)
    one[0, 3] = 1
    block = {512: 128, 1152: 128, 100: 4, 7: 1}[width]
    assert np.abs(packed_vectors.rotated(one)).max() == pytest.approx(block**-0.5)


def test_zeros_and_damaged_bytes() -> None:
    for codes in CODES:
        packed = pack_vectors(np.zeros((2, 20), np.float32), codes)
        assert not unpack_vectors(packed).any()
        for damaged in (packed[:, :-1], np.full_like(packed, 255)):
            with pytest.raises(ValueError, match="no packed vector"):
                unpack_vectors(damaged)


def test_packed_bytes_are_what_they_were() -> None:
    """A store depends on the rotation and the layout: these bytes must never change."""
    values = np.arange(1, 17, dtype=np.float32)[None] / 16
    assert pack_vectors(values, "int8").tobytes().hex() == GOLDEN["int8"]
    assert pack_vectors(values, "int7").tobytes().hex() == GOLDEN["int7"]


GOLDEN = {
    "int8": "001000c23f153c1f3aa3bf71cd561fefd30a2681410ab8",
    "int7": "0110004b50963ccfdd92a07826eb372ac5d3816045",
}


def photos(folder: Path, start: int = 0, count: int = 7, described: int = 3) -> Path:
    lines = []
    for i in range(start, start + count):
        paint(folder / f"p{i}.png", i, (60 + 9 * i, 44))
        if i < described:
            lines.append(json.dumps({"image": f"p{i}.png", "captions": ["x"], "dense": f"a dog, picture {i}"}))
    if lines:
        (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def indexed(folder: Path, store: Path, **options: Any) -> Searcher:
    model = load_search_model(dual_folder("clip"))
    index_folder(folder, store, model, str(dual_folder("clip")), options=IndexOptions(workers=1, **options))
    return Searcher(store, model)


@pytest.fixture
def both(tmp_path: Path) -> tuple[Searcher, Searcher]:
    """Stores of the same pictures, packed by default, and of floats."""
    folder = photos(tmp_path / "g")
    return indexed(folder, tmp_path / "s"), indexed(folder, tmp_path / "full", precision="float32")


def test_the_default_is_packed_and_scores_hardly_change(both: tuple[Searcher, Searcher], tmp_path: Path) -> None:
    """Two stages give what scoring everything gives, for sentences and for pictures, with descriptions and the bank."""
    packed, full = both
    assert (packed.store.settings.vector_codes, packed.store.settings.format) == ("int8", PACKED)
    assert (full.store.settings.vector_codes, full.store.settings.format) == (None, FORMAT)
    assert verify(packed.store) == [] and not packed.store.indexed()
    for query in QUERIES:
        found = {hit.path: hit.score for hit in packed.search(query, 20)}
        every = {hit.path: hit.score for hit in packed.search(query, 20, exact=True)}
        assert list(found) == list(every) and found == pytest.approx(every, abs=1e-6)
        wanted = {hit.path: hit.score for hit in full.search(query, 20)}
        assert found == pytest.approx(wanted, abs=0.02)
    for name in ("p1.png", "p5.png"):
        hit = packed.search_image(tmp_path / "g" / name, 3)[0]
        assert hit.path == name and hit.score == pytest.approx(1, abs=5e-3)
    assert [hit.path for hit in packed.search("dots", 5, filters=Filters(folder="not there"))] == []
    vectors, wanted_vectors = (read_gallery(one.store).vectors for one in both)
    assert vectors == pytest.approx(wanted_vectors, abs=0.02) and vectors.shape == wanted_vectors.shape


def test_candidates_are_the_nearest_by_the_whole_search_vector(both: tuple[Searcher, Searcher]) -> None:
    """Against a slow twin: every vector unpacked, with the description's part, and levels beside."""
    store = both[0].store
    rows = store.select(sorted(store.known()), ["id", "vector", "mean", "bank"])
    vectors, levels = whole_vectors(rows, store.settings), np.array(rows.values("bank"))
    assert np.abs(vectors[:, store.settings.width :]).max(axis=1).astype(bool).sum() == 3
    assert vectors == pytest.approx(whole_vectors(both[1].store.select(rows.values("id"), ["id", "vector"]),
                                                  both[1].store.settings), abs=0.02)  # fmt: skip
    for seed in range(6):
        query = units(1, vectors.shape[1], seed)[0]
        order = [rows.values("id")[place] for place in np.argsort(-(vectors @ query), kind="stable")]
        assert store.nearest(query, 4, ["id"]).values("id") == order[:4]
        prior = Prior(0.5, -1.0)
        best = np.argsort(-(0.5 * vectors @ query - levels), kind="stable")[:3]
        assert set(store.nearest(query, 3, ["id"], None, prior).values("id")) == {rows.values("id")[i] for i in best}


def test_stores_of_floats_stay_floats_and_packed_ones_packed(both: tuple[Searcher, Searcher], tmp_path: Path) -> None:
    """More pictures come, one changes: each store keeps its kind, whoever asks without an option."""
    photos(tmp_path / "g", 7, 3)
    paint(tmp_path / "g" / "p2.png", 30, (80, 44))
    for store, codes in (("s", "int8"), ("full", None)):
        searcher = indexed(tmp_path / "g", tmp_path / store)
        assert (len(searcher.store), searcher.store.settings.vector_codes) == (10, codes)
        assert verify(searcher.store) == []
        assert searcher.search_image(tmp_path / "g" / "p8.png", 1)[0].path == "p8.png"
        assert searcher.search_image(tmp_path / "g" / "p2.png", 1)[0].path == "p2.png"
    with pytest.raises(StoreError, match=r"keeps one vector as int8 .*, not one vector as floats"):
        indexed(tmp_path / "g", tmp_path / "s", precision="float16")
    with pytest.raises(StoreError, match=r"keeps one vector as floats .* as float32, not .* as int8"):
        indexed(tmp_path / "g", tmp_path / "full", precision="int8")


def test_a_store_of_the_former_release_keeps_its_precision(tmp_path: Path) -> None:
    """Its settings know no packed vectors; words were float16 and vectors float32 by default."""
    folder = photos(tmp_path / "g")
    store = indexed(folder, tmp_path / "s", precision="float16").store
    former = json.loads(store.settings.to_json())
    del former["vector_codes"]
    open_dataset(store.location).update_schema_metadata({"seps": json.dumps(former)})
    photos(folder, 7, 1)
    for options in ({}, {"precision": "float16"}):
        after = indexed(folder, tmp_path / "s", **options)
        assert len(after.store) == 8 and after.store.settings.vector_codes is None
        assert open_dataset(after.store.location).schema.field("vector").type.value_type == "float"
    with pytest.raises(StoreError, match="newer release"):
        StoreSettings.from_json(replace(store.settings, format=PACKED + 1).to_json(), "x")


def test_a_damaged_vector_is_told(both: tuple[Searcher, Searcher]) -> None:
    store: Store = both[0].store
    row = next(iter(store.rows(sorted(store.known())[:1]).values()))
    store.put([replace(row, vector=np.zeros(len(row.vector), np.uint8))])
    assert any("damaged" in str(problem) and row.path in str(problem) for problem in verify(store))
