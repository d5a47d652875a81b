"""DeMo's configuration, `configs/RGBNT201/DeMo_SDTPS.yml` and its like, as settings of `seps reid train`.

A file and the pairs behind it on the command line (`MODEL.SDTPS_USE_GUMBEL True`) are read as data. Keys that neither
names have DeMo's defaults (`config/defaults.py` of its code and of its SDTPS descendant). Every given key is answered:
by the setting it becomes, or by why it has none here.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seps.method.config import ConfigError
from seps.parsing import as_list, is_number, is_whole

SECTIONS = frozenset({"MODEL", "INPUT", "DATALOADER", "DATASETS", "SOLVER", "TEST", "OUTPUT_DIR"})
HINT = "DeMo's own files (MODEL, DATASETS, SOLVER, ...) are read by --config as they are."
_MAX_TEXT = 1000
_CLIP_RATE = 5e-6
"""The rate at which DeMo's solver trains CLIP's backbone, whatever BASE_LR is."""

_COPIED = {
    "MODEL.SIE_CAMERA": (True, "model.camera_embedding"),
    "MODEL.ID_LOSS_WEIGHT": (1.0, "loss.identity"),
    "MODEL.TRIPLET_LOSS_WEIGHT": (1.0, "loss.triplet"),
    "MODEL.GLOBAL_LOCAL": (False, "model.global_local"),
    "MODEL.SDTPS_SPARSE_RATIO": (0.5, "model.sparse_ratio"),
    "MODEL.SDTPS_AGGR_RATIO": (0.4, "model.aggr_ratio"),
    "MODEL.SDTPS_BETA": (0.25, "model.beta"),
    "MODEL.SDTPS_GUMBEL_TAU": (1.0, "model.temperature"),
    "MODEL.SDTPS_LOSS_WEIGHT": (2.0, "loss.sdtps"),
    "INPUT.SIZE_TRAIN": ([256, 128], "model.image_size"),
    "INPUT.PROB": (0.5, "data.flip"),
    "INPUT.RE_PROB": (0.5, "data.erase"),
    "INPUT.PADDING": (10, "data.pad"),
    "DATALOADER.NUM_INSTANCE": (16, "data.images"),
    "DATALOADER.NUM_WORKERS": (14, "data.threads"),
    "SOLVER.BASE_LR": (0.009, "train.learning_rate"),
    "SOLVER.MAX_EPOCHS": (120, "train.epochs"),
    "SOLVER.BIAS_LR_FACTOR": (2.0, "train.bias_lr_scale"),
    "SOLVER.WEIGHT_DECAY": (1e-4, "train.weight_decay"),
    "SOLVER.SEED": (1234, "train.seed"),
}
"""Key -> (DeMo's default, the setting that takes the value as it is)."""
_DERIVED: dict[str, Any] = {
    "MODEL.TRANSFORMER_TYPE": "vit_base_patch16_224",
    "MODEL.PRETRAIN_PATH_T": "",
    "MODEL.STRIDE_SIZE": [16, 16],
    "MODEL.DIRECT": 1,
    "MODEL.USE_SDTPS": False,
    "MODEL.SDTPS_USE_GUMBEL": False,
    "MODEL.IF_LABELSMOOTH": "on",
    "DATASETS.NAMES": "RGBNT201",
    "DATASETS.ROOT_DIR": "./data",
    "SOLVER.IMS_PER_BATCH": 128,
    "SOLVER.WARMUP_ITERS": 10,
    "SOLVER.OPTIMIZER_NAME": "SGD",
}
"""Key -> DeMo's default, for keys whose setting follows from the value by a rule (`_derive`)."""
_FIXED: dict[str, tuple[Any, str]] = {
    "MODEL.SIE_COE": (1.0, "the camera embedding is added as it is: its factor is 1"),
    "MODEL.SIE_VIEW": (False, "there is no embedding of the view"),
    "MODEL.NECK": ("bnneck", "the classifiers have a BNNeck"),
    "MODEL.IF_WITH_CENTER": ("no", "there is no center loss"),
    "MODEL.ID_LOSS_TYPE": ("softmax", "the identity loss is a plain cross-entropy"),
    "MODEL.METRIC_LOSS_TYPE": ("triplet", "the metric loss is the triplet loss"),
    "MODEL.NO_MARGIN": (True, "the triplet loss has a soft margin"),
    "MODEL.FROZEN": (False, "there is no LoRA to train instead: model.freeze_blocks fixes the first blocks"),
    "MODEL.PROMPT": (False, "there are no prompts"),
    "MODEL.ADAPTER": (False, "there are no adapters"),
    "MODEL.SDTPS_CROSS_ATTN_TYPE": ("cosine", "guides are cosines, which have no weights"),
    "INPUT.PIXEL_MEAN": ([0.5, 0.5, 0.5], "pixels are normalised by 0.5 in this network"),
    "INPUT.PIXEL_STD": ([0.5, 0.5, 0.5], "pixels are normalised by 0.5 in this network"),
    "DATALOADER.SAMPLER": ("softmax_triplet", "batches are P identities x K images"),
    "SOLVER.LARGE_FC_LR": (False, "classifiers learn at the rate of the other new parts"),
    "SOLVER.LR_SCHEDULER": ("cosine", "the schedule is train.schedule epoch-cosine"),
    "SOLVER.WARMUP_METHOD": ("linear", "the warm-up is linear"),
    "TEST.NECK_FEAT": ("before", "features are taken before the BNNeck"),
    "TEST.FEAT_NORM": ("yes", "features are compared at unit length"),
}
"""Key -> (the one value there is here, what to say of another)."""
_ELSEWHERE = {
    "MODEL.DEVICE": "--device",
    "MODEL.DEVICE_ID": "--device cuda:N",
    "MODEL.DIST_TRAIN": "torchrun",
    "TEST.IMS_PER_BATCH": "--batch-size of seps reid eval",
    "TEST.RE_RANKING": "--rerank of seps reid eval",
    "TEST.MISS": "--missing of seps reid eval",
    "TEST.WEIGHT": "the run folder that seps reid eval is given, or seps convert",
    "OUTPUT_DIR": "--out",
    "SOLVER.EVAL_PERIOD": "seps reid eval after training: the test split chooses no checkpoint",
    "SOLVER.CHECKPOINT_PERIOD": "train.checkpoint_every, in steps",
    "SOLVER.LOG_PERIOD": "train.log_every, in steps",
}
_UNUSED = {
    "SOLVER.MOMENTUM": "SGD's",
    "SOLVER.MARGIN": "of the triplet loss with a margin",
    "SOLVER.GAMMA": "of the multistep schedule",
    "SOLVER.STEPS": "of the multistep schedule",
    "SOLVER.WARMUP_FACTOR": "of the multistep schedule",
    "MODEL.SDTPS_CROSS_ATTN_HEADS": "of the learned attention",
    "MODEL.SDTPS_SHARE_CROSS_ATTN": "of the learned attention",
    "MODEL.HEAD": "of DeMo's experts",
    "MODEL.NAME": "a name",
    "MODEL.ARCH": "which of DeMo's variants; here the branch is SDTPS, or none",
    "MODEL.DROP_PATH": "of another backbone than CLIP's",
    "MODEL.DROP_OUT": "of another backbone than CLIP's",
    "MODEL.ATT_DROP_RATE": "of another backbone than CLIP's",
}
_UNUSED_STARTS = ("SOLVER.CENTER_", "SOLVER.CLUSTER_", "SOLVER.RANGE_", "SOLVER.COSINE_")
_MODULES = ("HDM", "ATM", "SACR", "MULTIMODAL_SACR", "LIF", "DGAF", "FUSED", "CENGJIFUSION", "NEWDEFORM", "DIVERSITY")
_RECIPE: dict[str, Any] = {
    "data.holdout": 0.0,
    "data.rerank": [50, 15],
    "model.network": "demo",
    "model.missing": "zero",
    "loss.triplet_space": "raw",
    "train.schedule": "epoch-cosine",
    "train.warmup_start": 0.1,
    "train.final_lr_fraction": 0.001,
    "train.lr_noise": 0.67,
    "train.clip_norm": 0.0,
    "train.precision": "bf16",
    "train.eval_every": 0,
}
"""What DeMo's code does and no key of its says; see configs/reid/demo-RGBNT201.yaml for the sources."""


@dataclass
class DemoSettings:
    """The settings (dotted name -> value) that a configuration makes, and an answer to each of its keys."""

    values: dict[str, Any]
    mapped: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def is_demo(values: Mapping[str, Any]) -> bool:
    """Whether the values of a YAML file are a configuration of DeMo's."""
    return bool(values) and set(values) <= SECTIONS


def demo_settings(values: Mapping[str, Any], options: Sequence[str] = (), source: str = "the file") -> DemoSettings:
    """The settings of a DeMo configuration; `options` are the words KEY VALUE ... that followed it.

    Raises ConfigError for a value that cannot be read and for a backbone, set or batch that there is none of.
    """
    given = _flat(values, source)
    if len(options) % 2:
        raise ConfigError(f"DeMo's options are pairs of KEY VALUE, but {' '.join(options)!r} has {len(options)} words.")
    for key, value in zip(options[::2], options[1::2], strict=True):
        if key.partition(".")[0] not in SECTIONS:
            raise ConfigError(f"{key} {value} is no option of DeMo's: write it as --{key} {value}.")
        given[key] = _literal(value)
    made = DemoSettings(dict(_RECIPE))
    for key, (default, name) in _COPIED.items():
        made.values[name] = given.get(key, default)
        if key in given:
            made.mapped.append(_arrow(key, given[key], f"{name} {_shown(given[key])}"))
    _derive(given, made)
    for key, value in given.items():
        if key not in _COPIED and key not in _DERIVED:
            _answer(key, value, given, made)
    return made


def _flat(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Dotted keys -> values, of one level of sections."""
    found: dict[str, Any] = {}
    for section, part in values.items():
        if isinstance(part, Mapping):
            found.update({f"{section}.{name}": _literal(value) for name, value in part.items()})
        elif section == "OUTPUT_DIR":
            found[section] = part
        elif part is not None:
            raise ConfigError(f"{source}: the section {section} must hold names and values, not {part!r:.200}.")
    return found


def _literal(value: Any) -> Any:
    """A value as DeMo reads it: a text that is a Python literal, such as ('RGBNT201') or 1e-4, is what it denotes."""
    if isinstance(value, str) and len(value) <= _MAX_TEXT:
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return value
    return list(value) if isinstance(value, tuple) else value


def _derive(given: Mapping[str, Any], made: DemoSettings) -> None:
    """The settings that follow from the values by a rule."""
    value = {key: given.get(key, default) for key, default in _DERIVED.items()}
    clip = value["MODEL.TRANSFORMER_TYPE"] == "ViT-B-16"
    if not clip and value["MODEL.TRANSFORMER_TYPE"] != "vit_base_patch16_224":
        raise ConfigError(
            f"MODEL.TRANSFORMER_TYPE {value['MODEL.TRANSFORMER_TYPE']!r} is not known here: 'ViT-B-16' (CLIP) and "
            "'vit_base_patch16_224' are. Add --model.encoder and --model.width to take another one."
        )
    weights = value["MODEL.PRETRAIN_PATH_T"]
    made.values["model.encoder"] = "clip-b-16" if clip else str(weights or "vit-b-224")
    made.values["model.width"] = 512 if clip else 768
    stride = _pair("MODEL.STRIDE_SIZE", value["MODEL.STRIDE_SIZE"])
    if stride[0] != stride[1]:
        raise ConfigError(f"MODEL.STRIDE_SIZE {list(stride)}: the stride here is the same in both directions.")
    made.values["model.stride"] = stride[0]
    made.values["model.direct"] = bool(value["MODEL.DIRECT"])
    made.values["model.fusion"] = "sdtps" if value["MODEL.USE_SDTPS"] else "concat"
    made.values["model.decision"] = "relaxed" if value["MODEL.SDTPS_USE_GUMBEL"] else "topk"
    made.values["loss.label_smoothing"] = 0.1 if value["MODEL.IF_LABELSMOOTH"] == "on" else 0.0
    name = value["DATASETS.NAMES"]
    name = name[0] if len(as_list(name)) == 1 else name
    made.values["data.layout"] = str(name).lower()
    made.values["data.root"] = f"{str(value['DATASETS.ROOT_DIR']).rstrip('/')}/{name}"
    images, batch = made.values["data.images"], value["SOLVER.IMS_PER_BATCH"]
    if not is_whole(batch) or not is_whole(images, 1) or batch % images:
        raise ConfigError(f"SOLVER.IMS_PER_BATCH {batch} is no multiple of DATALOADER.NUM_INSTANCE {images}.")
    made.values["data.identities"] = batch // images
    epochs, rate = made.values["train.epochs"], made.values["train.learning_rate"]
    numbers = {
        "SOLVER.MAX_EPOCHS": epochs,
        "SOLVER.BASE_LR": rate,
        "SOLVER.WARMUP_ITERS": value["SOLVER.WARMUP_ITERS"],
    }
    for key, number in numbers.items():
        if not is_number(number) or number < 0 or (key != "SOLVER.WARMUP_ITERS" and not number):
            raise ConfigError(f"{key} must be a number above 0, not {number!r}.")
    made.values["train.warmup_fraction"] = round(min(value["SOLVER.WARMUP_ITERS"] / epochs, 0.99), 6)
    made.values["train.backbone_lr_scale"] = _CLIP_RATE / rate if clip else 1.0
    optimizer = str(value["SOLVER.OPTIMIZER_NAME"]).lower()
    made.values["train.optimizer"] = optimizer if optimizer in ("adam", "adamw") else "adam"
    if optimizer not in ("adam", "adamw"):
        made.left_out.append(_arrow("SOLVER.OPTIMIZER_NAME", value["SOLVER.OPTIMIZER_NAME"], "adam and adamw are here"))
    becomes = {
        "MODEL.TRANSFORMER_TYPE": ("model.encoder", "model.width"),
        "MODEL.PRETRAIN_PATH_T": ("model.encoder",),
        "MODEL.STRIDE_SIZE": ("model.stride",),
        "MODEL.DIRECT": ("model.direct",),
        "MODEL.USE_SDTPS": ("model.fusion",),
        "MODEL.SDTPS_USE_GUMBEL": ("model.decision",),
        "MODEL.IF_LABELSMOOTH": ("loss.label_smoothing",),
        "DATASETS.NAMES": ("data.layout",),
        "DATASETS.ROOT_DIR": ("data.root",),
        "SOLVER.IMS_PER_BATCH": ("data.identities",),
        "SOLVER.WARMUP_ITERS": ("train.warmup_fraction",),
        "SOLVER.OPTIMIZER_NAME": ("train.optimizer",),
    }
    for key, names in becomes.items():
        if key in given:
            text = ", ".join(f"{name} {_shown(made.values[name])}" for name in names)
            made.mapped.append(_arrow(key, given[key], text))


def _pair(key: str, value: Any) -> tuple[int, int]:
    if is_whole(value):
        return value, value
    if len(as_list(value)) == 2 and all(map(is_whole, value)):
        return value[0], value[1]
    raise ConfigError(f"{key} must be two whole numbers, not {value!r:.200}.")


def _answer(key: str, value: Any, given: Mapping[str, Any], made: DemoSettings) -> None:
    """What becomes of a key that makes no setting."""
    name = key.partition(".")[2].removeprefix("USE_")
    if key in _FIXED:
        here, reason = _FIXED[key]
        (made.mapped if value == here else made.left_out).append(_arrow(key, value, reason))
    elif key == "INPUT.SIZE_TEST":
        same = value == made.values["model.image_size"]
        reason = "model.image_size, the same in training and test"
        (made.mapped if same else made.left_out).append(_arrow(key, value, reason))
    elif key == "SOLVER.WEIGHT_DECAY_BIAS":
        same = value == made.values["train.weight_decay"]
        reason = "train.weight_decay, the same for biases"
        (made.mapped if same else made.left_out).append(_arrow(key, value, reason))
    elif key in _ELSEWHERE:
        made.left_out.append(_arrow(key, value, f"given elsewhere: {_ELSEWHERE[key]}"))
    elif name.startswith(_MODULES):
        off = value in (False, 0, "")
        reason = "not used" if off else "a module that is not part of this project: trained without it"
        (made.mapped if off else made.left_out).append(_arrow(key, value, reason))
    elif key in _UNUSED or key.startswith(_UNUSED_STARTS):
        made.left_out.append(_arrow(key, value, f"has no effect: {_UNUSED.get(key, 'of a loss that is not used')}"))
    else:
        made.left_out.append(_arrow(key, value, "not known here"))


def _arrow(key: str, value: Any, text: str) -> str:
    return f"{key} {_shown(value)} -> {text}"


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
