"""Captioning over Ray: what needs no cluster, and the cluster itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, lines, photos

from messages import mentions
from seps.photos.captions import BackendConfig, CaptionConfig, RayConfig, caption_images, list_images
from seps.photos.captions.engines import describer


def config(server: ChatServer) -> BackendConfig:
    return BackendConfig(kind="openai", model="tiny", url=server.url, backoff=0.01, give_up_after=3)


def test_a_worker_describes_a_batch(tmp_path: Path) -> None:
    items = list_images(photos(tmp_path, 5))
    with ChatServer() as server:
        describe = describer(config(server), CaptionConfig())
        for _ in range(2):
            assert len(describe(items)) == 5
    assert len(server.requests) == 10


def test_a_worker_without_a_backend_says_so(tmp_path: Path) -> None:
    describe = describer(BackendConfig(model=str(tmp_path), device="nowhere"), CaptionConfig())
    (outcome,) = describe(list_images(photos(tmp_path, 2)))
    assert outcome.kind == "fatal" and "nowhere" in outcome.reason


def test_without_ray_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # what an import of a package that is not installed meets
    with ChatServer() as server, pytest.raises(ValueError, match=r"seps\[dist\]"):
        caption_images(list_images(photos(tmp_path, 1)), tmp_path / "o.jsonl", config(server), ray=RayConfig())


@pytest.mark.slow
def test_a_cluster_describes_resumes_and_stops_at_a_broken_server(cluster: Any, tmp_path: Path) -> None:
    items = list_images(photos(tmp_path / "in", 50))
    out = tmp_path / "dense.jsonl"
    with ChatServer() as server:
        report = caption_images(items[:20], out, config(server), ray=RayConfig(workers=1))
        assert report["complete"]
        report = caption_images(items, out, config(server), ray=RayConfig(workers=1))
        assert (report["described_now"], report["described_before"]) == (30, 20)
        assert len(server.requests) == 50
    assert sorted(line["image"] for line in lines(out)) == [item.id for item in items]
    with ChatServer(lambda *_: (500, {}, "no")) as server:
        report = caption_images(items, tmp_path / "other.jsonl", config(server), ray=RayConfig(workers=1))
    assert mentions(report["problem"], "3", "failures")
    assert not report["complete"]
