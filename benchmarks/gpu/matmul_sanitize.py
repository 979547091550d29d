"""Small launches of every CUDA matmul family for compute-sanitizer, with TVM's runtime and NumPy alone (no torch, whose own
kernels would be checked too). Results are compared with float64 as well.

    python -m benchmarks.gpu.matmul_sanitize build FOLDER                                       # anywhere with nvcc
    compute-sanitizer --tool racecheck python benchmarks/gpu/matmul_sanitize.py run FOLDER      # on the GPU; also memcheck
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

ROWS = {"rows": (3,), "few": (9, 40), "many": (130, 200), "quant": (3,), "few_quant": (20,), "rows_bulk": (3,),
        "mixed": (20,), "few_bulk": (11,), "group_columns": (1,)}
TOLERANCE = 6e-4            # float16 outputs


def variants() -> list[dict[str, Any]]:
    from benchmarks.gpu.matmul_variants import variant

    def half(family: str, shape: tuple[int, int], weight: str | None = None, **options: Any) -> dict[str, Any]:
        return variant(family, shape, "float16", None, weight, **options)

    return [half("rows", (264, 584), columns=8, dependent_launch=True),
            half("few", (272, 712), columns=16, consumers=2, split=2, share=2, swiglu=True, dependent_launch=True),
            half("few", (136, 1088), columns=40, consumers=1, split=4, bias=True, residual=True),
            half("many", (144, 584), tile_n=64, skew=1, blocks=2, swiglu=True, dependent_launch=True),
            half("many", (136, 584), tile_n=64, cluster=2, blocks=2, residual=True),
            half("many", (272, 1160), tile_n=128, split=2, bias=True, dependent_launch=True),
            half("many", (272, 1160), tile_n=192, split=6, residual=True),
            half("many", (272, 1160), tile_n=80, split=2, residual=True, dependent_launch=True),     # halves overlap
            half("quant", (272, 576), "q4_0", columns=8, dependent_launch=True),
            half("few_quant", (272, 1152), "q8_0", columns=32, strips=2, split=2),
            half("quant", (272, 576), "fp8", columns=8, convert=True),
            half("few_quant", (272, 1152), "fp8_block", columns=32, strips=1, split=2, convert=True),
            half("few", (272, 712), columns=16, consumers=2, split=1, dependent_launch=True),
            half("rows_bulk", (272, 1152), "q8_0", columns=8, dependent_launch=True),
            half("mixed", (272, 1152), "q4_0", columns=16, consumers=2, strips=2, blocks_per_sm=1, dependent_launch=True),
            half("mixed", (272, 1152), "q4_0", columns=32, split=2),
            half("few_bulk", (272, 1152), "q4_0", columns=16, warps=2, strips=1, groups=3, dependent_launch=True),
            half("few_bulk", (272, 1152), "q4_1", columns=16, warps=2, strips=1, groups=5, feeders=3, dependent_launch=True),
            half("few_bulk", (272, 1152), "fp8", columns=16, warps=2, strips=1, groups=3, split=2, feeders=2, convert=True),
            half("few_bulk", (272, 1152), "q8_0", columns=16, warps=2, strips=2, groups=1, split=2, stages=3),
            half("group_columns", (272, 1152), "q4_0", columns=1, warps=4, dependent_launch=True)]


def build(folder: Path) -> None:
    import relaxpack.tvm_setup  # noqa: F401
    import tvm
    from benchmarks.gpu.matmul_variants import make
    from relaxpack.schedules.cuda_compile import compile_module
    from relaxpack.target import parse_target

    folder.mkdir(parents=True, exist_ok=True)
    module = tvm.IRModule({one["name"]: make(one) for one in variants()})
    compile_module(module, parse_target("cuda:sm_90a")).export_library(str(folder / "sanitize.so"))
    (folder / "sanitize.json").write_text(json.dumps(variants()))


def run(folder: Path) -> int:
    import relaxpack.tvm_setup as setup

    setup.load_cuda_runtime()
    import tvm

    module, device = tvm.runtime.load_module(str(folder / "sanitize.so")), tvm.cuda(0)
    rng, bad = np.random.default_rng(1), 0

    def on_device(array: np.ndarray) -> Any:
        return tvm.runtime.tensor(array, device)

    for one in json.loads((folder / "sanitize.json").read_text()):
        n, k, options = one["n"], one["k"], one["options"]
        buffers, plain = weights(one, rng)
        swiglu = options.get("swiglu", False)
        width = n // 2 if swiglu else n
        for t in ROWS[one["family"]]:
            x, bias = rng.standard_normal((t, k)).astype(np.float16), rng.standard_normal(n).astype(np.float32)
            residual = rng.standard_normal((t, width)).astype(np.float16)
            y = on_device(np.full((t, width), np.nan, np.float16))
            module[one["name"]](on_device(x), *map(on_device, buffers), *([on_device(bias)] if options.get("bias") else []),
                                *([on_device(residual)] if options.get("residual") else []), y)
            device.sync()
            z = x.astype(np.float64) @ plain.astype(np.float64).T + (bias if options.get("bias") else 0)
            if swiglu:
                gate, up = np.moveaxis(z.reshape(t, -1, 2, 8), 2, 0)
                z = (gate / (1 + np.exp(-gate)) * up).reshape(t, width)
            z = z + (residual if options.get("residual") else 0)
            error = float(np.linalg.norm(y.numpy() - z) / np.linalg.norm(z))
            bad += not error < TOLERANCE
            print(f"{'ok ' if error < TOLERANCE else 'BAD'} {error:.1e} {t:4d} {one['name']}", flush=True)
    return int(bad > 0)


def weights(one: dict[str, Any], rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """(buffers of the kernel, the weight in numbers); plain weights are in the order of the kernel already."""
    n, k = one["n"], one["k"]
    if one["weight"] is None:
        plain = (rng.standard_normal((n, k)) * 0.05).astype(np.float16)
        return [plain], plain
    from relaxpack.schedules.kernels.cuda.packing import pack, weight_layout
    from relaxpack.weight_format import FORMATS, QuantizedTensor

    fmt = FORMATS[one["weight"]]
    groups = (n, fmt.groups(k))
    codes = rng.integers(0, 16 if fmt.bits == 4 else 120, (n, k))
    scales = (rng.random(groups) * 0.002 + 0.001).astype(fmt.scale_dtype)
    canonical = QuantizedTensor(fmt, codes.astype(np.int8 if fmt.signed else np.uint8), scales,
                                -8 * scales if fmt.minimum == "stored" else None)
    return list(pack(weight_layout(fmt, n, k, False), canonical).values()), canonical.dequantize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        return run(options.folder)
    build(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
