"""Where encoder weights come from: a folder or the hub, as safetensors or a pickle read safely."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seps.hub import download as hub
from seps.parsing import as_object

_SMALL_FILES = ["*.json", "vocab.txt", "merges.txt", "*.model"]
_WEIGHT_FILES = ["model*.safetensors"]
_PICKLED = "pytorch_model.bin"


class EncoderUnavailable(ValueError):
    """An encoder cannot be loaded: a package, folder or file is missing or damaged. The message says what to do."""


def transformers_module() -> Any:
    """The transformers package, imported on first use. Raises EncoderUnavailable when it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise EncoderUnavailable(
            f"This encoder needs the package transformers, which cannot be imported ({error}). "
            "Install it with: pip install 'seps[encoders]'"
        ) from error
    return transformers


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' load reports and bars: what matters in them is checked and raised by us."""
    log = transformers_module().utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def hub_folder(model: str, *, weights: bool, local_files_only: bool) -> Path:
    """The local folder of a hub model, downloaded when it is not in the cache.

    Only configuration, tokenizer and, with `weights`, safetensors files are fetched; where the model has none, those of
    the hub's conversion service, else pytorch_model.bin, which is read by a restricted unpickler. Never code.
    Raises EncoderUnavailable when the model is neither cached nor reachable.
    """
    transformers_module()
    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else [])]
    try:
        folder = hub.hub_folder(model, patterns, local_files_only=local_files_only)
        if not weights or list(folder.glob("*.safetensors")):
            return folder
        revision = None if local_files_only else hub.converted_revision(model)
        if revision is not None:
            return hub.hub_folder(model, patterns, revision=revision)
        return hub.hub_folder(model, [*_SMALL_FILES, _PICKLED], local_files_only=local_files_only)
    except hub.HubError as error:
        raise EncoderUnavailable(str(error)) from error


def read_config(folder: Path) -> Any:
    """The transformers configuration of a folder. Raises EncoderUnavailable without one that can be read."""
    if not (folder / "config.json").is_file():
        raise EncoderUnavailable(
            f"The folder {folder} has no config.json, so it is not a saved transformers model. "
            "Save one there with model.save_pretrained(folder)."
        )
    transformers = transformers_module()
    try:
        with quiet():
            return transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above: any type, one sentence
        raise EncoderUnavailable(
            f"{folder / 'config.json'} cannot be read by transformers {transformers.__version__}: {first_line(error)}"
        ) from error


def _model_class(config: Any) -> Any:
    transformers = transformers_module()
    named = next(iter(getattr(config, "architectures", None) or []), "")
    # A text tower saved alone (CLIPTextModel, SiglipTextModel) is not in AutoModel's table.
    if named.endswith(("TextModel", "VisionModel", "VisionModelWithProjection")) and hasattr(transformers, named):
        return getattr(transformers, named)
    return None


def build_model(config: Any) -> nn.Module:
    """A transformers model with random weights, float32."""
    with quiet():
        direct = _model_class(config)
        model = direct(config) if direct else transformers_module().AutoModel.from_config(config)
    loaded: nn.Module = model.float()
    return loaded


def load_model(folder: Path, config: Any) -> tuple[nn.Module, set[str]]:
    """A transformers model from a folder's safetensors, float32, and the names that the file did not hold.

    Without safetensors, from its pytorch_model.bin, read by the restricted unpickler. Raises EncoderUnavailable when
    the weights are missing, broken, or of another shape.
    """
    pickled = not list(folder.glob("*.safetensors"))
    if pickled and not (folder / _PICKLED).is_file():
        raise EncoderUnavailable(f"The folder {folder} has no model.safetensors and no {_PICKLED}.")
    loader = _model_class(config) or transformers_module().AutoModel
    try:
        with quiet():
            model, info = loader.from_pretrained(
                str(folder),
                config=config,
                dtype=torch.float32,
                use_safetensors=not pickled,
                weights_only=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # broken files surface as many types
        raise EncoderUnavailable(
            f"The weights in {folder} cannot be loaded as {config.model_type}: {first_line(error)}. "
            "Download or save the model again."
        ) from error
    return model, set(info["missing_keys"])


def to_safetensors(folder: str | Path) -> Path:
    """Write model.safetensors beside a folder's pytorch_model.bin, read with the restricted unpickler.

    Returns the new file. Raises EncoderUnavailable when the pickle is missing or holds more than tensors.
    """
    source, target = Path(folder) / _PICKLED, Path(folder) / "model.safetensors"
    if not source.is_file():
        raise EncoderUnavailable(f"There is no {source} to convert.")
    from safetensors.torch import save_file

    # Copies, because safetensors refuses tensors that share memory (tied embeddings).
    tensors = {name: tensor.clone().contiguous() for name, tensor in read_pickled_tensors(source).items()}
    save_file(tensors, str(target), metadata={"format": "pt"})
    return target


def read_pickled_tensors(path: Path) -> dict[str, Tensor]:
    """A state dict from a .bin or .pth file, tensors only. Raises EncoderUnavailable for anything else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # UnpicklingError, EOFError, RuntimeError, ...
        raise EncoderUnavailable(
            f"The file {path} is not a plain file of tensors, and was not loaded: {first_line(error)}"
        ) from error
    # DeiT's and many trainers' files hold the weights under a name.
    for name in ("model", "state_dict"):
        state = as_object(as_object(state).get(name)) or state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise EncoderUnavailable(f"The file {path} is not a plain file of tensors, and was not loaded.")
    return state


def refuse_missing(model: nn.Module, tower: nn.Module, missing: set[str], source: str) -> None:
    """Raise EncoderUnavailable when a parameter that the tower uses was not in the weights file."""
    used = {id(parameter) for parameter in tower.parameters()}
    absent = [name for name, value in model.named_parameters() if name in missing and id(value) in used]
    if absent:
        raise EncoderUnavailable(
            f"The weights of {source} lack {len(absent)} of the model's parameters (one is {absent[0]}), so "
            "part of the encoder would be random: the file belongs to another model than config.json says."
        )


def first_line(error: Exception) -> str:
    """What an error says in its first line, without a full stop; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
