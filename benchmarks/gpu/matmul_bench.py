"""Calls the matmul kernels of exported libraries on torch's tensors and times them, beside cuBLAS. On the GPU machine: TVM's
runtime and torch. Times are replays of a graph that walks over copies of the weight larger than the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 3e-5}
SHORT_MS = 2.0             # of a graph: a launch is 1 % of that at most
ROTATE_BYTES = 320 << 20   # weights walked over per replay, several times the L2 cache


def copies_to_rotate(weight_bytes: int) -> int:
    """Copies of a weight to walk over, so that none is still in the cache when its turn comes again."""
    return max(2, min(40, -(-ROTATE_BYTES // weight_bytes)))


def exact(x: Any, weight: Any, bias: Any, residual: Any, swiglu: bool, in_order: bool) -> Any:
    """float64 of a matmul and its epilogue. Packed rows are blocks of 8 gate rows and 8 up rows, biases too; `in_order`: the
    weight has that order already."""
    n, t = len(weight), len(x)
    z = x.double() @ weight.double().T
    if swiglu and not in_order:
        z = z.reshape(t, 2, n // 16, 8).transpose(1, 2).reshape(t, n)
    if bias is not None:
        z = z + bias.double()
    if swiglu:
        pairs = z.reshape(t, n // 16, 2, 8)
        gate, up = pairs[:, :, 0].reshape(t, n // 2), pairs[:, :, 1].reshape(t, n // 2)
        z = gate * gate.sigmoid() * up
    return z if residual is None else z + residual.double()


class Bench:
    """Calls kernels of exported libraries on torch tensors and times them."""

    device = "cuda"
    lead_in = False

    def __init__(self, folder: Path) -> None:
        import relaxpack.tvm_setup as setup

        setup.load_cuda_runtime()
        import torch

        import tvm
        import tvm_ffi

        self.torch, self.tvm, self.ffi, self.folder = torch, tvm, tvm_ffi, folder
        self.modules: dict[str, Any] = {}
        self.generator = torch.Generator(device="cuda").manual_seed(1)
        self.weights: dict[Any, Any] = {}

    def kernel(self, variant: dict[str, Any]) -> Any:
        library = variant["library"]
        if library not in self.modules:
            self.modules[library] = self.tvm.runtime.load_module(str(self.folder / library))
        return self.modules[library][variant["name"]]

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def random(self, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
        value = self.torch.randn(shape, generator=self.generator, device="cuda") * scale
        return value.to(getattr(self.torch, dtype))

    def captured(self, calls: list[Any]) -> Callable[[], float]:
        """Replays `calls` as one graph and answers with the microseconds of one of them. With `lead_in` a short graph runs
        once before, so that the host gets ahead and no launch is part of the time."""
        torch = self.torch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), self.ffi.use_raw_stream(self.tvm_device(), stream.cuda_stream):
            calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream), self.ffi.use_raw_stream(self.tvm_device(), stream.cuda_stream):
            for call in calls:
                call()

        short = self.lead_in

        def replay() -> float:
            nonlocal short
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if short:
                graph.replay()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            took = float(begin.elapsed_time(end))
            short = short and took < SHORT_MS
            return took * 1e3 / len(calls)

        return replay

    def time(self, calls: list[Any], replays: int = 7) -> float:
        """Median microseconds of one call, after one replay that does not count."""
        replay = self.captured(calls)
        replay()
        return sorted(replay() for _ in range(replays))[replays // 2]

    def tvm_device(self) -> Any:
        return self.ffi.device("cuda:0")

    def packed(self, variant: dict[str, Any], copies: int, seed: int = 0) -> tuple[list[list[Any]], Any]:
        """Copies of the weight buffers, and for quantised weights the canonical tensor of small shapes (else None)."""
        import numpy as np

        torch, n, k = self.torch, variant["n"], variant["k"]
        if variant["weight"] is None:
            first = self.random((n, k), variant["dtype"], k ** -0.5)
            return [[first if i == 0 else first.clone()] for i in range(copies)], None
        from relaxpack.schedules.kernels.cuda.packing import pack, weight_layout
        from relaxpack.weight_format import FORMATS, QuantizedTensor

        fmt, swiglu = FORMATS[variant["weight"]], variant["options"].get("swiglu", False)
        layout = weight_layout(fmt, n, k, swiglu)
        if n * k > 1 << 22:                 # random bytes, small scales
            sets = []
            for _ in range(copies):
                buffers = []
                for suffix, shape, dtype in layout.buffers:
                    if suffix == "codes":
                        random = torch.randint(-2**31, 2**31, shape, device="cuda", dtype=torch.int64).to(torch.int32)
                        buffers.append(random & ~0x40404040 if fmt.e4m3 else random)        # no NaN
                    elif dtype == "uint32":         # scale and zero
                        word = int(np.float16(0.01).view(np.uint16)) | 8 << 16
                        buffers.append(torch.full(shape, word, device="cuda", dtype=torch.int32))
                    else:
                        small = torch.rand(shape, generator=self.generator, device="cuda") * 0.01 + 0.005
                        buffers.append(small.to(getattr(torch, dtype)))
                sets.append(buffers)
            return sets, None
        rng = np.random.default_rng(seed)
        span = {"q4_0": (0, 16), "q4_1": (0, 16), "q4_k": (0, 16), "q4_128": (0, 16), "q5_0": (-16, 16),
                "q5_1": (0, 32), "q5_k": (0, 32), "q6_k": (-32, 32), "q8_0": (-128, 128), "fp8": (0, 127),
                "fp8_block": (0, 127)}[fmt.name]
        groups, sign = (n, fmt.groups(k)), rng.integers(0, 2, (n, k)) * 128 if fmt.e4m3 else 0
        canonical = QuantizedTensor(
            fmt, (rng.integers(*span, (n, k)) + sign).astype(np.int8 if fmt.signed else np.uint8),
            ((rng.random(groups) * 0.02 + 0.001) * (0.1 if fmt.e4m3 else 1)).astype(fmt.scale_dtype),
            (rng.standard_normal(groups) * 0.05).astype(fmt.scale_dtype) if fmt.minimum == "stored" else None,
            rng.integers(0, 16, groups).astype(np.uint8) if fmt.zeros else None)
        buffers = [torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array).cuda()
                   for array in pack(layout, canonical).values()]
        return [buffers] * copies, canonical

    def view(self, tensor: Any) -> Any:
        """torch has few uint32 operations: codes are int32 here and travel to TVM as uint32 views."""
        return tensor.view(self.torch.uint32) if tensor.dtype == self.torch.int32 else tensor

    def verdict(self, variant: dict[str, Any], t: int, out: Any, reference: Any) -> dict[str, Any]:
        error = float((out.double() - reference).norm() / reference.norm())
        return {"name": variant["name"], "t": t, "error": error, "ok": error < TOLERANCE[variant["out_dtype"]]}

    def measure(self, variant: dict[str, Any]) -> list[dict[str, Any]]:
        torch, n, k, options = self.torch, variant["n"], variant["k"], variant["options"]
        fn, rows, found = self.kernel(variant), variant["rows"], []
        key = (variant["linear"], variant["weight"])
        if key not in self.weights:
            self.weights.clear()
            torch.cuda.empty_cache()
            one = int(self.weight_bytes(variant))
            self.weights[key] = self.packed(variant, copies_to_rotate(one))[0]
        copies = self.weights[key]
        width = n // 2 if options.get("swiglu") else n
        for t in rows:
            if variant["family"] == "dequantize":
                out = torch.empty((n, k), device="cuda", dtype=getattr(torch, variant["dtype"]))
                us = self.time([partial(fn, *[self.view(c) for c in b], out) for b in copies])
            else:
                x = self.random((t, k), variant["dtype"])
                y = torch.empty((t, width), device="cuda", dtype=getattr(torch, variant["out_dtype"]))
                used = copies if t <= 256 else copies[:4]
                us = self.time([partial(fn, x, *[self.view(c) for c in b], y) for b in used])
            found.append({"name": variant["name"], "linear": variant["linear"], "family": variant["family"],
                          "weight": variant["weight"], "t": t, "us": us, "options": options,
                          "tb_s": self.weight_bytes(variant) / us / 1e6, "tflop_s": 2 * t * n * k / us / 1e6})
        return found

    def weight_bytes(self, variant: dict[str, Any]) -> float:
        from relaxpack.weight_format import FORMATS

        return variant["n"] * variant["k"] * (FORMATS[variant["weight"]].bytes_per_weight() if variant["weight"] else 2)

    def cublas(self, linear: str, n: int, k: int, rows: list[int]) -> list[dict[str, Any]]:
        """The bare product through torch, same rotation."""
        torch, found = self.torch, []
        copies = [self.random((n, k), "bfloat16", k ** -0.5)]
        copies += [copies[0].clone() for _ in range(copies_to_rotate(2 * n * k) - 1)]
        for t in rows:
            x = self.random((t, k), "bfloat16")
            used = copies if t <= 256 else copies[:4]
            us = self.time([partial(torch.nn.functional.linear, x, w) for w in used])
            found.append({"name": "cublas", "linear": linear, "family": "cublas", "weight": None, "t": t, "us": us,
                          "options": {}, "tb_s": 2 * n * k / us / 1e6, "tflop_s": 2 * t * n * k / us / 1e6})
        return found

    def ceilings(self) -> dict[str, float]:
        torch = self.torch
        big = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
        read = self.time([lambda: torch.sum(big, dtype=torch.float32)])
        a, b = (self.random((8192, 8192), "bfloat16") for _ in range(2))
        gemm = self.time([lambda: a @ b])
        return {"read_tb_s": 2 * (1 << 30) / read / 1e6, "gemm_tflop_s": 2 * 8192**3 / gemm / 1e6}
