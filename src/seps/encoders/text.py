"""Text encoders: texts to per-token features, with the map from tokens back to words.

Shapes: B texts, L tokens (padded to the longest text of the batch), C width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from seps.parsing import MAX_CHARACTERS

from .vision import drop_pooling
from .weights import EncoderUnavailable, quiet, transformers_module

_WORD = re.compile(r"\w+(?:['\u2019\-]\w+)*|[^\w\s]")
_PIECE_MARKS = re.compile(r"^(?:##|▁+|Ġ)|</w>$")
Span = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class TextBatch:
    """Tokenised texts. `ids` (B, L) long, `mask` (B, L) bool, True where a token is valid ([CLS], [SEP] too).

    `words[b]` are the words of text b; `word_of_token[b][l]` is the index of a token's word in it, or None
    for special tokens and padding.
    """

    ids: Tensor
    mask: Tensor
    word_of_token: list[list[int | None]]
    words: list[list[str]]


class TextEncoder(nn.Module):
    """A transformers text model (BERT-like, or the text tower of CLIP or SigLIP) and its tokenizer.

    Every family gets the attention mask, so that a text's features never depend on the rest of its batch.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: int | None = None) -> None:
        super().__init__()
        config: Any = model.config
        self.model = drop_pooling(model)
        self.tokenizer = tokenizer
        # AltCLIP's text tower ends with a projection of another width than its blocks have.
        self.width = int(getattr(config, "project_dim", None) or config.hidden_size)
        longest = longest_text(config, tokenizer)
        if max_length is not None and not 2 < max_length <= longest:
            raise ValueError(f"max_length must be from 3 to {longest} for this text encoder; got {max_length}.")
        self.max_length = max_length or longest

    def tokenize(self, texts: Sequence[str]) -> TextBatch:
        """Texts to a padded batch, cut at `MAX_CHARACTERS` characters and at `max_length` tokens.

        Raises ValueError without texts or tokens, for one text that is not in a list, and for a text that is not
        valid Unicode.
        """
        texts = [whole_characters(text)[:MAX_CHARACTERS] for text in several_texts(texts)]
        if not texts:
            raise ValueError("tokenize takes a list of one or more texts.")
        fast = bool(getattr(self.tokenizer, "is_fast", False))
        encoded = self.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=True,
            return_special_tokens_mask=True,
            return_offsets_mapping=fast,
        )
        mask = torch.tensor(encoded["attention_mask"], dtype=torch.bool)
        empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"Text {empty[0]} ({texts[empty[0]]!r}) has no tokens.")
        special = encoded["special_tokens_mask"]
        words, word_of_token = [], []
        for row, text in enumerate(texts):
            spans = word_spans(text)
            offsets = (
                [tuple(span) for span in encoded["offset_mapping"][row]]
                if fast
                else piece_spans(text, self.tokenizer.convert_ids_to_tokens(encoded["input_ids"][row]), special[row])
            )
            words.append([text[start:end] for start, end in spans])
            word_of_token.append(words_of_tokens(offsets, special[row], spans))
        return TextBatch(torch.tensor(encoded["input_ids"], dtype=torch.long), mask, word_of_token, words)

    @property
    def special_ids(self) -> list[int]:
        """Tokens that are no words: start, end, separator, padding. An unknown word is a word."""
        names = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
        found = {getattr(self.tokenizer, name, None) for name in names}
        return sorted(token for token in found if token is not None)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token ids and mask (B, L) -> features (B, L, C); those outside the mask mean nothing."""
        features: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return features


def several_texts(texts: Sequence[T]) -> list[T]:
    """The texts as a list. Raises ValueError for one text, whose letters would be taken for texts."""
    if isinstance(texts, str | bytes):
        raise ValueError(f"A list of texts is required, but got one text: write [{texts[:40]!r}].")
    return list(texts)


def whole_characters(text: str) -> str:
    """Return the text as it is, or raise ValueError: half of a surrogate pair in it cannot be tokenized.

    Bytes on a command line that are not UTF-8 arrive in this form. Raises ValueError also for what is no text.
    """
    if not isinstance(text, str):
        raise ValueError(f"Every text must be a str, and one is {text!r}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text {text!r} is not valid Unicode: it holds half of a character. Write it again in UTF-8."
        ) from error
    return text


def word_spans(text: str) -> list[Span]:
    """Character spans of the words and punctuation marks of a text, the same for every tokenizer."""
    return [match.span() for match in _WORD.finditer(text)]


def words_of_tokens(offsets: Sequence[Span], special: Sequence[int], spans: Sequence[Span]) -> list[int | None]:
    """For each token the first word that its characters overlap, or None. Both lists run left to right."""
    found: list[int | None] = []
    word = 0
    for (start, end), is_special in zip(offsets, special, strict=True):
        if is_special or end <= start:
            found.append(None)
            continue
        while word < len(spans) and spans[word][1] <= start:
            word += 1
        found.append(word if word < len(spans) and spans[word][0] < end else None)
    return found


def piece_spans(text: str, pieces: Sequence[str], special: Sequence[int]) -> list[Span]:
    """Character spans of subword pieces by finding them one after another, for tokenizers without offsets."""
    lowered, cursor = text.lower(), 0
    spans: list[Span] = []
    for piece, is_special in zip(pieces, special, strict=True):
        bare = _PIECE_MARKS.sub("", piece).lower()
        start = -1 if is_special or not bare else lowered.find(bare, cursor)
        if start < 0:
            spans.append((0, 0))
        else:
            cursor = start + len(bare)
            spans.append((start, cursor))
    return spans


def longest_text(config: Any, tokenizer: Any) -> int:
    """The most tokens a text may have: the smaller of the model's positions and the tokenizer's own limit."""
    positions = int(getattr(config, "max_position_embeddings", None) or 512)
    # RoBERTa-like models number positions from pad + 1 and have that many fewer to give.
    if "roberta" in config.model_type or config.model_type in ("camembert", "mpnet", "altclip_text_model"):
        positions -= int(config.pad_token_id) + 1
    return min(positions, int(tokenizer.model_max_length))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, with a padding token. Raises EncoderUnavailable when it cannot be loaded."""
    transformers = transformers_module()
    known = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
    if not any((folder / name).is_file() for name in known):
        raise EncoderUnavailable(
            f"The folder {folder} has no tokenizer ({', '.join(known)}). Save one there with "
            "tokenizer.save_pretrained(folder)."
        )
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # a missing sentencepiece, an unknown class, broken JSON: many types
        tokenizer = _plain_tokenizer(folder, error)
    if tokenizer.pad_token is None:
        raise EncoderUnavailable(
            f"The tokenizer in {folder} has no padding token: name a pad_token in its tokenizer_config.json."
        )
    tokenizer.padding_side = "right"
    return tokenizer


def _plain_tokenizer(folder: Path, error: Exception) -> Any:
    if (folder / "tokenizer.json").is_file():
        try:
            return transformers_module().PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as second:  # the first error is the one that tells the user more
            error.__context__ = second
    raise EncoderUnavailable(
        f"The tokenizer in {folder} cannot be loaded: {type(error).__name__}: {str(error).strip()[:300]}. "
        "If a package is missing, install it (SigLIP: pip install sentencepiece)."
    ) from error
