"""The `seps` command: one sub-command per file, imported only when it is called; every failure ends here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from seps.cli.shared.commands import COMMANDS, module_of, parser_of
from seps.cli.shared.errors import EXIT_DEFECT, EXIT_INTERRUPTED, EXIT_USER_ERROR, tell, warnings_as_sentences
from seps.cli.shared.parser import suggestion
from seps.cli.shared.text import printable

SHORT = ("search", "find")
"""Commands whose time is mostly that of their imports."""
EXAMPLES = """examples:
  seps demo                                        search photos that ship with the package
  seps find "a dog on the beach" photos            find pictures in a folder
  seps index photos --store store                  put a folder of pictures into a store
  seps search "a dog on the beach" --store store   find pictures in it
  seps serve --store store                         the same as a web page"""
_SAVED = {
    "find": " What was stored so far is kept; the same command goes on from there.",
    "index": " What was stored so far is kept; the same command goes on from there.",
    "compare": " Finished runs are in results.jsonl of the --out folder; the same command goes on from there.",
    "caption": " Finished descriptions are in the --out file; the same command goes on from there.",
    "train": " The last checkpoint is in the --out folder; the same command goes on from there.",
}
"""What a command that was interrupted leaves behind; the others leave nothing."""


def usage() -> str:
    """What `seps --help` prints."""
    width = max(map(len, COMMANDS))
    head = "usage: seps COMMAND [options]   (seps COMMAND --help for its options)"
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return f"{head}\n\n{listed}\n\n{EXAMPLES}\n\n--debug (or SEPS_DEBUG=1) shows the traceback of every error."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake ends in a sentence and status 2, a defect of ours in a traceback and 70."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or os.environ.get("SEPS_DEBUG", "") not in ("", "0")
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else EXIT_USER_ERROR
    if words[0] in ("-V", "--version"):
        from seps import __version__

        print(f"seps {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        hint = suggestion(name, COMMANDS) or "."
        print(f"seps: there is no command {printable(repr(name))}{hint} (seps --help lists them.)", file=sys.stderr)
        return EXIT_USER_ERROR
    if arguments is None and name in SHORT and "--plugin" not in words:
        from seps.cli.shared.startup import without_pandas

        without_pandas()
    return _run(name, words[1:], debug)


def call(name: str, words: Sequence[str]) -> int:
    """Run one command and return its exit status; raises what goes wrong."""
    options = parser_of(name).parse_args(words)
    return int(module_of(name).run(options))


def _run(name: str, words: Sequence[str], debug: bool) -> int:
    """One command inside the boundary that turns whatever happens into an exit status."""
    try:
        if hasattr(sys.stdout, "reconfigure"):
            # A name may hold what the terminal's encoding has no letter for; it must not end the command.
            sys.stdout.reconfigure(errors="backslashreplace")
        with warnings_as_sentences(f"seps {name}"):
            status = call(name, words)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"seps {name}: interrupted.{_SAVED.get(name, '')}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); what is left in the buffer must not complain at the end.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return EXIT_USER_ERROR if tell(f"seps {name}", error, debug) else EXIT_DEFECT


if __name__ == "__main__":
    sys.exit(main())
