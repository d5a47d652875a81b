"""`seps explain`: why a picture and a sentence have their score, as one picture or as JSON."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path

from seps.cli.argtypes import Parser, device, output_file, refuse_same_file


def build_parser() -> argparse.ArgumentParser:
    """The options of `seps explain`."""
    parser = Parser("seps explain", description=__doc__)
    parser.add_argument("image", help="picture to explain")
    parser.add_argument("caption", help='the sentence, like "a dog running on the beach"')
    parser.add_argument("-o", "--out", type=output_file, help="PNG or JPEG to write")
    parser.add_argument("--dense", metavar="TEXT", help="the picture's own description, if it has one")
    parser.add_argument("--model", default="mini", help="'mini', a model folder, or a run of seps train")
    parser.add_argument("--device", type=device, default="cpu", help="cpu (default), cuda, ...")
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Explain one pair; writes the picture and prints what each word adds."""
    options = build_parser().parse_args(arguments)
    from PIL import Image

    from seps.retrieval.data import ImageSource, read_source
    from seps.retrieval.data.images import decode_image
    from seps.retrieval.explain_picture import draw
    from seps.retrieval.explanation import Explainer
    from seps.retrieval.pretrained import from_pretrained
    from seps.retrieval.thumbnails import resized_jpeg

    if options.out and Path(options.out).suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise ValueError(f"--out is {options.out!r}; name a .png or .jpg file.")
    refuse_same_file("--out", options.out, [options.image])
    source = ImageSource(Path(options.image))
    data = read_source(source)
    explainer = Explainer(from_pretrained(options.model, device=options.device))
    pixels = decode_image(data, source, explainer.model.image_size)
    explanation = explainer.picture(pixels, options.caption, options.dense)
    if options.out:
        draw(explanation, Image.open(io.BytesIO(resized_jpeg(data, source, 1024)))).save(options.out)
    if options.json:
        print(json.dumps(explanation.as_dict(), ensure_ascii=False))
        return 0
    width = max(len(part.word) for part in explanation.words)
    print(f"score {explanation.score:.3f}; {sum(explanation.kept)} of {len(explanation.kept)} patches kept")
    for part in explanation.words:
        print(f"  {part.word:<{width}}  {part.contribution:+.3f}")
    if explanation.rest:
        print(f"  {'(MLP)':<{width}}  {explanation.rest:+.3f}")
    if options.out:
        print(f"Written: {options.out}")
    return 0
