"""How each command of the pages is checked: run as it stands, run smaller, or, where a test machine cannot, otherwise.

Two short tables say which is which. A command that is in neither and is no `seps` command fails the test.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from doc_blocks import ROOT

from seps import settings
from seps.cli.main import main
from seps.retrieval.train import start

Words = list[str]

SMALLER: dict[str, str] = {
    "seps train": "--model.vision {vision} --model.text {text} --model.image_size [32,32] --model.embed_size 16 "
    "--train.epochs 1 --train.batch_size 4 --train.precision float32",
    "seps compare": "--config tiny.yaml --only mean --seeds 0",
    "seps caption": "--url {server} --mixed",
    "seps convert": "--vision {vision} --text {text}",
    "seps reid synth": "--identities 8 --images 4 --height 64 --width 32 --workers 1",
    "seps reid train": "model.image_size=[64,32] model.width=16 data.identities=2 data.images=2 train.epochs=1 "
    "data.holdout=2",
    "seps reid report": "model.image_size=[64,32] model.width=16 data.identities=2 data.images=2 train.epochs=1 "
    "data.holdout=2",
    "seps reid threshold": "--false-accept 0.4",
}
"""Options added to a command, so that it runs on a test machine in a second or two; `{...}` is filled in."""


def check(words: Words, fill: dict[str, str]) -> None:
    """Check one command in the current folder. Raises AssertionError where it does not work."""
    line = " ".join(words)
    for pattern, instead in OTHERWISE:
        if re.search(pattern, line):
            instead(words)
            return
    assert words[0] == "seps", f"{line!r}: no way to check this command is known; add one to doc_commands.py."
    assert main([*words[1:], *added(words, fill)]) == 0, line


def added(words: Words, fill: dict[str, str]) -> Words:
    """The options that `SMALLER` adds to a command."""
    for length in (3, 2):
        options = SMALLER.get(" ".join(words[:length]))
        if options is not None:
            return options.format(**fill).split()
    return []


class Parsed(BaseException):  # which no error boundary takes for a defect
    """The command's words were understood; it is not run."""


@contextmanager
def parsing_only() -> Iterator[None]:
    """Let a command read its words, and stop it then with `Parsed`."""

    def stopping(original: Callable[..., Any]) -> Callable[..., Any]:
        def parse(*args: Any, **options: Any) -> Any:
            found = original(*args, **options)
            if not getattr(found, "settings", None):  # else they are read next
                raise Parsed
            return found

        return parse

    plain = argparse.ArgumentParser
    with (
        mock.patch.object(plain, "parse_args", stopping(plain.parse_args)),
        mock.patch.object(plain, "parse_intermixed_args", stopping(plain.parse_intermixed_args)),
        mock.patch.object(settings, "load", stopping(settings.load)),
        mock.patch.object(start, "load_run", stopping(start.load_run)),
    ):
        yield


def parse_seps(words: Words) -> None:
    """The words of a `seps` command are understood."""
    assert words[0] == "seps", words
    try:
        with parsing_only():
            main(words[1:])
    except Parsed:
        return
    raise AssertionError(f"{' '.join(words)}: was not understood.")


def check_make(words: Words) -> None:
    """The targets are in the Makefile, and the `seps` commands of their recipes are understood."""
    makefile = (ROOT / "Makefile").read_text()
    for target in words[1:]:
        recipe = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)*)", makefile, re.MULTILINE)
        assert recipe is not None, f"make {target}: there is no such target."
        for command in re.findall(r"^\t\$\(BIN\)/(seps .*)$", recipe[1], re.MULTILINE):
            parse_seps(command.split())


def check_pip(words: Words) -> None:
    """The extras are in pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*?)\]", words[-1]))):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), f"there is no extra {extra!r}."


def check_torchrun(words: Words) -> None:
    """torchrun takes its options, and `seps` its own; a single process of it is run elsewhere as `seps train`."""
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words[1:])
    assert options.module and options.training_script == "seps.cli.main", words
    parse_seps(["seps", *options.training_script_args])


def check_serve(words: Words) -> None:
    """The service starts on a free port, answers, and stops."""
    import uvicorn

    made: list[Any] = []

    class Server(uvicorn.Server):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            made.append(self)

    codes: list[int] = []
    with mock.patch.object(uvicorn, "Server", Server):
        thread = threading.Thread(target=lambda: codes.append(main([*words[1:], "--port", "0"])), daemon=True)
        thread.start()
        until = time.monotonic() + 30
        while not (made and made[0].started and made[0].servers) and time.monotonic() < until and thread.is_alive():
            time.sleep(0.02)
    assert made and made[0].started, f"{' '.join(words)}: did not start."
    port = made[0].servers[0].sockets[0].getsockname()[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        assert answer.status == 200
    made[0].should_exit = True
    thread.join(10)
    assert codes == [0]


def check_dual_encoder(words: Words) -> None:
    """A tiny model of the same kind stands for the published one, which would be downloaded."""
    from duals import dual_folder

    tiny = [str(dual_folder("clip")) if re.search(_DUAL, word) else word for word in words]
    assert main(tiny[1:]) == 0, words


def check_without_bank(words: Words) -> None:
    """Indexing without the background queries, which take most of the time for a few pictures."""
    assert main([*words[1:], "--no-bank"]) == 0, words


def check_object_storage(words: Words) -> None:
    """Another kind of address stands for the bucket: a URI all the same, of a folder here."""
    place = f"file://{Path.cwd()}/bucket"
    (Path.cwd() / "bucket/stores/photos").mkdir(parents=True, exist_ok=True)
    words = [re.sub(r"^(s3|gs|az)://\w+", place, word) for word in words]
    assert main(words[1:]) == 0, words


def check_script(words: Words) -> None:
    """A script of the repository, or one that a command of the page wrote, run in this process; it ends with 0."""
    try:
        with mock.patch.object(sys, "argv", words[1:]):
            runpy.run_path(words[1], run_name="__main__")
    except SystemExit as end:
        assert not end.code, words


def check_benchmark(words: Words) -> None:
    """A benchmark reads its options; none is run in a test."""
    try:
        with (
            parsing_only(),
            mock.patch.object(sys, "argv", words[2:]),
            mock.patch.object(sys, "path", [str(ROOT), *sys.path]),
        ):
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    except Parsed:
        return
    raise AssertionError(f"{' '.join(words)}: was not understood.")


def check_print(words: Words) -> None:
    """A command that prints and ends the process, with status 0."""
    try:
        code: Any = main(words[1:])
    except SystemExit as end:
        code = end.code
    assert not code, words


_DUAL = r"^(clip-b-\d+|siglip.*|openai/clip-.*)$"
OTHERWISE: list[tuple[str, Callable[[Words], None]]] = [
    (r"(finetune|typed)\.yaml", parse_seps),  # its model is too large to train in a test
    (r"^make ", check_make),
    (r"^(uv )?pip install ", check_pip),
    (r"^torchrun ", check_torchrun),
    (r"^seps serve ", check_serve),
    (r"^seps index .*--watch", parse_seps),
    (r"^seps index .*--store both", check_without_bank),
    (r"^seps find a dog photos ", parse_seps),  # the forms of the results: tests/library
    (r"^seps convert DeMo", parse_seps),
    (r"^seps reid export ", parse_seps),
    (r"^seps eval .*--extended", parse_seps),  # needs COCO's 5,000 photos
    (r"^seps (caption|index) .*--engine ray", parse_seps),
    (r"^seps .*--print_config", check_print),
    (r"^seps .*(s3|gs|az)://", check_object_storage),
    (r"^seps (index|eval) .*--model (clip-b-|siglip|openai/clip-)", check_dual_encoder),
    (r"^python (tools/\S+\.py |examples/\w+\.py$|seps_modules\.py$)", check_script),
    (r"^python -m benchmarks", check_benchmark),
]
"""What is done instead of running a command that needs what a test machine lacks; the first that fits counts."""
