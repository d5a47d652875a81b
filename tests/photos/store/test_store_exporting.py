"""The vectors of a store in other vector stores, searched by these: the same order as by the store's own vectors."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from duals import dual_folder
from messages import naming
from seps.cli.main import call
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.library import Library
from seps.photos.store.exporting import merged_tokens
from seps.photos.store.rows import StoreError
from seps.retrieval.engine.loading import load_engine
from stores import gallery, index, model_folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("exporting")
    index(gallery(place / "photos"), place / "s")
    return place / "photos", place / "s"


@pytest.fixture
def library(made: tuple[Path, Path]) -> Any:
    with Library(store=made[1], model=model_folder()) as library:
        yield library


def by_own_vectors(library: Library, text: str) -> list[str]:
    """Ids, best first, by the dot product with what the store holds."""
    ids, scores = [], []
    for images in library.store.scan(["id", "vector"]):
        ids += images.values("id")
        scores += (np.asarray(images.vectors(), np.float32) @ library.vector(text)).tolist()
    return [ids[place] for place in np.argsort(-np.array(scores), kind="stable")]


def late(words: np.ndarray[Any, Any], tokens: list[Any]) -> float:
    return float((words @ np.stack(tokens).T).max(axis=1).sum())


def test_the_vector_of_a_sentence_finds_its_candidates(library: Library) -> None:
    vector = library.vector("green noise")
    nearest = library.store.nearest(vector, 8, ["id"])
    assert nearest.values("id") == by_own_vectors(library, "green noise")


def test_parquet(library: Library, made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "p"
    assert call("export", ["--store", str(made[1]), "--to", "parquet", "--tokens", "4", "-o", str(out)]) == 0
    assert "8 pictures" in capsys.readouterr().out
    rows = pyarrow.parquet.read_table(out / "pictures.parquet").to_pylist()
    assert len(rows) == 8 and [path.name for path in out.iterdir()] == ["pictures.parquet"]
    assert list(out.parent.iterdir()) == [out]
    for row in rows:
        assert Path(row["path"]).is_file() and (row["width"], row["height"]) == (60, 44) and row["member"] is None
        np.testing.assert_array_equal(library.store.select([row["id"]], ["vector"]).vectors()[0], row["vector"])
        assert len(row["tokens"]) == 4
        np.testing.assert_allclose(np.linalg.norm(row["tokens"], axis=1), 1, atol=1e-5)
    assert sum(row["description"] is not None for row in rows) == 4


def test_lance(library: Library, tmp_path: Path) -> None:
    import lance

    assert library.export("lance", tmp_path / "l", tokens=4) == 8
    table = lance.dataset(str(tmp_path / "l" / "pictures.lance"))
    query = {"column": "vector", "q": library.vector("green noise"), "k": 8, "metric": "dot"}
    assert table.to_table(columns=["id"], nearest=query)["id"].to_pylist() == by_own_vectors(library, "green noise")
    words = library.word_vectors("green noise")
    rows = table.to_table(columns=["id", "tokens"]).to_pylist()
    order = sorted(rows, key=lambda row: -late(words, row["tokens"]))
    query = {"column": "tokens", "q": words.tolist(), "k": 8, "metric": "cosine"}
    found = table.to_table(columns=["id"], nearest=query)["id"].to_pylist()
    assert found == [row["id"] for row in order]


def test_qdrant(library: Library, tmp_path: Path) -> None:
    qdrant = pytest.importorskip("qdrant_client")
    assert library.export("qdrant", tmp_path / "q", tokens=4) == 8
    client = qdrant.QdrantClient(path=str(tmp_path / "q"))
    text = "green noise"
    hits = client.query_points("pictures", query=library.vector(text), using="vector", limit=8).points
    assert [hit.payload["id"] for hit in hits] == by_own_vectors(library, text)
    assert all(uuid.UUID(str(hit.id)).hex.startswith(hit.payload["id"]) for hit in hits)
    assert all(Path(hit.payload["path"]).is_file() for hit in hits) and "description" in hits[0].payload
    words = library.word_vectors(text)
    hits = client.query_points("pictures", query=words, using="tokens", limit=8, with_vectors=True).points
    assert len(hits) == 8
    for hit in hits:
        assert hit.score == pytest.approx(late(words, hit.vector["tokens"]), abs=1e-4)
    server = qdrant.QdrantClient(":memory:")  # any other Qdrant
    client.migrate(server)
    assert server.count("pictures").count == 8
    client.close()


def test_a_store_of_single_vectors_has_no_tokens(tmp_path: Path) -> None:
    folder = str(dual_folder("clip"))
    engine = load_engine(folder)
    index_folder(
        gallery(tmp_path / "g", 4), tmp_path / "s", engine, folder, options=IndexOptions(workers=1, bank=False)
    )
    with Library(store=tmp_path / "s", model=folder) as library:
        with pytest.raises(StoreError, match="one vector"):
            library.export("lance", tmp_path / "x", tokens=4)
        assert library.export("qdrant", tmp_path / "q") == 4
        qdrant = pytest.importorskip("qdrant_client")
        client = qdrant.QdrantClient(path=str(tmp_path / "q"))
        hits = client.query_points("pictures", query=library.vector("a dog"), using="vector", limit=4).points
        assert [hit.payload["id"] for hit in hits] == by_own_vectors(library, "a dog")
        client.close()


def test_merged_tokens_are_the_means_of_what_is_alike() -> None:
    generator = np.random.default_rng(0)
    centres = np.linalg.qr(generator.normal(size=(16, 16)))[0][:3]
    points = np.repeat(centres, 10, axis=0) + generator.normal(size=(30, 16)) * 0.01
    merged = merged_tokens(points.astype(np.float32), 3)
    assert np.allclose(np.sort((merged @ centres.T).max(axis=0)), 1, atol=1e-3)
    assert len(merged_tokens(points[:2], 3)) == 2 and len(merged_tokens(np.ones((9, 4)), 3)) == 3
    assert np.isfinite(merged_tokens(np.zeros((9, 4)), 3)).all()


def test_what_cannot_be_written_is_a_sentence(library: Library, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(StoreError, match=naming("full", "new folder")):
        library.export("parquet", tmp_path / "full")
    with pytest.raises(StoreError, match=naming("17", "16")):
        library.export("parquet", tmp_path / "x", tokens=17)
    with pytest.raises(StoreError, match=naming("faiss", "parquet")):
        library.export("faiss", tmp_path / "x")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
