"""The page in a real browser: pictures without a query, scrolling, folding, filters, theme, pictures opened."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from pages import QUERY, cards, found, scroll, search, until, wide


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
    # The places among the results, without gaps where copies are folded; those of a date have none.
    assert [int(name.split(". ")[0]) for name in names] == list(range(1, 31))
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
    assert {"24", "32"} <= set(page.locator("#end-note").inner_text().split())
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
    assert cards(page) == [f"p{number:02}.jpg" for number in range(29, 0, -2)]
    page.get_by_label("From").fill("2020-10-10")
    found(page, "3 pictures, newest")
    newest, where = cards(page), page.url
    page.goto("about:blank")
    page.goto(where)
    found(page, "3 pictures, newest")
    assert cards(page) == newest and page.input_value("#folder") == "sub" and page.input_value("#since") == "2020-10-10"
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
    page.get_by_role("button", name="Details").click()
    assert page.locator("#why").is_visible() and "plain=0" in page.url
    where = page.url
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
    for path in ("/", "/docs"):
        page.goto(address + path)
        assert page.evaluate(colour) == chosen
    page.goto(address)
    page.get_by_label("Theme").select_option("")
    assert page.evaluate(colour) == system


@wide
def test_the_line_behind_good_matches(page: Any, address: str) -> None:
    """It lies where good matches end, by score and by date, on whichever page that is."""

    ranks: list[int] = []

    def judged(route: Any) -> None:
        answer = route.fetch()
        body = answer.json()
        for hit in body["results"]:
            hit["good"] = hit["rank"] <= 26
            ranks.append(hit["rank"])
        route.fulfill(response=answer, json={**body, "good": 26})

    page.route("**/api/search?*", judged)
    search(page, address)
    assert "26 good" in page.locator("#message").inner_text()
    scroll(page, 30)
    items = page.locator("#results > li").evaluate_all("all => all.map(each => each.className)")
    assert items.count("line") == 1
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

    from seps.images.sources import row_id

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
        page.goto(f"{address}/docs")
        assert page.evaluate(LOOK, values) == ["loaded", "loaded", "loaded", *["answered"] * 4]
    finally:
        page.close()
        server.shutdown()
        server.server_close()
