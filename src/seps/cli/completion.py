"""`seps completion`: print a script that completes commands, options and choices in a shell.

    seps completion bash > ~/.local/share/bash-completion/completions/seps
    seps completion zsh >> ~/.zshrc
    seps completion fish > ~/.config/fish/completions/seps.fish

Print the script again after an update of SEPS.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from seps.cli.shared.commands import COMMANDS, parser_of
from seps.cli.shared.parser import Parser

_BASH = """\
_seps() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" known="" inner=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {commands} -- "$word")); return
    fi
    [ -n "${{COMP_WORDS[2]}}" ] && [ "$COMP_CWORD" -gt 2 ] && command="$command ${{COMP_WORDS[2]}}"
    case "$command $before" in
{choices}
    esac
    case "$command" in
{options}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$known" -- "$word")) ;;
        *) if [ -n "$inner" ]; then COMPREPLY=($(compgen -W "$inner" -- "$word"))
           else COMPREPLY=($(compgen -f -- "$word")); fi ;;
    esac
}}
complete -o filenames -F _seps seps
"""


def add_options(parser: Parser) -> None:
    """The options of `seps completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="print the script for this shell")


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    if options.shell == "fish":
        print("\n".join(_fish()))
    else:
        head = "autoload -U +X bashcompinit && bashcompinit\n" if options.shell == "zsh" else ""
        print(head + bash_script(), end="")
    return 0


def _parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """All parsers by what is typed before their options, those of commands within a command first."""
    for name in COMMANDS:
        parser = parser_of(name)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{name} {inner}", found) for inner, found in action.choices.items())
        yield name, parser


def _listed(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a parser, and its settings."""
    options = [name for action in _listed(parser) for name in action.option_strings]
    if isinstance(parser, Parser) and parser.settings:
        from seps.settings import defaults

        options += [f"--{name}" for name in defaults(parser.settings)]
    return options


def _inner(parser: argparse.ArgumentParser) -> list[str]:
    """What may stand where there is no option: commands within a command, and choices."""
    return [str(name) for action in _listed(parser) if not action.option_strings for name in action.choices or ()]


def bash_script() -> str:
    """The script for bash."""
    options, choices = [], []
    for name, parser in _parsers():
        known, inner = (shlex.quote(" ".join(words)) for words in (_options_of(parser), _inner(parser)))
        options.append(f"        {shlex.quote(name)}*) known={known} inner={inner} ;;")
        for action in _listed(parser):
            if action.choices and action.option_strings:
                cases = "|".join(f"{shlex.quote(name)}*' {option}'" for option in action.option_strings)
                known = shlex.quote(" ".join(map(str, action.choices)))
                choices.append(f'        {cases}) COMPREPLY=($(compgen -W {known} -- "$word")); return ;;')
    commands = shlex.quote(" ".join(COMMANDS))
    return _BASH.format(commands=commands, choices="\n".join(choices), options="\n".join(options))


def _fish() -> Iterator[str]:
    """Lines of the script for fish."""
    for name, text in COMMANDS.items():
        yield f"complete -c seps -f -n __fish_use_subcommand -a {name} -d {shlex.quote(text)}"
    for name, parser in _parsers():
        seen = shlex.quote("; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split()))
        for action in _listed(parser):
            if isinstance(action, argparse._SubParsersAction):
                yield f"complete -c seps -f -n {seen} -a {shlex.quote(' '.join(action.choices))}"
            for option in action.option_strings:
                kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
                known = " ".join(map(str, action.choices or ()))
                value = f" -x -a {shlex.quote(known)}" if known else "" if action.nargs == 0 else " -r"
                text = shlex.quote(" ".join((action.help or "").split()).replace("%(default)s", str(action.default)))
                yield f"complete -c seps -n {seen} {kind}{value} -d {text}"
