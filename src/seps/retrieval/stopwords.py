"""Function words of English: they hold a sentence together, and no picture shows them."""

from __future__ import annotations

import re

_LISTED = """
a an the this that these those some any each another other
i me my we us our you your he him his she her it its they them their who which what there
am is are was were be been being do does did has have had having can could will would may might
and or but nor so if then than as while when where because not no also just very
of in on at to by for from with without into onto out off up down over under above below near between among
through across along around behind against toward towards during before after about upon beside next s t
"""
_WORD = re.compile(r"\w+")
STOP_WORDS = frozenset(_LISTED.split())
"""Articles, pronouns, auxiliaries, conjunctions and prepositions, in lower case."""


def is_stop_word(word: str) -> bool:
    """Whether a word is a function word, or a mark without any letter or digit."""
    return word.lower() in STOP_WORDS or not any(letter.isalnum() for letter in word)


def content_words(text: str) -> int:
    """How many words of a text are no function words."""
    return sum(not is_stop_word(word) for word in _WORD.findall(text))


def is_short(text: str) -> bool:
    """Whether a query is a word or two beside function words, and no sentence."""
    return content_words(text) < 3
