"""Whole runs: sources, resuming, changed images, bad answers, mixtures, the command, kills."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from chat_server import GOOD, ChatServer, answer, lines, photo, photos, sent_image

from messages import mentions, naming
from seps.cli.main import call
from seps.images.sources import DataError
from seps.photos.captions import BackendConfig, CaptionConfig, Sampling, caption_images, list_images
from seps.photos.captions.backends import Answer
from seps.photos.captions.engines import run_local
from seps.photos.captions.images import content_hash
from seps.retrieval.data import NothingDescribed, attach_dense, load_jsonl

LOOP = "a dog and a cat and " * 30
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from seps.cli import main; main.COMMANDS.setdefault('caption', ''); sys.exit(main.main())",
    "caption",
]


def backend(server: ChatServer, **changes: Any) -> BackendConfig:
    return BackendConfig(
        **{"kind": "openai", "model": "tiny", "url": server.url, "backoff": 0.01, "timeout": 30.0, **changes}
    )


def by_photo(server: ChatServer, request: dict[str, Any], number: int) -> dict[str, Any]:
    return answer(f"{GOOD} Its content starts with {content_hash(sent_image(request))[:12]}.")


def tar(path: Path, count: int) -> Path:
    with tarfile.open(path, "w") as shard:
        for file in sorted(photos(path.parent / "to-tar", count).iterdir()):
            shard.add(file, f"./{file.name}")
        shard.add(__file__, "notes.txt")
    return path


def test_a_folder_is_walked_in_order(tmp_path: Path) -> None:
    photos(tmp_path / "b", 2)
    photos(tmp_path / "a" / "deep", 1)
    photos(tmp_path / ".hidden", 1)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "Z.JPG").write_bytes(b"")
    (tmp_path / "gone.png").symlink_to("nowhere.png")
    assert [item.id for item in list_images(tmp_path)] == ["Z.JPG", "a/deep/0000.png", "b/0000.png", "b/0001.png"]


def test_folders_that_cannot_be_read_are_named_and_system_folders_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "locked", "@eaDir", "a/.Trash-1000"):
        photos(tmp_path / "in" / name, 1)
    (tmp_path / "in" / "drawing.svg").write_bytes(b"x")
    (tmp_path / "in" / "cut.tar").write_bytes(b"no tar")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [item.id for item in list_images(tmp_path / "in")] == ["a/0000.png"]
    words = [str(tmp_path / "in"), "--out", str(tmp_path / "dense.jsonl"), "--report", str(tmp_path / "report.json")]
    with ChatServer() as server:
        assert call("caption", [*words, "--url", server.url]) == 0
    said = capsys.readouterr().err
    assert mentions(said, "2", "read")
    assert mentions(said, "locked", "Permission denied")
    assert "pictures" in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert [line.split(":")[0] for line in report["not_read"]] == ["cut.tar", "locked"]
    assert sum(report["skipped"].values()) == 3


def test_shards_and_data_sets_are_read(tmp_path: Path) -> None:
    shard = tar(tmp_path / "s.tar", 3)
    assert [item.id for item in list_images(shard)] == ["0000.png", "0001.png", "0002.png"]
    data = tmp_path / "data.jsonl"
    rows = [{"image": "0001.png", "shard": "s.tar", "captions": ["x"], "id": "17"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [item.id for item in list_images(data)] == ["17"]
    with pytest.raises(DataError, match=naming("0000.png")):
        (tmp_path / "one").mkdir()
        for name in ("x.tar", "y.tar"):
            os.link(shard, tmp_path / "one" / name)
        list_images(tmp_path / "one")


def test_where_there_are_no_images_a_sentence_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="images"):
        list_images(tmp_path)
    with pytest.raises(DataError, match="image"):
        list_images(photos(tmp_path, 1) / "0000.png")
    with pytest.raises(DataError, match="file"):
        list_images(tmp_path / "nothing")


def test_a_described_folder_is_bound_to_a_data_set_by_content(tmp_path: Path) -> None:
    folder = photos(tmp_path / "set" / "photos", 3)
    data = tmp_path / "set" / "data.jsonl"
    rows = [{"image": f"photos/{path.name}", "captions": ["x"]} for path in sorted(folder.iterdir())]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "dense.jsonl"
    with ChatServer(by_photo) as server:
        caption_images(list_images(folder), out, backend(server))
    attached = attach_dense(load_jsonl(data), out)
    assert [content_hash(photo(k))[:12] in str(text) for k, text in enumerate(attached.dense)] == [True] * 3
    sorted(folder.iterdir())[1].write_bytes(photo(7))
    assert attach_dense(load_jsonl(data), out).dense[1] is None
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(NothingDescribed, match="describes"):
        attach_dense(load_jsonl(data), out)


def test_lines_are_bound_by_id_and_content_and_attached_as_they_are(tmp_path: Path) -> None:
    tar(tmp_path / "s.tar", 6)
    data = tmp_path / "data.jsonl"
    rows = [{"image": f"{k:04d}.png", "shard": "s.tar", "captions": ["x"], "id": str(k)} for k in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "dense.jsonl"
    with ChatServer(by_photo) as server:
        caption_images(list_images(data), out, backend(server, parallel=3))
    attached = attach_dense(load_jsonl(data), out, verify=True)
    for number, record in enumerate(attached.records):
        assert record.dense is not None
        assert content_hash(photo(number))[:12] in record.dense
    line = next(line for line in lines(out) if line["image"] == "2")
    assert line["sha256"] == content_hash(photo(2))
    assert (line["model"], line["backend"], line["finish"], line["attempts"]) == ("tiny", "openai", "stop", 1)
    assert line["settings"] == {
        "prompt": "Provide a comprehensive description of this image",
        "temperature": 0.2,
        "top_p": 0.9,
        "max_tokens": 500,
        "seed": 0,
    }


def test_a_changed_image_is_described_anew_and_alone(tmp_path: Path) -> None:
    folder, out = photos(tmp_path / "in", 4), tmp_path / "dense.jsonl"
    with ChatServer(by_photo) as server:
        caption_images(list_images(folder), out, backend(server))
        (folder / "0002.png").write_bytes(photo(999))
        report = caption_images(list_images(folder), out, backend(server))
        assert len(server.requests) == 5
    assert (report["described_now"], report["described_before"]) == (1, 3)
    found = {line["image"]: line for line in lines(out)}
    assert len(lines(out)) == 4
    assert content_hash(photo(999))[:12] in found["0002.png"]["dense"]


def test_a_later_line_with_another_hash_counts_even_before_tidying(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    photos(tmp_path, 1)
    data.write_text(json.dumps({"image": "0000.png", "captions": ["x"]}) + "\n")
    out = tmp_path / "dense.jsonl"
    rows = [{"image": "0000.png", "sha256": sha, "dense": text} for sha, text in (("a", "old"), ("b", "new"))]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert attach_dense(load_jsonl(data), out).dense == ["new"]
    with pytest.raises(DataError, match="describes"):
        attach_dense(load_jsonl(data), out, verify=True)


def test_bad_answers_are_asked_again_warmer_then_set_aside(tmp_path: Path) -> None:
    asked: dict[bytes, int] = {}

    def reply(server: ChatServer, request: dict[str, Any], number: int) -> dict[str, Any]:
        image = sent_image(request)
        with server.lock:
            asked[image] = asked.get(image, 0) + 1
        if image == photo(0):
            return answer(LOOP, "length")
        if image == photo(1) and asked[image] == 1:
            return answer("I'm sorry, I can't assist with that.")
        if image == photo(2):
            return answer("cut off in the", "length")
        return answer(GOOD if image != photo(3) or asked[image] > 2 else "")

    folder, out = photos(tmp_path / "in", 5), tmp_path / "dense.jsonl"
    with ChatServer(reply) as server:
        report = caption_images(list_images(folder), out, backend(server, parallel=1))
        assert report["set_aside"] == {"cut": 1, "loop": 1}
        assert report["bad_answers"] == {"cut": 3, "empty": 2, "loop": 3, "refusal": 1}
        assert report["recovered_by_asking_again"] == 2
        heat = [request["temperature"] for request in server.requests if sent_image(request) == photo(0)]
        seeds = [request["seed"] for request in server.requests if sent_image(request) == photo(0)]
        assert (heat, seeds) == ([0.2, 0.4, 0.6], [0, 1, 2])

        failed = lines(tmp_path / "dense.failed.jsonl")
        assert {(line["image"], line["reason"]) for line in failed} == {("0000.png", "loop"), ("0002.png", "cut")}
        line = next(line for line in lines(out) if line["image"] == "0003.png")
        assert line["retry"] == {"after": ["empty", "empty"], "temperature": 0.6, "seed": 2}

        before = len(server.requests)
        report = caption_images(list_images(folder), out, backend(server))
        assert len(server.requests) == before
        assert report["complete"]
        assert (report["described_before"], report["set_aside_before"]) == (3, 2)

        again = CaptionConfig(retry_failed=True, accept=("cut",), bad_retries=0)
        report = caption_images(list_images(folder), out, backend(server), again)
        assert (report["described_now"], report["set_aside"]) == (1, {"loop": 1})
    assert {line["image"]: line["finish"] for line in lines(out)}["0002.png"] == "length"
    assert [line["image"] for line in lines(tmp_path / "dense.failed.jsonl")] == ["0000.png"]


def test_a_model_that_never_answers_well_is_not_paid_for_all_images(tmp_path: Path) -> None:
    folder, out = photos(tmp_path / "in", 30), tmp_path / "dense.jsonl"
    with ChatServer(lambda *_: answer("I'm sorry, I can't assist with that.")) as server:
        report = caption_images(list_images(folder), out, backend(server, give_up_after=5, parallel=2))
        assert len(server.requests) < 30
    assert "refusal" in report["problem"]
    assert not report["complete"]
    assert not out.exists()


def test_an_unreadable_image_is_set_aside_and_tried_again_when_replaced(tmp_path: Path) -> None:
    folder, out = photos(tmp_path / "in", 3), tmp_path / "dense.jsonl"
    (folder / "0001.png").write_bytes(b"no image")
    with ChatServer() as server:
        report = caption_images(list_images(folder), out, backend(server))
        assert report["set_aside"] == {"unreadable": 1}
        assert "0001.png" in lines(tmp_path / "dense.failed.jsonl")[0]["reason"]
        (folder / "0001.png").write_bytes(photo(1))
        assert caption_images(list_images(folder), out, backend(server))["described_now"] == 1
    assert not (tmp_path / "dense.failed.jsonl").exists()


def test_another_model_or_prompt_is_not_mixed_in_unasked(tmp_path: Path) -> None:
    folder, out = photos(tmp_path / "in", 2), tmp_path / "dense.jsonl"
    with ChatServer() as server:
        caption_images(list_images(folder)[:1], out, backend(server))
        other = CaptionConfig(Sampling(prompt="Say something else"))
        with pytest.raises(DataError, match="--mixed"):
            caption_images(list_images(folder), out, backend(server), other)
        with pytest.raises(DataError, match="--mixed"):
            caption_images(list_images(folder), out, backend(server, model="huge"))
        mixed = CaptionConfig(other.sampling, mixed=True)
        assert caption_images(list_images(folder), out, backend(server), mixed)["described_now"] == 1
    assert len(lines(out)) == 2


def test_odd_texts_are_written_as_utf8(tmp_path: Path) -> None:
    folder, out = photos(tmp_path / "in", 1), tmp_path / "dense.jsonl"
    with ChatServer(lambda *_: answer(f" {GOOD} \ud83d\u2028狗\n")) as server:
        caption_images(list_images(folder), out, backend(server))
    (line,) = [json.loads(line) for line in out.read_bytes().split(b"\n") if line]
    assert line["dense"] == f"{GOOD} ?\u2028狗"


def test_the_command_writes_report_and_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out, report = photos(tmp_path / "in", 5), tmp_path / "dense.jsonl", tmp_path / "report.json"
    key = tmp_path / "key"
    key.write_text("sesame\n")
    words = [str(folder), "--out", str(out), "--report", str(report)]
    with ChatServer() as server:
        assert call("caption", [*words, "--url", server.url, "--api-key-file", str(key), "--limit", "2"]) == 0
        assert server.headers[0]["Authorization"] == "Bearer sesame"
        monkeypatch.setenv("OTHER_KEY", "open")
        assert call("caption", [*words, "--url", server.url, "--api-key-env", "OTHER_KEY"]) == 0
        assert server.headers[-1]["Authorization"] == "Bearer open"
        with pytest.raises(ValueError, match="itself"):
            call("caption", [str(out), "--out", str(out), "--url", server.url])
    said = capsys.readouterr().out
    assert mentions(said, "5", "described")
    assert "described now / before" in said
    assert GOOD[:40] in said
    written = json.loads(report.read_text())
    assert written["words"] == {"min": 18, "median": 18, "mean": 18.0, "max": 18}
    assert (written["images"], written["described_now"], written["described_before"]) == (5, 3, 2)
    assert len(written["samples"]) == 3
    assert written["images_per_second"] > 0
    assert "sesame" not in report.read_text() + out.read_text() + said


def test_what_was_set_aside_is_told_how_to_be_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(photos(tmp_path / "in", 2)), "--out", str(tmp_path / "dense.jsonl"), "--url"]
    with ChatServer(lambda *_: answer("")) as server:
        assert call("caption", [*words, server.url]) == 0
        assert "--retry-failed" not in capsys.readouterr().out
        assert call("caption", [*words, server.url]) == 0
        assert "--retry-failed" in capsys.readouterr().out


def test_a_server_that_fails_ends_the_command_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = photos(tmp_path / "in", 9)
    words = [str(folder), "--out", str(tmp_path / "dense.jsonl"), "--model", "m", "--backoff", "0.01"]
    with ChatServer(lambda *_: (500, {}, "no")) as server:
        assert call("caption", [*words, "--url", server.url, "--give-up-after", "4"]) == 1
    assert mentions(capsys.readouterr().err, "4", "failures")


def start(folder: Path, out: Path, server: ChatServer, *more: str) -> subprocess.Popen[str]:
    words = [str(folder), "--out", str(out), "--url", server.url, "--model", "tiny", "--parallel", "4", *more]
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, *words], stdout=pipe, stderr=pipe, text=True)


def wait_for(server: ChatServer, count: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while len(server.requests) < count and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)


@pytest.mark.slow
def test_two_hundred_photos_survive_five_kills(tmp_path: Path) -> None:
    folder, out = photos(tmp_path / "in", 200), tmp_path / "dense.jsonl"
    draw = random.Random(7)

    def slow(server: ChatServer, request: dict[str, Any], number: int) -> dict[str, Any]:
        time.sleep(0.01)
        return by_photo(server, request, number)

    with ChatServer(slow) as server:
        kept: list[str] = []
        for _ in range(5):
            process = start(folder, out, server)
            wait_for(server, len(server.requests) + draw.randrange(10, 35), process)
            time.sleep(draw.random() * 0.02)
            assert process.poll() is None
            process.kill()
            process.communicate()
            whole = out.read_text().split("\n")[:-1] if out.exists() else []
            assert whole[: len(kept)] == kept
            kept = whole
        process = start(folder, out, server)
        said, problems = process.communicate(timeout=60)
        assert process.returncode == 0, problems
        # At most what was under way at each kill is asked for twice.
        assert len(server.requests) <= 200 + 5 * 8
    found = lines(out)
    assert mentions(said, "200", "described")
    assert len(found) == len({line["image"] for line in found}) == 200
    for line in found:
        sha = content_hash((folder / line["image"]).read_bytes())
        assert line["sha256"] == sha
        assert sha[:12] in line["dense"]
    assert sorted(os.listdir(tmp_path)) == ["dense.jsonl", "in"]


@pytest.mark.slow
def test_ctrl_c_finishes_what_is_running(tmp_path: Path) -> None:
    folder, out = photos(tmp_path / "in", 60), tmp_path / "dense.jsonl"

    gate = threading.Event()

    def slow(server: ChatServer, request: dict[str, Any], number: int) -> dict[str, Any]:
        if number > 10:
            gate.wait(60)
        return answer(GOOD)

    with ChatServer(slow) as server:
        process = start(folder, out, server)
        wait_for(server, 14, process)
        second = start(folder, out, server)
        _, refused = second.communicate(timeout=60)
        assert second.returncode == 2
        assert f"{process.pid}" in refused
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        gate.set()
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Stopped" in said
        # Every answer that the server gave is in the file.
        assert len(lines(out)) == len(server.requests) == 14
    assert not (tmp_path / "dense.jsonl.lock").exists()


def test_a_request_that_hangs_does_not_hold_up_the_end_of_the_process(tmp_path: Path) -> None:
    released = threading.Event()

    class Hanging:
        name, model, batch_size, parallel = "openai", "tiny", 1, 2

        def prepare(self, data: bytes, source: Any) -> None:
            """Nothing of the picture is needed."""

        def describe(self, pictures: Any, sampling: Sampling) -> Any:
            released.wait(60)
            return [Answer(GOOD, "stop")] * len(pictures)

    photos(tmp_path / "in", 2)
    running = run_local(list_images(tmp_path / "in"), Hanging(), CaptionConfig(), threading.Event(), lambda: False)
    threading.Timer(1, released.set).start()
    found: list[bool] = []
    reader = threading.Thread(target=lambda: found.extend(outcome.kind == "good" for outcome in running))
    reader.start()
    while not (threads := [thread for thread in threading.enumerate() if thread.name == "seps-caption"]):
        time.sleep(0.01)
    assert all(thread.daemon for thread in threads)
    reader.join(60)
    assert found == [True, True]
