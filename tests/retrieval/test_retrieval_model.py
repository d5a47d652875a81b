"""Heads against slow twins; saved models; the evaluation command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from messages import mentions, naming
from seps.cli.main import main
from seps.hub.folder import ModelError
from seps.method.config import ConfigError, SlimmingConfig
from seps.metrics import recall
from seps.retrieval.config import ModelConfig
from seps.retrieval.data import load_jsonl
from seps.retrieval.embedded import pack_delta, unpack_delta
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import DescriptionHead, ImageFeatures, MaxSimHead, MeanHead, ScanHead, TextFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained


@pytest.fixture(scope="module")
def model(encoders):
    torch.manual_seed(0)
    return RetrievalModel(ModelConfig(**encoders, embed_size=16)).eval()


def features():
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    dense_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    images = ImageFeatures(torch.randn(2, 7, 8), torch.randn(2, 5, 8), dense_mask)
    return images, TextFeatures(torch.randn(3, 4, 8), mask)


def slow_scan(patches, words, direction):
    """One image, one caption, by the definition."""
    a, b = F.normalize(patches, dim=-1), F.normalize(words, dim=-1)
    cosines = a @ b.T
    if direction == "scan-t2i":
        attention = F.normalize(F.leaky_relu(cosines, 0.1), dim=1)
        seen = torch.softmax(9 * attention, dim=0).T @ a
        return F.cosine_similarity(b, seen, dim=-1).mean()
    attention = F.normalize(F.leaky_relu(cosines, 0.1), dim=0)
    seen = torch.softmax(9 * attention, dim=1) @ b
    return F.cosine_similarity(a, seen, dim=-1).mean()


def maxsim(**options):
    return MaxSimHead(SlimmingConfig(embed_size=8, num_patches=6, num_prefix_tokens=1, **options))


@pytest.mark.parametrize("direction", ["scan-t2i", "scan-i2t", "scan"])
def test_scan_is_its_definition(direction):
    images, texts = features()
    ours = ScanHead(1, direction)(images, texts).similarity
    for v in range(2):
        for t in range(3):
            words = texts.words[t][texts.mask[t]]
            ways = ["scan-t2i", "scan-i2t"] if direction == "scan" else [direction]
            theirs = sum(slow_scan(images.tokens[v, 1:], words, way) for way in ways)
            assert ours[v, t].item() == pytest.approx(theirs.item(), abs=1e-4)


def test_mean_and_description_are_their_definitions():
    images, texts = features()
    mean = MeanHead(1)(images, texts).similarity
    described = DescriptionHead()(images, texts).similarity
    for v in range(2):
        dense = images.dense[v][images.dense_mask[v]]
        for t in range(3):
            words = texts.words[t][texts.mask[t]]
            cosine = F.cosine_similarity(images.tokens[v, 1:].mean(0), words.mean(0), dim=0)
            assert mean[v, t].item() == pytest.approx(cosine.item(), abs=1e-5)
            table = F.normalize(words, dim=-1) @ F.normalize(dense, dim=-1).T
            pooled = F.cosine_similarity(dense.mean(0), words.mean(0), dim=0)
            expected = table.amax(1).mean() + table.amax(0).mean() + 2 * pooled
            assert described[v, t].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("head", [MeanHead(1), maxsim(), maxsim(dense="none"), ScanHead(1, "scan"), DescriptionHead()])
def test_scores_do_not_depend_on_the_memory_budget(head):
    images, texts = features()
    torch.testing.assert_close(head.score(images, texts, memory=1), head.score(images, texts, memory=2**30))


def slow_maxsim(tokens, words, pooled):
    """One image, one caption: each word's nearest token, and the two means."""
    nearest = [max(float(F.cosine_similarity(word, token, dim=0)) for token in tokens) for word in words]
    unit = F.normalize(tokens, dim=-1)
    return sum(nearest) / len(nearest) + pooled * F.cosine_similarity(unit.mean(0), words.mean(0), dim=0).item()


def test_maxsim_is_its_definition():
    """Also for the description, for an image without one, and for one of which some patches are kept."""
    images, texts = features()
    images.tokens[:, 1:] = F.normalize(images.tokens[:, 1:], dim=-1)
    head = maxsim(pooled=1.5)
    head.trust.data.fill_(0.4)
    images.dense_mask[0] = False
    found = head(images, texts)
    weight = torch.sigmoid(head.trust).item()
    for t in range(3):
        words = texts.words[t][texts.mask[t]]
        pixels = [slow_maxsim(image[1:], words, 1.5) for image in images.tokens]
        described = slow_maxsim(images.dense[1], words, 1.5)
        assert found.pixels[:, t].tolist() == pytest.approx(pixels, abs=1e-5)
        assert found.description[1, t].item() == pytest.approx(described, abs=1e-5)
        mixed = (1 - weight) * pixels[1] + weight * described
        assert found.similarity[:, t].tolist() == pytest.approx([pixels[0], mixed], abs=1e-5)
    plain = maxsim(dense="none", pooled=1.5)
    assert plain.description_logit is None and not plain.uses_description
    torch.testing.assert_close(plain(images, texts).similarity, found.pixels)
    parts = head.score_parts(images, texts, memory=1)
    for name in ("similarity", "pixels", "description", "described"):
        torch.testing.assert_close(getattr(parts, name), getattr(found, name), msg=name)


@pytest.mark.parametrize(("head", "pooled"), [(MeanHead(1), 1.0), (maxsim(dense="none", pooled=2.0), 2.0)])
def test_the_mean_is_that_of_all_patches_where_some_are_kept(head, pooled):
    images, texts = features()
    few = ImageFeatures(images.tokens[:, :4])
    known = replace(few, mean=images.tokens[:, 1:].mean(dim=1))
    change = MeanHead(1)(images, texts).similarity - MeanHead(1)(few, texts).similarity
    expected = head(few, texts).similarity + pooled * change
    torch.testing.assert_close(head(known, texts).similarity, expected)


def test_options_that_maxsim_does_not_read_are_refused():
    for slimming, said in (
        ({"beta": 0.1}, naming("dense", "pooled")),
        ({"dense": "guide"}, naming("none", "tokens")),
    ):
        with pytest.raises(ConfigError, match=said):
            config = ModelConfig(head="maxsim", slimming=slimming)
            MaxSimHead(config.slimming_config(9, 1))
    with pytest.raises(ConfigError, match="leave"):
        ModelConfig(head="mean", slimming={"pooled": 1.0})


def test_a_saved_maxsim_model_comes_back_with_its_weight(encoders, tmp_path):
    torch.manual_seed(0)
    config = ModelConfig(**encoders, embed_size=16, head="maxsim", slimming={"pooled": 1.0})
    model = RetrievalModel(config).eval()
    model.set_description_weight(0.3)
    save_pretrained(model, tmp_path / "saved")
    back = from_pretrained(tmp_path / "saved")
    assert back.description_weight == pytest.approx(0.3)
    assert back.head.options == {"dense": "tokens", "pooled": 1.0}
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model"]["slimming"] == back.head.options


def test_padding_never_changes_a_text(model):
    together = model.encode_texts(["a red square .", "a red square on the left and a blue circle on the right ."])
    alone = model.encode_texts(["a red square ."])
    torch.testing.assert_close(together.words[0, : alone.words.shape[1]], alone.words[0], atol=1e-5, rtol=1e-4)


def test_without_special_tokens_the_words_are_those_between_them(model):
    """Against picking the rows by hand; an unknown word is a word, and an empty text keeps what it has."""
    plain = RetrievalModel(replace(model.config, special_tokens=False)).eval()
    plain.load_state_dict(model.state_dict())
    texts = ["a red square .", "a circle on the left", "qqq zzz", ""]
    batch, all_words = model.text.tokenize(texts), model.encode_texts(texts)
    ours = plain.encode_texts(texts)
    for row, text in enumerate(texts):
        tokens = int(batch.mask[row].sum())
        inner = range(1, tokens - 1) if tokens > 2 else range(tokens)
        assert int(ours.lengths[row]) == len(inner) and len(inner) >= 1, text
        torch.testing.assert_close(ours.words[row, : len(inner)], all_words.words[row, list(inner)], atol=1e-6, rtol=0)
    assert ours.words.shape[1] == int(ours.lengths.max())


def test_saved_models_come_back(model, tmp_path):
    save_pretrained(model, tmp_path / "full")
    back = from_pretrained(tmp_path / "full")
    for name, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], value)
    assert back.head.net.config == model.head.net.config
    other = RetrievalModel(model.config)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    save_pretrained(other, tmp_path / "delta", form="delta")
    close = from_pretrained(tmp_path / "delta").state_dict()
    for name, value in other.state_dict().items():
        torch.testing.assert_close(close[name], value, atol=1e-3, rtol=1e-3)


def test_packed_differences_are_close():
    base = torch.randn(20, 30)
    trained = base + 0.01 * torch.randn(20, 30)
    packed, scale = pack_delta(trained, base)
    assert packed.dtype == torch.int8
    torch.testing.assert_close(unpack_delta(packed, scale, base), trained, atol=2e-4, rtol=0)


def test_bad_model_folders_get_a_sentence(model, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        from_pretrained("nowhere")
    save_pretrained(model, tmp_path / "cut")
    path = tmp_path / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="read"):
        from_pretrained(tmp_path / "cut")
    path.unlink()
    with pytest.raises(ModelError, match=naming("model.safetensors")):
        from_pretrained(tmp_path / "cut")
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    (tmp_path / "cut" / "config.json").write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(ModelError, match="release"):
        from_pretrained(tmp_path / "cut")
    (tmp_path / "cut" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="configuration"):
        from_pretrained(tmp_path / "cut")


def test_eval_command(model, dev_scenes, tmp_path, capsys):
    save_pretrained(model, tmp_path / "model")
    out = tmp_path / "out.json"
    for protocol in ("image", "none", "published"):
        words = ["eval", "--model", str(tmp_path / "model"), "--data", str(dev_scenes), "--protocol", protocol]
        assert main([*words, "--json", str(out)]) == 0
        figures = json.loads(out.read_text())
        assert figures["protocol"] == protocol and figures["images"] == 24 and figures["captions"] == 48
        recalls = [figures[way][f"r{k}"] for way in ("i2t", "t2i") for k in (1, 5, 10)]
        assert figures["rsum"] == pytest.approx(sum(recalls))
        assert ("warning" in figures) == (protocol == "published")
        shown = capsys.readouterr()
        assert protocol in shown.out
        assert ("answer" in shown.err) == (protocol == "published")


def test_eval_command_reads_the_published_layout(model, dev_scenes, tmp_path):
    save_pretrained(model, tmp_path / "model")
    records = [json.loads(line) for line in dev_scenes.read_text().splitlines()]
    folder = tmp_path / "f30k"
    folder.mkdir()
    (folder / "id_mapping.json").write_text(json.dumps({str(i): r["image"] for i, r in enumerate(records)}))
    pairs = [(i, text) for i, r in enumerate(records) for text in r["captions"]]
    (folder / "test_ids.txt").write_text("".join(f"{i}\n" for i, _ in pairs))
    (folder / "test_caps.txt").write_text("".join(f"{text}\n" for _, text in pairs))
    (folder / "f30k_test.jsonl").write_text("".join(json.dumps({"text": r["dense"]}) + "\n" for r in records))
    words = ["eval", "--model", str(tmp_path / "model"), "--images", str(dev_scenes.parent), "--json"]
    assert main([*words, str(tmp_path / "a.json"), "--data", f"{folder}:test:f30k"]) == 0
    assert main([*words, str(tmp_path / "b.json"), "--data", str(dev_scenes)]) == 0
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert a["rsum"] == b["rsum"] and a["images_with_description"] == 24
    assert main([*words, "-", "--data", str(folder)]) == 2


def test_the_description_weight_moves_the_score_between_its_parts(model, dev_scenes, tmp_path, capsys):
    """The figures are those of (1 - w) * patches + w * description, the parts scored on their own."""
    save_pretrained(model, tmp_path / "model")
    words = ["eval", "--model", str(tmp_path / "model"), "--data", str(dev_scenes), "--json", "-"]
    data = load_jsonl(dev_scenes)
    texts = model.encode_texts(data.captions)
    description, mask = model.encode_descriptions(data.dense)
    with torch.no_grad():
        parts = model.head(ImageFeatures(encode_images(model, data), description, mask), texts)
    expected = {}
    for weight in (0.00001, 0.3, 0.99999):
        assert main([*words, "--description-weight", str(weight)]) == 0
        mixed = (1 - weight) * parts.pixels + weight * parts.description
        expected[weight] = recall(mixed, data.image_of_caption).rsum
        assert json.loads(capsys.readouterr().out)["rsum"] == pytest.approx(expected[weight], abs=1e-9)
    assert len(set(expected.values())) == 3
    assert main([*words, "--description-weight", "2"]) == 2
    assert mentions(capsys.readouterr().err, "--description-weight", "2")
    again = from_pretrained(tmp_path / "model")
    again.set_description_weight(0.25)
    assert again.description_weight == pytest.approx(0.25)


def test_eval_with_merged_descriptions(model, dev_scenes, tmp_path, capsys):
    """More words than there are change nothing, one word does; a description cannot have none."""
    save_pretrained(model, tmp_path / "model")
    words = ["eval", "--model", str(tmp_path / "model"), "--data", str(dev_scenes), "--json", "-"]
    words += ["--description-weight", "0.99"]
    figures = []
    for extra in ([], ["--words", "200"], ["--words", "1"]):
        assert main([*words, *extra]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert figures[0] == figures[1] != figures[2]
    assert main([*words, "--words", "0"]) == 2
    assert "--words" in capsys.readouterr().err


def test_eval_mistakes_get_a_sentence(model, dev_scenes, tmp_path, capsys):
    save_pretrained(model, tmp_path / "model")
    assert main(["eval", "--model", "nothing", "--data", str(dev_scenes)]) == 2
    assert "model" in capsys.readouterr().err
    assert main(["eval", "--data", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["eval", "--data", str(tmp_path / "empty.jsonl")]) == 2
    broken = dev_scenes.parent / "broken.png"
    broken.write_bytes(b"not a picture")
    lines = dev_scenes.read_text() + json.dumps({"image": "broken.png", "captions": ["a red square ."]}) + "\n"
    (dev_scenes.parent / "some.jsonl").write_text(lines)
    words = ["eval", "--model", str(tmp_path / "model"), "--data", str(dev_scenes.parent / "some.jsonl")]
    assert main([*words, "--strict"]) == 2
    assert "broken.png" in capsys.readouterr().err
    assert main(words) == 0
    assert "broken.png" in capsys.readouterr().err


def test_one_text_is_not_taken_for_a_list_of_its_letters(model):
    for encode in (model.encode_texts, model.encode_descriptions):
        with pytest.raises(ValueError, match=naming("['a dog']")):
            encode("a dog")
    with pytest.raises(ValueError, match=naming("7", "text")):
        model.encode_texts(["a dog", 7])
    assert torch.equal(model.encode_texts(("a dog",)).words, model.encode_texts(["a dog"]).words)
