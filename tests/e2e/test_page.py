"""The page in a real browser: search, filter, scroll, open, light a word, upload, go back; wide, narrow, by keyboard.

Skipped where playwright or Chromium is not installed (Debian: apt-get install chromium; pip install playwright).
"""

from __future__ import annotations

import os
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
    """The folder with the pictures `g`, 30 of them and two copies of the first, and the store `s`."""
    folder = tmp_path_factory.mktemp("page")
    gallery(folder / "g", 30, described=8)
    for number, path in enumerate(sorted((folder / "g").rglob("*.jpg"))):
        os.utime(path, (1.6e9 + 86400 * number,) * 2)
    (folder / "g" / "copies").mkdir()
    for name in ("a.jpg", "b.jpg"):
        shutil.copy2(folder / "g" / "p00.jpg", folder / "g" / "copies" / name)
    index(folder / "g", folder / "s")
    return folder


@pytest.fixture(scope="module")
def address(served: Path) -> Iterator[str]:
    from seps.retrieval.index.search import Searcher
    from seps.serve import rankings
    from seps.serve.app import create_app
    from seps.serve.guard import LOOPBACK

    folder = served
    # The untrained model of the tests takes all pictures for nearly the same.
    patch = pytest.MonkeyPatch()
    patch.setattr(rankings, "ALIKE", 0.999)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(
        create_app(Searcher(folder / "s", model()), hosts=LOOPBACK), "127.0.0.1", port, log_level="error"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)
    patch.undo()
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
    found(page)


def found(page: Any, text: str = "best first") -> None:
    """Wait until the page says what was found."""
    until(page, f"document.getElementById('message').textContent.includes('{text}')")


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
    assert page.locator("#heat").get_attribute("data-mode") == "word-2"
    assert painted(page) > 0
    assert page.locator("#caption-note").inner_text().startswith('"dog" adds ')
    page.get_by_role("button", name="beach").focus()
    assert page.locator("#heat").get_attribute("data-mode") == "word-5"
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
    page.goto(f"{address}/api")
    assert violations(page) == [] and fits(page)
    page.evaluate("document.documentElement.removeAttribute('lang')")
    assert [fault.split(":")[0] for fault in violations(page)] == ["html-has-lang"]  # it does look


def test_errors_are_shown(page: Any, address: str) -> None:
    page.goto(address)
    found(page, "32 pictures.")
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
    page.goto(f"{address}/?q=x&after=soon&sort=newest")
    until(page, "document.getElementById('message').textContent.includes('cannot be read; write it like 2024-05-31')")
    assert page.locator("#results a").count() == 0
    page.close()


wide = pytest.mark.parametrize("page", ["wide"], indirect=True)


def cards(page: Any) -> list[str]:
    return [text.split("\n")[0] for text in page.locator("#results a").all_inner_texts()]


def scroll(page: Any, count: int) -> None:
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    until(page, f"document.querySelectorAll('#results a').length === {count}")


@wide
def test_before_the_first_query(page: Any, address: str) -> None:
    page.goto(address)
    found(page, "32 pictures.")
    assert page.get_by_role("heading", name="Newest pictures").is_visible()
    scroll(page, 32)
    assert len(set(page.locator("#results a").evaluate_all("all => all.map(each => each.dataset.id)"))) == 32
    page.locator("#examples a").first.click()
    found(page)
    assert "?q=people%20outdoors" in page.url and page.locator("#start").is_hidden()
    page.go_back()
    found(page, "32 pictures.")
    assert page.locator("#start").is_visible() and page.input_value("#query") == ""


def test_scrolling_and_folding(page: Any, address: str) -> None:
    search(page, address)
    scroll(page, 30)  # 32 pictures, the two copies folded
    names = cards(page)
    assert len(set(names)) == 30 and page.locator("#more").is_hidden()
    assert page.locator("#message").inner_text() == "32 pictures, best first; 2 folded."
    page.get_by_role("button", name="2 more like this").click()
    assert page.locator("#results a").count() == 32 and page.locator("#results .folded").count() == 2
    page.get_by_role("button", name="Fold again").click()
    assert cards(page) == names
    page.get_by_label("Fold near-duplicates").uncheck()
    found(page, "best first.")
    assert "fold=0" in page.url and page.locator(".folding").count() == 0
    page.goto(f"{page.url}&depth=5")
    found(page, "24 pictures")
    assert page.locator("#end-note").inner_text() == "These are the 24 nearest of 32 pictures."
    page.get_by_role("button", name="Look further").click()
    found(page, "32 pictures")
    assert "depth=200" in page.url and page.locator("#further").is_hidden()


@wide
def test_the_address_holds_filters_and_order(page: Any, address: str) -> None:
    search(page, address)
    best = cards(page)
    page.locator("#filters summary").click()
    assert "sub" in page.locator("#folders option").evaluate_all("all => all.map(each => each.value)")
    page.get_by_label("Folder").fill("sub")
    page.keyboard.press("Tab")
    found(page, "15 pictures")
    page.get_by_label("Sort").select_option("newest")
    found(page, "newest first")
    assert "folder=sub" in page.url and "sort=newest" in page.url
    assert [name.split(". ")[1] for name in cards(page)] == [f"p{number:02}.jpg" for number in range(29, 0, -2)]
    page.get_by_label("From").fill("2020-10-10")
    found(page, "3 pictures, newest")
    newest, where = cards(page), page.url
    page.goto("about:blank")
    page.goto(where)
    found(page, "3 pictures, newest")
    assert cards(page) == newest and page.input_value("#folder") == "sub" and page.input_value("#after") == "2020-10-10"
    assert page.locator("#filters-title").inner_text() == "Filters (2)"
    page.get_by_role("button", name="Clear filters").click()
    found(page, "32 pictures, newest first")
    page.go_back()
    found(page, "3 pictures, newest")
    page.goto(f"{address}/?q=a%20dog%20on%20the%20beach")
    found(page)
    assert cards(page)[:24] == best[:24]


@wide
def test_kept_patches_on_hover(page: Any, address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/api/kept/" in request.url else None)
    search(page, address)
    assert asked == []
    for _ in range(2):
        page.locator("#results a").nth(2).hover()
        until(page, "document.querySelectorAll('#results canvas').length === 1")
        clear = page.locator("#results canvas").evaluate(
            """canvas => {
                const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                return data.filter((value, place) => place % 4 === 3 && !value).length / (data.length / 4);
            }"""
        )
        assert 0.5 < clear < 0.6  # 5 of 9 patches
        page.mouse.move(2, 2)
        until(page, "!document.querySelector('#results canvas')")
    assert len(asked) == 1
    page.locator("#results a").nth(3).focus()
    until(page, "document.querySelectorAll('#results canvas').length === 1")
    assert len(asked) == 2


@wide
def test_words_and_a_picture_together(page: Any, address: str, tmp_path: Path) -> None:
    from stores import paint

    search(page, address)
    words = cards(page)[:24]
    page.locator("#file").set_input_files(str(paint(tmp_path / "p.jpg", 2)))
    until(page, "location.search.includes('upload=') && !document.getElementById('with').hidden")
    found(page)
    assert "q=a%20dog" in page.url and cards(page)[:24] != words
    until(page, "document.getElementById('with-picture').naturalWidth > 0")
    page.get_by_label("Share of the picture").fill("1")
    until(page, "location.search.includes('weight=1')")
    found(page)
    until(page, "document.querySelector('#results a').innerText.includes('p02.jpg')")
    page.reload()
    found(page)
    assert "p02.jpg" in cards(page)[0] and page.input_value("#weight") == "1"
    page.get_by_role("button", name="Remove picture").click()
    until(page, "document.getElementById('with').hidden")
    found(page)
    until(page, "!location.search.includes('weight')")
    assert cards(page)[:24] == words
    page.locator("#results a").nth(4).click()
    page.get_by_role("link", name="Combine with the words").click()
    until(page, "location.search.includes('like=') && !document.getElementById('detail').open")
    found(page)
    assert page.input_value("#query") == QUERY


@wide
def test_an_open_picture(page: Any, address: str, served: Path) -> None:
    search(page, address)
    page.locator("#results a").nth(1).focus()
    page.keyboard.press("e")
    page.wait_for_selector("#words button")
    path = Path(page.locator("#full-path").inner_text())
    assert path.is_relative_to(served / "g") and path.is_file()
    page.keyboard.press("k")
    until(page, "location.search.includes('kept=1')")
    assert "kept" in page.locator("#heat").get_attribute("data-mode")
    page.keyboard.press("e")
    page.wait_for_selector("#why", state="hidden")
    assert "plain=1" in page.url
    page.keyboard.press("ArrowRight")
    until(page, f"!document.getElementById('full-path').textContent.endsWith('{path.name}')")
    assert page.locator("#why").is_hidden() and "kept=1" in page.url
    where = page.url
    page.goto("about:blank")
    page.goto(where)
    page.wait_for_selector("#detail", state="visible")
    assert page.locator("#why").is_hidden() and page.locator("#kept").is_checked()
    path = Path(page.locator("#full-path").inner_text())
    with page.expect_download() as saved:
        page.get_by_role("link", name="Download").click()
    assert saved.value.suggested_filename == path.name
    assert Path(saved.value.path()).read_bytes() == path.read_bytes()
    with page.context.expect_page() as tab:
        page.get_by_role("link", name="Open original").click()
    until(tab.value, "document.images.length === 1 && document.images[0].naturalWidth === 60")
    tab.value.close()
    page.keyboard.press("Escape")
    page.wait_for_selector("#detail", state="hidden")
    assert page.evaluate("document.activeElement.dataset.id") in where


def test_theme(page: Any, address: str) -> None:
    """The narrow page has a dark system, the wide one a light one; a choice goes before both and stays."""
    page.goto(address)
    colour = "getComputedStyle(document.body).backgroundColor"
    system, other = (
        page.evaluate(colour),
        "light" if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") else "dark",
    )
    page.get_by_label("Theme").select_option(other)
    chosen = page.evaluate(colour)
    assert {system, chosen} == {"rgb(255, 255, 255)", "rgb(19, 19, 22)"}
    for path in ("/", "/api"):
        page.goto(address + path)
        assert page.evaluate(colour) == chosen
    page.goto(address)
    page.get_by_label("Theme").select_option("")
    assert page.evaluate(colour) == system


@wide
def test_the_line_behind_good_matches(page: Any, address: str) -> None:
    """It lies where good matches end, by score and by date, on whichever page that is."""

    def judged(route: Any) -> None:
        answer = route.fetch()
        body = answer.json()
        for hit in body["results"]:
            hit["good"] = hit["rank"] <= 26
        route.fulfill(response=answer, json={**body, "good": 26})

    page.route("**/api/search?*", judged)
    search(page, address)
    assert "26 good" in page.locator("#message").inner_text()
    scroll(page, 30)
    items = page.locator("#results > li").evaluate_all("all => all.map(each => each.className)")
    assert items.count("line") == 1
    ranks = [int(text.split(".")[0]) for text in cards(page)]
    assert items.index("line") == sum(rank <= 26 for rank in ranks)


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
