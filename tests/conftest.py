"""What all tests share: skips from a cached probe, fixed seeds, signals as in a terminal, and no time limit on an example
of a property."""

from __future__ import annotations

import os
import random
import signal

import hypothesis
import numpy as np
import pytest

from relaxpack.dist.host import cuda_driver

# The same examples in every run, and no verdict on how fast this machine happens to be.
hypothesis.settings.register_profile("relaxpack", deadline=None, derandomize=True, database=None,
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("relaxpack")

# PyTorch, for references: two of its threads that spin for each other on a busy core turn seconds into minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background ignores SIGINT for them, and every process they start inherits that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not cuda_driver().gpus:
        skip = pytest.mark.skip(reason=f"no NVIDIA GPU: {cuda_driver().problem or 'the driver shows none'}")
        for item in gpu_items:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
