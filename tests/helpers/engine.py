"""For tests of the engine over the fake runner: prompts from a seed, and whether everything was given back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from relaxpack.runtime.engine import Engine
from relaxpack.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def prompts_of(lengths: Iterable[int], seed: int = 0, vocab: int = 97) -> list[list[int]]:
    """Token ids below `vocab`."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def idle(engine: Engine) -> bool:
    """Nothing runs and every page is free or cached."""
    engine.scheduler.check()
    pool = engine.scheduler.pool
    return not engine.has_work and pool.available == pool.total
