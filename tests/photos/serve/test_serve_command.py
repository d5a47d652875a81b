"""`seps serve` as a process: it says where it is, answers, asks for a token beyond the machine, and stops cleanly."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from stores import gallery, index

pytest.importorskip("uvicorn")


@pytest.mark.parametrize("host", [pytest.param("127.0.0.1", marks=pytest.mark.slow), "0.0.0.0"])
def test_serves_and_stops(tmp_path: Path, host: str) -> None:
    index(gallery(tmp_path / "g", 2), tmp_path / "s")
    script = "import sys; from seps.cli.main import call; sys.exit(call('serve', sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "--store", str(tmp_path / "s"), "--port", "0", "--host", host],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "SEPS_TOKEN"},
    )
    try:
        assert process.stdout is not None
        found = re.match(r"2 images\. Open http://\S+:(\d+)/(?:\?token=(\S+))?", process.stdout.readline())
        assert found is not None and (found[2] is not None) == (host == "0.0.0.0")
        address = f"http://127.0.0.1:{found[1]}/api/search?q=a+dog"
        if found[2]:
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(address, timeout=60)
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {found[2]}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert len(json.load(answer)["results"]) == 2
        for line in (b"rubbish\r\n\r\n", b"GET /" + b"a" * 65_600):
            with socket.create_connection(("127.0.0.1", int(found[1])), 60) as raw:
                raw.sendall(line)
                head, _, body = b"".join(iter(lambda: raw.recv(4096), b"")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
            assert "read" in json.loads(body)["error"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in errors
