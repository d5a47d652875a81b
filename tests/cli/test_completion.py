"""Scripts that complete commands: run in bash as the shell would, and of all commands in the others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from seps.cli.completion import bash_script
from seps.cli.main import call, main
from seps.cli.shared.commands import COMMANDS

_TRY = """
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_seps
echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script() -> str:
    return bash_script()


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["dupl"], "duplicates"),
        (["find", "a dog", "--si"], "--since"),
        (["find", "--sort", "o"], "oldest"),
        (["reid", "tra"], "train"),
        (["reid", "train", "--conf"], "--config"),
        (["train", "--train.epo"], "--train.epochs"),
        (["completion", "b"], "bash"),
    ],
)
def test_bash_completes(script: str, typed: list[str], found: str) -> None:
    complete = "complete() { :; }\n"  # not there where bash was built without it
    done = subprocess.run(["bash", "-c", complete + script + _TRY, "bash", "seps", *typed],
                          capture_output=True, text=True, timeout=20)  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == (found, "")


def test_the_other_shells_know_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("completion", ["zsh"]) == 0
    zsh = capsys.readouterr().out
    assert zsh.splitlines()[0].startswith("autoload") and zsh.endswith(bash_script())
    assert call("completion", ["fish"]) == 0
    fish = capsys.readouterr().out
    assert all(f"-a {name} " in fish for name in COMMANDS) and "-l since -r" in fish
    if shutil.which("fish"):
        subprocess.run(["fish", "--no-execute"], input=fish, text=True, check=True, timeout=20)


@pytest.mark.parametrize(
    "words",
    [["search", "a", "dog", "on", "grass", "--store", "s"], ["find", "--store", "s", "a", "dog", "on", "grass"]],
)
def test_a_sentence_without_quotes_gets_them(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert f"seps {words[0]} 'a dog on grass'" in capsys.readouterr().err


def test_a_folder_stays_outside_the_quotes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find", "a", "dog", str(tmp_path)]) == 2
    assert f"seps find 'a dog' {tmp_path}" in capsys.readouterr().err


def test_two_words_without_quotes(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    """The second is taken for the folder."""
    assert main(["find", "a", "dog-that-is-no-folder"]) == 2
    assert "seps find 'a dog-that-is-no-folder'" in capsys.readouterr().err
