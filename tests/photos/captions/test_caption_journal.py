"""The journal: torn lines, foreign files, locks, full disks, superseded lines."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_server import lines

from seps.images.sources import DataError
from seps.locks import FileInUse
from seps.photos.captions.journal import Journal, failed_path


def good(image: str, sha: str = "aa", text: str = "A dog, ein Hündchen.") -> dict[str, Any]:
    return {"image": image, "sha256": sha, "dense": text, "model": "m", "settings": {"seed": 1}}


def bad(image: str, sha: str = "aa", kind: str = "bad") -> dict[str, Any]:
    return {"image": image, "sha256": sha, "kind": kind, "reason": "loop"}


def test_lines_come_back(tmp_path: Path) -> None:
    out = tmp_path / "dense.jsonl"
    with Journal(out) as journal:
        journal.write_good(good("a"))
        journal.write_good(good("b"))
        journal.write_failed(bad("c"))
    with Journal(out) as journal:
        assert list(journal.good.entries) == ["a", "b"]
        assert journal.good.read("b") == good("b")
        assert journal.failed.entries["c"].note == "bad"
    assert not out.with_name("dense.jsonl.lock").exists()


def test_a_line_torn_at_any_byte_is_repaired(tmp_path: Path) -> None:
    out = tmp_path / "dense.jsonl"
    whole = [json.dumps(good(name), ensure_ascii=False).encode() + b"\n" for name in "ab"]
    for cut in range(len(whole[1])):
        out.write_bytes(whole[0] + whole[1][:cut])
        with Journal(out) as journal:
            # All but the line feed is a whole line, and stays.
            assert list(journal.good.entries) == (["a"] if cut < len(whole[1]) - 1 else ["a", "b"])
            if "b" not in journal.good.entries:
                journal.write_good(good("b"))
        assert out.read_bytes() == b"".join(whole)


def test_zeros_after_a_power_cut_are_repaired(tmp_path: Path) -> None:
    out = tmp_path / "dense.jsonl"
    line = json.dumps(good("a")).encode() + b"\n"
    out.write_bytes(line + b"\0" * 100)
    with Journal(out) as journal:
        assert list(journal.good.entries) == ["a"]
    assert out.read_bytes() == line


@pytest.mark.parametrize(
    "content",
    [
        b'{"image": "a.jpg", "captions": ["a dog"]}\n{"image": "b.jpg", "captions": []}',
        b"notes, not JSON",
        b"\xff\xd8\xff\xe0",
        b'[1, 2]\n{"image": "',
    ],
)
def test_somebody_elses_file_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "dense.jsonl"
    out.write_bytes(content)
    with pytest.raises(DataError, match="write"), Journal(out):
        pass
    assert out.read_bytes() == content
    assert os.listdir(tmp_path) == ["dense.jsonl"]


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path: Path) -> None:
    out = tmp_path / "dense.jsonl"
    with Journal(out), pytest.raises(FileInUse, match=f"process {os.getpid()} "), Journal(out):
        pass
    with Journal(out):
        pass


def test_the_lock_of_a_killed_process_is_stale(tmp_path: Path) -> None:
    out = tmp_path / "dense.jsonl"
    code = (
        "import os, signal, sys; from seps.locks import FileLock; from pathlib import Path\n"
        f"FileLock(Path({str(out) + '.lock'!r}), Path('x')).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert Path(f"{out}.lock").exists()
    with Journal(out) as journal:
        journal.write_good(good("a"))
    assert not Path(f"{out}.lock").exists()


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "dense.jsonl"
    real = os.write

    def full(handle: int, data: bytes) -> int:
        real(handle, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal(out) as journal:
        journal.write_good(good("a"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space"):
                journal.write_good(good("b"))
        journal.write_good(good("c"))
    assert [line["image"] for line in lines(out)] == ["a", "c"]


def test_the_later_line_counts_and_tidying_drops_the_older(tmp_path: Path) -> None:
    out = tmp_path / "dense.jsonl"
    with Journal(out) as journal:
        for line in (good("a", "old"), good("b"), good("a", "new")):
            journal.write_good(line)
    assert len(lines(out)) == 3
    with Journal(out) as journal:
        assert journal.good.entries["a"].sha256 == "new"
        journal.write_good(good("c"))
    assert [(line["image"], line["sha256"]) for line in lines(out)] == [("b", "aa"), ("a", "new"), ("c", "aa")]


def test_a_description_voids_the_failure_and_a_failure_voids_a_stale_description(tmp_path: Path) -> None:
    out = tmp_path / "dense.jsonl"
    with Journal(out) as journal:
        journal.write_failed(bad("a"))
        journal.write_good(good("b", "old"))
        journal.write_good(good("a"))
        journal.write_failed(bad("b", "new"))
        journal.tidy()
    assert [line["image"] for line in lines(out)] == ["a"]
    assert [line["image"] for line in lines(failed_path(out))] == ["b"]


def test_a_kill_between_the_two_files_is_mended(tmp_path: Path) -> None:
    out = tmp_path / "dense.jsonl"
    out.write_text(json.dumps(good("a")) + "\n")
    failed_path(out).write_text(json.dumps(bad("a")) + "\n")
    with Journal(out) as journal:
        assert not journal.failed.entries
        journal.tidy()
    assert not failed_path(out).exists()


def test_an_unused_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with Journal(tmp_path / "dense.jsonl"):
        pass
    assert not os.listdir(tmp_path)
    with pytest.raises(DataError, match="exist"), Journal(tmp_path / "no" / "dense.jsonl"):
        pass
