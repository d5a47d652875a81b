"""`seps mcp` through the protocol's own client: the real command over a tiny store."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from seps.cli.main import main
from stores import gallery, index, paint

mcp = pytest.importorskip("mcp")

SEPS = ("-m", "seps.cli.main", "mcp")
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("mcp")
    folder = gallery(place / "photos")
    (folder / "copy.jpg").write_bytes((folder / "p00.jpg").read_bytes())
    index(folder, place / "s")
    return folder, place / "s"


def session(store: Path, work: Callable[[Any], Awaitable[None]], *options: str) -> None:
    """What a client does with a server that it has started."""
    command = mcp.StdioServerParameters(
        command=sys.executable, args=[*SEPS, "--store", str(store), *options], env=ENVIRONMENT
    )

    async def run() -> None:
        async with mcp.Client(command, read_timeout_seconds=120) as client:
            await work(client)

    asyncio.run(run())


async def answer(client: Any, tool: str, **arguments: Any) -> tuple[dict[str, Any], list[Image.Image]]:
    """The facts of an answer, and its images."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    facts, *images = result.content
    assert all(image.mime_type == "image/jpeg" for image in images)
    return json.loads(facts.text), [Image.open(io.BytesIO(base64.b64decode(image.data))) for image in images]


async def refusal(client: Any, tool: str, **arguments: Any) -> str:
    """The sentence of a refused call."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error and len(result.content) == 1
    return str(result.content[0].text)


def test_a_client_uses_every_tool(made: tuple[Path, Path], tmp_path: Path) -> None:
    folder, store = made
    outside = paint(tmp_path / "secret.jpg", 99)
    (folder / "later.jpg").write_bytes(outside.read_bytes())  # in the folder, and not indexed

    async def work(client: Any) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"search", "similar", "describe", "explain", "duplicates"}
        assert all(tool.description and tool.annotations.read_only_hint for tool in tools.values())

        found, images = await answer(client, "search", query="green noise", count=3)
        assert len(found["results"]) == 3 and len(images) == 3 and max(images[0].size) <= 512
        paths = [Path(result["path"]) for result in found["results"]]
        assert all(path.is_relative_to(folder) and path.is_file() for path in paths)
        below, images = await answer(client, "search", query="green noise", folder="sub", images=False)
        assert {Path(result["path"]).parent.name for result in below["results"]} == {"sub"} and not images

        first = found["results"][0]
        like, images = await answer(client, "similar", picture=first["id"], count=2)
        assert len(like["results"]) == len(images) == 2 and first["id"] not in {one["id"] for one in like["results"]}
        assert [one["rank"] for one in like["results"]] == [1, 2]
        facts, images = await answer(client, "describe", picture=str(folder / "p00.jpg"))
        assert facts["description"].startswith("A picture with number 0") and len(images) == 1
        assert (facts["width"], facts["height"]) == (60, 44)
        assert (await answer(client, "describe", picture="p00.jpg"))[0] == facts
        why, images = await answer(client, "explain", picture="p00.jpg", sentence="green noise")
        assert "green" in why["words"] and max(images[0].size) <= 1024
        groups, images = await answer(client, "duplicates", kind="file", images=True)
        assert groups["groups_in_all"] == 1 and len(images) == 1
        assert {Path(one["path"]).name for one in groups["groups"][0]["pictures"]} == {"p00.jpg", "copy.jpg"}

        link = folder / "link.jpg"
        link.symlink_to(outside)
        for name in (str(outside), f"../../{outside.name}", "later.jpg", str(link), "/etc/passwd", "a\0b", "é" * 900):
            for tool, more in (("describe", {}), ("similar", {}), ("explain", {"sentence": "a dog"})):
                text = await refusal(client, tool, picture=name, **more)
                assert "indexed folders" in text and "Traceback" not in text
        await refusal(client, "search", query="a dog", folder=str(tmp_path))
        for arguments in ({"count": 51}, {"count": 0}, {"query": "a" * 1001}, {"query": ""}, {"since": "never"}):
            await refusal(client, "search", **{"query": "a dog", **arguments})
        await refusal(client, "nothing")
        assert (await answer(client, "search", query="a dog", count=1))[0]["results"]  # it lives

    session(store, work)


@pytest.mark.slow
def test_standard_output_has_the_protocol_alone(made: tuple[Path, Path], tmp_path: Path) -> None:
    plugin = tmp_path / "loud.py"
    plugin.write_text("print('loud')\n")
    hello = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
    done = subprocess.run(
        [sys.executable, *SEPS, "--store", str(made[1]), "--plugin", str(plugin)],
        input=json.dumps(hello) + "\nrubbish\n",
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **ENVIRONMENT},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["id"] == 1 and lines[0]["result"]["serverInfo"]["name"] == "seps"
    assert done.returncode == 0 and "loud" in done.stderr and "Traceback" not in done.stderr


def test_a_store_that_is_missing_ends_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", "--store", str(tmp_path / "none")]) == 2
    told = capfd.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
