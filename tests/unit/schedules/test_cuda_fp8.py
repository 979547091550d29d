"""fp8 weights on CUDA without a GPU: where packing puts codes and scales, which kernels the rules choose, and machine code
for every architecture."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
import tvm
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import EmbeddingSpec, LinearSpec
from relaxpack.schedules.cuda_compile import check_library, compile_module, device_modules, find_cuobjdump, resource_usage
from relaxpack.schedules.kernels.cuda.codes_fp8 import can_convert
from relaxpack.schedules.kernels.cuda.packing import pack, row_order, weight_layout
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.target import parse_target
from relaxpack.weight_format import FORMATS, QuantizedTensor

FP8, FP8_BLOCK = FORMATS["fp8"], FORMATS["fp8_block"]
ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("fmt", [FP8, FP8_BLOCK], ids=lambda f: f.name)
def test_codes_and_scales_are_where_the_layout_says(fmt, gated):
    n, k, rng = 32, 200, np.random.default_rng(1)
    groups, chunks = fmt.groups(k), 4
    weight = QuantizedTensor(fmt, rng.integers(0, 126, (n, k)).astype(np.uint8), rng.random((n, groups), np.float32))
    layout = weight_layout(fmt, n, k, gated)
    packed = pack(layout, weight)
    assert layout.buffers == (("codes", (2 * chunks * 256,), "uint32"), ("scales", (2 * groups * 16,), "float32"))
    for place, row in enumerate(row_order(n, gated)):
        strip, high, g = place // 16, place % 16 // 8, place % 8
        for column in range(k):
            chunk, half, q, value = column // 64, column % 64 // 32, column % 32 // 8, column % 8
            piece = (strip * chunks + chunk) * 256 + high * 128 + g * 16 + (q ^ g // 2 % 4) * 4
            word = packed["codes"][piece + half * 2 + value // 4]
            assert int(word) >> 8 * (0, 2, 1, 3)[value % 4] & 255 == weight.codes[row, column]
        np.testing.assert_array_equal(packed["scales"].reshape(2, groups, 8, 2)[strip, :, g, high], weight.scales[row])


def test_shapes_that_no_kernel_serves_are_refused():
    with pytest.raises(CompileError, match="multiple of 8"):
        weight_layout(FP8, 64, 100, False)
    assert weight_layout(FP8_BLOCK, 64, 104, False)      # blocks need not divide the row


def test_who_has_the_instruction():
    assert [arch for arch in (*ARCHS, "sm_86", "sm_90") if can_convert(arch)] == ["sm_89", "sm_90a", "sm_100a", "sm_120",
                                                                                 "sm_90"]


def kernels(arch: str) -> dict[str, object]:
    """What a model asks: each bucket's kernel, both formats and activation dtypes, the embedding."""
    provider = CudaKernels(parse_target(f"cuda:{arch}"))
    found = [provider.linear(LinearSpec(512, 256, FP8, "decode", "bfloat16", "bfloat16", max_rows=1, bias=True)),
             provider.linear(LinearSpec(512, 256, FP8_BLOCK, "decode", "float16", "float16", max_rows=2, residual=True)),
             provider.linear(LinearSpec(512, 2304, FP8_BLOCK, "decode", "bfloat16", "bfloat16", max_rows=8)),
             provider.linear(LinearSpec(512, 2304, FP8, "decode", "float16", "float32", max_rows=24, glu="swiglu")),
             provider.embedding(EmbeddingSpec(512, 256, FP8, "bfloat16"))]
    many = provider.linear(LinearSpec(512, 256, FP8_BLOCK, "prefill", "bfloat16", "bfloat16", glu="swiglu"))
    stages = [stage for kernel in found for stage in kernel.stages]
    return {stage.name: stage.func for stage in [*stages, many.stages[0]]}      # what follows it has no fp8


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_rules_choose_by_rows(arch):
    provider = CudaKernels(parse_target(f"cuda:{arch}"))

    def source(rows: int | None, phase: str = "decode") -> str:
        return provider.linear(LinearSpec(2048, 2048, FP8, phase, "bfloat16", "bfloat16", max_rows=rows)).source

    hopper = arch == "sm_90a"
    assert source(1) == source(8) == ("rule:cuda.gemm_rows_bulk" if hopper else "rule:cuda.gemm_rows_quant")
    assert source(16) == source(64) == ("rule:cuda.gemm_few_bulk" if hopper else "rule:cuda.gemm_few_quant")
    assert source(1024) == f"rule:cuda.dequantize+{'gemm_many' if hopper else 'gemm_tiles'}"
    assert source(None, "prefill").startswith("rule:cuda.dequantize+gemm_any")


def test_rules_for_builds_that_round_activations():
    """Only products of `fp8` weights with many rows on sm_90a, and only where the build says so; records are not asked."""
    class Records:
        def kernel(self, *args: object) -> None:
            raise AssertionError(args)

    provider = CudaKernels(parse_target("cuda:sm_90a"), tuned=Records(), activations="fp8")  # type: ignore[arg-type]
    rounded = "rule:cuda.quantize_rows+gemm_many_e4m3"
    for rows, phase in ((16, "decode"), (512, "prefill"), (None, "prefill")):
        spec = LinearSpec(2048, 2048, FP8, phase, "bfloat16", "bfloat16", max_rows=rows)
        assert provider.linear(spec).source == rounded
        older = CudaKernels(parse_target("cuda:sm_89"), activations="fp8")
        assert rounded not in (CudaKernels(parse_target("cuda:sm_90a")).linear(spec).source, older.linear(spec).source)
    quantize, multiply = provider.linear(spec).stages
    assert quantize.outputs == multiply.inputs[:2] == ("x_codes", "x_scales")
    rows_only = CudaKernels(parse_target("cuda:sm_90a"), activations="fp8")
    for spec in (LinearSpec(2048, 2048, FP8, "decode", "bfloat16", "bfloat16", max_rows=8),
                 LinearSpec(2048, 2048, FP8_BLOCK, "prefill", "bfloat16", "bfloat16", max_rows=512),
                 LinearSpec(2048, 2048, FORMATS["bf16"], "prefill", "bfloat16", "bfloat16", max_rows=512),
                 LinearSpec(2052, 2048, FP8, "prefill", "bfloat16", "bfloat16", max_rows=512)):     # rows of y: 8 bytes over
        assert rows_only.linear(spec).source != rounded


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_machine_code_of_fp8_products(tmp_path):
    """No spills, and wgmma of e4m3 with e4m3."""
    provider = CudaKernels(parse_target("cuda:sm_90a"), activations="fp8")
    specs = [LinearSpec(3072, 2048, FP8, "prefill", "bfloat16", "bfloat16", max_rows=rows, residual=rows == 512, glu=glu)
             for rows, glu in ((16, None), (512, None), (512, "swiglu"), (None, None))]
    functions = {stage.name: stage.func for spec in specs for stage in provider.linear(spec).stages}
    executable = compile_module(tvm.IRModule(functions), parse_target("cuda:sm_90a"))
    (device,) = device_modules(executable)
    assert "k32.f32.e4m3.e4m3" in device.inspect_source()
    library = tmp_path / "kernels.so"
    executable.export_library(str(library))
    check_library(library)
    if find_cuobjdump() is not None:
        for name, resources in resource_usage(library).items():
            assert resources["registers"] <= 255 and resources["local"] == resources["stack"] == 0, (name, resources)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ARCHS)
def test_machine_code(arch, tmp_path):
    """No spills; float16 is converted by the instruction where there is one, bfloat16 never."""
    executable = compile_module(tvm.IRModule(kernels(arch)), parse_target(f"cuda:{arch}"))
    (device,) = device_modules(executable)
    assert ("cvt.rn.f16x2.e4m3x2" in device.inspect_source()) == (arch != "sm_80")
    library = tmp_path / "kernels.so"
    executable.export_library(str(library))
    check_library(library)
    if find_cuobjdump() is not None:
        for name, resources in resource_usage(library).items():
            assert resources["registers"] <= 255 and resources["local"] == resources["stack"] == 0, (name, resources)
