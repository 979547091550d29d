"""CPU kernels at every instruction set that this machine can run."""

from __future__ import annotations

import pytest

from relaxpack.schedules.kernels.cpu.provider import CpuKernels
from tests.helpers.cpu_case import LEVELS, provider


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return provider(request.param)


@pytest.fixture(params=["avx2", "avx512"])
def float_kernels(request: pytest.FixtureRequest) -> CpuKernels:
    """For kernels without byte dot products: VNNI changes nothing in them."""
    return provider(request.param)
