"""The same search once more: after the service did not answer, after the store has changed, by a way back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pages import QUERY, found, search, until
from stores import paint

SILENT = "seps serve"


@pytest.fixture
def page(browser: Any) -> Any:
    page = browser.new_page()
    page.set_default_timeout(10_000)
    yield page
    page.close()


def test_a_service_that_is_back_answers_the_same_search(page: Any, address: str) -> None:
    search(page, address)
    page.route("**/api/search?**", lambda route: route.abort())
    page.fill("#query", "a red car")
    page.keyboard.press("Enter")
    found(page, SILENT)
    assert page.locator("#results a").count() == 0
    page.unroute("**/api/search?**")
    page.keyboard.press("Enter")
    found(page)
    assert page.locator("#results a").count() >= 24


def test_what_the_last_search_said_goes_when_the_next_one_is_sent(page: Any, address: str) -> None:
    """Also while the service is asked how it is: "does not answer" stayed above the results of the last search."""
    search(page, address)
    until(page, "document.getElementById('more').hidden")
    page.evaluate("document.getElementById('message').textContent = 'The last search.'")
    page.route("**/api/status", lambda route: None)
    page.fill("#query", "a red car")
    page.keyboard.press("Enter")
    assert page.locator("#message").inner_text() == "Searching..."


def test_the_way_back_asks_again_what_failed(page: Any, address: str) -> None:
    page.goto(address)
    found(page, "32 pictures.")
    page.route("**/api/search?**", lambda route: route.abort())
    page.fill("#query", QUERY)
    page.keyboard.press("Enter")
    found(page, SILENT)
    page.unroute("**/api/search?**")
    page.go_back()
    found(page, "32 pictures.")
    page.go_forward()
    found(page)


def test_the_same_words_are_asked_again_and_are_one_step_of_the_way_back(page: Any, address: str) -> None:
    search(page, address)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "offset=0&" in request.url else None)
    steps = page.evaluate("history.length")
    page.focus("#query")
    for times in (1, 2):
        page.keyboard.press("Enter")
        page.wait_for_timeout(300)
        found(page)
        assert len(asked) == times
    assert page.evaluate("history.length") == steps
    page.go_back()
    found(page, "32 pictures.")


def test_a_page_opened_before_the_service_was_ready(page: Any, address: str) -> None:
    page.route("**/api/status", lambda route: route.abort())
    page.goto(address)
    found(page, SILENT)
    page.unroute("**/api/status")
    page.fill("#query", QUERY)
    page.keyboard.press("Enter")
    found(page)
    assert "32 pictures of" in page.locator("#about").inner_text()


def test_filters_that_leave_nothing_are_named(page: Any, address: str) -> None:
    page.goto(f"{address}/?q=dog&min_size=9999")
    found(page, "filters")
    page.goto(f"{address}/?min_size=9999")
    found(page, "No pictures")


def test_a_wrong_folder_names_those_there_are(page: Any, address: str) -> None:
    for query in ("q=dog&", ""):
        page.goto(f"{address}/?{query}folder=nowhere")
        found(page, "copies, sub")


def test_the_picture_under_an_explanation_is_the_one_that_was_indexed(page: Any, address: str, served: Path) -> None:
    """Of a file that was written again the thumbnail is shown, also where it happens after the facts were asked for."""
    search(page, address)
    page.locator("#results a").first.click()
    page.wait_for_selector("#words button")
    name = page.locator("#photo").get_attribute("alt")
    path = served / "g" / str(name)
    status, before = path.stat(), path.read_bytes()
    try:
        paint(path, 999, (300, 300))
        page.reload()
        page.wait_for_selector("#words button")
        until(page, "document.getElementById('photo').naturalWidth > 0")
        assert page.evaluate("[photo.naturalWidth, photo.naturalHeight]") == [60, 44]
        assert "written again" in page.locator("#photo-note").inner_text()
        assert page.locator("#similar").is_hidden() and page.locator("#open").is_visible()

        def late(route: Any) -> None:
            answer = route.fetch()
            route.fulfill(response=answer, json={**answer.json(), "original": "present", "note": ""})

        page.route("**/api/picture/*", late)
        page.reload()
        until(page, "photo.src.includes('/api/thumb/') && photo.naturalWidth > 0")
        assert page.evaluate("[photo.naturalWidth, photo.naturalHeight]") == [60, 44]
        assert "written again" in page.locator("#photo-note").inner_text()
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
