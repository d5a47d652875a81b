"""JSON and YAML from outside: faults are sentences, whatever the text is."""

from __future__ import annotations

import math

import pytest

from seps.parsing import MAX_DEPTH, parse_json
from seps.yaml_text import parse_yaml

DEEP = ["[" * 100_000, '{"a":' * 100_000, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)]


@pytest.mark.parametrize("text", DEEP)
def test_a_deep_text_is_refused(text: str) -> None:
    for parse in (parse_json, parse_yaml):
        with pytest.raises(ValueError, match=str(MAX_DEPTH)):
            parse(text)


def test_what_is_less_deep_is_read() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(text) == parse_yaml(text)


@pytest.mark.parametrize("text", ["1e999", "[NaN]", '{"format": -Infinity}'])
def test_numbers_that_are_not_finite(text: str) -> None:
    parse_json(text)
    with pytest.raises(ValueError, match="finite"):
        parse_json(text, finite=True)


@pytest.mark.parametrize("text", ["&a [*a]", "a: &x {b: 1}\nc: *x", "a: &a [1]\nb: {<<: *a}"])
def test_a_yaml_that_repeats_itself_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"line [12]"):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["train: {epochs: 1}\nother: 2\ntrain: {seed: 2}", "a:\n  b: 1\n  c: 2\n  b: 3"])
def test_a_key_that_is_given_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"lines \d and \d"):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("010", 10), ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("0o10", 8), ("0x10", 16), ("-3", -3), ("1_000", 1000)],
        *[("1e-4", 1e-4), ("-.5", -0.5), ("1.", 1.0), (".inf", math.inf), ("2024-01-01", "2024-01-01"), ("yes", True)],
    ],
)
def test_numbers_of_yaml(text: str, value: object) -> None:
    found = parse_yaml(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["1e999", "!!timestamp x", "!!int x", "!!python/name:os.system", "a: [1", "? [1]\n: 2"]
)
def test_other_faults_of_yaml(text: str) -> None:
    with pytest.raises(ValueError):
        parse_yaml(text)
