"""Load a checkpoint of the published code: a file of its shape is made here, converted, saved, loaded and scored.

The published trainer writes a pickle with `model` (weights) and `opt` (its options). `convert_published` reads it with
a reader that builds tensors and nothing else, so that a hostile file runs nothing. With a real `model_best.pth` leave
out the first part and the encoders' names; `seps convert model_best.pth -o FOLDER` does the same. It prints the names
that changed, the scores, and what happens with a file that tries to run a program.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import transformers

import seps
from seps.encoders import mini_text_folder
from seps.hub.folder import ModelError
from seps.retrieval.convert import convert_published, read_published
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.pretrained import from_pretrained, save_pretrained

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def published_file(folder: Path) -> Path:
    """A `model_best.pth` as the published trainer writes it, with a tiny ViT and the embedded BERT."""
    torch.manual_seed(0)
    vit = transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **TINY))
    vit.save_pretrained(folder / "vit")
    bert = transformers.BertModel.from_pretrained(mini_text_folder(), dtype=torch.float32)
    net = seps.CrossSparseAggrNet(16, 16, sparse_ratio=0.5, aggr_ratio=0.4, has_cls=True)
    model = {f"img_enc.visual_encoder.{name}": value for name, value in vit.state_dict().items()}
    model |= {f"txt_enc.bert.{name}": value for name, value in bert.state_dict().items()}
    model |= {"img_enc.vision_proj.weight": torch.randn(16, 32), "img_enc.vision_proj.bias": torch.zeros(16)}
    model |= {"txt_enc.fc.weight": torch.randn(16, 384), "txt_enc.fc.bias": torch.zeros(16)}
    model |= {f"cross_net.{name}": value for name, value in net.state_dict().items()}
    options = argparse.Namespace(embed_size=16, sparse_ratio=0.5, aggr_ratio=0.4, vit_type="vit")
    torch.save({"epoch": 29, "model": model, "best_rsum": 500.0, "opt": options}, folder / "model_best.pth")
    return folder / "model_best.pth"


class Hostile:
    """Runs a program when a careless reader unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("echo a careless reader would have run this",)


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = published_file(folder)
        weights, options = read_published(path)
        print(f"{path.name}: {len(weights)} tensors, sparse_ratio {options['sparse_ratio']}")
        model = convert_published(path, vision=str(folder / "vit"), text="mini")
        save_pretrained(model, folder / "converted", about={"name": "converted", "license": "unknown"})
        print("saved:", ", ".join(sorted(part.name for part in (folder / "converted").iterdir())))
        back = from_pretrained(folder / "converted")
        pictures = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            texts = back.encode_texts(["a dog runs", "two cups of coffee", "a red house"])
            scores = back.score(ImageFeatures(back.encode_pixels(pictures)), texts)
        print("scores of 2 pictures with 3 captions:", [[round(x, 3) for x in row] for row in scores.tolist()])
        torch.save({"model": {}, "opt": Hostile()}, path)
        try:
            convert_published(path)
        except ModelError as error:
            print("a hostile file:", str(error).partition(":")[0])


if __name__ == "__main__":
    main()
