"""What comes from files reaches the terminal as text, never as a command to it."""

from __future__ import annotations

import io
import json

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from seps.cli.shared.text import cells, literal, printable, printable_json

JOINERS = {0x200C: None, 0x200D: None}  # parts of scripts and emoji, harmless
WITH_SURROGATES = st.lists(st.integers(0, 0x10FFFF).map(chr), max_size=12).map("".join)


def test_escapes_by_hand() -> None:
    assert printable("a\x1b[31mb\x07\n\t\x7f\x9b") == "a\\x1b[31mb\\x07\\n\\t\\x7f\\x9b"
    assert printable("gp\u202egpj.exe\udc80\U000e0001") == "gp\\u202egpj.exe\\x80\\U000e0001"
    assert printable("[red]größe 写真 🐕.jpg") == "[red]größe 写真 🐕.jpg"
    assert printable_json({"a": "\x1b\x7f\x9b\u202e\n"}) == '{"a": "\\u001b\\u007f\\u009b\\u202e\\n"}'


def test_columns_are_counted_as_a_terminal_does() -> None:
    for text in ("", "plain.jpg", "größe.jpg", "日本 語.jpg", "🐶.jpg", "e\u0301.jpg"):
        assert cells(text) == cell_len(text), text


@given(WITH_SURROGATES)
def test_everything_printed_prints(text: str) -> None:
    assert printable(text).translate(JOINERS).isprintable()
    printable(text).encode()
    assert all(line.isprintable() for line in printable_json([text], indent=1).translate(JOINERS).split("\n"))
    # A high and a low half beside each other are one letter once JSON was read; what is said is the same.
    assert json.loads(printable_json([text]))[0].encode("utf-16", "surrogatepass") == text.encode(
        "utf-16", "surrogatepass"
    )


@given(st.text(st.sampled_from("[]\\/red boldx=@#.1:g"), max_size=16))
def test_rich_shows_names_as_they_are(name: str) -> None:
    out = io.StringIO()
    Console(file=out, width=400, color_system="truecolor", force_terminal=True, highlight=False).print(
        literal(f"[red]{name}[/red]:dog:"), end="", soft_wrap=True
    )
    assert out.getvalue() == f"[red]{name}[/red]:dog:"
