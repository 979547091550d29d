"""Checks and times the CUDA attention, RoPE+append and sampling kernels on one GPU, beside torch SDPA in the same run.

    python -m tests.helpers.attention_builds .carry/attention --tune        # anywhere with nvcc
    python -m benchmarks.gpu.kernels_attention .carry/attention --out DIR   # on the GPU, TVM runtime and torch only

Inputs rotate beyond L2 (a fresh layer of pages per call), times are graph replays, the ceiling is a plain read
measured first. Prints a table and writes DIR/attention.json.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.nn.functional as F

from relaxpack.kernel_spec import SAMPLING_SETTINGS, TOP_LOGPROBS
from relaxpack.model_info import FP8
from tests.helpers import attention_device as dev
from tests.helpers import sampling_case

TOLERANCE = dev.TOLERANCE
PARTS = ("check_rope", "check_sample", "check_decode", "check_fused", "check_spread", "check_mma", "check_hopper",
         "decode", "prefill", "rope", "sample")
ROWS: list[dict[str, Any]] = []
FAILURES: list[str] = []


def record(kind: str, name: str, case: str, **values: Any) -> None:
    ROWS.append({"kind": kind, "kernel": name, "case": case, **values})
    text = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
    print(f"{kind:9s}{name:22s}{case:28s}{text}", flush=True)


def require(ok: bool, what: str) -> None:
    if not ok:
        FAILURES.append(what)
        print("FAILED", what, flush=True)


# numerics

def check_fused(lib: dev.Library) -> None:
    for name in lib.names("fused."):
        error, wrong = dev.check_fused(lib, name)
        for complaint in wrong:
            require(False, complaint)
        record("numerics", name, "ragged", error=error)


def check_spread(lib: dev.Library) -> None:
    for name in lib.names("spread."):
        error, wrong = dev.check_spread(lib, name)
        for complaint in wrong:
            require(False, complaint)
        record("numerics", name, "leading keys shared", error=error)


def check_attention(lib: dev.Library, kind: str, which: str) -> None:
    """`which`: "hopper" or "mma" tells the two prefill kernels apart, "" takes all."""
    for name in lib.names(kind + "."):
        if which and ("@" in name) != (which == "mma"):
            continue
        spec = lib.spec(name)
        size = spec["page_size"]
        worst, cases = 0.0, 0
        edges = [1, size - 1 or 1, size, size + 1, 3 * size - 1, 3 * size, 3 * size + 1, 63, 64, 65, 700]
        if kind == "decode":
            plans = [([n], None, 1.0) for n in (1, size + 1, 513)]
            plans += [(edges, None, 1.0), (edges * 12, None, 1.0), ([8192, 1, 5000, 0, 77], None, 1.0),
                      (edges, None, 30.0), (edges, None, 1e-3)]
        else:
            plans = [([n], [n], 1.0) for n in (1, 16, 65, 129)]
            plans += [([n + 5 for n in edges], edges, 1.0), ([1, 300, 1000, 129, 40], [1, 0, 200, 129, 33], 1.0),
                      ([2048], [1024], 1.0), (edges, edges, 30.0), (edges, edges, 1e-3)]
        plans = [(n, q, m) for n, q, m in plans if max(n) <= spec["max_pages"] * size]
        for i, (lengths, queries, magnitude) in enumerate(plans):
            case = dev.PagedCase(spec, lengths, queries, magnitude=magnitude, seed=i)
            launch = lib.prepare(name, case.buffers(1))
            launch()
            different = dev.other_bits(launch, case.y)
            require(different == 0, f"{name} {lengths[:6]}: {different} of {dev.REPEATS} repeats differ")
            error = dev.relative_error(case.y, case.reference(1))
            # With huge scores the softmax is one-hot and rounding of P vanishes; small ones average towards zero.
            worst, cases = max(worst, error), cases + 1
            require(error < TOLERANCE[spec["activation_dtype"]], f"{name} case {i} x{magnitude}: error {error:.2e}")
        record("numerics", name, f"{cases} cases", error=worst)


def check_rope(lib: dev.Library) -> None:
    for name in lib.names("rope."):
        spec = lib.spec(name)
        dtype, dim, rot = dev.torch_dtype(spec["activation_dtype"]), spec["head_dim"], spec["rotary_dim"]
        heads, kv_heads, size = spec["num_heads"], spec["num_kv_heads"], spec["page_size"]
        worst = 0.0
        for t in (1, 7, 300):
            buffers = rope_buffers(spec, t, seed=t)
            pages = buffers["pages"]
            launch = lib.prepare(name, buffers)
            launch()
            x = buffers["qkv"].double().reshape(t, heads + 2 * kv_heads, dim)
            if spec["qk_norm_epsilon"] is not None:
                normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + spec["qk_norm_epsilon"])
                x = torch.cat([normed[:, :heads] * buffers["q_norm"].double(),
                               normed[:, heads:heads + kv_heads] * buffers["k_norm"].double(), x[:, heads + kv_heads:]], 1)
            angle = buffers["rope_table"][buffers["positions"].long()].double()[:, None]
            cos, sin, a, b = angle[..., : rot // 2], angle[..., rot // 2:], x[..., : rot // 2], x[..., rot // 2:rot]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rot:]], -1)
            slots = buffers["slots"].long()
            kv = spec["kv_dtype"]
            written = dev.from_pages(pages[1, slots // size, :, :, slots % size], kv)                   # [t, 2, KV, D]
            stored = torch.stack([turned[:, heads:heads + kv_heads], x[:, heads + kv_heads:]], 1)
            if kv == FP8:
                stored = dev.from_pages(dev.to_pages(stored, kv), kv).double()
            pairs = [(buffers["q"].reshape(t, heads, dim), turned[:, :heads]), (written, stored)]
            for got, want in pairs:
                worst = max(worst, dev.relative_error(got.reshape(t, -1), want.reshape(t, -1)))
            live = torch.zeros((*pages.shape[1:2], size), dtype=torch.bool, device=dev.DEVICE)
            live[slots // size, slots % size] = True
            rest = pages[1].permute(0, 3, 1, 2, 4)[~live]
            alone = [bool(((x == dev.page_poison(kv)) if kv == FP8 else x.isnan()).all()) for x in (rest, pages[0])]
            require(all(alone), f"{name} t={t}: wrote outside its slots")
            require(dtype == buffers["q"].dtype and worst < TOLERANCE[spec["activation_dtype"]],
                    f"{name} t={t}: error {worst:.2e}")
        record("numerics", name, "3 cases", error=worst)


def rope_buffers(spec: dict[str, Any], t: int, seed: int = 0, layers: int = 2) -> dict[str, Any]:
    g = torch.Generator(dev.DEVICE).manual_seed(seed)
    dim, rot, size = spec["head_dim"], spec["rotary_dim"], spec["page_size"]
    dtype = dev.torch_dtype(spec["activation_dtype"])
    width = (spec["num_heads"] + 2 * spec["num_kv_heads"]) * dim
    count = t // size + 3
    angle = torch.randn((spec["max_position"], rot // 2), generator=g, device=dev.DEVICE) * 3
    buffers = {"qkv": torch.randn((t, width), generator=g, device=dev.DEVICE).to(dtype),
               "rope_table": torch.cat([angle.cos(), angle.sin()], 1).contiguous(),
               "positions": torch.randint(0, spec["max_position"], (t,), generator=g, device=dev.DEVICE, dtype=torch.int32),
               "slots": torch.randperm(count * size, generator=g, device=dev.DEVICE)[:t].to(torch.int32), "layer": 1,
               "pages": dev.poisoned([layers, count, 2, spec["num_kv_heads"], size, dim], spec["kv_dtype"]),
               "q": dev.poisoned([t, spec["num_heads"] * dim], spec["activation_dtype"])}
    if spec["qk_norm_epsilon"] is not None:
        for key in ("q_norm", "k_norm"):
            buffers[key] = torch.randn((dim,), generator=g, device=dev.DEVICE)
    return buffers


OFF = dict(temperature=1.0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0, typical_p=1.0, top_k=0,
           counts_row=-1)


def sampling_buffers(vocab: int, rows: list[dict[str, Any]], logits: torch.Tensor, constrained: bool,
                     seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    b = len(rows)
    settings, counters = np.zeros((b, 8), np.float32), np.zeros((b, 8), np.int32)
    for i, row in enumerate(rows):
        full = {**OFF, **row}
        settings[i, :7] = [full[k] for k in SAMPLING_SETTINGS]
        counters[i, :6] = [full["top_k"], *rng.integers(0, 2**31, 3), full["counts_row"], -1]
    counts = sampling_case.random_counts(rng, 4, vocab)
    counts[3, vocab:vocab + 2] = 7, counters[[row.get("counts_row") == 3 for row in rows], 3].sum()     # row 3 is stale
    counts[3, 7] += 1
    buffers = {"logits": logits, "settings": torch.tensor(settings, device=dev.DEVICE),
               "counts": torch.tensor(counts, device=dev.DEVICE), "drawn": dev.poisoned([b, 2], "int32")}
    if constrained:
        counters[1::2, 5] = rng.permutation(b // 2)
        bits = rng.integers(-2**31, 2**31, (b // 2, -(-vocab // 32))).astype(np.int32)
        buffers["allowed"] = torch.tensor(bits, device=dev.DEVICE)
    buffers["counters"] = torch.tensor(counters, device=dev.DEVICE)
    return buffers


def check_sampling(lib: dev.Library) -> None:
    rows = [dict(temperature=0), dict(temperature=0, repetition=1.3, presence=0.5, frequency=0.2, counts_row=1), {},
            dict(temperature=0.7, top_k=40), dict(top_p=0.9), dict(top_p=0.5, min_p=0.05, top_k=100), dict(min_p=0.1),
            dict(top_p=0.95, top_k=50, repetition=1.3, presence=0.5, frequency=0.2, counts_row=2), dict(top_k=1),
            dict(temperature=0.1, top_p=0.99, top_k=30, counts_row=0), dict(top_p=0.95, temperature=3.0), dict(top_k=6000),
            dict(), dict(temperature=0), dict(top_p=1e-6), dict(temperature=0.01, top_k=5)]
    rows[:0] = [dict(typical_p=0.9), dict(typical_p=0.5, top_p=0.95, min_p=0.001), dict(typical_p=0.3, temperature=3.0),
                dict(typical_p=0.8, top_k=3000, presence=0.5, repetition=1.2, counts_row=3)]
    for name in lib.names("sample."):
        vocab, constrained = lib.spec(name)["vocab_size"], lib.spec(name)["constrained"]
        mistakes, total = 0, 0
        for seed, scale in ((0, 3.0), (1, 0.02), (2, 10.0)):
            g = torch.Generator(dev.DEVICE).manual_seed(seed)
            logits = torch.randn((len(rows), vocab), generator=g, device=dev.DEVICE) * scale
            logits[-4, vocab // 2] = math.nan
            logits[-3, [5, vocab - 1]] = 1000.0
            buffers = sampling_buffers(vocab, rows, logits, constrained, seed)
            before = buffers["counts"].cpu().numpy().copy()
            launch = lib.prepare(name, buffers)
            launch()
            drawn = buffers["drawn"].cpu().numpy()
            tokens, logprobs = drawn[:, 0], drawn[:, 1].copy().view(np.float32)
            after = buffers["counts"].cpu().numpy()
            settings, counters = buffers["settings"].cpu().numpy(), buffers["counters"].cpu().numpy()
            host = logits.cpu().numpy()
            expected = before.copy()
            for i in range(len(rows)):
                allowed = None
                if counters[i, 5] >= 0:
                    bits = buffers["allowed"][counters[i, 5]].cpu().numpy().view(np.uint32)
                    allowed = (bits[np.arange(vocab) // 32] >> (np.arange(vocab) % 32) & 1) > 0
                counted = counters[i, 4]
                token, logprob, scores = sampling_case.expect(
                    host[i], settings[i], counters[i], before[counted] if counted >= 0 else None, allowed)
                same = tokens[i] == token or (token >= 0 <= tokens[i] and scores[token] - scores[tokens[i]] < 2e-4)
                if same and token >= 0:
                    same = abs(logprobs[i] - (logprob if tokens[i] == token else logprobs[i])) < 1e-3
                require(bool(same), f"{name} scale {scale} row {i} {rows[i]}: {tokens[i]} for {token}")
                mistakes, total = mistakes + (tokens[i] != token), total + 1
                if counted >= 0:
                    sampling_case.count(expected[counted], int(tokens[i]), int(counters[i, 3]))
            require(bool((after == expected).all()), f"{name} scale {scale}: counts changed wrongly")
            first = tokens
            for _ in range(dev.REPEATS):
                buffers["counts"].copy_(torch.tensor(before))
                launch()
                require(bool((buffers["drawn"][:, 0].cpu().numpy() == first).all()), f"{name}: repeats differ")
        record("numerics", name, f"{total} rows", near_ties=int(mistakes))
    check_distribution(lib)
    check_top(lib)


def top_buffers(wanted: list[int], logits: torch.Tensor) -> dict[str, Any]:
    counters = np.zeros((len(wanted), 8), np.int32)
    counters[:, 6] = wanted
    return {"logits": logits, "counters": torch.tensor(counters, device=dev.DEVICE),
            "top_ids": dev.poisoned([len(wanted), TOP_LOGPROBS], "int32"),
            "top_logprobs": dev.poisoned([len(wanted), TOP_LOGPROBS], "float32")}


def check_top(lib: dev.Library) -> None:
    for name in lib.names("top."):
        vocab, wanted = lib.spec(name)["vocab_size"], [TOP_LOGPROBS, 5, TOP_LOGPROBS, 1, 0]
        g = torch.Generator(dev.DEVICE).manual_seed(3)
        logits = torch.randn((len(wanted), vocab), generator=g, device=dev.DEVICE) * 3
        logits[1] = logits[1].round()
        logits[2, 7:] = -math.inf
        buffers = top_buffers(wanted, logits)
        lib.prepare(name, buffers)()
        for i, count in enumerate(wanted):
            z = logits[i].double().cpu().numpy()
            best = np.argsort(-z, kind="stable")[:count]
            found = buffers["top_logprobs"][i, :count].cpu().numpy()
            expected = z[best] - z.max() - np.log(np.exp(z - z.max()).sum())
            require(bool((buffers["top_ids"][i, :count].cpu().numpy() == best).all()), f"{name} row {i}: tokens")
            require(bool(np.allclose(found, expected, rtol=1e-6, atol=1e-4)), f"{name} row {i}: log-probabilities")
        require(bool((buffers["top_ids"][4] == buffers["top_ids"][4, 0]).all()), f"{name}: what nobody wants was written")
        record("numerics", name, f"{len(wanted)} rows")


def check_distribution(lib: dev.Library) -> None:
    """20000 draws of one row against its probabilities (chi-squared over the 20 likeliest and the rest)."""
    name, b = "sample.128256", 2000
    if name not in lib:
        return
    g = torch.Generator(dev.DEVICE).manual_seed(9)
    row = torch.randn((1, 128256), generator=g, device=dev.DEVICE) * 3
    for setting in ({}, dict(top_k=50, top_p=0.9)):
        hits = np.zeros(128256)
        buffers = sampling_buffers(128256, [setting] * b, row.expand(b, -1).contiguous(), False)
        launch = lib.prepare(name, buffers)
        for step in range(10):
            buffers["counters"][:, 3] = step
            launch()
            hits += np.bincount(buffers["drawn"][:, 0].cpu().numpy(), minlength=128256)
        z = row[0].double().cpu().numpy()
        keep = sampling_case.kept(z, setting.get("top_k", 0), setting.get("top_p", 1.0), 0.0)
        p = np.where(keep, np.exp(z - z.max()), 0)
        p /= p.sum()
        top = np.argsort(-p)[:20]
        expected = np.append(p[top], max(1 - p[top].sum(), 1e-12)) * b * 10
        observed = np.append(hits[top], hits.sum() - hits[top].sum())
        used = expected > 5
        chi = float((((observed - expected) ** 2) / expected)[used].sum())
        record("numerics", name, f"distribution {setting}", chi_squared=chi, degrees=int(used.sum() - 1))
        require(chi < 60 and hits[~keep].sum() == 0, f"{name} {setting}: chi-squared {chi:.1f}")


def sanitize(lib: dev.Library) -> None:
    """Every kernel once on small inputs; run it under compute-sanitizer."""
    ragged = [1025, 90, 1100, 0, *[1030] * 12]                    # 16 rows, of which 14 share their leading keys
    shared = [1024, 0, 1024, 0, *[1024] * 12]
    for name, lengths, queries, leading in (
            ("decode.d64_p16", [1, 16, 17, 300, 0], None, None), ("decode.d128_p8", [129, 5], None, None),
            ("prefill.d128_p8", [140, 300], [140, 20], None), ("prefill.d96_p16_w", [140, 300], [140, 20], None),
            ("prefill.d64_p16_e4m3", [140, 300], [140, 20], None),
            ("prefill.d128_p64_f16_e4m3", [140, 300], [140, 20], None),
            ("spread.d64_p16@16", ragged, None, shared), ("spread.d128_g16@16", ragged, None, shared)):
        case = dev.PagedCase(lib.spec(name), lengths, queries, shared=leading)
        lib.prepare(name, case.buffers(1))()
        torch.cuda.synchronize()
        require(bool(torch.isfinite(case.y).all()), name)
    for name in ("rope.norm", "rope.f16"):
        lib.prepare(name, rope_buffers(lib.spec(name), 5))()
    logits = torch.randn((4, 5003), device=dev.DEVICE) * 3
    rows: list[dict[str, Any]] = [dict(temperature=0), {}, dict(top_k=40, top_p=0.9, counts_row=1),
                                  dict(top_p=0.95, temperature=9.0)]
    lib.prepare("sample.5003c", sampling_buffers(5003, rows, logits, True))()
    torch.cuda.synchronize()


# times

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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS))
    args = parser.parse_args()
    parts = args.only.split(",")
    start = time.time()
    lib = dev.Library(args.folder)
    ceiling = read_bandwidth() if parts != ["sanitize"] else 0.0
    print(f"{torch.cuda.get_device_name()}: read {ceiling / 1e12:.2f} TB/s")
    steps = {"check_rope": lambda: check_rope(lib), "check_sample": lambda: check_sampling(lib),
             "check_decode": lambda: check_attention(lib, "decode", ""), "check_fused": lambda: check_fused(lib),
             "check_spread": lambda: check_spread(lib),
             "check_mma": lambda: check_attention(lib, "prefill", "mma"),
             "check_hopper": lambda: check_attention(lib, "prefill", "hopper"),
             "sanitize": lambda: sanitize(lib), "decode": lambda: time_decode(lib, ceiling, args.quick),
             "prefill": lambda: time_prefill(lib, args.quick),
             "rope": lambda: time_rope(lib, ceiling), "sample": lambda: time_sampling(lib)}
    for part in parts:
        try:
            steps[part]()
        except Exception as error:                         # a broken part must not hide the others' numbers
            import traceback

            traceback.print_exc()
            FAILURES.append(f"{part}: {type(error).__name__}: {str(error).splitlines()[0]}")
        print(f"-- {part}: {time.time() - start:.0f} s", flush=True)
    result = {"device": torch.cuda.get_device_name(), "read_bandwidth": ceiling, "torch": torch.__version__,
              "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "rows": ROWS, "failures": FAILURES}
    args.out.mkdir(parents=True, exist_ok=True)
    label = "all" if len(parts) == len(PARTS) else "-".join(parts)
    (args.out / f"attention-{label}.json").write_text(json.dumps(result, indent=1) + "\n")
    print("FAILURES:" if FAILURES else "all checks passed", *FAILURES, sep="\n")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    raise SystemExit(main())
