"""Write a model folder (`seps.hub.folder`) so that nothing of the user's is lost.

`config.json` lists the sha256 of every file that belongs to the model. Only files on such a list, with that content,
are ever removed or overwritten; anything else in the way is an error before the first byte is written.

A save prepares everything in a folder `.saving-seps-*` with a plan of what it adds and what it replaces. Replacing
`config.json` is the moment that counts: a save that stopped before it is undone, one that stopped after it is finished,
by itself or, if it was killed, by the next save. The plan is the first file that is written there and the last that is
removed, so that a folder without one is of that name and empty, or it is not a save's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from seps.files import load_json, numbered, sha256, unfinished, write_json
from seps.hub.folder import CARD, CONFIG, FORMAT, WEIGHTS, ModelError, describe_weights, inside, read_config
from seps.parsing import as_object

PLAN, OLD_CARD = "seps-plan.json", "card-before.md"
_ENCODER_FILES = frozenset(
    {"config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    | {"added_tokens.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "chat_template.jinja"}
)
"""What the last version, which listed no files, wrote into the folders of encoders."""
_STAGED = re.compile(r"\.saving-seps-[0-9a-f]{32}")
_OUR_CARD = re.compile(r"---\n(.*\n)*?library_name: \"?seps\"?\n")
Files = dict[str, str]
"""Path in the folder, with forward slashes, to sha256."""


def write_folder(
    folder: Path | str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    card: str,
    encoders: Callable[[Path], Mapping[str, str]] | None = None,
) -> None:
    """Write a model folder; a reader, or a crash, finds the model before or the model after, never a mixture.

    `encoders(folder)` writes the encoders' files there and returns their places for `config["encoders"]`.
    Raises ModelError when the folder cannot be written, or a file that no save wrote is in the way.
    """
    folder = Path(folder)
    with tempfile.TemporaryDirectory(prefix="seps-encoders-") as elsewhere:
        places = dict(encoders(Path(elsewhere))) if encoders is not None else {}
        try:
            with _one_save_at_a_time(folder):
                _write(folder, config, tensors, card, Path(elsewhere), places)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"The model was not saved: {folder} cannot be written ({error}). Make room or look at the "
                "permissions, then save it again."
            ) from error


def check_folder(folder: Path | str, places: Iterable[str] = ()) -> None:
    """Raise ModelError where `write_folder` would: a file that no save wrote is in the way.

    `places` are the folders that the encoders' files would go to. For callers that work long before they save.
    """
    folder = Path(folder)
    if _is_real_folder(folder):
        with _one_save_at_a_time(folder):
            _replaceable(folder, places)


def _replaceable(folder: Path, places: Iterable[str]) -> tuple[Files, bool]:
    """As `_belonging`, once an interrupted save is settled. Raises ModelError for a file that must not be replaced."""
    for left in sorted(folder.glob(".saving-*")):
        if (left / PLAN).is_file():
            _settle(folder, left)
        elif _STAGED.fullmatch(left.name) and _is_real_folder(left):
            _discard(left)
    before, keep_card = _belonging(folder)
    _check_free(folder, before, (CONFIG, WEIGHTS, CARD, *places))
    return before, keep_card


def _write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    card: str,
    encoders: Path,
    places: Mapping[str, str],
) -> None:
    before, keep_card = _replaceable(folder, places.values())
    staged = folder / f".saving-seps-{uuid.uuid4().hex}"
    staged.mkdir(mode=0o700)
    try:
        _write_plan(staged, {}, {}, "")
        save_file(dict(tensors), staged / WEIGHTS, metadata={"format": "pt"})
        weights = {**describe_weights(staged / WEIGHTS), "file": _free_name(folder, WEIGHTS)}
        moved = {kind: _free_name(folder, place) for kind, place in places.items()}
        (staged / CARD).write_text(card, encoding="utf-8")
        files: Files = {CARD: sha256(staged / CARD)}
        for kind, place in places.items():
            shutil.copytree(encoders / place, staged / place)
            written = sorted(path for path in (staged / place).rglob("*") if path.is_file())
            files |= {f"{moved[kind]}/{path.relative_to(staged / place).as_posix()}": sha256(path) for path in written}
        content = {"format": FORMAT, **config, "weights": weights, **({"encoders": moved} if moved else {})}
        text = json.dumps({**content, "files": files}, indent=1) + "\n"
        (staged / CONFIG).write_text(text, encoding="utf-8")
        if (folder / CARD).exists():
            shutil.copy2(folder / CARD, staged / OLD_CARD)
            if keep_card:  # no list says whether the user changed it
                shutil.copy2(folder / CARD, folder / _free_name(folder, CARD))
        _write_plan(staged, before, {**files, weights["file"]: weights["sha256"]}, sha256(staged / CONFIG))
        for kind, place in places.items():
            os.replace(staged / place, folder / moved[kind])
        os.replace(staged / WEIGHTS, folder / weights["file"])
        os.replace(staged / CARD, folder / CARD)
        os.replace(staged / CONFIG, folder / CONFIG)
    finally:
        _settle(folder, staged)


def _belonging(folder: Path) -> tuple[Files, bool]:
    """The files of the model that is in `folder`, and whether its card is a last version's, which is on no list."""
    if not (folder / CONFIG).exists():
        return {}, False
    try:
        config = read_config(folder)
    except ModelError:
        return {}, False
    if "form" not in config and "application" not in config:
        return {}, False
    where, weights = str(folder / CONFIG), as_object(config.get("weights"))
    files: Files = {CONFIG: sha256(folder / CONFIG)}
    if {"file", "sha256"} <= weights.keys():
        files[str(weights["file"])] = str(weights["sha256"])
    listed = "files" in config
    if listed:
        files |= {str(name): str(digest) for name, digest in as_object(config["files"]).items()}
    else:
        for place in as_object(config.get("encoders")).values():
            found = [path for path in inside(folder, place, where).glob("*") if path.name in _ENCODER_FILES]
            files |= {f"{place}/{path.name}": sha256(path) for path in found if path.is_file()}
    for name in files:
        inside(folder, name, where)
    card = folder / CARD
    old_card = not listed and card.is_file()
    if old_card and _OUR_CARD.match(card.read_text(encoding="utf-8", errors="replace")):
        return {**files, CARD: sha256(card)}, True
    return files, False


def _check_free(folder: Path, ours: Files, names: tuple[str, ...]) -> None:
    """Raise ModelError for a file in the way of `names`, or inside a folder of the model, that no save wrote."""
    tops = {*names, *(name.split("/")[0] for name in ours if "/" in name)}
    foreign = []
    for top in sorted(tops):
        path = folder / top
        inner = [each for each in path.rglob("*") if not each.is_dir()] if _is_real_folder(path) else []
        for each in inner or ([path] if os.path.lexists(path) else []):
            name = each.relative_to(folder).as_posix()
            if not _unchanged(folder, name, ours.get(name, "")):
                foreign.append(name)
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise ModelError(
            f"The model was not saved: {folder} holds {', '.join(sorted(foreign)[:5])}{more}, which was not written by "
            "an earlier save, or was changed since. Move it elsewhere, or save to another folder. Nothing was changed."
        )


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _unchanged(folder: Path, name: str, digest: str) -> bool:
    path = folder / name
    if path.is_symlink() or not path.is_file() or any((folder / part).is_symlink() for part in Path(name).parents):
        return False
    return sha256(path) == digest


def _settle(folder: Path, staged: Path) -> None:
    """Finish the save that `staged` belongs to if it replaced `config.json`, else undo it; remove `staged`."""
    try:
        plan = load_json(staged / PLAN)
        before, after, config = dict(plan["before"]), dict(plan["after"]), plan["config"]
    except (OSError, ValueError, KeyError, TypeError):
        before, after, config = {}, {}, ""
    now = sha256(folder / CONFIG) if (folder / CONFIG).is_file() else ""
    gone, stays = (before, after) if now == config else (after, before)
    for name in sorted(set(gone) - set(stays) - {CONFIG}):
        try:
            path = inside(folder, name, str(staged / PLAN))
        except ModelError:
            continue
        if _unchanged(folder, name, gone[name]):
            path.unlink()
        for parent in list(Path(name).parents)[:-1]:
            with contextlib.suppress(OSError):  # not empty: it holds something of the user's
                (folder / parent).rmdir()
    if now != config and (staged / OLD_CARD).is_file() and _unchanged(folder, CARD, after.get(CARD, "")):
        os.replace(staged / OLD_CARD, folder / CARD)
    _discard(staged)


def _discard(staged: Path) -> None:
    """Remove the folder of a settled save, or of one that has not begun: the plan last, by which it is known."""
    with contextlib.suppress(OSError):
        planned = (staged / PLAN).is_file()
        for path in staged.iterdir() if planned else ():
            if _is_real_folder(path):
                shutil.rmtree(path)
            elif path.name != PLAN:
                path.unlink()
        (staged / PLAN).unlink(missing_ok=True)
        unfinished(staged / PLAN).unlink(missing_ok=True)
        staged.rmdir()


def _write_plan(staged: Path, before: Files, after: Files, config: str) -> None:
    write_json(staged / PLAN, {"before": before, "after": after, "config": config})


def _free_name(folder: Path, name: str) -> str:
    """`name`, or one like it: what the model that is there consists of must stay readable until the end."""
    return next(str(free) for free in numbered(Path(name)) if not os.path.lexists(folder / free))


@contextlib.contextmanager
def _one_save_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder itself, where the system has such: a second save waits for the first.

    By hand, because filelock would leave a file of its own in the user's folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
