"""Training the text side alone for typed queries: what learns, what stays, and a run that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seps.cli.main import main
from seps.method.config import ConfigError
from seps.retrieval.config import DataConfig, ModelConfig, RunConfig, TypedConfig
from seps.retrieval.data import load_jsonl
from seps.retrieval.data.typed import queries_of_captions, save_queries
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from seps.retrieval.train import vectors
from seps.retrieval.train.run import train_model
from seps.training import TrainConfig


@pytest.fixture(scope="module")
def start(encoders, tmp_path_factory) -> Path:
    """A model to begin with: the pictures' side of a random model tells colours and shapes apart well enough."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("typed") / "start"
    save_pretrained(RetrievalModel(ModelConfig(**{**encoders, "embed_size": 16, "dropout": 0.0})).eval(), folder)
    return folder


@pytest.fixture
def config(start, encoders, scenes, dev_scenes) -> RunConfig:
    train = TrainConfig(epochs=20, batch_size=16, learning_rate=1e-2, weight_decay=0.0, eval_every=5, prefetch=0)
    return RunConfig(
        model=ModelConfig(**{**encoders, "embed_size": 16, "dropout": 0.0}),
        data=DataConfig(str(scenes), (str(dev_scenes),)),
        typed=TypedConfig(queries="captions", batch_size=8, keep=0.1),
        start=str(start),
        train=train,
    )


def logged(run: Path, kind: str = "train") -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    volatile = ("seconds", "data_seconds", "time")
    return [{k: v for k, v in line.items() if k not in volatile} for line in lines if line["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in logged(run)]


def test_the_text_side_learns_and_the_pictures_side_stays(config, start, tmp_path) -> None:
    result = train_model(config, tmp_path / "run")
    first, *_, last = logged(tmp_path / "run")
    assert last["loss_typed"] < 0.9 * first["loss_typed"]
    before, *_ = logged(tmp_path / "run", "eval")
    assert before["step"] == 0 and result.best_score >= before["score"]
    known, found = (from_pretrained(folder).state_dict() for folder in (start, tmp_path / "run" / "model"))
    moved = {name.partition(".")[0] for name in known if not torch.equal(known[name], found[name])}
    assert moved <= {"text", "project_words"}
    trained = from_pretrained(tmp_path / "run", averaged=False).state_dict()
    assert torch.equal(known["text.model.embeddings.word_embeddings.weight"],
                       trained["text.model.embeddings.word_embeddings.weight"])  # fmt: skip


def test_more_weight_on_keep_moves_sentences_less(config, tmp_path) -> None:
    moved = []
    for keep in (0.0, 100.0):
        typed = replace(config.typed, keep=keep)
        train_model(replace(config, typed=typed, data=replace(config.data, dev=())), tmp_path / str(keep))
        moved.append(logged(tmp_path / str(keep))[-1]["moved"])
    assert moved[1] < 0.2 * moved[0]


def test_queries_of_a_file_are_those_of_the_captions(config, scenes, tmp_path) -> None:
    short = replace(config, train=replace(config.train, epochs=1), data=replace(config.data, dev=()))
    save_queries(queries_of_captions(load_jsonl(scenes)), tmp_path / "queries.jsonl")
    train_model(short, tmp_path / "rules")
    train_model(replace(short, typed=replace(config.typed, queries=str(tmp_path / "queries.jsonl"))), tmp_path / "file")
    assert losses(tmp_path / "rules") == losses(tmp_path / "file")


def test_vectors_are_computed_once_and_again_where_a_picture_changed(config, scenes, tmp_path, monkeypatch) -> None:
    dataset, model = load_jsonl(scenes), from_pretrained(config.start)
    encoded = []
    whole = vectors._encoded
    monkeypatch.setattr(vectors, "_encoded", lambda *a: encoded.append(a[2]) or whole(*a))
    monkeypatch.setattr(vectors, "PART", 20)

    def lost(model, dataset, rows, vision):
        if rows.start:
            raise OSError("the machine is gone")
        return whole(model, dataset, rows, vision)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="gone"):
        patch.setattr(vectors, "_encoded", lost)
        vectors.picture_vectors(model, dataset, tmp_path / "part", print)
    part = vectors.picture_vectors(model, dataset, tmp_path / "part", print)
    assert [rows.start for rows in encoded] == [20, 40]
    complete = vectors.picture_vectors(model, dataset, tmp_path / "complete", print)
    assert torch.equal(part, complete) and len(encoded) == 5
    assert torch.equal(vectors.picture_vectors(model, dataset, tmp_path / "part", print), part) and len(encoded) == 5
    path = dataset.records[0].source.path
    before = path.stat()
    try:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        vectors.picture_vectors(model, dataset, tmp_path / "part", print)
        assert len(encoded) == 8
    finally:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_picture_that_cannot_be_read_is_left_out_and_named(config, tmp_path) -> None:
    from tiny import make_scenes

    path = make_scenes(tmp_path / "broken", name="broken")
    (tmp_path / "broken" / "broken003.png").write_bytes(b"no picture")
    told: list[str] = []
    short = replace(config, train=replace(config.train, epochs=1), data=replace(config.data, train=str(path), dev=()))
    train_model(short, tmp_path / "run", log=told.append)
    assert any("broken003.png" in line and "Left out" in line for line in told)
    assert torch.isfinite(torch.tensor(losses(tmp_path / "run"))).all()
    with pytest.raises(ValueError, match="broken003"):
        train_model(replace(short, data=replace(short.data, strict=True)), tmp_path / "strict")


def arguments(config: RunConfig, run: Path) -> list[str]:
    words = ["train", "--out", str(run), "--device", "cpu", "--start", config.start, "--typed.queries", "captions"]
    words += ["--data.train", config.data.train, "--data.dev", config.data.dev[0], "--train.batch_size", "8"]
    words += ["--train.epochs", "4", "--train.checkpoint_every", "2", "--train.learning_rate", "0.01"]
    return [*words, "--typed.batch_size", "4", "--train.eval_every", "2"]


@pytest.mark.slow
def test_a_run_killed_in_the_middle_goes_on_to_the_same_losses(config, tmp_path) -> None:
    assert main(arguments(config, tmp_path / "whole")) == 0
    command = [sys.executable, "-m", "seps.cli.main", *arguments(config, tmp_path / "killed")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and len(log.read_text().splitlines()) >= 6):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    stamp = (tmp_path / "killed" / "vectors" / "train.npy").stat().st_mtime_ns
    assert main(arguments(config, tmp_path / "killed")) == 0
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    scores = [logged(tmp_path / run, "eval")[-1]["score"] for run in ("killed", "whole")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert (tmp_path / "killed" / "vectors" / "train.npy").stat().st_mtime_ns == stamp


def test_typed_queries_need_a_trained_model() -> None:
    with pytest.raises(ConfigError, match="start='base'"):
        RunConfig(typed=TypedConfig(queries="captions"))
    with pytest.raises(ConfigError, match=r"typed\.temperature"):
        TypedConfig(temperature=0.0)


def test_blocks_that_are_frozen_stay(config, start, tmp_path) -> None:
    config = replace(config, freeze_text=1, data=replace(config.data, dev=()), train=replace(config.train, epochs=2))
    train_model(config, tmp_path / "run")
    known = from_pretrained(start).state_dict()
    found = from_pretrained(tmp_path / "run", averaged=False).state_dict()
    moved = {name for name in known if not torch.equal(known[name], found[name])}
    assert not any(name.startswith("text.model.encoder.layer.0.") for name in moved)
    assert any(name.startswith("text.model.encoder.layer.1.") for name in moved)


def test_a_projection_of_short_queries_learns_alone(config, start, scenes, tmp_path) -> None:
    """Sentences, descriptions and pictures are read as before, to the last bit; short queries are not."""
    short = replace(config, typed=replace(config.typed, short=True))
    train_model(short, tmp_path / "run")
    first, *_, last = logged(tmp_path / "run")
    assert last["loss_typed"] < 0.9 * first["loss_typed"]
    known, found = from_pretrained(start), from_pretrained(tmp_path / "run", averaged=False)
    assert found.config.short_queries and not known.config.short_queries
    state = found.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in known.state_dict().items())
    long, typed = ["a red circle beside a blue square on grey"], ["red circle", "a circle"]
    assert torch.equal(known.encode_texts(long).words, found.encode_texts(long).words)
    assert not torch.equal(known.encode_texts(typed).words, found.encode_texts(typed).words)
    one, other = known.encode_descriptions(["Red circle."]), found.encode_descriptions(["Red circle."])
    assert torch.equal(one[0], other[0])
    # Together, each is read as it is alone.
    both = found.encode_texts([*long, *typed])
    alone = found.encode_texts(typed)
    assert torch.allclose(both.words[1:][both.mask[1:]], alone.words[alone.mask], atol=1e-5)
    # What trains beside it would leave it behind: such a run goes on without.
    started = {"start": str(tmp_path / "run" / "model"), "model": replace(config.model, short_queries=True)}
    plain = replace(config, **started, typed=TypedConfig(), data=replace(config.data, dev=()))
    told: list[str] = []
    train_model(replace(plain, train=replace(plain.train, epochs=1)), tmp_path / "plain", log=told.append)
    assert not from_pretrained(tmp_path / "plain").config.short_queries
    assert any("configs/typed.yaml" in line for line in told)
    # Trained once more it begins anew: the same command gives the same model.
    train_model(replace(short, **started), tmp_path / "again")
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "run"), rel=1e-5)


def test_short_needs_queries() -> None:
    with pytest.raises(ConfigError, match=r"typed\.queries"):
        TypedConfig(short=True)
