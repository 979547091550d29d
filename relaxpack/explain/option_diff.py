"""How two builds of one model would differ: both go through the passes, without code and without weights, so the answer
takes seconds and needs no disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relaxpack.compile.kernels import kernel_provider, require_kernels
from relaxpack.compile.one_target import lower_target
from relaxpack.compile.options import BuildOptions, build_limits
from relaxpack.compile.target_plan import plan_targets
from relaxpack.explain.bundle_diff import compare, machine_of
from relaxpack.explain.document import explain_record
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.target import parse_target


def option_differences(model: str | Path, left: BuildOptions, right: BuildOptions, target: str = "cpu") -> dict[str, Any]:
    """`facts` and `kernels` as in `bundle_diff.step_differences`, and the options that differ."""
    sides = [_explained(model, options, target) for options in (left, right)]
    a, b = (options.to_json() for options in (left, right))
    return {"options": {name: [a[name], b[name]] for name in a if a[name] != b[name]}, **compare(*sides)}


def _explained(model: str | Path, options: BuildOptions, target: str) -> dict[str, Any]:
    checkpoint = open_checkpoint(model, ignore_keys=options.ignore_config_keys, pretokenizer=options.pretokenizer)
    limits, spec = build_limits(checkpoint, options), parse_target(target)
    (plan,) = plan_targets((spec,), checkpoint, options.weights, options.activation_dtype, options.kv_dtype,
                           options.activations)
    require_kernels(checkpoint.config, limits, plan)
    provider = kernel_provider(spec, activations=plan.activations)
    lowered = lower_target(checkpoint, plan, limits, options, provider, code=False)
    found = explain_record(lowered.explanation, lowered.buckets, lowered.arena_bytes(), limits.max_context,
                           limits.prefill_chunk, machine_of(spec))
    return {**found, "parameter_bytes": lowered.parameter_bytes()}
