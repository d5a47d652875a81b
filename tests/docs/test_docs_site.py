"""The site builds without a warning, no link leads nowhere, nothing is fetched from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from doc_blocks import READMES, ROOT

pytest.importorskip("mkdocs")
sys.path.append(str(ROOT / "tools"))
from docs_site import on_page_content, on_page_markdown, to_mathml
from leak_figure import draw

from seps.cli.shared.commands import COMMANDS
from seps.reid.config import ReidConfig
from seps.retrieval.config import RunConfig
from seps.settings import defaults


class Page(HTMLParser):
    """Anchors, links and assets of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in ("script", "img", "source", "iframe", "video", "audio") and "src" in values:
            self.assets.append(values["src"])
        elif tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.assets.append(values.get("href", ""))
        elif tag == "a" and "href" in values:
            self.links.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


@pytest.mark.slow
def test_no_link_leads_nowhere(site: Path, pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        for link in (*page.links, *page.assets):
            if urlsplit(link).scheme or link.startswith("//") or path.name == "404.html":
                continue
            address, anchor = urldefrag(link)
            target = path if not address else (path.parent / unquote(address)).resolve()
            known = pages.get(target)
            if not target.is_file() or (anchor and known is not None and unquote(anchor) not in known.anchors):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert lost == []
    assert any(page.links for page in pages.values())


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    def outside(address: str) -> bool:
        return bool(urlsplit(address).netloc)

    found = [asset for page in pages.values() for asset in page.assets if outside(asset)]
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8", errors="replace")
        urls = re.findall(r"url\(\s*['\"]?([^'\")]+)", text) + re.findall(r"@import\s+['\"]([^'\"]+)", text)
        found += [f"{sheet.name}: {url}" for url in urls if not url.startswith("data:") and outside(url)]
    assert found == []


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_readme_links_exist(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not urlsplit(link).scheme]
    assert links
    assert [link for link in links if not (ROOT / urldefrag(link)[0]).exists()] == []


@pytest.mark.slow
def test_the_reference_names_every_command_and_setting(site: Path) -> None:
    listed = (site / "commands.html").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"usage: seps {name}" not in listed] == []
    settings = (site / "settings.html").read_text(encoding="utf-8")
    names = [*defaults(RunConfig), *defaults(ReidConfig)]
    assert [name for name in names if f">{name}</code>" not in settings] == []


def test_equations_become_mathml_and_code_stays() -> None:
    class File:
        src_uri = "a.md"

    class Where:
        file = File()

    text = "An \\(x_1 * y_2 * z\\) and `\\(code\\)`.\n\n$$ \\sum_i a_i \\tag{3} $$\n\n```text\n$$ raw $$\n```\n"
    marked = on_page_markdown(text, page=Where)
    assert "`\\(code\\)`" in marked and "$$ raw $$" in marked and "sum" not in marked
    html = on_page_content("<p>An EQUATION0X</p>\n<p>EQUATION1X</p>", page=Where)
    assert html.count("<math") == 2 and '<div class="equation">' in html and "<span>(3)</span>" in html
    assert 'display="block"' in to_mathml("a", display=True) and "<mi>a</mi>" in to_mathml("a", display=False)


def test_links_to_the_repository_are_led_to_pages() -> None:
    class File:
        src_uri = "zh/a.md"

    class Where:
        file = File()

    marked = on_page_markdown("[x](../../ARCHITECTURE.md#rooms) [y](../method.md) [z](https://a.b/c.md)", page=Where)
    assert marked == "[x](../architecture.md#rooms) [y](../method.md) [z](https://a.b/c.md)"


def test_the_figure_is_the_results() -> None:
    drawn = draw(ROOT / "docs/results/compare-flickr8k.jsonl")
    assert drawn == (ROOT / "docs/images/leak.svg").read_text(encoding="utf-8")
