"""`seps index`: put folders of pictures into a store that `seps search` and `seps serve` read.

Run it again after a change of the folders: it reads only new, changed and moved files. `--watch` does so automatically.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from seps.cli.shared.argtypes import default_device, device, non_negative_real, positive, positive_real
from seps.cli.shared.indexing import is_all_excluded, tell_left_out
from seps.cli.shared.parser import Parser, add_plugins
from seps.cli.shared.text import counted, list_problems, print_json, printable, say
from seps.extras import is_installed
from seps.memory import hold_little_memory
from seps.retrieval.config import DEFAULT_MODEL, SIZES, VECTOR

if TYPE_CHECKING:
    from seps.photos.indexing.build import IndexReport
    from seps.photos.indexing.gallery import Problem
    from seps.photos.indexing.reading import ReadingReport
    from seps.photos.library import Library
    from seps.photos.store.store import Store
    from seps.retrieval.engine.engine import Engine


LONG_SECONDS = 60.0
"""Processor seconds of encoding after which a faster way is named."""


def add_options(parser: Parser) -> None:
    """The options of `seps index`."""
    parser.intermixed = True
    parser.add_argument(
        "folder",
        nargs="*",
        help="index these folders of pictures and uncompressed .tar files (default: all folders of the store)",
    )
    parser.add_argument("--store", required=True, help="write this store: a folder, or the URI of an object storage")
    parser.add_argument(
        "--model",
        help="embed with 'base' (default), 'mini' (faster, finds less), a model folder, a run of seps train, or a dual "
        "encoder: a preset like clip-b-32, "
        "siglip2-b-16 (many languages) or siglip2-so400m, a hub id like openai/clip-vit-base-patch32, or a folder",
    )
    parser.add_argument(
        "--dense",
        action="append",
        default=[],
        metavar="FILE",
        help="read descriptions from this JSONL file, such as that of seps caption; FOLDER/*.jsonl is always read",
    )
    parser.add_argument(
        "--size",
        choices=(VECTOR, *SIZES),
        help="store this much per picture: vector (one vector, at most 1.5 KB), tiny (2 KB), small (at most 8 KB), "
        "patches (64 patches), full (all patches) (default: as in the store, else patches, of a dual encoder vector)",
    )
    parser.add_argument("--batch", type=positive, default=32, help="embed this many pictures at a time (default: 32)")
    parser.add_argument(
        "--workers",
        type=positive,
        help="embed with this many threads, or actors of Ray (default: one per core, at most 16)",
    )
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="run on this machine, or on a Ray cluster (extra 'dist'; default: local)",
    )
    parser.add_argument(
        "--ray-address",
        default="",
        help="connect to the Ray cluster at this address (default: start one on this machine)",
    )
    parser.add_argument(
        "--gpus", type=non_negative_real, default=0.0, help="reserve this many GPUs for each actor of Ray (default: 0)"
    )
    parser.add_argument("--moved", action="store_true", help="accept a new place of the indexed folder")
    parser.add_argument("--add", action="store_true", help="add the folder to those of the store")
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="skip files and folders like 'screenshots/' or '*.gif', by patterns of .gitignore; a file"
        " .sepsignore does so in every call",
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="remove the pictures of missing files from the store, even if they are more than a tenth",
    )
    parser.add_argument(
        "--metadata",
        action=argparse.BooleanOptionalAction,
        help="add titles, captions, keywords, persons and places of the files (XMP, IPTC, EXIF, "
        "sidecars .xmp) to descriptions (default: as in the store; on in a new one)",
    )
    parser.add_argument(
        "--ocr",
        action="store_true",
        help="read text in pictures, too, so that its words find them (extra 'ocr'): about a second per photo, each "
        "once; Ctrl-C keeps what was read, and the next --ocr continues",
    )
    parser.add_argument("--strict", action="store_true", help="stop at an unusable line of descriptions")
    parser.add_argument(
        "--forget-descriptions",
        action="append",
        default=[],
        metavar="NAME",
        help="remove the stored description of this picture; NAME may be a pattern, '*' is all",
    )
    parser.add_argument(
        "--no-bank",
        action="store_true",
        help="store no levels over background queries: faster, but without hubness correction and confidence",
    )
    parser.add_argument("--device", type=device, help="compute on cpu, cuda or cuda:1 (default: a GPU if there is one)")
    add_plugins(parser)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--status", action="store_true", help="print the contents of the store, and stop")
    action.add_argument(
        "--verify", action="store_true", help="check every row and file, and stop; exit status 1 if one is bad"
    )
    action.add_argument(
        "--compact", action="store_true", help="join small files of the store, delete old versions, and stop"
    )
    action.add_argument(
        "--remove-root",
        metavar="FOLDER",
        help="hide this folder, named exactly, from search; no file is touched, and --add restores it."
        " With --prune its data is deleted from the store",
    )
    action.add_argument("--watch", action="store_true", help="index now, and again after every change of the folders")
    parser.add_argument(
        "--every",
        type=positive_real,
        default=10.0,
        metavar="SECONDS",
        help="look for changes every so many seconds with --watch (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> int:
    """Index, or look after a store."""
    if options.status or options.verify or options.compact:
        return _maintain(options)
    if options.remove_root is not None:
        return _remove(options)
    hold_little_memory()
    from seps.photos.indexing.opening import IndexOptions, settings_at
    from seps.photos.library import Library
    from seps.ray_cluster import RayConfig

    if options.ocr:
        from seps.images.ocr import check_installed

        check_installed()  # before pictures are indexed, which takes longest
    is_new = settings_at(options.store) is None
    if not options.folder and is_new:
        options.parser.error("name the folder of pictures, or give --status, --verify or --compact of a store")
    ray = RayConfig(options.ray_address, options.workers or 2, options.gpus) if options.engine == "ray" else None
    settings = IndexOptions(
        size=options.size,
        batch_size=options.batch,
        workers=options.workers,
        moved=options.moved,
        ray=ray,
        prune=options.prune,
        strict=options.strict,
        forget_descriptions=tuple(options.forget_descriptions),
        bank=not options.no_bank,
        exclude=tuple(options.exclude),
        dense=tuple(options.dense),
        metadata=options.metadata,
        add=options.add,
    )
    library = Library(
        store=options.store,
        model=options.model,
        device=options.device or ("cpu" if ray is not None else default_device()),
        options=settings,
        plugins=options.plugin,
    )
    if options.watch:
        return _watch(options, library)
    report = _index(options, library)
    texts = _read_texts(library) if options.ocr else None
    if options.json:
        print_json({**_plain_report(report), **({} if texts is None else _plain_texts(texts))})
        return 0
    _tell(report)
    if texts is not None:
        _tell_texts(texts)
    if report.former_size is not None:
        then, now = (f"{height} x {width}" for height, width in (report.former_size, library.engine.traits.image_size))
        print(
            f"The pictures of {options.store} were encoded with {then} px, and so are those that join them. The model "
            f"takes {now} px now. To change over, index into a new store: seps index "
            f"{' '.join(options.folder) or 'FOLDER'} --store NEW",
            file=sys.stderr,
        )
    if not report.new + report.changed + report.moved + report.unchanged:
        if not is_all_excluded(report):
            there = printable(", ".join(options.folder)) or "the folders of the store"
            print(f"There is no picture in {there} yet, so there is nothing to search.")
        return 0
    if is_new and options.model in (None, DEFAULT_MODEL) and options.size != VECTOR and is_installed("torch"):
        _name_stronger()
    if report.encoding > LONG_SECONDS:
        _name_faster(library.engine)
    print(f'Search it: seps search "a dog on the beach" --store {shlex.quote(options.store)}')
    return 0


def _index(options: argparse.Namespace, library: Library) -> IndexReport:
    from seps.cli.shared.progress import count_progress

    with count_progress("indexing", "images") as progress:
        library.progress = progress
        return library.update(options.folder, always=True)


def _read_texts(library: Library) -> ReadingReport:
    from seps.cli.shared.progress import count_progress

    with count_progress("reading text", "images") as progress:
        library.progress = progress
        return library.read_texts()


def _plain_texts(report: ReadingReport) -> dict[str, object]:
    return {
        "text_looked_for": report.read,
        "with_text": report.with_text,
        "unread_texts": _plain_values(report.problems),
    }


def _tell_texts(report: ReadingReport) -> None:
    """Say in how many pictures there is text."""
    print(f"Text in {report.with_text} of {counted(report.read, 'picture')} ({report.seconds:.1f} s).", flush=True)
    list_problems(report.problems, "cannot be read now; the next --ocr tries again", "--json")


def _plain_report(report: IndexReport) -> dict[str, object]:
    names = ("new", "changed", "moved", "unchanged", "deleted", "kept", "described", "excluded", "rescored")
    counts = {name: getattr(report, name) for name in names}
    times = {name: round(getattr(report, name), 2) for name in ("seconds", "decoding", "encoding", "own")}
    faults = {
        "problems": _plain_values(report.problems),
        "unread": report.unread,
        "description_problems": _plain_values(report.description_problems),
        "skipped": {reason: len(found) for reason, found in report.skipped.items()},
        "away": report.away,
    }
    return {**counts, **times, "former_size": report.former_size, **faults}


def _tell(report: IndexReport, again: str = "") -> None:
    """Say what a run did; `again` as for `tell_left_out`."""
    read = report.new + report.changed + report.moved
    speed = f", {read / report.seconds:.1f} images a second" if read and report.seconds else ""
    print(
        f"{report.new} new, {report.changed} changed, {report.moved} moved or copied, {report.deleted} deleted, "
        f"{report.unchanged} unchanged; {report.described} with a description ({report.seconds:.1f} s{speed}).",
        flush=True,
    )
    if report.rescored:
        print(
            f"Another version of seps or its model had scored {report.rescored} of them; these scores are made again."
        )
    tell_left_out(report, "--json", again)


def _watch(options: argparse.Namespace, library: Library) -> int:
    """Index whenever the folders change, until Ctrl-C."""
    from seps.photos.indexing.opening import settings_at
    from seps.photos.indexing.watching import Watch, list_folders

    known = settings_at(options.store)
    folders = options.folder or list(known.roots if known is not None else ())

    def update() -> None:
        report = _index(options, library)
        if report.new + report.changed + report.moved + report.deleted or watch.seen is None:
            _tell(report, "" if watch.seen is None else f"seps index --store {shlex.quote(options.store)}")
        if options.ocr and (texts := _read_texts(library)).read:
            _tell_texts(texts)

    asked: list[bool] = []

    def stop(*_: object) -> None:
        asked.append(True)  # an interrupt inside the database can end there as an error that is tried again
        raise KeyboardInterrupt

    def wait() -> None:
        if not asked:
            time.sleep(options.every)
        if asked:
            raise KeyboardInterrupt

    watch = Watch(lambda: list_folders(folders, options.dense, options.exclude), update, say)
    before = signal.signal(signal.SIGINT, stop)
    try:
        seen = watch.look()
        update()  # a mistake in the call ends it here; later on, what fails is said and tried again
        watch.seen = seen
        say(f"Watching {', '.join(folders)}; Ctrl-C ends it.")
        watch.run(wait)
    except KeyboardInterrupt:
        say("Stopped watching. What was stored is kept.")
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


def _remove(options: argparse.Namespace) -> int:
    from seps.photos.indexing.maintenance import remove_root

    folder, count = remove_root(options.store, options.remove_root, prune=options.prune)
    kept = "Their data is deleted from the store" if options.prune else "Their data stays in the store"
    print(
        f"{counted(count, 'picture')} of {printable(folder)} hidden from search; no file was touched. {kept}. To "
        f"restore the folder: seps index {printable(shlex.quote(folder))} --store {shlex.quote(options.store)} --add"
    )
    return 0


def _name_stronger() -> None:
    """Say, when a store is made, that there are stronger models."""
    from seps.encoders.dual import presets_sentence

    print(
        "The embedded model knows everyday scenes. Stronger models know many more things; name one with "
        f"--model and another --store: {presets_sentence()}, or the hub id of a CLIP or SigLIP. They are downloaded "
        "once."
    )


def _name_faster(engine: Engine) -> None:
    """Say, after a long run on a CPU, what would make the next one shorter."""
    from seps.retrieval.engine.loading import faster_way

    if tip := faster_way(engine):
        print(f"On a CPU indexing is 1.35 to 1.5 times as fast after: {tip}")


def _maintain(options: argparse.Namespace) -> int:
    from seps.photos.store.store import Store, writer_lock

    store = Store.open(options.store)
    if options.status:
        return _status(store, options.json)
    if options.compact:
        before = store.disk_bytes()
        with writer_lock(store.location):
            store.tidy(always=True)
        print(f"{counted(len(store), 'image')}; {_size(before)} before, {_size(store.disk_bytes())} now.")
        return 0
    from seps.cli.shared.progress import count_progress
    from seps.photos.indexing.maintenance import verify

    with count_progress("checking", "images") as progress:
        problems = verify(store, progress=progress)
    if options.json:
        print_json(_plain_values(problems))
    else:
        print(f"{counted(len(store), 'image')} checked, {counted(len(problems), 'problem')}.")
        list_problems(problems, "are not as they should be", "--json")
    return 1 if problems else 0


def _status(store: Store, as_json: bool) -> int:
    from seps.photos.indexing.maintenance import status

    values = status(store)
    if as_json:
        print_json(values)
        return 0
    for name, value in values.items():
        shown = _size(value) if "bytes" in name else "all" if value is None else value
        shown = ", ".join(map(printable, value)) if isinstance(value, list) else shown
        print(f"{name.replace('_', ' '):<26} {shown}")
    return 0


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _plain_values(problems: Sequence[Problem]) -> list[dict[str, str]]:
    return [{"name": problem.name, "why": problem.why} for problem in problems]
