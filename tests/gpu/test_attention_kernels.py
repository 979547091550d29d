"""Attention, RoPE+append and sampling on the GPU against float64: every head_dim, page size, dtype and group size of the
suite, ragged lengths around page and tile edges, poisoned outputs, 100 repeats bit for bit. Where the machine has no
compiler, RELAXPACK_GPU_ATTENTION names a folder that `python -m tests.helpers.attention_builds FOLDER` made elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.helpers import attention_device

    if folder := os.environ.get("RELAXPACK_GPU_ATTENTION"):
        return attention_device.Library(Path(folder))
    from relaxpack.target import local_gpu_arch
    from tests.helpers import attention_builds

    folder = tmp_path_factory.mktemp("attention")
    arch = local_gpu_arch()
    attention_builds.build(folder, arch, attention_builds.builds(tune=False, arch=arch))
    return attention_device.Library(folder)


@pytest.mark.parametrize("part", ["rope", "sample", "decode", "fused", "spread", "prefill mma", "prefill hopper"])
def test_kernels_equal_float64_and_repeat_exactly(library: Any, part: str) -> None:
    from benchmarks.gpu import attention_checks as suite
    from benchmarks.gpu.attention_report import FAILURES, ROWS

    FAILURES.clear()
    checks = {"rope": lambda: suite.check_rope(library), "sample": lambda: suite.check_sampling(library),
              "decode": lambda: suite.check_attention(library, "decode", ""),
              "fused": lambda: suite.check_fused(library), "spread": lambda: suite.check_spread(library),
              "prefill mma": lambda: suite.check_attention(library, "prefill", "mma"),
              "prefill hopper": lambda: suite.check_attention(library, "prefill", "hopper")}
    before = len(ROWS)
    checks[part]()
    assert not FAILURES
    if part not in ("prefill mma", "fused", "spread"):      # the one is left out of some builds, the others need clusters
        assert len(ROWS) > before
