"""Where the store of a folder is when nobody named one: below the user's data folder, one per folder and model."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path


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
