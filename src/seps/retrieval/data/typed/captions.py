"""Typed queries made from the captions of a data set, by rules.

| query | example | right: a caption says | unknown: captions |
|---|---|---|---|
| noun, attribute | dog, dogs, a dog | the word, singular or plural | have a word that stands for it (puppy) |
| attribute, noun | red car, a red car | one right before the other | give the noun no attribute |
| noun, action | dog running, a dog running | the action up to two words after the noun | give the noun no action |
| two nouns | child on swing, a child on a swing | both, the preposition between | have both, otherwise |

Every other image is wrong. An image's sentences are its captions and those of its description, which in sets such as
Flickr8k are further captions (`sentences_of`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import permutations

from ..batches import sentences
from ..records import ImageRecord, RetrievalDataset
from .queries import TypedQuery
from .words import PREPOSITIONS, Vocabulary, article, is_action, plural, tokens, vocabulary

FEWEST = 5
"""Images that a query is right for at least."""
MOST = 0.5
"""Part of the images that a query is right for at most: beyond it nothing is looked for."""
IMPLIED = 0.3
"""Part of the images with one word that have another, in other captions, from which the first stands for the second."""
GAP = 2
"""Words between a noun and its action, such as "is" or "are"."""
Key = tuple[str, ...]
"""Of a query: ("word", dog), ("attribute", red, car), ("action", dog, running) or ("pair", child, on, swing)."""


def queries_of_captions(
    dataset: RetrievalDataset, *, fewest: int = FEWEST, descriptions: bool = True
) -> tuple[TypedQuery, ...]:
    """Typed queries with at least `fewest` right images, in the order of the alphabet.

    `descriptions`: whether sentences of descriptions count as captions.
    """
    said = [sentences_of(record, descriptions) for record in dataset.records]
    known = vocabulary(sentence for every in said for sentence in every)
    places: dict[Key, set[int]] = defaultdict(set)
    beside: dict[tuple[str, str], set[int]] = defaultdict(set)
    for image, every in enumerate(said):
        for sentence in every:
            keys = set(keys_of(sentence, known))
            for key in keys:
                places[key].add(image)
            named = [key[1] for key in keys if key[0] == "word"]
            for first, second in permutations(named, 2):
                beside[first, second].add(image)
    unknown = _Unknown(places, beside)
    ids = [record.id for record in dataset.records]
    queries = []
    for key in sorted(places):
        right = places[key]
        if fewest <= len(right) <= MOST * len(ids):
            rest = sorted(unknown.of(key) - right)
            texts = forms(key, known)
            queries.append(TypedQuery(texts, tuple(ids[i] for i in sorted(right)), tuple(ids[i] for i in rest)))
    return tuple(queries)


def sentences_of(record: ImageRecord, descriptions: bool = True) -> list[str]:
    """The captions of an image and the sentences of its description."""
    return [*record.captions, *(sentences(record.dense) if descriptions and record.dense else [])]


def keys_of(sentence: str, known: Vocabulary) -> Iterator[Key]:
    """The queries that a sentence says yes to."""
    words = tokens(sentence)
    # One place per word: its singular where it is a noun.
    nouns = [known.nouns.get(word) for word in words]
    for place, word in enumerate(words):
        noun = nouns[place]
        if word in known.attributes:
            yield "word", word
        if noun is None:
            continue
        yield "word", noun
        if place and words[place - 1] in known.attributes:
            yield "attribute", words[place - 1], noun
        action = None if _is_object(words, place) else _action(words, nouns, place, known)
        if action is not None:
            yield "action", noun, action
        yield from _pairs(words, nouns, place)


def _action(words: Sequence[str], nouns: Sequence[str | None], place: int, known: Vocabulary) -> str | None:
    """What the noun at a place does, up to `GAP` words later, in -ing."""
    for later in range(place + 1, min(place + 2 + GAP, len(words))):
        word = words[later]
        # "two dogs run" and "a dog runs", but a "ski jump" is a noun.
        does = word.endswith("s") or words[place] != nouns[place]
        if is_action(word) or (later == place + 1 and does and word in known.actions):
            return known.actions.get(word, word)
        if nouns[later] is not None or not word[0].isalpha():
            break
    return None


def _is_object(words: Sequence[str], place: int) -> bool:
    """Whether a preposition or "wearing" leads to the noun at a place: "a man in a hat walking" is about the man."""
    before = words[max(0, place - 4) : place]
    return any(word in PREPOSITIONS or word in ("of", "wearing") for word in before)


def _pairs(words: Sequence[str], nouns: Sequence[str | None], place: int) -> Iterator[Key]:
    """Two nouns with a preposition right after the first, articles and attributes left out."""
    if place + 1 >= len(words) or words[place + 1] not in PREPOSITIONS:
        return
    for later in range(place + 2, min(place + 5, len(words))):
        second = nouns[later]
        if second is not None:
            # "a field of grass": the last noun of a compound is the one that is meant, the first is enough here.
            yield "pair", str(nouns[place]), words[place + 1], second
            return
        if words[later] in PREPOSITIONS or not words[later][0].isalpha():
            return


def forms(key: Key, known: Vocabulary) -> tuple[str, ...]:
    """What is typed for a query: without and with articles, and in the plural."""
    kind, *words = key

    def with_article(noun: str, text: str) -> str:
        return article(text) if noun in known.countable else text

    if kind == "word":
        noun = words[0]
        if noun in known.attributes and noun not in known.nouns:
            return (noun,)
        many = [plural(noun)] if noun in known.countable and known.nouns.get(plural(noun)) == noun else []
        texts = [noun, with_article(noun, noun), *many]
    elif kind == "attribute":
        text, noun = " ".join(words), words[1]
        texts = [text, with_article(noun, text)]
        if known.nouns.get(plural(noun)) == noun:
            texts.append(f"{words[0]} {plural(noun)}")
    elif kind == "action":
        text, noun = " ".join(words), words[0]
        texts = [text, with_article(noun, text)]
        if known.nouns.get(plural(noun)) == noun:
            texts.append(f"{plural(noun)} {words[1]}")
    else:
        first, preposition, second = words
        whole = f"{with_article(first, first)} {preposition} {with_article(second, second)}"
        texts = [" ".join(words), whole]
    return tuple(dict.fromkeys(texts))


class _Unknown:
    """Of which images the captions leave open whether a query fits."""

    def __init__(self, places: dict[Key, set[int]], beside: dict[tuple[str, str], set[int]]) -> None:
        self.places = places
        self.others: dict[tuple[str, str], set[int]] = defaultdict(set)
        """By kind and noun: images whose captions give the noun an attribute, an action, or a place."""
        by_image: dict[int, list[str]] = defaultdict(list)
        for key, images in places.items():
            if key[0] == "word":
                for image in images:
                    by_image[image].append(key[1])
            elif key[0] != "pair":
                self.others[key[0], key[2] if key[0] == "attribute" else key[1]] |= images
        together = Counter[tuple[str, str]]()
        for words in by_image.values():
            together.update(permutations(words, 2))
        self.implied: dict[str, set[int]] = defaultdict(set)
        """By word: images with another word that mostly stands for it."""
        for (first, second), count in together.items():
            # "puppy" and "dog" come in different captions of an image, "ball" and "dog" in one.
            instead = count - len(beside[first, second]) if (first, second) in beside else count
            if instead >= IMPLIED * len(places["word", first]):
                self.implied[second] |= places["word", first]

    def of(self, key: Key) -> set[int]:
        """The images, right ones among them."""
        kind, *words = key
        if kind == "word":
            return self.implied[words[0]]
        if kind == "pair":
            first, second = self._maybe(words[0]), self._maybe(words[2])
            return first & second
        noun = words[1] if kind == "attribute" else words[0]
        return self._maybe(noun) - self.others[kind, noun]

    def _maybe(self, noun: str) -> set[int]:
        """Images that have a noun, or may have it."""
        return self.places["word", noun] | self.implied[noun]
