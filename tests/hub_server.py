"""A model hub on this machine, for tests: the requests that huggingface_hub's client makes to upload and download."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class Hub:
    """What the hub holds; `offline` makes it refuse every request."""

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By model, its files."""
    large: dict[str, bytes] = field(default_factory=dict)
    """By sha256, uploaded content that waits for its commit."""
    refuse: bool = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Be silent."""

    def answer(self, value: Any = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code: str = "RepoNotFound") -> None:
        self.answer({"error": "not found"}, 404, {"X-Error-Code": code})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name = "/".join(parts[2:4])
            files = self.hub.files.get(name)
            if files is None:
                return self.missing()
            if parts[4:5] == ["tree"]:
                rows = [{"type": "file", "path": one, "size": len(data), "oid": "0"} for one, data in files.items()]
                return self.answer(rows)
            return self.answer({"id": name, "sha": COMMIT, "siblings": [{"rfilename": one} for one in files]})
        if parts[2:3] == ["resolve"]:
            data = self.hub.files.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
            if data is None:
                return self.missing("EntryNotFound")
            tag = hashlib.sha256(data).hexdigest()
            return self.answer(data, headers={"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'})
        return self.missing()

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.hub.large[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self.body()
        if self.hub.refuse:
            return self.answer({"error": "no"}, 403)
        if path == "/api/repos/create":
            told = json.loads(body)
            name = f"{told['organization']}/{told['name']}"
            self.hub.files.setdefault(name, {})
            return self.answer({"url": f"{self.hub.address}/{name}", "id": name})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        parts = path.strip("/").split("/")
        if parts[-3:] == ["lfs", "objects", "batch"]:
            wanted = json.loads(body)["objects"]
            actions = [
                {**one, "actions": {"upload": {"href": f"{self.hub.address}/large/{one['oid']}"}}} for one in wanted
            ]
            return self.answer({"transfer": "basic", "objects": actions})
        name = "/".join(parts[2:4])
        if parts[4:5] == ["preupload"]:
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            return self.answer({"files": modes})
        if parts[4:5] == ["commit"]:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.hub.files[name][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.hub.files[name][value["path"]] = self.hub.large[value["oid"]]
            url = f"{self.hub.address}/{name}/commit/{COMMIT}"
            return self.answer({"commitUrl": url, "commitOid": COMMIT, "success": True})
        return self.missing()


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """A running hub at `Hub.address`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
