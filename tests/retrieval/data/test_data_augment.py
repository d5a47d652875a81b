"""Augmentation of captions and images, and the order of batches: shares, limits, determinism, ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from messages import naming
from seps.images.sources import DataError
from seps.retrieval.data import ImageAugment, augment_tokens, epoch_batches, mixed_seed
from seps.retrieval.data.augment import _jitter, _sample

CLS, SEP, PAD, MASK, VOCABULARY = 101, 102, 0, 103, 1000
SPECIAL = (PAD, CLS, SEP, MASK)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def captions(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Rows [CLS] 200 201 ... [SEP] [PAD]...: every word of a row has its own id."""
    width = max(lengths) + 2
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, : length + 2] = torch.tensor([CLS, *range(200, 200 + length), SEP])
    return ids, (ids != PAD).long()


def augmented(ids: Tensor, mask: Tensor, seed: int = 0, probability: float = 0.2) -> tuple[Tensor, Tensor]:
    return augment_tokens(
        ids,
        mask,
        mask_id=MASK,
        vocab_size=VOCABULARY,
        special_ids=SPECIAL,
        generator=generator(seed),
        probability=probability,
    )


def test_shares_are_those_published() -> None:
    ids, mask = captions([50] * 2000)
    out, kept = augmented(ids, mask)
    words = 50 * 2000
    dropped = (mask.sum() - kept.sum()).item() / words
    masked = (out == MASK).sum().item() / words
    drawn = (kept.bool() & ((out < 200) | (out >= 250)) & (out != CLS) & (out != SEP) & (out != MASK)).sum()
    assert dropped == pytest.approx(0.08, abs=0.004)
    assert masked == pytest.approx(0.10, abs=0.004)
    assert drawn.item() / words == pytest.approx(0.02 * 0.95, abs=0.002)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.2, 0.9, 1.0]),
)
def test_augmented_rows_stay_well_formed(lengths: list[int], seed: int, probability: float) -> None:
    ids, mask = captions(lengths)
    before = ids.clone()
    out, kept = augmented(ids, mask, seed, probability)
    assert torch.equal(ids, before) and out.shape == ids.shape and kept.dtype == mask.dtype
    for row, length in enumerate(lengths):
        n = int(kept[row].sum())
        assert kept[row].tolist() == [1] * n + [0] * (len(kept[row]) - n)
        tokens = out[row, :n].tolist()
        assert tokens[0] == CLS and tokens[-1] == SEP
        inner = tokens[1:-1]
        assert CLS not in inner and SEP not in inner and PAD not in inner
        assert bool(inner) == bool(length) and len(inner) <= length
        survivors = [token for token in inner if 200 <= token < 200 + length]
        if probability == 0.0:
            assert survivors == inner == list(range(200, 200 + length))
        assert (out[row, n:] == PAD).all()


def test_tokens_are_a_function_of_the_seed() -> None:
    ids, mask = captions([12, 7, 3])
    torch.manual_seed(1)
    first = augmented(ids, mask, 5)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, augmented(ids, mask, 5), strict=True))
    assert not torch.equal(first[0], augmented(ids, mask, 6)[0])


def test_tokens_keep_their_order_and_each_has_one_fate() -> None:
    """Replacements come from outside the caption here, so that every token shows what became of it."""
    ids, mask = captions([30] * 400)
    special = (*SPECIAL, *range(200, 230))
    words = torch.arange(300, 330).repeat(400, 1)
    ids[:, 1:31] = words
    out, kept = augment_tokens(
        ids,
        mask,
        mask_id=MASK,
        vocab_size=300,
        special_ids=special,
        generator=generator(1),
        pad_id=9,
    )
    assert (out[~kept.bool()] == 9).all()
    for row, valid in zip(out, kept.bool(), strict=True):
        inner = row[valid][1:-1]
        own = inner[inner >= 300]
        assert torch.equal(own, own.sort().values) and len(own.unique()) == len(own)
    inner = out[kept.bool()]
    counts = {
        "kept": (inner >= 300),
        "masked": inner == MASK,
        "replaced": (inner < 300) & ~torch.isin(inner, torch.tensor(SPECIAL)),
    }
    shares = {fate: chosen.sum().item() / 12_000 for fate, chosen in counts.items()}
    shares["dropped"] = 1 - sum(shares.values())
    assert shares == pytest.approx({"kept": 0.8, "masked": 0.1, "replaced": 0.02, "dropped": 0.08}, abs=0.01)


def test_token_shapes_and_probability_are_checked() -> None:
    ids, mask = captions([3])
    with pytest.raises(DataError, match="shape"):
        augmented(ids, mask[:, :-1])
    with pytest.raises(DataError, match="between 0 and 1"):
        augmented(ids, mask, probability=20)


def pixels(n: int = 6, height: int = 24, width: int = 32) -> Tensor:
    return torch.rand(n, 3, height, width, generator=generator(7))


def test_image_augment_without_noise_is_the_identity_and_flips_exactly() -> None:
    still = ImageAugment((24, 32), scale=(1.0, 1.0), flip=0.0, jitter=0.0)
    mirror = ImageAugment((24, 32), scale=(1.0, 1.0), flip=1.0, jitter=0.0)
    batch = pixels()
    assert torch.allclose(still(batch, 0), batch, atol=1e-5)
    assert torch.allclose(mirror(batch, 0), batch.flip(-1), atol=1e-5)


def test_a_crop_is_a_slice_resized() -> None:
    """The affine sampling against its slow twin; at the crop's edge it may see the pixels outside."""
    batch = pixels(2, 48, 64)
    top, left, height, width = 10, 20, 30, 40
    theta = torch.zeros(2, 2, 3)
    theta[:, 0, 0], theta[:, 0, 2] = width / 64, (2 * left + width) / 64 - 1
    theta[:, 1, 1], theta[:, 1, 2] = height / 48, (2 * top + height) / 48 - 1
    sliced = batch[:, :, top : top + height, left : left + width]
    twin = torch.nn.functional.interpolate(sliced, size=(50, 60), mode="bilinear", align_corners=False)
    assert torch.allclose(_sample(batch, theta, (50, 60))[..., 2:-2, 2:-2], twin[..., 2:-2, 2:-2], atol=1e-4)


def test_crops_lie_inside_the_image_and_keep_their_share() -> None:
    """A picture of its own coordinates shows where each crop was."""
    y, x = torch.meshgrid(torch.linspace(0, 1, 101), torch.linspace(0, 1, 101), indexing="ij")
    batch = torch.stack([x, y, torch.zeros_like(x)]).repeat(300, 1, 1, 1)
    out = ImageAugment((101, 101), scale=(0.3, 0.8), jitter=0.0)(batch, 3)
    widths = (out[:, 0].amax((1, 2)) - out[:, 0].amin((1, 2))) * 101 / 100
    heights = (out[:, 1].amax((1, 2)) - out[:, 1].amin((1, 2))) * 101 / 100
    area, shape = widths * heights, widths / heights
    assert area.min() > 0.27 and area.max() < 0.83 and area.std() > 0.1
    assert shape.min() > 0.7 and shape.max() < 1.4
    flipped = (out[:, 0, 50, 0] > out[:, 0, 50, -1]).float().mean()
    assert 0.4 < flipped < 0.6
    assert out[:, 0].amin((1, 2)).std() > 0.03 and out[:, 1].amin((1, 2)).std() > 0.03


def test_image_augment_depends_on_its_seed_alone_and_agrees_across_ranks() -> None:
    augment, batch = ImageAugment((20, 20)), pixels(8)
    torch.manual_seed(1)
    whole = augment(batch, 11)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(whole, augment(batch, 11))
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.allclose(whole, augment(batch, 12))
    parts = torch.cat([augment(batch[:4], 11, first=0), augment(batch[4:], 11, first=4)])
    assert torch.allclose(whole, parts, atol=1e-6)


def test_jitter_stays_in_range_and_mild() -> None:
    out = ImageAugment((24, 32), scale=(1.0, 1.0), flip=0.0, jitter=0.2)(pixels(64), 0)
    assert out.min() >= 0 and out.max() <= 1
    grey = torch.full((64, 3, 4, 4), 0.5)
    level = ImageAugment((4, 4), jitter=0.2)(grey, 0)
    assert level.min() >= 0.4 - 1e-5 and level.max() <= 0.6 + 1e-5 and level[:, 0, 0, 0].std() > 0.03


def test_each_factor_of_the_jitter_does_its_own_part() -> None:
    batch = pixels(2)
    luma = (batch * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
    expected = {
        (0.5, 1.0, 1.0): batch / 2,
        (1.0, 0.0, 1.0): luma.mean(dim=(2, 3), keepdim=True).expand_as(batch),
        (1.0, 1.0, 0.0): luma.expand_as(batch),
        (1.0, 1.0, 1.0): batch,
    }
    for factors, result in expected.items():
        torch.testing.assert_close(_jitter(batch, torch.tensor([factors, factors])), result, atol=1e-5, rtol=0)
    for place in range(3):  # a factor that is drawn changes the picture
        draws = torch.ones(2, 3)
        draws[:, place] = 0.8
        assert (_jitter(batch, draws) - batch).abs().max() > 0.01


def test_image_augment_keeps_half_precision_and_refuses_bytes() -> None:
    half = ImageAugment((8, 8))(pixels().bfloat16(), 0)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), ImageAugment((8, 8))(pixels(), 0), atol=0.02, rtol=0)
    with pytest.raises(DataError, match="uint8"):
        ImageAugment((8, 8))((pixels() * 255).byte(), 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"size": (0, 4)},
        {"scale": (0.9, 0.5)},
        {"scale": (0.0, 1.0)},
        {"ratio": 0.5},
        {"flip": 2.0},
        {"jitter": 1},
    ],
)
def test_image_augment_checks_its_fields(fields: dict[str, object]) -> None:
    with pytest.raises(DataError, match=next(iter(fields))):
        ImageAugment(**{"size": (4, 4), **fields})  # type: ignore[arg-type]


def test_batches_repeat_for_the_same_seed_and_differ_between_epochs() -> None:
    once, again = epoch_batches(50, 5, 8, 3, 4), epoch_batches(50, 5, 8, 3, 4)
    assert len(once) == 6
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a.images, b.images) and torch.equal(a.captions, b.captions)
    assert not torch.equal(once[0].images, epoch_batches(50, 5, 8, 3, 5)[0].images)
    assert not torch.equal(once[0].images, epoch_batches(50, 5, 8, 4, 4)[0].images)


def test_the_order_is_pinned() -> None:
    """A run resumed on another release must see the same batches: these figures must not move."""
    batches = epoch_batches(6, 5, 3, seed=7, epoch=2)
    assert [(b.images.tolist(), b.captions.tolist()) for b in batches] == [
        ([5, 1, 0], [4, 3, 3]),
        ([2, 3, 4], [4, 4, 1]),
    ]


def test_every_caption_is_seen_once_in_as_many_epochs() -> None:
    counts = [1, 2, 3, 5, 4, 2]
    seen: list[list[int]] = [[] for _ in counts]
    for epoch in range(60):
        for batch in epoch_batches(6, counts, 3, 0, epoch):
            for image, caption in zip(batch.images.tolist(), batch.captions.tolist(), strict=True):
                seen[image].append(caption)
    for count, captions_seen in zip(counts, seen, strict=True):
        assert len(captions_seen) == 60
        for start in range(0, 60, count):
            assert sorted(captions_seen[start : start + count]) == list(range(count))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99), st.integers(0, 9))
def test_an_epoch_visits_an_image_once_at_most(n: int, size: int, seed: int, epoch: int) -> None:
    if size > n:
        with pytest.raises(DataError, match="filled"):
            epoch_batches(n, 5, size, seed, epoch)
        return
    whole = epoch_batches(n, 5, size, seed, epoch)
    assert len(whole) == n // size and all(len(batch.images) == len(batch.captions) == size for batch in whole)
    images = torch.cat([batch.images for batch in whole])
    assert len(images.unique()) == len(images)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((4, [1, 2, 0, 1], 2, 0, 0), naming("2", "caption")),
        ((4, [1, 2], 2, 0, 0), naming("2", "caption")),
        ((4, 5, 0, 0, 0), "filled"),
        ((4, 5, 2, -1, 0), "negative"),
    ],
)
def test_impossible_batches_are_refused(arguments: tuple[object, ...], what: str) -> None:
    with pytest.raises(DataError, match=what):
        epoch_batches(*arguments)  # type: ignore[arg-type]


def test_mixed_seeds_do_not_collide() -> None:
    seeds = {mixed_seed(a, b) for a in range(40) for b in range(40)}
    assert len(seeds) == 1600 and max(seeds) < 2**63
