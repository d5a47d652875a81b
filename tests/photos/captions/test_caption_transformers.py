"""Real transformers models, tiny and random, made here and loaded from a folder: LLaVA and Qwen2.5-VL."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_server import lines, photo, photos

from seps.cli.main import call
from seps.images.sources import ImageSource
from seps.photos.captions import BackendConfig, CaptionConfig, Sampling, caption_images, list_images
from seps.photos.captions.backends import Answer, FatalError, RejectedError, build
from seps.photos.captions.transformers_backend import TransformersBackend, prompt_text

transformers = pytest.importorskip("transformers")
SOURCE = ImageSource(Path("x.png"))
WORDS = 60


def save_tokenizer(folder: Path, special: list[str], template: str) -> Any:
    """A tokenizer of whole words; the first special tokens are: unknown, start, end, padding, image."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*special, *(f"word{k}" for k in range(WORDS - len(special)))]
    inner = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token=special[0]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token=special[0],
        bos_token=special[1],
        eos_token=special[2],
        pad_token=special[3],
        additional_special_tokens=special[4:],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
CHAT = "{% for m in messages %}USER: {% for c in m.content %}{% if c.type == 'image' %}IMAGE {% else %}{{ c.text }}"
CHAT += "{% endif %}{% endfor %}{% endfor %} ASSISTANT:"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=16,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_index=4
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    tokenizer = save_tokenizer(folder, ["<unk>", "<s>", "</s>", "<pad>", "<image>"], CHAT.replace("IMAGE", "<image>"))
    pixels = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    transformers.LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the hub has SmolVLM-256M, the captioner for a laptop: an Idefics3."""
    folder = tmp_path_factory.mktemp("smolvlm")
    torch.manual_seed(0)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Idefics3Config(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=4,
        scale_factor=1,
        pad_token_id=3,
    )
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    special = ["<unk>", "<s>", "</s>", "<pad>", "<image>", "<fake_token_around_image>", "<end_of_utterance>"]
    tokenizer = save_tokenizer(folder, [*special, "<global-img>"], CHAT.replace("IMAGE", "<image>"))
    pixels = transformers.Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": 28}, max_image_size={"longest_edge": 28}
    )
    transformers.Idefics3Processor(
        image_processor=pixels, tokenizer=tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template
    ).save_pretrained(folder)
    return folder


def test_the_small_captioner_describes_batches(smolvlm: Path, tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", 3)
    out = tmp_path / "dense.jsonl"
    backend = BackendConfig(model=str(smolvlm), batch_size=2, device="cpu")
    report = caption_images(
        list_images(folder), out, backend, CaptionConfig(Sampling(max_tokens=8), accept=("cut", "loop"))
    )
    assert report["described_in_file"] == 3 and all(line["dense"] for line in lines(out))


def test_presets_name_the_small_ones_first() -> None:
    from seps.cli.main import parser_of
    from seps.cli.models.caption import _backend
    from seps.photos.captions.config import CAPTIONERS, MODEL

    assert list(CAPTIONERS) == ["smolvlm-256m", "smolvlm-500m", "llava-7b"]
    assert CAPTIONERS["llava-7b"][0] == MODEL
    chosen = _backend(parser_of("caption").parse_args(["photos", "--model", "smolvlm-256m"]))
    assert chosen.model == "HuggingFaceTB/SmolVLM-256M-Instruct"
    served = _backend(
        parser_of("caption").parse_args(["photos", "--model", "smolvlm-256m", "--url", "http://localhost/v1"])
    )
    assert served.model == "smolvlm-256m", "a server has its own names"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the hub has Qwen2.5-VL: its processor also takes videos, which needs torchvision."""
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "out_hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "fullatt_block_indexes": [1],
        "window_size": 28,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2_5_VLConfig(
        vision_config=vision,
        text_config={**TEXT, "rope_parameters": rope},
        image_token_id=4,
        video_token_id=5,
        vision_start_token_id=6,
        vision_end_token_id=7,
    )
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    special = ["<unk>", "<|im_start|>", "<|im_end|>", "<pad>", "<|image_pad|>", "<|video_pad|>"]
    special += ["<|vision_start|>", "<|vision_end|>"]
    save_tokenizer(folder, special, CHAT.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"))
    pixels = transformers.Qwen2VLImageProcessorPil(
        min_pixels=28 * 28, max_pixels=56 * 56, patch_size=14, merge_size=2, temporal_patch_size=2
    )
    pixels.save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    saved = json.loads(file.read_text())
    saved |= {"processor_class": "Qwen2_5_VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"}
    file.write_text(json.dumps(saved))
    return folder


def tiny(folder: Path, **changes: Any) -> TransformersBackend:
    return TransformersBackend(BackendConfig(model=str(folder), device="cpu", **changes))


def describe(backend: TransformersBackend, count: int, sampling: Sampling) -> list[Answer | ValueError]:
    sizes = [(8 + 40 * (k % 2), 8 + 9 * k) for k in range(count)]
    return backend.describe([backend.prepare(photo(k, size), SOURCE) for k, size in enumerate(sizes)], sampling)


@pytest.mark.parametrize("name", ["llava", "qwen"])
def test_answers_are_words_and_know_how_they_ended(name: str, request: pytest.FixtureRequest) -> None:
    backend = tiny(request.getfixturevalue(name))
    answers = describe(backend, 8, Sampling(max_tokens=20, temperature=1.0, top_p=1.0))
    assert len(answers) == 8
    for answer in answers:
        assert isinstance(answer, Answer)
        assert all(word.startswith("word") for word in answer.text.split())
        assert answer.tokens is not None
        assert (answer.finish == "length") == (answer.tokens == 20)
    assert {answer.finish for answer in answers if isinstance(answer, Answer)} == {"stop", "length"}


def test_a_seed_repeats_and_leaves_the_global_generator_alone(llava: Path) -> None:
    backend = tiny(llava)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = describe(backend, 3, Sampling(max_tokens=12))
    assert torch.equal(torch.rand(2), expected)
    assert describe(backend, 3, Sampling(max_tokens=12)) == first
    assert describe(backend, 3, Sampling(max_tokens=12, seed=1)) != first
    greedy = Sampling(max_tokens=12, temperature=0.0)
    assert describe(backend, 3, greedy) == describe(backend, 3, greedy)


def test_the_padding_of_a_batch_does_not_change_an_answer(qwen: Path) -> None:
    backend = tiny(qwen)
    greedy = Sampling(max_tokens=8, temperature=0.0)
    together = describe(backend, 4, greedy)
    sizes = [(8 + 40 * (k % 2), 8 + 9 * k) for k in range(4)]
    alone = [backend.describe([backend.prepare(photo(k, size), SOURCE)], greedy)[0] for k, size in enumerate(sizes)]
    assert together == alone


def test_the_prompt_goes_in_the_models_own_chat_form(llava: Path) -> None:
    backend = tiny(llava)
    assert prompt_text(backend._processor, "Say it") == "USER: <image> Say it ASSISTANT:"
    backend._processor.chat_template = backend._processor.tokenizer.chat_template = None
    assert prompt_text(backend._processor, "Say it") == "USER: <image>\nSay it ASSISTANT:"


def test_a_batch_that_fails_is_halved_down_to_the_culprit(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tiny(llava, give_up_after=2)
    real = backend._generate

    def generate(pictures: Any, sampling: Sampling) -> list[Answer]:
        if any(picture.size == (99, 99) for picture in pictures):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(pictures, sampling)

    monkeypatch.setattr(backend, "_generate", generate)
    culprit = backend.prepare(photo(0, (99, 99)), SOURCE)
    fine = backend.prepare(photo(1), SOURCE)
    answers = backend.describe([fine, fine, culprit, fine], Sampling(max_tokens=3))
    assert [type(answer) for answer in answers] == [Answer, Answer, RejectedError, Answer]
    assert backend._fits == 1, "a batch that did not fit is not tried again"
    with pytest.raises(FatalError, match="memory"):
        backend.describe([culprit, culprit], Sampling(max_tokens=3))


def test_what_cannot_be_loaded_is_a_sentence(tmp_path: Path, llava: Path) -> None:
    with pytest.raises(ValueError, match="save_pretrained"):
        tiny(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="loaded"):
        tiny(tmp_path)
    with pytest.raises(ValueError, match="floatish"):
        tiny(llava, dtype="floatish")
    with pytest.raises(ValueError, match="toaster"):
        build(BackendConfig(model=str(llava), device="toaster"), threading.Event())


def test_the_command_describes_with_a_local_model(llava: Path, tmp_path: Path) -> None:
    folder, out = photos(tmp_path / "in", 3), tmp_path / "dense.jsonl"
    words = [str(folder), "--out", str(out), "--model", str(llava), "--device", "cpu", "--max-tokens", "9"]
    assert call("caption", [*words, "--accept", "cut", "--bad-retries", "5"]) == 0
    assert len(lines(out)) == 3
