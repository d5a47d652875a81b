"""Files that commands write never replace something that the command did not write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seps.captioning.journal import Journal
from seps.cli.main import main
from seps.cli.shared.outputs import check_output, write_output
from seps.retrieval.data import DataError

COMMANDS = {
    "--json": ["eval", "--data", "data.jsonl"],
    "--report": ["caption", "photos", "--out", "dense.jsonl"],
}


@pytest.mark.parametrize("text", ['{"image": "a.jpg", "captions": ["x"]}\n', '{"mine": 1}', "notes", "[1]"])
@pytest.mark.parametrize("option", COMMANDS)
def test_a_foreign_file_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text(text)
    # The data are not there or no data at all: the sentence about the output must come first.
    assert main([*COMMANDS[option], option, "data.jsonl"]) == 2
    assert f"{option} data.jsonl exists and was not written by this command" in capsys.readouterr().err
    assert Path("data.jsonl").read_text() == text and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("path", "said"), [("folder", "is a folder"), ("none/out.json", "does not exist")])
def test_impossible_outputs_get_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    assert main(["eval", "--data", "data.jsonl", "--json", path]) == 2
    assert said in capsys.readouterr().err


def test_an_earlier_result_and_an_empty_file_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.touch()
    write_output(check_output(path, "--json", "rsum"), {"rsum": 1.0})
    write_output(check_output(path, "--json", "rsum"), {"rsum": 2.0})
    assert json.loads(path.read_text()) == {"rsum": 2.0} and list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError):
        write_output(path, {"rsum": object()})
    assert json.loads(path.read_text()) == {"rsum": 2.0} and list(tmp_path.iterdir()) == [path]


OURS = {"image": "a.jpg", "sha256": "aa", "dense": "a dog", "model": "m"}


def test_a_data_set_of_one_line_without_a_line_feed_is_not_taken_for_a_torn_line(tmp_path: Path) -> None:
    out = tmp_path / "data.jsonl"
    text = '{"image": "a.jpg", "captions": ["a dog"]}'
    out.write_text(text)
    with pytest.raises(DataError, match="did not write"), Journal(out):
        pass
    assert out.read_text() == text


def test_a_whole_last_line_without_its_line_feed_is_kept_and_a_torn_one_cut(tmp_path: Path) -> None:
    out = tmp_path / "dense.jsonl"
    line = json.dumps(OURS)
    out.write_text(line)
    with Journal(out) as journal:
        assert journal.good.read("a.jpg") == OURS
        journal.write_good({**OURS, "image": "b.jpg"})
    assert [json.loads(one)["image"] for one in out.read_text().splitlines()] == ["a.jpg", "b.jpg"]
    out.write_text(f"{line}\n{line[:30]}")
    with Journal(out) as journal:
        assert list(journal.good.entries) == ["a.jpg"]
    assert out.read_text() == f"{line}\n"
