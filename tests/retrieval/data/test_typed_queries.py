"""Typed queries: their file, and the rules that make them from captions."""

from __future__ import annotations

import json

import pytest

from seps.images.sources import DataError, ImageSource
from seps.retrieval.data import ImageRecord, RetrievalDataset
from seps.retrieval.data.typed import TypedQueries, TypedQuery, load_queries, queries_of_captions, save_queries


def dataset(captions: dict[str, list[str]], tmp_path) -> RetrievalDataset:
    records = [ImageRecord(name, ImageSource(tmp_path / name), tuple(texts)) for name, texts in captions.items()]
    return RetrievalDataset(tuple(records))


@pytest.fixture
def told(tmp_path) -> RetrievalDataset:
    """Six pictures of each kind, so that the rules see every word often enough."""
    kinds = {
        "red": ["A red car is on the road .", "The car is on a street ."],
        "blue": ["A blue car stands in the road .", "A car ."],
        "plain": ["A car in the street .", "There is a car on the road ."],
        "runs": ["A dog runs on the grass .", "The dog is on the lawn ."],
        "running": ["Two dogs are running in the park .", "The dogs ."],
        "jumping": ["A dog is jumping over a fence .", "A dog ."],
        "still": ["A dog on the grass .", "The dog with a ball ."],
        "puppy": ["A puppy on the lawn .", "A dog ."],
        "young": ["A puppy .", "The puppy with a ball ."],
        "swing": ["A child on a swing .", "A child in the park ."],
        "beside": ["A child by the swing .", "The swing in the park ."],
        "lonely": ["A swing in the park .", "The grass in the park ."],
    }
    return dataset({f"{kind}{i}": texts for kind, texts in kinds.items() for i in range(6)}, tmp_path)


def kinds(ids: tuple[str, ...]) -> set[str]:
    return {name.rstrip("0123456789") for name in ids}


def by_text(queries: tuple[TypedQuery, ...]) -> dict[str, TypedQuery]:
    return {text: query for query in queries for text in query.texts}


def test_nouns_with_articles_and_plurals(told) -> None:
    queries = by_text(queries_of_captions(told))
    assert queries["dog"] is queries["a dog"] is queries["dogs"]
    assert kinds(queries["dog"].right) == {"runs", "running", "jumping", "still", "puppy"}
    assert "a grass" not in queries and "grasses" not in queries


def test_a_word_that_stands_for_another_makes_a_picture_unknown(told) -> None:
    """Pictures of a puppy are called a dog in other captions; grass and a dog stand in one caption."""
    queries = by_text(queries_of_captions(told))
    assert kinds(queries["dog"].unknown) == {"young"}


def test_attributes_are_right_unknown_or_wrong(told) -> None:
    query = by_text(queries_of_captions(told))["red car"]
    assert set(query.texts) == {"red car", "a red car"}
    assert (kinds(query.right), kinds(query.unknown)) == ({"red"}, {"plain"})


def test_actions_in_all_their_forms(told) -> None:
    queries = by_text(queries_of_captions(told))
    query = queries["dog running"]
    assert query is queries["dogs running"]
    assert kinds(query.right) == {"runs", "running"}
    assert kinds(query.unknown) == {"still", "puppy", "young"}
    assert kinds(queries["dog jumping"].right) == {"jumping"}


def test_two_nouns_with_a_preposition(told) -> None:
    queries = by_text(queries_of_captions(told))
    query = queries["child on swing"]
    assert query is queries["a child on a swing"]
    assert (kinds(query.right), kinds(query.unknown)) == ({"swing"}, {"beside"})


def test_rare_queries_are_left_out(told) -> None:
    assert "red car" not in by_text(queries_of_captions(told, fewest=7))
    assert "dog running" in by_text(queries_of_captions(told, fewest=7))


def test_what_is_no_noun_is_no_query(told) -> None:
    texts = set(by_text(queries_of_captions(told)))
    assert not texts & {"runs", "the", "is", "stands", "a runs", "two", "there"}


def test_a_file_gives_back_what_was_saved(told, tmp_path) -> None:
    queries = queries_of_captions(told)
    save_queries(queries, tmp_path / "queries.jsonl")
    assert load_queries(tmp_path / "queries.jsonl") == queries


def test_images_by_number(told) -> None:
    found = TypedQueries([TypedQuery(("x",), ("red1", "elsewhere"), ("red0",)), TypedQuery(("y",), ("absent",))], told)
    assert len(found) == 1
    right, unknown = found.marks([0])
    assert right.nonzero().tolist() == [[0, 1]] and unknown.nonzero().tolist() == [[0, 0]]
    with pytest.raises(DataError, match="No typed query names an image"):
        TypedQueries([TypedQuery(("y",), ("absent",))], told)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"texts": [], "right": ["1"]}, "no text"),
        ({"texts": "dog", "right": ["1"]}, '"texts" must be a list'),
        ({"texts": ["dog"], "right": []}, "no right image"),
        ({"texts": ["dog"], "right": [" "]}, 'an entry of "right" is blank'),
        ({"texts": ["dog"], "right": ["1"], "unknown": ["1"]}, "as right and as unknown"),
        ({"texts": [7], "right": ["1"]}, "must be a text"),
        ({"kind": "image", "texts": ["dog"], "right": ["1"]}, '"kind" is'),
    ],
)
def test_a_malformed_line_is_named(line, why, tmp_path) -> None:
    path = tmp_path / "queries.jsonl"
    path.write_text(json.dumps({"texts": ["fine"], "right": [1]}) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(DataError, match=why) as error:
        load_queries(path)
    assert "line 2" in str(error.value)


def test_an_empty_file_is_refused(tmp_path) -> None:
    (tmp_path / "queries.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no typed queries"):
        load_queries(tmp_path / "queries.jsonl")
