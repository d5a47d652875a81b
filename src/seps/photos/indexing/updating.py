"""Bring the store of a folder up to date. Where nothing has changed, no model is loaded and nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from seps.photos.indexing.build import IndexOptions, IndexReport, index_folder, up_to_date
from seps.photos.indexing.opening import roots_to_read, settings_at
from seps.retrieval.config import DEFAULT_MODEL
from seps.retrieval.engine.engine import Engine
from seps.retrieval.engine.loading import engine_of, load_engine


@dataclass(frozen=True)
class Update:
    """What was done, and the engine, where it was needed for that."""

    report: IndexReport
    engine: Engine | None = None


def update_store(
    folders: Sequence[str],
    store: str,
    model: object = None,
    *,
    options: IndexOptions | None = None,
    device: str | Callable[[], str] = "cpu",
    plugins: Iterable[str | os.PathLike[str]] = (),
    first: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] | None = None,
) -> Update:
    """Index what is new, changed or gone in the folders (none: all of the store's).

    `model`: its name, or the object; default: that of the store, else `base`. `device` may be a function, which is
    called where a model is loaded, and `first` is called before a store is made. A store without a bank of background
    queries stays without. Raises as `index_folder`.
    """
    known = settings_at(store)
    wanted = options or IndexOptions()
    roots_to_read(known, store, folders, wanted)  # raises for the folders before anything is loaded
    report = up_to_date(folders, store, options=wanted) if known is not None else None
    if report is not None:
        return Update(report)
    if known is not None:  # as the store is
        wanted = replace(wanted, bank=bool(known.bank))
    name = model if isinstance(model, str) else "custom model" if model is not None else DEFAULT_MODEL
    if known is not None and not isinstance(model, str):
        name = known.model
    if model is None or isinstance(model, str):
        engine = load_engine(name, device=device if isinstance(device, str) else device(), plugins=plugins)
    else:
        engine = engine_of(model)
    if known is None:
        first()
    return Update(index_folder(folders, store, engine, name, options=wanted, progress=progress), engine)
