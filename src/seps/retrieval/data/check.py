"""Check data before it is used: which images are missing, unreadable, without captions, doubled or in two splits."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from seps.images.decoding import ImageReader, decode_image
from seps.images.shards import UnreadableImage, read_source, why_absent
from seps.images.sources import DataError, ImageSource

from .records import RetrievalDataset

FaultKind = Literal["missing", "unreadable", "no captions", "duplicate id", "in two splits"]
Verify = Literal["exists", "decode"]
Visit = Callable[[int, int, bytes, ImageSource], None]

NAMED = 10  # how many images of a kind a report names

_TEXT: dict[FaultKind, tuple[str, str]] = {
    "missing": ("without their file", "Check the paths, or the image root"),
    "unreadable": ("that cannot be decoded", "Replace the files"),
    "no captions": ("without captions", "Add captions or remove the lines"),
    "duplicate id": ("with the id of an earlier image", "Give every image its own id"),
    "in two splits": ("that another split holds too", "Remove them from one of the two"),
}


@dataclass(frozen=True)
class DataFault:
    """One fault of one image: `index` is its place in the data set labelled `dataset`."""

    kind: FaultKind
    dataset: str
    index: int
    image: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.image} ({self.detail})" if self.detail else self.image


@dataclass(frozen=True)
class CheckReport:
    """What was found, and the sizes of the data sets it was found in (by label)."""

    findings: tuple[DataFault, ...]
    sizes: dict[str, int]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def counts(self) -> dict[tuple[str, FaultKind], int]:
        """How many images of each data set have each fault."""
        return dict(Counter((finding.dataset, finding.kind) for finding in self.findings))

    def sentences(self, *, left_out: bool = False) -> list[str]:
        """One sentence for each data set and fault: how many images, the first of them, what to do.

        With `left_out` they say that the work goes on without these images.
        """
        sentences = []
        for (dataset, kind), count in self.counts.items():
            fault, remedy = _TEXT[kind]
            if left_out:
                remedy = f"Left out; {remedy[:1].lower()}{remedy[1:]}"
            found = [str(f) for f in self.findings if (f.dataset, f.kind) == (dataset, kind)]
            names = ", ".join(found[:NAMED]) + (f" and {count - NAMED} more" if count > NAMED else "")
            noun = "image" if self.sizes[dataset] == 1 else "images"
            sentences.append(f"{dataset}: {count} of {self.sizes[dataset]} {noun} {fault}: {names}. {remedy}.")
        return sentences

    def raise_if(self, strict: bool = True) -> None:
        """Raise DataError with all sentences if `strict` and anything was found."""
        if strict and self.findings:
            raise DataError("The data has faults.\n" + "\n".join(self.sentences()))


def left_out(reports: Sequence[CheckReport]) -> dict[str, Any]:
    """What checks of one data set took away, for JSON: `images_left_out`, and by fault how many with the first names.

    An image with two faults counts once in the sum.
    """
    faults: dict[str, list[str]] = {}
    for finding in (finding for report in reports for finding in report.findings):
        faults.setdefault(finding.kind, []).append(finding.image)
    images = sum(len({finding.index for finding in report.findings}) for report in reports)
    named = {kind: {"count": len(names), "images": names[:NAMED]} for kind, names in faults.items()}
    return {"images_left_out": images, **({"left_out": named} if named else {})}


def check_dataset(
    train: RetrievalDataset,
    *others: RetrievalDataset,
    verify_images: Verify = "exists",
    progress: Callable[[int, int], None] | None = None,
    workers: int | None = None,
    visit: Visit | None = None,
) -> CheckReport:
    """Look for faults in `train` and in the other splits, and for images that two of them share.

    "exists" looks for files and shard members; "decode" reads and decodes every image as well, and
    recognises an image in two splits by its bytes and not only by its id or file. An image in two splits
    counts as a fault of the earlier data set: put the one to clean (train) first.
    `visit(number of the data set, index, bytes, source)` takes the place of the trial decoding, for callers that
    decode the images anyway; threads call it, and an UnreadableImage that it raises is a finding.
    """
    if verify_images not in ("exists", "decode"):
        raise DataError(f"verify_images must be 'exists' or 'decode', not {verify_images!r}.")
    datasets = (train, *others)
    sizes = {dataset.label: len(dataset) for dataset in datasets}
    if len(sizes) < len(datasets):
        raise DataError(f"The data sets to check need different names or splits: {', '.join(sizes)}.")
    findings: list[DataFault] = []
    hashes: list[list[str | None]] = []
    total, done = sum(sizes.values()), 0
    with ImageReader(workers=workers) as reader:
        for dataset in datasets:
            findings += _text_findings(dataset)
            digests: list[str | None] = []
            look = partial(_decode, visit or _try, len(hashes)) if verify_images == "decode" else _exists
            for index, (kind, detail) in enumerate(reader.map(look, range(len(dataset)), dataset.sources)):
                if kind is not None:
                    findings.append(DataFault(kind, dataset.label, index, dataset.records[index].id, detail))
                digests.append(detail if kind is None and detail else None)
                done += 1
                if progress is not None:
                    progress(done, total)
            hashes.append(digests)
    findings += _shared(datasets, hashes)
    return CheckReport(tuple(findings), sizes)


def _text_findings(dataset: RetrievalDataset) -> Iterator[DataFault]:
    seen: set[str] = set()
    for index, record in enumerate(dataset.records):
        if not record.captions:
            yield DataFault("no captions", dataset.label, index, record.id)
        if record.id in seen:
            yield DataFault("duplicate id", dataset.label, index, record.id, str(record.source))
        seen.add(record.id)


def _exists(index: int, source: ImageSource) -> tuple[FaultKind | None, str]:
    why = why_absent(source)
    # Of a plain file the path says it all; a shard may be there, and be cut short or compressed.
    return (None, "") if why is None else ("missing", str(source) if source.member is None else f"{source}: {why}")


def _try(number: int, index: int, data: bytes, source: ImageSource) -> None:
    # A small target: JPEG then decodes at an eighth, and still reads its file to the end.
    decode_image(data, source, (16, 16), "resize")


def _decode(visit: Visit, number: int, index: int, source: ImageSource) -> tuple[FaultKind | None, str]:
    """(fault, its detail), or (None, digest of the bytes)."""
    fault = _exists(index, source)
    if fault[0] is not None:
        return fault
    try:
        data = read_source(source)
        visit(number, index, data, source)
    except UnreadableImage as error:
        return "unreadable", f"{source}: {error.why.rstrip('.')}"
    return None, hashlib.blake2b(data, digest_size=16).hexdigest()


def _shared(datasets: Sequence[RetrievalDataset], hashes: Sequence[Sequence[str | None]]) -> list[DataFault]:
    """Images that a later data set holds too: the same id, the same file or the same bytes."""

    def keys(which: int, index: int) -> Iterator[tuple[str, Hashable]]:
        record = datasets[which].records[index]
        yield "id", record.id
        yield "file", record.source
        digest = hashes[which][index]
        if digest is not None:
            yield "content", digest

    later: dict[tuple[str, Hashable], str] = {}
    faults: list[DataFault] = []
    for which in reversed(range(len(datasets))):
        dataset = datasets[which]
        here: list[DataFault] = []
        for index, record in enumerate(dataset.records):
            hit = next((key for key in keys(which, index) if key in later), None)
            if hit is not None:
                detail = f"the same {hit[0]} in {later[hit]}"
                here.append(DataFault("in two splits", dataset.label, index, record.id, detail))
        faults = here + faults
        later.update((key, dataset.label) for index in range(len(dataset)) for key in keys(which, index))
    return faults


def drop_bad(dataset: RetrievalDataset, report: CheckReport) -> RetrievalDataset:
    """`dataset` without the images that the report finds fault with; of doubles the first stays.

    An image in two splits leaves the earlier of the two in the order of the check, so that test sets stay
    whole. Raises DataError if the report is not about this data set, or if nothing would be left.
    """
    bad = {finding.index: finding.image for finding in report.findings if finding.dataset == dataset.label}
    same = report.sizes.get(dataset.label) == len(dataset)
    if not same or any(dataset.records[index].id != image for index, image in bad.items()):
        raise DataError(f"The report was not made for {dataset.label} as it is now. Check it again first.")
    if len(bad) == len(dataset):
        raise DataError(
            f"No usable image is left in {dataset.label}.\n"
            + "\n".join(line for line in report.sentences() if line.startswith(f"{dataset.label}: "))
        )
    return dataset.subset(index for index in range(len(dataset)) if index not in bad)
