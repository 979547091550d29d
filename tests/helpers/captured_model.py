"""A two-layer Llama as a GPU gets it: buckets, captured steps, sampling inside. Here its kernels are plain loops on the
CPU, TVM's graph builtins are the stand-ins of `graph_stand_ins.py`, and device memory is host memory, so the GPU's own
runner runs on any machine.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.compile.kernels import attention_spec
from relaxpack.compile.storage_summary import storage_summary
from relaxpack.dist.bundle import BundleWriter
from relaxpack.dist.host import Gpu, Host
from relaxpack.dist.integrity import canonical_json
from relaxpack.dist.manifest import Manifest, TargetEntry, WeightsSummary
from relaxpack.model_info import ModelInfo
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.memory_plan import PLAN, arena_bytes
from relaxpack.passes.pipeline import phases, run_phases
from relaxpack.passes.rewrite import exported_functions, num_inputs
from relaxpack.passes.step_table import step_table
from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.export import BuildLimits, export_model
from relaxpack.relax_models.rope import RopeConfig
from relaxpack.runtime import cuda_memory
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.vm import Library
from relaxpack.target import TargetSpec, host_cpu_features
from relaxpack.weight_format import FORMATS
from tests.helpers import graph_stand_ins
from tests.helpers.plain_kernels import PlainKernels
from tests.helpers.tiny_checkpoints import tokenizer_json

CONFIG = ModelConfig("llama", 32, 48, 2, 4, 2, 8, 61, 1e-5, 64, RopeConfig("default", 10000.0, 8, 64), (None, 5), True,
                     False, False, False, False)
END = 60


class F32(dict[str, Any]):
    """Every matrix in float32."""

    def __missing__(self, name: str) -> Any:
        return FORMATS["f32"]

    def get(self, name: str, default: Any = None) -> Any:
        return FORMATS["f32"]


@dataclass(frozen=True)
class CapturedModel:
    """`final`: the module that became the library."""

    path: Path
    parameters: list[Any]
    names: list[str]
    final: Any
    limits: BuildLimits
    buckets: dict[str, tuple[int, ...]]
    functions: tuple[str, ...] = ("prefill", "decode")
    steps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)    # what each function's kernels move and compute

    @property
    def info(self) -> ModelInfo:
        c, limits = CONFIG, self.limits
        return ModelInfo("captured", c.architecture, c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim,
                         c.vocab_size, limits.max_context, limits.page_size, "float32", "float32", limits.max_batch,
                         limits.prefill_chunk, None, (END,), False)


def build(folder: Path, limits: BuildLimits, buckets: dict[str, tuple[int, ...]], embed: bool = False,
          enabled: frozenset[str] = frozenset()) -> CapturedModel:
    graph_stand_ins.install()
    target = tvm.target.Target({"kind": "llvm"})
    mod = export_model(CONFIG, limits, "float32", "float32", device_sampling=True, embed=embed)
    config = PipelineConfig(decode_buckets=buckets["decode"], prefill_buckets=buckets["prefill"], cuda_graph=True,
                            enabled=enabled | ({"SpreadDecode"} if "decode_spread" in buckets else set()),
                            spread_buckets=buckets.get("decode_spread", ()))
    seen: dict[str, tvm.IRModule] = {}
    final = run_phases(mod, target, phases(PlainKernels(), attention_spec(CONFIG, limits, "float32", "float32"), F32(),
                                           config), lambda phase, after, _: seen.__setitem__(phase, after))
    path = folder / "model.so"
    with target:
        tvm.compile(final, target, relax_pipeline=None).export_library(str(path))
    _, func = next(exported_functions(seen["lower"]))
    rng = np.random.default_rng(0)
    variables = func.params[num_inputs(func):]
    parameters = [tvm.runtime.tensor(np.zeros([int(d) for d in v.ty.shape], np.int32) if str(v.ty.dtype) == "int32" else (
        rng.standard_normal([int(d) for d in v.ty.shape]) * 0.3 + ("norm" in v.name)).astype(np.float32)) for v in variables]
    return CapturedModel(path, parameters, [v.name for v in variables], final, limits, buckets,
                         ("prefill", "decode", *(["embed"] if embed else [])), step_table(seen["lower"]))


class _HostArray:
    """`cuda_memory.PinnedArray` in ordinary memory."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._raw = np.zeros(self.bytes + 64, np.uint8)
        start = -self._raw.ctypes.data % 64
        self.array = self._raw[start:start + self.bytes].view(dtype).reshape(shape)
        self.pointer = self.array.ctypes.data

    def close(self) -> None:
        self.pointer = 0


class _Event:
    def record(self) -> None:
        return None

    def wait(self) -> None:
        return None


def host_memory(patch: pytest.MonkeyPatch, free: int = 1 << 30, total: int = 1 << 31) -> None:
    """The calls of `cuda_memory` over host memory, each done when it returns."""
    def move(destination: int, source: int, size: int, kind: int, what: str) -> None:
        ctypes.memmove(destination, source, size)

    def copy_within(tensor: Any, source: int, destination: int, size: int, stride: int, count: int) -> None:
        for row in range(count):
            move(tensor.data_ptr() + destination + row * stride, tensor.data_ptr() + source + row * stride, size, 0, "")

    def fill_zero(tensor: Any, size: int) -> None:
        ctypes.memset(tensor.data_ptr(), 0, size)

    for name, value in {"PinnedArray": _HostArray, "Event": _Event, "_copy": move, "copy_within": copy_within,
                        "fill_zero": fill_zero, "synchronize": lambda: None,
                        "free_and_total": lambda: (free, total)}.items():
        patch.setattr(cuda_memory, name, value)


def runner(model: CapturedModel, graphs: bool = True, parameters: list[Any] | None = None, num_pages: int = 40,
           **options: Any) -> tuple[CudaModelRunner, graph_stand_ins.GraphLog]:
    """The GPU's runner over a model on this CPU; call `host_memory` before."""
    log = graph_stand_ins.install()      # fresh caches: a library finds its builtins when it is opened
    library = Library(model.path, tvm.cpu(), model.parameters if parameters is None else parameters, graphs)
    return CudaModelRunner(library, model.info, tvm.cpu(), model.buckets, num_pages,
                           functions=model.functions, **options), log


FUNCTIONS = ("prefill", "decode", "sample", "top_logprobs")


def write_bundle(model: CapturedModel, path: Path, functions: tuple[str, ...] = FUNCTIONS) -> Manifest:
    """A bundle as a build for `cuda:sm_90a` makes it, but for its code, which is this CPU's."""
    target = TargetSpec("cuda", "sm_90a")
    explanation = {"memory_plan": json.loads(str(model.final.attrs[PLAN]))}
    memory = {"arena_bytes": arena_bytes(explanation["memory_plan"]),
              "weight_bytes": sum(p.numpy().nbytes for p in model.parameters),
              **storage_summary(explanation["memory_plan"])}
    with BundleWriter(path) as writer:
        writer.add_file(f"lib/{target.file_stem}.so", model.path)
        writer.add_bytes("tokenizer/tokenizer.json", tokenizer_json().encode())
        writer.add_bytes("tokenizer/text.json", b"{}")
        writer.add_bytes("explain.json", canonical_json({**explanation, "phases": [], "kernels": [], "calls": {},
                                                         "steps": model.steps}))
        with writer.params(target.file_stem) as params:
            for name, tensor in zip(model.names, model.parameters, strict=True):
                params.add(name, {"": tensor.numpy()})
        entry = TargetEntry(target, f"lib/{target.file_stem}.so", target.file_stem, tuple(model.names), functions,
                            {}, model.buckets, memory, activation_dtype="float32", kv_dtype="float32")
        summary = WeightsSummary({"f32": memory["weight_bytes"]})
        return writer.finish(Manifest("test", "0" * 64, model.info, summary, (entry,), {}, {"name": "captured"}, {}))


def as_gpu(patch: pytest.MonkeyPatch, free: int = 1 << 30) -> graph_stand_ins.GraphLog:
    """Let this machine pass for one with an H200 as far as loading and running such a bundle is concerned. Libraries that
    are opened from now on share one log of graphs."""
    host_memory(patch, free)
    gpu = Host("x86_64", host_cpu_features(), (Gpu("stand-in for an H200", (9, 0), 1 << 37),))
    patch.setattr("relaxpack.dist.bundle.detect_host", lambda: gpu)
    patch.setattr("relaxpack.runtime.load.device_for", lambda kind, index=0: tvm.cpu())
    return graph_stand_ins.install()
