"""Count the words of a training set's captions, for `src/seps/assets/words.txt`.

python tools/ordinary_words.py train.jsonl > src/seps/assets/words.txt
"""

from __future__ import annotations

import sys
from collections import Counter

from seps.retrieval.data import load_data
from seps.retrieval.languages import words_of


def main(path: str) -> None:
    """Print the number of images, then each word and the number of images that have it in a caption or description."""
    records = load_data(path).records
    counts = Counter(word for record in records for word in words_of(" ".join([*record.captions, record.dense or ""])))
    print("# Words of the training captions and how many images' captions have them; first the number of images.")
    print(len(records))
    for word, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
        if count > 1:
            print(word, count)


if __name__ == "__main__":
    main(sys.argv[1])
