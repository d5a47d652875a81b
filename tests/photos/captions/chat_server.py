"""For the tests of captioning: a real HTTP server of the chat protocol that misbehaves on demand, and photos."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image

GOOD = "A small square of one colour fills the whole picture, evenly lit and without any object in it."
Reply = Callable[["ChatServer", dict[str, Any], int], Any]


def answer(text: str, finish: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return {"id": "x", "choices": [choice], "usage": {"completion_tokens": len(text.split())}}


class ChatServer:
    """`reply(server, request, number)` gives a dict (JSON), bytes (sent as they are), (status, headers, text),
    or a number of seconds to hang."""

    def __init__(self, reply: Reply | None = None, models: tuple[str, ...] = ("tiny",)) -> None:
        self.reply = reply or (lambda server, request, number: answer(GOOD))
        self.models = models
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.images: list[bytes] = []
        self.lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.send(json.dumps({"data": [{"id": name} for name in owner.models]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner.lock:
                    owner.requests.append(body)
                    owner.headers.append({name.title(): value for name, value in self.headers.items()})
                    owner.times.append(time.monotonic())
                    owner.images.append(sent_image(body))
                    number = len(owner.requests)
                reply = owner.reply(owner, body, number)
                if isinstance(reply, float):
                    time.sleep(reply)
                elif isinstance(reply, tuple):
                    self.send(reply[2].encode(), *reply[:2])
                else:
                    self.send(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

            def send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
                try:
                    self.send_response(status)
                    for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                        self.send_header(key, value)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client was killed

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 64

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> ChatServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def sent_image(request: dict[str, Any]) -> bytes:
    url = request["messages"][0]["content"][0]["image_url"]["url"]
    return base64.b64decode(url.split(",", 1)[1])


def photo(number: int, size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (number % 256, number // 256, 77)).save(buffer, "PNG")
    return buffer.getvalue()


def photos(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number:04d}.png").write_bytes(photo(number))
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
