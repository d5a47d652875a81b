"""DeMo's own files of settings, written here from their documented keys, drive a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from reid_toys import msvr310, rgbnt201, tiny_vit_file

from seps.cli.main import main
from seps.method.config import ConfigError
from seps.reid.config import ReidConfig, load_config
from seps.reid.demo.settings import demo_settings, is_demo
from seps.settings import load

CONFIGS = Path(__file__).parents[2] / "configs" / "reid"
# Keys and values as DeMo's users have them: tuples and names in brackets are texts in YAML.
SDTPS = """
MODEL:
  TRANSFORMER_TYPE: 'ViT-B-16'
  STRIDE_SIZE: [ 16, 16 ]
  SIE_CAMERA: True
  SIE_COE: 1.0
  DIRECT: 1
  ID_LOSS_WEIGHT: 0.25
  TRIPLET_LOSS_WEIGHT: 1.0
  GLOBAL_LOCAL: True
  HDM: False
  ATM: False
  HEAD: 4
  USE_SDTPS: True
  SDTPS_SPARSE_RATIO: 0.5
  SDTPS_AGGR_RATIO: 0.4
  SDTPS_BETA: 0.25
  SDTPS_USE_GUMBEL: False
  SDTPS_GUMBEL_TAU: 1.0
  SDTPS_LOSS_WEIGHT: 2.0
INPUT:
  SIZE_TRAIN: [ 256, 128 ]
  SIZE_TEST: [ 256, 128 ]
  PROB: 0.5
  RE_PROB: 0.5
  PADDING: 10
DATALOADER:
  SAMPLER: 'softmax_triplet'
  NUM_INSTANCE: 8
  NUM_WORKERS: 14
DATASETS:
  NAMES: ('RGBNT201')
  ROOT_DIR: 'data'
SOLVER:
  BASE_LR: 0.00035
  WARMUP_ITERS: 10
  MAX_EPOCHS: 50
  OPTIMIZER_NAME: 'Adam'
  IMS_PER_BATCH: 64
  EVAL_PERIOD: 1
TEST:
  IMS_PER_BATCH: 64
  RE_RANKING: 'no'
  WEIGHT: ''
  NECK_FEAT: 'before'
  FEAT_NORM: 'yes'
  MISS: 'nothing'
OUTPUT_DIR: '..'
"""


def settings_of(text: str, *options: str) -> tuple[ReidConfig, list[str], list[str]]:
    made = demo_settings(yaml.safe_load(text), options)
    return load(ReidConfig, overrides=made.values), made.mapped, made.left_out


def test_the_sdtps_file_is_the_preset_of_that_recipe() -> None:
    """Every field but what the preset does not copy: the seed and the threads."""
    config, mapped, left_out = settings_of(SDTPS)
    made, preset = config.to_json(), load_config(CONFIGS / "demo-RGBNT201.yaml").to_json()
    differing = {
        f"{section}.{name}"
        for section in made
        for name, value in made[section].items()
        if preset[section][name] != (pytest.approx(value) if isinstance(value, float) else value)
    }
    assert differing == {"data.threads", "train.seed", "train.workers"}
    keys = {f"{s}.{k}" for s, part in yaml.safe_load(SDTPS).items() if isinstance(part, dict) for k in part}
    answered = {line.split(" ")[0] for line in (*mapped, *left_out)}
    assert answered == keys | {"OUTPUT_DIR"}


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        (("MODEL.SDTPS_USE_GUMBEL", "True"), "model.decision", "relaxed"),
        (("MODEL.SDTPS_SPARSE_RATIO", "0.7"), "model.sparse_ratio", 0.7),
        (("MODEL.USE_SDTPS", "False"), "model.fusion", "concat"),
        (("MODEL.DIRECT", "0"), "model.direct", False),
        (("SOLVER.MAX_EPOCHS", "20", "SOLVER.WARMUP_ITERS", "5"), "train.warmup_fraction", 0.25),
        (("INPUT.SIZE_TRAIN", "(128, 256)"), "model.image_size", [128, 256]),
        (("DATASETS.NAMES", "('MSVR310')"), "data.root", "data/MSVR310"),
        (
            ("MODEL.TRANSFORMER_TYPE", "vit_base_patch16_224", "MODEL.PRETRAIN_PATH_T", "a.pth"),
            "model.encoder",
            "a.pth",
        ),
        (("MODEL.IF_LABELSMOOTH", "off"), "loss.label_smoothing", 0.0),
    ],
)
def test_trailing_options_win_over_the_file(options: tuple[str, ...], name: str, expected: Any) -> None:
    section, _, field = name.partition(".")
    assert settings_of(SDTPS, *options)[0].to_json()[section][field] == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("MODEL.HDM", "True"), "not part of this project"),
        (("MODEL.USE_DGAF", "True"), "not part of this project"),
        (("MODEL.SIE_COE", "3.0"), "factor is 1"),
        (("SOLVER.OPTIMIZER_NAME", "SGD"), "adam and adamw"),
        (("MODEL.SDTPS_CROSS_ATTN_TYPE", "attention"), "cosines"),
        (("MODEL.NEW_THING", "7"), "not known here"),
        (("INPUT.SIZE_TEST", "[300, 150]"), "the same in training and test"),
    ],
)
def test_what_has_no_counterpart_is_listed_with_its_reason(options: tuple[str, ...], reason: str) -> None:
    assert any(line.startswith(f"{options[0]} ") and reason in line for line in settings_of(SDTPS, *options)[2])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("MODEL.DIRECT",), "pairs of KEY VALUE"),
        (("model.width", "64"), "no option of DeMo's"),
        (("MODEL.TRANSFORMER_TYPE", "t2t_vit_t_24"), "is not known here"),
        (("MODEL.STRIDE_SIZE", "[16, 12]"), "same in both directions"),
        (("SOLVER.IMS_PER_BATCH", "60"), "no multiple"),
        (("SOLVER.MAX_EPOCHS", "0"), "above 0"),
        (("MODEL.SDTPS_SPARSE_RATIO", "most"), "model.sparse_ratio"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(options: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        settings_of(SDTPS, *options)


def test_values_are_data_and_never_run(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    settings_of(SDTPS, "OUTPUT_DIR", f"__import__('pathlib').Path({str(trap)!r}).touch()")
    assert not trap.exists()
    assert not is_demo({"MODEL": {}, "model": {}}) and not is_demo({})


@pytest.mark.parametrize("layout", ["RGBNT201", "MSVR310"])
def test_a_demo_file_trains_a_run_on_its_tree(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of DeMo's users, with the sizes of a toy: --config FILE and options behind it."""
    trees = {"RGBNT201": rgbnt201, "MSVR310": msvr310}
    trees[layout](tmp_path / "data" / layout)
    size = "[64, 32]" if layout == "RGBNT201" else "[32, 64]"
    file = tmp_path / "DeMo_SDTPS.yml"
    file.write_text(SDTPS.replace("'data'", f"'{tmp_path / 'data'}'"), encoding="utf-8")
    small = [
        "INPUT.SIZE_TRAIN",
        size,
        "SOLVER.MAX_EPOCHS",
        "2",
        "SOLVER.WARMUP_ITERS",
        "1",
        "DATALOADER.NUM_INSTANCE",
        "2",
    ]
    small += ["SOLVER.IMS_PER_BATCH", "4", "DATASETS.NAMES", layout, "MODEL.SDTPS_USE_GUMBEL", "True"]
    words = ["reid", "train", "--config", str(file), *small, "--out", str(tmp_path / "run"), "--device", "cpu"]
    encoder = ["--model.encoder", str(tiny_vit_file(tmp_path / "vit.pth")), "--model.width", "64"]
    assert main([*words, *encoder, "--train.precision", "float32", "--model.aggr_ratio", "0.5"]) == 0
    shown = capsys.readouterr()
    assert "MODEL.SDTPS_USE_GUMBEL True -> model.decision relaxed" in shown.err
    assert "TEST.RE_RANKING no -> given elsewhere: --rerank of seps reid eval" in shown.err
    # What was printed is a file of settings that makes the same run.
    printed = yaml.safe_load(
        shown.err.partition("as a file for --config:\n")[2].partition("\nepoch")[0].split("\n\n")[0]
    )
    state = json.loads(next((tmp_path / "run").rglob("state.json")).read_text(encoding="utf-8"))
    assert load(ReidConfig, overrides=printed).to_json() == state["about"]["reid"]
    assert main(["reid", "eval", str(tmp_path / "run"), "--json", "--device", "cpu"]) == 0


def test_an_unknown_file_is_told_of_demos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("MODEL:\n  DIRECT: 1\nsolver:\n  lr: 1\n", encoding="utf-8")
    assert main(["reid", "train", "--config", str(file), "--out", str(tmp_path / "run")]) == 2
    assert "DeMo's own files" in capsys.readouterr().err
    assert main(["reid", "train", "MODEL.DIRECT", "0", "--out", str(tmp_path / "run")]) == 2
    assert "DeMo's own files" in capsys.readouterr().err
