"""Bring the translations of the single file in line with the sources: `python tools/translations.py`.

Beside each module, `NAME.zh.yaml` gets an entry for every docstring and note, in the order of the source. New ones have
an empty `zh`, to be filled in; entries that the source no longer says are moved to the end, to be used up and deleted.
The exit status is 1 where either is left.
"""

from __future__ import annotations

from pathlib import Path

import seps
from seps.modules.language import LANGUAGES, Translation
from seps.modules.writer import check_translations

ROOT = Path(seps.__file__).parent


def block(text: str, indent: str = "    ") -> str:
    """A YAML block of `text`."""
    lines = "\n".join(f"{indent}{line}".rstrip() for line in text.splitlines())
    return f"|-\n{lines}" if text else '""'


def write(path: Path, translation: Translation) -> None:
    """Write the entries of `translation` in the order of their use, the stale ones last."""
    order = [*translation.used, *translation.stale]
    pairs = [f"- en: {block(said)}\n  zh: {block(translation.entries.get(said, ''))}\n" for said in order]
    path.write_text("".join(pairs), encoding="utf-8")


def main() -> int:
    """Rewrite all files, and print what is left to do in each."""
    left = 0
    for language in LANGUAGES[1:]:
        for name, translation in check_translations(ROOT, language).items():
            if translation.used or translation.entries:
                write(ROOT / f"{name}.{language}.yaml", translation)
            left += len(translation.missing) + len(translation.stale)
            if translation.missing or translation.stale:
                print(f"{name}.{language}.yaml: {len(translation.missing)} to fill in, {len(translation.stale)} stale")
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
