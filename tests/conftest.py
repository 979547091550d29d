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

# Workers of pytest-xdist keep the cores busy by themselves. There a kernel on two of TVM's threads, which wait for each
# other, takes ten times as long as on one; tests/helpers/tvm_threads.py is for tests that are about more.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("TVM_NUM_THREADS", "1")

# A shell that starts the tests in the background ignores SIGINT for them, nohup SIGHUP, and every process they start
# inherits that. Under nohup the tests themselves go on ignoring it, by a handler, which is not inherited.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL),
                          (signal.SIGHUP, lambda *_: None)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


@pytest.hookimpl(optionalhook=True)          # of pytest-xdist, which the GPU machine does without
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker for each core this process may use, at most four, for each may need three gigabytes."""
    return min(len(os.sched_getaffinity(0)), 4)


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
