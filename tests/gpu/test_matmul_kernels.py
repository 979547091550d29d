"""Every CUDA matmul family on the GPU: odd shapes, epilogues, dtypes and quantised formats against float64 with poisoned
outputs, and twice the same bits. Where the machine has no compiler, RELAXPACK_GPU_KERNELS names a folder that
`python -m benchmarks.gpu.kernels_matmul build FOLDER check chain` made elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if folder := os.environ.get("RELAXPACK_GPU_KERNELS"):
        return Path(folder)
    import relaxpack.tvm_setup as setup

    if setup.runtime_only():
        pytest.skip("no compiler here and RELAXPACK_GPU_KERNELS is not set")
    from benchmarks.gpu.kernels_matmul import build

    folder = tmp_path_factory.mktemp("kernels")
    build(folder, ["check", "chain"])
    return folder


def test_norms_inside_matmuls(tmp_path: Path) -> None:
    """Weight formats, 1 to 8 rows. `RELAXPACK_GPU_KERNELS`: `python -m benchmarks.gpu.norm_fusion build FOLDER/norms`."""
    pytest.importorskip("torch")
    import relaxpack.tvm_setup as setup
    from benchmarks.gpu.norm_fusion import Run, build

    folder = Path(os.environ.get("RELAXPACK_GPU_KERNELS", tmp_path)) / "norms"
    if not folder.exists():
        if setup.runtime_only():
            pytest.skip("no compiler here and RELAXPACK_GPU_KERNELS has no folder norms")
        build(folder, ("check",))
    run = Run(folder, tmp_path, limit=0)        # checks only
    run.all()
    assert not run.result["failures"] and len(run.result["checks"]) == 234
    bad = [c for c in run.result["checks"] if not (c["ok"] and c["same_again"])]
    assert not bad, bad[:5]


def test_fp8_activations_against_float64(tmp_path: Path) -> None:
    """Rows rounded to fp8 and their products. `RELAXPACK_GPU_KERNELS`: `python -m benchmarks.gpu.fp8_matmul build_checks
    FOLDER/fp8`."""
    pytest.importorskip("torch")
    import relaxpack.tvm_setup as setup
    from benchmarks.gpu.fp8_matmul import Fp8Checks, build_checks

    folder = Path(os.environ.get("RELAXPACK_GPU_KERNELS", tmp_path)) / "fp8"
    if not folder.exists():
        if setup.runtime_only():
            pytest.skip("no compiler here and RELAXPACK_GPU_KERNELS has no folder fp8")
        build_checks(folder)
    bench = Fp8Checks(folder)
    checks = [check for one in bench.variants for check in bench.check(one)]
    bad = [check for check in checks if not (check["ok"] and check["same_again"])]
    assert len(checks) > 100 and not bad, bad[:5]


@pytest.mark.parametrize("group", ["check", "chain"])
def test_kernels_against_float64(kernels: Path, group: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from benchmarks.gpu.kernels_matmul import run_group

    run_group(kernels, group, tmp_path)
    result = json.loads((tmp_path / f"matmul-{group}.json").read_text())
    assert not result["failures"]
    assert result["checks"]
    bad = [c for c in result["checks"] if not c["ok"] or c.get("same_again") is False]
    assert not bad, bad[:5]


def test_quantised_kernels_against_float64(tmp_path: Path) -> None:
    """gemm_few_bulk, gemm_mixed, gemm_rows_bulk and gemm_group_columns in every format. `RELAXPACK_GPU_KERNELS`:
    `python -m benchmarks.gpu.quantised_matmul build FOLDER/quantised`."""
    pytest.importorskip("torch")
    import relaxpack.tvm_setup as setup
    from benchmarks.gpu.quantised_matmul import QuantisedBench, build
    from benchmarks.gpu.quantised_variants import check_variants

    folder = Path(os.environ.get("RELAXPACK_GPU_KERNELS", tmp_path)) / "quantised"
    if not folder.exists():
        if setup.runtime_only():
            pytest.skip("no compiler here and RELAXPACK_GPU_KERNELS has no folder quantised")
        build(folder, check_variants())
    bench = QuantisedBench(folder)
    checks = [check for v in json.loads((folder / "index.json").read_text()) if v["check"] for check in bench.check(v)]
    bad = [c for c in checks if not (c["ok"] and c["same_again"])]
    assert len(checks) > 300 and not bad, bad[:5]
