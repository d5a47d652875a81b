"""Where the store of a folder is when nobody named one (below the user's data folder), and folders within a store."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seps.photos.store.store import Store

_NAMED = 10
"""Folders of a store that an error names."""


def data_folder(environment: Mapping[str, str], platform: str, home: Path) -> Path:
    """The folder for data of programs: `XDG_DATA_HOME` where it is set, else what the system (`sys.platform`) has.

    A relative `XDG_DATA_HOME` counts as none, as its specification says.
    """
    named = environment.get("XDG_DATA_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    if platform == "win32":
        return Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local")
    if platform == "darwin":
        return home / "Library" / "Application Support"
    return home / ".local" / "share"


def default_store(data: Path, folder: str | os.PathLike[str], model: str) -> Path:
    """The store of a folder and a model: the same for every way to write the folder, another for every model.

    A model that is a folder is told apart by its path.
    """
    root = os.path.realpath(folder)
    name = os.path.realpath(model) if os.path.isdir(model) else model
    digest = hashlib.sha256(f"{root}\0{name}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
    readable = re.sub(r"[^\w-]+", "-", Path(root).name, flags=re.ASCII).strip("-")[:40] or "root"
    return data / "seps" / "stores" / f"{readable}-{digest}"


class EmptyFolderError(ValueError):
    """No picture of the store is below the folder."""


def check_folder(store: Store, folder: str) -> None:
    """Raise EmptyFolderError where no picture of the store is below the folder."""
    from seps.photos.store.filters import Filters

    if next(store.scan(["id"], store.allowed(Filters(folder)), batch_size=1), None) is None and len(store):
        there = [name if name.isprintable() else repr(name) for name in store.folders()]
        more = " and others" if len(there) > _NAMED else ""
        names = f"Its folders are {', '.join(there[:_NAMED])}{more}." if there else "It has no folders."
        raise EmptyFolderError(f"No picture of the store {store.location} is in the folder {folder!r}. {names}")
