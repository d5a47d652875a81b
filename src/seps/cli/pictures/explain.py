"""`seps explain`: show what each word and each patch adds to the score of a picture for a sentence.

With --store the picture is one of the store, and the score is that of `seps search`.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seps.cli.shared.argtypes import device, named_file, output_file, refuse_same_file
from seps.cli.shared.outputs import check_picture, save_picture
from seps.cli.shared.parser import Parser, add_plugins
from seps.cli.shared.text import print_json, printable
from seps.plugins import load_plugins
from seps.retrieval.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from PIL import Image

    from seps.retrieval.explain.explanation import Explanation


def add_options(parser: Parser) -> None:
    """The options of `seps explain`."""
    parser.add_argument(
        "image", help="explain this picture; with --store name it by its path in seps search, or by its id"
    )
    parser.add_argument("caption", help='explain its score for this sentence, like "a dog running on the beach"')
    parser.add_argument(
        "--store", help="explain a picture of this store, with its description and the score of the search"
    )
    parser.add_argument("-o", "--out", type=output_file, help="write the explanation to this PNG or JPEG file")
    parser.add_argument("--dense", metavar="TEXT", help="use this description of the picture (not with --store)")
    parser.add_argument(
        "--model",
        help="score with 'base' (default), 'mini', a model folder, a run of seps train or a dual encoder; with --store "
        "the default is its model",
    )
    parser.add_argument(
        "--guide",
        type=named_file,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="add a guide of the selection: a vector in a .npy or .safetensors file (not with --store)",
    )
    add_plugins(parser)
    parser.add_argument("--device", type=device, default="cpu", help="compute on cpu, cuda or cuda:1 (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print every number as JSON")


def run(options: argparse.Namespace) -> int:
    """Explain one pair; writes the picture and prints what each word adds."""
    if options.out and Path(options.out).suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise ValueError(f"--out is {options.out!r}; name a .png or .jpg file.")
    if options.out:
        check_picture(options.out, "--out")
    if options.store and options.dense is not None:
        raise ValueError("--dense and --store do not go together: a store has its own descriptions.")
    if options.store and options.guide:
        raise ValueError("--guide and --store do not go together: a store has its own guides.")
    load_plugins(options.plugin)
    explanation, photo, notes = _of_store(options) if options.store else _of_file(options)
    if options.out:
        from seps.retrieval.explain.picture import draw

        save_picture(draw(explanation, photo), Path(options.out))
    if options.json:
        print_json(explanation.as_dict(), None)
        return 0
    if not explanation.whole_sentence:
        named, others = explanation.shown_words
        words = [(printable(part.word), part.contribution) for part in named]
        words += [("(other words)", sum(part.contribution for part in others))] if others else []
        words += [("(rest)", explanation.rest)] if explanation.rest else []
        how = "kept" if explanation.groups else "chosen by words"
        about = f"{sum(explanation.kept)} of {len(explanation.kept)} patches {how}"
    else:  # a dual encoder: its sentence is one vector, and has no words of its own
        words = [("patches", sum(explanation.patches)), ("elsewhere", explanation.elsewhere)]
        described = explanation.terms.get("description")
        words += [] if described is None else [("description", described)]
        about = "a dual encoder gives the sentence as a whole one vector"
    words += [("(any sentence)", explanation.background)] if explanation.background else []
    width = max(len(word) for word, _ in words)
    print(f"score {explanation.score:.3f}; {about}")
    for word, contribution in words:
        print(f"  {word:<{width}}  {contribution:+.3f}")
    for word, value in explanation.found_words.items():
        where = "in the picture" if word in explanation.words_in_picture else "that the description has"
        print(f"  {printable(word):<{width}}  {value:+.3f}  (a rare word {where})")
    if explanation.text_in_picture:
        print(f"Text in the picture: {printable(' / '.join(explanation.text_in_picture.splitlines()))}")
    if explanation.described_by:
        print(f"Its texts are from: {printable(', '.join(explanation.described_by))}")
    for note in notes:
        print(printable(note))
    if options.out:
        print(f"Written: {printable(options.out)}")
    return 0


def _of_file(options: argparse.Namespace) -> tuple[Explanation, Image.Image, list[str]]:
    """A picture by itself, with the description that was given: its explanation, the photo, and notes."""
    import torch
    from PIL import Image

    from seps.images.decoding import resized_jpeg
    from seps.images.shards import read_source
    from seps.images.sources import ImageSource
    from seps.retrieval.data.guides import GuideSource
    from seps.retrieval.engine.engine import Photo
    from seps.retrieval.engine.loading import load_engine

    refuse_same_file("--out", options.out, [options.image])
    source = ImageSource(Path(options.image))
    data = read_source(source)
    engine = load_engine(options.model or DEFAULT_MODEL, device=options.device)
    if reason := engine.traits.explains:
        raise ValueError(reason)
    _check_guides(engine.traits.guides, [name for name, _ in options.guide])
    guides = {name: torch.from_numpy(GuideSource(path=Path(file)).read(name)) for name, file in options.guide}
    explanation = engine.explain(options.caption, options.dense, lambda: Photo(data, source), guides=guides)
    hint = "Give it with --dense TEXT, or name the store with --store DIR."
    notes = [f"{explanation.note} {hint}"] if explanation.note else []
    return explanation, Image.open(io.BytesIO(resized_jpeg(data, source, 1024))), notes


def _check_guides(read: Sequence[str], given: Sequence[str]) -> None:
    """Raise ValueError unless the guides that the model reads are those that were given."""
    missing = [name for name in read if name not in given]
    if missing:
        options = " ".join(f"--guide {name}=FILE" for name in missing)
        raise ValueError(
            f"The model reads {', '.join(map(repr, missing))} of each picture, a guide that comes with the data: give "
            f"it with {options}."
        )
    unread = [name for name in given if name not in read]
    if unread:
        known = ", ".join(map(repr, read)) or "none"
        raise ValueError(f"The model does not read the guide {unread[0]!r}; leave --guide out. It reads: {known}.")


def _of_store(options: argparse.Namespace) -> tuple[Explanation, Image.Image, list[str]]:
    """The same of a picture of a store, from what the store holds of it, with the score of a search."""
    from seps.photos.library import Library

    library = Library(store=options.store, model=options.model, device=options.device)
    explained = library.explain(library.find(options.image), options.caption, longest=1024)
    notes = [explained.explanation.note, explained.photo_note if options.out else ""]
    return explained.explanation, explained.photo, [note for note in notes if note]
