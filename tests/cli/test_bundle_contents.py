"""What the single file tells its reader: heads, contents, legend, and where each difference acts."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import seps
from seps.bundle import MODULES, STYLES, Style, single_file
from seps.bundle_contents import DIFFERENCES, BundleError, first_sentence, line_of
from seps.cli.main import main

ROOT = Path(seps.__file__).parent
FILES = {style: single_file(style) for style in STYLES}
every_style = pytest.mark.parametrize("style", STYLES)


def module_head(name: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))) or ""


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each section by module name."""
    parts = re.split(r"^# --- (.+)\.py$", text, flags=re.MULTILINE)
    return {name: body.splitlines() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def difference_rows(text: str) -> dict[str, tuple[int, list[int]]]:
    """By option: the line that sets it, and the lines where it acts."""
    table = text.split("The seven differences", 1)[1].split('"""', 1)[0]
    found = re.findall(r"\d\. (\w+)\n.+\n.+\n +set +line (\d+)\n +acts +lines ([\d, ]+)", table)
    return {option: (int(at), [int(number) for number in acts.split(",")]) for option, at, acts in found}


@every_style
def test_torch_is_the_only_package_imported(style: Style) -> None:
    imported = set()
    for node in ast.walk(ast.parse(FILES[style])):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported - sys.stdlib_module_names == {"torch"}


def test_annotated_file_has_every_head_in_full() -> None:
    found = sections(FILES["annotated"])
    assert tuple(found) == MODULES
    for name, lines in found.items():
        head = [f"# {line}".rstrip() for line in module_head(name).splitlines()]
        assert lines[1 : 3 + len(head)] == ["#", *head, ""], name


def test_plain_file_has_one_line_docstrings_and_no_comments_beside_code() -> None:
    for name, lines in sections(FILES["plain"]).items():
        assert lines[2] == f"# {first_sentence(module_head(name))}" and lines[3] == "", name
    tree = ast.parse(FILES["plain"])
    strings = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node is not tree.body[0]
    ]
    assert len(strings) > 100
    assert [node.lineno for node in strings if node.lineno != node.end_lineno] == []
    beside = [line for line in FILES["plain"].splitlines() if re.search(r"\S  # (?!type:|noqa)", line)]
    assert beside == []
    assert any(re.search(r"\S  # (?!type:|noqa)", line) for line in FILES["annotated"].splitlines())


def test_both_styles_hold_the_same_code() -> None:
    def code(text: str) -> str:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [one for one in body if not (isinstance(one, ast.Expr) and is_text(one.value))]
        return ast.dump(tree)

    def is_text(value: ast.expr) -> bool:
        return isinstance(value, ast.Constant) and isinstance(value.value, str)

    assert code(FILES["plain"]) == code(FILES["annotated"])


@every_style
def test_contents_give_the_line_of_each_section(style: Style) -> None:
    lines = FILES[style].splitlines()
    listed = re.findall(r"^ +(\d+): (\S+)\.py  (.+)$", FILES[style], re.MULTILINE)
    assert [name for _, name, _ in listed] == list(MODULES)
    for number, name, told in listed:
        assert lines[int(number) - 1] == f"# --- {name}.py"
        assert told == first_sentence(module_head(name))


@every_style
def test_legend_explains_every_symbol_of_the_sections(style: Style) -> None:
    text = FILES[style]
    legend = dict(re.findall(r"^    ([A-Z])  (.+)$", text.split("Shapes: the axes", 1)[1].split("The seven")[0], re.M))
    assert legend["M"] == "words of a caption or sensors" and legend["K"] == "kept patches or image tokens"
    suffixes = set(re.findall(r"\b[a-z_]+_([A-Z]{1,4})\b", text.split("# --- ", 1)[1]))
    assert len(suffixes) > 10
    assert {symbol for suffix in suffixes for symbol in suffix} <= set(legend)


@every_style
def test_differences_name_the_lines_where_options_act(style: Style) -> None:
    lines, rows = FILES[style].splitlines(), difference_rows(FILES[style])
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
    assert capsys.readouterr().out in page.read_text(encoding="utf-8")
