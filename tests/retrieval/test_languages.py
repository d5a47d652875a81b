"""Queries that a model of English does not read: other scripts and languages, and what must not be taken for them."""

from __future__ import annotations

import pytest

from seps.method.config import ConfigError
from seps.retrieval.config import ModelConfig
from seps.retrieval.embedded import EMBEDDED, sentence_side
from seps.retrieval.languages import ENGLISH, frequent_words, is_not_english, language_note, reads, words_of
from seps.retrieval.pretrained import from_pretrained

OTHER = (
    "ein Hund am Strand",
    "zwei Kinder spielen im Schnee",
    "Fahrrad",
    "un chien sur la plage",
    "une fille qui rit",
    "gâteau d'anniversaire",
    "un perro en la playa",
    "cane sulla spiaggia",
    "um cachorro na praia",
    "een hond op het strand",
    "沙滩上的狗",
    "山",
    "собака на пляже",
    "كلب على الشاطئ",
    "犬がビーチで走る",
)
ENGLISH_QUERIES = (
    "dog",
    "a dog on the beach",
    "a brwon dog runing",
    "bicyle",
    "Zofia Kowalska",
    "Olga's birthday in Lisbon",
    "Charles de Gaulle airport",
    "Los Angeles",
    "Rio de Janeiro",
    "Beyoncé",
    "a café in Paris",
    "Mount Fuji seen from Hakone",
    "IMG_2034",
    "2019",
    "🎂",
)


@pytest.mark.parametrize("name", EMBEDDED)
def test_queries_in_other_languages(name: str) -> None:
    side = sentence_side(name)
    assert side is not None and side[0].languages == ("en",)
    assert [text for text in OTHER if not is_not_english(text, side[0].pieces)] == []
    assert [text for text in ENGLISH_QUERIES if is_not_english(text, side[0].pieces)] == []


def test_only_a_model_of_english_says_so() -> None:
    class Settings:
        model, root = "mine", "photos"

    model = from_pretrained("mini")
    assert reads(model.languages, "a dog", model.pieces)
    assert not reads(model.languages, OTHER[0], model.pieces)
    note = language_note(Settings)
    assert "mine" in note and "seps index photos" in note and "--model siglip2-b-16" in note
    assert all(reads(languages, OTHER[0], model.pieces) for languages in ((), ("en", "de"), ("de",)))


def test_words_of_other_languages_are_no_frequent_words_of_english() -> None:
    """Neither function words nor words of captions prove another language."""
    sure, unsure = frequent_words()
    assert len(sure) > 300 and not sure & unsure and not (sure | unsure) & ENGLISH
    assert all(words_of(word) == [word] for word in sure)


@pytest.mark.parametrize("languages", [("English",), "en", ("EN",), (1,), 3])
def test_languages_are_codes(languages: object) -> None:
    with pytest.raises(ConfigError, match="languages"):
        ModelConfig(languages=languages)  # type: ignore[arg-type]
    assert ModelConfig(languages=["en", "deu"]).languages == ("en", "deu")  # type: ignore[arg-type]
