"""What the single file tells its reader: heads, contents, legend, and where each difference acts."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import seps as package
from seps.cli.main import main
from seps.modules import LANGUAGES, PARTS, STYLES
from seps.modules.contents import BundleError, first_sentence, legend, line_of
from seps.modules.language import in_english
from single_files import PART_FILES, VARIANTS, module_of, text_of

ROOT = Path(package.__file__).parent
WORDS = {
    "en": ("Shapes: the axes of a tensor in brackets; a name such as `patches_BNC` ends with its axes.", "The seven"),
    "zh": ("像 `patches_BNC` 这样的名称以它的各轴结尾。", "论文与其公开代码的七处差异"),
}
"""By language: what stands before and behind the legend."""
every_file = pytest.mark.parametrize("variant", VARIANTS)
every_code = pytest.mark.parametrize("variant", [f"{style}-en" for style in STYLES])
"""The Chinese files hold the same code (test_modules_language.py)."""
every_language = pytest.mark.parametrize("language", LANGUAGES)


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each section by its title."""
    parts = re.split(r"^# --- (.+)$", text, flags=re.MULTILINE)
    return {name: body.splitlines() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def difference_rows(variant: str) -> list[tuple[int, list[int]]]:
    """By difference: the line that sets it, and the lines where it acts."""
    front = text_of(variant).split('"""', 2)[1]
    pattern = {
        "en": r"\d\. .+: set in line (\d+), acts in lines ([\d, ]+)",
        "zh": r"\d\. .+第 (\d+) 行设置.第 ([\d, ]+) 行",
    }
    found = re.findall(pattern[variant[-2:]], front)
    return [(int(at), [int(number) for number in acts.split(",")]) for at, acts in found]


@every_code
def test_torch_is_the_only_package_imported(variant: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse(text_of(variant))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize("variant", [each for each in (*VARIANTS, *PART_FILES) if "-en" in each])
def test_the_file_names_nothing_that_it_does_not_have(variant: str) -> None:
    text = text_of(variant)
    tree = ast.parse(text)
    defined = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert used <= defined | {"__name__"}, used - defined
    for word in ("regist", "plugin", "plug-in", "SlimmingConfig", "PatchSlimming", "LossConfig", "from_config"):
        assert word not in text, word
    imported = {
        name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for name in bound(node)
    }
    assert imported <= used | {"annotations"}, imported - used


def bound(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [(alias.asname or alias.name).split(".")[0] for alias in node.names]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_its_classes_alone(part: str) -> None:
    wanted = {
        "sdtps": {"TokenSparse", "TokenAggregation", "DualTokenAggregation"},
        "sensors": {"TokenSparse", "TokenAggregation", "MultiModalSDTPS"},
        "losses": {"SEPSLoss", "ContrastiveLoss", "RatioLoss"},
    }
    for style in STYLES:
        made = module_of(f"{style}-en-{part}")
        assert set(made.__all__) == wanted[part]
        modules = {
            name for name, value in vars(made).items() if isinstance(value, type) and issubclass(value, torch.nn.Module)
        }
        assert modules == wanted[part]


def test_the_slim_file_has_both_modes_and_no_checks() -> None:
    slim = module_of("slim-en")
    for paper, count in ((False, 291), (True, 1198)):
        net = slim.CrossSparseAggrNet(32, 16, 0.5, 0.5, use_paper_version=paper)
        assert sum(weight.numel() for weight in net.parameters()) == count
    assert not [name for name in vars(slim) if re.match("_?check_", name)]


@every_file
def test_contents_give_the_line_of_each_section(variant: str) -> None:
    lines = text_of(variant).splitlines()
    listed = re.findall(r"^ +(\d+): (.+?)(?:  .+)?$", text_of(variant).split('"""', 2)[1], re.MULTILINE)
    assert len(listed) > 8
    for number, title in listed:
        first = title.split(",")[0]
        assert lines[int(number) - 1] in (f"# --- {title}", f"class {first}(nn.Module):"), title


@every_file
def test_legend_explains_every_symbol_of_the_file(variant: str) -> None:
    text, (start, end) = text_of(variant), WORDS[variant[-2:]]
    rows = [row for row in text.split(start, 1)[1].split(end)[0].splitlines() if row.startswith("    ")]
    legend = dict(item.strip().split(" ", 1) for item in " ".join(rows).replace("    ", " ").split("; "))
    assert len(legend) > 14 and all(re.fullmatch("[A-Z]", symbol) for symbol in legend), legend
    suffixes = set(re.findall(r"\b[a-z_]+_([A-Z]{1,4})\b", text.split('"""', 2)[2]))
    assert len(suffixes) > 5
    assert {symbol for suffix in suffixes for symbol in suffix} <= set(legend)


@every_file
def test_differences_name_the_lines_where_options_act(variant: str) -> None:
    lines, rows = text_of(variant).splitlines(), difference_rows(variant)
    words = [
        ("use_paper_version: bool", r"if not self\.use_paper_version"),
        ("use_paper_version: bool", r"if not self\.use_paper_version|for tokens, \(text"),
        ("use_dual_aggr: bool", r"self\.use_dual_aggr"),
        ("use_paper_version: bool", r"relevance_mlp\(top_k\) if|if self.relevance_mlp is None"),
        ("scan: bool", r"self\.scan =|if self.scan"),
        ("use_gumbel_softmax: bool", r'self\.decision == "topk"|return gumbel_topk\('),
        ("ratio_form: RatioForm", r'if form == "'),
    ]
    assert len(rows) == len(words)
    for (set_at, acts), (option, pattern) in zip(rows, words, strict=True):
        assert option in lines[set_at - 1], option
        for number in acts:
            assert re.search(pattern, lines[number - 1]), (option, number, lines[number - 1])


def test_print_shows_beta_and_the_numbers_of_patches(seps: ModuleType) -> None:
    net = seps.CrossSparseAggrNet(64, 196, use_paper_version=True) if seps is not package else None
    if net is not None:
        assert "beta=0.25" in repr(net) and "196 -> 98 -> 39" in repr(net)
    sensors = repr(seps.MultiModalSDTPS(64, 128))
    assert "beta=0.25" in sensors and "128 -> 64 -> 25" in sensors


def test_a_difference_whose_line_is_gone_stops_the_making() -> None:
    assert line_of(["def f():", "    return 1"], {"f": (1, 2)}, ("f", "return")) == 2
    for place in (("f", "gone"), ("g", "return"), ("f", "f")):
        with pytest.raises(BundleError, match="not once"):
            line_of(["def f():", "    f = 1"], {"f": (1, 2)}, place)


def test_a_head_whose_shapes_cannot_be_read_stops_the_making() -> None:
    assert legend({"a": "Head.\n\nShapes: B images,\nN patches."}, in_english)[0].startswith("    B images; D ")
    for shapes in ("B images, the best Z of them", "B images, N", "B images; n patches, n lines"):
        with pytest.raises(BundleError, match="capital"):
            legend({"a": f"Head.\n\nShapes: {shapes}."}, in_english)


def test_first_sentence_reads_over_abbreviations() -> None:
    assert first_sentence("Eq. 5 for (e.g. one) text.\nMore.\n\nRest.") == "Eq. 5 for (e.g. one) text."
    assert first_sentence("No point,\nsecond line\n\nRest.") == "No point, second line"


def test_the_page_prints_the_line_that_the_command_prints(tmp_path: Path, monkeypatch, capsys) -> None:
    page = Path(__file__).parents[2] / "docs/moving-from-published-code.md"
    monkeypatch.chdir(tmp_path)
    assert main(["modules"]) == 0
    printed = re.sub(r"\(\d+ lines\)", "(... lines)", capsys.readouterr().out)
    assert "(... lines)" in printed and printed in page.read_text(encoding="utf-8")
