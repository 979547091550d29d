"""Names and small device helpers that the attention kernels share: 16-bit pairs in 32-bit registers, tensor-core and
copy mnemonics, and the layout rules of `mma.m16n8k16` fragments.

No kernels and no TVMScript functions live here; everything is called while a kernel's script is parsed.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.model_info import FP8
from tvm import tirx
from tvm.script import tirx as T

SHORT = {"bfloat16": "bf16", "float16": "f16"}
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
LDMATRIX_T = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
COPY16 = "cp.async.cg.shared.global"
COMMIT = "cp.async.commit_group"
WAIT = "cp.async.wait_group"
EXP2 = "ex2.approx.ftz.f32"
LOG2_E = 1.4426950408889634
FULL_MASK = 0xFFFFFFFF
AWAIT = "griddepcontrol.wait"                    # until the kernels before this one are complete
RELEASE = "griddepcontrol.launch_dependents"     # the next kernel may be launched, up to its own wait
MAPA = "mapa.shared::cluster.u32"                # address of shared memory in another block of the cluster
REMOTE_STORE = "st.shared::cluster"
NEG_BIG = -1e30            # stands for -inf where inf - inf would give NaN

_UNPACK_F16 = """
#include <cuda_fp16.h>
__device__ __forceinline__ float f16_bits_to_float(unsigned int bits) {
  __half_raw raw; raw.x = (unsigned short)bits; return __half2float(raw); }
"""


def check_dtypes(*dtypes: str) -> None:
    """Raise CompileError unless all are 16-bit floats."""
    for dtype in dtypes:
        if dtype not in SHORT:
            raise CompileError(f"CUDA attention kernels store bfloat16 or float16, not {dtype}: build with "
                               "--dtype bfloat16")


def check_pages(what: str, spec: AttentionSpec) -> None:
    """Refuses what kernels that read pages cannot: their numbers are the activations' or e4m3."""
    check_dtypes(spec.activation_dtype)
    if spec.kv_dtype not in (spec.activation_dtype, FP8):
        raise CompileError(f"{what}: activations {spec.activation_dtype} and pages {spec.kv_dtype} differ; "
                           "build with one dtype for both or with --kv-dtype fp8")
    least, other = (32, ", without --kv-dtype fp8 multiples of 16") if spec.fp8 else (16, "")
    if spec.head_dim % least:
        raise CompileError(f"{what}: head_dim {spec.head_dim} has no CUDA kernel; supported: multiples of {least}{other}")
    if spec.num_heads % spec.num_kv_heads:
        raise CompileError(f"{what}: {spec.num_heads} heads are not a multiple of {spec.num_kv_heads} KV heads")


def page_name(spec: AttentionSpec) -> str:
    """Both dtypes in a kernel's name."""
    return SHORT[spec.activation_dtype] + ("_e4m3" if spec.fp8 else "")


def early_launch(arch: str) -> bool:
    """Whether kernels for this architecture may start while the kernel before them ends (programmatic dependent launch)."""
    return arch in ("sm_90", "sm_90a", "sm_100a", "sm_120")


def finish(func: Any, early: bool = False, grid: str = "x", shared: bool = True, cluster: int = 1) -> Any:
    """Mark a PrimFunc as scheduled and opaque, so that neither fusion nor a schedule rule touches it. With `early` it is
    launched while the kernel before it still runs and must begin with AWAIT and RELEASE; `grid` names its block indices,
    `shared` says whether it has dynamic shared memory, `cluster` blocks along x form a cluster."""
    func = func.with_attr("tirx.is_scheduled", True).with_attr("op_pattern", 8)
    if early:
        func = func.with_attr("tirx.kernel_launch_params", [
            *["clusterCtaIdx.x"] * (cluster > 1),
            *(f"blockIdx.{axis}" for axis in grid), "threadIdx.x", "tirx.use_programtic_dependent_launch",
            *(["tirx.use_dyn_shared_memory"] if shared else [])])
    return func


def without_parameters(func: Any, *names: str) -> Any:
    """The PrimFunc without parameters that its body does not use."""
    kept = [parameter for parameter in func.params if parameter.name not in names]
    return tirx.PrimFunc(kept, func.body, func.ret_type, func.attrs)


def mma(dtype: str) -> str:
    """D[16, 8] += A[16, 16] B[16, 8] in f32. Thread 4g+t holds D rows g, g+8 at columns 2t, 2t+1; A pairs of columns
    at rows g, g+8 (registers 0, 1) and the same eight columns on (2, 3); B pairs of rows 2t (0) and 2t+8 (1), column g.
    """
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{SHORT[dtype]}.{SHORT[dtype]}.f32"


def pack(dtype: str) -> str:
    """cvt d, high, low: two f32 → one register."""
    return f"cvt.rn.{SHORT[dtype]}x2.f32"


def low(dtype: str, word: Any) -> Any:
    """First element of a pair in a 32-bit register, as f32."""
    if dtype == "bfloat16":
        return T.cuda.uint_as_float(word << T.uint32(16))
    return T.cuda.func_call("f16_bits_to_float", word & T.uint32(0xFFFF), source_code=_UNPACK_F16, return_type="float32")


def high(dtype: str, word: Any) -> Any:
    """Second element of a pair in a 32-bit register, as f32."""
    if dtype == "bfloat16":
        return T.cuda.uint_as_float(word & T.uint32(0xFFFF0000))
    return T.cuda.func_call("f16_bits_to_float", word >> T.uint32(16), source_code=_UNPACK_F16, return_type="float32")


def shuffle_xor(value: Any, mask: int) -> Any:
    return getattr(T.cuda, "__shfl_xor_sync")(T.uint32(FULL_MASK), value, mask, 32)


def shuffle(value: Any, lane: Any) -> Any:
    return getattr(T.cuda, "__shfl_sync")(T.uint32(FULL_MASK), value, lane, 32)


def shuffle_up(value: Any, delta: int) -> Any:
    return getattr(T.cuda, "__shfl_up_sync")(T.uint32(FULL_MASK), value, delta, 32)
