"""The chat protocol against a real local server: what is sent, and every way a server fails."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_server import GOOD, ChatServer, answer, lines, photo, photos
from PIL import Image

from messages import mentions, naming
from seps.images.shards import UnreadableImage
from seps.images.sources import ImageSource
from seps.photos.captions import BackendConfig, CaptionConfig, Sampling, caption_images, list_images, openai_backend
from seps.photos.captions.backends import Answer, FatalError, Health, RejectedError, RetryableError, Stopped, build
from seps.photos.captions.images import data_url, open_picture
from seps.photos.captions.openai_backend import OpenAIBackend, read_answer, seconds_of

SOURCE = ImageSource(Path("x.png"))


def config(server: ChatServer | str, **changes: Any) -> BackendConfig:
    url = server if isinstance(server, str) else server.url
    return BackendConfig(**{"kind": "openai", "model": "tiny", "url": url, "backoff": 0.01, "timeout": 30.0, **changes})


def ask(server: ChatServer | str, sampling: Sampling | None = None, **changes: Any) -> Answer | ValueError:
    backend = OpenAIBackend(config(server, **changes), threading.Event())
    return backend.describe([backend.prepare(photo(1), SOURCE)], sampling or Sampling())[0]


def patience(fault: Any) -> float:
    """Short for a server that hangs; on a busy machine even a good answer takes its time."""
    return 1.0 if isinstance(fault, float) else 30.0


def first(*replies: Any) -> Callable[..., Any]:
    """These replies, one a request, then good answers."""
    return lambda server, request, number: replies[number - 1] if number <= len(replies) else answer(GOOD)


def test_the_request_carries_the_photo_and_the_published_settings() -> None:
    with ChatServer() as server:
        got = ask(server, api_key="secret", extra={"top_k": 5, "seed": None})
    assert got == Answer(GOOD, "stop", len(GOOD.split()))
    request = server.requests[0]
    content = request["messages"][0]["content"]
    assert content[1] == {"type": "text", "text": "Provide a comprehensive description of this image"}
    assert (request["temperature"], request["top_p"], request["max_tokens"]) == (0.2, 0.9, 500)
    assert (request["model"], request["top_k"]) == ("tiny", 5)
    assert "seed" not in request
    assert server.images == [photo(1)]
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "fault",
    [
        (500, {}, "oops"),
        (503, {}, json.dumps({"error": {"message": "loading"}})),
        (429, {"Retry-After": "0"}, "slow down"),
        b'{"choices": [{"mess',
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": 7}}]}',
        b"\xff\xfe" + b"[" * 100_000,
        (200, {"Content-Length": "5000"}, "{"),
        3.0,
    ],
    ids=["500", "503", "429", "torn", "list", "no choice", "number", "nested", "short", "hang"],
)
def test_a_fault_is_tried_again(fault: Any) -> None:
    with ChatServer(first(fault, fault)) as server:
        got = ask(server, timeout=patience(fault))
    assert got == Answer(GOOD, "stop", len(GOOD.split()))
    assert len(server.requests) == 3


def test_retries_are_bounded_and_the_fault_is_named() -> None:
    with ChatServer(lambda *_: (500, {}, "out of cheese")) as server:
        got = ask(server, retries=3)
    assert isinstance(got, RetryableError)
    assert "answered 500 (out of cheese)" in str(got)
    assert len(server.requests) == 4


def test_retry_after_is_waited_for() -> None:
    with ChatServer(first((429, {"Retry-After": "0.5"}, ""))) as server:
        ask(server)
    assert 0.5 <= server.times[1] - server.times[0] < 3


def test_an_image_the_server_rejects_is_not_sent_again() -> None:
    with ChatServer(lambda *_: (400, {}, json.dumps({"error": {"message": "image too large"}}))) as server:
        got = ask(server)
    assert isinstance(got, RejectedError)
    assert "image too large" in str(got)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_no_image_can_pass_ends_the_run(status: int) -> None:
    with ChatServer(lambda *_: (status, {}, "")) as server, pytest.raises(FatalError, match=f"answered {status}"):
        ask(server, api_key="secret")
    assert len(server.requests) == 1


def test_a_redirect_to_another_host_gets_no_key() -> None:
    with ChatServer() as other, ChatServer(lambda *_: (307, {"Location": f"{other.url}/chat"}, "")) as server:
        url = server.url.replace("127.0.0.1", "localhost")  # another host than that of the redirect
        assert isinstance(ask(url, api_key="secret"), Answer)
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "Authorization" not in other.headers[0]


def test_a_server_that_is_not_there_ends_the_run_with_a_sentence() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(FatalError, match=naming("3", "again")):
        ask(url, give_up_after=3)


def test_an_answer_resets_the_count_of_faults() -> None:
    health = Health(2)
    for _ in range(5):
        health.failed(RetryableError("x"))
        health.succeeded()
    health.failed(RetryableError("x"))
    with pytest.raises(FatalError):
        health.failed(RetryableError("x"))


def test_a_trickling_server_is_timed_out() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 20)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(100):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return
                    time.sleep(0.05)

        threading.Thread(target=trickle, daemon=True).start()
        start = time.monotonic()
        got = ask(url, timeout=0.4, retries=0)
    assert isinstance(got, RetryableError)
    assert "0.4" in str(got)
    assert time.monotonic() - start < 3


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_backend, "MAX_ANSWER", 1 << 16)
    with ChatServer(lambda *_: answer("word " * 20_000)) as server:
        got = ask(server, retries=0)
    assert isinstance(got, RetryableError)
    assert "more than" in str(got)


def test_a_proxy_is_used_but_for_this_machine_and_no_key_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not for this server")
    monkeypatch.setenv("OPENAI_ORG_ID", "nor this")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with ChatServer() as server:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, server.url.removesuffix("/v1"))
        assert isinstance(ask("http://far.example/v1"), Answer)
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        assert isinstance(ask(server), Answer)
    assert server.headers[0]["Host"] == "far.example"
    assert not [
        name for headers in server.headers for name in headers if name in ("Authorization", "Openai-Organization")
    ]


def test_the_model_is_found_inside_a_running_event_loop() -> None:
    async def notebook(server: ChatServer) -> str:
        return OpenAIBackend(config(server, model=""), threading.Event()).model

    with ChatServer() as server:
        assert asyncio.run(notebook(server)) == "tiny"


@pytest.mark.parametrize("missing", ["openai", "tenacity"])
def test_without_its_packages_a_sentence_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "seps.photos.captions.openai_backend")
    monkeypatch.setitem(sys.modules, missing, None)  # what an import of a package that is not installed meets
    with pytest.raises(ValueError, match=naming("seps[caption]")):
        build(config("http://localhost/v1"), threading.Event())


def test_the_only_model_is_found_and_several_are_listed() -> None:
    with ChatServer() as server:
        assert OpenAIBackend(config(server, model=""), threading.Event()).model == "tiny"
    with ChatServer(models=("a", "b")) as server, pytest.raises(FatalError, match="2 models: a, b"):
        OpenAIBackend(config(server, model=""), threading.Event())


def test_waiting_ends_when_the_run_is_stopped() -> None:
    halt = threading.Event()
    threading.Timer(0.1, halt.set).start()
    start = time.monotonic()
    with ChatServer(lambda *_: (500, {}, "")) as server, pytest.raises(Stopped):
        OpenAIBackend(config(server, retries=9, backoff=100.0), halt).describe(["data:,"], Sampling())
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(("value", "seconds"), [(None, 0), ("3", 3.0), ("-1", 0.0), ("soon", 0), ("nan", 0.0)])
def test_retry_after_is_understood(value: str | None, seconds: float) -> None:
    assert seconds_of(value) == seconds


def test_answers_of_other_servers_are_read() -> None:
    parts = {"choices": [{"message": {"content": [{"type": "text", "text": "a "}, {"text": "dog"}]}}]}
    assert read_answer(parts) == Answer("a dog", "stop", None)
    refused = {"choices": [{"message": {"content": None, "refusal": "No."}, "finish_reason": "stop"}]}
    assert read_answer(refused) == Answer("No.", "filter", None)
    cut = {"choices": [{"message": {"content": "a"}, "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
    assert read_answer(cut) == Answer("a", "length", 1)


def test_photos_on_their_side_and_odd_formats_are_sent_upright_and_readable() -> None:
    wide = Image.new("RGB", (20, 10), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    jpeg, bitmap = io.BytesIO(), io.BytesIO()
    wide.save(jpeg, "JPEG", exif=exif)
    wide.save(bitmap, "BMP")
    turned = data_url(jpeg.getvalue(), SOURCE)
    assert turned.startswith("data:image/jpeg;")
    assert _size(turned) == (10, 20)
    assert data_url(bitmap.getvalue(), SOURCE).startswith("data:image/png;")
    assert _size(data_url(bitmap.getvalue(), SOURCE, max_side=8)) == (8, 4)
    for broken in (b"", b"not an image", photo(1, (64, 64))[:60]):
        with pytest.raises(UnreadableImage):
            data_url(broken, SOURCE)


def test_a_photo_of_108_megapixels_is_described_from_half_its_size() -> None:
    photo108, too_large = io.BytesIO(), io.BytesIO()
    Image.new("L", (12_000, 9_000), 90).save(photo108, "JPEG")
    Image.new("L", (12_000, 9_000), 90).save(too_large, "PNG")
    assert open_picture(photo108.getvalue(), SOURCE).size == (6_000, 4_500)
    assert _size(data_url(photo108.getvalue(), SOURCE, max_side=800)) == (800, 600)
    with pytest.raises(UnreadableImage, match="decoded"):
        open_picture(too_large.getvalue(), SOURCE)


def _size(url: str) -> tuple[int, int]:
    import base64

    size: tuple[int, int] = Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).size
    return size


@pytest.mark.parametrize("fault", [(500, {}, "oops"), b"{broken", 60.0], ids=["500", "broken", "hang"])
def test_a_server_that_dies_midway_loses_no_line(tmp_path: Path, fault: Any) -> None:
    items = list_images(photos(tmp_path / "in", 12))
    out = tmp_path / "dense.jsonl"
    dying = ChatServer(lambda server, request, number: answer(GOOD) if number <= 5 else fault)
    with dying as server:
        settings = config(server, timeout=patience(fault), retries=1, give_up_after=6, parallel=2)
        report = caption_images(items, out, settings)
        assert mentions(report["problem"], "6", "failures")
        assert not report["complete"]
        assert len(lines(out)) == report["described_in_file"] == 5
    with ChatServer() as server:
        report = caption_images(items, out, config(server), CaptionConfig())
    assert report["complete"]
    assert (report["described_now"], report["described_before"]) == (7, 5)
    assert sorted(line["image"] for line in lines(out)) == [item.id for item in items]
    assert not (tmp_path / "dense.failed.jsonl").exists()


def test_bad_settings_are_named() -> None:
    for changes, field in [({"url": "ftp://x"}, "url"), ({"parallel": 0}, "parallel"), ({"timeout": 0.0}, "timeout")]:
        with pytest.raises(ValueError, match=field):
            config("http://localhost/v1", **changes)
    with pytest.raises(ValueError, match="API key") as caught:
        config("http://localhost/v1", api_key="se\ncret")
    assert "cret" not in str(caught.value)
    assert "secret" not in repr(config("http://localhost/v1", api_key="secret"))
