"""The service: answers, limits, what it refuses, and that nothing outside the gallery can be read."""

from __future__ import annotations

import io
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from seps.photos.search.searcher import Searcher
from seps.photos.serve import app as service
from seps.photos.serve import service as work
from seps.photos.serve import uploads
from seps.photos.serve.guard import host_name
from serving import QUERY, Client, served
from stores import gallery, index, model


@pytest.fixture(scope="module")
def searcher(tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    folder = tmp_path_factory.mktemp("served")
    (folder / "secret.txt").write_text("secret")
    index(gallery(folder / "g", 6, described=3), folder / "s")
    return Searcher(folder / "s", model())


def photo(size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(out, kind)
    return out.getvalue()


def test_search(client: Client, searcher: Searcher) -> None:
    answer = client.get(QUERY + "&k=3").json()
    assert [hit["id"][:20] for hit in answer["results"]] == [hit.id for hit in searcher.search("a dog", k=3)]
    assert answer["results"][0].keys() >= {"path", "score", "rank"}
    assert len(client.get(QUERY + "&folder=sub&exact=true").json()["results"]) == 3


def test_filters(tmp_path: Path) -> None:
    """The same filters as on the command line, for sentences and for pictures."""
    folder = gallery(tmp_path / "g", 6)
    for number, path in enumerate(sorted(folder.rglob("*.jpg"))):
        day = datetime(2024, 5, 1 + number, 12).timestamp()
        os.utime(path, (day, day))
    index(folder, tmp_path / "s")
    data = (folder / "p00.jpg").read_bytes()
    with served(tmp_path / "s") as client:
        for chosen, count in (
            ("since=2024-05-03", 4),
            ("until=2024-05-03", 2),
            ("since=2024-05-02&until=2024-05-04", 2),
            ("since=2024-05-02T13:00&until=2024-05-04", 1),
            ("since=2024-05-03T12:00:00", 4),
            ("folder=sub", 3),
            ("folder=sub&min_size=44", 3),
            ("min_size=45", 0),
        ):
            for exact in ("", "&exact=true"):
                assert len(client.get(f"{QUERY}&{chosen}{exact}").json()["results"]) == count, chosen
            found = client.post(f"/api/search-image?{chosen}", content=data).json()["results"]
            assert len(found) == count, chosen
        assert client.post("/api/search-image?since=soon", content=data).status_code == 422
        documented = client.get("/docs").text
        assert "since" in documented and "until" in documented


def test_pictures(client: Client) -> None:
    first = client.get(QUERY).json()["results"][0]
    for kind in ("thumb", "image"):
        answer = client.get(f"/api/{kind}/{first['id']}")
        assert answer.headers["content-type"] == "image/jpeg"
        assert Image.open(io.BytesIO(answer.content)).size == (60, 44)
    similar = client.get(f"/api/similar/{first['id']}").json()["results"]
    assert similar[0]["id"] == first["id"]


def test_explanation(client: Client) -> None:
    for hit in client.get(QUERY).json()["results"]:
        answer = client.get(f"/api/explain/{hit['id']}?q=a+dog").json()
        assert answer["score"] == hit["score"] and answer["id"] == hit["id"]
        assert sum(part["contribution"] for part in answer["words"]) == pytest.approx(hit["score"], abs=1e-4)
        assert len(answer["kept"]) == 9 and answer["path"] == hit["path"]


def test_upload(client: Client, searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (Path(searcher.store.settings.root) / "p00.jpg").read_bytes()
    assert client.post("/api/search-image?k=2", content=data).json()["results"][0]["path"] == "p00.jpg"
    assert client.post("/api/search-image", content=b"").status_code == 400
    refused = client.post("/api/search-image", content=b"<svg onload=alert(1)>")
    assert refused.status_code == 422 and "format" in refused.json()["error"]
    assert client.post("/api/search-image", content=photo()[:-30]).status_code == 422
    monkeypatch.setattr(uploads, "UPLOAD_BYTES", 1000)
    assert client.post("/api/search-image", content=b"x" * 1001).status_code == 413
    # A body of unknown length is counted while it comes.
    assert client.post("/api/search-image", content=iter([b"x" * 600, b"x" * 600])).status_code == 413
    monkeypatch.setattr(uploads, "UPLOAD_PIXELS", 500)
    assert "more than 500" in client.post("/api/search-image", content=photo()).json()["error"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/search", 422),
        ("/api/search?q=", 422),
        ("/api/search?q=%20", 400),
        ("/api/search?q=a&k=0", 422),
        ("/api/search?q=a&k=many", 422),
        ("/api/search?q=a&k=100000", 422),
        ("/api/search?q=" + "a" * 2001, 422),
        ("/api/search?q=a&min_size=-1", 422),
        ("/api/search?q=a&since=yesterday", 422),
        ("/api/search?q=a&until=2024-13-01", 422),
        ("/api/search?q=a&since=0001-01-01", 422),
        ("/api/search?q=a&since=2024-05-31&until=2024-05-31", 422),
        ("/api/search?q=a&since=1+OR+1%3D1", 422),
        ("/api/search?q=a&folder=" + "a" * 1001, 422),
        ("/api/search?q=a&offset=-1", 422),
        ("/api/search?q=a&offset=99999999", 422),
        ("/api/search?q=a&sort=colour", 422),
        ("/api/search?q=a&weight=2", 422),
        ("/api/search?upload=..%2fsecret", 422),
        ("/api/search?upload=" + "0" * 32, 404),
        ("/api/search?like=" + "0" * 20, 404),
        ("/api/search?like=" + "0" * 20 + "&upload=" + "0" * 32, 422),
        ("/api/pictures?k=1000", 422),
        ("/api/pictures?sort=score", 422),
        ("/api/upload/" + "0" * 32, 404),
        ("/api/original/..%2f..%2fsecret.txt", 404),
        ("/api/original/" + "0" * 20, 404),
        ("/api/kept/" + "0" * 20 + "?q=a", 404),
        ("/api/kept/" + "0" * 20, 422),
        ("/api/image/" + "0" * 20, 404),
        ("/api/thumb/" + "0" * 20, 404),
        ("/api/explain/" + "0" * 20 + "?q=a", 404),
        ("/api/explain/" + "0" * 20, 422),
        ("/api/image/xyz", 422),
        ("/api/image/' OR 1=1 --", 422),
        ("/api/image/..%2f..%2fsecret.txt", 404),
        ("/api/image/../../secret.txt", 404),
        ("/static/..%2fapp.py", 404),
        ("/static/../app.py", 404),
        ("/static/nothing.js", 404),
        ("/secret.txt", 404),
        ("/nowhere", 404),
    ],
)
def test_malformed_requests_get_a_sentence(client: Client, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert re.match(r"[A-Z].+\.$", answer.json()["error"])
    assert "secret" not in answer.text


def test_wrong_method(client: Client) -> None:
    assert client.post("/api/search?q=a").status_code == 405


def test_token(searcher: Searcher) -> None:
    with served(searcher, "http://photos.example", token="sesame") as client:
        for path in (
            "/",
            QUERY,
            "/api/status",
            "/static/app.js",
            "/docs",
            "/openapi.json",
            "/?token=wrong",
            QUERY + "&token=sesame",
        ):
            assert client.get(path).status_code == 401
        assert client.get(QUERY, headers={"Authorization": "Bearer sesame"}).status_code == 200
        assert client.get(QUERY, headers={"Authorization": "Bearer sésame".encode()}).status_code == 401
        answer = client.get("/?token=sesame&q=a+dog", follow_redirects=False)
        assert answer.status_code == 303 and answer.headers["location"] == "./?q=a+dog"
        assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=strict" in answer.headers["set-cookie"]
        assert client.get(QUERY).status_code == 200  # the cookie


def test_other_host_names_are_refused(client: Client) -> None:
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/", headers={"Host": "127.0.0.1:8000"}).status_code == 200
    assert host_name("[::1]:80") == "::1" and host_name("[::1]") == "::1" and host_name("a") == "a"
    for header in ("[localhost]evil.com", "[::1]evil.com", "localhost:80:evil.com", "localhost:evil.com", "[::1", ""):
        assert host_name(header) == "" and client.get("/", headers={"Host": header}).status_code == 400, header


def test_page_and_documentation(client: Client) -> None:
    page = client.get("/")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    for name, kind in service.FILES.items():
        assert client.get(f"/static/{name}").headers["content-type"].startswith(kind)
    for name in service.FILES:  # works without any other machine
        assert not re.search(r"https?://|//[a-z]+\.", (service.STATIC / name).read_text())
    documented = client.get("/docs").text
    for path in client.get("/openapi.json").json()["paths"]:
        assert path in documented
    assert {"/api/search", "/api/search-image", "/api/image/{identity}", "/api/explain/{identity}"} <= set(
        client.get("/openapi.json").json()["paths"]
    )
    assert client.get("/api/status").json()["images"] == 6


def test_failures_are_answered(searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("inner secret")

    monkeypatch.setattr(searcher, "search", broken)
    with served(searcher) as client:
        answer = client.get(QUERY)
        assert answer.status_code == 500 and "secret" not in answer.text
        assert answer.headers["x-content-type-options"] == "nosniff"
    monkeypatch.setattr(work, "WAITING", 0)
    with served(searcher) as client:
        assert client.get(QUERY).status_code == 503


def test_parallel_clients(client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: client.get(f"/api/search?q=query+{i % 5}&k=2"), range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 5


def test_a_picture_does_not_wait_for_searches(client: Client, searcher: Searcher, monkeypatch) -> None:
    identity, released, begun = searcher.search("a dog", k=1)[0].id, threading.Event(), threading.Semaphore(0)
    plain = work.Service.search

    def slow(*arguments: Any) -> Any:
        begun.release()
        released.wait(60)
        return plain(*arguments)

    monkeypatch.setattr(work.Service, "search", slow)
    with ThreadPoolExecutor(5) as pool:
        searches = [pool.submit(client.get, QUERY) for _ in range(4)]
        begun.acquire()
        begun.acquire()  # both threads of searches are taken
        try:
            assert pool.submit(client.get, f"/api/image/{identity}").result(timeout=30).status_code == 200
        finally:
            released.set()
    assert [search.result().status_code for search in searches] == [200] * 4


def test_confidence(tmp_path: Path) -> None:
    """With a bank each result has its confidence, `good` counts those above the line, and the parts sum up."""
    index(gallery(tmp_path / "g", 6, described=3), tmp_path / "s", bank=True)
    banked = Searcher(tmp_path / "s", model())
    with served(banked) as client:
        answer = client.get(QUERY).json()
        sure = [hit["confidence"] for hit in answer["results"]]
        assert sure == sorted(sure, reverse=True) and len(sure) == 6
        assert answer["good"] == sum(bool(hit.good) for hit in banked.search("a dog", 6))
        fewer = client.get(f"{QUERY}&min_confidence={sure[2] - 1e-3}").json()["results"]
        assert 3 <= len(fewer) <= 6 and fewer == answer["results"][: len(fewer)]
        found = client.get(f"/api/explain/{answer['results'][0]['id']}?q=a+dog").json()
        parts = sum(part["contribution"] for part in found["words"]) + found["rest"] + found["background"]
        assert parts == pytest.approx(answer["results"][0]["score"], abs=1e-5) and found["background"] < 0
        assert client.get(f"{QUERY}&min_confidence=2").status_code == 422
    index(tmp_path / "g", tmp_path / "plain")
    with served(tmp_path / "plain") as client:
        answer = client.get(QUERY).json()
        assert answer["good"] is None and answer["results"][0]["confidence"] is None
        refused = client.get(f"{QUERY}&min_confidence=0.5")
        assert refused.status_code == 422 and "confidence" in refused.json()["error"]
