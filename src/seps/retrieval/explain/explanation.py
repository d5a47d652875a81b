"""Explanations of scores: shares (`shares`, `maxsim`) by words of the caption and the description."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from seps.retrieval.languages import is_stop_word


@dataclass
class DescriptionPart:
    """One word of the image's description."""

    word: str
    special: bool
    """A mark of the tokenizer and not a word of the text."""
    contribution: float
    """Its part of the score."""
    stop: bool = field(init=False)
    """A function word ("the", "is", "of") or a mark, which no picture shows."""

    def __post_init__(self) -> None:
        self.stop = self.special or is_stop_word(self.word)


@dataclass
class WordPart(DescriptionPart):
    """One word of the caption, and what it adds to the score."""

    heat: list[float]
    """What of its contribution comes from each cell of the patch grid, row by row."""


@dataclass
class Explanation:
    """A score and what it is made of.

    `sum(words) + rest + added` and `sum(patches) + elsewhere + sum(description) + rest + added` both are the score.
    """

    caption: str
    score: float
    grid: tuple[int, int]
    words: list[WordPart]
    """Of a dual encoder one entry, the whole sentence: it has one vector."""
    patches: list[float]
    """What each cell of the grid adds."""
    kept: list[bool]
    """Cells whose patches the caption kept, or, with head "maxsim", some word chose; of a dual encoder all that it
    sees."""
    stored: list[bool]
    """Cells whose patches the store holds; all, unless indexing left some out. Of a dual encoder those that it sees:
    some crop the picture."""
    groups: list[list[float]]
    """Merge weights of each group over the cells; none where nothing is merged."""
    description: list[DescriptionPart]
    elsewhere: float
    """Prefix tokens, and patches left out at indexing time; of a dual encoder all that its last attention did not take
    from patches."""
    rest: float
    """What belongs to no word: the MLP of Eq. 5, where the model has it, or what an alignment of one's own adds to the
    means; of a dual encoder the constant of the description's part."""
    terms: dict[str, float]
    """The same score by its terms."""
    added: float = 0.0
    """What a store's search adds to the model's score; `terms` has its parts by name ("lexical",
    "background")."""
    found_words: dict[str, float] = field(default_factory=dict)
    """Of the lexical term: the words of the caption that occur in the description or in the picture, and what each
    adds."""
    note: str = ""
    """What took no part in the score, as a sentence; empty where nothing was left out."""
    background: float = 0.0
    """Of `added`: what the bank of background queries adds, the same for every sentence; 0 outside a store, or without
    a bank."""

    whole_sentence: bool = False
    """Whether the sentence has one vector and no words of its own, as with a dual encoder."""
    described_by: list[str] = field(default_factory=list)
    """Sources of the texts in a store, like "jsonl", "xmp title" or "text in the picture"."""
    text_in_picture: str = ""
    """That a store has of it, a line per line."""
    words_in_picture: list[str] = field(default_factory=list)
    """Those of `found_words` that stand in it."""

    @property
    def shown_words(self) -> tuple[list[WordPart], list[WordPart]]:
        """The words that a picture can show, in the order of the sentence, and the others (`DescriptionPart.stop`).

        The encoder writes the meaning of a sentence into all its tokens, so that "the" may add more than "dog": a list
        of words for people names the first ones and gives what the others add in one sum. Where a sentence has no other
        word, function words are shown.
        """
        shown = [part for part in self.words if not part.stop]
        return (shown, [part for part in self.words if part.stop]) if shown else (list(self.words), [])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)
