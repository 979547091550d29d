"""Which CUDA kernel multiplies which shape: from a LinearSpec to the stages of one matmul. The kernels themselves are one
file each; the rules here come from benchmarks/gpu/kernels_matmul.py on an H200 and docs/kernels_cuda.md says how.

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
from relaxpack.schedules.kernels.cuda.many_operands import e4m3_func
from relaxpack.schedules.kernels.cuda.packing import weight_layout
from relaxpack.schedules.kernels.cuda.quantize_rows import can_quantize, padded_columns, quantize_rows
from relaxpack.schedules.kernels.cuda.quantized_tilings import bulk_tiling, group_columns_tiling, quantized_few_tiling
from relaxpack.weight_format import WeightFormat

MULTIPROCESSORS = 132
# Clusters of so many blocks, a block to each multiprocessor, that one H200 runs at once: a wave has no more of them.
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
TILE_WIDTHS = (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)       # columns of a gemm_many tile
FILL_QUANTIZED = 128            # the same for gemm_few_quant
UNPACK_ROWS = 64                # from here on a quantised weight is unpacked once before the product
E4M3_ROWS = 8                   # above so many rows, activations are rounded to fp8 in builds that do so
EVERY = 1 << 40                 # larger than any row count
DECODE_ROWS = (8, 32, 128, EVERY)
PREFILL_ROWS = (32, 64, 128, 256, 512, 1024, 2048, EVERY)
GENERIC_ROWS = (16, EVERY)

# family → body maker, and the grid its launch parameters need
FAMILIES: dict[str, tuple[Callable[..., Any], str]] = {
    "gemm_rows": (rows_body, "xy"), "gemm_few": (few_body, "x"), "gemm_many": (many_body, "x"),
    "gemm_tiles": (tiles_body, "xy")}
QUANTIZED_FAMILIES: dict[str, Callable[..., Any]] = {
    "gemm_group_columns": gemm_group_columns, "gemm_rows_quant": gemm_rows_quant, "gemm_rows_bulk": gemm_rows_bulk,
    "gemm_few_quant": gemm_few_quant, "gemm_few_bulk": gemm_few_bulk, "gemm_mixed": gemm_mixed}
Plan = tuple[str, dict[str, int]]
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
        return _one(spec, rule_plan(spec, arch), hopper)
    plan = hopper_plan if hopper and _fits_tma(spec) else generic_plan
    limits = GENERIC_ROWS if plan is generic_plan else DECODE_ROWS if spec.phase == "decode" else PREFILL_ROWS
    return _several(spec, [(limit, plan(spec.out_features, spec.in_features, limit, spec.gated)) for limit in limits])


def rule_plan(spec: LinearSpec, arch: str) -> Plan:
    """Family and tiling of the kernel for exactly `max_rows` rows; of a weight that is unpacked first, of the product."""
    assert spec.max_rows is not None
    hopper = arch == "sm_90a"
    if spec.weight.quantized and spec.max_rows <= UNPACK_ROWS:
        return quantized_plan(spec, spec.max_rows, hopper)
    plan = hopper_plan if hopper and _fits_tma(spec) else generic_plan
    return plan(spec.out_features, spec.in_features, spec.max_rows, spec.gated)


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
    few = few_tiling(n, k, rows) if rows <= 128 else None
    if few is not None and (rows <= 64 or n > 65536):       # heads write float32, which gemm_many stores without TMA
        return "gemm_few", few
    many = many_tiling(n, k, rows, gated)
    one_wave = -(-n // 128) <= MULTIPROCESSORS
    if few is not None and one_wave and few_estimate(n, k, **few) < many_estimate(n, k, rows, many["tile_n"],
                                                                                  many.get("split", 1)):
        return "gemm_few", few
    return "gemm_many", many


def _rows_plan(n: int, k: int, rows: int) -> Plan:
    """By the chains of benchmarks/gpu/norm_fusion.py: what a kernel holds of a multiprocessor also matters to the next."""
    most = 16 if n <= 8192 else 8
    warps = next(w for w in (16, 8, 4, 2, 1) if w <= most and w * 2 * 64 <= max(k, 128))
    if rows > 8:
        return "gemm_rows", {"columns": 16, "warps": warps, "unroll": 2}
    options = {"columns": 8, "warps": warps, "unroll": 2, "blocks_per_sm": 32 // warps}     # registers of 1024 threads
    if n <= 8192 and warps == 16:
        if k > 4096:
            options |= {"unroll": 4, "blocks_per_sm": 1}
        elif n > k:
            options |= {"warps": 8, "blocks_per_sm": 3}
    elif k <= 8192 and (k > 2048 or n > 65536):
        options |= {"unroll": 1, "ahead": True}
    return "gemm_rows", options


def few_tiling(n: int, k: int, rows: int) -> dict[str, int]:
    """For up to 128 rows: strips of weight rows, each cut along K into as many pieces as leave one wave of clusters and
    12 k tiles to every block. Strips have 128 rows; for up to 64 rows of x 64, where that gives no fewer blocks."""
    columns = -(-rows // 8) * 8

    def pieces(strips: int) -> int:
        return max((s for s in range(1, 9) if (s == 1 or k // 64 // s >= 12) and strips <= CLUSTERS[s]), default=1)

    wide, narrow = -(-n // 128), -(-n // 64)
    if rows <= 64 and narrow <= MULTIPROCESSORS and narrow * pieces(narrow) >= wide * pieces(wide):
        return {"columns": columns, "consumers": 1, "split": pieces(narrow), "share": 1, "blocks_per_sm": 1}
    split = pieces(wide)
    shares = split <= 4 and -(-wide // 2) <= CLUSTERS[2 * split]
    share = 2 if rows > 32 and k >= 8192 and wide > 1 and columns % 16 == 0 and shares else 1
    per_sm = 2 if wide > MULTIPROCESSORS and columns <= 64 else 1
    return {"columns": columns, "consumers": 2, "split": split, "share": share, "blocks_per_sm": per_sm}


def many_tiling(n: int, k: int, rows: int, gated: bool) -> dict[str, int]:
    width, split = _fastest(many_estimate, TILE_WIDTHS, n, k, rows, gated, k // 64)
    return {"tile_n": width, "cluster": 1, **({"split": split} if split > 1 else {})}


def keeps_bits(n: int, width: int, split: int) -> bool:
    """Whether a column has the same bits whichever tile writes it last. The last tile of a row overlaps the one before; of
    three or more pieces of K each block adds its own first, so an order depends on where in its tile a column is."""
    return split <= 2 or n % width == 0


def _fastest(estimate: Callable[[int, int, int, int, int], float], widths: tuple[int, ...], n: int, k: int, rows: int,
             gated: bool, k_tiles: int) -> tuple[int, int]:
    """Columns of a tile and pieces of K with the least estimated time; a tie is for whole tiles."""
    rows, output = min(rows, 4096), 32 if gated else 16
    found = [(estimate(n, k, rows, width, split) * (1.05 if split > 1 else 1), split, width)
             for width in widths for split in (1, 2, 3, 4)
             if width % (output * split) == 0 and (split == 1 or (k_tiles // split >= 4 and width < 256))      # 256: spills
             and keeps_bits(n, width, split)]
    _, split, width = min(found)
    return width, split


def e4m3_tiling(n: int, k: int, rows: int, gated: bool) -> dict[str, Any]:
    """For e4m3 operands: sums are added in float32 after every 128 values of K, or 256 in narrow tiles, which would wait too
    long for them. Of 208 to 240 columns neither the sums nor their halves fit."""
    widths = tuple(width for width in TILE_WIDTHS if width <= 192 or width == 256)
    width, split = _fastest(e4m3_estimate, widths, n, k, rows, gated, k // 128)
    tiling: dict[str, Any] = {"tile_n": width, "promote": 2 if width <= 128 else 1}
    return tiling | ({"split": split} if split > 1 else {"whole_store": True} if width > 128 else {})


# Microseconds on an H200, fitted to the times of 140 tilings of 1B, 7B and 8B matmuls at 128 to 1024 rows (off by 5 % in the
# mean). A wave of blocks takes what its k tiles or the bytes of the weight take, whichever is more.
def many_estimate(n: int, k: int, rows: int, width: int, split: int) -> float:
    return _in_waves(n, k, rows, width, split, 2, 0.043 + 0.00264 * width, 0.5 + 0.036 * width * (split - 1) / split)


def e4m3_estimate(n: int, k: int, rows: int, width: int, split: int) -> float:
    """Off by 6 % in the mean of 144 timings of 1B and 8B matmuls at 16 to 4096 rows."""
    k_tile = (0.08 + 0.0026 * width) * (1.08 if width > 192 else 1)
    return _in_waves(n, k, rows, width, split, 1, k_tile, 1.4 + 0.02 * width * (split - 1) / split)


def _in_waves(n: int, k: int, rows: int, width: int, split: int, size: int, k_tile: float, ending: float) -> float:
    """Numbers of `size` bytes; `k_tile`: microseconds for 128 bytes of K; `ending`: for what comes behind them in a tile."""
    tiles = -(-rows // 128) * -(-n // width)
    waves = -(-tiles // CLUSTERS[split])
    memory = size * k * (n + rows) / _bandwidth(tiles * split / waves) / waves
    return 1.2 + waves * (max(k * size / 128 / split * k_tile, memory) + ending)


def _bandwidth(blocks: float) -> float:
    """Bytes a microsecond that so many blocks read: 120 of them are needed for all that the memory gives."""
    return 3.7e6 * min(1.0, blocks / 120)


def few_estimate(n: int, k: int, columns: int, split: int, share: int, **_: int) -> float:
    """One wave of gemm_few in strips of 128."""
    product = k / 64 / split * (0.23 + 0.00136 * columns)
    reduction = columns / 128 * (2.3 + 0.46 * max(split - 3, 0)) if split > 1 else 0.0
    return (2.2 if share == 2 else 3.7) + max(product, 2 * k * n / 3.7e6) + reduction


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


def _one(spec: LinearSpec, plan: Plan, hopper: bool) -> Kernel:
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


def quantized_plan(spec: LinearSpec, rows: int, hopper: bool) -> tuple[str, dict[str, Any]]:
    """Kernel and options for up to UNPACK_ROWS rows of x and a packed weight."""
    n, k, weight = spec.out_features, spec.in_features, spec.weight
    if rows == 1 and weight.bits == 4:
        return "gemm_group_columns", group_columns_tiling(n, k, rows)
    if hopper and rows <= 8 and k >= 2048 and (weight.bits == 8 or weight.scale_dtype == "float32" or n > 65536):
        return "gemm_rows_bulk", bulk_tiling(n, k, rows, weight)
    if hopper and rows > 8 and _fits_tma(spec):
        return quantized_few_tiling(n, k, rows, weight)
    if rows <= 8 or weight.group_size == 16:
        columns, heavy = 8 if rows <= 8 else 16, weight.minimum == "stored" and weight.scale_dtype == "float32"
        if k < 2048:
            return "gemm_rows_quant", {"columns": columns, "warps": 4, "unroll": 2}
        if columns == 8 and weight.group_size == 16:
            return "gemm_rows_quant", {"columns": 8, "warps": 16, "unroll": 2, "ahead": True}
        if columns == 8 and not heavy:
            return "gemm_rows_quant", {"columns": 8, **rows_tiling(n, k, weight)}
        return "gemm_rows_quant", {"columns": columns, "warps": 8, "unroll": 4 if heavy and n <= 8192 else 2}
    strips = 2 if n >= 8192 else 1
    blocks = -(-n // (128 * strips))
    split = max(1, min(8, FILL_QUANTIZED // blocks, k // 64 // 4)) if hopper else 1
    return "gemm_few_quant", {"columns": -(-rows // 8) * 8, "strips": strips, "warps": 8, "split": split}


def rows_tiling(n: int, k: int, weight: WeightFormat) -> dict[str, Any]:
    """Tiling of gemm_rows_quant for up to 8 rows. blocks_per_sm is what decides: 65 registers instead of 64 leave a block of
    16 warps alone on its multiprocessor, which costs a third."""
    if n > 8192:
        if weight.bits == 8:
            return {"warps": 8, "unroll": 2, "blocks_per_sm": 4}
        if weight.minimum == "stored":              # two strips share the sums of x
            return {"warps": 8, "unroll": 1, "strips": 2, "blocks_per_sm": 4}
        if weight.zeros:
            return {"warps": 8, "unroll": 2, "blocks_per_sm": 4}
        return {"warps": 8, "unroll": 4, "blocks_per_sm": 3}
    if n > k:
        return {"warps": 8, "unroll": 2, "blocks_per_sm": 3}
    if weight.bits == 8:
        return {"warps": 16, "unroll": 1, "ahead": True, "blocks_per_sm": 2}
    return {"warps": 16, "unroll": 2, "blocks_per_sm": 2}


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
        convert=convert, **_norm(spec), **options)
    return Kernel((_stage(spec, func, name, _buffers(spec)),), f"rule:cuda.{family}")


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


def rounds_activations(spec: LinearSpec, arch: str) -> bool:
    """Whether this product has a kernel for fp8 activations and enough rows for it."""
    rows = spec.max_rows if spec.max_rows is not None else (32 if spec.phase == "decode" else EVERY)
    return (arch == "sm_90a" and spec.weight.name == "fp8" and rows > E4M3_ROWS and _fits_tma(spec)
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
