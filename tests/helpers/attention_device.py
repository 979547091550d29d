"""Runs built attention and sampling kernels on a GPU with TVM's runtime and torch: poisoned outputs, float64 answers.

Torch is the test's allocator and reference only.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

import relaxpack.tvm_setup as tvm_setup
import tvm
import tvm_ffi

DEVICE = "cuda"
POISON = float("nan")


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


class Library:
    """The kernels of one folder by name."""

    def __init__(self, folder: Path) -> None:
        assert tvm_setup.load_cuda_runtime(), "TVM's CUDA runtime did not load"
        self.manifest = json.loads((folder / "manifest.json").read_text())["kernels"]
        self.module = tvm.runtime.load_module(str(folder / "kernels.so"))

    def __contains__(self, name: str) -> bool:
        return name in self.manifest

    def names(self, prefix: str) -> list[str]:
        return [n for n in self.manifest if n.startswith(prefix)]

    def spec(self, name: str) -> dict[str, Any]:
        return self.manifest[name]["spec"]

    def prepare(self, name: str, buffers: dict[str, Any]) -> Any:
        """A call without arguments that launches all stages; temporaries are allocated and poisoned here."""
        entry = self.manifest[name]
        sizes = {"t": None, "b": None}
        for key in ("q", "qkv"):
            if key in buffers:
                sizes["t"] = buffers[key].shape[0]
        for key in ("lengths", "logits"):
            if key in buffers:
                sizes["b"] = buffers[key].shape[0]
        held = dict(buffers)
        for key, (shape, dtype) in entry["temporaries"].items():
            dims = [sizes[d] if isinstance(d, str) else d for d in shape]
            held[key] = poisoned(dims, dtype)
        calls = []
        for stage in entry["stages"]:
            names = [*stage["inputs"], *stage["outputs"]]
            args = [held[n] if n == "layer" else tvm_ffi.from_dlpack(held[n]) for n in names]
            calls.append((self.module[stage["function"]], args))

        def launch() -> None:
            for function, args in calls:
                function(*args)

        launch.held = held  # type: ignore[attr-defined]
        return launch


def poisoned(shape: list[int], dtype: str) -> torch.Tensor:
    if dtype == "int32":
        return torch.full(shape, -123456789, dtype=torch.int32, device=DEVICE)
    return torch.full(shape, POISON, dtype=torch_dtype(dtype), device=DEVICE)


class PagedCase:
    """Pages in random order; page 0 and everything no sequence owns is NaN. `layers` copies for cold-cache timing."""

    def __init__(self, spec: dict[str, Any], lengths: list[int], queries: list[int] | None = None, layers: int = 2,
                 magnitude: float = 1.0, seed: int = 0, shuffle: bool = True) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        layers += layers % 2
        size, kv_heads, dim = spec["page_size"], spec["num_kv_heads"], spec["head_dim"]
        dtype = torch_dtype(spec["kv_dtype"])
        self.spec, self.queries = spec, queries or [1] * len(lengths)
        counts = [-(-n // size) for n in lengths]
        order = torch.randperm(sum(counts), generator=generator, device=DEVICE) + 1
        if not shuffle:
            order = order.sort().values
        self.pages = torch.full((layers, sum(counts) + 1, 2, kv_heads, size, dim), POISON, dtype=dtype, device=DEVICE)
        table = torch.zeros((len(lengths), spec["max_pages"]), dtype=torch.int32)
        used = 0
        order_host = order.cpu()
        for s, count in enumerate(counts):
            table[s, :count] = order_host[used:used + count]
            used += count
        for layer in range(layers):
            values = torch.randn(self.pages.shape[1:], generator=generator, device=DEVICE, dtype=torch.float32)
            self.pages[layer] = (values * magnitude).to(dtype)
            del values
        self.pages[:, 0] = POISON
        for s, n in enumerate(lengths):
            if n % size:
                self.pages[:, table[s, n // size].item(), :, :, n % size:] = POISON
        self.page_table = table.to(DEVICE)
        self.lengths_host = lengths
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        starts = [0]
        for n in self.queries:
            starts.append(starts[-1] + n)
        self.starts_host = starts
        self.query_start = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        self.q = (torch.randn((starts[-1], spec["num_heads"] * dim), generator=generator, device=DEVICE)
                  * magnitude).to(torch_dtype(spec["activation_dtype"]))
        self.y = poisoned(list(self.q.shape), spec["activation_dtype"])

    def buffers(self, layer: int) -> dict[str, Any]:
        """The kernels know two layers: any further ones are pages behind those of the first ones."""
        count, per = self.pages.shape[1], self.pages.shape[0] // 2
        return {"q": self.q, "layer": layer // per, "pages": self.pages.reshape(2, per * count, *self.pages.shape[2:]),
                "page_table": self.page_table + layer % per * count,
                "lengths": self.lengths, "query_start": self.query_start, "y": self.y}

    def keys_values(self, s: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[KV, length, D] each, in the storage dtype."""
        n = self.lengths_host[s]
        ids = self.page_table[s, : -(-n // self.spec["page_size"])].long()
        kv = self.pages[layer, ids].permute(1, 2, 0, 3, 4)
        kv = kv.reshape(2, self.spec["num_kv_heads"], -1, self.spec["head_dim"])[:, :, :n]
        return kv[0], kv[1]

    def reference(self, layer: int, rows: int | None = None) -> torch.Tensor:
        """float64 [t, H*D]; with `rows`, of the last so many queries of each sequence and NaN elsewhere."""
        spec = self.spec
        heads, kv_heads, dim = spec["num_heads"], spec["num_kv_heads"], spec["head_dim"]
        out = torch.full((self.starts_host[-1], heads, dim), POISON, dtype=torch.float64, device=DEVICE)
        for s, n in enumerate(self.lengths_host):
            first, last = self.starts_host[s], self.starts_host[s + 1]
            skip = max(0, last - first - rows) if rows else 0
            if last - first - skip <= 0:
                continue
            if n == 0:
                out[first:last] = 0
                continue
            k, v = (x.double() for x in self.keys_values(s, layer))
            positions = torch.arange(n - (last - first) + skip, n, device=DEVICE)
            visible = torch.arange(n, device=DEVICE)[None] <= positions[:, None]
            if spec["window"] is not None:
                visible &= torch.arange(n, device=DEVICE)[None] > positions[:, None] - spec["window"]
            query = self.q[first + skip:last].double().reshape(-1, kv_heads, heads // kv_heads, dim)
            for h in range(kv_heads):
                score = torch.einsum("igd,kd->gik", query[:, h], k[h]) * spec["scale"]
                weight = torch.softmax(score.masked_fill(~visible, -math.inf), -1)
                out[first + skip:last, h * (heads // kv_heads):(h + 1) * (heads // kv_heads)] = torch.einsum(
                    "gik,kd->igd", weight, v[h])
        return out.reshape(self.starts_host[-1], -1)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Over the rows that the reference has; NaN counts as infinite."""
    rows = ~want.isnan().any(-1)
    got, want = got[rows].double(), want[rows]
    if not torch.isfinite(got).all():
        return math.inf
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def graph_time(calls: list[Any], replays: int = 20) -> float:
    """Seconds per call, from one CUDA graph of all calls replayed; the calls should not share cold data."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with tvm_ffi.use_torch_stream(torch.cuda.graph(graph)):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1e-3 / len(calls)
