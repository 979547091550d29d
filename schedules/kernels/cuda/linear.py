"""From a LinearSpec to the stages of one CUDA matmul. Which kernel multiplies which shape is said by `linear_rules.py`; the
kernels themselves are one file each.

A spec with `max_rows` gets one kernel for exactly that bucket, launched dependently (the next kernel starts to fetch its
weights while this one drains). Without it, one PrimFunc holds kernels for several row counts and the host picks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relaxpack.kernel_spec import NORM_GROUP, Kernel, LinearSpec, Stage
from relaxpack.schedules.kernels.cuda.codes_fp8 import can_convert
from relaxpack.schedules.kernels.cuda.common import by_rows, linear_func
from relaxpack.schedules.kernels.cuda.dequantize import dequantize
from relaxpack.schedules.kernels.cuda.gemm_few import few_body
from relaxpack.schedules.kernels.cuda.gemm_few_bulk import gemm_few_bulk
from relaxpack.schedules.kernels.cuda.gemm_few_quant import gemm_few_quant
from relaxpack.schedules.kernels.cuda.gemm_group_columns import gemm_group_columns
from relaxpack.schedules.kernels.cuda.gemm_many import many_body
from relaxpack.schedules.kernels.cuda.gemm_mixed import gemm_mixed
from relaxpack.schedules.kernels.cuda.gemm_rows import rows_body
from relaxpack.schedules.kernels.cuda.gemm_rows_bulk import gemm_rows_bulk
from relaxpack.schedules.kernels.cuda.gemm_rows_quant import gemm_rows_quant
from relaxpack.schedules.kernels.cuda.gemm_tiles import tiles_body
from relaxpack.schedules.kernels.cuda.linear_rules import (
    DECODE_ROWS,
    E4M3_ROWS,
    EVERY,
    GENERIC_ROWS,
    PREFILL_ROWS,
    Plan,
    e4m3_tiling,
    fits_tma,
    generic_plan,
    hopper_plan,
    quantized_plan,
    rule_plan,
    unpacks,
)
from relaxpack.schedules.kernels.cuda.many_operands import e4m3_func
from relaxpack.schedules.kernels.cuda.packing import weight_layout
from relaxpack.schedules.kernels.cuda.quantize_rows import can_quantize, padded_columns, quantize_rows

# family → body maker, and the grid its launch parameters need
FAMILIES: dict[str, tuple[Callable[..., Any], str]] = {
    "gemm_rows": (rows_body, "xy"), "gemm_few": (few_body, "x"), "gemm_many": (many_body, "x"),
    "gemm_tiles": (tiles_body, "xy")}
QUANTIZED_FAMILIES: dict[str, Callable[..., Any]] = {
    "gemm_group_columns": gemm_group_columns, "gemm_rows_quant": gemm_rows_quant, "gemm_rows_bulk": gemm_rows_bulk,
    "gemm_few_quant": gemm_few_quant, "gemm_few_bulk": gemm_few_bulk, "gemm_mixed": gemm_mixed}
# How the names of families begin that can have a norm inside, and those of their stages.
NORM_FAMILIES = ("gemm_rows", "gemm_group_columns")


def linear(spec: LinearSpec, arch: str, activations: str = "float") -> Kernel:
    """Stages for one matmul on `arch`. Without Hopper's instructions mma kernels serve every row count. `activations`: "fp8"
    where they may be rounded to it."""
    hopper = arch == "sm_90a"
    if spec.weight.quantized:
        if activations == "fp8" and rounds_activations(spec, arch):
            return e4m3(spec)
        return _quantized(spec, hopper, spec.weight.e4m3 and can_convert(arch))
    if spec.max_rows is not None:
        return planned(spec, rule_plan(spec, arch), hopper)
    plan = hopper_plan if hopper and fits_tma(spec) else generic_plan
    limits = GENERIC_ROWS if plan is generic_plan else DECODE_ROWS if spec.phase == "decode" else PREFILL_ROWS
    return _several(spec, [(limit, plan(spec.out_features, spec.in_features, limit, spec.gated)) for limit in limits])


def folds_norm(spec: LinearSpec, plain: str) -> bool:
    """Whether the kernel that was chosen without the norm, whose family or stage is named `plain`, can have it: those for
    few rows. In float16 w * x may overflow where the normed x does not, so norms stay what they are there."""
    features = spec.out_features if spec.prepares_norm else spec.in_features
    return spec.activation_dtype == "bfloat16" and spec.max_rows is not None and features % NORM_GROUP == 0 \
        and plain.startswith(NORM_FAMILIES) and not (spec.prepares_norm and spec.norm_epsilon is not None) \
        and (not spec.prepares_norm or (spec.out_dtype == spec.activation_dtype and not spec.gated))


def _norm(spec: LinearSpec) -> dict[str, Any]:
    """Options of the kernels that know norms."""
    return {key: getattr(spec, key) for key in ("norm_epsilon", "prepares_norm") if getattr(spec, key)}


def _body(spec: LinearSpec, plan: Plan, **more: Any) -> Any:
    family, options = plan
    return FAMILIES[family][0](spec.out_features, spec.in_features, spec.activation_dtype, spec.out_dtype, bias=spec.bias,
                               residual=spec.residual, glu=spec.glu, **options, **more)


def planned(spec: LinearSpec, plan: Plan, hopper: bool) -> Kernel:
    """One kernel as planned, for a spec with `max_rows` and a float weight."""
    family, options = plan
    more = {} if family == "gemm_tiles" or not hopper else {"dependent_launch": True}
    cluster = {"gemm_few": options.get("split", 1) * options.get("share", 1),
               "gemm_many": options.get("split", 1) * options.get("cluster", 1)}
    marks = "".join(f"_{key[:2]}{value}" for key, value in options.items())
    return _kernel(spec, f"{family}{marks}", _body(spec, plan, **_norm(spec), **more), grid=FAMILIES[family][1],
                   cluster=cluster.get(family, 1), **more)


def _several(spec: LinearSpec, plans: list[tuple[int, Plan]]) -> Kernel:
    """One PrimFunc for every row count."""
    body = by_rows([(limit, _body(spec, plan)) for limit, plan in joined(plans)])
    return _kernel(spec, f"gemm_any_{spec.phase}", body)


def joined(plans: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Plans by row limit without those that the next one equals."""
    return [entry for entry, after in zip(plans, [*plans[1:], None], strict=True) if after is None or after[1] != entry[1]]


def _kernel(spec: LinearSpec, family: str, body: Any, **launch: Any) -> Kernel:
    name = _name(spec, family)
    func = linear_func(body, spec.out_features, spec.in_features, spec.activation_dtype, spec.out_dtype, name,
                       bias=spec.bias, residual=spec.residual, glu=spec.glu, **_norm(spec), **launch)
    source = "_".join(family.split("_")[:2])
    return Kernel((_stage(spec, func, name, ("weight",)),), f"rule:cuda.{source}")


def _quantized(spec: LinearSpec, hopper: bool, convert: bool) -> Kernel:
    rows = spec.max_rows if spec.max_rows is not None else (32 if spec.phase == "decode" else EVERY)
    if unpacks(spec, rows, hopper):
        return unpacked(spec, hopper)
    return packed(spec, quantized_plan(spec, rows, hopper), hopper, convert)


def packed(spec: LinearSpec, plan: tuple[str, dict[str, Any]], hopper: bool, convert: bool) -> Kernel:
    """A kernel that reads the packed weight. `convert`: the GPU has an instruction from fp8."""
    family, options = plan
    marks = "".join(f"_{key[:2]}{value}" for key, value in options.items())
    name = _name(spec, f"{family}_{spec.weight.name}{marks}")
    func = QUANTIZED_FAMILIES[family](
        spec.out_features, spec.in_features, spec.weight, spec.activation_dtype, spec.out_dtype, bias=spec.bias,
        residual=spec.residual, glu=spec.glu, name=name, dependent_launch=hopper and spec.max_rows is not None,
        convert=convert, **_norm(spec), **options)
    return Kernel((_stage(spec, func, name, _buffers(spec)),), f"rule:cuda.{family}")


def unpacked(spec: LinearSpec, hopper: bool, chosen: Plan | None = None) -> Kernel:
    """Unpack the weight once, then multiply: the unpacked copy is small against the work of many rows. `chosen`: how to
    multiply, in place of the rule's plan (specs with `max_rows`)."""
    n, k, dtype = spec.out_features, spec.in_features, spec.activation_dtype
    name = f"dequantize_{spec.weight.name}_{n}x{k}_{dtype}"
    unpack = Stage(dequantize(n, k, spec.weight, dtype, name=name), name, _buffers(spec), ("plain",))
    plan = hopper_plan if hopper and fits_tma(spec) else generic_plan
    if spec.max_rows is not None:
        multiply = planned(spec, chosen or plan(n, k, spec.max_rows, spec.gated), hopper)
    else:
        limits = (128, 512, 2048, EVERY) if plan is hopper_plan else (EVERY,)
        multiply = _several(spec, [(limit, plan(n, k, limit, spec.gated)) for limit in limits])
    (stage,) = multiply.stages
    inputs = tuple("plain" if name == "weight" else name for name in stage.inputs)
    return Kernel((unpack, Stage(stage.func, stage.name, inputs, stage.outputs)),
                  "rule:cuda.dequantize+" + multiply.source.removeprefix("rule:cuda."), {"plain": ((n, k), dtype)})


def rounds_activations(spec: LinearSpec, arch: str) -> bool:
    """Whether this product has a kernel for fp8 activations and enough rows for it."""
    rows = spec.max_rows if spec.max_rows is not None else (32 if spec.phase == "decode" else EVERY)
    return (arch == "sm_90a" and spec.weight.name == "fp8" and rows > E4M3_ROWS and fits_tma(spec)
            and can_quantize(spec.in_features) and spec.norm_epsilon is None and not spec.prepares_norm)


def e4m3(spec: LinearSpec) -> Kernel:
    """Quantise x, then multiply codes with codes."""
    n, k, dtype, rows = spec.out_features, spec.in_features, spec.activation_dtype, spec.max_rows
    early: dict[str, Any] = {} if rows is None else {"dependent_launch": True}
    epilogue: dict[str, Any] = {"bias": spec.bias, "residual": spec.residual, "glu": spec.glu}
    name, codes = f"quantize_rows_{k}_{dtype}{'_early' if early else ''}", ("x_codes", "x_scales")
    quantize = Stage(quantize_rows(k, dtype, name=name, **early), name, ("x",), codes)

    def body(tiling: dict[str, Any]) -> Any:
        return many_body(n, k, dtype, spec.out_dtype, e4m3=True, **epilogue, **tiling, **early)

    if rows is None:
        plans = [(limit, e4m3_tiling(n, k, limit, spec.gated)) for limit in PREFILL_ROWS if limit >= 128]
        chosen = by_rows([(limit, body(plan)) for limit, plan in joined(plans)])
        name, cluster = _name(spec, "gemm_any_e4m3"), 1
    else:
        tiling = e4m3_tiling(n, k, rows, spec.gated)
        marks = "".join(f"_{key[:2]}{value}" for key, value in tiling.items())
        name, chosen, cluster = _name(spec, f"gemm_many_e4m3{marks}"), body(tiling), tiling.get("split", 1)
    func = e4m3_func(chosen, n, k, dtype, spec.out_dtype, name, cluster=cluster, **epilogue, **early)
    stage = _stage(spec, func, name, _buffers(spec))
    multiply = replace(stage, inputs=(*codes, *stage.inputs[1:]))
    return Kernel((quantize, multiply), "rule:cuda.quantize_rows+gemm_many_e4m3",
                  {"x_codes": (("t", padded_columns(k)), "uint8"), "x_scales": (("t",), "float32")})


def _buffers(spec: LinearSpec) -> tuple[str, ...]:
    layout = weight_layout(spec.weight, spec.out_features, spec.in_features, spec.gated)
    return tuple(f"weight.{suffix}" for suffix, _, _ in layout.buffers)


def _stage(spec: LinearSpec, func: Any, name: str, weight: tuple[str, ...]) -> Stage:
    extras = {"bias": spec.bias, "residual": spec.residual, "norm_weight": spec.prepares_norm,
              "squares": spec.norm_epsilon is not None}
    outputs = ("y", "scaled", "squares") if spec.prepares_norm else ("y",)
    inputs = ("x", *weight, *(key for key, there in extras.items() if there))
    # The kernels for few rows read a residual before they write, in the thread that writes there.
    over = spec.residual and name.startswith(NORM_FAMILIES) and spec.out_dtype == spec.activation_dtype
    return Stage(func, name, inputs, outputs, overwrites=(("residual", "y"),) if over else ())


def _name(spec: LinearSpec, family: str) -> str:
    flags = "_bias" * spec.bias + "_residual" * spec.residual + (f"_{spec.glu}" if spec.glu else "")
    flags += "_prepares_norm" * spec.prepares_norm
    if spec.norm_epsilon is not None:
        flags += f"_norm{spec.norm_epsilon:g}".replace("-", "m").replace(".", "p").replace("+", "")
    out = "_f32" if spec.out_dtype == "float32" else ""
    return f"{family}_{spec.out_features}x{spec.in_features}_{spec.activation_dtype}{out}{flags}"
