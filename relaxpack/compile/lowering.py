"""Config → IRModule → passes → executable library, and the record of what happened on the way (`explain.json`)."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.compile import reproducer
from relaxpack.compile.ir_history import IrHistory
from relaxpack.compile.kernels import attention_spec
from relaxpack.dist.params import numpy_dtype
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import KernelProvider
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.lower_kernels import KERNELS
from relaxpack.passes.memory_plan import PLAN, arena_bytes
from relaxpack.passes.pipeline import PassFailure, PassRecord, phases, run_phases, sizes
from relaxpack.passes.rewrite import exported_functions, notes_of, num_inputs, recipes_of
from relaxpack.passes.schedule_rest import SOURCE
from relaxpack.passes.specialize_buckets import buckets_of
from relaxpack.passes.spread_decode import SPREAD
from relaxpack.passes.step_table import step_table
from relaxpack.recipe import FromCheckpoint, Recipe
from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.export import BuildLimits, export_model
from relaxpack.schedules.cuda_compile import compile_module
from relaxpack.schedules.rest import rest_rule
from relaxpack.spread_costs import SpreadCosts
from relaxpack.target import TargetSpec
from relaxpack.weight_format import WeightFormat

if TYPE_CHECKING:
    from relaxpack.tuning.lookup import DatabaseLookup


@dataclass(frozen=True)
class Parameter:
    """One entry of the functions' parameter tuple."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    recipe: Recipe

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass
class Lowered:
    """A compiled model without its weights. `explanation` is JSON: kernels, phases, memory plan."""

    executable: Any
    parameters: list[Parameter]
    functions: tuple[str, ...]
    bounds: dict[str, int]
    buckets: dict[str, tuple[int, ...]]
    spread: dict[int, SpreadCosts] = field(default_factory=dict)    # buckets with two graphs: what each costs
    explanation: dict[str, Any] = field(default_factory=dict)

    def kernel_counts(self) -> dict[str, int]:
        """PrimFuncs by the kind of their source: tuned, rule, dlight, library, fallback."""
        return dict(sorted(Counter(k["source"].split(":")[0] for k in self.explanation["kernels"]).items()))

    def parameter_bytes(self) -> int:
        return sum(p.bytes for p in self.parameters)

    def arena_bytes(self) -> int:
        """Intermediates of all functions together; results of functions that are not captured come on top."""
        return arena_bytes(self.explanation["memory_plan"])


def lower_model(config: ModelConfig, limits: BuildLimits, target: TargetSpec, provider: KernelProvider,
                formats: Mapping[str, WeightFormat], activation_dtype: str, kv_dtype: str,
                pipeline: PipelineConfig, dump: Path | None = None,
                progress: Callable[[str], None] = lambda stage: None, generate: bool = True,
                embed: bool = False, records: DatabaseLookup | None = None, code: bool = True) -> Lowered:
    """Export, run the passes, generate code. `dump`: folder for the IR after each phase. `generate`, `embed`: which
    functions, see `export_model`. `records`: what the provider was given, for functions without a kernel and the report.
    `code` False: passes alone, and no executable."""
    mod = export_model(config, limits, activation_dtype, kv_dtype, target.kind == "cuda", generate, embed)
    attention = attention_spec(config, limits, activation_dtype, kv_dtype)
    report: list[dict[str, Any]] = []
    bindings, prim_funcs = sizes(mod)
    passes: list[dict[str, Any]] = [asdict(PassRecord("export", "export", 0.0, bindings, prim_funcs))]
    history = IrHistory(mod)
    parameters: list[Parameter] = []
    steps: dict[str, list[dict[str, Any]]] = {}

    def observe(phase: str, after: tvm.IRModule, seconds: float) -> None:
        progress(phase)
        bindings, prim_funcs = sizes(after)
        report.append({"phase": phase, "seconds": round(seconds, 3), "bindings": bindings, "prim_funcs": prim_funcs})
        if phase == "lower":
            parameters.extend(_parameters(after))
            steps.update(step_table(after))
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{len(report)}_{phase}.py").write_text(after.script(show_meta=False))

    def observe_pass(record: PassRecord, after: tvm.IRModule) -> None:
        passes.append({**asdict(record), "ir": history.changes(record.name, after)})

    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / "0_export.py").write_text(mod.script(show_meta=False))
    rule = rest_rule(target)
    if records is not None:
        from relaxpack.tuning.rest import with_records

        rule = with_records(rule, records)
    try:
        final = run_phases(mod, target.to_tvm(), phases(provider, attention, formats, pipeline, rule), observe,
                           observe_pass)
    except PassFailure as failure:
        progress(failure.phase)     # raises where the user has interrupted: TVM makes an error of the pass of that
        inputs = reproducer.Inputs(config, limits, target, {n: formats[n].name for n in formats}, activation_dtype,
                                   kv_dtype, pipeline)
        raise CompileError(reproducer.crash_report(failure, inputs, dump)) from failure
    progress("code")
    start = time.perf_counter()
    executable = _generate_code(final, target) if code else None
    report.append({"phase": "code", "seconds": round(time.perf_counter() - start, 3)})
    bounds: dict[str, int] = {}
    for _, func in exported_functions(mod):
        for name, bound in dict(func.attrs["tir_var_upper_bound"]).items():
            bounds[str(name)] = max(int(bound), bounds.get(str(name), 0))
    explanation = {"phases": report, "passes": passes, "disabled": sorted(pipeline.disabled),
                   "enabled": sorted(pipeline.enabled), "notes": notes_of(final),
                   "kernels": _kernels(final), "calls": json.loads(str(final.attrs[KERNELS])), "steps": steps,
                   "memory_plan": json.loads(str(final.attrs[PLAN]))}
    if records is not None:
        explanation["tuning"] = records.report()
    buckets = buckets_of(final)
    functions = tuple(gv.name_hint for gv, _ in exported_functions(mod))
    spread = {rows: provider.spread_costs(attention, rows) for rows in buckets.get(SPREAD, ())}
    return Lowered(executable, parameters, functions, bounds, buckets, spread, explanation)


def _generate_code(mod: tvm.IRModule, target: TargetSpec) -> Any:
    try:
        if target.kind == "cuda":
            return compile_module(mod, target, relax_pipeline=None)
        with target.to_tvm() as tvm_target:
            return tvm.compile(mod, tvm_target, relax_pipeline=None)
    except (RuntimeError, ValueError, TypeError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise CompileError(f"code generation for {target.name} failed: {why}") from error


def _parameters(mod: tvm.IRModule) -> list[Parameter]:
    recipes = recipes_of(mod)
    _, func = next(exported_functions(mod))
    return [Parameter(v.name, tuple(int(d) for d in v.ty.shape), str(v.ty.dtype),
                      recipes.get(v.name, FromCheckpoint(v.name))) for v in func.params[num_inputs(func):]]


def _kernels(mod: tvm.IRModule) -> list[dict[str, str]]:
    """Every PrimFunc of the final module with where its schedule comes from."""
    by_function = json.loads(str(mod.attrs[KERNELS]))
    sources = {call["kernel"]: call["source"] for calls in by_function.values() for call in calls}
    found = []
    for gv, func in sorted(mod.functions_items(), key=lambda item: item[0].name_hint):
        if isinstance(func, tvm.tirx.PrimFunc):
            own = (func.attrs or {}).get(SOURCE)
            found.append({"name": gv.name_hint, "source": sources.get(gv.name_hint) or str(own or "host")})
    return found
