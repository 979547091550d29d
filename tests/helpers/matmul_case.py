"""Runs matmul-side CUDA kernels (linear, norm, embedding, dequantise) on the emulator, and makes their inputs and
references. Shapes must be small; real speed and wgmma kernels are for the tests marked `gpu`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import relaxpack.tvm_setup  # noqa: F401  isort: skip
import tvm
from relaxpack.schedules.cuda_compile import compile_module, device_modules
from relaxpack.schedules.kernels.cuda.packing import pack, row_order, weight_layout
from relaxpack.target import parse_target
from relaxpack.weight_format import FORMATS, LARGEST_ZERO, QuantizedTensor
from tests.helpers import cuda_emulator
from tests.helpers.cuda_harness import generate_source, tensor_maps

NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# Largest relative error ‖out - reference‖ / ‖reference‖ by the dtype of the output.
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 2e-6}


def _lop3(out: list[str], inp: list[str], mnemonic: str) -> str:
    table = int(mnemonic.split(",")[-1].strip().rstrip(";"), 0)
    terms = [f"({'' if i & 4 else '~'}({inp[0]}) & {'' if i & 2 else '~'}({inp[1]}) & {'' if i & 1 else '~'}({inp[2]}))"
             for i in range(8) if table >> i & 1]
    return f"{{ uint32_t r = {' | '.join(terms)}; {out[0]} = r; }}"


def _from_e4m3(out: list[str], inp: list[str], mnemonic: str) -> str:
    """From the definition of the format, not by the trick of the kernels."""
    return (f"{{ uint32_t r = 0; for (int h = 0; h < 2; ++h) {{ int c = (uint32_t)({inp[0]}) >> 8 * h & 255; "
            "int e = c >> 3 & 15; float v = e ? ldexpf(1 + (c & 7) / 8.0f, e - 7) : ldexpf((c & 7) / 8.0f, -6); "
            f"r |= (uint32_t)half(c & 128 ? -v : v).bits << 16 * h; }} {out[0]} = r; }}")


cuda_emulator.RULES.insert(0, (r"cvt\.rn\.f16x2\.e4m3x2", _from_e4m3))
cuda_emulator.RULES.insert(0, (r"lop3\.b32", _lop3))


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(NUMPY[dtype])


def random_quantized(rng: np.random.Generator, name: str, n: int, k: int) -> QuantizedTensor:
    """Random codes over the whole range of a format, positive scales, minimums of both signs."""
    fmt = FORMATS[name]
    low, high = {"q4_0": (0, 16), "q4_1": (0, 16), "q4_k": (0, 16), "q4_128": (0, 16), "q5_0": (-16, 16),
                 "q5_1": (0, 32), "q5_k": (0, 32), "q6_k": (-32, 32), "q8_0": (-128, 128)}[name]
    codes = rng.integers(low, high, (n, k)).astype(np.int8 if fmt.signed else np.uint8)
    groups = (n, fmt.groups(k))
    scales = (rng.random(groups) * 0.02 + 0.001).astype(fmt.scale_dtype)
    minimums = (rng.standard_normal(groups) * 0.05).astype(fmt.scale_dtype) if fmt.minimum == "stored" else None
    zeros = rng.integers(0, LARGEST_ZERO + 1, groups).astype(np.uint8) if fmt.zeros else None
    return QuantizedTensor(fmt, codes, scales, minimums, zeros)


def random_weight(rng: np.random.Generator, name: str, n: int, k: int) -> QuantizedTensor:
    """`random_quantized`, fp8 formats included (no NaN)."""
    fmt = FORMATS[name]
    if not fmt.e4m3:
        return random_quantized(rng, name, n, k)
    codes = (rng.integers(0, 127, (n, k)) + 128 * rng.integers(0, 2, (n, k))).astype(np.uint8)
    return QuantizedTensor(fmt, codes, (rng.random((n, fmt.groups(k))) * 0.002 + 0.0001).astype(np.float32))


def late_buffers(options: dict[str, Any]) -> tuple[str, ...]:
    """What the kernel before writes, for `emulate`."""
    if not options.get("dependent_launch"):
        return ()
    return ("x", "residual") if options.get("residual") else ("x",)


def quantized_product(rng: np.random.Generator, kernel: Any, weight: QuantizedTensor, x: np.ndarray,
                      options: dict[str, Any], grid: tuple[int, ...], threads: int,
                      becomes: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(float32 outputs of `kernel` for random bias and residual where `options` say so, float64 reference). `becomes`: the
    weight that the kernel is expected to multiply, where that is not exactly the true one."""
    (n, k), t, glu = weight.shape, len(x), options.get("glu")
    dtype = {np.dtype(kind): name for name, kind in NUMPY.items()}[x.dtype]
    out = n // 2 if glu else n
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    residual = random_array(rng, (t, out), dtype) if options.get("residual") else None
    y = poisoned((t, out), "float32")
    emulate(kernel(n, k, weight.format, dtype, "float32", **options), grid, threads, machine_code=False,
            cluster=options.get("split", 1), late=late_buffers(options), x=x, y=y, t=t,
            **pack(weight_layout(weight.format, n, k, glu is not None), weight),
            **({} if bias is None else {"bias": bias[row_order(n, glu is not None)]}),
            **({} if residual is None else {"residual": residual}))
    return y, reference_linear(x, weight if becomes is None else becomes, bias, residual, glu)


def reference_linear(x: np.ndarray, weight: np.ndarray | QuantizedTensor, bias: np.ndarray | None = None,
                     residual: np.ndarray | None = None, glu: str | None = None) -> np.ndarray:
    """float64 result for a canonical weight `[N, K]` (gate rows then up rows with glu)."""
    plain = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    y = x.astype(np.float64) @ plain.astype(np.float64).T
    if bias is not None:
        y = y + bias
    if glu is not None:
        gate, up = np.split(y, 2, axis=1)
        y = activation(glu, gate) * up
    return y if residual is None else y + residual.astype(np.float64)


def activation(glu: str, gate: np.ndarray) -> np.ndarray:
    """What the gate goes through: silu, or GELU with the tanh approximation."""
    if glu == "swiglu":
        return gate / (1 + np.exp(-gate))
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))


def relative_error(got: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - reference) / np.linalg.norm(reference))


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.full(shape, np.nan, NUMPY[dtype])


def emulate(func: Any, grid: tuple[int, ...], threads: int, arch: str = "sm_90a", machine_code: bool = True,
            cluster: int = 1, late: tuple[str, ...] = (), **arguments: Any) -> None:
    """Compile one PrimFunc, run it on the emulator. Outputs are written in place. Without `machine_code` nvcc does not see
    the source, which saves most of the time. `grid` counts blocks, not clusters; for `late` see
    EmulatedModule.run."""
    if machine_code:
        executable = compile_module(tvm.IRModule({"main": func}), parse_target(f"cuda:{arch}"))
        source = device_modules(executable)[0].inspect_source()
    else:
        source = generate_source({"main": func}, arch)
    module = cuda_emulator.EmulatedModule(source)
    (kernel,) = module.parameters
    views = {name: value.view(np.uint16) if isinstance(value, np.ndarray) and value.dtype.itemsize == 2 else value
             for name, value in arguments.items()}
    module.run(kernel, grid, threads, cluster, late, **views, **tensor_maps(func, views))
