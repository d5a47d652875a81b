"""The single file in Chinese: every text is translated, no translation outlives it, code and shapes are the same."""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest

import seps
import shape_source
from seps.cli.main import main
from seps.modules import MODULES, STYLES, BundleError, single_file, writer
from seps.modules.contents import first_sentence, one_line
from seps.modules.language import Translation, texts, translated
from seps.modules.writer import check_translations, read_translations
from single_files import text_of

ROOT = Path(seps.__file__).parent
CHINESE = re.compile("[\u4e00-\u9fff]")
KEPT = {
    "names and equations": r"`[^`]*`",
    "shapes": r"\((?:[A-Z](?:_[a-z])?|\.\.\.)(?:,| \+| or )[^()]*\)",
    "identifiers": r"[a-z]+_[a-z_]+",
    "numbers, but 0 and 1": r"\d+\.\d+|\d{2,}|[2-9]",
    "places to fill": r"\{\w*\}",
}
HEADS = (("Args:", "参数:"), ("Returns:", "返回:"), ("Flow", "流程"))


def left(root: Path) -> dict[str, tuple[list[str], list[str]]]:
    """By file: what has no translation, and what is stale."""
    found = check_translations(root, "zh").items()
    return {name: (each.missing, each.stale) for name, each in found if each.missing or each.stale}


def test_every_text_is_translated_and_no_entry_is_stale() -> None:
    assert left(ROOT) == {}, "Run tools/translations.py, and fill in or delete what it names."


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the single file is made from."""
    for name in (*MODULES, "modules/contents"):
        for end in ("py", "zh.yaml"):
            target = tmp_path / f"{name}.{end}"
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / f"{name}.{end}").exists():
                shutil.copy(ROOT / f"{name}.{end}", target)
    monkeypatch.setattr(writer, "__file__", str(tmp_path / "modules" / "writer.py"))
    return tmp_path


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, after), encoding="utf-8")


NEW = '    def planted(self) -> None:\n        """A new text."""\n\n'


@pytest.mark.parametrize(
    ("file", "before", "after", "missing", "stale"),
    [
        ("method/losses/ratio", "    def _check_once", f"{NEW}    def _check_once", "A new text.", None),
        (
            "method/losses/ratio",
            "    weights = [lam",
            "    # A new note,\n    # b.\n    weights = [lam",
            "A new note,",
            None,
        ),
        ("method/score", "zero where none is valid", "0 where none is valid", "`E`, the mean", "`E`, the mean"),
        ("modules/selftest", '    """The triplet loss."""\n', "", None, "The triplet loss."),
        ("method/checks", "Shapes: R rows", "Shapes: R lines", "Checks of arguments", "Checks of arguments"),
    ],
)
def test_a_planted_change_is_found(
    package: Path, file: str, before: str, after: str, missing: str | None, stale: str | None
) -> None:
    change(package / f"{file}.py", before, after)
    found = left(package)
    assert list(found) == [file]
    for texts_left, start in zip(found[file], (missing, stale), strict=True):
        assert [text.startswith(start or "") for text in texts_left] == ([] if start is None else [True]), found
    if missing is None:
        single_file("annotated", "zh")
    else:
        with pytest.raises(BundleError, match=rf"{file}\.zh\.yaml has no translation of .{re.escape(missing)}"):
            single_file("annotated", "zh")


def test_an_entry_that_nothing_says_or_that_is_empty_is_found(package: Path) -> None:
    path = package / "modules/contents.zh.yaml"
    with path.open("a", encoding="utf-8") as file:
        file.write("- en: Nobody says this.\n  zh: x\n")
    assert left(package) == {"modules/contents": ([], ["Nobody says this."])}
    change(package / "modules/selftest.zh.yaml", "三元组损失。", "")
    assert left(package)["modules/selftest"] == (["The triplet loss."], [])


def unfaithful(en: str, zh: str) -> list[str]:
    """What of the English text is not in the Chinese one, or the other way round."""
    found = []
    for what, pattern in KEPT.items():
        # What one language says twice the other may say once.
        differ = set(re.findall(pattern, en)) ^ set(re.findall(pattern, zh))
        found += [f"{what}: {sorted(differ)}"] if differ else []
    if set(re.findall(r"Eq\. (\d[-\d]*)", en)) != set(re.findall(r"公式 (\d[-\d]*)", zh)):
        found.append("numbers of equations")
    found += [english for english, chinese in HEADS if bool(re.search(rf"^{english}", en, re.M)) != (chinese in zh)]
    if not CHINESE.search(zh) and re.search("[a-z]{3} [a-z]|[a-z]{4}", re.sub("`[^`]*`", "", en)):
        found.append("not Chinese")
    if re.search(r"(?:\b[a-z]{2,}\b[ ,.]+){4}", re.sub(r"`[^`]*`|\S*[_()=]\S*", " ", zh)):
        found.append("English words")
    return found


@pytest.mark.parametrize("name", sorted({*MODULES, "modules/contents"} - {"method/config"}))
def test_translations_keep_names_shapes_and_equations(name: str) -> None:
    pairs = read_translations(ROOT, "zh")[name].entries.items()
    assert pairs
    assert [(faults, en, zh) for en, zh in pairs if (faults := unfaithful(en, zh))] == []


def test_an_unfaithful_translation_is_found() -> None:
    en = "`x` of Eq. 5 for 2 images, see `f`: (B, N) -> (B,)."
    zh = "公式 5 的 `x`, 2 张图, 见 `f`: (B, N) -> (B,)。"
    assert unfaithful(en, zh) == []
    for before, after in (("`x`", "x"), ("(B, N)", "(B, M)"), (" 5", " 4"), (" 2", " 3"), ("见", "as it is said in")):
        assert unfaithful(en, zh.replace(before, after)) != [], after
    assert unfaithful("One text.", "One text.") == ["not Chinese"]


def test_the_chinese_files_hold_the_same_code_and_shapes() -> None:
    def code(text: str) -> str:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
        return ast.dump(tree)

    def shapes(text: str) -> list[str]:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        beside = [token.string for token in tokens if token.type == tokenize.COMMENT and token.line.strip()[0] != "#"]
        return [comment for comment in beside if shape_source.parse_comment(comment)]

    for style in STYLES:
        assert code(text_of(f"{style}-zh")) == code(text_of(f"{style}-en"))
        assert shapes(text_of(f"{style}-zh")) == shapes(text_of(f"{style}-en"))
    assert len(shapes(text_of("annotated-zh"))) > 150


@pytest.mark.parametrize("style", STYLES)
def test_no_english_prose_is_left(style: str) -> None:
    said = [text.said for text in texts(text_of(f"{style}-zh")) if not text.said.startswith("--- ")]
    assert len(said) > 80
    assert [text for text in said if not CHINESE.search(text) and re.search("[a-z]{3} [a-z]{2}", text)] == []


@pytest.mark.parametrize("name", MODULES)
def test_notes_and_shapes_are_told_apart_as_the_shape_test_does(name: str) -> None:
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    notes = {text.said for text in texts(source) if not text.docstring}
    assert not [note for note in notes if shape_source.parse_comment(note)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    counted = Counter(
        shape_source.parse_comment(token.string) is not None
        for token in tokens
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa"))
    )
    assert counted[False] >= len(notes) and (counted[False] > 0) == bool(notes)


SOURCE = '''"""Head.

More \\\\ of it.
"""

x = 1  # beside
# first line
# second line
y = 2  # (B, N)


def f():
    """One."""
    # each (B,)
    z = 3  # type: ignore
    # alone
    return z
'''


def test_texts_are_replaced_where_they_stand() -> None:
    assert [text.said for text in texts(SOURCE)] == [
        "Head.\n\nMore \\ of it.",
        "beside",
        "first line second line",
        "One.",
        "alone",
    ]
    said = {"Head.\n\nMore \\ of it.": "头\\。", "beside": "旁", "first line second line": "一\n二"}
    translation = Translation({**said, "One.": "一。\n\n二。", "gone": "去"})
    made = translated(SOURCE, translation)
    assert (translation.missing, translation.stale) == (["alone"], ["gone"])
    assert ast.literal_eval(made.split("\n")[0]) == "头\\。"
    assert made.split("\n", 1)[1] == (
        "\nx = 1  # 旁\n# 一\n# 二\ny = 2  # (B, N)\n\n\ndef f():\n"
        '    """一。\n\n    二。\n    """\n    # each (B,)\n    z = 3  # type: ignore\n    # alone\n    return z\n'
    )


def test_chinese_lines_are_joined_without_spaces() -> None:
    assert one_line("图块、\nN 个\n图块。") == "图块、N 个图块。"
    assert one_line("two\n  lines") == "two lines" and one_line("图块\nN") == "图块 N"
    assert first_sentence("公式 5 (e.g. 一条) 的 0.5 倍。\n第二句。") == "公式 5 (e.g. 一条) 的 0.5 倍。"


def test_the_command_writes_over_its_own_file_in_either_language(tmp_path: Path) -> None:
    out = str(tmp_path / "seps_modules.py")
    for language in ("zh", "en", "zh"):
        assert main(["modules", "--language", language, "-o", out]) == 0
    assert Path(out).read_text(encoding="utf-8") == text_of("annotated-zh")


def test_the_printed_file_is_utf_8_whatever_the_terminal_is() -> None:
    command = [sys.executable, "-m", "seps.cli.main", "modules", "--style", "slim", "--language", "zh", "-o", "-"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert done.stdout.decode("utf-8") == text_of("slim-zh")
