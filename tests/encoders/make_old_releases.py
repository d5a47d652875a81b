"""Write the test data of `test_tensor_names.py`; run it once under each old release of transformers.

    python tests/encoders/make_old_releases.py tests/encoders/old_releases

names-VERSION.json: the names and shapes of tiny models of every family. towers-VERSION.safetensors: for the families
whose names changed, the weights, an input and what the model makes of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
VISION = {"hidden_size": 8, "image_size": 8, "patch_size": 4, **LAYERS}
TEXT = {"hidden_size": 8, "vocab_size": 40, "max_position_embeddings": 16, **LAYERS}
SWIN = {"embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2, "image_size": 16, "patch_size": 2}
TWO = {"vision_config": VISION, "text_config": TEXT, "projection_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("vit", "deit", "beit", "dinov2", "dinov2_with_registers", "dinov3_vit", "ijepa"), VISION),
    **dict.fromkeys(("swin", "swinv2", "donut-swin"), SWIN),
    **dict.fromkeys(("clip", "siglip", "chinese_clip"), TWO),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "mpnet", "camembert"), TEXT),
    "distilbert": {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12, "vocab_size": 40},
}
TOWERS = {"4": ("vit", "deit", "beit", "dinov2", "swin"), "5": ("dinov2",)}


def build(family: str) -> Any:
    """A tiny model of a family with weights that differ from tensor to tensor."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family, **FAMILIES[family])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def main(folder: Path) -> None:
    version = transformers.__version__
    names = {}
    for family in FAMILIES:
        names[family] = {name: list(value.shape) for name, value in build(family).state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"names-{version}.json").write_text(json.dumps(names, separators=(",", ":")) + "\n")
    towers = {}
    for family in TOWERS[version[0]]:
        model = build(family)
        size = FAMILIES[family]["image_size"]
        pixels = torch.rand(2, 3, size, size)
        with torch.no_grad():
            output = model(pixels).last_hidden_state
        towers |= {f"{family}//{name}": value.clone().contiguous() for name, value in model.state_dict().items()}
        towers |= {f"{family}//pixels": pixels, f"{family}//output": output.contiguous()}
    save_file(towers, folder / f"towers-{version}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
