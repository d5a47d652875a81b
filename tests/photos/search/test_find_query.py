"""Queries that add and subtract: what is a sign, sums against a slow twin, and one sentence as the plain search."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seps.photos.search.query import Query, Term, how_read, parse, terms_of
from seps.photos.search.ranking import rank
from seps.photos.search.results import Hit
from seps.photos.search.searcher import Part, Searcher
from seps.photos.search.sums import search_combined
from seps.photos.store.tables import Columns
from stores import gallery, index, model_folder

SENTENCES = ("a dog", "number 3", "stripes and dots", "black-and-white", "a very dark picture", "C++", "+1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a dog on the beach", [("a dog on the beach", 1)]),
        ("horse + stripes - grass", [("horse", 1), ("stripes", 1), ("grass", -1)]),
        ("- grass + horse", [("grass", -1), ("horse", 1)]),
        ("+ horse", [("horse", 1)]),
        ("a black-and-white C++ book, +1 -2", [("a black-and-white C++ book, +1 -2", 1)]),
        ("  a dog  +  a cat ", [("a dog", 1), ("a cat", 1)]),
        ("horse\t-\ngrass", [("horse", 1), ("grass", -1)]),
        ('"rock - paper" + scissors', [("rock - paper", 1), ("scissors", 1)]),
        ('a "big - red" bus - rain', [('a "big - red" bus', 1), ("rain", -1)]),
        ('"quoted"', [('"quoted"', 1)]),
        ('5" nails - "hammer', [('5" nails - "hammer', 1)]),
        ("a \u2212 b", [("a \u2212 b", 1)]),
        ("beach without people", [("beach", 1), ("people", -1)]),
        ("a street with no cars + snow", [("a street", 1), ("cars", -1), ("snow", 1)]),
        ("horse - a field Without any trees", [("horse", 1), ("a field", -1), ("trees", 1)]),
        ('"beach without people"', [("beach without people", 1)]),
        ("without people", [("without people", 1)]),
        ("a without b without c", [("a without b without c", 1)]),
    ],
)
def test_what_is_a_sign(text: str, expected: list[tuple[str, int]]) -> None:
    assert [(term.text, term.sign) for term in parse(text)] == expected


def test_a_form_that_makes_parts_is_said() -> None:
    assert '"beach - people"' in how_read("beach without people")
    assert '"horse + beach - people"' in how_read("horse + beach without people")
    for text in ("a dog", "a - b", '"beach without people"', "without people", "a without b without c"):
        assert how_read(text) == ""


@pytest.mark.parametrize("text", ["horse +", "+", "-", "horse + + grass", "horse + - grass", "- - grass", "a - "])
def test_a_sign_without_anything_is_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="subtract"):
        parse(text)


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_a_blank_query(text: str) -> None:
    with pytest.raises(ValueError, match="blank"):
        parse(text)


def test_something_must_be_looked_for() -> None:
    with pytest.raises(ValueError, match="look"):
        Query(terms_of(None))
    with pytest.raises(ValueError, match="away"):
        Query(terms_of("- grass"))
    with pytest.raises(ValueError, match="away"):
        Query(terms_of(None, minus_images=["a.jpg"]))
    assert terms_of("- grass", ["a.jpg"]) == (Term("grass", sign=-1), Term("a.jpg", True))


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_and_a_sentence_stays_as_it_is(text: str) -> None:
    try:
        terms = parse(text)
    except ValueError:
        return
    assert all(term.text and term.text == term.text.strip() for term in terms)
    if not any(word in ("+", "-") for word in text.split()):
        assert terms == (Term(text.strip()),)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery of 20, most of them described, and its store with the bank."""
    root = tmp_path_factory.mktemp("sums")
    index(gallery(root / "g", 20, described=15), root / "s", bank=True)
    return root


@pytest.fixture(scope="module")
def searcher(place: Path) -> Searcher:
    return Searcher(place / "s", model_folder())


def plain(hits: list[Hit]) -> list[tuple[object, ...]]:
    return [(hit.rank, hit.id, hit.score, hit.confidence, dict(hit.terms), tuple(hit.parts)) for hit in hits]


@pytest.mark.parametrize("text", SENTENCES)
def test_one_sentence_is_exactly_the_plain_search(searcher: Searcher, text: str) -> None:
    assert plain(rank(searcher, Query(parse(text), k=20), {})) == plain(searcher.search(text, 20))


def test_one_picture_is_exactly_the_search_by_a_picture(searcher: Searcher, place: Path) -> None:
    picture = str(place / "g" / "p04.jpg")
    assert plain(rank(searcher, Query(terms_of(None, [picture]), k=20), {})) == plain(
        searcher.search_image(picture, 20)
    )


def twin(searcher: Searcher, terms: tuple[Term, ...]) -> list[dict[str, float]]:
    """What each part adds, by path: the standard scores of one search per part, with its sign and share."""
    parts = []
    for term in terms:
        found = searcher.search_image(term.text, 50) if term.is_image else searcher.search(term.text, 50)
        assert len(found) == 20
        scores = {hit.path: hit.score for hit in found}
        middle, deviation = fmean(scores.values()), pstdev(scores.values())
        parts.append({path: term.sign * (score - middle) / deviation / len(terms) for path, score in scores.items()})
    return parts


@pytest.mark.parametrize("exact", [False, True])
def test_sums_are_means_of_standard_scores(searcher: Searcher, place: Path, exact: bool) -> None:
    terms = terms_of(
        "a dog + number 3 - stripes and dots", [str(place / "g" / "p04.jpg")], [str(place / "g" / "p06.jpg")]
    )
    parts = twin(searcher, terms)
    expected = {path: sum(part[path] for part in parts) for path in parts[0]}
    hits = rank(searcher, Query(terms, k=20, exact=exact), {})
    assert {hit.path: hit.score for hit in hits} == pytest.approx(expected, abs=1e-4)
    assert [hit.path for hit in hits] == sorted(expected, key=lambda path: -expected[path])
    for hit in hits:
        assert sum(hit.parts) == pytest.approx(hit.score, abs=1e-6) and hit.confidence is None
        assert hit.parts == pytest.approx([part[hit.path] for part in parts], abs=1e-4)


def test_the_scale_of_a_part_changes_nothing(searcher: Searcher, place: Path) -> None:
    """Scores of pictures are larger than those of sentences; what counts is how pictures differ in them."""
    sentence, picture = searcher.part_of_text("a dog"), searcher.part_of_image(place / "g" / "p04.jpg")
    plain = search_combined(searcher, [sentence, picture], 20)
    scored = searcher.scored

    def enlarged(images: Columns, part: Part) -> Iterator[tuple[float, dict[str, float]]]:
        pairs = scored(images, part)
        return pairs if part.described else ((10 * score + 3, terms) for score, terms in pairs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searcher, "scored", enlarged)
        other = search_combined(searcher, [sentence, picture], 20)
    assert [hit.path for hit in other] == [hit.path for hit in plain]
    assert [hit.score for hit in other] == pytest.approx([hit.score for hit in plain], abs=1e-5)


@pytest.mark.parametrize("weights", [(0.0, 0.0), (1.0, -0.5), (float("nan"), 1.0)])
def test_weights_that_mean_nothing(searcher: Searcher, weights: tuple[float, float]) -> None:
    parts = [searcher.part_of_text("a dog"), searcher.part_of_text("a cat")]
    with pytest.raises(ValueError, match="weights"):
        search_combined(searcher, parts, 5, weights)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(SENTENCES), st.sampled_from([1, -1])), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_the_order_of_the_parts_never_matters(
    searcher: Searcher, chosen: list[tuple[str, int]], shuffler: random.Random
) -> None:
    terms = [Term("a photo"), *(Term(text, sign=sign) for text, sign in chosen)]
    mixed = shuffler.sample(terms, len(terms))
    one, other = (rank(searcher, Query(tuple(some), k=5), {}) for some in (terms, mixed))
    assert [(hit.id, hit.score, dict(hit.terms)) for hit in one] == [
        (hit.id, hit.score, dict(hit.terms)) for hit in other
    ]


def test_candidates_of_a_sum_hold_its_best(searcher: Searcher) -> None:
    """The vector of a sum is the sum of the vectors: few candidates find what scoring everything does."""
    terms = parse("a dog - stripes and dots + number 3")
    (best, *_) = rank(searcher, Query(terms, k=1, exact=True), {})
    assert best.id in {hit.id for hit in rank(searcher, Query(terms, k=8, candidates=8), {})}


def test_a_confidence_is_for_one_sentence() -> None:
    with pytest.raises(ValueError, match="sentence"):
        Query(parse("a + b"), min_confidence=0.5)


def test_equal_queries_are_one_key() -> None:
    assert Query(parse("a + b")) == Query(terms_of("a + b")) and len({Query(parse("a")), Query(parse(" a "))}) == 1
    assert str(Query(terms_of("a - b", ["c.jpg"]))) == "a - b + picture c.jpg"
    assert [Query(terms_of(text)).explained for text in ("a", "- a + b")] == ["a", "b"]
    assert Query(terms_of(None, ["c.jpg"])).explained is None
