"""CUDA compilation on a machine without a GPU: machine code only, mixed pipelines, resources within bounds, every
architecture. One compiler run per architecture."""

from __future__ import annotations

import re
import shutil

import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
import tvm
from relaxpack.errors import CompileError, UsageError
from relaxpack.kernel_spec import EmbeddingSpec, LinearSpec, NormSpec
from relaxpack.schedules.cuda_compile import (
    check_library,
    compile_module,
    device_modules,
    find_cuobjdump,
    prepare_cuda_compiler,
    resource_usage,
)
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.target import parse_target
from relaxpack.weight_format import FORMATS
from tvm import relax, te

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def matmul_kernels(arch: str) -> dict[str, object]:
    """PrimFuncs by name: what a small model asks of the matmul side."""
    provider = CudaKernels(parse_target(f"cuda:{arch}"))
    kernels = [provider.linear(LinearSpec(512, 256, FORMATS["bf16"], phase, "bfloat16", "bfloat16", max_rows=rows, **extra))
               for phase, rows, extra in (("decode", 1, {"bias": True}), ("decode", 48, {"residual": True}),
                                          ("prefill", None, {"glu": "swiglu"}), ("prefill", None, {"glu": "geglu"}))]
    kernels += [provider.linear(LinearSpec(512, 256, FORMATS["q4_0"], "decode", "bfloat16", "float32", max_rows=4)),
                provider.linear(LinearSpec(512, 256, FORMATS["q4_k"], "prefill", "bfloat16", "bfloat16")),
                provider.linear(LinearSpec(512, 256, FORMATS["q4_1"], "decode", "bfloat16", "bfloat16", max_rows=32)),
                provider.embedding(EmbeddingSpec(512, 256, FORMATS["q8_0"], "bfloat16")),
                provider.norm(NormSpec(256, 1e-5, "bfloat16", True))]
    return {stage.name: stage.func for kernel in kernels for stage in kernel.stages}


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_120"])
def test_matmul_kernels_become_machine_code(arch, tmp_path):
    funcs = matmul_kernels(arch)
    executable = compile_module(tvm.IRModule(funcs), parse_target(f"cuda:{arch}"))
    (device,) = device_modules(executable)
    assert ("wgmma.mma_async" in device.inspect_source()) == (arch == "sm_90a")
    library = tmp_path / "kernels.so"
    executable.export_library(str(library))
    check_library(library)
    assert b"__global__" not in library.read_bytes()
    if find_cuobjdump() is not None:
        usage = resource_usage(library)
        assert {re.sub(r"_kernel(_\d+)?$", "", kernel) for kernel in usage} == set(funcs)
        for name, resources in usage.items():
            assert resources["registers"] <= 255 and resources["local"] == 0, (name, resources)
            assert resources["stack"] == 0, f"{name} spills: {resources}"


@needs_nvcc
def test_block_and_plain_kernels_share_one_module():
    """A TE function scheduled by nobody's rule but the default one, beside a kernel of ours."""
    x = te.placeholder((64,), "float32", name="x")
    block = te.create_prim_func([x, te.compute((64,), lambda i: x[i] + 1.0, name="y")])
    from tvm.s_tir import dlight

    target = parse_target("cuda:sm_90a")
    with target.to_tvm():
        block = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(tvm.IRModule({"main": block}))["main"]
    builder = relax.BlockBuilder()
    (ours,) = CudaKernels(target).norm(NormSpec(256, 1e-5, "bfloat16", False)).stages
    mod = builder.get()
    mod["block"] = block.with_attr("global_symbol", "block")
    mod["plain"] = ours.func.with_attr("global_symbol", "plain")
    (device,) = device_modules(compile_module(mod, target))
    source = device.inspect_source()
    assert "block_kernel" in source and "plain_kernel" in source


def test_stub_or_driver_is_there():
    assert prepare_cuda_compiler() in ("driver", "stub")
    assert tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None


def test_a_library_with_source_text_is_refused(tmp_path):
    path = tmp_path / "bad.so"
    path.write_bytes(b"\x7fELF extern \"C\" __global__ void f()")
    with pytest.raises(CompileError, match="CUDA source text"):
        check_library(path)
    path.write_bytes(b"\x7fELF nothing")
    with pytest.raises(CompileError, match="no device code"):
        check_library(path)


def test_only_cuda_targets():
    with pytest.raises(UsageError, match="cpu"):
        compile_module(tvm.IRModule({}), parse_target("cpu:x86-64-v3"))
