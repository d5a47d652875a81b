"""How much somebody reads who follows a query, or adds something: the walks of ARCHITECTURE.md."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import seps
from stores import few_sentences, gallery, index

ROOT = Path(__file__).parents[2]
PACKAGE = Path(seps.__file__).parent
sys.path.append(str(ROOT / "tools"))
import walk  # noqa: E402


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("walks")
    with pytest.MonkeyPatch.context() as patch:
        few_sentences(patch)
        index(gallery(place / "g", 8, described=4), place / "s", bank=True)
        yield place / "s"


@pytest.mark.parametrize(("door", "files", "functions"), [("search", 26, 278), ("page", 28, 256)])
def test_a_query_passes_few_files(store: Path, door: str, files: int, functions: int) -> None:
    """Bounds may fall, never rise; the two kinds of tables of a store took two files."""
    passed = {"search": walk.search, "page": walk.page}[door](store)
    there, inside, _ = walk.counts(passed)
    assert there <= files and inside <= functions, sorted(passed)
    assert "photos/library.py" in passed and "photos/search/ranking.py" in passed


def test_a_filter_of_the_page_is_four_files() -> None:
    rooms = ("photos/store", "photos/search", "photos/serve")
    files = [path for room in rooms for path in (PACKAGE / room).rglob("*") if path.suffix in (".py", ".js", ".html")]
    naming = {path.relative_to(PACKAGE).as_posix() for path in files if "min_size" in path.read_text(encoding="utf-8")}
    assert naming == {
        "photos/store/filters.py",
        "photos/serve/search_routes.py",
        "photos/serve/static/api.js",
        "photos/serve/static/index.html",
    }


def test_only_the_store_knows_its_backend() -> None:
    importing = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.partition(".")[0] for name in names} & {"lance", "lancedb"}:
                importing.add(path.relative_to(PACKAGE).parent.as_posix())
    assert importing == {"photos/store", "photos/store/lance"}  # the first writes exports


def test_doors_assemble_no_search() -> None:
    """Commands and the service call the library: none makes a searcher or ranks by itself."""
    doors = [*(PACKAGE / "cli").rglob("*.py"), *(PACKAGE / "photos/serve").rglob("*.py")]
    for path in doors:
        text = path.read_text(encoding="utf-8")
        for name in ("Searcher(", "search_parts(", "search_combined(", "import fold", "in_order("):
            assert name not in text, f"{name} in {path}"
