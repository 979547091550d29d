"""Inputs on which CPU kernels are checked and timed, and what must come out, in float64 NumPy written for clarity.

A check has one set of arguments; a timing has many, which differ in what a step of a model would read anew (weights, pages)
and together exceed the last-level cache, so that every call finds its data in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relaxpack.kernel_spec import AttentionSpec, LinearSpec, NormSpec
from relaxpack.schedules.kernels.cpu import layout
from relaxpack.weight_format import FORMATS, QuantizedTensor

MAX_SETS = 512
CONTEXTS = (64, 256, 1024)     # tokens behind a decoding sequence; their mean time counts
_LARGEST_CODE = {"q5_0": (-16, 15), "q6_k": (-32, 31), "q8_0": (-128, 127)}


@dataclass
class Case:
    """Arguments of calls in parameter order; the same array object in several sets is the same memory."""

    sets: list[list[Any]]
    outputs: tuple[int, ...]                                   # written by the kernel
    expected: list[np.ndarray] = field(default_factory=list)   # of each output of the first set, float64
    bounds: list[np.ndarray] = field(default_factory=list)     # how far from it is still right


Make = Callable[[Any, int, int], Case]   # spec, rows, seed


def check_rows(family: str, spec: Any, bucket: int) -> tuple[int, ...]:
    """A kernel must be right for any number of rows, whatever it was tuned for."""
    return tuple(sorted({1, 3, bucket, bucket + 5}))


def check_case(family: str, spec: Any, rows: int, seed: int) -> Case:
    """Raises KeyError for a family without a reference."""
    return _CHECKS[family](spec, rows, seed)


def timing_case(family: str, spec: Any, rows: int, seed: int, rotate: int) -> Case:
    """Sets of arguments that exceed `rotate` bytes, at most MAX_SETS."""
    if "attention" in family or "append" in family:
        return _attention_sets(family, spec, rows, seed, rotate)
    case = _CHECKS[family](spec, rows, seed) if "linear" not in family else _linear(spec, rows, seed, reference=False)
    arguments = case.sets[0]
    changing = [i for i, a in enumerate(arguments) if "linear" not in family or i == 1]
    size = sum(arguments[i].nbytes for i in changing)
    sets = [[a.copy() if i in changing else a for i, a in enumerate(arguments)]
            for _ in range(max(1, min(MAX_SETS, -(-rotate // size))))]
    return Case(sets, case.outputs)


# ---- linear ----

def random_weight(spec: LinearSpec, rng: np.random.Generator) -> np.ndarray | QuantizedTensor:
    fmt, n, k = spec.weight, spec.out_features, spec.in_features
    if not fmt.quantized:
        return rng.standard_normal((n, k), dtype=np.float32).astype("float16" if fmt.name == "f16" else "float32")
    low, high = _LARGEST_CODE.get(fmt.name, (0, 15 if fmt.bits == 4 else 31))
    codes = rng.integers(low, high, (n, k), np.int8 if fmt.signed else np.uint8, endpoint=True)
    codes[0], codes[-1] = low, high      # the ends of the range, all along a row
    shape = (n, k // fmt.group_size)
    scales = (rng.choice([-1, 1], shape) * rng.uniform(0.5, 1.5, shape) / high).astype(fmt.scale_dtype)
    lows = rng.standard_normal(shape).astype(fmt.scale_dtype) if fmt.minimum == "stored" else None
    return QuantizedTensor(fmt, codes, scales, lows)


def rounded(x: np.ndarray, group: int) -> np.ndarray:
    """Activations as the quantised kernels round them: int8 with one scale a group."""
    groups = x.reshape(len(x), -1, group)
    largest = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / np.maximum(largest, np.float32(1e-30))))
    return (codes.astype(np.float64) * (largest * np.float32(1 / 127))).reshape(x.shape)


def _linear(spec: LinearSpec, rows: int, seed: int, reference: bool = True) -> Case:
    rng = np.random.default_rng(seed)
    fmt, n, k = spec.weight, spec.out_features, spec.in_features
    weight = random_weight(spec, rng)
    packed = layout.pack(layout.weight_layout(fmt, n, k, spec.gated), weight)[""]
    columns = n // 2 if spec.gated else n
    x = (rng.standard_normal((rows, k)) * np.exp(rng.standard_normal((rows, k))) / np.sqrt(k)).astype(np.float32)
    x[-1, :fmt.group_size or 3] = 0      # a group without a largest value
    bias = rng.standard_normal(n).astype(np.float32) if spec.bias else None
    residual = rng.standard_normal((rows, columns)).astype(np.float32) if spec.residual else None
    arguments = [a for a in (x, packed, bias, residual) if a is not None] + [np.full((rows, columns), np.nan, np.float32)]
    case = Case([arguments], (len(arguments) - 1,))
    if reference:
        used = rounded(x, fmt.group_size) if fmt.quantized else x.astype(np.float64)
        product, magnitude = _product(used, weight, fmt.name)
        expected = product + (bias if bias is not None else 0)
        if spec.gated:
            gate, up = np.split(expected, 2, axis=1)
            slope = 1 if spec.glu == "swiglu" else np.sqrt(8 / np.pi) * (1 + 0.044715 * gate**2)
            expected = gate / (1 + np.exp(-slope * gate)) * up
        bound = 3e-6 * magnitude * (4 * max(1.0, np.abs(expected).max()) if spec.gated else 1) + 1e-6
        case.expected = [expected + (residual if residual is not None else 0)]
        case.bounds = [np.broadcast_to(bound, expected.shape)]
    return case


def _product(x: np.ndarray, weight: np.ndarray | QuantizedTensor, name: str) -> tuple[np.ndarray, float]:
    """(x W^T, the largest sum of magnitudes that float32 may round), a slice of W at a time."""
    parts, largest = [], 0.0
    for first in range(0, len(weight.codes if isinstance(weight, QuantizedTensor) else weight), 4096):
        rows = slice(first, first + 4096)
        if isinstance(weight, QuantizedTensor):
            low = None if weight.minimums is None else weight.minimums[rows]
            part = QuantizedTensor(weight.format, weight.codes[rows], weight.scales[rows], low)
            w = part.dequantize().astype(np.float64)
            # The kernels add scale * codes and the minimum apart: either may be larger than their sum.
            size = np.abs(w) + np.abs(part.codes * np.repeat(part.scales.astype(np.float64), part.format.group_size, 1))
        else:
            stored = weight[rows]
            if name == "bf16":
                stored = (layout.bfloat16_bits(stored).astype(np.uint32) << 16).view(np.float32)
            w = stored.astype(np.float64)
            size = np.abs(w)
        parts.append(x @ w.T)
        largest = max(largest, float((np.abs(x) @ size.T).max()))
    return np.concatenate(parts, axis=1), largest


# ---- norm ----

def _norm(spec: NormSpec, rows: int, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    x, residual = rng.standard_normal((2, rows, spec.hidden_size)).astype(np.float32)
    weight = rng.standard_normal(spec.hidden_size).astype(np.float32)
    total = x.astype(np.float64) + (residual if spec.residual else 0)
    y = total / np.sqrt((total**2).mean(-1, keepdims=True) + spec.epsilon) * weight
    inputs = [x, residual, weight] if spec.residual else [x, weight]
    expected = [total, y] if spec.residual else [y]
    arguments = inputs + [np.full(x.shape, np.nan, np.float32) for _ in expected]
    return Case([arguments], tuple(range(len(inputs), len(arguments))), expected,
                [4e-6 * np.abs(e) + 1e-6 for e in expected])


# ---- attention ----

@dataclass
class Pages:
    pages: np.ndarray
    table: np.ndarray


def random_pages(spec: AttentionSpec, lengths: list[int], rng: np.random.Generator, dtype: Any = None) -> Pages:
    """Pages in a shuffled order; what no sequence owns is NaN, so that reading it shows."""
    counts = [-(-n // spec.page_size) for n in lengths]
    order = rng.permutation(sum(counts)) + 1
    table = np.zeros((len(lengths), spec.max_pages), np.int32)
    pages = rng.standard_normal((spec.num_layers, sum(counts) + 1, 2, spec.num_kv_heads, spec.page_size, spec.head_dim),
                                dtype=np.float32).astype(dtype or spec.kv_dtype)
    pages[:, 0] = np.nan
    for s, count in enumerate(counts):
        table[s, :count] = order[sum(counts[:s]):sum(counts[:s + 1])]
        if lengths[s] % spec.page_size:
            pages[:, table[s, count - 1], :, :, lengths[s] % spec.page_size:] = np.nan
    return Pages(pages, table)


def attend(spec: AttentionSpec, q: np.ndarray, held: Pages, sequence: int, layer: int, position: int) -> np.ndarray:
    """One query at `position`."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    at = np.arange(first, position + 1)
    row = held.table[sequence]
    kv = held.pages[layer, row[at // spec.page_size], :, :, at % spec.page_size].astype(np.float64)   # [n, 2, KV, D]
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (np.repeat(kv[:, i], group, axis=1) for i in (0, 1))
    scores = np.einsum("hd,nhd->hn", q.reshape(spec.num_heads, -1).astype(np.float64), keys) * spec.scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(-1, keepdims=True), values).reshape(-1)


def _decode_attention(spec: AttentionSpec, rows: int, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    longest = min(spec.max_pages * spec.page_size, 300)
    lengths = [int(n) for n in rng.integers(1, longest + 1, rows)]
    lengths[0] = longest
    held = random_pages(spec, lengths, rng)
    q = rng.standard_normal((rows, spec.num_heads * spec.head_dim)).astype(np.float32)
    layer = spec.num_layers - 1
    expected = np.stack([attend(spec, q[s], held, s, layer, n - 1) for s, n in enumerate(lengths)])
    arguments = [q, held.pages, held.table, np.array(lengths, np.int32), layer, np.full(q.shape, np.nan, np.float32)]
    return Case([arguments], (5,), [expected], [1e-5 * np.abs(expected) + 3e-6])


def _prefill_attention(spec: AttentionSpec, rows: int, seed: int) -> Case:
    """`rows` tokens over two sequences, the second one behind a cached prefix."""
    rng = np.random.default_rng(seed)
    second = rows // 3
    steps = [(rows - second, 0), *([(second, 37)] if second else [])]
    lengths = [new + cached for new, cached in steps]
    held = random_pages(spec, lengths, rng)
    starts = np.cumsum([0] + [new for new, _ in steps]).astype(np.int32)
    q = rng.standard_normal((rows, spec.num_heads * spec.head_dim)).astype(np.float32)
    layer = spec.num_layers - 1
    expected = np.stack([attend(spec, q[starts[s] + i], held, s, layer, cached + i)
                         for s, (new, cached) in enumerate(steps) for i in range(new)])
    arguments = [q, held.pages, held.table, starts, np.array(lengths, np.int32), layer,
                 np.full(q.shape, np.nan, np.float32)]
    return Case([arguments], (6,), [expected], [1e-5 * np.abs(expected) + 3e-6])


def rope_table(spec: AttentionSpec, rng: np.random.Generator) -> np.ndarray:
    """Any angles, as cosines and sines."""
    angle = rng.uniform(0, 6, (spec.max_position, spec.rotary_dim // 2))
    return np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)


def _rope_append(spec: AttentionSpec, rows: int, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    heads, kv_heads, dim, half = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rotary_dim // 2
    table = rope_table(spec, rng)
    qkv = rng.standard_normal((rows, (heads + 2 * kv_heads) * dim)).astype(np.float32)
    positions = rng.integers(0, spec.max_position, rows).astype(np.int32)
    count = 1 + -(-rows // spec.page_size)
    slots = (rng.permutation((count - 1) * spec.page_size)[:rows] + spec.page_size).astype(np.int32)
    norms = list(rng.standard_normal((2, dim)).astype(np.float32)) if spec.qk_norm_epsilon is not None else []
    pages = np.zeros((spec.num_layers, count, 2, kv_heads, spec.page_size, dim), spec.kv_dtype)
    layer = spec.num_layers - 1
    split = qkv.reshape(rows, -1, dim).astype(np.float64)
    turned = split[:, :heads + kv_heads].copy()
    for weight, part in zip(norms, (turned[:, :heads], turned[:, heads:]), strict=False):
        part *= weight / np.sqrt((part**2).mean(-1, keepdims=True) + spec.qk_norm_epsilon)
    cos, sin = (t[:, None].astype(np.float64) for t in np.split(table[positions], 2, axis=1))
    a, b = turned[..., :half].copy(), turned[..., half:2 * half].copy()
    turned[..., :half], turned[..., half:2 * half] = a * cos - b * sin, b * cos + a * sin
    after = pages.astype(np.float64)
    page, offset = slots // spec.page_size, slots % spec.page_size
    after[layer, page, 0, :, offset] = turned[:, heads:]
    after[layer, page, 1, :, offset] = split[:, heads + kv_heads:]
    step = 2.0**-10 if spec.kv_dtype == "float16" else 4e-6
    q = turned[:, :heads].reshape(rows, -1)
    arguments = [qkv, table, positions, slots, *norms, pages, layer, np.full(q.shape, np.nan, np.float32)]
    return Case([arguments], (len(arguments) - 3, len(arguments) - 1), [after, q],
                [step * np.abs(after) + 1e-5, 4e-6 * np.abs(q) + 1e-5])


def _attention_sets(family: str, spec: AttentionSpec, rows: int, seed: int, rotate: int) -> Case:
    """Layers take turns, as they do in a step; where all layers together are too small, so do several caches."""
    rng = np.random.default_rng(seed)
    if family.endswith("rope_append"):
        first = _rope_append(spec, rows, seed).sets[0]
        at = len(first) - 2
        return Case([[*first[:at], layer, first[-1]] for layer in range(spec.num_layers)], (at - 1, at + 1))
    decode = family.endswith("decode_attention")
    limit = spec.max_pages * spec.page_size
    contexts = [n for n in CONTEXTS if n <= limit] if decode else [min(rows, limit)]
    size = 2 * spec.num_kv_heads * spec.head_dim * np.dtype(spec.kv_dtype).itemsize * spec.num_layers
    size *= sum(contexts) * (rows if decode else 1)
    q = rng.standard_normal((rows, spec.num_heads * spec.head_dim)).astype(np.float32)
    y = np.zeros(q.shape, np.float32)
    caches = []
    for context in contexts * max(1, -(-rotate // size)):
        lengths = [context] * rows if decode else [rows]
        held = random_pages(spec, lengths, rng)
        middle: list[Any] = [held.table] if decode else [held.table, np.array([0, rows], np.int32)]
        caches.append([q, held.pages, *middle, np.array(lengths, np.int32)])
    return Case([[*cache, layer, y] for layer in range(spec.num_layers) for cache in caches], (len(caches[0]) + 1,))


_CHECKS: dict[str, Make] = {
    "cpu.linear_quantized": _linear, "cpu.linear_float": _linear, "cpu.norm": _norm,
    "cpu.decode_attention": _decode_attention, "cpu.prefill_attention": _prefill_attention, "cpu.rope_append": _rope_append}

assert set(_LARGEST_CODE) <= set(FORMATS)
