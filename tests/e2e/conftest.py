"""The served store and the browser of `pages`, for every test of this folder."""

import pytest

try:
    from pages import address, browser, page, served
except pytest.skip.Exception:  # without a browser, each module skips itself when it imports `pages`
    pass
else:
    __all__ = ["address", "browser", "page", "served"]
