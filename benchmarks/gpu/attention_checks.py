"""Checks the CUDA attention, RoPE+append and sampling kernels against float64, with poisoned outputs and equal repeats. On
the GPU machine: TVM's runtime and torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.attention_inputs import rope_buffers, sampling_buffers, top_buffers
from benchmarks.gpu.attention_report import record, require
from relaxpack.kernel_spec import TOP_LOGPROBS
from relaxpack.model_info import FP8
from tests.helpers import attention_device as dev
from tests.helpers import sampling_case


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
            require(error < dev.TOLERANCE[spec["activation_dtype"]], f"{name} case {i} x{magnitude}: error {error:.2e}")
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
            require(dtype == buffers["q"].dtype and worst < dev.TOLERANCE[spec["activation_dtype"]],
                    f"{name} t={t}: error {worst:.2e}")
        record("numerics", name, "3 cases", error=worst)


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
