"""Rare words of a query that stand in a description: found first, on the scale of the model, and shown as a term."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seps.photos.search.explaining import StoredExplainer
from seps.photos.search.searcher import Searcher
from seps.photos.store.filters import Filters
from seps.photos.store.store import Store
from seps.retrieval.data import load_jsonl
from seps.retrieval.evaluate.protocol import view
from seps.retrieval.evaluate.run import evaluate, score_dataset
from seps.retrieval.languages import words_of
from seps.retrieval.ranking.terms import WORD_STRENGTH, InMemory, matches_of, ordinary_words, rare, unusual
from stores import index, model, paint

NAMED = {
    "Grandma Olga's 80th birthday in Lisbon": ["Lisbon", "grandma Olga", "80th birthday", "LISBON!", "Olga's party"],
    "uncle Bob dancing": ["uncle Bob dancing", "Bob", "is that Bob?"],
    "Marta and Piotr at the wedding of Zofia, Kraków 1998": ["Kraków", "Zofia's wedding", "1998", "Piotr"],
    "Our dog Rufus on the beach at Brighton": ["Rufus", "our dog in Brighton", "Rufus on the beach"],
    "Receipt 4471 from Hotel Miramar": ["4471", "Hotel Miramar"],
    "Ticket for platform 9, train IC 2043 to Antwerp": ["train to Antwerp", "2043"],
    "在北京的生日": ["北京", "生日"],
    "Die alte Straße nach Görlitz": ["Görlitz", "straße"],
}
ORDINARY = ["A brown dog runs over the grass.", "Two men in red shirts play football.", "A girl on a swing."]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery of ordinary descriptions, and some with names."""
    folder = tmp_path_factory.mktemp("named")
    texts = [*NAMED, *(ORDINARY[i % 3] for i in range(24)), None, None]
    lines = []
    for i, text in enumerate(texts):
        paint(folder / f"p{i:02}.jpg", i)
        lines.append(json.dumps({"image": f"p{i:02}.jpg", "captions": [ORDINARY[i % 3]], "dense": text}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def searcher(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    store = tmp_path_factory.mktemp("store") / "s"
    index(photos, store)
    return Searcher(store, model())


QUERIES = [(i, query) for i, queries in enumerate(NAMED.values()) for query in queries]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("number", "query"), QUERIES)
def test_names_places_and_numbers_come_first(searcher: Searcher, number: int, query: str, exact: bool) -> None:
    # One candidate by vector: the named photo must come by its words.
    hits = searcher.search(query, k=3, candidates=1, exact=exact)
    assert hits[0].path == f"p{number:02}.jpg"
    assert hits[0].terms["lexical"] > 0


def test_ordinary_words_change_nothing(searcher: Searcher) -> None:
    for query in ("a dog runs over the grass", "two men", "girl on a swing", "the"):
        assert not matches_of(query, searcher.store).words
        assert all(not hit.terms for hit in searcher.search(query, k=40))


def test_filters_hold(searcher: Searcher) -> None:
    assert [hit.path for hit in searcher.search("Lisbon", filters=Filters(folder="elsewhere"))] == []
    assert [hit.path for hit in searcher.search("Lisbon", filters=Filters(folder="p01.jpg"))] == ["p01.jpg"]


def test_explanations_sum_with_the_lexical_term(searcher: Searcher) -> None:
    explainer = StoredExplainer(searcher)
    for query in ("Lisbon", "our dog in Brighton", "a dog on grass"):
        hit = searcher.search(query)[0]
        found, _ = explainer.explain(hit.id, query, hit.score) or pytest.fail("the image is gone")
        assert found.score == hit.score
        words = sum(part.contribution for part in found.words) + found.rest + found.added
        parts = sum(found.patches) + found.elsewhere + sum(part.contribution for part in found.description)
        assert words == pytest.approx(hit.score, abs=1e-4)
        assert parts + found.rest + found.added == pytest.approx(hit.score, abs=1e-4)
        assert sum(found.terms.values()) == pytest.approx(hit.score, abs=1e-4)
        assert found.terms.get("lexical", 0.0) == found.added == pytest.approx(sum(found.found_words.values()))
        assert bool(found.added) == (query != "a dog on grass")


def test_the_evaluation_can_add_what_the_search_adds(searcher: Searcher, photos: Path) -> None:
    data = load_jsonl(photos / "data.jsonl")
    for record in data.records:  # one query with a name among the captions
        object.__setattr__(record, "captions", ("Rufus on the beach",))
    seen = view(data, "image")
    scores = score_dataset(model(), data, seen, lexical=True)
    wanted = {record.id: float(scores[i, 0]) for i, record in enumerate(data.records)}
    hits = searcher.search("Rufus on the beach", k=50)
    assert {hit.path: hit.score for hit in hits} == pytest.approx(wanted, abs=1e-3)
    assert evaluate(model(), data, lexical=True).as_dict()["lexical"] is True
    assert "lexical" not in evaluate(model(), data).as_dict()


def test_a_full_text_index_finds_the_same(searcher: Searcher, photos: Path, tmp_path: Path) -> None:
    """Large stores have one; the store, the memory and the index agree on every word."""
    index(photos, tmp_path / "s")
    store = Store.open(tmp_path / "s")
    paths = {row["id"]: row["path"] for part in store.scan(["id", "path"]) for row in part.rows()}
    texts = {row["path"]: row["dense"] for part in store.scan(["path", "dense"]) for row in part.rows()}
    memory = InMemory(texts)
    asked = [*{word for text in [*NAMED, *ORDINARY] for word in words_of(text)}, "art", "absent"]
    plain = {word: {paths[identity] for identity in store.containing(word, 99)} for word in asked}
    assert plain == {word: set(memory.containing(word, 99)) for word in asked}
    store.table._index_words("dense")
    store = Store.open(tmp_path / "s")
    assert not store.indexed(), "the index of the words is not that of the vectors"
    assert {word: {paths[identity] for identity in store.containing(word, 99)} for word in asked} == plain
    paint(photos / "later.jpg", 77)
    (photos / "later.jsonl").write_text(json.dumps({"image": "later.jpg", "dense": "Wanda in Gdynia"}) + "\n")
    index(photos, tmp_path / "s")
    assert len(Store.open(tmp_path / "s").containing("gdynia", 9)) == 1, "what came after the index is found too"
    (photos / "later.jsonl").unlink()
    (photos / "later.jpg").unlink()


def test_words_are_whole_and_safe() -> None:
    assert words_of("Olga's 80th, I-95 — naïve Ça") == ["olga", "80th", "95", "naïve", "ça"]
    assert words_of("e\u0301cole") == ["école"]
    assert words_of("'; DROP TABLE x --") == ["drop", "table"]
    assert words_of("...!") == []


def test_rarity_falls_with_use() -> None:
    total, counts = ordinary_words()
    assert total == 5827 and counts["dog"] > 1000
    assert unusual("dog") == unusual("the") == 0.0
    assert unusual("lisbon") == 1.0
    assert rare(1, 1) > 0.9 and rare(1, 1000) == 1.0
    assert rare(500, 1000) == 0.0 and 0 < rare(100, 1000) < 1
    values = [rare(count, 1000) for count in range(1, 400)]
    assert values == sorted(values, reverse=True)


def test_a_common_name_of_the_store_adds_nothing() -> None:
    everywhere = InMemory({str(i): f"Rufus number {i}" for i in range(100)})
    assert not matches_of("Rufus", everywhere).words
    some = InMemory({str(i): "Rufus" if i < 8 else "a dog" for i in range(100)})
    assert set(matches_of("Rufus", some).found) == {str(i) for i in range(8)}


def test_long_queries_lean_less_on_one_word() -> None:
    texts = InMemory({"0": "Lisbon", "1": "a dog"})
    short, long = (matches_of(text, texts).of("0") for text in ("Lisbon", "a man and a woman on a street in Lisbon"))
    assert short == 2 * long == pytest.approx(WORD_STRENGTH * rare(1, 2))


def test_a_query_that_is_cut_says_so(searcher: Searcher) -> None:
    assert searcher.note("a dog") == ""
    assert "48 tokens" in searcher.note("dog " * 60)
    assert searcher.search("dog " * 60)
