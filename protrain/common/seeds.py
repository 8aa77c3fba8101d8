"""Seeds of random numbers that follow from what they are drawn for."""

from __future__ import annotations

import numpy as np


def seed_of(*key: int) -> int:
    """A seed for ``key``, such as the seed of a run, a step and the number of a micro-batch.

    Numbers that are drawn with this seed depend neither on the rank nor on earlier draws.
    """
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
