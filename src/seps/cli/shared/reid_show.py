"""`seps reid show`: pictures of what a trained model finds, keeps and looks at."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from seps.cli.shared.argtypes import output_folder, positive
from seps.cli.shared.outputs import check_picture, save_picture
from seps.cli.shared.reid_use import DATA_SETTINGS, READING, add_pattern, add_run, load_run
from seps.cli.shared.text import printable

RANKED, KEPT, GRADIENTS, FEATURES = "ranked.png", "kept.png", "gradients.png", "features.png"


def add_show(commands: Any) -> None:
    """Put `show` beside the other sub-commands."""
    show = commands.add_parser(
        "show", help="pictures: ranked lists, kept patches, features", settings=DATA_SETTINGS, of_run=READING
    )
    add_run(show)
    show.add_argument("--out", type=output_folder, required=True, help="write the pictures to this folder")
    show.add_argument("--queries", type=positive, default=6, help="show this many queries (default: %(default)s)")
    show.add_argument(
        "--places", type=positive, default=5, help="show this many gallery shots per query (default: %(default)s)"
    )
    show.add_argument(
        "--features",
        action="store_true",
        help="draw features.png, too, a map of the features by identity and camera, and gradients.png,"
        " which explains a similarity by patches",
    )
    show.add_argument(
        "--projection",
        choices=("tsne", "pca"),
        default="tsne",
        help="map the features by t-SNE or principal components (default: %(default)s)",
    )
    show.add_argument(
        "--identities",
        type=positive,
        default=12,
        help="show this many identities in features.png (default: %(default)s)",
    )
    add_pattern(show)
    show.set_defaults(action=_show)


def _show(options: argparse.Namespace) -> int:
    from seps.reid.show.feature_map import features_picture
    from seps.reid.show.gradients import gradients_picture
    from seps.reid.show.pictures import kept_picture, ranked_picture, ranking
    from seps.reid.task import make_reader

    out = Path(options.out)
    for name in (RANKED, KEPT, *((GRADIENTS, FEATURES) if options.features else ())):
        check_picture(out / name, "--out")
    trained, config, dataset = load_run(options)
    model, pattern = trained.model, options.pattern
    count = min(options.queries, len(dataset.query))
    # Spread over the set: neighbours in the list are often the same identity.
    queries = [number * len(dataset.query) // count for number in range(count)]
    out.mkdir(parents=True, exist_ok=True)
    with make_reader(config, dataset) as reader:
        matrix = ranking(model, dataset, reader, options.batch_size, pattern)
        pictures = {RANKED: ranked_picture(dataset, reader, matrix, queries, options.places)}
        if model.sdtps is not None:
            pictures[KEPT] = kept_picture(model, dataset, reader, [dataset.query[i] for i in queries])
        if options.features:
            pictures[GRADIENTS] = gradients_picture(model, dataset, reader, matrix, queries, pattern)
            pictures[FEATURES] = features_picture(
                model,
                dataset,
                reader,
                identities=options.identities,
                projection=options.projection,
                pattern=pattern,
                batch_size=options.batch_size,
            )
    for name, picture in pictures.items():
        save_picture(picture, out / name)
        print(printable(out / name))
    return 0
