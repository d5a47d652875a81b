"""Which store an indexing run writes to: made or opened, of the same model and settings, and with little to lose."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from seps.ray_cluster import RayConfig
from seps.retrieval.data import UnreadableImage, read_source
from seps.retrieval.data.gallery import Gallery, is_hidden
from seps.retrieval.data.guides import stacked
from seps.retrieval.index.bank import bank_name
from seps.retrieval.index.codec import Precision, model_hash
from seps.retrieval.index.guides import told_widths
from seps.retrieval.index.rows import FORMAT, IndexedFile, MissingStoreError, StoreError, StoreSettings
from seps.retrieval.index.store import Store
from seps.retrieval.index.zeroshot import ZeroShotModel, other_words
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import EMBEDDED


@dataclass(frozen=True)
class IndexOptions:
    """How to index."""

    precision: Precision = "float16"
    keep_patches: int | None = None
    """Patches kept per image, those that matter most before any caption is known; None: all."""
    keep_words: int | None = None
    """Words that each description is merged to; None: all."""
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


def gone_from(gallery: Gallery, known: dict[str, IndexedFile], prune: bool) -> tuple[list[str], int]:
    """Ids of rows whose files are known to be absent, and how many others without a file are kept."""
    missing = [known[identity] for identity in known.keys() - {found.id for found in gallery.images}]
    absent = [row for row in missing if gallery.is_absent(row.path)]
    if not prune:
        absent = [row for row in absent if not is_hidden(row.path) and not is_hidden(row.member or "")]
    return sorted(row.id for row in absent), len(missing) - len(absent)


def _check_loss(location: str, gallery: Gallery, known: dict[str, IndexedFile], gone: Sequence[str]) -> None:
    """Raise StoreError where `gone` is too much of the store to delete unasked. Moved pictures are no loss."""
    allowed = max(1, len(known) // 10)
    if not gone or (len(gone) <= allowed and len(gone) < len(known)):
        return
    rows = [known[identity] for identity in gone]
    sizes = {row.size for row in rows}
    seen = set()
    for found in gallery.images:
        if found.id not in known and found.size in sizes:
            try:
                seen.add(hashlib.sha256(read_source(found.source(gallery.root))).hexdigest())
            except UnreadableImage:
                continue
    lost = [row for row in rows if row.sha256 not in seen]
    if lost and (len(lost) > allowed or len(lost) == len(known)):
        part = "all" if len(lost) == len(known) else f"{len(lost)} of the {len(known)}"
        names = ", ".join(sorted(row.path for row in lost)[:3])
        raise StoreError(
            f"{part} pictures of the store {location} are no longer in {gallery.root} ({names}, ...). Is the disk "
            "there, and is it the right folder? If they were deleted on purpose, say so with --prune. Nothing was "
            "changed."
        )


def _settings(
    model: RetrievalModel | ZeroShotModel, root: str, model_name: str, options: IndexOptions, guides: dict[str, int]
) -> StoreSettings:
    """The settings of a store of this model. Raises StoreError for options that the model cannot have."""
    if options.keep_words is not None and options.keep_words < 1:
        raise StoreError(f"keep_words is {options.keep_words}; a description needs at least one word.")
    name = str(Path(model_name).resolve()) if model_name not in EMBEDDED and Path(model_name).is_dir() else model_name
    keep = options.keep_patches
    if isinstance(model, ZeroShotModel):
        if keep is not None:
            raise StoreError(f"keep_patches is {keep}, but of this model one vector per image is kept, and no patches.")
        return model.settings(
            root,
            name,
            precision=options.precision,
            keep_words=options.keep_words,
            bank=bank_name() if options.bank else "",
        )
    grid = model.vision.grid_for(*model.image_size)
    if keep is not None and not 1 <= keep <= grid[0] * grid[1]:
        raise StoreError(f"keep_patches is {keep}; this model has {grid[0] * grid[1]} patches per image.")
    return StoreSettings(
        root=root,
        model=name,
        model_hash=model_hash(model),
        width=model.config.embed_size,
        grid=grid,
        num_prefix_tokens=model.vision.num_prefix_tokens,
        precision=options.precision,
        keep_patches=None if keep == grid[0] * grid[1] else keep,
        keep_words=options.keep_words,
        format=FORMAT if guides else 1,
        guides=guides,
        bank=bank_name() if options.bank else "",
    )


def open_store(
    location: str | os.PathLike[str],
    gallery: Gallery,
    model: RetrievalModel | ZeroShotModel,
    model_name: str,
    options: IndexOptions,
    guides: dict[str, int],
) -> tuple[Store, dict[str, IndexedFile]]:
    """The store, made where there is none, and its files. A store that does not fit is left as it was."""
    settings = _settings(model, str(gallery.root), model_name, options, guides)
    try:
        store = Store.open(location)
    except MissingStoreError:
        if isinstance(model, RetrievalModel):
            stacked([], () if guides else model.head.guides, str(gallery.root))  # says what is missing
        return Store.create(location, settings), {}
    _check_same(store, settings, options.moved)
    known = store.known()
    if not options.prune:
        _check_loss(store.location, gallery, known, gone_from(gallery, known, prune=False)[0])
    if store.settings.root != settings.root:
        store.set_settings(replace(store.settings, root=settings.root))
    if options.bank and store.settings.bank != settings.bank:
        store.set_bank(settings.bank)
    return store, known


def _check_same(store: Store, wanted: StoreSettings, moved: bool) -> None:
    have = store.settings
    if have.model_hash != wanted.model_hash:
        raise StoreError(
            f"The store {store.location} was made with another model ({have.model}, {have.model_hash[:8]}) than "
            f"{wanted.model} ({wanted.model_hash[:8]}): their states do not mix. Use that model or another store."
        )
    if have.words_hash != wanted.words_hash:
        raise StoreError(other_words(store.location))
    if _kept(have) != _kept(wanted):
        raise StoreError(
            f"The store {store.location} keeps {_kept(have)}, not {_kept(wanted)}. Leave these options as they were, "
            "or use another store."
        )
    if wanted.guides and have.guides != wanted.guides:
        raise StoreError(
            f"The store {store.location} keeps the guides {told_widths(have.guides)}, not "
            f"{told_widths(wanted.guides)} (values per image). Leave the guides as they were, or use another store."
        )
    if have.root != wanted.root and not moved:
        raise StoreError(
            f"The store {store.location} holds the folder {have.root}, not {wanted.root}. If the folder was moved, "
            "say so with --moved; for another folder use another store."
        )


def _kept(settings: StoreSettings) -> str:
    """What a store keeps per image, for messages."""
    patches, words = settings.keep_patches or "all", settings.keep_words or "all"
    return f"{patches} patches and {words} words of a description as {settings.precision}"
