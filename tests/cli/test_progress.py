"""Bars are for terminals."""

from __future__ import annotations

import sys

import pytest

from seps.cli.shared import progress


class Terminal:
    def __init__(self, yes: bool) -> None:
        self.yes, self.text = yes, ""

    def isatty(self) -> bool:
        return self.yes

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


def test_the_bar_of_a_training_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal(False))
    assert progress.training_progress() is None
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = progress.training_progress()
    assert bar is not None
    bar.start(0, 5)
    bar.update(5, 0.25, 10.0)
    bar.note("score 3")
    bar.stop()
    assert "0.2500" in terminal.text and "10.0/s" in terminal.text and "5/5" in terminal.text


@pytest.mark.parametrize("yes", [True, False])
def test_counts_and_stages(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    terminal = Terminal(yes)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.count_progress("indexing", "images") as count:
        count(1, None)
        count(3, 4)
    with progress.stage_progress() as stage:
        stage("encoding", 2, 7)
    for part in ("indexing", "3/4", "encoding", "2/7"):
        assert (part in terminal.text) == yes


def test_a_pipe_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, now = Terminal(False), [0.0]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.count_progress("indexing", "images") as count:
        for done in range(1, 21):
            now[0] += 1
            count(done, 20)
    assert terminal.text.splitlines() == [f"indexing: {done} of 20 images" for done in (5, 10, 15, 20)]
