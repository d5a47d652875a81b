"""Identity-balanced batches: what holds for every data set, seed and number of processes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seps.reid.data import IdentityBatches, ReidDataError, epoch_plan

counts_of_images = st.lists(st.integers(1, 9), min_size=4, max_size=15)


def labels_of(counts: list[int]) -> list[int]:
    return [label for label, count in enumerate(counts) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(counts_of_images, st.integers(1, 4), st.integers(1, 5), st.integers(0, 99), st.integers(0, 9))
def test_batches_hold_p_identities_with_k_images(
    counts: list[int], identities: int, images: int, seed: int, epoch: int
) -> None:
    labels = labels_of(counts)
    plan = epoch_plan(labels, identities, images, seed, epoch)
    for row in plan:
        of_row = [labels[index] for index in row]
        groups = [of_row[start : start + images] for start in range(0, len(of_row), images)]
        assert all(len(set(group)) == 1 for group in groups)
        assert len({group[0] for group in groups}) == identities
        for start in range(0, len(row), images):
            distinct = len(set(row[start : start + images].tolist()))
            assert distinct == min(images, counts[of_row[start]])


@settings(max_examples=60, deadline=None)
@given(counts_of_images, st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_an_epoch_shows_every_image_unless_one_identity_outweighs_the_steps(
    counts: list[int], identities: int, images: int, seed: int
) -> None:
    plan = epoch_plan(labels_of(counts), identities, images, seed, epoch=0)
    groups = [-(-count // images) for count in counts]
    assert len(plan) == -(-sum(groups) // identities)
    if max(groups) <= len(plan):
        assert set(plan.ravel().tolist()) == set(range(sum(counts)))


@settings(max_examples=30, deadline=None)
@given(counts_of_images, st.sampled_from([1, 2, 4]), st.integers(0, 99), st.integers(0, 3))
def test_the_global_batch_is_the_same_on_any_number_of_processes(
    counts: list[int], world: int, seed: int, epoch: int
) -> None:
    labels = labels_of(counts)
    alone = IdentityBatches(labels, identities=4, images=3, seed=seed)
    ranks = [
        IdentityBatches(labels, identities=4, images=3, seed=seed, rank=rank, world=world) for rank in range(world)
    ]
    for step in range(len(alone)):
        together = [index for rank in ranks for index in rank.batch(epoch, step)]
        assert together == alone.batch(epoch, step) == ranks[0].global_batch(epoch, step)


def test_epochs_and_seeds_differ_and_an_epoch_resumes() -> None:
    batches = IdentityBatches(labels_of([5] * 12), identities=4, images=2, seed=1)
    first = list(batches.epoch(0))
    assert len(first) == batches.steps == 9
    assert first != list(batches.epoch(1))
    assert list(batches.epoch(0, start=6)) == first[6:]
    assert first != list(IdentityBatches(labels_of([5] * 12), identities=4, images=2, seed=2).epoch(0))


def test_what_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(ReidDataError, match="cannot be drawn from 3"):
        IdentityBatches([0, 1, 2], identities=4)
    with pytest.raises(ReidDataError, match="do not divide"):
        IdentityBatches(list(range(8)), identities=4, world=3)
    with pytest.raises(ReidDataError, match="rank 2"):
        IdentityBatches(list(range(8)), identities=4, rank=2, world=2)
    with pytest.raises(ReidDataError, match=">= 1"):
        IdentityBatches(list(range(8)), identities=4, images=0)
    with pytest.raises(ReidDataError, match="outside"):
        IdentityBatches(list(range(8)), identities=4).batch(0, 99)
