"""`TargetSpec`: what code is generated for, by our own names; TVM only inside `to_tvm()`.

Names: `cpu` (this machine's CPU), `cpu:CPU` with an LLVM CPU name (`cpu:x86-64-v3`, `cpu:znver4`), `cuda` (the GPU in
this machine), `cuda:sm_90a`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from relaxpack.env import num_threads
from relaxpack.errors import UsageError

# By LLVM's names. The second row is used by no kernel of ours, but LLVM may emit it for a named CPU, so a bundle must
# not be loaded where it is missing.
CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "avxvnni", "avx512bf16",
                "bmi2", "avx512cd", "avx512dq", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512bitalg",
                "avx512vpopcntdq", "avx512fp16", "gfni")
# Features of named x86-64 levels that are not this machine's own CPU.
_LEVELS = {"x86-64-v3": ("avx2", "fma", "f16c", "bmi2"),
           "x86-64-v4": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "bmi2", "avx512cd", "avx512dq")}
CUDA_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120")


@dataclass(frozen=True)
class TargetSpec:
    kind: str                       # "cpu" | "cuda"
    arch: str                       # LLVM CPU name, or "sm_90a"
    features: tuple[str, ...] = ()  # CPU instruction sets the code uses, out of CPU_FEATURES
    threads: int = field(default_factory=num_threads)

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.arch}"

    @property
    def file_stem(self) -> str:
        return f"{self.kind}-{self.arch}".replace(":", "-")

    def to_tvm(self) -> Any:
        """The `tvm.target.Target`."""
        import relaxpack.tvm_setup  # noqa: F401
        import tvm

        if self.kind == "cuda":
            return tvm.target.Target({"kind": "cuda", "arch": self.arch, "host": {"kind": "llvm"}})
        return tvm.target.Target({"kind": "llvm", "mcpu": self.arch, "num-cores": self.threads})

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "arch": self.arch, "features": list(self.features)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TargetSpec:
        return cls(data["kind"], data["arch"], tuple(data["features"]))


def host_cpu_features() -> tuple[str, ...]:
    """Instruction sets of this machine's CPU, out of CPU_FEATURES (from /proc/cpuinfo)."""
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("flags"):
                have = {flag.replace("_", "") for flag in line.split(":", 1)[1].split()}
                return tuple(f for f in CPU_FEATURES if f in have)
    return ()


def parse_target(text: str) -> TargetSpec:
    """`cpu`, `cpu:NAME`, `cuda`, `cuda:sm_XX` → TargetSpec. Raises UsageError with the known names."""
    kind, _, arch = text.partition(":")
    if kind == "cpu":
        if arch in _LEVELS:
            return TargetSpec("cpu", arch, _LEVELS[arch])
        if arch and not re.fullmatch(r"[\w.-]+", arch):
            raise UsageError(f"target {text!r}: {arch!r} is not an LLVM CPU name")
        import relaxpack.tvm_setup  # noqa: F401
        import tvm

        host = str(tvm.get_global_func("target.llvm_get_system_cpu")())
        if arch in ("", host):
            return TargetSpec("cpu", host, host_cpu_features())
        raise UsageError(f"target {text!r}: known CPU targets are cpu (this machine: {host}), "
                         + ", ".join(f"cpu:{name}" for name in _LEVELS))
    if kind == "cuda":
        if not arch:
            return TargetSpec("cuda", local_gpu_arch())
        if arch not in CUDA_ARCHS:
            raise UsageError(f"target {text!r}: known GPU architectures are "
                             + ", ".join(f"cuda:{name}" for name in CUDA_ARCHS))
        return TargetSpec("cuda", arch)
    raise UsageError(f"target {text!r}: expected cpu, cpu:NAME, cuda or cuda:sm_XX")


def local_gpu_arch() -> str:
    """Architecture of GPU 0 in this machine, e.g. "sm_90a"."""
    import relaxpack.tvm_setup as setup

    if setup.load_cuda_runtime():
        import tvm

        device = tvm.cuda(0)
        if device.exist:
            sm = "sm_" + device.compute_version.replace(".", "")
            return sm + "a" if sm in ("sm_90", "sm_100") else sm
    raise UsageError("target 'cuda': no NVIDIA GPU is visible here; name one, e.g. --target cuda:sm_90a")
