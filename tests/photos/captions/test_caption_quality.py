"""Bad answers are found, good descriptions are not called bad."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seps.photos.captions import answer_problem
from seps.photos.captions.quality import words_of

LONG = (
    "The image features a brown dog running across a grassy field with a red ball in its mouth. In the background, "
    "there are several trees and a wooden fence. Two people stand near the fence and watch the dog. One of them "
    "wears a blue jacket, the other a white shirt. The sky is cloudy, and the light is soft. There is a second dog, "
    "smaller than the first, in the background on the left side of the field, near a bench."
)


@pytest.mark.parametrize(
    "text",
    [
        LONG,
        "A dog.",
        "I can see two dogs on a beach.",
        "I cannot help but notice the bright red door in the middle of the street.",
        "A sign says 'Sorry, we are closed' above a shop door.",
        "The man cannot be seen clearly because of the fog.",
        "I'm sorry I cannot identify the people, but " + LONG,
        "A very, very, very tall tower. There are three cups, three plates, and three spoons.",
        "一只棕色的狗在草地上奔跑、嘴里叼着一个红色的球。背景中有几棵树和一道木栅栏。",
        "The digits 1 2 3 4 5 6 7 8 9 10 are written on a board.",
    ],
)
def test_descriptions_are_good(text: str) -> None:
    assert answer_problem(text, "stop") is None


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        ("", "stop", "empty"),
        (" \n\t ", "stop", "empty"),
        ("...!?", "length", "empty"),
        (LONG, "length", "cut"),
        (LONG, "filter", "refusal"),
        ("I'm sorry, but I can't assist with that request.", "stop", "refusal"),
        ("I\u2019m sorry, I can\u2019t help with that.", "stop", "refusal"),
        ("I cannot describe this image.", "stop", "refusal"),
        ("I cannot provide a description of real people.", "stop", "refusal"),
        ("Unfortunately, I am unable to view images.", "stop", "refusal"),
        ("As an AI language model, I do not have the ability to see images.", "stop", "refusal"),
        ("I don't have the ability to view images directly.", "stop", "refusal"),
        ("Sorry, I can't do that.", "stop", "refusal"),
        ("抱歉、我无法描述这张图片。", "stop", "refusal"),
        ("A dog and a dog and a dog and a dog and a dog and a dog and a dog", "length", "loop"),
        ("dog " * 20, "length", "loop"),
        ("There is a red car. " * 3, "stop", "loop"),
        ("一只狗在跑" * 6, "length", "loop"),
        (LONG + " There is a chair next to the table on the left side." * 4, "length", "loop"),
    ],
)
def test_bad_answers_are_named(text: str, finish: str, reason: str) -> None:
    assert answer_problem(text, finish) == reason


@given(st.lists(st.sampled_from(["red", "dog", "runs", "over", "green", "hills", "slowly"]), min_size=2, max_size=12))
def test_any_phrase_said_six_times_is_a_loop(phrase: list[str]) -> None:
    assert answer_problem(" ".join(["Here we see", *phrase * 8]), "stop") == "loop"


@given(st.integers(1, 400))
def test_distinct_words_never_loop(count: int) -> None:
    assert answer_problem(" ".join(f"word{k}" for k in range(count)), "stop") is None


@given(st.text(max_size=300), st.sampled_from(["stop", "length", "filter"]))
def test_any_text_is_judged(text: str, finish: str) -> None:
    reason = answer_problem(text, finish)
    assert reason in (None, "empty", "cut", "loop", "refusal")
    if finish != "filter":
        assert (reason == "empty") == (not words_of(text))
