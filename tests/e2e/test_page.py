"""The page in a real browser: search, open, light a word, upload, go back; wide, narrow, by keyboard.

Skipped where playwright or Chromium is not installed (Debian: apt-get install chromium; pip install playwright).
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stores import gallery, index, model

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
if CHROMIUM is None:
    pytest.skip("no Chromium is installed (apt-get install chromium)", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
uvicorn = pytest.importorskip("uvicorn")

QUERY = "a dog on the beach"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the pictures `g` and the store `s`."""
    folder = tmp_path_factory.mktemp("page")
    index(gallery(folder / "g", 8, described=8), folder / "s")
    return folder


@pytest.fixture(scope="module")
def address(served: Path) -> Iterator[str]:
    from seps.retrieval.index.search import Searcher
    from seps.serve.app import create_app

    folder = served
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(create_app(Searcher(folder / "s", model())), "127.0.0.1", port, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(params=["wide", "narrow"])
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    size = {"wide": {"width": 1200, "height": 800}, "narrow": {"width": 360, "height": 700}}[request.param]
    context = browser.new_context(viewport=size, color_scheme="dark" if request.param == "narrow" else "light")
    page = context.new_page()
    page.set_default_timeout(10_000)
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "request", lambda asked: None if "127.0.0.1" in asked.url or asked.url == "data:," else faults.append(asked.url)
    )
    yield page
    context.close()
    assert faults == []


def search(page: Any, address: str) -> None:
    page.goto(address)
    page.get_by_label("What to look for").fill(QUERY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#results a")


def until(page: Any, expression: str, seconds: float = 20) -> None:
    """Wait for something of the page. Playwright's own way asks the page to evaluate text, which its policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


def painted(page: Any) -> int:
    """How many pixels of the overlay are not transparent."""
    return int(
        page.evaluate(
            """() => {
                const canvas = document.getElementById("heat");
                const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                return data.filter((value, place) => place % 4 === 3 && value).length;
            }"""
        )
    )


def fits(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_search_open_light_and_back(page: Any, address: str) -> None:
    search(page, address)
    assert page.locator("#results a").count() == 8
    assert "q=a%20dog" in page.url and fits(page)
    page.locator("#results a").nth(1).click()
    page.wait_for_selector("#words button")
    assert "&id=" in page.url and page.locator("#detail").is_visible() and fits(page)
    assert "score" in page.locator("#detail-title").inner_text()
    page.mouse.move(2, 2)
    until(page, "document.getElementById('heat').dataset.mode === 'none'")
    assert painted(page) == 0
    page.get_by_role("button", name="dog").hover()
    assert page.locator("#heat").get_attribute("data-mode") == "word-2"
    assert painted(page) > 0
    assert page.locator("#caption-note").inner_text().startswith('"dog" adds ')
    page.get_by_role("button", name="beach").focus()
    assert page.locator("#heat").get_attribute("data-mode") == "word-5"
    page.get_by_role("switch").check()
    assert "kept" in page.locator("#heat").get_attribute("data-mode")
    page.go_back()
    page.wait_for_selector("#detail", state="hidden")
    assert page.locator("#results a").count() == 8 and "id=" not in page.url
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
    assert page.locator("#results a").count() == 8


def test_upload_and_similar(page: Any, address: str, tmp_path: Path) -> None:
    from stores import paint

    page.goto(address)
    page.locator("#file").set_input_files(str(paint(tmp_path / "p.jpg", 2)))
    page.wait_for_selector("#results a")
    assert "upload=" in page.url and "p02.jpg" in page.locator("#results a").first.inner_text()
    page.locator("#results a").first.click()
    page.wait_for_selector("#detail", state="visible")
    assert page.locator("#why").is_hidden()
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(page: Any, address: str, tmp_path: Path, scheme: str) -> None:
    """Every state of the page, light and dark, wide and narrow: empty, results, detail, upload, message, API."""
    from stores import paint

    page.emulate_media(color_scheme=scheme)
    page.goto(address)
    assert violations(page) == []
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
    page.locator("#file").set_input_files(str(paint(tmp_path / "p.jpg", 2)))
    page.wait_for_selector("#results a")
    assert violations(page) == []
    page.goto(f"{address}/api")
    assert violations(page) == [] and fits(page)
    page.evaluate("document.documentElement.removeAttribute('lang')")
    assert [fault.split(":")[0] for fault in violations(page)] == ["html-has-lang"]  # it does look


def test_errors_are_shown(page: Any, address: str) -> None:
    page.goto(address)
    page.get_by_role("button", name="Search", exact=True).click()
    assert page.locator("#message").inner_text() == "Write what to look for."


def test_a_picture_whose_folder_is_away_shows_its_thumbnail(page: Any, address: str, served: Path) -> None:
    (served / "g").rename(served / "away")
    try:
        search(page, address)
        page.locator("#results a").first.click()
        page.wait_for_selector("#words button")
        until(page, "document.getElementById('photo').naturalWidth > 0")
        assert "/api/thumb/" in page.locator("#photo").get_attribute("src")
        assert "The folder g is away" in page.locator("#photo-note").inner_text() and fits(page)
    finally:
        (served / "away").rename(served / "g")
    page.keyboard.press("Escape")
    page.locator("#results a").first.click()
    until(page, "document.getElementById('photo').src.includes('/api/image/')")
    assert page.locator("#photo-note").is_hidden()


def test_an_image_that_is_not_there_is_said(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/?id={'0' * 20}")
    until(page, "document.getElementById('message').textContent.includes('There is no image')")
    assert page.locator("#detail").is_hidden()
    page.close()


LOOK = """async ([address, there, absent]) => {
    const load = (tag, url) => new Promise((done) => {
        const element = document.createElement(tag);
        element.onload = () => done("loaded");
        element.onerror = () => done("failed");
        element.src = url;
        document.body.append(element);
    });
    const ask = (url, options) => fetch(url, {mode: "no-cors", ...options}).then(() => "answered", () => "failed");
    return [
        await load("img", `${address}/api/thumb/${there}`),
        await load("img", `${address}/api/image/${there}`),
        await load("script", `${address}/static/app.js?again`),
        await ask(`${address}/api/search?q=a`),
        await ask(`${address}/api/search-image`, {method: "POST", body: "x"}),
        await ask(`${address}/api/thumb/${there}`),
        await ask(`${address}/api/thumb/${absent}`),
    ];
}"""


def test_other_sites_cannot_look(browser: Any, address: str) -> None:
    """A page of another origin in a real browser: pictures, scripts, searches and uploads all fail alike."""
    import http.server

    from seps.retrieval.index.rows import row_id

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title>")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = browser.new_page()
    values = [address, row_id("p00.jpg", None), "0" * 20]
    try:
        for host in ("localhost", "127.0.0.1"):  # another site, and the same one on another port
            page.goto(f"http://{host}:{server.server_address[1]}/")
            assert page.evaluate(LOOK, values) == ["failed"] * 7
        page.goto(f"{address}/api")
        assert page.evaluate(LOOK, values) == ["loaded", "loaded", "loaded", *["answered"] * 4]
    finally:
        page.close()
        server.shutdown()
        server.server_close()
