"""Models of ours in the real mteb, on a task of pictures made here, by the code of docs/mteb.md."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from seps.cli.main import main
from stores import model_folder, paint

pytest.importorskip("sentence_transformers")
PAGE = Path(__file__).parents[2] / "docs/mteb.md"
ASK = """
from PIL import Image as Pictures
OwnPictures.captions = {captions!r}
(score,) = run([OwnPictures()]).values()
pictures = model.encode_document([Pictures.open(file) for file in OwnPictures.captions])
scores = model.encode_query(list(OwnPictures.captions.values())) @ pictures.T
places = [int((row > row[place]).sum()) for place, row in enumerate(scores)]
print("SCORES", [float(score), [float(row[place]) for place, row in enumerate(scores)], places])
"""


def test_pictures_come_as_mteb_gives_them(tmp_path: Path) -> None:
    """In dictionaries by modality."""
    from sentence_transformers import SentenceTransformer

    assert main(["export", model_folder(), "--sentence-transformers", "-o", str(tmp_path / "m")]) == 0
    model = SentenceTransformer(str(tmp_path / "m"), trust_remote_code=True, device="cpu")
    picture = Image.open(paint(tmp_path / "a.jpg", 1))
    (plain,), (named,) = model.encode_document([picture]), model.encode_document([{"image": picture}])
    assert (plain == named).all()
    (plain,), (named,) = model.encode_query(["a dog"]), model.encode_query([{"text": "a dog"}])
    assert (plain == named).all()


if sys.version_info >= (3, 11):  # what mteb needs

    @pytest.mark.slow
    def test_a_task_runs_and_its_score_is_that_of_the_model(tmp_path: Path) -> None:
        assert main(["export", model_folder(), "--sentence-transformers", "-o", str(tmp_path / "base-vector")]) == 0
        words = ("red", "green", "blue", "a dog", "two boats at dusk")
        captions = {str(paint(tmp_path / f"{seed}.png", seed)): text for seed, text in enumerate(words)}
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
        python = tmp_path / "env/bin/python"
        (site,) = (tmp_path / "env").glob("lib/*/site-packages")
        (site / "this.pth").write_text("\n".join(sys.path))
        subprocess.run([python, "-m", "pip", "install", "-q", "mteb"], check=True, capture_output=True)
        check(str(python), tmp_path, captions)


def check(python: str, folder: Path, captions: dict[str, str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "run.py").write_text("\n".join([*blocks, ASK.format(captions=captions)]))
    done = subprocess.run([python, "run.py"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert "SCORES" in done.stdout, done.stderr
    score, _, places = json.loads(done.stdout.partition("SCORES")[2])
    gains = [1 / math.log2(place + 2) for place in places]
    assert score == pytest.approx(sum(gains) / len(gains), abs=1e-3)
