"""Folders of a model hub, in its cache or fetched; what goes wrong is one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class HubError(ValueError):
    """A hub model that cannot be had; the message says why, and the remedy."""


def hub_folder(
    name: str,
    patterns: Sequence[str],
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    token: bool | str | None = None,
    cache: str | None = None,
) -> Path:
    """The local folder of the hub model `name`, with the files that match `patterns`. Raises HubError.

    `token` and `cache` (a folder) replace those of the environment.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise HubError(
            f"There is no folder {name!r}, and to fetch a model of that name from the hub the package "
            "huggingface_hub is needed: pip install huggingface-hub"
        ) from error
    try:
        found = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=local_files_only,
            token=token,
            cache_dir=cache,
        )
        return Path(found)
    except Exception as error:  # the hub client raises a dozen unrelated types, and users need one sentence
        raise HubError(_sentence(name, revision, type(error).__name__, local_files_only)) from error


def converted_revision(name: str) -> str | None:
    """The pull request of the hub's conversion service that holds a model's weights as safetensors, or None.

    Models that were published as a pickle alone have one: their weights are read from there, and the pickle never.
    """
    try:
        import huggingface_hub

        found = huggingface_hub.HfApi().get_repo_discussions(
            name, author="SFconvertbot", discussion_type="pull_request"
        )
        return next((str(one.git_reference) for one in found if one.git_reference), None)
    except Exception:  # no network, no such model: the caller has a sentence for what is missing
        return None


def _sentence(name: str, revision: str | None, kind: str, local_files_only: bool) -> str:
    if kind == "GatedRepoError":
        return f"The model {name} is gated: accept its licence on its hub page, `hf auth login`, then run again."
    if kind in ("RepositoryNotFoundError", "HFValidationError"):
        return f"There is no folder {name!r}, and no model {name} on the hub (or it is private: `hf auth login`)."
    if kind == "RevisionNotFoundError":
        return f"The model {name} has no revision {revision!r}: look up its branches and tags on the hub."
    cause = "only local files were allowed" if local_files_only else "the hub could not be reached"
    return (
        f"There is no folder {name!r}; a hub model of that name is not in the local cache, and {cause}. On a machine "
        f"with network run `hf download {name} --local-dir DIR`, copy DIR here, and give its path in place of the name."
    )
