"""Every fenced block of README and docs is executed: Python in order, commands in a folder made for them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from doc_blocks import PAGES, ROOT, Block, blocks, commands
from doc_commands import added, check, parse_seps
from doc_scratch import prepare
from PIL import Image

from seps import registry
from seps.plugins import plugin_modules

sys.path.append(str(ROOT / "tests/photos/captions"))
from chat_server import ChatServer

ELSEWHERE = {"mteb.md", "retrievers.md"}
"""Pages whose blocks run in other environments: tests/retrieval/test_mteb.py, tests/examples/test_retrievers.py."""
RUN = [page for page in PAGES if page.name not in ELSEWHERE]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory, encoders: dict[str, str]) -> Path:
    return prepare(tmp_path_factory.mktemp("scratch") / "made", encoders)


@pytest.fixture
def fill(
    scratch: Path, tmp_path: Path, encoders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """A fresh copy of the scratch folder to work in; what the commands' tables fill in."""
    shutil.copytree(scratch, tmp_path / "work", symlinks=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    # Stores that are given no place, and pictures that are shown, must not reach the person who runs the tests.
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(Image.Image, "show", lambda self, title=None: None)
    # Ideas that a page registers are its own.
    with ChatServer() as server, mock.patch.dict(registry._IDEAS):
        yield {**encoders, "server": server.url}
    for module in plugin_modules():
        del sys.modules[module.__name__]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ELSEWHERE], ids=lambda page: str(page.relative_to(ROOT))
)
def test_blocks_work(page: Path, fill: dict[str, str]) -> None:
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        try:
            run(block, namespace, fill)
        except BaseException as error:
            error.add_note(f"in the block at {block.place}") if hasattr(error, "add_note") else None
            raise


def run(block: Block, namespace: dict[str, Any], fill: dict[str, str]) -> None:
    """Execute a block, or read it where it is data."""
    if block.language == "python":
        exec(compile(block.text, block.place, "exec"), namespace)
    elif block.language == "bash":
        for words in commands(block):
            check(words, fill)
    elif block.language == "json":
        assert is_json(block.text), block.place
    elif block.language == "yaml":
        yaml.safe_load(block.text)
    else:
        assert block.language == "text", f"{block.place}: say what the block is: python, bash, json, yaml or text."


def is_json(text: str) -> bool:
    """Whether a text is one JSON value, or one a line."""
    try:
        json.loads(text)
    except ValueError:
        for line in text.splitlines():
            json.loads(line)
    return True


def test_an_unknown_command_fails() -> None:
    fill = {"vision": "v", "text": "t", "server": "http://127.0.0.1:1"}
    with pytest.raises(AssertionError, match="no way to check"):
        check(["curl", "example"], fill)
    with pytest.raises(AssertionError):
        check(["seps", "nosuch"], fill)
    with pytest.raises(AssertionError, match="no such target"):
        check(["make", "nosuch"], fill)
    with pytest.raises(AssertionError, match="no extra"):
        check(["pip", "install", "seps[nosuch]"], fill)
    with pytest.raises(AssertionError, match="was not understood"):
        parse_seps(["seps", "eval", "--nosuch"])
    with pytest.raises(ValueError, match="no plain command"):
        list(commands(Block("here", "bash", "seps demo | head\n")))
    assert added(["seps", "eval"], fill) == []


@pytest.mark.slow
def test_commands_that_stand_for_those_of_other_tools_are_understood(fill: dict[str, str]) -> None:
    text = (ROOT / "docs/from-other-tools.md").read_text(encoding="utf-8")
    found = re.findall(r"`(seps [^`]+)`", text)
    assert found and fill
    for command in found:
        shutil.copy("photos/tabby-cat.jpg", "cat.jpg")
        parse_seps(shlex.split(command))
