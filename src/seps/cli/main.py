"""The `seps` command: one sub-command a file, imported only when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "index": "embed a folder of pictures into a store, again and again",
    "search": "find pictures of a store by a sentence or a picture",
    "explain": "show why a picture has its score for a sentence",
    "serve": "a web page and an API over a store",
    "train": "train a retrieval model on pictures with captions",
    "eval": "measure a model: recall both ways, under a named protocol",
    "caption": "describe images with a vision-language model, one resumable line an image",
    "compare": "train and measure baselines, or the ablation, over several seeds",
    "convert": "make a model from a checkpoint of the published code",
    "demo": "run the main job on the photos that ship with the package",
    "reid": "re-identification over RGB / NIR / TIR: synth, train, eval, show",
    "doctor": "what is installed, which parts work, what is missing and how to get it",
    "modules": "write seps_modules.py, the method in one file that needs torch alone",
}
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def usage() -> str:
    """What `seps --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: seps COMMAND [options]   (seps COMMAND --help for its options)", "", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake ends in a sentence and exit status 2, never in a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else EXIT_USER_ERROR
    if words[0] in ("-V", "--version"):
        from seps import __version__

        print(f"seps {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        print(f"seps: there is no command {name!r}.\n\n{usage()}", file=sys.stderr)
        return EXIT_USER_ERROR
    command = importlib.import_module(f"seps.cli.{name.replace('-', '_')}")
    try:
        return int(command.run(words[1:]) or 0)
    except KeyboardInterrupt:
        print("seps: interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return 0
    except (ValueError, OSError) as error:
        print(f"seps {name}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
