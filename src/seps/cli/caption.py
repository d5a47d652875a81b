"""`seps caption`: write one description per image with a vision-language model."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape
from rich.progress import TextColumn
from rich.table import Table

from seps.captioning import BackendConfig, CaptionConfig, RayConfig, Sampling, caption_images
from seps.captioning.config import ACCEPTABLE, CAPTIONERS, LOCAL_URL, MODEL, BackendKind
from seps.captioning.images import ImageList, scan_images
from seps.captioning.run import Tally
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
    refuse_same_file,
)
from seps.cli.shared.errors import EXIT_INTERRUPTED
from seps.cli.shared.outputs import check_output, write_output
from seps.cli.shared.parser import Parser
from seps.cli.shared.progress import bar
from seps.cli.shared.text import printable
from seps.retrieval.data.gallery import OTHER
from seps.training.interrupt import InterruptGuard

EXIT_UNFINISHED = 1
QUIET_SECONDS = 30.0
SHOWN_PROBLEMS = 20
STOPPING = "finishing what is running; Ctrl-C again leaves at once"


def run(arguments: Sequence[str]) -> int:
    """Describe images; 0 when every image was accounted for, 1 when the run had to stop, 130 after Ctrl-C."""
    options = build_parser().parse_args(arguments)
    images, out = Path(options.images), Path(options.out)
    if out.exists() and images.exists() and os.path.samefile(images, out):
        raise ValueError(f"--out {out} is the data set itself. Choose another file for the descriptions.")
    summary = check_output(options.report, "--report", "described_in_file") if options.report else None
    refuse_same_file("--report", options.report, [options.images, options.out])
    backend, config = _backend(options), _config(options)
    ray = RayConfig(options.ray_address, options.workers, options.gpus) if options.engine == "ray" else None
    found = scan_images(images, options.images_root)
    items = found.items[: options.limit]
    with InterruptGuard() as guard, _Display(len(items), guard) as display:
        report = caption_images(items, out, backend, config, ray=ray, stop=display.stopping, progress=display.update)
    report["not_read"] = [str(problem) for problem in found.problems]
    report["skipped"] = {reason: len(names) for reason, names in found.skipped.items()}
    if summary is not None:
        write_output(summary, report)
    _print(report)
    _print_left_out(found)
    if report["problem"]:
        print(f"seps caption: {printable(report['problem'])}", file=sys.stderr)
        return EXIT_UNFINISHED
    return EXIT_INTERRUPTED if report["interrupted"] else 0


def build_parser() -> argparse.ArgumentParser:
    """The options of `seps caption`."""
    said, who, how = Sampling(), BackendConfig(), CaptionConfig()
    parser = Parser(
        "seps caption",
        description=__doc__,
        epilog="Started again, it goes on where it was stopped or killed. Images that got no good answer are in "
        "OUT's side file, dense.failed.jsonl, with the reason.",
    )
    add = parser.add_argument
    add("images", help="a folder (walked), a .tar shard, or a JSONL data set")
    add(
        "--out",
        type=output_file_anywhere,
        default="dense.jsonl",
        help="file to write, one line per image (default: %(default)s)",
    )
    add("--report", type=output_file, metavar="FILE", help="write the report as JSON, too")
    add("--images-root", type=input_folder, metavar="DIR", help="folder that the paths in a JSONL data set start from")
    add("--limit", type=positive, metavar="N", help="describe the first N images only")

    add = parser.add_argument_group("who writes").add_argument
    add("--backend", choices=("transformers", "openai"), help="default: openai with --url, else transformers")
    add(
        "--model",
        help="; ".join(f"{name} ({about})" for name, (_, about) in CAPTIONERS.items())
        + f"; or a folder, a hub id (default: {MODEL}), or the server's name for it (default: its only one)",
    )
    add("--url", help=f"address of a server that speaks the OpenAI chat protocol (default: {LOCAL_URL})")
    add("--api-key-file", type=input_file, metavar="FILE", help="file that holds the server's key")
    add("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="else its variable (default: %(default)s)")
    add(
        "--batch-size",
        type=positive,
        default=who.batch_size,
        help="transformers: images at once (default: %(default)s)",
    )
    add("--parallel", type=positive, default=who.parallel, help="openai: requests at once (default: %(default)s)")
    add(
        "--device",
        type=device_or_auto,
        default=who.device,
        help="transformers: auto, cpu, cuda, cuda:1 (default: %(default)s)",
    )
    add("--dtype", default=who.dtype, help="transformers: auto, float32, float16, bfloat16 (default: %(default)s)")
    add("--max-side", type=non_negative, default=who.max_side, help="make longer images smaller; 0 never (default: 0)")
    add("--extra", default="{}", metavar="JSON", help="openai: more keys of a request, e.g. '{\"max_tokens\": null}'")

    add = parser.add_argument_group("what is written (defaults as published)").add_argument
    add("--prompt", default=said.prompt, help="default: %(default)s")
    add("--temperature", type=non_negative_real, default=said.temperature, help="default: %(default)s")
    add("--top-p", type=positive_fraction, default=said.top_p, help="default: %(default)s")
    add("--max-tokens", type=positive, default=said.max_tokens, help="default: %(default)s")
    add("--seed", type=non_negative, default=said.seed, help="default: %(default)s")
    add(
        "--bad-retries",
        type=non_negative,
        default=how.bad_retries,
        help="ask again after a bad answer (default: %(default)s)",
    )
    add("--accept", nargs="+", choices=ACCEPTABLE, default=[], help="bad answers to take all the same")
    add("--retry-failed", action="store_true", help="try images again that an earlier run set aside")
    add("--mixed", action="store_true", help="allow several models or settings in one file")

    add = parser.add_argument_group("when the server fails").add_argument
    add(
        "--retries",
        type=non_negative,
        default=who.retries,
        help="per request, with growing pauses (default: %(default)s)",
    )
    add(
        "--backoff",
        type=non_negative_real,
        default=who.backoff,
        help="seconds of the first pause (default: %(default)s)",
    )
    add("--timeout", type=positive_real, default=who.timeout, help="seconds for an answer (default: %(default)s)")
    add(
        "--requests-per-minute",
        type=non_negative_real,
        default=who.requests_per_minute,
        help="0 does not limit (default: 0)",
    )
    add("--give-up-after", type=positive, default=who.give_up_after, help="faults in a row (default: %(default)s)")

    add = parser.add_argument_group("over a cluster").add_argument
    add("--engine", choices=("local", "ray"), default="local", help="ray: Ray Data (default: %(default)s)")
    add("--ray-address", default="", help="address of the cluster (default: start one on this machine)")
    add("--workers", type=positive, default=1, help="describing processes in the cluster (default: %(default)s)")
    add("--gpus", type=non_negative_real, default=0.0, help="GPUs of each (default: 0)")
    return parser


def _backend(options: argparse.Namespace) -> BackendConfig:
    kind: BackendKind = options.backend or ("openai" if options.url else "transformers")
    url = options.url or LOCAL_URL
    model = options.model or (MODEL if kind == "transformers" else "")
    if kind == "transformers" and model in CAPTIONERS and not Path(model).is_dir():
        model = CAPTIONERS[model][0]
    return BackendConfig(
        kind=kind,
        model=model,
        url=url,
        api_key=_api_key(options) if kind == "openai" else "",
        batch_size=options.batch_size,
        parallel=options.parallel,
        retries=options.retries,
        timeout=options.timeout,
        backoff=options.backoff,
        requests_per_minute=options.requests_per_minute,
        give_up_after=options.give_up_after,
        max_side=options.max_side,
        device=options.device,
        dtype=options.dtype,
        proxies=_proxies(url),
        extra=_extra(options.extra),
    )


def _config(options: argparse.Namespace) -> CaptionConfig:
    sampling = Sampling(options.prompt, options.temperature, options.top_p, options.max_tokens, options.seed)
    return CaptionConfig(sampling, options.bad_retries, tuple(options.accept), options.retry_failed, options.mixed)


def _api_key(options: argparse.Namespace) -> str:
    if options.api_key_file:
        return Path(options.api_key_file).read_text(encoding="utf-8").strip()
    return os.environ.get(options.api_key_env, "").strip()


def _proxies(url: str) -> dict[str, str]:
    host = urlsplit(url).hostname or ""
    if host in ("localhost", "127.0.0.1", "::1") or urllib.request.proxy_bypass(host):
        return {}
    return dict(urllib.request.getproxies())


def _extra(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--extra is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"--extra must be a JSON object like {{...}}, not {text}.")
    return value


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


def _print_left_out(found: ImageList) -> None:
    """Say what of the folder could not be read, and which skipped files may be pictures all the same."""
    lines = [str(problem) for problem in found.problems[:SHOWN_PROBLEMS]]
    if len(found.problems) > SHOWN_PROBLEMS:
        lines.append(f"and {len(found.problems) - SHOWN_PROBLEMS} more (--report lists all)")
    if lines:
        print(f"{len(found.problems)} could not be read and have no description:", file=sys.stderr)
    for line in lines:
        print(f"  {printable(line)}", file=sys.stderr)
    for reason, names in sorted(found.skipped.items()):
        if reason != OTHER:
            print(
                f"{len(names)} skipped: {reason} ({printable(names[0])}{', ...' * (len(names) > 1)})", file=sys.stderr
            )


def _print(report: dict[str, Any]) -> None:
    table = Table(
        show_header=False,
        title=escape(
            f"{report['described_in_file']} of {report['images']} images described in {printable(str(report['out']))}"
        ),
    )
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("described now / before", f"{report['described_now']} / {report['described_before']}")
    for reason, count in report["set_aside"].items():
        table.add_row(f"set aside: {reason}", str(count))
    if report["set_aside_before"]:
        table.add_row("set aside by an earlier run", str(report["set_aside_before"]))
    for reason, count in report["bad_answers"].items():
        table.add_row(f"bad answers: {reason}", str(count))
    if report["recovered_by_asking_again"]:
        table.add_row("good after asking again", str(report["recovered_by_asking_again"]))
    if report["words"]:
        words = report["words"]
        table.add_row("words, min / median / max", f"{words['min']} / {words['median']:g} / {words['max']}")
    table.add_row("speed", f"{report['images_per_second']:g} images/s, {report['seconds']:g} s")
    console = Console(soft_wrap=False)
    console.print(table)
    for sample in report["samples"]:
        text = printable(" ".join(sample["dense"].split()))
        console.print(
            f"{printable(sample['image'])}: {text[:300]}{'...' if len(text) > 300 else ''}",
            markup=False,
            highlight=False,
        )
    if report["failed"]:
        console.print(
            f"Images without a description, and why: {printable(str(report['failed']))}", markup=False, highlight=False
        )
    if report["interrupted"]:
        console.print("Stopped on request. The same command goes on from here.")
