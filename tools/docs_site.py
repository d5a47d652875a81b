"""Hooks of the documentation site (mkdocs.yml): equations as MathML, pages from files of the repository, and the
reference, generated from parsers, dataclasses and schemas.

Equations are written `$$ ... $$` on lines of their own, or `\\( ... \\)` in a sentence. They become MathML when the
site is built, so that no page needs a script for them.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

sys.path.append(str(Path(__file__).parent))
from docs_reference import commands_page, http_page, settings_page, store_page

ROOT = Path(__file__).parent.parent
STUDY_FILES = {".md", ".json", ".jsonl", ".txt", ".gz"}
"""What the site takes of a study: its page and its raw files."""
REPOSITORY_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "src/seps/assets/mini/README.md": "model-card.md",
    **{
        str(path.relative_to(ROOT)): str(path.relative_to(ROOT))
        for path in sorted((ROOT / "lab").rglob("*"))
        if path.suffix in STUDY_FILES
    },
}
"""Files outside docs/ that are part of the site as well; links to them are led to their place in the site."""
GENERATED = {
    "commands.md": commands_page,
    "settings.md": settings_page,
    "http-api.md": http_page,
    "store.md": store_page,
}
"""Pages made from the code."""

_CODE = re.compile(r"(^```.*?^```\s*?$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_MATH = re.compile(r"\$\$(.+?)\$\$|\\\((.+?)\\\)", re.DOTALL)
_TAG = re.compile(r"\\tag\{(.+?)\}")
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_CODE_WORD = re.compile(r"<code>([^<\s]{1,26})</code>")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)


def on_config(config: Any) -> Any:
    """List the changelog where the repository has one; in a menu, so that the bar stays one line."""
    if (ROOT / "CHANGELOG.md").is_file():
        menu = next(part["Reference"] for part in config.nav if "Reference" in part)
        menu.append({"Changes": "changelog.md"})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that live outside docs/."""
    for source, page in REPOSITORY_PAGES.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page, make in GENERATED.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put equations aside, where Markdown cannot reach them, and lead links to the repository's files to pages."""
    page.equations = []

    def aside(found: re.Match[str]) -> str:
        display = found[1] is not None
        page.equations.append(display_html(found[1]) if display else to_mathml(found[2], display=False))
        return f"EQUATION{len(page.equations) - 1}X"

    parts = _CODE.split(markdown)
    place = _repository_path(page.file.src_uri)
    parts[::2] = [_LINK.sub(lambda link: _led(link, place, page.file.src_uri), part) for part in parts[::2]]
    parts[::2] = [_MATH.sub(aside, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Bring the equations back, keep short code whole, and let wide tables scroll by themselves."""
    for number, mathml in enumerate(page.equations):
        html = html.replace(f"<p>EQUATION{number}X</p>", mathml).replace(f"EQUATION{number}X", mathml)
    html = html.replace("::</p>", ":</p>")  # a docstring's mark that a plain block follows
    html = _CODE_WORD.sub(r'<code class="whole">\1</code>', html)  # an option is not broken at its hyphens
    return _TABLE.sub(lambda table: f'<div class="table">{table[0]}</div>', html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Say in which language a page is, and give the theme's colour switch the sheets it looks for."""
    if page.file.src_uri.startswith("zh/"):
        output = output.replace('<html lang="en"', '<html lang="zh"', 1)
    # With highlight.js off the theme leaves these out, but its script switches them all the same, and stumbles.
    sheets = '<style id="hljs-light"></style><style id="hljs-dark"></style>'
    return output.replace("</head>", f"{sheets}</head>", 1)


def display_html(latex: str) -> str:
    """An equation on a line of its own; its number (`\\tag{...}`) stands apart, so that it is seen on a phone, too."""
    number = _TAG.search(latex)
    label = f"<span>({number[1]})</span>" if number else ""
    return f'<div class="equation"><div>{to_mathml(_TAG.sub("", latex), display=True)}</div>{label}</div>'


def to_mathml(latex: str, *, display: bool) -> str:
    """One equation as MathML."""
    return convert(" ".join(latex.split()), display="block" if display else "inline")


def _repository_path(src_uri: str) -> str:
    """Where a page's file is in the repository."""
    back = {page: source for source, page in REPOSITORY_PAGES.items()}
    return back.get(src_uri, f"docs/{src_uri}")


def _led(link: re.Match[str], place: str, src_uri: str) -> str:
    """The link, led to the page of a repository's file where it has one."""
    if ":" in link[2] or link[2].startswith("/"):
        return link[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(place), link[2]))
    page = REPOSITORY_PAGES.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
    if page is None:
        return link[0]
    return f"{link[1]}{posixpath.relpath(page, posixpath.dirname(src_uri) or '.')}{link[3] or ''}"
