"""Which CUDA kernel multiplies which shape: from a LinearSpec to the stages of one matmul. The kernels themselves are one
file each; the rules here come from benchmarks/gpu/kernels_matmul.py on an H200 and docs/kernels_cuda.md says how.

A spec with `max_rows` gets one kernel for exactly that bucket, launched dependently (the next kernel starts to fetch its
weights while this one drains). Without it, one PrimFunc holds kernels for several row counts and the host picks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relaxpack.kernel_spec import Kernel, LinearSpec, Stage
from relaxpack.schedules.kernels.cuda.codes_fp8 import can_convert
from relaxpack.schedules.kernels.cuda.common import by_rows, linear_func
from relaxpack.schedules.kernels.cuda.dequantize import dequantize
from relaxpack.schedules.kernels.cuda.gemm_few import few_body
from relaxpack.schedules.kernels.cuda.gemm_few_quant import gemm_few_quant
from relaxpack.schedules.kernels.cuda.gemm_many import many_body
from relaxpack.schedules.kernels.cuda.gemm_rows import rows_body
from relaxpack.schedules.kernels.cuda.gemm_rows_quant import gemm_rows_quant
from relaxpack.schedules.kernels.cuda.gemm_tiles import tiles_body
from relaxpack.schedules.kernels.cuda.packing import weight_layout

MULTIPROCESSORS = 132
FILL = 96                       # blocks that are enough for gemm_few: the rest of the chip starts the next kernel
FILL_QUANTIZED = 128            # the same for gemm_few_quant
UNPACK_ROWS = 64                # from here on a quantised weight is unpacked once before the product
# Measured time of one wave of gemm_many by the tile's columns, in columns of the widest: narrow tiles read more from L2.
TILE_COST = {64: 84, 96: 110, 128: 138, 192: 200, 256: 256}
EVERY = 1 << 40                 # larger than any row count
DECODE_ROWS = (8, 32, 128, EVERY)
PREFILL_ROWS = (32, 64, 128, 256, 512, 1024, 2048, EVERY)
GENERIC_ROWS = (16, EVERY)

# family → body maker, and the grid its launch parameters need
FAMILIES: dict[str, tuple[Callable[..., Any], str]] = {
    "gemm_rows": (rows_body, "xy"), "gemm_few": (few_body, "x"), "gemm_many": (many_body, "x"),
    "gemm_tiles": (tiles_body, "xy")}
QUANTIZED_FAMILIES: dict[str, Callable[..., Any]] = {"gemm_rows_quant": gemm_rows_quant, "gemm_few_quant": gemm_few_quant}
Plan = tuple[str, dict[str, int]]


def linear(spec: LinearSpec, arch: str) -> Kernel:
    """Stages for one matmul on `arch`. Without Hopper's instructions mma kernels serve every row count."""
    hopper = arch == "sm_90a"
    if spec.weight.quantized:
        return _quantized(spec, hopper, spec.weight.e4m3 and can_convert(arch))
    plan = hopper_plan if hopper and _fits_tma(spec) else generic_plan
    if spec.max_rows is not None:
        return _one(spec, plan(spec.out_features, spec.in_features, spec.max_rows, spec.gated), hopper)
    limits = GENERIC_ROWS if plan is generic_plan else DECODE_ROWS if spec.phase == "decode" else PREFILL_ROWS
    return _several(spec, [(limit, plan(spec.out_features, spec.in_features, limit, spec.gated)) for limit in limits])


def _fits_tma(spec: LinearSpec) -> bool:
    """Rows of y must be multiples of 16 bytes for vector and TMA stores."""
    return spec.out_features % (16 if spec.gated else 8) == 0


def generic_plan(n: int, k: int, rows: int, gated: bool) -> Plan:
    """sm_80 and newer."""
    return _rows_plan(n, k, rows) if rows <= 16 else ("gemm_tiles", {})


def hopper_plan(n: int, k: int, rows: int, gated: bool) -> Plan:
    """Family and tiling for exactly `rows` rows (or up to them) of x, weights `[n, k]`. At 8 rows and fewer gemm_few is as
    fast alone, but in a chain its full shared memory keeps the next kernel from starting early."""
    if rows <= 8:
        return _rows_plan(n, k, rows)
    if rows <= 128 or (rows <= 256 and (gated or (n <= 2048 and k >= 4096))):
        return "gemm_few", few_tiling(n, k, rows, gated)
    return "gemm_many", many_tiling(n, rows, gated)


def _rows_plan(n: int, k: int, rows: int) -> Plan:
    most = 16 if n <= 8192 else 8
    warps = next(w for w in (16, 8, 4, 2, 1) if w <= most and w * 2 * 64 <= max(k, 128))
    return "gemm_rows", {"columns": 8 if rows <= 8 else 16, "warps": warps, "unroll": 2}


def few_tiling(n: int, k: int, rows: int, gated: bool = False) -> dict[str, int]:
    """Enough blocks to fill most of the chip: strips of 128 weight rows, blocks of rows, then pieces of K."""
    columns = -(-rows // 8) * 8 if rows <= 128 else 256 if gated else 128
    strips = -(-n // 128)
    split = max(1, min(8, FILL // (strips * -(-min(rows, 256) // columns)), k // 64 // 4))
    share = 2 if rows > 32 and k >= 8192 and split <= 4 and strips > 1 and columns % 16 == 0 and rows <= 128 else 1
    per_sm = 2 if strips > MULTIPROCESSORS and columns <= 64 else 1
    return {"columns": columns, "consumers": 2, "split": split, "share": share, "blocks_per_sm": per_sm}


def many_tiling(n: int, rows: int, gated: bool) -> dict[str, int]:
    """Columns of a tile by waves of tiles over the chip, times what a tile of that width costs."""
    rows = min(rows, 4096)
    if gated:
        return {"tile_n": 128 if rows <= 2048 else 256, "cluster": 1}

    def cost(tile_n: int) -> int:
        return -(-(-(-rows // 128) * -(-n // tile_n)) // MULTIPROCESSORS) * TILE_COST[tile_n]

    return {"tile_n": min(TILE_COST, key=cost), "cluster": 1}


def _body(spec: LinearSpec, plan: Plan, **more: bool) -> Any:
    family, options = plan
    return FAMILIES[family][0](spec.out_features, spec.in_features, spec.activation_dtype, spec.out_dtype, bias=spec.bias,
                               residual=spec.residual, glu=spec.glu, **options, **more)


def _one(spec: LinearSpec, plan: Plan, hopper: bool) -> Kernel:
    family, options = plan
    more = {} if family == "gemm_tiles" or not hopper else {"dependent_launch": True}
    cluster = {"gemm_few": options.get("split", 1) * options.get("share", 1),
               "gemm_many": options.get("split", 1) * options.get("cluster", 1)}
    marks = "".join(f"_{key[:2]}{value}" for key, value in options.items())
    return _kernel(spec, f"{family}{marks}", _body(spec, plan, **more), grid=FAMILIES[family][1],
                   cluster=cluster.get(family, 1), **more)


def _several(spec: LinearSpec, plans: list[tuple[int, Plan]]) -> Kernel:
    """One PrimFunc for every row count; neighbours with equal plans are joined."""
    joined = [entry for entry, after in zip(plans, [*plans[1:], None], strict=True)
              if after is None or after[1] != entry[1]]
    body = by_rows([(limit, _body(spec, plan)) for limit, plan in joined])
    return _kernel(spec, f"gemm_any_{spec.phase}", body)


def _kernel(spec: LinearSpec, family: str, body: Any, **launch: Any) -> Kernel:
    name = _name(spec, family)
    func = linear_func(body, spec.out_features, spec.in_features, spec.activation_dtype, spec.out_dtype, name,
                       bias=spec.bias, residual=spec.residual, glu=spec.glu, **launch)
    source = "_".join(family.split("_")[:2])
    return Kernel((Stage(func, name, ("x", "weight", *_extras(spec)), ("y",)),), f"rule:cuda.{source}")


def quantized_plan(spec: LinearSpec, rows: int, hopper: bool) -> tuple[str, dict[str, Any]]:
    """Kernel and options for up to UNPACK_ROWS rows of x and a packed weight."""
    n, k, weight = spec.out_features, spec.in_features, spec.weight
    if rows <= 8 or weight.group_size == 16:
        columns, heavy = 8 if rows <= 8 else 16, weight.minimum == "stored" and weight.scale_dtype == "float32"
        if k < 2048:
            return "gemm_rows_quant", {"columns": columns, "warps": 4, "unroll": 2}
        if columns == 8 and not heavy and (n <= 8192 or weight.group_size == 16):
            return "gemm_rows_quant", {"columns": 8, "warps": 16, "unroll": 2, "ahead": True}
        return "gemm_rows_quant", {"columns": columns, "warps": 8, "unroll": 4 if heavy and n <= 8192 else 2}
    strips = 2 if n >= 8192 else 1
    blocks = -(-n // (128 * strips))
    split = max(1, min(8, FILL_QUANTIZED // blocks, k // 64 // 4)) if hopper else 1
    return "gemm_few_quant", {"columns": -(-rows // 8) * 8, "strips": strips, "warps": 8, "split": split}


def _quantized(spec: LinearSpec, hopper: bool, convert: bool) -> Kernel:
    rows = spec.max_rows if spec.max_rows is not None else (32 if spec.phase == "decode" else EVERY)
    if rows > UNPACK_ROWS:
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
        convert=convert, **options)
    return Kernel((Stage(func, name, ("x", *_buffers(spec), *_extras(spec)), ("y",)),), f"rule:cuda.{family}")


def unpacked(spec: LinearSpec, hopper: bool, chosen: Plan | None = None) -> Kernel:
    """Unpack the weight once, then multiply: the unpacked copy is small against the work of many rows. `chosen`: how to
    multiply, in place of the rule's plan (specs with `max_rows`)."""
    n, k, dtype = spec.out_features, spec.in_features, spec.activation_dtype
    name = f"dequantize_{spec.weight.name}_{n}x{k}_{dtype}"
    unpack = Stage(dequantize(n, k, spec.weight, dtype, name=name), name, _buffers(spec), ("plain",))
    plan = hopper_plan if hopper and _fits_tma(spec) else generic_plan
    if spec.max_rows is not None:
        multiply = _one(spec, chosen or plan(n, k, spec.max_rows, spec.gated), hopper)
    else:
        limits = (128, 512, 2048, EVERY) if plan is hopper_plan else (EVERY,)
        multiply = _several(spec, [(limit, plan(n, k, limit, spec.gated)) for limit in limits])
    (stage,) = multiply.stages
    inputs = tuple("plain" if name == "weight" else name for name in stage.inputs)
    return Kernel((unpack, Stage(stage.func, stage.name, inputs, stage.outputs)),
                  "rule:cuda.dequantize+" + multiply.source.removeprefix("rule:cuda."), {"plain": ((n, k), dtype)})


def _buffers(spec: LinearSpec) -> tuple[str, ...]:
    layout = weight_layout(spec.weight, spec.out_features, spec.in_features, spec.gated)
    return tuple(f"weight.{suffix}" for suffix, _, _ in layout.buffers)


def _extras(spec: LinearSpec) -> tuple[str, ...]:
    return (*(["bias"] if spec.bias else []), *(["residual"] if spec.residual else []))


def _name(spec: LinearSpec, family: str) -> str:
    flags = "_bias" * spec.bias + "_residual" * spec.residual + (f"_{spec.glu}" if spec.glu else "")
    out = "_f32" if spec.out_dtype == "float32" else ""
    return f"{family}_{spec.out_features}x{spec.in_features}_{spec.activation_dtype}{out}{flags}"
