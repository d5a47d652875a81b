"""One draw across the modalities, against a slow twin; and the reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from seps.reid.data import Augmentation, ReidDataError, ReidReader, ReidRecord, Source, read_record
from seps.reid.data.reader import fault_of
from seps.reid.data.transforms import apply, draw


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def augment(images: torch.Tensor, chance: torch.Generator, config: Augmentation) -> torch.Tensor:
    return apply(images, draw(len(images), tuple(images.shape[-2:]), config, chance), config)


def test_crop_and_flip_match_a_slow_twin() -> None:
    config = Augmentation(pad=3, flip=0.5, erase=0.0)
    images = torch.randint(0, 256, (6, 2, 3, 9, 7), dtype=torch.uint8, generator=generator(1))
    choices = draw(6, (9, 7), config, generator(2))
    result = apply(images, choices, config)
    for shot in range(6):
        padded = torch.nn.functional.pad(images[shot].float() / 255, (3, 3, 3, 3))
        top, left = choices.offsets[shot].tolist()
        crop = padded[..., top : top + 9, left : left + 7]
        assert torch.equal(result[shot], crop.flip(-1) if choices.flips[shot] else crop)
    assert 0 < int(choices.flips.sum()) < 6 and len(choices.offsets.unique(dim=0)) > 1


def test_one_draw_for_all_modalities() -> None:
    one = torch.rand(16, 1, 3, 24, 12, generator=generator(3))
    images = one.expand(-1, 3, -1, -1, -1)
    config = Augmentation(pad=4, erase=0.0)
    result = augment(images, generator(4), config)
    assert torch.equal(result[:, 0], result[:, 1]) and torch.equal(result[:, 0], result[:, 2])
    assert not torch.equal(result, images)
    erased = augment(torch.zeros(16, 3, 3, 24, 12), generator(5), Augmentation(pad=0, flip=0.0, erase=1.0))
    touched = erased != 0
    assert torch.equal(touched[:, 0], touched[:, 1]) and torch.equal(touched[:, 0], touched[:, 2])
    shares = touched[:, 0, 0].float().mean((-1, -2))
    assert float(shares.min()) > 0.01 and float(shares.max()) < 0.45 and float(shares.std()) > 0.02
    assert not torch.equal(erased[:, 0], erased[:, 1])


def test_same_generator_same_pixels_and_slices_of_a_global_draw_agree() -> None:
    images = torch.randint(0, 256, (8, 3, 3, 16, 8), dtype=torch.uint8, generator=generator(1))
    config = Augmentation(pad=2)
    whole = augment(images, generator(9), config)
    assert torch.equal(whole, augment(images, generator(9), config))
    assert not torch.equal(whole, augment(images, generator(10), config))
    choices = draw(8, (16, 8), config, generator(9))
    halves = [apply(images[part], choices[part], config) for part in (slice(0, 4), slice(4, 8))]
    assert torch.equal(torch.cat(halves), whole)
    assert whole.dtype == torch.float32 and float(whole.min()) >= 0 and float(whole.max()) <= 1


def test_nothing_to_do_leaves_pixels_and_the_input_alone() -> None:
    images = torch.rand(2, 2, 3, 8, 8, generator=generator())
    kept = images.clone()
    same = augment(images, generator(), Augmentation(pad=0, flip=0.0, erase=0.0))
    assert torch.equal(same, images)
    augment(images, generator(), Augmentation(pad=2, erase=1.0))
    assert torch.equal(images, kept)


def test_wrong_shapes_and_settings_are_refused() -> None:
    with pytest.raises(ReidDataError, match=r"\(B, M, 3, H, W\)"):
        augment(torch.zeros(2, 3, 8, 8), generator(), Augmentation())
    with pytest.raises(ReidDataError, match="4 shots"):
        apply(torch.zeros(2, 2, 3, 8, 8), draw(4, (8, 8), Augmentation(), generator()), Augmentation())
    with pytest.raises(ReidDataError, match="flip"):
        Augmentation(flip=1.5)
    with pytest.raises(ReidDataError, match="pad"):
        Augmentation(pad=-1)
    with pytest.raises(ReidDataError, match="erase_area"):
        Augmentation(erase_area=(0.5, 0.1))


def records(folder: Path, count: int = 5) -> list[ReidRecord]:
    made = []
    for number in range(count):
        colour, grey = folder / f"{number}_rgb.png", folder / f"{number}_grey.png"
        Image.new("RGB", (8, 16), (number, 100, 200)).save(colour)
        Image.new("L", (4, 6), 10 * number).save(grey)
        made.append(ReidRecord({"RGB": Source(colour), "TI": Source(grey)}, number, 1))
    return made


def test_reader_keeps_order_resizes_and_replicates_grey(tmp_path: Path) -> None:
    shots = records(tmp_path)
    with ReidReader(("RGB", "TI"), (32, 16), threads=3) as reader:
        batch = reader.batch([*shots, shots[0]])
        assert reader.batch([]).shape == (0, 2, 3, 32, 16)
    assert batch.shape == (6, 2, 3, 32, 16) and batch.dtype == torch.uint8
    assert batch[:, 0, 0, 5, 5].tolist() == [0, 1, 2, 3, 4, 0]
    assert batch[:, 1, :, 5, 5].tolist() == [[10 * n] * 3 for n in (0, 1, 2, 3, 4, 0)]


def test_reader_takes_the_upper_byte_of_sixteen_bit_images(tmp_path: Path) -> None:
    path = tmp_path / "thermal.png"
    Image.fromarray(np.full((4, 4), 0x7B12, dtype=np.uint16)).save(path)
    with ReidReader(("TI",), (4, 4)) as reader:
        assert reader.read(ReidRecord({"TI": Source(path)}, 1, 1)).unique().tolist() == [0x7B]


def test_cache_serves_from_memory_within_its_budget(tmp_path: Path) -> None:
    shots = records(tmp_path)
    shot_bytes = 2 * 3 * 8 * 4
    with ReidReader(("RGB", "TI"), (8, 4), threads=1, cache_bytes=2 * shot_bytes) as reader:
        expected = reader.batch(shots)
        for path in tmp_path.iterdir():
            path.unlink()
        assert torch.equal(reader.batch(shots[:2]), expected[:2])
        with pytest.raises(ReidDataError, match="2_rgb"):
            reader.read(shots[2])


def test_reader_names_a_lacking_modality(tmp_path: Path) -> None:
    shot = records(tmp_path, 1)[0]
    for cache in (0, 10**6):
        reader = ReidReader(("RGB", "NI"), (8, 4), cache_bytes=cache)
        with reader, pytest.raises(ReidDataError, match="NI"):
            reader.read(shot)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 256], [4096, 65535]], dtype=np.uint16), [[0, 1], [16, 255]]),
        (np.array([[0, 256], [4096, 65535]], dtype=np.int32), [[0, 1], [16, 255]]),
        (np.array([[0, 256], [4096, 70000]], dtype=np.int32), "from 0 to 70000"),
        (np.array([[0.0, 20.5], [21.0, 300.0]], dtype=np.float32), "floating"),
        # Bytes in 16 bits: their upper byte is 0, and every such picture was black.
        (np.array([[0, 17], [200, 255]], dtype=np.uint16), "8 bits"),
        (np.zeros((2, 2), dtype=np.uint16), [[0, 0], [0, 0]]),
    ],
)
def test_pixels_of_more_than_a_byte_are_scaled_or_refused(
    tmp_path: Path, values: np.ndarray, expected: list[list[int]] | str
) -> None:
    """Thermal cameras write 16 bits or more: cut off at 255, warm and hot would both be white."""
    path = tmp_path / "shot.tiff"
    Image.fromarray(values).save(path)
    record = ReidRecord({"RGB": Source(path), "TI": Source(path)}, 1, 1)
    if isinstance(expected, str):
        with pytest.raises(ReidDataError, match=expected):
            read_record(record, ("RGB", "TI"), (2, 2))
        fault = fault_of(record)
        assert fault is not None and fault[0] == "undecodable" and expected in fault[2]
    else:
        assert read_record(record, ("RGB", "TI"), (2, 2))[1, 0].tolist() == expected and fault_of(record) is None
