"""`seps export`: write a model as ONNX files, or the vectors of a store for another vector store.

seps export base -o FOLDER                            image, text and score as ONNX files
seps export base --vector -o FOLDER                   one vector per picture and text
seps export base --sentence-transformers -o FOLDER    a model of the library sentence-transformers
seps export --store STORE --to qdrant -o FOLDER       the vectors of a store
"""

from __future__ import annotations

import argparse

from seps.cli.shared.argtypes import output_folder, positive
from seps.cli.shared.parser import Parser, add_plugins
from seps.cli.shared.text import counted, printable


def add_options(parser: Parser) -> None:
    """The options of `seps export`."""
    parser.add_argument("model", nargs="?", help="export 'mini', 'base', a model folder or a run of seps train")
    parser.add_argument("-o", "--out", type=output_folder, required=True, help="write to this folder")
    vector = parser.add_argument_group("one vector per picture and text (small, for other programs)")
    vector.add_argument("--vector", action="store_true", help="write the graphs of one vector, examples and a card")
    vector.add_argument(
        "--layout",
        choices=["plain", "immich"],
        default="plain",
        help="name files and inputs plainly, or as Immich does (default: plain)",
    )
    vector.add_argument(
        "--bits",
        type=int,
        choices=[8, 32],
        default=8,
        help="store weights and compute products with this many bits (default: 8)",
    )
    vector.add_argument("--batch", type=positive, help="fix the number of pictures per call (default: any number)")
    parser.add_argument(
        "--sentence-transformers",
        nargs="?",
        const="vector",
        choices=["vector", "words", "pairs"],
        help="write a folder of that library: for SentenceTransformer (vector, the default), MultiVectorEncoder "
        "(words), or CrossEncoder (pairs)",
    )
    pictures = parser.add_argument_group("the vectors of a store (docs/vector-stores.md)")
    pictures.add_argument("--store", help="export the pictures of this store, made by seps index, instead of a model")
    pictures.add_argument(
        "--to",
        choices=["parquet", "lance", "qdrant"],
        help="write the vectors of --store in this format, which is required",
    )
    pictures.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="merge the patches of a picture to N vectors, too, at most 16 (default: none)",
    )
    add_plugins(parser)


def run(options: argparse.Namespace) -> int:
    """Export one model, or the pictures of a store."""
    if not options.vector and (options.layout, options.bits, options.batch) != ("plain", 8, None):
        raise ValueError("--layout, --bits and --batch belong to --vector; add --vector, or leave them out.")
    if options.store:
        return _export_store(options)
    if options.to or options.tokens:
        raise ValueError("--to and --tokens belong to --store; add --store, or leave them out.")
    if options.model is None:
        options.parser.error("name a model, or a store with --store")
    from seps.retrieval.export import check_export, export_model
    from seps.retrieval.pretrained import from_pretrained

    if options.sentence_transformers:
        return _export_sentence_transformers(options)
    check_export(options.out)
    model = from_pretrained(options.model, plugins=options.plugin)
    if options.vector:
        from seps.retrieval.vector_export import export_vectors

        made = export_vectors(
            model, options.out, name=options.model, layout=options.layout, bits=options.bits, batch=options.batch
        )
        for name, megabytes in made.megabytes.items():
            print(f"{name:<20} {megabytes:.1f} MB")
        print(f"Least cosine with torch over the texts and pictures of the check: {made.cosine:.4f}")
        print(f"Wrote {printable(options.out)}; its README.md says how to use it.")
        return 0
    differences = export_model(model, options.out)
    for name, value in differences.items():
        print(f"{name:<11} largest difference from torch {value:.1e}")
    print(f"Wrote {printable(options.out)}; export.json has the sizes and the names of the inputs.")
    return 0


def _export_sentence_transformers(options: argparse.Namespace) -> int:
    from seps.retrieval import sentence_transformers
    from seps.retrieval.pretrained import from_pretrained

    if options.vector:
        raise ValueError("--vector writes ONNX files, and --sentence-transformers a model of that library: leave one.")
    model, form = from_pretrained(options.model, plugins=options.plugin), sentence_transformers.form_of(options.model)
    sentence_transformers.save(model, options.out, options.sentence_transformers, form=form)
    name = sentence_transformers.CLASSES[options.sentence_transformers]
    print(f"Wrote {printable(options.out)}; load it by {name}({str(options.out)!r}, trust_remote_code=True).")
    return 0


def _export_store(options: argparse.Namespace) -> int:
    from seps.photos.library import Library

    if options.model or options.vector:
        raise ValueError(f"--store {options.store} writes vectors of pictures: leave out the model and --vector.")
    if options.to is None:
        raise ValueError("--store needs --to: parquet, lance or qdrant.")
    with Library(store=options.store) as library:
        count = library.export(options.to, options.out, tokens=options.tokens)
    print(f"Wrote {counted(count, 'picture')} to {printable(options.out)}, for {options.to}.")
    return 0
