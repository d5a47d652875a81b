"""Write the embedded text encoder, src/seps/assets/minilm, from a folder of the published model.

    python tools/minilm.py FOLDER

FOLDER is a copy of sentence-transformers/all-MiniLM-L6-v2. Matrices are stored in float16, vectors in float32, the
published pooling layer is left out. Then run `python tools/sentence_side.py`: both embedded models use this encoder.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from seps.encoders import mini_text_folder
from seps.encoders.bert import own_tensors

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def main(source: Path) -> None:
    """Write the weights and copy the small files."""
    target = mini_text_folder()
    tensors = own_tensors(load_file(source / "model.safetensors"))
    halved = {name: value.half() if value.dim() > 1 else value for name, value in tensors.items()}
    save_file(halved, target / "model.safetensors", metadata={"format": "pt"})
    for name in FILES:
        shutil.copyfile(source / name, target / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
