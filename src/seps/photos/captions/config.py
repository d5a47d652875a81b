"""The settings of a captioning run: the only place their defaults live."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from seps.training.config import CheckedSettings

BackendKind = Literal["transformers", "openai"]
BadAnswer = Literal["empty", "loop", "refusal", "cut"]

PROMPT = "Provide a comprehensive description of this image"
MODEL = "llava-hf/llava-1.5-7b-hf"
CAPTIONERS = {
    "smolvlm-256m": ("HuggingFaceTB/SmolVLM-256M-Instruct", "0.26 B parameters, 0.5 GB: for a laptop"),
    "smolvlm-500m": ("HuggingFaceTB/SmolVLM-500M-Instruct", "0.5 B, 1 GB: for a laptop, slower"),
    "llava-7b": (MODEL, "7 B, 14 GB: for a GPU"),
}
"""Models by a short name: hub id, and what they need. Their speed is not measured here."""
ACCEPTABLE: tuple[BadAnswer, ...] = get_args(BadAnswer)[1:]  # an empty answer describes nothing
LOCAL_URL = "http://localhost:8000/v1"


@dataclass(frozen=True)
class Sampling(CheckedSettings):
    """How one answer is drawn; the published settings are the defaults. Raises ValueError naming the field.

    temperature 0 always takes the likeliest token. max_tokens: new tokens at most, after which an answer is cut.
    """

    prompt: str = PROMPT
    temperature: float = 0.2
    top_p: float = 0.9
    max_tokens: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        self._require("prompt", bool(self.prompt.strip()), "say what the model shall write")
        self._require("temperature", 0.0 <= self.temperature <= 2.0, "choose a number from 0 to 2")
        self._require("top_p", 0.0 < self.top_p <= 1.0, "choose a number above 0, at most 1")
        self._require("max_tokens", self.max_tokens >= 1, "choose at least 1")
        self._require("seed", 0 <= self.seed < 2**31, "choose a number from 0 to 2147483647")

    def retry(self, attempt: int) -> Sampling:
        """The settings of attempt 0, 1, ...: another seed and a higher temperature each time."""
        if attempt == 0:
            return self
        warmer = max(self.temperature, min(1.0, round(self.temperature + 0.2 * attempt, 6)))
        return Sampling(self.prompt, warmer, self.top_p, self.max_tokens, (self.seed + attempt) % 2**31)


@dataclass(frozen=True)
class CaptionConfig(CheckedSettings):
    """How answers are drawn, and which are taken as descriptions. Raises ValueError naming field, value and remedy.

    bad_retries: how often a bad answer (see quality.py) is asked for again before its image is set aside.
    accept: kinds of bad answers that are taken all the same, e.g. ("cut",).
    retry_failed: describe images again that an earlier run set aside for their bad answers.
    mixed: allow another model or other settings than the lines that are already in the file.
    """

    sampling: Sampling = field(default_factory=Sampling)
    bad_retries: int = 2
    accept: tuple[BadAnswer, ...] = ()
    retry_failed: bool = False
    mixed: bool = False

    def __post_init__(self) -> None:
        self._require("bad_retries", self.bad_retries >= 0, "choose 0 or more")
        self._require("accept", set(self.accept) <= set(ACCEPTABLE), f"choose from {', '.join(ACCEPTABLE)}")


@dataclass(frozen=True)
class BackendConfig(CheckedSettings):
    """Who writes. Raises ValueError naming the field, its value and the remedy.

    model: transformers: a folder or a hub id; openai: the server's name for it, "" takes the only one it has.
    url: openai: the address before /chat/completions, http or https.
    batch_size: transformers: images per generate call. parallel: openai: requests at once.
    retries: openai: how often a request is sent again after it failed (not after a bad answer).
    backoff: openai: seconds of the first pause before a request is sent again; it doubles each time.
    timeout: openai: seconds for one whole answer.
    give_up_after: the run stops after this many failures in a row, or images in a row with bad answers.
    max_side: images with a longer side are made smaller before the model gets them; 0 never.
    device, dtype: transformers: "auto" chooses the GPU if there is one, and the checkpoint's own dtype.
    extra: openai: keys added to each request; None removes one.
    """

    kind: BackendKind = "transformers"
    model: str = MODEL
    url: str = LOCAL_URL
    api_key: str = field(default="", repr=False)
    batch_size: int = 8
    parallel: int = 8
    retries: int = 5
    timeout: float = 120.0
    backoff: float = 1.0
    give_up_after: int = 30
    max_side: int = 0
    device: str = "auto"
    dtype: str = "auto"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._require_choice("kind", BackendKind)
        self._require_each("batch_size parallel give_up_after", lambda v: v >= 1, "choose at least 1")
        self._require_each("retries max_side backoff", lambda v: v >= 0, "choose 0 or more")
        self._require("timeout", 0 < self.timeout < math.inf, "choose a number of seconds")
        if self.kind == "transformers":
            self._require("model", bool(self.model), "name a folder or a hub id")
        else:
            self._check_server()

    def _check_server(self) -> None:
        address = urlsplit(self.url)
        good = address.scheme in ("http", "https") and bool(address.hostname)
        self._require("url", good, f"write it like {LOCAL_URL}")
        # A key with a line feed or a letter outside ASCII would break the header it is sent in.
        if self.api_key and not re.fullmatch(r"[\x21-\x7e]+", self.api_key):
            raise ValueError("The API key holds spaces or characters outside ASCII. Check the file it comes from.")
