"""Many clients at once against `seps serve`: errors, requests, latency, memory.

    python -m benchmarks.search.serving --store DIR [--clients 50] [--seconds 60]

Each client searches, fetches a thumbnail of what it found and asks for an explanation, again and again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote, urlsplit

QUERIES = ("a dog running on the beach", "two people on a bench", "a child in a red shirt", "a man on a bicycle")


def client(address: str, until: float, number: int, done: list[tuple[int, float]]) -> None:
    """Ask until the time is over; note the status (0: no answer) and seconds of each request."""
    connection = http.client.HTTPConnection(address, timeout=120)
    count = 0

    def ask(path: str) -> Any:
        start = time.monotonic()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            done.append((answer.status, time.monotonic() - start))
            return json.loads(body) if answer.getheader("content-type") == "application/json" else None
        except (OSError, http.client.HTTPException):
            done.append((0, time.monotonic() - start))
            connection.close()
            return None

    while time.monotonic() < until:
        query = quote(f"{QUERIES[(number + count) % len(QUERIES)]} {number} {count}")
        found = ask(f"/api/search?q={query}&k=5") or {"results": []}
        for hit in found["results"][:1]:
            ask(f"/api/thumb/{hit['id']}")
            ask(f"/api/explain/{hit['id']}?q={query}")
        count += 1


def resident(process: int) -> float:
    """Megabytes a process holds."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1000
    return 0.0


def main() -> None:
    """Serve, ask, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.serving", description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    command = [sys.executable, "-m", "seps.cli.main", "serve", "--store", options.store, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if server.stdout is None:
            raise RuntimeError("the server has no output")
        address = urlsplit(server.stdout.readline().split("Open ")[1].split()[0]).netloc
        until = time.monotonic() + options.seconds
        done: list[tuple[int, float]] = []
        threads = [threading.Thread(target=client, args=(address, until, n, done)) for n in range(options.clients)]
        for thread in threads:
            thread.start()
        memory = []
        while time.monotonic() < until:
            time.sleep(options.seconds / 12)
            memory.append(round(resident(server.pid)))
        for thread in threads:
            thread.join()
        times = [seconds for _, seconds in done]
        wrong = sorted({status for status, _ in done} - {200})
        facts = {
            "clients": options.clients,
            "seconds": options.seconds,
            "requests": len(done),
            "errors": sum(status != 200 for status, _ in done),
            "statuses_of_errors": wrong,
            "median_seconds": round(median(times), 2),
            "longest_seconds": round(max(times), 2),
            "memory_megabytes": memory,
        }
        server.terminate()
        facts["exit_status"] = server.wait(30)
        print(json.dumps(facts), flush=True)
    finally:
        if server.poll() is None:
            server.kill()


if __name__ == "__main__":
    main()
