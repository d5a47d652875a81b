"""Model folders to a model hub."""

from __future__ import annotations

from pathlib import Path

from seps.hub.download import HubError
from seps.hub.folder import SAFE_FILES, inside, read_config, read_weights


def push_to_hub(
    folder: Path | str,
    name: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload a model of seps",
    token: bool | str | None = None,
) -> str:
    """Upload a model folder as the hub model `name` ("user/model"), which is made where there is none.

    Only tensors, configurations, tokenizers and the card are uploaded, whatever else the folder holds.

    Returns:
        The address of the commit.

    Raises:
        ModelError: for a folder that is not a whole model folder.
        HubError: where the hub cannot be reached or refuses the upload.
    """
    folder = Path(folder)
    config = read_config(folder)
    read_weights(folder, config)
    for file in config.get("files") or {}:
        if not inside(folder, file, str(folder)).is_file():
            raise HubError(f"{folder} lacks {file}, which its config.json names; save the model again.")
    import huggingface_hub

    try:
        api = huggingface_hub.HfApi(token=token)
        api.create_repo(name, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            revision=revision,
            commit_message=message,
            allow_patterns=list(SAFE_FILES),
        )
    except Exception as error:  # the hub client raises a dozen unrelated types, and users need one sentence
        first = str(error).strip().split("\n", 1)[0]
        raise HubError(
            f"The model was not uploaded as {name}: {type(error).__name__}: {first}. Check the name, the network and "
            "the login (`hf auth login`)."
        ) from error
    return str(done.commit_url)
