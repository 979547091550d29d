"""What the tuner of CUDA kernels holds for right is what kernels compute (on the emulator), and a wrong kernel is seen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from relaxpack.kernel_spec import AttentionSpec, FusedAttentionSpec, Kernel, LinearSpec, NormSpec
from relaxpack.schedules.kernels.cuda.linear import linear
from relaxpack.schedules.kernels.cuda.norm import NormTuning, norm_kernel
from relaxpack.schedules.kernels.cuda.packing import pack, weight_layout
from relaxpack.schedules.kernels.cuda.rope_append_attention import rope_append_attention
from relaxpack.schedules.kernels.cuda.rope_append_attention_tuning import FusedTuning
from relaxpack.target import parse_target
from relaxpack.tuning import cuda_jobs
from relaxpack.tuning.cuda_cases import (
    PERIOD,
    GpuCase,
    Repeated,
    _weights,
    check_cases,
    random_quantized,
    stored,
    timing_cases,
)
from relaxpack.tuning.cuda_jobs import neighbour_of
from relaxpack.tuning.specs import as_asked, family_and_spec
from relaxpack.tuning_record import Workload
from relaxpack.tvm_records import primfunc_workload
from relaxpack.weight_format import FORMATS, QuantizedTensor
from tests.helpers import gpu_stand_in
from tests.helpers.cuda_emulator import EmulatedModule
from tests.helpers.cuda_harness import can_generate, generate_source, tensor_maps
from tests.helpers.gpu_stand_in import StandInGpu
from tests.helpers.tuning_records import doubling

pytestmark = pytest.mark.skipif(not can_generate(), reason="no CUDA code generator")
ATTENTION = AttentionSpec(2, 8, 2, 64, 64, 16, 64, 1024, "bfloat16", "bfloat16", 0.125)


def _linear(n: int, k: int, rows: int, weight: str = "bf16", **changes: Any) -> LinearSpec:
    return LinearSpec(n, k, FORMATS[weight], "decode", "bfloat16", "bfloat16", max_rows=rows, **changes)


def _run(kernel: Kernel, case: GpuCase, grid: tuple[int, ...], threads: int, cluster: int = 1) -> dict[str, np.ndarray]:
    """The buffers after one launch."""
    stage, = kernel.stages
    held = {name: np.resize(value.block, value.shape) if isinstance(value, Repeated) else
            (value.copy() if isinstance(value, np.ndarray) else value) for name, value in case.buffers.items()}
    words = {name: value.view(np.uint16) if isinstance(value, np.ndarray) and value.itemsize == 2 else stored(value)
             for name, value in held.items()}
    words |= {"before": words.get("residual"), "t": case.rows, **({"p": held["pages"].shape[1]} if "pages" in held else {})}
    module = EmulatedModule(generate_source({stage.name: stage.func}, "sm_90a"))
    module.run(stage.name + "_kernel", grid, threads, cluster, **words, **tensor_maps(stage.func, words))
    return held


def _error(case: GpuCase, held: dict[str, np.ndarray]) -> float:
    return max(case.share(name, held[name]) for name in case.expected)


@pytest.mark.parametrize("spec", [
    _linear(1040, 256, 3, bias=True),                                      # more rows than the weight repeats after
    _linear(64, 256, 8, residual=True, prepares_norm=True),
    _linear(64, 256, 1, glu="swiglu", norm_epsilon=1e-5),
])
def test_a_matmul(spec: LinearSpec) -> None:
    kernel = linear(spec, "sm_90a")
    name = kernel.stages[0].name
    warps = int(name.split("_wa")[1].split("_")[0])
    case, = check_cases("cuda.linear", spec, spec.max_rows or 0, 7)
    held = _run(kernel, case, (-(-spec.out_features // 16), 1), 32 * warps)
    assert _error(case, held) < 1, name
    at = int(np.abs(held["y"][-1]).argmax())
    held["y"][-1, at] = 0
    assert _error(case, held) > (1 if spec.out_features < 100 else 0.2)
    held["y"][0, 0] = np.nan
    assert _error(case, held) == math.inf


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q4_128", "q5_k", "q6_k", "q8_0", "fp8", "fp8_block"])
def test_a_quantised_weight_is_what_packing_makes_of_it(name: str) -> None:
    """Its rows repeat, as packed bytes and as the numbers they stand for, and the numbers are exact in bfloat16."""
    fmt, n, k = FORMATS[name], PERIOD + 32, 256
    buffers, plain = _weights(fmt, n, k, 3)
    one = random_quantized(fmt, PERIOD, k, np.random.default_rng([3, 1]))
    whole = QuantizedTensor(fmt, *(None if part is None else np.resize(part, (n, part.shape[1]))
                                   for part in (one.codes, one.scales, one.minimums, one.zeros)))
    packed = pack(weight_layout(fmt, n, k, False), whole)
    assert set(buffers) == {f"weight.{suffix}" for suffix in packed}
    for suffix, array in packed.items():
        repeated = buffers[f"weight.{suffix}"]
        assert np.array_equal(np.resize(repeated.block, repeated.shape), array)
    assert np.array_equal(np.resize(plain, (n, k)), whole.dequantize())
    assert np.array_equal(plain.astype(ml_dtypes.bfloat16).astype(np.float64), plain)


@pytest.mark.parametrize(("residual", "blocks"), [(False, 0), (True, 0), (False, 2), (True, 4), (True, 16)])
def test_a_norm(residual: bool, blocks: int) -> None:
    spec = NormSpec(256, 1e-5, "bfloat16", residual)
    cases = check_cases("cuda.norm", spec, 4, 7)
    assert [case.rows for case in cases] == [1, 3, 4, 9]
    for case in cases:
        held = _run(norm_kernel(spec, "sm_90a", NormTuning(64, True, blocks)), case, (min(case.rows, blocks or 99),), 64)
        assert _error(case, held) < 1, case.rows


@pytest.mark.parametrize(("epsilon", "kv_dtype"), [(None, "bfloat16"), (1e-6, "bfloat16"), (None, "float8_e4m3fn")])
def test_rope_append_and_attention(epsilon: float | None, kv_dtype: str) -> None:
    spec = FusedAttentionSpec(replace(ATTENTION, qk_norm_epsilon=epsilon, kv_dtype=kv_dtype, page_size=32), 3)
    tuning = FusedTuning(2, 2, 2)
    kernel = rope_append_attention(spec.attention, 3, tuning=tuning)
    assert kernel is not None
    case, = check_cases("cuda.rope_append_attention", spec, 3, 7)
    held = _run(kernel, case, (3 * 2 * tuning.cluster,), 32 * tuning.warps, tuning.cluster)
    assert _error(case, held) < 1
    elsewhere = np.argwhere(~np.isnan(case.expected["pages"]))[0]
    held["pages"][(case.buffers["layer"], *elsewhere)] = 90         # a write where nothing may change
    assert _error(case, held) > 1


def test_timings_walk_over_more_than_the_cache() -> None:
    spec = FusedAttentionSpec(ATTENTION, 4)
    cases = timing_cases("cuda.rope_append_attention", spec, 4, 0, 1 << 24)
    assert [int(case.buffers["lengths"][0]) for case in cases] == [512]        # 64 pages hold no more
    case, = cases
    slots = {(one["layer"], tuple(one["slots"])) for one in case.variants}
    assert len(slots) == len(case.variants) and case.read_bytes * len(case.variants) >= 1 << 24
    assert timing_cases("cuda.linear", _linear(64, 256, 4, "q4_1"), 4, 0, 1 << 24)[0].copied == (
        "weight.codes", "weight.scales", "weight.minimums")


def test_a_matmul_is_measured_as_a_build_has_it() -> None:
    """With its norm, where it has one; else beside the norm that is its neighbour."""
    plain, folded = _linear(512, 256, 4), _linear(512, 256, 4, norm_epsilon=1e-5)
    assert as_asked("cuda.linear", plain) is None
    asked = as_asked("cuda.linear", folded)
    assert asked is not None and family_and_spec(asked) == ("cuda.linear", folded)
    assert neighbour_of(asked, 4) is None and neighbour_of(Workload.kernel("cuda.linear", plain), 512) is None
    assert neighbour_of(Workload.kernel("cuda.linear", plain), 4) == NormSpec(256, 1e-5, "bfloat16", False)
    behind = _linear(256, 512, 4, residual=True, prepares_norm=True)
    asked = as_asked("cuda.linear", behind)
    assert asked is not None and family_and_spec(asked)[1] == behind


def test_a_function_without_a_kernel_is_checked_element_by_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled for the GPU by dlight's schedule, called with its buffers in order, and right or wrong."""
    workload = primfunc_workload(doubling("bfloat16"), "doubling")
    library = tmp_path / "doubling.so"
    cuda_jobs.compile_candidate(workload, {"kind": "trace", "trace": [[], []]}, parse_target("cuda:sm_90a"), str(library))
    assert library.stat().st_size > 1000
    factor = 2.0

    def double(**buffers: np.ndarray) -> None:
        first, second = (buffers[name] for name in sorted(buffers))
        second[...] = first * factor

    gpu_stand_in.use(monkeypatch, StandInGpu(lambda name: double, lambda name: 5.0))
    assert cuda_jobs.check(str(library), workload, 1, 0)[0] <= 1
    rounds, = cuda_jobs.time_in_turn([str(library)], workload, 1, 0, 9, 1.0)
    assert len(rounds.times_us) == 9 and rounds.rotated_bytes >= gpu_stand_in.L2_BYTES
    factor = 2.1
    assert cuda_jobs.check(str(library), workload, 1, 0)[0] > 1
