"""Runs built attention and sampling kernels on a GPU with TVM's runtime and torch: poisoned outputs, float64 answers.

Torch is the test's allocator and reference only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import relaxpack.tvm_setup as tvm_setup
import tvm
import tvm_ffi
from relaxpack.model_info import FP8, page_dtype

DEVICE = "cuda"
POISON = float("nan")
REPEATS = 100                     # of every check: the same bits each time


# of ‖out - ref‖ / ‖ref‖, by the activations' dtype: rounding of P and of the output. What pages hold is read exactly.
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4}


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def to_pages(x: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """As pages store it: e4m3 numbers are bytes."""
    if kv_dtype == FP8:
        return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return x.to(torch_dtype(kv_dtype))


def from_pages(x: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    return x.view(torch.float8_e4m3fn).float() if kv_dtype == FP8 else x


def page_poison(kv_dtype: str) -> float:
    return 0x7F if kv_dtype == FP8 else POISON


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
    if dtype == FP8:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE)
    return torch.full(shape, POISON, dtype=torch_dtype(dtype), device=DEVICE)


class PagedCase:
    """Pages in random order; page 0 and everything no sequence owns is NaN. `layers` copies for cold-cache timing. `shared`:
    leading keys, whole pages, that a sequence has in common with the first one of which this is not 0."""

    def __init__(self, spec: dict[str, Any], lengths: list[int], queries: list[int] | None = None, layers: int = 2,
                 magnitude: float = 1.0, seed: int = 0, shuffle: bool = True, shared: list[int] | None = None) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        layers += layers % 2
        size, kv_heads, dim = spec["page_size"], spec["num_kv_heads"], spec["head_dim"]
        poison = page_poison(spec["kv_dtype"])
        self.spec, self.queries = spec, queries or [1] * len(lengths)
        shared = shared or [0] * len(lengths)
        leader = next((s for s, n in enumerate(shared) if n), 0)
        common = [0 if s == leader else n // size for s, n in enumerate(shared)]
        counts = [-(-n // size) - pages for n, pages in zip(lengths, common, strict=True)]
        order = torch.randperm(sum(counts), generator=generator, device=DEVICE) + 1
        if not shuffle:
            order = order.sort().values
        self.pages = torch.empty((layers, sum(counts) + 1, 2, kv_heads, size, dim), device=DEVICE,
                                 dtype=torch_dtype(page_dtype(spec["kv_dtype"])))
        table = torch.zeros((len(lengths), spec["max_pages"]), dtype=torch.int32)
        used = 0
        order_host = order.cpu()
        for s, count in enumerate(counts):
            table[s, common[s]:common[s] + count] = order_host[used:used + count]
            used += count
        for s, pages in enumerate(common):
            table[s, :pages] = table[leader, :pages]
        for layer in range(layers):
            values = torch.randn(self.pages.shape[1:], generator=generator, device=DEVICE, dtype=torch.float32)
            self.pages[layer] = to_pages(values * magnitude, spec["kv_dtype"])
            del values
        self.pages[:, 0] = poison
        for s, n in enumerate(lengths):
            if n % size:
                self.pages[:, table[s, n // size].item(), :, :, n % size:] = poison
        self.page_table = table.to(DEVICE)
        self.lengths_host = lengths
        self.lengths, self.shared = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lengths, shared))
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
                "lengths": self.lengths, "shared": self.shared, "query_start": self.query_start, "y": self.y}

    def keys_values(self, s: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[KV, length, D] each, in the storage dtype (e4m3: float32)."""
        n = self.lengths_host[s]
        ids = self.page_table[s, : -(-n // self.spec["page_size"])].long()
        kv = from_pages(self.pages[layer, ids], self.spec["kv_dtype"]).permute(1, 2, 0, 3, 4)
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


class DecodeStep:
    """A decode step's inputs: pages lack the new tokens, `qkv` has them. `case` is what attention then reads."""

    def __init__(self, spec: dict[str, Any], lengths: list[int], layers: int = 2, magnitude: float = 1.0,
                 shared: list[int] | None = None) -> None:
        self.spec, heads, groups, dim = spec, spec["num_heads"], spec["num_kv_heads"], spec["head_dim"]
        rot, t, size = spec["rotary_dim"], len(lengths), spec["page_size"]
        self.case = PagedCase(spec, lengths, layers=layers, magnitude=magnitude, shared=shared)
        dtype, where = self.case.q.dtype, DEVICE
        g = torch.Generator(where).manual_seed(5)
        self.qkv = (torch.randn((t, (heads + 2 * groups) * dim), generator=g, device=where) * magnitude).to(dtype)
        angle = torch.randn((spec["max_position"], rot // 2), generator=g, device=where) * 3
        self.table = torch.cat([angle.cos(), angle.sin()], 1)
        self.positions = (self.case.lengths - 1).clamp_min(0) % spec["max_position"]
        at = (self.case.lengths - 1).clamp_min(0).long()
        pages = self.case.page_table[torch.arange(t, device=where), at // size].long()
        self.slots = (pages * size + at % size).int()
        self.norms = (1 + 0.3 * torch.randn((2, dim), generator=g, device=where)) if spec["qk_norm_epsilon"] else None
        x = self.qkv.double().reshape(t, -1, dim)
        values = x[:, heads + groups:]
        if self.norms is not None:
            x = x / (x.square().mean(-1, keepdim=True) + spec["qk_norm_epsilon"]).sqrt()
            x = torch.cat([x[:, :heads] * self.norms[0], x[:, heads:heads + groups] * self.norms[1], values], 1)
        row = self.table[self.positions.long()].double()[:, None]
        cos, sin, a, b = row[..., :rot // 2], row[..., rot // 2:], x[..., :rot // 2], x[..., rot // 2:rot]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rot:]], -1)
        self.case.q = turned[:, :heads].reshape(t, -1).to(dtype)
        new = to_pages(torch.stack([turned[:, heads:heads + groups], values], 1), spec["kv_dtype"])
        if layers == 2:                                   # for the numbers; times overwrite the new token in place
            self.pages = self.case.pages.clone()
            self.pages[:, pages, :, :, at % size] = page_poison(spec["kv_dtype"])
            self.case.pages[:, pages, :, :, at % size] = new[None].expand(layers, *new.shape).transpose(0, 1)
        else:
            self.pages = self.case.pages
        self.y = self.case.y

    def buffers(self, layer: int) -> dict[str, Any]:
        held = self.case.buffers(layer)
        count, per = self.pages.shape[1], self.pages.shape[0] // 2
        held |= {"pages": self.pages.reshape(2, per * count, *self.pages.shape[2:]), "qkv": self.qkv,
                 "rope_table": self.table, "positions": self.positions,
                 "slots": self.slots + layer % per * count * self.spec["page_size"]}
        return held if self.norms is None else {**held, "q_norm": self.norms[0], "k_norm": self.norms[1]}

    def expected_pages(self) -> torch.Tensor:
        """What the pages hold after the step; only of two layers."""
        return self.case.pages


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Over the rows that the reference has; NaN counts as infinite."""
    rows = ~want.isnan().any(-1)
    got, want = got[rows].double(), want[rows]
    if not torch.isfinite(got).all():
        return math.inf
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def bytes_of(mask: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    return mask.repeat_interleave(pages.element_size(), -1)


def other_bits(launch: Callable[[], None], y: torch.Tensor, repeats: int = REPEATS) -> int:
    """How many of so many launches, each over a poisoned output, give other bits than `y` has now. The host waits once."""
    first, different = y.clone(), torch.zeros((), dtype=torch.int32, device=y.device)
    for _ in range(repeats):
        y.fill_(POISON)
        launch()
        different += (first.view(torch.uint8) != y.view(torch.uint8)).any()
    return int(different)


def check_fused(library: Library, name: str) -> tuple[float, list[str]]:
    """A kernel that rotates, appends and attends, over ragged lengths: (largest error, what is wrong)."""
    spec, worst, wrong = library.spec(name), 0.0, []
    size, limit = spec["page_size"], TOLERANCE[spec["activation_dtype"]]
    edges = [1, size - 1 or 1, size, size + 1, 3 * size, 63, 64, 65, 700, 128, 129, 511, 512, 513, 1000]
    for lengths, magnitude in (([1], 1.0), ([700], 1.0), (edges, 1.0), (edges, 8.0), (edges, 1e-3), ([8000, 1, 0, 77], 1.0)):
        step = DecodeStep(spec, lengths, magnitude=magnitude)
        launch = library.prepare(name, step.buffers(1))
        launch()
        if different := other_bits(launch, step.y):
            wrong.append(f"{name} {lengths[:4]}: {different} of {REPEATS} repeats differ")
        error = relative_error(step.y, step.case.reference(1))
        worst = max(worst, error)
        if not error < limit:
            wrong.append(f"{name} {lengths[:4]} x{magnitude}: error {error:.2e}")
        wanted, got = step.expected_pages()[1], step.pages[1]
        new = torch.zeros(wanted.shape[0] * size, dtype=torch.bool, device=DEVICE)
        new[step.slots.long()] = True
        fresh = new.reshape(-1, 1, 1, size, 1).expand(wanted.shape)
        stored = [from_pages(pages[fresh], spec["kv_dtype"])[None] for pages in (got, wanted)]
        if not relative_error(stored[0], stored[1].double()) < limit:
            wrong.append(f"{name} {lengths[:4]}: the new token in the pages is wrong")
        if not torch.equal(got.view(torch.uint8)[~bytes_of(fresh, got)], wanted.view(torch.uint8)[~bytes_of(fresh, got)]):
            wrong.append(f"{name} {lengths[:4]}: it wrote elsewhere in the pages")
    return worst, wrong


def check_spread(library: Library, name: str) -> tuple[float, list[str]]:
    """Decode attention whose rows may share leading keys: (largest error, what is wrong)."""
    spec, worst, wrong = library.spec(name), 0.0, []
    limit = TOLERANCE[spec["activation_dtype"]]
    for lengths, shared, magnitude in (
            ([300, 257, 700, 513], [256] * 4, 1.0), ([1100, 1, 0, 77, 1025, 1500, 90], [1024, 0, 0, 0, 1024, 1024, 0], 1.0),
            ([3, 5, 700], [0, 0, 0], 1.0), ([2048 + 30 * i + 1 for i in range(70)], [2048] * 70, 8.0),
            ([600 + i for i in range(9)], [0, *[512] * 8], 1e-3)):
        case = PagedCase(spec, lengths, magnitude=magnitude, shared=shared)
        launch = library.prepare(name, case.buffers(1))
        launch()
        if different := other_bits(launch, case.y):
            wrong.append(f"{name} {lengths[:4]}: {different} of {REPEATS} repeats differ")
        error = relative_error(case.y, case.reference(1))
        worst = max(worst, error)
        if not error < limit:
            wrong.append(f"{name} {lengths[:4]} shared {max(shared)} x{magnitude}: error {error:.2e}")
    return worst, wrong


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
