"""An open picture fills the window: zoom, drag, arrow keys; the same theme-proof veil; reloading keeps the place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pages import cards, found, scroll, search, serving, until, wide
from seps.photos.search.searcher import Searcher
from stores import gallery, index, model, paint


def box(page: Any, name: str) -> dict[str, float]:
    return dict(page.locator(name).bounding_box())


def scale(page: Any) -> float:
    return float(page.evaluate("new DOMMatrix(getComputedStyle(stage).transform).a"))


def test_an_open_picture_fills_the_window(page: Any, address: str) -> None:
    page.goto(address)
    found(page, "32 pictures.")
    page.locator("#results a").nth(1).click()
    until(page, "document.getElementById('photo').naturalWidth > 0")
    size = page.viewport_size
    assert box(page, "#detail") == {"x": 0, "y": 0, **size}
    view, stage = box(page, "#view"), box(page, "#stage")
    assert view["width"] == size["width"] and view["height"] > 0.8 * size["height"]
    assert stage["width"] == pytest.approx(view["width"], abs=1) or stage["height"] == pytest.approx(
        view["height"], abs=1
    )
    assert stage["width"] / stage["height"] == pytest.approx(60 / 44, rel=0.01)
    page.keyboard.press("e")
    page.wait_for_selector("#side", state="visible")
    assert box(page, "#view")["width"] >= (0.6 if size["width"] > 760 else 1) * size["width"]


@wide
def test_zoom(page: Any, address: str) -> None:
    page.goto(address)
    found(page, "32 pictures.")
    page.locator("#results a").nth(1).click()
    until(page, "document.getElementById('photo').naturalWidth > 0")
    assert scale(page) == 1 and page.get_by_role("button", name="Zoom out").is_disabled()
    for key, expected in (("+", 1.5), ("=", 2.25), ("-", 1.5), ("0", 1), ("-", 1)):
        page.keyboard.press(key)
        assert scale(page) == pytest.approx(expected)
    page.get_by_role("button", name="Zoom in").click()
    assert scale(page) == pytest.approx(1.5) and page.locator("#fit").inner_text() == "150 %"
    page.get_by_role("button", name="Fit the window").click()
    assert scale(page) == 1
    # The place under the pointer stays where it is.
    view, before = box(page, "#view"), box(page, "#stage")
    spot = (view["x"] + view["width"] * 0.4, view["y"] + view["height"] * 0.6)
    page.mouse.move(*spot)
    page.mouse.wheel(0, -600)
    until(page, "new DOMMatrix(getComputedStyle(stage).transform).a > 2")
    after = box(page, "#stage")
    for side, length, where in (("x", "width", spot[0]), ("y", "height", spot[1])):
        assert (where - before[side]) / before[length] == pytest.approx((where - after[side]) / after[length], abs=0.01)
    page.mouse.down()
    page.mouse.move(spot[0] + 40, spot[1] + 30)
    page.mouse.up()
    moved = box(page, "#stage")
    assert (moved["x"] - after["x"], moved["y"] - after["y"]) == pytest.approx((40, 30), abs=1)
    page.keyboard.press("Shift+ArrowRight")
    assert box(page, "#stage")["x"] == pytest.approx(moved["x"] - 80, abs=1)
    # It covers the window, however far it is dragged.
    page.mouse.move(view["x"] + 5, view["y"] + 5)
    page.mouse.down()
    page.mouse.move(view["x"] + view["width"] - 5, view["y"] + view["height"] - 5)
    page.mouse.up()
    assert box(page, "#stage")["x"] == pytest.approx(view["x"], abs=1)
    # Another picture fits the window again.
    page.keyboard.press("ArrowRight")
    until(page, "getComputedStyle(stage).transform === 'none'")
    page.mouse.dblclick(*spot)
    assert scale(page) == pytest.approx(3)


@wide
def test_kept_patches_are_the_bright_ones_in_both_themes(page: Any, address: str) -> None:
    search(page, address)
    page.locator("#results a").first.click()
    page.wait_for_selector("#words button")
    page.keyboard.press("k")
    until(page, "heat.dataset.mode.includes('kept')")
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.keyboard.press("k")
        page.keyboard.press("k")
        until(page, "heat.dataset.mode.includes('kept')")
        veiled = page.evaluate(
            """() => {
                const data = heat.getContext("2d").getImageData(0, 0, heat.width, heat.height).data;
                return [...Array(data.length / 4).keys()].filter((place) => data[4 * place + 3])
                    .map((place) => Math.max(data[4 * place], data[4 * place + 1], data[4 * place + 2]));
            }"""
        )
        assert veiled and max(veiled) < 64, theme


@wide
def test_reloading_keeps_the_place(page: Any, address: str) -> None:
    """Also with an open picture, and on the way back from another search."""
    page.set_viewport_size({"width": 1000, "height": 400})
    search(page, address)
    scroll(page, 30)
    page.evaluate("scrollTo(0, 600)")
    page.wait_for_timeout(500)
    names = cards(page)
    for _ in range(2):
        page.reload()
        until(page, "document.querySelectorAll('#results a').length === 30 && Math.abs(scrollY - 600) < 2")
        assert cards(page) == names
    page.locator("#results a").nth(20).click()
    page.wait_for_selector("#detail", state="visible")
    where = page.evaluate("scrollY")
    page.reload()
    page.wait_for_selector("#detail", state="visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#detail", state="hidden")
    until(page, f"Math.abs(scrollY - {where}) < 2")
    page.evaluate("document.getElementById('query').value = ''")
    page.get_by_label("What to look for").fill("a red car")
    page.keyboard.press("Enter")
    until(page, "location.search.includes('red')")
    found(page)
    until(page, "scrollY < 100")
    page.go_back()
    until(page, f"document.querySelectorAll('#results a').length === 30 && Math.abs(scrollY - {where}) < 2")


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address, below a prefix, of a store with one photo that says when it was taken, and one that does not."""
    from seps.photos.library import Library
    from seps.photos.serve.app import create_app

    folder = tmp_path_factory.mktemp("dated")
    gallery(folder / "g", 1)
    paint(folder / "g" / "camera.jpg", 5, (2400, 1600))
    exif = Image.Exif()
    exif[0x9003] = exif[0x0132] = "2019:03:04 05:06:07"
    with Image.open(folder / "g" / "camera.jpg") as photo:
        photo.save(folder / "g" / "camera.jpg", exif=exif)
    os.utime(folder / "g" / "p00.jpg", (1.6e9, 1.6e9))
    index(folder / "g", folder / "s")
    inner = create_app(Library.over(Searcher(folder / "s", model())))

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        """Takes the prefix away, as a reverse proxy does, and answers nothing outside of it."""
        if scope["type"] == "http":
            inside = scope["path"].startswith("/my/photos/")
            scope = {**scope, "path": scope["path"].removeprefix("/my/photos") if inside else "/nothing/here"}
        await inner(scope, receive, send)

    with serving(proxy) as place:
        yield f"{place}/my/photos/"


@wide
def test_the_date_of_a_file_is_called_so_and_a_prefix_works(page: Any, dated: str, tmp_path: Path) -> None:
    page.goto(dated)
    found(page, "2 pictures.")
    texts = page.locator("#results a").all_inner_texts()
    assert ["file date 2020-09-1" in text for text in texts] == [True, False] and "2019-03-04" in texts[1]
    page.locator("#results a").nth(1).click()
    until(page, "document.getElementById('photo').naturalWidth === 1600")
    page.keyboard.press("e")
    assert "file date" not in page.locator("#facts").inner_text()
    # Close up there are more pixels than the window has.
    page.keyboard.press("+")
    until(page, "document.getElementById('photo').naturalWidth === 2400")
    page.keyboard.press("ArrowLeft")
    until(page, "document.getElementById('facts').textContent.includes('file date 2020-09-1')")
    page.keyboard.press("Escape")
    # Everything else below the prefix: search, a picture sent, the way back, the documentation.
    page.get_by_label("What to look for").fill("a dog")
    page.keyboard.press("Enter")
    found(page)
    assert page.url == f"{dated}?q=a%20dog"
    page.locator("#file").set_input_files(str(paint(tmp_path / "p.jpg", 5)))
    until(page, "location.search.includes('upload=')")
    found(page)
    until(page, "document.getElementById('with-picture').naturalWidth > 0")
    page.get_by_role("button", name="Remove picture").click()
    page.locator("#home").click()
    found(page, "2 pictures.")
    assert page.url == dated
    page.get_by_role("link", name="API").click()
    until(page, "document.title === 'SEPS API'")
    schema = page.get_by_role("link", name="openapi.json").evaluate("link => link.href")
    # Not opened: for JSON a browser asks for an icon at the top of the site, which no prefix holds.
    assert schema == f"{dated}openapi.json" and page.request.get(schema).json()["openapi"]
