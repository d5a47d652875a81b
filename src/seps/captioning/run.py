"""A captioning run from images to a file: feed the backend, write each line as it comes, stop cleanly."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from seps.ray_cluster import RayConfig
from seps.retrieval.data import DataError

from .backends import Backend, build
from .config import BackendConfig, CaptionConfig
from .journal import Journal, maker_of
from .local_engine import Stop, run_local
from .report import Tally, evenly, make_report
from .sources import Item
from .work import Outcome, failed_line, good_line

Progress = Callable[[Tally], None]


def caption_images(
    items: Sequence[Item],
    out: str | os.PathLike[str],
    backend: BackendConfig,
    config: CaptionConfig | None = None,
    *,
    ray: RayConfig | None = None,
    stop: Stop = lambda: False,
    progress: Progress = lambda tally: None,
) -> dict[str, Any]:
    """Describe `items` into the JSONL file `out` and return the report.

    Lines that are there already stay, for images whose content is the same; the rest is described and written
    line by line. `stop` is asked several times a second: once true, what is running is finished and nothing new
    begins. A backend that fails for good ends the run early: the report's "problem" says why.
    Raises ValueError before anything is written where the file or the backend cannot be used.
    """
    config = config or CaptionConfig()
    halt = threading.Event()
    with Journal(out) as journal:
        built = None if ray is not None and backend.model else build(backend, halt)
        model = backend.model or (built.model if built is not None else "")
        _refuse_mixture(journal, model, config)
        todo = _with_known(items, journal, config)
        tally = Tally(len(todo))
        progress(tally)
        for outcome in _outcomes(todo, replace(backend, model=model), built, config, ray, halt, stop):
            _write(outcome, journal, tally, backend.kind, model, config)
            if tally.bad_in_a_row >= backend.give_up_after:
                tally.problem = tally.problem or _too_many_bad(tally)
            if tally.problem:
                halt.set()
            progress(tally)
        tally.interrupted = halt.is_set() and not tally.problem and tally.done < tally.total
        journal.tidy()
        return _report(items, journal, tally, backend.kind, model, config)


def _outcomes(
    items: list[Item],
    backend: BackendConfig,
    built: Backend | None,
    config: CaptionConfig,
    ray: RayConfig | None,
    halt: threading.Event,
    stop: Stop,
) -> Iterator[Outcome]:
    if ray is not None:
        from .ray_engine import run_ray

        return run_ray(items, backend, config, ray, halt, stop)
    return run_local(items, built or build(backend, halt), config, halt, stop)


def _write(outcome: Outcome, journal: Journal, tally: Tally, backend: str, model: str, config: CaptionConfig) -> None:
    if outcome.kind == "fatal":
        tally.problem = tally.problem or outcome.reason
        return
    if outcome.kind == "good":
        journal.write_good(good_line(outcome, backend, model, config))
    elif outcome.kind not in ("same", "aside"):
        journal.write_failed(failed_line(outcome, backend, model, config))
    tally.add(outcome)


def _with_known(items: Sequence[Item], journal: Journal, config: CaptionConfig) -> list[Item]:
    """Each item with the content hashes that are settled: described, or set aside for a bad answer."""
    todo = []
    for item in items:
        good, failed = journal.good.entries.get(item.id), journal.failed.entries.get(item.id)
        settled = failed is not None and failed.note[0] == "bad" and not config.retry_failed
        todo.append(
            replace(
                item,
                known=good.sha256 if good is not None else "",
                aside=failed.sha256 if failed is not None and settled else "",
            )
        )
    return todo


def _refuse_mixture(journal: Journal, model: str, config: CaptionConfig) -> None:
    ours = maker_of({"model": model, "settings": asdict(config.sampling)})
    others = [maker for maker in journal.makers if maker != ours]
    if others and not config.mixed:
        raise DataError(
            f"{journal.path} holds descriptions made with {others[0]}, and this run would add some made with {ours}. "
            "Choose another --out, the same settings, or --mixed to have both in one file."
        )


def _too_many_bad(tally: Tally) -> str:
    reasons = ", ".join(f"{reason} {count} times" for reason, count in tally.set_aside.most_common())
    return (
        f"{tally.bad_in_a_row} images in a row got no good answer ({reasons}). Read the answers in the side file: "
        "another model, another --prompt, more --max-tokens or --accept may help; then use --retry-failed."
    )


def _report(
    items: Sequence[Item], journal: Journal, tally: Tally, backend: str, model: str, config: CaptionConfig
) -> dict[str, Any]:
    entries = journal.good.entries
    described = [item.id for item in items if item.id in entries]
    samples = [journal.good.read(image) for image in evenly(described)]
    return make_report(
        tally,
        [entries[image].note[0] for image in described],
        [{"image": line["image"], "dense": line["dense"]} for line in samples],
        out=str(Path(journal.path)),
        failed=str(journal.failed_path) if journal.failed.entries else "",
        model=model,
        backend=backend,
        settings=asdict(config.sampling),
    )
