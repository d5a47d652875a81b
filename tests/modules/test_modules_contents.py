"""What the single file tells its reader: heads, contents, legend, and where each difference acts."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import seps
from seps.cli.main import main
from seps.modules import LANGUAGES, MODULES
from seps.modules.contents import DIFFERENCES, BundleError, first_sentence, legend, line_of
from seps.modules.language import in_english
from seps.modules.writer import read_translations
from single_files import VARIANTS, text_of

ROOT = Path(seps.__file__).parent
CHINESE = read_translations(ROOT, "zh")
WORDS = {
    "en": ("Shapes: the axes", "The seven differences", "set +line", "acts +lines", ""),
    "zh": ("形状：括号里", "七处差异", "设置  第", "作用  第", " 行"),  # noqa: RUF001
}
"""By language: how the legend and the table begin, and what stands around the numbers of lines."""
every_file = pytest.mark.parametrize("variant", VARIANTS)
every_language = pytest.mark.parametrize("language", LANGUAGES)


def module_head(name: str, language: str) -> str:
    head = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return head if language == "en" else CHINESE[name].entries[head]


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each section by module name."""
    parts = re.split(r"^# --- (.+)\.py$", text, flags=re.MULTILINE)
    return {name: body.splitlines() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def difference_rows(variant: str) -> dict[str, tuple[int, list[int]]]:
    """By option: the line that sets it, and the lines where it acts."""
    _, start, set_at, acts_at, end = WORDS[variant[-2:]]
    table = text_of(variant).split(start, 1)[1].split('"""', 1)[0]
    found = re.findall(rf"\d\. (\w+)\n.+\n.+\n +{set_at} (\d+){end}\n +{acts_at} ([\d, ]+){end}\n", table)
    return {option: (int(at), [int(number) for number in acts.split(",")]) for option, at, acts in found}


@every_file
def test_torch_is_the_only_package_imported(variant: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse(text_of(variant))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported - sys.stdlib_module_names == {"torch"}


@every_language
def test_annotated_file_has_every_head_in_full(language: str) -> None:
    found = sections(text_of(f"annotated-{language}"))
    assert tuple(found) == MODULES
    for name, lines in found.items():
        head = [f"# {line}".rstrip() for line in module_head(name, language).splitlines()]
        assert lines[1 : 3 + len(head)] == ["#", *head, ""], name


@every_language
def test_plain_file_has_one_line_docstrings_and_no_comments_beside_code(language: str) -> None:
    text = text_of(f"plain-{language}")
    for name, lines in sections(text).items():
        assert lines[2] == f"# {first_sentence(module_head(name, language))}" and lines[3] == "", name
    tree = ast.parse(text)
    strings = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node is not tree.body[0]
    ]
    assert len(strings) > 100
    assert [node.lineno for node in strings if node.lineno != node.end_lineno] == []
    assert [line for line in text.splitlines() if re.search(r"\S  # (?!type:|noqa)", line)] == []
    annotated = text_of(f"annotated-{language}").splitlines()
    assert any(re.search(r"\S  # (?!type:|noqa)", line) for line in annotated)


def test_all_files_hold_the_same_code() -> None:
    def code(text: str) -> str:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [one for one in body if not (isinstance(one, ast.Expr) and is_text(one.value))]
        return ast.dump(tree)

    def is_text(value: ast.expr) -> bool:
        return isinstance(value, ast.Constant) and isinstance(value.value, str)

    assert len({code(text_of(variant)) for variant in VARIANTS}) == 1


@every_file
def test_contents_give_the_line_of_each_section(variant: str) -> None:
    lines = text_of(variant).splitlines()
    listed = re.findall(r"^ +(\d+): (\S+)\.py  (.+)$", text_of(variant), re.MULTILINE)
    assert [name for _, name, _ in listed] == list(MODULES)
    for number, name, told in listed:
        assert lines[int(number) - 1] == f"# --- {name}.py"
        assert told == first_sentence(module_head(name, variant[-2:]))


@every_file
def test_legend_explains_every_symbol_of_the_sections(variant: str) -> None:
    text, (start, end, *_) = text_of(variant), WORDS[variant[-2:]]
    rows = [row for row in text.split(start, 1)[1].split(end)[0].splitlines() if row.startswith("    ")]
    legend = dict(row.strip().split("  ", 1) for row in rows)
    assert len(legend) == len(rows) > 15 and all(re.fullmatch("[A-Z]", symbol) for symbol in legend), legend
    said = {
        "en": [
            "words of a caption; sensors",
            "kept patches; image tokens",
            "the similarity of an image and a text; columns",
        ],
        "zh": ["短文本的词；传感器", "保留的图块；图像 token", "图像与文本的相似度；列"],  # noqa: RUF001
    }
    assert [legend[symbol] for symbol in "MKS"] == said[variant[-2:]]
    suffixes = set(re.findall(r"\b[a-z_]+_([A-Z]{1,4})\b", text.split("# --- ", 1)[1]))
    assert len(suffixes) > 10
    assert {symbol for suffix in suffixes for symbol in suffix} <= set(legend)


@every_file
def test_differences_name_the_lines_where_options_act(variant: str) -> None:
    lines, rows = text_of(variant).splitlines(), difference_rows(variant)
    options = ["scoring", "dense", "aggregation", "alignment", "similarity", "decision", "ratio_form"]
    assert list(rows) == options
    # What a line says that reads the option, under its own name or the name the value has further on.
    words = {
        "scoring": r"scoring ==|if (not )?self\.use_paper_version",
        "dense": r"\bdense (==|!=|in)",
        "aggregation": r'aggregation == "dual"',
        "alignment": r'alignment == "topk"|mlp is None',
        "similarity": r'similarity == "leaky"|if leaky:',
        "decision": r"self\.decision (==|in)|decision=config\.decision",
        "ratio_form": r"form == |self\.form or",
    }
    for option, (set_at, acts) in rows.items():
        assert re.match(rf"    {option}: \w+( \| str)? = ", lines[set_at - 1]), option
        for number in acts:
            assert re.search(words[option], lines[number - 1]), (option, number, lines[number - 1])
        # Every line of the network that reads the option is named.
        readers = {i for i, line in enumerate(lines, start=1) if re.search(rf"\bconfig\.{option}\b(?!,)", line)}
        assert readers <= set(acts), (option, [lines[i - 1] for i in readers - set(acts)])


def test_a_difference_whose_line_is_gone_stops_the_making() -> None:
    assert line_of(["def f():", "    return 1"], {"f": (1, 2)}, ("f", "return")) == 2
    for place in (("f", "gone"), ("g", "return"), ("f", "f")):
        with pytest.raises(BundleError, match="not once"):
            line_of(["def f():", "    f = 1"], {"f": (1, 2)}, place)


def test_a_head_whose_shapes_cannot_be_read_stops_the_making() -> None:
    assert legend({"a": "Head.\n\nShapes: B images,\nN patches."}, in_english)[0] == "    B  images"
    for shapes in ("B images, the best Z of them", "B images, N", "B images; n patches, n lines"):
        with pytest.raises(BundleError, match="capital"):
            legend({"a": f"Head.\n\nShapes: {shapes}."}, in_english)


def test_options_of_the_table_are_those_of_the_presets() -> None:
    paper, code = seps.SlimmingConfig.paper(), seps.SlimmingConfig.open_source()
    for row in DIFFERENCES[:6]:
        assert f'"{getattr(code, row.option)}"' in row.code
        if row.option != "decision":  # the preset takes the code's: top-K
            assert f'"{getattr(paper, row.option)}"' in row.paper


def test_first_sentence_reads_over_abbreviations() -> None:
    assert first_sentence("Eq. 5 for (e.g. one) text.\nMore.\n\nRest.") == "Eq. 5 for (e.g. one) text."
    assert first_sentence("No point,\nsecond line\n\nRest.") == "No point, second line"


def test_the_page_prints_the_line_that_the_command_prints(tmp_path: Path, monkeypatch, capsys) -> None:
    page = Path(__file__).parents[2] / "docs/moving-from-published-code.md"
    monkeypatch.chdir(tmp_path)
    assert main(["modules"]) == 0
    printed = re.sub(r"\(\d+ lines\)", "(... lines)", capsys.readouterr().out)
    assert "(... lines)" in printed and printed in page.read_text(encoding="utf-8")
