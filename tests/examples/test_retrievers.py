"""The retrievers of docs/retrievers.md run, each in an environment with the real package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stores import few_sentences, index, model_folder, paint

PAGE = Path(__file__).parents[2] / "docs/retrievers.md"
CHECK = """
library = seps.Library(store="store", model={model!r})
found = {find}
print([(place.endswith("a.jpg"), text, type(score)) for place, text, score in found])
"""
FIND = {
    "langchain-core": "[(each.metadata['path'], each.page_content, each.metadata['score']) for each in "
    "PhotoRetriever(library=library, k=1).invoke('okonkwo')]",
    "llama-index-core": "[(each.node.image_path, each.node.text, each.score) for each in "
    "PhotoRetriever(library, 1).retrieve('okonkwo')]",
}


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(FIND))
def test_the_retriever_of_the_page_runs(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (text for text in blocks() if package.replace("-", "_").replace("_core", "") in text)
    few_sentences(monkeypatch)
    paint(tmp_path / "g/a.jpg", 1)
    paint(tmp_path / "g/b.jpg", 2)
    (tmp_path / "g/data.jsonl").write_text('{"image": "a.jpg", "dense": "A painting by Okonkwo"}')
    index(tmp_path / "g", tmp_path / "store")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    (site,) = (tmp_path / "env").glob("lib/*/site-packages")
    (site / "this.pth").write_text("\n".join(sys.path))  # behind the packages of the environment itself
    subprocess.run([python, "-m", "pip", "install", "-q", package], check=True, capture_output=True)
    classes = block[: block.index("\nretriever = ")]
    program = classes + CHECK.format(model=model_folder(), find=FIND[package])
    done = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[(True, 'A painting by Okonkwo', <class 'float'>)]", done.stderr


def test_the_retrievers_are_short() -> None:
    for text in blocks():
        body = text[text.index("class ") : text.index("\nretriever = ")]
        assert len([line for line in body.splitlines() if line.strip()]) <= 10
        compile(text, str(PAGE), "exec")


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
