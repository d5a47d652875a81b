"""Every setting of a command has a description in its help, and --explain prints one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from seps.cli.main import main
from seps.reid.config import ReidConfig
from seps.retrieval.config import RunConfig
from seps.setting_docs import described, explained, listing, short
from seps.settings import defaults


@dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"] = "a"
    """Choose the kind (e.g. `a`). More about
    kinds."""


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    bare: int = 1


@pytest.mark.parametrize("cls", [RunConfig, ReidConfig])
def test_every_setting_has_a_description(cls: type[Any]) -> None:
    texts = described(cls)
    assert list(texts) == list(defaults(cls))
    assert [name for name, text in texts.items() if len(text) < 20 or not text[0].isupper() or text[-1] != "."] == []


def test_docstrings_below_fields_are_descriptions() -> None:
    assert described(Outer) == {"inner.kind": "Choose the kind (e.g. `a`). More about kinds.", "bare": ""}
    assert short(described(Outer)["inner.kind"]) == "Choose the kind (e.g. a)"
    assert listing(Outer)[:2] == ['  --inner.kind "a"', "      Choose the kind (e.g. a)"]
    assert listing(Outer, ["bare"]) == ["  --bare"]


def test_a_dataclass_without_source_has_no_descriptions() -> None:
    made: dict[str, Any] = {}
    exec("from dataclasses import dataclass\n@dataclass\nclass Made:\n    a: int = 1\n", made)
    assert described(made["Made"]) == {"a": ""}


def test_one_setting_is_explained_whole() -> None:
    text = explained(Outer, "--inner.kind")
    assert '"a", "b"' in text and 'default: "a"' in text and "More about kinds." in text


@pytest.mark.parametrize("command", [["train"], ["compare"], ["reid", "train"]])
def test_explain_prints_one_setting_and_stops(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--explain", "train.epochs"])
    printed = capsys.readouterr().out
    assert not end.value.code and printed.startswith("train.epochs\n") and "default: 10" in printed


def test_an_unknown_setting_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--explain", "train.epoch"]) == 2
    assert "did you mean train.epochs?" in capsys.readouterr().err
