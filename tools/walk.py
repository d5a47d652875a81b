"""The files and functions of the application that a query passes: how much of it somebody reads who follows one.

    python tools/walk.py [search page score_matrix forward]

Traced by `sys.setprofile` in all threads over a second call in one process, over a store of the demo photos: the files
of the application that run, and all functions of seps. `score_matrix` and `forward` take random features instead, 4
images and 300 texts on a CPU, for each preset of the method; they name the functions too. `tests/photos/test_walks.py`
and `tests/scoring/test_scoring_walk.py` bound them.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import seps

SOURCE = Path(seps.__file__).parent
APPLICATION = ("retrieval", "photos", "images")
"""The rooms whose files are counted; beside them stand the command line and what every room uses."""
Functions = dict[str, set[str]]


def passed(first: Callable[[], Any], second: Callable[[], Any]) -> Functions:
    """The functions of seps that the second of two calls runs, by file; threads may be those of the first call."""
    functions: Functions = {}
    counting = False

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if counting and event == "call" and code.co_filename.startswith(str(SOURCE)):
            name = Path(code.co_filename).relative_to(SOURCE).as_posix()
            functions.setdefault(name, set()).add(f"{code.co_name}:{code.co_firstlineno}")

    before = sys.getprofile()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        first()
        counting = True
        second()
    finally:
        counting = False
        sys.setprofile(before)
        threading.setprofile(None)
    return functions


def counts(functions: Functions) -> tuple[int, int, int]:
    """Files of the application, their functions, and the functions of all of seps."""
    files = [name for name in functions if name.split("/")[0] in APPLICATION]
    return len(files), sum(len(functions[name]) for name in files), sum(map(len, functions.values()))


def search(store: Path) -> Functions:
    """A second `seps search` of one process."""
    from seps.cli.main import main

    def call() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["search", "a photo of a dog", "--store", str(store)]) == 0

    return passed(call, call)


def page(store: Path) -> Functions:
    """A second search by the page, as the page sends it."""
    from starlette.testclient import TestClient

    from seps.photos.library import Library
    from seps.photos.serve.app import create_app

    clients: list[TestClient] = []

    def call(text: str) -> None:
        assert clients[0].get("/api/search", params={"q": text, "fold": True}).status_code == 200

    def first() -> None:  # the service with its threads
        clients.append(TestClient(create_app(Library(store=store)), base_url="http://127.0.0.1"))
        clients[0].__enter__()
        call("a photo of a dog")

    try:
        return passed(first, lambda: call("green noise"))
    finally:
        clients[0].__exit__(None, None, None)


def scoring(name: str, preset: str) -> Functions:
    """A second `score_matrix`, or `forward` of the network, of one preset."""
    import torch

    from seps import PatchSlimming, SlimmingConfig
    from seps.scoring import score_matrix

    net = PatchSlimming(getattr(SlimmingConfig, preset)(embed_size=64, num_patches=49)).eval()
    generator = torch.Generator().manual_seed(0)
    images, words = (torch.randn(*shape, 64, generator=generator) for shape in ((4, 50), (300, 12)))
    lengths = torch.randint(4, 13, (300,), generator=generator)

    def call() -> None:
        with torch.no_grad():
            score_matrix(net, images, words, lengths) if name == "score_matrix" else net(images, words, lengths)

    return passed(call, call)


def main() -> None:
    """Print the files and counts."""
    for name in {"score_matrix", "forward"} & set(sys.argv[1:]):
        for preset in ("default", "open_source", "paper"):
            functions = scoring(name, preset)
            for file in sorted(functions):
                print(f"  {len(functions[file]):3}  {file}: {' '.join(sorted(functions[file]))}")
            print(f"{name}, {preset}: {len(functions)} files, {sum(map(len, functions.values()))} functions")
    names = [name for name in sys.argv[1:] or ["search", "page"] if name in ("search", "page")]
    if names:
        applications(names)


def applications(names: Sequence[str]) -> None:
    """Print those of the search and of the page."""
    from seps.retrieval.demo import gallery_file

    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        with contextlib.redirect_stdout(io.StringIO()):
            from seps.cli.main import main as run

            assert run(["index", str(gallery_file().parent), "--store", str(store), "--model", "mini"]) == 0
        for name in names:
            functions = {"search": search, "page": page}[name](store)
            for file in sorted(functions):
                print(f"  {len(functions[file]):3}  {file}")
            files, inside, calls = counts(functions)
            print(f"{name}: {files} files of the application, {inside} functions of them, {calls} of all of seps")


if __name__ == "__main__":
    main()
