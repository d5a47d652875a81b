"""Photos near a place: on the globe, at every door."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from seps.cli.main import main
from seps.photos.library import Library
from seps.photos.search.searcher import Searcher
from seps.photos.serve.app import create_app
from seps.photos.store.filters import EARTH, Filters, place_of
from stores import index, model_folder, paint

PLACES = {
    "eiffel": (48.8584, 2.2945),
    "louvre": (48.8606, 2.3376),
    "sydney": (-33.8568, 151.2153),
    "taveuni": (-16.85, 179.99),
    "rabi": (-16.5, -179.98),
    "pole": (89.9, 20.0),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("near")
    for number, (name, (latitude, longitude)) in enumerate(PLACES.items()):
        file = paint(place / "g" / f"{name}.jpg", number)
        exif = Image.Exif()
        north, east = ((abs(value), 0.0, 0.0) for value in (latitude, longitude))
        signs = "S" if latitude < 0 else "N", "W" if longitude < 0 else "E"
        exif.get_ifd(0x8825).update({1: signs[0], 2: north, 3: signs[1], 4: east})
        with Image.open(file) as image:
            image.save(file, exif=exif)
    paint(place / "g" / "nowhere.jpg", 99)
    index(place / "g", place / "s", metadata=False)
    return place / "s"


def names(hits: object) -> set[str]:
    return {Path(hit["path"] if isinstance(hit, dict) else hit.path).stem for hit in hits}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("near", "within", "expected"),
    [
        ((48.86, 2.3), None, {"eiffel", "louvre"}),
        ((48.8584, 2.2945), 1, {"eiffel"}),
        ((-33.9, 151.2), 10, {"sydney"}),
        ((-16.8, 180), 50, {"taveuni", "rabi"}),  # across the date line
        ((90, -100), 20, {"pole"}),
        ((0, 0), 20_100, set(PLACES)),
        ((0, -30), 5, set()),
    ],
)
def test_python_finds_what_is_near(store: Path, near: tuple[float, float], within: float, expected: set[str]) -> None:
    library = Library(store=store, model=model_folder(), update=False)
    found = library.search("a dog", near=near, within=within)
    assert names(found) == expected
    assert all(result.position == pytest.approx(PLACES[result.path.stem], abs=1e-6) for result in found)
    assert names(library.search("a dog", near=f"{near[0]},{near[1]}", within=within, exact=True)) == expected


def test_the_distance_is_that_of_a_sphere(store: Path) -> None:
    """By vectors from the middle of the earth, which has no formula in common."""

    def unit(latitude: float, longitude: float) -> list[float]:
        north, east = math.radians(latitude), math.radians(longitude)
        return [math.cos(north) * math.cos(east), math.cos(north) * math.sin(east), math.sin(north)]

    searcher = Searcher(store, model_folder())
    draw = random.Random(3)
    for _ in range(20):
        here = (draw.uniform(-90, 90), draw.uniform(-180, 180))
        within = draw.uniform(100, 15_000)
        expected = {
            name
            for name, place in PLACES.items()
            if EARTH * math.acos(sum(a * b for a, b in zip(unit(*here), unit(*place), strict=True))) <= within
        }
        assert names(searcher.search("a dog", 10, filters=Filters(near=here, within=within))) == expected


def test_the_service_and_the_commands(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = TestClient(create_app(Library.over(Searcher(store, model_folder()))), base_url="http://localhost")
    for address in ("/api/search?q=a+dog&", "/api/pictures?"):
        answer = client.get(f"{address}near=48.86,%202.35&within=3").json()
        assert names(answer["results"]) == {"louvre"}
        for bad in ("near=here", "near=91,0", "near=1,2,3", "near=nan,0", "near=1,0&within=0", "within=3", "near=0,0)"):
            refused = client.get(f"{address}{bad}")
            assert refused.status_code == 422 and refused.json()["error"], bad
    (found,) = client.get("/api/search?q=a+dog&near=48.86,2.35&within=3").json()["results"]
    assert found["position"] == pytest.approx(PLACES["louvre"], abs=1e-6)
    common = ["--store", str(store), "--model", model_folder(), "--json"]
    assert main(["search", "a dog", "--near", "-33.9,151.2", *common]) == 0
    assert names(json.loads(capsys.readouterr().out)) == {"sydney"}
    assert main(["search", "a dog", "--near", "the sea", *common]) == 2
    assert main(["search", "a dog", "--within", "4", *common]) == 2


@pytest.mark.parametrize("text", ["", "1", "1,2,3", "north,east", "1;2", "1,"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="like 48"):
        place_of(text)


def test_places_that_are_not_on_the_globe_are_refused() -> None:
    for near, within in [((91, 0), None), ((0, 181), None), ((math.nan, 0), None), ((0, 0), 0), ((0, 0), math.inf)]:
        with pytest.raises(ValueError, match=r"latitude|kilometres"):
            Filters(near=near, within=within)
