"""Pictures of the page of `seps serve`, over the photos that ship with the package.

    python tools/page_pictures.py [--out docs/images] [--all]

Writes `page.jpg` (a photo and its explanation) and `page-grid.jpg` (results, kept patches of one). With `--all` every
state, wide, narrow and dark, as PNG files to look at. Needs Chromium and playwright.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from seps.photos.indexing.build import index_folder
from seps.photos.library import Library
from seps.photos.search.searcher import Searcher
from seps.photos.serve.app import create_app
from seps.retrieval.demo import gallery_file
from seps.retrieval.pretrained import from_pretrained

QUERY = "a dog running in a field"
SIZES = {"wide": (1280, 860), "narrow": (390, 800)}


def store(folder: Path) -> Searcher:
    """The shipped photos as a person would have them: in folders, and some twice."""
    photos = folder / "photos"
    shutil.copytree(gallery_file().parent, photos)
    for number, path in enumerate(sorted(photos.glob("*.jpg"))):
        day = time.mktime((2023, 1 + number % 12, 1 + number % 28, 12, 0, 0, 0, 0, -1))
        if "dog" in path.stem or "cat" in path.stem:
            (photos / "copies").mkdir(exist_ok=True)
            Image.open(path).convert("RGB").save(photos / "copies" / path.name, quality=60)
        os.utime(path, (day, day))
    model = from_pretrained("base")
    index_folder(photos, folder / "store", model, "base")
    return Searcher(folder / "store", model)


@contextmanager
def served(searcher: Searcher) -> Iterator[str]:
    """The address of the page while it is served."""
    import uvicorn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(create_app(Library.over(searcher)), port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


def settled(page: Any) -> None:
    """Wait until everything asked for has come."""
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(400)


def grid(page: Any, address: str) -> None:
    """Results, the pointer on the second."""
    page.goto(f"{address}/?q={QUERY}")
    page.wait_for_selector("#results a")
    page.locator("#results a").nth(1).hover()
    settled(page)


def detail(page: Any, address: str) -> None:
    """The first result, one word lit."""
    page.goto(f"{address}/?q={QUERY}")
    page.wait_for_selector("#results a")
    page.locator("#results a").first.click()
    page.wait_for_selector("#words button")
    page.get_by_role("button", name="dog").click()
    settled(page)


def start(page: Any, address: str) -> None:
    """Before the first query."""
    page.goto(address)
    page.wait_for_selector("#results a")
    settled(page)


def filtered(page: Any, address: str) -> None:
    """A picture and a sentence, filters, unfolded near-duplicates."""
    page.goto(f"{address}/?q={QUERY}")
    page.wait_for_selector("#results a")
    identity = page.locator("#results a").nth(3).get_attribute("data-id")
    page.goto(f"{address}/?q={QUERY}&like={identity}&weight=0.3&since=2020-01-01&min_size=100")
    page.wait_for_selector("#results .folding")
    page.locator("#results .folding").first.click()
    settled(page)


def kept(page: Any, address: str) -> None:
    """The kept patches of an open picture, without its explanation."""
    detail(page, address)
    page.keyboard.press("k")
    page.keyboard.press("e")
    settled(page)


def main() -> None:
    """Index, serve, look."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, served(store(Path(folder))) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])

        def shoot(state: Any, size: str, scheme: str) -> Image.Image:
            width, height = SIZES[size]
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            state(page, address)
            picture = Image.open(io.BytesIO(page.screenshot()))
            context.close()
            return picture

        if options.all:
            for state in (start, grid, detail, filtered, kept):
                for size, scheme in (("wide", "light"), ("narrow", "light"), ("wide", "dark"), ("narrow", "dark")):
                    shoot(state, size, scheme).save(options.out / f"{state.__name__}-{size}-{scheme}.png")
        else:
            for state, name in ((detail, "page"), (grid, "page-grid")):
                shoot(state, "wide", "light").convert("RGB").save(options.out / f"{name}.jpg", quality=80)
        browser.close()


if __name__ == "__main__":
    main()
