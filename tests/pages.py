"""A served store, a real browser, and what tests of the page do with it.

Importing it skips a module where playwright or Chromium is not installed (Debian: apt-get install chromium; pip install
playwright). `e2e/conftest.py` hands the fixtures to the tests, once for all modules.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address at which an application answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def address(served: Path) -> Iterator[str]:
    from seps.photos.library import Library
    from seps.photos.search.searcher import Searcher
    from seps.photos.serve.app import create_app
    from seps.photos.serve.guard import LOOPBACK
    from seps.retrieval import embedded

    # The untrained model of the tests takes all pictures for nearly the same.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "UNMEASURED_COSINE", 0.999)
        with serving(create_app(Library.over(Searcher(served / "s", model())), hosts=LOOPBACK, local=True)) as place:
            yield place


@pytest.fixture(scope="package")
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


wide = pytest.mark.parametrize("page", ["wide"], indirect=True)


def cards(page: Any) -> list[str]:
    return [text.split("\n")[0] for text in page.locator("#results a").all_inner_texts()]


def scroll(page: Any, count: int) -> None:
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    until(page, f"document.querySelectorAll('#results a').length === {count}")
