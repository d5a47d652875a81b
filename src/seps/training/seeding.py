"""Randomness as a function of (seed, step, rank): a resumed run needs the step number and nothing else."""

from __future__ import annotations

import random

import numpy as np
import torch


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from non-negative integers, e.g.

    (seed, epoch, step); different parts, unrelated seeds.
    """
    high, low = np.random.SeedSequence(parts).generate_state(2, np.uint32)
    return (int(high) << 32 | int(low)) & (2**63 - 1)


def seed_everything(*parts: int) -> None:
    """Seed torch (all devices), numpy and python's random from `derive_seed(*parts)`."""
    seed = derive_seed(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
