"""BERT's tokenizer without importing transformers: that of `tokenizer.json`, read by the package tokenizers.

It takes the calls of transformers' tokenizers that this library makes (tests/encoders/test_bert.py compares both).
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from seps.files import load_json

from .weights import EncoderUnavailable

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


class WordPieceTokenizer:
    """BERT's WordPiece tokenizer: texts to token ids, with [CLS] in front and [SEP] behind.

    Raises EncoderUnavailable for a folder without a `tokenizer.json` that can be read.
    """

    is_fast = True
    """It tells the characters of each token, as transformers' fast tokenizers do."""
    padding_side = "right"
    cls_token, sep_token, pad_token, mask_token, unk_token = "[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]"

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise EncoderUnavailable(
                f"This encoder needs the package tokenizers, which cannot be imported ({error}). "
                "Install it: pip install tokenizers"
            ) from error
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise EncoderUnavailable(f"The folder {folder} has no tokenizer ({path.name}).")
        try:
            self._inner = Tokenizer.from_file(str(path))
            stated = load_json(folder / "tokenizer_config.json", finite=False)
            self.model_max_length = int(stated["model_max_length"])
        except Exception as error:  # tokenizers raises plain Exception
            raise EncoderUnavailable(
                f"The tokenizer in {folder} cannot be loaded: {type(error).__name__}: {str(error).strip()[:300]}."
            ) from error
        self.folder = folder
        self._inner.no_padding()
        self._inner.no_truncation()
        self._longest: int | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._inner.get_vocab_size())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @property
    def cls_token_id(self) -> int:
        """Of [CLS], which stands in front of every text."""
        return self._id(self.cls_token)

    @property
    def sep_token_id(self) -> int:
        """Of [SEP], which stands behind every text."""
        return self._id(self.sep_token)

    @property
    def pad_token_id(self) -> int:
        """Of [PAD], with which the shorter texts of a batch are filled up."""
        return self._id(self.pad_token)

    @property
    def mask_token_id(self) -> int:
        """Of [MASK], which stands for a hidden word."""
        return self._id(self.mask_token)

    @property
    def unk_token_id(self) -> int:
        """Of [UNK], which stands for a word that has no pieces."""
        return self._id(self.unk_token)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of [UNK], [SEP], [PAD], [CLS] and [MASK]."""
        names = (self.unk_token, self.sep_token, self.pad_token, self.cls_token, self.mask_token)
        return [self._id(name) for name in names]

    def _id(self, token: str) -> int:
        found = self._inner.token_to_id(token)
        if found is None:
            raise EncoderUnavailable(f"The tokenizer in {self.folder} has no token {token}.")
        return int(found)

    def __call__(
        self, texts: Sequence[str], *, max_length: int | None = None, padding: bool = True, **_: Any
    ) -> dict[str, list[list[Any]]]:
        """Lists per text: `input_ids`, `attention_mask`, `special_tokens_mask` and `offset_mapping`.

        Texts are cut at `max_length` tokens and, with `padding`, filled up to the longest.
        """
        with self._lock:
            if max_length != self._longest:
                if max_length is None:
                    self._inner.no_truncation()
                else:
                    self._inner.enable_truncation(max_length)
                self._longest = max_length
            encoded = self._inner.encode_batch(list(texts))
        longest = max((len(one.ids) for one in encoded), default=0) if padding else 0
        found: dict[str, list[list[Any]]] = {}
        for name, part, filling in (
            ("input_ids", "ids", self.pad_token_id),
            ("attention_mask", "attention_mask", 0),
            ("special_tokens_mask", "special_tokens_mask", 1),
            ("offset_mapping", "offsets", (0, 0)),
        ):
            rows = [list(getattr(one, part)) for one in encoded]
            found[name] = [row + [filling] * (longest - len(row)) for row in rows]
        return found

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """The word pieces with these ids; "##" in front marks one that continues a word."""
        return [str(self._inner.id_to_token(int(one))) for one in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids, special tokens included."""
        return str(self._inner.decode([int(one) for one in ids], skip_special_tokens=False))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files from which this class, and transformers, make the same tokenizer."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, Path(folder) / name)
