"""A model runner over a module compiled in this process, without a library file."""

from __future__ import annotations

from typing import Any

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
import tvm
import tvm_ffi
from relaxpack.model_info import ModelInfo
from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.export import BuildLimits
from relaxpack.runtime.model_runner import CpuModelRunner
from tvm.runtime.vm import VirtualMachine


class JitLibrary:
    """What `runtime.vm.Library` is."""

    def __init__(self, executable: Any, parameters: list[np.ndarray]) -> None:
        self._vm = VirtualMachine(executable, tvm.cpu())
        self._parameters = tvm_ffi.convert([tvm.runtime.tensor(p) for p in parameters])

    def call(self, name: str, inputs: list[Any]) -> Any:
        return self._vm[name](*inputs, self._parameters)


def jit_runner(config: ModelConfig, limits: BuildLimits, executable: Any, parameters: list[np.ndarray],
               num_pages: int | None = None) -> CpuModelRunner:
    """`parameters`: in the order of the functions' tuple."""
    info = ModelInfo("tiny", "llama", config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads,
                     config.head_dim, config.vocab_size, limits.max_context, limits.page_size, "float32", "float32",
                     limits.max_batch, limits.prefill_chunk, None, (2,), False)
    return CpuModelRunner(JitLibrary(executable, parameters), info, num_pages)  # type: ignore[arg-type]
