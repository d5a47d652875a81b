"""Identity-balanced batches: what holds for every data set and seed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages import naming
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


def test_epochs_and_seeds_differ_and_a_batch_does_not_depend_on_the_earlier_ones() -> None:
    labels = labels_of([5] * 12)
    plans = {}
    for seed in (1, 2):
        batches = IdentityBatches(labels, identities=4, images=2, seed=seed)
        for epoch in (0, 1):
            plans[seed, epoch] = [batches.global_batch(epoch, step) for step in range(len(batches))]
    assert len(plans[1, 0]) == 9 and len({str(plan) for plan in plans.values()}) == 4
    assert IdentityBatches(labels, identities=4, images=2, seed=1).global_batch(1, 6) == plans[1, 1][6]


def test_what_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(ReidDataError, match=naming("3", "drawn")):
        IdentityBatches([0, 1, 2], identities=4)
    with pytest.raises(ReidDataError, match=">= 1"):
        IdentityBatches(list(range(8)), identities=4, images=0)
    with pytest.raises(ReidDataError, match="outside"):
        IdentityBatches(list(range(8)), identities=4).global_batch(0, 99)
