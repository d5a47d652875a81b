"""The page in a real browser draws the line between good matches and the rest, where the API says it is.

Skipped where playwright or Chromium is not installed (`pages`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pages import serving
from seps.photos.search.searcher import Searcher
from seps.retrieval.ranking.bank import GOOD_CONFIDENCE
from stores import few_sentences, gallery, index, model


def with_good(searcher: Searcher, text: str, count: int) -> None:
    """Set the calibration so that the best `count` hits of the text are good matches."""
    scores = [hit.score for hit in searcher.search(text, 6)]
    edges = [scores[0] + 1, *scores, scores[-1] - 1]
    between = (edges[count] + edges[count + 1]) / 2
    settings = searcher.store.settings
    values = {**settings.calibration, "scale": 1e-4, "place": between}
    searcher.store.settings = replace(settings, calibration=values)
    assert sum(bool(hit.good) for hit in searcher.search(text, 6)) == count, GOOD_CONFIDENCE


def test_the_line_between_good_matches_and_the_rest(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from seps.photos.library import Library
    from seps.photos.serve.app import create_app

    few_sentences(monkeypatch)
    index(gallery(tmp_path / "g", 6, described=3), tmp_path / "s", bank=True)
    searcher = Searcher(tmp_path / "s", model())
    with serving(create_app(Library.over(searcher))) as place:
        page = browser.new_page(viewport={"width": 1000, "height": 800})
        for good in (2, 5, 0, 6):
            with_good(searcher, f"a dog runs over the wet sand {good}", good)
            page.goto(f"{place}/?q=a%20dog%20runs%20over%20the%20wet%20sand%20{good}")
            page.wait_for_selector("#results a")
            kinds = page.evaluate(
                "[...document.querySelectorAll('#results > li')].map((item) => item.querySelector('a') ? 1 : 0)"
            )
            # One entry without a picture after the good ones; none where all or none of them are good.
            assert kinds == ([1] * good + [0] + [1] * (6 - good) if 0 < good < 6 else [1] * 6)
            told = page.locator("body").inner_text()
            assert ("The rest" in told) == (0 < good < 6) and ("No good match" in told) == (good == 0)
            if 0 < good < 6:
                line = page.locator("#results > li", has_text="The rest")
                above, below = (page.locator("#results a").nth(place).bounding_box() for place in (good - 1, good))
                box = line.bounding_box()
                assert above["y"] + above["height"] <= box["y"] + 1 and box["y"] < below["y"] and box["width"] > 500
        page.close()
