"""Results page by page, sorted and folded; sentences and pictures together; what is shown without a query."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from seps import recent
from seps.photos.search import ranking
from seps.photos.search.ranking import in_order
from seps.photos.search.results import Hit
from seps.photos.search.searcher import Searcher
from seps.photos.serve import browse, service
from serving import QUERY, Client, near, served
from stores import always_newest, gallery, index, model


@pytest.fixture(scope="module")
def searcher(tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    """12 pictures, one a day, those before p06 described; and two copies of p00, without descriptions."""
    folder = gallery(tmp_path_factory.mktemp("pages") / "g", 12, described=6)
    for number in range(12):
        path = folder / f"{'sub/' if number % 2 else ''}p{number:02}.jpg"
        day = datetime(2024, 5, 1 + number, 12).timestamp()
        os.utime(path, (day, day))
    (folder / "copies" / "deep").mkdir(parents=True)
    for name in ("a.jpg", "deep/b.jpg"):
        shutil.copy(folder / "p00.jpg", folder / "copies" / name)
    index(folder, folder.parent / "s", patches=7)
    return Searcher(folder.parent / "s", model())


def pages(client: Client, path: str, k: int) -> list[dict[str, Any]]:
    """All results, page after page as `next` says."""
    found, offset = [], 0
    while offset is not None:
        answer = client.get(f"{path}&k={k}&offset={offset}").json()
        assert answer["offset"] == offset and len(answer["results"]) <= k
        found += answer["results"]
        offset = answer["next"]
    assert answer["total"] == len(found)
    return found


def paths(results: list[dict[str, Any]]) -> list[str]:
    return [hit["path"] for hit in results]


def test_pages_are_parts_of_one_ranking(client: Client, searcher: Searcher) -> None:
    whole = [hit.path for hit in searcher.search("a dog", 14)]
    for path in (QUERY, f"{QUERY}&exact=true"):
        for k in (1, 5, 14, 200):
            found = pages(client, path, k)
            assert paths(found) == whole and [hit["rank"] for hit in found] == list(range(1, 15))
    assert client.get(f"{QUERY}&offset=14").json()["results"] == []
    assert len(pages(client, f"{QUERY}&folder=sub", 4)) == 6
    # No more can be found than are scored.
    assert len(pages(client, f"{QUERY}&candidates=5", 2)) == 5
    similar = f"/api/similar/{found[0]['id']}?fold=false"
    assert sorted(paths(pages(client, similar, 4))) == sorted(whole)


def test_a_change_of_the_store_between_two_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further pages neither repeat nor miss a picture; the next search sees the change."""
    folder = gallery(tmp_path / "g", 6)
    index(folder, tmp_path / "s")
    with served(tmp_path / "s") as client:
        before = paths(client.get(f"{QUERY}&k=6").json()["results"])
        first = paths(client.get(f"{QUERY}&k=3").json()["results"])
        listed = paths(client.get("/api/pictures?k=6").json()["results"])
        (folder / before[0]).unlink()
        index(folder, tmp_path / "s", prune=True)
        always_newest(monkeypatch)
        assert first + paths(client.get(f"{QUERY}&k=3&offset=3").json()["results"]) == before
        # What is gone cannot be listed any more; the others keep their places.
        rest = paths(client.get("/api/pictures?k=3&offset=3").json()["results"])
        assert rest == [path for path in listed[3:] if path != before[0]]
        now = paths(client.get(f"{QUERY}&k=6").json()["results"])
        assert now == before[1:]


def test_sorted_by_date(client: Client, searcher: Searcher) -> None:
    dates = {hit.path: hit.mtime for hit in searcher.search("a dog", 14)}
    found = pages(client, f"{QUERY}&sort=newest", 4)
    assert sorted(paths(found)) == sorted(dates)
    assert [dates[path] for path in paths(found)] == sorted(dates.values(), reverse=True)
    assert paths(pages(client, f"{QUERY}&sort=oldest", 5))[:3] == ["p00.jpg", "sub/p01.jpg", "p02.jpg"]
    assert {hit["path"]: hit["date"] for hit in found}["sub/p03.jpg"] == "2024-05-04T12:00:00"


def hit(rank: int, confidence: float | None, mtime: int) -> Hit:
    return Hit(rank, -float(rank), f"{rank:020}", f"{rank}.jpg", None, 4, 3, mtime, confidence=confidence)


def test_good_matches_stay_before_the_rest_by_date() -> None:
    hits = [hit(1, 0.9, 5), hit(2, 0.5, 9), hit(3, 0.2, 99), hit(4, 0.1, 1)]
    assert [one.rank for one in in_order(hits, "newest")] == [2, 1, 3, 4]
    assert [one.rank for one in in_order(hits, "oldest")] == [1, 2, 4, 3]
    assert in_order(hits, "score") == hits
    unknown = [replace(one, confidence=None) for one in hits]
    assert [one.rank for one in in_order(unknown, "newest")] == [3, 2, 1, 4]


def test_by_date_what_is_less_relevant_stays_behind() -> None:
    """Without a good match everything was put into an order of dates, and what fits best left the first page."""
    none_good = [hit(rank, 0.2, rank) for rank in range(1, 201)]
    for unsure in (none_good, [replace(one, confidence=None) for one in none_good]):
        assert [one.rank for one in in_order(unsure, "newest")] == [*range(24, 0, -1), *range(25, 201)]
    many_good = [hit(rank, 0.9 if rank <= 60 else 0.1, rank) for rank in range(1, 201)]
    assert [one.rank for one in in_order(many_good, "newest")] == [*range(60, 0, -1), *range(61, 201)]
    few_good = [hit(rank, 0.9 if rank <= 3 else 0.1, rank) for rank in range(1, 201)]
    found = [one.rank for one in in_order(few_good, "newest")]
    assert found == [3, 2, 1, *range(24, 3, -1), *range(25, 201)]


def test_near_duplicates_are_folded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies have no description and the first has one: only the pixels count."""
    same = {"p00.jpg", "copies/a.jpg", "copies/deep/b.jpg"}
    whole = paths(pages(client, QUERY, 200))
    found = pages(client, f"{QUERY}&fold=true", 5)
    assert len(found) == 12
    (entry,) = [hit for hit in found if hit["folded"]]
    assert [entry["path"], *paths(entry["folded"])] == [path for path in whole if path in same]
    assert entry["folded"][0]["thumbnail"].startswith("/api/thumb/")
    answer = client.get(f"{QUERY}&fold=true").json()
    assert (answer["total"], answer["pictures"]) == (12, 14)
    assert not any(hit["folded"] for hit in pages(client, QUERY, 200))
    monkeypatch.setattr(ranking, "COMPARED", 1)
    assert len(pages(client, f"{QUERY}&fold=true", 14)) == 14


def test_rankings_are_bounded() -> None:
    kept: recent.Recent[int] = recent.Recent(most=99)
    for key in range(5):
        kept.put(key, key, 40)
    assert [kept.get(key) for key in range(5)] == [None, None, None, 3, 4]
    kept.get(3)
    kept.put(5, 5, 40)
    assert [kept.get(key) for key in (3, 4, 5)] == [3, None, 5]  # 3 was asked for later than 4
    kept.put("large", 9, 200)
    assert kept.get("large") == 9 and kept.get(5) is None


def test_rankings_without_a_result_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no end of queries that find nothing."""
    sizes: list[int] = []
    monkeypatch.setattr(recent.Recent, "put", lambda self, key, value, size=1: sizes.append(size))
    assert client.get(f"{QUERY}&min_size=9999").json()["results"] == []
    assert client.get("/api/pictures?min_size=9999").json()["results"] == []
    assert [size for size in sizes if size != 1] == [service.EMPTY_ROWS, service.EMPTY_ROWS]


def test_a_sentence_and_a_picture(client: Client, searcher: Searcher) -> None:
    """Each image's score is the sum of both, in deviations; weight 0 and 1 are the one and the other alone."""
    said = {hit.path: hit.score for hit in searcher.search("a dog", 14, exact=True)}
    identity = client.get(f"{QUERY}&folder=sub").json()["results"][2]["id"]
    data = (Path(searcher.store.settings.root) / client.get(f"/api/picture/{identity}").json()["path"]).read_bytes()
    seen = {hit.path: hit.score for hit in searcher.search_image(data, 14, exact=True)}

    def twin(weight: float) -> dict[str, float]:
        parts = [
            {path: (score - fmean(scores.values())) / pstdev(scores.values()) for path, score in scores.items()}
            for scores in (said, seen)
        ]
        return {path: (1 - weight) * parts[0][path] + weight * parts[1][path] for path in said}

    upload = client.post("/api/upload", content=data).json()["upload"]
    for picture in (f"like={identity}", f"upload={upload}"):
        for weight in (0.0, 0.3, 0.5, 1.0):
            for exact in ("", "&exact=true"):
                found = pages(client, f"{QUERY}&{picture}&weight={weight}{exact}", 6)
                expected = twin(weight)
                for hit in found:
                    assert hit["score"] == pytest.approx(expected[hit["path"]], abs=1e-4)
                    assert sum(hit["terms"].values()) == pytest.approx(hit["score"], abs=1e-5)
                scores = [hit["score"] for hit in found]
                assert scores == sorted(scores, reverse=True) and len(found) == 14
    both = client.post("/api/search-image?q=a+dog&k=14", content=data).json()["results"]
    assert paths(both) == paths(pages(client, f"{QUERY}&upload={upload}", 14))
    refused = client.get(f"{QUERY}&upload={upload}&min_confidence=0.5")
    assert refused.status_code == 422 and "picture" in refused.json()["error"]


def test_uploaded_pictures_are_remembered_for_a_while(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KEPT_PICTURES", 1)
    client = near(searcher)
    root = Path(searcher.store.settings.root)
    answer = client.post("/api/upload", content=(root / "p02.jpg").read_bytes()).json()
    assert paths(pages(client, f"/api/search?upload={answer['upload']}", 5))[0] == "p02.jpg"
    assert client.get(answer["thumbnail"]).headers["content-type"] == "image/jpeg"
    assert client.post("/api/upload", content=b"<svg>").status_code == 422
    client.post("/api/upload", content=(root / "p04.jpg").read_bytes())
    for path in (f"/api/search?upload={answer['upload']}", answer["thumbnail"]):
        gone = client.get(path)
        assert gone.status_code == 404 and "Send" in gone.json()["error"]


def test_kept_patches_are_those_of_the_explanation(client: Client) -> None:
    """In a store that itself keeps 7 of 9 patches."""
    for hit in client.get(QUERY).json()["results"]:
        whole = client.get(f"/api/explain/{hit['id']}?q=a+dog").json()
        answer = client.get(f"/api/kept/{hit['id']}?q=a+dog")
        assert answer.headers["cache-control"] == "private, max-age=86400"
        assert [cell == "1" for cell in answer.json()["kept"]] == whole["kept"]
        assert answer.json()["grid"] == whole["grid"] and 0 < sum(whole["kept"]) < 9
    assert client.get(f"/api/kept/{hit['id'][:20]}?q=a+dog").headers["cache-control"] == "no-store"


def test_pictures_without_a_query(client: Client, searcher: Searcher) -> None:
    dates = {hit.path: hit.mtime for hit in searcher.search("a dog", 14)}
    newest = pages(client, "/api/pictures?sort=newest", 4)
    assert [dates[path] for path in paths(newest)] == sorted(dates.values(), reverse=True)
    assert paths(pages(client, "/api/pictures?folder=sub", 4)) == [
        f"sub/p{number:02}.jpg" for number in (11, 9, 7, 5, 3, 1)
    ]
    assert len(pages(client, "/api/pictures?until=2024-05-03", 5)) == 2
    assert client.get(newest[0]["thumbnail"]).status_code == 200
    assert client.get("/api/pictures?min_size=9999").json() == {"total": 0, "offset": 0, "next": None, "results": []}


def test_overview(client: Client) -> None:
    found = client.get("/api/overview").json()
    assert found["images"] == 14 and found["oldest"] == "2024-05-01T12:00:00"
    counts = {"copies": 2, "copies/deep": 1, "sub": 6}
    assert {folder["path"]: folder["images"] for folder in found["folders"]} == counts
    assert found["examples"] == list(browse.PLAIN)  # "A picture with number 0" says too little
    assert client.get("/api/status").json()["keeps"] is True


def test_an_overview_reads_the_rows_again_only_if_they_changed(
    client: Client, searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    whole = browse.overview
    monkeypatch.setattr(browse, "overview", lambda searcher: made.append(1) or whole(searcher))
    monkeypatch.setattr(service, "OVERVIEW_SECONDS", -1.0)
    found = [client.get("/api/overview").json() for _ in range(3)]
    assert found[0] == found[1] == found[2] and len(made) == 1
    version = searcher.store.version()
    monkeypatch.setattr(searcher.store, "version", lambda: version + 1)
    assert client.get("/api/overview").json() == found[0] and len(made) == 2


@pytest.mark.parametrize(
    ("description", "phrase"),
    [
        ("A tabby cat sleeps on a red sofa. Behind it is a window.", "a tabby cat sleeps on a red sofa"),
        ("The image shows a man and a woman, close together.", "a man and a woman"),
        ("Two dogs with collars run.", "Two dogs"),
        ("A simple, plain wall.", ""),
        ("Dog.", ""),
        ("", ""),
        ("A very long row of words that goes on and on and on without end", "a very long row of words"),
        ("One two three four five six seven eight nine ten.", ""),
    ],
)
def test_examples_are_the_beginnings_of_descriptions(description: str, phrase: str) -> None:
    assert browse.beginning(description) == phrase


def test_examples_are_of_the_store(tmp_path: Path) -> None:
    folder = gallery(tmp_path / "g", 3, described=0)
    lines = [json.dumps({"image": "p00.jpg", "captions": ["x"], "dense": "A red boat on a lake, seen from above."})]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    index(folder, tmp_path / "s")
    assert browse.examples(Searcher(tmp_path / "s", model())) == ["a red boat on a lake"]


def test_a_store_of_a_dual_encoder(tmp_path: Path) -> None:
    """Its vectors fold copies, descriptions aside; a sentence and a picture combine; no patches are kept."""
    from duals import dual_folder
    from seps.photos.indexing.build import IndexOptions, index_folder
    from seps.retrieval.engine.loading import load_engine

    folder = gallery(tmp_path / "g", 4, described=4)
    shutil.copy(folder / "p00.jpg", folder / "copy.jpg")
    clip = load_engine(dual_folder("clip"))
    index_folder(folder, tmp_path / "s", clip, str(dual_folder("clip")), options=IndexOptions(workers=1))
    with served(Searcher(tmp_path / "s", clip)) as client:
        found = pages(client, f"{QUERY}&fold=true", 2)
        assert len(found) == 4
        (entry,) = [hit for hit in found if hit["folded"]]
        assert {entry["path"], *paths(entry["folded"])} == {"p00.jpg", "copy.jpg"}
        both = pages(client, f"{QUERY}&like={found[0]['id']}&weight=1", 2)
        assert len(both) == 5 and both[0]["score"] == pytest.approx(both[0]["terms"]["picture"])
        refused = client.get(f"/api/kept/{found[0]['id']}?q=a+dog")
        assert refused.status_code == 501 and "selects" in refused.json()["error"]
        assert client.get("/api/status").json()["keeps"] is False
