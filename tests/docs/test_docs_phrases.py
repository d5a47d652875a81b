"""Pages and messages have no banned phrasing; the tool finds them where they are, and nowhere else."""

from __future__ import annotations

import re
import sys

from doc_blocks import ROOT

sys.path.append(str(ROOT / "tools"))
from phrases import BANNED, in_page, in_source


def test_a_page_is_read_without_its_code() -> None:
    text = "# Title\n\n```text\nMend this.\n```\n\n`mend` it, then\nit is made\nanew. [mend](mend.md)\n"
    assert [(line, said) for line, said, _ in in_page(text)] == [(8, "made anew"), (9, "mend")]


def test_messages_are_read_and_docstrings_are_not() -> None:
    text = (
        '"""Mend."""\n\n\ndef f(name):\n    """Mend."""\n    raise ValueError(f"{name}: mend "\n        "the file")\n'
    )
    assert [said for _, said, _ in in_source(text)] == ["mend"]


def test_every_phrasing_has_a_successor_that_is_not_banned() -> None:
    for pattern, instead in BANNED.items():
        assert instead and not re.search(pattern, instead, re.IGNORECASE), pattern
