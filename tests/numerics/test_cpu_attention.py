"""RoPE, append and attention of the CPU against plain NumPy in float64, at every instruction set this machine can run."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.model_info import FP8
from relaxpack.schedules.kernels.cpu.provider import CpuKernels
from relaxpack.weight_format import E4M3
from tests.helpers.cpu_case import run


def attention_spec(**changes: object) -> AttentionSpec:
    given = dict(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=64, page_size=16, max_pages=16,
                 max_position=300, activation_dtype="float32", kv_dtype="float32", scale=0.0)
    given.update(changes)
    if "head_dim" in changes and "rotary_dim" not in changes:
        given["rotary_dim"] = changes["head_dim"]
    given["scale"] = given["head_dim"] ** -0.5  # type: ignore[operator]
    return AttentionSpec(**given)  # type: ignore[arg-type]


def random_pages(spec: AttentionSpec, lengths: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pages and a shuffled page table; everything no sequence owns is NaN, so that reading it shows."""
    rng = np.random.default_rng(seed)
    counts = [-(-n // spec.page_size) for n in lengths]
    order = rng.permutation(sum(counts)) + 1
    shape = (spec.num_layers, sum(counts) + 1, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
    pages = unowned(spec, shape)
    table = np.zeros((len(lengths), spec.max_pages), "int32")
    taken = 0
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        assert count <= spec.max_pages
        table[s, :count] = order[taken:taken + count]
        taken += count
        for i in range(length):
            pages[:, table[s, i // spec.page_size], :, :, i % spec.page_size] = stored(spec, rng.standard_normal(
                (spec.num_layers, 2, spec.num_kv_heads, spec.head_dim)))
    return pages, table


def unowned(spec: AttentionSpec, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, 0x7F, np.uint8) if spec.fp8 else np.full(shape, np.nan, spec.kv_dtype)


def stored(spec: AttentionSpec, values: np.ndarray) -> np.ndarray:
    """As pages hold them."""
    if spec.fp8:
        return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return values.astype(spec.kv_dtype)


def read(pages: np.ndarray) -> np.ndarray:
    return (E4M3[pages] if pages.dtype == np.uint8 else pages).astype("float64")


def attend(spec: AttentionSpec, q: np.ndarray, pages: np.ndarray, row: np.ndarray, layer: int, position: int) -> np.ndarray:
    """float64 attention of one query at `position`."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    at = np.arange(first, position + 1)
    kv = read(pages[layer, row[at // spec.page_size], :, :, at % spec.page_size])  # [n, 2, KV, D]
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (np.repeat(kv[:, i], group, axis=1) for i in (0, 1))
    scores = np.einsum("hd,nhd->hn", q.reshape(spec.num_heads, -1).astype("float64"), keys) * spec.scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(-1, keepdims=True), values).reshape(-1)


ATTENTION_CASES = {
    "gqa": {}, "mha": {"num_kv_heads": 4}, "mqa": {"num_kv_heads": 1}, "group3": {"num_heads": 9, "num_kv_heads": 3},
    "page1": {"page_size": 1, "max_pages": 256}, "page8": {"page_size": 8, "max_pages": 32},
    "page64": {"page_size": 64, "max_pages": 4}, "window": {"window": 7}, "window100": {"window": 100},
    "f16": {"kv_dtype": "float16"}, "f16page1": {"kv_dtype": "float16", "page_size": 1, "max_pages": 256},
    "d32": {"head_dim": 32}, "d80": {"head_dim": 80}, "d96": {"head_dim": 96}, "d128": {"head_dim": 128},
    "d256": {"head_dim": 256}, "d20": {"head_dim": 20}, "d40f16": {"head_dim": 40, "kv_dtype": "float16"},
    "e4m3": {"kv_dtype": FP8}, "d40e4m3": {"head_dim": 40, "kv_dtype": FP8, "window": 33},
}


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_decode_attention(float_kernels: CpuKernels, case: str) -> None:
    spec = attention_spec(**ATTENTION_CASES[case])
    kernel = float_kernels.decode_attention(spec)
    for lengths in ([1, 17, 64, 200, 15, 16, 65, 129, 2, 33], [150]):  # without and with parts
        pages, table = random_pages(spec, lengths)
        q = np.random.default_rng(3).standard_normal((len(lengths), spec.num_heads * spec.head_dim)).astype("float32")
        y, = run(float_kernels, kernel, {"q": q, "pages": pages, "page_table": table, "layer": 1,
                                   "lengths": np.array(lengths, "int32")}, {"y": q.shape})
        for s, length in enumerate(lengths):
            np.testing.assert_allclose(y[s], attend(spec, q[s], pages, table[s], 1, length - 1), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("case", ["gqa", "group3", "window100", "f16", "e4m3"])
def test_a_row_of_decode_attention_is_the_same_alone_and_in_any_batch(float_kernels: CpuKernels, case: str) -> None:
    """Bit for bit: sampling with a seed, and preempted sequences that compute their keys and values again, rely on it."""
    spec = attention_spec(**ATTENTION_CASES[case])
    kernel = float_kernels.decode_attention(spec)
    lengths = [200, 5, 129, 256, 64, 128, 180, 1, 97]
    pages, table = random_pages(spec, lengths)
    q = np.random.default_rng(5).standard_normal((len(lengths), spec.num_heads * spec.head_dim)).astype("float32")

    def of(rows: list[int]) -> np.ndarray:
        y, = run(float_kernels, kernel, {"q": q[rows], "pages": pages, "page_table": table[rows], "layer": 1,
                                         "lengths": np.array(lengths, "int32")[rows]}, {"y": q[rows].shape})
        return y

    alone = np.concatenate([of([row]) for row in range(len(lengths))])
    for rows in (list(range(len(lengths))), [0, 1], [2, 3], [8, 7, 6, 5, 4], [3, 0, 2]):
        np.testing.assert_array_equal(of(rows), alone[rows])


def test_decode_attention_of_an_empty_row_is_zero(float_kernels: CpuKernels) -> None:
    spec = attention_spec()
    pages, table = random_pages(spec, [3])
    q = np.ones((1, spec.num_heads * spec.head_dim), "float32")
    y, = run(float_kernels, float_kernels.decode_attention(spec), {"q": q, "pages": pages, "page_table": table, "layer": 0,
                                                      "lengths": np.array([0], "int32")}, {"y": q.shape})
    assert (y == 0).all()


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_prefill_attention(float_kernels: CpuKernels, case: str) -> None:
    spec = attention_spec(**ATTENTION_CASES[case])
    kernel = float_kernels.prefill_attention(spec)
    # (tokens of this step, tokens cached before): whole, chunk after a prefix, one token, page edges
    for steps in ([(5, 0), (1, 70), (49, 100), (16, 16), (1, 0), (130, 3)], [(200, 0)]):
        lengths = [new + cached for new, cached in steps]
        pages, table = random_pages(spec, lengths)
        starts = np.cumsum([0] + [new for new, _ in steps]).astype("int32")
        q = np.random.default_rng(4).standard_normal((starts[-1], spec.num_heads * spec.head_dim)).astype("float32")
        y, = run(float_kernels, kernel, {"q": q, "pages": pages, "page_table": table, "query_start": starts, "layer": 1,
                                   "lengths": np.array(lengths, "int32")}, {"y": q.shape})
        for s, (new, cached) in enumerate(steps):
            for i in range(new):
                expected = attend(spec, q[starts[s] + i], pages, table[s], 1, cached + i)
                np.testing.assert_allclose(y[starts[s] + i], expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("case", [
    {}, {"head_dim": 80, "rotary_dim": 32}, {"head_dim": 96}, {"head_dim": 20},
    {"head_dim": 32, "page_size": 2, "max_pages": 256},
    {"qk_norm_epsilon": 1e-6}, {"qk_norm_epsilon": 1e-6, "head_dim": 80, "rotary_dim": 20, "kv_dtype": "float16"},
    {"head_dim": 256, "kv_dtype": "float16", "num_kv_heads": 1, "page_size": 8}, {"kv_dtype": FP8},
    {"head_dim": 40, "rotary_dim": 20, "kv_dtype": FP8, "qk_norm_epsilon": 1e-6}], ids=str)
def test_rope_append(float_kernels: CpuKernels, case: dict[str, object]) -> None:
    spec = attention_spec(**case)
    heads, kv_heads, dim, half = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rotary_dim // 2
    rng = np.random.default_rng(8)
    angle = rng.uniform(0, 6, (spec.max_position, half))
    table = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype("float32")
    for rows in (1, 9):
        qkv = rng.standard_normal((rows, (heads + 2 * kv_heads) * dim)).astype("float32")
        positions = rng.integers(0, spec.max_position, rows).astype("int32")
        slots = rng.permutation(8 * spec.page_size)[:rows].astype("int32")
        norms = rng.standard_normal((2, dim)).astype("float32")
        before = unowned(spec, (2, 8, 2, kv_heads, spec.page_size, dim))
        values = {"qkv": qkv, "rope_table": table, "positions": positions, "slots": slots, "q_norm": norms[0],
                  "k_norm": norms[1], "pages": before.copy(), "layer": 1}
        q, = run(float_kernels, float_kernels.rope_append(spec), values, {"q": (rows, heads * dim)})
        split = qkv.reshape(rows, heads + 2 * kv_heads, dim).astype("float64")
        turned = split[:, :heads + kv_heads].copy()
        if spec.qk_norm_epsilon is not None:
            turned /= np.sqrt((turned**2).mean(-1, keepdims=True) + spec.qk_norm_epsilon)
            turned *= np.repeat(norms, [heads, kv_heads], axis=0)
        cos, sin = (part[positions][:, None].astype("float64") for part in (table[:, :half], table[:, half:]))
        a, b = turned[..., :half].copy(), turned[..., half:2 * half].copy()
        turned[..., :half], turned[..., half:2 * half] = a * cos - b * sin, b * cos + a * sin
        np.testing.assert_allclose(q, turned[:, :heads].reshape(rows, -1), rtol=1e-5, atol=3e-6)
        written = values["pages"][1, slots // spec.page_size, :, :, slots % spec.page_size]      # [rows, 2, KV, D]
        # half a step of e4m3 is 2^-4 of a number at most, and 2^-10 of subnormal ones
        rtol, atol = {"float16": (1e-3, 3e-6), FP8: (2.0**-4 + 1e-5, 2.0**-10)}.get(spec.kv_dtype, (1e-5, 3e-6))
        np.testing.assert_allclose(read(written[:, 0]), turned[:, heads:], rtol=rtol, atol=atol)
        np.testing.assert_array_equal(written[:, 1], stored(spec, split[:, heads + kv_heads:]))
        values["pages"][1, slots // spec.page_size, :, :, slots % spec.page_size] = (
            before[1, slots // spec.page_size, :, :, slots % spec.page_size])
        np.testing.assert_array_equal(values["pages"], before)                                   # nothing else


def test_e4m3_pages_hold_rounded_and_saturated_numbers(float_kernels: CpuKernels) -> None:
    """Every code, every middle between two and what is just beside it, of both signs; beyond 448, infinite, NaN."""
    spec = attention_spec(num_heads=1, num_kv_heads=1, kv_dtype=FP8)
    codes = np.sort(E4M3[:0x7F])
    ties = (codes[1:] + codes[:-1]) / 2
    some = np.concatenate([codes, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e3)),
                           [448.01, 464, 1e4, 3e38, np.inf]]).astype("float32")
    some = np.concatenate([some, -some, [np.nan]])
    rows = -(-len(some) // 64)
    qkv = np.zeros((rows, 3, 64), "float32")
    qkv[:, 2] = np.resize(some, (rows, 64))
    values = {"qkv": qkv.reshape(rows, -1), "rope_table": np.zeros((300, 64), "float32"),
              "positions": np.zeros(rows, "int32"), "slots": np.arange(rows, dtype="int32"),
              "pages": np.zeros((2, 8, 2, 1, 16, 64), np.uint8), "layer": 0}
    run(float_kernels, float_kernels.rope_append(spec), values, {"q": (rows, 64)})
    got = values["pages"][0, :, 1, 0].reshape(-1)[:len(some)]
    np.testing.assert_array_equal(got[:-1], stored(spec, some[:-1]))
    assert got[-1] == 0x7F
