"""Find banned phrasings: `python tools/phrases.py` prints each place with the wording to use, and ends with status 1.

Pages are the READMEs and docs without result files; in src only texts that programs print (strings that are no
docstrings) are read. Code blocks and `code` of pages are left out. A phrasing is a regular expression on text whose
line ends are spaces.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BANNED = {
    r"\bless how (?:high|well|much)\b": "minus its average score for unrelated queries (hubness correction)",
    r"\bwhatever is asked\b": "for any query",
    r"\bwhat is told wins\b": "explicit settings override those of ...",
    r"\btold apart\b": "distinguished; statistically indistinguishable",
    r"\b(?:is|are|be|was|were) told\b": "is given, printed, passed or raised",
    r"\b(?:was|were|could|is|are|not) (?:not )?(?:to )?be had\b": "not tested; not available",
    r"\bnobody (?:knows|asked|says)\b": "name what is unknown, and to which program",
    r"\b(?:did|do|does|has|have) not come\b": "is required; is missing",
    r"\b(?:came|comes); (?:pass|give)\b": "pass either A or B, not both",
    r"\bbut a \w+ came\b": "got a ...",
    r"\bmade anew\b|\banew\b": "rebuilt; again",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bto have the \w+ back\b": "to restore",
    r"\bis whole; make room\b": "existing data is intact; free disk space",
    r"\bknows no \w+": "has no ...",
    r"\bbe rid of\b": "remove",
    r"\bin the readable form\b|\bthe readable form\b": "the reference implementation",
    r"\b(?:ideas?|heads?|encoders?|scorings?|decisions?|rows?|guides?|network) of (?:your|one's) own\b": "custom",
    r"\bfind(?:s)? nothing to say\b": "has no result",
    r"\bsince then\b|\bwhich came later\b|\bformerly\b": "the present state only",
    r"\bwent through the\b": "passed",
    r"\bleast confidence\b": "minimum confidence",
    r"自己的想法": "用户自定义组件",
    r"指导来源": "引导信号",
    r"图块": "patch",
    r"弃去": "丢弃",
    r"被拒绝": "报错",
    r"登记": "注册",
    r"都不明确": "均不显著",
    r"各值多少": "各项的贡献",
}
"""Phrasings, and what to write instead."""
_CODE = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2 *$|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", re.M | re.S)


def pages() -> list[Path]:
    """The READMEs and the pages of docs; reference made from docstrings and lists of result files are left out."""
    docs = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in ("api", "results")]
    return [ROOT / "README.md", ROOT / "README.zh.md", *sorted(docs)]


def found_in(text: str) -> Iterator[tuple[int, str, str]]:
    """(place, phrasing, what to write) of each banned phrasing of a text."""
    flat = text.replace("\n", " ")
    for pattern, instead in BANNED.items():
        for match in re.finditer(pattern, flat, re.IGNORECASE):
            yield match.start(), match[0], instead


def in_page(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, phrasing, what to write) in a page, without its code."""
    plain = _CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for place, said, instead in found_in(plain):
        yield plain.count("\n", 0, place) + 1, said, instead


def in_source(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, phrasing, what to write) in the strings of a module that are no docstrings."""
    tree = ast.parse(text)
    documented = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            for _, said, instead in found_in(node.value):
                yield node.lineno, said, instead


def problems() -> list[str]:
    """All places, as `FILE:LINE: 'phrasing'; write: ...`."""
    found = []
    sources = sorted((ROOT / "src/seps").rglob("*.py"))
    for path, look in [*((page, in_page) for page in pages()), *((source, in_source) for source in sources)]:
        for line, said, instead in look(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(ROOT)}:{line}: {said!r}; write: {instead}")
    return found


def main() -> int:
    """Print what is found."""
    found = problems()
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
