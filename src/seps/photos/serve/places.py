"""How clients see paths: from the name of the indexed folder on, never where that folder lies on this machine."""

from __future__ import annotations

import posixpath
from pathlib import PurePath

from seps.photos.store.rows import StoreSettings


def folder_names(settings: StoreSettings) -> dict[str, str]:
    """A different name for each folder of a store: the last part of its path, with a number where that is taken."""
    names: dict[str, str] = {}
    for root in (settings.root, *settings.more_roots):
        plain = name = PurePath(root).name or "root"
        number = 1
        while name in names.values():
            number += 1
            name = f"{plain} ({number})"
        names[root] = name
    return names


def shown_path(settings: StoreSettings, path: str) -> str:
    """The path of a row: below the folder of a store; with several folders, from the folder's name on."""
    if not settings.more_roots:
        return path
    base = settings.base_of(path)
    return f"{folder_names(settings)[base or settings.root]}/{path[len(base) :].lstrip('/')}"


def stored_folder(settings: StoreSettings, folder: str) -> str | None:
    """The folder that `shown_path` shows so, as `Filters.folder` takes it; None where the store has no such folder."""
    clean = posixpath.normpath(folder)
    if clean.startswith(("/", "../")) or clean == "..":
        return None
    if not settings.more_roots or clean == ".":
        return clean
    name, _, rest = clean.partition("/")
    root = next((root for root, each in folder_names(settings).items() if each == name), None)
    if root is None:
        return None
    if root == settings.root and rest:
        return rest
    return posixpath.join(root, rest) if rest else root


def without_places(settings: StoreSettings, location: str, text: str) -> str:
    """A message in which the folders of a store and the store itself have their names alone."""
    names = {**folder_names(settings), location: PurePath(location).name}
    for place in sorted((place for place in names if len(place) > 1), key=len, reverse=True):
        text = text.replace(place, names[place])
    return text
