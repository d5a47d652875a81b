"""Finds answers that are no descriptions: empty, a loop, a refusal, cut off at the token limit."""

from __future__ import annotations

import re

from .config import BadAnswer

# A description that opens with a reservation and then goes on at length is still a description.
REFUSAL_WORDS = 80
LONGEST_PERIOD = 40

# Languages written without spaces count a character as a word.
_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+(?:['\u2019][^\W_]+)*")
_SENTENCE = re.compile(r"[.!?\u3002\uff01\uff1f\n]+")
_ABLE = (
    r"(?:assist|help\b(?!\s+but)|provide|describe|see\b|view|process|analy[sz]e|comply|fulfil|generate|identify"
    r"|answer|access|continue|create|offer|give|do\s+that|discuss|engage|interpret|look\s+at|open|display)"
)
_REFUSAL = re.compile(
    rf"""^\W*(?:
        (?:i\s*[' ]?\s*a?m\s+)?(?:so\s+|very\s+)?sorry\b
      | (?:i\s+apologi[sz]e|my\s+apologies|apologies)\b
      | (?:unfortunately,?\s+|however,?\s+|sorry,?\s+(?:but\s+)?)?
        (?:i|we)\s+(?:can\s*not|can't|could\s*not|couldn't|won't|will\s+not|do\s+not|don't)\s+(?:\w+\s+)??{_ABLE}
      | (?:unfortunately,?\s+)?i\s*(?:'m|\s+am)\s+(?:unable|not\s+able|not\s+allowed|not\s+permitted)\b
      | (?:unfortunately,?\s+)?i\s+(?:do\s+not|don't)\s+(?:actually\s+)?have\s+(?:the\s+)?
        (?:ability|capability|access|permission)
      | as\s+(?:an?|a\s+large)\s+(?:ai|artificial|language|text|assistant)\b
      | i\s*(?:'m|\s+am)\s+(?:just\s+|only\s+)?(?:an?\s+)(?:ai|artificial|language|text)\b
      | \u62b1\u6b49 | \u5bf9\u4e0d\u8d77 | \u5f88\u9057\u61be | \u6211\u65e0\u6cd5 | \u6211\u4e0d\u80fd
    )""",
    re.IGNORECASE | re.VERBOSE,
)


def words_of(text: str) -> list[str]:
    """Split a text into words in lower case; of Chinese, Japanese and Korean every character is a word."""
    return _TOKEN.findall(text.lower())


def answer_problem(text: str, finish: str) -> BadAnswer | None:
    """Why an answer is no description: "empty", "loop", "refusal" or "cut"; None for a good one.

    `finish` says how the model ended: by itself ("stop"), at the token limit ("length") or by a filter ("filter"). A
    text that repeats itself until the limit is a "loop" and not "cut": more tokens would not help.
    """
    words = words_of(text)
    if finish == "filter":
        return "refusal"
    if not words:
        return "empty"
    if is_refusal(text, words):
        return "refusal"
    if is_loop(text, words):
        return "loop"
    return "cut" if finish == "length" else None


def is_refusal(text: str, words: list[str]) -> bool:
    """Whether a short text opens by saying that it will not or cannot describe the image."""
    return len(words) <= REFUSAL_WORDS and _REFUSAL.match(text.replace("\u2019", "'")) is not None


def is_loop(text: str, words: list[str]) -> bool:
    """Whether a text repeats itself: a phrase over and over, a sentence three times, or few distinct 4-grams."""
    if _has_run(words):
        return True
    sentences = [tuple(words_of(part)) for part in _SENTENCE.split(text)]
    long = [sentence for sentence in sentences if len(sentence) >= 4]
    if any(long.count(sentence) >= 3 for sentence in set(long)):
        return True
    grams = [tuple(words[k : k + 4]) for k in range(len(words) - 3)]
    return len(grams) >= 40 and len(set(grams)) < 0.5 * len(grams)


def _has_run(words: list[str]) -> bool:
    """Whether a phrase is followed by itself at least three times, over eight words or more."""
    for period in range(1, min(LONGEST_PERIOD, len(words) // 4) + 1):
        run, need = 0, max(3 * period, 8)
        for here, before in zip(words[period:], words, strict=False):
            run = run + 1 if here == before else 0
            if run >= need:
                return True
    return False
