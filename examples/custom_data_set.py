"""Your own data set: records made in Python, checked, saved as JSONL and evaluated with the embedded model.

A record is an image, its captions and, if you have one, a description of the image. The description belongs to the
image; protocol "none" does not use it, "image" uses it on the gallery side. It prints what the check finds in a set
with a missing file, then the recalls of a few photos of the shipped gallery under both protocols.
"""

import tempfile
from pathlib import Path

from seps.images.sources import ImageSource
from seps.retrieval.data import ImageRecord, RetrievalDataset, check_dataset, drop_bad, load_jsonl, save_jsonl
from seps.retrieval.demo import gallery_file
from seps.retrieval.evaluate.run import evaluate
from seps.retrieval.pretrained import from_pretrained


def my_records() -> list[ImageRecord]:
    """Read your own format here: a spreadsheet, a database, a folder. We borrow photos of the shipped gallery."""
    photos = load_jsonl(gallery_file()).records[::9]
    mine = [ImageRecord(Path(photo.id).stem, photo.source, photo.captions, photo.dense) for photo in photos]
    return [*mine, ImageRecord("lost", ImageSource(gallery_file().parent / "lost.jpg"), ("a photo that is gone",))]


def main() -> None:
    dataset = RetrievalDataset(tuple(my_records()), name="mine", split="dev")
    report = check_dataset(dataset, verify_images="decode")
    for sentence in report.sentences():
        print(f"check: {sentence}")
    dataset = drop_bad(dataset, report)
    with tempfile.TemporaryDirectory() as folder:
        # The file the commands read: seps train --data.train mine.jsonl, seps eval --data mine.jsonl
        path = Path(folder) / "mine.jsonl"
        save_jsonl(dataset, path, images_root=gallery_file().parent)
        again = load_jsonl(path, images_root=gallery_file().parent, name="mine", split="dev")
        print(f"{len(again)} images, {len(again.captions)} captions in {path.name}; the same: {again == dataset}")
        model = from_pretrained("mini")
        for protocol in ("none", "image"):
            found = evaluate(model, again, protocol)
            recall = found.metrics.t2i
            print(f"protocol {protocol:>5}: text -> image R@1 {recall.r1:.0f} %, R@5 {recall.r5:.0f} %")


if __name__ == "__main__":
    main()
