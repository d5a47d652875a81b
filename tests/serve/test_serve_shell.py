"""`seps search` asks a service that runs over its store: the same output, and its own answer where that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stores import TEXTS, gallery, index, model, model_folder, paint

pytest.importorskip("fastapi")
import uvicorn

import seps
from seps.cli.main import call
from seps.cli.pictures.serve import bind
from seps.library.answers import Question
from seps.retrieval.index.search import Searcher
from seps.serve import notice
from seps.serve.app import create_app
from seps.serve.guard import LOOPBACK

TOKEN = "a-secret"


class Running:
    """A service in a thread, and how many questions it was asked."""

    def __init__(self, store: Path, token: str | None = None) -> None:
        self.store, self.asked = store, 0
        inner = create_app(Searcher(store, model()), token=token, hosts=LOOPBACK, local=True)

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            self.asked += scope["type"] == "http"
            await inner(scope, receive, send)

        listening = bind("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.server = uvicorn.Server(uvicorn.Config(counted, log_level="error", http="h11"))
        self.thread = threading.Thread(target=lambda: self.server.run(sockets=[listening]), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shell")
    index(gallery(place / "g"), place / "s")
    return place / "s"


@pytest.fixture(scope="module")
def running(store: Path) -> Iterator[Running]:
    service = Running(store, TOKEN)
    yield service
    service.stop()


def output(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = call("search", list(words))
    shown = capsys.readouterr()
    return status, shown.out, shown.err


CASES = [
    ["a photo of a dog"],
    [TEXTS[0], "-k", "3", "--json"],
    ["a dog", "--folder", "sub", "--min-size", "10", "--before", "2100-01-01"],
    ["a dog", "--after", "2100-01-01"],
    ["word " * 100],
    ["a dog + water - people"],
]


@pytest.mark.parametrize("words", CASES)
def test_the_service_gives_the_same_output(
    store: Path, running: Running, capsys: pytest.CaptureFixture[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = output(capsys, *words, "--store", str(store))
    assert not (store / notice.FILE).exists()
    before = running.asked
    with notice.posted(str(store), "127.0.0.1", running.port, TOKEN), monkeypatch.context() as patch:
        patch.setattr("seps.cli.pictures.search._of_process", lambda *_: pytest.fail("it searched by itself"))
        assert output(capsys, *words, "--store", str(store)) == alone
    assert running.asked == before + 1 and not (store / notice.FILE).exists()


def test_signs_that_are_read_as_words_are_told(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`seps find` and the page add and subtract; `seps search` looks for the sentence as it stands."""
    for text in ("a dog + water - people", "- people", "a dog +"):
        status, shown, told = output(capsys, text, "--store", str(store))
        assert status == 0 and shown and "read as part of the sentence; seps find" in told
    for text in ("black-and-white", "C++", '"rock - paper"', "a dog -4 degrees"):
        assert "part of the sentence" not in output(capsys, text, "--store", str(store))[2]


def test_it_shows_pictures_that_came_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gallery(tmp_path / "g", 3)
    index(folder, tmp_path / "s")
    service = Running(tmp_path / "s")
    try:
        paint(folder / "later.jpg", 77)
        index(folder, tmp_path / "s")
        with notice.posted(str(tmp_path / "s"), "localhost", service.port, None):
            found = json.loads(output(capsys, "a dog", "--store", str(tmp_path / "s"), "--json")[1])
        assert len(found) == 4 and service.asked == 1
    finally:
        service.stop()


def test_it_searches_by_itself_where_the_service_cannot_answer(
    store: Path, running: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    alone = output(capsys, "a dog", "--store", str(store))
    told = {"host": "127.0.0.1", "port": running.port, "pid": os.getpid(), "token": TOKEN, "version": seps.__version__}
    assert notice.ask(str(store), Question("a dog").as_dict()) is None
    closed = bind("127.0.0.1", 0)
    free = closed.getsockname()[1]
    closed.close()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    wrong: list[Any] = [
        {**told, "port": free},
        {**told, "pid": ended.pid},
        {**told, "token": "another"},
        {**told, "token": None},
        {**told, "version": "0.0.0"},
        {**told, "host": "192.0.2.1"},
        {**told, "port": "x"},
        {},
    ]
    try:
        for one in wrong:
            (store / notice.FILE).write_text(json.dumps(one))
            assert notice.ask(str(store), Question("a dog").as_dict()) is None, one
            assert output(capsys, "a dog", "--store", str(store)) == alone
        (store / notice.FILE).write_text("{broken")
        assert output(capsys, "a dog", "--store", str(store)) == alone
        (store / notice.FILE).write_text(json.dumps(told))
        # The same service, asked for another store than its own.
        index(gallery(tmp_path / "g", 2), tmp_path / "other")
        (tmp_path / "other" / notice.FILE).write_text(json.dumps(told))
        assert notice.ask(str(tmp_path / "other"), Question("a dog").as_dict()) is None
        with pytest.raises(ValueError, match="is in the folder"):
            call("search", ["a dog", "--store", str(store), "--folder", "nowhere"])
        before = running.asked
        for words in (["--exact"], ["--model", model_folder()]):
            output(capsys, "a dog", "--store", str(store), *words)
        with pytest.raises(ValueError, match="blank"):
            call("search", [" ", "--store", str(store)])
        assert running.asked == before
    finally:
        (store / notice.FILE).unlink()


def test_the_notice_is_for_its_user_alone_and_goes_with_its_service(tmp_path: Path) -> None:
    with notice.posted(str(tmp_path), "0.0.0.0", 8000, TOKEN):
        path = tmp_path / notice.FILE
        told = json.loads(path.read_text())
        assert (told["host"], told["port"], told["token"], told["pid"]) == ("127.0.0.1", 8000, TOKEN, os.getpid())
        assert path.stat().st_mode & 0o777 == 0o600
        with notice.posted(str(tmp_path), "::1", 8001, None):
            assert json.loads(path.read_text())["port"] == 8001
        assert not path.exists()
        path.write_text("of another service")
    assert path.read_text() == "of another service"
    path.unlink()
    for host, place in (("192.0.2.1", str(tmp_path)), ("127.0.0.1", "s3://bucket/store"), ("::1", str(path / "no"))):
        with notice.posted(place, host, 8000, None):
            assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("values", [{}, {"text": 3}, {"k": "ten"}, {"more": 1}, {"exact": 1}])
def test_a_question_of_another_kind_is_refused(running: Running, values: dict[str, Any]) -> None:
    good = Question("a dog").as_dict()
    assert Question.from_dict(good) == Question("a dog")
    with pytest.raises(ValueError, match="question"):
        Question.from_dict({**good, **values} if values else {})


def test_the_command_posts_and_removes_its_notice(store: Path) -> None:
    program = [sys.executable, "-m", "seps.cli.main", "serve", "--store", str(store), "--port", "0"]
    serving = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert serving.stdout is not None and "Open http" in serving.stdout.readline()
        for _ in range(500):
            if (store / notice.FILE).exists():
                break
            time.sleep(0.02)
        told = json.loads((store / notice.FILE).read_text())
        assert told["pid"] == serving.pid
        found = None
        for _ in range(100):
            found = found or notice.ask(str(store), Question("a dog").as_dict())
            time.sleep(0 if found else 0.05)
        assert found is not None
        light = (
            "import sys; from seps.cli.main import main; status = main(sys.argv[1:]); "
            "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(status)"
        )
        program = [sys.executable, "-c", light, "search", "a dog", "--store", str(store)]
        printed = subprocess.run(program, capture_output=True, text=True, check=False)
        assert printed.returncode == 0 and "p00.jpg" in printed.stdout, printed.stderr
        # Another number of threads sums in another order.
        here = [hit.as_dict() for hit in Searcher(store, model()).search("a dog")]
        assert [{**hit, "score": 0} for hit in found["hits"]] == [{**hit, "score": 0} for hit in here]
        assert [hit["score"] for hit in found["hits"]] == pytest.approx([hit["score"] for hit in here], abs=5e-6)
    finally:
        serving.terminate()
        status = serving.wait(30)
    assert status == -signal.SIGTERM and not (store / notice.FILE).exists()
