"""The pipeline: phases, each a list of passes by name; ours stand in files here, the others are TVM's.

    graph     RoPE tables folded to constants, parallel matmuls combined
    weights   weights packed as the target's kernels read them
    fuse      unpack + matmul (+ bias, SwiGLU), residual + norm
    lower     placeholders become scheduled kernels, the rest TVM's legalisation; dead parameters removed
    finalize  memory planned with upper bounds, checked, lowered to the VM
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec, KernelProvider
from relaxpack.passes.capture_graph import MarkStatic, PrepareCapture
from relaxpack.passes.combine_parallel_matmul import CombineParallelMatmul
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.fuse_add_norm import FuseAddNorm
from relaxpack.passes.fuse_unpack_matmul import FuseUnpackMatmul
from relaxpack.passes.lower_kernels import LowerKernels
from relaxpack.passes.memory_plan import VerifyMemoryPlan
from relaxpack.passes.pack_weights import PackWeights
from relaxpack.passes.plan_memory import PlanMemory
from relaxpack.passes.prune_parameters import PruneParameters
from relaxpack.passes.schedule_rest import DropUnusedKernels, ScheduleRest
from relaxpack.passes.specialize_buckets import SpecializeBuckets
from relaxpack.passes.verify import VerifyPhase
from relaxpack.weight_format import WeightFormat
from tvm import relax

Phase = tuple[str, list[Any]]
OPTIONAL = ("CombineParallelMatmul",)


def phases(provider: KernelProvider, attention: AttentionSpec, formats: Mapping[str, WeightFormat],
           config: PipelineConfig, schedule_rule: Callable[[Any], Any] | None = None) -> list[Phase]:
    """All phases in order. `schedule_rule` schedules what no kernel covers (None: TVM's plain loops)."""
    combine = [] if "CombineParallelMatmul" in config.disabled else [CombineParallelMatmul(formats)]
    return [
        ("graph", [relax.transform.FoldConstant(), *combine, PruneParameters, VerifyPhase("graph")]),
        ("weights", [PackWeights(provider, formats), PruneParameters, VerifyPhase("weights")]),
        ("fuse", [FuseUnpackMatmul, FuseAddNorm, PruneParameters, VerifyPhase("fuse")]),
        ("lower", [
            *([SpecializeBuckets("decode", "t", config.decode_buckets)] if config.decode_buckets else []),
            *([SpecializeBuckets("prefill", "t", config.prefill_buckets)] if config.prefill_buckets else []),
            LowerKernels(provider, attention),
            PruneParameters,
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            ScheduleRest(schedule_rule),
            DropUnusedKernels,
            VerifyPhase("lower"),
            *([PrepareCapture] if config.cuda_graph else []),
        ]),
        ("finalize", [
            relax.transform.BundleModelParams("params"),
            relax.transform.RewriteDataflowReshape(),
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            PlanMemory(),
            VerifyMemoryPlan,
            *([MarkStatic, relax.transform.RewriteCUDAGraph()] if config.cuda_graph else []),
            relax.transform.LowerAllocTensor(),
            relax.transform.KillAfterLastUse(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]),
    ]


def run_phases(mod: tvm.IRModule, target: Any, all_phases: list[Phase],
               observe: Callable[[str, tvm.IRModule, float], None] | None = None) -> tvm.IRModule:
    """Run the phases under the target. `observe(phase, module, seconds)` sees the module after each."""
    import time

    for name, passes in all_phases:
        start = time.perf_counter()
        for one in passes:
            try:
                with target, tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": True}):
                    mod = one(mod)
            except CompileError:
                raise
            except Exception as error:
                last = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
                raise CompileError(f"pass {one.info.name} failed in phase {name!r}: {last}") from error
        if observe is not None:
            observe(name, mod, time.perf_counter() - start)
    return mod
