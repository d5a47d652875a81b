"""Our models in the library sentence-transformers: one vector, vectors of words and patches, or a reranker.

    kind      class of the library     what it gives
    vector    SentenceTransformer      one vector of a text or a picture; their cosine is the score
    words     MultiVectorEncoder       a vector per word or patch; MaxSim is the score
    pairs     CrossEncoder             the score of the whole model for a text and a picture

`save` writes a folder that the class of the library loads, and that `seps.retrieval.pretrained.from_pretrained` loads
as well: the modules of this file keep the model in the root of the folder. The library imports classes of other
packages only with `trust_remote_code=True`; no code of the folder is run.

A text is a query, or a document (`encode_document`): a description, which may be longer.

Shapes: B texts or pictures, L words or patches, C width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modality import infer_modality
from sentence_transformers.base.modules import InputModule, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor

from seps.hub.download import hub_folder
from seps.hub.folder import SAFE_FILES, ModelError, find_folder, read_config
from seps.images.decoding import as_upright, pixels_of, read_image
from seps.images.sources import ImageSource
from seps.retrieval.embedded import EMBEDDED, embedded_folder
from seps.retrieval.engine.patches import PatchEngine
from seps.retrieval.languages import is_short
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import Form, check_save, load_folder, save_pretrained

Kind = Literal["vector", "words", "pairs"]
CLASSES: dict[Kind, str] = {"vector": "SentenceTransformer", "words": "MultiVectorEncoder", "pairs": "CrossEncoder"}
_MODALITIES = ["text", "image"]
_FILES = ("modules.json", "config_sentence_transformers.json")


class _ModelModule(InputModule):  # type: ignore[misc]
    """A module that keeps a model of ours in the root of the folder."""

    save_in_root = True

    def __init__(self, model: RetrievalModel, form: Form = "full") -> None:
        super().__init__()
        self.model, self.form = model, form
        self.tokenizer = model.text.tokenizer
        self.max_seq_length: int | None = None
        """Tokens that are read of a text; None: what the model's configuration says of queries and descriptions."""

    @property
    def modalities(self) -> list[str]:
        """What it takes."""
        return list(_MODALITIES)

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the model folder. Raises ValueError where weights were to be pickled."""
        if not safe_serialization:
            raise ValueError("Models of seps are saved as safetensors alone; leave safe_serialization out.")
        save_pretrained(self.model, output_path, form=self.form)

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The module of a local folder or of a hub model; of a hub model only tensors and texts are fetched."""
        folder, remote = Path(model_name_or_path), not os.path.isdir(model_name_or_path)
        if remote:
            folder = hub_folder(
                model_name_or_path,
                SAFE_FILES,
                revision=revision,
                local_files_only=local_files_only,
                token=token,
                cache=cache_folder,
            )
        folder = folder / subfolder
        return cls(load_folder(folder, remote), read_config(folder)["form"])

    def _pixels(self, pictures: Sequence[Any]) -> Tensor:
        """(B, 3, H, W) uint8 of Pillow images, files or arrays."""
        return torch.stack([_pixels_of(picture, self.model.image_size) for picture in pictures])


class WordsAndPatches(_ModelModule):
    """Texts to the vectors of their words, pictures to those of their patches."""

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, task: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Token ids of texts, or pixels of pictures; `task` is "query" (or None) or "document"."""
        if infer_modality(inputs[0], supported_modalities=_MODALITIES) == "image":
            return {"pixels": self._pixels(inputs)}
        texts = [(prompt or "") + _plain(one) for one in inputs]
        tokens, config, is_query = self.model.text.tokenize(texts), self.model.config, task != "document"
        most = self.max_seq_length or (config.max_words if is_query else config.max_dense_words)
        features = {"input_ids": tokens.ids[:, :most], "attention_mask": tokens.mask[:, :most]}
        if config.short_queries and is_query:
            features["short"] = torch.tensor([is_short(text) for text in texts])
        return features

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `token_embeddings` (B, L, C), and `attention_mask` (B, L) of those that count."""
        model = self.model
        if "pixels" in features:
            tokens = model.encode_pixels(features["pixels"].float() / 255)[:, model.vision.num_prefix_tokens :]
            mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
            return {"token_embeddings": tokens, "attention_mask": mask}
        ids, mask = features["input_ids"], features["attention_mask"].bool()
        read = model.text(ids, mask)
        words = model.project_words(read).float()
        if "short" in features:
            words = torch.where(features["short"][:, None, None], model.project_short(read).float(), words)
        return {**features, "token_embeddings": words, "attention_mask": model.is_word(ids, mask)}


class PairScores(_ModelModule):
    """The model's own score of a text and a picture, or of a text and a picture with its description."""

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Of pairs (text, picture), or (text, {"image": picture, "text": description}): each picture is read once."""
        pictures: dict[int, Any] = {}
        features: dict[str, Any] = {"queries": [], "descriptions": [], "places": []}
        places: dict[tuple[int, str | None], int] = {}
        for text, document in inputs:
            picture, description = _parts(document)
            place = places.setdefault((id(picture), description), len(places))
            if place == len(pictures):
                pictures[place] = picture
                features["descriptions"].append(description)
            features["queries"].append((prompt or "") + _plain(text))
            features["places"].append(place)
        return {**features, "pixels": self._pixels(list(pictures.values()))}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `scores` (B, 1): each query is encoded once and scored with each picture of the batch."""
        engine, queries = PatchEngine(self.model), list(dict.fromkeys(features["queries"]))
        pictures = engine.pictures(engine.encode_pixels(features["pixels"]), features["descriptions"])
        scores = engine.score(pictures, engine.encode_texts(queries))
        columns = [queries.index(query) for query in features["queries"]]
        return {**features, "scores": scores[features["places"], columns][:, None]}


def save(model: RetrievalModel, folder: Path | str, kind: Kind = "vector", *, form: Form = "full") -> None:
    """Write a folder for the library's class of this kind; `form` as for `save_pretrained`.

    Raises ModelError where a file that no save wrote is in the way.
    """
    check_save(model, folder)
    foreign = [name for name in _FILES if (Path(folder) / name).exists()]
    if foreign and not (Path(folder) / "config.json").exists():
        raise ModelError(f"{folder} has a {foreign[0]} that is not of a model of seps; save to another folder.")
    of_kind(model, kind, form).save_pretrained(str(folder), create_model_card=False)


def of_kind(model: RetrievalModel, kind: Kind, form: Form = "full") -> Any:
    """A model of ours as an object of the library."""
    device = str(model.device)
    if kind == "pairs":
        return CrossEncoder(modules=[PairScores(model, form)], activation_fn=torch.nn.Identity(), device=device)
    encoder = WordsAndPatches(model, form)
    if kind == "words":
        from sentence_transformers import MultiVectorEncoder

        return MultiVectorEncoder(modules=[encoder, Normalize("token_embeddings")], device=device)
    modules = [encoder, Pooling(model.config.embed_size, pooling_mode="mean"), Normalize()]
    return SentenceTransformer(modules=modules, device=device, similarity_fn_name="cosine")


def form_of(name: str) -> Form:
    """How the weights of a model are kept: those of a folder as they are there, those of a training run whole."""
    folder = embedded_folder(name) if name in EMBEDDED else find_folder(name)[0]
    form: Form = read_config(folder)["form"] if (folder / "config.json").is_file() else "full"
    return form


def _plain(text: Any) -> str:
    """A text as it comes, or {"text": a text}. Raises ValueError for anything else."""
    if isinstance(text, dict) and list(text) == ["text"]:
        text = text["text"]
    if not isinstance(text, str):
        raise ValueError(f"A text is required, not {type(text).__name__}.")
    return text


def _parts(document: Any) -> tuple[Any, str | None]:
    """The picture of a document, and its description."""
    match document:
        case {"image": image}:
            return image, document.get("text")
    if infer_modality(document, supported_modalities=_MODALITIES) != "image":
        raise ValueError('A document to score is a picture, or {"image": picture, "text": its description}.')
    return document, None


def _pixels_of(picture: Any, size: tuple[int, int]) -> Tensor:
    """(3, H, W) uint8 of a Pillow image, a file or an array (height, width, 3) of bytes. Raises UnreadableImage."""
    match picture:
        case {"image": image}:
            return _pixels_of(image, size)
        case str() | os.PathLike():
            return read_image(ImageSource(Path(picture)), size)
        case np.ndarray():
            picture = Image.fromarray(picture)
    pixels: Tensor = pixels_of(as_upright(picture), ImageSource(Path("the picture")), size)
    return pixels
