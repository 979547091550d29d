"""What all tests share: skips from a cached probe, a cache folder per test, a fixed seed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from relaxpack.dist.host import cuda_driver


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
