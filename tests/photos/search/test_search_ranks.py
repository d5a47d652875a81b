"""Search: exact ranks are those of the evaluation, candidates lose little, filters filter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from messages import naming
from seps.cli.main import call
from seps.method.encoded import Texts
from seps.photos import Filters, Searcher
from seps.photos.store.rows import StoreError
from seps.retrieval.config import ModelConfig
from seps.retrieval.data import load_jsonl
from seps.retrieval.engine.keeping import image_vectors
from seps.retrieval.evaluate.protocol import view
from seps.retrieval.evaluate.run import score_dataset
from seps.retrieval.heads import ImageFeatures
from stores import TEXTS, gallery, index, model, model_folder, paint


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gallery(tmp_path_factory.mktemp("photos"), 30, described=15)


@pytest.fixture(scope="module")
def scores(photos: Path) -> torch.Tensor:
    dataset = load_jsonl(photos / "data.jsonl")
    return score_dataset(model(), dataset, view(dataset, "image"))


@pytest.fixture(scope="module")
def searcher(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    store = tmp_path_factory.mktemp("stores") / "exact"
    index(photos, store, precision="float32")
    return Searcher(store, model())


@pytest.mark.parametrize("exact", [True, False])
def test_ranks_equal_the_evaluation(searcher: Searcher, photos: Path, scores: torch.Tensor, exact: bool) -> None:
    dataset = load_jsonl(photos / "data.jsonl")
    for number, caption in enumerate(TEXTS):  # captions of the first five images
        hits = searcher.search(caption, k=30, exact=exact)
        wanted = {record.id: float(scores[i, number]) for i, record in enumerate(dataset.records)}
        # What the search adds for rare words ("stripes") is a term of its own: test_lexical.py.
        added = {hit.path: sum(hit.terms.values()) for hit in hits}
        assert {hit.path: hit.score - added[hit.path] for hit in hits} == pytest.approx(wanted, abs=2e-5)
        assert [hit.path for hit in hits] == sorted(wanted, key=lambda path: -wanted[path] - added[path])
        assert [hit.rank for hit in hits] == list(range(1, 31))


@pytest.mark.parametrize(("options", "tolerance"), [({}, 0.01), ({"precision": "int4"}, 0.1)])
def test_smaller_states_stay_close(
    photos: Path, searcher: Searcher, tmp_path: Path, options: dict[str, str], tolerance: float
) -> None:
    index(photos, tmp_path / "s", **options)
    small = Searcher(tmp_path / "s", model())
    exact = {hit.id: hit.score for hit in searcher.search("a dog", k=30)}
    assert {hit.id: hit.score for hit in small.search("a dog", k=30)} == pytest.approx(exact, abs=tolerance)


def test_index_time_slimming(photos: Path, searcher: Searcher, tmp_path: Path) -> None:
    """Fewer patches: smaller states and other scores, but the mean patch is still that of all."""
    index(photos, tmp_path / "s", precision="float32", patches=6)
    slim = Searcher(tmp_path / "s", model())
    columns = ["tokens"]
    identity = slim.search("a dog", k=1)[0].id
    sizes = [len(store.get(identity, columns)["tokens"]) for store in (slim.store, searcher.store)]  # type: ignore[index]
    assert sizes[0] - 5 == (sizes[1] - 5) * 6 // 9
    pairs = [({hit.id: hit.score for hit in one.search(text, k=30)}) for one in (slim, searcher) for text in TEXTS]
    a = torch.tensor([pairs[t][i] for t in range(5) for i in sorted(pairs[0])])
    b = torch.tensor([pairs[5 + t][i] for t in range(5) for i in sorted(pairs[0])])
    assert torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.9
    assert not torch.equal(a, b)


def test_all_patches_kept_is_no_slimming(photos: Path, searcher: Searcher, tmp_path: Path) -> None:
    index(photos, tmp_path / "s", precision="float32", patches=9)
    assert Searcher(tmp_path / "s", model()).search("a dog") == searcher.search("a dog")


@pytest.mark.parametrize("pixels", [True, False])
def test_the_vector_of_a_picture_does_not_depend_on_those_beside_it(
    pixels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture without description, next to a described one and alone; also where the head sees no pixels."""
    monkeypatch.setattr(type(model().head), "uses_pixels", pixels)
    tokens = torch.randn(2, 9, 32)
    dense, mask = model().encode_descriptions(["a dog runs", None])
    beside = image_vectors(model(), ImageFeatures(tokens, dense, mask))[1]
    alone = image_vectors(model(), ImageFeatures(tokens[1:]))[0]
    assert torch.equal(beside, alone) and bool(alone.any()) == pixels


def test_vector_is_the_pooled_part(photos: Path) -> None:
    """The dot product of the vectors, times the weight, is the pooled part of the score."""
    net = model().head.net
    tokens = torch.randn(3, 9, 32)
    dense, mask = model().encode_descriptions(["a dog runs", None, "many more words than that"])
    texts = model().encode_texts(["two dogs", "a cat"])
    got = image_vectors(model(), ImageFeatures(tokens, dense, mask)) @ texts.mean_word.T
    pooled = {}
    for weight in (0.0, net.config.pooled):
        config = replace(net.config, pooled=weight)
        net.config, before = config, net.config
        try:
            side = net.encode_images(tokens, dense=dense, dense_lengths=mask.sum(dim=1))
            pooled[weight] = net.score(side, Texts.of(texts.words[:2], texts.mask[:2])).similarity
        finally:
            net.config = before
    torch.testing.assert_close(got * 2.0, pooled[2.0] - pooled[0.0], atol=1e-5, rtol=1e-4)


def test_filters(searcher: Searcher, photos: Path) -> None:
    inside = searcher.search("a dog", k=30, filters=Filters(folder="sub"))
    assert len(inside) == 15 and all(hit.path.startswith("sub/") for hit in inside)
    assert searcher.search("a dog", filters=Filters(folder="it's ' OR 1=1 --")) == []
    assert searcher.search("a dog", filters=Filters(min_size=45)) == []
    assert len(searcher.search("a dog", k=30, filters=Filters(min_size=44), exact=True)) == 30
    times = sorted(hit.mtime for hit in searcher.search("a dog", k=30))
    middle = times[len(times) // 2]
    late = searcher.search("a dog", k=30, filters=Filters(since=middle))
    early = searcher.search("a dog", k=30, filters=Filters(until=middle))
    assert len(late) + len(early) == 30 and all(hit.mtime >= middle for hit in late)


def test_search_by_picture_finds_itself(searcher: Searcher, photos: Path, tmp_path: Path) -> None:
    for name in ("p00.jpg", "sub/p17.jpg"):
        hits = searcher.search_image(photos / name, k=5)
        assert hits[0].path == name and hits[0].score > hits[1].score
        again = searcher.search_image((photos / name).read_bytes(), k=5, exact=True)
        assert again[0].id == hits[0].id
    (tmp_path / "no.jpg").write_text("text")
    with pytest.raises(ValueError, match=naming("no.jpg")):
        searcher.search_image(tmp_path / "no.jpg")


def test_bad_requests(searcher: Searcher, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="query"):
        searcher.search("  ")
    with pytest.raises(ValueError, match="0"):
        searcher.search("a dog", k=0)
    from seps.retrieval.model import RetrievalModel

    with pytest.raises(StoreError, match="weights"):
        Searcher(searcher.store, RetrievalModel(ModelConfig(image_size=(96, 96), embed_size=32)))


def test_readers_see_what_a_writer_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.setattr("seps.photos.store.store._FRESH", timedelta(0))
    folder = gallery(tmp_path / "g", 3)
    index(folder, tmp_path / "s")
    reader = Searcher(tmp_path / "s", model())
    assert len(reader.search("a dog")) == 3
    paint(folder / "new.jpg", 44)
    index(folder, tmp_path / "s")
    assert len(reader.search("a dog")) == 4


def test_image_source_stays_inside(searcher: Searcher) -> None:
    for path in ("../../etc/passwd", "/etc/passwd", "sub/../../x"):
        with pytest.raises(StoreError, match="leads"):
            searcher.image_source({"path": path, "member": None})


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, store = gallery(tmp_path / "g", 4), str(tmp_path / "s")
    (folder / "bad.jpg").write_bytes(b"")
    assert call("index", [str(folder), "--store", store, "--model", model_folder(), "--size", "small"]) == 0
    shown = capsys.readouterr()
    assert "4 new" in shown.out and "bad.jpg" in shown.err
    for action in ("--status", "--verify", "--compact"):
        assert call("index", ["--store", store, action]) == 0
    assert "4 images checked, 0 problems." in capsys.readouterr().out
    assert call("search", ["a dog", "--store", store, "-k", "2", "--json", "--exact"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["rank"] for entry in found] == [1, 2] and {"path", "score", "rank"} <= found[0].keys()
    assert call("search", ["--image", str(folder / "p00.jpg"), "--store", store]) == 0
    assert "p00.jpg" in capsys.readouterr().out.splitlines()[1]
    (folder / "p00.jpg").unlink()
    assert call("index", ["--store", store, "--verify"]) == 1
    with pytest.raises(ValueError, match="sentence"):
        call("search", ["--store", store])
