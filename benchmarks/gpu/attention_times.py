"""Times the CUDA attention, RoPE+append and sampling kernels beside torch's SDPA and a plain read. On the GPU machine: TVM's
runtime and torch. Inputs rotate beyond L2 (a fresh layer of pages per call), times are graph replays."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.attention_inputs import rope_buffers, sampling_buffers, top_buffers
from benchmarks.gpu.attention_report import record, require
from relaxpack.kernel_spec import TOP_LOGPROBS
from tests.helpers import attention_device as dev


def read_bandwidth() -> float:
    x = torch.randn(1 << 29, device=dev.DEVICE)          # 2 GiB
    seconds = dev.graph_time([lambda: torch.sum(x)] * 4, 8)
    return x.numel() * 4 / seconds


def time_decode(lib: dev.Library, ceiling: float, quick: bool) -> None:
    shapes = [(1, 512), (1, 2048), (1, 8192), (1, 32768), (8, 512), (8, 2048), (32, 512), (32, 2048), (128, 512), (16, 8192)]
    tuned = [(1, 512), (1, 32768), (32, 512), (16, 8192)]
    for name in lib.names("decode."):
        rest = name.split(".")[1]
        if rest.split("@")[0] not in ("8b", "1b", "7b"):
            continue
        spec = lib.spec(name)
        cases = tuned if "@" in rest or quick or rest != "8b" else shapes
        for b, length, shuffle in [(*c, True) for c in cases] + [(16, 8192, False)]:
            per_layer = b * length * spec["num_kv_heads"] * spec["head_dim"] * 4
            layers = max(2, min(64, math.ceil(400e6 / per_layer) // 2 * 2))
            case = dev.PagedCase(spec, [length] * b, layers=layers, shuffle=shuffle)
            calls = [lib.prepare(name, case.buffers(layer)) for layer in range(layers)]
            seconds = dev.graph_time(calls)
            error = dev.relative_error(case.y[:4], case.reference(layers - 1)[:4])
            require(error < 4e-3, f"{name} {b}x{length}: error {error:.2e}")
            values: dict[str, Any] = {"us": seconds * 1e6, "GBps": per_layer / seconds / 1e9,
                                      "share": per_layer / seconds / ceiling, "error": error}
            if "@" not in rest and shuffle:
                values["sdpa_us"] = sdpa_decode(case, layers) * 1e6
            record("decode", name, f"{b} x {length}" + ("" if shuffle else " pages in order"), **values)
            del case, calls
            torch.cuda.empty_cache()


def sdpa_decode(case: dev.PagedCase, layers: int) -> float:
    spec = case.spec
    b, n = len(case.lengths_host), case.lengths_host[0]
    layers = min(layers, max(2, math.ceil(200e6 / (b * n * spec["num_kv_heads"] * spec["head_dim"] * 4))))
    q = case.q.reshape(b, spec["num_heads"], 1, spec["head_dim"])
    kv = [torch.randn((2, b, spec["num_kv_heads"], n, spec["head_dim"]), device=dev.DEVICE, dtype=q.dtype)
          for _ in range(layers)]
    return dev.graph_time([lambda x=x: F.scaled_dot_product_attention(q, x[0], x[1], enable_gqa=True) for x in kv], 8)


def time_prefill(lib: dev.Library, quick: bool) -> None:
    shapes = [([n], [n]) for n in (128, 512, 2048, 8192)] + [([2048] * 4, [2048] * 4), ([8192], [512])]
    for name in lib.names("prefill."):
        rest = name.split(".")[1]
        if rest.split("@")[0] not in ("8b", "1b", "7b"):
            continue
        spec = lib.spec(name)
        for lengths, queries in [shapes[i] for i in (1, 2, 3)] if ("@" in rest or quick or rest != "8b") else shapes:
            case = dev.PagedCase(spec, lengths, queries, layers=4)
            seconds = dev.graph_time([lib.prepare(name, case.buffers(layer)) for layer in range(4)], 8)
            pairs = sum(q * n - q * (q - 1) // 2 for n, q in zip(lengths, queries, strict=True))
            work = 4 * pairs * spec["num_heads"] * spec["head_dim"]
            error = dev.relative_error(case.y, case.reference(3, rows=64))
            require(error < 4e-3, f"{name} {queries}/{lengths}: error {error:.2e}")
            values = {"us": seconds * 1e6, "TFLOPs": work / seconds / 1e12, "error": error}
            if "@" not in rest and lengths == queries:
                values["sdpa_TFLOPs"] = work / sdpa_prefill(spec, len(lengths), lengths[0]) / 1e12
            record("prefill", name, f"{queries[0]} of {lengths[0]} x{len(lengths)}", **values)


def sdpa_prefill(spec: dict[str, Any], b: int, n: int) -> float:
    heads, dim = spec["num_heads"], spec["head_dim"]
    q, k, v = (torch.randn((b, heads, n, dim), device=dev.DEVICE, dtype=torch.bfloat16) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return dev.graph_time([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)] * 3, 8)


def time_rope(lib: dev.Library, ceiling: float) -> None:
    spec = lib.spec("rope.8b")
    for t in (1, 8, 128, 2048, 8192):
        sets = 4 if t >= 2048 else 16
        calls = [lib.prepare("rope.8b", rope_buffers(spec, t, i, layers=2)) for i in range(sets)]
        seconds = dev.graph_time(calls)
        moved = t * ((spec["num_heads"] + 2 * spec["num_kv_heads"]) * spec["head_dim"] * 4 + spec["rotary_dim"] * 4)
        record("rope", "rope.8b", f"{t} tokens", us=seconds * 1e6, GBps=moved / seconds / 1e9,
               share=moved / seconds / ceiling)


def time_sampling(lib: dev.Library) -> None:
    modes = {"greedy": dict(temperature=0), "temperature": {}, "top_k 40": dict(top_k=40), "top_p 0.9": dict(top_p=0.9),
             "k, p, penalties": dict(top_k=40, top_p=0.9, repetition=1.1, presence=0.1, counts_row=0),
             "typical_p 0.9": dict(typical_p=0.9)}
    for b in (1, 32, 128):
        for shape, scale in (("peaked", 3.0), ("flat", 1.0)):
            logits = torch.randn((b, 128256), device=dev.DEVICE) * scale
            for mode, setting in modes.items() if "sample.128256" in lib else ():
                if shape == "flat" and not setting.keys() & {"top_p", "typical_p"}:
                    continue
                launch = lib.prepare("sample.128256", sampling_buffers(128256, [setting] * b, logits, False))
                record("sample", "sample.128256", f"{b} rows {shape} {mode}", us=dev.graph_time([launch] * 8) * 1e6)
            for wanted in (5, TOP_LOGPROBS) if shape == "peaked" and "top.128256" in lib else ():
                launch = lib.prepare("top.128256", top_buffers([wanted] * b, logits))
                record("sample", "top.128256", f"{b} rows, {wanted} tokens", us=dev.graph_time([launch] * 8) * 1e6)
