"""Clients learn where pictures are below the indexed folders, and never where those folders are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.library import Library
from seps.photos.search.searcher import Searcher
from seps.photos.serve.app import create_app
from seps.photos.serve.guard import LOOPBACK
from seps.photos.serve.places import without_places
from serving import Client, near, served
from stores import gallery, index, model, model_folder, paint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three folders, two of one name, the first with a folder of the second's name."""
    place = tmp_path_factory.mktemp("places")
    gallery(place / "g", 2, described=0)
    paint(place / "g" / "more" / "x.jpg", 20)
    for number, name in enumerate(("more", "other/more")):
        paint(place / name / "deep" / f"y{number}.jpg", 30 + number)
    folders = [place / "g", place / "more", place / "other" / "more"]
    index_folder(folders, place / "s", model(), model_folder(), options=IndexOptions(workers=2, bank=False))
    return place


@pytest.fixture(params=["local", "elsewhere"])
def client(folder: Path, request: pytest.FixtureRequest) -> Iterator[Client]:
    app = create_app(Library.over(Searcher(folder / "s", model())), hosts=LOOPBACK, local=request.param == "local")
    with Client(app, base_url="http://localhost") as client:
        yield client


PATHS = {"g/p00.jpg", "g/sub/p01.jpg", "g/more/x.jpg", "more/deep/y0.jpg", "more (2)/deep/y1.jpg"}


def test_paths_begin_with_the_name_of_their_folder(client: Client, folder: Path) -> None:
    answers = [client.get(path) for path in ("/api/search?q=a+dog", "/api/pictures", "/api/overview")]
    assert {hit["path"] for hit in answers[0].json()["results"]} == PATHS
    assert {hit["path"] for hit in answers[1].json()["results"]} == PATHS
    names = {each["path"]: each["images"] for each in answers[2].json()["folders"]}
    assert names == {"g": 3, "g/sub": 1, "g/more": 1, "more": 1, "more/deep": 1, "more (2)": 1, "more (2)/deep": 1}
    for hit in answers[0].json()["results"]:
        answers.append(client.get(f"/api/explain/{hit['id']}?q=a+dog"))
        assert answers[-1].json()["path"] == hit["path"]
    answers += [client.get("/api/status"), client.get("/docs"), client.get("/openapi.json")]
    assert all(str(folder) not in answer.text for answer in answers)


@pytest.mark.parametrize(
    ("name", "count"), [("g", 3), ("g/more", 1), ("more", 1), ("more (2)/deep/", 1), ("./g/sub", 1), (".", 5)]
)
def test_what_is_shown_is_a_filter(client: Client, name: str, count: int) -> None:
    for path in ("/api/search?q=a", "/api/pictures?k=9", "/api/search?q=a&exact=true"):
        answer = client.get(f"{path}", params={**dict(client.get(path).request.url.params), "folder": name})
        assert len(answer.json()["results"]) == count, path


def test_a_wrong_folder_names_those_there_are(client: Client, folder: Path) -> None:
    for name in ("nowhere", "sub", str(folder / "more"), str(folder / "g"), "../g", "g/../../more", "g/none"):
        for path in ("/api/search?q=a", "/api/pictures"):
            asked = {**({"q": "a"} if "q=" in path else {}), "folder": name}
            answer = client.get(path.partition("?")[0], params=asked)
            assert answer.status_code == 404, (path, name)
            assert "more (2)" in answer.json()["error"] and str(folder) not in answer.json()["error"].replace(name, "")


def test_whole_paths_are_for_this_machine(folder: Path) -> None:
    searcher = Searcher(folder / "s", model())
    for local in (True, False):
        with near(searcher, local=local) as client:
            for hit in client.get("/api/search?q=a").json()["results"]:
                facts = client.get(f"/api/picture/{hit['id']}").json()
                if local:
                    assert Path(facts["full_path"]).is_file()
                else:
                    assert facts["full_path"] == facts["path"] == hit["path"]


def test_messages_hold_no_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searcher = Searcher(folder / "s", model())
    with near(searcher) as client:
        hits = {hit["path"]: hit["id"] for hit in client.get("/api/search?q=a").json()["results"]}

        def fails(*_: Any, **__: Any) -> None:
            raise ValueError(f"{folder}/more/deep/y0.jpg and {folder}/s/images.lance are odd.")

        monkeypatch.setattr(searcher, "search", fails)
        answer = client.get("/api/search?q=a")
        assert answer.status_code == 400 and answer.json()["error"] == "more/deep/y0.jpg and s/images.lance are odd."
        (folder / "more").rename(folder / "away")
        try:
            note = client.get(f"/api/picture/{hits['more/deep/y0.jpg']}").json()["note"]
        finally:
            (folder / "away").rename(folder / "more")
        assert "away" in note
        target = folder / "more" / "deep" / "y0.jpg"
        target.rename(folder / "kept.jpg")
        target.symlink_to(folder / "kept.jpg")
        try:
            refused = client.get(f"/api/original/{hits['more/deep/y0.jpg']}")
        finally:
            target.unlink()
            (folder / "kept.jpg").rename(target)
        assert refused.status_code == 400 and str(folder) not in refused.text
    assert without_places(searcher.store.settings, "/", "a/b") == "a/b"
    inside = folder / "g" / "store"  # a store inside a folder of its own pictures: the longer path first
    assert without_places(searcher.store.settings, str(inside), f"{inside}/images.lance") == "store/images.lance"


def test_a_store_of_one_folder_has_paths_below_it(tmp_path: Path) -> None:
    index(gallery(tmp_path / "g", 2), tmp_path / "s")
    with served(tmp_path / "s") as client:
        assert {hit["path"] for hit in client.get("/api/search?q=a").json()["results"]} == {"p00.jpg", "sub/p01.jpg"}
        answer = client.get("/api/search?q=a&folder=nowhere")
        assert answer.status_code == 404 and "sub" in answer.json()["error"]
        assert client.get(f"/api/search?q=a&folder={tmp_path / 'g'}").status_code == 404
