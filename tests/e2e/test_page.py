"""The page in a real browser: search, open, light a word, upload, go back; wide, narrow, by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pages import QUERY, fits, found, painted, scroll, search, until


def test_search_open_light_and_back(page: Any, address: str) -> None:
    search(page, address)
    assert page.locator("#results a").count() >= 24
    assert "q=a%20dog" in page.url and fits(page)
    page.locator("#results a").nth(1).click()
    page.wait_for_selector("#words button")
    assert "&id=" in page.url and page.locator("#detail").is_visible() and fits(page)
    assert "score" in page.locator("#detail-title").inner_text()
    page.mouse.move(2, 2)
    until(page, "document.getElementById('heat').dataset.mode === 'none'")
    assert painted(page) == 0
    page.get_by_role("button", name="dog").hover()
    assert page.locator("#heat").get_attribute("data-mode") == "word-0"
    assert painted(page) > 0
    assert page.locator("#caption-note").inner_text().startswith('"dog" adds ')
    page.get_by_role("button", name="beach").focus()
    assert page.locator("#heat").get_attribute("data-mode") == "word-1"
    # Function words and marks are one row, the last, whose parts its title names.
    assert page.locator("#words .word").all_inner_texts()[-1] == "others"
    others = page.get_by_role("button", name="others")
    assert "the " in others.get_attribute("title") and "dog" not in others.get_attribute("title")
    width = "document.querySelector('#words button:last-child .fill').getBoundingClientRect().width"
    assert page.evaluate(width) > 10
    others.hover()
    assert page.locator("#caption-note").inner_text().startswith("The other words add ")
    page.get_by_role("switch").check()
    assert "kept" in page.locator("#heat").get_attribute("data-mode")
    page.go_back()
    page.wait_for_selector("#detail", state="hidden")
    assert page.locator("#results a").count() >= 24 and "id=" not in page.url
    page.go_forward()
    page.wait_for_selector("#detail", state="visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#detail", state="hidden")
    assert page.input_value("#query") == QUERY


def test_address_alone_shows_the_same(page: Any, address: str) -> None:
    search(page, address)
    page.locator("#results a").first.click()
    page.wait_for_selector("#words button")
    title, where = page.locator("#detail-title").inner_text(), page.url
    page.goto("about:blank")
    page.goto(where)
    page.wait_for_selector("#words button")
    assert page.locator("#detail-title").inner_text() == title
    page.get_by_role("button", name="Close").click()
    page.wait_for_selector("#detail", state="hidden")
    assert page.locator("#results a").count() >= 24


def test_upload_and_similar(page: Any, address: str, tmp_path: Path) -> None:
    from stores import paint

    page.goto(address)
    page.locator("#file").set_input_files(str(paint(tmp_path / "p.jpg", 2)))
    found(page)
    assert "upload=" in page.url and "p02.jpg" in page.locator("#results a").first.inner_text()
    page.locator("#results a").first.click()
    page.wait_for_selector("#detail", state="visible")
    assert page.locator("#why").is_hidden() and page.locator("#side").is_hidden()
    page.get_by_role("button", name="Details").click()
    page.get_by_role("link", name="More like this").click()
    page.wait_for_url("**/?like=*")
    page.wait_for_selector("#detail", state="hidden")
    page.go_back()
    page.wait_for_selector("#detail", state="visible")


def test_keyboard(page: Any, address: str) -> None:
    search(page, address)
    page.locator("#results a").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.id") == page.locator("#results a").nth(1).get_attribute(
        "data-id"
    )
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "query"
    page.locator("#results a").nth(1).focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#words button")
    page.keyboard.press("Escape")
    page.wait_for_selector("#detail", state="hidden")


def violations(page: Any) -> list[str]:
    """What axe-core finds: every rule of WCAG 2.2 A and AA, and its best practices."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed (pip install axe-playwright-python)"
    )
    found = axe.Axe().run(page).response["violations"]
    return [
        f"{fault['id']}: {node['html'][:200]} {node.get('failureSummary')}"
        for fault in found
        for node in fault["nodes"]
    ]


@pytest.mark.slow
def test_accessible(page: Any, address: str, tmp_path: Path) -> None:
    """Every state of the page, wide and light, narrow and dark: empty, results, detail, upload, message, API."""
    from stores import paint

    page.goto(address)
    found(page, "32 pictures.")
    page.wait_for_selector("#examples a")
    assert violations(page) == [] and fits(page)
    page.get_by_role("button", name="Search", exact=True).click()
    assert violations(page) == []
    search(page, address)
    assert violations(page) == []
    page.locator("#results a").first.click()
    page.wait_for_selector("#description span")
    assert violations(page) == []
    page.get_by_role("button", name="dog").focus()
    page.get_by_role("switch").check()
    assert violations(page) == []
    page.goto(address)
    page.get_by_label("What to look for").fill(QUERY)
    page.locator("#file").set_input_files(str(paint(tmp_path / "p.jpg", 2)))
    found(page)
    page.locator("#filters summary").click()
    scroll(page, 30)
    page.locator(".folding").first.click()
    assert violations(page) == [] and fits(page)
    page.goto(f"{address}/docs")
    assert violations(page) == [] and fits(page)
    page.evaluate("document.documentElement.removeAttribute('lang')")
    assert [fault.split(":")[0] for fault in violations(page)] == ["html-has-lang"]  # it does look


def test_errors_are_shown(page: Any, address: str) -> None:
    page.goto(address)
    found(page, "32 pictures.")
    page.get_by_role("button", name="Search", exact=True).click()
    assert page.locator("#message").inner_text() not in ("", "32 pictures.")


def test_a_picture_whose_folder_is_away_shows_its_thumbnail(page: Any, address: str, served: Path) -> None:
    (served / "g").rename(served / "away")
    try:
        search(page, address)
        page.locator("#results a").first.click()
        page.wait_for_selector("#words button")
        until(page, "document.getElementById('photo').naturalWidth > 0")
        assert page.locator("#photo").get_attribute("src").startswith("api/thumb/")
        assert "The folder g is away" in page.locator("#photo-note").inner_text() and fits(page)
        assert all(page.locator(f"#{name}").is_hidden() for name in ("similar", "combine", "open", "download"))
    finally:
        (served / "away").rename(served / "g")
    page.keyboard.press("Escape")
    page.locator("#results a").first.click()
    until(page, "document.getElementById('photo').src.includes('/api/image/')")
    assert page.locator("#photo-note").is_hidden() and page.locator("#combine").is_visible()


def test_an_image_that_is_not_there_is_said(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/?id={'0' * 20}")
    until(page, "document.getElementById('message').textContent.includes('no image')")
    assert page.locator("#detail").is_hidden()
    page.goto(f"{address}/?q=x&since=soon&sort=newest")
    until(page, "document.getElementById('message').textContent.includes('2024-05-31')")
    assert page.locator("#results a").count() == 0
    page.close()
