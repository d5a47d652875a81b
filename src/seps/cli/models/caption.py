"""`seps caption`: write one description per image with a vision-language model."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TextColumn
from rich.table import Table

from seps.cli.shared.argtypes import (
    device_or_auto,
    input_file,
    input_folder,
    non_negative,
    non_negative_real,
    output_file,
    output_file_anywhere,
    positive,
    positive_fraction,
    positive_real,
)
from seps.cli.shared.errors import EXIT_INTERRUPTED
from seps.cli.shared.outputs import check_output, write_output
from seps.cli.shared.parser import Parser
from seps.cli.shared.progress import bar
from seps.cli.shared.text import list_problems, list_skipped, printable
from seps.parsing import ShapeError, parse_object
from seps.photos.captions import BackendConfig, CaptionConfig, RayConfig, Sampling, caption_images
from seps.photos.captions.config import ACCEPTABLE, CAPTIONERS, LOCAL_URL, MODEL, BackendKind
from seps.photos.captions.images import scan_images
from seps.photos.captions.run import Tally
from seps.training.interrupt import InterruptGuard

EXIT_UNFINISHED = 1
QUIET_SECONDS = 30.0
STOPPING = "finishing what is running; Ctrl-C again leaves at once"


def run(options: argparse.Namespace) -> int:
    """Describe images; 0 when every image was accounted for, 1 when the run had to stop, 130 after Ctrl-C."""
    images, out = Path(options.images), Path(options.out)
    if out.exists() and images.exists() and os.path.samefile(images, out):
        raise ValueError(f"--out {out} is the data set itself. Choose another file for the descriptions.")
    inputs = (options.images, options.out)
    summary = check_output(options.report, "--report", "described_in_file", inputs) if options.report else None
    backend, config = _backend(options), _config(options)
    ray = RayConfig(options.ray_address, options.workers, options.gpus) if options.engine == "ray" else None
    images_found = scan_images(images, options.images_root)
    items = images_found.items[: options.limit]
    with InterruptGuard() as guard, _Display(len(items), guard) as display:
        report = caption_images(items, out, backend, config, ray=ray, stop=display.stopping, progress=display.update)
    report["not_read"] = [str(problem) for problem in images_found.problems]
    report["skipped"] = {reason: len(names) for reason, names in images_found.skipped.items()}
    if summary is not None:
        write_output(summary, report)
    _print(report)
    list_problems(images_found.problems, "could not be read and have no description", "--report")
    list_skipped(images_found.skipped)
    if report["problem"]:
        print(f"seps caption: {printable(report['problem'])}", file=sys.stderr)
        return EXIT_UNFINISHED
    return EXIT_INTERRUPTED if report["interrupted"] else 0


def add_options(parser: Parser) -> None:
    """The options of `seps caption`."""
    parser.epilog = (
        "Started again, it goes on where it was stopped or killed. Images that got no good answer are in OUT's side "
        "file, dense.failed.jsonl, with the reason."
    )
    out = "write one line per image to this file (default: %(default)s)"
    parser.add_argument(
        "images", help="describe the images of this folder with its subfolders, .tar shard, or JSONL data set"
    )
    parser.add_argument("--out", type=output_file_anywhere, default="dense.jsonl", help=out)
    parser.add_argument("--report", type=output_file, metavar="FILE", help="write the report to FILE as JSON")
    parser.add_argument(
        "--images-root",
        type=input_folder,
        metavar="DIR",
        help="resolve the paths of a JSONL data set from this folder (default: that of the file)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="describe the first N images only")

    group = parser.add_argument_group("describing model")
    add = group.add_argument
    add(
        "--backend",
        choices=("transformers", "openai"),
        help="run the model with transformers, or on a server (default: openai with --url, else transformers)",
    )
    add(
        "--model",
        help="describe with "
        + "; ".join(f"{name} ({about})" for name, (_, about) in CAPTIONERS.items())
        + f"; or a folder, a hub id (default: {MODEL}), or the server's name for it (default: its only one)",
    )
    add("--url", help=f"send requests to this server with the OpenAI chat protocol (default: {LOCAL_URL})")
    add("--api-key-file", type=input_file, metavar="FILE", help="read the key of the server from this file")
    add(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="read the key of the server from this environment variable (default: %(default)s)",
    )
    _add_fields(
        group,
        BackendConfig(),
        ("--batch-size", positive, "transformers: describe this many images at once"),
        ("--parallel", positive, "openai: send this many requests at once"),
        ("--device", device_or_auto, "transformers: compute on auto, cpu, cuda or cuda:1"),
        ("--dtype", str, "transformers: compute in auto, float32, float16 or bfloat16"),
        ("--max-side", non_negative, "shrink images to this longest side, in pixels; 0 keeps their size"),
    )
    add(
        "--extra",
        default="{}",
        metavar="JSON",
        help="openai: add these keys to a request, such as '{\"max_tokens\": null}'",
    )

    group = parser.add_argument_group("answers (defaults as published)")
    _add_fields(
        group,
        Sampling(),
        ("--prompt", str, "instruct the model with this text"),
        ("--temperature", non_negative_real, "draw words with this randomness; 0 always takes the likeliest"),
        ("--top-p", positive_fraction, "draw from the likeliest words with this total probability"),
        ("--max-tokens", positive, "end an answer after this many tokens"),
        ("--seed", non_negative, "seed the random draws"),
    )
    _add_fields(
        group, CaptionConfig(), ("--bad-retries", non_negative, "repeat a request this often after a bad answer")
    )
    add = group.add_argument
    add("--accept", nargs="+", choices=ACCEPTABLE, default=[], help="accept these kinds of bad answers")
    add("--retry-failed", action="store_true", help="describe again the images that an earlier run set aside")
    add("--mixed", action="store_true", help="allow several models or settings in one file")

    _add_fields(
        parser.add_argument_group("when the server fails"),
        BackendConfig(),
        ("--retries", non_negative, "repeat a failed request this often, with growing pauses"),
        ("--backoff", non_negative_real, "wait this many seconds before the first repetition"),
        ("--timeout", positive_real, "wait at most this many seconds for an answer"),
        ("--give-up-after", positive, "stop after this many failures in a row"),
    )

    add = parser.add_argument_group("over a cluster").add_argument
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="run on this machine, or on a Ray cluster (default: %(default)s)",
    )
    add(
        "--ray-address",
        default="",
        help="connect to the Ray cluster at this address (default: start one on this machine)",
    )
    add(
        "--workers",
        type=positive,
        default=1,
        help="start this many describing processes in the cluster (default: %(default)s)",
    )
    add(
        "--gpus",
        type=non_negative_real,
        default=0.0,
        help="reserve this many GPUs for each describing process (default: 0)",
    )


def _add_fields(group: Any, config: Any, *options: tuple[str, Callable[[str], Any], str]) -> None:
    """Options that are fields of `config`, with its defaults."""
    for name, kind, text in options:
        default = getattr(config, name[2:].replace("-", "_"))
        group.add_argument(name, type=kind, default=default, help=f"{text} (default: %(default)s)")


def _backend(options: argparse.Namespace) -> BackendConfig:
    kind: BackendKind = options.backend or ("openai" if options.url else "transformers")
    url = options.url or LOCAL_URL
    model = options.model or (MODEL if kind == "transformers" else "")
    if kind == "transformers" and model in CAPTIONERS and not Path(model).is_dir():
        model = CAPTIONERS[model][0]
    chosen: dict[str, Any] = {
        "kind": kind,
        "model": model,
        "url": url,
        "api_key": _api_key(options) if kind == "openai" else "",
        "extra": _extra(options.extra),
    }
    # The other fields are options of the same name.
    same = {field.name: getattr(options, field.name) for field in fields(BackendConfig) if field.name not in chosen}
    return BackendConfig(**chosen, **same)


def _config(options: argparse.Namespace) -> CaptionConfig:
    sampling = Sampling(options.prompt, options.temperature, options.top_p, options.max_tokens, options.seed)
    return CaptionConfig(sampling, options.bad_retries, tuple(options.accept), options.retry_failed, options.mixed)


def _api_key(options: argparse.Namespace) -> str:
    if options.api_key_file:
        return Path(options.api_key_file).read_text(encoding="utf-8").strip()
    return os.environ.get(options.api_key_env, "").strip()


def _extra(text: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ShapeError as error:
        raise ValueError(f"--extra must be a JSON object like {{...}}, not {text}.") from error
    except ValueError as error:
        raise ValueError(f"--extra is not JSON ({error}).") from error


class _Display:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, total: int, guard: InterruptGuard) -> None:
        self.guard = guard
        self._last = time.monotonic()
        self._said = False
        figures = TextColumn("{task.fields[speed]:.2f}/s {task.fields[note]}")
        self.bar = bar(figures, transient=False)
        self.task = self.bar.add_task("describing", total=total, speed=0.0, note="")

    def __enter__(self) -> _Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def stopping(self) -> bool:
        """Whether Ctrl-C was pressed; says so at once, though what is running may take a while."""
        if self.guard.requested and not self._said:
            self._said = True
            self.bar.update(self.task, note=STOPPING)
            if self.bar.disable:
                print(f"seps caption: {STOPPING}.", file=sys.stderr)
        return self.guard.requested

    def update(self, tally: Tally) -> None:
        """Show where the run stands."""
        aside = sum(tally.set_aside.values())
        note = f"{aside} set aside" if aside else ""
        if self.guard.requested:
            note = STOPPING
        self.bar.update(self.task, completed=tally.done, speed=tally.per_second, note=note)
        if self.bar.disable and time.monotonic() - self._last > QUIET_SECONDS:
            self._last = time.monotonic()
            speed = f"{tally.per_second:.2f} images/s"
            print(f"{tally.done} of {tally.total} images, {speed} {note}".rstrip(), file=sys.stderr)


def _print(report: dict[str, Any]) -> None:
    title = f"{report['described_in_file']} of {report['images']} images described in {printable(report['out'])}"
    table = Table(show_header=False, title=escape(title))
    table.add_column("")
    table.add_column("", justify="right")
    rows = {"described now / before": f"{report['described_now']} / {report['described_before']}"}
    rows |= {f"set aside: {reason}": str(count) for reason, count in report["set_aside"].items()}
    if report["set_aside_before"]:
        rows["set aside by an earlier run"] = str(report["set_aside_before"])
    rows |= {f"bad answers: {reason}": str(count) for reason, count in report["bad_answers"].items()}
    if report["recovered_by_asking_again"]:
        rows["good after asking again"] = str(report["recovered_by_asking_again"])
    if report["words"]:
        rows["words, min / median / max"] = "{min} / {median:g} / {max}".format(**report["words"])
    rows["speed"] = f"{report['images_per_second']:g} images/s, {report['seconds']:g} s"
    for row in rows.items():
        table.add_row(*row)
    Console(soft_wrap=False).print(table)
    for sample in report["samples"]:
        text = printable(" ".join(sample["dense"].split()))
        print(f"{printable(sample['image'])}: {text[:300]}{'...' if len(text) > 300 else ''}")
    if report["set_aside_before"]:
        print("Images that an earlier run set aside were skipped; --retry-failed describes them.")
    if report["failed"]:
        print(f"Images without a description, and why: {printable(report['failed'])}")
    if report["interrupted"]:
        print("Stopped on request. The same command goes on from here.")
