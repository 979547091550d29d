"""The pipeline: phases, each a list of passes by name; ours stand in files here, the others are TVM's.

    graph     the RoPE table shared as a parameter, constants folded, equal expressions merged, rows that no logits
              need left out early, parallel matmuls combined
    weights   weights packed as the target's kernels read them
    fuse      unpack + matmul (+ bias, gated linear units), residual + norm
    lower     a function per bucket, norms into the matmuls around them, placeholders become scheduled kernels, the rest
              TVM's legalisation; dead parameters removed
    finalize  memory planned with upper bounds, checked, lowered to the VM
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec, KernelProvider
from relaxpack.passes.capture_graph import MarkStatic, PrepareCapture
from relaxpack.passes.combine_parallel_matmul import CombineParallelMatmul
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.fold_norm_weights import FoldNormWeights
from relaxpack.passes.fold_scales import FoldScales
from relaxpack.passes.fuse_add_norm import FuseAddNorm
from relaxpack.passes.fuse_head_sample import FuseHeadSample
from relaxpack.passes.fuse_norm_linear import FuseNormLinear
from relaxpack.passes.fuse_residual import FuseResidual
from relaxpack.passes.fuse_rope_append_attention import FuseRopeAppendAttention
from relaxpack.passes.fuse_unpack_matmul import FuseUnpackMatmul, FuseUnpackOnly
from relaxpack.passes.lower_kernels import LowerKernels
from relaxpack.passes.memory_plan import VerifyMemoryPlan
from relaxpack.passes.pack_weights import PackWeights
from relaxpack.passes.plan_memory import PlanMemory
from relaxpack.passes.prune_parameters import PruneParameters
from relaxpack.passes.rewrite import exported_functions
from relaxpack.passes.rewrite_reshapes import RewriteDataflowReshape
from relaxpack.passes.schedule_rest import DropUnusedKernels, ScheduleRest
from relaxpack.passes.select_rows_early import SelectRowsEarly
from relaxpack.passes.share_rope_table import ShareRopeTable
from relaxpack.passes.specialize_buckets import SpecializeBuckets
from relaxpack.passes.spread_decode import SpreadDecode
from relaxpack.passes.verify import VerifyPhase
from relaxpack.weight_format import WeightFormat
from tvm import relax

Phase = tuple[str, list[Any]]


@dataclass(frozen=True)
class PassRecord:
    """One pass that ran: seconds, and the sizes of the module after it."""

    phase: str
    name: str
    seconds: float
    bindings: dict[str, int]     # by exported function
    prim_funcs: int


def phases(provider: KernelProvider, attention: AttentionSpec, formats: Mapping[str, WeightFormat],
           config: PipelineConfig, schedule_rule: Callable[[Any], Any] | None = None) -> list[Phase]:
    """All phases in order. `schedule_rule` schedules what no kernel covers (None: TVM's plain loops)."""
    def unless(name: str, *passes: Any) -> list[Any]:
        return [] if name in config.disabled else list(passes)

    def requested(name: str, *passes: Any) -> list[Any]:
        return list(passes) if name in config.enabled else []

    epilogues = "FuseEpilogues" not in config.disabled
    return [
        ("graph", [
            *unless("ShareRopeTable", ShareRopeTable),
            *unless("FoldConstant", relax.transform.FoldConstant()),
            *unless("EliminateCommonSubexpr", relax.transform.EliminateCommonSubexpr()),
            *unless("SelectRowsEarly", SelectRowsEarly),
            *unless("FoldScales", FoldScales(config.fixed_weights)),
            *unless("CombineParallelMatmul", CombineParallelMatmul(formats)),
            *requested("FoldNormWeights", FoldNormWeights(config.fixed_weights)),
            PruneParameters,
            VerifyPhase("graph"),
        ]),
        ("weights", [PackWeights(provider, formats, epilogues), PruneParameters, VerifyPhase("weights")]),
        ("fuse", [
            FuseUnpackMatmul if epilogues else FuseUnpackOnly,
            *requested("FuseResidual", FuseResidual),
            *unless("FuseAddNorm", FuseAddNorm),
            PruneParameters,
            VerifyPhase("fuse"),
        ]),
        ("lower", [
            *([SpecializeBuckets("decode", "t", config.decode_buckets)] if config.decode_buckets else []),
            *requested("SpreadDecode", SpreadDecode(provider, attention, config.spread_buckets)),
            *([SpecializeBuckets("prefill", "t", config.prefill_buckets)] if config.prefill_buckets else []),
            *unless("FuseRopeAppendAttention", FuseRopeAppendAttention(provider, attention)),
            *unless("FuseNormLinear", FuseNormLinear(provider)),
            *requested("FuseHeadSample", FuseHeadSample(provider)),
            LowerKernels(provider, attention),
            PruneParameters,
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            *unless("FoldConstant", relax.transform.FoldConstant()),
            *unless("FuseOps", relax.transform.FuseOps(), relax.transform.FuseTIR()),
            ScheduleRest(schedule_rule),
            DropUnusedKernels,
            VerifyPhase("lower"),
            *([PrepareCapture] if config.cuda_graph else []),
        ]),
        ("finalize", [
            relax.transform.BundleModelParams("params"),
            RewriteDataflowReshape,
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            *unless("PlanMemory", PlanMemory()),
            VerifyMemoryPlan,
            *(unless("RewriteCUDAGraph", MarkStatic, relax.transform.RewriteCUDAGraph()) if config.cuda_graph else []),
            relax.transform.LowerAllocTensor(),
            relax.transform.KillAfterLastUse(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]),
    ]


class PassFailure(CompileError):
    """A pass raised or broke a rule of ours. `module` is what it was given; `phase` and `index` find it in `phases`."""

    def __init__(self, phase: str, index: int, one_pass: Any, module: tvm.IRModule, why: str) -> None:
        super().__init__(f"pass {one_pass.info.name} failed in phase {phase!r}: {why}")
        self.phase, self.index, self.one_pass, self.module, self.why = phase, index, one_pass, module, why


def run_phases(mod: tvm.IRModule, target: Any, all_phases: list[Phase],
               observe: Callable[[str, tvm.IRModule, float], None] | None = None,
               observe_pass: Callable[[PassRecord, tvm.IRModule], None] | None = None) -> tvm.IRModule:
    """Run the phases under the target. `observe(phase, module, seconds)` sees the module after each phase,
    `observe_pass` a record of each pass and the module it gave. Raises PassFailure for a bug, CompileError for what the
    user can change."""
    for name, passes in all_phases:
        begun = time.perf_counter()
        for index, one in enumerate(passes):
            start = time.perf_counter()
            mod = run_pass(mod, target, name, index, one)
            if observe_pass is not None:
                seconds = time.perf_counter() - start
                observe_pass(PassRecord(name, str(one.info.name), round(seconds, 4), *sizes(mod)), mod)
        if observe is not None:
            observe(name, mod, time.perf_counter() - begun)
    return mod


def run_pass(mod: tvm.IRModule, target: Any, phase: str, index: int, one: Any) -> tvm.IRModule:
    """One pass under the target."""
    try:
        with target, tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": True}):
            return one(mod)
    except CompileError as error:
        if not str(one.info.name).startswith("Verify"):
            raise
        raise PassFailure(phase, index, one, mod, str(error)) from error
    except Exception as error:
        raise PassFailure(phase, index, one, mod, _reason(error)) from error


def _reason(error: Exception) -> str:
    """The line that says what is wrong. TVMScript's messages end with a drawing of the source; theirs comes earlier."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error    # str() of one quotes its text
    lines = [line.strip() for line in str(text).strip().splitlines() if line.strip()]
    found = [line for line in lines if line.startswith("error:") or "Check failed" in line]
    return f"{(found or [f'{type(error).__name__}: {line}' for line in lines] or [type(error).__name__])[-1]}{_place(error)}"


def _place(error: Exception) -> str:
    """The last line of Python outside TVM that ran before the error, as ` (FILE:LINE)`: who writes a pass looks there
    first. "" where TVM's own code failed in a pass of its own."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename.endswith(".py") and not {"tvm", "tvm_ffi"} & set(Path(frame.filename).parts)
              and (frame.filename, frame.name) != (__file__, run_pass.__name__)]
    if not frames:
        return ""
    path = Path(frames[-1].filename)
    here = Path(__file__).parents[1]
    return f" ({path.relative_to(here) if path.is_relative_to(here) else path}:{frames[-1].lineno})"


def sizes(mod: tvm.IRModule) -> tuple[dict[str, int], int]:
    """(bindings by exported function, number of PrimFuncs)."""
    bindings = {gv.name_hint: sum(len(block.bindings) for block in func.body.blocks)
                for gv, func in exported_functions(mod)}
    return bindings, sum(isinstance(f, tvm.tirx.PrimFunc) for f in mod.functions.values())
