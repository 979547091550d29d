"""The LM head with stage one of sampling in its epilogue, on the emulator: logits and draws against float64, and everything
that sampling finds with the very bits of two kernels."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import numpy as np
import pytest

from relaxpack.kernel_spec import (
    COUNT_BITS,
    FIRST_EDIT,
    IN_PROMPT,
    NORM_GROUP,
    Kernel,
    LinearSpec,
    SamplingSpec,
    counts_width,
)
from relaxpack.schedules.kernels.cuda import sampling_pick
from relaxpack.schedules.kernels.cuda.head_sample import head_sample
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.schedules.kernels.cuda.sampling import sample
from relaxpack.schedules.kernels.cuda.sampling_scan import SCAN_THREADS, scan_blocks
from relaxpack.target import parse_target
from relaxpack.weight_format import FORMATS
from tests.helpers import cuda_harness, sampling_case
from tests.helpers import matmul_case as case
from tests.helpers.cuda_emulator import EmulatedModule

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to lower CUDA kernels")
K, ROWS, PENALISED = 512, 7, 4
# by row: temperature, top_p, min_p, repetition, presence, frequency
SETTINGS = [(0, 1, 0, 1, 0, 0), (0.7, 1, 0, 1, 0, 0), (1.3, 1, 0, 1, 0, 0), (0.9, 0.95, 0, 1, 0, 0),
            (1, 1, 0, 1.2, 0.5, 0.25), (0, 1, 0, 1, 0, 0), (0.8, 1, 0, 1, 0, 0)]


def spec(vocab: int, rows: int = ROWS, **more: Any) -> LinearSpec:
    return LinearSpec(vocab, K, FORMATS["bf16"], "decode", "bfloat16", "float32", max_rows=rows, **more)


class Run:
    """Poisoned buffers of one run of a kernel's stages on the emulator."""

    def __init__(self, vocab: int, rows: int) -> None:
        rng = np.random.default_rng(vocab)
        self.vocab, self.rows, parts = vocab, rows, scan_blocks(vocab)
        x = rng.standard_normal((ROWS, K)).astype(np.float32)
        weight = case.random_array(rng, (vocab, K), "bfloat16", 0.15)
        x[0] = np.abs(x[0])
        weight[[9, 4100]] = 0.25 * np.ones(K)                       # the largest logit of row 0, in two parts
        x[5, 3], x[6, 200] = np.nan, np.inf
        self.x, self.weight = x[:rows].astype(weight.dtype), weight
        self.settings, self.counters = np.zeros((rows, 8), np.float32), np.zeros((rows, 8), np.int32)
        for i in range(rows):
            self.settings[i, :6], self.settings[i, 6] = SETTINGS[i], 1
            self.counters[i] = (0, *rng.integers(0, 2**31, 3), 1 if i == PENALISED else -1, -1, 0, 0)
        self.counts = np.zeros((2, counts_width(vocab)), np.int32)
        self.counts[1, :vocab:3] = 2
        self.counts[1, :vocab:5] |= IN_PROMPT
        self.counts[1, :vocab:7] |= FIRST_EDIT << COUNT_BITS            # a bias for these, a ban for those
        self.counts[1, 1:vocab:11] = FIRST_EDIT + 1 << COUNT_BITS
        self.counts[1, vocab + 1] = -1
        self.counts[1, vocab + FIRST_EDIT:vocab + FIRST_EDIT + 2] = np.array([1.5, -np.inf], np.float32).view(np.int32)
        self.seen = self.counts.copy()
        self.squares = rng.uniform(0, 64, (rows, K // NORM_GROUP)).astype(np.float32)   # of other numbers than x
        self.arrived = np.zeros(parts, np.int32)
        self.sums, self.picks = np.full((rows, parts, 5), np.nan, np.float32), np.full((rows, parts, 3), -7, np.int32)
        self.tops = np.full((rows, parts * 16), np.nan, np.float32)
        self.y = np.full((rows, vocab), np.nan, np.float32)
        self.drawn = np.full((rows + 1, 2), -7, np.int32)

    def __call__(self, kernel: Kernel, module: EmulatedModule, grids: list[tuple[int, ...]], threads: list[int]) -> None:
        held = {**vars(self), "logits": self.y, "x": self.x.view(np.uint16), "weight": self.weight.view(np.uint16)}
        for stage, grid, count in zip(kernel.stages, grids, threads, strict=True):
            late = ("x", "squares", "settings", "counters", "counts") if "x" in stage.inputs else ()  # of kernels before
            module.run(f"{stage.name}_kernel", grid, count, late=late, **held, t=self.rows, b=self.rows, c=2,
                       d=len(self.drawn))


@functools.cache
def module_of(fused: bool, vocab: int, rows: int, epsilon: float | None = None,
              tiling: tuple[tuple[str, int], ...] = ()) -> tuple[Kernel, EmulatedModule]:
    sampling = SamplingSpec(vocab)
    kernel = (head_sample(spec(vocab, rows, norm_epsilon=epsilon), sampling, "sm_90a", **dict(tiling)) if fused
              else sample(sampling))
    assert kernel is not None
    return kernel, EmulatedModule(cuda_harness.generate_source({s.name: s.func for s in kernel.stages}, "sm_90a"))


def fused(run: Run, epsilon: float | None, **tiling: int) -> None:
    kernel, module = module_of(True, run.vocab, run.rows, epsilon, tuple(tiling.items()))
    assert kernel.persistent == {"arrived": ((scan_blocks(run.vocab),), "int32")}
    blocks = -(-run.vocab // (16 * tiling.get("strips", 2)))
    run(kernel, module, [(blocks, 1), (run.rows,)], [SCAN_THREADS, sampling_pick.THREADS])


def apart(run: Run) -> None:
    run(*module_of(False, run.vocab, run.rows), [(scan_blocks(run.vocab), run.rows), (run.rows,)],
        [SCAN_THREADS, sampling_pick.THREADS])


@pytest.mark.parametrize(("vocab", "rows", "epsilon", "tiling"), [
    (4250, ROWS, None, {}), (4104, 2, 1e-5, {"strips": 1, "unroll": 2})])
def test_everything_has_the_bits_of_two_kernels(vocab: int, rows: int, epsilon: float | None,
                                                tiling: dict[str, int]) -> None:
    one, two = Run(vocab, rows), Run(vocab, rows)
    fused(one, epsilon, **tiling)
    finite = np.isfinite(one.x.astype(np.float32)).all(1)
    exact = case.reference_linear(one.x[finite], one.weight)
    if epsilon is not None:
        exact /= np.sqrt(one.squares.astype(np.float64).sum(1, keepdims=True)[finite] / K + epsilon)
    assert case.relative_error(one.y[finite], exact) < case.TOLERANCE["float32"]
    two.y[:] = one.y
    apart(two)
    for name in ("sums", "picks", "tops", "drawn", "counts"):
        np.testing.assert_array_equal(getattr(one, name).view(np.int32), getattr(two, name).view(np.int32), err_msg=name)
    assert not one.arrived.any() and (one.drawn[rows] == -7).all()
    token_ids, logprobs = one.drawn[:rows, 0].copy(), one.drawn[:rows, 1].copy().view(np.float32)
    for i in range(rows):
        row = one.counters[i, 4]
        token, logprob, scores = sampling_case.expect(one.y[i], one.settings[i], one.counters[i],
                                                      one.seen[row] if row >= 0 else None)
        assert token_ids[i] == token or scores[token] - scores[token_ids[i]] < 1e-4, i
        assert np.isnan(logprobs[i]) if token < 0 else abs(logprobs[i] - logprob) < 1e-4
    assert token_ids[0] == 9                                    # of two equal logits the lower id
    assert list(token_ids[5:]) == [-1] * max(rows - 5, 0)       # NaN, infinity
    # The count of blocks starts again at zero, so a second run draws the same.
    one.drawn[:], one.counts[:] = -7, one.seen
    one.sums[:] = np.nan
    fused(one, epsilon, **tiling)
    np.testing.assert_array_equal(one.drawn[:rows, 0], token_ids)


@pytest.mark.parametrize(("given", "sampling"), [
    (spec(4096, 9), SamplingSpec(4096)), (spec(4096, bias=True), SamplingSpec(4096)),
    (spec(4096), SamplingSpec(4096, constrained=True)), (spec(4096), SamplingSpec(4000)),
    (LinearSpec(4096, 256, FORMATS["bf16"], "decode", "bfloat16", "float32", max_rows=1), SamplingSpec(4096)),
    (LinearSpec(4096, K, FORMATS["bf16"], "decode", "bfloat16", "bfloat16", max_rows=1), SamplingSpec(4096)),
    (LinearSpec(4096, K, FORMATS["q8_0"], "decode", "bfloat16", "float32", max_rows=1), SamplingSpec(4096)),
    (LinearSpec(4096, K, FORMATS["bf16"], "decode", "bfloat16", "float32"), SamplingSpec(4096))],
    ids=["rows", "bias", "masks", "vocabulary", "short", "16-bit logits", "quantised", "any rows"])
def test_what_is_left_apart(given: LinearSpec, sampling: SamplingSpec) -> None:
    assert head_sample(given, sampling, "sm_90a") is None


def test_a_head_that_was_chosen_or_measured_stays_apart() -> None:
    class Tuned:
        def kernel(self, operation: str, asked: LinearSpec, label: str) -> tuple[Kernel, str]:
            return Kernel((), "rule:test"), "tuned:1"

    target, given = parse_target("cuda:sm_90a"), (spec(4096), SamplingSpec(4096))
    assert CudaKernels(target, library_for=lambda asked: "cublaslt").head_sample(*given) is None
    assert CudaKernels(target, tuned=Tuned()).head_sample(*given) is None  # type: ignore[arg-type]
    assert CudaKernels(target).head_sample(*given) is not None
