"""Buffers for the RoPE+append and sampling kernels on the GPU: random inputs, poisoned outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from relaxpack.kernel_spec import SAMPLING_SETTINGS, TOP_LOGPROBS
from tests.helpers import attention_device as dev
from tests.helpers import sampling_case

OFF = dict(temperature=1.0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0, typical_p=1.0, top_k=0,
           counts_row=-1)


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


def top_buffers(wanted: list[int], logits: torch.Tensor) -> dict[str, Any]:
    counters = np.zeros((len(wanted), 8), np.int32)
    counters[:, 6] = wanted
    return {"logits": logits, "counters": torch.tensor(counters, device=dev.DEVICE),
            "top_ids": dev.poisoned([len(wanted), TOP_LOGPROBS], "int32"),
            "top_logprobs": dev.poisoned([len(wanted), TOP_LOGPROBS], "float32")}
