"""Which CUDA kernel multiplies which shape: from a LinearSpec to the stages of one matmul. The kernels themselves are one
file each; the numbers here come from benchmarks/gpu/kernels_matmul.py and say so in docs/kernels_cuda.md.
"""

from __future__ import annotations

from relaxpack.kernel_spec import Kernel, LinearSpec, Stage
from relaxpack.schedules.kernels.cuda.dequantize import dequantize
from relaxpack.schedules.kernels.cuda.gemm_few import gemm_few
from relaxpack.schedules.kernels.cuda.gemm_many import gemm_many
from relaxpack.schedules.kernels.cuda.gemm_rows import gemm_rows
from relaxpack.schedules.kernels.cuda.gemm_rows_quant import gemm_rows_quant
from relaxpack.schedules.kernels.cuda.packing import weight_layout

MULTIPROCESSORS = 132
ROWS_LIMIT = 8            # up to here the register kernel reads weights as fast as memory gives them


def linear(spec: LinearSpec, arch: str) -> Kernel:
    """Stages for one matmul on `arch`. Without Hopper's instructions the register kernels serve every row count."""
    hopper = arch == "sm_90a"
    rows = spec.max_rows if spec.max_rows is not None else (128 if spec.phase == "decode" else 1 << 20)
    if spec.weight.quantized:
        return _quantized_many(spec) if hopper and rows > 64 and spec.phase == "prefill" else _quantized_few(spec, rows)
    if not hopper or rows <= ROWS_LIMIT:
        return _one(spec, gemm_rows, "gemm_rows", columns=_columns(rows, 16), warps=8,
                    unroll=2)
    return _few(spec, rows) if rows <= 128 else _many(spec)


def _columns(rows: int, most: int) -> int:
    return min(most, -(-rows // 8) * 8)


def _few(spec: LinearSpec, rows: int) -> Kernel:
    n, k = spec.out_features, spec.in_features
    consumers = 2 if n >= 16384 else 1
    strips = -(-n // (64 * consumers))
    split = 1
    while split < 8 and strips * split < 1.5 * MULTIPROCESSORS and k // 64 // (split * 2) >= 4:
        split *= 2
    return _one(spec, gemm_few, "gemm_few", columns=_columns(rows, 128), consumers=consumers, split=split,
                blocks_per_sm=1 if rows > 64 else 2)


def _many(spec: LinearSpec) -> Kernel:
    n = spec.out_features
    tile = 128 if n <= 4096 else 256
    return _one(spec, gemm_many, "gemm_many", tile_n=tile)


def _one(spec: LinearSpec, make: object, family: str, **options: int) -> Kernel:
    name = _name(spec, family, options)
    func = make(spec.out_features, spec.in_features, spec.activation_dtype, spec.out_dtype, bias=spec.bias,  # type: ignore[operator]
                residual=spec.residual, swiglu=spec.swiglu, name=name, **options)
    return Kernel((Stage(func, name, ("x", "weight", *_extras(spec)), ("y",)),), f"rule:cuda.{family}")


def _quantized_few(spec: LinearSpec, rows: int) -> Kernel:
    options = {"columns": _columns(rows, 16), "warps": 8}
    name = _name(spec, "gemm_rows_quant", options)
    func = gemm_rows_quant(spec.out_features, spec.in_features, spec.weight, spec.activation_dtype, spec.out_dtype,
                           bias=spec.bias, residual=spec.residual, swiglu=spec.swiglu, name=name, **options)
    return Kernel((Stage(func, name, ("x", *_buffers(spec), *_extras(spec)), ("y",)),), "rule:cuda.gemm_rows_quant")


def _quantized_many(spec: LinearSpec) -> Kernel:
    """Unpack the weight once, then multiply: the unpacked copy is small against the work of many rows."""
    n, k, dtype = spec.out_features, spec.in_features, spec.activation_dtype
    name = f"dequantize_{spec.weight.name}_{n}x{k}_{dtype}"
    unpack = Stage(dequantize(n, k, spec.weight, dtype, name=name), name, _buffers(spec), ("plain",))
    multiply = _many(spec)
    (stage,) = multiply.stages
    inputs = tuple("plain" if name == "weight" else name for name in stage.inputs)
    return Kernel((unpack, Stage(stage.func, stage.name, inputs, stage.outputs)), "rule:cuda.dequantize+gemm_many",
                  {"plain": ((n, k), dtype)})


def _buffers(spec: LinearSpec) -> tuple[str, ...]:
    layout = weight_layout(spec.weight, spec.out_features, spec.in_features, spec.swiglu)
    return tuple(f"weight.{suffix}" for suffix, _, _ in layout.buffers)


def _extras(spec: LinearSpec) -> tuple[str, ...]:
    return (*(["bias"] if spec.bias else []), *(["residual"] if spec.residual else []))


def _name(spec: LinearSpec, family: str, options: dict[str, int]) -> str:
    marks = "".join(f"_{key[:2]}{value}" for key, value in options.items())
    weight = f"_{spec.weight.name}" if spec.weight.quantized and "quant" in family else ""
    flags = "".join(f"_{flag}" for flag in ("bias", "residual", "swiglu") if getattr(spec, flag))
    out = "_f32" if spec.out_dtype == "float32" else ""
    return f"{family}{weight}_{spec.out_features}x{spec.in_features}_{spec.activation_dtype}{out}{flags}{marks}"
