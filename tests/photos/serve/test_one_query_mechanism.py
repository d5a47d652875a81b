"""`seps find` and the page answer a query of several parts with the same ranking and the same scores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from seps.cli.main import call
from seps.photos.search import sums
from seps.photos.search.searcher import Searcher
from serving import Client
from stores import few_sentences, gallery, index, model_folder

SUM = "a dog + number 3 - stripes and dots"
PICTURE = "p04.jpg"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A gallery of 20, most of them described, and its store with a bank of few sentences, for all tests."""
    root = tmp_path_factory.mktemp("doors")
    with pytest.MonkeyPatch.context() as patch:
        few_sentences(patch)
        index(gallery(root / "g", 20, described=15), root / "s", bank=True)
        shutil.copy(root / "g" / PICTURE, root / "asked.jpg")
        yield root


@pytest.fixture(scope="module")
def searcher(place: Path) -> Searcher:
    return Searcher(place / "s", model_folder())


def by_command(place: Path, text: str, picture: bool, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    """Results of `seps find`."""
    words = [text, "--store", str(place / "s"), "--no-update", "--json", "-k", "20", "--model", model_folder(), *more]
    assert call("find", [*words, *(["--image", str(place / "asked.jpg")] if picture else [])]) == 0
    return json.loads(capsys.readouterr().out)


def by_page(place: Path, client: Client, text: str, picture: bool, **more: object) -> Any:
    """Results of the page's address."""
    params: dict[str, object] = {"q": text, "k": 20, **more}
    if picture:
        params["upload"] = client.post("/api/upload", content=(place / "asked.jpg").read_bytes()).json()["upload"]
    answer = client.get("/api/search", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


@pytest.mark.parametrize(("text", "picture"), [("a dog", True), (SUM, False), (SUM, True), ('"rock - paper"', False)])
def test_both_doors_give_one_ranking(
    place: Path, client: Client, capsys: pytest.CaptureFixture[str], text: str, picture: bool
) -> None:
    told = by_command(place, text, picture, capsys)
    shown = by_page(place, client, text, picture)
    names = [(str(Path(hit["path"]).relative_to(place / "g")), hit["score"], hit.get("confidence")) for hit in told]
    assert [(hit["path"], hit["score"], hit["confidence"]) for hit in shown] == names
    assert [adding(hit) for hit in shown] == [adding(hit) for hit in told]


def adding(hit: dict[str, Any]) -> list[tuple[str, float]]:
    """What each part adds; the command names the file of a picture."""
    return [
        ("picture" if part["part"].startswith("picture") else part["part"], part["score"])
        for part in hit.get("parts", [])
    ]


def standard_scores(searcher: Searcher, place: Path, picture: bool) -> list[tuple[int, dict[str, float]]]:
    """Slow twin: signs, and standard scores by path, of one search per part over the whole gallery."""
    plain = [
        (sign, {hit.path: hit.score for hit in searcher.search(text, 20, exact=True)})
        for sign, text in ((1, "a dog"), (1, "number 3"), (-1, "stripes and dots"))
    ]
    if picture:
        found = searcher.search_image(place / "asked.jpg", 20, exact=True)
        plain.append((1, {hit.path: hit.score for hit in found}))
    return [
        (sign, {path: (score - fmean(scores.values())) / pstdev(scores.values()) for path, score in scores.items()})
        for sign, scores in plain
    ]


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.5, 1.0])
def test_a_sum_beside_a_picture_against_the_twin(
    place: Path, client: Client, searcher: Searcher, weight: float
) -> None:
    weights = [1 - weight, 1 - weight, 1 - weight, weight]
    parts = standard_scores(searcher, place, True)
    for hit in by_page(place, client, SUM, True, weight=weight):
        own = [
            share * sign * standard[hit["path"]] / sum(weights)
            for share, (sign, standard) in zip(weights, parts, strict=True)
        ]
        assert hit["score"] == pytest.approx(sum(own), abs=1e-4)
        assert [part["score"] for part in hit["parts"]] == pytest.approx(own, abs=1e-4)
        assert hit["terms"] == pytest.approx({"sentence": sum(own[:3]), "picture": own[3]}, abs=1e-4)


def test_filters_and_depth_change_no_score(
    place: Path, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are standardised over the gallery's pictures nearest to the parts, whatever may be found of them."""
    monkeypatch.setattr(sums, "SAMPLE", 6)
    whole = {hit["path"]: hit["score"] for hit in by_page(place, client, SUM, True)}
    for more in ({"folder": "sub"}, {"candidates": 3, "k": 3}, {"exact": True}):
        some = {hit["path"]: hit["score"] for hit in by_page(place, client, SUM, True, **more)}
        assert some and some == pytest.approx({path: whole[path] for path in some}, abs=2e-6)  # rounded to 1e-6
    below = by_command(place, SUM, True, capsys, str(place / "g" / "sub"))
    expected = sorted(whole[path] for path in whole if path.startswith("sub/"))
    assert sorted(hit["score"] for hit in below) == pytest.approx(expected, abs=2e-6)


def test_what_cannot_be_asked_is_a_sentence_at_both_doors(
    place: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, why in (("- grass", "away"), ("a dog +", "add")):
        assert why in client.get("/api/search", params={"q": text}).json()["error"]
        with pytest.raises(ValueError, match=why):
            by_command(place, text, False, capsys)
    refused = client.get("/api/search", params={"q": "a + b", "min_confidence": 0.5})
    assert refused.status_code == 400 and "sentence" in refused.json()["error"]
    # A picture to look for makes it a query.
    assert len(by_page(place, client, "- grass", True)) == 20


def test_an_open_picture_of_a_sum_is_explained_by_the_first_sentence_looked_for(
    client: Client, searcher: Searcher
) -> None:
    found = client.get("/api/search", params={"q": "a dog"}).json()["results"][0]
    explained = client.get(f"/api/explain/{found['id']}", params={"q": "- number 3 + a dog"}).json()
    assert explained["caption"] == "a dog" and explained["score"] == found["score"]
    kept = [client.get(f"/api/kept/{found['id']}", params={"q": q}).json() for q in ("a dog", "- number 3 + a dog")]
    assert kept[0] == kept[1]
