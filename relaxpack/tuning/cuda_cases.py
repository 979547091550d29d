"""Inputs on which CUDA kernels are checked and timed, by the buffer names of `relaxpack.kernel_spec`, and what must come
out, in float64 NumPy. Needs no GPU.

Weights repeat after some hundred rows, so that a reference costs as many columns whatever the size of the matrix; the number
is none that an indexing mistake would be off by. They are exact in 16 bits, scales and all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from relaxpack.kernel_spec import NORM_GROUP, AttentionSpec, FusedAttentionSpec, LinearSpec, NormSpec
from relaxpack.schedules.kernels.cuda.packing import pack, weight_layout
from relaxpack.tuning.cases import Case, Pages, attend, random_pages, rope_table
from relaxpack.weight_format import LARGEST_ZERO, WHOLE_ROW, QuantizedTensor, WeightFormat

TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 3e-5}      # relative error of a whole output
PERIOD = 16 * 61                          # rows of a weight
CONTEXTS = (512, 2048)                    # tokens behind a decoding sequence in a timing
FEW_NORM_ROWS, MANY_NORM_ROWS = (1, 64), (512, 4096)      # one kernel serves all of them
CACHE_BYTES = 4 << 30                     # keys and values of a timing, at most
_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Repeated:
    """An array of this shape made of copies of `block`, one behind the other: filled on the device."""

    block: np.ndarray
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.block.itemsize


@dataclass
class GpuCase:
    """`buffers` of a call. Calls that follow each other differ in `variants` (in turn), and each has copies of its own of
    what is named in `copied`, until all that differs exceeds the L2 cache."""

    rows: int
    buffers: dict[str, Any]
    outputs: tuple[str, ...]
    copied: tuple[str, ...] = ()
    variants: list[dict[str, Any]] = field(default_factory=list)
    expected: dict[str, np.ndarray] = field(default_factory=dict)     # float64, NaN where NaN must stay; pages: of the layer
    tolerance: float = TOLERANCE["bfloat16"]
    bounds: dict[str, np.ndarray] = field(default_factory=dict)       # of each element, in place of a tolerance
    read_bytes: int = 0                                               # of a call, about

    def bytes_of_copy(self) -> int:
        return sum(self.buffers[name].nbytes for name in self.copied)


    def share(self, name: str, got: np.ndarray) -> float:
        """The error of an output as a share of what is allowed; infinite where NaN is on one side only."""
        expected, wide = self.expected[name], got.astype(np.float64)
        if wide.ndim > expected.ndim:
            wide = wide[self.buffers["layer"]]
        there = ~np.isnan(expected)
        if not np.array_equal(~np.isnan(wide), there):
            return math.inf
        error = np.abs((wide - expected)[there])
        if name in self.bounds:
            share = float((error / self.bounds[name][there]).max(initial=0.0))
        else:
            share = float(np.linalg.norm(error) / max(float(np.linalg.norm(expected[there])), 1e-30)) / self.tolerance
        return share if math.isfinite(share) else math.inf


def dtype_of(name: str) -> Any:
    return np.dtype(_DTYPES.get(name, name))


def stored(value: Any) -> Any:
    """As a kernel gets it: e4m3 numbers are bytes."""
    if isinstance(value, Repeated):
        return Repeated(stored(value.block), value.shape)
    if isinstance(value, np.ndarray) and value.dtype == ml_dtypes.float8_e4m3fn:
        return value.view(np.uint8)
    return value


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.full(shape, -123456789 if dtype.startswith("int") else np.nan, dtype_of(dtype))


def check_cases(family: str, spec: Any, bucket: int, seed: int) -> list[GpuCase]:
    """A kernel must be right for any rows it may get, whatever it was tuned for."""
    if family == "cuda.linear":
        return [linear_case(spec, bucket, seed)]
    if family == "cuda.norm":
        return [_norm(spec, rows, seed + rows) for rows in sorted({1, 3, bucket, bucket + 5})]
    if family == "cuda.decode_attention":
        return [_decode_attention(spec, rows, seed + rows) for rows in sorted({1, 3, min(bucket, 32)})]
    if family == "cuda.prefill_attention":
        return [_prefill_attention(spec, rows, seed + rows) for rows in sorted({1, 3, min(bucket, 256) + 5})]
    if family == "cuda.rope_append_attention":
        return [_fused(spec.attention, spec.rows, seed)]
    raise KeyError(family)


def primfunc_gpu_case(case: Case) -> GpuCase:
    """Of a function that no kernel covers: its buffers are named by their places."""
    first = case.sets[0]
    outputs = tuple(str(i) for i in case.outputs)
    return GpuCase(1, {str(i): value for i, value in enumerate(first)}, outputs,
                   tuple(str(i) for i, value in enumerate(first) if isinstance(value, np.ndarray)),
                   expected=dict(zip(outputs, case.expected, strict=False)),
                   bounds=dict(zip(outputs, case.bounds, strict=False)))


def timing_cases(family: str, spec: Any, bucket: int, seed: int, rotate: int) -> list[GpuCase]:
    """The geometric mean of their times counts."""
    if family == "cuda.linear":
        return [linear_case(spec, bucket, seed, reference=False)]
    if family == "cuda.norm":
        moved = ("x", "residual", "total", "y") if spec.residual else ("x", "y")
        some = MANY_NORM_ROWS if spec.many_rows else FEW_NORM_ROWS
        return [replace(_norm(spec, rows, seed), copied=moved) for rows in sorted({*some, bucket})]
    if family == "cuda.prefill_attention":
        return [_pages_in_turn(spec, [bucket], bucket, True, seed, rotate)]
    attention = spec.attention if isinstance(spec, FusedAttentionSpec) else spec
    counts = (bucket,) if isinstance(spec, FusedAttentionSpec) else sorted({1, bucket})
    limit = attention.max_pages * attention.page_size
    shapes = [(count, tokens) for count in counts for tokens in CONTEXTS
              if tokens <= limit and (tokens == CONTEXTS[0] or _cache_bytes(attention, count * tokens) <= CACHE_BYTES)]
    found = [_pages_in_turn(attention, [tokens] * count, count, False, seed, rotate) for count, tokens in shapes]
    if isinstance(spec, FusedAttentionSpec):
        for case, (count, tokens) in zip(found, shapes, strict=True):
            _with_rotation(case, attention, count, tokens, seed)
    return found


def step_case(family: str, spec: Any, rows: int, seed: int) -> GpuCase:
    """What a kernel of a decode step gets, in one set; attention and what belongs to it are one."""
    if family == "cuda.linear":
        return linear_case(spec, rows, seed, reference=False)
    if family == "cuda.norm":
        return _norm(spec, rows, seed)
    attention = spec.attention if isinstance(spec, FusedAttentionSpec) else spec
    tokens = min(CONTEXTS[0], attention.max_pages * attention.page_size)
    case = _pages_in_turn(attention, [tokens] * rows, rows, False, seed, 0)
    q = case.buffers["q"]
    _with_rotation(case, attention, rows, tokens, seed)
    case.buffers["q"] = q
    return case


# ---- matmul ----

def linear_case(spec: LinearSpec, rows: int, seed: int, reference: bool = True) -> GpuCase:
    rng = np.random.default_rng(seed)
    n, k, act = spec.out_features, spec.in_features, dtype_of(spec.activation_dtype)
    width = n // 2 if spec.gated else n
    weights, plain = _weights(spec.weight, n, k, seed)
    buffers: dict[str, Any] = {"x": rng.standard_normal((rows, k), np.float32).astype(act), **weights,
                               "y": poisoned((rows, width), spec.out_dtype)}
    if spec.bias:
        buffers["bias"] = rng.standard_normal(n, np.float32)
    if spec.residual:
        buffers["residual"] = rng.standard_normal((rows, width), np.float32).astype(act)
    if spec.norm_epsilon is not None:
        buffers["squares"] = (rng.standard_normal((rows, k // NORM_GROUP), np.float32) ** 2) * NORM_GROUP
    outputs: tuple[str, ...] = ("y",)
    if spec.prepares_norm:
        buffers |= {"norm_weight": rng.standard_normal(n, np.float32), "scaled": poisoned((rows, n), spec.activation_dtype),
                    "squares": poisoned((rows, n // NORM_GROUP), "float32")}
        outputs = ("y", "scaled", "squares")
    case = GpuCase(rows, buffers, outputs, tuple(weights), tolerance=TOLERANCE[spec.out_dtype])
    case.read_bytes = case.bytes_of_copy() + buffers["x"].nbytes + buffers["y"].nbytes
    if reference:
        case.expected = _product(spec, buffers, plain)
    return case


def _product(spec: LinearSpec, buffers: dict[str, Any], plain: np.ndarray) -> dict[str, np.ndarray]:
    n, x = spec.out_features, buffers["x"].astype(np.float64)
    z = np.resize((x @ plain.T).T, (n, len(x))).T            # columns repeat as the rows of the weight do
    if spec.norm_epsilon is not None:
        mean = buffers["squares"].astype(np.float64).sum(-1, keepdims=True) / spec.in_features
        z = z / np.sqrt(mean + spec.norm_epsilon)
    if spec.bias:
        z = z + buffers["bias"]
    if spec.gated:                                            # packed rows are blocks of 8 gate rows and their 8 up rows
        pairs = z.reshape(len(z), -1, 2, 8)
        gate, up = (pairs[:, :, i].reshape(len(z), n // 2) for i in (0, 1))
        inner = gate if spec.glu == "swiglu" else np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3)
        z = gate / (1 + np.exp(-inner)) * up
    if spec.residual:
        z = z + buffers["residual"].astype(np.float64)
    if not spec.prepares_norm:
        return {"y": z}
    return {"y": z, "scaled": z * buffers["norm_weight"], "squares": (z.reshape(len(z), -1, NORM_GROUP) ** 2).sum(-1)}


@lru_cache(maxsize=8)
def _weights(fmt: WeightFormat, n: int, k: int, seed: int) -> tuple[dict[str, Any], np.ndarray]:
    """(buffers in packed order, the PERIOD rows they repeat, in float64)."""
    rng = np.random.default_rng([seed, 1])                # not the numbers of x
    rows = min(PERIOD, -(-n // 16) * 16)
    if not fmt.quantized:
        values = (rng.standard_normal((rows, k), np.float32) / np.sqrt(k)).astype(dtype_of(fmt.dtype))
        return {"weight": Repeated(values, (n, k))}, values.astype(np.float64)
    held = random_quantized(fmt, rows, k, rng)
    packed = pack(weight_layout(fmt, rows, k, False), held)
    wanted = weight_layout(fmt, n, k, False).buffers
    return ({f"weight.{suffix}": Repeated(packed[suffix], shape) for suffix, shape, _ in wanted},
            held.dequantize().astype(np.float64))


def random_quantized(fmt: WeightFormat, rows: int, k: int, rng: np.random.Generator) -> QuantizedTensor:
    groups = fmt.groups(k)
    powers = np.exp2(-rng.integers(6, 9, (rows, groups))).astype(fmt.scale_dtype)
    if fmt.e4m3:
        codes = rng.integers(0, 256, (rows, k), np.uint8)
        codes[codes & 0x7F == 0x7F] ^= 1                      # no NaN
        if fmt.group_size == WHOLE_ROW:
            powers = powers * np.float32(2.0**-4)
    else:
        low, high = (-128, 127) if fmt.signed else (0, (1 << min(fmt.bits, 5)) - 1)
        codes = rng.integers(low, high, (rows, k), np.int8 if fmt.signed else np.uint8, endpoint=True)
    lows = np.full(powers.shape, -(2.0**-5), fmt.scale_dtype) if fmt.minimum == "stored" else None
    zeros = rng.integers(0, LARGEST_ZERO, powers.shape, np.uint8, endpoint=True) if fmt.zeros else None
    return QuantizedTensor(fmt, codes, powers, lows, zeros)


# ---- norm ----

def _norm(spec: NormSpec, rows: int, seed: int) -> GpuCase:
    rng = np.random.default_rng(seed)
    act, shape = dtype_of(spec.activation_dtype), (rows, spec.hidden_size)
    buffers: dict[str, Any] = {"x": (3 * rng.standard_normal(shape, np.float32)).astype(act),
                               "weight": rng.standard_normal(spec.hidden_size, np.float32),
                               "y": poisoned(shape, spec.activation_dtype)}
    total = buffers["x"].astype(np.float64)
    if spec.residual:
        buffers |= {"residual": rng.standard_normal(shape, np.float32).astype(act),
                    "total": poisoned(shape, spec.activation_dtype)}
        total = (buffers["x"].astype(np.float32) + buffers["residual"].astype(np.float32)).astype(act).astype(np.float64)
    y = total / np.sqrt((total**2).mean(-1, keepdims=True) + spec.epsilon) * buffers["weight"]
    expected = {"total": total, "y": y} if spec.residual else {"y": y}
    return GpuCase(rows, buffers, tuple(expected), expected=expected, tolerance=TOLERANCE[spec.activation_dtype],
                   read_bytes=sum(buffers[name].nbytes for name in buffers))


# ---- attention ----

def _queries(spec: AttentionSpec, rows: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((rows, spec.num_heads * spec.head_dim), np.float32).astype(dtype_of(spec.activation_dtype))


def _lengths(spec: AttentionSpec, rows: int, rng: np.random.Generator) -> list[int]:
    longest = min(spec.max_pages * spec.page_size, 300, max(40, 4800 // rows))
    return [longest, *(int(n) for n in rng.integers(1, longest + 1, rows - 1))]


def _decode_attention(spec: AttentionSpec, rows: int, seed: int) -> GpuCase:
    rng = np.random.default_rng(seed)
    lengths, layer = _lengths(spec, rows, rng), spec.num_layers - 1
    held = random_pages(spec, lengths, rng, dtype_of(spec.kv_dtype))
    q = _queries(spec, rows, rng)
    expected = np.stack([attend(spec, q[s], held, s, layer, n - 1) for s, n in enumerate(lengths)])
    return GpuCase(rows, {"q": q, "pages": held.pages, "page_table": held.table, "lengths": np.array(lengths, np.int32),
                          "layer": layer, "y": poisoned(q.shape, spec.activation_dtype)},
                   ("y",), expected={"y": expected}, tolerance=TOLERANCE[spec.activation_dtype])


def _prefill_attention(spec: AttentionSpec, rows: int, seed: int) -> GpuCase:
    """`rows` tokens over two sequences, the second one behind a cached prefix."""
    rng = np.random.default_rng(seed)
    second = rows // 3
    steps = [(rows - second, 0), *([(second, 37)] if second else [])]
    lengths, layer = [new + cached for new, cached in steps], spec.num_layers - 1
    held = random_pages(spec, lengths, rng, dtype_of(spec.kv_dtype))
    starts = np.cumsum([0] + [new for new, _ in steps]).astype(np.int32)
    q = _queries(spec, rows, rng)
    expected = np.stack([attend(spec, q[starts[s] + i], held, s, layer, cached + i)
                         for s, (new, cached) in enumerate(steps) for i in range(new)])
    return GpuCase(rows, {"q": q, "pages": held.pages, "page_table": held.table, "query_start": starts,
                          "lengths": np.array(lengths, np.int32), "layer": layer,
                          "y": poisoned(q.shape, spec.activation_dtype)},
                   ("y",), expected={"y": expected}, tolerance=TOLERANCE[spec.activation_dtype])


def _fused(spec: AttentionSpec, rows: int, seed: int) -> GpuCase:
    """RoPE, append and attention of `rows` sequences. Besides y, every page of the layer is compared: only the new keys and
    values may have changed."""
    rng = np.random.default_rng(seed)
    lengths, layer = _lengths(spec, rows, rng), spec.num_layers - 1
    kv, act = dtype_of(spec.kv_dtype), dtype_of(spec.activation_dtype)
    held = random_pages(spec, lengths, rng, kv)
    case = GpuCase(rows, {"pages": held.pages.copy(), "page_table": held.table, "lengths": np.array(lengths, np.int32),
                          "layer": layer}, ("y",), tolerance=TOLERANCE[spec.activation_dtype])
    _with_rotation(case, spec, rows, None, seed)
    given = case.buffers
    heads, kv_heads, half = spec.num_heads, spec.num_kv_heads, spec.rotary_dim // 2
    split = given["qkv"].astype(np.float64).reshape(rows, -1, spec.head_dim)
    turned = split[:, :heads + kv_heads].copy()
    if spec.qk_norm_epsilon is not None:
        for name, part in (("q_norm", turned[:, :heads]), ("k_norm", turned[:, heads:])):
            part *= given[name] / np.sqrt((part**2).mean(-1, keepdims=True) + spec.qk_norm_epsilon)
    cos, sin = (t[:, None].astype(np.float64) for t in np.split(given["rope_table"][given["positions"]], 2, axis=1))
    a, b = turned[..., :half].copy(), turned[..., half:2 * half].copy()
    turned[..., :half], turned[..., half:2 * half] = a * cos - b * sin, b * cos + a * sin
    page, offset = given["slots"] // spec.page_size, given["slots"] % spec.page_size
    pages = held.pages[layer:layer + 1].astype(np.float64)
    new = np.stack([turned[:, heads:], split[:, heads + kv_heads:]], axis=1)          # [t, 2, KV, D]
    pages[0, page, :, :, offset] = new.astype(kv).astype(np.float64)
    queries = turned[:, :heads].reshape(rows, -1).astype(act).astype(np.float64)
    after = Pages(pages, held.table)
    case.expected = {"y": np.stack([attend(spec, queries[s], after, s, 0, n - 1) for s, n in enumerate(lengths)]),
                     "pages": pages[0]}
    return case


def _with_rotation(case: GpuCase, spec: AttentionSpec, rows: int, tokens: int | None, seed: int) -> None:
    """qkv and what rotation and append need, for a case that has pages: its last token is the new one."""
    rng = np.random.default_rng(seed + 1)
    given = case.buffers
    given.pop("q", None)
    lengths, size = given["lengths"], spec.page_size
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    given |= {"qkv": rng.standard_normal((rows, width), np.float32).astype(dtype_of(spec.activation_dtype)),
              "rope_table": rope_table(spec, rng), "positions": (lengths - 1).astype(np.int32),
              "y": poisoned((rows, spec.num_heads * spec.head_dim), spec.activation_dtype)}
    if spec.qk_norm_epsilon is not None:
        given |= {name: rng.standard_normal(spec.head_dim, np.float32) for name in ("q_norm", "k_norm")}
    for one in (given, *case.variants):
        if "page_table" in one:
            last = (lengths - 1).astype(np.int64)
            pages = one["page_table"][np.arange(rows), last // size]
            one["slots"] = (pages * size + last % size).astype(np.int32)


def _cache_bytes(spec: AttentionSpec, tokens: int) -> int:
    return 2 * spec.num_kv_heads * spec.head_dim * dtype_of(spec.kv_dtype).itemsize * spec.num_layers * tokens


def _pages_in_turn(spec: AttentionSpec, lengths: list[int], rows: int, prefill: bool, seed: int, rotate: int) -> GpuCase:
    """Layers take turns, as they do in a step; where all layers together are too small, so do several sets of sequences."""
    rng = np.random.default_rng(seed)
    counts = [-(-n // spec.page_size) for n in lengths]
    tables = []
    groups = max(1, -(-rotate // _cache_bytes(spec, sum(lengths))))
    order = rng.permutation(groups * sum(counts)).astype(np.int32) + 1
    for group in range(groups):
        table, used = np.zeros((len(lengths), spec.max_pages), np.int32), group * sum(counts)
        for s, count in enumerate(counts):
            table[s, :count] = order[used:used + count]
            used += count
        tables.append(table)
    block = rng.standard_normal(1048573, np.float32).astype(dtype_of(spec.kv_dtype))
    shape = (spec.num_layers, len(order) + 1, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
    q = _queries(spec, rows, rng)
    buffers: dict[str, Any] = {"q": q, "pages": Repeated(block, shape), "page_table": tables[0],
                               "lengths": np.array(lengths, np.int32), "layer": 0,
                               "y": poisoned(q.shape, spec.activation_dtype)}
    if prefill:
        buffers["query_start"] = np.array([0, rows], np.int32)
    variants = [{"page_table": table, "layer": layer} for layer in range(spec.num_layers) for table in tables]
    return GpuCase(rows, buffers, ("y",), variants=variants, tolerance=TOLERANCE[spec.activation_dtype],
                   read_bytes=_cache_bytes(spec, sum(lengths)) // spec.num_layers)
