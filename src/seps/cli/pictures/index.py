"""`seps index`: put a folder of pictures into a store that `seps search` and `seps serve` read.

Run it again whenever the folder has changed: only what is new, changed or moved is read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from seps.cli.shared.argtypes import default_device, device, non_negative_real, positive
from seps.cli.shared.parser import Parser, add_plugins
from seps.cli.shared.text import list_problems, list_skipped, print_json, printable
from seps.retrieval.config import StoredPrecision

if TYPE_CHECKING:
    from seps.retrieval.data.gallery import Problem
    from seps.retrieval.index.store import Store


def add_options(parser: Parser) -> None:
    """The options of `seps index`."""
    parser.add_argument("folder", nargs="?", help="folder of pictures and plain .tar shards of pictures")
    parser.add_argument("--store", required=True, help="folder (or object storage URI) of the store")
    parser.add_argument(
        "--model",
        default="mini",
        help="'mini', 'base', a model folder, a run of seps train, or a dual encoder: a preset like clip-b-32, "
        "siglip2-b-16 (many languages) or siglip2-so400m, a hub id like openai/clip-vit-base-patch32, or a folder",
    )
    parser.add_argument(
        "--dense",
        action="append",
        default=[],
        metavar="FILE",
        help="JSONL of descriptions by image, e.g. from seps caption; FOLDER/*.jsonl is read anyway",
    )
    parser.add_argument(
        "--precision",
        choices=get_args(StoredPrecision),
        default="float16",
        help="of the stored state (default: float16)",
    )
    parser.add_argument("--patches", type=positive, metavar="M", help="keep only the M patches that matter most")
    parser.add_argument("--words", type=positive, metavar="M", help="merge each description to at most M words")
    parser.add_argument("--batch", type=positive, default=32, help="images embedded at a time (default: 32)")
    parser.add_argument(
        "--workers", type=positive, help="threads that embed (default: one per core, at most 16); actors of Ray"
    )
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="ray: a cluster (extra 'dist')")
    parser.add_argument("--ray-address", default="", help="of the cluster (default: start one on this machine)")
    parser.add_argument("--gpus", type=non_negative_real, default=0.0, help="GPUs of each actor of Ray (default: 0)")
    parser.add_argument("--moved", action="store_true", help="the folder itself has moved to a new place")
    parser.add_argument(
        "--prune", action="store_true", help="let more than a tenth of the store go, if their files are gone on purpose"
    )
    parser.add_argument("--strict", action="store_true", help="stop at a line of descriptions that cannot be used")
    parser.add_argument(
        "--forget-descriptions",
        action="append",
        default=[],
        metavar="NAME",
        help="take away the stored description of this picture; NAME may be a pattern, '*' is all",
    )
    parser.add_argument(
        "--no-bank", action="store_true", help="no background queries: faster, no confidence, plain scores in search"
    )
    parser.add_argument("--device", type=device, help="cpu, cuda, ...; default: a GPU if there is one")
    add_plugins(parser)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--status", action="store_true", help="say what the store holds, and stop")
    action.add_argument("--verify", action="store_true", help="check every row and file; exit status 1 if any is bad")
    action.add_argument("--compact", action="store_true", help="join small parts and drop old versions")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> int:
    """Index, or look after a store."""
    if options.status or options.verify or options.compact:
        return _maintain(options)
    if options.folder is None:
        options.parser.error("name the folder of pictures, or give --status, --verify or --compact")
    from seps.cli.shared.progress import count_progress
    from seps.ray_cluster import RayConfig
    from seps.retrieval.index.build import IndexOptions, index_folder
    from seps.retrieval.index.zeroshot import load_search_model

    ray = RayConfig(options.ray_address, options.workers or 2, options.gpus) if options.engine == "ray" else None
    device = options.device or ("cpu" if ray is not None else default_device())
    model = load_search_model(options.model, device=device, plugins=options.plugin)
    is_new = not _has_store(options.store)
    settings = IndexOptions(
        options.precision,
        options.patches,
        options.words,
        options.batch,
        options.workers,
        options.moved,
        ray,
        options.prune,
        options.strict,
        tuple(options.forget_descriptions),
        not options.no_bank,
    )
    with count_progress("indexing", "images") as progress:
        report = index_folder(
            options.folder,
            options.store,
            model,
            options.model,
            dense=options.dense,
            options=settings,
            progress=progress,
        )
    counts = {
        name: getattr(report, name) for name in ("new", "changed", "moved", "unchanged", "deleted", "kept", "described")
    }
    if options.json:
        times = {name: round(getattr(report, name), 2) for name in ("seconds", "decoding", "encoding", "own")}
        faults = {
            "problems": _plain_values(report.problems),
            "unread": report.unread,
            "description_problems": _plain_values(report.description_problems),
            "skipped": {reason: len(names) for reason, names in report.skipped.items()},
        }
        print_json({**counts, **times, "older_pixels": report.older_pixels, **faults})
        return 0
    read = report.new + report.changed + report.moved
    speed = f", {read / report.seconds:.1f} images a second" if read and report.seconds else ""
    print(
        f"{report.new} new, {report.changed} changed, {report.moved} moved or copied, {report.deleted} deleted, "
        f"{report.unchanged} unchanged; {report.described} with a description ({report.seconds:.1f} s{speed})."
    )
    if report.kept:
        print(f"{report.kept} of the store are kept although their files could not be read or are skipped.")
    list_problems(report.problems, "could not be indexed", "--json", report.unread)
    list_problems(report.description_problems, "descriptions were not used, or may be out of date", "--json")
    list_skipped(report.skipped)
    if report.older_pixels:
        print(
            f"The pictures of {options.store} were made the old way, stretched to the model's size at once, and so are "
            "those that join them and pictures to search by. The new way finds more (docs/retrieval-results.md). To "
            f"change over, index into a new store: seps index {options.folder} --store NEW",
            file=sys.stderr,
        )
    if not read + report.unchanged:
        print(f"There is no picture in {printable(options.folder)} yet, so there is nothing to search.")
        return 0
    if options.model == "mini" and is_new:
        _name_stronger()
    print(f'Search it: seps search "a dog on the beach" --store {options.store}')
    return 0


def _has_store(location: str) -> bool:
    from seps.retrieval.index.rows import StoreError
    from seps.retrieval.index.store import Store

    try:
        Store.open(location)
    except StoreError:
        return False
    return True


def _name_stronger() -> None:
    """Say, when a store is made, that there are stronger models."""
    from seps.encoders.dual import presets_sentence

    print(
        "The embedded model is small and knows everyday scenes. Stronger models know many more things; name one with "
        f"--model and another --store: {presets_sentence()}, or the hub id of a CLIP or SigLIP. They are downloaded "
        "once."
    )


def _maintain(options: argparse.Namespace) -> int:
    from seps.retrieval.index.store import Store, writer_lock

    store = Store.open(options.store)
    if options.status:
        return _status(store, options.json)
    if options.compact:
        before = store.disk_bytes()
        with writer_lock(store.location):
            store.tidy(always=True)
        print(f"{len(store)} images; {_size(before)} before, {_size(store.disk_bytes())} now.")
        return 0
    from seps.cli.shared.progress import count_progress
    from seps.retrieval.index.maintenance import verify

    with count_progress("checking", "images") as progress:
        problems = verify(store, progress=progress)
    if options.json:
        print_json(_plain_values(problems))
    else:
        print(f"{len(store)} images checked, {len(problems)} problems.")
        list_problems(problems, "are not as they should be", "--json")
    return 1 if problems else 0


def _status(store: Store, as_json: bool) -> int:
    from seps.retrieval.index.maintenance import status

    values = status(store)
    if as_json:
        print_json(values)
        return 0
    for name, value in values.items():
        shown = _size(value) if "bytes" in name else "all" if value is None else value
        print(f"{name.replace('_', ' '):<26} {shown}")
    return 0


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _plain_values(problems: Sequence[Problem]) -> list[dict[str, str]]:
    return [{"name": problem.name, "why": problem.why} for problem in problems]
