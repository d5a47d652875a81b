"""Which words of captions are nouns, attributes and actions, and the singular of a noun: by their places alone.

No list of words is needed. A noun is a word that often ends what an article begins: before a preposition, a verb form
in -ing, a mark or the end. An attribute is one that often stands between an article and a noun, and seldom ends such a
part. So the same rules serve captions about any subject.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARTICLES = _words("a an the")
STARTS = ARTICLES | _words("his her its their two three four five six some several many")
"""Words that begin a part with a noun."""
PREPOSITIONS = _words("in on at with by near under behind beside over through across along from into")
"""Those that stand between two nouns of a typed query."""
_OTHER = "of to for onto off out up down around against toward towards above below between among upon while as and or"
_VERBS = "is are was were has have who that which wearing"
_PARTLY = "each other one another front top middle back backs side sides next left right end close rear bottom center"
_VAGUE = "inside outside background foreground lot number bunch pair piece type kind way edge area distance something"
BOUNDARIES = PREPOSITIONS | ARTICLES | _words(f"{_OTHER} {_VERBS}")
"""Words that end a part with a noun."""
NEVER = (
    BOUNDARIES
    | STARTS
    | _words(f"{_PARTLY} {_VAGUE}")
    | _words("it he she they them him there what very this these both few various same first")
)
"""Words that are no noun, attribute or action of a query."""
LEAST = 5
"""Places in which a word must stand before it counts as a noun or an attribute."""
NOT_ACTIONS = _words("during wearing including something nothing anything everything morning evening")
_PLURALS = {
    "men": "man", "women": "woman", "children": "child", "people": "person", "feet": "foot", "teeth": "tooth",
    "mice": "mouse", "geese": "goose", "leaves": "leaf", "knives": "knife", "wolves": "wolf", "shelves": "shelf",
}  # fmt: skip
_SINGULARS = {one: many for many, one in _PLURALS.items()}
_TOKEN = re.compile(r"[a-z]+(?:['\u2019-][a-z]+)*|[^\sa-z]")


def tokens(text: str) -> list[str]:
    """Words and marks of a text, in lower case."""
    return _TOKEN.findall(text.lower())


def is_word(token: str) -> bool:
    """Whether a token is a word that may be part of a query: no mark, no function word, at least three letters."""
    return len(token) > 2 and token[0].isalpha() and token not in NEVER


def is_action(token: str) -> bool:
    """Whether a word looks like what a noun does, such as "running"."""
    return len(token) > 5 and token.endswith("ing") and token not in NOT_ACTIONS


def plural(noun: str) -> str:
    """The plural of a singular noun."""
    if noun in _SINGULARS:
        return _SINGULARS[noun]
    if noun.endswith(("s", "x", "z", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2:-1] not in set("aeiou"):
        return noun[:-1] + "ies"
    return noun + "s"


def article(text: str) -> str:
    """A text with its indefinite article."""
    return f"{'an' if text[:1] in set('aeiou') and not text.startswith('uni') else 'a'} {text}"


@dataclass(frozen=True)
class Vocabulary:
    """Nouns with their singular, and attributes, of some captions."""

    nouns: dict[str, str]
    """By noun as written: its singular."""
    attributes: frozenset[str]
    countable: frozenset[str]
    """Singular nouns that "a" or "an" stands before, or that have a plural in the captions."""
    actions: dict[str, str]
    """By verb as written, like "runs" and "run": its form in -ing."""


def vocabulary(captions: Iterable[str]) -> Vocabulary:
    """The nouns and attributes of captions, by where each word stands."""
    parsed = [tokens(caption) for caption in captions]
    total, ending, alone, counted = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for words in parsed:
        total.update(words)
        for first, part, ended in _parts(words):
            ending[part[-1]] += ended
            # A verb ends a part as well ("a dog runs in"), but no article stands right before it, and not so often.
            if ended and len(part) == 1:
                alone[part[0]] += 1
                counted[part[0]] += first in ("a", "an")
    nouns = {
        word
        for word, count in ending.items()
        if count >= (max(LEAST, total[word] / 4) if alone[word] >= LEAST else max(LEAST, 0.8 * total[word]))
        if is_word(word) and not is_action(word)
    }
    after_noun, before_noun = Counter[str](), Counter[str]()
    for words in parsed:
        for first, second in pairwise(words):
            after_noun[second] += first in nouns
            before_noun[first] += second in nouns
    nouns = {word for word in nouns if 2 * after_noun[word] < total[word]}
    attributes = {word for word in before_noun if is_word(word) and 2 * after_noun[word] < total[word]}
    # "soccer ball", "red car": often before a noun, and an action or a noun only where that is mostly so.
    attributes = {
        word
        for word in attributes
        if before_noun[word] >= max(LEAST, total[word] / (2 if word in nouns or is_action(word) else 4))
    }
    nouns -= attributes
    singulars = {word: _singular(word, nouns) for word in nouns}
    with_plural = {one for word, one in singulars.items() if word != one}
    often = {one for one, count in counted.items() if count >= LEAST}
    return Vocabulary(singulars, frozenset(attributes), frozenset(often | with_plural), _actions(total))


def _parts(words: Sequence[str]) -> Iterable[tuple[str, list[str], bool]]:
    """An article or number, the one to three words after it, and whether what follows them ends such a part."""
    for place, word in enumerate(words):
        if word not in STARTS:
            continue
        part = []
        for following in words[place + 1 : place + 5]:
            if following in BOUNDARIES or not following[0].isalpha() or is_action(following):
                break
            part.append(following)
        stop = place + 1 + len(part)
        if 0 < len(part) < 4:
            ended = stop >= len(words) or words[stop] in BOUNDARIES or not words[stop][0].isalpha()
            yield word, part, ended or is_action(words[stop])


def _actions(total: Counter[str]) -> dict[str, str]:
    """By verb as written its form in -ing, of those that stand in the captions."""
    actions: dict[str, str] = {}
    for action in (word for word, count in total.items() if is_action(word) and count >= LEAST):
        stem = action[:-3]
        # running, riding, jumping: of the stems that captions have, the one with most places.
        stems = [stem, stem + "e", *([stem[:-1]] if stem[-1] == stem[-2] else [])]
        verb = max(stems, key=lambda word: total[word] + total[word + "s"] + total[word + "es"])
        actions |= {form: action for form in (verb, verb + "s", verb + "es") if total[form]}
        actions[action] = action
    return actions


def _singular(noun: str, nouns: set[str]) -> str:
    """The singular of a noun, where that is a noun of the captions; else the noun as it is."""
    if noun in _PLURALS:
        return _PLURALS[noun]
    endings = [(noun[:-1], "s"), (noun[:-2], "es"), (noun[:-3] + "y", "ies")]
    for stem, ending in endings:
        if noun.endswith(ending) and stem in nouns and not noun.endswith("ss"):
            return stem
    return noun
