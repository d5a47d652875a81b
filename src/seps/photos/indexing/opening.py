"""Which store an indexing run writes to: made or opened, of the same model and settings, and with little to lose.

A store has one or more folders (roots). Paths of the first are kept relative to it, those of the others absolute, so
that a store of one folder is what it always was. A root that is removed leaves its rows behind, excluded: added again,
it is as it was.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from seps.images.formats import is_video
from seps.images.shards import UnreadableImage, read_source
from seps.photos.indexing.gallery import Gallery
from seps.photos.store.rows import (
    OTHER_WORDS,
    IndexedFile,
    MissingStoreError,
    OtherModelError,
    StoreError,
    StoreSettings,
)
from seps.photos.store.store import Store
from seps.ray_cluster import RayConfig
from seps.retrieval.embedded import EMBEDDED
from seps.retrieval.engine.engine import Engine
from seps.retrieval.ranking import bank

MOST_UNREADABLE = 10_000
"""Files that could not be read that a store remembers."""


@dataclass(frozen=True)
class IndexOptions:
    """How to index."""

    size: str | None = None
    """How a picture is kept, one of `Traits.sizes`; None: as in the store, and in a new store `Traits.default_size`."""
    batch_size: int = 32
    workers: int | None = None
    moved: bool = False
    """The folder itself has moved: continue at the new place."""
    ray: RayConfig | None = None
    """Decode and embed on a Ray cluster, with its number of workers."""
    prune: bool = False
    """Let any number of absent pictures leave the store, and those in places that are skipped."""
    strict: bool = False
    """Stop at a line of descriptions that cannot be used."""
    forget_descriptions: Sequence[str] = ()
    """Names or patterns of pictures whose stored descriptions are taken away."""
    bank: bool = True
    """Keep levels over the bank of background queries. False: a new store gets none, another is left as it is."""
    exclude: Sequence[str] = ()
    """Patterns of what is left out, beside those of ignore files (`seps.photos.indexing.ignoring`)."""
    dense: Sequence[str | os.PathLike[str]] = ()
    """JSONL files of descriptions, beside those in the folders."""
    metadata: bool | None = None
    """Whether titles, captions, keywords, persons and places of the files become descriptions; None: as in the store,
    and in a new store they do."""
    add: bool = False
    """A folder that the store does not have joins those that it has."""

    def __post_init__(self) -> None:
        """One pattern or file may come by itself. Raises ValueError for numbers below 1."""
        for name in ("forget_descriptions", "exclude", "dense"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str | os.PathLike) else tuple(value))
        for name in ("batch_size", "workers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} of IndexOptions is {value!r}; it must be at least 1.")


@dataclass(frozen=True)
class Root:
    """A folder to index."""

    folder: str
    base: str
    """As in `Gallery`."""
    known: bool
    """Whether the store has it."""


def settings_at(location: str | os.PathLike[str]) -> StoreSettings | None:
    """The settings of the store at a place; None where there is none."""
    try:
        return Store.open(location).settings
    except MissingStoreError:
        return None


def roots_to_read(
    settings: StoreSettings | None,
    location: str | os.PathLike[str],
    folders: Iterable[str | os.PathLike[str]],
    options: IndexOptions,
) -> list[Root]:
    """The folders to index, once each; all of the store's where none is named.

    A folder that the store does not have is added where the call says so (`options.add`), or names one that it has.
    Raises StoreError for another folder, and for one inside another.
    """
    places = list(dict.fromkeys(os.path.realpath(folder) for folder in folders))
    have = () if settings is None else (settings.root, *settings.more_roots)
    if not places:
        places = list(() if settings is None else settings.roots)
    if not places:
        raise StoreError(f"There is no store {location} yet: name the folder of pictures to make it of.")
    active = () if settings is None else settings.roots
    if settings is not None and not any(stored_root(place, have) in active for place in places):
        if options.moved:
            if len(places) > 1 or len(have) > 1:
                raise StoreError(
                    f"The store {location} holds several folders: --moved does not say which. Add the new place "
                    "with --add, then take out the old one with --remove-root; nothing is computed again. Nothing was "
                    "changed."
                )
            return [Root(places[0], "", True)]
        if not options.add:
            raise StoreError(_other_folder(str(location), active, places[0]))
    first = places[0] if settings is None else settings.root
    roots = [
        Root(place, "" if place == first else Path(place).as_posix(), stored_root(place, have) in active)
        for place in places
    ]
    _check_apart([*roots, *(Root(root, "", True) for root in active)])
    return roots


def _other_folder(location: str, active: Sequence[str], place: str) -> str:
    """What to do about a folder that the store does not have. `seps find` and `Library` say it, too."""
    store = shlex.quote(location)
    outer = next((root for root in active if Path(place).is_relative_to(root)), None)
    if outer is not None:
        part = shlex.quote(Path(place).relative_to(outer).as_posix())
        return (
            f"{place} lies in {outer}, which the store {location} holds as a whole. To bring it up to date: seps index "
            f'--store {store}. To search this part alone: seps search "a dog" --store {store} --folder {part}'
        )
    command = f"seps index {shlex.quote(place)} --store {store}"
    return (
        f"The store {location} holds the folder {', '.join(active)}, not {place}. If the folder was moved: {command} "
        f"--moved. To have both in one store: {command} --add. For another folder use another store."
    )


def stored_root(place: str, have: Iterable[str]) -> str | None:
    """The root of the store that is this folder."""
    return next((root for root in have if Path(root) == Path(place)), None)


def _check_apart(roots: Sequence[Root]) -> None:
    """Raise StoreError where one folder lies in another: its pictures would be in the store twice."""
    for inner in roots:
        for outer in roots:
            if Path(inner.folder) != Path(outer.folder) and Path(inner.folder).is_relative_to(outer.folder):
                raise StoreError(
                    f"{inner.folder} lies in {outer.folder}: its pictures would be in the store twice. Name one of "
                    "them. Nothing was changed."
                )


@dataclass(frozen=True)
class MissingRows:
    """Rows of a folder that are not among its images."""

    gone: list[str]
    """Ids of those whose files are known to be absent."""
    excluded: list[str]
    """Ids of those in places that are left out; their files may be there."""
    kept: int
    """How many stay, with those that are excluded."""


def missing_from(gallery: Gallery, known: Iterable[IndexedFile], prune: bool) -> MissingRows:
    """What of the rows `known` of a folder is not in it. With `prune` those that are left out are gone, too."""
    there = {found.id for found in gallery.images}
    rows = [row for row in known if row.id not in there]
    inside = {row.id: row.path.removeprefix(f"{gallery.base}/" if gallery.base else "") for row in rows}
    excluded = {row.id for row in rows if not prune and gallery.is_left_out(inside[row.id], row.member)}
    gone = sorted(row.id for row in rows if gallery.is_absent(inside[row.id]) and row.id not in excluded)
    return MissingRows(gone, sorted(excluded), len(rows) - len(gone))


def rows_of(gallery: Gallery, known: Iterable[IndexedFile], settings: StoreSettings) -> list[IndexedFile]:
    """The rows of one folder."""
    return [row for row in known if settings.base_of(row.path) == gallery.base]


def _check_loss(
    location: str,
    gallery: Gallery,
    others: Sequence[Gallery],
    known: dict[str, IndexedFile],
    own: Sequence[IndexedFile],
) -> None:
    """Raise StoreError where too much of a folder's `own` rows would go unasked. Moved pictures are no loss, nor are
    frames that a video has no more although its file is there.
    """
    gone = missing_from(gallery, own, prune=False).gone
    allowed = max(1, len(own) // 10)
    if not gone or (len(gone) <= allowed and len(gone) < len(own)):
        return
    rows = [known[identity] for identity in gone]
    sizes = {row.size for row in rows}
    seen = set()
    for place in others:
        for found in place.images:
            if found.id not in known and found.size in sizes:
                try:
                    seen.add(hashlib.sha256(read_source(found.source(place.root))).hexdigest())
                except UnreadableImage:
                    continue
    videos = {found.stored for found in gallery.images if is_video(found.path)}
    lost = [row for row in rows if row.sha256 not in seen and row.path not in videos]
    if lost and (len(lost) > allowed or len(lost) == len(own)):
        part = "all" if len(lost) == len(own) else f"{len(lost)} of the {len(own)}"
        names = ", ".join(sorted(row.path for row in lost)[:3])
        raise StoreError(
            f"{part} pictures of the store {location} are no longer in {gallery.root} ({names}, ...). Is the disk "
            "there, and is it the right folder? If they were deleted on purpose, say so with --prune. Nothing was "
            "changed."
        )


def _settings(
    engine: Engine, roots: Sequence[Root], model_name: str, options: IndexOptions, have: StoreSettings | None
) -> StoreSettings:
    """The settings of a store of this engine, which may `have` some. Raises StoreError for a size it cannot have."""
    name = str(Path(model_name).resolve()) if model_name not in EMBEDDED and Path(model_name).is_dir() else model_name
    traits, digests = engine.traits, engine.digests()
    if traits.guides:
        raise StoreError(
            f"The model {name} reads the guides {', '.join(traits.guides)} beside its pictures, which stores do not "
            "keep. Use a model without them; seps train and seps eval take guides."
        )
    size = options.size or (traits.default_size if have is None else have.layout.size)
    try:
        layout = engine.layout(size)
    except ValueError as error:
        raise StoreError(str(error)) from error
    return StoreSettings(
        root=roots[0].folder,
        model=name,
        model_hash=digests.pictures,
        layout=layout,
        words_hash=digests.words,
        text_hash=digests.texts,
        bank=bank.bank_name() if options.bank else "",
        metadata=options.metadata is not False,
    )


def open_store(
    location: str | os.PathLike[str],
    galleries: Sequence[Gallery],
    roots: Sequence[Root],
    engine: Engine,
    model_name: str,
    options: IndexOptions,
) -> tuple[Store, dict[str, IndexedFile]]:
    """The store, made where there is none, and its files. A store that does not fit is left as it was."""
    settings = _settings(engine, roots, model_name, options, settings_at(location))
    try:
        store = Store.open(location)
    except MissingStoreError:
        return Store.create(location, _with_roots(settings, roots)), {}
    _check_same(store, settings)
    known = store.known()
    if not options.prune:
        for gallery in galleries:
            own = rows_of(gallery, known.values(), store.settings)
            _check_loss(store.location, gallery, galleries, known, own)
    placed = replace(_with_roots(store.settings, roots), metadata=reads_metadata(store.settings, options))
    if store.settings != placed:
        store.set_settings(placed)
    tag = settings.bank if options.bank else store.settings.bank
    if tag and (store.settings.bank != tag or store.settings.text_hash != settings.text_hash):
        store.set_bank(tag, settings.text_hash)
    return store, known


def reads_metadata(settings: StoreSettings, options: IndexOptions) -> bool:
    """Whether the metadata of files becomes descriptions."""
    return settings.metadata if options.metadata is None else options.metadata


def _with_roots(settings: StoreSettings, roots: Sequence[Root]) -> StoreSettings:
    """The settings with these folders in use; the one of base "" is the first."""
    first = next((root.folder for root in roots if not root.base), settings.root)
    more = tuple(dict.fromkeys([*settings.more_roots, *(root.base for root in roots if root.base)]))
    named = {root.base or root.folder for root in roots}
    removed = tuple(root for root in settings.removed_roots if root not in named)
    return replace(settings, root=first, more_roots=more, removed_roots=removed)


def remember_unreadable(store: Store, galleries: Sequence[Gallery], failed: Mapping[str, tuple[int, int]]) -> None:
    """Keep which files could not be read, so that a search need not read them again to know that nothing is new."""
    before = store.settings.unreadable
    broken = {name: facts for gallery in galleries for name, facts in gallery.unreadable.items()}
    seen = {found.id for gallery in galleries for found in gallery.images} | broken.keys()
    others = before if len(galleries) < len(store.settings.roots) else {}
    now = {**{name: facts for name, facts in others.items() if name not in seen}, **broken, **failed}
    if now != before:
        store.set_settings(replace(store.settings, unreadable=dict(list(now.items())[:MOST_UNREADABLE])))


def _check_same(store: Store, wanted: StoreSettings) -> None:
    have = store.settings
    if have.model_hash != wanted.model_hash:
        raise OtherModelError(
            f"The store {store.location} was made with another model ({have.model}, {have.model_hash[:8]}) than "
            f"{wanted.model} ({wanted.model_hash[:8]}): their states do not mix. Use that model or another store."
        )
    if have.words_hash != wanted.words_hash:
        raise OtherModelError(OTHER_WORDS.format(store.location))
    if have.layout != wanted.layout:
        raise StoreError(
            f"The store {store.location} keeps pictures at the size {have.layout.size!r}, not {wanted.layout.size!r}. "
            "Leave --size out, or use another store."
        )
