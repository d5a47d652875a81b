"""How the server treats its connections: how many there are, and how long it waits for a slow client.

A client may send its request in small pieces, or not read the answer. The server waits for a limited time, and for a
limited number of such clients: where more come, the connection that waited longest is closed. So clients that send
nothing cannot keep others out.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 512
"""Open at once; requests on more are answered 503."""
WAITING = 256
"""Connections whose client has to go on: to send its request or to read the answer."""
SECONDS = {"head": 10.0, "body": 60.0, "answer": 60.0}
"""How long a client may take to send the head of a request, to send its body, and to read what is ready."""
LONGEST_HEAD = 64 * 1024
Phase = Literal["", "head", "body", "answer"]


class Waiting:
    """The connections that wait for their client, those that wait longest first."""

    def __init__(self) -> None:
        self._connections: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Connection) -> None:
        """Count a connection; if there are too many, close the one that waits longest."""
        self._connections[connection] = None
        if len(self._connections) > WAITING:
            next(iter(self._connections)).give_up()

    def remove(self, connection: Connection) -> None:
        """Count it no more."""
        self._connections.pop(connection, None)


class Connection(H11Protocol):
    """uvicorn's connection, with limits in time, and a sentence for what is no request."""

    def __init__(self, *args: Any, waiting: Waiting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting = waiting
        self._phase: Phase = ""
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for("")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        self._paused = True
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        self._paused = False
        super().resume_writing()
        self._look()

    def give_up(self) -> None:
        """Close the connection: its client took too long."""
        phase = self._phase
        self._wait_for("")
        if phase == "head":
            self.transport.close()
        else:
            self.transport.abort()  # what is ready would be waited for

    def send_400_response(self, msg: str) -> None:
        text = "The request cannot be read: it is not HTTP, or its address and headers are longer than 64 KiB."
        body = json.dumps({"error": text}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _look(self) -> None:
        """Note what the connection waits for now."""
        if self.transport.is_closing():
            self._wait_for("")
        elif self._paused:
            self._wait_for("answer")
        else:
            phases: dict[Any, Phase] = {h11.IDLE: "head", h11.SEND_BODY: "body"}
            self._wait_for(phases.get(self.conn.their_state, ""))

    def _wait_for(self, phase: Phase) -> None:
        if phase == self._phase:
            return  # the time for all of it goes on
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting.remove(self)
        if phase:
            self._timer = self.loop.call_later(SECONDS[phase], self.give_up)
            self._waiting.add(self)


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """The settings of the server for an application."""
    waiting = Waiting()

    class Counted(Connection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, waiting=waiting, **kwargs)

    return uvicorn.Config(
        app,
        log_level="error",
        timeout_graceful_shutdown=5,
        # The other parser of uvicorn takes in headers and addresses of any length.
        http=Counted,
        ws="none",
        h11_max_incomplete_event_size=LONGEST_HEAD,
        limit_concurrency=CONNECTIONS,
        **options,
    )
