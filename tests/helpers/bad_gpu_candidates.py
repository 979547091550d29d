"""Candidates for an RMSNorm that harm whoever builds or runs them on a GPU: real kernels, compiled and run like any other.
Stands in for `relaxpack.tuning.cuda_jobs` in the processes of a measurer (`CudaMeasurer.jobs`).
"""

from __future__ import annotations

import json
import os
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.schedules.cuda_compile import compile_module
from relaxpack.schedules.kernels.cuda.common import finish, with_handles
from relaxpack.target import TargetSpec
from relaxpack.tuning import cuda_jobs
from relaxpack.tuning.cuda_jobs import check, clocks, prepare, time_in_turn
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning_record import Workload
from tvm.script import tirx as T

__all__ = ["check", "clocks", "compile_candidate", "prepare", "time_in_turn"]
_HARM = {
    "runs_forever": 'while (true) asm volatile("nanosleep.u32 1000;");',
    "crashes_the_runner": "*(volatile int*)16 = 1;",
    "is_wrong": "",
}


def compile_candidate(workload: Workload, choice: dict[str, Any], target: TargetSpec, path: str) -> None:
    """`choice["parameters"]["kind"]` says what is wrong with it; nothing is without one."""
    kind = choice["parameters"].get("kind")
    if kind == "crashes_the_builder":
        os.abort()
    if kind not in _HARM:
        parameters = {"threads": 64} if kind is not None else choice["parameters"]
        cuda_jobs.compile_candidate(workload, {**choice, "parameters": parameters}, target, path)
        return
    _, spec = family_and_spec(workload)
    name = f"norm_that_{kind}"
    module = tvm.IRModule({name: _harmful(spec.hidden_size, spec.activation_dtype, kind).with_attr("global_symbol", name)})
    compile_module(module, target).export_library(path)
    cuda_jobs.description_of(path).write_text(json.dumps(
        {"stages": [{"function": name, "arguments": ["x", "weight", "y"]}], "temporaries": {}}))


def _harmful(H: int, dtype: str, kind: str) -> Any:
    source = f"__device__ __forceinline__ void {kind}() {{ {_HARM[kind]} }}"

    @T.inline
    def bind(handles):
        t = T.int64()
        x = T.match_buffer(handles[0], (t, H), dtype, align=16)
        weight = T.match_buffer(handles[1], (H,), "float32", align=16)
        y = T.match_buffer(handles[2], (t, H), dtype, align=16)
        T.device_entry()
        row = T.cta_id([T.Cast("int32", t)])
        tx = T.thread_id([32])
        for i in T.unroll(H // 32):
            y[row, tx + i * 32] = x[row, tx + i * 32] + T.Cast(dtype, weight[tx + i * 32])
        T.cuda.func_call(kind, source_code=source)

    return finish(with_handles(3, bind), f"norm_that_{kind}")
