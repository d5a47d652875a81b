"""Descriptions from a model of the transformers library on this machine: LLaVA, Qwen2.5-VL, any image-text-to-text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seps.images.sources import ImageSource

from .backends import Answer, Health, RejectedError
from .config import BackendConfig, Sampling
from .images import open_picture


class TransformersBackend:
    """Generates for `batch_size` pictures at once; a batch that does not fit in memory is halved."""

    name = "transformers"
    parallel = 1

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self.model = config.model
        self.batch_size = config.batch_size
        self._fits = config.batch_size
        self._health = Health(config.give_up_after)
        self._device = _device(config.device)
        self._processor = load_processor(config.model)
        self._model = load_model(config.model, config.dtype).to(self._device)

    def prepare(self, data: bytes, source: ImageSource) -> Any:
        """The decoded picture. Raises UnreadableImage."""
        return open_picture(data, source, self.config.max_side)

    def describe(self, pictures: Sequence[Any], sampling: Sampling) -> list[Answer | ValueError]:
        """One generate call for all pictures; if it fails, one per half, down to one picture. Raises FatalError."""
        if len(pictures) > self._fits:
            parts = [pictures[k : k + self._fits] for k in range(0, len(pictures), self._fits)]
            return [answer for part in parts for answer in self.describe(part, sampling)]
        try:
            answers: list[Answer | ValueError] = [*self._generate(pictures, sampling)]
        except (torch.OutOfMemoryError, RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                self._fits = max(1, len(pictures) // 2)
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            self._health.succeeded()
            return answers
        # After the except block: inside it, the error still holds the failed call's tensors.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if len(pictures) > 1:
            half = len(pictures) // 2
            return self.describe(pictures[:half], sampling) + self.describe(pictures[half:], sampling)
        rejected = RejectedError(f"The model {self.model} failed on this image ({why}).")
        self._health.failed(rejected)
        return [rejected]

    @torch.inference_mode()
    def _generate(self, pictures: Sequence[Any], sampling: Sampling) -> list[Answer]:
        inputs = self._processor(
            text=[prompt_text(self._processor, sampling.prompt)] * len(pictures),
            images=[[picture] for picture in pictures],
            padding=True,
            return_tensors="pt",
        ).to(self._device, dtype=self._model.dtype)
        options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            # top_k 0: a checkpoint's own top_k (Qwen ships 1) would silently overrule the settings.
            options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(sampling.seed)
            output = self._model.generate(**inputs, max_new_tokens=sampling.max_tokens, **options)
        written = output[:, inputs["input_ids"].shape[1] :]
        texts = self._processor.batch_decode(written, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ended = _lengths(written, self._model.generation_config.eos_token_id)
        return [
            Answer(text, "stop" if length is not None else "length", written.shape[1] if length is None else length)
            for text, length in zip(texts, ended, strict=True)
        ]


def prompt_text(processor: Any, prompt: str) -> str:
    """The prompt in the model's chat form, with the place of one image; LLaVA 1.5's form where there is none."""
    tokenizer = processor.tokenizer
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    if template is None:
        return f"USER: {getattr(processor, 'image_token', '<image>')}\n{prompt} ASSISTANT:"
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}
    return str(
        processor.apply_chat_template([message], chat_template=template, add_generation_prompt=True, tokenize=False)
    )


def _lengths(written: Tensor, end: int | list[int] | None) -> list[int | None]:
    """Tokens before each row's end token, None where it never came. written: (batch, new tokens)."""
    ends = torch.tensor([] if end is None else [end] if isinstance(end, int) else list(end), device=written.device)
    hit = torch.isin(written, ends.to(written.dtype))
    return [int(row.int().argmax()) if bool(row.any()) else None for row in hit]


def load_model(model: str, dtype: str = "auto") -> Any:
    """A model in evaluation mode from a folder or a hub id; code that lies beside the weights is never run.

    Raises ValueError where there is none or it does not describe images.
    """
    transformers = _transformers()
    chosen: Any = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if chosen is None:
        raise ValueError(f"dtype is {dtype!r}. Choose auto, float32, float16 or bfloat16.")
    try:
        return transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=chosen).eval()
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(_unloadable(model, error)) from error


def load_processor(model: str) -> Any:
    """The processor of a model, padding on the left as generation needs.

    Processors that also take videos want torchvision for those: without it they are built for images alone.
    """
    transformers = _transformers()
    try:
        try:
            processor = transformers.AutoProcessor.from_pretrained(model)
        except ImportError:
            processor = _image_only_processor(transformers, model)
        processor.tokenizer.padding_side = "left"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(_unloadable(model, error)) from error
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    return processor


def _image_only_processor(transformers: Any, model: str) -> Any:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kind = transformers.AutoConfig.from_pretrained(model).model_type
    name = PROCESSOR_MAPPING_NAMES.get(kind)
    if name is None:
        raise ValueError(f"transformers has no processor for models of type {kind!r}.")
    parent: Any = getattr(transformers, name)

    class ImageOnly(parent):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    images = transformers.AutoImageProcessor.from_pretrained(model)
    return ImageOnly(
        image_processor=images, tokenizer=tokenizer, video_processor=None, chat_template=tokenizer.chat_template
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "The transformers backend needs the transformers package: pip install 'seps[encoders]', "
            "or describe with a server: --backend openai."
        ) from error
    return transformers


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}. Choose auto, cpu, cuda or cuda:0.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch sees no GPU. Choose cpu, or install torch with CUDA.")
    return device


def _unloadable(model: str, error: Exception) -> str:
    return (
        f"The model {model!r} cannot be loaded as one that describes images "
        f"({' '.join(str(error).split())[:300]}). Name a folder that save_pretrained wrote, or a hub id."
    )
