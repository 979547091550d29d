"""The LM head with stage one of sampling in its epilogue, for few rows: of the blocks that compute the 4096 logits of one
part, the last to arrive reads them back from L2 and does with them what a block of `sampling_scan` does, by the same code,
so that tokens and log-probabilities have the same bits as without fusion. Stage two stays a kernel.

`arrived` counts the blocks of each part. Counting starts again at zero by itself, so it is a parameter that is zero at build
and after every run. The logits are written: filters, callers and the host read them.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import NORM_GROUP, Kernel, LinearSpec, SamplingSpec, Stage, counts_width
from relaxpack.schedules.kernels.cuda.common import finish, optional, with_handles
from relaxpack.schedules.kernels.cuda.gemm_rows import rows_body
from relaxpack.schedules.kernels.cuda.sampling import sample
from relaxpack.schedules.kernels.cuda.sampling_scan import (
    PART_TOPS,
    SCAN_LOGITS,
    SCAN_THREADS,
    scan_blocks,
    scan_part,
    scan_shared,
)
from tvm.script import tirx as T

MOST_ROWS = 8
_ARRIVE = """
__device__ __forceinline__ int last_to_arrive(int* arrived, int others) {
  int last = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc((unsigned int*)arrived, (unsigned int)others) == (unsigned int)others;
    __threadfence();
  }
  return __syncthreads_or(last);
}
"""


def head_sample(spec: LinearSpec, sampling: SamplingSpec, arch: str, **tiling: int) -> Kernel | None:
    """x, weight, settings, counters, counts (in place), arrived i32[parts] (in place), drawn (in place) → y f32[b, V].
    None where the pieces do not fit: quantised weights, many rows, K too short for the threads of a part."""
    rows, k = spec.max_rows, spec.in_features
    if (spec.weight.quantized or spec.gated or spec.bias or spec.residual or spec.prepares_norm
            or spec.out_dtype != "float32" or sampling.constrained or spec.out_features != sampling.vocab_size
            or rows is None or rows > MOST_ROWS or k < 64 * SCAN_THREADS // 32):
        return None
    # Two strips a block: half as many arrivals (docs/kernels_cuda_attention.md).
    options: dict[str, Any] = {"columns": 8, "warps": SCAN_THREADS // 32, "strips": 2, "unroll": 1, **tiling}
    early = arch == "sm_90a"
    name = f"head_sample_{spec.out_features}x{k}_{spec.activation_dtype}" + "".join(
        f"_{key[:2]}{value}" for key, value in options.items())
    normed = spec.norm_epsilon is not None
    name += "_norm" if normed else ""
    func = finish(head_sample_function(spec, sampling, early, options), name, early, grid="xy")
    pick = sample(sampling, arch).stages[1]
    parts = scan_blocks(sampling.vocab_size)
    inputs = ("x", "weight", *(["squares"] if normed else []), "settings", "counters", "counts", "arrived")
    return Kernel((Stage(func, name, inputs, ("y", "sums", "picks", "tops"), inplace=("arrived",)),
                   Stage(pick.func, pick.name, tuple("y" if n == "logits" else n for n in pick.inputs), pick.outputs,
                         pick.inplace)),
                  source="rule:cuda.head_sample",
                  temporaries={"sums": (("b", parts, 5), "float32"), "picks": (("b", parts, 3), "int32"),
                               "tops": (("b", parts * PART_TOPS), "float32")},
                  persistent={"arrived": ((parts,), "int32")})


def head_sample_function(spec: LinearSpec, sampling: SamplingSpec, early: bool, options: dict[str, Any]) -> Any:
    V, K, dtype = spec.out_features, spec.in_features, spec.activation_dtype
    PARTS, BM, WIDTH = scan_blocks(V), 16 * options["strips"], counts_width(V)
    PER, BLOCKS = SCAN_LOGITS // BM, -(-V // BM)        # blocks of a whole part, of all
    assert options["warps"] * 32 == SCAN_THREADS and SCAN_LOGITS % BM == 0
    scan = scan_part(sampling, early=False, fresh=True)

    @T.inline
    def end(shared, y, bx, tx, rows, after):
        part = T.meta_var(bx // PER)
        settings, counters, counts, arrived, sums, picks, tops = T.meta_var(after)
        if T.cuda.func_call("last_to_arrive", arrived.ptr_to([part]), T.min(PER, BLOCKS - part * PER) - 1,
                            source_code=_ARRIVE, return_type="int32") != 0:
            for row in T.serial(rows):
                scan(shared[0], shared[1], y, settings, counters, counts, None, sums, picks, tops, part, row, tx)
                T.cuda.cta_sync()

    body = rows_body(V, K, dtype, "float32", dependent_launch=early, norm_epsilon=spec.norm_epsilon,
                     tail=(scan_shared, end), **options)
    normed = spec.norm_epsilon is not None

    @T.inline
    def bind(handles):
        t = T.int64()
        c = T.int64()
        x = T.match_buffer(handles[0], (t, K), dtype, align=16)
        weight = T.match_buffer(handles[1], (V, K), dtype, align=16)
        norm = T.meta_var([optional(True, "squares", handles[2], (t, K // NORM_GROUP), "float32")] if normed else None)
        settings = T.match_buffer(handles[-8], (t, 8), "float32")
        counters = T.match_buffer(handles[-7], (t, 8), "int32")
        counts = T.match_buffer(handles[-6], (c, WIDTH), "int32", align=16)
        arrived = T.match_buffer(handles[-5], (PARTS,), "int32")
        y = T.match_buffer(handles[-4], (t, V), "float32", align=16)
        sums = T.match_buffer(handles[-3], (t, PARTS, 5), "float32")
        picks = T.match_buffer(handles[-2], (t, PARTS, 3), "int32")
        tops = T.match_buffer(handles[-1], (t, PARTS * PART_TOPS), "float32")
        body(x, weight, None, None, y, t, [settings, counters, counts, arrived, sums, picks, tops], norm)

    return with_handles(10 + normed, bind)
