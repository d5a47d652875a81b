"""The parser of all commands: its mistakes are one sentence, and it takes settings (`--section.name value`)."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from seps.cli.shared.argtypes import input_file

_OVERRIDE = re.compile(r"\w+(\.\w+)+=.*", re.DOTALL)


class UsageError(ValueError):
    """Options that do not fit; the message says which."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it; a mistyped option gets a suggestion.

    The fields of the dataclass `settings` are options, too: `--section.name value`, `--section.name=value` or
    `section.name=value`, anywhere. They come back as `options.settings`, name to text, for `seps.settings.load`, which
    checks them.
    """

    def __init__(self, *words: Any, settings: Any = None, of_run: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*words, **options)
        self.settings, self.of_run = settings, of_run
        """`of_run`: the settings that a command for a trained model lists; they are those of its run unless given."""
        self.intermixed = False
        """Whether options may stand between the words, as in `seps find "a dog" -k 3 photos`."""
        self.sentence = False
        """Whether the first word is a sentence, which is put into quotes where it has several words."""
        self._words: list[str] = []
        """What was typed."""
        self._dashed = ""
        """The first word with one dash that is no option."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; see `intermixed`."""
        if self.intermixed:
            return self.parse_intermixed_args(args, namespace)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, which `seps.cli.main` prints."""
        if message.endswith("expected one argument") and self._dashed:
            message += f"; a value that begins with a dash is written --option={self._dashed}"
        elif message.startswith("unrecognized arguments: -") and self._dashed:
            message += f"; a name that begins with a dash is written ./{self._dashed}, and a sentence after --"
        elif message.startswith("unrecognized arguments: ") and self.sentence:
            message += f"; a sentence of several words goes into quotes: {self.prog} {self._sentence()}"
        raise UsageError(f"{ended(message)} ({self.prog} --help lists the options.)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        values: dict[str, str] = {}
        self._words = self._words or list(args or ())
        if args is not None and self.settings and not {"-h", "--help"} & {*args}:
            args, values = self._take_settings(args)
        known = self._option_string_actions
        dashed = (word for word in args or () if word[:1] == "-" and word[:2] not in ("-", "--") and word not in known)
        self._dashed = self._dashed or next(dashed, "")
        # A mistyped option first: "--store is required" would not help the one who wrote --sotre.
        if args is not None and self._subparsers is None:
            self._refuse_unknown(args)
        options, left = super().parse_known_args(args, namespace)
        if self.settings:
            options.settings = values
        return options, left

    def format_help(self) -> str:
        """The options, and below them the settings with their defaults."""
        text = super().format_help()
        if self.of_run:
            from seps.setting_docs import listing

            head = "settings (--name value or --name=value); one that is not given is as in the run:"
            return "\n".join([text, head, *listing(self.settings, self.of_run), ""])
        if not self.settings:
            return text
        from seps.setting_docs import listing

        head = "settings with their defaults (--name value or --name=value):"
        return "\n".join([text, head, *listing(self.settings), ""])

    def _take_settings(self, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The words without the settings, and the settings by name."""
        top = {f"--{name}" for name in self.settings.__dataclass_fields__} - {*self._option_string_actions}
        rest: list[str] = []
        values: dict[str, str] = {}
        waiting = iter(words)
        takes_value = False
        for word in waiting:
            name, equals, value = word.partition("=")
            if word == "--":
                rest += [word, *waiting]
            elif name.startswith("--") and ("." in name or name in top):
                if not equals:
                    value = next(waiting, "--")
                    if value.startswith("--"):
                        self.error(f"{name} needs a value")
                values[name[2:]] = value
                takes_value = False
            elif not takes_value and _OVERRIDE.fullmatch(word):
                values[name] = value
            else:
                action = self._option_string_actions.get(word)
                takes_value = action is not None and action.nargs != 0
                rest.append(word)
        return rest, values

    def _sentence(self) -> str:
        """The first words that belong together, quoted: those between two options, without an option's value.

        A folder behind them stays outside the quotes.
        """
        runs: list[list[str]] = [[]]
        for word in self._words:
            if word.startswith("-"):
                action = self._option_string_actions.get(word)
                runs.append([] if action is None or action.nargs == 0 else [word])
            else:
                runs[-1].append(word)
        plain = [run[2:] if run and run[0].startswith("-") else run for run in runs]
        longest: list[str] = max(plain, key=len)
        folder = longest[-1:] if len(longest) > 1 and Path(longest[-1]).is_dir() else []
        sentence = " ".join(longest[:-1] if folder else longest)
        return " ".join(shlex.quote(word) for word in (sentence, *folder))

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        known = list(self._option_string_actions)
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and not any(option.startswith(name) for option in known):
                more = [f"--{field}" for field in self.settings.__dataclass_fields__] if self.settings else []
                self.error(f"there is no option {name}{suggestion(name, [*known, *more])}")


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """The option --plugin FILE of commands that load a model or a recipe; `load_plugins(options.plugin)` runs them."""
    parser.add_argument(
        "--plugin",
        type=input_file,
        action="append",
        default=[],
        metavar="FILE",
        help="run this Python file, which registers custom components (docs/change-one-idea.md)",
    )


class Explain(argparse.Action):
    """The option --explain KEY: print one setting of the parser, and stop."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        """Print the setting that `values` names."""
        from seps.setting_docs import explained

        print(explained(cast("Parser", parser).settings, str(values)))
        parser.exit()


def add_explain(parser: Parser) -> None:
    """The option --explain KEY of commands with settings."""
    parser.add_argument(
        "--explain", action=Explain, metavar="KEY", help="print type, default and description of one setting, and stop"
    )


def ended(message: str) -> str:
    """`message` with a full stop, where it has no end of its own."""
    return message if message.endswith((".", "?", "!")) else f"{message}."


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known word that is most like this one, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
