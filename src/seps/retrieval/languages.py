"""Words of queries: function words of English, and whether a sentence is in another language.

A model of English captions does not read another language.

A sentence is in another language if most of its letters are of another script, or if all of this holds:

- no word is one of `ENGLISH`, the frequent words of English that other languages lack;
- a word is a frequent one of another language (`assets/other_languages.txt`), or two are and may be names as well;
- more than half of the words are such, or outside the vocabulary: the tokenizer cuts them into several pieces.

Names and misspelt words are outside the vocabulary as well, so they alone prove nothing.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Protocol

_LISTED = """
the of with and is are at from to this that his her their its my our your by for into near while wearing it he she they
them who what where when two three it's not
"""
ENGLISH = frozenset(_LISTED.split())
MANY_LANGUAGES = "siglip2-b-16"
"""The smallest preset that reads many languages."""
_WORD = re.compile(r"[^\W\d_]+")


class IndexedBy(Protocol):
    """Settings of a store."""

    @property
    def model(self) -> str:
        """The name of its model."""
        ...

    @property
    def root(self) -> str:
        """The folder that it was made of."""
        ...


@functools.cache
def frequent_words() -> tuple[frozenset[str], frozenset[str]]:
    """Words of other languages that prove one, and those that are names or English words as well."""
    text = (files("seps") / "assets" / "other_languages.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    sure = {word for line in lines if not line.startswith("?") for word in line.split()}
    unsure = {word for line in lines if line.startswith("?") for word in line.split()[1:]}
    return frozenset(sure), frozenset(unsure - sure)


def is_not_english(text: str, pieces: Callable[[str], int]) -> bool:
    """Whether a query is in another language; `pieces` counts the tokens of a word."""
    letters = [letter for letter in text if letter.isalpha()]
    other = sum(not unicodedata.name(letter, "").startswith("LATIN ") for letter in letters)
    if 2 * other > len(letters):
        return True
    words = [word.casefold() for word in _WORD.findall(text)]
    sure, unsure = frequent_words()
    frequent = 2 * sum(word in sure for word in words) + sum(word in unsure for word in words)
    if frequent < 2 or not ENGLISH.isdisjoint(words):
        return False
    strange = sum(word in sure or word in unsure or pieces(word) > 1 for word in words)
    return 2 * strange > len(words)


def reads(languages: Sequence[str], text: str, pieces: Callable[[str], int]) -> bool:
    """Whether a model of these languages reads a query, as far as that can be told; none: not known, or many."""
    return tuple(languages) != ("en",) or not is_not_english(text, pieces)


def language_note(store: IndexedBy) -> str:
    """A sentence on a query in another language than the English that a store's model reads."""
    return (
        f"The model {store.model} reads English, and this query seems to be in another language: its results are "
        f"arbitrary. Write it in English, or use a model of many languages: seps index {store.root} --store ANOTHER "
        f"--model {MANY_LANGUAGES}"
    )


_FUNCTION_WORDS = """
a an the this that these those some any each another other
i me my we us our you your he him his she her it its they them their who which what there
am is are was were be been being do does did has have had having can could will would may might
and or but nor so if then than as while when where because not no also just very
of in on at to by for from with without into onto out off up down over under above below near between among
through across along around behind against toward towards during before after about upon beside next s t
"""
_TOKEN = re.compile(r"\w+")
STOP_WORDS = frozenset(_FUNCTION_WORDS.split())
"""Articles, pronouns, auxiliaries, conjunctions and prepositions, in lower case."""


def is_stop_word(word: str) -> bool:
    """Whether a word is a function word, or a mark without any letter or digit."""
    return word.lower() in STOP_WORDS or not any(letter.isalnum() for letter in word)


def content_words(text: str) -> int:
    """How many words of a text are no function words."""
    return sum(not is_stop_word(word) for word in _TOKEN.findall(text))


def is_short(text: str) -> bool:
    """Whether a query is a word or two beside function words, and no sentence."""
    return content_words(text) < 3


_RUN = re.compile(r"\w+")
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")
"""Scripts that are written without spaces: words are found there as pairs of letters."""


def words_of(text: str) -> list[str]:
    """The distinct words of a text in lower case; single Latin letters are none (the s of "Olga's")."""
    words: dict[str, None] = {}
    for run in _RUN.findall(unicodedata.normalize("NFC", text).lower()):
        for part in re.split(f"({_UNSPACED.pattern})", run):
            if is_unspaced(part) and len(part) > 1:
                words.update(dict.fromkeys(part[i : i + 2] for i in range(len(part) - 1)))
            elif len(part) > 1 or is_unspaced(part) or part.isdigit():
                words[part] = None
    return list(words)


def is_unspaced(word: str) -> bool:
    """Whether a word is of a script that is written without spaces."""
    return bool(word) and _UNSPACED.fullmatch(word) is not None
