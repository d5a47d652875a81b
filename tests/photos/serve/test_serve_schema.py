"""The schema of the API is valid and complete, other parameters are refused, and pictures come as a body or a form."""

from __future__ import annotations

from pathlib import Path

import pytest

from seps.photos.search.searcher import Searcher
from seps.photos.serve.guard import LOOPBACK
from serving import Client, served


@pytest.mark.parametrize("token", [None, "sesame"])
@pytest.mark.parametrize("root_path", ["", "/photos"])
def test_the_schema_is_valid(searcher: Searcher, token: str | None, root_path: str) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    with served(searcher, token=token, root_path=root_path) as client:
        schema = client.get("/openapi.json", headers={"Authorization": "Bearer sesame"}).json()
    validator.validate(schema)
    operations = {
        (path, method): about for path, methods in schema["paths"].items() for method, about in methods.items()
    }
    names = [about["operationId"] for about in operations.values()]
    assert len(set(names)) == len(names) and all(name.isidentifier() and "api" not in name for name in names)
    for about in operations.values():
        assert {"400", "404", "422"} <= about["responses"].keys()
        for status in ("400", "404", "422"):
            content = about["responses"][status]["content"]["application/json"]
            assert content["schema"] == {"$ref": "#/components/schemas/Failure"}
    for path in ("/api/upload", "/api/search-image"):
        assert {"image/*", "multipart/form-data"} <= operations[path, "post"]["requestBody"]["content"].keys()
    if token:
        kinds = schema["components"]["securitySchemes"]
        assert kinds["token"] == {**kinds["token"], "type": "http", "scheme": "bearer"}
        assert {"token": []} in schema["security"] and operations["/health", "get"]["security"] == []
    assert [server["url"] for server in schema.get("servers", [])] == ([root_path] if root_path else [])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/api/search?q=a&top_k=3", "top_k"),
        ("/api/search?q=a&q=b", "q"),
        ("/api/pictures?q=a", "q"),
        ("/api/status?verbose=1", "verbose"),
        ("/api/overview?" + "x" * 500, "x" * 50),
        (f"/api/thumb/{'0' * 20}?size=9", "size"),
        ("/health?deep=1", "deep"),
    ],
)
def test_unknown_parameters_are_refused(client: Client, path: str, name: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 422 and name in answer.json()["error"] and len(answer.text) < 400
    assert client.post("/api/upload?q=a", content=b"x").status_code == 422


def test_the_page_takes_any_address(client: Client) -> None:
    assert client.get("/?whatever=1").status_code == 200


def test_a_picture_in_a_form(client: Client, searcher: Searcher) -> None:
    data = (Path(searcher.store.settings.root) / "p02.jpg").read_bytes()
    plain = client.post("/api/upload", content=data).json()
    for files, fields in (
        ({"file": ("p.jpg", data, "image/jpeg")}, {}),
        ({"image": ('odd "name".jpg', data)}, {"note": "before the file"}),
    ):
        answer = client.post("/api/upload", files=files, data=fields)
        assert answer.json() == plain
        found = client.post("/api/search-image?k=1", files=files, data=fields).json()["results"]
        assert found[0]["path"] == "p02.jpg"
    boundary = "multipart/form-data; boundary="
    for kind, body in (
        (boundary + "x", b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\ntext\r\n--x--\r\n"),
        (boundary + "x", b'--x\r\nContent-Disposition: form-data; name=a; filename="b"\r\n\r\ncut'),
        (boundary + "x", data),
        (boundary + '""', data),
        ("multipart/form-data", data),
    ):
        answer = client.post("/api/upload", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 400 and "form" in answer.json()["error"], kind


def test_health_needs_neither_token_nor_name(searcher: Searcher) -> None:
    with served(searcher, "http://10.0.0.9", token="t", hosts=LOOPBACK) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/api/status").status_code == 400
        assert client.get("/health", headers={"Origin": "http://evil.example"}).status_code == 403
