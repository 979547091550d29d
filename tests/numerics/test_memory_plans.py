"""Memory plans of whole models: at most 1.05 of the lower bound, never above TVM's planner, and what a graph allocates is
what the manifest will say. Passes only; no code is generated.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.compile.kernels import attention_spec, kernel_provider
from relaxpack.kernel_spec import KernelProvider
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.memory_plan import PLAN, arena_bytes
from relaxpack.passes.pipeline import phases, run_phases
from relaxpack.passes.rewrite import is_op
from relaxpack.passes.step_table import step_table
from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.export import BuildLimits, export_model
from relaxpack.relax_models.rope import RopeConfig
from relaxpack.schedules.rest import cpu_elementwise
from relaxpack.step_costs import floor_bytes
from relaxpack.target import parse_target
from tests.helpers.model_shapes import SHAPES, formats_of
from tests.helpers.plain_kernels import PlainKernels
from tvm import relax

TINY = ModelConfig("llama", 64, 160, 3, 4, 2, 16, 512, 1e-5, 128, RopeConfig("default", 1e4, 16, 128), (None,) * 3, True,
                   True, False, False, False)


def lowered(config: ModelConfig, provider: KernelProvider, weights: tuple[str, str], kv: str, pipeline: PipelineConfig,
            limits: BuildLimits, tvm_plan: bool = False) -> tuple[tvm.IRModule, tvm.IRModule]:
    """(the module after phase lower, after finalize)."""
    all_phases = phases(provider, attention_spec(config, limits, "float32", kv), formats_of(config, *weights), pipeline,
                        cpu_elementwise)
    if tvm_plan:
        all_phases = [(name, [relax.transform.StaticPlanBlockMemory() if one.info.name == "PlanMemory" else one
                              for one in passes]) for name, passes in all_phases]
    seen: dict[str, tvm.IRModule] = {}
    mod = export_model(config, limits, "float32", kv, device_sampling=pipeline.cuda_graph)
    final = run_phases(mod, parse_target("cpu").to_tvm(), all_phases,
                       lambda phase, after, _: seen.setdefault(phase, after) and None)
    return seen["lower"], final


def plan_of(final: tvm.IRModule) -> dict[str, Any]:
    return json.loads(str(final.attrs[PLAN]))  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", SHAPES)
def test_published_shapes_on_a_cpu(model: str) -> None:
    provider = kernel_provider(parse_target("cpu"))
    args = (SHAPES[model], provider, ("q8_0", "q4_1"), "float16", PipelineConfig(), BuildLimits(2048))
    before, final = lowered(*args)
    plan = plan_of(final)
    live = max(function["live_bytes"] for function in plan.values())
    assert live <= arena_bytes(plan) <= 1.05 * live
    theirs = arena_bytes(plan_of(lowered(*args, tvm_plan=True)[1]))
    assert arena_bytes(plan) < 0.6 * theirs

    decode = step_table(before)["decode"]
    moved = sum(c["weight_bytes"] + c["row_bytes"] + 1024 * c["context_bytes"] for c in decode)
    assert floor_bytes(decode, 1, 1024) <= moved <= 1.03 * floor_bytes(decode, 1, 1024)
    sources = {str(f.attrs["relaxpack.source"]) for f in before.functions.values()
               if f.attrs and "relaxpack.source" in f.attrs}
    assert max(c["depth"] for c in decode) == len(decode)              # one chain: nothing could run side by side
    assert sources <= {"rule:cpu.elementwise"}                        # no fallback is left


@pytest.mark.parametrize("buckets", [((1, 4), (8, 16)), ((1, 2, 4), ())], ids=str)
def test_a_graph_allocates_what_the_plan_says(buckets: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    pipeline = PipelineConfig(decode_buckets=buckets[0], prefill_buckets=buckets[1], cuda_graph=True)
    _, final = lowered(TINY, PlainKernels(), ("f32", "f32"), "float32", pipeline, BuildLimits(64, 4, 16))
    (graph,) = [f for gv, f in final.functions_items() if gv.name_hint == "cuda_graph_alloc"]
    calls = [b.value for block in graph.body.blocks for b in block.bindings]
    allocated = [v for v in calls if is_op(v, "relax.vm.alloc_storage") or is_op(v, "relax.memory.alloc_storage")]
    sizes = [next(int(arg.values[0]) for arg in v.args if isinstance(arg, relax.ShapeExpr)) for v in allocated]
    assert sizes and sum(sizes) == arena_bytes(plan_of(final))
    live = max(function["live_bytes"] for function in plan_of(final).values())
    assert live <= sum(sizes) <= 1.5 * live       # plain kernels overwrite nothing, so the bound is out of reach
