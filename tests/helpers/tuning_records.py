"""Small tuning records for tests: of a kernel with parameters, or of a TVM function with a trace made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relaxpack.tuning_record import Check, Facts, Origin, TuningRecord, Workload

CPU: Facts = {"kind": "cpu", "arch": "znver5", "features": ("avx2", "fma"), "threads": 2}
SM_80: Facts = {"kind": "cuda", "arch": "sm_80", "name": "A100", "sm_count": 108, "l2_bytes": 41943040, "memory_gib": 80}
SM_90: Facts = {"kind": "cuda", "arch": "sm_90a", "name": "H200", "sm_count": 132, "l2_bytes": 52428800, "memory_gib": 140}
COMPILER: Facts = {"apache-tvm": "0.27.0.post1", "kernels": 1, "llvm": 22}


def record(name: str = "cpu.gemv", us: float = 10.0, *, bucket: int | None = 4, target: Facts = CPU,
           compiler: Facts = COMPILER, parameters: Mapping[str, Any] | None = None,
           seed: int = 0, **changes: Any) -> TuningRecord:
    """One record; `seed` tells apart what is otherwise equal."""
    made = TuningRecord(
        Workload.kernel("family", {"name": name}, name), bucket, target, compiler,
        {"kind": "parameters", "parameters": parameters or {"tile": 16, "unroll": True}}, (us * 1.1, us, us * 0.9),
        {"repeats": 3, "rotated_bytes": 1 << 26, "clock_mhz": None}, Check(seed, 1e-6, 1e-5),
        Origin("2026-11-29T20:15:00Z", "machine-a", "relaxpack 0.1.0", 32), baseline_us=us * 2)
    return replace(made, **changes)


def doubling(dtype: str = "float32") -> Any:
    """A PrimFunc B = 2 A of 64x64 floats, unscheduled."""
    import relaxpack.tvm_setup  # noqa: F401
    from tvm import te

    a = te.placeholder((64, 64), dtype, name="A")
    return te.create_prim_func([a, te.compute((64, 64), lambda i, j: a[i, j] * 2, name="B")])


TRACE = [[["GetSBlock", [], ["B", "main"], ["b0"]], ["GetLoops", ["b0"], [], ["l1", "l2"]],
          ["Split", ["l1", "None", 8], [1, 0], ["l3", "l4"]], ["Parallel", ["l3"], [], []]], []]
BROKEN_TRACE = [[["GetSBlock", [], ["no such block", "main"], ["b0"]]], []]


def traced(us: float = 10.0, *, trace: Any = None, target: Facts = CPU, compiler: Facts = COMPILER,
           bucket: int | None = None) -> TuningRecord:
    from relaxpack.tvm_records import primfunc_workload

    return replace(record(us=us, bucket=bucket, target=target, compiler=compiler),
                   workload=primfunc_workload(doubling(), "doubling"), choice={"kind": "trace", "trace": trace or TRACE})
